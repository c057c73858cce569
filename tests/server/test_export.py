"""Facts about exported models: other runtimes give our probabilities, or there is no file."""

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, compute_image_probabilities
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.zoo.spec import SEGMENTATION_NETWORKS, Architecture, ModelSpec, Task
from polyclinic.data.load import load_dataset
from polyclinic.server.export.exported_model import (
    METADATA_FILE,
    ExportedOutputsDiffer,
    ExportFormat,
    choose_comparison_images,
    export_model,
)
from tests.federations import DIGITS
from tests.missing_packages import hide_packages
from tests.network.real import flwr_sim
from tests.server.commands import ROOT, needs_real_data

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
# Its import takes a CPU second, and each worker collects this module.
if importlib.util.find_spec("onnxscript") is None:
    pytest.skip("the export extra is not installed", allow_module_level=True)

CLASSES = ("edema", "mass", "nodule")
ARCHITECTURES = [
    name if name == "resnet18" else pytest.param(name, marks=pytest.mark.long)
    for name in get_args(Architecture)
    if name not in ("tiny_cnn", "tiny_cnn_3d")
]
"""``make test`` tries the smallest with shortcuts, and ``tiny_cnn``; volumes have tests of their own."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small saved model."""
    return saved(tmp_path / "run", "tiny_cnn")


def saved(folder: Path, architecture: str, channels: int = 1, task: Task = "multi_label", size: Any = 32) -> Path:
    """Save a model with random weights whose batch normalisation is not as it was built."""
    task = "segmentation" if architecture in SEGMENTATION_NETWORKS else task
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=size, task=task)  # type: ignore[arg-type]
    network = build_network(spec, CLASSES, 7)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value.add_(0.2 * torch.rand(value.shape, generator=random))
    folder.mkdir(exist_ok=True)
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


def pixels(channels: int, height: int, width: int, amount: int = 5) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (amount, channels, height, width), dtype=np.uint8)


def by_onnx(path: Path, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["probabilities"], {"images": batch})[0])


