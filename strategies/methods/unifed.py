"""UniFed and two baselines with the same training: one model passes from hospital to hospital.

Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
Tasks", 2024 (docs/papers.md#decisions-unifed). Tasks with different class sets share one list of classes, that of the
label contract.

Before round 1 all hospitals train one epoch in parallel and measure the slope of their training loss. In a round the
model passes from the easiest task (steepest fall) to the hardest; each hospital trains until its validation loss
settles. The coordinator trains the mixed model of the round before on its own images, and mixes the result with the
hospitals' model.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field

from polyclinic.common.models.network import Model
from polyclinic.common.wire.records import Arrays
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.method_traits import Parameters, Payload, SequentialTraits, Statistic
from polyclinic.strategies.local.objective import ClientContext, LocalRound, Losses, plain
from polyclinic.strategies.local.site_method import SequentialSite
from polyclinic.strategies.methods.base import (
    RoundContext,
    SequentialMethod,
    ServerTrainingSettings,
    SiteReply,
    convert_to_json_numbers,
    make_method,
)

SlopeRule = Literal["least_squares", "endpoints"]
"""``least_squares`` is the paper's eq. 2. ``endpoints`` is the authors' code: the mean of successive differences, which
depends on the first and last batch only. The two rules can order sites differently."""


class SequentialParameters(Parameters):
    """The ``[method]`` table of ``fedseq``.

    Attributes:
        missing: In a multi-class task, ``negative`` takes the softmax over all tasks' classes, as in the paper;
            ``masked`` omits classes whose label is unknown.
    """

    missing: Missing = "negative"


class ServerOnlyParameters(SequentialParameters):
    """The ``[method]`` table of ``server_only``.

    Attributes:
        tolerance: A decrease of the validation loss by less than this counts as slight.
        epoch_cap: The largest number of epochs of one training.
        server_patience: The coordinator's training ends after this many consecutive epochs that are worse than the best
            one, or after this many epochs with a slight decrease in total.
        global_patience: The run ends after this many rounds without a better model on the coordinator's validation
            part.
    """

    tolerance: float = Field(0.01, ge=0)
    epoch_cap: int = Field(200, ge=1)
    server_patience: int = Field(10, ge=1)
    global_patience: int = Field(10, ge=1)


class UniFedParameters(ServerOnlyParameters):
    """The ``[method]`` table of ``unifed``.

    Attributes:
        patience: A hospital's training ends after this many consecutive epochs that are worse than the best one, or
            after this many epochs with a slight decrease of the loss in total.
        alpha: Weight of the hospitals' model in the mixture: 0.7 in the text, 0.3 in the authors' code.
        slope: Rule that computes one slope from a hospital's losses.
    """

    patience: int = Field(7, ge=1)
    alpha: float = Field(0.7, ge=0, le=1)
    slope: SlopeRule = "least_squares"


# ---------------------------------------------------------------------- how fast a loss falls (eq. 2)


def loss_slope(losses: Sequence[float], rule: SlopeRule = "least_squares") -> float:
    """Return the slope of a site's training loss over all batches of its latest training.

    The slope shrinks with the length of training; neither the paper nor this code corrects for that.

    Args:
        losses: Loss of each batch, in order.
        rule: Straight line by ``least_squares``, or through the ``endpoints``: the first and the last loss.

    Returns:
        Change of loss per batch; 0 for fewer than two batches, a case that the paper does not define.
    """
    if len(losses) < 2:
        return 0.0
    if rule == "endpoints":
        return (losses[-1] - losses[0]) / (len(losses) - 1)
    steps = np.arange(len(losses)) - (len(losses) - 1) / 2
    values = np.asarray(losses, np.float64)
    return float((steps * (values - values.mean())).sum() / (steps * steps).sum())


def sort_sites_easiest_first(slopes: Mapping[str, float]) -> tuple[str, ...]:
    """Return the sites sorted from the fastest falling loss to the slowest; ties by name, NaN last.

    Args:
        slopes: Site -> change of its training loss per batch.
    """

    return tuple(sorted(slopes, key=lambda site: (math.inf if math.isnan(slopes[site]) else slopes[site], site)))


# ---------------------------------------------------------------------- UniFed


class UniFedSite(SequentialSite):
    """The hospital's half of UniFed: training until the loss settles; it sends the slope of the loss (eq. 2)."""

    traits = SequentialTraits(
        "unifed",
        parameters_class=UniFedParameters,
        payload=Payload(
            statistics=(Statistic("slope", "images", "how fast the loss fell in the last training: one number"),)
        ),
        looks_at_images=False,
        ranks_sites=True,
        stores_statistics_by_site=True,
    )
    parameters: UniFedParameters

    @cached_property
    def early_stopping(self) -> EarlyStopping:
        """Return the rule that stops a hospital's training in a round."""
        return EarlyStopping(self.parameters.patience, self.parameters.tolerance, self.parameters.epoch_cap)

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: plain training; the statistics are the slope of the loss."""

        def slope(model: Model, losses: Losses) -> Arrays:
            return {"slope": np.array([loss_slope(losses.tolist(), self.parameters.slope)], np.float32)}

        return LocalRound(plain(self.choose_training_loss(context.examples, context.spec)), slope)


class UniFed(SequentialMethod):
    """The coordinator's half of UniFed: one model passes from the hospital with the easiest task to the hardest.

    The steeper a hospital's training loss falls, the easier its task. The coordinator also trains a model on its own
    images, and mixes it with the hospitals' model, whose weight is ``alpha``.
    """

    site_class = UniFedSite
    site: UniFedSite

    @property
    def server_training_settings(self) -> ServerTrainingSettings | None:
        """Return the settings of the coordinator's training, which lasts until the loss settles in each round."""
        return _make_server_training_settings(self.site.parameters, self.site.parameters.alpha)

    def order_sites(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return the sites sorted by their latest slope, the fastest falling loss first; sites without a slope last."""
        slopes = {site: float(slope[0]) for site, slope in context.statistics.items() if site in sites}
        return [*sort_sites_easiest_first(slopes), *(site for site in sites if site not in slopes)]

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the slope, which is one number."""
        return {"slope": (1,)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the latest slope of each site."""
        return {**context.statistics, **{site: reply.statistics["slope"] for site, reply in replies.items()}}

    def compute_round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return the slope of each site's training loss."""
        return {"slopes": convert_to_json_numbers(context.statistics)}


# ---------------------------------------------------------------------- the two baselines


class SequentialTrainingSite(SequentialSite):
    """The hospital's half of ``fedseq``: training for the experiment's number of epochs."""

    traits = SequentialTraits("fedseq", parameters_class=SequentialParameters)


SequentialTraining = make_method(SequentialMethod, SequentialTrainingSite)
"""The coordinator's half of ``fedseq``: passes the model through the sites in the order of their names."""


class ServerOnlyTrainingSite(SequentialSite):
    """The hospital's half of ``server_only``: it tests the coordinator's model and does not train."""

    traits = SequentialTraits("server_only", parameters_class=ServerOnlyParameters, hospitals_train=False)
    parameters: ServerOnlyParameters


class ServerOnlyTraining(SequentialMethod):
    """The coordinator trains alone on its own images: UniFed's lower bound (docs/papers.md#unifed-alone)."""

    site_class = ServerOnlyTrainingSite
    site: ServerOnlyTrainingSite

    @property
    def server_training_settings(self) -> ServerTrainingSettings:
        """Return the settings of the coordinator's training, whose model is not mixed with models of sites."""
        return _make_server_training_settings(self.site.parameters, 0.0)

    def order_sites(self, context: RoundContext, sites: Sequence[str]) -> Sequence[str]:
        """Return no sites, because no hospital trains."""
        return ()


def _make_server_training_settings(parameters: ServerOnlyParameters, alpha: float) -> ServerTrainingSettings:
    settling = EarlyStopping(parameters.server_patience, parameters.tolerance, parameters.epoch_cap)
    return ServerTrainingSettings(settling, alpha, parameters.global_patience)
