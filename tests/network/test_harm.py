"""What else happens to a federation: lines cut, disks full, clocks set, slow sites, programs begun twice or stopped."""

import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.server.deployment.supervisor import RunExitCode, count_checkpointed_rounds
from tests.network.conftest import Survives
from tests.network.ended import disk, fill
from tests.network.federated import EVERYBODY, REMEMBERING, SLOW, Federation, admitted, events, sites_by_round
from tests.network.real import PARTIAL, Program, eventually, free_ports, lines_of, settings

pytestmark = [pytest.mark.slow, pytest.mark.torture]
CUT_S = 20.0
QUICK = ("run.rounds=3", REMEMBERING)
THREE = (SLOW, *QUICK)


@pytest.fixture
def lines(federation: Federation) -> Iterator[dict[str, Program]]:
    """East and north reach the coordinator through a line of their own that can be cut."""
    ports, made = dict(zip(("east", "north"), free_ports(2), strict=True)), dict[str, Program]()
    for name, port in ports.items():
        made[name] = federation.machine.start("line", "-m", "tests.network.proxy", port, federation.coordinator.port)
        made[name].says("open")
    with federation.rerouted(ports):
        yield made
    for line in made.values():
        line.kill()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGUSR2], ids=["silent", "reset"])
def test_lines_that_are_cut_for_20_s_cost_time_and_nothing_else(
    how: signal.Signals, federation: Federation, lines: dict[str, Program], survives: Survives
) -> None:
    survives("network cut of 20 s")
    run = federation.run(*THREE)
    federation.north.works_on("train", 2)
    for line in lines.values():
        line.process.send_signal(how)
    time.sleep(CUT_S)
    for line in lines.values():
        line.process.send_signal(signal.SIGHUP)
    federation.ends_unharmed(run, 3, *THREE)


def test_a_coordinator_whose_disk_is_full_stops_and_goes_on(federation: Federation, survives: Survives) -> None:
    survives("disk full at the coordinator")
    run = federation.run_struck("disk full", *QUICK)
    assert run.ends() == RunExitCode.STOPPED
    assert f"no room on the disk of {federation.out}" in run.output
    again = federation.run(*QUICK, options=("--resume",))
    federation.ends_unharmed(again, 3, *QUICK)


def test_a_site_whose_disk_is_full_costs_its_update(federation: Federation, survives: Survives) -> None:
    survives("disk full at a site", same_model=False)
    federation.strike(federation.north, "disk full")
    run = federation.run(SLOW, "run.rounds=3", REMEMBERING, "participation.min_sites=2")
    run.says("round 2 of 3")
    federation.happened.unlink()  # somebody freed some
    run.succeeds()
    rounds = lines_of(federation.out / "rounds.jsonl")
    assert "no room on the site's disk" in rounds[1]["absent"]["north"]
    assert "No space left on device" in federation.north.program.output
    assert rounds[0]["sites"] == EVERYBODY
    assert federation.north.program.runs


@pytest.mark.parametrize("point", ["clock +1", "clock -1"])
def test_a_coordinators_clock_that_is_set_in_a_round_changes_nothing(
    point: str, federation: Federation, survives: Survives
) -> None:
    survives("clock set by an hour")
    run = federation.run_struck(point, *QUICK)
    federation.ends_unharmed(run, 3, *QUICK)
    assert federation.happened.exists()


def test_a_site_whose_clock_is_wrong_costs_its_update(federation: Federation, survives: Survives) -> None:
    survives("clock set by an hour", same_model=False)
    federation.strike(federation.north, "clock +1")
    run = federation.run(SLOW, "run.rounds=3", "participation.min_sites=2")
    assert federation.north.program.ends() == ClientExitCode.CLOCK
    run.succeeds()
    assert sites_by_round(federation.out)[:2] == [EVERYBODY, ["east", "south"]]


@pytest.mark.parametrize("point", ["clock +1", "clock -1"])
def test_a_superlink_whose_clock_is_wrong_for_a_while_keeps_the_run_waiting_and_no_longer(
    point: str, federation: Federation, survives: Survives
) -> None:
    survives("clock set by an hour")
    wrong, coordinator = federation.happened, federation.coordinator
    coordinator.program.stop()
    coordinator.start_by("-m", "tests.network.dying", wrong, point, 0, "serving", "start", coordinator.folder)
    coordinator.sees(*federation.sites)
    run = federation.run(*THREE)
    federation.north.works_on("train", 2)
    wrong.touch()
    assert [site.program.ends() for site in federation.sites] == [ClientExitCode.CLOCK] * 3, (
        "told that the clocks differ"
    )
    wrong.unlink()
    federation.gather()
    federation.ends_unharmed(run, 3, *THREE)
    coordinator.program.stop()
    coordinator.start()


