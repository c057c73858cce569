"""Volumes: the axes of every orientation, the grid, grey values; messy files are read rightly or refused by name."""

import gzip
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nibabel import orientations
from numpy.typing import NDArray

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.nifti import render_nifti_slice
from polyclinic.data.images.volume_grid import fit_volume
from polyclinic.data.images.volume_pixels import render_volume
from polyclinic.data.images.volumes import Volume, read_volume, read_volume_header
from tests.data.volume_files import head, multi_frame_file, slice_file, write_nifti, write_series

WIDE = (60.0, 121.0)
"""A window over all values of :func:`head`."""


def make(voxels: NDArray[Any], spacing: tuple[float, float, float] = (1, 1, 1)) -> Volume:
    return Volume(voxels.astype(np.float32), np.diag([*spacing, 1.0]))


# ---------------------------------------------------------------------- axes


def test_a_volume_has_the_same_axes_in_all_48_orientations_of_a_file(tmp_path: Path) -> None:
    image: Any = nibabel.load(write_nifti(tmp_path / "first.nii", head()))
    file = tmp_path / "it.nii"
    for order in itertools.permutations(range(3)):
        for flips in itertools.product([1, -1], repeat=3):
            turned = image.as_reoriented(np.array(list(zip(order, flips, strict=True))))
            nibabel.save(turned, file)
            volume = read_volume(file)
            assert (volume.voxels == head()).all(), orientations.aff2axcodes(turned.affine)
            assert volume.spacing == (3, 2, 1)


def test_a_slice_of_a_volume_is_the_axial_picture_of_the_file(tmp_path: Path) -> None:
    file = write_nifti(tmp_path / "it.nii", head())
    volume = render_volume(file, (6, 5, 4), "stretch", PictureRenderingOptions(window=WIDE)).voxels
    for number, plane in enumerate(volume[..., 0], start=1):
        picture = render_nifti_slice(file, PictureRenderingOptions(number, "axial", WIDE)).pixels
        assert (plane == picture).all()


def test_the_affine_leads_from_a_voxel_to_its_place_in_the_patient(tmp_path: Path) -> None:
    affine = np.array([[-2.0, 0, 0, 90], [0, 0, 1.5, -70], [0, -4, 0, 30], [0, 0, 0, 1]])
    stored = head((4, 5, 6))
    nibabel.save(nibabel.Nifti1Image(stored, affine), tmp_path / "it.nii")
    volume = read_volume(tmp_path / "it.nii")
    for place in itertools.product(*map(range, volume.voxels.shape)):
        there = np.linalg.solve(affine, volume.affine @ [*place, 1])[:3].round().astype(int)
        assert volume.voxels[place] == stored[tuple(there)]


def test_an_oblique_volume_is_turned_to_the_nearest_axes_and_keeps_its_voxels(tmp_path: Path) -> None:
    angle = np.radians(20)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag([1.0, 2.0, 3.0])
    nibabel.save(nibabel.Nifti1Image(head()[:, ::-1, ::-1].transpose(2, 1, 0), affine), tmp_path / "it.nii")
    volume = read_volume(tmp_path / "it.nii")
    assert (volume.voxels == head()).all()
    assert volume.spacing == pytest.approx((3, 2, 1))


# ---------------------------------------------------------------------- the same volume in other files


@pytest.mark.parametrize("kind", ["u1", "<i2", ">i2", "<u2", "<i4", "<f4", ">f8"])
def test_voxels_are_those_of_the_file_in_every_type_of_number(tmp_path: Path, kind: str) -> None:
    voxels = head().astype(kind)
    volume = read_volume(write_nifti(tmp_path / "it.nii.gz", voxels))
    assert volume.voxels.dtype == np.float32
    assert (volume.voxels == voxels).all()


