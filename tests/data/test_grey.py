"""Grey values by the header: tables, padding, rescaling as the standard says and as real devices write them."""

import io
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import uid
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset

from polyclinic.data.base.spec import PictureRenderingOptions
from tests.data.conftest import long
from tests.data.dicom_files import decode_dicom_pixels, dicom
from tests.data.dicom_syntaxes import by_pydicom, saved
from tests.data.second_readers import disagreement

RAMP = np.array([[0, 1024, 2048, 4095]], np.uint16)
SHOWN = [[0, 64, 128, 255]]


@pytest.mark.parametrize("first", [0, 250, *long(range(500, 2000, 250))])
@pytest.mark.filterwarnings("ignore")
def test_random_files_are_what_pydicoms_own_functions_make_of_them(first: int) -> None:
    """Of random depth, sign, tables, windows, padding, planes, colours, frames and packing."""
    differences = {seed: disagreement(seed) for seed in range(first, first + 250)}
    assert {seed: value for seed, value in differences.items() if value is not None and value > 0.51} == {}
    assert sum(value is not None for value in differences.values()) > 240


def item(**elements: Any) -> Dataset:
    dataset = Dataset()
    for keyword, value in elements.items():
        setattr(dataset, keyword, value)
    return dataset


def table(entries: NDArray[Any], bits: int, first: int = 0, kind: str = "<u2", vr: str = "OW") -> Dataset:
    """A lookup table, with its entries as they are or as a list of numbers."""
    made = item(LUTDescriptor=[len(entries) % 65536, first, bits])
    content = entries.astype(kind)
    made.add_new(0x00283006, vr, content.tobytes() if vr == "OW" else content.tolist())
    return made


@pytest.mark.parametrize(
    ("depth", "stated", "stored"),
    [
        *((12, 16, stored) for stored in (12, 14, 16, 10)),  # common with CR
        *((depth, 16, 12) for depth in (8, 10, 14, 16)),
        *((depth, depth, 12) for depth in (8, 10, 12, 14, 16)),
        *((16, stated, 16) for stated in (8, 10, 12, 14)),  # fewer bits than the entries have
        *((12, stated, 12) for stated in (8, 10, 0, 32)),
    ],
)
def test_a_table_has_the_depth_of_its_entries_not_that_of_its_descriptor(depth: int, stated: int, stored: int) -> None:
    pixels = np.array([[0, 256, 512, 1023]], np.uint16)
    entries = np.round(np.linspace(0, (1 << depth) - 1, 1024))
    data = dicom(pixels, BitsStored=stored, HighBit=stored - 1, VOILUTSequence=[table(entries, stated)])
    assert np.abs(decode_dicom_pixels(data).astype(int) - SHOWN).max() <= 1


@pytest.mark.parametrize("top", [1030, 1500, 3000])
def test_dim_tables_of_a_device_are_of_one_depth(top: int) -> None:
    data = dicom(RAMP, VOILUTSequence=[table(np.linspace(0, top, 4096).round(), 16)])
    assert decode_dicom_pixels(data).max() == round(255 * top / 4095)


@pytest.mark.parametrize("top", [200, 900, 1000])
def test_a_table_so_dim_that_its_depth_is_a_guess_is_refused(top: int) -> None:
    """With a guess it would be four times as bright as another of its device."""
    data = dicom(RAMP, VOILUTSequence=[table(np.linspace(0, top, 4096).round(), 16)])
    with pytest.raises(ValueError, match=f"says 16 bits, and its largest entry is {top}"):
        decode_dicom_pixels(data)


