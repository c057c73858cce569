"""Over the network: a patient who opts out during a run is left out from the next round on."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from polyclinic.common.security.audit import AuditLog
from tests.federations import DIGITS
from tests.network.federated import connected, sites_by_round
from tests.network.real import Coordinator, Program, Site, summary_of, written

pytestmark = pytest.mark.slow

EXPERIMENT = f"""{DIGITS.split("[data]")[0]}
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


def wait_for_round(run: Path, number: int) -> None:
    ends = time.monotonic() + 120
    while rounds_in(run) < number:
        assert time.monotonic() < ends, f"no round {number}"
        time.sleep(0.05)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[tuple[Coordinator, list[Site], Path]]:
    experiment = written(EXPERIMENT, tmp_path)
    data = [write_hospital(tmp_path / "data" / name, part) for part, name in enumerate(HOSPITALS)]
    with connected(experiment, tmp_path / "machine", data=data) as (coordinator, sites):
        yield coordinator, sites, experiment


Federation = tuple[Coordinator, list[Site], Path]


def begin(federation: Federation, out: Path) -> Program:
    coordinator, _, experiment = federation
    run = coordinator.run(experiment, out, *SLOW, sites=3, once=True)
    wait_for_round(out, 2)
    return run


def test_patients_who_opt_out_in_mid_run_are_left_out_of_the_next_rounds(
    federation: Federation, tmp_path: Path
) -> None:
    _, sites, _ = federation
    north = next(site for site in sites if site.name == "north")
    run = begin(federation, tmp_path / "run")
    (north.folder / "opted-out.txt").write_text("P-1\nP-2\np3\nnobody\n")
    south = next(site for site in sites if site.name == "south")
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
    east = next(site for site in sites if site.name == "east")
    assert not [entry for entry in entries(east) if "opted_out" in entry]
    # The next run begins without them.
    again = federation[0].run(federation[2], tmp_path / "again", sites=3, once=True)
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
    _, sites, _ = federation
    north = next(site for site in sites if site.name == "north")
    run = begin(federation, tmp_path / "run")
    (north.folder / "opted-out.txt").unlink()
    run.succeeds()
    assert sites_by_round(tmp_path / "run")[-1] == ["east", "south"]
    told = (tmp_path / "run" / "events.jsonl").read_text() + run.output
    assert "OptOutsUnknown" in told
    assert "opted-out.txt" not in told
    assert "cat: opted-out.txt" in north.program.output


def test_a_site_whose_file_is_broken_in_mid_run_trains_nothing_until_it_is_repaired(
    federation: Federation, tmp_path: Path
) -> None:
    _, sites, _ = federation
    north = next(site for site in sites if site.name == "north")
    run = begin(federation, tmp_path / "run")
    edit_opt_out(north, 'opt_out = ["P-1", "P-2')
    without = tmp_path / "run" / "rounds.jsonl"
    ends = time.monotonic() + 120
    while '"north":"OptOutsUnknown' not in without.read_text().replace('": "', '":"'):
        assert time.monotonic() < ends
        time.sleep(0.05)
    edit_opt_out(north, 'opt_out = ["P-1", "P-2"]')
    run.succeeds()
    assert sites_by_round(tmp_path / "run")[-1] == sorted(HOSPITALS)
    assert "P-1" not in (tmp_path / "run" / "events.jsonl").read_text() + run.output
    assert [entry["opted_out"] for entry in entries(north) if entry.get("event") == "patients"] == [2]