def test_slope_and_intercept_count(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(head()[:, ::-1, ::-1].transpose(2, 1, 0), np.diag([1.0, 2, 3, 1]))
    image.header.set_slope_inter(0.5, -1024)
    nibabel.save(image, tmp_path / "it.nii")
    assert (read_volume(tmp_path / "it.nii").voxels == 0.5 * head() - 1024).all()


def test_a_volume_of_four_axes_with_one_volume_is_read(tmp_path: Path) -> None:
    stored = head()[:, ::-1, ::-1].transpose(2, 1, 0)[..., None]
    nibabel.save(nibabel.Nifti1Image(stored, np.diag([1.0, 2, 3, 1])), tmp_path / "it.nii.gz")
    assert (read_volume(tmp_path / "it.nii.gz").voxels == head()).all()


def test_a_series_is_sorted_by_position_and_is_the_nifti_file_of_the_same_voxels(tmp_path: Path) -> None:
    write_series(tmp_path / "series", head())
    series, file = read_volume(tmp_path / "series"), read_volume(write_nifti(tmp_path / "it.nii", head()))
    assert (series.voxels == file.voxels).all()
    assert series.spacing == file.spacing == (3, 2, 1)


def test_files_beside_the_slices_that_are_texts_or_hidden_change_nothing(tmp_path: Path) -> None:
    write_series(tmp_path / "series", head())
    for name in ("DICOMDIR", ".DS_Store", "notes.txt", "LICENSE"):
        (tmp_path / "series" / name).write_bytes(b"a text")
    assert (read_volume(tmp_path / "series").voxels == head()).all()


def test_frames_of_one_file_are_sorted_by_position(tmp_path: Path) -> None:
    (tmp_path / "it.dcm").write_bytes(multi_frame_file(head(), (3, 0, 5, 1, 4, 2)))
    volume = read_volume(tmp_path / "it.dcm")
    assert (volume.voxels == head()).all()
    assert volume.spacing == (3, 2, 1)


def test_a_folder_with_one_file_of_several_frames_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "it.dcm").write_bytes(multi_frame_file(head(), range(6)))
    assert (read_volume(tmp_path / "it").voxels == head()).all()


def test_rescaling_of_each_slice_counts_and_padding_is_no_number(tmp_path: Path) -> None:
    write_series(tmp_path / "series", head(), RescaleSlope=2, RescaleIntercept=-10, PixelPaddingValue=7)
    voxels = read_volume(tmp_path / "series").voxels
    assert np.isnan(voxels.ravel()[7])
    assert (np.delete(voxels.ravel(), 7) == np.delete(2 * head().ravel().astype(float) - 10, 7)).all()


def test_sagittal_slices_become_the_same_volume(tmp_path: Path) -> None:
    """Rows run to the back, columns to the feet, and slices from the patient's left to the right."""
    for number in range(4):
        plane = head()[::-1, :, 3 - number]  # (down, across)
        place = [(3 - number) * 1.0, 0, 15.0]
        (tmp_path / f"{number}").write_bytes(
            slice_file(
                plane,
                ImagePositionPatient=place,
                ImageOrientationPatient=[0, 1, 0, 0, 0, -1],
                PixelSpacing=[3, 2],
                SeriesInstanceUID="1",
            )
        )
    volume = read_volume(tmp_path)
    assert (volume.voxels == head()).all()
    assert volume.spacing == (3, 2, 1)


