"""Parse JPEG headers, and decode JPEG images only if they are complete.

For a truncated file, libjpeg fills the missing part with grey and reports no error through Pillow or imagecodecs.
"""

import io
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

CUT_OFF = "damaged or cut off: a part of the picture is missing"
OVERWRITTEN = "damaged: a part of the picture was overwritten with zeros"
END_OF_IMAGE = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""A marker followed by a segment, or the end-of-image marker; compressed data contain none."""
_END_OF_IMAGE = 0xD9
_BASELINE, _EXTENDED = 0xC0, 0xC1
_SCAN, _JFIF, _ADOBE, _RESTART_INTERVAL, _HUFFMAN_TABLES = 0xDA, 0xE0, 0xEE, 0xDD, 0xC4
_ZEROS = bytes(64)
"""Shortest run of zeros that is examined; disks and networks overwrite at least as much."""
_RESTART = re.compile(rb"\xff([\xd0-\xd7])")
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ONES = b"\xff\x00" * 8
"""As many one bits as libjpeg reads ahead, which begin no code word (ITU-T T.81, annex C)."""
_NOISE = bytes((37 * number * number + 11 * number) % 251 for number in range(512))
"""Bytes that change the picture if a decoder takes them for image data."""


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment of a JPEG or JPEG-LS file (ITU-T T.81, B.1.1).

    The compressed data of a scan are yielded as a segment with marker 0.

    Raises:
        struct.error: If the file is cut off within a segment.
    """
    place = 2
    while match := _MARKER.search(data, place):
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
class JpegHead:
    """Properties of a JPEG file from its markers, and where its last scan ends.

    Attributes:
        process: Second byte of the frame marker: 0xC0 baseline, 0xC2 progressive, 0xC3 lossless.
        components: Identifiers of the components, one byte each.
        subsampled: True if a component has fewer samples than another.
        jfif: True if there is a JFIF marker, which means that colours are YCbCr.
        adobe: The colour transform in the Adobe marker, 0 for none; None without such a marker.
        predictor: Number of the predictor in a lossless file (ITU-T T.81, table H.1).
        scans: Number of scans.
        whole: True if the scans hold all bits of all coefficients.
        end: Position after the last byte of the last scan.
    """

    process: int
    components: bytes
    subsampled: bool
    jfif: bool
    adobe: int | None
    predictor: int
    scans: int
    whole: bool
    end: int

    @property
    def converts_to_rgb(self) -> bool:
        """True if libjpeg assumes that three components are YCbCr, and converts them to RGB."""
        if self.jfif or self.adobe is not None:
            return self.jfif or self.adobe != 0
        return self.components != b"RGB"

    def is_ycbcr(self, stated: bool) -> bool:
        """Return True if the colours are YCbCr; if the markers do not say, the DICOM header's ``stated`` decides."""
        if self.jfif or self.adobe is not None:
            return self.jfif or self.adobe != 0
        if self.components in (b"RGB", b"rgb"):
            return False
        return self.subsampled or stated  # only YCbCr is stored with subsampled components


