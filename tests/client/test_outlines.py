"""``flwr-client evaluate`` of a segmentation: figures and outlines on a hospital's own images, which stay there."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.sources.drawn_organs import draw_organs
from tests.client.check.sites import CLASSES, Hospital, hospital_in
from tests.network.real import flwr_client

LABELS = f'label_columns = ["{CLASSES[0]}", "{CLASSES[1]}"]\n'
MASKS = 'mask_column = "mask"\nmask_values = { Leber = 2, Milz = 4 }\n'
SYNONYMS = '[data.synonyms]\nLeber = "Liver"\nMilz = "Spleen"\n'
COUNT = 20


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Hospital:
    """A hospital whose masks are of drawn organs, in its own words."""
    north = hospital_in(tmp_path_factory.mktemp("hospital") / "north", images=COUNT)
    drawn = draw_organs(COUNT, (32, 32), np.random.default_rng(0))
    assert drawn.masks is not None
    areas = drawn.masks.read_class_areas(np.arange(COUNT), ("Liver", "Spleen"))
    rows = north.table
    for number, row in enumerate(rows):
        Image.fromarray(drawn.images[number]).save(north.folder / "images" / row["image"])
        values = areas[number, 0] * np.uint8(2)
        values[areas[number, 1]] = 4
        Image.fromarray(values).save(north.folder / "images" / f"m{number}.png")
        row |= {"mask": f"m{number}.png", "patient": f"P{number}", "part": ("train", "val", "test", "test")[number % 4]}
    north.rewrite(rows)
    north.edit(LABELS, MASKS)
    with (north.folder / "site.toml").open("a", encoding="utf-8") as file:
        file.write(SYNONYMS)
    return north


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "run"
    folder.mkdir()
    form = {"architecture": "tiny_unet", "channels": 1, "image_size": 32, "task": "exclusive_segmentation"}
    network = build_network(ModelSpec.model_validate(form), ("Kidney", "Liver", "Spleen"), seed=0)
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


def test_figures_and_the_worst_outlines_are_on_a_page_for_the_owner_alone(
    hospital: Hospital, model: Path, tmp_path: Path
) -> None:
    ended = flwr_client("evaluate", hospital.folder, model, "--failures", 2, "--out", tmp_path / "out", "--json")
    assert ended.code == 0, ended.err
    figures = json.loads(ended.out)
    assert figures["images"] == COUNT // 2
    assert set(figures["classes"]) == {"Liver", "Spleen"}
    assert figures["classes"]["Liver"]["patients"] == COUNT // 2
    page = tmp_path / "out" / "outlines.html"
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png") == 4
    assert "For this hospital only" in text
    assert page.stat().st_mode & 0o077 == 0


def test_without_failures_the_page_has_no_image(hospital: Hospital, model: Path, tmp_path: Path) -> None:
    ended = flwr_client("evaluate", hospital.folder, model, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert "Liver: Dice" in ended.out
    assert "data:image" not in (tmp_path / "out" / "outlines.html").read_text(encoding="utf-8")


def test_subgroups_and_comparisons_are_refused(hospital: Hospital, model: Path, tmp_path: Path) -> None:
    for more in (("--by", "patient"), (model,)):
        ended = flwr_client("evaluate", hospital.folder, model, *more, "--out", tmp_path / "out")
        assert ended.code == 2, ended.out
        assert "segment" in ended.err


def test_masks_of_predict_have_the_hospitals_own_values(hospital: Hospital, model: Path, tmp_path: Path) -> None:
    ended = flwr_client("predict", hospital.folder, model, hospital.folder / "images", "--out", tmp_path / "masks")
    assert ended.code == 0, ended.err
    values = json.loads((tmp_path / "masks" / "classes.json").read_text())
    assert values == {"Kidney": 5, "Liver": 2, "Spleen": 4}


def test_dicom_segmentations_of_pictures_that_are_none_are_refused_by_name(
    hospital: Hospital, model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("highdicom", reason="the sr extra is not installed")
    image = hospital.folder / "images" / "00000.png"
    ended = flwr_client("predict", hospital.folder, model, image, "--out", tmp_path / "masks", "--dicom-seg")
    assert ended.code == 1
    assert "00000.png: no segmentation: it is no DICOM file" in " ".join(ended.out.split())
    assert (tmp_path / "masks" / "00000.png").is_file()
