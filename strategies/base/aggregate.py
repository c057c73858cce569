"""How updates make the next model, by the method's own rule: for the round loop, and to check it afterwards."""

from collections.abc import Mapping

from common.models.state import ModelState
from common.wire.records import TrainReply
from strategies.aggregation.mean import WholeHeadMean
from strategies.aggregation.server_optimizer import Moments
from strategies.base.known import Known
from strategies.base.method import Method
from strategies.base.robust_state import Merged, robust_means
from strategies.base.state import Means, means_of, site_weight


def means_by(method: Method, known: Known, model: ModelState, accepted: Mapping[str, TrainReply]) -> Means:
    """:func:`merged_by`, without what it says beside the means."""
    return merged_by(method, known, model, accepted).means


def merged_by(method: Method, known: Known, model: ModelState, accepted: Mapping[str, TrainReply]) -> Merged:
    """The means of a round's updates, by this method's weights or its robust mean.

    Args:
        known: When the round began.
        model: What the sites started from.
        accepted: In the order of site names.
    """
    replies = list(accepted.values())
    plain = [site_weight(reply, method.parameters.weighting) for reply in replies]
    if method.parameters.mean is not None:
        return robust_means(model, [reply.update for reply in replies], plain, method.parameters.mean)
    return Merged(means_of(model, replies, method.site_weights(known, accepted, plain), method.head_mean))


def moved_by(method: Method, server_round: int, means: Means, moments: Moments) -> tuple[ModelState, Moments]:
    """The global model after the round."""
    optimizer = method.parameters.server_optimizer
    stepped = (means.moved(), moments) if optimizer is None else means.stepped(optimizer, moments)
    return method.finalize(server_round, *stepped)


def passed_on(model: ModelState, reply: TrainReply) -> ModelState:
    """The model after it passed through one site."""
    return means_of(model, [reply], [1.0], WholeHeadMean).moved()
