"""UniFed and two baselines that train like it: one model passes from hospital to hospital.

Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
Tasks", 2024 (specs 2.4). Tasks with class sets of their own share one class space, the label contract's.

Before round 1 all hospitals train one epoch side by side, and the slope of each one's loss is taken. In a round the
model passes from the easiest task to the hardest; each hospital trains until its validation loss settles. The
coordinator trains the mixed model of the round before on images of its own, and mixes both.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field

from common.models.network import Model
from common.wire.records import Arrays
from strategies.local.early_stopping import EarlyStopping
from strategies.local.losses import Missing
from strategies.local.objective import ClientContext, LocalRound, Losses, plain
from strategies.local.site_method import Parameters, Payload, SequentialSite, Statistic
from strategies.methods.base import RoundContext, SequentialMethod, ServerTraining, SiteReply, convert_to_json_numbers

SlopeRule = Literal["least_squares", "endpoints"]
"""``least_squares`` is the paper's eq. 2. ``endpoints`` is the authors' code, the mean of successive differences, in
which two noisy batches decide; the two can order sites differently."""


class SequentialParameters(Parameters):
    """The ``[method]`` table of ``fedseq``.

    Attributes:
        missing: In a multi-class task, ``negative`` is a softmax over all tasks' classes, as in the paper; ``masked``
            runs over the classes known of an image.
    """

    missing: Missing = "negative"


class ServerOnlyParameters(SequentialParameters):
    """The ``[method]`` table of ``server_only``.

    Attributes:
        tolerance: A fall of the validation loss below this is slight.
        epoch_cap: The largest number of epochs of one training.
        server_patience: Epochs that the coordinator's loss may be worse in a row, or slightly better in all.
        global_patience: Rounds without a better model on the coordinator's validation part after which the run ends.
    """

    tolerance: float = Field(0.01, ge=0)
    epoch_cap: int = Field(200, ge=1)
    server_patience: int = Field(10, ge=1)
    global_patience: int = Field(10, ge=1)


class UniFedParameters(ServerOnlyParameters):
    """The ``[method]`` table of ``unifed``.

    Attributes:
        patience: Epochs that a hospital's loss may be worse in a row, or slightly better in all.
        alpha: Weight of the hospitals' model in the mixture: 0.7 by the text, 0.3 in the authors' code.
        slope: Rule that turns a hospital's losses into one slope.
    """

    patience: int = Field(7, ge=1)
    alpha: float = Field(0.7, ge=0, le=1)
    slope: SlopeRule = "least_squares"


# ---------------------------------------------------------------------- how fast a loss falls (eq. 2, specs 2.4)


def loss_slope(losses: Sequence[float], rule: SlopeRule = "least_squares") -> float:
    """Return the slope of the training loss over all batches of a site's latest training, epoch after epoch.

    The slope shrinks as training gets longer; the paper does not correct for that, nor do we.

    Returns:
        Change of loss per batch; 0 for one batch or none, which the paper leaves open.
    """
    if len(losses) < 2:
        return 0.0
    if rule == "endpoints":
        return (losses[-1] - losses[0]) / (len(losses) - 1)
    steps = np.arange(len(losses)) - (len(losses) - 1) / 2
    values = np.asarray(losses, np.float64)
    return float((steps * (values - values.mean())).sum() / (steps * steps).sum())


def sort_easiest_first(slopes: Mapping[str, float]) -> tuple[str, ...]:
    """Return the sites from the fastest falling loss to the slowest; ties go to the lower name, and NaN comes last."""

    return tuple(sorted(slopes, key=lambda site: (math.inf if math.isnan(slopes[site]) else slopes[site], site)))


# ---------------------------------------------------------------------- UniFed


class UniFedSite(SequentialSite):
    """The hospital's half of UniFed: plain training until the loss settles; the slope of its fall is sent (eq. 2)."""

    name = "unifed"
    table = UniFedParameters
    parameters: UniFedParameters
    declared = Payload(
        statistics=(Statistic("slope", "images", "how fast the loss fell in the last training: one number"),)
    )
    looks_at_images = False
    ranks_sites = True

    @cached_property
    def early_stopping(self) -> EarlyStopping:
        """Return the rule by which a hospital stops training in a round."""
        return EarlyStopping(self.parameters.patience, self.parameters.tolerance, self.parameters.epoch_cap)

    def client(self, context: ClientContext) -> LocalRound:
        """Return a round that trains as in FedAvg, and sends the slope."""

        def slope(model: Model, losses: Losses) -> Arrays:
            return {"slope": np.array([loss_slope(losses.tolist(), self.parameters.slope)], np.float32)}

        return LocalRound(plain(self.training_loss(context.examples, context.spec)), slope)


class UniFed(SequentialMethod):
    """UniFed: in each round one model passes from the hospital with the easiest task to that with the hardest.

    How easy a task is, the slope of the hospital's training loss tells. The coordinator trains on images of its own;
    ``alpha`` is the weight of the hospitals' model in the mean with the coordinator's.
    """

    site_class = UniFedSite
    site: UniFedSite

    @property
    def server_training(self) -> ServerTraining | None:
        """Return that the coordinator trains until the loss settles, each round."""
        return _make_server_training(self.site.parameters, self.site.parameters.alpha)

    def order(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites by the slope that each sent last; sites without a slope come last."""
        slopes = {site: float(slope[0]) for site, slope in context.statistics.items() if site in sites}
        return [*sort_easiest_first(slopes), *(site for site in sites if site not in slopes)]

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the slope, which is one number."""
        return {"slope": (1,)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the slope of each site's last training."""
        return {**context.statistics, **{site: reply.statistics["slope"] for site, reply in replies.items()}}

    def round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return the slopes by site."""
        return {"slopes": convert_to_json_numbers(context.statistics)}


# ---------------------------------------------------------------------- the two baselines


class SequentialTrainingSite(SequentialSite):
    """The hospital's half of ``fedseq``: the experiment's number of epochs."""

    name = "fedseq"
    table = SequentialParameters


class SequentialTraining(SequentialMethod):
    """The model passes through the sites in the order of names, for the experiment's number of epochs at each."""

    site_class = SequentialTrainingSite


class ServerOnlySite(SequentialSite):
    """The hospital's half of ``server_only``, which tests the coordinator's model and does not train."""

    name = "server_only"
    table = ServerOnlyParameters
    parameters: ServerOnlyParameters
    hospitals_train = False


class ServerOnly(SequentialMethod):
    """The coordinator trains on its own images alone: the lower bound of UniFed (specs 2.4, at the end)."""

    site_class = ServerOnlySite
    site: ServerOnlySite

    @property
    def server_training(self) -> ServerTraining:
        """Return that the coordinator trains until the loss settles, each round; no other model is mixed in."""
        return _make_server_training(self.site.parameters, 0.0)

    def order(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return no site, because no hospital trains."""
        return ()


def _make_server_training(parameters: ServerOnlyParameters, alpha: float) -> ServerTraining:
    settling = EarlyStopping(parameters.server_patience, parameters.tolerance, parameters.epoch_cap)
    return ServerTraining(settling, alpha, parameters.global_patience)
