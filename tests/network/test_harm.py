"""What else happens to a federation: lines cut, disks full, clocks set, slow sites, programs begun twice or stopped."""

import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.connection.exit_codes import ExitCode
from server.deployment.supervisor import RunExit
from tests.network.conftest import Survives
from tests.network.federated import (
    EVERYBODY,
    REMEMBERING,
    SLOW,
    Federation,
    events,
    hash_in,
    sites_by_round,
    undisturbed,
)
from tests.network.real import Coordinator, Program, eventually, flwr_sim, free_ports, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.torture]
CUT_S = 20.0


# ---------------------------------------------------------------------- lines


@pytest.fixture
def lines(federation: Federation) -> Iterator[dict[str, Program]]:
    """East and north reach the coordinator through a line of their own that can be cut."""
    made, port = dict[str, Program](), federation.coordinator.port
    sites = (federation.east, federation.north)
    for site, own in zip(sites, free_ports(2), strict=True):
        made[site.name] = federation.machine.start("line", "-m", "tests.network.proxy", own, port)
        made[site.name].says("open")
        site.program.stop()
        site.edit(site.kit, (f":{port}", f":{own}"))
        site.start().says("connected to trial")
    federation.coordinator.sees(*sites)
    yield made
    for site in sites:
        site.end()
        text = site.kit.read_text(encoding="utf-8")
        site.kit.write_text(re.sub(r"(127\.0\.0\.1):\d+", rf"\1:{port}", text), encoding="utf-8")
        made[site.name].kill()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGUSR2], ids=["silent", "reset"])
def test_lines_that_are_cut_for_20_s_cost_time_and_nothing_else(
    how: signal.Signals, federation: Federation, lines: dict[str, Program], tmp_path: Path, survives: Survives
) -> None:
    survives("network cut of 20 s")
    overrides = (SLOW, "run.rounds=3", REMEMBERING)
    run = federation.run(tmp_path / "run", *overrides)
    federation.north.works_on("train", 2)
    for line in lines.values():
        line.process.send_signal(how)
    time.sleep(CUT_S)
    for line in lines.values():
        line.process.send_signal(signal.SIGHUP)
    federation.ends_unharmed(run, tmp_path, 3, *overrides)


# ---------------------------------------------------------------------- disks


