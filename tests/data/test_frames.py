"""Files of several frames, frames with windows of their own, palettes, signs: by hand, and beside pydicom."""

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.uid import ExplicitVRBigEndian

from polyclinic.data.base.spec import PictureRenderingOptions
from tests.data.dicom_files import decode_dicom_pixels, dicom
from tests.data.dicom_syntaxes import by_pydicom, saved

ROOT = Path(__file__).parents[2]
FOUR = np.array([[[0, 10]], [[0, 20]], [[30, 0]], [[40, 0]]], dtype=np.uint16)
BRIGHTEST = {"WindowCenter": 128, "WindowWidth": 256}


def four_frames(**elements: Any) -> bytes:
    return dicom(FOUR, NumberOfFrames=4, **BRIGHTEST, **elements)


@pytest.mark.parametrize(("frame", "expected"), [(1, [[0, 10]]), (2, [[0, 20]]), (4, [[40, 0]]), ("middle", [[30, 0]])])
def test_the_chosen_frame_is_the_picture(frame: Any, expected: list[list[int]]) -> None:
    assert decode_dicom_pixels(four_frames(), PictureRenderingOptions(frame)).tolist() == expected


@pytest.mark.parametrize("syntax", [uid.RLELossless, uid.JPEGLSLossless, uid.JPEG2000Lossless])
@pytest.mark.parametrize("frame", [1, 3])
def test_the_chosen_frame_of_packed_ones_is_the_picture(syntax: str, frame: int) -> None:
    frames = np.tile(FOUR, (1, 40, 20))
    data = by_pydicom(dicom(frames, NumberOfFrames=4, **BRIGHTEST), syntax)
    assert decode_dicom_pixels(data, PictureRenderingOptions(frame)).tolist() == frames[frame - 1].tolist()