def test_nobody_works_twice_in_one_folder(federation: Federation, survives: Survives) -> None:
    survives("two programs in one folder", 4, same_model=False)
    here, experiment = federation.machine, federation.experiment
    sets = ("--backend", "inline", *settings(SLOW, "run.rounds=1"))
    first = federation.run(SLOW, "run.rounds=1")
    federation.north.works_on("train", 1)
    with federation.north.program.frozen():
        programs = [
            federation.run("run.rounds=1", out="other"),
            here.start("second", "-m", "polyclinic.server.cli", "start", federation.coordinator.folder),
            here.start("second", "-m", "polyclinic.client.cli", "start", federation.east.folder),
            here.start(
                "second", "-m", "polyclinic.studies.cli", "run", experiment, "--out", federation.out, "--resume", *sets
            ),
        ]
        assert [program.ends() for program in programs] == [2] * 4
    names = ("flwr-server run", "flwr-server start", "flwr-client", "run")
    for program, name in zip(programs, names, strict=True):
        assert re.search(f"another {name} (is at work in|runs on) this folder.", program.output)
    assert not (federation.folder / "other").exists()
    first.succeeds()
    assert len(lines_of(federation.out / "rounds.jsonl")) == 1


def test_a_killed_start_takes_its_superlink_along(federation: Federation, survives: Survives) -> None:
    survives("SIGKILL of flwr-server start")
    coordinator = federation.coordinator
    run = federation.run(*THREE)
    federation.north.works_on("train", 2)
    superlink = coordinator.superlink
    coordinator.program.kill()
    eventually(lambda: not superlink.is_running() or superlink.status() == "zombie", "the SuperLink ends with it")
    coordinator.start()
    federation.ends_unharmed(run, 3, *THREE)


def test_a_run_that_is_stopped_on_request_goes_on(federation: Federation, survives: Survives) -> None:
    survives("SIGTERM to a run")
    overrides = ("training.epochs=40", "run.rounds=2", REMEMBERING)
    run = federation.run(*overrides)
    federation.north.works_on("train", 2)
    assert run.stop() == RunExitCode.ON_REQUEST
    assert events(federation.out, "stopped")[-1]["reason"] == "on request"
    federation.north.program.says("the work on it is dropped")
    (typed,) = re.findall(r"to go on: (flwr-server run .*)", run.output)
    program, *arguments = shlex.split(typed)
    assert program == "flwr-server"
    again = federation.coordinator.lead("-m", "polyclinic.server.cli", *arguments)
    federation.ends_unharmed(again, 2, *overrides)


def test_a_site_that_is_stopped_lets_go_of_its_training(federation: Federation, survives: Survives) -> None:
    survives("SIGTERM to a site", same_model=False)
    run = federation.run("training.epochs=60", "run.rounds=1", "participation.min_sites=2")
    federation.north.works_on("train", 1)
    began = time.monotonic()
    assert federation.north.program.stop() == 0
    assert time.monotonic() - began < 10
    run.says("north signed off")
    run.succeeds()
    assert sites_by_round(federation.out) == [["east", "south"]]


MEGABYTES = 32
FULL_S = 8.0


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[Federation]:
    """The coordinator's ``state`` is on a small disk."""
    with admitted(tmp_path, PARTIAL) as federation:
        (federation.coordinator.folder / "state").mkdir(exist_ok=True)
        with disk(federation.coordinator.folder / "state", MEGABYTES * 1024):
            federation.coordinator.start()
            federation.gather()
            yield federation


def test_a_full_disk_under_the_superlink_costs_time(cramped: Federation, survives: Survives) -> None:
    survives("disk full under the SuperLink")
    run = cramped.run(*THREE)
    cramped.north.works_on("train", 2)
    filler = fill(cramped.coordinator.folder / "state")
    time.sleep(FULL_S)
    assert count_checkpointed_rounds(cramped.out) == 1  # nothing went on meanwhile
    filler.unlink()
    cramped.ends_unharmed(run, 3, *THREE)
