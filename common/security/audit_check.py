"""Whether an audit is what was written: every entry there, in order, unchanged; and where it is not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import Fault
from common.security.audit import BEGINNING, FILE, HEAD, Entry, Torn, files, line_sha256, parsed, torn_of


@dataclass
class Findings:
    """What was found.

    Attributes:
        entries, sha256: The last entry's number and hash.
        faults: What was changed, removed, inserted or put out of order, and where.
        notes: What is unusual and explained: lines torn by a kill.
    """

    entries: int = 0
    sha256: str = BEGINNING
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(folder: Path) -> Findings:
    """Go through an audit from its first entry to its head."""
    found, debris, where_torn, last = Findings(), b"", "", ""
    for where, line in _lines(folder):
        if not line:
            found.faults.append(Fault(where, "is empty: inserted."))
            continue
        entry = parsed(line)
        if entry is None:
            debris, where_torn = debris + line + b"\n", where_torn or where
            continue
        _check_torn(found, entry, torn_of(debris), where_torn or where)
        _check_link(found, entry, where, last)
        found.entries, found.sha256 = entry["n"], line_sha256(line)
        debris, where_torn, last = b"", "", where
    if torn_of(debris) is not None:
        found.notes.append(f"{where_torn} is torn, as by a kill; the next entry will say so.")
    _check_head(found, folder, last)
    return found


def _lines(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in files(folder):
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        yield from ((f"{path.name} line {number}", line) for number, line in enumerate(lines, 1) if lines != [b""])


def _check_torn(found: Findings, entry: Entry, there: Torn | None, where: str) -> None:
    said = entry.get("torn")
    told = None if there is None else {"bytes": there.bytes, "sha256": there.sha256}
    if said == told:
        if there is not None:
            found.notes.append(f"{where} was torn by a kill; entry {entry['n']} says so.")
        return
    if said is None:
        problem = f"is no entry, and entry {entry['n']} after it does not say that it was torn: changed or inserted."
    elif told is None:
        problem = (
            f"says that a torn line stands before it, and there is none: it was removed, or entry {entry['n']} changed."
        )
    else:
        problem = f"is not the torn line that entry {entry['n']} speaks of: changed."
    found.faults.append(Fault(where, problem))


def _check_link(found: Findings, entry: Entry, where: str, last: str) -> None:
    number, expected = entry["n"], found.entries + 1
    if number == expected and entry["before"] == found.sha256:
        return
    if number > expected:
        gone = f"entry {expected} is" if number == expected + 1 else f"entries {expected} to {number - 1} are"
        found.faults.append(Fault(where, f"is entry {number}, but {gone} missing before it: removed."))
    elif number < expected:
        problem = f"is entry {number}, but stands after entry {found.entries}: inserted, repeated or out of order."
        found.faults.append(Fault(where, problem))
    elif last:
        found.faults.append(Fault(last, f"(entry {number - 1}) is not what entry {number} says it was: changed."))
    else:
        found.faults.append(Fault(where, "is called the first entry, but speaks of one before it: changed or removed."))


def _check_head(found: Findings, folder: Path, last: str) -> None:
    try:
        head = json.loads((folder / HEAD).read_bytes())
        entries, sha256 = int(head["entries"]), str(head["sha256"])
    except FileNotFoundError:
        if found.entries:
            problem = "is missing: entries that were cut off at the end could not be told."
            found.faults.append(Fault(HEAD, problem))
        return
    except (ValueError, TypeError, KeyError):
        found.faults.append(Fault(HEAD, "cannot be read: changed."))
        return
    if entries > found.entries:
        gone = entries - found.entries
        problem = f"ends with entry {found.entries}; {HEAD} counts {entries}: the last {gone} were removed or spoiled."
        found.faults.append(Fault(last or FILE, problem))
    elif (entries, sha256) == (found.entries, found.sha256):
        return
    elif entries == found.entries:
        found.faults.append(Fault(last, f"(entry {entries}) is not what {HEAD} says it was: changed."))
    elif entries == found.entries - 1 and _before(folder) == sha256:
        found.notes.append(f"{HEAD} is one entry behind: the process was killed between the two files.")
    else:
        problem = (
            f"counts {entries} entries, there are {found.entries}: appended by other hands, or {HEAD} was changed."
        )
        found.faults.append(Fault(HEAD, problem))


def _before(folder: Path) -> str:
    """What the last entry says of the one before it."""
    entries = [entry for _, line in _lines(folder) if (entry := parsed(line)) is not None]
    return str(entries[-1]["before"])
