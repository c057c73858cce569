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

import psutil
import pytest

from common.system.stopping import STOPPED_ON_REQUEST
from strategies.method_list import CLASSES
from strategies.registry import STRATEGIES
from studies.cli import resume_command
from tests.network.ended import (
    MARK,
    as_from_a_terminal,
    marked,
    rounds_done,
    to_every_process,
    to_the_group,
    to_the_parent,
)
from tests.processes import living

LIMIT_S = 5
PROGRAM = "from studies.cli import main; main()"
EXPERIMENT = "experiments/digits_surgical.toml"
ENDLESS = ["--set", "run.rounds=500"]
Send = Callable[[int, str, signal.Signals], None]


def listens(pid: int) -> bool:
    """Whether a process has begun: SIGTERM would no longer just end it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def started(arguments: list[str], out: Path, **more: str) -> subprocess.Popen[str]:
    """``flwr-sim`` in a session of its own; its processes are marked with ``out``.

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


def ended(
    arguments: list[str],
    out: Path,
    number: signal.Signals,
    send: Send,
    late: bool,
    ignored: bool = False,
    after_s: float = 0.0,
) -> tuple[int, float, str, list[psutil.Process]]:
    """Exit code, seconds from the signal to the last process's end, stderr, and processes left.

    Args:
        late: Send the signal when two rounds are done, else as soon as the program listens to signals.
        after_s: Seconds after that.
    """
    scratch = Path(tempfile.mkdtemp(prefix="s"))  # sockets lie in it, whose paths have to be short
    with as_from_a_terminal(ignored):
        program = started(arguments, out, TMPDIR=str(scratch))
    until = time.monotonic() + 150
    while late and rounds_done(out.parent) < 2 and program.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    while not late and not listens(program.pid) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(after_s)
    assert program.poll() is None
    if ignored:
        os.killpg(program.pid, signal.SIGINT)
        time.sleep(0.5)
        assert program.poll() is None
    known = set(marked(str(out)))
    left = lambda: living({*known, *marked(str(out))})  # noqa: E731
    asked = time.monotonic()
    send(program.pid, str(out), number)
    try:
        said = program.communicate(timeout=20)[1]
        while left() and time.monotonic() < asked + 20:
            time.sleep(0.05)
        return program.returncode, time.monotonic() - asked, said, left()
    finally:
        for process in left():
            process.kill()
        program.communicate()
        there = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor")]  # torch's cache
        shutil.rmtree(scratch)
        assert there == []


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


def holds(arguments: list[str], out: Path, way: str, late: bool, ignored: bool = False, after_s: float = 0.0) -> None:
    code, seconds, said, left = ended(arguments, out, *WAYS[way], late=late, ignored=ignored, after_s=after_s)
    print(f"{way}, {'late' if late else 'early'} and {after_s:.1f} s: ended in {seconds:.2f} s with {code}, {left}")
    assert (code, left) == (STOPPED_ON_REQUEST, [])
    assert seconds < LIMIT_S
    again = "--resume" if arguments[0] == "run" and (out / "events.jsonl").exists() else ""
    assert "stopped on request; to go on: flwr-sim" in said
    assert said.rstrip().endswith(again)
    assert "Traceback" not in said
    assert [path for path in out.parent.rglob("*") if path.name.endswith(".part") or path.name == "images"] == []
    assert list(out.parent.rglob("*.unfinished")) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_command_that_has_just_begun_ends_at_once(tmp_path: Path, way: str) -> None:
    holds(INLINE, tmp_path / "run", way, late=False)


@pytest.mark.parametrize("out", [["--out", "it"], ["--out=it"]], ids=["apart", "joined"])
def test_the_line_that_goes_on_resumes_a_run_that_has_begun(
    tmp_path: Path, out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resume_command(["run", "own.toml", *out]) == f"flwr-sim run own.toml {' '.join(out)}"
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "events.jsonl").touch()
    assert resume_command(["run", "own.toml", *out]) == f"flwr-sim run own.toml {' '.join(out)} --resume"
    assert resume_command(["run", *out, "--resume"]) == f"flwr-sim run {' '.join(out)} --resume"


