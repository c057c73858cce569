"""What makes a method: which groups travel, which head rows a site holds, how it learns, how updates merge."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from common.contract import LabelContract
from common.errors import BadInput, Fault, quoted
from strategies.losses import Loss

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
    """The ``[method]`` table that every averaging method shares."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trunk: TrunkRule = "fedavg"
    weighting: Weighting = "uniform"
    warm_up_epochs: int = Field(0, ge=0)
    warm_up_lr: float = Field(1e-3, gt=0)


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


@dataclass(frozen=True)
class Method:
    """One federated method, both halves: the coordinator reads the first part, the hospital the second.

    Attributes:
        name: As in experiment files.
        trunk: How the trunk, and batch normalisation in it, is averaged.
        sends_trunk: Whether the trunk is averaged at all; else each site trains its own.
        sends_head: Whether head rows are averaged over the sites that hold them.
        rows: Head rows a site holds: ``own`` for its annotated classes in its own order, ``all`` for the run's.
        weighting: Weight of a site in every mean.
        needs_full_coverage: Refuse a run in which a site does not annotate every class.
        pooled: One pseudo-site trains on everybody's images (simulation only).
        selection: Who picks the best round: the federation by mean validation loss, or each site for itself.
        loss: Local objective.
        warm_up: Before round 1.
    """

    name: str
    loss: Loss
    trunk: TrunkRule = "fedavg"
    sends_trunk: bool = True
    sends_head: bool = True
    rows: Literal["own", "all"] = "all"
    weighting: Weighting = "uniform"
    needs_full_coverage: bool = False
    pooled: Literal["no", "negative", "masked", "known"] = "no"
    selection: Literal["federation", "site"] = "federation"
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

    def rows_of(self, site: str, contract: LabelContract) -> tuple[str, ...]:
        """The head rows that a site holds, in the order its head has them."""
        return contract.sites[site] if self.rows == "own" else contract.class_names

    def refuse_unfit(self, contract: LabelContract) -> None:
        """Raise :class:`BadInput` if the method cannot serve this contract."""
        if not self.needs_full_coverage or len(contract.shared_classes) == len(contract.class_names):
            return
        partial = [name for name in contract.class_names if name not in contract.shared_classes]
        problem = f"{self.name} needs every class annotated by every site; {quoted(partial)} are not."
        remedy = 'Use "surgical" or "partial_loss", which learn from partial labels, or "vanilla": missing is negative.'
        raise BadInput([Fault("run.method", problem, remedy)])


def shared_choices(parameters: Parameters) -> SharedChoices:
    """The part of a method that every ``[method]`` table sets in the same way."""
    return {
        "trunk": parameters.trunk,
        "weighting": parameters.weighting,
        "warm_up": WarmUp(parameters.warm_up_epochs, parameters.warm_up_lr),
    }
