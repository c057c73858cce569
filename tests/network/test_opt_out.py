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
    run.succeeds()
    assert sites_by_round(tmp_path / "run") == [sorted(HOSPITALS)] * 8
    events = [entry for entry in entries(north) if entry.get("event") == "patients"]
    assert [entry["opted_out"] for entry in events] == [3]
    trained = [
        entry["round"]
        for entry in entries(north)
        if entry["n"] > events[0]["n"] and entry.get("record") == "TrainReply"
    ]
    assert 8 in trained
    assert not [entry for site in sites if site is not north for entry in entries(site) if "opted_out" in entry]
    # The next run begins without them.
    again = federation[0].run(federation[2], tmp_path / "again", sites=3, once=True)
    again.succeeds()
    assert images_of_north(tmp_path / "again") == images_of_north(tmp_path / "run") - 6


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
