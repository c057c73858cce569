"""What a trained segmentation writes: masks of pictures, an ONNX file, its report, and refusals by name."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, decide_class_areas
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.prediction.masks import name_class_files, name_mask_files
from polyclinic.data.images.masks import PictureGrid, fit_mask_to_format, restore_mask_to_grid
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.server.export.evaluation import evaluate_saved_model
from polyclinic.server.export.exported_model import ExportFormat, export_model
from polyclinic.server.export.prediction import predict_to_csv
from polyclinic.server.reporting.tables import format_run_result
from polyclinic.server.runs.reader import read_run
from polyclinic.studies.comparison import compare_methods
from polyclinic.studies.comparison_report import comparison_as_markdown, write_comparison_report
from tests.federations import federation, finished
from tests.organs import ORGANS, TASKS

CLASSES = ("Left kidney", "Liver")


def saved(folder: Path, task: str) -> Path:
    """A model whose weights are as they were drawn, with a head that predicts both classes somewhere."""
    form = {"architecture": "tiny_unet", "channels": 1, "image_size": 16, "task": task}
    network = build_network(ModelSpec.model_validate(form), CLASSES, seed=4)
    with torch.no_grad():
        network.head.weight.mul_(20)
    folder.mkdir()
    save_model(folder, network, label_contract_sha256="0" * 64)
    return folder


def mask_of(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def pictures(folder: Path) -> Path:
    folder.mkdir()
    random = np.random.default_rng(2)
    for name, shape in {"wide": (10, 20), "high": (24, 12)}.items():
        Image.fromarray(random.integers(0, 255, shape, dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_predict_writes_masks_of_the_pictures_own_size(tmp_path: Path, task: str) -> None:
    out = tmp_path / "masks"
    predict_to_csv(saved(tmp_path / "model", task), pictures(tmp_path / "pictures"), out)
    assert json.loads((out / "classes.json").read_text()) == {"Left kidney": 1, "Liver": 2}
    files = sorted(file.name for file in out.glob("*.png"))
    if task == "exclusive_segmentation":
        assert files == ["high.png", "wide.png"]
        assert set(np.unique(mask_of(out / "wide.png"))) <= {0, 1, 2}
    else:
        assert files == [f"{name}.{of}.png" for name in ("high", "wide") for of in CLASSES]
        assert set(np.unique(mask_of(out / "wide.Liver.png"))) <= {0, 255}
    assert all(mask_of(file).shape == (10, 20) for file in out.glob("wide*.png"))


def test_predicted_masks_are_those_of_the_network(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "exclusive_segmentation")
    source = tmp_path / "pictures"
    source.mkdir()
    values = np.random.default_rng(3).integers(0, 255, (16, 16), dtype=np.uint8)
    Image.fromarray(values).save(source / "own.png")
    predict_to_csv(folder, source, tmp_path / "masks")
    from polyclinic.common.models.saved import load_model

    with torch.no_grad():
        logits = load_model(folder)(torch.from_numpy(values)[None, None].float())
    areas = decide_class_areas(logits, "exclusive_segmentation")[0].numpy()
    expected = areas[0] * 1 + areas[1] * 2
    assert expected.max() > 0
    assert np.array_equal(mask_of(tmp_path / "masks" / "own.png"), expected)


NAMES = {
    "v.nii.gz": "v",
    "north/V.NII.GZ": "north/V",
    "scan.nii": "scan",
    "it.dcm": "it",
    "series/ct": "series/ct",
    "1.2.840.7": "1.2.840.7",
    "p.1.png": "p.1",
    "b.png": "b.png",  # beside b.jpg
    "b.jpg": "b.jpg",
    "b.png.png": "b.png.png",
}


def test_masks_have_the_names_of_their_pictures_without_the_extension() -> None:
    assert name_mask_files(list(NAMES)) == NAMES
    assert len(set(NAMES.values())) == len(NAMES)


def test_classes_whose_names_differ_in_signs_of_no_file_name_have_a_file_each() -> None:
    assert name_class_files({"L/R": 1, "L:R": 2, "Liver": 3}) == {"L/R": "L_R_1", "L:R": "L_R_2", "Liver": "Liver"}


@pytest.mark.parametrize("resize", ["pad", "stretch"])
def test_a_mask_comes_back_from_the_grid_of_the_data_set(resize: str) -> None:
    form = DecodedImageFormat(40, False, resize)  # type: ignore[arg-type]
    grid = PictureGrid(10, 20)
    mask = np.random.default_rng(0).integers(0, 3, (10, 20))
    assert np.array_equal(restore_mask_to_grid(fit_mask_to_format(mask, grid, form), grid, form), mask)


def test_an_onnx_file_gives_the_same_probabilities_of_each_pixel(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    folder = saved(tmp_path / "model", "exclusive_segmentation")
    images = [np.random.default_rng(1).integers(0, 256, (3, 1, side, side + 5), dtype=np.uint8) for side in (16, 30)]
    done = export_model(folder, ExportFormat.onnx, tmp_path / "model.onnx", images)
    assert done.largest_difference < 1e-4


def test_what_needs_a_label_for_each_image_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "segmentation")
    with pytest.raises(BadInput) as refused:
        evaluate_saved_model(folder, None)  # type: ignore[arg-type]
    assert "evaluate" in refused.value.faults[0].problem


def test_the_report_of_a_run_names_dice_and_no_auroc() -> None:
    folder, summary = finished(*ORGANS, pages=True)
    page = (folder / "report.html").read_text()
    assert "Dice" in page
    assert "Hausdorff" in page
    assert "AUROC" not in page
    assert "the best by the sites’ validation Dice." in page
    assert "Bars start at" not in page  # those of a Dice start at 0
    assert summary["claims"]["result"].count("mean Dice") == 1


def test_methods_are_compared_by_their_dice(tmp_path: Path) -> None:
    runs = [
        read_run(finished(*ORGANS, f"run.method={method}", f"run.seed={seed}")[0])
        for method in ("surgical", "vanilla")
        for seed in (3, 4)
    ]
    comparison = compare_methods(runs)
    assert comparison.figure == "Dice"
    dice = [run.summary.test.segmentation.mean_dice for run in runs]  # type: ignore[union-attr]
    assert comparison.methods[0].auroc["all"].mean == pytest.approx((dice[0] + dice[1]) / 2)
    assert "Dice, all" in comparison_as_markdown(comparison)
    page = write_comparison_report(comparison, tmp_path / "report.html").read_text()
    assert "AUROC" not in page


def test_a_dice_is_not_compared_with_an_auroc() -> None:
    runs = [read_run(finished(*settings)[0]) for settings in (ORGANS, ("run.rounds=1",))]
    with pytest.raises(BadInput, match="Dice"):
        compare_methods(runs)


def test_the_model_card_has_dice_by_organ() -> None:
    folder, _ = finished(*ORGANS, pages=True)
    card = (folder / "MODEL_CARD.md").read_text()
    assert "| class | Dice |" in card
    assert "AUROC" not in card
    assert "A segmentation network for 4 classes" in card
    assert "pixel or voxel" in card
    assert "--out masks" in card
    assert "pc.predict" not in card  # it is refused


@pytest.mark.slow
def test_ray_ends_in_the_inline_model_and_its_figures(tmp_path: Path) -> None:
    _, inline = finished(*ORGANS)
    on_ray = federation(tmp_path, *ORGANS, 'simulation.backend="ray"', "simulation.workers=2", out="ray")
    assert on_ray["backend"] == "ray"
    for key in ("model_sha256", "test"):
        assert inline[key] == on_ray[key]


def test_the_terminal_shows_dice_and_distance_of_each_class() -> None:
    folder, summary = finished(*ORGANS, "run.rounds=8", "training.lr=0.01")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(format_run_result(read_run(folder)))
    text = console.export_text()
    of_class = summary["test"]["segmentation"]["per_class"]["Liver"]
    (line,) = [line for line in text.splitlines() if "Liver " in line and "│" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")][-2:] == [
        f"{of_class['dice']:.3f}",
        f"{of_class['hd95']:.1f}",
    ]
    assert "HD95 is the 95 % Hausdorff distance" in text
