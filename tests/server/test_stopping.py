"""Ctrl-C, SIGTERM and SIGHUP end flwr-sim and all that it started, at once, and say how to go on."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyclinic.common.system.stopping import STOPPED_EXIT_CODE
from polyclinic.strategies.method_list import METHOD_CLASS_PATHS
from polyclinic.strategies.registry import STRATEGIES
from polyclinic.studies.cli import make_resume_command
from tests.network.ended import (
    MARK,
    as_from_a_terminal,
    marked,
    rounds_done,
    to_every_process,
    to_the_group,
    to_the_parent,
)
from tests.processes import kill, living
from tests.server.commands import PROGRAM

LIMIT_S = 5
EXPERIMENT = "experiments/digits_surgical.toml"
ENDLESS = ["--set", "run.rounds=500"]


def listens(pid: int) -> bool:
    """Return whether a process has begun: SIGTERM would no longer just end it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def started(arguments: list[str], out: Path, **more: str) -> subprocess.Popen[str]:
    """Start ``flwr-sim`` in a session of its own; its processes are marked with ``out``.

    Args:
        more: Environment variables.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: str(out), **more},
    )


def wait_for(program: subprocess.Popen[str], condition: Callable[[], bool], pause_s: float = 0.05) -> None:
    """Wait until a program has come so far; it must not end before."""
    until = time.monotonic() + 150
    while not condition() and program.poll() is None and time.monotonic() < until:
        time.sleep(pause_s)
    assert program.poll() is None, program.communicate()[1]


def still_living(processes: set[psutil.Process], out: Path) -> list[psutil.Process]:
    """Wait up to 20 s for the end of these processes, and of all that a program has started; return the others."""
    until = time.monotonic() + 20
    while (left := living({*processes, *marked(str(out))})) and time.monotonic() < until:
        time.sleep(0.05)
    return left


INLINE = ["run", EXPERIMENT, "--backend", "inline", *ENDLESS]
RAY = ["run", EXPERIMENT, "--backend", "ray", *ENDLESS]
COMPARE = ["compare", EXPERIMENT, "--seeds", "2", "--jobs", "2", "--backend", "inline", *ENDLESS]
STUDY = ["study", "experiments/papers/fedmlp", "--quick", "--jobs", "2"]
WAYS = {
    "Ctrl-C": (signal.SIGINT, to_the_group),
    "SIGTERM to the parent": (signal.SIGTERM, to_the_parent),
    "SIGHUP to the parent": (signal.SIGHUP, to_the_parent),
    "SIGTERM to the group": (signal.SIGTERM, to_the_group),
    "SIGTERM to every process": (signal.SIGTERM, to_every_process),
}


def check_end(
    arguments: list[str], out: Path, way: str, *, late: bool, ignored: bool = False, after_s: float = 0.0
) -> None:
    """Send a signal; the program and all that it started end at once, leave no file, and say how to go on.

    Args:
        late: Send it when two rounds are done, else as soon as the program listens to signals.
        ignored: Start the program so that it ignores SIGINT.
        after_s: Seconds after that.
    """
    scratch = Path(tempfile.mkdtemp(prefix="s"))  # sockets lie in it, whose paths have to be short
    with as_from_a_terminal(ignored):
        program = started(arguments, out, TMPDIR=str(scratch))
    wait_for(program, lambda: rounds_done(out.parent) >= 2 if late else listens(program.pid))
    time.sleep(after_s)
    assert program.poll() is None
    if ignored:
        os.killpg(program.pid, signal.SIGINT)
        time.sleep(0.5)
        assert program.poll() is None
    processes, began = set(marked(str(out))), time.monotonic()
    number, send = WAYS[way]
    send(program.pid, str(out), number)
    left = list[psutil.Process]()
    try:
        err = program.communicate(timeout=20)[1]
        left = still_living(processes, out)
        seconds = time.monotonic() - began
    finally:
        kill(living({*processes, *marked(str(out))}))
        program.communicate()
        files = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")]  # torch's cache
        shutil.rmtree(scratch)
    print(f"{way}, {'late' if late else 'early'} and {after_s:.1f} s: {seconds:.2f} s, {program.returncode}, {left}")
    assert (program.returncode, left, files) == (STOPPED_EXIT_CODE, [], [])
    assert seconds < LIMIT_S
    again = "--resume" if arguments[0] == "run" and (out / "events.jsonl").exists() else ""
    assert "stopped on request; to go on: flwr-sim" in err
    assert err.rstrip().endswith(again)
    assert "Traceback" not in err
    assert [path for path in out.parent.rglob("*") if path.name.endswith(".part") or path.name == "images"] == []
    assert list(out.parent.rglob("*.unfinished")) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_command_that_has_just_begun_ends_at_once(tmp_path: Path, way: str) -> None:
    check_end(INLINE, tmp_path / "run", way, late=False)


@pytest.mark.parametrize("out", [["--out", "it"], ["--out=it"]], ids=["apart", "joined"])
def test_the_printed_line_resumes_a_run_that_has_begun(
    tmp_path: Path, out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_resume_command(["run", "own.toml", *out]) == f"flwr-sim run own.toml {' '.join(out)}"
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "events.jsonl").touch()
    assert make_resume_command(["run", "own.toml", *out]) == f"flwr-sim run own.toml {' '.join(out)} --resume"
    assert make_resume_command(["run", *out, "--resume"]) == f"flwr-sim run {' '.join(out)} --resume"


@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True], ids=["", "SIGINT ignored"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arguments", [INLINE, RAY, COMPARE, STUDY], ids=["inline", "ray", "compare", "study"])
def test_a_command_at_work_ends_within_the_limit(tmp_path: Path, arguments: list[str], way: str, ignored: bool) -> None:
    if ignored and way == "Ctrl-C":
        pytest.skip("it is what such a process is started to ignore")
    check_end(arguments, tmp_path / "run", way, late=True, ignored=ignored)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(20))
def test_sigterm_on_ray_at_any_time_ends_it_within_the_limit(tmp_path: Path, turn: int) -> None:
    """While it imports, while Ray starts, in the first rounds: ten each of early and late, at random seconds."""
    way = tuple(way for way in WAYS if way != "Ctrl-C")[turn % 3]
    check_end(RAY, tmp_path / "run", way, late=turn % 2 == 1, after_s=random.Random(turn).uniform(0.0, 8.0))


@pytest.mark.parametrize(
    ("arguments", "late"),
    [
        pytest.param(COMPARE, False, id="compare early"),
        pytest.param(COMPARE, True, id="compare late", marks=pytest.mark.long),
        pytest.param(STUDY, True, id="study late", marks=pytest.mark.long),
        pytest.param(RAY, True, id="ray late", marks=pytest.mark.long),
    ],
)
def test_after_sigkill_no_process_is_left_and_it_can_be_called_again(
    tmp_path: Path, arguments: list[str], late: bool
) -> None:
    """As the system does where memory is short: no code of ours runs, and no process is warned."""
    out = tmp_path / "run"
    for _ in range(2):
        program = started(arguments, out)
        wait_for(program, lambda: rounds_done(out) >= 2 if late else len(marked(str(out))) > 1)
        processes = set(marked(str(out)))
        assert len(processes) > 1
        program.kill()
        began = time.monotonic()
        kill(still_living(processes, out))
        program.communicate()
        assert time.monotonic() - began < LIMIT_S
        arguments = [*arguments, "--resume"] if arguments[0] == "run" and "--resume" not in arguments else arguments
        for path in out.rglob("rounds.jsonl"):
            path.write_text("")  # the next call is judged by its own rounds


def run_with_signals(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that ends on signals as ours do; its body is indented."""
    code = f"import os, resource, signal, subprocess, time\n{IMPORT}\nwith stop_on_signals():\n{body}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **options)


