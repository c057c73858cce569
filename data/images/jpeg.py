"""Parse JPEG headers, and decode JPEG images only if they are complete.

For a truncated file, libjpeg fills the missing part with grey, and its warning is lost in Pillow and in imagecodecs.
Therefore the end of the compressed data is compared with the position at which the decoder has all pixels.
"""

import io
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyclinic.data.images.bands import VALUES_PER_BAND

CUT_OFF_MESSAGE = "damaged or cut off: a part of the picture is missing"
END_OF_IMAGE = b"\xff\xd9"
_SEGMENT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""A marker followed by a segment, or the end-of-image marker; compressed data contain none."""
_END_OF_IMAGE = 0xD9
_BASELINE, _EXTENDED, LOSSLESS = 0xC0, 0xC1, 0xC3
_SCAN, _JFIF, _ADOBE, _RESTART_INTERVAL, _HUFFMAN_TABLES = 0xDA, 0xE0, 0xEE, 0xDD, 0xC4
_RESTART_MARKER = re.compile(rb"\xff([\xd0-\xd7])")
_FRAME_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_READ_AHEAD_BYTES = 7
"""Bytes that libjpeg may read after the last code word."""
_MIN_ZERO_RUN_BYTES = 64
"""Minimum number of consecutive zero bytes that may be damage; failing disks and networks write at least as many."""
_ZEROS_OF_FAILED_COPY = bytes(16)
_MAX_SURPLUS_BYTES = 2
"""Maximum number of bytes after the last code word; a few encoders and copying programs add a byte."""
_NOISE_BYTES = bytes((37 * number * number + 11 * number) % 251 for number in range(512))
"""Bytes that change the picture if a decoder reads them as image data."""


def iterate_jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment of a JPEG or JPEG-LS file (ITU-T T.81, B.1.1).

    The compressed data of a scan are yielded as a segment with marker 0.

    Raises:
        struct.error: If the file is cut off within a segment.
    """
    place = 2
    while match := _SEGMENT_MARKER.search(data, place):
        if match.start() > place:
            yield 0, place, match.start()
        marker, place = data[match.start() + 1], match.end() + 2
        if marker == _END_OF_IMAGE:
            return
        stop = match.end() + struct.unpack_from(">H", data, match.end())[0]
        yield marker, place, stop
        place = stop
    yield 0, place, len(data)


@dataclass(frozen=True)
class JpegScan:
    """One scan of a JPEG file, with the tables that apply to it.

    Attributes:
        header: Content of the scan header (ITU-T T.81, B.2.3).
        start: Position of the first byte of compressed data.
        stop: Position after the last byte of compressed data.
        interval: Number of minimum coded units (MCU) between two restart markers; 0 without restart markers.
        tables: Byte with class and number of a Huffman table -> the table: the number of code words of each length from
            1 to 16, then the symbols, one byte each.
    """

    header: bytes
    start: int
    stop: int
    interval: int
    tables: Mapping[int, bytes]


@dataclass(frozen=True)
class JpegHeader:
    """Properties of a JPEG file from its markers.

    Attributes:
        process: Second byte of the frame marker: 0xC0 baseline, 0xC2 progressive, 0xC3 lossless.
        precision_place: Position of the byte that gives the bits per sample.
        precision: Bits per sample.
        components: Identifiers of the components, one byte each.
        sampling: Sampling factors of the components, one byte each.
        jfif: True if there is a JFIF marker, which means that colours are YCbCr.
        adobe: The colour transform in the Adobe marker, 0 for no transform; None if there is no such marker.
        scans: The scans, at least one.
    """

    process: int
    precision_place: int
    precision: int
    components: bytes
    sampling: bytes
    jfif: bool
    adobe: int | None
    scans: tuple[JpegScan, ...]

    @property
    def converts_ycbcr_to_rgb(self) -> bool:
        """True if libjpeg assumes that three components are YCbCr, and converts them to RGB."""
        if self.jfif or self.adobe is not None:
            return self.jfif or self.adobe != 0
        return self.components != b"RGB"

    def has_ycbcr_colors(self, stated: bool) -> bool:
        """Return True if the colours are YCbCr.

        Args:
            stated: True if the DICOM header says YCbCr; used if the markers of the JPEG file do not decide.
        """
        if self.jfif or self.adobe is not None:
            return self.jfif or self.adobe != 0
        if self.components in (b"RGB", b"rgb"):
            return False
        return len(set(self.sampling)) > 1 or stated  # only YCbCr is stored with subsampled components


