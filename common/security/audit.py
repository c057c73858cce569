"""An audit log: a file that only grows, in which every line holds the hash of the line before it.

Entries are appended to ``audit.jsonl``; files that grew too large stay beside it as ``audit-000001.jsonl`` and so on,
and the chain goes on from file to file. ``audit.head`` holds the number of entries and the hash of the last: a cut at
the end shows by it.

Each entry has ``n`` (from 1), ``time``, and ``before``: the SHA-256 of the line before, without its newline. An entry
is on the disk before :meth:`AuditLog.append` returns. A process that was killed while it wrote leaves a torn line; the
next entry names it (``torn``: its bytes and their SHA-256), so that it is not taken for a changed one.

Anyone who may write to the folder can write the whole chain anew, head included. Only a copy elsewhere shows that: the
coordinator's receipt names the hash of every record that it received.

:func:`check_audit` checks that an audit is what was written: every entry there, in order, unchanged.
"""

import datetime as dt
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import Fault
from common.system.files import flush_folder, write_atomically
from common.system.plain_text import json_text

FILE, HEAD = "audit.jsonl", "audit.head"
ROTATED_AT_BYTES = 16 * 2**20
_HEAD_BYTES = 128
BEGINNING = ""
"""Stands in the first entry for the hash of the line before."""

AuditEntry = Mapping[str, Any]


@dataclass(frozen=True)
class TornLine:
    """The bytes that a killed process left after the last whole entry."""

    bytes: int
    sha256: str


