"""A hospital's folder as it should be, to be broken in one way at a time."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from polyclinic.client.check.connection import check_connection
from polyclinic.client.check.findings import CheckResult
from polyclinic.client.check.machine import GpuMeasurements, MachineMeasurements
from polyclinic.client.check.run import run_site_check
from polyclinic.client.site.site_file import make_site_folder, read_site_toml_without_data
from polyclinic.common.config import read_experiment
from polyclinic.common.security.identity import (
    SiteConnectionKit,
    format_public_key_line,
    read_private_key,
    write_commented_toml_file,
)
from polyclinic.data.sources.built_in import PHANTOM_CLASSES, draw_phantom_images
from polyclinic.server.coordinator.folder import CoordinatorFolder
from tests.client.handshakes import coordinator_in
from tests.federations import DIGITS

CLASSES = ("Cardiomegaly", "Effusion")
SITE = f"""name = "north"
[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
patient_column = "patient"
split_column = "part"
label_columns = ["{CLASSES[0]}", "{CLASSES[1]}"]
image_size = 32
"""
GB = 10**9
GOOD_MACHINE = MachineMeasurements(
    disk_free=80 * GB,
    memory=32 * GB,
    memory_free=24 * GB,
    cores=8,
    gpu=None,
    user=10001,
    writable=True,
    key_mode=0o600,
    key_remedy="",
    folder_mode=0o700,
)
SMALL_GPU = GpuMeasurements("Quadro P400", GB // 2, 300_000_000)


@dataclass(frozen=True)
class Hospital:
    """Its folder, and the coordinator that it has a kit of."""

    folder: Path
    coordinator: CoordinatorFolder

    def image(self, row: int) -> Path:
        return self.folder / "images" / f"{row:05}.png"

    @property
    def table(self) -> list[dict[str, str]]:
        with (self.folder / "labels.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def rewrite(self, rows: list[dict[str, str]]) -> None:
        with (self.folder / "labels.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def edit(self, old: str, new: str) -> None:
        """Change site.toml by hand."""
        text = (self.folder / "site.toml").read_text(encoding="utf-8")
        assert old in text
        (self.folder / "site.toml").write_text(text.replace(old, new), encoding="utf-8")

    def at(self, address: str) -> "Hospital":
        """With a kit for this address."""
        line = format_public_key_line(read_private_key(self.folder / "north.key"), "north")
        authority = self.coordinator.ca_certificate_path.read_text(encoding="ascii")
        kit = SiteConnectionKit(
            coordinator="trial", address=address, site="north", public_key=line, ca_certificate=authority
        )
        write_commented_toml_file(self.folder / "north.kit", kit, "For tests.")
        return self

    def checked(self, machine: MachineMeasurements = GOOD_MACHINE, **options: object) -> CheckResult:
        """Return the result of ``flwr-client check`` on this machine."""
        (self.folder / "experiment.toml").write_text(DIGITS, encoding="utf-8")
        experiment = read_experiment(self.folder / "experiment.toml").experiment
        usual = {"environment": {}, "experiment": experiment, "look": lambda settings: machine}
        return run_site_check(self.folder, **usual | options)[0]

    def connection(self, environment: Mapping[str, str] | None = None) -> CheckResult:
        """Return the result of the check of the connection alone."""
        area = check_connection(read_site_toml_without_data(self.folder), environment or {}, offline=False)
        return CheckResult("north", (area,))

    def connection_at(self, port: int, host: str = "127.0.0.1") -> CheckResult:
        """Return the same with a kit for this port."""
        return self.at(f"{host}:{port}").connection()


def hospital_in(folder: Path, images: int = 60, size: int = 32) -> Hospital:
    """Phantom radiographs, a table, a key, a kit of a coordinator that nobody has started."""
    make_site_folder(folder, "north")
    write_images(folder, images, size)
    (folder / "site.toml").write_text(SITE, encoding="utf-8")
    return Hospital(folder, coordinator_in(folder.parent / "coordinator")).at("127.0.0.1:9")


def write_images(folder: Path, count: int, size: int = 32) -> None:
    """PNG files and labels.csv; every fifth patient tests, every fifth validates."""
    (folder / "images").mkdir(parents=True)
    for name, content in draw_files(count, size).items():
        (folder / name).write_bytes(content)


@cache
def draw_files(count: int, size: int) -> dict[str, bytes]:
    drawn, files = draw_phantom_images(count, size, np.random.default_rng(4)), dict[str, bytes]()
    columns = [PHANTOM_CLASSES.index(name) for name in CLASSES]
    parts = ("train", "train", "train", "val", "test")
    lines = [",".join(("image", "patient", "part", *CLASSES))]
    for row in range(count):
        name, patient, file = f"{row:05}.png", str(drawn.patients[row]), io.BytesIO()
        Image.fromarray(drawn.images[row]).save(file, "PNG")
        files[f"images/{name}"] = file.getvalue()
        part = parts[int(patient.split("-")[1]) % len(parts)]
        lines.append(",".join((name, patient, part, *(f"{drawn.labels[row, c]:.0f}" for c in columns))))
    return {**files, "labels.csv": ("\n".join(lines) + "\n").encode()}
