"""How much each site counts in a round's means, and what becomes of the model after them, as values.

A method that merges by another rule than plain averaging turns the sites' weights into others, or mixes the mean with
an earlier model; the means themselves stay where they are (:mod:`strategies.aggregation.mean`).
"""

from collections.abc import Callable, Mapping, Sequence

from common.models.state import ModelState
from common.wire.records import TrainReply
from strategies.aggregation.server_optimizer import Moments
from strategies.base.coordinator_half import Known

Weights = Sequence[float]
"""One a site, in the order of site names; they need not sum to one."""

Shares = Callable[[Known, Mapping[str, TrainReply], Weights], Weights]
"""This round's weights, from what was known when it began, the accepted replies in the order of site names, and each
site's plain weight."""

Settled = Callable[[int, ModelState, Moments], tuple[ModelState, Moments]]
"""The global model after a round, from the round and the model that the means make; what must last goes into the
moments, which are part of the coordinator's state."""


def plain_shares(known: Known, replies: Mapping[str, TrainReply], weights: Weights) -> Weights:
    """Every site counts by its plain weight."""
    return weights


def as_averaged(server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
    """The mean is the model."""
    return model, moments
