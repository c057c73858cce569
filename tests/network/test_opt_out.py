"""Over the network: a patient who opts out during a run is left out from the next round on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from polyclinic.common.security.audit import AuditLog
from tests.federations import INLINE_RUN
from tests.network.federated import connected, sites_by_round
from tests.network.real import Coordinator, Program, Site, eventually, summary_of, written

pytestmark = pytest.mark.slow

EXPERIMENT = f"""{INLINE_RUN}
[participation]
min_sites = 2
"""
SITE = """name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
label_columns = ["large", "odd"]
image_size = 16
opt_out = "cat opted-out.txt"
"""
"""The command runs in the folder of site.toml."""


HOSPITALS = ("east", "north", "south")
SLOW = ("run.rounds=8", "training.epochs=4")


def write_hospital(folder: Path, part: int) -> Path:
    """A third of 600 digits as pictures, two of each patient."""
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    lines = ["image,patient,large,odd"]
    for place, index in enumerate(range(part, 600, 3)):
        Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(folder / "images" / f"{index}.png")
        digit = int(digits.target[index])
        lines.append(f"{index}.png,P-{place // 2},{int(digit > 4)},{digit % 2}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    (folder / "site.toml").write_text(SITE.format(name=folder.name))
    (folder / "opted-out.txt").write_text("")
    return folder


def entries(site: Site) -> list[dict[str, Any]]:
    return [dict(entry) for entry in AuditLog(site.folder / "state").read_entries()]


def rounds_in(run: Path) -> int:
    file = run / "rounds.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@dataclass(frozen=True)
class Federation:
    """Three connected hospitals by name, and their coordinator."""

    coordinator: Coordinator
    sites: dict[str, Site]
    experiment: Path

    def begin(self, out: Path) -> Program:
        """Start a run, and wait until its second round has ended."""
        run = self.coordinator.run(self.experiment, out, *SLOW, sites=3, once=True)
        eventually(lambda: rounds_in(out) >= 2, "round 2 ends", within_s=120)
        return run


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    experiment = written(EXPERIMENT, tmp_path)
    data = [write_hospital(tmp_path / "data" / name, part) for part, name in enumerate(HOSPITALS)]
    with connected(experiment, tmp_path / "machine", data=data) as (coordinator, sites):
        yield Federation(coordinator, {site.name: site for site in sites}, experiment)


def test_patients_who_opt_out_in_mid_run_are_left_out_of_the_next_rounds(
    federation: Federation, tmp_path: Path
) -> None:
    north, south = federation.sites["north"], federation.sites["south"]
    run = federation.begin(tmp_path / "run")
    (north.folder / "opted-out.txt").write_text("P-1\nP-2\np3\nnobody\n")
    edit_opt_out(south, 'opt_out = ["P-4", 5]')
    run.succeeds()
    assert sites_by_round(tmp_path / "run") == [sorted(HOSPITALS)] * 8
    events = [entry for entry in entries(north) if entry.get("event") == "patients"]
    assert [(entry["opted_out"], entry["opted_out_unmatched"]) for entry in events] == [(3, 1)]
    events_of_south = [entry for entry in entries(south) if entry.get("event") == "patients"]
    assert [(entry["opted_out"], entry["opted_out_unmatched"]) for entry in events_of_south] == [(2, 0)]
    trained = [
        entry["round"]
        for entry in entries(north)
        if entry["n"] > events[0]["n"] and entry.get("record") == "TrainReply"
    ]
    assert 8 in trained
    assert "nobody" in north.program.output
    assert "nobody" not in run.output + (tmp_path / "run" / "events.jsonl").read_text()
    assert not [entry for entry in entries(federation.sites["east"]) if "opted_out" in entry]
    # The next run begins without them.
    again = federation.coordinator.run(federation.experiment, tmp_path / "again", sites=3, once=True)
    again.succeeds()
    assert images_of_north(tmp_path / "again") == images_of_north(tmp_path / "run") - 6


def edit_opt_out(site: Site, line: str) -> None:
    """Write another line in place of that of ``opt_out`` of ``site.toml``."""
    path = site.folder / "site.toml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line if old.startswith("opt_out") else old for old in lines) + "\n")


def images_of_north(run: Path) -> int:
    return int(summary_of(run)["sites"]["north"]["train_samples"])


def test_a_site_that_cannot_ask_who_opted_out_trains_nothing_and_names_no_patient(
    federation: Federation, tmp_path: Path
) -> None:
    north = federation.sites["north"]
    run = federation.begin(tmp_path / "run")
    (north.folder / "opted-out.txt").unlink()
    run.succeeds()
    assert sites_by_round(tmp_path / "run")[-1] == ["east", "south"]
    seen_by_coordinator = (tmp_path / "run" / "events.jsonl").read_text() + run.output
    assert "OptOutsUnknown" in seen_by_coordinator
    assert "opted-out.txt" not in seen_by_coordinator
    assert "cat: opted-out.txt" in north.program.output


def test_a_site_whose_file_is_broken_in_mid_run_trains_nothing_until_it_is_repaired(
    federation: Federation, tmp_path: Path
) -> None:
    north = federation.sites["north"]
    run = federation.begin(tmp_path / "run")
    edit_opt_out(north, 'opt_out = ["P-1", "P-2')
    rounds = tmp_path / "run" / "rounds.jsonl"
    absence = '"north":"OptOutsUnknown'
    eventually(
        lambda: absence in rounds.read_text().replace('": "', '":"'), "a round goes on without north", within_s=120
    )
    edit_opt_out(north, 'opt_out = ["P-1", "P-2"]')
    run.succeeds()
    assert sites_by_round(tmp_path / "run")[-1] == sorted(HOSPITALS)
    assert "P-1" not in (tmp_path / "run" / "events.jsonl").read_text() + run.output
    assert [entry["opted_out"] for entry in entries(north) if entry.get("event") == "patients"] == [2]
