"""The steps of a run, simulated or over the network: check, open the run folder, run the rounds, write the report.

A new run begins, or an interrupted run is resumed.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polyclinic.common.config import Experiment, ExperimentFile
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.plain_text import join_as_english_list, list_first_and_count_rest
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, hash_dataset, hash_dataset_components
from polyclinic.server.federation.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    refuse_checkpoint_of_other_experiment,
    refuse_experiment_changes,
    suggest_new_run,
)
from polyclinic.server.runs.folder import RunFolder, holds_refused_run
from polyclinic.server.runs.tracking import TrackingService, open_mlflow_store, send_metrics_to_trackers
from polyclinic.strategies.engine.events import RunStopped

DATA_TABLES = ("data", "server_data", "external_test")
"""Tables of an experiment that name a data set."""


@dataclass(frozen=True)
class OpenedRunFolder:
    """A locked run folder, with the run's identifier and starting point.

    Attributes:
        run: Identifier of the run.
        resumed: Checkpoint from which the run continues; None for a new run.
        is_reopened: True if another process began the run in this folder, with or without a checkpoint.
    """

    folder: RunFolder
    run: str
    resumed: Checkpoint | None = None
    is_reopened: bool = False


def read_begun_experiment(out: Path) -> Mapping[str, Any] | None:
    """Return the experiment of the run in ``out`` as JSON values; None if there is no run that can be resumed."""
    try:
        summary = json.loads((out / "summary.json").read_bytes())
        return dict(summary["experiment"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # the run is not finished, or the file is damaged, which is refused later
        checkpoint, _ = CheckpointFolder(out, durable=False).read_newest_undamaged_checkpoint()
        return None if checkpoint is None else checkpoint.experiment


def read_finished_run_summary(out: Path, experiment: Experiment, *, resume: bool) -> dict[str, Any] | None:
    """Return ``summary.json`` of a finished run with as many rounds as requested; None if rounds are missing.

    Raises:
        BadInput: If the file is damaged, or belongs to another experiment or to a run of more rounds.
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
        refuse_experiment_changes(began, experiment, out)
        rounds = began["run"]["rounds"]
        requested_rounds = experiment.run.rounds
        if rounds > requested_rounds:
            problem = f"is done: a run of {rounds} rounds. The experiment asks for {requested_rounds}."
            raise BadInput([Fault(f"--resume {out}", problem, "Set run.rounds to as many, or more.")])
        if rounds < requested_rounds:
            return None
    return summary


@contextmanager
def open_run_folder(out: Path, experiment: Experiment, *, resume: bool, durable: bool) -> Iterator[OpenedRunFolder]:
    """Create or reopen the run folder, and lock it in the ``with`` block.

    With ``resume``, a run without a checkpoint or without a folder starts from the beginning, so that a supervisor may
    always pass ``--resume``. A run that was refused before round 1 also starts from the beginning, with or without
    ``resume``. The results of a finished run are kept until another round is completed.

    Args:
        durable: True if the files of each round must survive a power failure.

    Raises:
        BadInput: If a new folder is not empty, or a folder to resume holds no run, another experiment, or only damaged
            checkpoints.
    """
    is_new = (not resume and not holds_refused_run(out)) or not out.is_dir() or not any(out.iterdir())
    folder = RunFolder.create_run_folder(out) if is_new else RunFolder.reopen_run_folder(out)
    with folder.lock_run_folder():
        if is_new:
            folder.append_event("begun")
            with _record_refusal(folder):
                yield OpenedRunFolder(folder, uuid.uuid4().hex)
            return
        folder.remove_partial_output()
        checkpoint, checkpoint_faults = CheckpointFolder(out, durable=durable).read_newest_undamaged_checkpoint()
        for name, problem in checkpoint_faults.items():
            folder.append_event("checkpoint_broken", file=name, reason=problem)
        if checkpoint is None:
            if folder.is_run_finished:
                problem = "is done, and no checkpoint is left from which it could go on for more rounds."
                raise BadInput([Fault(f"--resume {out}", problem, f"To go on, {suggest_new_run(out)}.")])
            where = f"--resume {out}: checkpoints"
            remedy = "Put a copy of checkpoints/ back, or begin the run again with a new --out."
            raise_faults(
                [Fault(f"{where}/{name}", f"{why.rstrip('.')}.", remedy) for name, why in checkpoint_faults.items()]
            )
            folder.remove_rounds_after(0)
            folder.append_event("begun_anew")
            with _record_refusal(folder):
                yield OpenedRunFolder(folder, uuid.uuid4().hex, is_reopened=True)
            return
        refuse_checkpoint_of_other_experiment(checkpoint, experiment, out)
        folder.append_event("resumed", round=checkpoint.state.round)
        with _record_refusal(folder):
            yield OpenedRunFolder(folder, checkpoint.run, checkpoint, is_reopened=True)


@contextmanager
def _record_refusal(folder: RunFolder) -> Iterator[None]:
    """Record an event with the reason if the run is refused or stops in the ``with`` block."""
    try:
        yield
    except (BadInput, RunStopped) as error:
        reason = str(error)
        last_event = folder.read_run_events()[-1]
        if last_event.get("reason") != reason:  # else the event of the stop has the reason
            folder.append_event("refused", reason=reason)
        raise