@pytest.mark.parametrize(
    "form", [("u1", "OW"), ("<u2", "OW"), ("<u2", "US")], ids=["two a word", "one a word", "numbers"]
)
@pytest.mark.parametrize("keyword", ["VOILUTSequence", "ModalityLUTSequence"])
def test_entries_of_8_bits_are_read_in_every_form(form: tuple[str, str], keyword: str) -> None:
    made = table(np.arange(4096) // 16, 8, kind=form[0], vr=form[1])
    assert decode_dicom_pixels(dicom(RAMP, **{keyword: [made]})).tolist() == SHOWN


@pytest.mark.parametrize("first", [-2048, 63488])
def test_a_table_of_signed_numbers_may_state_its_first_as_unsigned(first: int) -> None:
    made = table(np.arange(4096), 12, first)
    made.add_new(0x00283002, "SS" if first < 0 else "US", [4096, first, 12])
    pixels = (RAMP.astype(int) - 2048).astype(np.int16)
    assert decode_dicom_pixels(dicom(pixels, PixelRepresentation=1, VOILUTSequence=[made])).tolist() == SHOWN
    shifted = dicom(RAMP, RescaleSlope=1, RescaleIntercept=-2048, VOILUTSequence=[made])
    assert decode_dicom_pixels(shifted).tolist() == SHOWN


def groups(shared: Dataset | None, of_frames: list[Dataset]) -> dict[str, Any]:
    empty = Dataset()
    return {
        "SharedFunctionalGroupsSequence": [item(FrameVOILUTSequence=[shared]) if shared else empty],
        "PerFrameFunctionalGroupsSequence": [item(FrameVOILUTSequence=[each]) for each in of_frames],
    }


INVERTED = item(VOILUTSequence=[table(np.arange(4095, -1, -1), 12)])
WINDOW = item(WindowCenter=2048, WindowWidth=4096)


@pytest.mark.parametrize(
    ("shared", "frame", "expected"),
    [
        (None, INVERTED, [[255, 191, 127, 0]]),
        (INVERTED, WINDOW, SHOWN),  # the frame's own window replaces the table that all share
        (WINDOW, INVERTED, [[255, 191, 127, 0]]),
    ],
)
def test_a_frame_has_its_own_table_or_window(shared: Dataset | None, frame: Dataset, expected: list[Any]) -> None:
    two = np.stack([RAMP, RAMP])
    data = dicom(two, NumberOfFrames=2, **groups(shared, [WINDOW, frame]))
    assert decode_dicom_pixels(data, PictureRenderingOptions(2)).tolist() == expected
    assert decode_dicom_pixels(data, PictureRenderingOptions(1)).tolist() == SHOWN


@pytest.mark.parametrize("empty", [item(), item(LUTDescriptor=[4096, 0, 12]), item(LUTExplanation="NORMAL")])
def test_an_empty_table_beside_a_window_is_none(empty: Dataset) -> None:
    data = dicom(RAMP, VOILUTSequence=[empty], WindowCenter=2048, WindowWidth=4096)
    assert decode_dicom_pixels(data).tolist() == SHOWN


PADDED = np.array([[-2000, -100, 0, 100], [-1990, -100, 0, 100]], np.int16)


def with_padding(pixels: NDArray[Any], *ends: tuple[str, int], **elements: Any) -> bytes:
    data = dicom(pixels, **{"BitsStored": 16, "HighBit": 15, "PixelRepresentation": 1, **elements})
    dataset = pydicom.dcmread(io.BytesIO(data))
    for tag, (vr, value) in zip((0x00280120, 0x00280121), ends, strict=False):
        dataset.add(DataElement(tag, vr, value))
    return saved(dataset)


@pytest.mark.parametrize("syntax", [uid.ExplicitVRLittleEndian, uid.RLELossless])
@pytest.mark.parametrize("ends", [[("SS", -2000)], [("US", 63536)], [("SS", -2000), ("SS", -1990)],
                                  [("US", 63546), ("US", 63536)], [("SS", -1990), ("US", 63536)]])  # fmt: skip
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_padding_is_black_and_no_part_of_the_range(ends: list[tuple[str, int]], syntax: str, kind: str) -> None:
    rows = PADDED if len(ends) == 2 else PADDED[:1]
    data = with_padding(rows, *ends, PhotometricInterpretation=kind)
    shown = decode_dicom_pixels(by_pydicom(data, syntax) if syntax == uid.RLELossless else data)
    expected = [0, 0, 128, 255] if kind == "MONOCHROME2" else [0, 255, 128, 0]
    assert shown.tolist() == [expected] * len(rows)


def test_padding_beside_the_bits_of_a_value_is_no_value_that_looks_alike() -> None:
    pixels = np.array([[0xFFFF, 0, 4095, 1000]], np.uint16)  # 12 bits; 65535 marks padding, 4095 is bright
    shown = decode_dicom_pixels(with_padding(pixels, ("US", 65535), BitsStored=12, HighBit=11, PixelRepresentation=0))
    assert shown.tolist() == [[0, 0, 255, 62]]


def test_padding_is_black_in_a_window_and_a_table_too() -> None:
    bright = np.array([[4000, 0, 2048]], np.uint16)
    settings = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 0}
    for display in ({"WindowCenter": 2048, "WindowWidth": 4096}, {"VOILUTSequence": [table(np.arange(4096), 12)]}):
        assert decode_dicom_pixels(with_padding(bright, ("US", 4000), **settings, **display)).tolist() == [[0, 0, 128]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"RescaleSlope": "", "RescaleIntercept": -1024}, "RescaleSlope is missing or blank"),
    ({"RescaleIntercept": "", "RescaleSlope": 1}, "RescaleIntercept is missing or blank"),
    ({"RescaleSlope": 2}, "RescaleIntercept is missing or blank"),
    ({"RescaleSlope": 0, "RescaleIntercept": 0}, "RescaleSlope is 0"),
    ({"WindowCenter": 40}, "WindowWidth is missing or blank"),
    ({"WindowWidth": 400, "WindowCenter": ""}, "WindowCenter is missing or blank"),
    ({"WindowCenter": 40, "WindowWidth": -400}, "window width -400 is too small"),
    ({"PresentationLUTShape": "INVERSE"}, "PresentationLUTShape INVERSE contradicts MONOCHROME2"),
    *(
        ({"PresentationLUTShape": shape, "PhotometricInterpretation": kind}, f"contradicts {kind}")
        for shape, kind in [("IDENTITY", "MONOCHROME1"), ("LIN OD", "MONOCHROME1"), ("LIN OD", "MONOCHROME2")]
    ),
    ({"PresentationLUTShape": ["IDENTITY", "INVERSE"]}, "contradicts MONOCHROME2"),
    ({"PresentationLUTSequence": [table(np.arange(4096)[::-1], 12)]}, "PresentationLUTSequence is not read here"),
    ({"WindowCenter": ["", "2000"], "WindowWidth": ["", "1000"]}, "WindowCenter is no number"),
    ({"SamplesPerPixel": 3, "PlanarConfiguration": 0}, "SamplesPerPixel 3 contradicts"),
    ({"PhotometricInterpretation": "RGB"}, "SamplesPerPixel 1 contradicts"),
    ({"VOILUTSequence": [table(np.arange(4000), 12), item()]}, ""),
    ({"PixelData": bytes(6)}, "holds 6"),
]


