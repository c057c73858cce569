"""A window that slides over an image: its blending worked by hand, and the settings of a model of patches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from polyclinic.common.config import Experiment, HospitalPlan, make_hospital_plan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, decide_class_areas, find_network_build_faults
from polyclinic.common.models.segmenting import iterate_logits
from polyclinic.common.models.sliding_window import slide_over_images
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.prediction.masks import predict_masks
from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.pixels import ImageTensors
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.volume_masks import restore_volume_mask
from polyclinic.data.images.volume_pixels import render_volume
from polyclinic.data.images.volumes import read_volume, read_volume_grid
from tests.data.volume_files import write_nifti
from tests.missing_packages import hide_packages

pytest.importorskip("monai", reason="the extra monai is not installed")
MODEL = {"architecture": "tiny_unet", "channels": 1, "image_size": [8, 24, 24], "task": "segmentation"}


def spec(**more: Any) -> ModelSpec:
    return ModelSpec.model_validate({**MODEL, "patch_size": [8, 16, 16], **more})


def test_constant_blending_is_the_mean_of_the_windows_over_a_pixel() -> None:
    # Windows of 8 begin at 0, 6 (a quarter overlaps), and 8, where the image of 16 ends.
    pictures = spec(image_size=16, patch_size=8, patch_overlap=0.25, patch_blending="constant")
    numbers = iter(range(100))

    def number_windows(windows: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full_like(window, next(numbers)) for window in windows])

    maps = slide_over_images(number_windows, torch.zeros(1, 1, 16, 16), pictures)
    # Window 3 * row + column; along the first row of pixels lie windows 0, 1 and 2.
    assert maps[0, 0, 0].tolist() == [0.0] * 6 + [0.5] * 2 + [1.5] * 6 + [2.0] * 2
    assert float(maps[0, 0, 7, 7]) == (0 + 1 + 3 + 4) / 4
    assert float(maps[0, 0, 8, 8]) == (4 + 5 + 7 + 8) / 4


def test_gaussian_blending_favours_the_window_whose_middle_is_near() -> None:
    pictures = spec(image_size=12, patch_size=8, patch_overlap=0.5)
    numbers = iter(range(100))

    def number_windows(windows: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full_like(window, next(numbers)) for window in windows])

    row = slide_over_images(number_windows, torch.zeros(1, 1, 12, 12), pictures)[0, 0, 3]
    # A sigma of an eighth of the window, 1: pixel 4 is 0.5 from the middle of window 0, and 3.5 from that of window 1.
    weights = np.exp([-0.5 * 0.5**2, -0.5 * 3.5**2])
    assert float(row[4]) == pytest.approx(weights[1] / weights.sum(), rel=0.02)
    assert float(row[5] + row[6]) == pytest.approx(1)


def test_an_image_of_the_size_of_a_patch_is_one_window() -> None:
    whole = build_network(ModelSpec.model_validate({**MODEL, "image_size": [8, 16, 16]}), ("a",), seed=3).eval()
    network = build_network(spec(), ("a",), seed=3).eval()
    images = torch.rand(2, 1, 8, 16, 16) * 255
    assert torch.equal(network(images), whole(images))


def test_logits_of_a_whole_image_are_blended_in_its_own_size() -> None:
    network = build_network(spec(), ("a", "b"), seed=3).eval()
    images = torch.rand(2, 1, 9, 25, 31, generator=torch.Generator().manual_seed(1)) * 255
    with torch.no_grad():
        logits = network(images)
        first = network(images[:, :, :8, :16, :16])
    assert logits.shape == (2, 2, 9, 25, 31)
    # One window alone covers the first corner.
    torch.testing.assert_close(logits[:, :, :1, :8, :8], first[:, :, :1, :8, :8], rtol=1e-4, atol=1e-5)


def test_evaluation_slides_over_each_image_by_itself() -> None:
    network = build_network(spec(), ("a",), seed=3)
    images = torch.randint(0, 256, (3, 1, 8, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = ImageTensors(images, None, torch.device("cpu"))
    logits = torch.cat([of_batch for _, of_batch in iterate_logits(network, tensors)])
    with torch.no_grad():
        expected = torch.cat([network.eval()(image[None].float()) for image in images])
    assert torch.equal(logits, expected)


def test_predict_writes_the_mask_of_a_volume_that_is_larger_than_a_patch(tmp_path: Path) -> None:
    (tmp_path / "volumes").mkdir()
    file = tmp_path / "volumes" / "one.nii.gz"
    write_nifti(file, np.random.default_rng(1).integers(0, 256, (8, 24, 24)).astype(np.int16), (3.0, 2.0, 1.0))
    form = DecodedImageFormat((8, 24, 24), False, "pad", PictureRenderingOptions(window=(127.5, 255)))
    grey = render_volume(file, (8, 24, 24), "pad", form.rendering).voxels
    images = torch.from_numpy(grey[None, None, ..., 0]).float()
    network = build_network(spec(task="exclusive_segmentation"), ("a", "b"), seed=4).eval()
    with torch.no_grad():
        network.head.bias.sub_(network(images).mean((0, 2, 3, 4)))  # so that each class is somewhere
        areas = decide_class_areas(network(images), "exclusive_segmentation")[0].numpy()
    predict_masks(network, network.class_names, file.parent, form, tmp_path / "masks")
    expected = areas[0] * 1 + areas[1] * 2
    written = read_volume(tmp_path / "masks" / "one.nii.gz").voxels
    assert len(np.unique(expected)) == 3
    assert np.array_equal(written, restore_volume_mask(expected, read_volume_grid(file), form))


def test_a_small_axis_is_padded_with_black_and_cut_again() -> None:
    network = build_network(spec(), ("a",), seed=3).eval()
    images = torch.rand(1, 1, 5, 24, 24) * 255
    with torch.no_grad():
        assert network(images).shape == (1, 1, 5, 24, 24)


REFUSED = {
    "task": {"task": "multi_label", "architecture": "tiny_cnn_3d"},
    "one number": {"patch_size": 16},
    "larger": {"patch_size": [8, 16, 32]},
    "small for the network": {"patch_size": [4, 16, 16]},
    "overlap": {"patch_overlap": 1.0},
    "blending": {"patch_blending": "linear"},
    "no patch": {"patch_size": None, "patch_overlap": 0.25},
}


@pytest.mark.parametrize("keys", REFUSED.values(), ids=list(REFUSED))
def test_settings_without_a_meaning_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec(**keys)


def experiment(**training: Any) -> Experiment:
    model = spec().model_dump() if training.pop("patches", True) else MODEL
    return Experiment.model_validate({"run": {"method": "surgical"}, "model": model, "training": training})


def test_a_plan_of_whole_images_has_no_key_of_patches() -> None:
    whole = make_hospital_plan(experiment(patches=False)).model_dump_json()
    assert "patch" not in whole
    plan = make_hospital_plan(experiment(patches_per_volume=2))
    again = HospitalPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert again.model.sides == (8, 16, 16)
    assert again.training.patches_per_volume == 2


def test_keys_of_training_go_with_a_patch() -> None:
    with pytest.raises(ValidationError, match="patch_foreground goes with"):
        experiment(patches=False, patch_foreground=0.2)


def test_without_monai_the_window_is_refused_with_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "monai")
    (fault,) = find_network_build_faults(spec(), Path())
    assert fault.where == "model.patch_size"
    with pytest.raises(BadInput, match="monai"):
        build_network(spec(), ("a",), seed=0)