def parse_jpeg(data: bytes) -> JpegHead:
    """Parse the markers of a JPEG file.

    Raises:
        ValueError: If the file holds no picture, is damaged or is cut off.
    """
    frame, jfif, adobe, scans, end, predictor = b"", False, None, 0, 0, 0
    process, lowest, interval, restarts = 0, dict[int, list[int]](), 0, 0
    try:
        for marker, start, stop in jpeg_segments(data):
            content = data[start:stop] if marker else b""
            if marker in _FRAMES and not frame:
                process, frame = marker, content
                lowest = {content[6 + 3 * number]: [99] * 64 for number in range(content[5])}
            elif marker == _JFIF and content.startswith(b"JFIF\0"):
                jfif = True
            elif marker == _ADOBE and content.startswith(b"Adobe") and len(content) >= 12:
                adobe = content[11]
            elif marker == _RESTART_INTERVAL:
                interval = struct.unpack(">H", content)[0]
            elif marker == _SCAN:
                names, (first, last, approximation) = content[1 : 1 + 2 * content[0] : 2], content[-3:]
                for name in names:
                    lowest[name][first : last + 1] = [approximation & 15] * (last + 1 - first)
                scans, predictor, end = scans + 1, first, stop
            elif not marker and scans:
                end = stop
                restarts = _count_restarts(data, start, stop)
    except (struct.error, IndexError, KeyError, ValueError):
        raise ValueError("damaged or cut off") from None
    if not scans or not frame:
        raise ValueError("damaged or cut off")
    sampling, components = frame[7::3], frame[6::3]
    _refuse_zeros(data)
    if (
        interval
        and scans == 1
        and process in (_BASELINE, _EXTENDED)
        and restarts != _expected_restarts(frame, interval)
    ):
        raise ValueError(CUT_OFF)
    whole = process == 0xC3 or not any(any(bits) for bits in lowest.values())
    return JpegHead(process, components, len(set(sampling)) > 1, jfif, adobe, predictor, scans, whole, end)


def _count_restarts(data: bytes, start: int, stop: int) -> int:
    """Return the number of restart markers in the compressed data (ITU-T T.81, B.2.1).

    Raises:
        ValueError: If a marker is missing; they must cycle through 0 to 7.
    """
    numbers = [number[0] & 7 for number in _RESTART.findall(data, start, stop)]
    if numbers != [place % 8 for place in range(len(numbers))]:
        raise ValueError(CUT_OFF)
    return len(numbers)


def _refuse_zeros(data: bytes) -> None:
    """Refuse a sequential JPEG whose data were partly overwritten with zeros.

    Zero bits also decode to valid symbols. But in most files a long run of zeros decodes to consecutive blocks in which
    all coefficients are equal, and no real picture has two of them in a row.

    Raises:
        ValueError: If the run of zeros is too long for a picture, or a Huffman table is damaged.
    """
    if _ZEROS not in data:
        return
    longest, sampling, codes = 0, dict[int, int](), dict[int, tuple[int, int]]()
    for marker, start, stop in jpeg_segments(data):
        content = data[start:stop] if marker else b""
        if marker in _FRAMES and not sampling:
            if marker not in (_BASELINE, _EXTENDED):
                return
            sampling = {content[6 + 3 * number]: content[7 + 3 * number] for number in range(content[5])}
        elif marker == _HUFFMAN_TABLES:
            codes |= _codes_of_zeros(content)
        elif marker == _SCAN:
            longest = _most_zeros(content, sampling, codes)
        elif not marker and longest and bytes(longest) in data[start:stop].rstrip(b"\0"):
            raise ValueError(OVERWRITTEN)


def _codes_of_zeros(content: bytes) -> dict[int, tuple[int, int]]:
    """Return the all-zero code word of each Huffman table, as length and symbol, by the table's class and number.

    It is the first of the shortest code words (ITU-T T.81, annex C).

    Raises:
        ValueError: If the segment is damaged.
    """
    codes, place = dict[int, tuple[int, int]](), 0
    while place < len(content):
        counts = content[place + 1 : place + 17]
        if not any(counts) or place + 17 + sum(counts) > len(content):
            raise ValueError("damaged or cut off")
        codes[content[place]] = 17 - len(counts.lstrip(b"\0")), content[place + 17]
        place += 17 + sum(counts)
    return codes


