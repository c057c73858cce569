"""A federation to be harmed, and what its run folder says afterwards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.network.real import Coordinator, Machine, Program, Site, exported, flwr_sim, lines_of, machine, written

SLOW = "training.epochs=6"
"""Rounds of a second or so, to be hit in."""
REMEMBERING = "training.reset_optimizer=false"
"""The sites keep their optimisers' state, so that it matters which of their rounds counted."""
EVERYBODY = ["east", "north", "south"]


@dataclass
class Federation:
    """A coordinator and three sites."""

    machine: Machine
    coordinator: Coordinator
    experiment: Path
    east: Site
    north: Site
    south: Site

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.east, self.north, self.south

    def run(
        self, out: Path, *overrides: str, sites: int = 3, options: Sequence[str] = (), once: bool = False
    ) -> Program:
        return self.coordinator.run(self.experiment, out, *overrides, sites=sites, options=options, once=once)

    def run_struck(self, folder: Path, point: str, *overrides: str, victim: int = 0) -> Program:
        """A run to whose leading process something happens in round 2; see :mod:`tests.network.dying`."""
        sets = [part for override in overrides for part in ("--set", override)]
        command = ("run", self.coordinator.folder, self.experiment, "--out", folder / "run", "--sites", 3)
        launcher = ("-m", "tests.network.dying", folder / "happened", point, victim, "supervised")
        return self.coordinator.lead(*launcher, *command, *sets)

    def strike(self, site: Site, folder: Path, point: str) -> None:
        """Start a site anew, to which something happens in round 2."""
        site.program.stop()
        site.start_by("-m", "tests.network.dying", folder / "happened", point, 0, "client", "start", site.folder)
        self.coordinator.sees(*self.sites)

    def ends_unharmed(self, run: Program, folder: Path, rounds: int, *overrides: str) -> None:
        """The run ends, all sites took part in each round, and the model is that of an undisturbed run."""
        assert run.ends() == 0, run.said
        assert sites_by_round(folder / "run") == [EVERYBODY] * rounds
        assert hash_in(folder / "run") == undisturbed(self.experiment, folder / "through", *overrides)

    def gather(self) -> None:
        """Start anyone who does not run, and wait until all are there."""
        for site in self.sites:
            site.start_if_down()
        self.coordinator.sees(*self.sites)


@contextmanager
def admitted(folder: Path, experiment: str) -> Iterator[Federation]:
    """Three sites and a coordinator, of which none has been started."""
    file = written(experiment, folder)
    with machine(folder / "machine") as here:
        coordinator = Coordinator(here)
        sites = [coordinator.admit(coordinator.site(one)) for one in exported(file, folder / "data")]
        yield Federation(here, coordinator, file, *sites)


@contextmanager
def connected(
    experiment: Path, folder: Path, programs: Mapping[str, str] | None = None
) -> Iterator[tuple[Coordinator, list[Site]]]:
    """A coordinator in touch with the experiment's sites; a site in ``programs`` runs that one, not ``client.cli``."""
    with machine(folder) as here:
        coordinator = Coordinator(here)
        sites = [coordinator.admit(coordinator.site(one)) for one in exported(experiment, here.folder / "data")]
        coordinator.start()
        for site in sites:
            site.start_by("-m", (programs or {}).get(site.name, "client.cli"), "start", site.folder)
        coordinator.sees(*sites)
        yield coordinator, sites


def hash_in(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["model_sha256"])


def undisturbed(experiment: Path, out: Path, *overrides: str) -> str:
    """The hash of the model that simulation trains."""
    sets = [part for override in overrides for part in ("--set", override)]
    with patch("server.federation.set_up.write_pages"):  # nobody looks at them here
        assert flwr_sim("run", experiment, "--backend", "inline", "--out", out, *sets).code == 0
    return hash_in(out)


def sites_by_round(folder: Path) -> list[list[str]]:
    return [line["sites"] for line in lines_of(folder / "rounds.jsonl")]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder / "events.jsonl") if line["event"] == kind]
