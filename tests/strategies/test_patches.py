"""Federations that segment volumes in patches: one model on every path, and whole volumes in every figure."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.common.errors import BadInput
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.server.export.exported_model import ExportFormat, export_model, make_export_metadata
from polyclinic.strategies.engine.coordinator import Coordinator
from tests.federations import federation, finished, needs_of
from tests.organs import ALL_OUTLINED, PATCHES, SEGMENTING, TASKS
from tests.server.killing import Killed, kill_at

pytest.importorskip("monai", reason="the extra monai is not installed")
ALIKE = next(setting for setting in ALL_OUTLINED[::-1] if setting.startswith("partition"))


@pytest.mark.parametrize("task", TASKS)
def test_where_all_hospitals_outline_all_organs_surgical_aggregation_is_fedavg_in_patches_too(task: str) -> None:
    setting = (*PATCHES, ALIKE, f"model.task={task}", "method.weighting=samples", "augmentation.rotation=0.05")
    runs = [finished(*setting, f"run.method={method}")[1] for method in ("surgical", "fedavg")]
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
    assert runs[0]["test"]["segmentation"]["mean_dice"] is not None


def test_killed_and_resumed_it_draws_the_patches_of_a_run_that_went_through(tmp_path: Path) -> None:
    setting = (*PATCHES, "run.rounds=3")
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, Coordinator, "configure_train", 3)
        with pytest.raises(Killed):
            federation(tmp_path, *setting, out="killed")
    resumed = federation(tmp_path, *setting, out="killed", resume=True)
    assert resumed["model_sha256"] == finished(*setting)[1]["model_sha256"]


@pytest.mark.parametrize("change", ["training.patch_foreground=0.0", "training.patches_per_volume=3"])
def test_how_patches_are_drawn_decides_on_the_model(change: str) -> None:
    assert finished(*PATCHES, change)[1]["model_sha256"] != finished(*PATCHES)[1]["model_sha256"]


def test_how_windows_are_blended_changes_the_figures_and_not_the_model() -> None:
    last = (*PATCHES, "evaluation.checkpoint=last")
    ours, other = finished(*last)[1], finished(*last, "model.patch_blending=constant", "model.patch_overlap=0.0")[1]
    assert ours["model_sha256"] == other["model_sha256"]
    dice = [run["test"]["segmentation"]["mean_dice"] for run in (ours, other)]
    assert dice[0] != dice[1]


@pytest.mark.parametrize("method", SEGMENTING)
@pytest.mark.slow
def test_every_method_that_segments_trains_on_patches(method: str) -> None:
    needs = [need for need in needs_of(method) if not need.startswith(("partition", "server_data"))]
    needs = ["model.norm=group"] if method == "fedbn_plus" else needs
    own = ['server_data={kind = "organs", images = 60, image_size = 24, depth = 8, seed = 9}']
    summary = finished(*PATCHES, ALIKE, f"run.method={method}", *needs, *own, "run.rounds=1")[1]
    assert sorted(summary["test"]["per_class"]) == ["Kidney", "Liver", "Pancreas", "Spleen"]


@pytest.mark.slow
def test_ray_ends_in_the_inline_model_and_its_figures(tmp_path: Path) -> None:
    inline = finished(*PATCHES)[1]
    on_ray = federation(tmp_path, *PATCHES, 'simulation.backend="ray"', "simulation.workers=2", out="ray")
    for key in ("model_sha256", "test"):
        assert inline[key] == on_ray[key]


def test_gradients_of_several_batches_add_up_over_patches() -> None:
    summary = finished(*PATCHES, "training.gradient_accumulation_steps=2")[1]
    assert summary["model_sha256"] != finished(*PATCHES)[1]["model_sha256"]


def test_pictures_are_trained_in_patches_too() -> None:
    sizes = ("model.image_size=32", 'data={kind = "organs", images = 48, image_size = 32}', "model.patch_size=16")
    summary = finished(*PATCHES, *sizes)[1]
    assert summary["test"]["segmentation"]["mean_dice"] is not None


def test_volumes_that_are_smaller_than_a_patch_are_refused_before_round_1(tmp_path: Path) -> None:
    small = 'data={kind = "organs", images = 48, image_size = 16, depth = 8}'
    with pytest.raises(BadInput, match="smaller than the run's patches, 8 × 20 × 20 voxels"):
        federation(tmp_path, *PATCHES, "model.patch_size=[8, 20, 20]", small)


@pytest.mark.parametrize("task", TASKS)
def test_an_onnx_file_gives_the_same_probabilities_by_the_same_window(tmp_path: Path, task: str) -> None:
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    folder, _ = finished(*PATCHES, f"model.task={task}")
    volumes = np.random.default_rng(1).integers(0, 256, (2, 1, 9, 24, 27), dtype=np.uint8)
    file = tmp_path / "model.onnx"
    assert export_model(folder, ExportFormat.onnx, file, [volumes]).largest_difference < 1e-4
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (output,) = session.get_outputs()
    window = volumes[:, :, :8, :16, :16]
    assert output.name == "logits"
    expected = load_model(folder).eval()(torch.from_numpy(window)).detach().numpy()
    np.testing.assert_allclose(session.run(["logits"], {"images": window})[0], expected, atol=1e-3)
    metadata = make_export_metadata(read_model_description(folder))
    assert "windows of 8 x 16 x 16, overlap 0.5, gaussian blending" in metadata["input"]


def test_the_saved_model_says_how_its_window_slides() -> None:
    folder, _ = finished(*PATCHES)
    saved = read_model_description(folder)
    assert saved.model.patch_size == (8, 16, 16)
    assert "windows of 8 x 16 x 16, overlap 0.5, gaussian blending" in saved.preprocessing
