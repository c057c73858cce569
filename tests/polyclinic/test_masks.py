"""From Python: a torch data set of images and masks, arrays of masks, MONAI's dictionaries; and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import polyclinic as pc
from polyclinic.common.errors import BadInput
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, concatenate_image_sets
from polyclinic.data.base.spec import PluginDatasetSpec
from polyclinic.data.load import load_dataset
from polyclinic.data.sources import plugin
from polyclinic.data.sources.drawn_organs import draw_organs

VALUES = {"Liver": 1, "Spleen": 4}
NAMES = tuple(VALUES)
COUNT = 40
DRAWN = draw_organs(COUNT, (32, 32), np.random.default_rng(0))
assert DRAWN.masks is not None
AREAS = DRAWN.masks.read_class_areas(np.arange(COUNT), NAMES)
MAPS = (AREAS[:, 0] * 1 + AREAS[:, 1] * 4).astype(np.int64)
IMAGES = DRAWN.images
TABLES = {
    "run": {"method": "surgical", "rounds": 1},
    "model": {"architecture": "tiny_unet", "channels": 1, "image_size": 32, "task": "exclusive_segmentation"},
    "training": {"batch_size": 8},
    "partition": {"kind": "class_lists", "lists": {"east": ["Liver"], "north": ["Liver", "Spleen"]}},
}


class Items(Dataset[Any]):
    """Items of a form, from the image as a tensor from 0 to 1, and the label map."""

    def __init__(self, form: Callable[[torch.Tensor, np.ndarray, int], Any]) -> None:
        self.form = form

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> Any:
        return self.form(torch.from_numpy(IMAGES[row]).float()[None] / 255, MAPS[row], row)


FORMS: dict[str, Callable[[torch.Tensor, np.ndarray, int], Any]] = {
    "pair of tensors": lambda image, mask, row: (image, torch.from_numpy(mask)),
    "mask with a channel": lambda image, mask, row: (image, torch.from_numpy(mask).float()[None]),
    "MONAI's dictionary": lambda image, mask, row: {"image": image, "label": torch.from_numpy(mask)[None]},
    "dictionary with a patient": lambda image, mask, row: {"image": image, "seg": mask, "patient": f"P{row // 2}"},
    "an area for each class": lambda image, mask, row: (image, np.stack([mask == 1, mask == 4]).astype(np.uint8)),
    "areas by name": lambda image, mask, row: (image, {"Spleen": mask == 4, "Liver": mask == 1}),
}


def opened(data: pc.LabelledImages) -> DatasetSplits:
    """Read a data set as a plug-in of this name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plugin, "load_plugin_entry_point", lambda group, name: lambda folder, options: data)
        return load_dataset(PluginDatasetSpec(kind="plugin", name="organs"), Path())


def everything(images: Any) -> ImageSet:
    return concatenate_image_sets(opened(images).parts)


def check_areas(images: ImageSet) -> None:
    assert images.masks is not None
    got = images.masks.read_class_areas(np.arange(len(images)), NAMES)
    order = [int(np.abs(IMAGES.astype(int) - image).sum((1, 2)).argmin()) for image in images.images]
    assert sorted(order) == list(range(COUNT))
    assert np.array_equal(got, AREAS[order])
    assert np.array_equal(images.labels == 1, AREAS[order].any((2, 3)))


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_items_lie_on_their_images(form: str) -> None:
    check_areas(everything(pc.LabelledImages(Items(FORMS[form]), mask_values=VALUES)))


def test_masks_in_an_array_lie_on_their_images() -> None:
    check_areas(everything(pc.LabelledImages(IMAGES, mask_values=VALUES, masks=MAPS)))


def test_a_function_brings_other_items_into_that_form() -> None:
    items = Items(lambda image, mask, row: {"scan": image, "outline": mask})
    check_areas(everything(pc.LabelledImages(items, mask_values=VALUES, item=lambda x: (x["scan"], x["outline"]))))


def test_patients_of_items_stay_together() -> None:
    splits = opened(pc.LabelledImages(Items(FORMS["dictionary with a patient"]), mask_values=VALUES))
    patients = [set(part.patients.tolist()) for part in splits.parts]
    assert len(set.union(*patients)) == COUNT // 2 == sum(map(len, patients))


def test_what_nobody_outlined_is_not_annotated() -> None:
    def form(image: torch.Tensor, mask: np.ndarray, row: int) -> Any:
        return (image, {"Liver": mask == 1, "Spleen": None} if row % 4 else None)

    images = everything(pc.LabelledImages(Items(form), mask_values=VALUES))
    assert np.isnan(images.labels[:, 1]).all()
    assert np.isnan(images.labels[:, 0]).sum() == COUNT // 4


def changing(image: torch.Tensor, mask: np.ndarray, row: int) -> Any:
    return image.roll(int(torch.randint(0, 9, ())), -1), mask


def one_is_small(image: torch.Tensor, mask: np.ndarray, row: int) -> Any:
    return image, mask[:-1] if row == 3 else mask


