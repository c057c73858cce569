"""The SuperLink's log stays small."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from server.deployment.superlink.process import (
    FILE_BYTES,
    FILES,
    LINES_A_MINUTE,
    LONGEST_LINE,
    BoundedLog,
    copy_lines,
    escape_control_characters,
)

STAMP = len("2026-11-22T10:00:00Z ")


def words(path: Path) -> list[str]:
    """The lines without their times."""
    return [line[STAMP:] for line in path.read_text().splitlines()]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_log_is_rotated_by_size_and_its_files_are_few_and_private(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "superlink.log"
    path.write_text("of an earlier release\n")
    path.chmod(0o644)
    log = BoundedLog(path, clock)
    for number in range(10_000):
        clock.now += 1
        log.write(f"{number} " + "x" * 1500)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["superlink.log", "superlink.log.1", "superlink.log.2"]
    assert len(files) == FILES
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert sum(file.stat().st_size for file in files) <= FILES * (FILE_BYTES + LONGEST_LINE + STAMP)
    numbers = [int(line.split()[1]) for file in reversed(files) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 10_000))


def test_on_request_a_line_is_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "superlink.log"
    BoundedLog(path, as_json=True).write('refused "east": \x1b]0;name\u202e\n')
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r'\{"time": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", .*\}', line)
    assert json.loads(line)["message"] == r'refused "east": \x1b]0;name\u202e'


def test_a_flood_of_lines_does_not_wash_out_what_was_there(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "superlink.log"
    log = BoundedLog(path, clock)
    log.write("before the flood")
    for _ in range(100_000):
        log.write("refused")
    clock.now += 60
    log.write("after the flood")
    lines = words(path)
    assert len(lines) == LINES_A_MINUTE + 2
    assert lines[0] == "before the flood"
    assert lines[-2:] == [f"{100_001 - LINES_A_MINUTE} more lines in that minute", "after the flood"]


def test_a_line_is_cut_and_steers_no_terminal(tmp_path: Path) -> None:
    BoundedLog(tmp_path / "log").write("x" * 1_000_000)
    assert len((tmp_path / "log").read_text()) == STAMP + LONGEST_LINE + 1
    assert escape_control_characters("\x1b[91mERROR\x1b[0m : \x1b]0;title\x07 \u202egnp.exe\r\n") == (
        r"ERROR : \x1b]0;title\x07 \u202egnp.exe"
    )


def test_what_a_process_prints_is_written_as_it_comes_and_after_its_end(tmp_path: Path) -> None:
    prints = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n\\xff' + b'x' * 100_000 + b'\\nlast')"
    process = subprocess.Popen([sys.executable, "-c", prints], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    copy_lines(process.stdout, BoundedLog(tmp_path / "log")).join(30)
    assert process.wait() == 0
    lines = words(tmp_path / "log")
    assert lines[:2] == ["out", "err"]
    assert lines[-1] == "last"


def test_a_full_disk_does_not_stop_the_process_whose_log_it_is(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()  # nothing can be written there
    reading, writing = os.pipe()
    thread = copy_lines(os.fdopen(reading, "rb"), BoundedLog(tmp_path / "log"))
    for _ in range(1000):
        os.write(writing, b"a line of a hundred bytes or so" * 3 + b"\n")
    os.close(writing)
    thread.join(30)
    assert not thread.is_alive()