def ours(folder: Path, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the probabilities as prediction and evaluation compute them, without the exported wrapper."""
    return compute_image_probabilities(load_model(folder), torch.from_numpy(batch))


def check_onnx(folder: Path, channels: int) -> None:
    batch = pixels(channels, 32, 32)
    export_model(folder, ExportFormat.onnx, folder / "model.onnx", [batch])
    np.testing.assert_allclose(by_onnx(folder / "model.onnx", batch), ours(folder, batch), atol=1e-4)


@pytest.mark.parametrize(
    ("task", "channels"),
    [
        ("multi_label", 1),
        ("multi_class", 3),
        pytest.param("multi_label", 3, marks=pytest.mark.long),
        pytest.param("multi_class", 1, marks=pytest.mark.long),
    ],
)
def test_a_small_model_says_the_same_in_onnx(task: Task, channels: int, tmp_path: Path) -> None:
    check_onnx(saved(tmp_path / "run", "tiny_cnn", channels, task), channels)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_says_the_same_in_onnx(architecture: str, tmp_path: Path) -> None:
    check_onnx(saved(tmp_path / "run", architecture, 3), 3)


@pytest.mark.parametrize("architecture", ["tiny_cnn", *ARCHITECTURES])
def test_every_architecture_says_the_same_in_torchscript(architecture: str, tmp_path: Path) -> None:
    folder, batch = saved(tmp_path / "run", architecture, 3), pixels(3, 32, 32)
    done = export_model(folder, ExportFormat.torchscript, folder / "model.pt", [batch])
    assert (done.images, done.largest_difference <= 1e-4) == (5, True)


@pytest.mark.parametrize("form", list(ExportFormat))
def test_a_network_of_volumes_says_the_same_for_volumes_of_its_size(form: ExportFormat, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn_3d", size=(8, 12, 16))
    batch = np.random.default_rng(1).integers(0, 256, (5, 1, 8, 12, 16), dtype=np.uint8)
    done = export_model(folder, form, folder / f"model.{form}", [batch])
    assert (done.images, done.largest_difference <= 1e-4) == (5, True)
    facts = facts_in(form, folder / f"model.{form}")
    assert facts["input"] == "images: uint8 (batch, 1, 8, 12, 16), pixels 0..255, grey; volumes of 8 x 12 x 16 voxels"
    assert "resize" not in facts["preprocessing"]


def test_an_export_of_volumes_without_images_is_compared_on_noise_of_its_size(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn_3d", size=(8, 12, 16))
    batches, source = choose_comparison_images(folder, load_model(folder).spec, None)
    assert source.startswith("synthetic images")
    assert [batch.shape for batch in batches] == [(8, 1, 8, 12, 16)]


def facts_in(form: ExportFormat, path: Path) -> dict[str, str]:
    if form is ExportFormat.onnx:
        return dict(onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map)
    with zipfile.ZipFile(path) as file:  # torch calls its own reader deprecated
        (name,) = (each for each in file.namelist() if each.endswith(f"/extra/{METADATA_FILE}"))
        return dict(json.loads(file.read(name)))


def test_the_file_says_what_its_columns_and_pixels_are_and_resizes_images_of_any_size_and_number(tiny: Path) -> None:
    sha256 = json.loads((tiny / "model.json").read_text(encoding="utf-8"))["model_sha256"]
    for form in ExportFormat:
        export_model(tiny, form, tiny / f"model.{form}", [pixels(1, 32, 32)])
        facts = facts_in(form, tiny / f"model.{form}")
        assert json.loads(facts["class_names"]) == list(CLASSES), form
        assert facts["input"] == "images: uint8 (batch, 1, height, width), pixels 0..255, grey; any size", form
        assert (facts["label_contract_sha256"], facts["model_sha256"]) == ("0" * 64, sha256), form
    for batch in (pixels(1, 50, 41, amount=1), pixels(1, 20, 90, amount=9)):
        shown = by_onnx(tiny / f"model.{ExportFormat.onnx}", batch)
        np.testing.assert_allclose(shown, ours(tiny, batch), atol=1e-4)


def test_a_model_whose_outputs_differ_is_not_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No output is equal enough.
    monkeypatch.setattr("polyclinic.server.export.exported_model.MAX_PROBABILITY_DIFFERENCE", -1.0)
    with pytest.raises(ExportedOutputsDiffer, match="differ from ours by up to"):
        export_model(tiny, ExportFormat.torchscript, tiny / "model.pt", [pixels(1, 32, 32)])
    assert sorted(path.name for path in tiny.iterdir()) == ["model.json", "model.safetensors"]


def test_a_model_whose_outputs_are_no_numbers_is_not_written_whichever_batch_shows_it(tmp_path: Path) -> None:
    network = build_network(ModelSpec(architecture="tiny_cnn", channels=1, image_size=32), CLASSES, 7)
    with torch.no_grad():
        network.head.bias[0] = torch.nan
    save_model(tmp_path, network, label_contract_sha256="0" * 64)
    with pytest.raises(ExportedOutputsDiffer, match="nan"):
        export_model(tmp_path, ExportFormat.torchscript, tmp_path / "model.pt", [pixels(1, 32, 32), pixels(1, 40, 40)])


def test_nothing_is_written_over(tiny: Path) -> None:
    (tiny / "model.onnx").write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match="nothing is written over"):
        export_model(tiny, ExportFormat.onnx, tiny / "model.onnx", [pixels(1, 32, 32)])
    assert (tiny / "model.onnx").read_text(encoding="utf-8") == "mine"


def test_a_missing_package_is_named_with_the_line_that_installs_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "onnxscript")
    with pytest.raises(BadInput, match=r"onnxscript is not installed here\..*pip install 'polyclinic\[export\]'"):
        export_model(tiny, ExportFormat.onnx, tiny / "model.onnx", [pixels(1, 32, 32)])


def test_a_run_is_exported_beside_its_card_and_compared_on_images_that_are_named(tmp_path: Path) -> None:
    experiment, run = tmp_path / "digits.toml", tmp_path / "run"
    experiment.write_text(DIGITS, encoding="utf-8")
    ran = flwr_sim("run", experiment, "--out", run, "--set", "run.rounds=1")
    assert ran.code == 0, ran.err
    ended = flwr_sim("export", run, "--to", "onnx")
    assert ended.code == 0, ended.err
    assert "256 test images of the run's own experiment" in ended.out
    (tmp_path / "model").mkdir()
    command = ("export", run, "--to", "torchscript", "--out", tmp_path / "model" / "digits.pt")
    assert f"images of {experiment}" in flwr_sim(*command, "--check", experiment).out
    cards = [(folder / "MODEL_CARD.md").read_text(encoding="utf-8") for folder in (run, tmp_path / "model")]
    assert cards[0] == cards[1]


def test_a_wrong_call_is_answered_with_what_was_meant(tiny: Path) -> None:
    file = "experiments/digits_surgical.toml"
    for place, form, remedy in ((file, "onnx", f"flwr-sim sites {file}"), (tiny, "onx", 'Did you mean "onnx"?')):
        ended = flwr_sim("export", place, "--to", form)
        assert ended.code == 2
        assert remedy in ended.err


@needs_real_data
def test_radiographs_get_the_same_probabilities_in_onnx(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "run", "tiny_cnn", size=64), read_experiment(ROOT / "experiments/nih_surgical.toml")
    assert file.experiment.data is not None
    images = load_dataset(file.experiment.data, file.base_folder).test.images[:64, None]
    done = export_model(folder, ExportFormat.onnx, folder / "model.onnx", [images])
    assert (done.images, done.largest_difference < 1e-4) == (64, True)
