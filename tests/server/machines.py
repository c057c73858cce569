"""Two machines of a cluster on this one: network namespaces joined by a cable, the second with folders of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from polyclinic.server.simulation.backends.cluster import QUIET_VARIABLES, make_ray_token_variables
from tests.processes import command_line, kill

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
EAST, WEST = "10.77.0.1", "10.77.0.2"
WITHIN_S = 120
SECRET = make_ray_token_variables()
"""Without it Ray takes one from the home folder where there is one."""
POSSIBLE = hasattr(os, "geteuid") and os.geteuid() == 0 and Path("/usr/sbin/ip").exists()
"""Namespaces of one's own need root."""


@dataclass(frozen=True)
class Machine:
    """A network namespace, and a view of the disk.

    Attributes:
        pid: Of the process that keeps it.
    """

    pid: int
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", f"--wdns={ROOT}", *arguments]

    def start(self, *arguments: str, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program there, which finds our packages in this tree."""
        environment = {**os.environ, **QUIET_VARIABLES, **SECRET, "PYTHONPATH": str(ROOT), **(more or {})}
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(arguments), env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end."""
        process = self.start(*arguments, more=more)
        out, err = process.communicate(timeout=4 * WITHIN_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def kill_all(self, name: str) -> None:
        """Kill the processes there that have this name in their command line."""
        kill(process for process in inside(self) if name in command_line(process))


def inside(machine: Machine) -> list[psutil.Process]:
    """Return every process in a machine's network, the one that keeps it last."""
    network, processes = _network(machine.pid), []
    for process in psutil.process_iter():
        with suppress(OSError):
            if _network(process.pid) == network:
                processes.append(process)
    return sorted(processes, key=lambda process: process.pid == machine.pid)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Make two: the first has this machine's disk, the second nothing of ``folder``, /tmp and /dev/shm."""
    keepers = [subprocess.Popen(["unshare", "-nm", "sleep", "infinity"]) for _ in range(2)]
    east, west = (Machine(keeper.pid, at) for keeper, at in zip(keepers, (EAST, WEST), strict=True))
    try:
        for machine in (east, west):
            _wait_until_apart(machine.pid)
            _checked(machine, "ip link set lo up")
        _checked(east, f"ip link add east type veth peer name west netns {west.pid}")
        for machine, name in ((east, "east"), (west, "west")):
            _checked(machine, f"ip addr add {machine.address}/24 dev {name}")
            _checked(machine, f"ip link set {name} up")
            _checked(machine, f"ip route add default dev {name}")  # Ray asks which address leads outside
        for place in (str(folder), "/tmp", "/dev/shm"):
            _checked(west, f"mount -t tmpfs none {place}")
        yield east, west
    finally:
        kill([*inside(east), *inside(west)])  # Ray's agents outlive a raylet that is killed
        for keeper in keepers:
            keeper.wait()


@contextmanager
def ray_on(east: Machine, west: Machine) -> Iterator[str]:
    """Start a head of two cores, and a node of two cores and a GPU that Ray only believes in; yield the address."""
    common = ("--num-cpus=2", "--object-store-memory=200000000", "--block")
    address = f"{EAST}:6379"
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets lie below: 107 characters at most
    head = ("--head", "--port=6379", "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={place}")
    processes = [east.start(str(BIN / "ray"), "start", *head, *common)]
    try:
        _wait_for_nodes(east, address, 1)
        processes.append(west.start(str(BIN / "ray"), "start", f"--address={address}", "--num-gpus=1", *common))
        _wait_for_nodes(east, address, 2)
        yield address
    finally:
        kill(each for each in (*inside(west), *inside(east)) if each.pid not in (east.pid, west.pid))
        for started in processes:
            started.communicate()
        shutil.rmtree(place, ignore_errors=True)


def _wait_for_nodes(machine: Machine, address: str, many: int) -> None:
    code = (
        "import sys, time\n"
        "from ray._raylet import GcsClient\n"
        "while True:\n"
        "    try:\n"
        "        nodes = GcsClient(address=sys.argv[1]).get_all_node_info().values()\n"
        "        if sum(node.state == 0 for node in nodes) == int(sys.argv[2]):\n"
        "            break\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    time.sleep(0.3)\n"
    )
    done = machine.run("timeout", str(WITHIN_S), sys.executable, "-c", code, address, str(many))
    assert done.returncode == 0, done.stdout + done.stderr


def _network(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _wait_until_apart(pid: int) -> None:
    until = time.monotonic() + WITHIN_S
    while _network(pid) == _network("self"):
        assert time.monotonic() < until, "no namespace was made"
        time.sleep(0.01)


def _checked(machine: Machine, line: str) -> None:
    done = machine.run(*line.split())
    assert done.returncode == 0, f"{line}: {done.stderr}"
