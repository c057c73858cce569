"""Facts about the process that Ray's workers are forked from, and about what a raylet is told of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from ray._private import services

from server.simulation.backends.own_ray.ray_worker import FORKED
from server.simulation.backends.own_ray.raylet import AGENT, WORKER, own_parts
from server.simulation.backends.own_ray.start_fork_server import FORK_SERVER, ONE_THREAD
from tests.processes import living

WITHIN_S = 20
SAYS = f"""
import os, sys
if __name__ == "__main__":
    killed_first, forked = open("/proc/self/oom_score_adj").read().strip(), "{FORKED}" in os.environ
    print(sys.argv[1:], os.getcwd(), os.environ["SAID"], killed_first, forked, "colorsys" in sys.modules)
"""
AS_RAY_HAS_IT = 'echo 700 > /proc/self/oom_score_adj; exec "$0" "$@"'
A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.01)


@contextmanager
def fork_server(path: Path, *modules: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """One that has imported ``colorsys``, which nothing else does, and these modules."""
    command = [sys.executable, "-m", FORK_SERVER, str(os.getpid()), str(path), "colorsys", *modules]
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        until(path.exists)
        yield process
    finally:
        process.kill()
        process.wait()


def worker(folder: Path, server: Path) -> str:
    """What a worker says that is started as Ray starts one."""
    program, said = folder / "program.py", folder / "said"
    program.write_text(SAYS, encoding="utf-8")
    with said.open("w") as output:
        ours = [sys.executable, str(WORKER), str(server), str(program), "--one", "two words"]
        command = ["sh", "-c", AS_RAY_HAS_IT, *ours]
        subprocess.run(
            command, env={**os.environ, "SAID": "hello"}, cwd=folder, stdout=output, check=True, timeout=WITHIN_S
        )
    until(lambda: said.read_text().endswith("\n"))
    return said.read_text().strip()


def says(folder: Path, forked: bool) -> str:
    return f"['--one', 'two words'] {folder} hello 700 {forked} {forked}"


def test_a_forked_worker_is_what_ray_asked_for_and_has_what_was_imported(tmp_path: Path) -> None:
    """Its arguments, folder, environment, streams, and that the kernel kills it before other processes."""
    path = tmp_path / "fork"
    with fork_server(path):
        assert [worker(tmp_path, path) for _ in range(2)] == [says(tmp_path, forked=True)] * 2


def test_a_worker_starts_by_itself_where_the_fork_server_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "fork"
    with fork_server(path) as server:
        server.kill()
        server.wait()
        assert worker(tmp_path, path) == says(tmp_path, forked=False)


def test_nothing_is_forked_from_a_process_with_threads_and_numpy_has_none_as_it_is_launched(tmp_path: Path) -> None:
    (tmp_path / "a_thread.py").write_text(A_THREAD, encoding="utf-8")
    path, other = tmp_path / "fork", tmp_path / "other"
    with fork_server(other, "a_thread", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])) as server:
        assert worker(tmp_path, other) == says(tmp_path, forked=False)
        server.wait(WITHIN_S)
    with fork_server(path, "numpy", OMP_NUM_THREADS="2", **ONE_THREAD):
        assert worker(tmp_path, path) == says(tmp_path, forked=True)


def test_a_broken_request_and_one_whose_sender_is_gone_leave_no_process_and_the_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "fork"
    nowhere = {"arguments": ["/none"], "environment": {}, "folder": "/none", "killed_first": "0"}
    whole = json.dumps(nowhere).encode() + b"\n"
    with fork_server(path) as server:
        for data, streams in [(b"{", [0, 1, 2]), (b"no JSON\n", [0, 1, 2]), (whole, [0]), (whole, [0, 1, 2])]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\0" * 8)
                socket.send_fds(connection, [data], streams)
        assert worker(tmp_path, path) == says(tmp_path, forked=True)
        until(lambda: psutil.Process(server.pid).children() == [])
        assert psutil.Process(server.pid).num_fds() == 4  # its streams and where it listens


def test_a_stand_in_writes_its_ports_and_it_and_the_fork_server_end_with_their_parent(tmp_path: Path) -> None:
    ports, path = tmp_path / "ports", tmp_path / "fork"
    agent, server = [sys.executable, str(AGENT), str(ports)], [sys.executable, "-m", FORK_SERVER]
    code = (
        f"import os, subprocess, time\nsubprocess.Popen({agent!r})\n"
        f"subprocess.Popen([*{server!r}, str(os.getpid()), {str(path)!r}])\ntime.sleep(60)"
    )
    parent = psutil.Popen([sys.executable, "-c", code])
    until(ports.exists)
    until(path.exists)
    children = parent.children()
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, left = psutil.wait_procs(children, timeout=WITHIN_S)
    assert living(left) == []
    assert int(ports.read_text()) > 0


# ---------------------------------------------------------------------- what Ray's raylet is told

NODE = "ab" * 28
RAYLET = [
    "/ray/raylet",
    "--session_dir=/tmp/session",
    f"--node_id={NODE}",
    "--python_worker_command=/bin/python /ray/setup_worker.py '/a b/default_worker.py' --webui= PLACEHOLDER",
    "--dashboard_agent_command=python agent.py",
    "--runtime_env_agent_command=python main.py",
    "--head",
]


def started(command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The command that Ray runs in the end for this one, and the reasons why it is as it was."""
    run, reasons = list[list[str]](), list[str]()
    monkeypatch.setattr(services, "start_ray_process", lambda words, *arguments, **options: run.append(words))
    with own_parts("/tmp/fork", reasons.append):
        services.start_ray_process(command, "raylet", fate_share=True)
    return run[0], reasons