@pytest.mark.long
@pytest.mark.parametrize("ignored", [False, True], ids=["", "SIGINT ignored"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arguments", [INLINE, RAY, COMPARE, STUDY], ids=["inline", "ray", "compare", "study"])
def test_a_command_at_work_ends_within_the_limit(tmp_path: Path, arguments: list[str], way: str, ignored: bool) -> None:
    if ignored and way == "Ctrl-C":
        pytest.skip("it is what such a process is started to ignore")
    holds(arguments, tmp_path / "run", way, late=True, ignored=ignored)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(20))
def test_sigterm_on_ray_at_any_time_ends_it_within_the_limit(tmp_path: Path, turn: int) -> None:
    """While it imports, while Ray starts, in the first rounds: ten each of early and late, at random seconds."""
    way = tuple(way for way in WAYS if way != "Ctrl-C")[turn % 3]
    holds(RAY, tmp_path / "run", way, late=turn % 2 == 1, after_s=random.Random(turn).uniform(0.0, 8.0))


@pytest.mark.parametrize(
    ("arguments", "late"),
    [
        pytest.param(COMPARE, False, id="compare early"),
        pytest.param(COMPARE, True, id="compare late", marks=pytest.mark.long),
        pytest.param(STUDY, True, id="study late", marks=pytest.mark.long),
        pytest.param(RAY, True, id="ray late", marks=pytest.mark.long),
    ],
)
def test_a_program_that_gets_sigkill_leaves_no_process_and_can_be_called_again(
    tmp_path: Path, arguments: list[str], late: bool
) -> None:
    """As the system does where memory is short: nothing of ours can act, and no one else is told."""
    out = tmp_path / "run"
    for _ in range(2):
        program = started(arguments, out)
        until = time.monotonic() + 150
        begun = (lambda: rounds_done(out) >= 2) if late else (lambda: len(marked(str(out))) > 1)
        while not begun() and program.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        known = set(marked(str(out)))
        assert program.poll() is None, program.communicate()[1]
        assert len(known) > 1
        program.kill()
        killed = time.monotonic()
        left = lambda: living({*known, *marked(str(out))})  # noqa: B023, E731
        while left() and time.monotonic() < killed + 20:
            time.sleep(0.05)
        seconds = time.monotonic() - killed
        for process in left():
            process.kill()
        program.communicate()
        assert seconds < LIMIT_S
        arguments = [*arguments, "--resume"] if arguments[0] == "run" and "--resume" not in arguments else arguments
        for path in out.rglob("rounds.jsonl"):
            path.write_text("")  # the next call is judged by its own rounds


def test_a_forked_child_that_is_ended_does_not_end_its_parent() -> None:
    code = (
        "import os, signal, time\n"
        "from common.system.stopping import stop_on_signals\n"
        "with stop_on_signals():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        time.sleep(30)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(-signal.SIGTERM), "")


def test_a_process_whose_parent_has_ended_before_is_ended_too(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, time\n"
        "from common.system.stopping import stop_on_signals\n"
        "with stop_on_signals():\n"
        "    subprocess.run(['sh', '-c', 'sleep 60 >/dev/null 2>&1 &'])\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        start_new_session=True,
        env={**os.environ, MARK: str(tmp_path)},
    )
    left = marked(str(tmp_path))
    for process in left:
        process.kill()
    assert (done.returncode, left) == (STOPPED_ON_REQUEST, [])
    assert "stopped on request" in done.stderr


def test_the_names_that_are_known_early_are_those_of_the_methods() -> None:
    assert {name: method.site_class.name for name, method in STRATEGIES.items()} == {name: name for name in CLASSES}


def test_a_program_with_as_many_open_files_as_it_may_have_ends_all_the_same() -> None:
    program = """
import os, resource, signal, time
from common.system.stopping import stop_on_signals
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with stop_on_signals():
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "stopped on request" in done.stderr