def hash_run_data_sets(
    data: DatasetSplits | None, server: DatasetSplits | None, external: ImageSet | None
) -> dict[str, tuple[str, dict[str, str]]]:
    """Return hashes of the data sets that a run reads.

    Args:
        data: The data of simulated sites; None for hospitals.
        server: The coordinator's own images; None if it has none.
        external: The external test images; None without them.

    Returns:
        Table of the experiment (``data``, ``server_data``, ``external_test``) -> hash of the data set, and hashes or
            counts of its parts (:func:`polyclinic.data.base.image_set.hash_dataset_components`). Data sets that are
            None are left out.
    """
    image_sets = {
        "data": data and data.parts,
        "server_data": server and server.parts,
        "external_test": external and (external,),
    }
    return {
        table: (hash_dataset(*parts), hash_dataset_components(*parts)) for table, parts in image_sets.items() if parts
    }


def record_data_hashes_or_refuse(opening: OpenedRunFolder, data: Mapping[str, tuple[str, dict[str, str]]]) -> None:
    """Record the hash of each data set that a run reads.

    Args:
        data: The result of :func:`hash_run_data_sets`.

    Raises:
        BadInput: If a resumed run began with other data; then nothing is recorded.
    """
    folder = opening.folder
    hashes = {table: sha256 for table, (sha256, _) in data.items()}
    recorded_hashes = dict[str, str]()
    recorded_contents = dict[str, dict[str, str]]()
    for event in folder.read_run_events():
        if event["event"] == "data_read":
            recorded_hashes |= {table: sha256 for table, sha256 in event.items() if table in DATA_TABLES}
            if "sha256" in event:  # the key of an earlier release
                recorded_hashes["data"] = event["sha256"]
            recorded_contents |= event.get("contents", {})
    remedy = "Put the data back, or begin a new run: --out NEW."
    faults = list[Fault]()
    changed = [table for table, sha256 in hashes.items() if recorded_hashes.get(table, sha256) != sha256]
    for table in changed if opening.resumed else ():
        before = recorded_contents.get(table)
        now = data[table][1]
        problem = "began with other images, labels or patients than the data set has now."
        if before and "labels by picture" in before:  # earlier releases recorded other contents, or none
            differences = list[str]()  # "205 images instead of 200", "other labels", "of hospital Ost"
            if now["images"] != before["images"]:
                differences.append(f"{now['images']} images instead of {before['images']}")
            kinds = [key for key in ("pictures", "labels", "patients") if now[key] != before[key]]
            if "pictures" not in kinds:  # the labels or patients may be assigned to other pictures
                pairs = {key: f"{key} by picture" for key in ("labels", "patients")}
                kinds = [key for key, pair in pairs.items() if key in kinds or now[pair] != before[pair]]
            differences += [f"other {join_as_english_list(kinds)}"] if kinds else []
            keys = sorted(key for key in {*now, *before} if key.startswith("hospital "))
            hospitals = [key for key in keys if now.get(key) != before.get(key)]
            differences += [f"of {list_first_and_count_rest(hospitals, 3)}"] if hospitals else []
            change = ", ".join(differences) or "other parts or hospitals"
            problem = f"has changed since the run began: it has {change} now."
        faults.append(Fault(f"--resume {folder.path}: [{table}]", problem, remedy))
    raise_faults(faults)
    if any(recorded_hashes.get(table) != sha256 for table, sha256 in hashes.items()):
        contents = {table: components for table, (_, components) in data.items()}
        folder.append_event("data_read", **hashes, contents=contents)


class RunBackend(Protocol):
    """The way in which a run reaches its sites: in a simulation on this machine, or over the network.

    Attributes:
        durable: True if the files of each round must survive a power failure.
        tell: Function that prints one line for a person.
    """

    durable: bool
    tell: Callable[[str], None]

    def load_and_check_data(self, *, resume: bool) -> None:
        """Load the data, and check data and experiment before files are written or requests are sent.

        Raises:
            BadInput: If the data or the experiment have faults; all of them are reported.
        """

    def lock_out_other_runs(self) -> AbstractContextManager[object]:
        """Return a context in which no other run can start, if this backend allows only one run at a time."""

    def run_all_rounds(self, opening: OpenedRunFolder) -> dict[str, Any]:
        """Run all rounds and the final test; return the summary."""


def execute_run(
    backend: RunBackend,
    file: ExperimentFile,
    out: Path,
    *,
    track: TrackingService | None = None,
    resume: bool = False,
    pages: bool = True,
) -> dict[str, Any]:
    """Run an experiment and write its folder ``out``; return the summary.

    Args:
        backend: Reaches the sites, in a simulation or over the network.
        track: Tracking service that receives the metrics in addition to the run folder; None for no service.
        resume: Continue the run in ``out`` from its last checkpoint. For a finished run, return its summary and write
            missing pages.
        pages: True to write report and model card. Drawing the figures may take longer than a small run.
    """
    summary = read_finished_run_summary(out, file.experiment, resume=resume)
    if summary is not None:
        if pages and not (out / "report.html").is_file():  # the run was stopped after it had written its summary
            write_run_pages(out)
        return summary
    store = open_mlflow_store(track)
    backend.load_and_check_data(resume=resume)
    with (
        backend.lock_out_other_runs(),
        open_run_folder(out, file.experiment, resume=resume, durable=backend.durable) as opening,
    ):
        with send_metrics_to_trackers(opening.folder, file.experiment, store, backend.tell):
            summary = backend.run_all_rounds(opening)
        if pages:
            write_run_pages(out)
    return summary


def write_run_pages(out: Path) -> None:
    """Write the report and the model card of a finished run."""
    # Imported here, so that a run does not wait for the import at its start.
    from polyclinic.server.reporting.model_card import write_model_card
    from polyclinic.server.reporting.run_report import write_run_report

    write_run_report(out)
    write_model_card(out)