def test_a_raylet_runs_our_worker_with_rays_own_as_its_argument_and_stand_ins_that_write_each_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, reasons = started(RAYLET, monkeypatch)
    assert reasons == []
    assert [command[place] for place in (0, 1, 2, 6)] == [RAYLET[place] for place in (0, 1, 2, 6)]
    ours = f'/bin/python /ray/setup_worker.py {WORKER} /tmp/fork "/a b/default_worker.py" --webui= PLACEHOLDER'
    assert command[3] == f"--python_worker_command={ours}"
    agent = f"{sys.executable} -S -I {AGENT}"
    ports = [f"/tmp/session/{name}_{NODE}" for name in ("metrics_agent_port", "metrics_export_port")]
    assert command[4].startswith(f"--dashboard_agent_command={agent} {' '.join(ports)} ")
    assert command[5] == f"--runtime_env_agent_command={agent} /tmp/session/runtime_env_agent_port_{NODE}"


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ("--dashboard_agent_command", "its raylet has no --dashboard_agent_command"),
        ("--python_worker_command", "it has not called start_ray_process for a raylet"),
    ],
)
def test_a_raylet_that_is_told_other_things_starts_as_ray_has_it_and_the_reason_is_said(
    without: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [word for word in RAYLET if not word.startswith(without)]
    command, (said,) = started(other, monkeypatch)
    assert command == other
    assert said.startswith("Ray ")
    assert said.endswith(f": {reason}")


def test_a_ray_that_renames_a_port_or_its_worker_or_its_function_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray import _raylet

    renamed = [word.replace("default_worker", "worker") for word in RAYLET]
    command, (said,) = started(renamed, monkeypatch)
    assert (command, "--python_worker_command does not name default_worker.py" in said) == (renamed, True)
    monkeypatch.delattr(_raylet, "METRICS_AGENT_PORT_NAME")
    command, (said,) = started(RAYLET, monkeypatch)
    assert (command, "METRICS_AGENT_PORT_NAME" in said) == (RAYLET, True)
    monkeypatch.delattr(services, "start_ray_process")
    reasons = list[str]()
    with own_parts("/tmp/fork", reasons.append):
        assert not hasattr(services, "start_ray_process")
    assert [reason.endswith("has no start_ray_process") for reason in reasons] == [True]
