"""Every command and every way to stop it: all ends within seconds, with one exit code, and nothing half done is left.

``pytest tests/network/test_interrupts.py -m "" -n 0`` tries the whole table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.network.ended import WAYS, Command, Ended, listens, rounds_done
from tests.network.real import PARTIAL, Coordinator, exported, flwr_client, flwr_sim, machine, written

LIMIT_S = 5.0
IMAGES = 4000


Places = dict[str, Path]
"""What stands in a command line in capitals: an experiment, a run, images, folders of coordinators and of a site."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """A coordinator that runs with a site that runs, another one, and a site that the tests start."""
    with machine(tmp_path_factory.mktemp("interrupts") / "machine") as here:
        experiment, run, images = written(PARTIAL, here.folder), here.folder / "run", here.folder / "many.npz"
        done = flwr_sim("run", experiment, "--out", run, "--set", "run.rounds=1", "--progress", "none")
        assert done.code == 0, done.err
        pixels = np.random.default_rng(0).integers(0, 255, (IMAGES, 16, 16), np.uint8)
        labels = np.arange(IMAGES)[:, None] % 10
        few = {"train_images": pixels[:100], "train_labels": labels[:100]}
        np.savez(images, test_images=pixels, test_labels=labels, **few)
        coordinator, other = Coordinator(here), Coordinator(here, "other")
        coordinator.start()
        sites = exported(experiment, here.folder / "data")[:2]
        east, north = (coordinator.admit(coordinator.site(site)) for site in sites)
        east.connect()
        files = {"EXPERIMENT": experiment, "RUN": run, "IMAGES": images}
        yield files | {"COORDINATOR": coordinator.folder, "OTHER": other.folder, "NORTH": north.folder}


def trained(rounds: int) -> Callable[[Command, Path], bool]:
    """So many rounds are done."""
    return lambda command, out: rounds_done(out.parent) >= rounds


def worked(seconds: float) -> Callable[[Command, Path], bool]:
    """At work: what it imports takes less."""
    return lambda command, out: command.worked_s() > seconds


def says(text: str) -> Callable[[Command, Path], bool]:
    return lambda command, out: text in command.output


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        line: With the names of :data:`Places` in capitals, and OUT for a path that is new.
        late: Whether it is at work.
        code: With which it ends.
        words: What it says then.
        makes: Whether it makes the new path only when it is done.
    """

    line: str
    late: Callable[[Command, Path], bool]
    words: str = "stopped on request"
    code: int = 3
    makes: bool = False


