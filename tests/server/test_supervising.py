"""The process that stays begins the one that leads again, for as long as that helps."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from server.deployment import supervisor
from server.deployment.supervisor import RunExit, rounds_done, supervise
from tests.network.real import ROOT, eventually
from tests.processes import living

LEADS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
lives = sorted(folder.glob("life-*"))
(folder / f"life-{len(lives)}").write_text(" ".join(sys.argv[2:]))
"""
Notes = list[tuple[str, int, float]]


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Notes]]:
    """Supervise a process that does as it is told in each of its lives."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)

    def lead(then: str, *, resume: bool = False) -> tuple[int, Notes]:
        (tmp_path / "leads.py").write_text(LEADS + then)
        monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, str(tmp_path / "leads.py"), str(tmp_path)))
        notes: Notes = []
        note = lambda how, deaths, pause_s: notes.append((how, deaths, pause_s))  # noqa: E731
        return supervise(["run", "trial"], lambda: rounds_done(tmp_path), note, resume=resume), notes

    return lead


def lives(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("life-*"))]


KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"


def test_one_that_is_killed_is_begun_again_with_resume_until_it_is_done(
    led: Callable[..., tuple[int, Notes]], tmp_path: Path
) -> None:
    code, notes = led(f"if len(lives) < 2: {KILLED}")
    assert code == RunExit.DONE
    assert lives(tmp_path) == ["run trial --once", "run trial --once --resume", "run trial --once --resume"]
    assert [(how, deaths) for how, deaths, _ in notes] == [("was killed by SIGKILL", 1), ("was killed by SIGKILL", 2)]


@pytest.mark.parametrize("code", [RunExit.DONE, RunExit.STOPPED, RunExit.BAD_INPUT, RunExit.ON_REQUEST])
def test_one_that_ends_properly_is_not_begun_again(
    code: RunExit, led: Callable[..., tuple[int, Notes]], tmp_path: Path
) -> None:
    assert led(f"sys.exit({int(code)})", resume=True) == (code, [])
    assert lives(tmp_path) == ["run trial --once --resume"]


def test_one_that_dies_again_and_again_without_a_round_is_given_up(led: Callable[..., tuple[int, Notes]]) -> None:
    code, notes = led(f"sys.exit({int(RunExit.CRASHED)})")
    assert code == RunExit.CRASHED
    assert [deaths for _, deaths, _ in notes] == [1, 2, 3, 4, 5]
    pauses = [pause for _, _, pause in notes]
    assert pauses[1] == 2 * pauses[0] > 0
    assert pauses[-1] == 0


def test_a_new_round_between_two_deaths_makes_the_next_one_the_first(
    led: Callable[..., tuple[int, Notes]], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    a_round = "(folder / 'checkpoints' / f'round-{len(lives) + 1:06d}.json').touch()\n"
    code, notes = led(f"{a_round}\nif len(lives) < 7: {KILLED}")
    assert code == RunExit.DONE
    assert [deaths for _, deaths, _ in notes] == [1] * 7


def test_sigterm_reaches_the_one_that_leads_and_it_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "leads.py").write_text(LEADS + "time.sleep(60)")
    program = (sys.executable, str(tmp_path / "leads.py"), str(tmp_path))
    code = (
        "import sys; from server.deployment import supervisor\n"
        f"supervisor.PROGRAM = {program!r}\n"
        "sys.exit(supervisor.supervise(['run'], lambda: 0, print, resume=False))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as supervisor:
        eventually(lambda: lives(tmp_path), "it leads")
        supervisor.terminate()
        assert supervisor.wait(30) == RunExit.ON_REQUEST
    assert len(lives(tmp_path)) == 1


def test_a_child_does_not_outlive_the_process_that_started_it() -> None:
    code = (
        "import os, subprocess, sys, time; from common.system.stopping import STARTER\n"
        "environment = {**os.environ, STARTER: str(os.getpid())}\n"
        "program = 'from common.system.stopping import end_with_starter; end_with_starter()'\n"
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
        "import os; from common.system.stopping import STARTER\n"
        "server = grpc.server(ThreadPoolExecutor(2)); port = server.add_insecure_port('127.0.0.1:0'); server.start()\n"
        "channel = grpc.insecure_channel(f'127.0.0.1:{port}'); grpc.channel_ready_future(channel).result(30)\n"
        "started = lambda: subprocess.run(['true'], env={**os.environ, STARTER: str(os.getpid())}).returncode\n"
        "print({started() for _ in range(300)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("{0}\n", "")


def test_no_program_is_started_with_a_function_for_the_child() -> None:
    named = [
        path
        for folder in ("client", "common", "server", "strategies", "polyclinic")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in named if "preexec_fn=" in path.read_text(encoding="utf-8")] == []
