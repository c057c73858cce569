"""A federation as it is in life: both programs as processes, real sockets, keys and certificates, on loopback."""

import atexit
import contextlib
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

import polyclinic.client.cli
import polyclinic.server.cli
import polyclinic.studies.cli
from polyclinic.client.connection.status import read_client_status
from polyclinic.common.errors import BadInput
from polyclinic.server.coordinator.state import ControlSocketPath
from tests.federations import DIGITS
from tests.network.warm import LEADING, LEADS, Forked, Warm
from tests.network.warm import PROGRAMS as WARM_PROGRAMS
from tests.processes import MARK, ROOT, command_line, environment, kill, marked
from tests.server.commands import Ended

WITHIN_S = 240.0
"""For anything that takes seconds on an idle machine; tests wait for what they want to see, never for a time."""
ENDS_WITHIN_S = 30.0
T = TypeVar("T")

_HEAD = DIGITS.split("[partition]")[0]
PARTIAL = f"""{_HEAD}
[partition]
kind = "class_lists"
[partition.lists]
east = ["0", "1", "2", "3", "4"]
north = ["9", "8", "7", "6", "5", "0"]
south = ["5", "0", "1", "6"]
"""
"""Three hospitals that label different digits: one in common, some shared by two, some of one alone."""
FULL = f"""{_HEAD}
[partition]
kind = "class_lists"
[partition.lists]
east = {list("0123456789")}
north = {list("9876543210")}
south = {list("0123456789")}
"""
"""Three hospitals that label every digit."""


def eventually(
    holds: Callable[[], T], what: str, within_s: float = WITHIN_S, output: Callable[[], str] = lambda: ""
) -> T:
    """Wait until ``holds`` returns something true, and return it; else fail with what programs printed until then."""
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain for this: {what}\n{output()}"
        time.sleep(0.05)
    return value


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]


def listens(port: int) -> bool:
    """Whether anybody listens on this port of 127.0.0.1."""
    with socket.socket() as opened:
        return opened.connect_ex(("127.0.0.1", port)) == 0


def typed(main: Callable[[Sequence[str]], None], *arguments: object) -> Ended:
    """A command that starts, asks and ends, as a person types it, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return Ended(int(stopped.value.code or 0), out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class InstalledRelease:
    """An earlier release, unpacked from its wheel into a folder of its own.

    Attributes:
        folder: The folder of its packages; it holds nothing of this tree.
        prefix: What stands before the names of its packages.
    """

    folder: Path
    prefix: str = ""

    def module(self, name: str) -> str:
        """Its own name of one of our modules."""
        return self.prefix + name.removeprefix("polyclinic.")

    def environment(self) -> dict[str, str]:
        """The environment in which Python finds its packages, and not this tree's."""
        return {"PYTHONPATH": str(self.folder)}

    def typed(self, program: str, *arguments: object) -> Ended:
        """A command of it that starts, asks and ends; ``program`` is ``client`` or ``server``."""
        command = [sys.executable, "-m", self.module(f"{program}.cli"), *map(str, arguments)]
        variables = environment() | self.environment()
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)


flwr_server = partial(typed, polyclinic.server.cli.main)
flwr_client = partial(typed, polyclinic.client.cli.main)
flwr_sim = partial(typed, polyclinic.studies.cli.main)


def module_of(release: InstalledRelease | None, module: str) -> str:
    """The name of a module in a release; None is this tree."""
    return module if release is None else release.module(module)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))


@cache
def warm() -> Warm:
    """The process that forks hospitals' programs: one for all tests of this process, and it ends with them."""
    started = Warm(
        "polyclinic.client.connection.service", "polyclinic.server.deployment.network"
    )  # torch, Flower, gRPC, our own code
    atexit.register(started.end)
    return started


class Program:
    """A process, and everything that it printed."""

    def __init__(self, log: Path, process: "subprocess.Popen[bytes] | Forked") -> None:
        self._log, self.process = log, process

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def says(self, text: str) -> None:
        """Wait until it prints this."""
        eventually(lambda: text in self.output or not self.runs, f"{self._log.stem} says: {text}")
        assert text in self.output, f"{self._log.stem} ended with {self.process.poll()}:\n{self.output}"

    def ends(self) -> int:
        """Wait until it ends by itself; its exit code."""
        eventually(lambda: not self.runs, f"{self._log.stem} ends", output=lambda: self.output)
        return int(self.process.wait())

    def succeeds(self) -> None:
        """Wait until it ends by itself, with 0."""
        assert self.ends() == 0, self.output

    def stop(self) -> int:
        self.process.terminate()
        return self.ends()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold it where it is, as a machine that swaps or a network that is cut would."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)  # sent to nobody where it has ended


