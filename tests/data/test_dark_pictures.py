"""Pictures that use a small part of 0 to 255: the warning, and the setting that it names."""

import io
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import DATASETS, register_local_plugin
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.data.base.spec import DataSpec, FolderDatasetSpec, PictureRenderingOptions, PluginDatasetSpec
from polyclinic.data.images.reading import decode_picture
from polyclinic.data.load import load_dataset, load_external_test_images
from polyclinic.data.sources.plugin import LabelledImages

ADAPTER: TypeAdapter[DataSpec] = TypeAdapter(DataSpec)
RAMP = np.arange(64, dtype=np.uint8).reshape(8, 8)


def write_npz(folder: Path, images: NDArray[Any], counts: tuple[int, int] = (20, 10)) -> None:
    """A data set whose pictures differ from one another in their first row."""
    random, arrays = np.random.default_rng(0), dict[str, Any]()
    for part, count in zip(("train", "test"), counts, strict=True):
        pictures = np.stack([images] * count)
        pictures[:, 0] = random.choice(images.reshape(-1), (count, 8))
        arrays |= {f"{part}_images": pictures, f"{part}_labels": np.arange(count) % 2}
    np.savez(folder / "it.npz", **arrays)


def find_dark_notes(splits: DatasetSplits) -> list[str]:
    return [note for note in splits.train.notes if "nearly black" in note]


def load_npz(folder: Path, **settings: Any) -> DatasetSplits:
    spec = {"kind": "npz", "path": "it.npz", "classes": ["a", "b"], "image_size": 8, **settings}
    return load_dataset(ADAPTER.validate_python(spec), folder)


@pytest.mark.parametrize(("brightest", "white"), [(1, 1), (11, 15), (16, 31), (63, 63), (64, None), (255, None)])
def test_a_set_whose_pictures_have_no_value_of_64_is_noted_with_the_range_to_write(
    tmp_path: Path, brightest: int, white: int | None
) -> None:
    write_npz(tmp_path, (RAMP * (brightest / 63)).round().astype(np.uint8))
    splits = load_npz(tmp_path)
    notes = find_dark_notes(splits)
    assert [part.white_of_dark for part in splits.parts] == [white or 0] * 3
    assert [f"value_range = [0, {white}]" in note for note in notes] == [True] * (white is not None)


def test_an_external_test_set_is_noted_too(tmp_path: Path) -> None:
    write_npz(tmp_path, RAMP // 8)
    spec = ADAPTER.validate_python({"kind": "npz", "path": "it.npz", "classes": ["a", "b"]})
    images = load_external_test_images(spec, tmp_path)
    assert images is not None
    assert any("value_range = [0, 7]" in note for note in images.notes)


def write_folder(folder: Path, pictures: list[NDArray[Any]]) -> FolderDatasetSpec:
    rows = ["file,patient,a"]
    for place, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(folder / f"{place}.png")
        rows.append(f"{place}.png,p{place},{place % 2}")
    (folder / "labels.csv").write_text("\n".join(rows), encoding="utf-8")
    settings = {"images": ".", "labels": "labels.csv", "image_column": "file", "patient_column": "patient"}
    return FolderDatasetSpec(kind="folder", label_columns=("a",), image_size=8, **settings)


@pytest.mark.parametrize(("dark", "noted"), [(20, 0), (21, 1)])
def test_more_than_half_of_the_pictures_must_be_dark(tmp_path: Path, dark: int, noted: int) -> None:
    spec = write_folder(tmp_path, [RAMP // 16] * dark + [RAMP * 4] * (40 - dark))
    assert len(find_dark_notes(load_dataset(spec, tmp_path))) == noted


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_value_range_makes_the_named_values_black_and_white(kind: str, mode: str) -> None:
    file = io.BytesIO()
    even = [Image.new("L", (16, 16), value) for value in (5, 10, 15, 30)]
    sheet = Image.new("L", (64, 16))
    for place, image in enumerate(even):
        sheet.paste(image, (16 * place, 0))
    sheet.convert(mode).save(file, format=kind, quality=100)
    shown = decode_picture(file.getvalue(), PictureRenderingOptions(value_range=(5, 15))).convert("L")
    assert [shown.getpixel((16 * place + 8, 8)) for place in range(4)] == [0, 128, 255, 255]


def test_value_range_reads_png_of_16_bits_without_a_depth() -> None:
    deep = np.array([[1000, 2000], [3000, 5000]], np.uint16)
    shown = decode_picture(imagecodecs.png_encode(deep), PictureRenderingOptions(value_range=(1000, 3000)))
    assert np.asarray(shown).tolist() == [[0, 128], [255, 255]]


def test_value_range_of_a_folder_ends_the_warning_and_fills_the_range(tmp_path: Path) -> None:
    spec = write_folder(tmp_path, [RAMP // 4] * 20).model_copy(update={"value_range": (0.0, 15.0)})
    splits = load_dataset(spec, tmp_path)
    assert find_dark_notes(splits) == []
    assert splits.train.images[0].tolist() == (RAMP // 4 * 17).tolist()


@pytest.mark.parametrize(
    ("images", "value_range"),
    [
        (RAMP // 4, (0, 15)),
        ((RAMP // 4).astype(np.uint16) * 273, (0, 4095)),
        ((RAMP // 4).astype(np.int16) * 100 - 1000, (-1000, 500)),
        ((RAMP // 4).astype(np.float32) / 15, (0, 1)),
    ],
)
def test_an_npz_file_of_any_numbers_is_read_by_its_value_range(
    tmp_path: Path, images: NDArray[Any], value_range: tuple[float, float]
) -> None:
    write_npz(tmp_path, images)
    pictures = load_npz(tmp_path, value_range=value_range).test.images
    assert pictures[0][1:].tolist() == (RAMP // 4 * 17)[1:].tolist()


def test_an_npz_file_of_other_numbers_needs_a_value_range(tmp_path: Path) -> None:
    write_npz(tmp_path, RAMP.astype(np.uint16))
    with pytest.raises(BadInput) as refused:
        load_npz(tmp_path)
    assert "value_range = [0, 4095]" in refused.value.faults[0].remedy


def test_pixels_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_npz(tmp_path, np.where(RAMP == 5, np.nan, RAMP / 64))
    with pytest.raises(BadInput) as refused:
        load_npz(tmp_path, value_range=(0, 1))
    assert "no number (NaN)" in refused.value.faults[0].problem


@pytest.mark.parametrize("settings", [{"value_range": (9, 9)}, {"value_range": (0, 15), "bit_depth": 12}])
def test_ranges_that_contradict_themselves_are_refused(settings: dict[str, Any]) -> None:
    plain = {"kind": "folder", "images": ".", "labels": "t.csv", "image_column": "f", "label_columns": ["a"]}
    with pytest.raises(ValidationError):
        ADAPTER.validate_python({**plain, **settings})


@pytest.mark.parametrize(("brightest", "noted"), [(0.2, 1), (0.9, 0)])
def test_floats_in_a_small_range_are_noted_in_python(tmp_path: Path, brightest: float, noted: int) -> None:
    rng = np.random.default_rng(0)
    images = [(rng.random((8, 8), np.float32) * brightest, [row % 2]) for row in range(40)]
    data = LabelledImages(images, class_names=["a"])
    name = register_local_plugin(DATASETS, lambda folder, options: data)
    notes = find_dark_notes(load_dataset(PluginDatasetSpec(kind="plugin", name=name), tmp_path))
    assert ["value_range=(a, b)" in note for note in notes] == [True] * noted