def _most_zeros(scan: bytes, sampling: Mapping[int, int], codes: Mapping[int, tuple[int, int]]) -> int:
    """Return a number of consecutive zero bytes that no picture has; 0 if uniform blocks make any number possible.

    Args:
        scan: The content of the scan header.
        sampling: The sampling factors of each component.
        codes: The all-zero code words from :func:`_codes_of_zeros`.
    """
    bits, is_even = 0, True  # in two minimum coded units (MCU)
    for name, tables in zip(scan[1 : 1 + 2 * scan[0] : 2], scan[2 : 2 + 2 * scan[0] : 2], strict=True):
        (length, size), (ac_length, symbol) = codes.get(tables >> 4, (0, 0)), codes.get(0x10 | tables & 15, (0, 0))
        words = math.ceil(63 / ((symbol >> 4) + 1)) if symbol else 1
        blocks = (sampling[name] >> 4) * (sampling[name] & 15) if scan[0] > 1 else 1
        bits += 2 * blocks * (length + size + words * (ac_length + (symbol & 15)))
        is_even = is_even and not symbol
    return 0 if is_even else len(_ZEROS) + bits // 8


def _expected_restarts(frame: bytes, interval: int) -> int:
    """Return the number of restart markers in a picture with one scan and one marker per ``interval`` blocks."""
    height, width = (int.from_bytes(frame[start : start + 2]) for start in (1, 3))
    sampling = frame[7::3]
    wide, high = (max(sampling) >> 4, max(each & 15 for each in sampling)) if len(sampling) > 1 else (1, 1)
    blocks = math.ceil(width / (8 * wide)) * math.ceil(height / (8 * high))
    return math.ceil(blocks / interval) - 1


def _leave_image_unchanged(image: Image.Image) -> None:
    """Do nothing; the default of ``prepare`` in :func:`decode_jpeg`."""


def decode_jpeg(data: bytes, prepare: Callable[[Image.Image], Any] = _leave_image_unchanged) -> Image.Image:
    """Decode a JPEG file with Pillow, and refuse an incomplete one.

    Args:
        prepare: Called with the opened image before its pixels are decoded; may raise an error, or set a smaller scale.

    Raises:
        ValueError: If a part of the picture is missing or damaged. Exceptions of ``prepare`` are not caught.
    """
    head = parse_jpeg(data)
    if not head.whole:
        raise ValueError(CUT_OFF)
    scanned = _trim_after_scan(data, head)
    if head.process in (_BASELINE, _EXTENDED) and head.scans == 1:
        # Without an end marker libjpeg requests the rest of a truncated picture, and Pillow raises an error.
        return _load_jpeg(scanned + _ONES, prepare)
    image = _load_jpeg(scanned + END_OF_IMAGE, prepare)
    if image.tobytes() != _load_jpeg(scanned + _NOISE + END_OF_IMAGE, prepare).tobytes():
        raise ValueError(CUT_OFF)
    return image


def _trim_after_scan(data: bytes, head: JpegHead) -> bytes:
    """Return the file up to the end of its last scan, without zeros that a failed copy appended."""
    scanned = data[: head.end].rstrip(b"\xff")
    return scanned.rstrip(b"\0").rstrip(b"\xff") if scanned.endswith(bytes(4)) else scanned


def _load_jpeg(data: bytes, prepare: Callable[[Image.Image], Any]) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    prepare(image)
    try:
        image.load()
    except OSError:
        raise ValueError(CUT_OFF) from None
    return image


def refuse_filled_in(data: bytes, pixels: Any, decode: Callable[[bytes], Any]) -> None:
    """Refuse the decoded pixels of a truncated JPEG, in which the decoder has filled in the missing part.

    A filled-in part ends with repeated pixels. If the end is repeated, the file is decoded again with noise appended:
    if pixels change, data were missing.

    Raises:
        ValueError: If a part of the picture is missing.
    """
    head = parse_jpeg(data)
    last = pixels[-1, -(pixels.shape[1] % 8 or 8) :]
    if head.whole and (last != last[:1]).any() and head.predictor <= 1:
        return
    scanned = _trim_after_scan(data, head)
    if not head.whole or (decode(scanned + _NOISE + END_OF_IMAGE) != pixels).any():
        raise ValueError(CUT_OFF)
