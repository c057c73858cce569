"""Tables as hospitals send them, from ``flwr-sim init`` to a first run: its counts are those of the images."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.config import read_experiment
from polyclinic.data.base.image_set import concatenate_image_sets
from polyclinic.data.load import load_dataset
from polyclinic.data.partition.spec import ClassListsPartitionSpec
from polyclinic.strategies.registry import find_method_faults
from tests.network.real import flwr_sim


@dataclass(frozen=True)
class Reading:
    """One image as it is: its hospital, its patient, and the classes that the hospital looked for."""

    hospital: str
    patient: int
    shows: Mapping[str, bool]


@dataclass(frozen=True)
class Messy:
    """A table of somebody's making.

    Attributes:
        line: Returns the cells of an image, given its number.
        options: Options of ``flwr-sim init`` beside the table.
        names: The classes by the names of the table, where these differ.
        notes: Parts of the output of ``init``.
    """

    looked_for: Mapping[str, Sequence[str]]
    header: Sequence[str]
    line: Callable[[int, Reading], Sequence[str]]
    separator: str = ","
    encoding: str = "utf-8"
    suffix: str = ".png"
    options: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    twice: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)


def cells(reading: Reading, classes: Sequence[str]) -> list[str]:
    """The cells of label columns: 1, 0, or nothing where the hospital did not look."""
    return [str(int(reading.shows[name])) if name in reading.shows else "" for name in classes]


def findings(reading: Reading, mark: str, no_finding: str) -> str:
    return mark.join(name for name, shown in reading.shows.items() if shown) or no_finding


SAME, CHEST = ("Effusion", "Mass"), ("Fluid", "Mass", "Nodule")
TABLES = {
    "a hospital's own export": Messy(
        {"": CHEST},
        ("Bild Nr", "Patient ID", "Alter", "Geschlecht", *CHEST, "Bemerkung"),
        lambda n, r: (f"{n:03}", f"P{r.patient}", f"{40 + n},5", "mw"[n % 2], *cells(r, CHEST), "a; b"),
        separator=";",
        encoding="utf-8-sig",
        twice=7,
        notes=("7 lines said the same as an earlier one", "patients: column Patient ID"),
    ),
    "findings in one column": Messy(
        {"": ("Effusion", "Mass", "Nodule")},
        ("Image", "Finding Labels", "Follow-up", "Patient ID", "View Position"),
        lambda n, r: (
            f"{n:03}.png",
            findings(r, "|", "No Finding"),
            str(n % 3 + 1),
            str(r.patient),
            ("PA", "AP")[n % 2],
        ),
        notes=("patients: column Patient ID",),
    ),
    "hospitals with their own names": Messy(
        {"St. Mary's": SAME, "Süd": ("Effusion", "Nodule"), "Nord": ("Effusion", "Nodule")},
        ("filename", "HospitalName", "patient", "Effusion", "effusion_", "Mass", "Nodule"),
        lambda n, r: (
            f"{n:03}.png",
            r.hospital,
            f"{r.hospital[:2]}{r.patient}",
            *(["", *cells(r, ("Effusion",))] if r.hospital == "Süd" else [*cells(r, ("Effusion",)), ""]),
            *cells(r, ("Mass", "Nodule")),
        ),
        separator="\t",
        names={"effusion_": "Effusion"},
        sources={"St. Mary's": "St. Mary_s"},
        notes=('one class or two? "effusion_" = "Effusion"',),
    ),
    "German findings, decimal commas, Latin letters": Messy(
        {"Klinikum Köln": ("Erguß", "Ödem"), "Klinikum Bonn": ("Erguß", "Rundherd")},
        ("Datei", "Klinik", "Pat.-Nr.", "Patient", "Dosis", "Befund"),
        lambda n, r: (
            *(f"Bilder\\{n:03}.PNG", r.hospital, "", f"{r.hospital[-4:]}/{r.patient}", f"{n},25"),
            findings(r, ", ", "Normal"),
        ),
        separator=";",
        encoding="cp1252",
        options=("--source-column", "Klinik", "--findings", "Befund"),
    ),
    "no endings, patients in three ways": Messy(
        {"1": ("Fluid", "Mass"), "2": ("Fluid", "Nodule"), "3": ("Mass", "Nodule")},
        ("study", "site", "subject", *CHEST),
        lambda n, r: (
            *(f"IMG{n:04}", r.hospital),
            ("P-{}{:03}", "p{}{:03}", "P {}{:03}")[n % 3].format(r.hospital, r.patient),
            *cells(r, CHEST),
        ),
        suffix="",
        options=("--join-patients",),
    ),
}


def readings(messy: Messy) -> list[Reading]:
    """Thirty patients a hospital with two images each, of which classes show independently."""
    random = np.random.default_rng(5)
    return [
        Reading(hospital, patient, {name: bool(random.random() < 0.4) for name in classes})
        for hospital, classes in messy.looked_for.items()
        for patient in range(1, 31)
        for _ in range(2)
    ]


def write(folder: Path, messy: Messy) -> list[Reading]:
    images = readings(messy)
    (folder / "Bilder").mkdir(parents=True)
    lines = []
    for number, reading in enumerate(images):
        line = messy.line(number, reading)
        name = line[0].split("\\")[-1] if line[0].endswith(("G", "g")) else line[0] + messy.suffix
        Image.fromarray(np.full((16, 16), number, np.uint8)).save(folder / "Bilder" / name, "PNG")
        lines.append(line)
    with (folder / "labels.csv").open("w", newline="", encoding=messy.encoding) as file:
        csv.writer(file, delimiter=messy.separator).writerows([messy.header, *lines, *lines[: messy.twice]])
    return images


@pytest.mark.parametrize("name", TABLES)
def test_the_first_run_counts_what_the_images_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messy = TABLES[name]
    images = write(tmp_path, messy)
    monkeypatch.chdir(tmp_path)
    ended = flwr_sim("init", "labels.csv", "--out", "mine.toml", *messy.options)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    assert [note for note in messy.notes if note not in text] == []
    (command,) = [line for line in ended.out.splitlines() if line.startswith("Next: ")]
    if messy.names:  # confirmed as a person does
        lines = (tmp_path / "mine.toml").read_text(encoding="utf-8")
        (tmp_path / "mine.toml").write_text(lines.replace("# synonyms", "synonyms"), encoding="utf-8")
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda out: None)
    ended = flwr_sim(
        *command.partition("flwr-sim ")[2].split(), "--set", "run.rounds=1", "--set", "model.image_size=16"
    )
    assert ended.code == 0, ended.err

    experiment = read_experiment(tmp_path / "mine.toml", [], find_method_faults).experiment
    assert experiment.data is not None
    splits = load_dataset(experiment.data, tmp_path)
    data = concatenate_image_sets(splits.parts)
    expected, counted = Counter[tuple[str, str, bool]](), Counter[tuple[str, str, bool]]()
    for reading in images:
        site = messy.sources.get(reading.hospital, reading.hospital)
        expected.update((site, label, shown) for label, shown in reading.shows.items())
    lists: Mapping[str, Sequence[str]] = {"": data.class_names}
    if isinstance(experiment.partition, ClassListsPartitionSpec):
        lists = experiment.partition.lists
    for source, row in zip(data.sources.tolist(), data.labels, strict=True):
        counted.update((source, label, bool(row[data.class_names.index(label)])) for label in lists[source])
    assert counted == expected
    assert {site: set(labels) for site, labels in lists.items()} == {
        messy.sources.get(site, site): set(labels) for site, labels in messy.looked_for.items()
    }
    assert len(set(data.patients.tolist())) == len({(reading.hospital, reading.patient) for reading in images})
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["rounds"] == 1
    tested = splits.test  # of a class, by the images of hospitals that look for it, and by no other
    for column, label in enumerate(data.class_names):
        own = np.isin(tested.sources, [source for source, names in lists.items() if label in names])
        positives = int((tested.labels[own, column] == 1).sum())
        result = summary["test"]["per_class"][label]
        assert (result["positives"], result["negatives"]) == (positives, int(own.sum()) - positives)