GOES_ON = "stopped on request; to go on: flwr-"
ENDLESS = "--set run.rounds=500"
STUDY, DIGITS = "experiments/papers/fedmlp", "0,1,2,3,4,5,6,7,8,9"
CASES = {
    "flwr-sim run (inline)": Case(f"flwr-sim run EXPERIMENT --out OUT --backend inline {ENDLESS}", trained(2), GOES_ON),
    "flwr-sim run (ray)": Case(f"flwr-sim run EXPERIMENT --out OUT --backend ray {ENDLESS}", trained(2), GOES_ON),
    "flwr-sim compare": Case(f"flwr-sim compare EXPERIMENT --out OUT --backend inline {ENDLESS}", trained(1), GOES_ON),
    "flwr-sim study": Case(f"flwr-sim study {STUDY} --quick --out OUT {ENDLESS}", trained(1), GOES_ON),
    "flwr-sim benchmark": Case("flwr-sim benchmark --variant small --out OUT", says("validation AUROC"), GOES_ON),
    "flwr-sim demo": Case("flwr-sim demo --backend inline --out OUT", trained(1)),
    "flwr-sim sites": Case("flwr-sim sites EXPERIMENT --out OUT", worked(1.0)),
    "flwr-sim predict": Case("flwr-sim predict RUN IMAGES --out OUT", worked(1.0), makes=True),
    "flwr-sim evaluate": Case(f"flwr-sim evaluate RUN IMAGES --out OUT --classes {DIGITS}", worked(1.0), makes=True),
    "flwr-sim export": Case("flwr-sim export RUN --out OUT", worked(2.0), makes=True),
    "flwr-server start": Case("flwr-server start OTHER", says("hospitals connect to"), code=0),
    "flwr-server run": Case(
        f"flwr-server run COORDINATOR EXPERIMENT --out OUT --sites 1 {ENDLESS} --set participation.min_sites=1",
        trained(2),
        GOES_ON,
    ),
    "flwr-server run (waits for sites)": Case(
        "flwr-server run COORDINATOR EXPERIMENT --out OUT", says("waiting for"), GOES_ON
    ),
    "flwr-server status --web": Case(
        "flwr-server status COORDINATOR --web --port 0", says("live view: https"), "the live view is closed", code=0
    ),
    "flwr-server verify": Case("flwr-server verify RUN", worked(1.0)),
    "flwr-client start": Case("flwr-client start NORTH", says("connected to"), code=0),
    "flwr-client check": Case("flwr-client check NORTH --all", worked(1.0)),
    "flwr-client preview": Case("flwr-client preview NORTH", worked(1.0)),
    "flwr-client preview-data": Case("flwr-client preview-data NORTH --out OUT", worked(1.0), makes=True),
}
WHEN = {"early": ("Ctrl-C", "SIGTERM to the parent"), "late": tuple(WAYS)}
ALL = [(name, when, way) for name in CASES for when, ways in WHEN.items() for way in ways]
SHORT = [("flwr-client check", "Ctrl-C"), ("flwr-client preview-data", "SIGTERM to the group")]


def stopped(case: Case, places: Places, out: Path, when: str, way: str, ignores_ctrl_c: bool = False) -> Ended:
    words = [(places | {"OUT": out}).get(word, word) for word in case.line.split()]
    command = Command(words, out.parent / "output.log", ignores_ctrl_c=ignores_ctrl_c)
    if when == "early":
        command.until(lambda command: listens(command.process.pid))
    else:
        command.until(lambda command: case.late(command, out))
    return command.ended(out.parent, way)


def holds(case: Case, ended: Ended, out: Path, *, early: bool = False) -> None:
    assert (ended.code, ended.left) == (case.code, ()), ended.output[-3000:]
    assert ended.wall_s < LIMIT_S
    # A service that is stopped before it has said anything need not say that it was stopped.
    assert case.words in ended.output or (early and case.code == 0)
    assert "Traceback" not in ended.output
    assert not (case.makes and out.exists())


@pytest.mark.network
@pytest.mark.parametrize(("name", "when", "way"), ALL, ids=lambda each: str(each))
def test_a_command_that_is_told_to_stop_ends_with_all_that_it_started(
    name: str, when: str, way: str, places: Places, tmp_path: Path
) -> None:
    ended = stopped(CASES[name], places, tmp_path / "out", when, way)
    holds(CASES[name], ended, tmp_path / "out", early=when == "early")


@pytest.mark.network
@pytest.mark.parametrize("name", ["flwr-server start", "flwr-server run", "flwr-client start", "flwr-sim run (ray)"])
def test_a_service_in_the_background_of_a_shell_which_ignores_ctrl_c_ends_by_sigterm(
    name: str, places: Places, tmp_path: Path
) -> None:
    ended = stopped(CASES[name], places, tmp_path / "out", "late", "SIGTERM to the parent", ignores_ctrl_c=True)
    holds(CASES[name], ended, tmp_path / "out")


@pytest.mark.parametrize(("name", "way"), SHORT, ids=lambda each: str(each))
def test_two_commands_of_the_table(name: str, way: str, tmp_path: Path) -> None:
    folder = tmp_path / "north"
    assert flwr_client("init", folder, "--name", "north").code == 0
    (folder / "site.toml").write_text('name = "north"\n[data]\nkind = "digits"\n', encoding="utf-8")
    out = tmp_path / "out"
    holds(CASES[name], stopped(CASES[name], {"NORTH": folder}, out, "late", way), out)
