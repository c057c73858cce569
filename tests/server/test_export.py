"""Facts about exported models: other runtimes give our probabilities, or there is no file."""

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.config import read_experiment
from common.data.load import load
from common.errors import BadInput
from common.models.network import build, compute_scores
from common.models.saved import load_model, save_model
from common.models.zoo.spec import Architecture, ModelSpec, Task
from server.export import exported_model
from server.export.exported_model import METADATA, ExportFormat, OutputsDiffer, export_model
from tests.federations import DIGITS
from tests.server.commands import ROOT, flwr_sim, needs_real_data

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
# Its import takes a CPU second, and each worker collects this module.
if importlib.util.find_spec("onnxscript") is None:
    pytest.skip("the export extra is not installed", allow_module_level=True)

CLASSES = ("edema", "mass", "nodule")
SHORT = {"resnet18", "fedsld_cnn"}
ARCHITECTURES = [name for name in get_args(Architecture) if name != "tiny_cnn"]


def saved(folder: Path, architecture: str, channels: int = 1, task: Task = "multi_label", size: int = 32) -> Path:
    """A model with random weights that is not at rest: its batch normalisation has seen something."""
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=size, task=task)  # type: ignore[arg-type]
    network = build(spec, CLASSES, 7)
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
    """As prediction and evaluation compute them, without the exported wrapper."""
    return compute_scores(load_model(folder), torch.from_numpy(batch))


def check_onnx(folder: Path, channels: int) -> None:
    batch = pixels(channels, 32, 32)
    export_model(folder, ExportFormat.onnx, folder / "model.onnx", [batch])
    np.testing.assert_allclose(by_onnx(folder / "model.onnx", batch), ours(folder, batch), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("task", ["multi_label", "multi_class"])
def test_a_small_model_says_the_same_in_onnx(task: Task, channels: int, tmp_path: Path) -> None:
    check_onnx(saved(tmp_path / "run", "tiny_cnn", channels, task), channels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES],
)
def test_every_architecture_says_the_same_in_onnx(architecture: str, tmp_path: Path) -> None:
    check_onnx(saved(tmp_path / "run", architecture, 3), 3)


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_every_architecture_says_the_same_in_torchscript(architecture: str, tmp_path: Path) -> None:
    folder, batch = saved(tmp_path / "run", architecture, 3), pixels(3, 32, 32)
    done = export_model(folder, ExportFormat.torchscript, folder / "model.pt", [batch])
    assert (done.images, done.largest_difference <= 1e-4) == (5, True)


def test_images_of_any_size_and_number_are_resized_inside_the_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn")
    export_model(folder, ExportFormat.onnx, folder / "model.onnx", [pixels(1, 32, 32)])
    for batch in (pixels(1, 50, 41, amount=1), pixels(1, 20, 90, amount=9)):
        np.testing.assert_allclose(by_onnx(folder / "model.onnx", batch), ours(folder, batch), atol=1e-4)


@pytest.mark.parametrize("form", list(ExportFormat))
def test_the_file_says_what_its_columns_and_its_pixels_are(form: ExportFormat, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn")
    export_model(folder, form, folder / "model", [pixels(1, 32, 32)])
    facts = facts_in(form, folder / "model")
    assert json.loads(facts["class_names"]) == list(CLASSES)
    assert facts["input"] == "images: uint8 (batch, 1, height, width), pixels 0..255, grey; any size"
    assert facts["label_contract_sha256"] == "0" * 64
    assert facts["model_sha256"] == json.loads((folder / "model.json").read_text(encoding="utf-8"))["model_sha256"]


def facts_in(form: ExportFormat, path: Path) -> dict[str, str]:
    if form is ExportFormat.onnx:
        return dict(onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map)
    with zipfile.ZipFile(path) as file:  # torch calls its own reader deprecated
        (name,) = (each for each in file.namelist() if each.endswith(f"/extra/{METADATA}"))
        return dict(json.loads(file.read(name)))


def test_a_model_that_says_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn")
    monkeypatch.setattr("server.export.exported_model.TOLERANCE", -1.0)  # nothing is equal enough
    with pytest.raises(OutputsDiffer, match="differ from ours by up to"):
        export_model(folder, ExportFormat.torchscript, folder / "model.pt", [pixels(1, 32, 32)])
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]


def test_a_model_that_says_nothing_is_not_kept_whichever_batch_shows_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    network = build(ModelSpec(architecture="tiny_cnn", channels=1, image_size=32), CLASSES, 7)
    with torch.no_grad():
        network.head.bias[0] = torch.nan
    folder.mkdir()
    save_model(folder, network, label_contract_sha256="0" * 64)
    with pytest.raises(OutputsDiffer, match="nan"):
        export_model(folder, ExportFormat.torchscript, folder / "model.pt", [pixels(1, 32, 32), pixels(1, 40, 40)])


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", "tiny_cnn")
    (folder / "model.onnx").write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match="exists, and nothing is written over"):
        export_model(folder, ExportFormat.onnx, folder / "model.onnx", [pixels(1, 32, 32)])
    assert (folder / "model.onnx").read_text(encoding="utf-8") == "mine"


def test_what_is_not_installed_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(exported_model.REQUIRED_PACKAGES, ExportFormat.onnx, ("onnx", "no_such_thing"))
    folder = saved(tmp_path / "run", "tiny_cnn")
    with pytest.raises(BadInput, match=r"needs no_such_thing, not installed here\. pip install 'polyclinic\[export\]'"):
        export_model(folder, ExportFormat.onnx, folder / "model.onnx", [pixels(1, 32, 32)])


# ---------------------------------------------------------------------- as typed


def test_a_run_is_exported_beside_its_card_and_compared_on_images_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits.toml").write_text(DIGITS, encoding="utf-8")
    ran = flwr_sim(capsys, "run", tmp_path / "digits.toml", "--out", tmp_path / "run", "--set", "run.rounds=1")
    assert ran.code == 0, ran.err
    ended = flwr_sim(capsys, "export", tmp_path / "run", "--to", "onnx")
    assert ended.code == 0, ended.err
    assert "compared on 256 test images of the run's own experiment" in ended.out
    (tmp_path / "model").mkdir()
    command = ("export", tmp_path / "run", "--to", "torchscript", "--out", tmp_path / "model" / "digits.pt")
    named = flwr_sim(capsys, *command, "--check", tmp_path / "digits.toml")
    assert f"images of {tmp_path / 'digits.toml'}" in named.out
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert card == (tmp_path / "run" / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("folder", "form", "remedy"),
    [
        ("experiments/digits_surgical.toml", "onnx", "flwr-sim sites experiments/digits_surgical.toml"),
        ("run", "onx", '--to: is onx; expected onnx or torchscript. Did you mean "onnx"?'),
    ],
)
def test_a_wrong_call_is_answered_with_what_was_meant(
    folder: str, form: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = saved(tmp_path / "run", "tiny_cnn") if folder == "run" else folder
    ended = flwr_sim(capsys, "export", place, "--to", form)
    assert ended.code == 2
    assert remedy in ended.err


@needs_real_data
def test_radiographs_get_the_same_probabilities_in_onnx(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "run", "tiny_cnn", size=64), read_experiment(ROOT / "experiments/nih_surgical.toml")
    assert file.experiment.data is not None
    images = load(file.experiment.data, file.base).test.images[:64, None]
    done = export_model(folder, ExportFormat.onnx, folder / "model.onnx", [images])
    assert (done.images, done.largest_difference < 1e-4) == (64, True)
