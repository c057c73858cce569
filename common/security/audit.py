"""The audit logs of coordinator and sites: hash chains, in which every line contains the hash of the line before.

Entries are appended to ``audit.jsonl``. A file that is too large is renamed to ``audit-000001.jsonl`` and so on, and
the chain continues in the next file. ``audit.head`` contains the number of entries and the hash of the last entry, to
detect that entries were cut off at the end. :func:`check_audit_log` checks that no entry was changed, removed or
inserted.

Each entry has ``n`` (from 1), ``time``, and ``before``: the SHA-256 of the line before, without its newline. An entry
is on the disk before :meth:`AuditLog.append` returns. A process that is killed while it writes leaves a torn
(incomplete) line. The next entry records that line (``torn``: size and SHA-256), so that it does not look changed. On a
full disk the process replaces its incomplete line by :data:`FULL_DISK_MARK`, so that the two causes can be
distinguished.

Anyone who can write to the folder can also rewrite the whole chain and ``audit.head``. Only a copy elsewhere reveals
that: the coordinator's receipt contains the hash of every record that it received.
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

from polyclinic.common.errors import Fault
from polyclinic.common.system.files import (
    flush_folder,
    is_disk_full,
    open_own_descriptor,
    open_own_file,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_as_json_text

AUDIT_FILE = "audit.jsonl"
AUDIT_HEAD_FILE = "audit.head"
MAX_AUDIT_FILE_BYTES = 16 * 2**20
_HEAD_BYTES = 128
FULL_DISK_MARK = b"(no room on the disk)"
"""Line in place of an entry that did not fit on the disk."""
FIRST_ENTRY_PREDECESSOR = ""
"""Value of ``before`` in the first entry, which has no line before it."""

AuditEntry = Mapping[str, Any]


@dataclass(frozen=True)
class TornAuditLine:
    """The incomplete line that a killed process or a full disk left after the last entry.

    Attributes:
        bytes: Size of the line.
        sha256: Hash of the line.
        cause: ``a kill``, ``a full disk``, or both.
    """

    bytes: int
    sha256: str
    cause: str = "a kill"


class AuditLog:
    """Appends entries to the audit log in a folder. Several processes may write in turn, but not at the same time.

    Attributes:
        folder: The folder.
        durable: True to flush each entry to disk; False in simulations, which a power failure ends in any case.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder
        self.durable = durable
        self._written: tuple[tuple[int, ...], _AuditChainEnd] | None = None

    def append(self, **facts: Any) -> TornAuditLine | None:
        """Append an entry with the fields ``facts``; return the torn line before it, or None if there is none.

        Raises:
            OSError: If the disk is full; the log then has :data:`FULL_DISK_MARK` in place of the entry.
        """
        end = self._find_audit_chain_end()
        entry: dict[str, Any] = {
            "n": end.entries + 1,
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            "before": end.sha256,
        }
        if end.torn is not None:
            entry["torn"] = {"bytes": end.torn.bytes, "sha256": end.torn.sha256}
        line = format_as_json_text({**entry, **facts}).encode()
        written = self._write_audit_line(line, b"\n" if end.cut else b"")
        now = _AuditChainEnd(end.entries + 1, hash_audit_line(line))
        head = json.dumps({"entries": now.entries, "sha256": now.sha256}).encode().ljust(_HEAD_BYTES)
        # Overwriting is cheaper than an atomic replacement, which must also flush the folder; the content is shorter
        # than a disk sector, so a crash cannot leave half of it.
        overwritten = False
        with suppress(FileNotFoundError), open_own_file(self.folder / AUDIT_HEAD_FILE, "rb+", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == len(head):
                overwritten = file.write(head) == len(head)
                if self.durable:
                    os.fdatasync(file.fileno())
        if not overwritten:
            write_atomically(self.folder / AUDIT_HEAD_FILE, head, durable=self.durable)
        self._written = written, now
        return end.torn

    def read_file_state(self) -> tuple[int, ...]:
        """Return identity, size and time of the current file, which change with each entry; empty without a file."""
        try:
            return _read_file_state((self.folder / AUDIT_FILE).stat())
        except FileNotFoundError:
            return ()

    def read_entries(self) -> Iterator[AuditEntry]:
        """Yield all readable entries, oldest first, without a check of the chain."""
        for path in list_audit_files(self.folder):
            for line in path.read_bytes().split(b"\n"):
                if (entry := parse_audit_entry(line)) is not None:
                    yield entry

    def read_last_entry(self) -> AuditEntry | None:
        """Return the last readable entry, without a check of the chain; None if there is none."""
        for path in reversed(list_audit_files(self.folder)):
            last, _ = _read_last_audit_entry(path)
            if last is not None:
                return parse_audit_entry(last)
        return None

    def _write_audit_line(self, line: bytes, first: bytes) -> tuple[int, ...]:
        path = self.folder / AUDIT_FILE
        flags = os.O_WRONLY | os.O_APPEND
        try:
            descriptor = open_own_descriptor(path, flags)
            new = False
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_own_descriptor(path, flags | os.O_CREAT, 0o600)
            new = True
        try:
            self._write_whole(path, descriptor, first, line + b"\n")
            if self.durable:
                os.fdatasync(descriptor)
            state = _read_file_state(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        if new and self.durable:
            flush_folder(self.folder)
        return state

    def _write_whole(self, path: Path, descriptor: int, first: bytes, line: bytes) -> None:
        """Write a line at the end of the file; on a full disk, replace its incomplete line by :data:`FULL_DISK_MARK`.

        Args:
            path: The file.
            descriptor: Descriptor of the file, open for appending.
            first: A newline if the file lacks one at its end; else empty.
            line: The line, with its newline.
        """
        start = os.fstat(descriptor).st_size + len(first)
        data = first + line
        try:
            while data:  # the system may write only a part at a time
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            if is_disk_full(error):
                with suppress(OSError):  # without the mark, the line looks torn by a kill
                    _mark_full_disk(path, start)
            raise

    def _find_audit_chain_end(self) -> "_AuditChainEnd":
        """Return the end of the hash chain; first rename the current file if it is too large."""
        active = self.folder / AUDIT_FILE
        debris = b""
        cut = False
        with suppress(FileNotFoundError):
            status = active.stat()
            is_full = status.st_size >= MAX_AUDIT_FILE_BYTES
            if self._written is not None and self._written[0] == _read_file_state(status) and not is_full:
                return self._written[1]  # the file is unchanged since this object wrote it
            if is_full:
                active.rename(self.folder / f"audit-{len(list_audit_files(self.folder)):06d}.jsonl")
        for path in reversed(list_audit_files(self.folder)):
            last, behind = _read_last_audit_entry(path)
            if path == active and path.stat().st_size > 0:
                with path.open("rb") as file:
                    file.seek(-1, os.SEEK_END)
                    cut = file.read() != b"\n"
            debris = behind + debris
            if last is not None:
                return _AuditChainEnd(
                    int(json.loads(last)["n"]), hash_audit_line(last), describe_torn_audit_line(debris), cut
                )
        return _AuditChainEnd(0, FIRST_ENTRY_PREDECESSOR, describe_torn_audit_line(debris), cut)


def _mark_full_disk(path: Path, start: int) -> None:
    """Replace the incomplete line that starts at byte ``start`` by a mark, which needs no more space on the disk."""
    descriptor = open_own_descriptor(path, os.O_WRONLY)  # O_APPEND would write the mark after the line
    try:
        room = os.fstat(descriptor).st_size - start
        if room >= len(FULL_DISK_MARK):
            os.pwrite(descriptor, FULL_DISK_MARK, start)
            os.ftruncate(descriptor, start + len(FULL_DISK_MARK))
        elif room > 0:
            os.ftruncate(descriptor, start)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _AuditChainEnd:
    """The end of the hash chain.

    Attributes:
        entries: Number of the last entry.
        sha256: Hash of the last entry.
        torn: The torn line after the last entry; None if there is none.
        cut: True if the file lacks a final newline.
    """

    entries: int
    sha256: str
    torn: TornAuditLine | None = None
    cut: bool = False


def _read_file_state(status: os.stat_result) -> tuple[int, ...]:
    """Return device, inode, size and modification time of a file, to detect that another process wrote to it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_TAIL_BYTES = 2**18
"""Number of bytes at the end of a file in which the last entry is first searched; an entry has a few thousand bytes."""


def _read_last_audit_entry(path: Path) -> tuple[bytes | None, bytes]:
    """Return a file's last complete entry as a line, and the bytes after it; None and all bytes if there is no entry.

    It reads a growing part at the end of the file until this part contains an entry. An entry can have any length,
    because it may quote text from other machines.
    """
    size = path.stat().st_size
    step = _TAIL_BYTES
    with path.open("rb") as file:
        while True:
            start = max(size - step, 0)
            file.seek(start)
            data = file.read()
            last, behind = split_off_last_audit_entry(data.partition(b"\n")[2] if start else data)
            if last is not None or not start:
                return last, behind
            step *= 4


def split_off_last_audit_entry(data: bytes) -> tuple[bytes | None, bytes]:
    """Return the last complete entry as a line, and the bytes after it; ``(None, data)`` if there is no entry."""
    lines = data.split(b"\n")
    for place in range(len(lines) - 1, -1, -1):
        if parse_audit_entry(lines[place]) is not None:
            return lines[place], b"\n".join(lines[place + 1 :])
    return None, data


def describe_torn_audit_line(debris: bytes) -> TornAuditLine | None:
    """Return size and hash of the bytes after the last entry; None if there are no bytes."""
    debris = debris.removesuffix(b"\n")
    if not debris:
        return None
    is_marked = {line == FULL_DISK_MARK for line in debris.split(b"\n")}
    causes = {True: "a full disk", False: "a kill"}
    cause = " and ".join(causes[marked] for marked in sorted(is_marked))
    return TornAuditLine(len(debris), hash_audit_line(debris), cause)


def list_audit_files(folder: Path) -> list[Path]:
    """Return the existing files of the audit log in a folder, oldest first."""
    active = folder / AUDIT_FILE
    return [*sorted(folder.glob("audit-*.jsonl")), *([active] if active.exists() else [])]


def parse_audit_entry(line: bytes) -> AuditEntry | None:
    """Parse a line of an audit log; return None if the line is not a valid entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("n")) is int and "before" in entry else None


def hash_audit_line(line: bytes) -> str:
    """Return the SHA-256 of a line, which must not include the newline."""
    return hashlib.sha256(line).hexdigest()


@dataclass
class AuditCheckResult:
    """The result of :func:`check_audit_log`.

    Attributes:
        entries, sha256: Number and hash of the last entry.
        before: The field ``before`` of the last entry: the hash of the entry before it.
        faults: Entries that were changed, removed, inserted or reordered.
        notes: Harmless irregularities, such as torn lines.
    """

    entries: int = 0
    sha256: str = FIRST_ENTRY_PREDECESSOR
    before: str = FIRST_ENTRY_PREDECESSOR
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_audit_log(folder: Path) -> AuditCheckResult:
    """Check the hash chain of an audit log from its first entry to ``audit.head``."""
    findings = AuditCheckResult()
    debris = b""
    where_torn = ""
    last = ""
    lines = (
        (f"{path.name} line {number}", line)
        for path in list_audit_files(folder)
        if (content := path.read_bytes().removesuffix(b"\n"))
        for number, line in enumerate(content.split(b"\n"), 1)
    )
    for where, line in lines:
        if not line:
            findings.faults.append(Fault(where, "is empty: inserted."))
            continue
        entry = parse_audit_entry(line)
        if entry is None:
            debris = debris + line + b"\n"
            where_torn = where_torn or where
            continue
        if debris or "torn" in entry:
            _check_torn_line(findings, entry, describe_torn_audit_line(debris), where_torn or where)
        if (entry["n"], entry["before"]) != (findings.entries + 1, findings.sha256):
            _add_chain_fault(findings, entry, where, last)
        findings.entries = entry["n"]
        findings.sha256 = hash_audit_line(line)
        findings.before = str(entry["before"])
        debris = b""
        where_torn = ""
        last = where
    if (torn := describe_torn_audit_line(debris)) is not None:
        findings.notes.append(f"{where_torn} is torn, as by {torn.cause}; the next entry will say so.")
    _check_audit_head(findings, folder, last)
    return findings


def _check_torn_line(
    findings: AuditCheckResult, entry: AuditEntry, torn_line: TornAuditLine | None, where: str
) -> None:
    stated = entry.get("torn")
    actual = None if torn_line is None else {"bytes": torn_line.bytes, "sha256": torn_line.sha256}
    if stated == actual:
        if torn_line is not None:
            findings.notes.append(f"{where} was torn by {torn_line.cause}; entry {entry['n']} says so.")
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


def _add_chain_fault(findings: AuditCheckResult, entry: AuditEntry, where: str, last: str) -> None:
    """Add a fault for an entry that does not match the preceding entry in its number or its field ``before``.

    Args:
        findings: The result so far, to which the fault is added.
        entry: The entry; its field ``before`` states the hash of the preceding entry.
        where: File and line of the entry.
        last: File and line of the preceding entry; empty for the first entry.
    """
    number = entry["n"]
    expected = findings.entries + 1
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


def _check_audit_head(findings: AuditCheckResult, folder: Path, last: str) -> None:
    try:
        head = json.loads((folder / AUDIT_HEAD_FILE).read_bytes())
        entries = int(head["entries"])
        sha256 = str(head["sha256"])
    except FileNotFoundError:
        if findings.entries:
            problem = "is missing: entries that were cut off at the end could not be told."
            findings.faults.append(Fault(AUDIT_HEAD_FILE, problem))
        return
    except (ValueError, TypeError, KeyError):
        findings.faults.append(Fault(AUDIT_HEAD_FILE, "cannot be read: changed."))
        return
    if entries > findings.entries:
        gone = entries - findings.entries
        counted = f"ends with entry {findings.entries}; {AUDIT_HEAD_FILE} counts {entries}"
        problem = f"{counted}: the last {gone} were removed or spoiled."
        findings.faults.append(Fault(last or AUDIT_FILE, problem))
    elif (entries, sha256) == (findings.entries, findings.sha256):
        return
    elif entries == findings.entries:
        findings.faults.append(Fault(last, f"(entry {entries}) is not what {AUDIT_HEAD_FILE} says it was: changed."))
    elif entries == findings.entries - 1 and findings.before == sha256:
        findings.notes.append(
            f"{AUDIT_HEAD_FILE} is one entry behind: a kill or a full disk came between the two files."
        )
    else:
        counted = f"counts {entries} entries, there are {findings.entries}"
        problem = f"{counted}: appended by other hands, or {AUDIT_HEAD_FILE} was changed."
        findings.faults.append(Fault(AUDIT_HEAD_FILE, problem))
