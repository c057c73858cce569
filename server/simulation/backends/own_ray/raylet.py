"""How a raylet of our own starts its workers and agents; Ray has no options for either.

Ray starts its processes by one private function. The raylet's command names the programs of workers and agents, so that
some words of it are all that changes. Where they are not as known, Ray starts as it does by itself.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKER, AGENT = HERE / "ray_worker.py", HERE / "stand_in_agent.py"
STARTS, WORKERS, PROGRAM = "start_ray_process", "--python_worker_command", "default_worker.py"
PORTS = {
    "--dashboard_agent_command": (
        "METRICS_AGENT_PORT_NAME",
        "METRICS_EXPORT_PORT_NAME",
        "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    ),
    "--runtime_env_agent_command": ("RUNTIME_ENV_AGENT_PORT_NAME",),
}
"""Option for an agent -> Ray's constants with the names of the ports that the raylet waits for."""

PortFile = Callable[[str, str], str]


class UnknownRay(Exception):
    """This release of Ray starts its parts in another way than those known; says what differs."""


@contextmanager
def own_parts(fork_server: str, say: Callable[[str], None]) -> Iterator[None]:
    """While Ray starts here, have its raylet fork its workers, and stand-ins take the place of its agents.

    Args:
        fork_server: Its socket.
        say: Called with the reason where Ray has started as it does by itself.
    """
    from ray import __version__, _raylet
    from ray._private import services

    start: Callable[..., Any] | None = getattr(services, STARTS, None)
    if start is None:
        yield
        say(f"Ray {__version__} has no {STARTS}")
        return
    reasons = [f"it has not called {STARTS} for a raylet"]

    def start_with_own_parts(command: list[str], *arguments: Any, **options: Any) -> Any:
        if any(word.startswith(f"{WORKERS}=") for word in command):
            try:
                command = with_own_parts(command, fork_server, lambda node, port: port_file(_raylet, node, port))
                reasons.clear()
            except UnknownRay as error:
                reasons[:] = [str(error)]
        return start(command, *arguments, **options)

    setattr(services, STARTS, start_with_own_parts)
    try:
        yield
    finally:
        setattr(services, STARTS, start)
    for reason in reasons:
        say(f"Ray {__version__}: {reason}")


def with_own_parts(command: Sequence[str], fork_server: str, file_of: PortFile) -> list[str]:
    """A raylet's command with our programs for its workers and agents.

    Args:
        command: Ray's own: the program and ``--option=value``.
        fork_server: Its socket.
        file_of: Name of the file for a port, by the node and the name of Ray's constant.

    Raises:
        UnknownRay: If it is not a command as known.
    """
    options = dict(word.split("=", 1) for word in command if "=" in word)
    if lacking := {WORKERS, "--session_dir", "--node_id", *PORTS} - options.keys():
        raise UnknownRay(f"its raylet has no {', '.join(sorted(lacking))}")
    worker = shlex.split(options[WORKERS])
    at = [place for place, word in enumerate(worker) if os.path.basename(word) == PROGRAM]
    if len(at) != 1:
        raise UnknownRay(f"{WORKERS} does not name {PROGRAM}")
    ours = {WORKERS: [*worker[: at[0]], str(WORKER), fork_server, *worker[at[0] :]]}
    for option, ports in PORTS.items():
        files = [os.path.join(options["--session_dir"], file_of(options["--node_id"], port)) for port in ports]
        ours[option] = [sys.executable, "-S", "-I", str(AGENT), *files]
    changed = {option: f"{option}={subprocess.list2cmdline(words)}" for option, words in ours.items()}
    return [changed.get(word.partition("=")[0], word) for word in command]


def port_file(names: Any, node: str, port: str) -> str:
    """Name of the file in which a raylet expects a port.

    Raises:
        UnknownRay: If Ray does not know such a port.
    """
    try:
        name: str = names.get_port_filename(node, getattr(names, port))
    except (AttributeError, TypeError) as error:
        raise UnknownRay(str(error)) from None
    return name
