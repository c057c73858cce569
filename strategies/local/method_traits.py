"""The traits of a method: fixed properties, parameters, and a declaration of all data that leaves a hospital.

The declaration is data, so that a hospital's policy can check it before a round, and the coordinator can check replies
against it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from polyclinic.common.wire.records import NumberFormat
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.aggregation.robust import RobustMeanRule
from polyclinic.strategies.aggregation.server_optimizer import ServerOptimizer
from polyclinic.strategies.local.losses import Missing
from polyclinic.strategies.local.stages import RoundDefault, Stage

TrunkRule = Literal["fedavg", "fedbn", "fedbn_plus"]
"""How the trunk is averaged (docs/papers.md#surgical-trunk).

``fedavg``: every tensor is averaged, including batch normalisation (plain mean of the variances).
``fedbn``: batch normalisation stays local at each site (Li et al., ICLR 2021), so there is no global model.
``fedbn_plus``: batch normalisation is frozen at its initial, pre-trained values at all sites and never sent
("FedFBN", Kulkarni et al. 2023, arXiv 2303.06180).
"""

Criterion = Literal["auroc", "loss"]
"""The figure by which the best round is chosen: mean AUROC, or loss."""


class Parameters(BaseModel):
    """The keys of the ``[method]`` table of every method that averages updates.

    Attributes:
        trunk: ``fedavg`` averages batch normalisation like all else. ``fedbn`` leaves it at each site, so that there is
            no global model. ``fedbn_plus`` freezes it as it is in ``model.weights``, which it needs.
        weighting: A site's weight in every mean: 1 (``uniform``, as secure aggregation needs), or its number of
            training images (``samples``).
        warm_up_epochs: Local epochs with a frozen backbone at the beginning of a site's first round (under secure
            aggregation, of round 1 alone); the epoch with the lowest validation loss is used.
        warm_up_lr: Learning rate of the warm-up.
        proximal_mu: Strength of the proximal term (FedProx), which is added to the method's loss.
        clip_update: The largest Euclidean length of a site's update.
        compress_update: Number format in which a site sends its trunk: ``float16`` halves the bytes, ``int8`` quarters
            them. The rounding error is added to the next update.
        compress_model: Number format in which the coordinator sends the trunk; it rounds its own model to that format,
            and adds the rounding error to the next round's model.
        server_optimizer: Server optimiser, which uses the mean update as a gradient (FedAdam, FedYogi, momentum).
        mean: A robust mean instead of the plain one, so that a few wrong updates have little effect.
        round_defaults: Setting that counts rounds -> its value where the experiment gives none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {}

    trunk: TrunkRule = "fedavg"
    weighting: Weighting = "uniform"
    warm_up_epochs: int = Field(0, ge=0)
    warm_up_lr: float = Field(1e-3, gt=0)
    proximal_mu: float = Field(0.0, ge=0)
    clip_update: float | None = Field(None, gt=0)
    compress_update: NumberFormat = "float32"
    compress_model: NumberFormat = "float32"
    server_optimizer: ServerOptimizer | None = None
    mean: RobustMeanRule | None = None

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the stages, ramps and periods that a run must reach, so that it is a run of this method."""
        return ()


Granularity = Literal["images", "signs", "positives", "counts"]
"""The images that a statistic describes, for the site's disclosure limits: all training images; the negatives and
positives of each class (first two axes); or the positives of each class (first axis). ``counts`` are numbers of images
of each class."""


@dataclass(frozen=True)
class Statistic:
    """A statistic that a site's reply may contain in addition to the update.

    Attributes:
        name: Name of the statistic in records.
        granularity: The images that each entry describes; a site omits entries that describe too few patients.
        meaning: Description for hospitals in plain words.
        least: Smallest possible value; a reply with a smaller one does not count.
    """

    name: str
    granularity: Granularity
    meaning: str
    least: float = -math.inf

    def find_impossible_value(self, values: NDArray[np.floating]) -> str:
        """Return a sentence on the smallest value if it is impossible; empty if all are possible or NaN."""
        smallest = float(np.nanmin(values, initial=math.inf))
        return (
            f'"{self.name}" holds {smallest:.3g}, and cannot be below {self.least:g}' if smallest < self.least else ""
        )


@dataclass(frozen=True)
class Payload:
    """Declares the model parts and statistics that sites send and receive, so that a policy can check them in advance.

    Attributes:
        trunk: True if the trunk is averaged; otherwise each site trains its own.
        head: True if head rows are averaged over the sites that send them; otherwise each site trains its own.
        rows: Head rows that a site holds: ``own`` for its annotated classes in its own order, ``all`` for all classes
            of the run.
        sends_rows: Head rows that a site sends: ``all`` that it holds, or only its ``own``.
        statistics: Statistics that a reply may contain in addition to the update; no other data leaves a site.
        label_counts: True if the roll call asks for the number of images that show each class.
    """

    trunk: bool = True
    head: bool = True
    rows: Literal["own", "all"] = "all"
    sends_rows: Literal["own", "all"] = "all"
    statistics: tuple[Statistic, ...] = ()
    label_counts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the declared statistics."""
        return tuple(statistic.name for statistic in self.statistics)