# ---------------------------------------------------------------------- what is refused


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def sheared(folder: Path) -> Path:
    affine = np.array([[1.0, 0, 0.2, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(head(), affine), folder / "it.nii")
    return folder / "it.nii"


def zero_affine(folder: Path) -> Path:
    file = write_nifti(folder / "it.nii", head())
    content = bytearray(file.read_bytes())
    content[280:328] = bytes(48)  # the three rows of the sform
    content[252:256] = b"\0\0\2\0"  # qform_code 0, sform_code 2
    file.write_bytes(content)
    return file


def rgb(folder: Path) -> Path:
    voxels = np.zeros((4, 4, 2), [(name, "u1") for name in "RGB"])
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / "it.nii")
    return folder / "it.nii"


def several_times(folder: Path) -> Path:
    nibabel.save(nibabel.Nifti1Image(np.zeros((3, 3, 3, 2), np.int16), np.eye(4)), folder / "it.nii")
    return folder / "it.nii"


def header_pair(folder: Path) -> Path:
    nibabel.save(nibabel.Nifti1Pair(head(), np.eye(4)), folder / "it.hdr")
    return folder / "it.hdr"


def cut_gzip(folder: Path) -> Path:
    file = write_nifti(folder / "it.nii.gz", head())
    cut(file)
    return file


def all_nan(folder: Path) -> Path:
    return write_nifti(folder / "it.nii", np.full((3, 3, 3), np.nan, np.float32))


def one_slice(folder: Path) -> Path:
    return write_nifti(folder / "it.nii", head((1, 5, 4)))


def picture(folder: Path) -> Path:
    (folder / "it.nii").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(400))
    return folder / "it.nii"


