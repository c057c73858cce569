"""SIGKILL at named points and at random ones: the run goes on by itself and ends in the undisturbed run's model."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyclinic.client.connection.pending import PendingMessage
from tests.network.conftest import Survives
from tests.network.federated import EVERYBODY, REMEMBERING, SLOW, Federation, events, sites_by_round, undisturbed
from tests.network.real import eventually, flwr_client, flwr_server

pytestmark = [pytest.mark.slow, pytest.mark.torture]
OVERRIDES = ("run.rounds=3", REMEMBERING)


@pytest.fixture(scope="module")
def model(standing: Federation, tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(standing.experiment, tmp_path_factory.mktemp("through") / "run", *OVERRIDES)


LEADING = (
    "before sending",
    "after sending",
    "with a reply that it has not noted",
    "in aggregation",
    "half-way through a checkpoint's state",
    "between a checkpoint's two files",
    "between two rounds",
)


def every_reply_is_in_the_receipt(federation: Federation, out: Path) -> None:
    """Check the receipt as the coordinator and each site do."""
    checks = [flwr_server("verify", out)]
    options = ("--receipt", out / "receipt.json")
    checks += [flwr_client("audit", "verify", site.folder, *options) for site in federation.sites]
    assert [check.err or check.out for check in checks if check.code] == []


@pytest.mark.parametrize("point", [*LEADING, "our own mistake"])
def test_the_process_that_leads_dies_and_is_begun_again_by_the_one_that_stays(
    point: str, federation: Federation, model: str, survives: Survives
) -> None:
    survives("our own exception" if point == "our own mistake" else "SIGKILL of the leading process")
    run = federation.run_struck(point, *OVERRIDES)
    federation.ends_unharmed(run, 3, model=model)
    assert federation.happened.exists()
    (died,) = events(federation.out, "died")
    assert died["times"] == 1
    assert died["how"] in run.output
    assert len(events(federation.out, "resumed")) == 1
    every_reply_is_in_the_receipt(federation, federation.out)


@pytest.mark.parametrize("point", ["before sending", "after sending", "in aggregation", "between two rounds"])
def test_the_superlink_is_killed_and_no_round_is_lost(
    point: str, federation: Federation, model: str, survives: Survives
) -> None:
    survives("SIGKILL of the SuperLink")
    run = federation.run_struck(point, *OVERRIDES, victim=federation.coordinator.superlink.pid)
    federation.ends_unharmed(run, 3, model=model)
    assert federation.happened.exists()
    federation.coordinator.program.says("the SuperLink ended with -9")


AT_THE_SITE = (
    "while training",
    "half-way through its memory",
    "after its memory is written",
    "before it sends",
    "while it sends",
    "after it has sent",
)


@pytest.mark.parametrize("point", AT_THE_SITE)
def test_a_site_dies_and_is_started_again(point: str, federation: Federation, model: str, survives: Survives) -> None:
    survives("SIGKILL of a site")
    north = federation.north
    federation.strike(north, point)
    run = federation.run(*OVERRIDES)
    eventually(lambda: not north.program.runs, f"north dies {point}")
    north.start()
    federation.ends_unharmed(run, 3, model=model)
    assert federation.happened.exists()


@pytest.mark.parametrize("point", ["while training", "half-way through its memory", "after its memory is written"])
def test_a_site_that_dies_goes_on_with_the_model_of_its_own(
    point: str, federation: Federation, survives: Survives
) -> None:
    survives("SIGKILL of a site")
    overrides = (*OVERRIDES, "run.method=ditto")  # whose run is named by the hash of the sites' own models
    federation.strike(federation.north, point)
    run = federation.run(*overrides)
    eventually(lambda: not federation.north.program.runs, f"north dies {point}")
    federation.north.start()
    federation.ends_unharmed(run, 3, *overrides)
    assert federation.happened.exists()


@pytest.mark.parametrize("seed", [20261121, 7])
def test_whoever_is_killed_whenever_the_model_is_the_same(
    seed: int, federation: Federation, survives: Survives, record_property: Callable[[str, object], None]
) -> None:
    record_property("seed", seed)
    survives("SIGKILL at a random point", 5)
    draw, overrides = random.Random(seed), (SLOW, "run.rounds=6", REMEMBERING)
    run = federation.run(*overrides)
    for server_round in range(1, 6):
        victim, after_s = draw.choice(["run", "superlink", "east", "north", "south"]), draw.uniform(0.0, 1.5)
        print(f"seed {seed}: round {server_round}, {after_s:.2f} s after a site trains in it: SIGKILL of {victim}")
        done = federation.out / "checkpoints" / f"round-{server_round - 1:06d}.json"
        eventually(lambda done=done, n=server_round: n == 1 or done.exists() or not run.runs, str(done))
        time.sleep(after_s)
        if victim == "run":
            federation.coordinator.kill_leading(run)
        elif victim == "superlink":
            federation.coordinator.kill_superlink()
            eventually(lambda: federation.coordinator.now["superlink"] == "up", "the SuperLink is back")
        else:
            site = {site.name: site for site in federation.sites}[victim]
            site.program.kill()
            site.start()
    federation.ends_unharmed(run, 6, *overrides)
    every_reply_is_in_the_receipt(federation, federation.out)


def test_stops_on_request_in_a_long_step_are_no_deaths_and_the_site_finishes_its_work(federation: Federation) -> None:
    north = federation.north
    federation.stop(north)
    north.start_by("-m", "tests.network.slow_step", "start", north.folder)
    federation.coordinator.sees(*federation.sites)
    run = federation.run("run.rounds=1", "participation.min_sites=3", once=True)
    for _ in range(2):
        north.works_on("train", 1)
        time.sleep(1.0)  # into the step
        assert north.program.stop() == 0
        attempts, _ = PendingMessage(north.folder / "state" / "in-hand").read_message() or (None, b"")
        assert attempts == 0
        north.start_by("-m", "tests.network.slow_step", "start", north.folder)
    run.succeeds()
    assert sites_by_round(federation.out) == [EVERYBODY]
    assert not (north.folder / "state" / "set-aside").exists()
