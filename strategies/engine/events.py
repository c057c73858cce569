"""The events of a run, such as a round's record or a rollback, and the coordinator's callbacks that receive them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import RecordDict

from polyclinic.common.errors import ProgramCannotContinue
from polyclinic.common.metrics.multi_class import CorrectPredictionCount
from polyclinic.common.wire.records import EvaluateReply, TrainReply

if TYPE_CHECKING:
    from polyclinic.strategies.engine.state import FederationState


class RunStopped(ProgramCannotContinue):
    """Raised when a run cannot continue; the message gives the reason."""


class TooFewSites(RunStopped):
    """Raised when fewer than ``participation.min_sites`` sites answered in time; names the missing sites."""


@dataclass(frozen=True)
class FederationValidation:
    """Validation figures of one model by site, for the sites that have validation images.

    Attributes:
        tallies: Site -> number of its test images and of correct predictions on them, if the experiment tests the
            model of every round.
    """

    loss: Mapping[str, float] = field(default_factory=dict)
    auroc: Mapping[str, float] = field(default_factory=dict)
    tallies: Mapping[str, CorrectPredictionCount] = field(default_factory=dict)

    @classmethod
    def from_replies(cls, replies: Mapping[str, TrainReply] | Mapping[str, EvaluateReply]) -> "FederationValidation":
        """Collect the validation figures from replies; a site that sent none is omitted."""
        loss = dict[str, float]()
        auroc = dict[str, float]()
        tallies = dict[str, CorrectPredictionCount]()
        for site, reply in replies.items():
            if reply.validation_loss is not None:
                loss[site] = reply.validation_loss
            if reply.validation_auroc is not None:
                auroc[site] = reply.validation_auroc
            if reply.test_correct is not None and reply.test_images is not None:
                tallies[site] = CorrectPredictionCount(reply.test_correct, reply.test_images)
        return cls(loss, auroc, tallies)

    def without_sites(self, sites: Collection[str]) -> "FederationValidation":
        """Return the figures without those of the given sites."""
        loss = {site: value for site, value in self.loss.items() if site not in sites}
        auroc = {site: value for site, value in self.auroc.items() if site not in sites}
        tallies = {site: value for site, value in self.tallies.items() if site not in sites}
        return FederationValidation(loss, auroc, tallies)

    @property
    def mean_loss(self) -> float | None:
        """Return the mean validation loss over sites with equal weights; None if no site sent a loss."""
        return float(np.mean(list(self.loss.values()))) if self.loss else None

    @property
    def mean_auroc(self) -> float | None:
        """Return the mean of the sites' AUROCs with equal weights; a site's AUROC is a mean over its classes."""
        return float(np.mean(list(self.auroc.values()))) if self.auroc else None


@dataclass(frozen=True)
class CoordinatorTrainingRecord:
    """Figures of the coordinator's training on its own images in one round, for methods that train there."""

    train_loss: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class RoundRecord:
    """The figures of one round; ``validation`` refers to the model at the beginning of the round.

    Attributes:
        sites: Sites whose replies count, sorted by name, or in the order in which the model passed through them.
        epochs: Number of epochs trained at each site.
        train_loss: Training loss of each site that sends one.
        epsilon: Site -> privacy budget (epsilon) spent by the run so far, for sites with differential privacy.
        after: Validation of the model at the end of the round, for methods that validate it in the same round.
        shortened: Site -> a sentence that says how its update was shortened, for updates that were too long.
        plain: Parts that got the plain instead of the robust mean because too few sites sent them: ``trunk`` (with
            batch normalisation), or the name of a class for its head row.
        closed_rows: Head rows whose sum stayed masked, because too few sites that own them were left.
        arithmetic: Each site's statement of the number format and memory layout of its training.
        images: Site -> number of images that counts for it, for the sites whose own number was lowered.
        uncounted: Sites whose statistics did not count when the round began.
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
    images: Mapping[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()

    @classmethod
    def from_replies(cls, server_round: int, replies: Mapping[str, TrainReply], **figures: Any) -> "RoundRecord":
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
        """Return the mean training loss over the sites that send one, with equal weights.

        If no site sends one, return the coordinator's training loss, or None if the coordinator does not train.
        """
        if self.train_loss:
            return float(np.mean(list(self.train_loss.values())))
        return None if self.coordinator is None else self.coordinator.train_loss


@dataclass(frozen=True)
class ReplyArrival:
    """A site's reply on arrival, for the callbacks and the audit log.

    Attributes:
        record: Name of the expected record class.
        content: The received records; None if the reply is an error.
        reason: Why the reply does not count; empty if it counts.
    """

    record: str
    round: int
    site: str
    content: RecordDict | None
    reason: str


@dataclass(frozen=True)
class MissingReplyStatus:
    """The sites whose replies are still missing, for progress displays.

    Attributes:
        phase: ``roll call``, ``train``, ``masking``, ``evaluate`` or ``test``.
        round: Number of the round; 0 before the first.
        sites: Sorted names of the missing sites; at the roll call, of registered sites that are not connected.
        lost: Disconnected sites without a reply. The run waits for their return only if too few others reply.
        deadline_s: Seconds left.
        awaiting_approval: At the roll call, the sites at which a person has to approve the plan first.
    """

    phase: str
    round: int
    sites: tuple[str, ...]
    lost: tuple[str, ...]
    deadline_s: float
    awaiting_approval: tuple[str, ...] = ()


@dataclass(frozen=True)
class RollbackEvent:
    """Reports that a model collapsed and that the run returns to the model of an earlier round.

    Attributes:
        collapsed: The round that made the collapsed model.
        to: The round whose model the run returns to.
        because: A phrase with the sites' figures that show the collapse.
    """

    collapsed: int
    to: int
    because: str

    @property
    def rollback_sentence(self) -> str:
        """Return a sentence for people: which model collapsed, why, and from which round the run continues."""
        return (
            f"round {self.collapsed}: {self.because}; the run goes back to the model of round {self.to} and does round "
            f"{self.collapsed} again, to find the site that did it"
        )


def describe_site_exclusion(server_round: int, site: str, reason: str) -> str:
    """Return a sentence for people that a site is excluded for the rest of the run, with the reason."""
    return f"round {server_round}: {site} harms the model and is left out for the rest of the run: {reason}"


class RunCallbacks:
    """Base class of objects that receive the events of a run; its methods do nothing."""

    def on_waiting_for_sites(self, waiting: MissingReplyStatus) -> None:
        """Receive the sites whose replies are missing, whenever these sites change."""

    def on_late_join(self, server_round: int, site: str) -> None:
        """Receive the name of a site that joined after the roll call."""

    def on_lowered_claims(self, images: Mapping[str, int]) -> None:
        """Receive site -> the number of images that counts for it, for sites that claim too many; before round 1 and
        whenever there is another such site."""

    def on_uncounted_sites(self, server_round: int, reasons: Mapping[str, str], counting: Collection[str]) -> None:
        """Receive the sites whose statistics have ceased to count in a round, with the reasons, and those whose
        statistics count again."""

    def on_round_repetition(self, server_round: int, sites: Collection[str]) -> None:
        """Receive the round that the sites train again, without the statistics of these sites."""

    def on_reply(self, arrival: ReplyArrival) -> None:
        """Receive every reply of a site to a request, on arrival."""

    def on_absent_sites(self, phase: str, absent: Mapping[str, str]) -> None:
        """Receive the sites that missed an exchange, such as the test, with the reasons."""

    def on_round_end(self, record: RoundRecord, state: "FederationState") -> None:
        """Receive the record of a completed round, and the coordinator's state after the round."""

    def on_exclusion(self, server_round: int, site: str, reason: str) -> None:
        """Receive the name of a site that is excluded for the rest of the run, with the reason."""

    def on_rollback(self, rolled_back: RollbackEvent) -> "FederationState | None":
        """Return the stored state that the run returns to; None if no state is stored, which cancels the rollback."""
        return None

    def on_state_reset(self, state: "FederationState") -> FederationValidation:
        """Receive the state from which the run continues after a rollback; return its model's validation figures."""
        return FederationValidation()
