"""The totals of a run, added up round by round, and the lines of ``rounds.jsonl``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from common.metrics.multi_class import Tally, round_accuracy
from server.runs.folder import RunFolder
from strategies.engine.events import FederationValidation, RoundRecord
from strategies.engine.state import FederationState


@dataclass
class RunTotals:
    """Sums over rounds, for the summary; and the round whose validation figures are not known yet.

    Attributes:
        folder: Where lines are written.
        workers: Sites that train at a time.
        train_seconds: Time in which sites computed: the slowest one's, or their sum over the workers if that is longer.
        aggregate_seconds: The coordinator's.
        round_seconds: What all rounds took by the coordinator's clock.
        site_seconds, epochs: What each site spent on training, over all rounds.
        epsilon: What the run has cost each site, where it has privacy.
        arithmetic: How each site said that it computed, the last time.
        tallies: Round -> how the model after it did on the sites' test parts.
    """

    folder: RunFolder
    workers: int
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    round_seconds: float = 0.0
    tallies: dict[int, Mapping[str, Tally]] = field(default_factory=dict)
    site_seconds: Counter[str] = field(default_factory=Counter)
    epochs: Counter[str] = field(default_factory=Counter)
    epsilon: dict[str, float] = field(default_factory=dict)
    arithmetic: dict[str, str] = field(default_factory=dict)
    _pending: tuple[RoundRecord, Mapping[str, Any]] | None = None
    _plain: tuple[str, ...] = ()

    def note(self, record: RoundRecord, state: FederationState, learned: Mapping[str, Any]) -> None:
        """Add a round up, and write the last whose validation figures are known by now: mostly the one before.

        Args:
            learned: What the method says of its statistics (``round_figures``).
        """
        self.finalize(record.validation, state)
        self._pending = record, learned
        self.train_seconds += _computing(list(record.site_seconds.values()), self.workers)
        if record.coordinator:
            self.train_seconds += record.coordinator.seconds
        self.aggregate_seconds += record.aggregate_seconds
        self.round_seconds += record.seconds
        self.site_seconds.update(record.site_seconds)
        self.epochs.update(record.epochs)
        self.epsilon.update(record.epsilon)
        self.arithmetic.update(record.arithmetic)
        self.folder.absent(record.round, record.absent, record.sites)
        for site, done in record.shortened.items():
            self.folder.event("shortened_update", round=record.round, site=site, done=done)
        if record.plain != self._plain:
            self.folder.event("plain_mean", round=record.round, of=list(record.plain))
            self._plain = record.plain
        if record.closed_rows:
            self.folder.event("rows_stayed_masked", round=record.round, classes=list(record.closed_rows))
        if record.after is not None:
            self.finalize(record.after, state)

    def finalize(self, validation: FederationValidation, state: FederationState) -> None:
        """Write the pending round's line with the validation figures of the model that it made."""
        if self._pending is None:
            return
        (record, learned), self._pending = self._pending, None
        self.tallies[record.round] = validation.tallies
        self.folder.round(
            {
                "round": record.round,
                "sites": list(record.sites),
                "absent": dict(record.absent),
                "shortened": dict(record.shortened),
                "closed_rows": list(record.closed_rows),
                "train_loss": record.mean_train_loss,
                "validation_loss": validation.mean_loss,
                "validation_auroc": validation.mean_auroc,
                "test_accuracy": (accuracy := round_accuracy(validation.tallies)) and asdict(accuracy),
                "best": state.best_round == record.round,
                "site_losses": {
                    site: {"train_loss": record.train_loss.get(site), "validation_loss": validation.loss.get(site)}
                    for site in record.sites
                },
                "epochs": dict(record.epochs),
                "epsilon": dict(record.epsilon),
                "arithmetic": dict(record.arithmetic),
                "coordinator": record.coordinator and asdict(record.coordinator),
                "learned": dict(learned),
                "site_seconds": dict(record.site_seconds),
                "seconds": record.seconds,
                "bytes_up": sum(record.bytes_up.values()),
                "bytes_down": sum(record.bytes_down.values()),
            }
        )

    def facts(self) -> dict[str, Any]:
        """All of it for a checkpoint, as JSON has it."""
        pending = None
        if self._pending is not None:
            pending = {"record": as_json(self._pending[0]), "learned": dict(self._pending[1])}
        return {
            "train_seconds": self.train_seconds,
            "aggregate_seconds": self.aggregate_seconds,
            "round_seconds": self.round_seconds,
            "site_seconds": dict(self.site_seconds),
            "epochs": dict(self.epochs),
            "epsilon": dict(self.epsilon),
            "arithmetic": dict(self.arithmetic),
            "tallies": {str(number): as_json(tallies) for number, tallies in self.tallies.items()},
            "pending": pending,
        }

    def go_on_from(self, facts: Mapping[str, Any], last_round: int) -> None:
        """Take up :meth:`facts`, and take back the lines of rounds after them."""
        self.train_seconds, self.aggregate_seconds = facts["train_seconds"], facts["aggregate_seconds"]
        self.round_seconds = facts.get("round_seconds", self.train_seconds)
        self.site_seconds, self.epochs = Counter(facts["site_seconds"]), Counter(facts["epochs"])
        self.epsilon = dict(facts.get("epsilon", {}))
        self.arithmetic = dict(facts.get("arithmetic", {}))
        self.tallies = {int(number): _TALLIES.validate_python(one) for number, one in facts["tallies"].items()}
        self._pending = None
        if (pending := facts["pending"]) is not None:
            self._pending = _RECORD.validate_python(pending["record"]), pending["learned"]
        self.folder.keep_rounds(last_round if pending is None else last_round - 1)


_RECORD, _TALLIES = TypeAdapter(RoundRecord), TypeAdapter(dict[str, Tally])


def as_json(value: Any) -> Any:
    """Dataclasses and mappings, however deep, as dictionaries."""
    if is_dataclass(value):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    return {key: as_json(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _computing(seconds: Sequence[float], workers: int) -> float:
    """Time in which these sites computed, so many at a time."""
    return max(max(seconds), sum(seconds) / min(workers, len(seconds))) if seconds else 0.0
