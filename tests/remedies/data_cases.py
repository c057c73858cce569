"""Refusals of data sets: arrays, torch data sets, npz files and folders of pictures."""

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from polyclinic.common.plugins import DATASETS, register_local_plugin
from polyclinic.custom_parts import wrap_as_dataset_plugin
from polyclinic.data import LabelledImages
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import CompositesDatasetSpec, FolderDatasetSpec, NpzDatasetSpec, PluginDatasetSpec
from polyclinic.data.load import load_dataset
from polyclinic.data.partition.partition import partition_dataset
from polyclinic.data.partition.spec import ClassListsPartitionSpec
from tests.remedies.cases import Case, evaluate, read_setting, take

COUNT = 60
PICTURES = np.random.default_rng(5).integers(0, 256, (COUNT, 8, 8), dtype=np.uint8)
PICTURES[:, 0, 0] = 255
DEEP = PICTURES.astype(np.uint16) * 16  # 12 bits
TORCH, PLUGIN, NPZ = "data/sources/torch_dataset.py", "data/sources/plugin.py", "data/sources/npz.py"


class Items(list[Any]):
    """A data set that names its classes."""

    classes = ("a", "b")

    def __init__(self, images: Sequence[Any], labels: Sequence[Any] | None = None) -> None:
        super().__init__(zip(images, labels or [row % 2 for row in range(len(images))], strict=True))


def load(data: Any, **settings: Any) -> DatasetSplits:
    """Load what somebody would pass to ``pc.simulate(dataset=...)``."""
    wrapped = data if isinstance(data, LabelledImages | dict) else LabelledImages(data)
    name = register_local_plugin(DATASETS, lambda folder, options: wrapped)
    return load_dataset(PluginDatasetSpec(kind="plugin", name=name, **settings), Path())


def arrays(images: NDArray[Any] = PICTURES, **fields: Any) -> LabelledImages:
    labels = (np.arange(len(images)) % 2)[:, None] == np.arange(2)
    return LabelledImages(images, labels.astype(np.float32), ("a", "b"), **fields)


def check_pictures(splits: DatasetSplits, expected: NDArray[Any]) -> None:
    """Check that the parts together hold these pictures, rounded to 8 bits, and no other."""
    read = np.concatenate([part.images for part in splits.parts])
    assert sorted(picture.tobytes() for picture in read) == sorted(
        picture.tobytes() for picture in np.round(expected).astype(np.uint8)
    )


