"""One key bounds what a file takes in memory; below the bound nothing is read otherwise than before."""

import csv
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom.dataset import Dataset

from polyclinic.common.errors import BadInput
from polyclinic.data.base.decoded_size import (
    DEFAULT_LARGEST_MB,
    MAX_MEMORY_SHARE,
    compute_decoded_file_size_limit,
    measure_process_memory_limit,
)
from polyclinic.data.base.spec import FolderDatasetSpec, NpzDatasetSpec, PictureRenderingOptions
from polyclinic.data.images import bands
from polyclinic.data.images.headers import estimate_jpeg_2000_decoder_memory
from polyclinic.data.images.reading import decode_picture
from polyclinic.data.load import load_dataset
from polyclinic.data.sources.npz_file import open_npz_arrays
from polyclinic.data.tables.csv import read_csv_table
from tests.data.bombs import jpeg_2000
from tests.data.dicom_files import decode_dicom_pixels
from tests.data.dicom_syntaxes import plain, source

MIB = 1 << 20


@pytest.mark.parametrize(
    ("packed", "unpacked"),
    [
        (4_100_000_000, 112_120 * 224 * 224),  # ChestMNIST of 224 pixels, grey
        (12_600_000_000, 107_180 * 224 * 224 * 3),  # PathMNIST of 224 pixels, colour
        (2_000_000, 58_830 * 28 * 28),  # 46 MB of small images are below what any file may take
    ],
)
def test_medmnist_may_be_read_where_three_quarters_of_the_memory_hold_it(packed: int, unpacked: int) -> None:
    fits = unpacked <= max(DEFAULT_LARGEST_MB * MIB, MAX_MEMORY_SHARE * measure_process_memory_limit())
    assert (unpacked <= compute_decoded_file_size_limit(packed)) == fits


def test_a_file_may_grow_a_hundred_times_and_to_what_the_key_says_in_any_case() -> None:
    assert compute_decoded_file_size_limit(3_000_000) == 300_000_000
    assert compute_decoded_file_size_limit(1000) == 256 * MIB
    assert compute_decoded_file_size_limit(1000, 5000) == 5000 * MIB


def png(mode: str, *size: int) -> bytes:
    content = io.BytesIO()
    Image.new(mode, size).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize(("mode", "needed"), [("L", 1), ("I;16", 2), ("RGB", 4), ("LA", 4)])
def test_the_key_says_what_a_picture_may_take(mode: str, needed: int) -> None:
    content = png(mode, 1024, 1024)  # a MiB in grey of 8 bits
    bound = PictureRenderingOptions(largest_mb=needed, bit_depth=16)
    assert decode_picture(content, bound).size == (1024, 1024)
    with pytest.raises(ValueError, match="largest_mb"):
        decode_picture(png(mode, 1024, 1025), bound)


def test_a_dicom_pictures_bytes_are_counted_with_samples_and_bits() -> None:
    content = plain(source(12), 12, Rows=1024, Columns=1024)  # two bytes a pixel
    with pytest.raises(ValueError, match="takes 2 MiB, 1 MiB are allowed"):
        decode_dicom_pixels(content, PictureRenderingOptions(largest_mb=1))


def save_npz(folder: Path, side: int) -> None:
    arrays = {f"{part}_images": np.full((4, side, side), 90, np.uint8) for part in ("train", "test")}
    arrays |= {f"{part}_labels": np.array([0, 1, 0, 1], np.uint8) for part in ("train", "test")}
    np.savez_compressed(folder / "a.npz", **arrays)


def spec(**more: Any) -> NpzDatasetSpec:
    return NpzDatasetSpec(kind="npz", path="a.npz", classes=("a", "b"), **more)


@pytest.mark.parametrize(("side", "image_size"), [(700, None), (4, 4096)])  # 3.9 MB in some kilobytes, and resized
def test_an_npz_file_beyond_the_limit_is_refused(tmp_path: Path, side: int, image_size: int | None) -> None:
    save_npz(tmp_path, side)
    with pytest.raises(BadInput, match="largest_mb") as caught:
        load_dataset(spec(largest_mb=1, image_size=image_size), tmp_path)
    assert [fault.where for fault in caught.value.faults] == ["data.path"]
    assert len(load_dataset(spec(largest_mb=4), tmp_path).train) > 0


def test_npz_images_are_in_memory_once(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (1000, 100, 200), dtype=np.uint8)
    labels = np.arange(1000) % 2
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, test_images=255 - images, test_labels=labels)
    tracemalloc.start()
    splits = load_dataset(spec(validation_fraction=0.5), tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(part.stored.nbytes for part in splits.parts) == 2 * images.nbytes
    assert most < 2.2 * images.nbytes


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["C", "F"]), st.sampled_from([(5,), (3, 4), (2, 3, 3)]), st.integers(0, 40))
def test_chosen_rows_are_those_of_the_whole_array(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, order: Any, shape: tuple[int, ...], count: int
) -> None:
    array = np.asarray(np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8), order=order)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=count))), dtype=np.intp)
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    np.savez(path, a=array)
    with open_npz_arrays(path) as arrays:
        np.testing.assert_array_equal(arrays.read_array_rows("a", rows), array[rows])


