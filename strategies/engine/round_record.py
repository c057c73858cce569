"""The record of a round, and the errors that end a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from flwr.app import RecordDict

from common.errors import CannotGoOn
from common.metrics.multi_class import Tally


@dataclass(frozen=True)
class FederationValidation:
    """How good one model is on the sites' validation parts, for the sites that have one.

    Attributes:
        tallies: On their test parts, where the experiment asks for that every round.
    """

    loss: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    auroc: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    tallies: Mapping[str, Tally] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def mean_loss(self) -> float | None:
        """Uniform mean over sites (specs 1.4)."""
        return float(np.mean(list(self.loss.values()))) if self.loss else None

    @property
    def mean_auroc(self) -> float | None:
        """Uniform mean over sites of each site's mean over its classes."""
        return float(np.mean(list(self.auroc.values()))) if self.auroc else None


@dataclass(frozen=True)
class CoordinatorRound:
    """Figures of the coordinator's own training, in a method that has any."""

    train_loss: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class RoundRecord:
    """The figures of one round; the validation is that of the model it began with.

    Attributes:
        sites: In the order of their names, or in which the model passed through them.
        epochs: Trained at each site.
        train_loss: By site, for those that tell it.
        epsilon: Privacy that the run has cost each site so far, where it has privacy.
        after: Validation of the model that the round made, where it is known at once.
        shortened: Sites whose update was too long and was shortened, with what was done.
        plain: What got the plain mean because too few sites sent it for the method's own: ``trunk``, and classes.
        closed_rows: Head rows that stayed masked, because only one site was left that owns them.
        arithmetic: How each site says that it computed.
    """

    round: int
    sites: tuple[str, ...]
    absent: Mapping[str, str]
    train_loss: Mapping[str, float]
    validation: FederationValidation
    site_seconds: Mapping[str, float]
    bytes_down: Mapping[str, int]
    bytes_up: Mapping[str, int]
    seconds: float
    aggregate_seconds: float
    epochs: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    coordinator: CoordinatorRound | None = None
    after: FederationValidation | None = None
    shortened: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    plain: tuple[str, ...] = ()
    closed_rows: tuple[str, ...] = ()
    epsilon: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    arithmetic: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def mean_train_loss(self) -> float | None:
        """Uniform mean over the sites that tell, or the coordinator's where none does; None where nobody does."""
        if self.train_loss:
            return float(np.mean(list(self.train_loss.values())))
        return None if self.coordinator is None else self.coordinator.train_loss


@dataclass(frozen=True)
class Arrival:
    """A site's reply, as it came.

    Attributes:
        record: Name of the record that was expected.
        content: The records that came; None where an error did.
        reason: Why it does not count; empty where it does.
    """

    record: str
    round: int
    site: str
    content: RecordDict | None
    reason: str


class RunStopped(CannotGoOn):
    """The run cannot go on; says why."""


class TooFewSites(RunStopped):
    """Fewer sites than ``participation.min_sites`` answered in time; says who is missing and why."""


@dataclass(frozen=True)
class Waiting:
    """The sites that a run waits for, shown to anyone who watches it.

    Attributes:
        phase: ``roll call``, ``train``, ``masking``, ``evaluate`` or ``test``.
        round: 0 before the first.
        sites: Names of the sites that are waited for, sorted; at the roll call, of those that are not there.
        lost: Those that have not replied and give no sign of life; they are waited for only where too few others are
            left, and may come back.
        deadline_s: Seconds left when this was told.
    """

    phase: str
    round: int
    sites: tuple[str, ...]
    lost: tuple[str, ...]
    deadline_s: float
