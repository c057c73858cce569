"""An audit finds every line that is not what was written, and a kill in the middle of one breaks nothing."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.security import audit
from polyclinic.common.security.audit import AuditLog, check_audit_log, list_audit_files

ENTRIES = 6
ROOT = Path(__file__).parents[2]


def written(folder: Path, entries: int = ENTRIES, text: str = "") -> Path:
    trail = AuditLog(folder, durable=False)
    facts = {"text": text} if text else {}
    for number in range(entries):
        trail.append(record="TrainReply", bytes=100 + number, **facts)
    return folder / audit.AUDIT_FILE


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def faults(folder: Path) -> list[str]:
    return [str(fault) for fault in check_audit_log(folder).faults]


def is_sound(folder: Path, entries: int, notes: int = 0) -> bool:
    verdict = check_audit_log(folder)
    return (verdict.entries, verdict.faults, len(verdict.notes)) == (entries, [], notes)


def test_what_was_written_is_right_and_counted(tmp_path: Path) -> None:
    written(tmp_path)
    assert is_sound(tmp_path, ENTRIES)
    assert [entry["bytes"] for entry in AuditLog(tmp_path).read_entries()] == [100, 101, 102, 103, 104, 105]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    written(folder)
    return folder


@contextlib.contextmanager
def replaced(folder: Path, content: bytes) -> Iterator[None]:
    """An audit of other bytes for a while."""
    path = folder / audit.AUDIT_FILE
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        yield
    finally:
        path.write_bytes(before)


@given(data=st.data())
@settings(max_examples=50)
def test_any_changed_byte_is_found(original: Path, data: st.DataObject) -> None:
    before = (original / audit.AUDIT_FILE).read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != before[at]))
    lost_newline = at == len(before) - 1  # nothing of any entry: the next one begins on a line of its own
    with replaced(original, before[:at] + bytes([byte]) + before[at + 1 :]):
        assert faults(original) or lost_newline


@given(order=st.permutations(range(ENTRIES)))
@settings(max_examples=50)
def test_any_other_order_is_found(original: Path, order: list[int]) -> None:
    before = lines(original / audit.AUDIT_FILE)
    with replaced(original, b"".join(before[place] for place in order)):
        assert bool(faults(original)) == (list(order) != sorted(order))


@given(gone=st.sets(st.integers(0, ENTRIES - 1), min_size=1))
@settings(max_examples=50)
def test_any_removed_lines_are_found_those_at_the_end_too(original: Path, gone: set[int]) -> None:
    before = lines(original / audit.AUDIT_FILE)
    with replaced(original, b"".join(line for place, line in enumerate(before) if place not in gone)):
        assert faults(original)


def changed(line: bytes) -> bytes:
    return line.replace(b'"bytes": 10', b'"bytes": 99')


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: [*whole[:2], changed(whole[2]), *whole[3:]], "line 3: (entry 3) is not what entry 4 says"),
        (
            lambda whole: [*whole[:2], *whole[4:]],
            "line 3: is entry 5, but entries 3 to 4 are missing before it: removed",
        ),
        (lambda whole: [*whole[:3], whole[1], *whole[3:]], "line 4: is entry 2, but stands after entry 3: inserted"),
        (lambda whole: [*whole[:3], b"nothing\n", *whole[3:]], "line 4: is no entry, and entry 4 after it"),
        (lambda whole: whole[:4], "line 4: ends with entry 4; audit.head counts 6"),
        (
            lambda whole: [*whole[:5], changed(whole[5])],
            "line 6: (entry 6) is not what audit.head says it was: changed",
        ),
    ],
    ids=["changed", "removed", "repeated", "inserted", "cut_off", "changed_at_the_end"],
)
def test_a_fault_names_the_line_and_what_became_of_it(
    change: Callable[[list[bytes]], list[bytes]], reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    path.write_bytes(b"".join(change(lines(path))))
    assert f"audit.jsonl {reason}" in faults(tmp_path)[0]


@pytest.mark.parametrize("torn", [b"{", b'{"n": 4, "time": "2026', b'{"n": 4, "reason": "' + b"x" * 2**20])
def test_a_line_torn_by_a_kill_is_closed_off_named_and_cannot_be_taken_out(torn: bytes, tmp_path: Path) -> None:
    """The longest is longer than the bytes in which the last entry is first looked for."""
    path = written(tmp_path, 3)
    with path.open("ab") as file:
        file.write(torn)
    assert faults(tmp_path) == []
    left = AuditLog(tmp_path, durable=False).append(record="start")
    assert left.bytes == len(torn)
    assert is_sound(tmp_path, 4, notes=1)
    assert "line 4 was torn by a kill; entry 4" in check_audit_log(tmp_path).notes[0]
    whole = lines(path)
    path.write_bytes(b"".join([*whole[:3], whole[4]]))
    assert "says that a torn line stands before it, and there is none" in faults(tmp_path)[0]
    (tmp_path / audit.AUDIT_HEAD_FILE).unlink()
    assert faults(tmp_path)[-1].startswith("audit.head: is missing")


@pytest.mark.parametrize("ending", [b"\n", b""], ids=["line and no head", "line and no newline"])
def test_a_kill_between_line_and_head_is_no_fault(ending: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    head = (tmp_path / audit.AUDIT_HEAD_FILE).read_bytes()
    AuditLog(tmp_path, durable=False).append(record="TrainReply")
    (tmp_path / audit.AUDIT_HEAD_FILE).write_bytes(head)
    path.write_bytes(path.read_bytes().removesuffix(b"\n") + ending)
    assert faults(tmp_path) == []
    AuditLog(tmp_path, durable=False).append(record="TrainReply")
    assert is_sound(tmp_path, 5)


def test_a_full_file_makes_way_and_the_chain_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_AUDIT_FILE_BYTES", 500)
    written(tmp_path, 12)
    assert [path.name for path in list_audit_files(tmp_path)][:2] == ["audit-000001.jsonl", "audit-000002.jsonl"]
    assert is_sound(tmp_path, 12)
    (tmp_path / "audit-000001.jsonl").unlink()
    assert "are missing before it: removed." in faults(tmp_path)[0]


def test_each_entry_is_one_line_of_json_that_only_the_owner_may_read(tmp_path: Path, lax_umask: None) -> None:
    AuditLog(tmp_path, durable=False).append(reason="a\nb\u2028c")
    assert [json.loads(line)["reason"] for line in lines(tmp_path / audit.AUDIT_FILE)] == ["a\nb\u2028c"]
    assert os.stat(tmp_path / audit.AUDIT_FILE).st_mode & 0o077 == 0


@pytest.mark.parametrize("size", [2**18 - 200, 2**18, 2**18 + 1, 14_000_000])
def test_a_line_of_any_length_is_found_again_and_the_chain_goes_on(size: int, tmp_path: Path) -> None:
    """Lines of earlier releases may hold words that a site sent: 14 MB of them began the chain anew."""
    trail = AuditLog(tmp_path, durable=False)
    trail.append(record="TrainReply")
    for _ in range(2):
        trail.append(reason="x" * size)
        trail.append(record="TrainReply")
    assert is_sound(tmp_path, 5)


def test_a_long_line_as_an_earlier_release_wrote_it_is_found_again(tmp_path: Path) -> None:
    """Raw control characters stand in it, and it is the last line of a file that is full."""
    path = written(tmp_path, 3)
    last = json.loads(lines(path)[-1])
    raw = {"n": 4, "before": audit.hash_audit_line(lines(path)[-1].rstrip(b"\n")), "reason": "\u202e\x85" * 9_000_000}
    assert last["n"] == 3
    with path.open("ab") as file:
        file.write(line := json.dumps(raw, ensure_ascii=False).encode())
        file.write(b"\n")
    (tmp_path / audit.AUDIT_HEAD_FILE).write_text(json.dumps({"entries": 4, "sha256": audit.hash_audit_line(line)}))
    AuditLog(tmp_path, durable=False).append(record="start")
    assert [path.name for path in list_audit_files(tmp_path)] == ["audit-000001.jsonl", "audit.jsonl"]
    assert is_sound(tmp_path, 5)


@pytest.mark.parametrize("durable", [True, False])
def test_processes_that_write_in_turn_continue_one_chain(durable: bool, tmp_path: Path) -> None:
    trails = [AuditLog(tmp_path, durable=durable) for _ in range(3)]
    for trail in [*trails, *reversed(trails), *trails]:
        trail.append(record="TrainReply")
    assert is_sound(tmp_path, 9)


def test_a_line_that_is_torn_or_changed_between_two_entries_of_one_process_is_seen(tmp_path: Path) -> None:
    trail = AuditLog(tmp_path, durable=False)
    trail.append(record="TrainReply")
    trail.append(record="TrainReply")
    with (tmp_path / audit.AUDIT_FILE).open("ab") as file:
        file.write(b'{"n": 3, "ti')
    left = trail.append(record="start")
    assert left.bytes == 12
    assert faults(tmp_path) == []
    (tmp_path / audit.AUDIT_FILE).unlink()
    trail.append(record="start")
    assert is_sound(tmp_path, 1)


APPEND = """
import sys
from pathlib import Path
from polyclinic.common.security.audit import AuditLog
trail = AuditLog(Path(sys.argv[1]), durable=sys.argv[2] == "durable")
while True:
    print(trail.append(record="TrainReply"), flush=True)
