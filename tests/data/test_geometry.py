"""A picture has the shape that a viewer shows: pixels that are not square, scans in any order, float pixels."""

import io
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nibabel import orientations
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.headers import DicomHeader, describe_mirrored_dicom_slices, read_dicom_header
from polyclinic.data.images.reading import (
    DecodedImageFormat,
    decode_picture,
    fit_picture_to_format,
    has_unequal_density,
)
from tests.data.dicom_files import dicom

SQUARE = DecodedImageFormat(8, color=False, resize="pad")
WHITE = np.full((4, 4), 4095, np.uint16)
WINDOW = {"WindowCenter": 2048, "WindowWidth": 4096}


def measure_body(data: bytes | Path, form: DecodedImageFormat = SQUARE) -> tuple[int, int]:
    """The height and width of what is not padding."""
    picture = fit_picture_to_format(decode_picture(data, form.rendering), form)
    return int((picture > 0).any(axis=1).sum()), int((picture > 0).any(axis=0).sum())


def with_spacing_of_a_frame(spacing: list[float]) -> dict[str, Any]:
    measures, group = Dataset(), Dataset()
    measures.PixelSpacing = spacing
    group.PixelMeasuresSequence = [measures]
    return {"SharedFunctionalGroupsSequence": [group]}


@pytest.mark.parametrize(
    ("elements", "body"),
    [
        ({}, (8, 8)),
        ({"PixelSpacing": [0.7, 0.7]}, (8, 8)),
        ({"PixelSpacing": [2, 1]}, (8, 4)),  # rows are 2 mm apart, so the picture is twice as high as wide
        ({"PixelSpacing": [0.5, 1]}, (4, 8)),
        ({"ImagerPixelSpacing": [1, 2]}, (4, 8)),
        ({"NominalScannedPixelSpacing": [1, 2]}, (4, 8)),
        ({"PixelAspectRatio": [1, 2]}, (4, 8)),
        ({"PixelSpacing": [1, 1], "ImagerPixelSpacing": [1, 2]}, (8, 8)),  # the first that is there counts
        ({"PixelSpacing": [0, 0], "PixelAspectRatio": [1, 2]}, (4, 8)),
        ({"PixelSpacing": [0.7, 0.7001]}, (8, 8)),
        (with_spacing_of_a_frame([2, 1]), (8, 4)),
    ],
)
def test_dicom_pixels_that_are_not_square_are_shown_in_their_shape(
    elements: dict[str, Any], body: tuple[int, int]
) -> None:
    assert measure_body(dicom(WHITE, **WINDOW, **elements)) == body


def test_a_pixel_of_impossible_shape_makes_its_file_unreadable() -> None:
    with pytest.raises(ValueError, match="500 high and 1 wide"):
        decode_picture(dicom(WHITE, PixelSpacing=[500, 1]))


def test_stretching_fills_the_square_with_any_pixels() -> None:
    stretched = DecodedImageFormat(8, color=False, resize="stretch")
    assert measure_body(dicom(WHITE, PixelSpacing=[2, 1], **WINDOW), stretched) == (8, 8)


def scan(folder: Path, axes: str, sizes: tuple[float, float, float] = (1, 1, 1)) -> Path:
    """One scan, stored with its axes in this order and direction."""
    voxels = np.random.default_rng(0).integers(1, 255, (4, 5, 6)).astype(np.int16)
    image = nibabel.Nifti1Image(voxels, np.diag([*sizes, 1]))
    turned = image.as_reoriented(
        orientations.ornt_transform(orientations.axcodes2ornt("RAS"), orientations.axcodes2ornt(axes))
    )
    nibabel.save(turned, folder / f"{axes}.nii")
    return folder / f"{axes}.nii"


@pytest.mark.parametrize("axis", ["axial", "coronal", "sagittal"])
@pytest.mark.parametrize("axes", ["LPS", "LAS", "RPI", "PSR", "SLA"])
def test_a_scan_gives_one_picture_in_every_orientation_in_which_it_is_stored(
    tmp_path: Path, axis: Any, axes: str
) -> None:
    form = DecodedImageFormat(16, color=False, resize="pad", rendering=PictureRenderingOptions(2, axis, (128, 256)))
    stored, again = (
        fit_picture_to_format(decode_picture(scan(tmp_path, order, (1, 2, 5)), form.rendering), form)
        for order in ("RAS", axes)
    )
    np.testing.assert_array_equal(stored, again)


@pytest.mark.parametrize(
    # 4 x 5 x 6 voxels of 1, 2 and 5 mm: 4 mm wide, 10 deep and 30 high.
    ("axis", "body"),
    [("axial", (30, 12)), ("coronal", (30, 4)), ("sagittal", (30, 10))],
)
def test_voxels_have_their_size(tmp_path: Path, axis: Any, body: tuple[int, int]) -> None:
    rendering = PictureRenderingOptions(2, axis, (0, 2))
    form = DecodedImageFormat(30, color=False, resize="pad", rendering=rendering)
    assert measure_body(scan(tmp_path, "RAS", (1, 2, 5)), form) == body


