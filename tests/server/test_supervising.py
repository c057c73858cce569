"""Programs that stay up: a run's process is restarted while that helps; their lines have times or are JSON."""

import datetime as dt
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polyclinic.server.deployment import supervisor
from polyclinic.server.deployment.superlink import process
from polyclinic.server.deployment.superlink.process import (
    MAX_LINE_CHARACTERS,
    MAX_LINES_PER_MINUTE,
    MAX_LOG_FILES,
    RotatingLogFile,
    copy_lines_to_log,
    escape_control_characters,
)
from polyclinic.server.deployment.supervisor import RunExitCode, supervise_run
from polyclinic.server.runs.folder import RunFolder
from tests.network.real import ROOT, eventually, flwr_client, flwr_server, free_ports
from tests.processes import living
from tests.server.commands import Ended
from tests.server.superlinks import Clock

LEADS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
lives = sorted(folder.glob("life-*"))
(folder / f"life-{len(lives)}").write_text(" ".join(sys.argv[2:]))
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"
Led = Callable[..., tuple[int, list[tuple[str, int, float]]]]


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Led:
    """Supervise a process that runs this code in each of its lives; return its exit code and what was noted."""
    monkeypatch.setattr(supervisor, "FIRST_RESTART_DELAY_S", 0.001)

    def lead(then: str, *, resume: bool = False) -> tuple[int, list[tuple[str, int, float]]]:
        (tmp_path / "leads.py").write_text(LEADS + then)
        monkeypatch.setattr(supervisor, "LEADER_COMMAND", (sys.executable, str(tmp_path / "leads.py"), str(tmp_path)))
        (tmp_path / "events.jsonl").touch()
        lines = list[str]()
        code = supervise_run(["run", "trial"], tmp_path, lines.append, resume=resume)
        notes = [(event["how"], event["times"], event["again_in_s"]) for event in RunFolder(tmp_path).read_run_events()]
        assert [line.partition(";")[0] for line in lines] == [
            f"the process that leads the run {how}" for how, *_ in notes
        ]
        return code, notes

    return lead


def lives(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("life-*"))]


def test_a_killed_run_is_begun_again_until_it_is_done(led: Led, tmp_path: Path) -> None:
    code, notes = led(f"if len(lives) < 2: {KILLED}")
    assert (code, [note[:2] for note in notes]) == (RunExitCode.DONE, [("was killed by SIGKILL", n) for n in (1, 2)])
    assert lives(tmp_path) == ["run trial --once", "run trial --once --resume", "run trial --once --resume"]


@pytest.mark.parametrize("code", [RunExitCode.DONE, RunExitCode.STOPPED, RunExitCode.BAD_INPUT, RunExitCode.ON_REQUEST])
def test_a_run_that_ends_is_not_begun_again(code: RunExitCode, led: Led, tmp_path: Path) -> None:
    assert led(f"sys.exit({int(code)})", resume=True) == (code, [])
    assert lives(tmp_path) == ["run trial --once --resume"]


def test_a_run_that_dies_five_times_without_a_round_is_given_up(led: Led) -> None:
    code, notes = led(f"sys.exit({int(RunExitCode.CRASHED)})")
    assert (code, [deaths for _, deaths, _ in notes]) == (RunExitCode.CRASHED, [1, 2, 3, 4, 5])
    pauses = [pause for _, _, pause in notes]
    assert pauses[1] == 2 * pauses[0] > pauses[-1] == 0