"""


@pytest.mark.parametrize("how", ["durable", "simulated"])
def test_a_kill_at_any_moment_leaves_an_audit_without_a_fault(how: str, tmp_path: Path) -> None:
    entries = 0
    for kill in range(3):
        command = [sys.executable, "-c", APPEND, tmp_path, how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            appended = sum(bool(writer.stdout.readline()) for _ in range(20 + 41 * kill))
            writer.kill()
        verdict = check_audit_log(tmp_path)
        assert verdict.faults == []
        assert verdict.entries >= entries + appended
        entries = verdict.entries


@contextlib.contextmanager
def full_after(folder: Path, room: int) -> Iterator[None]:
    """Within it, files of this process end so many bytes behind the end of the audit, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / audit.AUDIT_FILE).stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 20, 21, 22, 100])
def test_a_full_disk_is_named_in_the_place_of_the_entry_and_the_chain_goes_on(room: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    for _ in range(2):  # each attempt on the full disk
        with full_after(tmp_path, room), pytest.raises(OSError, match="File too large"):
            AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=1)
    marks = path.read_bytes().count(audit.FULL_DISK_MARK)
    assert marks == (0 if room < 21 else 1 if room == 21 else 2)
    assert is_sound(tmp_path, ENTRIES, notes=min(marks, 1))
    torn = AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=2)
    assert is_sound(tmp_path, ENTRIES + 1, notes=min(marks, 1))
    assert (torn is None) == (marks == 0)
    for note in check_audit_log(tmp_path).notes:
        assert f"was torn by a full disk; entry {ENTRIES + 1} says so" in note