class Machine:
    """Starts programs, and sees to it that none outlives the tests."""

    def __init__(self, folder: Path, works_in: Path = ROOT) -> None:
        self.folder, self._works_in = folder, works_in
        self._mark = uuid.uuid4().hex
        self._programs: list[Program] = []
        self.ports: list[int] = []
        self._environment = environment() | {MARK: self._mark, "XDG_STATE_HOME": str(folder / "account")}

    def start(self, name: str, *arguments: object, release: InstalledRelease | None = None) -> Program:
        """Run Python with these arguments; what :mod:`tests.network.warm` can fork is forked.

        Args:
            release: An earlier release that the program is of; None for this tree.
        """
        log = self.folder / f"{name}-{len(self._programs)}.log"
        words = [str(argument) for argument in arguments]
        with log.open("wb") as file:
            module, *rest = words[words[0] == "-m" :]
            process: subprocess.Popen[bytes] | Forked
            if release is not None:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                variables = self._environment | release.environment()
                command = [sys.executable, *words]
                process = subprocess.Popen(command, cwd=release.folder, env=variables, **streams)
            elif module in WARM_PROGRAMS or (module in LEADING and "--once" in rest):
                process = warm().fork(module, rest, self._environment, self._works_in, log)
            else:
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                command = [sys.executable, *words]
                process = subprocess.Popen(command, cwd=self._works_in, env=self._environment, **streams)
        self._programs.append(Program(log, process))
        return self._programs[-1]

    def left(self) -> list[psutil.Process]:
        """Every process that descends from ours, also one whose parent is gone."""
        forked = {program.process.pid for program in self._programs if program.runs}  # they do not show their mark
        return marked(self._mark, forked)

    def end(self) -> None:
        """SIGTERM to the programs; nothing may be left of them, nor of what they started and were writing."""
        for program in self._programs:
            program.process.terminate()
        _, late = psutil.wait_procs(self.left(), timeout=ENDS_WITHIN_S)
        names = [line for process in late if (line := command_line(process))]
        kill(late)
        psutil.wait_procs(late, timeout=ENDS_WITHIN_S)
        for program in self._programs:
            program.process.wait()
        assert not names, f"not ended {ENDS_WITHIN_S:.0f} s after SIGTERM: {names}"
        assert self.left() == []
        assert list(self.folder.parent.rglob("*.part")) == []
        assert [port for port in self.ports if listens(port)] == []