@pytest.mark.parametrize(
    ("frame", "problem"),
    [(None, '4 frames; choose one by data.frame, 1 to 4 or "middle"'), (5, "4 frames; data.frame = 5 is none of them")],
)
def test_no_frame_is_guessed(frame: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode_dicom_pixels(four_frames(), PictureRenderingOptions(frame))


@pytest.mark.parametrize("frame", [None, 1, "middle"])
def test_a_file_of_one_frame_needs_no_choice(frame: Any) -> None:
    assert decode_dicom_pixels(dicom(FOUR[0], **BRIGHTEST), PictureRenderingOptions(frame)).tolist() == [[0, 10]]


def test_a_frame_has_its_own_window_before_the_one_that_all_share() -> None:
    def group(center: float) -> Dataset:
        window, item = Dataset(), Dataset()
        window.WindowCenter, window.WindowWidth = center, 2 * center
        window.VOILUTFunction = "LINEAR_EXACT"
        item.FrameVOILUTSequence = [window]
        return item

    groups = {"SharedFunctionalGroupsSequence": [group(10)], "PerFrameFunctionalGroupsSequence": [Dataset(), group(20)]}
    data = dicom(FOUR[:2], NumberOfFrames=2, **groups)
    assert decode_dicom_pixels(data, PictureRenderingOptions(1)).tolist() == [[0, 128]]  # 10 of 0 to 20
    assert decode_dicom_pixels(data, PictureRenderingOptions(2)).tolist() == [[0, 128]]  # 20 of 0 to 40


SIXTEEN = {"BitsAllocated": 16, "BitsStored": 16, "HighBit": 15}
PALETTE: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR", **SIXTEEN}


def palette(entries: Sequence[Sequence[int]], first: int, bits: int, kind: str, pack: bool = False) -> dict[str, Any]:
    """Elements of a palette; ``pack``: two entries of 8 bits a word, the first in its low byte."""
    elements = dict(PALETTE)
    for color, column in zip(("Red", "Green", "Blue"), np.transpose(entries), strict=True):
        words = np.asarray(column, np.uint8).view("<u2").astype(kind) if pack else np.asarray(column, kind)
        elements[f"{color}PaletteColorLookupTableDescriptor"] = [len(column), first, bits]
        elements[f"{color}PaletteColorLookupTableData"] = words.tobytes()
    return elements


@pytest.mark.parametrize(
    ("entries", "bits", "colors"),
    [
        # Entries of 8 bits in the low bytes of words of 16, as older files have them (DICOM PS3.3 C.7.6.3.1.6).
        ([(10, 20, 30), (200, 0, 255)], 8, [[10, 20, 30], [200, 0, 255]]),
        ([(2570, 5140, 0), (51400, 0, 65535)], 8, [[10, 20, 0], [200, 0, 255]]),  # of 16 bits, said to have 8
        ([(0, 0, 0), (65535, 0, 51400)], 16, [[0, 0, 0], [255, 0, 200]]),  # a palette without green
    ],
)
def test_a_palette_is_read_by_the_depth_of_its_entries(entries: list[Any], bits: int, colors: list[Any]) -> None:
    assert decode_dicom_pixels(dicom(np.array([[0, 1]], np.uint16), **palette(entries, 0, bits, "<u2"))).tolist() == [
        colors
    ]


@pytest.mark.parametrize("pack", [True, False])
def test_numbers_outside_of_a_palette_take_its_ends(pack: bool) -> None:
    """Also with more than 256 entries, and far outside."""
    entries = [(number % 251, number // 2 % 256, 7) for number in range(300)]
    elements = palette(entries, 1000, 8, "<u2", pack)
    picture = decode_dicom_pixels(dicom(np.array([[0, 999, 1000, 1299, 1300, 65535]], np.uint16), **elements))
    assert picture.tolist() == [[list(entries[place]) for place in (0, 0, 0, 299, 299, 299)]]


@pytest.mark.parametrize("pack", [True, False])
def test_a_palette_in_a_file_whose_high_byte_comes_first(pack: bool) -> None:
    entries = [(1, 20, 30), (40, 50, 60), (70, 80, 90), (255, 0, 9)]
    pixels = np.array([[3, 0, 2, 1]], ">u2")
    wide = [[257 * value for value in entry] for entry in entries]
    elements = palette(entries, 0, 8, ">u2", pack) if pack else palette(wide, 0, 16, ">u2")
    picture = decode_dicom_pixels(dicom(pixels, syntax=ExplicitVRBigEndian, **elements))
    assert picture.tolist() == [[list(entries[place]) for place in (3, 0, 2, 1)]]


@pytest.mark.parametrize("signed", [0, 1])
@pytest.mark.parametrize(("stored", "high"), [(12, 15), (12, 13), (8, 11), (8, 15), (1, 3)])
def test_values_that_lie_above_unused_bits_are_read_as_they_are(stored: int, high: int, signed: int) -> None:
    """As older archives have them; what lies below is no part of the value."""
    shift = high + 1 - stored
    low = -(1 << (stored - 1)) if signed else 0
    values = np.linspace(low, low + (1 << stored) - 1, 12).astype(np.int64).reshape(3, 4)
    cells = ((values << shift) | ((1 << shift) - 1)) & 0xFFFF
    bits = {"BitsStored": stored, "PixelRepresentation": signed}
    picture = decode_dicom_pixels(dicom(cells.astype(np.uint16), HighBit=high, **bits))
    plain = decode_dicom_pixels(dicom((values & 0xFFFF).astype(np.uint16), HighBit=stored - 1, **bits))
    assert picture.tolist() == plain.tolist()
    assert (picture.min(), picture.max()) == (0, 255)


@pytest.mark.parametrize("wrong", [{"Rows": 3}, {"Columns": 3}, {"Rows": 2}, {"Columns": 1}, {"NumberOfFrames": 0}])
def test_pixels_of_another_size_than_the_file_says_are_refused(wrong: dict[str, int]) -> None:
    """They would be a cut or a sheared picture."""
    right = dicom(np.arange(16, dtype=np.uint16).reshape(4, 4))
    assert decode_dicom_pixels(right).shape == (4, 4)
    elements = wrong if "NumberOfFrames" not in wrong else {"PixelData": bytes(64)}
    with pytest.raises(ValueError, match="bytes of pixels, and holds"):
        decode_dicom_pixels(dicom(np.arange(16, dtype=np.uint16).reshape(4, 4), **elements))


@pytest.mark.parametrize("wrong", [{"Rows": 3}, {"Columns": 3}, {"Rows": 2}, {"Columns": 1}])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_packed_by_run_lengths_too(wrong: dict[str, int], kind: type) -> None:
    pixels = np.array([[5, 5, 5, 5], [1, 2, 3, 4], [9, 9, 9, 1], [0, 0, 0, 0]], kind)
    bits = 8 * pixels.itemsize
    dataset = pydicom.dcmread(io.BytesIO(dicom(pixels, BitsAllocated=bits, BitsStored=bits, HighBit=bits - 1)))
    dataset.compress(uid.RLELossless)
    assert decode_dicom_pixels(saved(dataset)).shape == (4, 4)
    for name, value in wrong.items():
        setattr(dataset, name, value)
    with pytest.raises(ValueError, match="its packed pixels are 16"):
        decode_dicom_pixels(saved(dataset))


@pytest.mark.filterwarnings("ignore:.*excess padding:UserWarning")
@pytest.mark.parametrize("padding", [1, 2, 6])
def test_a_few_bytes_behind_the_pixels_are_padding(padding: int) -> None:
    pixels = np.arange(16, dtype=np.uint16).reshape(4, 4)
    padded = decode_dicom_pixels(dicom(pixels, PixelData=pixels.tobytes() + bytes(padding)))
    assert padded.tolist() == decode_dicom_pixels(dicom(pixels)).tolist()


def test_what_pydicom_warns_of_is_not_printed(tmp_path: Path) -> None:
    """Texts for programmers with paths of this machine, between our own lines."""
    padded = dicom(np.zeros((4, 4), np.uint16), PixelData=bytes(34))
    (tmp_path / "padded.dcm").write_bytes(padded)
    code = (
        "import pathlib, sys; from polyclinic.data.images import reading; "
        "reading.decode_picture(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "padded.dcm"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


TWO_COLORS = palette([(1, 2, 3), (4, 5, 6)], 0, 16, "<u2")
TOO_SHORT = {
    **TWO_COLORS,
    **{f"{color}PaletteColorLookupTableDescriptor": [200, 0, 16] for color in ("Red", "Green", "Blue")},
}


def test_a_blank_window_of_a_frame_leaves_that_of_the_file() -> None:
    """The item is empty, has blank elements or only a function; a slope of the frame replaces the file's table."""
    blank, function, slope, several = Dataset(), Dataset(), Dataset(), {"WindowCenter": 10, "WindowWidth": 20}
    blank.WindowCenter = blank.WindowWidth = None
    function.VOILUTFunction = "SIGMOID"
    for window in (Dataset(), blank, function):
        group = Dataset()
        group.FrameVOILUTSequence = [window]
        data = dicom(FOUR[:2], NumberOfFrames=2, PerFrameFunctionalGroupsSequence=[group, group], **several)
        plain_file = dicom(FOUR[:2], NumberOfFrames=2, **several)
        shown, expected = (
            decode_dicom_pixels(each, PictureRenderingOptions(2)).tolist() for each in (data, plain_file)
        )
        assert shown == expected
    slope.RescaleSlope, slope.RescaleIntercept = 2, 0
    group = Dataset()
    group.PixelValueTransformationSequence = [slope]
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 16], bytes(8)
    data = dicom(FOUR[:1], PerFrameFunctionalGroupsSequence=[group], ModalityLUTSequence=[table], **several)
    assert decode_dicom_pixels(data).tolist() == decode_dicom_pixels(dicom(2 * FOUR[0], **several)).tolist()


def test_a_frame_without_its_group_is_refused_where_others_have_theirs() -> None:
    data = dicom(FOUR[:2], NumberOfFrames=2, PerFrameFunctionalGroupsSequence=[Dataset()])
    assert decode_dicom_pixels(data, PictureRenderingOptions(1)).shape == (1, 2)
    with pytest.raises(ValueError, match="PerFrameFunctionalGroupsSequence ends at frame 1"):
        decode_dicom_pixels(data, PictureRenderingOptions(2))


@pytest.mark.parametrize(
    ("elements", "words"),
    [
        *(({name: None}, f"does not give {name}") for name in ("Rows", "BitsStored", "PixelRepresentation")),
        ({"PhotometricInterpretation": None}, "does not give PhotometricInterpretation"),
        ({"PhotometricInterpretation": ""}, "does not give PhotometricInterpretation"),
        ({"PhotometricInterpretation": "HSV"}, "of the kind HSV"),
        ({"PixelData": b""}, "holds no pixels"),
        ({**TWO_COLORS, "BluePaletteColorLookupTableData": None}, "does not give BluePaletteColorLookupTableData"),
        ({**TWO_COLORS, "GreenPaletteColorLookupTableDescriptor": None}, "not give GreenPaletteColorLookupTableDesc"),
        (
            {**TWO_COLORS, "GreenPaletteColorLookupTableDescriptor": [2, 100, 16]},
            "descriptors of its red, green and blue",
        ),
        ({**TWO_COLORS, "GreenPaletteColorLookupTableData": bytes(2)}, "unlike depths"),  # packed, beside words
        ({**palette([(0, 3, 0), (65535, 200, 0)], 0, 16, "<u2")}, "unlike depths"),  # low words, beside high ones
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "the file does not give RedPaletteColorLookupTableDescriptor"),
        ({**PALETTE, "SegmentedRedPaletteColorLookupTableData": bytes(6)}, "segmented"),  # may grow without bound
        (TOO_SHORT, "fewer than the 200 entries"),
        ({"WindowCenter": 5, "WindowWidth": 0}, "window width 0 is too small"),
        *(({"HighBit": high}, f"12 bits up to bit {high} of 16 for a pixel") for high in (3, 16)),
    ],
)
def test_a_file_that_is_no_picture_is_refused_with_the_reason(elements: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_dicom_pixels(dicom(np.array([[0, 1]], np.uint16), **elements))


def test_a_private_transfer_syntax_is_named() -> None:
    data = dicom(FOUR[0]).replace(b"1.2.840.10008.1.2.1\0", b"1.2.3.4.5.6.7.8.9.1\0")
    with pytest.raises(ValueError, match=r"packed as 1\.2\.3\.4\.5\.6\.7\.8\.9\.1, which cannot be decoded here"):
        decode_dicom_pixels(data)
