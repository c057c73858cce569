"""Slices of NIfTI volumes: as nibabel reads them, upright for every orientation, little memory, no bombs."""

import gzip
import itertools
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nibabel import orientations
from numpy.typing import NDArray

from polyclinic.data.base.spec import Axis, FolderDatasetSpec, PictureRenderingOptions
from polyclinic.data.images import nifti
from polyclinic.data.images.nifti import render_nifti_slice
from polyclinic.data.images.reading import BLANK_KEY, DecodedImageFormat, decode_picture
from polyclinic.data.images.store import decode_pictures
from polyclinic.data.load import load_dataset
from tests.data.nifti_files import AFFINE, volume, write

WIDE = (0.0, 2001.0)
VOXELS = volume()
SLICES: dict[Axis, NDArray[Any]] = {
    # Right on the left, front or head at the top: index 2 of the third axis is slice 3, counted from the feet.
    "axial": VOXELS[::-1, ::-1, 2].T,
    "coronal": VOXELS[::-1, 2, ::-1].T,
    "sagittal": VOXELS[2, ::-1, ::-1].T,
}


def grey(values: NDArray[Any], center: float = 0.0, width: float = 2001.0) -> NDArray[np.uint8]:
    """DICOM's linear window, PS3.3 C.11.2.1.2.1."""
    shown = np.clip((values.astype(float) - (center - 0.5)) / (width - 1) + 0.5, 0, 1)
    return np.round(255 * shown).astype(np.uint8)


@pytest.mark.parametrize("axis", SLICES)
def test_a_slice_is_upright_in_all_48_orientations_of_a_file(tmp_path: Path, axis: Axis) -> None:
    image = nibabel.Nifti1Image(VOXELS, AFFINE)
    for order in itertools.permutations(range(3)):
        for flips in itertools.product([1, -1], repeat=3):
            turned = image.as_reoriented(np.array(list(zip(order, flips, strict=True))))
            nibabel.save(turned, tmp_path / "it.nii")
            picture = render_nifti_slice(tmp_path / "it.nii", PictureRenderingOptions(3, axis, WIDE)).pixels
            assert (picture == grey(SLICES[axis])).all(), orientations.aff2axcodes(turned.affine)


@pytest.mark.parametrize("kind", ["<i2", ">i2", "u1", "<u2", "<i4", "<f4", ">f8"])
@pytest.mark.parametrize("name", ["it.nii", "it.nii.gz"])
@pytest.mark.parametrize("version", [1, 2])
def test_slices_are_what_nibabel_reads(tmp_path: Path, kind: str, name: str, version: int) -> None:
    voxels = volume("<i2").astype(kind) if kind not in ("u1", "<u2") else np.abs(volume("<i2")).astype(kind)
    write(tmp_path / name, voxels, slope=0.5, intercept=-100, version=version)
    whole = nibabel.as_closest_canonical(nibabel.load(tmp_path / name)).get_fdata()
    picture = render_nifti_slice(tmp_path / name, PictureRenderingOptions(5, "axial", (0, 1500))).pixels
    assert np.abs(picture.astype(int) - grey(whole[::-1, ::-1, 4].T, 0, 1500)).max() <= 1


def shown(folder: Path, voxels: NDArray[Any], rendering: PictureRenderingOptions, **scale: float) -> list[list[int]]:
    """Write a volume, and return a slice of it."""
    write(folder / "it.nii", voxels, **scale)
    return render_nifti_slice(folder / "it.nii", rendering).pixels.tolist()


def test_hounsfield_units_follow_slope_and_intercept(tmp_path: Path) -> None:
    voxels = np.array([0, 1024, 1064, 3000], dtype="<i2").reshape(1, 4, 1)
    # -1024, 0, 40 and 1976 in a window of 40 ± 200: below -160 black, above 240 white, 40 is (40 - 39.5) / 399 + 0.5.
    picture = shown(tmp_path, voxels, PictureRenderingOptions(1, "axial", (40, 400)), slope=1, intercept=-1024)
    assert picture[::-1] == [[0], [102], [128], [255]]


