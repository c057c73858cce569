"""The folder of a new run, or of one that was broken off and goes on."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Experiment
from common.errors import BadInput, Fault, stop_on
from server.federation.checkpoints import Checkpoint, CheckpointFolder, refuse_another, refuse_changes
from server.runs.folder import RunFolder


@dataclass(frozen=True)
class OpenedRunFolder:
    """A run folder that may be written to.

    Attributes:
        run: The run's identifier.
        resumed: Where it goes on from; None where it begins.
    """

    folder: RunFolder
    run: str
    resumed: Checkpoint | None = None


def finished(out: Path, experiment: Experiment, *, resume: bool) -> dict[str, Any] | None:
    """``summary.json`` of a run that is to be resumed and is done; else None.

    Raises:
        BadInput: If it is damaged, or was another experiment's, or one of fewer or more rounds.
    """
    path = out / "summary.json"
    if not resume or not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        remedy = "Remove it to have it written again: the run then goes on from its last checkpoint."
        raise BadInput([Fault(str(path), "is damaged or was edited: it is no JSON.", remedy)]) from None
    if isinstance(began := summary.get("experiment"), dict):
        refuse_changes(began, experiment, out)
        if (rounds := began["run"]["rounds"]) != (asked := experiment.run.rounds):
            problem = f"is done: a run of {rounds} rounds. The experiment asks for {asked}."
            raise BadInput([Fault(f"--resume {out}", problem, "No run goes on after its end: take a new --out.")])
    return summary


@contextmanager
def opened(out: Path, experiment: Experiment, *, resume: bool, durable: bool) -> Iterator[OpenedRunFolder]:
    """Make the folder ``out``, or open it again, and keep others out of it meanwhile.

    A run that was broken off before its first checkpoint begins anew, in the same folder; so does one that is to be
    resumed where nothing is yet, so that a supervisor's line may always say ``--resume``.

    Raises:
        BadInput: If there is something in a new folder, no run in one to resume, another experiment's, or one whose
            checkpoints are all broken.
    """
    begins = not resume or not out.is_dir() or not any(out.iterdir())
    folder = RunFolder.create(out) if begins else RunFolder.reopen(out)
    with folder.held():
        if begins:
            folder.event("begun")
        else:
            folder.take_back_what_was_cut_off()
        yield OpenedRunFolder(folder, uuid.uuid4().hex) if begins else _gone_on(folder, experiment, durable=durable)


def _gone_on(folder: RunFolder, experiment: Experiment, *, durable: bool) -> OpenedRunFolder:
    checkpoint, broken = CheckpointFolder(folder.path, durable=durable).newest()
    for name, problem in broken.items():
        folder.event("checkpoint_broken", file=name, reason=problem)
    if checkpoint is None:
        stop_on([_broken(folder.path, name, problem) for name, problem in broken.items()])
        folder.keep_rounds(0)
        folder.event("begun_anew")
        return OpenedRunFolder(folder, uuid.uuid4().hex)
    refuse_another(checkpoint, experiment, folder.path)
    folder.event("resumed", round=checkpoint.state.round)
    return OpenedRunFolder(folder, checkpoint.run, checkpoint)


def _broken(out: Path, name: str, problem: str) -> Fault:
    remedy = "Put a copy of checkpoints/ back, or begin the run again with a new --out."
    return Fault(f"--resume {out}: checkpoints/{name}", f"{problem.rstrip('.')}.", remedy)
