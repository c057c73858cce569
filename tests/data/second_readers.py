"""DICOM files of random depth, sign, tables, windows, padding and colours, read by us and by pydicom's functions."""

import io
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import uid
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset
from pydicom.pixels.processing import apply_modality_lut, apply_voi, apply_windowing, convert_color_space
from pydicom.pixels.utils import pixel_array

from polyclinic.data.base.spec import PictureRenderingOptions
from tests.data.dicom_files import decode_dicom_pixels, dicom
from tests.data.dicom_syntaxes import by_gdcm, by_pydicom, saved, unpacked_as

PACKED_BY = {
    uid.RLELossless: by_pydicom,
    uid.JPEG2000Lossless: by_pydicom,
    uid.JPEGLosslessSV1: by_gdcm,
    uid.JPEGLSLossless: by_gdcm,
}
PLAIN = (uid.ImplicitVRLittleEndian, uid.ExplicitVRBigEndian, uid.DeflatedExplicitVRLittleEndian)
COLORS = ("RGB", "YBR_FULL", "YBR_FULL_422")


def table(hand: Random, low: int, high: int, depths: tuple[int, ...]) -> Dataset:
    """A lookup table somewhere over the numbers from ``low`` to ``high``; 8 bits may be packed two a word."""
    item, bits, count = Dataset(), hand.choice(depths), hand.choice((2, 200, 256, 4096, 65536))
    first = hand.randint(low, high) - hand.choice((0, count // 2))
    first = min(max(first, -(2**15)), 2**15 - 1) if low < 0 else max(first, 0)
    entries = np.sort(np.random.default_rng(hand.randrange(2**32)).integers(0, 1 << bits, count))
    entries[-1] = (1 << bits) - 1
    entries = entries[:: hand.choice((1, -1))]
    packed = bits == 8 and count % 2 == 0 and hand.random() < 0.5
    item.add_new(0x00283002, "SS" if low < 0 else "US", [0 if count == 65536 else count, first, bits])
    item.add_new(0x00283006, "OW", entries.astype("u1" if packed else "<u2").tobytes())
    return item


def padding(hand: Random, pixels: NDArray[Any]) -> list[DataElement]:
    """PixelPaddingValue, often with PixelPaddingRangeLimit, in either type of number."""
    signed = pixels.dtype.kind == "i"
    ends = [int(hand.choice(pixels.ravel().tolist())) for _ in range(hand.choice((1, 1, 2)))]
    tags, elements = (0x00280120, 0x00280121), []
    for tag, end in zip(tags, ends, strict=False):
        as_written = hand.choice(("US", "SS")) if signed else "US"
        elements.append(DataElement(tag, as_written, end % 2**16 if as_written == "US" else end))
    return elements


def random_file(seed: int) -> tuple[bytes, int | None]:
    """A file, and the number of the frame to look at."""
    hand = Random(seed)
    kind = hand.choice(("MONOCHROME1", "MONOCHROME2", "MONOCHROME2", "PALETTE COLOR", *COLORS))
    color, grey = kind in COLORS, kind.startswith("MONO")
    size = 1 if color else hand.choice((1, 2, 2))
    stored = 8 if color else hand.choice((8, 7) if size == 1 else (16, 15, 14, 12, 12, 10, 9))
    signed = grey and hand.random() < 0.4
    frames, rows, columns = hand.choice((1, 1, 1, 3)), hand.choice((1, 7, 24, 33)), hand.choice((2, 8, 14, 34))
    draw = np.random.default_rng(seed)
    low = -(1 << stored - 1) if signed else 0
    shape = (frames, rows, columns, *((3,) if color else ()))
    spread = hand.choice((1.0, 1.0, 0.3))
    pixels = (low + draw.integers(0, max(2, int(spread * (1 << stored))), shape)).astype(
        f"{'i' if signed else 'u'}{size}"
    )
    elements: dict[str, Any] = {
        "PhotometricInterpretation": kind,
        "BitsAllocated": 8 * size,
        "BitsStored": stored,
        "HighBit": stored - 1,
        "PixelRepresentation": int(signed),
        "Rows": rows,
        "Columns": columns,
        "SamplesPerPixel": 3 if color else 1,
        "NumberOfFrames": frames if frames > 1 or hand.random() < 0.3 else None,
    }
    data = pixels
    if color:
        elements["PlanarConfiguration"] = planar = int(kind != "YBR_FULL_422" and hand.random() < 0.5)
        data = np.moveaxis(pixels, -1, 1) if planar else pixels
        if kind == "YBR_FULL_422":
            pairs = pixels.reshape(frames, rows, columns // 2, 2, 3)
            data = np.stack([pairs[..., 0, 0], pairs[..., 1, 0], pairs[..., 0, 1], pairs[..., 0, 2]], -1)
    if kind == "PALETTE COLOR":
        count, bits = hand.choice((3, 100, 256)), hand.choice((8, 16))
        for name in ("Red", "Green", "Blue"):
            entries = draw.integers(0, 1 << bits, count)
            entries[-1] = (1 << bits) - 1
            elements[f"{name}PaletteColorLookupTableDescriptor"] = [count, 0, bits]
            elements[f"{name}PaletteColorLookupTableData"] = entries.astype(f"<u{bits // 8}").tobytes() + bytes(
                count % 2
            )
    if grey:
        elements |= _grey_elements(hand, low, stored)
    raw = np.ascontiguousarray(data).tobytes()
    elements["PixelData"] = raw + bytes(len(raw) % 2)
    content = dicom(pixels, **{name: value for name, value in elements.items() if value is not None})
    if grey and hand.random() < 0.4:
        dataset = pydicom.dcmread(io.BytesIO(content))
        for element in padding(hand, pixels):
            dataset.add(element)
        content = saved(dataset)
    syntax = hand.choice((*PLAIN, *PACKED_BY, *[uid.ExplicitVRLittleEndian] * 4))
    if syntax in PLAIN and not (kind == "PALETTE COLOR" and syntax == uid.ExplicitVRBigEndian):
        content = unpacked_as(content, syntax) if size == 2 or syntax != uid.ExplicitVRBigEndian else content
    elif syntax in PACKED_BY and frames == 1 and grey and (syntax == uid.RLELossless or stored in (8, 12, 16)):
        with suppress(RuntimeError, AssertionError):  # too small for the encoder
            content = PACKED_BY[syntax](content, syntax)
    return content, hand.randint(1, frames) if frames > 1 else None


def _grey_elements(hand: Random, low: int, stored: int) -> dict[str, Any]:
    """Rescaling or a modality table, and a window, a VOI table or nothing."""
    elements: dict[str, Any] = {}
    high = low + (1 << stored) - 1
    match hand.randrange(4):
        case 0:
            elements["RescaleSlope"], elements["RescaleIntercept"] = 1, -min(1024, high)
            low, high = low - min(1024, high), high - min(1024, high)
        case 1:
            elements["RescaleSlope"], elements["RescaleIntercept"] = hand.choice((0.5, 2.25, -1)), 17.5
            return {**elements, **_window(hand, low, high)}
        case 2:
            item = table(hand, low, high, (8, 16))
            elements["ModalityLUTSequence"], bits = [item], item.LUTDescriptor[2]
            low, high = 0, (1 << bits) - 1
    if hand.random() < 0.4:
        return {**elements, "VOILUTSequence": [table(hand, low, high, (8, 10, 12, 16))]}
    return {**elements, **(_window(hand, low, high) if hand.random() < 0.7 else {})}


def _window(hand: Random, low: int, high: int) -> dict[str, Any]:
    width = hand.choice((1, 2, (high - low) // 3 + 1, high - low + 1))
    center = hand.randint(low, high) + hand.choice((0, 0.5))
    function = hand.choice((None, "LINEAR", "LINEAR_EXACT", "SIGMOID"))
    several = hand.random() < 0.3
    elements: dict[str, Any] = {"WindowCenter": [center, 1] if several else center}
    return {**elements, "WindowWidth": [width, 5] if several else width, "VOILUTFunction": function}


def reference(dataset: Any, pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The picture of stored grey pixels by pydicom's functions; of a table of 8 bits, with one entry a word."""
    for keyword in ("ModalityLUTSequence", "VOILUTSequence"):
        for item in dataset.get(keyword) or ():
            count, _, bits = item.LUTDescriptor
            if bits == 8 and len(item.LUTData) == (count or 65536):
                order = "<u2" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">u2"
                pairs = np.frombuffer(item.LUTData, order).astype("<u2").view(np.uint8)
                item.LUTData = pairs.astype(order).tobytes()
    values = np.asarray(apply_modality_lut(pixels.astype(np.int64), dataset))
    ends = [dataset.get(f"PixelPadding{name}") for name in ("Value", "RangeLimit")]
    signed, padded = bool(dataset.PixelRepresentation), np.zeros(pixels.shape, bool)
    if ends[0] is not None:
        limits = [end - 2**16 if signed and end >= 2**15 else end for end in ends if end is not None]
        padded = (pixels >= min(limits)) & (pixels <= max(limits))
    if dataset.get("VOILUTSequence"):
        item = dataset.VOILUTSequence[0]
        if float(values.min()) < 0 and item.LUTDescriptor[1] >= 2**15:  # read as unsigned from an implicit VR
            item.LUTDescriptor[1] -= 2**16
        bits, item.LUTDescriptor[2] = item.LUTDescriptor[2], 16  # with 8, pydicom's own numbers would overflow
        count, first, _ = item.LUTDescriptor
        inside = np.minimum(values.astype(np.int64), first + (count or 65536) - 1)  # else they overflow in pydicom too
        shown = apply_voi(inside, dataset) / ((1 << bits) - 1)
    elif dataset.get("WindowCenter") is not None:
        if dataset.get("ModalityLUTSequence"):
            low, high = 0, (1 << dataset.ModalityLUTSequence[0].LUTDescriptor[2]) - 1
        else:
            low = -(1 << dataset.BitsStored - 1) if signed else 0
            high = low + (1 << dataset.BitsStored) - 1
            slope, intercept = float(dataset.get("RescaleSlope", 1)), float(dataset.get("RescaleIntercept", 0))
            low, high = low * slope + intercept, high * slope + intercept
        shown = (np.asarray(apply_windowing(values, dataset), float) - low) / (high - low)
    else:
        inside = values[~padded]
        low, high = float(inside.min()), float(inside.max())
        shown = np.clip((values - low) / max(high - low, 1e-9), 0, 1)
    shown = 255 * (1 - shown if dataset.PhotometricInterpretation == "MONOCHROME1" else shown)
    shown[padded] = 0
    return shown


def by_pydicom_alone(content: bytes, frame: int | None) -> NDArray[Any]:
    """The picture by pydicom's own decoders and functions, not yet rounded."""
    dataset = pydicom.dcmread(io.BytesIO(content))
    pixels = pixel_array(dataset, index=(frame or 1) - 1, raw=True)
    kind = dataset.PhotometricInterpretation
    if kind in COLORS:
        return convert_color_space(pixels, "YBR_FULL", "RGB") if kind.startswith("YBR") else pixels
    if kind == "PALETTE COLOR":
        count, _, bits = dataset.RedPaletteColorLookupTableDescriptor
        tables = [
            np.frombuffer(dataset[f"{name}PaletteColorLookupTableData"].value, f"<u{bits // 8}")[:count]
            for name in ("Red", "Green", "Blue")
        ]
        place = np.minimum(pixels.astype(int), count - 1)
        return np.stack([entries[place] * (255 / ((1 << bits) - 1)) for entries in tables], axis=-1)
    return reference(dataset, pixels)


def disagreement(seed: int) -> float | None:
    """The largest difference between our picture and pydicom's, of 255; None where a file holds only padding."""
    content, frame = random_file(seed)
    try:
        ours = decode_dicom_pixels(content, PictureRenderingOptions(frame)).astype(float)
    except ValueError as error:
        if "nothing but padding" in str(error):
            return None
        raise
    return float(np.abs(by_pydicom_alone(content, frame) - ours).max())