IMPORT = "from polyclinic.common.system.stopping import stop_on_signals"
FORKS = """
    child = os.fork()
    if not child:
        time.sleep(30)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(0.3)
"""
LEAVES_AN_ORPHAN = """
    subprocess.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 &"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
OPENS_FILES = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = []
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""

GETS_SIGTERM_WITH_ITS_HANDLER = """
import importlib, os, signal, sys
install = signal.signal
def install_and_send(number, handler):
    install(number, handler)
    if number == signal.SIGTERM:
        os.kill(os.getpid(), number)
signal.signal = install_and_send
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "call",
    [
        "polyclinic.client.cli start north",
        "polyclinic.server.cli start trial",
        "polyclinic.server.cli status trial --web",
    ],
)
def test_a_signal_as_soon_as_a_service_handles_signals_ends_it_with_its_own_code(call: str) -> None:
    command = [sys.executable, "-c", GETS_SIGTERM_WITH_ITS_HANDLER, *call.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_that_is_ended_does_not_end_its_parent() -> None:
    done = run_with_signals(FORKS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(-signal.SIGTERM), "")


def test_a_process_whose_parent_has_ended_before_is_ended_too(tmp_path: Path) -> None:
    done = run_with_signals(LEAVES_AN_ORPHAN, start_new_session=True, env={**os.environ, MARK: str(tmp_path)})
    left = marked(str(tmp_path))
    kill(left)
    assert (done.returncode, left) == (STOPPED_EXIT_CODE, [])


def test_a_program_with_as_many_open_files_as_it_may_have_ends_all_the_same() -> None:
    assert run_with_signals(OPENS_FILES).returncode == STOPPED_EXIT_CODE


def test_the_names_that_are_known_early_are_those_of_the_methods() -> None:
    assert {name: method.site_class.traits.name for name, method in STRATEGIES.items()} == {
        name: name for name in METHOD_CLASS_PATHS
    }
