"""A run added up again from the updates that it kept, by the method's own rules: do they make each round's model?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from common.config import Experiment
from common.contract import Declaration, merge
from common.errors import Fault
from common.models.network import build
from common.models.state import Layout, ModelState, layout_of, state_sha256
from common.wire.canonical_bytes import of_bytes, record_sha256
from common.wire.codec import R, decode
from common.wire.errors import WireError
from common.wire.records import Arrays, TrainReply, no_arrays
from common.wire.roll_call import RollCallAnswer
from server.runs.audit_log import INITIAL, UPDATES, record_file, round_folder
from server.runs.receipt import Receipt, ReceiptRound
from strategies.aggregation.bounds import Lengths, bounded
from strategies.aggregation.server_optimizer import Moments
from strategies.engine.aggregator import longest_update, merged_by, moved_by, visit
from strategies.engine.checkpoint import of_bytes as state_of_bytes
from strategies.methods.base import Method, RoundContext, SequentialMethod
from strategies.registry import strategy_of


class Altered(Exception):
    """What was kept is not what the receipt names."""

    def __init__(self, where: Path, problem: str) -> None:
        super().__init__(problem)
        self.fault = Fault(f"{UPDATES}/{where}", problem)


def why_not(receipt: Receipt, experiment: Experiment) -> str:
    """Why the rounds cannot be added up again, or an empty string."""
    method = strategy_of(experiment)
    if not receipt.updates_kept:
        return "the run did not keep its updates (run.keep_updates)"
    if experiment.privacy.secure_aggregation:
        return "under secure aggregation updates came masked, and what unmasks them is not kept"
    if isinstance(method, SequentialMethod) and method.server_training is not None:
        return "the coordinator trained on images of its own, which are no part of the receipt"
    return ""


@dataclass
class Replay:
    """The coordinator's state as it is made again.

    Attributes:
        updates: The folder of what was kept.
    """

    updates: Path
    receipt: Receipt
    experiment: Experiment
    layout: Layout
    method: Method
    model: ModelState
    moments: Moments = field(default_factory=lambda: MappingProxyType({}))
    statistics: Arrays = field(default_factory=no_arrays)
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))
    _answers: dict[str, RollCallAnswer] = field(default_factory=dict)

    @property
    def clip(self) -> float | None:
        """The longest update that counted as it was, in median lengths; None for any."""
        return longest_update(self.method.site, self.experiment.participation, self.experiment.privacy)

    @classmethod
    def of(cls, run_folder: Path, receipt: Receipt, experiment: Experiment) -> "Replay":
        """Before round 1.

        Raises:
            Altered: If the initial model or an answer to the roll call is not what the receipt names.
        """
        spec = experiment.model.model_copy(update={"weights": None, "weights_sha256": None})
        layout = layout_of(build(spec, receipt.classes, seed=0))
        updates = run_folder / UPDATES
        try:
            initial = state_of_bytes(_content(updates, Path(INITIAL)))
            model, sha256 = initial.model, state_sha256(initial.model, layout)
        except (ValueError, KeyError, AssertionError) as error:
            raise Altered(Path(INITIAL), f"is no model of this run ({type(error).__name__}): changed.") from None
        if sha256 != receipt.initial_model_sha256:
            raise Altered(Path(INITIAL), f"holds the model {sha256}, the receipt names {receipt.initial_model_sha256}.")
        if initial.best is not None or initial.moments or initial.statistics:
            raise Altered(Path(INITIAL), "holds more than a model to begin with: changed.")
        replay = cls(updates, receipt, experiment, layout, strategy_of(experiment), model)
        for site, one in receipt.sites.items():
            path = Path("roll-call") / record_file(site)
            replay._answers[site] = replay._record(path, one.answer_sha256, RollCallAnswer)
        return replay

    def rounds(self) -> Iterator[ReceiptRound]:
        """Make round after round again; yields those that end in the model that the receipt names.

        Raises:
            Altered: Naming the first update or round that does not.
        """
        for one in self.receipt.rounds:
            folder = Path(round_folder(one.round))
            replies = {
                site: self._record(folder / record_file(site), sha256, TrainReply) for site, sha256 in one.sites.items()
            }
            known = self._known(one.round)
            self._move(one.round, known, replies)
            self.statistics = self.method.aggregate_statistics(known, replies)
            if (sha256 := state_sha256(self.model, self.layout)) != one.model_sha256:
                raise Altered(folder, f"make the model {sha256}, the receipt names {one.model_sha256}.")
            yield one

    def _move(self, server_round: int, known: RoundContext, replies: dict[str, TrainReply]) -> None:
        if isinstance(self.method, SequentialMethod):
            passed, left = self.model, self.experiment.run.rounds - server_round
            for hops, reply in enumerate(replies.values(), start=1):
                visited = visit(passed, reply, self.clip, self.lengths)
                passed, self.lengths = visited.model, visited.lengths
                self.model = self.method.after_hop(left, hops, self.model, passed)
            return
        if self.clip is not None:
            replies, _ = bounded(replies, self.clip)
        means = merged_by(self.method, known, self.model, replies).means
        self.model, self.moments = moved_by(self.method, server_round, means, self.moments)

    def _known(self, server_round: int) -> RoundContext:
        """What the coordinator knew when this round began."""
        answers = {
            site: self._answers[site] for site, one in sorted(self.receipt.sites.items()) if one.joined <= server_round
        }
        contract = merge(
            (
                Declaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))
                for answer in answers.values()
            ),
            self.receipt.classes,
        )
        task, seed = self.experiment.model.task, self.experiment.run.seed
        return RoundContext(task, contract, answers, self.statistics, server_round, seed)

    def _record(self, where: Path, sha256: str, kind: type[R]) -> R:
        data = _content(self.updates, where)
        try:
            content = of_bytes(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Altered(where, f"is no record that was kept ({error}): changed.") from None
        if (found := record_sha256(content)) != sha256:
            raise Altered(where, f"has SHA-256 {found}, the receipt names {sha256}: changed.")
        try:
            return decode(content, kind)
        except (WireError, ValueError) as error:
            raise Altered(where, f"is none of this release's records: {error}") from None


def _content(updates: Path, where: Path) -> bytes:
    if (updates / where).exists() and not (updates / where).is_file():  # a pipe would be waited for
        raise Altered(where, "is no file: changed.")
    try:
        return (updates / where).read_bytes()
    except OSError as error:
        raise Altered(where, f"cannot be read ({error.strerror}): removed.") from None
