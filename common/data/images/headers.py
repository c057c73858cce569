"""DICOM files and packed frames, read with a bound on memory: elements, heads, and the size that a frame states.

Decoders believe what a frame says of its size and take the memory, so it is read before anything is unpacked.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pydicom
from pydicom.dataelem import RawDataElement
from pydicom.filereader import _read_file_meta_info, read_dataset, read_preamble
from pydicom.tag import BaseTag, Tag
from pydicom.uid import DeflatedExplicitVRLittleEndian

from common.data.base.decoded_size import LARGEST_MB, largest_picture, refuse_larger
from common.data.base.image_set import UNKNOWN_PATIENT
from common.data.images.reading import IN_MEMORY, is_dicom

# What it finds in somebody's file is told by our own checks, or is no matter; its texts are for programmers.
warnings.filterwarnings("ignore", category=UserWarning, module=r"pydicom\b")

_OF_A_READ = 512
"""Bytes in memory that come of each piece that pydicom reads: an element takes one or two, an item of a sequence 4."""
_OF_AN_ITEM = 1280
_PIECE = 1 << 12
_OF_A_BYTE = {"SQ": 40}
"""Bytes in memory for each byte of a sequence, beside its items."""
_OF_A_VALUES_BYTE = 300
"""The same of an element of many short values, each of which becomes an object."""
_ITEMS = (b"\xfe\xff\x00\xe0", b"\xff\xfe\xe0\x00")
"""The tag of an item, in either order of bytes."""


class _CountedReads:
    """A binary file of which pydicom makes a bounded number of objects: one for each piece that it reads, or fewer."""

    def __init__(self, content: BinaryIO, largest_mb: int) -> None:
        self._read, self._bound = content.read, largest_picture(largest_mb)
        self._claimed = 0
        self.seek, self.tell = content.seek, content.tell

    def read(self, size: int = -1) -> bytes:
        """Read a piece.

        Raises:
            ValueError: If these were too many.
        """
        self._claimed += _OF_A_READ
        if self._claimed > self._bound:
            refuse_larger(self._claimed, self._bound)
        return self._read(size)


def tags_of(*keywords: str) -> tuple[BaseTag, ...]:
    """Return the tags of elements, for :func:`dataset_of` and :func:`refuse_large_elements`."""
    return tuple(map(Tag, keywords))


def dataset_of(content: bytes | BinaryIO, tags: Sequence[BaseTag] | None = None, largest_mb: int = LARGEST_MB) -> Any:
    """Read a file.

    Args:
        content: All of it, or the file, open.
        tags: Read only these elements, of those before the pixels; all where None.
        largest_mb: MiB that its elements may take, and that it may inflate to.

    Raises:
        ValueError: If it takes more memory than it may; what pydicom raises passes.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    read_preamble(file, force=False)
    meta, only = _read_file_meta_info(file), None if tags is None else list[BaseTag | int](tags)
    if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
        file.seek(0)
        counted: Any = _CountedReads(file, largest_mb)
        return pydicom.dcmread(counted, stop_before_pixels=tags is not None, specific_tags=only)
    counted = _CountedReads(_inflated(file.read(), largest_mb), largest_mb)
    dataset = read_dataset(counted, is_implicit_VR=False, is_little_endian=True, specific_tags=only)
    dataset.file_meta = meta
    return dataset


def _inflated(packed: bytes, largest_mb: int) -> BinaryIO:
    """Return what a file inflates to.

    Raises:
        ValueError: If that is more than it may be, or ``zlib.error`` if it is damaged.
    """
    inflater, inflated = zlib.decompressobj(-zlib.MAX_WBITS), io.BytesIO()
    bound = largest_picture(largest_mb)
    for start in range(0, len(packed), _PIECE):
        inflated.write(inflater.decompress(packed[start : start + _PIECE], bound + 1 - inflated.tell()))
        refuse_larger(inflated.tell(), bound)
    inflated.seek(0)
    return inflated


