"""Files of several frames, frames with windows of their own, palettes, signs: by hand, and beside pydicom."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.pixels.utils import pixel_array

from common.data.base.spec_base import Rendering
from common.data.images.dicom import dicom_pixels
from tests.common.data.dicom_files import dicom
from tests.common.data.dicom_syntaxes import by_gdcm, by_pydicom, plain, source

ROOT = Path(__file__).parents[3]
FOUR = np.array([[[0, 10]], [[0, 20]], [[30, 0]], [[40, 0]]], dtype=np.uint16)
BRIGHTEST = {"WindowCenter": 128, "WindowWidth": 256}


def four_frames(**elements: Any) -> bytes:
    return dicom(FOUR, NumberOfFrames=4, **BRIGHTEST, **elements)


@pytest.mark.parametrize(("frame", "expected"), [(1, [[0, 10]]), (2, [[0, 20]]), (4, [[40, 0]]), ("middle", [[30, 0]])])
def test_the_chosen_frame_is_the_picture(frame: Any, expected: list[list[int]]) -> None:
    assert dicom_pixels(four_frames(), Rendering(frame)).tolist() == expected


@pytest.mark.parametrize("syntax", [uid.RLELossless, uid.JPEGLSLossless, uid.JPEG2000Lossless])
@pytest.mark.parametrize("frame", [1, 3])
def test_the_chosen_frame_of_packed_ones_is_the_picture(syntax: str, frame: int) -> None:
    frames = np.tile(FOUR, (1, 40, 20))
    data = by_pydicom(dicom(frames, NumberOfFrames=4, **BRIGHTEST), syntax)
    assert dicom_pixels(data, Rendering(frame)).tolist() == frames[frame - 1].tolist()


@pytest.mark.parametrize(
    ("frame", "problem"),
    [(None, '4 frames; choose one by data.frame, 1 to 4 or "middle"'), (5, "4 frames; data.frame = 5 is none of them")],
)
def test_no_frame_is_guessed(frame: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dicom_pixels(four_frames(), Rendering(frame))


@pytest.mark.parametrize("frame", [None, 1, "middle"])
def test_a_file_of_one_frame_needs_no_choice(frame: Any) -> None:
    assert dicom_pixels(dicom(FOUR[0], **BRIGHTEST), Rendering(frame)).tolist() == [[0, 10]]


def test_a_frame_has_its_own_window_before_the_one_that_all_share() -> None:
    def group(center: float) -> Dataset:
        window, item = Dataset(), Dataset()
        window.WindowCenter, window.WindowWidth = center, 2 * center
        window.VOILUTFunction = "LINEAR_EXACT"
        item.FrameVOILUTSequence = [window]
        return item

    groups = {"SharedFunctionalGroupsSequence": [group(10)], "PerFrameFunctionalGroupsSequence": [Dataset(), group(20)]}
    data = dicom(FOUR[:2], NumberOfFrames=2, **groups)
    assert dicom_pixels(data, Rendering(1)).tolist() == [[0, 128]]  # 10 of 0 to 20
    assert dicom_pixels(data, Rendering(2)).tolist() == [[0, 128]]  # 20 of 0 to 40


@pytest.mark.parametrize("bits", [8, 16])
def test_a_palette_becomes_its_colours(bits: int) -> None:
    tables = {"Red": [0, 255, 7, 3], "Green": [1, 0, 8, 3], "Blue": [2, 100, 9, 3]}
    elements: dict[str, Any] = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    for color, entries in tables.items():
        scaled = np.array(entries, dtype=f"<u{bits // 8}") * (257 if bits == 16 else 1)
        elements[f"{color}PaletteColorLookupTableDescriptor"] = [4, 0, bits]
        elements[f"{color}PaletteColorLookupTableData"] = scaled.tobytes()
    data = dicom(np.array([[2, 1], [0, 1]], np.uint8), PhotometricInterpretation="PALETTE COLOR", **elements)
    assert dicom_pixels(data).tolist() == [[[7, 8, 9], [255, 0, 100]], [[0, 1, 2], [255, 0, 100]]]


def test_a_palette_that_is_missing_is_told_in_our_words() -> None:
    with pytest.raises(ValueError, match="numbers in a palette, and the file holds no palette"):
        dicom_pixels(dicom(np.array([[2, 1], [0, 1]], np.uint8), PhotometricInterpretation="PALETTE COLOR"))


def test_what_pydicom_warns_of_is_not_printed(tmp_path: Path) -> None:
    """Texts for programmers with paths of this machine, between our own lines."""
    rows = dicom(np.zeros((4, 4), np.uint16), Rows=3)
    (tmp_path / "rows.dcm").write_bytes(rows)
    code = "import pathlib, sys; from common.data.images import reading; reading.picture(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "rows.dcm"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_segmented_palette_is_refused_because_it_may_grow_without_bound() -> None:
    elements = {"PhotometricInterpretation": "PALETTE COLOR", "SegmentedRedPaletteColorLookupTableData": bytes(6)}
    with pytest.raises(ValueError, match="segmented"):
        dicom_pixels(dicom(FOUR[0], **elements))


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("bits", "signed"), [(12, False), (14, False), (16, False), (12, True), (16, True)])
def test_grey_is_what_pydicoms_own_pipeline_shows(photometric: str, bits: int, signed: bool) -> None:
    window = {"WindowCenter": 300, "WindowWidth": 900, "RescaleSlope": 2, "RescaleIntercept": -50}
    data = plain(source(bits, signed=signed), bits, PhotometricInterpretation=photometric, **window)
    dataset = pydicom.dcmread(io.BytesIO(data))
    shown = np.asarray(apply_voi_lut(apply_modality_lut(pixel_array(dataset), dataset), dataset), dtype=float)
    low = -(1 << bits - 1) * 2 - 50 if signed else -50  # pydicom maps the window to the range of rescaled pixels
    part = (shown - low) / (2 * ((1 << bits) - 1))
    expected = 255 * (1 - part if photometric == "MONOCHROME1" else part)
    assert np.abs(dicom_pixels(by_gdcm(data, uid.JPEGLosslessSV1)) - expected).max() <= 0.51