@pytest.mark.parametrize(
    ("settings", "unequal"),
    [
        ({"format": "PNG"}, False),
        ({"format": "PNG", "dpi": (72, 72)}, False),
        ({"format": "PNG", "dpi": (72, 144)}, True),
        ({"format": "JPEG", "dpi": (72, 72)}, False),
        ({"format": "JPEG", "dpi": (72, 144)}, True),
    ],
)
def test_the_density_of_a_png_or_jpeg_file_is_noticed_and_changes_nothing(
    settings: dict[str, Any], unequal: bool
) -> None:
    file = io.BytesIO()
    Image.new("L", (4, 4), 255).save(file, **settings)
    assert has_unequal_density(Image.open(file)) == unequal
    assert measure_body(file.getvalue()) == (8, 8)


def head(*cosines: float) -> DicomHeader:
    return read_dicom_header(dicom(WHITE, ImageOrientationPatient=list(cosines) or None))


AXIAL, MIRRORED, OBLIQUE = head(1, 0, 0, 0, 1, 0), head(-1, 0, 0, 0, 1, 0), head(0.9, 0.1, 0.4, 0, 0.97, -0.2)
SAGITTAL = head(0, 1, 0, 0, 0, -1)


def test_slices_that_are_mirror_images_are_counted() -> None:
    sentence = describe_mirrored_dicom_slices([AXIAL, AXIAL, MIRRORED, SAGITTAL])
    assert "(2 L\\P, 1 R\\P)" in sentence


@pytest.mark.parametrize("heads", [[AXIAL, AXIAL, OBLIQUE, SAGITTAL], [head(), head()], [MIRRORED], []])
def test_slices_of_several_planes_or_one_direction_are_no_mirror_images(heads: list[DicomHeader]) -> None:
    assert describe_mirrored_dicom_slices(heads) == ""


# ---------------------------------------------------------------------- pixels that are floats


def float_map(values: NDArray[Any], keyword: str = "FloatPixelData", **elements: Any) -> bytes:
    """A parametric map: it has neither bits stored nor a sign."""
    none = dict.fromkeys(("BitsStored", "HighBit", "PixelRepresentation", "PixelData"))
    bits = 8 * values.itemsize
    return dicom(values, **none, **{"BitsAllocated": bits, keyword: values.tobytes(), **elements})


MAP = np.array([[0.0, 0.25], [0.5, 1.0]], np.float32)


@pytest.mark.parametrize(
    ("values", "elements", "expected"),
    [
        (MAP, {}, [[0, 64], [128, 255]]),
        (MAP.astype(np.float64), {"keyword": "DoubleFloatPixelData"}, [[0, 64], [128, 255]]),
        (MAP, {"PhotometricInterpretation": "MONOCHROME1"}, [[255, 191], [128, 0]]),
        (MAP, {"WindowCenter": 0.25, "WindowWidth": 0.5}, [[0, 128], [255, 255]]),
        (
            MAP,
            {"RescaleSlope": 100, "RescaleIntercept": -50, "WindowCenter": 0, "WindowWidth": 50},
            [[0, 0], [128, 255]],
        ),
        (MAP, {"FloatPixelPaddingValue": 1.0}, [[0, 128], [255, 0]]),
        (np.array([[np.nan, 1], [2, np.inf]], np.float32), {}, [[0, 0], [255, 0]]),
    ],
)
def test_pixels_that_are_floats_are_read(
    values: NDArray[Any], elements: dict[str, Any], expected: list[list[int]]
) -> None:
    assert np.asarray(decode_picture(float_map(values, **elements))).tolist() == expected


def test_a_window_of_the_experiment_shows_floats_too() -> None:
    shown = decode_picture(float_map(MAP), PictureRenderingOptions(window=(0.5, 1)))
    assert np.asarray(shown).tolist() == [[0, 64], [128, 255]]


def test_the_chosen_frame_of_floats_is_the_picture() -> None:
    data = float_map(np.stack([MAP, MAP[::-1]]), NumberOfFrames=2)
    assert np.asarray(decode_picture(data, PictureRenderingOptions(2))).tolist() == [[128, 255], [0, 64]]


@pytest.mark.parametrize(
    ("values", "elements", "words"),
    [
        (MAP, {"Rows": 3}, "3 rows and 2 columns, which are 24 bytes of FloatPixelData, and holds 16"),
        (MAP, {"PhotometricInterpretation": "RGB"}, "of the kind RGB, which floats cannot be"),
        (np.full((2, 2), np.nan, np.float32), {}, "no numbers"),
    ],
)
def test_floats_that_are_no_picture_are_refused_with_the_reason(
    values: NDArray[Any], elements: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        decode_picture(float_map(values, **elements))
