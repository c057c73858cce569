"""The events of a run, such as the record of a round or a rollback, and the callbacks that receive them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import RecordDict

from common.errors import ProgramCannotContinue
from common.metrics.multi_class import CorrectCount
from common.wire.records import EvaluateReply, TrainReply

if TYPE_CHECKING:
    from strategies.engine.state import FederationState


class RunStopped(ProgramCannotContinue):
    """Raised when a run cannot go on; the message gives the reason."""


class TooFewSites(RunStopped):
    """Raised when fewer sites than ``participation.min_sites`` answered in time; it names the missing sites."""


@dataclass(frozen=True)
class FederationValidation:
    """Validation figures of one model by site, for the sites that hold back images for validation.

    Attributes:
        tallies: Site -> correct answers on its test images, where the experiment asks for them every round.
    """

    loss: Mapping[str, float] = field(default_factory=dict)
    auroc: Mapping[str, float] = field(default_factory=dict)
    tallies: Mapping[str, CorrectCount] = field(default_factory=dict)

    @classmethod
    def of_replies(cls, replies: Mapping[str, TrainReply] | Mapping[str, EvaluateReply]) -> "FederationValidation":
        """Return the validation figures of replies; a site that has none is left out."""
        loss, auroc, tallies = dict[str, float](), dict[str, float](), dict[str, CorrectCount]()
        for site, reply in replies.items():
            if reply.validation_loss is not None:
                loss[site] = reply.validation_loss
            if reply.validation_auroc is not None:
                auroc[site] = reply.validation_auroc
            if reply.test_correct is not None and reply.test_images is not None:
                tallies[site] = CorrectCount(reply.test_correct, reply.test_images)
        return cls(loss, auroc, tallies)

    @property
    def mean_loss(self) -> float | None:
        """Return the mean validation loss over sites, each with the same weight (specs 1.4)."""
        return float(np.mean(list(self.loss.values()))) if self.loss else None

    @property
    def mean_auroc(self) -> float | None:
        """Return the mean AUROC over sites with equal weights, of each site's mean over its classes."""
        return float(np.mean(list(self.auroc.values()))) if self.auroc else None


@dataclass(frozen=True)
class CoordinatorTrainingRecord:
    """Figures of one round's training on the coordinator's own images, in methods that train there."""

    train_loss: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class RoundRecord:
    """The figures of one round; ``validation`` is of the model that the round began with.

    Attributes:
        sites: Sites whose replies count, sorted by name, or in the order in which the model passed through them.
        epochs: Epochs trained at each site.
        train_loss: Training loss of each site that sends one.
        epsilon: Site -> epsilon that the run has cost so far, where it uses differential privacy.
        after: Validation of the model that the round made, where it is known at once.
        shortened: Site -> a sentence that says how its update was shortened, for updates that were too long.
        plain: Parts that got the plain mean because too few sites sent them for the method's own: ``trunk``, classes.
        closed_rows: Head rows whose sum stayed masked, because too few sites that own them were left.
        arithmetic: Each site's statement of how it computed.
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
    epochs: Mapping[str, int] = field(default_factory=dict)
    coordinator: CoordinatorTrainingRecord | None = None
    after: FederationValidation | None = None
    shortened: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    closed_rows: tuple[str, ...] = ()
    epsilon: Mapping[str, float] = field(default_factory=dict)
    arithmetic: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_replies(cls, server_round: int, replies: Mapping[str, TrainReply], **figures: Any) -> "RoundRecord":
        """Make the record of a round from the sites' replies and from further figures of the coordinator."""
        return cls(
            round=server_round,
            sites=tuple(replies),
            train_loss={site: reply.train_loss for site, reply in replies.items() if reply.train_loss is not None},
            site_seconds={site: reply.seconds for site, reply in replies.items()},
            epochs={site: reply.epochs for site, reply in replies.items()},
            epsilon={site: reply.epsilon for site, reply in replies.items() if reply.epsilon is not None},
            arithmetic={site: reply.arithmetic for site, reply in replies.items()},
            **figures,
        )

    @property
    def mean_train_loss(self) -> float | None:
        """Return the mean loss over the sites that send one, each with the same weight.

        Where no site does, it is the coordinator's training loss, or None if the coordinator does not train.
        """
        if self.train_loss:
            return float(np.mean(list(self.train_loss.values())))
        return None if self.coordinator is None else self.coordinator.train_loss


@dataclass(frozen=True)
class ReplyArrival:
    """A site's reply as it arrived, for the callbacks and the audit log.

    Attributes:
        record: Name of the record that was expected.
        content: The records that came; None where an error came.
        reason: Why the reply does not count; empty where it does.
    """

    record: str
    round: int
    site: str
    content: RecordDict | None
    reason: str


@dataclass(frozen=True)
class WaitingStatus:
    """The sites that a run waits for, shown to anyone who watches the run.

    Attributes:
        phase: ``roll call``, ``train``, ``masking``, ``evaluate`` or ``test``.
        round: Number of the round; 0 before the first.
        sites: Names of the sites that are waited for, sorted; at the roll call, of those that are not connected.
        lost: Sites that have not replied and are no longer connected. They may come back, and are waited for only where
            too few others are left.
        deadline_s: Seconds left.
    """

    phase: str
    round: int
    sites: tuple[str, ...]
    lost: tuple[str, ...]
    deadline_s: float


@dataclass(frozen=True)
class RollbackEvent:
    """Reports that a model collapsed and that the run goes back to the model of an earlier round.

    Attributes:
        collapsed: The round that made the model.
        to: The round whose model is taken up again.
        because: The sites' figures that show the collapse, in words.
    """

    collapsed: int
    to: int
    because: str

    @property
    def sentence(self) -> str:
        """Return a sentence for people that says which model collapsed, why, and where the run goes on."""
        return (
            f"round {self.collapsed}: {self.because}; the run goes back to the model of round {self.to} and does round "
            f"{self.collapsed} again, to find the site that did it"
        )


def describe_exclusion(server_round: int, site: str, reason: str) -> str:
    """Return a sentence for people: this site is left out for the rest of the run, with the reason."""
    return f"round {server_round}: {site} harms the model and is left out for the rest of the run: {reason}"


class RunCallbacks:
    """Receives the events of a run; a method that is not overridden does nothing."""

    def on_waiting_for_sites(self, waiting: WaitingStatus) -> None:
        """Receive the sites that are waited for, whenever these change."""

    def on_late_join(self, server_round: int, site: str) -> None:
        """Receive the name of a site that joined after the roll call."""

    def on_reply(self, arrival: ReplyArrival) -> None:
        """Receive every reply of a site that was asked, as it comes."""

    def on_absent_sites(self, phase: str, absent: Mapping[str, str]) -> None:
        """Receive the sites that missed an exchange outside the rounds, such as the test, with reasons."""

    def on_round_end(self, record: RoundRecord, state: "FederationState") -> None:
        """Receive the record of a completed round, and the state after it."""

    def on_exclusion(self, server_round: int, site: str, reason: str) -> None:
        """Receive the site that is left out for the rest of the run."""

    def on_rollback(self, rolled_back: RollbackEvent) -> "FederationState | None":
        """Return the stored state of the round to go back to; None if it is not stored, so that the run goes on."""
        return None

    def on_state_reset(self, state: "FederationState") -> FederationValidation:
        """Receive the state that the run goes on from after a rollback; return the validation of its model."""
        return FederationValidation()