def test_a_kill_on_a_full_disk_is_named_with_it(tmp_path: Path) -> None:
    path = written(tmp_path)
    with full_after(tmp_path, 40), pytest.raises(OSError, match="File too large"):
        AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=1)
    with path.open("ab") as file:
        file.write(b'\n{"n": 7, "ti')
    torn = AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=2)
    assert torn is not None
    assert torn.cause == "a kill and a full disk"
    assert is_sound(tmp_path, ENTRIES + 1, notes=1)


def test_a_mark_that_is_changed_later_is_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    with full_after(tmp_path, 40), pytest.raises(OSError, match="File too large"):
        AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=1)
    AuditLog(tmp_path, durable=False).append(record="TrainReply", bytes=2)
    path.write_bytes(path.read_bytes().replace(audit.FULL_DISK_MARK, b"(no room in the disk)"))
    assert any("is not the torn line that entry 7 speaks of: changed" in fault for fault in faults(tmp_path))


def test_a_small_disk_that_is_really_full_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this account may mount nothing")
    try:
        with pytest.raises(OSError, match="No space left"):
            # 17 entries of 700 bytes leave room for a part of the next one in the 12 KiB beside the file of the head.
            written(disk, entries=10_000, text="x" * 530)
        (note,) = check_audit_log(disk).notes
        assert "is torn, as by a full disk; the next entry will say so" in note
    finally:
        subprocess.run(["umount", disk], check=True)