def series_with(change: Callable[[Path, list[Path]], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        change(folder, write_series(folder, head()))
        return folder

    return write


def other_slice(**elements: Any) -> Callable[[Path, list[Path]], object]:
    settings = {"SeriesInstanceUID": "1.2.3", "ImagePositionPatient": [0, 0, 18], **elements}
    size = elements.pop("size", (5, 4))
    settings.pop("size", None)
    return lambda folder, files: (folder / "other.dcm").write_bytes(slice_file(np.zeros(size), **settings))


def tilted(folder: Path) -> Path:
    for number in range(6):
        place = [0, number * 0.6, number * 3.0]
        content = slice_file(head()[number], ImagePositionPatient=place, SeriesInstanceUID="1")
        (folder / f"{number}.dcm").write_bytes(content)
    return folder


def film(folder: Path) -> Path:
    content = slice_file(head().reshape(-1, 4), NumberOfFrames=6, Rows=5, Columns=4)
    (folder / "it.dcm").write_bytes(content)
    return folder / "it.dcm"


def inverted(folder: Path) -> Path:
    write_series(folder, head(), PhotometricInterpretation="MONOCHROME1")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "sheared affine": (sheared, r"its axes are not at right angles \(sheared affine\)"),
    "zero affine": (zero_affine, r"its affine \(sform or qform\) gives an axis no length or no direction"),
    "colours": (rgb, "its voxels are no single numbers"),
    "several times": (several_times, "its shape is 3 × 3 × 3 × 2; only three axes are read"),
    "hdr and img": (header_pair, r"its voxels are in another file \(.hdr and .img\)"),
    "cut gzip": (cut_gzip, "damaged or cut off"),
    "only NaN": (all_nan, "the volume holds no number"),
    "one slice": (one_slice, "one slice, which is no volume"),
    "a picture": (picture, "no volume: "),
    "missing slice": (
        series_with(lambda folder, files: files[2].unlink()),
        r'"IM\d+.dcm" and "IM\d+.dcm" are farther apart than most, 6 and 3 mm; slices are missing',
    ),
    "two slices at one place": (series_with(other_slice(ImagePositionPatient=[0, 0, 6])), "are at one place"),
    "two series": (
        series_with(other_slice(SeriesInstanceUID="9.9", SeriesDescription="Scout")),
        r'the folder holds 2 series \(files: 6, "Scout" 1\); give each a folder',
    ),
    "unequal sizes": (series_with(other_slice(size=(6, 4))), "unequal sizes, 5 × 4 and 6 × 4"),
    "unequal pixels": (series_with(other_slice(PixelSpacing=[1, 1])), "pixels of unequal sizes"),
    "a scout": (
        series_with(other_slice(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])),
        "lie in other directions, as a scout does",
    ),
    "no position": (series_with(other_slice(ImagePositionPatient=None)), "does not say the place of its slices"),
    "no pixel size": (series_with(other_slice(PixelSpacing=None)), "does not say the size of its pixels"),
    "a cut slice": (
        series_with(lambda folder, files: (folder / "IM_last").write_bytes(b"DIC")),
        'the folder holds "IM_last", which is no DICOM file',
    ),
    "tilted gantry": (tilted, "a tilted gantry"),
    "a film": (film, "its 6 frames have no place in the patient"),
    "inverted slices": (inverted, "a volume needs grey values, MONOCHROME2"),
    "an empty folder": (lambda folder: folder, "the folder holds no DICOM file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_volume_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        render_volume(write(tmp_path), (4, 4, 4), "pad", PictureRenderingOptions())
    assert len(str(caught.value)) <= 150


def test_a_volume_that_would_fill_the_memory_is_refused_by_its_head(tmp_path: Path) -> None:
    content = bytearray(write_nifti(tmp_path / "it.nii", head()).read_bytes())
    content[42:48] = np.array([1000, 1000, 500], "<i2").tobytes()
    (tmp_path / "it.nii.gz").write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(ValueError, match="takes 1,908 MiB, 256 MiB are allowed"):
        read_volume(tmp_path / "it.nii.gz")


def test_a_header_gives_shape_and_spacing_without_voxels(tmp_path: Path) -> None:
    write_series(tmp_path / "series", head())
    file = write_nifti(tmp_path / "it.nii", head())
    file.write_bytes(file.read_bytes()[:360])
    for content, kind in ((tmp_path / "series", "DICOM series"), (file, "NIfTI")):
        header = read_volume_header(content)
        assert (header.shape, header.spacing, header.kind) == ((6, 5, 4), (3, 2, 1), kind)


def test_a_file_that_states_no_orientation_is_read_as_nibabel_reads_it_and_is_known(tmp_path: Path) -> None:
    file = write_nifti(tmp_path / "it.nii", head())
    content = bytearray(file.read_bytes())
    content[252:256] = bytes(4)
    file.write_bytes(content)
    volume = read_volume(file)
    assert not volume.knows_orientation
    assert volume.spacing == (3, 2, 1)


# ---------------------------------------------------------------------- the grid


def test_a_volume_of_the_wanted_size_and_spacing_stays_as_it_is() -> None:
    volume = make(head(), (3, 2, 1))
    fitted = fit_volume(volume, (6, 5, 4), spacing=(3, 2, 1))
    assert (fitted.voxels == head()).all()
    assert (fitted.affine == volume.affine).all()


def test_a_spacing_crops_and_pads_around_the_middle_in_whole_voxels() -> None:
    fitted = fit_volume(make(head()), (4, 7, 4), spacing=(1, 1, 1))
    assert (fitted.voxels[:, 1:6] == head()[1:5]).all()
    assert not fitted.voxels[:, [0, 6]].any()
    assert fitted.affine[:3, 3].tolist() == [1, -1, 0]  # the first voxel was number (1, -1, 0)


def test_a_larger_spacing_is_a_weighted_mean_worked_by_hand() -> None:
    # Two voxels become one. A triangle of half-width 2 around 1.0, over the centres 0.5, 1.5 and 2.5:
    # distances 0.5, 0.5, 1.5, weights 1.5, 1.5, 0.5 of 3.5.
    line = np.zeros((4, 2, 2))
    line[:, 0, 0] = [1, 4, 16, 2]
    fitted = fit_volume(make(line), (2, 2, 2), spacing=(2, 1, 1))
    expected = [(1.5 * 1 + 1.5 * 4 + 0.5 * 16) / 3.5, (0.5 * 4 + 1.5 * 16 + 1.5 * 2) / 3.5]
    assert fitted.voxels[:, 0, 0].tolist() == pytest.approx(expected)


def test_a_smaller_spacing_interpolates_between_voxels() -> None:
    line = np.zeros((2, 2, 2))
    line[:, 0, 0] = [0, 8]
    fitted = fit_volume(make(line), (4, 2, 2), spacing=(0.5, 1, 1))
    assert fitted.voxels[:, 0, 0].tolist() == [0, 2, 6, 8]  # at 0.25, 0.75, 1.25 and 1.75; the ends stay


def test_without_a_spacing_pad_keeps_proportions_and_stretch_fills() -> None:
    volume = make(np.ones((4, 8, 8)), (4, 1, 1))  # 16 × 8 × 8 mm
    padded = fit_volume(volume, (8, 8, 8))  # voxels of 2 mm: 8 × 4 × 4 of them
    assert padded.filled == (slice(0, 8), slice(2, 6), slice(2, 6))
    assert padded.voxels.sum() == 8 * 4 * 4
    stretched = fit_volume(volume, (8, 8, 8), resize="stretch")
    assert (stretched.voxels == 1).all()


def test_nearest_takes_only_values_of_the_file() -> None:
    mask = np.random.default_rng(0).choice([0, 3, 7], (9, 7, 5))
    fitted = fit_volume(make(mask), (12, 4, 6), spacing=(0.7, 1.9, 1.3), nearest=True)
    assert set(np.unique(fitted.voxels)) <= {0, 3, 7}


def test_the_grid_keeps_its_place_in_the_patient(tmp_path: Path) -> None:
    """A bright point is where the affine says, before and after resampling."""
    voxels = np.zeros((20, 24, 28))
    voxels[14, 5, 9] = 1
    volume = Volume(voxels.astype(np.float32), np.array([[3.0, 0, 0, 5], [0, 1, 0, 6], [0, 0, 2, 7], [0, 0, 0, 1]]))
    fitted = fit_volume(volume, (30, 16, 40), spacing=(1.5, 1.5, 1.5))
    places = np.argwhere(fitted.voxels > 0)
    weights = fitted.voxels[tuple(places.T)]
    middle = (places * weights[:, None]).sum(axis=0) / weights.sum()
    there = fitted.affine @ [*middle, 1]
    assert there[:3] == pytest.approx((volume.affine @ [14, 5, 9, 1])[:3], abs=0.6)


# ---------------------------------------------------------------------- grey values


def test_a_window_says_what_is_black_and_white(tmp_path: Path) -> None:
    voxels = np.full((2, 2, 2), -1000, np.int16)
    voxels[0, 0] = [40, 300]
    file = write_nifti(tmp_path / "it.nii", voxels, (1, 1, 1))
    shown = render_volume(file, (2, 2, 2), "pad", PictureRenderingOptions(window=(40, 400))).voxels
    assert shown.shape == (2, 2, 2, 1)
    assert shown[0, 0, :, 0].tolist() == [128, 255]  # (40 - 39.5) / 399 + 0.5
    assert not shown[1].any()


def test_without_a_window_single_bright_voxels_do_not_make_the_rest_black(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).normal(100, 10, (20, 20, 20))
    voxels[3, 3, 3] = 30_000
    shown = render_volume(
        write_nifti(tmp_path / "it.nii", voxels, (1, 1, 1)), (20,) * 3, "pad", PictureRenderingOptions()
    )
    assert 100 < shown.voxels.mean() < 156
    assert not shown.is_blank


def test_a_window_that_misses_all_values_makes_a_blank_volume(tmp_path: Path) -> None:
    file = write_nifti(tmp_path / "it.nii", head())
    assert render_volume(file, (6, 5, 4), "pad", PictureRenderingOptions(window=(9000, 10))).is_blank


def test_voxels_that_are_no_numbers_are_black_and_spoil_no_neighbour(tmp_path: Path) -> None:
    voxels = np.full((8, 8, 8), 100, np.float32)
    voxels[0] = np.nan
    voxels[1] = -np.inf
    voxels[7] = 0
    file = write_nifti(tmp_path / "it.nii", voxels, (1, 1, 1))
    shown = render_volume(file, (8, 8, 8), "pad", PictureRenderingOptions(window=(50, 99))).voxels[..., 0]
    assert [int(plane.max()) for plane in shown] == [0, 0, 255, 255, 255, 255, 255, 0]