def refuse_large_elements(dataset: Any, tags: Iterable[BaseTag], largest_mb: int) -> None:
    """Refuse elements that become more objects than they may once their values are asked for.

    Args:
        dataset: As it was read: values are made of an element's bytes when they are asked for.

    Raises:
        ValueError: If they take more memory than a picture may.
    """
    claimed = 0
    for tag in tags:
        element = dataset.get_item(tag)
        if not isinstance(element, RawDataElement) or not isinstance(element.value, bytes):
            continue
        claimed += len(element.value) * _OF_A_BYTE.get(element.VR or "", _OF_A_VALUES_BYTE)
        if element.VR == "SQ":
            claimed += sum(map(element.value.count, _ITEMS)) * _OF_AN_ITEM
    refuse_larger(claimed, largest_picture(largest_mb))


_SIZ = b"\xff\x4f\xff\x51"
_STANDS_ALONE = {0x01, *range(0xD0, 0xD9)}
_TABLES = {0xC4, 0xC8, 0xCC}
_JPEG_LS = 0xF7
_CODING_STYLE, _COMPONENT_STYLE, _TILE_PART, _DATA = 0xFF52, 0xFF53, 0xFF90, 0xFF93
_OF_A_TILE, _OF_A_BLOCK = 9 << 10, 768
"""Bytes that OpenJPEG takes for each tile, and for each code block with its precinct (measured with version 2.5)."""


def frame_size(frame: bytes) -> tuple[int, int, int]:
    """Return rows, columns and samples a pixel of a frame of JPEG, JPEG-LS or JPEG 2000.

    Raises:
        ValueError: If its head is damaged, or does not say one size.
    """
    try:
        return _of_jpeg(frame) if frame.startswith(b"\xff\xd8") else _of_jpeg_2000(frame)
    except (struct.error, IndexError):
        raise ValueError("the head of its packed pixels is damaged") from None


def _of_jpeg(frame: bytes) -> tuple[int, int, int]:
    """Walk from marker to marker to the frame header (ITU-T T.81, B.2.2; T.87, C.2.2)."""
    place = 2
    while frame[place] == 0xFF:
        marker = frame[place + 1]
        if (0xC0 <= marker <= 0xCF and marker not in _TABLES) or marker == _JPEG_LS:
            rows, columns, samples = struct.unpack_from(">HHB", frame, place + 5)
            return rows, columns, samples
        if marker == 0xFF:  # a fill byte
            place += 1
        else:
            place += 2 if marker in _STANDS_ALONE else 2 + struct.unpack_from(">H", frame, place + 2)[0]
    raise ValueError("the head of its packed pixels is damaged")


def _of_jpeg_2000(frame: bytes) -> tuple[int, int, int]:
    """Read the one image and tile size marker (ITU-T T.800, A.5.1); no packed data hold these four bytes."""
    if frame.count(_SIZ) != 1:
        raise ValueError("the head of its packed pixels is damaged")
    width, height, left, top = struct.unpack_from(">IIII", frame, frame.index(_SIZ) + 8)
    (samples,) = struct.unpack_from(">H", frame, frame.index(_SIZ) + 40)
    return height - top, width - left, samples