def test_deaths_are_counted_anew_after_a_round(led: Led, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    a_round = "(folder / 'checkpoints' / f'round-{len(lives) + 1:06d}.json').touch()\n"
    code, notes = led(f"{a_round}\nif len(lives) < 7: {KILLED}")
    assert (code, [deaths for _, deaths, _ in notes]) == (RunExitCode.DONE, [1] * 7)


def test_sigterm_reaches_the_one_that_leads_and_it_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "leads.py").write_text(LEADS + "time.sleep(60)")
    program = (sys.executable, str(tmp_path / "leads.py"), str(tmp_path))
    code = (
        "import pathlib, sys; from polyclinic.server.deployment import supervisor\n"
        f"supervisor.LEADER_COMMAND = {program!r}\n"
        f"sys.exit(supervisor.supervise_run(['run'], pathlib.Path({str(tmp_path)!r}), print, resume=False))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as supervisor:
        eventually(lambda: lives(tmp_path), "it leads")
        supervisor.terminate()
        assert supervisor.wait(30) == RunExitCode.ON_REQUEST
    assert len(lives(tmp_path)) == 1


def test_a_child_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import os, subprocess, sys, time; from polyclinic.common.system.stopping import STARTER_VARIABLE\n"
        "environment = {**os.environ, STARTER_VARIABLE: str(os.getpid())}\n"
        "program = 'from polyclinic.common.system.stopping import end_with_parent_if_requested; '\n"
        "program += 'end_with_parent_if_requested()'\n"
        "program += '; import time; print(0, flush=True); time.sleep(60)'\n"
        "child = subprocess.Popen([sys.executable, '-c', program], env=environment, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
    eventually(lambda: not living([child]), "the child ends")


def test_a_process_that_uses_grpc_loses_none_of_its_children_at_their_start() -> None:
    """``flwr-server start`` does when it starts the SuperLink again; by ``preexec_fn`` 21 of 400 were aborted."""
    code = (
        "import grpc, subprocess; from concurrent.futures import ThreadPoolExecutor\n"
        "import os; from polyclinic.common.system.stopping import STARTER_VARIABLE\n"
        "server = grpc.server(ThreadPoolExecutor(2)); port = server.add_insecure_port('127.0.0.1:0'); server.start()\n"
        "channel = grpc.insecure_channel(f'127.0.0.1:{port}'); grpc.channel_ready_future(channel).result(30)\n"
        "started_here = {**os.environ, STARTER_VARIABLE: str(os.getpid())}\n"
        "started = lambda: subprocess.run(['true'], env=started_here).returncode\n"
        "print({started() for _ in range(150)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("{0}\n", "")


def test_no_program_is_started_with_a_function_for_the_child() -> None:
    folders = ("client", "common", "data", "server", "strategies", "polyclinic")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if "preexec_fn=" in path.read_text(encoding="utf-8")] == []


LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d)  \S")
ZONE = {"TZ": "UTC-05:30"}  # as POSIX has it: east of Greenwich


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    folder = tmp_path / "trial"
    made = flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1", "--port", free_ports(1)[0])
    assert made.code == 0
    return folder


def lines_until_ready(*arguments: str) -> list[str]:
    """Start a coordinator; return the lines of its standard output until it is stopped, which is when it is ready."""
    command, pipe = [sys.executable, "-m", "polyclinic.server.cli", "start", *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | ZONE) as process:
        assert process.stdout is not None
        lines, until = list[str](), time.monotonic() + 120
        while not any("ready" in line for line in lines) and process.poll() is None and time.monotonic() < until:
            if select.select([process.stdout], [], [], 1)[0]:
                lines.append(process.stdout.readline().rstrip("\n"))
        process.terminate()
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    assert any("ready" in line for line in lines)
    return [*lines, *rest.splitlines()]


def is_now(moment: str) -> bool:
    parsed = dt.datetime.fromisoformat(moment)
    return parsed.utcoffset() == dt.timedelta(hours=5, minutes=30) and abs(parsed.timestamp() - time.time()) < 300


def test_the_coordinators_lines_have_date_time_and_zone(coordinator: Path) -> None:
    matches = [LINE.match(line) for line in lines_until_ready(str(coordinator))]
    assert all(match and is_now(match[1]) for match in matches)


def test_on_request_they_are_json_and_so_are_those_of_its_log_file(coordinator: Path) -> None:
    lines = [json.loads(line) for line in lines_until_ready(str(coordinator), "--log-format", "json")]
    assert all(is_now(line["time"]) and line["level"] == "info" for line in lines)
    assert lines[-1]["message"].startswith("stopped on request")
    log = (coordinator / "logs" / "superlink.log").read_text(encoding="utf-8")
    assert all(set(json.loads(line)) == {"time", "message"} for line in log.splitlines())