class AuditLog:
    """The audit log of one folder. Several processes may write in turn, not at once.

    Attributes:
        durable: Flush to disk; off in simulation, where a power failure ends everything anyway.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self._written: tuple[tuple[int, ...], _ChainEnd] | None = None

    def append(self, **facts: Any) -> TornLine | None:
        """Write one entry; return the torn line that a killed process had left before it, if any."""
        end = self._find_end()
        entry: dict[str, Any] = {
            "n": end.entries + 1,
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "before": end.sha256,
        }
        if end.torn is not None:
            entry["torn"] = {"bytes": end.torn.bytes, "sha256": end.torn.sha256}
        line = json_text({**entry, **facts}).encode()
        written = self._write_line(line, b"\n" if end.cut else b"")
        now = _ChainEnd(end.entries + 1, line_sha256(line))
        head = json.dumps({"entries": now.entries, "sha256": now.sha256}).encode().ljust(_HEAD_BYTES)
        if not _overwrite(self.folder / HEAD, head, durable=self.durable):
            write_atomically(self.folder / HEAD, head, durable=self.durable)
        self._written = written, now
        return end.torn

    def entries(self) -> Iterator[AuditEntry]:
        """Yield the entries that can be read, oldest first, unchecked."""
        for path in audit_files(self.folder):
            for line in path.read_bytes().split(b"\n"):
                if (entry := parse_entry(line)) is not None:
                    yield entry

    def _write_line(self, line: bytes, first: bytes) -> tuple[int, ...]:
        path, flags = self.folder / FILE, os.O_WRONLY | os.O_APPEND
        try:
            descriptor, new = os.open(path, flags), False
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, new = os.open(path, flags | os.O_CREAT, 0o600), True
        try:
            data = first + line + b"\n"
            while data:  # the system may take only a part
                data = data[os.write(descriptor, data) :]
            if self.durable:
                os.fdatasync(descriptor)
            state = _file_state(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if new and self.durable:
            flush_folder(self.folder)
        return state

    def _find_end(self) -> "_ChainEnd":
        """Return the end of the chain; a full file is renamed first."""
        active, debris, cut = self.folder / FILE, b"", False
        with suppress(FileNotFoundError):
            status = active.stat()
            is_full = status.st_size >= ROTATED_AT_BYTES
            if self._written is not None and self._written[0] == _file_state(status) and not is_full:
                return self._written[1]  # as this object left it: nothing to read
            if is_full:
                active.rename(self.folder / f"audit-{len(audit_files(self.folder)):06d}.jsonl")
        for path in reversed(audit_files(self.folder)):
            last, behind = _last_entry_of(path)
            if path == active and path.stat().st_size > 0:
                with path.open("rb") as file:
                    file.seek(-1, os.SEEK_END)
                    cut = file.read() != b"\n"
            debris = behind + debris
            if last is not None:
                return _ChainEnd(int(json.loads(last)["n"]), line_sha256(last), describe_torn_line(debris), cut)
        return _ChainEnd(0, BEGINNING, describe_torn_line(debris), cut)


@dataclass(frozen=True)
class _ChainEnd:
    """The last whole entry, and the bytes after it; ``cut`` where the file does not end with a newline."""

    entries: int
    sha256: str
    torn: TornLine | None = None
    cut: bool = False


def _file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return a file's identity, size and time, which change when another process writes to it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_TAIL = 2**18
"""Number of bytes in which the last entry is first looked for; an entry has a few thousand."""


def _last_entry_of(path: Path) -> tuple[bytes | None, bytes]:
    """Return :func:`last_entry` of a file, which is read from its end in growing steps until an entry is in them.

    So the chain continues from a line of any length, for which an outsider's words may be the cause.
    """
    size, step = path.stat().st_size, _TAIL
    with path.open("rb") as file:
        while True:
            start = max(size - step, 0)
            file.seek(start)
            data = file.read()
            last, behind = last_entry(data.partition(b"\n")[2] if start else data)
            if last is not None or not start:
                return last, behind
            step *= 4


def last_entry(data: bytes) -> tuple[bytes | None, bytes]:
    """Return the last line that is an entry, and the bytes after it."""
    lines = data.split(b"\n")
    for place in range(len(lines) - 1, -1, -1):
        if parse_entry(lines[place]) is not None:
            return lines[place], b"\n".join(lines[place + 1 :])
    return None, data


def describe_torn_line(debris: bytes) -> TornLine | None:
    """Describe the bytes after the last entry by their number and hash; return None where there are none."""
    debris = debris.removesuffix(b"\n")
    return TornLine(len(debris), line_sha256(debris)) if debris else None


def audit_files(folder: Path) -> list[Path]:
    """Return the files of an audit that are there, oldest first."""
    active = folder / FILE
    return [*sorted(folder.glob("audit-*.jsonl")), *([active] if active.exists() else [])]


def parse_entry(line: bytes) -> AuditEntry | None:
    """Parse a line of an audit log; return None if it is no entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("n")) is int and "before" in entry else None


def line_sha256(line: bytes) -> str:
    """Hash a line without its newline."""
    return hashlib.sha256(line).hexdigest()