def decoder_tables(frame: bytes) -> int:
    """Return bytes that a decoder of JPEG 2000 takes beside the pixels: a head may name tiles and blocks of one pixel.

    Of another kind of frame there are none.

    Raises:
        ValueError: If its head is damaged.
    """
    if frame.startswith(b"\xff\xd8"):
        return 0
    try:
        place = frame.index(_SIZ)
        *corner, tile_width, tile_height = struct.unpack_from(">IIIIII", frame, place + 8)
        (samples,) = struct.unpack_from(">H", frame, place + 40)
        width, height = corner[0] - corner[2], corner[1] - corner[3]
        tiles = -(-width // tile_width) * -(-height // tile_height) if min(tile_width, tile_height) else 2**32
        sides = min(width, tile_width), min(height, tile_height)
        # A tile has more layers and blocks only if its own head says so: the largest of all heads stands for each.
        styles: list[tuple[int, bytes]] = list(_coding_styles(frame, place + 4, wide=samples > 256))
        blocks = max((_blocks(*sides, style) for _, style in styles), default=0)
        visits = max((2 * layers * (style[0] + 1) for layers, style in styles), default=0)
        return int(tiles * _OF_A_TILE + samples * blocks * (tiles * _OF_A_BLOCK + visits))
    except (struct.error, IndexError, ValueError):
        raise ValueError("the head of its packed pixels is damaged") from None


def _coding_styles(frame: bytes, place: int, *, wide: bool) -> Iterator[tuple[int, bytes]]:
    """Yield layers and style of every coding style (ITU-T T.800, A.6.1 and A.6.2), of main head and tile parts.

    Args:
        place: Of the length behind the marker of sizes.
        wide: Whether components are counted in two bytes.
    """
    layers, part, marker = 1, 0, 0
    while place + 2 <= len(frame) and marker != 0xFFD9:
        (length,) = struct.unpack_from(">H", frame, place)
        content = frame[place + 2 : place + length]
        if marker == _CODING_STYLE:
            layers = struct.unpack_from(">H", content, 2)[0]
            yield layers, content[5:]
        elif marker == _COMPONENT_STYLE:
            yield layers, content[3 if wide else 2 :]
        elif marker == _TILE_PART:
            size = struct.unpack_from(">I", content, 2)[0]
            part = place - 2 + size if size else len(frame)
        place += length
        (marker,) = struct.unpack_from(">H", frame, place) if place + 2 <= len(frame) else (0xFFD9,)
        place += 2
        if marker == _DATA:  # the next part begins where this one said that it ends
            place = max(part, place)
            (marker,) = struct.unpack_from(">H", frame, place) if place + 2 <= len(frame) else (0xFFD9,)
            place += 2


def _blocks(width: int, height: int, style: bytes) -> int:
    """Count the code blocks of a component of a tile over all resolutions; a precinct has one of each band or more."""
    levels, exponents = style[0], (style[1] + 2, style[2] + 2)
    precincts, total = style[5:], 0
    for level in range(levels + 1):
        own = precincts[level] if level < len(precincts) else 0xFF
        halved = int(level > 0)
        across, down = (
            min(block, max(size - halved, 0)) for block, size in zip(exponents, (own & 15, own >> 4), strict=True)
        )
        shrunk = levels - level + halved
        total += (3 if halved else 1) * -(-width >> shrunk >> across) * -(-height >> shrunk >> down)
    return total


def plane_size(frame: bytes) -> int:
    """Return bytes that the first segment of an RLE frame unpacks to: one of each pixel (DICOM PS3.5, annex G).

    Raises:
        ValueError: If its head is damaged.
    """
    try:
        segments, place, after = struct.unpack_from("<3I", frame)
    except struct.error:
        raise ValueError("the head of its packed pixels is damaged") from None
    end, size = min(after if segments > 1 else len(frame), len(frame)), 0
    while place < end:
        control, place = frame[place], place + 1
        if control < 128:  # so many bytes and one, as they are
            size += min(control + 1, end - place)
            place += control + 1
        elif control > 128:  # one byte, repeated
            size += 257 - control
            place += 1
    return size


_WANTED = tags_of("PatientID", "SpecificCharacterSet")


@dataclass(frozen=True)
class DicomHead:
    """What is read of a file; both are empty where it is no DICOM file, or is damaged."""

    syntax: str = ""
    patient: str = ""


def dicom_heads(files: Sequence[Path]) -> list[DicomHead]:
    """Read the heads of these files on several threads, in order."""
    with ThreadPoolExecutor(IN_MEMORY.workers) as pool:
        return list(pool.map(_head, files))


def _head(file: Path) -> DicomHead:
    # Any error on a broken file ends here: reading its pixels tells what is wrong with it.
    try:
        with file.open("rb") as opened:
            if not is_dicom(opened.read(132)):
                return DicomHead()
            opened.seek(0)
            head = dataset_of(opened, _WANTED)
        refuse_large_elements(head, _WANTED, LARGEST_MB)
        return DicomHead(str(head.file_meta.get("TransferSyntaxUID", "")), str(head.get("PatientID") or "").strip())
    except Exception:
        return DicomHead()


def dicom_patients(heads: Sequence[DicomHead]) -> list[str] | None:
    """Return the PatientID of each DICOM file; a file of another kind, or a missing one, is a patient of its own.

    None where a DICOM file has none, or where all have the same: that stands for a name that was taken out.
    """
    told = [head.patient for head in heads if head.syntax]
    if not all(told) or len(set(told)) < min(2, len(heads)):
        return None
    return [head.patient or f"{UNKNOWN_PATIENT}{place}" for place, head in enumerate(heads)]