def test_a_coordinator_whose_disk_is_full_stops_says_what_to_free_and_goes_on_afterwards(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("disk full at the coordinator")
    overrides = ("run.rounds=3", REMEMBERING)
    run = federation.run_struck(tmp_path, "disk full", *overrides)
    assert run.ends() == RunExit.STOPPED
    assert f"no room on the disk of {tmp_path / 'run'}: free some, then go on with: flwr-server run" in run.said
    again = federation.run(tmp_path / "run", *overrides, options=("--resume",))
    assert again.ends() == 0, again.said
    assert hash_in(tmp_path / "run") == undisturbed(federation.experiment, tmp_path / "through", *overrides)


def test_a_site_whose_disk_is_full_says_so_and_the_run_goes_on_without_its_update(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("disk full at a site", same_model=False)
    federation.strike(federation.north, tmp_path, "disk full")
    run = federation.run(tmp_path / "run", SLOW, "run.rounds=3", REMEMBERING, "participation.min_sites=2")
    run.says("round 2 of 3")
    (tmp_path / "happened").unlink()  # somebody freed some
    assert run.ends() == 0, run.said
    rounds = lines_of(tmp_path / "run" / "rounds.jsonl")
    assert rounds[1]["absent"] == {"north": "no room on the site's disk; it has to free some"}
    assert "No space left on device" in federation.north.program.said
    assert rounds[0]["sites"] == EVERYBODY
    assert federation.north.program.runs


# ---------------------------------------------------------------------- clocks


@pytest.mark.parametrize("point", ["clock +1", "clock -1"])
def test_a_coordinators_clock_that_is_set_in_a_round_changes_nothing(
    point: str, federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("clock set by an hour")
    overrides = ("run.rounds=3", REMEMBERING)
    run = federation.run_struck(tmp_path, point, *overrides)
    federation.ends_unharmed(run, tmp_path, 3, *overrides)
    assert (tmp_path / "happened").exists()


def test_a_site_whose_clock_is_set_wrong_is_told_so_and_costs_only_its_own_update(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("clock set by an hour", same_model=False)
    federation.strike(federation.north, tmp_path, "clock +1")
    run = federation.run(tmp_path / "run", SLOW, "run.rounds=3", "participation.min_sites=2")
    assert federation.north.program.ends() == ExitCode.CLOCK
    assert run.ends() == 0, run.said
    assert sites_by_round(tmp_path / "run")[:2] == [EVERYBODY, ["east", "south"]]


@pytest.mark.parametrize("point", ["clock +1", "clock -1"])
def test_a_superlink_whose_clock_is_wrong_for_a_while_keeps_the_run_waiting_and_no_longer(
    point: str, federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("clock set by an hour")
    wrong, overrides, coordinator = tmp_path / "wrong", (SLOW, "run.rounds=3", REMEMBERING), federation.coordinator
    coordinator.program.stop()
    coordinator.start_by("-m", "tests.network.dying", wrong, point, 0, "serving", "start", coordinator.folder)
    coordinator.sees(*federation.sites)
    run = federation.run(tmp_path / "run", *overrides)
    federation.north.works_on("train", 2)
    wrong.touch()
    assert [site.program.ends() for site in federation.sites] == [ExitCode.CLOCK] * 3, "told that the clocks differ"
    wrong.unlink()
    federation.gather()
    federation.ends_unharmed(run, tmp_path, 3, *overrides)
    coordinator.program.stop()
    coordinator.start()


# ---------------------------------------------------------------------- slow


def test_a_site_twice_as_slow_as_the_deadline_costs_only_its_own_update(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("site slower than the deadline", same_model=False)
    deadlines = ("participation.min_sites=2", "participation.round_deadline_s=20")
    run = federation.run(tmp_path / "run", "run.rounds=3", *deadlines)
    federation.south.works_on("train", 1)
    with federation.south.program.frozen():
        run.says("round 2 of 3")
    assert run.ends() == 0, run.said
    rounds = lines_of(tmp_path / "run" / "rounds.jsonl")
    assert [line["sites"] for line in rounds[:2]] == [["east", "north"]] * 2
    assert rounds[0]["absent"] == {"south": "no reply within 20 s"}


# ---------------------------------------------------------------------- begun twice


def test_nobody_leads_serves_or_trains_twice_in_one_folder(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("two programs in one folder", 3, same_model=False)
    first = federation.run(tmp_path / "run", SLOW, "run.rounds=1")
    federation.north.works_on("train", 1)
    with federation.north.program.frozen():
        second = federation.run(tmp_path / "other", "run.rounds=1")
        start = federation.machine.start("second", "-m", "server.cli", "start", federation.coordinator.folder)
        site = federation.machine.start("second", "-m", "client.cli", "start", federation.east.folder)
        assert [program.ends() for program in (second, start, site)] == [2, 2, 2]
    assert "another flwr-server run is at work in this folder." in second.said
    assert "another flwr-server start is at work in this folder." in start.said
    assert "another flwr-client runs on this folder." in site.said
    assert not (tmp_path / "other").exists()
    assert first.ends() == 0, first.said


# ---------------------------------------------------------------------- killed with everything, stopped on request


def test_a_killed_flwr_server_start_takes_its_superlink_along_and_the_next_one_takes_over(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("SIGKILL of flwr-server start")
    coordinator, overrides = federation.coordinator, (SLOW, "run.rounds=3", REMEMBERING)
    run = federation.run(tmp_path / "run", *overrides)
    federation.north.works_on("train", 2)
    superlink = coordinator.superlink
    coordinator.program.kill()
    eventually(lambda: not superlink.is_running() or superlink.status() == "zombie", "the SuperLink ends with it")
    coordinator.start()
    assert run.ends() == 0, run.said
    assert hash_in(tmp_path / "run") == undisturbed(federation.experiment, tmp_path / "through", *overrides)


def test_a_run_that_is_stopped_on_request_tells_its_sites_says_how_to_go_on_and_does(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("SIGTERM to a run")
    overrides = ("training.epochs=40", "run.rounds=2", REMEMBERING)
    run = federation.run(tmp_path / "run", *overrides)
    federation.north.works_on("train", 2)
    assert run.stop() == RunExit.ON_REQUEST
    assert events(tmp_path / "run", "stopped")[-1]["reason"] == "on request"
    federation.north.program.says("the work on it is dropped")
    (typed,) = re.findall(r"to go on: (flwr-server run .*)", run.said)
    program, *arguments = shlex.split(typed)
    assert program == "flwr-server"
    again = federation.coordinator.lead("-m", "server.cli", *arguments)
    assert again.ends() == 0, again.said
    assert hash_in(tmp_path / "run") == undisturbed(federation.experiment, tmp_path / "through", *overrides)


def test_a_site_that_is_stopped_lets_go_of_its_training_and_the_round_does_not_wait_for_it(
    federation: Federation, tmp_path: Path, survives: Survives
) -> None:
    survives("SIGTERM to a site", same_model=False)
    run = federation.run(tmp_path / "run", "training.epochs=60", "run.rounds=1", "participation.min_sites=2")
    federation.north.works_on("train", 1)
    began = time.monotonic()
    assert federation.north.program.stop() == 0
    assert time.monotonic() - began < 10
    run.says("north signed off")
    assert run.ends() == 0, run.said
    assert sites_by_round(tmp_path / "run") == [["east", "south"]]


def test_two_runs_never_write_into_one_folder(federation: Federation, tmp_path: Path, survives: Survives) -> None:
    survives("two programs in one folder", same_model=False)
    run = federation.run(tmp_path / "run", SLOW, "run.rounds=3")
    federation.north.works_on("train", 2)
    sets = ("--backend", "inline", "--set", SLOW, "--set", "run.rounds=3")
    other = flwr_sim("run", federation.experiment, "--out", tmp_path / "run", "--resume", *sets)
    assert other.code == 2
    assert "another run is at work in this folder." in other.err
    assert run.ends() == 0, run.said
    assert len(lines_of(tmp_path / "run" / "rounds.jsonl")) == 3


def test_a_second_coordinator_on_the_ports_of_the_first_says_so(federation: Federation, survives: Survives) -> None:
    survives("two programs in one folder", same_model=False)
    other = Coordinator(federation.machine, "other")
    text = (other.folder / "coordinator.toml").read_text(encoding="utf-8")
    text = text.replace(str(other.port), str(federation.coordinator.port))
    (other.folder / "coordinator.toml").write_text(text, encoding="utf-8")
    second = federation.machine.start("other", "-m", "server.cli", "start", other.folder)
    assert second.ends() == 2
    assert "address already in use. Stop what uses it, or set another port" in second.said