REFUSED: dict[str, tuple[Callable[[], pc.LabelledImages], str]] = {
    "random transforms": (lambda: pc.LabelledImages(Items(changing), mask_values=VALUES), "masks are read once"),
    "an unknown value": (
        lambda: pc.LabelledImages(Items(FORMS["pair of tensors"]), mask_values={"Liver": 1}),
        '"4", which data.mask_values does not name',
    ),
    "a mask of another size": (
        lambda: pc.LabelledImages(Items(lambda image, mask, row: (image, mask[::2])), mask_values=VALUES),
        "A mask has the size of its image",
    ),
    "one mask of another size": (lambda: pc.LabelledImages(Items(one_is_small), mask_values=VALUES), "shape"),
    "soft values": (
        lambda: pc.LabelledImages(Items(lambda image, mask, row: (image, mask * 0.5)), mask_values=VALUES),
        "whole numbers",
    ),
    "labels beside masks": (
        lambda: pc.LabelledImages(Items(FORMS["pair of tensors"]), np.zeros((COUNT, 2)), mask_values=VALUES),
        "labels and class names follow",
    ),
    "masks without values": (lambda: pc.LabelledImages(IMAGES, masks=MAPS), "mask_values"),
    "no mask in the items": (
        lambda: pc.LabelledImages(Items(lambda image, mask, row: image), mask_values=VALUES),
        "is no (image, mask)",
    ),
    "two masks in an item": (
        lambda: pc.LabelledImages(
            Items(lambda image, mask, row: {"image": image, "mask": mask, "seg": mask}), mask_values=VALUES
        ),
        "one entry with its mask",
    ),
    "fewer masks than images": (
        lambda: pc.LabelledImages(IMAGES, mask_values=VALUES, masks=MAPS[:-1]),
        "39 masks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_would_train_another_model_are_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(BadInput) as refused:
        opened(make())
    assert words in " ".join(f"{fault.problem} {fault.remedy}" for fault in refused.value.faults)


def test_a_run_from_python_segments_and_names_its_dice(tmp_path: Path) -> None:
    run = pc.simulate(
        TABLES, dataset=pc.LabelledImages(Items(FORMS["pair of tensors"]), mask_values=VALUES), out=tmp_path / "run"
    )
    assert run.model_sha256
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["test"]["segmentation"]["per_class"]) == set(NAMES)
    same = pc.simulate(
        TABLES, dataset=pc.LabelledImages(IMAGES, mask_values=VALUES, masks=MAPS), out=tmp_path / "array"
    )
    assert same.model_sha256 == run.model_sha256


def test_volumes_with_masks_are_taken_as_they_are() -> None:
    drawn = draw_organs(12, (8, 16, 16), np.random.default_rng(1))
    assert drawn.masks is not None
    areas = drawn.masks.read_class_areas(np.arange(12), NAMES)
    maps = areas[:, 0] * 1 + areas[:, 1] * 4
    volumes = drawn.images[..., 0]

    class Volumes(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> Any:
            return {"image": torch.from_numpy(volumes[row])[None], "label": torch.from_numpy(maps[row])[None]}

    images = everything(pc.LabelledImages(Volumes(), mask_values=VALUES))
    assert images.stored.shape == (12, 8, 16, 16, 1)
    assert images.masks is not None
    assert images.masks.shape == (8, 16, 16)
    assert images.masks.read_class_areas(np.arange(12), NAMES).sum() == areas.sum()


@pytest.mark.parametrize("form", ["items", "arrays"])
def test_collections_in_memory_outline_their_own_organs_alone(tmp_path: Path, form: str) -> None:
    sources = np.where(np.arange(COUNT) % 2, "livers", "spleens")
    outlines = [{"Liver": MAPS[row] == 1} if row % 2 else {"Spleen": MAPS[row] == 4} for row in range(COUNT)]
    if form == "items":
        pairs = [(image, mask) for image, mask in zip(IMAGES, outlines, strict=True)]
        data = pc.LabelledImages(pairs, mask_values=VALUES, sources=sources)
    else:
        data = pc.LabelledImages(IMAGES, masks=outlines, mask_values=VALUES, sources=sources)
    images = concatenate_image_sets(opened(data).parts)
    for name, source in {"Liver": "livers", "Spleen": "spleens"}.items():
        annotated = ~np.isnan(images.labels[:, NAMES.index(name)])
        assert set(images.sources[annotated].tolist()) == {source}
        assert annotated.sum() == COUNT // 2
    partition = {"kind": "class_lists", "images": "source", "lists": {"livers": ["Liver"], "spleens": ["Spleen"]}}
    settings = {**TABLES, "partition": partition, "simulation": {"backend": "inline"}}
    run = pc.simulate(settings, dataset=data, out=tmp_path / "run")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert {site: list(record["per_class"]) for site, record in summary["per_site"].items()} == {
        "livers": ["Liver"],
        "spleens": ["Spleen"],
    }