@dataclass(frozen=True)
class MethodTraits:
    """The fixed properties of a method, which hold at both sides and with every value of its parameters.

    Attributes:
        name: Name in experiment files.
        parameters_class: Schema of the ``[method]`` table.
        payload: The data that sites send and receive with default parameters.
        missing: How the loss treats classes that a site does not annotate, if the ``[method]`` table has no such key.
        loss_is_per_image: True if the method's loss is the mean of a separate loss of each image. It counts only in a
            method that overrides :meth:`SiteMethod.make_round` or :meth:`SiteMethod.local_loss`.
        looks_at_images: False if :meth:`SiteMethod.make_round` adds nothing to the loss that uses the images or draws
            views of them; then the features of a frozen backbone are computed once. It counts only in a method that
            overrides ``make_round``.
        weighs_updates: True if the coordinator computes weights from updates; then it stores all updates of a round.
        reads_updates: True if the coordinator's statistics follow from single updates; then, too, it stores them.
        needs_full_coverage: True if every site must annotate every class.
        supports_volumes: True if the method trains on volumes.
        supports_multi_class: True if the method supports tasks in which classes exclude one another.
        reason_against_segmentation: Why the method does not support labels of pixels; empty if it does.
        selection: Who chooses the best round: the ``federation`` by the sites' mean, or each ``site`` for itself.
        sequential: True if the model passes from hospital to hospital instead of being averaged.
        hospitals_train: True if hospitals train at all.
        ranks_sites: True if every site trains once before round 1, to determine the order of the sites.
        allows_other_loss: True if ``[training]`` may choose another loss; False if the loss is part of the method.
        reason_for_global_norm: Why batch normalisation cannot stay at the sites; empty if it can.
        stores_statistics_by_site: True if the names of the statistics that the coordinator stores are sites. Then the
            method leaves out those of sites that do not count (``context.uncounted``). If False, the stored statistics
            are dropped when a site that is in them does not count any more.
        trains_own_model: True if a site also trains a whole model of its own, which never leaves it and which it tests
            (:attr:`LocalRound.own_objective`).
        keeps_method_state: True if :attr:`LocalRound.method_state` makes arrays that a site stores for its next round.
    """

    name: str
    parameters_class: type[Parameters] = Parameters
    payload: Payload = Payload()
    missing: Missing = "masked"
    loss_is_per_image: bool = False
    looks_at_images: bool = True
    weighs_updates: bool = False
    reads_updates: bool = False
    needs_full_coverage: bool = False
    supports_volumes: bool = True
    supports_multi_class: bool = True
    reason_against_segmentation: str = ""
    selection: Literal["federation", "site"] = "federation"
    sequential: bool = False
    hospitals_train: bool = True
    ranks_sites: bool = False
    allows_other_loss: bool = True
    reason_for_global_norm: str = ""
    stores_statistics_by_site: bool = False
    trains_own_model: bool = False
    keeps_method_state: bool = False


@dataclass(frozen=True)
class SequentialTraits(MethodTraits):
    """The traits of a method that passes one model from hospital to hospital.

    Attributes:
        stores_site_models: True if the coordinator's statistics follow from the models that sites passed on in a round.
        has_averaging_rounds: True if updates are averaged in some rounds (:meth:`SequentialSite.averages_in_round`).
    """

    missing: Missing = "negative"
    sequential: bool = True
    stores_site_models: bool = False
    has_averaging_rounds: bool = False
