"""A federation to be harmed, and what its run folder says afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.network.real import (
    Coordinator,
    Machine,
    Program,
    Site,
    exported,
    flwr_sim,
    lines_of,
    machine,
    settings,
    summary_of,
    written,
)

SLOW = "training.epochs=6"
"""Rounds of a second or so, to be hit in."""
REMEMBERING = "training.reset_optimizer=false"
"""The sites keep their optimisers' state, so that it matters which of their rounds counted."""
EVERYBODY = ["east", "north", "south"]


@dataclass
class Federation:
    """A coordinator and three sites.

    Attributes:
        folder: Where runs of the present test are written.
    """

    folder: Path
    machine: Machine
    coordinator: Coordinator
    experiment: Path
    east: Site
    north: Site
    south: Site

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.east, self.north, self.south

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def happened(self) -> Path:
        """A file that is there once something has happened; see :mod:`tests.network.dying`."""
        return self.folder / "happened"

    def run(
        self, *overrides: str, out: str = "run", sites: int = 3, options: Sequence[str] = (), once: bool = False
    ) -> Program:
        folder = self.folder / out
        return self.coordinator.run(self.experiment, folder, *overrides, sites=sites, options=options, once=once)

    def run_struck(self, point: str, *overrides: str, victim: int = 0) -> Program:
        """A run to whose leading process something happens in round 2."""
        command = ("run", self.coordinator.folder, self.experiment, "--out", self.out, "--sites", 3)
        launcher = ("-m", "tests.network.dying", self.happened, point, victim, "supervised")
        return self.coordinator.lead(*launcher, *command, *settings(*overrides))

    def strike(self, site: Site, point: str) -> None:
        """Start a site anew, to which something happens in round 2."""
        site.program.stop()
        site.start_by("-m", "tests.network.dying", self.happened, point, 0, "client", "start", site.folder)
        self.coordinator.sees(*self.sites)

    def ends_unharmed(self, run: Program, rounds: int, *overrides: str, model: str = "") -> None:
        """The run ends, all sites took part in each round, and the model is that of an undisturbed run."""
        run.succeeds()
        assert sites_by_round(self.out) == [EVERYBODY] * rounds
        assert hash_in(self.out) == (model or undisturbed(self.experiment, self.folder / "through", *overrides))

    def stop(self, site: Site) -> None:
        """Stop a site, and wait until the coordinator knows."""
        assert site.program.stop() == 0
        self.coordinator.sees(site, state="stopped")

    @contextmanager
    def rerouted(self, ports: Mapping[str, int]) -> Iterator[None]:
        """Within it, these sites reach the coordinator on other ports; after it they are down."""
        own, sites = f":{self.coordinator.port}", [site for site in self.sites if site.name in ports]
        for site in sites:
            site.end()
            site.edit(site.kit, (own, f":{ports[site.name]}"))
            site.connect()
        self.coordinator.sees(*sites)
        yield
        for site in sites:
            site.end()
            site.edit(site.kit, (f":{ports[site.name]}", own))

    def gather(self) -> None:
        """Start anyone who does not run, and wait until all are there."""
        for site in self.sites:
            site.start_if_down()
        for site in self.sites:
            site.program.says("connected to ")  # the coordinator may still count a killed process as connected
        self.coordinator.sees(*self.sites)


@contextmanager
def admitted(folder: Path, experiment: str) -> Iterator[Federation]:
    """Three sites and a coordinator, of which none has been started."""
    file = written(experiment, folder)
    with machine(folder / "machine") as here:
        coordinator = Coordinator(here)
        sites = [coordinator.admit(coordinator.site(path)) for path in exported(file, folder / "data")]
        yield Federation(folder, here, coordinator, file, *sites)


@contextmanager
def connected(
    experiment: Path, folder: Path, programs: Mapping[str, str] | None = None, data: Sequence[Path] = ()
) -> Iterator[tuple[Coordinator, list[Site]]]:
    """A coordinator in touch with the experiment's sites, or with sites of these folders.

    Args:
        programs: Site -> the module that it runs instead of ``polyclinic.client.cli``.
    """
    with machine(folder) as here:
        coordinator = Coordinator(here)
        folders = data or exported(experiment, here.folder / "data")
        sites = [coordinator.admit(coordinator.site(path)) for path in folders]
        coordinator.start()
        for site in sites:
            site.start_by("-m", (programs or {}).get(site.name, "polyclinic.client.cli"), "start", site.folder)
        coordinator.sees(*sites)
        yield coordinator, sites


def hash_in(folder: Path) -> str:
    return str(summary_of(folder)["model_sha256"])


def undisturbed(experiment: Path, out: Path, *overrides: str) -> str:
    """The hash of the model that simulation trains."""
    with patch("polyclinic.server.federation.set_up.write_run_pages"):  # nobody looks at them here
        done = flwr_sim("run", experiment, "--backend", "inline", "--out", out, *settings(*overrides))
    assert done.code == 0, done.err
    return hash_in(out)


def sites_by_round(folder: Path) -> list[list[str]]:
    return [line["sites"] for line in lines_of(folder / "rounds.jsonl")]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder / "events.jsonl") if line["event"] == kind]