def _overwrite(path: Path, content: bytes, *, durable: bool) -> bool:
    """Overwrite a file of the same length in place; return False where there is none.

    The content is shorter than a disk's sector, so neither a kill nor a power failure leaves half of it. A new file
    would need a flush of its name, too.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_size != len(content):
            return False
        written = os.pwrite(descriptor, content, 0) == len(content)
        if durable:
            os.fdatasync(descriptor)
        return written
    finally:
        os.close(descriptor)


@dataclass
class AuditCheckResult:
    """The result of :func:`check_audit`.

    Attributes:
        entries, sha256: Number and hash of the last entry.
        before: The hash of the line before, as the last entry states it.
        faults: Entries that were changed, removed, inserted or put out of order.
        notes: Harmless irregularities: lines torn by a kill.
    """

    entries: int = 0
    sha256: str = BEGINNING
    before: str = BEGINNING
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_audit(folder: Path) -> AuditCheckResult:
    """Check an audit log from its first entry to its head."""
    findings, debris, where_torn, last = AuditCheckResult(), b"", "", ""
    lines = (
        (f"{path.name} line {number}", line)
        for path in audit_files(folder)
        if (content := path.read_bytes().removesuffix(b"\n"))
        for number, line in enumerate(content.split(b"\n"), 1)
    )
    for where, line in lines:
        if not line:
            findings.faults.append(Fault(where, "is empty: inserted."))
            continue
        entry = parse_entry(line)
        if entry is None:
            debris, where_torn = debris + line + b"\n", where_torn or where
            continue
        if debris or "torn" in entry:
            _check_torn(findings, entry, describe_torn_line(debris), where_torn or where)
        if (entry["n"], entry["before"]) != (findings.entries + 1, findings.sha256):
            _note_broken_link(findings, entry, where, last)
        findings.entries, findings.sha256, findings.before = entry["n"], line_sha256(line), str(entry["before"])
        debris, where_torn, last = b"", "", where
    if describe_torn_line(debris) is not None:
        findings.notes.append(f"{where_torn} is torn, as by a kill; the next entry will say so.")
    _check_head(findings, folder, last)
    return findings


def _check_torn(findings: AuditCheckResult, entry: AuditEntry, there: TornLine | None, where: str) -> None:
    stated = entry.get("torn")
    actual = None if there is None else {"bytes": there.bytes, "sha256": there.sha256}
    if stated == actual:
        if there is not None:
            findings.notes.append(f"{where} was torn by a kill; entry {entry['n']} says so.")
        return
    if stated is None:
        problem = f"is no entry, and entry {entry['n']} after it does not say that it was torn: changed or inserted."
    elif actual is None:
        problem = (
            f"says that a torn line stands before it, and there is none: it was removed, or entry {entry['n']} changed."
        )
    else:
        problem = f"is not the torn line that entry {entry['n']} speaks of: changed."
    findings.faults.append(Fault(where, problem))


def _note_broken_link(findings: AuditCheckResult, entry: AuditEntry, where: str, last: str) -> None:
    """Note the fault of an entry that does not follow the one before it."""
    number, expected = entry["n"], findings.entries + 1
    if number > expected:
        gone = f"entry {expected} is" if number == expected + 1 else f"entries {expected} to {number - 1} are"
        findings.faults.append(Fault(where, f"is entry {number}, but {gone} missing before it: removed."))
    elif number < expected:
        problem = f"is entry {number}, but stands after entry {findings.entries}: inserted, repeated or out of order."
        findings.faults.append(Fault(where, problem))
    elif last:
        findings.faults.append(Fault(last, f"(entry {number - 1}) is not what entry {number} says it was: changed."))
    else:
        findings.faults.append(
            Fault(where, "is called the first entry, but speaks of one before it: changed or removed.")
        )


def _check_head(findings: AuditCheckResult, folder: Path, last: str) -> None:
    try:
        head = json.loads((folder / HEAD).read_bytes())
        entries, sha256 = int(head["entries"]), str(head["sha256"])
    except FileNotFoundError:
        if findings.entries:
            problem = "is missing: entries that were cut off at the end could not be told."
            findings.faults.append(Fault(HEAD, problem))
        return
    except (ValueError, TypeError, KeyError):
        findings.faults.append(Fault(HEAD, "cannot be read: changed."))
        return
    if entries > findings.entries:
        gone = entries - findings.entries
        problem = (
            f"ends with entry {findings.entries}; {HEAD} counts {entries}: the last {gone} were removed or spoiled."
        )
        findings.faults.append(Fault(last or FILE, problem))
    elif (entries, sha256) == (findings.entries, findings.sha256):
        return
    elif entries == findings.entries:
        findings.faults.append(Fault(last, f"(entry {entries}) is not what {HEAD} says it was: changed."))
    elif entries == findings.entries - 1 and findings.before == sha256:
        findings.notes.append(f"{HEAD} is one entry behind: the process was killed between the two files.")
    else:
        problem = (
            f"counts {entries} entries, there are {findings.entries}: appended by other hands, or {HEAD} was changed."
        )
        findings.faults.append(Fault(HEAD, problem))
