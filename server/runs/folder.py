"""Write the run folder: ``summary.json``, ``rounds.jsonl``, ``events.jsonl``; and check folders before use."""

import contextlib
import datetime as dt
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.security.audit import list_audit_files
from polyclinic.common.system.files import (
    add_file_name_to_errors,
    find_output_folder_faults,
    is_file,
    lock_file,
    make_missing_input_fault,
    make_private_folder,
    open_own_file,
    remove_temporary_files,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.server.runs.live_status import SIGNED_OFF
from polyclinic.server.runs.reader import parse_round_lines, read_rounds
from polyclinic.server.runs.schema import RoundFileLine, RunSummary
from polyclinic.server.runs.tracking import MetricsTracker, extract_final_test_scalars, extract_round_scalars

RECEIPT_FILE = "receipt.json"
SUMMARY_FILE = "summary.json"
UPDATES_FOLDER = "updates"
DEMO_MARK_FILE = "demo.txt"
"""File that marks the folder of a demo, which the next demo may remove."""


def find_new_run_folder_faults(path: Path) -> list[Fault]:
    """Return a fault if no new run can be written to this folder."""
    if holds_refused_run(path):
        return []
    has_run = os.path.isfile(path / "events.jsonl")  # unlike Path.is_file, no error for an unreadable folder
    go_on = " To go on with the run in it: --resume." if has_run else ""
    return find_output_folder_faults(path, f"Name another folder, or remove this one.{go_on}")


def holds_refused_run(path: Path) -> bool:
    """Return True if a folder holds a run that was refused before round 1, so that the same command may try again."""
    if not (path / "events.jsonl").is_file() or any(
        (path / name).exists() for name in (SUMMARY_FILE, "rounds.jsonl", "checkpoints", "model.safetensors")
    ):
        return False
    lines = (path / "events.jsonl").read_bytes().splitlines()
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return bool(json.loads(lines[-1])["event"] == "refused")
    return False


def find_resumed_run_folder_faults(path: Path) -> list[Fault]:
    """Return a fault if no run in this folder can be resumed or started with ``--resume``."""
    if not path.is_dir():
        return find_new_run_folder_faults(path)
    try:
        is_run_folder = any((path / name).is_file() for name in ("events.jsonl", SUMMARY_FILE))
        holds_other_files = any(path.iterdir()) and not is_run_folder
    except OSError as error:
        return [Fault(f"--resume {path}", f"cannot be looked into: {error.strerror}.", "Name another folder.")]
    return [_make_no_run_fault(path)] if holds_other_files else []


def _make_no_run_fault(path: Path) -> Fault:
    return Fault(f"--resume {path}", "holds something, but no run.", "Name the folder of a run, or a new one.")


def find_demo_folder_faults(path: Path) -> list[Fault]:
    """Return a fault if no demo can be written to this folder: only an earlier demo may be replaced."""
    try:
        is_empty = path.is_dir() and not any(path.iterdir())
        is_usable = not path.exists() or (path / DEMO_MARK_FILE).is_file() or is_empty
    except OSError as error:
        return [Fault(f"--out {path}", f"cannot be looked into: {error.strerror}.", "Name another folder.")]
    return [] if is_usable else [Fault(f"--out {path}", "holds something that no demo wrote.", "Name another folder.")]


def find_receipt_path_faults(path: Path) -> list[Fault]:
    """Return a fault if a path is neither a receipt nor a run folder with an audit.

    The verification itself reports a missing or damaged receipt beside an audit.
    """
    if path.is_dir():
        if (path / RECEIPT_FILE).is_file() or list_audit_files(path):
            return []
        remedy = f"Name the {RECEIPT_FILE} of a run, or the run's folder."
        return [Fault(str(path), "holds no run that is done.", remedy)]
    if not is_file(path):
        return [make_missing_input_fault(path)]
    try:
        content = path.read_bytes().lstrip()
    except OSError as error:
        return [Fault(str(path), f"cannot be read: {error.strerror}.")]
    has_audit = path.name == RECEIPT_FILE and list_audit_files(path.parent)
    is_json_with_audit = content.startswith(b"{") and b'"audit"' in content
    if has_audit or is_json_with_audit:
        return []
    return [Fault(str(path), "is no receipt of a run.", f"Name the {RECEIPT_FILE} of a run, or the run's folder.")]


class RunFolder:
    """Writes the files of one run; it never overwrites files of another run.

    Attributes:
        trackers: Receivers of the metrics of every round and of the final test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trackers: list[MetricsTracker] = []
        self._stopped: dict[str, str] = {}  # site that has signed off -> reason of its last absence event
        # Lines for rounds.jsonl that wait until the results of a finished run may be replaced; None if none wait.
        self._unwritten_rounds: list[bytes] | None = None

    @classmethod
    def create_run_folder(cls, path: Path) -> "RunFolder":
        """Create the folder of a new run, readable only by this account.

        A run's files may be confidential: events, summary and report name files that could not be read, and folders of
        sites hold their models. An existing folder keeps its mode, because a person chose it.

        Raises:
            BadInput: If the folder is not empty or cannot be created.
        """
        raise_faults(find_new_run_folder_faults(path))
        try:
            if not path.exists():
                make_private_folder(path)
        except OSError as error:
            raise BadInput([Fault(f"--out {path}", f"cannot be made: {error.strerror}.")]) from None
        return cls(path)

    @classmethod
    def reopen_run_folder(cls, path: Path) -> "RunFolder":
        """Open the folder of an interrupted run, to resume the run.

        Raises:
            BadInput: If it is not a run folder.
        """
        if not (path / "events.jsonl").is_file():
            raise BadInput([_make_no_run_fault(path)])
        return cls(path)

    def remove_partial_output(self) -> None:
        """Remove incomplete files of a killed run, and an incomplete last event. The folder must be locked."""
        remove_temporary_files(self.path, below=True)
        events = self.path / "events.jsonl"
        if (content := events.read_bytes()) and not content.endswith(b"\n"):
            write_atomically(events, content[: content.rfind(b"\n") + 1])

    @property
    def is_run_finished(self) -> bool:
        """True if the run is finished: the folder has a summary."""
        return (self.path / SUMMARY_FILE).is_file()

    def replace_finished_results(self) -> None:
        """Remove summary and pages of a finished run that has completed another round, and write its new rounds.

        Before that, all files of the finished run are kept, because its continuation may be refused or killed. Do
        nothing for other runs.
        """
        if self._unwritten_rounds is None:
            return
        for name in (SUMMARY_FILE, "report.html", "MODEL_CARD.md"):
            (self.path / name).unlink(missing_ok=True)
        write_atomically(self.path / "rounds.jsonl", b"".join(self._unwritten_rounds))
        self._unwritten_rounds = None

    @contextlib.contextmanager
    def lock_run_folder(self) -> Iterator[None]:
        """Lock the folder in the ``with`` block, so that only one process writes to it.

        Raises:
            BadInput: If another process holds the lock.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        problem = "another run is at work in this folder."
        remedy = "Wait for its end, or name another folder."
        try:
            lock_file(descriptor, Fault(f"--out {self.path}", problem, remedy))
            yield
        finally:
            os.close(descriptor)

    def remove_rounds_after(self, last: int) -> None:
        """Remove from ``rounds.jsonl`` the lines of rounds after ``last``, and an incomplete last line.

        The file of a finished run is not changed before :meth:`replace_finished_results`.

        Raises:
            BadInput: If a line is not a round's line.
        """
        path = self.path / "rounds.jsonl"
        lines = self._unwritten_rounds
        if lines is None:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        complete_lines = [line for line in lines if line.endswith(b"\n")]
        try:
            remaining = [line for line in complete_lines if json.loads(line)["round"] <= last]
        except (ValueError, LookupError, TypeError):
            problem = "was edited or damaged: a line is not that of a round."
            raise BadInput([Fault(str(path), problem, "Put a copy of it back.")]) from None
        if self.is_run_finished:
            self._unwritten_rounds = remaining
        elif remaining != lines:
            write_atomically(path, b"".join(remaining))

    def append_round_line(self, line: RoundFileLine) -> None:
        """Append the line of one round to ``rounds.jsonl``, and send its metrics to the trackers.

        If a finished run is continued, the line stays in memory until :meth:`replace_finished_results`.
        """
        if self._unwritten_rounds is None:
            self._append_json_line("rounds.jsonl", line.to_json_object())
        else:
            self._unwritten_rounds.append((format_as_json_text(line.to_json_object()) + "\n").encode())
        self._send_scalars_to_trackers(extract_round_scalars(line), line.round)

    def read_round_lines(self) -> tuple[RoundFileLine, ...]:
        """Return the lines of all rounds so far, also of rounds that are not written to the file yet."""
        if self._unwritten_rounds is None:
            return read_rounds(self.path)
        return parse_round_lines(self.path / "rounds.jsonl", b"".join(self._unwritten_rounds).decode())

    def append_event(self, name: str, **fields: Any) -> None:
        """Append an event to ``events.jsonl``: time, name, and values as fields."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        self._append_json_line("events.jsonl", {"time": now, "event": name, **fields})

    def read_run_events(self) -> list[dict[str, Any]]:
        """Return all events so far, oldest first."""
        return [json.loads(line) for line in (self.path / "events.jsonl").read_bytes().splitlines()]

    def append_absence_events(self, when: int | str, absent: Mapping[str, str], present: Collection[str] = ()) -> None:
        """Append an event for each site that missed a round or another exchange.

        A site that has signed off gets only one event, until it takes part or signs off again.

        Args:
            when: Number of the round, or name of the exchange.
            absent: Site -> reason for its absence.
            present: Sites that took part.
        """
        for site in present:
            self._stopped.pop(site, None)
        for site, reason in absent.items():
            if self._stopped.get(site) == reason:
                continue
            self.append_event("absent", round=when, site=site, reason=reason)
            if reason.startswith(SIGNED_OFF):
                self._stopped[site] = reason

    def write_summary(self, summary: RunSummary) -> None:
        """Write ``summary.json`` of a run that ended, and send the test figures to the trackers."""
        self.replace_finished_results()  # no further round was needed
        text = format_as_json_text(summary.to_json_object(), indent=1) + "\n"
        write_atomically(self.path / SUMMARY_FILE, text.encode())
        self._send_scalars_to_trackers(extract_final_test_scalars(summary.test), summary.rounds)

    def _send_scalars_to_trackers(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.store_scalars(values, step)

    def _append_json_line(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path / name
        with add_file_name_to_errors(path), open_own_file(path, "a") as file:
            file.write(format_as_json_text(line) + "\n")
