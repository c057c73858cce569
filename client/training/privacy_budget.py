"""What a site has spent of its privacy: every noisy reply that may have left, on its own disk.

One ledger for all runs, for they see the same patients. A reply is written to the disk first, then what it cost, then
it leaves. A site that is killed in between finds both: the same request gets the same reply again, and what has left
twice alike has cost once. Any other request is answered anew, with new noise, and costs anew.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.numpy import save

from common.system.files import write_atomically
from common.wire.records import (
    Arrays,
    Groups,
    TrainReply,
    TrainRequest,
    below,
)
from strategies.privacy.accounting import Accountant, Steps, epsilon_of

FOLDER = "privacy"


@dataclass(frozen=True)
class BudgetEntry:
    """One reply that may have left.

    Attributes:
        request: Which request it answers, as :func:`fingerprint` has it.
    """

    run: str
    round: int
    request: str
    noise_multiplier: float
    sample_rate: float
    count: int

    @property
    def steps(self) -> Steps:
        return Steps(self.noise_multiplier, self.sample_rate, self.count)


def fingerprint(request: TrainRequest) -> str:
    """SHA-256 of everything that a request says."""
    digest = hashlib.sha256()
    plain = (request.run, request.round, request.plan, request.contract, request.counted, request.best)
    digest.update(json.dumps([*plain, list(request.class_names)]).encode())
    for name, array in sorted({**request.model.named(), **_prefixed("told", request.statistics)}.items()):
        digest.update(f"\0{name}\0{list(array.shape)}\0".encode())
        digest.update(array.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


class PaidReply(NamedTuple):
    """A reply that is on the disk.

    Attributes:
        left: :meth:`MemoryFolder.digest` of the memory that its training left.
    """

    reply: TrainReply
    left: bytes


class PrivacyBudgetLedger:
    """The ledger in a site's folder."""

    def __init__(self, site: Path, *, durable: bool = True) -> None:
        self._folder, self._durable = site / FOLDER, durable

    @property
    def entries(self) -> tuple[BudgetEntry, ...]:
        """Return the entries in the order in which they were written."""
        if not self._path.exists():
            return ()
        return tuple(BudgetEntry(**one) for one in json.loads(self._path.read_text(encoding="utf-8"))["entries"])

    def epsilon(self, delta: float, more: Sequence[Steps] = ()) -> float:
        """What all runs have cost, with ``more`` steps on top."""
        return self._cost(self.entries, delta, "prv", more)

    def epsilon_of_run(self, run: str, delta: float, accountant: Accountant, more: Sequence[Steps] = ()) -> float:
        """What one run has cost, with ``more`` steps on top."""
        return self._cost([entry for entry in self.entries if entry.run == run], delta, accountant, more)

    def reply_to(self, request: str) -> PaidReply | None:
        """The reply to this very request, if it was the last to be answered."""
        if not self._reply_path.exists():
            return None
        with safe_open(self._reply_path, framework="numpy") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            if facts.pop("request") != request:
                return None
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        classes, form, left = facts.pop("classes"), facts.pop("form"), bytes.fromhex(facts.pop("left"))
        update = replace(Groups.of_named(below("update", arrays), classes), form=form)
        return PaidReply(TrainReply(**facts, update=update, statistics=below("statistics", arrays)), left)

    def note(self, entry: BudgetEntry, paid: PaidReply) -> None:
        """Write down a reply and what it costs, before it leaves."""
        write_atomically(self._reply_path, _saved(paid, entry.request), durable=self._durable)
        self._add(entry)

    def note_failure(self, entry: BudgetEntry) -> None:
        """Write down the cost of an error in the place of an answer: it can hang on the noise, and is asked again."""
        self._add(entry)

    def note_again(self, entry: BudgetEntry) -> None:
        """Write down what the reply on the disk costs, unless that is done: it may have been cut off before."""
        entries = self.entries
        if not entries or entries[-1].request != entry.request:
            self._add(entry)

    def _add(self, entry: BudgetEntry) -> None:
        text = json.dumps({"entries": [asdict(one) for one in (*self.entries, entry)]}, indent=1)
        write_atomically(self._path, text.encode(), durable=self._durable)

    @property
    def _path(self) -> Path:
        return self._folder / "ledger.json"

    @property
    def _reply_path(self) -> Path:
        return self._folder / "last-reply.safetensors"

    @staticmethod
    def _cost(entries: Sequence[BudgetEntry], delta: float, accountant: Accountant, more: Sequence[Steps]) -> float:
        return epsilon_of(_joined([*(entry.steps for entry in entries), *more]), delta, accountant)


def _joined(steps: Sequence[Steps]) -> list[Steps]:
    """Steps of one kind as one, which an accountant counts at once."""
    counts: dict[tuple[float, float], int] = {}
    for one in steps:
        kind = (one.noise_multiplier, one.sample_rate)
        counts[kind] = counts.get(kind, 0) + one.count
    return [Steps(noise, rate, count) for (noise, rate), count in counts.items()]


def _prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def _saved(paid: PaidReply, request: str) -> bytes:
    reply = paid.reply
    facts = {name: value for name, value in vars(reply).items() if name not in ("update", "statistics")}
    head = reply.update.head
    facts |= {
        "request": request,
        "left": paid.left.hex(),
        "classes": list(head.class_names) if head else [],
        "form": reply.update.form,
    }
    arrays = {**_prefixed("update", reply.update.named()), **_prefixed("statistics", reply.statistics)}
    return save({name: array.copy() for name, array in arrays.items()}, {"facts": json.dumps(facts)})
