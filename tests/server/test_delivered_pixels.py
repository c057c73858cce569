"""A delivered model reads images as its training did: scored on the same images, it gives the report's figures."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from polyclinic.common.models.saved import read_model_description
from polyclinic.common.prediction.pictures import read_unlabelled_pictures
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.server.federation.set_up import write_run_pages
from tests.data.dicom_files import dicom
from tests.federations import SMALL_RUN, temporary_folder
from tests.network.real import flwr_sim

NAMES = ("large", "odd")
COUNT = 240
EXPERIMENT = f"""{SMALL_RUN}[training]
batch_size = 32
lr = 0.01
[partition]
kind = "class_subsets"
sites = 2
shared = 2
[simulation]
backend = "inline"
[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["large", "odd"]
split_column = "part"
image_size = 20
"""
Render = Callable[[NDArray[np.float64], int], bytes]
"""Makes the bytes of an image file from pixels 0..1 ``(height, width)`` and the digit."""


def write_colour(pixels: NDArray[np.float64], digit: int) -> bytes:
    share = float(np.clip(digit / 9 + np.random.default_rng(int(1e6 * pixels.sum())).normal(0, 0.6), 0, 1))
    hue = np.array([1.0, share, 1 - share])
    return encode(Image.fromarray((255 * pixels[..., None] * hue).astype(np.uint8)))


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def write_dicom(pixels: NDArray[np.float64], digit: int) -> bytes:
    return dicom((300 + 1500 * pixels).astype(np.uint16), WindowCenter=1000, WindowWidth=2000)


KINDS: dict[str, tuple[Render, int, str]] = {
    "colour": (write_colour, 3, "color = true"),
    "grey": (write_colour, 3, "color = false"),
    "stretched": (write_colour, 1, 'resize = "stretch"'),
    "dicom": (write_dicom, 1, "window = [1100, 900]"),
}
"""Kind -> its files, the network's channels, and the keys of ``[data]``. The network's own size is another one."""


@cache
def finished(kind: str) -> tuple[Path, Path, dict[str, Any]]:
    """A run on 240 pictures: its experiment's folder, the delivered model, and the figures of its report."""
    render, channels, keys = KINDS[kind]
    folder = temporary_folder(f"polyclinic-{kind}-")
    digits, lines, tests = load_digits(), ["image,large,odd,part"], ["image,large,odd"]
    (folder / "images").mkdir()
    (folder / "test").mkdir()
    for row in range(COUNT):
        pixels, digit = np.kron(digits.images[row] / 16, np.ones((3, 5))), int(digits.target[row])
        part = ("test", "val", "train", "train", "train")[row % 5]
        content, labels = render(pixels, digit), f"{int(digit > 4)},{digit % 2}"
        (folder / "images" / f"{row}.img").write_bytes(content)
        lines.append(f"{row}.img,{labels},{part}")
        if part == "test":
            (folder / "test" / f"{row}.img").write_bytes(content)
            tests.append(f"{row}.img,{labels}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "test.csv").write_text("\n".join(tests) + "\n", encoding="utf-8")
    experiment = folder / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(channels=channels) + keys + "\n", encoding="utf-8")
    with patch("polyclinic.server.federation.set_up.write_run_pages"):
        ended = flwr_sim("run", experiment, "--out", folder / "run")
    assert ended.code == 0, ended.err
    (folder / "delivered").mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(folder / "run" / name, folder / "delivered")
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    figures = {name: summary["test"]["per_class"][name]["auroc"] for name in NAMES}
    assert all(0 < figure < 1 for figure in figures.values()), figures
    return folder, folder / "delivered", figures


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_of_the_same_images_gives_the_reports_auroc(kind: str) -> None:
    folder, model, figures = finished(kind)
    ended = flwr_sim("evaluate", model, folder / "test.csv", "--images", folder / "test", "--json")
    assert ended.code == 0, ended.err
    classes = json.loads(ended.out)["classes"]
    assert {name: classes[name]["auroc"] for name in NAMES} == pytest.approx(figures, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_experiment_that_reads_its_images_otherwise_is_evaluated_by_the_models_own_keys(
    kind: str, tmp_path: Path
) -> None:
    folder, model, figures = finished(kind)
    _, channels, _ = KINDS[kind]
    other = EXPERIMENT.format(channels=channels).replace("image_size = 20", "image_size = 64")
    for name in ("images", "labels.csv"):
        other = other.replace(f'= "{name}"', f'= "{folder / name}"')
    (tmp_path / "other.toml").write_text(f"{other}color = {str(kind != 'colour').lower()}\n", encoding="utf-8")
    ended = flwr_sim("evaluate", model, tmp_path / "other.toml", "--json")
    assert ended.code == 0, ended.err
    classes = json.loads(ended.out)["classes"]
    assert {name: classes[name]["auroc"] for name in NAMES} == pytest.approx(figures, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_of_the_same_images_give_the_reports_auroc(kind: str, tmp_path: Path) -> None:
    folder, model, figures = finished(kind)
    out = tmp_path / "scores.csv"
    ended = flwr_sim("predict", model, folder / "test", "--out", out)
    assert ended.code == 0, ended.err
    with out.open(encoding="utf-8", newline="") as file:
        scores = {row["image"]: row for row in csv.DictReader(file)}
    assert aurocs(folder, lambda image, name: float(scores[image][name])) == pytest.approx(figures, abs=1e-6)


def aurocs(folder: Path, score: Callable[[str, str], float]) -> dict[str, float]:
    """Class -> AUROC of the test images, by scikit-learn."""
    with (folder / "test.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: float(roc_auc_score([int(row[name]) for row in rows], [score(row["image"], name) for row in rows]))
        for name in NAMES
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_says_how_to_read_images_and_gives_the_reports_auroc(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    folder, model, figures = finished(kind)
    out = tmp_path / "model.onnx"
    ended = flwr_sim("export", model, "--to", "onnx", "--out", out, "--check", folder / "test")
    assert ended.code == 0, ended.err
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    form = PixelForm.model_validate_json(facts["pixels"])
    assert form == read_model_description(model).pixels
    assert form.resize is not None
    pictures = read_unlabelled_pictures(
        folder / "test", DecodedImageFormat(form.height, form.color, form.resize, form.rendering_options)
    )
    channels = KINDS[kind][1]
    first = pictures.images.transpose(0, 3, 1, 2) if form.color else pictures.images[:, None]
    batch = np.ascontiguousarray(np.broadcast_to(first, (len(first), channels, form.height, form.width)))
    scores = session.run(["probabilities"], {"images": batch})[0]
    names, columns = list(pictures.names), json.loads(facts["class_names"])
    found = aurocs(folder, lambda image, name: float(scores[names.index(image), columns.index(name)]))
    assert found == pytest.approx(figures, abs=1e-6)


def test_a_model_of_pictures_whose_colour_was_dropped_says_so_in_its_file_and_its_report() -> None:
    folder, model, _ = finished("grey")
    form = read_model_description(model).pixels
    assert form is not None
    assert (form.color, form.only_grey, form.height) == (False, False, 20)
    assert '"color": false' in (model / "model.json").read_text(encoding="utf-8")
    write_run_pages(folder / "run")
    card = (folder / "run" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "Images that have colour were read in grey" in card
    assert "grey, 20 × 20 pixels" in card