def test_without_a_window_the_range_of_the_slice_is_shown(tmp_path: Path) -> None:
    voxels = np.zeros((2, 1, 3), dtype="<i2")
    voxels[:, 0, 1] = [10, 30]
    assert shown(tmp_path, voxels, PictureRenderingOptions("middle")) == [[255, 0]]  # the second of three


@pytest.mark.parametrize(("values", "blank"), [((10, 30), True), ((10, 10), False)])
def test_a_window_that_misses_a_whole_slice_is_noticed(values: tuple[int, int], blank: bool, tmp_path: Path) -> None:
    write(tmp_path / "it.nii", np.array(values, dtype="<i2").reshape(2, 1, 1))
    assert (
        decode_picture(tmp_path / "it.nii", PictureRenderingOptions(window=(900, 20))).info.get(BLANK_KEY, False)
        == blank
    )
    assert not decode_picture(tmp_path / "it.nii", PictureRenderingOptions(window=(20, 30))).info.get(BLANK_KEY, False)


def test_numbers_that_are_none_are_black(tmp_path: Path) -> None:
    voxels = np.array([np.nan, np.inf, -np.inf, 1e300], dtype="<f8").reshape(4, 1, 1)
    assert len(shown(tmp_path, voxels, PictureRenderingOptions(window=(0, 2)))[0]) == 4
    assert shown(tmp_path, voxels, PictureRenderingOptions()) == [[255, 0, 0, 0]]


EMPTY, INFINITE = np.full((4, 4, 2), np.nan, "<f4"), np.full((4, 4, 2), np.inf, "<f4")
WRONG: dict[str, tuple[Any, int | None, str]] = {
    "no slice chosen": (VOXELS, None, "has 7 axial slices; choose one by data.frame, 1 to 7 or"),
    "no such slice": (VOXELS, 9, "has 7 axial slices; data.frame = 9 is none of them"),
    "time": (volume(shape=(3, 3, 3, 2)), None, "its shape is 3 × 3 × 3 × 2; only three axes are read"),
    "complex": (VOXELS.astype("<c8"), None, "its voxels are no single numbers"),
    "colours": (np.zeros((4, 4, 2), [(name, "u1") for name in "RGB"]), None, "its voxels are no single numbers"),
    "no number": (EMPTY, 1, "holds no number"),
    "infinite": (INFINITE, 1, "holds no number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_without_such_a_slice(tmp_path: Path, name: str) -> None:
    voxels, frame, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        shown(tmp_path, voxels, PictureRenderingOptions(frame))


def test_a_slice_with_one_number_is_a_picture(tmp_path: Path) -> None:
    voxels = EMPTY.copy()
    voxels[0, 0, 1] = 3
    assert np.shape(shown(tmp_path, voxels, PictureRenderingOptions(2, "axial"))) == (4, 4)


@pytest.mark.parametrize("name", ["it.nii", "it.nii.gz"])
def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path, name: str) -> None:
    content = write(tmp_path / name, VOXELS)
    (tmp_path / name).write_bytes(content[:-40])
    with pytest.raises(ValueError, match="damaged or cut off"):
        render_nifti_slice(tmp_path / name, PictureRenderingOptions(7))


@pytest.mark.parametrize("place", [0.5, -8])
def test_a_gzip_file_with_another_checksum_than_its_content_is_damaged(tmp_path: Path, place: float) -> None:
    """Stored, not packed, so that changed bytes are voxels; the checksum is in the last 8 bytes."""
    content = bytearray(gzip.compress(write(tmp_path / "it.nii", VOXELS), 0))
    at = int(place * len(content)) if place > 0 else int(place)
    content[at] ^= 0x55
    (tmp_path / "it.nii.gz").write_bytes(content)
    for number in (1, 7):
        with pytest.raises(ValueError, match="damaged or cut off"):
            render_nifti_slice(tmp_path / "it.nii.gz", PictureRenderingOptions(number))


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("it.nii", (30000, 30000, 30000), "51,498,414 MiB"), ("it.nii.gz", (1000, 1000, 500), "954 MiB")],
)
def test_volumes_that_would_fill_the_memory_are_refused_by_their_head(
    tmp_path: Path, name: str, shape: tuple[int, ...], size: str
) -> None:
    content = write(tmp_path / "it.nii", VOXELS)
    content = content[:40] + struct.pack("<8h", 3, *shape, 1, 1, 1, 1) + content[56:]
    (tmp_path / name).write_bytes(gzip.compress(content + bytes(1 << 20)) if name.endswith(".gz") else content)
    with pytest.raises(ValueError, match=f"takes {size}, 256 MiB are allowed"):
        render_nifti_slice(tmp_path / name, PictureRenderingOptions(1))


