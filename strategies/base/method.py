"""What makes a method: which groups travel, which head rows a site holds, how it learns, how updates merge."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from common.contract import LabelContract
from common.errors import BadInput, Fault, quoted
from common.models.zoo.spec import Task
from common.wire.quantization import Form
from strategies.aggregation.robust import RobustMean
from strategies.aggregation.server_optimizer import ServerOptimizer
from strategies.base.aggregation_weights import Settled, Shares, as_averaged, plain_shares
from strategies.base.coordinator_half import SILENT, Guidance
from strategies.local.early_stopping import Settling
from strategies.local.losses import Loss
from strategies.local.objective import LocalHalf, minimising, proximal

TrunkRule = Literal["fedavg", "fedbn", "fedbn_plus"]
"""How the trunk is averaged (specs 1.5 step 2).

``fedavg``: every tensor, batch normalisation's four included (plain mean of the variances).
``fedbn``: batch normalisation stays at the site (Li et al., ICLR 2021); there is no global model then.
``fedbn_plus``: batch normalisation is frozen at its initial, pre-trained values everywhere and never sent up
("FedFBN", Kulkarni et al. 2023, arXiv 2303.06180).
"""


Weighting = Literal["uniform", "samples"]
"""A site's weight in every mean: 1 each, or its training images."""


