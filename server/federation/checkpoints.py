"""Checkpoints of a run: everything the coordinator knows after a round, so that it can go on from there.

Two files a round in ``checkpoints/``: ``round-000012.safetensors``, the state, and ``round-000012.json``, which says
what state that is, of which run, and the BLAKE3 hash of both. Each is written beside, flushed and renamed, the JSON
last: a checkpoint counts only with both, and only where the hash is right. The last two are kept.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from common.config import Experiment
from common.errors import BadInput, Fault, quoted
from common.models.zoo.spec import NAMED_BY_THE_RUN
from common.system.files import Parts, write_atomically
from strategies.engine.state import FederationState, deserialize_state, serialize_state_in_parts

VERSION = 3
KEPT = 2
_MAY_CHANGE = ("simulation", "participation")
"""Tables of an experiment that change where and when sites train, not what comes out of it."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round, from which it can go on.

    Attributes:
        run: Its identifier, under which the sites keep their memory.
        experiment: The experiment that the run began with.
        totals: The sums of :class:`server.federation.recorder.RunTotals`.
        last_validation: Validation of the newest model that was judged.
    """

    run: str
    state: FederationState
    experiment: Mapping[str, Any]
    totals: Mapping[str, Any]
    last_validation: Mapping[str, Any]


class CheckpointFolder:
    """The folder ``checkpoints/`` of one run.

    Attributes:
        durable: Flush to disk; off in simulation, which a power failure may set back further.
    """

    def __init__(self, run_folder: Path, *, durable: bool) -> None:
        self.folder, self.durable = run_folder / "checkpoints", durable

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and remove all but the last :data:`KEPT`."""
        content, number = serialize_state_in_parts(checkpoint.state), checkpoint.state.round
        facts = {
            "round": number,
            "run": checkpoint.run,
            "experiment": checkpoint.experiment,
            "books": checkpoint.totals,
            "last_validation": checkpoint.last_validation,
        }
        write_atomically(self._path(number, "safetensors"), content, durable=self.durable)
        whole = {"version": VERSION, "blake3": _hash(content, facts), "facts": facts}
        write_atomically(self._path(number, "json"), json.dumps(whole).encode(), durable=self.durable)
        # Of later rounds there are only those that could not be read; they must not take these ones' places.
        self._remove([earlier for earlier in self._numbers() if earlier <= number][:-KEPT])

    def after(self, server_round: int) -> Checkpoint | None:
        """Return the checkpoint of a round; None where it is not there or not whole."""
        try:
            return self._read(server_round)
        except (OSError, ValueError):
            return None

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint over that of its round, and remove later ones.

        Killed in between, the run resumes from a later one, finds its model broken again and comes back here.
        """
        self.save(checkpoint)
        self._remove(later for later in self._numbers() if later > checkpoint.state.round)

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for kind in ("json", "safetensors"):
                self._path(number, kind).unlink(missing_ok=True)

    def newest(self) -> tuple[Checkpoint | None, dict[str, str]]:
        """Return the newest checkpoint that is whole, and why newer ones are not, by file name."""
        broken: dict[str, str] = {}
        for number in reversed(self._numbers()):
            try:
                return self._read(number), broken
            except (OSError, ValueError) as error:
                problem = str(error)
                if isinstance(error, FileNotFoundError):
                    problem = f"there is no {Path(error.filename).name} beside it"
                elif isinstance(error, OSError):
                    problem = f"it cannot be read: {error.strerror}"
                broken[self._path(number, "json").name] = problem
        return None, broken

    def _read(self, number: int) -> Checkpoint:
        paths = [self._path(number, kind) for kind in ("json", "safetensors")]
        if odd := [path.name for path in paths if path.exists() and not path.is_file()]:
            raise ValueError(f"{odd[0]} is no file")  # a pipe would be waited for without end
        text, content = paths[0].read_bytes(), paths[1].read_bytes()
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is cut off or damaged") from None
        if not isinstance(whole, dict) or "version" not in whole:
            raise ValueError("it is not what a run writes")
        if whole["version"] != VERSION:
            raise ValueError(f"it has version {whole['version']}, this release reads {VERSION}")
        facts: Any = whole.get("facts")
        if _hash([content], facts) != whole.get("blake3"):
            raise ValueError("its hash is not that of what it says and of the state beside it")
        state = deserialize_state(content)
        if not _describes(facts, state.round, number):
            raise ValueError("it is not what a run writes after this round")
        return Checkpoint(facts["run"], state, facts["experiment"], facts["books"], facts["last_validation"])

    def _numbers(self) -> list[int]:
        names = (path.stem.removeprefix("round-") for path in self.folder.glob("round-*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, number: int, kind: str) -> Path:
        return self.folder / f"round-{number:06d}.{kind}"


def _describes(facts: Any, of_state: int, number: int) -> bool:
    """Return whether the facts of a checkpoint have all that a run needs to go on."""
    if not isinstance(facts, dict) or facts.get("round") != number or of_state != number:
        return False
    tables = [facts.get(name) for name in ("books", "last_validation", "experiment")]
    if isinstance(experiment := tables[-1], dict):
        tables += [experiment.get("run"), experiment.get("model")]
    return isinstance(facts.get("run"), str) and all(isinstance(table, dict) for table in tables)


def _hash(content: Parts, facts: Any) -> str:
    digest = blake3()
    for part in content:
        digest.update(part)
    digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def refuse_another(checkpoint: Checkpoint, experiment: Experiment, out: Path) -> None:
    """Raise :class:`BadInput` unless this is the experiment that the run began with; it may have more rounds."""
    refuse_changes(checkpoint.experiment, experiment, out)
    rounds = experiment.run.rounds
    if checkpoint.state.round > rounds:
        problem = f"has done {checkpoint.state.round} rounds; the experiment asks for {rounds}."
        raise BadInput([Fault(f"--resume {out}", problem, "Set run.rounds to as many, or more.")])


def refuse_changes(before: Mapping[str, Any], experiment: Experiment, out: Path) -> None:
    """Raise :class:`BadInput` unless an experiment is the one that a run began with, but for its rounds and name.

    Args:
        before: The experiment that the run began with, as JSON.
        experiment: The experiment that is to go on.
        out: Folder of the run.
    """
    began, now = dict(before), experiment.model_dump(mode="json")
    rounds = now["run"]["rounds"]
    began["run"] = {**began["run"], "rounds": rounds, "name": now["run"]["name"]}
    for key in NAMED_BY_THE_RUN:
        if now["model"][key] is None:  # compared when the network is built
            now["model"] = {**now["model"], key: began["model"].get(key)}
    changed = sorted(
        name for name in began.keys() | now.keys() if name not in _MAY_CHANGE and began.get(name) != now.get(name)
    )
    if _gpus(began) != _gpus(now):  # of another number of parts the sums are rounded otherwise
        changed.append("simulation.gpus_per_site")
    if changed:
        problem = f"began with another experiment: {quoted(changed)} differ."
        raise BadInput([Fault(f"--resume {out}", problem, "Resume with the same file and --set, or take a new --out.")])


def _gpus(experiment: Mapping[str, Any]) -> int:
    """Return how many GPUs each batch of a simulated site is split across."""
    gpus = experiment.get("simulation", {}).get("gpus_per_site", "auto")  # another release may have other keys
    return 1 if gpus == "auto" else max(1, int(gpus))