def test_what_gzip_holds_beyond_the_voxels_does_not_fill_the_memory(tmp_path: Path) -> None:
    content = write(tmp_path / "it.nii", VOXELS)
    (tmp_path / "it.nii.gz").write_bytes(gzip.compress(content + bytes(1 << 26), 1))
    most, picture = peak(tmp_path / "it.nii.gz", PictureRenderingOptions(7))
    assert picture.shape == (6, 5)
    assert most < 1 << 20


@pytest.mark.parametrize("axis", nifti.AXES)
@pytest.mark.parametrize("name", ["it.nii", "it.nii.gz"])
def test_a_slice_takes_the_memory_of_a_slice(tmp_path: Path, name: str, axis: Axis) -> None:
    voxels = np.random.default_rng(0).integers(0, 9, (128, 128, 128)).astype("<i2")  # 4 MiB, a plane 32 KiB
    write(tmp_path / name, voxels)
    most, _ = peak(tmp_path / name, PictureRenderingOptions("middle", axis))
    assert most < voxels.nbytes / 4


def peak(file: Path, rendering: PictureRenderingOptions) -> tuple[int, NDArray[np.uint8]]:
    """Most bytes in use while a slice is read; and the slice."""
    tracemalloc.start()
    picture = render_nifti_slice(file, rendering).pixels
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most, picture


def test_a_folder_of_volumes_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    rows = []
    for number in range(20):
        name = f"{number}.nii.gz" if number % 2 else f"{number}.nii"
        write(tmp_path / "scans" / name, volume() + number)
        rows.append(f"{name},p{number},{number % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(["image,patient,Mass", *rows]), encoding="utf-8")
    columns = {"image_column": "image", "patient_column": "patient", "label_columns": ["Mass"], "window": [40, 400]}
    common = {"kind": "folder", "images": "scans", "labels": "labels.csv", "image_size": 8, **columns}
    splits = load_dataset(FolderDatasetSpec.model_validate({**common, "frame": "middle", "axis": "coronal"}), tmp_path)
    assert sum(map(len, splits.parts)) == 20


def test_a_volume_is_known_by_its_content(tmp_path: Path) -> None:
    write(tmp_path / "it.nii.gz", VOXELS)
    (tmp_path / "it.nii.gz").rename(tmp_path / "scan")
    assert decode_picture(tmp_path / "scan", PictureRenderingOptions(1)).size == (5, 6)
    (tmp_path / "other.nii.gz").write_bytes(gzip.compress(b"no volume"))
    (tmp_path / "short.nii.gz").write_bytes(b"\x1f\x8b\x08")
    files = [tmp_path / "other.nii.gz", tmp_path / "short.nii.gz"]
    form = DecodedImageFormat(4, color=False, resize="pad")
    reasons = [skip.reason for skip in decode_pictures(["a", "b"], files.__getitem__, form).skipped]
    assert reasons == ["neither PNG, JPEG, DICOM nor NIfTI"] * 2


def test_copies_of_a_volume_have_one_place_and_volumes_that_share_a_slice_have_not(tmp_path: Path) -> None:
    changed = volume()
    changed[..., 0] += 1  # not in the slice that is read
    for name, voxels in (("a", volume()), ("b", volume()), ("c", changed)):
        write(tmp_path / f"{name}.nii", voxels)
    files = [tmp_path / f"{name}.nii" for name in "abc"]
    form = DecodedImageFormat(8, color=False, resize="pad", rendering=PictureRenderingOptions(3, "axial"))
    assert decode_pictures(["a", "b", "c"], files.__getitem__, form).places.tolist() == [0, 0, 2]