@pytest.mark.parametrize("program", [flwr_server, flwr_client])
def test_why_a_program_ends_is_json_too(program: Callable[..., Ended], tmp_path: Path) -> None:
    ended = program("start", tmp_path, "--log-format", "json")
    (line,) = [json.loads(line) for line in ended.err.splitlines()]
    assert (ended.code, ended.out, line["level"], str(tmp_path) in line["message"]) == (2, "", "error", True)


STAMP = len("2026-11-22T10:00:00Z ")


def words(path: Path) -> list[str]:
    """Return the lines without their times."""
    return [line[STAMP:] for line in path.read_text().splitlines()]


def test_a_log_is_rotated_by_size_and_its_files_are_few_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_LOG_FILE_BYTES", 20_000)
    clock, path = Clock(), tmp_path / "superlink.log"
    path.write_text("of an earlier release\n")
    path.chmod(0o644)
    log = RotatingLogFile(path, clock)
    for number in range(500):
        clock.now += 1
        log.write_log_line(f"{number} " + "x" * 300)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["superlink.log", "superlink.log.1", "superlink.log.2"]
    assert (len(files), {stat.S_IMODE(file.stat().st_mode) for file in files}) == (MAX_LOG_FILES, {0o600})
    assert sum(file.stat().st_size for file in files) <= MAX_LOG_FILES * (20_000 + MAX_LINE_CHARACTERS + STAMP)
    numbers = [int(line.split()[1]) for file in reversed(files) for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 500))


def test_on_request_a_line_is_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "superlink.log"
    RotatingLogFile(path, as_json=True).write_log_line('refused "east": \x1b]0;name\u202e\n')
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r'\{"time": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", .*\}', line)
    assert json.loads(line)["message"] == r'refused "east": \x1b]0;name\u202e'


def test_a_flood_of_lines_does_not_wash_out_what_was_there(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "superlink.log"
    log = RotatingLogFile(path, clock)
    log.write_log_line("before the flood")
    for _ in range(5000):
        log.write_log_line("refused")
    clock.now += 60
    log.write_log_line("after the flood")
    more = [f"{5001 - MAX_LINES_PER_MINUTE} more lines in that minute", "after the flood"]
    assert words(path) == ["before the flood", *["refused"] * (MAX_LINES_PER_MINUTE - 1), *more]


def test_a_line_is_cut_and_steers_no_terminal(tmp_path: Path) -> None:
    RotatingLogFile(tmp_path / "log").write_log_line("x" * 10_000)
    assert len((tmp_path / "log").read_text()) == STAMP + MAX_LINE_CHARACTERS + 1
    assert escape_control_characters("\x1b[91mERROR\x1b[0m : \x1b]0;title\x07 \u202egnp.exe\r\n") == (
        r"ERROR : \x1b]0;title\x07 \u202egnp.exe"
    )


def test_what_a_process_prints_is_written_as_it_comes_and_after_its_end(tmp_path: Path) -> None:
    prints = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n\\xff' + b'x' * 100_000 + b'\\nlast')"
    process = subprocess.Popen([sys.executable, "-c", prints], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    copy_lines_to_log(process.stdout, RotatingLogFile(tmp_path / "log")).join(30)
    assert process.wait() == 0
    first, second, *_, last = words(tmp_path / "log")
    assert (first, second, last) == ("out", "err", "last")


def test_a_full_disk_does_not_stop_the_process_whose_log_it_is(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()  # nothing can be written there
    reading, writing = os.pipe()
    thread = copy_lines_to_log(os.fdopen(reading, "rb"), RotatingLogFile(tmp_path / "log"))
    for _ in range(1000):
        os.write(writing, b"a line of a hundred bytes or so" * 3 + b"\n")
    os.close(writing)
    thread.join(30)
    assert not thread.is_alive()