@pytest.mark.parametrize(("elements", "words"), REFUSED)
def test_a_header_that_does_not_say_how_pixels_are_shown_is_refused(elements: dict[str, Any], words: str) -> None:
    if not words:  # a table whose numbers end before the pixels' do takes its last entry
        assert decode_dicom_pixels(dicom(RAMP, **elements))[0, -1] == round(3999 * 255 / 4095)
        return
    with pytest.raises(ValueError, match=words):
        decode_dicom_pixels(dicom(RAMP, **elements))


def test_a_table_with_too_few_entries_is_refused_by_name() -> None:
    short = table(np.arange(100), 12)
    short.LUTDescriptor = [4096, 0, 12]
    with pytest.raises(ValueError, match="LUTData of its VOILUTSequence has fewer than the 4096"):
        decode_dicom_pixels(dicom(RAMP, VOILUTSequence=[short]))


@pytest.mark.parametrize("missing", ["PlanarConfiguration", "TransferSyntaxUID"])
def test_the_missing_element_is_named(missing: str) -> None:
    color = {
        "SamplesPerPixel": 3,
        "PhotometricInterpretation": "RGB",
        "BitsAllocated": 8,
        "BitsStored": 8,
        "HighBit": 7,
    }
    size = {"Rows": 2, "Columns": 4}
    data = dicom(np.zeros((2, 4, 3), np.uint8), PlanarConfiguration=0, **color, **size)
    dataset = pydicom.dcmread(io.BytesIO(data))
    del (dataset.file_meta if missing == "TransferSyntaxUID" else dataset)[missing]
    dataset.save_as(file := io.BytesIO(), implicit_vr=False, little_endian=True)
    with pytest.raises(ValueError, match=f"does not give {missing}"):
        decode_dicom_pixels(file.getvalue())


def test_a_window_of_one_has_two_sides() -> None:
    """LINEAR of width 1: up to centre - 0.5 black, above it white (PS3.3 C.11.2.1.2.1)."""
    data = dicom(np.array([[9, 10, 11]], np.uint16), WindowCenter=10.5, WindowWidth=1)
    assert decode_dicom_pixels(data).tolist() == [[0, 0, 255]]