class Parameters(BaseModel):
    """The ``[method]`` table that every averaging method shares: its wrappers are here.

    Attributes:
        proximal_mu: Keeps a site near the model it received (FedProx), whatever else it minimises.
        clip_update: Longest Euclidean length of what a site sends.
        compress_update: Form in which the trunk of an update travels; what rounding loses is added to the next one.
        server_optimizer: Takes the mean update for a gradient (FedAdam, FedYogi, momentum).
        mean: A mean that a few wrong updates cannot move far, in the place of the plain one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trunk: TrunkRule = "fedavg"
    weighting: Weighting = "uniform"
    warm_up_epochs: int = Field(0, ge=0)
    warm_up_lr: float = Field(1e-3, gt=0)
    proximal_mu: float = Field(0.0, ge=0)
    clip_update: float | None = Field(None, gt=0)
    compress_update: Form = "float32"
    server_optimizer: ServerOptimizer | None = None
    mean: RobustMean | None = None


@dataclass(frozen=True)
class WarmUp:
    """Local epochs before round 1 with the backbone frozen; the epoch with the lowest validation loss is kept."""

    epochs: int
    lr: float


class SharedChoices(TypedDict):
    """Arguments of :class:`Method` that come straight from :class:`Parameters`."""

    trunk: TrunkRule
    weighting: Weighting
    warm_up: WarmUp
    proximal_mu: float
    clip_update: float | None
    compress_update: Form
    server_optimizer: ServerOptimizer | None
    mean: RobustMean | None


@dataclass(frozen=True)
class ServerTraining:
    """The coordinator trains on images of its own, and mixes what came of it with the hospitals' model (UniFed).

    Attributes:
        settling: When it stops, each round.
        alpha: Weight of the hospitals' model in the mixture.
        patience: Rounds without a lower loss on the coordinator's validation part after which the run ends.
    """

    settling: Settling
    alpha: float
    patience: int


@dataclass(frozen=True)
class Passing:
    """The model goes from hospital to hospital instead of being averaged.

    Attributes:
        order: ``easy_first``: by the slope that each site last told, once before round 1; ``name``: always the same;
            ``nobody``: the coordinator trains alone.
        server: None where the coordinator does not train.
    """

    order: Literal["easy_first", "name", "nobody"]
    server: ServerTraining | None = None


@dataclass(frozen=True)
class Method:
    """One federated method, both halves: the coordinator reads the first part, the hospital the second.

    Attributes:
        name: As in experiment files.
        trunk: How the trunk, and batch normalisation in it, is averaged.
        sends_trunk: Whether the trunk is averaged at all; else each site trains its own.
        sends_head: Whether head rows are averaged over the sites that hold them.
        rows: Head rows a site holds: ``own`` for its annotated classes in its own order, ``all`` for the run's.
        sends_rows: Of those it sends ``all``, or only its ``own``, so that a class's row is made by its owners.
        weighting: Plain weight of a site in every mean.
        shares: Turns the plain weights into a round's.
        settled: What becomes of the mean.
        needs_full_coverage: Refuse a run in which a site does not annotate every class.
        needs_label_counts: Ask at the roll call how many images show each class.
        pooled: One pseudo-site trains on everybody's images (simulation only).
        selection: Who picks the best round: the federation by mean validation loss, or each site for itself.
        guidance: What the coordinator tells and learns beside averaging.
        tells: Names of the statistics that a site's reply may hold beside its update; no other leaves a site.
        server_optimizer, mean: See :class:`Parameters`.
        passing: How the model travels where it is not averaged.
        loss: What validation measures, and what a site minimises where ``local`` is None.
        local: The hospital's half.
        settling: When a site stops training in a round; None trains the experiment's number of epochs.
        proximal_mu, clip_update, compress_update: See :class:`Parameters`.
        warm_up: Before round 1.
    """

    name: str
    loss: Loss
    trunk: TrunkRule = "fedavg"
    sends_trunk: bool = True
    sends_head: bool = True
    rows: Literal["own", "all"] = "all"
    sends_rows: Literal["own", "all"] = "all"
    weighting: Weighting = "uniform"
    shares: Shares = plain_shares
    settled: Settled = as_averaged
    needs_full_coverage: bool = False
    needs_label_counts: bool = False
    pooled: Literal["no", "negative", "masked", "known"] = "no"
    selection: Literal["federation", "site"] = "federation"
    guidance: Guidance = SILENT
    tells: tuple[str, ...] = ()
    server_optimizer: ServerOptimizer | None = None
    mean: RobustMean | None = None
    passing: Passing | None = None
    local: LocalHalf | None = None
    settling: Settling | None = None
    proximal_mu: float = 0.0
    clip_update: float | None = None
    compress_update: Form = "float32"
    warm_up: WarmUp = WarmUp(0, 1e-3)

    @property
    def sends_norm(self) -> bool:
        """Whether batch normalisation is averaged with the trunk."""
        return self.sends_trunk and self.trunk == "fedavg"

    @property
    def frozen_norm(self) -> bool:
        """Whether batch normalisation is neither trained nor updated."""
        return self.trunk == "fedbn_plus"

    @property
    def has_global_model(self) -> bool:
        """Whether the coordinator ends with one model for all classes."""
        return self.sends_trunk and self.sends_head and (self.sends_norm or self.frozen_norm)

    @property
    def keeps_local_parts(self) -> bool:
        """Whether a site holds a part of its model that never leaves it."""
        return not self.has_global_model

    @property
    def shares_nothing(self) -> bool:
        """Whether every site trains by itself."""
        return not self.sends_trunk and not self.sends_head

    @property
    def half(self) -> LocalHalf:
        """The hospital's half, with its wrapper."""
        half = self.local or minimising(self.loss)
        if not self.proximal_mu:
            return half
        return proximal(half, self.proximal_mu, head=self.sends_head, norm=self.sends_norm)

    def rows_of(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """The head rows that a site holds, in the order its head has them."""
        return contract.sites[site] if self.rows == "own" else contract.class_names

    def rows_sent(self, held: tuple[str, ...], annotated: Collection[str]) -> tuple[str, ...]:
        """The head rows that a site sends, of those it holds."""
        return held if self.sends_rows == "all" else tuple(name for name in held if name in annotated)

    def refuse_unfit(self, contract: LabelContract) -> None:
        """Raise :class:`BadInput` if the method cannot serve this contract."""
        if self.mean is not None and len(contract.sites) < self.mean.fewest:
            problem = f"{self.mean.kind} needs {self.mean.fewest} sites or more; there are {len(contract.sites)}."
            raise BadInput([Fault("method.mean", problem, "Leave it out, or choose another.")])
        if not self.needs_full_coverage or len(contract.shared_classes) == len(contract.class_names):
            return
        partial = [name for name in contract.class_names if name not in contract.shared_classes]
        problem = f"{self.name} needs every class annotated by every site; {quoted(partial)} are not."
        remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
        raise BadInput([Fault("run.method", problem, remedy)])

    def contradictions(self) -> list[Fault]:
        """What in this method's parameters makes no sense together."""
        set_here = {
            # A pass hands every site a model to stay near, too.
            "proximal_mu": bool(self.proximal_mu) and (self.passing is None or self.passing.order == "nobody"),
            "clip_update": self.clip_update is not None,
            "compress_update": self.compress_update != "float32",
            "server_optimizer": self.server_optimizer is not None,
            "mean": self.mean is not None,
            "weighting": self.passing is not None and self.weighting != "uniform",
            "warm_up_epochs": self.passing is not None and self.warm_up.epochs > 0,
        }
        reason = self._why_nothing_is_averaged()
        faults = [
            Fault(f"method.{key}", f"makes no sense in {self.name}: {reason}.", "Leave it out.")
            for key, is_set in set_here.items()
            if reason and is_set
        ]
        if self.mean is not None and self.shares is not plain_shares:
            problem = f"makes no sense in {self.name}: it weighs the sites by a rule of its own."
            faults.append(Fault("method.mean", problem, "Leave it out."))
        if self.passing and self.trunk == "fedbn":
            problem = f"makes no sense in {self.name}: the whole network is passed on, batch normalisation too."
            faults.append(Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".'))
        return faults

    def _why_nothing_is_averaged(self) -> str:
        if self.pooled != "no":
            return "there is one pseudo-site, and nothing to average"
        if self.passing:
            return "the model is passed on, not averaged"
        return "" if self.sends_trunk else "every site trains by itself, and nothing is averaged"


def refuse_multi_class(name: str, task: Task) -> None:
    """Raise :class:`BadInput` in a multi-class task, for a method that asks of each class by itself."""
    if task == "multi_class":
        problem = (
            f"{name} asks of each class by itself whether it is there; in a multi-class task classes exclude others."
        )
        raise BadInput([Fault("run.method", problem, 'Use "fedsld" or "unifed", or model.task = "multi_label".')])


def shared_choices(parameters: Parameters) -> SharedChoices:
    """The part of a method that every ``[method]`` table sets in the same way."""
    return {
        "trunk": parameters.trunk,
        "weighting": parameters.weighting,
        "warm_up": WarmUp(parameters.warm_up_epochs, parameters.warm_up_lr),
        "proximal_mu": parameters.proximal_mu,
        "clip_update": parameters.clip_update,
        "compress_update": parameters.compress_update,
        "server_optimizer": parameters.server_optimizer,
        "mean": parameters.mean,
    }