def parse_jpeg_header(data: bytes) -> JpegHeader:
    """Parse the markers of a JPEG file.

    Raises:
        ValueError: If the file holds no picture, is damaged or is cut off.
    """
    frame, place, process, jfif, adobe, interval = b"", 0, 0, False, None, 0
    scans, tables = list[JpegScan](), dict[int, bytes]()
    try:
        for marker, start, stop in iterate_jpeg_segments(data):
            content = data[start:stop] if marker else b""
            if marker in _FRAME_MARKERS and not frame:
                process, frame, place = marker, content, start
            elif marker == _JFIF and content.startswith(b"JFIF\0"):
                jfif = True
            elif marker == _ADOBE and content.startswith(b"Adobe") and len(content) >= 12:
                adobe = content[11]
            elif marker == _RESTART_INTERVAL:
                interval = struct.unpack(">H", content)[0]
            elif marker == _HUFFMAN_TABLES:  # ITU-T T.81, B.2.4.2
                while content:
                    size = 17 + sum(content[1:17])
                    if not 17 < size <= len(content):
                        raise ValueError
                    tables[content[0]], content = content[1:size], content[size:]
            elif marker == _SCAN:
                scans.append(JpegScan(content, stop, stop, interval, dict(tables)))
            elif not marker and scans:
                scans[-1] = replace(scans[-1], stop=start + len(data[start:stop].rstrip(b"\xff")))
        _refuse_incomplete_jpeg_data(data, process, frame, scans)
    except (struct.error, IndexError, KeyError, ValueError):
        raise ValueError(CUT_OFF_MESSAGE) from None
    return JpegHeader(process, place, frame[0], frame[6::3], frame[7::3], jfif, adobe, tuple(scans))


def _refuse_incomplete_jpeg_data(data: bytes, process: int, frame: bytes, scans: Sequence[JpegScan]) -> None:
    """Raise a ``ValueError`` if a part of the picture is missing, or was overwritten with zeros.

    Signs of damage are: a missing frame; scans that do not contain all bits of the coefficients; restart markers that
    are missing or in a wrong order; too many consecutive zero bytes in a sequential scan.

    Args:
        process: Second byte of the frame marker.
        frame: Content of the frame header.
        scans: The scans of the file.
    """
    if not frame or not int.from_bytes(frame[1:3]):
        raise ValueError
    lowest = {name: [99] * 64 for name in frame[6::3]}
    for scan in scans:
        header, (first, last, approximation) = scan.header, scan.header[-3:]
        for name in header[1:-3:2]:
            lowest[name][first : last + 1] = [approximation & 15] * (last + 1 - first)
        restarts = [number[0] & 7 for number in _RESTART_MARKER.findall(data, scan.start, scan.stop)]
        if restarts != [index % 8 for index in range(len(restarts))]:
            raise ValueError
        sequential = process in (_BASELINE, _EXTENDED)
        sampling = frame[7::3]
        if sequential:
            longest = _compute_max_plausible_zero_run(scan, dict(zip(frame[6::3], sampling, strict=True)))
            if longest and data.find(bytes(longest), scan.start, scan.stop) >= 0:
                raise ValueError
        if sequential and len(scans) == 1 and scan.interval:
            height, width = struct.unpack_from(">HH", frame, 1)
            # Sampling factors of a minimum coded unit, in blocks of 8x8 pixels.
            horizontal, vertical = 1, 1
            if len(sampling) > 1:
                horizontal = max(sampling) >> 4
                vertical = max(factors & 15 for factors in sampling)
            blocks = math.ceil(width / (8 * horizontal)) * math.ceil(height / (8 * vertical))
            if len(restarts) != math.ceil(blocks / scan.interval) - 1:
                raise ValueError
    if not scans or (process != LOSSLESS and any(map(any, lowest.values()))):
        raise ValueError