def test_a_table_of_many_blocks_holds_the_cells_of_its_lines(tmp_path: Path) -> None:
    lines = [[f"{row}.png", "x" * (row % 140), str(row % 3)] for row in range(30_000)]  # 2.4 MiB
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "text", "label"], *lines])
    columns = read_csv_table(tmp_path / "a.csv", "data.labels")
    assert [list(row) for row in zip(*columns.values(), strict=True)] == lines
    assert columns["text"].dtype == np.dtype("<U139")
    assert columns.lines.tolist() == list(range(2, 30_002))


def test_ragged_lines_are_counted_over_all_blocks(tmp_path: Path) -> None:
    lines = [f"{'a' * 20},1"] * 150_000
    lines[10], lines[140_000] = "a", "a,1,2"
    (tmp_path / "a.csv").write_text("\n".join(["image,label", *lines]), encoding="utf-8")
    with pytest.raises(BadInput, match=r"2 lines of a.csv .* line 12 first"):
        read_csv_table(tmp_path / "a.csv", "data.labels")


@pytest.mark.parametrize(("largest_mb", "where"), [(1, "data.labels"), (4, "data.images")])
def test_a_table_of_a_folder_has_the_key_too(tmp_path: Path, largest_mb: int, where: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "a.csv").write_text("image,Mass\n" + "x" * 200 + ",1\n" + "a,1\n" * 5000, encoding="utf-8")  # 3.8 MiB
    folder = {"kind": "folder", "images": "pictures", "labels": "a.csv", "image_column": "image"}
    with pytest.raises(BadInput) as caught:  # in the end because there is no picture
        load_dataset(
            FolderDatasetSpec.model_validate({**folder, "label_columns": ["Mass"], "largest_mb": largest_mb}), tmp_path
        )
    assert [fault.where for fault in caught.value.faults] == [where]


def voi_table() -> list[Dataset]:
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 8]
    table.LUTData = (np.arange(4096) // 16).astype("<u2").tobytes()
    return [table]


FORMS: dict[str, Callable[[], bytes]] = {
    "the range of the values": lambda: plain(source(12), 12),
    "padding": lambda: plain(source(12), 12, PixelPaddingValue=2048),
    "inverted": lambda: plain(source(12), 12, PhotometricInterpretation="MONOCHROME1"),
    "a window": lambda: plain(source(12), 12, WindowCenter=2000, WindowWidth=1500),
    "a table": lambda: plain(source(12), 12, VOILUTSequence=voi_table()),
    "colours": lambda: plain(source(8, samples=3), 8),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_is_the_same_in_bands(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode_dicom_pixels(FORMS[form]())
    monkeypatch.setattr(bands, "VALUES_PER_BAND", 5 * 52)
    np.testing.assert_array_equal(decode_dicom_pixels(FORMS[form]()), whole)


TILE, BLOCK = 9216, 768


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (jpeg_2000(64, 64), TILE + BLOCK + 2),  # one block of 64 x 64; one layer of one resolution is visited, 2 bytes
        (jpeg_2000(64, 32, blocks=0), TILE + 16 * 8 * (BLOCK + 2)),  # blocks of 4 x 4
        (jpeg_2000(64, 64, tile=32), 4 * TILE + 4 * BLOCK + 2),
        # Levels halve: 8 x 8 without bands, then three bands of 8 x 8, then of 16 x 16, in blocks of 8 x 8.
        (jpeg_2000(32, 32, levels=2, blocks=1), TILE + (1 + 3 + 3 * 4) * (BLOCK + 6)),
        (jpeg_2000(16, 16, precincts=1), TILE + 64 * (BLOCK + 2)),  # precincts of 2 x 2
    ],
)
def test_tables_of_jpeg_2000_are_counted_by_tiles_and_blocks(frame: bytes, expected: int) -> None:
    assert estimate_jpeg_2000_decoder_memory(frame) == expected


def test_the_style_of_a_later_tile_counts() -> None:
    frame = jpeg_2000(64, 64)
    place = frame.index(b"\xff\x90")
    style = b"\xff\x52\0\x0c" + bytes([0, 0, 0, 1, 0, 0, 0, 0, 0, 1])  # blocks of 4 x 4
    part = b"\xff\x90\0\x0a\0\0" + (14 + len(style)).to_bytes(4, "big") + b"\0\2" + style + b"\xff\x93"
    first = b"\xff\x90\0\x0a\0\0" + (14).to_bytes(4, "big") + b"\0\2\xff\x93"
    assert estimate_jpeg_2000_decoder_memory(frame[:place] + first + part + b"\xff\xd9") == TILE + 256 * (BLOCK + 2)
