"""From Python: volumes as arrays and as items of a torch data set, MONAI's too, and a network of one's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import polyclinic as pc
from polyclinic.common.errors import BadInput
from polyclinic.data.images.volume_grid import fit_volume
from polyclinic.data.images.volumes import read_volume
from tests.data.volume_files import write_nifti

QUIET_MONAI = pytest.mark.filterwarnings("ignore:NvImgCodecPydicomReader")
"""MONAI warns of a reader that is not installed."""
LABELS = np.random.default_rng(1).integers(0, 2, (60, 2)).astype(np.float32)
TABLES = {
    "run": {"method": "surgical", "rounds": 1},
    "model": {"architecture": "tiny_cnn_3d", "channels": 1, "image_size": [8, 10, 12]},
    "training": {"batch_size": 8},
    "partition": {"kind": "class_lists", "lists": {"east": ["Mass"], "north": ["Mass", "Fluid"]}},
}


def draw() -> np.ndarray:
    """Draw volumes ``(60, 8, 10, 12)``, in which each class is a bright part of its own."""
    volumes = np.random.default_rng(0).integers(0, 90, (60, 8, 10, 12)).astype(np.uint8)
    for place in range(2):
        volumes[LABELS[:, place] == 1, 3 * place : 3 * place + 3, 2:8, 2:8] += 120
    return volumes


VOLUMES = draw()


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Volumes ``(1, depth, height, width)`` from 0 to 1, as MONAI's transforms give them."""

    class_names = ("Mass", "Fluid")

    def __len__(self) -> int:
        return len(VOLUMES)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(VOLUMES[place]).float()[None] / 255, torch.from_numpy(LABELS[place])


class Bytes(Items):
    """The same from 0 to 255."""

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(VOLUMES[place])[None], torch.from_numpy(LABELS[place])


def arrays(images: np.ndarray = VOLUMES) -> pc.LabelledImages:
    return pc.LabelledImages(images, LABELS, ("Mass", "Fluid"), [f"P{row}" for row in range(len(LABELS))])


def test_arrays_of_volumes_train_and_are_predicted(tmp_path: Path) -> None:
    run = pc.simulate(TABLES, dataset=arrays(), out=tmp_path / "run")
    scores = run.predict(VOLUMES[:3])
    assert scores.shape == (3, 2)
    same = run.predict(VOLUMES[:3, ..., None])
    np.testing.assert_allclose(np.asarray(scores), np.asarray(same), atol=1e-6)


def test_items_of_a_torch_data_set_make_the_model_that_their_array_makes(tmp_path: Path) -> None:
    # Each item is a patient, as each row of the array; parts are given, so that both are divided alike.
    parts = {"train": slice(0, 40), "validation": slice(40, 50), "test": slice(50, 60)}

    def items(rows: slice) -> pc.LabelledImages:
        numbers = range(60)[rows]
        return pc.LabelledImages(torch.utils.data.Subset(Bytes(), numbers), class_names=("Mass", "Fluid"))

    def array(rows: slice) -> pc.LabelledImages:
        return pc.LabelledImages(VOLUMES[rows], LABELS[rows], ("Mass", "Fluid"))

    first = pc.simulate(TABLES, dataset={name: items(rows) for name, rows in parts.items()}, out=tmp_path / "items")
    second = pc.simulate(TABLES, dataset={name: array(rows) for name, rows in parts.items()}, out=tmp_path / "array")
    assert first.summary["model_sha256"] == second.summary["model_sha256"]


def test_floats_from_0_to_1_are_read_as_those_of_pictures(tmp_path: Path) -> None:
    run = pc.simulate(TABLES, dataset=Items(), out=tmp_path / "run")
    assert run.predict(Items()).shape == (60, 2)


def test_a_classifier_of_volumes_of_one_s_own_is_taken(tmp_path: Path) -> None:
    def classifier(channels: int, image_size: tuple[int, int, int]) -> nn.Module:
        assert image_size == (8, 10, 12)
        return nn.Sequential(
            nn.Conv3d(channels, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 2)
        )

    run = pc.simulate(TABLES, model=classifier, head="4", dataset=arrays(), out=tmp_path / "run")
    assert run.predict(VOLUMES[:2]).shape == (2, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.image_size": 16}, "resizes pictures, and these images are volumes"),
        ({"model.architecture": "tiny_cnn", "model.image_size": 16}, "volumes of 8 × 10 × 12 voxels"),
    ],
)
def test_what_does_not_fit_volumes_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        pc.simulate(TABLES, settings=change, dataset=arrays(), out=tmp_path / "run")


def test_several_channels_of_a_volume_are_refused(tmp_path: Path) -> None:
    class Coloured(Items):
        def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
            volume, labels = super().__getitem__(place)
            return volume.repeat(3, 1, 1, 1), labels

    with pytest.raises(BadInput, match=r"Volumes have one channel: \(1, depth, height, width\)"):
        pc.simulate(TABLES, dataset=Coloured(), out=tmp_path / "run")


@QUIET_MONAI
def test_a_data_set_of_monai_with_dictionary_transforms_is_taken_as_it_is(tmp_path: Path) -> None:
    data, transforms = pytest.importorskip("monai.data"), pytest.importorskip("monai.transforms")
    for place, voxels in enumerate(VOLUMES[:30]):
        write_nifti(tmp_path / f"{place}.nii.gz", voxels.astype(np.int16), (2, 1, 1))
    items = [{"image": str(tmp_path / f"{place}.nii.gz"), "label": LABELS[place]} for place in range(30)]
    steps = transforms.Compose(
        [
            transforms.LoadImaged("image", reader="NibabelReader"),
            transforms.EnsureChannelFirstd("image"),
            transforms.Orientationd("image", axcodes="SPL", labels=None),
            transforms.Spacingd("image", pixdim=(2, 2, 2)),
            transforms.ScaleIntensityRanged("image", 0, 209, 0, 1, clip=True),
            transforms.ResizeWithPadOrCropd("image", (8, 10, 12)),
        ]
    )
    images = pc.LabelledImages(data.Dataset(items, steps), class_names=("Mass", "Fluid"))
    run = pc.simulate(TABLES, dataset=images, out=tmp_path / "run")
    assert set(run.classes.index) == {"Mass", "Fluid"}


@QUIET_MONAI
def test_axes_and_grid_are_those_of_monai(tmp_path: Path) -> None:
    """MONAI's transforms make the same grid of the same file, but for its own filter where voxels become larger."""
    transforms = pytest.importorskip("monai.transforms")
    voxels = np.random.default_rng(3).integers(0, 200, (8, 10, 12)).astype(np.int16)
    file = write_nifti(tmp_path / "it.nii.gz", voxels, (2, 1, 1))
    steps = transforms.Compose(
        [
            transforms.LoadImage(reader="NibabelReader"),
            transforms.EnsureChannelFirst(),
            transforms.Orientation("SPL", labels=None),
            transforms.ResizeWithPadOrCrop((6, 14, 12)),
        ]
    )
    fitted = fit_volume(read_volume(file), (6, 14, 12), spacing=(2, 1, 1))
    np.testing.assert_allclose(fitted.voxels, np.asarray(steps(str(file)))[0])