def _compute_max_plausible_zero_run(scan: JpegScan, sampling: Mapping[int, int]) -> int:
    """Return the number of consecutive zero bytes from which a sequential scan must be damaged; 0 if there is none.

    Failing disks and copies leave runs of zeros, but zero bits are also valid code words. In most files they decode to
    blocks in which all coefficients are equal. A real picture never has two consecutive minimum coded units (MCU) of
    such blocks, so that a longer run proves damage. In some files zero bits decode to uniformly grey blocks; there a
    run of zeros proves nothing.

    Args:
        sampling: Sampling factors of each component.
    """
    bits, uniform = 0, True  # of two minimum coded units (MCU)
    for name, tables in zip(scan.header[1:-3:2], scan.header[2:-3:2], strict=True):
        # The code word of zeros is the first of the shortest ones (ITU-T T.81, annex C).
        codes, ac_codes = scan.tables[tables >> 4], scan.tables[0x10 | tables & 15]
        length, ac_length = (17 - len(table[:16].lstrip(b"\0")) for table in (codes, ac_codes))
        size, symbol = codes[16], ac_codes[16]
        words = math.ceil(63 / ((symbol >> 4) + 1)) if symbol else 1
        blocks = (sampling[name] >> 4) * (sampling[name] & 15) if scan.header[0] > 1 else 1
        bits += 2 * blocks * (length + size + words * (ac_length + (symbol & 15)))
        uniform = uniform and not symbol
    return 0 if uniform else _MIN_ZERO_RUN_BYTES + bits // 8


def decode_jpeg(data: bytes, prepare: Callable[[Image.Image], Any] = lambda image: None) -> Image.Image:
    """Decode a JPEG file of 8 bits per sample with Pillow, and refuse an incomplete file.

    Args:
        prepare: Called with the opened image before its pixels are decoded; may raise a ``ValueError``, or set a
            smaller scale.

    Raises:
        ValueError: If a part of the picture is missing or damaged. Exceptions of ``prepare`` are not caught.
    """
    head = parse_jpeg_header(data)
    if head.precision != 8 or head.process == LOSSLESS:
        kind = "lossless JPEG file" if head.process == LOSSLESS else f"JPEG file of {head.precision} bits a sample"
        raise ValueError(f"a {kind}, which is read only inside a DICOM file; save it as a PNG file")
    scan = head.scans[-1]
    if head.process in (_BASELINE, _EXTENDED) and len(head.scans) == 1:
        # Without an end marker libjpeg requests the rest of a truncated picture, and Pillow raises an error.
        before_end = max(scan.stop - _MAX_SURPLUS_BYTES, scan.start)  # a small picture has a byte or two of data
        # The filler has as many bytes as libjpeg reads ahead, but too few to complete a block. Zero bits are the first
        # code word. If this code word ends a block, use one bits instead, which are no code word.
        ends_block = scan.tables[0x10 | scan.header[-4] & 15][16] == 0
        filler = b"\xff\x00" * _READ_AHEAD_BYTES if ends_block else bytes(_READ_AHEAD_BYTES)
        file = _FileWithReadBarrier(data[: scan.stop] + filler, before_end)
        image = _load_jpeg(file, prepare)
        if file.tell() <= file.barrier:  # all pixels were decoded before the data end
            raise ValueError(CUT_OFF_MESSAGE)
        return image
    packed = data[: scan.stop]
    image = _load_jpeg(io.BytesIO(packed + END_OF_IMAGE), prepare)
    if scan.header[-3] and packed.endswith(_ZEROS_OF_FAILED_COPY):  # scans of the first coefficient may end so
        packed = packed.rstrip(b"\0")
    cuts = [0, *(each.stop for each in head.scans)]
    noisy = _NOISE_BYTES.join(packed[start:stop] for start, stop in pairwise(cuts)) + _NOISE_BYTES + END_OF_IMAGE
    if image.tobytes() != _load_jpeg(io.BytesIO(noisy), prepare).tobytes():  # a scan goes on beyond its data
        raise ValueError(CUT_OFF_MESSAGE)
    return image


class _FileWithReadBarrier(io.BytesIO):
    """A file in memory that detects if a reader needed bytes after the position ``barrier``.

    A ``read(size)`` that begins before the barrier stops there; only the next read goes beyond it. So ``tell()`` is
    above ``barrier`` only if the reader asked for more bytes.
    """

    def __init__(self, data: bytes, barrier: int) -> None:
        super().__init__(data)
        self.barrier = barrier

    def read(self, size: int | None = -1, /) -> bytes:
        before_barrier = self.barrier - self.tell()
        return super().read(before_barrier if size and 0 < before_barrier < size else size)


def _load_jpeg(file: io.BytesIO, prepare: Callable[[Image.Image], Any]) -> Image.Image:
    try:
        image = Image.open(file, formats=("JPEG",))
        prepare(image)
        image.load()
    except OSError:
        raise ValueError(CUT_OFF_MESSAGE) from None
    return image


