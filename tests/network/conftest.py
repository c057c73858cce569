"""Running coordinators for tests that can share one: each test brings its sites, or there are three."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.network.federated import Federation, admitted
from tests.network.real import PARTIAL, Coordinator, Machine, Site, exported, machine, written


@dataclass(frozen=True)
class Trial:
    """A running coordinator, an experiment, and folders of three sites' images."""

    machine: Machine
    coordinator: Coordinator
    experiment: Path
    sites: tuple[Path, ...]


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    with machine(tmp_path_factory.mktemp("trial") / "machine") as here:
        experiment = written(PARTIAL, here.folder)
        sites = exported(experiment, here.folder / "data")
        coordinator = Coordinator(here, listen="0.0.0.0")
        coordinator.start()
        yield Trial(here, coordinator, experiment, tuple(sites))


Hospital = Callable[..., Site]


@pytest.fixture
def hospital(trial: Trial) -> Iterator[Hospital]:
    """Makes and admits a site of this name and policy, with the images of ``east``; ends it after the test."""
    sites: list[Site] = []

    def make(name: str, policy: str = "") -> Site:
        site = trial.coordinator.admit(trial.coordinator.site(trial.sites[0], name))
        sites.append(site)
        site.edit(site.toml, ("[policy]", f"[policy]\n{policy}"))
        return site

    yield make
    for site in sites:
        site.end()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this machine names a proxy."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running coordinator with three sites of its own, for the tests of several modules."""
    with admitted(tmp_path_factory.mktemp("standing"), PARTIAL) as federation:
        federation.coordinator.start()
        yield federation


@pytest.fixture
def federation(standing: Federation, tmp_path: Path) -> Iterator[Federation]:
    """All three connected, whatever was done to them, and no run of an earlier test under way."""
    standing.folder = tmp_path
    standing.gather()
    yield standing
    standing.coordinator.end_runs()


Survives = Callable[..., None]


@pytest.fixture
def survives(record_property: Callable[[str, object], None]) -> Survives:
    """Notes for ``make torture`` which harm a run survived, how often, and that it ended in the undisturbed model."""

    def note(kind: str, times: int = 1, *, same_model: bool = True) -> None:
        record_property("survived", (kind, times) if times > 1 else kind)
        if same_model:
            record_property("same model", kind)

    return note