@contextlib.contextmanager
def machine(folder: Path, works_in: Path = ROOT) -> Iterator[Machine]:
    """For a fixture: programs end with it, whatever happens.

    Args:
        folder: In a folder that only this test writes to: no half-written file may be left there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    this = Machine(folder, works_in)
    try:
        yield this
    finally:
        this.end()


class Site:
    """A hospital's folder and its program.

    Attributes:
        release: An earlier release whose program is started; None for this tree's. It may be changed, for an upgrade.
    """

    def __init__(self, on: Machine, folder: Path, release: InstalledRelease | None = None) -> None:
        self.name, self.folder, self._machine, self.release = folder.name, folder, on, release
        self._programs: list[Program] = []

    @property
    def program(self) -> Program:
        """The one begun last."""
        return self._programs[-1]

    @property
    def toml(self) -> Path:
        return self.folder / "site.toml"

    @property
    def kit(self) -> Path:
        return self.folder / f"{self.name}.kit"

    def edit(self, path: Path, *changes: tuple[str, str]) -> None:
        """Change a file of the folder by hand; each text must be there."""
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")

    def start(self) -> Program:
        """``flwr-client start``."""
        return self.start_by("-m", module_of(self.release, "polyclinic.client.cli"), "start", self.folder)

    def connect(self) -> None:
        """Start it, and wait until it is connected."""
        self.start().says("connected to ")

    def start_by(self, *arguments: object) -> Program:
        """A process of this site that is begun in another way."""
        self._programs.append(self._machine.start(self.name, *arguments, release=self.release))
        return self.program

    def start_if_down(self) -> None:
        if not self._programs or not self.program.runs:
            self.start()

    def end(self) -> None:
        """SIGTERM to whatever of it runs."""
        for program in self._programs:
            program.stop()

    @property
    def now(self) -> Mapping[str, Any]:
        """What ``flwr-client status --json`` says; empty where nobody answers."""
        try:
            return read_client_status(self.folder / "state")
        except BadInput:
            return {}

    def works_on(self, phase: str, server_round: int) -> None:
        """Wait until it is in the midst of this."""
        position = {"state": "working", "phase": phase, "round": server_round}
        eventually(lambda: self.now.items() >= position.items(), f"{self.name} works on {phase} of {server_round}")


@contextlib.contextmanager
def ready_to_lead(folder: Path) -> Iterator[Path]:
    """A coordinator's folder with one admitted site, and something that listens where ``flwr-server start`` would.

    What ``flwr-server run`` checks before it imports torch then finds no fault.
    """
    trial, site = folder / "trial", folder / "north"
    for ended in (
        flwr_server("init", trial, "--name", "trial", "--host", "127.0.0.1"),
        flwr_client("init", site, "--name", "north"),
        flwr_server("admit", trial, site / "north.request", "--yes"),
    ):
        assert ended.code == 0, ended.err
    (trial / "state").mkdir(exist_ok=True)
    with contextlib.closing(ControlSocketPath(trial / "state")) as place, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place.path)
        listening.listen()
        yield trial


class Coordinator:
    """A coordinator's folder and its programs.

    Attributes:
        release: An earlier release whose programs are started; None for this tree's. It may be changed, for an upgrade.
    """

    def __init__(
        self,
        on: Machine,
        name: str = "trial",
        listen: str = "127.0.0.1",
        release: InstalledRelease | None = None,
    ) -> None:
        self.name, self._machine, self.folder, self.release = name, on, on.folder / name, release
        self._runs: list[Program] = []
        (self.port,) = free_ports(1)
        on.ports.append(self.port)
        address = ("--host", "127.0.0.1", "--listen", listen, "--port", self.port)
        made = self.typed("init", self.folder, "--name", name, *address)
        assert made.code == 0, made.err
        self.program: Program

    def typed(self, *arguments: object) -> Ended:
        """A command of ``flwr-server`` that starts, asks and ends."""
        return flwr_server(*arguments) if self.release is None else self.release.typed("server", *arguments)

    def start(self) -> Program:
        """``flwr-server start``, until hospitals can connect."""
        return self.start_by("-m", module_of(self.release, "polyclinic.server.cli"), "start", self.folder)

    def start_by(self, *arguments: object) -> Program:
        """The same, begun in another way."""
        self.program = self._machine.start(self.name, *arguments, release=self.release)
        self.program.says("hospitals connect to")
        return self.program

    def site(self, exported: Path, name: str = "", release: InstalledRelease | None = None) -> Site:
        """A hospital with the images of an exported site, its key and request made, not admitted yet."""
        name = name or exported.name
        site = Site(self._machine, self._machine.folder / "sites" / name, release)
        shutil.copytree(exported, site.folder)
        site.edit(site.toml, (f'name = "{exported.name}"', f'name = "{name}"'))
        command = ("init", site.folder, "--name", name)
        made = flwr_client(*command) if release is None else release.typed("client", *command)
        assert made.code == 0, made.err
        return site

    def admit(self, site: Site) -> Site:
        """Admit it, and bring it its kit."""
        done = self.typed("admit", self.folder, site.folder / f"{site.name}.request", "--yes")
        assert done.code == 0, done.err
        shutil.copy(self.folder / "kits" / site.kit.name, site.kit)
        return site

    def revoke(self, site: Site) -> Ended:
        return flwr_server("revoke", self.folder, site.name, "--yes")

    def run(
        self,
        experiment: Path,
        out: Path,
        *overrides: str,
        sites: int = 0,
        options: Sequence[str] = (),
        pages: bool = False,
        once: bool = False,
    ) -> Program:
        """``flwr-server run``, begun.

        Args:
            pages: Draw its report and its model card.
            once: No process stays that begins the leading one again. That one is forked then, and imports nothing.
        """
        command = ("run", self.folder, experiment, "--out", out, "--sites", sites, *settings(*overrides), *options)
        leads = module_of(self.release, "polyclinic.server.cli") if pages or self.release else LEADS
        return self.lead("-m", leads, *command, *["--once"] * once)

    def lead(self, *arguments: object) -> Program:
        """A run that is begun in another way."""
        self._runs.append(self._machine.start("run", *arguments, release=self.release))
        return self._runs[-1]

    def kill_leading(self, run: Program) -> None:
        """SIGKILL to the process that leads, and not to the one that begins it again; nothing between two lives."""
        with contextlib.suppress(psutil.Error):
            kill(psutil.Process(run.process.pid).children())

    def end_runs(self) -> None:
        """SIGTERM to runs that have not ended."""
        for run in self._runs:
            run.stop()

    @property
    def now(self) -> dict[str, Any]:
        """What ``flwr-server status --json`` says."""
        return dict(json.loads(self.typed("status", self.folder, "--json").out))

    def sees(self, *sites: Site, state: str = "connected") -> None:
        """Wait until all these are in this state."""

        def output() -> str:
            log = (self.folder / "logs" / "superlink.log").read_text(encoding="utf-8", errors="replace")
            return f"{log[-5000:]}\n" + "\n".join(f"{site.name}: {site.program.output[-2000:]}" for site in sites)

        for name in [site.name for site in sites]:
            eventually(lambda name=name: self.now["sites"][name]["state"] == state, f"{name} is {state}", output=output)

    @property
    def superlink(self) -> psutil.Process:
        """Its only child."""
        (child,) = psutil.Process(self.program.process.pid).children()
        return child

    def kill_superlink(self) -> None:
        """SIGKILL to the SuperLink alone."""
        superlink = self.superlink
        superlink.kill()
        superlink.wait()


def written(experiment: str, folder: Path) -> Path:
    """The experiment as a file."""
    (folder / "digits.toml").write_text(experiment, encoding="utf-8")
    return folder / "digits.toml"


def exported(experiment: Path, folder: Path) -> list[Path]:
    """A folder for each of the experiment's sites, with its images and its site.toml."""
    done = flwr_sim("sites", experiment, "--out", folder)
    assert done.code == 0, done.err
    return sorted(folder.iterdir())


def settings(*overrides: str) -> list[str]:
    """The options that set these values."""
    return [part for override in overrides for part in ("--set", override)]