def refuse_incomplete_lossless_jpeg(data: bytes, pixels: NDArray[Any]) -> None:
    """Refuse a lossless JPEG whose compressed data are shorter or longer than its decoded pixels require.

    A lossless JPEG encodes the difference between each sample and a prediction, so that the pixels determine the number
    of bits (ITU-T T.81, H.1.2). A decoder that runs out of data invents pixels, which would require more bits.

    Args:
        pixels: The decoded picture, ``(height, width[, components])``.

    Raises:
        ValueError: If a part of the picture is missing or damaged.
    """
    head = parse_jpeg_header(data)
    planes = np.atleast_3d(pixels)
    if len(head.components) != planes.shape[2] or (planes.shape[2] > 1 and set(head.sampling) != {0x11}):
        raise ValueError("its lossless JPEG has components of several sizes, which is not read here")
    for scan in head.scans:
        shift = scan.header[-1] & 15
        stretch = scan.interval // planes.shape[1] or len(planes)  # rows between two restarts
        row_bits = np.zeros(len(planes), np.int64)
        for name, table in zip(scan.header[1:-3:2], scan.header[2:-3:2], strict=True):
            plane = planes[..., head.components.index(name)] >> shift
            codes = scan.tables[table >> 4]
            lengths = dict(zip(codes[16:], np.repeat(range(1, 17), list(codes[:16])).tolist(), strict=True))
            # The additional bits of size 16 are not stored, because only one prediction error has this size.
            bits_of_sizes = np.array([lengths.get(size, 99) + size % 16 for size in range(17)], np.uint8)
            bits = bits_of_sizes[_count_prediction_error_bits()]  # of each prediction error modulo 2^16
            middle = 1 << head.precision - shift - 1
            for first, errors in _compute_prediction_errors(plane, scan.header[-3], stretch, middle):
                row_bits[first : first + len(errors)] += bits[errors].sum(axis=1, dtype=np.int64)
        expected = -(-np.add.reduceat(row_bits, np.arange(0, len(planes), stretch)) // 8)
        packed = data[scan.start : scan.stop]
        parts = re.split(rb"\xff+[\xd0-\xd7]", packed) if scan.interval else [packed]
        surplus = [len(part) - part.count(b"\xff\0") - size for part, size in zip(parts, expected, strict=False)]
        if len(parts) != len(expected) or min(surplus) < 0 or max(surplus) > _MAX_SURPLUS_BYTES:
            raise ValueError(CUT_OFF_MESSAGE)


@cache
def _count_prediction_error_bits() -> NDArray[np.uint8]:
    """Return the number of significant bits of each prediction error, ``(65536,)`` (ITU-T T.81, table H.2).

    Index i is the prediction error modulo 2^16.
    """
    errors = np.arange(1 << 16)
    sizes: NDArray[np.uint8] = np.ceil(np.log2(np.minimum(errors, (1 << 16) - errors) + 1)).astype(np.uint8)
    return sizes


def _compute_prediction_errors(
    plane: NDArray[Any], predictor: int, stretch: int, middle: int
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """Yield the first row number and the prediction errors modulo 2^16 of each band of rows (ITU-T T.81, H.1.2.1).

    Args:
        plane: The samples of one component, ``(height, width)``.
        predictor: Number of the predictor, 1 to 7.
        stretch: Number of rows between two restarts; the prediction starts again after each restart.
        middle: The predicted value of the first sample after a restart.
    """
    padded = np.concatenate([plane[:1], plane]).astype(np.int32)
    rows = max(1, VALUES_PER_BAND // plane.shape[1])
    for first in range(0, len(plane), rows):
        values, above = padded[first + 1 : first + 1 + rows], padded[first : first + rows][: len(plane) - first]
        left, up, corner = values[:, :-1], above[:, 1:], above[:, :-1]
        predicted = above.copy()
        match predictor:
            case 1:
                predicted[:, 1:] = left
            case 3:
                predicted[:, 1:] = corner
            case 4:
                predicted[:, 1:] = left + up - corner
            case 5:
                predicted[:, 1:] = left + (up - corner >> 1)
            case 6:
                predicted[:, 1:] = up + (left - corner >> 1)
            case 7:
                predicted[:, 1:] = left + up >> 1
        restarts = slice(-first % stretch, None, stretch)
        predicted[restarts, 1:], predicted[restarts, 0] = left[restarts], middle
        yield first, (values - predicted).astype(np.uint16)