def check_labels(splits: DatasetSplits, ones: int = COUNT // 2) -> None:
    """Check that each class is in so many pictures."""
    labels = np.concatenate([part.labels for part in splits.parts])
    assert labels.sum(axis=0).tolist() == [ones, ones]


# ---------------------------------------------------------------------- images of a torch data set


def of_two_sizes(convert: Callable[[NDArray[Any]], Any]) -> list[Any]:
    return [convert(picture if row else np.tile(picture, (2, 2))) for row, picture in enumerate(PICTURES)]


def of_two_modes(convert: Callable[[NDArray[Any]], Any]) -> list[Any]:
    return [convert(picture if row else np.stack([picture] * 3, axis=2)) for row, picture in enumerate(PICTURES)]


def as_tensor(picture: NDArray[Any]) -> torch.Tensor:
    array = torch.from_numpy(picture.copy())
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def resize_all(images: list[Any]) -> Callable[[Path, str], None]:
    def remedy(folder: Path, message: str) -> None:
        resized = [evaluate(message, r"one size: (.*) for instance", image=image) for image in images]
        splits = load(Items(resized))
        assert splits.train.images.shape[1:] == (224, 224)
        assert abs(splits.train.images.mean() - PICTURES.mean()) < 3

    return remedy


def color_all(images: list[Any], is_grey: Callable[[Any], bool]) -> Callable[[Path, str], None]:
    def remedy(folder: Path, message: str) -> None:
        line = r"channels: (.*) for each"
        colored = [evaluate(message, line, image=image) if is_grey(image) else image for image in images]
        check_pictures(load(Items(colored)), np.stack([PICTURES] * 3, axis=3))

    return remedy


def shape_cases() -> list[Case]:
    cases, site = list[Case](), f"{TORCH} _refuse_other_shape"
    grey: list[tuple[Callable[[NDArray[Any]], Any], Callable[[Any], bool]]] = [
        (Image.fromarray, lambda image: image.mode == "L"),
        (as_tensor, lambda image: len(image) == 1),
        (np.array, lambda image: image.ndim == 2),
    ]
    for convert, is_grey in grey:
        sizes, modes = of_two_sizes(convert), of_two_modes(convert)
        cases.append(Case(site, lambda folder, sizes=sizes: load(Items(sizes)), resize_all(sizes)))
        cases.append(Case(site, lambda folder, modes=modes: load(Items(modes)), color_all(modes, is_grey)))
    return cases


def try_value_range(folder: Path, message: str) -> None:
    dataset = Items(list(DEEP))
    check_pictures(load(evaluate(message, r"pc\.LabelledImages\(.*?\)\)", dataset=dataset)), DEEP * (255 / 4095))


def try_normalised_range(folder: Path, message: str) -> None:
    dataset = Items(list(PICTURES.astype(np.float32) / 127.5 - 1))
    check_pictures(load(evaluate(message, r"pc\.LabelledImages\(.*?\)\)", dataset=dataset)), PICTURES)


def try_range_of_floats(folder: Path, message: str) -> None:
    assert "Normalize" not in message
    assert "value_range=(0, 255)" in message
    dataset = Items(list(PICTURES.astype(np.float32)))
    check_pictures(load(evaluate(message, r"pc\.LabelledImages\(.*?\)\)", dataset=dataset)), PICTURES)


def with_transparency(row: int) -> Image.Image:
    return Image.merge("RGBA", [*[Image.fromarray(PICTURES[row])] * 3, Image.new("L", (8, 8), 255)])


def try_pasting(folder: Path, message: str) -> None:
    assert "paste it on black or white" in message
    pasted = list[Image.Image]()
    for row in range(COUNT):
        ground, image = Image.new("RGB", (8, 8)), with_transparency(row)
        ground.paste(image, mask=image.getchannel("A"))
        pasted.append(ground)
    check_pictures(load(Items(pasted)), np.stack([PICTURES] * 3, axis=3))


def try_three_channels(folder: Path, message: str) -> None:
    assert "an array (height, width, 3)" in message
    check_pictures(load(Items([np.stack([picture] * 3, axis=2) for picture in PICTURES])), np.stack([PICTURES] * 3, 3))


def try_one_type(folder: Path, message: str) -> None:
    assert "Give all images one type" in message
    check_pictures(load(Items([picture.astype(np.float32) / 255 for picture in PICTURES])), PICTURES)


def try_all_numbers(folder: Path, message: str) -> None:
    assert "Give every pixel a value" in message
    check_pictures(load(Items([picture / np.float32(255) for picture in PICTURES])), PICTURES)


WITH_NAN = [np.where(picture == 255, np.nan, picture / 255).astype(np.float32) for picture in PICTURES]


class Changing(Items):
    """A data set whose labels are drawn at each reading, or whose patient is."""

    def __getitem__(self, row: Any) -> Any:
        return self.images[row], int(torch.randint(2, ()))

    images = PICTURES


def try_fixed_labels(folder: Path, message: str) -> None:
    assert "always has the same labels" in message
    check_labels(load(Items(list(PICTURES))))


def given(data: Any) -> LabelledImages:
    return LabelledImages(data, np.eye(2, dtype=np.float32)[np.arange(COUNT) % 2], ("a", "b"))


def try_fixed_labels_beside_given_ones(folder: Path, message: str) -> None:
    assert "always has the same labels" in message
    check_labels(load(given(Items(list(PICTURES)))))


def patient_items(count: int) -> Any:
    items = Items(list(PICTURES))
    named = [
        {"image": image, "label": label, **({"patient": f"p{row}"} if row < count else {})}
        for row, (image, label) in enumerate(items)
    ]
    items[:] = named
    return items


def try_all_patients(folder: Path, message: str) -> None:
    assert "Name one for each item" in message
    splits = load(patient_items(COUNT))
    assert {name for part in splits.parts for name in part.patients.tolist()} == {f"p{row}" for row in range(COUNT)}


class Streaming(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Items(list(PICTURES)))


def try_map_style(folder: Path, message: str) -> None:
    assert "with __len__ and __getitem__" in message
    check_pictures(load(Items([image for image, _ in Streaming()])), PICTURES)


LOADER: Any = DataLoader(Items(list(PICTURES)))  # type: ignore[arg-type]


def try_dataset_of_loader(folder: Path, message: str) -> None:
    check_pictures(load(evaluate(message, r"loader\.dataset", loader=LOADER)), PICTURES)


def try_darker_first(folder: Path, message: str) -> None:
    assert "darker value first" in message
    check_pictures(load(LabelledImages(Items(list(DEEP)), value_range=(0, 4080))), PICTURES)


class Others(Items):
    classes = ("b", "c")


def try_one_list_of_classes(folder: Path, message: str) -> None:
    assert "one list of classes" in message
    check_labels(load(ConcatDataset([Items(list(PICTURES[:30])), Items(list(PICTURES[30:]))])))  # type: ignore[list-item]


def crops(row: int) -> list[dict[str, Any]]:
    """Two crops of a picture, as MONAI's RandSpatialCropSamplesd returns them."""
    return [{"image": PICTURES[row, :, :5], "label": row % 2}, {"image": PICTURES[row, :, 3:], "label": row % 2}]


ALL_CROPS: Any = [crops(row) for row in range(COUNT)]


def try_first_crop(folder: Path, message: str) -> None:
    one = evaluate(message, r"pc\.LabelledImages\(.*?\]\)", dataset=ALL_CROPS)
    splits = load(replace(one, class_names=("a", "b")))
    check_pictures(splits, PICTURES[:, :, :5])
    check_labels(splits)


def named_items(names: Any) -> LabelledImages:
    """Items without names of their own, which fail as soon as one is read where the names are wrong."""

    def read(item: Any) -> Any:
        assert isinstance(names, list), "an item is read before the names are checked"
        return item

    return LabelledImages(list(zip(PICTURES, (row % 2 for row in range(COUNT)), strict=True)), None, names, item=read)


def try_list_of_names(folder: Path, message: str) -> None:
    assert "not 5" in message
    check_labels(load(named_items(evaluate(message, r"class_names=(\[.*?\])"))))


def parts_of_pictures() -> dict[str, Any]:
    return {"train": Items(list(PICTURES[:40])), "test": Items(list(PICTURES[40:]))}


def try_dictionary_as_dataset(folder: Path, message: str) -> None:
    assert 'dataset={"train": ..., "test": ...}' in message
    splits = load_dataset(
        PluginDatasetSpec(
            kind="plugin", name=register_local_plugin(DATASETS, wrap_as_dataset_plugin(parts_of_pictures()))
        ),
        Path(),
    )
    assert len(splits.test) == 20
    check_pictures(splits, PICTURES)


def load_with_lists(class_names: Sequence[str]) -> DatasetSplits:
    splits = load(LabelledImages(Nameless(list(PICTURES)), class_names=class_names))
    lists = {"east": ("nevus", "melanoma"), "north": ("nevus",)}
    return partition_dataset(splits, ClassListsPartitionSpec(kind="class_lists", lists=lists), 1).splits


def try_naming_numbers(folder: Path, message: str) -> None:
    assert "class_names=NAMES" in message
    assert load_with_lists(["nevus", "melanoma"]).class_names == ("nevus", "melanoma")


TORCH_CASES = (
    Case("data/sources/dataset_items.py parse_item", lambda folder: load(ALL_CROPS), try_first_crop),
    Case(
        f"{TORCH} open_torch_dataset",
        lambda folder: load(LabelledImages(parts_of_pictures())),  # type: ignore[arg-type]
        try_dictionary_as_dataset,
    ),
    Case(
        "data/tables/class_names.py find_numbered_class_faults",
        lambda folder: load_with_lists([]),
        try_naming_numbers,
    ),
    *shape_cases(),
    Case(f"{TORCH} _scale_pixels_to_255", lambda folder: load(Items(list(DEEP))), try_value_range),
    Case(f"{TORCH} _scale_pixels_to_255", lambda folder: load(Items(WITH_NAN)), try_all_numbers),
    Case(
        f"{TORCH} refuse_wrong_value_range",
        lambda folder: load(Items(list(PICTURES.astype(np.float32) / 127.5 - 1))),
        try_normalised_range,
    ),
    Case(
        f"{TORCH} refuse_wrong_value_range",
        lambda folder: load(Items(list(PICTURES.astype(np.float32)))),
        try_range_of_floats,
    ),
    Case(
        f"{TORCH} _convert_pillow_picture",
        lambda folder: load(Items([with_transparency(row) for row in range(COUNT)])),
        try_pasting,
    ),
    Case(
        f"{TORCH} convert_item_image",
        lambda folder: load(Items([np.stack([picture] * 5, axis=0) for picture in PICTURES])),
        try_three_channels,
    ),
    Case(
        f"{TORCH} convert_item_image",
        lambda folder: load(Items([PICTURES[0], *(PICTURES[1:] / np.float32(255))])),
        try_one_type,
    ),
    Case(f"{TORCH} check_item_labels_unchanged", lambda folder: load(Changing(list(PICTURES))), try_fixed_labels),
    Case(
        f"{TORCH} check_items_repeatable",
        lambda folder: load(given(Changing(list(PICTURES)))),
        try_fixed_labels_beside_given_ones,
    ),
    Case(f"{TORCH} _take_for_all_or_none", lambda folder: load(patient_items(30)), try_all_patients),
    Case(f"{TORCH} open_torch_dataset", lambda folder: load(LOADER), try_dataset_of_loader),
    Case(f"{TORCH} open_torch_dataset", lambda folder: load(Streaming()), try_map_style),
    Case(
        f"{TORCH} open_torch_dataset",
        lambda folder: load(LabelledImages(Items(list(DEEP)), value_range=(4095, 0))),
        try_darker_first,
    ),
    Case(
        f"{TORCH} read_dataset_class_names",
        lambda folder: load(ConcatDataset([Items(list(PICTURES[:30])), Others(list(PICTURES[30:]))])),  # type: ignore[list-item]
        try_one_list_of_classes,
    ),
)

# ---------------------------------------------------------------------- parts, labels and copies


def try_named_parts(folder: Path, message: str) -> None:
    names = [take(message, rf'"{name}"') for name in ("train", "test", "validation")]
    rows = (slice(0, 30), slice(30, 45), slice(45, 60))
    parts = {name.strip('"'): arrays(PICTURES[of_part]) for name, of_part in zip(names, rows, strict=True)}
    splits = load(parts)
    assert [len(part) for part in splits.parts] == [30, 15, 15]


def try_parts_of_one_size(folder: Path, message: str) -> None:
    assert "one size" in message
    check_pictures(load({"train": arrays(PICTURES[:40]), "test": arrays(PICTURES[40:])}), PICTURES)


def try_range_of_dark_pictures(folder: Path, message: str) -> None:
    assert "value_range=(a, b)" in message
    check_pictures(load(arrays(PICTURES // 25, value_range=(0, 10))), PICTURES // 25 * 25.5)


def try_resizing_in_the_transform(folder: Path, message: str) -> None:
    assert "resize them in its transform" in message
    small = [np.asarray(Image.fromarray(picture).resize((4, 4))) for picture in PICTURES]
    check_pictures(load(Items(small)), np.stack(small))


MIXED = [row % 2 if row < 30 else [1.0 - row % 2, float(row % 2)] for row in range(COUNT)]


class Nameless(Items):
    classes = ()  # type: ignore[assignment]


def try_class_names(folder: Path, message: str) -> None:
    dataset = Nameless(list(PICTURES), MIXED)
    check_labels(load(evaluate(message, r"pc\.LabelledImages\(.*?\)", dataset=dataset, NAMES=["a", "b"])))


def try_order_of_the_data_set(folder: Path, message: str) -> None:
    assert "Leave class_names out" in message
    names = evaluate(message, r"class_names=(\[.*?\])")
    assert names == ["a", "b"]
    check_labels(load(LabelledImages(Items(list(PICTURES)), class_names=names)))
    check_labels(load(Items(list(PICTURES))))


WHOLE: Any = Items(list(PICTURES))


def try_items_of_its_own(folder: Path, message: str) -> None:
    assert "items of its own" in message
    parts = {"train": LabelledImages(Subset(WHOLE, range(40))), "test": LabelledImages(Subset(WHOLE, range(40, 60)))}
    check_pictures(load(parts), PICTURES)
    duplicates = evaluate(message, r"settings=(\{.*?\})")["data.duplicates"]
    plain = Brighter(WHOLE)
    parts["train"] = LabelledImages(Subset(plain, range(40)))  # the same items, and no equal picture
    parts["test"] = LabelledImages(Subset(Brighter(plain, 1), range(30, 60)))
    splits = load(parts, duplicates=duplicates)
    assert len(splits.train) + len(splits.validation) == 30
    assert len(splits.test) == 30
    assert any("10 of 40 train items were dropped" in note for note in splits.test.notes)


class Brighter(Dataset[Any]):
    """A wrapper that changes the pictures of another data set."""

    classes = ("a", "b")

    def __init__(self, dataset: Any, by: int = 0) -> None:
        self.dataset, self.by = dataset, by

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        image, label = self.dataset[row]
        return np.maximum(image, self.by), label


def try_each_item_once(folder: Path, message: str) -> None:
    check_pictures(load(Items(list(PICTURES))), PICTURES)
    patients = evaluate(message, r"patients=(\[\.\.\.\])") and [f"p{row}" for row in [*range(COUNT), *range(COUNT)]]
    splits = load(LabelledImages(ConcatDataset([WHOLE, WHOLE]), patients=patients))
    digests = [set(part.picture_digests.tolist()) for part in splits.parts]
    assert not digests[0] & digests[2]


TWICE = np.concatenate([PICTURES, PICTURES])


def try_dropping_repeated_pictures(folder: Path, message: str) -> None:
    settings = evaluate(message, r"settings=(\{.*?\})")
    splits = load(arrays(TWICE), **{key.removeprefix("data."): value for key, value in settings.items()})
    digests = [set(part.picture_digests.tolist()) for part in splits.parts]
    assert not digests[0] & digests[2]
    assert not digests[1] & digests[2]


def overlapping() -> Any:
    return {"train": arrays(PICTURES[:40]), "test": arrays(PICTURES[30:])}


def try_dropping_shared_pictures(folder: Path, message: str) -> None:
    splits = load(overlapping(), **read_setting(message, r'duplicates = "\w+"'))
    assert len(splits.test) == 30
    check_pictures(splits, PICTURES)


WHITE = [Image.fromarray(300 + picture.astype(np.uint16)).convert("L") for picture in PICTURES]


def try_numbers_of_deep_pictures(folder: Path, message: str) -> None:
    images = [Image.fromarray(picture) for picture in DEEP]
    numbers = [evaluate(message, r"np\.asarray\(image\)", image=image) for image in images]
    value_range = evaluate(message, r"value_range=(\(.*?\))")
    check_pictures(load(LabelledImages(Items(numbers), value_range=value_range)), DEEP * (255 / 4095))


def try_one_side_of_the_split(folder: Path, message: str) -> None:
    assert "on one side" in message
    parts = np.array(["train"] * 30 + ["test"] * 30)
    splits = load(arrays(patients=[f"p{row // 3}" for row in range(COUNT)], parts=parts))
    assert not set(splits.train.patients) & set(splits.test.patients)


def in_two_parts() -> LabelledImages:
    return arrays(patients=[f"p{row // 3}" for row in range(COUNT)], parts=np.array(["train", "test"] * 30))


def similar_patients(second: str) -> LabelledImages:
    names = [f"p{row // 3}" for row in range(COUNT - 3)]
    return arrays(patients=[*names, second, second, second])


def try_one_spelling(folder: Path, message: str) -> None:
    assert "Write each patient in one way" in message
    assert len({name for part in load(similar_patients("p1")).parts for name in part.patients.tolist()}) == 19


def volumes() -> LabelledImages:
    """Volumes ``(n, depth, height, width)`` in the place of pictures."""
    return arrays(np.repeat(PICTURES[:, None], 5, axis=1))


def try_volumes_as_they_are(folder: Path, message: str) -> None:
    assert "Leave it out: the network resizes volumes." in message
    assert load(volumes()).train.stored.shape[1:] == (5, *PICTURES.shape[1:], 1)


PART_CASES = (
    Case(f"{PLUGIN} _make_plugin_image_set", lambda folder: load(volumes(), image_size=4), try_volumes_as_they_are),
    Case(
        f"{PLUGIN} _join_plugin_parts",
        lambda folder: load({"training": arrays(PICTURES[:40]), "exam": arrays(PICTURES[40:])}),
        try_named_parts,
    ),
    Case(
        f"{PLUGIN} _join_plugin_parts",
        lambda folder: load({"train": arrays(PICTURES[:40]), "test": arrays(PICTURES[40:, :4, :4])}),
        try_parts_of_one_size,
    ),
    Case(f"{PLUGIN} _refuse_empty_pictures", lambda folder: load(arrays(PICTURES // 25)), try_range_of_dark_pictures),
    Case(
        f"{PLUGIN} _open_torch_dataset",
        lambda folder: load(Items(list(PICTURES)), image_size=4),
        try_resizing_in_the_transform,
    ),
    Case(f"{PLUGIN} _refuse_odd_class_names", lambda folder: load(named_items(5)), try_list_of_names),
    Case(f"{PLUGIN} _collect_raw_labels", lambda folder: load(Nameless(list(PICTURES), MIXED)), try_class_names),
    Case(
        "data/sources/shared_items.py find_shared_item_faults",
        lambda folder: load(
            {"train": LabelledImages(Subset(WHOLE, range(40))), "test": LabelledImages(Subset(WHOLE, range(30, 60)))}
        ),
        try_items_of_its_own,
    ),
    Case(
        f"{PLUGIN} _find_moved_name_faults",
        lambda folder: load(LabelledImages(Items(list(PICTURES)), class_names=["b", "a"])),
        try_order_of_the_data_set,
    ),
    Case(
        "data/sources/shared_items.py find_repeated_item_faults",
        lambda folder: load(ConcatDataset([WHOLE, WHOLE])),
        try_each_item_once,
    ),
    Case(
        "data/tables/copies.py find_repeated_picture_faults",
        lambda folder: load(arrays(TWICE)),
        try_dropping_repeated_pictures,
    ),
    Case(
        "data/base/shared_pictures.py find_shared_picture_faults",
        lambda folder: load(overlapping()),
        try_dropping_shared_pictures,
    ),
    Case(
        "data/sources/plugin.py _refuse_empty_pictures",
        lambda folder: load(Items(WHITE)),
        try_numbers_of_deep_pictures,
    ),
    Case(
        "data/sources/torch_dataset.py _name_classes",
        lambda folder: load(Nameless(list(PICTURES), MIXED)),
        try_class_names,
    ),
    Case(
        "data/base/splits.py find_shared_patient_faults",
        lambda folder: load(in_two_parts()),
        try_one_side_of_the_split,
    ),
    Case(
        "data/base/splits.py find_patient_name_faults",
        lambda folder: load(similar_patients("P-1")),
        try_one_spelling,
    ),
)

# ---------------------------------------------------------------------- npz files

LABELS = np.arange(COUNT) % 2
ROWS = {"train": slice(0, 40), "test": slice(40, 60)}


def write_npz(folder: Path, images: NDArray[Any] = PICTURES, **changes: Any) -> None:
    whole = {f"{part}_images": images[rows] for part, rows in ROWS.items()}
    whole |= {f"{part}_labels": LABELS[rows] for part, rows in ROWS.items()}
    np.savez(folder / "a.npz", **{name: array for name, array in (whole | changes).items() if array is not None})


def load_npz(folder: Path, **settings: Any) -> DatasetSplits:
    spec = {"kind": "npz", "path": "a.npz", "classes": ("a", "b"), **settings}
    return load_dataset(NpzDatasetSpec.model_validate(spec), folder)


def of_npz(settings: dict[str, Any] | None = None, **changes: Any) -> Callable[[Path], DatasetSplits]:
    def refused(folder: Path) -> DatasetSplits:
        write_npz(folder, **changes)
        return load_npz(folder, **(settings or {}))

    return refused


def try_npz_value_range(folder: Path, message: str) -> None:
    setting = read_setting(message, r"value_range = \[.*?\]")
    write_npz(folder, DEEP)
    check_pictures(load_npz(folder, **setting), DEEP * (255 / 4095))


CUBES = np.repeat(PICTURES[:, None], 8, axis=1)
"""Volumes of 8 equal slices."""


def try_npz_volumes(folder: Path, message: str) -> None:
    assert "Leave data.image_size out" in message
    write_npz(folder, CUBES)
    check_pictures(load_npz(folder), CUBES)


def try_dividing(folder: Path, message: str) -> None:
    for name in ("train_images", "train_labels", "test_images"):
        assert name in message
    write_npz(folder)
    check_pictures(load_npz(folder), PICTURES)


def try_near_array(folder: Path, message: str) -> None:
    (name,) = [take(message, r'Did you mean "(\w+)"')]
    write_npz(folder, train_labels=None, **{name: LABELS[ROWS["train"]]})
    np.savez(
        folder / "a.npz",
        **{key.replace(name, "train_labels"): array for key, array in np.load(folder / "a.npz").items()},
    )
    check_labels(load_npz(folder))


def try_plain_arrays(folder: Path, message: str) -> None:
    assert "plain arrays of numbers or strings" in message
    write_npz(folder, train_patient=np.array(["p0"] * 40), test_patient=np.array(["p1"] * 20))
    check_pictures(load_npz(folder), PICTURES)


WORDS = np.where(LABELS == 1, "mass", "clear")


def try_numbering(folder: Path, message: str) -> None:
    line, names = take(message, r"classes, numbers = [^,]*, return_inverse=True\)"), {"labels": WORDS}
    exec(line, {"numpy": np}, names)
    numbers: Any = names["numbers"]
    write_npz(folder, **{f"{part}_labels": numbers[rows] for part, rows in ROWS.items()})
    splits = load_npz(folder, classes=tuple(names["classes"].tolist()))
    assert splits.class_names == ("clear", "mass")
    check_labels(splits)


def try_number_of_names(folder: Path, message: str) -> None:
    count = int(take(message, r"Give (\d+) names"))
    write_npz(folder)
    check_labels(load_npz(folder, classes=tuple("abcdef"[:count])))


def try_npz_without_nan(folder: Path, message: str) -> None:
    write_npz(folder, PICTURES / 255)
    check_pictures(load_npz(folder, value_range=(0, 1)), PICTURES)


def of_patients(first: str) -> dict[str, Any]:
    names = [first, *(f"p{row}" for row in range(1, COUNT))]
    return {f"{part}_patient": np.array(names[rows]) for part, rows in ROWS.items()}


def try_naming_the_patient(folder: Path, message: str) -> None:
    assert "Name the patient of every image" in message
    write_npz(folder, **of_patients("p0"))
    assert "p0" in load_npz(folder, patient_key="patient").train.patients


def encode_jpegs(first: bytes) -> dict[str, Any]:
    """JPEG bytes in the place of pixels; the first picture of training is this."""
    result: dict[str, Any] = {f"{part}_images": None for part in ROWS}
    for part, rows in ROWS.items():
        files = list[bytes]()
        for picture in PICTURES[rows]:
            content = io.BytesIO()
            Image.fromarray(picture).save(content, "JPEG")
            files.append(content.getvalue())
        files[0] = first if part == "train" and first else files[0]
        result |= {f"{part}_jpeg": np.frombuffer(b"".join(files), np.uint8)}
        result |= {f"{part}_offsets": np.cumsum([0, *map(len, files)])}
    return result


def try_repairing_the_first(folder: Path, message: str) -> None:
    assert "repair or remove it" in message
    write_npz(folder, **encode_jpegs(b""))
    assert sum(map(len, load_npz(folder).parts)) == COUNT


COMPOSITES = {"kind": "composites", "path": "a.npz", "classes": ("a", "b"), "train": 20, "validation": 5, "test": 5}


def load_composites_of(several: bool) -> Callable[[Path], DatasetSplits]:
    def refused(folder: Path) -> DatasetSplits:
        matrix = np.ones((COUNT, 2), np.uint8) if several else np.eye(2, dtype=np.uint8)[LABELS]
        write_npz(folder, **{f"{part}_labels": matrix[rows] for part, rows in ROWS.items()})
        from polyclinic.common.errors import raise_faults
        from polyclinic.data.load import find_dataset_faults

        spec = CompositesDatasetSpec.model_validate(COMPOSITES)
        raise_faults(find_dataset_faults(spec, folder))
        return load_dataset(spec, folder)

    return refused


NPZ_CASES = (
    Case(f"{NPZ} _find_npz_picture_faults", of_npz(images=DEEP), try_npz_value_range),
    Case(f"{NPZ} _find_npz_picture_faults", of_npz({"image_size": 8}, images=CUBES), try_npz_volumes),
    Case(
        f"{NPZ} find_npz_array_name_faults",
        lambda folder: (np.savez(folder / "a.npz", images=PICTURES, labels=LABELS), load_npz(folder)),
        try_dividing,
    ),
    Case(
        f"{NPZ} find_npz_array_name_faults",
        of_npz(train_labels=None, train_label=LABELS[ROWS["train"]]),
        try_near_array,
    ),
    Case(
        f"{NPZ} find_npz_array_name_faults",
        of_npz(train_patient=np.array([{}] * 40, dtype=object), test_patient=np.array([{}] * 20, dtype=object)),
        try_plain_arrays,
    ),
    Case(
        f"{NPZ} find_npz_label_faults",
        of_npz(**{f"{part}_labels": WORDS[rows] for part, rows in ROWS.items()}),
        try_numbering,
    ),
    Case(f"{NPZ} find_npz_label_faults", of_npz({"classes": ("a",)}), try_number_of_names),
    Case(
        f"{NPZ} _iterate_8_bit_blocks",
        of_npz({"value_range": (0, 1)}, images=np.where(PICTURES == 255, np.nan, PICTURES / 255)),
        try_npz_without_nan,
    ),
    Case(
        "data/base/splits.py find_patient_name_faults",
        of_npz({"patient_key": "patient"}, **of_patients("ANON")),
        try_naming_the_patient,
    ),
    Case(f"{NPZ} _read_npz_jpeg_images", of_npz(**encode_jpegs(b"no picture")), try_repairing_the_first),
    Case(
        "data/sources/composed.py find_composite_faults",
        load_composites_of(several=True),
        lambda folder, message: load_composites_of(several=False)(folder),
    ),
)

# ---------------------------------------------------------------------- folders of pictures


def write_folder(folder: Path, encode: Callable[[NDArray[Any]], bytes]) -> None:
    (folder / "scans").mkdir(exist_ok=True)
    rows = ["file,patient,a,b"]
    for row, picture in enumerate(PICTURES):
        (folder / "scans" / f"{row}.png").write_bytes(encode(picture))
        rows.append(f"{row}.png,p{row},{row % 2},{1 - row % 2}")
    (folder / "labels.csv").write_text("\n".join(rows), encoding="utf-8")


def load_folder(folder: Path, **settings: Any) -> DatasetSplits:
    columns = {"image_column": "file", "patient_column": "patient", "label_columns": ("a", "b")}
    spec = {"kind": "folder", "images": "scans", "labels": "labels.csv", "image_size": 8, **columns, **settings}
    return load_dataset(FolderDatasetSpec.model_validate(spec), folder)


def encode_as(kind: str) -> Callable[[NDArray[Any]], bytes]:
    def encode(picture: NDArray[Any]) -> bytes:
        content = io.BytesIO()
        Image.fromarray(picture).save(content, kind)
        return content.getvalue()

    return encode


def encode_deep(picture: NDArray[Any]) -> bytes:
    return bytes(imagecodecs.png_encode(picture.astype(np.uint16) * 16))


def of_folder(encode: Callable[[NDArray[Any]], bytes]) -> Callable[[Path], DatasetSplits]:
    def refused(folder: Path) -> DatasetSplits:
        write_folder(folder, encode)
        return load_folder(folder)

    return refused


def try_depth(folder: Path, message: str) -> None:
    depth = int(take(message, r"data\.bit_depth must say .* such as (\d+)"))
    check_pictures(load_folder(folder, bit_depth=depth), DEEP * (255 / 4095))


def try_command_that_converts(folder: Path, message: str) -> None:
    command = take(message, r'python -c ".*?" FILE').removesuffix("FILE").replace("python", sys.executable, 1)
    subprocess.run(f"{command} scans/*", shell=True, cwd=folder, check=True)
    check_pictures(load_folder(folder), PICTURES)


def write_some_damaged(folder: Path) -> DatasetSplits:
    write_folder(folder, encode_as("PNG"))
    for row in range(12):
        (folder / "scans" / f"{row}.png").write_bytes(b"no picture")
    return load_folder(folder)


def try_skip_budget(folder: Path, message: str) -> None:
    assert "raise skip_budget" in message
    check_pictures(load_folder(folder, skip_budget=0.2), PICTURES[12:])


def write_words(folder: Path) -> DatasetSplits:
    write_folder(folder, encode_as("PNG"))
    text = (folder / "labels.csv").read_text(encoding="utf-8")
    (folder / "labels.csv").write_text(text.replace(",1", ",ja").replace(",0", ",nein"), encoding="utf-8")
    return load_folder(folder)


def try_naming_words(folder: Path, message: str) -> None:
    words = read_setting(message, r"present = \[.*?\]") | read_setting(message, r"absent = \[.*?\]")
    check_labels(load_folder(folder, **words))


SKIPPED = "data/images/reading.py refuse_too_many_skipped_images"
FOLDER_CASES = (
    Case(SKIPPED, of_folder(encode_deep), try_depth),
    Case(SKIPPED, of_folder(encode_as("BMP")), try_command_that_converts),
    Case(SKIPPED, of_folder(encode_as("TIFF")), try_command_that_converts),
    Case(SKIPPED, write_some_damaged, try_skip_budget),
    Case("data/tables/cells.py parse_label_columns", write_words, try_naming_words),
)
CASES = (*TORCH_CASES, *PART_CASES, *NPZ_CASES, *FOLDER_CASES)
