"""Over the network: hospitals whose images become other pixels are refused with the line to write, before round 1.

The line is then written, and the run ends in the model of hospitals that agreed from the beginning.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.data.dicom_files import dicom
from tests.federations import SMALL_RUN
from tests.network.federated import connected, events, sites_by_round
from tests.network.real import Coordinator, Program, Site, flwr_sim, summary_of, written

pytestmark = pytest.mark.slow

HOSPITALS = ("east", "north", "south")
NAMES = ("large", "odd")
EXPERIMENT = f"""{SMALL_RUN}[training]
batch_size = 32
lr = 0.01
[participation]
min_sites = 2
"""
SITE = """name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["large", "odd"]
split_column = "part"
{keys}
"""
COLOUR = ("color = true", "image_size = 20")
"""The keys of hospitals that agree; the network resizes their images to 16 pixels alike."""
CT = ("image_size = 16", "window = [1100, 900]")
RANGE = ("image_size = 16", "value_range = [0, 4095]")
"""The keys of hospitals with PNG files of 16 bits, of which 12 are used."""
GREY = ("image_size = 16",)
"""The keys of hospitals with grey PNG files of 8 bits."""
FORGETS = {
    "east": ("color = true", "color = false"),
    "north": ("image_size = 20", "image_size = 24"),
    "south": ("", 'resize = "stretch"'),
}
"""A hospital -> the key that it has otherwise than the others."""


def write_hospital(folder: Path, part: int, keys: tuple[str, ...]) -> Path:
    """A third of 450 digits as pictures, coloured PNG or DICOM files by the hospital's keys."""
    digits, rng = load_digits(), np.random.default_rng(part)
    (folder / "images").mkdir(parents=True)
    lines = ["image,large,odd,part"]
    for place, index in enumerate(range(part, 450, 3)):
        pixels, digit = np.kron(digits.images[index] / 16, np.ones((3, 4))), int(digits.target[index])
        file = folder / "images" / f"{index}.img"
        if keys == CT:
            file.write_bytes(dicom((300 + 1500 * pixels).astype(np.uint16), WindowCenter=1000, WindowWidth=2000))
        elif keys == RANGE:
            Image.fromarray((4095 * pixels).astype(np.uint16)).save(file, "PNG")
        elif keys == GREY:
            Image.fromarray(17 * np.minimum(16 * pixels, 15).astype(np.uint8)).save(file, "PNG")
        else:
            share = float(np.clip(digit / 9 + rng.normal(0, 0.5), 0, 1))
            coloured = pixels[..., None] * np.array([1.0, share, 1 - share])
            Image.fromarray((255 * coloured).astype(np.uint8)).save(file, "PNG")
        kind = ("test", "val", "train", "train", "train")[place % 5]
        lines.append(f"{index}.img,{int(digit > 4)},{digit % 2},{kind}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "site.toml").write_text(SITE.format(name=folder.name, keys="\n".join(keys)), encoding="utf-8")
    return folder


@dataclass
class Federation:
    """A coordinator and three hospitals that agree on pixels until one of them is set otherwise."""

    folder: Path
    experiment: Path
    keys: tuple[str, ...]
    coordinator: Coordinator
    sites: list[Site]

    def set_keys(self, **keys: tuple[str, ...]) -> None:
        """Write the keys of these hospitals, and of the others those on which all agree; start all anew."""
        for site in self.sites:
            text = SITE.format(name=site.name, keys="\n".join(keys.get(site.name, self.keys)))
            if site.toml.read_text(encoding="utf-8") != text:
                site.end()
                site.toml.write_text(text, encoding="utf-8")
                site.start()
        self.coordinator.sees(*self.sites)

    def run(self, name: str, *overrides: str) -> Program:
        return self.coordinator.run(self.experiment, self.folder / name, *overrides, sites=3, once=True)

    def model_of(self, name: str, *overrides: str) -> str:
        """Run to the end; return the model's hash."""
        self.run(name, *overrides).succeeds()
        assert sites_by_round(self.folder / name) == [list(HOSPITALS)] * 2
        return str(summary_of(self.folder / name)["model_sha256"])


def federation_of(folder: Path, channels: int, keys: tuple[str, ...]) -> Iterator[Federation]:
    experiment = written(EXPERIMENT.format(channels=channels), folder)
    data = [write_hospital(folder / "data" / name, part, keys) for part, name in enumerate(HOSPITALS)]
    with connected(experiment, folder / "machine", data=data) as (coordinator, sites):
        yield Federation(folder, experiment, keys, coordinator, sites)


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    yield from federation_of(tmp_path_factory.mktemp("colour"), 3, COLOUR)


@pytest.fixture(scope="module")
def ct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    yield from federation_of(tmp_path_factory.mktemp("ct"), 1, CT)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    yield from federation_of(tmp_path_factory.mktemp("deep"), 1, RANGE)


@pytest.fixture
def grey(tmp_path: Path) -> Iterator[Federation]:
    yield from federation_of(tmp_path, 1, GREY)


@pytest.fixture(scope="module")
def agreed(colour: Federation) -> str:
    """The model of three hospitals that agree."""
    colour.set_keys()
    return colour.model_of("agreed")


def line_to_write(reason: str) -> str:
    (line,) = re.findall(r"^    (\w+ = .+)$", reason, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("odd", HOSPITALS)
def test_one_hospital_that_differs_is_left_out_until_it_writes_the_line_and_then_the_model_is_the_same(
    odd: str, colour: Federation, agreed: str
) -> None:
    usual, other = FORGETS[odd]
    keys = tuple(other if key == usual else key for key in COLOUR) if usual else (*COLOUR, other)
    colour.set_keys(**{odd: keys})
    colour.run(f"without-{odd}").succeeds()
    assert sites_by_round(colour.folder / f"without-{odd}") == [[name for name in HOSPITALS if name != odd]] * 2
    (left_out,) = events(colour.folder / f"without-{odd}", "left_out")
    assert left_out["site"] == odd
    line = line_to_write(left_out["reason"])
    site = next(site for site in colour.sites if site.name == odd)
    site.program.says(line)  # its staff reads the same line
    repaired = tuple(line if key.split(" = ")[0] == line.split(" = ")[0] else key for key in keys)
    colour.set_keys(**{odd: repaired})
    assert colour.model_of(f"repaired-{odd}") == agreed


def test_three_hospitals_of_which_each_differs_from_each_are_refused_with_all_lines(
    colour: Federation, agreed: str
) -> None:
    keys = {
        "east": ("color = false", "image_size = 20"),
        "north": ("color = true", "image_size = 24"),
        "south": ("color = true", "image_size = 28", 'resize = "stretch"'),
    }
    colour.set_keys(**keys)
    run = colour.run("none", "participation.min_sites=3")
    assert run.ends() != 0
    for line in ("color = true", "image_size = 20", 'resize = "pad"'):
        assert line in run.output
    assert not (colour.folder / "none" / "model.json").exists()
    assert agreed


def test_pictures_without_colour_give_one_model_whether_a_hospital_reads_them_in_grey_or_in_colour(
    ct: Federation,
) -> None:
    """Grey DICOM files in a network of three channels."""
    in_colour = (*CT, "color = true")
    ct.set_keys(**dict.fromkeys(HOSPITALS, in_colour))
    everywhere = ct.model_of("in-colour", "model.channels=3")
    ct.set_keys(north=in_colour)
    assert ct.model_of("in-both", "model.channels=3") == everywhere
    ct.set_keys()
    assert ct.model_of("in-grey", "model.channels=3") == everywhere


def test_another_window_is_refused_and_the_experiments_own_table_counts(ct: Federation) -> None:
    ct.set_keys(south=("image_size = 16", "window = [1000, 2000]"))
    ct.run("two-windows").succeeds()
    (left_out,) = events(ct.folder / "two-windows", "left_out")
    assert (left_out["site"], line_to_write(left_out["reason"])) == ("south", "window = [1100, 900]")
    run = ct.run("stated", "pixels={window = [1000, 2000]}")
    assert run.ends() != 0
    assert "the experiment says window = [1000, 2000] under [pixels]" in run.output


def test_another_value_range_is_refused_until_the_line_is_written_or_the_experiment_lets_them_differ(
    deep: Federation,
) -> None:
    deep.set_keys()
    agreed = deep.model_of("agreed")
    deep.set_keys(south=("image_size = 16", "value_range = [0, 2047]"))
    deep.run("two-ranges").succeeds()
    (left_out,) = events(deep.folder / "two-ranges", "left_out")
    assert (left_out["site"], line_to_write(left_out["reason"])) == ("south", "value_range = [0, 4095]")
    assert deep.model_of("own-ranges", 'pixels={own = ["value_range"]}') != agreed
    deep.set_keys()
    assert deep.model_of("again") == agreed


def test_a_hospital_with_nearly_black_pictures_is_refused_until_both_lines_are_written(grey: Federation) -> None:
    """Its files hold the upper four of eight bits, as values from 0 to 15."""
    agreed = grey.model_of("agreed")
    (south,) = (site for site in grey.sites if site.name == "south")
    for file in (south.folder / "images").iterdir():
        with Image.open(file) as picture:
            dark = np.asarray(picture) // 17
        Image.fromarray(dark).save(file, "PNG")
    grey.set_keys(south=(*GREY, "# other files"))
    grey.run("dark").succeeds()
    (left_out,) = events(grey.folder / "dark", "left_out")
    assert left_out["site"] == "south"
    line = line_to_write(left_out["reason"])
    assert line == "value_range = [0, 15]"
    grey.set_keys(south=(*GREY, line))
    assert 'own = ["value_range"]' in left_out["reason"]
    assert grey.model_of("both-lines", 'pixels={own = ["value_range"]}') == agreed


@pytest.mark.parametrize("kind", ["colour", "ct", "deep"])
def test_the_delivered_model_scored_at_a_hospital_gives_the_reports_auroc(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    federation: Federation = request.getfixturevalue(kind)
    federation.set_keys()
    federation.model_of("delivered")
    for name in ("model.json", "model.safetensors"):
        shutil.copy(federation.folder / "delivered" / name, tmp_path)
    for site in federation.sites:
        with (site.folder / "labels.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["part"] == "test"]
        table = tmp_path / f"{site.name}.csv"
        lines = [f"{row['image']},{row['large']},{row['odd']}" for row in rows]
        table.write_text("\n".join(["image,large,odd", *lines]) + "\n", encoding="utf-8")
        ended = flwr_sim("evaluate", tmp_path, table, "--images", site.folder / "images", "--json")
        assert ended.code == 0, ended.err
        classes = json.loads(ended.out)["classes"]
        reported = summary_of(federation.folder / "delivered")["per_site"][site.name]["per_class"]
        for name in NAMES:
            assert classes[name]["auroc"] == pytest.approx(reported[name]["auroc"], abs=1e-6)


def test_the_coordinators_own_images_are_read_as_those_of_the_hospitals(colour: Federation) -> None:
    colour.set_keys()
    south = next(site for site in colour.sites if site.name == "south")
    table = {
        "kind": '"folder"',
        "images": f'"{south.folder / "images"}"',
        "labels": f'"{south.folder / "labels.csv"}"',
        "image_column": '"image"',
        "label_columns": '["large", "odd"]',
        "split_column": '"part"',
        "image_size": "20",
    }

    def external(**keys: str) -> str:
        return "external_test={" + ", ".join(f"{key} = {value}" for key, value in (table | keys).items()) + "}"

    run = colour.run("grey-test", external(), "participation.min_sites=3")
    assert run.ends() != 0
    assert "external_test.color" in run.output
    assert "This line under [external_test] of the experiment settles it" in run.output
    colour.run("coloured-test", external(color="true")).succeeds()
