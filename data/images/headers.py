"""Read the headers of DICOM files and of compressed frames within a memory limit.

Decoders allocate as much memory as the header of a frame requests. Therefore its size is checked before decoding.
"""

import io
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pydicom
from pydicom import filereader
from pydicom.dataelem import RawDataElement
from pydicom.tag import BaseTag, Tag
from pydicom.uid import DeflatedExplicitVRLittleEndian

from polyclinic.common.system.plain_text import format_count_with_noun
from polyclinic.common.system.resources import READING_THREADS
from polyclinic.data.base.decoded_size import DEFAULT_LARGEST_MB, refuse_oversized_file
from polyclinic.data.base.image_set import fill_missing_patients_by_study
from polyclinic.data.base.names import is_anonymous_patient
from polyclinic.data.images.file_kinds import is_dicom_file
from polyclinic.data.images.jpeg import iterate_jpeg_segments

# pydicom's warnings are meant for programmers; our own checks report what matters to users.
warnings.filterwarnings("ignore", category=UserWarning, module=r"pydicom\b")

_BYTES_PER_READ = 512
"""Estimated memory in bytes for each read by pydicom: an element takes one or two reads, a sequence item four."""
_BYTES_PER_ITEM = 1280
"""Estimated memory in bytes for each item of a sequence."""
_DEFLATED_SYNTAX = DeflatedExplicitVRLittleEndian.encode()
_CHUNK_BYTES = 1 << 12
_BYTES_PER_SEQUENCE_BYTE = {"SQ": 40}
"""Value representation -> estimated memory in bytes for each byte of an element, without sequence items."""
_BYTES_PER_VALUE_BYTE = 300
"""Estimated memory in bytes for each byte of other elements, because each short value becomes an object."""
_ITEM_TAGS = (b"\xfe\xff\x00\xe0", b"\xff\xfe\xe0\x00")
"""The tag of a sequence item in both byte orders."""


class _ReadCountLimitedFile:
    """A binary file that limits the number of reads and so the number of Python objects that pydicom creates."""

    def __init__(self, content: BinaryIO, largest_mb: int) -> None:
        self._read, self._limit = content.read, largest_mb << 20
        self._claimed = 0
        self.seek, self.tell = content.seek, content.tell

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes; raise a ``ValueError`` after too many reads."""
        self._claimed += _BYTES_PER_READ
        refuse_oversized_file(self._claimed, self._limit)
        return self._read(size)


def convert_dicom_keywords_to_tags(*keywords: str) -> tuple[BaseTag, ...]:
    """Convert DICOM keywords such as "PatientID" to pydicom tags."""
    return tuple(map(Tag, keywords))


def read_dicom_elements(
    content: bytes | BinaryIO, tags: Sequence[BaseTag] | None = None, largest_mb: int = DEFAULT_LARGEST_MB
) -> Any:
    """Read a DICOM file, given its bytes or the open file, into a pydicom data set.

    Args:
        tags: Read only these elements, and stop before the pixels; None reads all.
        largest_mb: Maximum memory in MiB for the elements, and maximum size in MiB of a deflated file after inflation.

    Raises:
        ValueError: If the file needs more memory than allowed. Exceptions of pydicom are not caught.
    """
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    only = None if tags is None else list[BaseTag | int](tags)
    meta = None
    if not isinstance(content, bytes) or _DEFLATED_SYNTAX in content:  # rare: parses the header twice
        filereader.read_preamble(file, force=False)
        meta = filereader._read_file_meta_info(file)
    if meta is None or meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
        file.seek(0)
        counted: Any = _ReadCountLimitedFile(file, largest_mb)
        return pydicom.dcmread(counted, stop_before_pixels=tags is not None, specific_tags=only)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = io.BytesIO()
    limit = largest_mb << 20
    while packed := file.read(_CHUNK_BYTES):
        inflated.write(inflater.decompress(packed, limit + 1 - inflated.tell()))
        refuse_oversized_file(inflated.tell(), limit)
    inflated.seek(0)
    counted = _ReadCountLimitedFile(inflated, largest_mb)
    dataset = filereader.read_dataset(counted, is_implicit_VR=False, is_little_endian=True, specific_tags=only)
    dataset.file_meta = meta
    return dataset


def refuse_large_dicom_elements(dataset: Any, tags: Iterable[BaseTag], largest_mb: int) -> None:
    """Refuse a data set whose elements would become too many Python objects.

    Args:
        dataset: The result of :func:`read_dicom_elements`; pydicom parses an element only on first access.
        tags: The elements to check.

    Raises:
        ValueError: If the values would need more than ``largest_mb`` MiB.
    """
    claimed = 0
    for tag in tags:
        element = dataset.get_item(tag)
        if not isinstance(element, RawDataElement) or not isinstance(element.value, bytes):
            continue
        claimed += len(element.value) * _BYTES_PER_SEQUENCE_BYTE.get(element.VR or "", _BYTES_PER_VALUE_BYTE)
        if element.VR == "SQ":
            claimed += sum(map(element.value.count, _ITEM_TAGS)) * _BYTES_PER_ITEM
    refuse_oversized_file(claimed, largest_mb << 20)


_SIZ_MARKER, _END_MARKER = b"\xff\x4f\xff\x51", b"\xff\xd9"
_NON_FRAME_MARKERS = {0xC4, 0xC8, 0xCC}
_JPEG_LS = 0xF7
_CODING_STYLE, _COMPONENT_STYLE, _TILE_PART, _DATA_START = 0xFF52, 0xFF53, 0xFF90, 0xFF93
_BYTES_PER_TILE = 9 << 10
"""Bytes that OpenJPEG allocates for each tile (measured with version 2.5)."""
_BYTES_PER_BLOCK = 768
"""Bytes that OpenJPEG allocates for each code block with its precinct (measured with version 2.5)."""


def read_encoded_frame_shape(frame: bytes) -> tuple[int, int, int]:
    """Return the rows, columns and samples per pixel that the header of a JPEG, JPEG-LS or JPEG 2000 frame states.

    Raises:
        ValueError: If the header is damaged or ambiguous.
    """
    with suppress(struct.error, IndexError):
        if frame.startswith(b"\xff\xd8"):  # JPEG or JPEG-LS: the frame header (ITU-T T.81, B.2.2; T.87, C.2.2)
            for marker, start, _ in iterate_jpeg_segments(frame):
                if (0xC0 <= marker <= 0xCF and marker not in _NON_FRAME_MARKERS) or marker == _JPEG_LS:
                    rows, columns, samples = struct.unpack_from(">HHB", frame, start + 1)
                    return rows, columns, samples
        elif frame.count(_SIZ_MARKER) == 1:  # JPEG 2000: the SIZ marker (ITU-T T.800, A.5.1), which must occur once
            width, height, left, top = struct.unpack_from(">IIII", frame, frame.index(_SIZ_MARKER) + 8)
            (samples,) = struct.unpack_from(">H", frame, frame.index(_SIZ_MARKER) + 40)
            return height - top, width - left, samples
    raise ValueError("its packed pixels are damaged or cut off")


def is_jpeg_2000_signed(frame: bytes) -> bool:
    """Return True if a frame is JPEG 2000 with signed samples (ITU-T T.800, A.5.1), False for other kinds of frames.

    Call :func:`read_encoded_frame_shape` first, because it refuses a damaged header.
    """
    return not frame.startswith(b"\xff\xd8") and frame[frame.index(_SIZ_MARKER) + 42] >= 0x80


def estimate_jpeg_2000_decoder_memory(frame: bytes) -> int:
    """Estimate the bytes that a JPEG 2000 decoder needs besides the pixels; 0 for other kinds of frames.

    The decoder allocates memory for each tile and code block, and a malicious frame may declare tiles of one pixel.

    Raises:
        ValueError: If the header is damaged.
    """
    if frame.startswith(b"\xff\xd8"):
        return 0
    try:
        place = frame.index(_SIZ_MARKER)
        *corner, tile_width, tile_height = struct.unpack_from(">IIIIII", frame, place + 8)
        (samples,) = struct.unpack_from(">H", frame, place + 40)
        width, height = corner[0] - corner[2], corner[1] - corner[3]
        tiles = -(-width // tile_width) * -(-height // tile_height) if min(tile_width, tile_height) else 2**32
        sides = min(width, tile_width), min(height, tile_height)
        # Each tile may have its own header: assume the largest values of all headers for each.
        styles: list[tuple[int, bytes]] = list(_parse_jpeg_2000_coding_styles(frame, place + 4, wide=samples > 256))
        blocks = max((_count_jpeg_2000_code_blocks(*sides, style) for _, style in styles), default=0)
        visits = max((2 * layers * (style[0] + 1) for layers, style in styles), default=0)
        return int(tiles * _BYTES_PER_TILE + samples * blocks * (tiles * _BYTES_PER_BLOCK + visits))
    except (struct.error, IndexError, ValueError):
        raise ValueError("its packed pixels are damaged or cut off") from None


def _parse_jpeg_2000_coding_styles(frame: bytes, place: int, *, wide: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the number of layers and the coding parameters of each COD and COC marker (ITU-T T.800, A.6.1 and A.6.2).

    Args:
        place: Position of the length field after the SIZ marker.
        wide: True if component numbers take two bytes.
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
            part = place - 2 + size if size else frame.rindex(_END_MARKER)
        place += length
        (marker,) = struct.unpack_from(">H", frame, place) if place + 2 <= len(frame) else (0xFFD9,)
        place += 2
        if marker == _DATA_START:  # the next part begins at the stated end of this one
            place = max(part, place)
            (marker,) = struct.unpack_from(">H", frame, place)
            place += 2
            if marker not in (_TILE_PART, 0xFFD9):
                raise ValueError


def _count_jpeg_2000_code_blocks(width: int, height: int, style: bytes) -> int:
    """Count the code blocks of one component of a tile over all resolution levels."""
    levels, exponents = style[0], (style[1] + 2, style[2] + 2)
    precincts, total = style[5:], 0
    for level in range(levels + 1):
        precinct = precincts[level] if level < len(precincts) else 0xFF
        halved = int(level > 0)
        across, down = (
            min(block, max(size - halved, 0))
            for block, size in zip(exponents, (precinct & 15, precinct >> 4), strict=True)
        )
        shrunk = levels - level + halved
        total += (3 if halved else 1) * -(-width >> shrunk >> across) * -(-height >> shrunk >> down)
    return total


_MAX_SEGMENT_BYTES_TO_UNPACK = 2**22
"""A segment of at most this many bytes is decompressed to determine its size, which is at most 64 times as large. The
size of a larger segment is counted without decompression."""


def compute_rle_plane_sizes(frame: bytes) -> list[int]:
    """Return the decompressed size in bytes of each segment of an RLE frame (PS3.5, annex G).

    A segment holds one byte of each pixel.

    Raises:
        ValueError: If the header is damaged.
    """
    from imagecodecs import packbits_decode  # imported here, because most tables have no DICOM

    try:
        segments, *starts = struct.unpack_from("<16I", frame)
    except struct.error:
        raise ValueError("its packed pixels are damaged or cut off") from None
    sizes = list[int]()
    for place, stop in zip(starts, [*starts[1:segments], len(frame)], strict=False):
        end, size = min(stop, len(frame)), 0
        if end - place <= _MAX_SEGMENT_BYTES_TO_UNPACK:
            with suppress(RuntimeError):  # data that end within a run: the loop below counts their size
                sizes.append(len(packbits_decode(frame[place:end])))
                continue
        while place < end:
            control, place = frame[place], place + 1
            if control < 128:  # literal run of control + 1 bytes
                size += min(control + 1, end - place)
                place += control + 1
            elif control > 128:  # one byte, repeated 257 - control times
                size += 257 - control
                place += 1
        sizes.append(size)
    return sizes


_FUNCTIONAL_GROUP_TAGS = convert_dicom_keywords_to_tags(
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"
)
_WINDOW_TAGS = (*convert_dicom_keywords_to_tags("WindowCenter", "VOILUTSequence"), *_FUNCTIONAL_GROUP_TAGS)
_HEAD_TAGS = (
    *convert_dicom_keywords_to_tags(
        *("PatientID", "SpecificCharacterSet", "StudyInstanceUID", "Modality", "PhotometricInterpretation"),
        "ImageOrientationPatient",
    ),
    *_WINDOW_TAGS,
)
_FRAME_VOI_TAGS = (b"\x28\0\x32\x91", b"\0\x28\x91\x32")
"""The tag of FrameVOILUTSequence in both byte orders."""


@dataclass(frozen=True)
class DicomHeader:
    """Selected header elements of a DICOM file; all are empty if the file is damaged or not a DICOM file.

    Attributes:
        syntax: Transfer syntax.
        patient: PatientID.
        study: StudyInstanceUID.
        modality: Modality, such as ``CT``.
        shown_by_range: True for a grey image without window and VOI LUT; black and white are then the image's smallest
            and largest value.
        orientation: Directions of the rows and columns of a slice, such as ``L\\P`` for left and back; empty if
            unknown.
    """

    syntax: str = ""
    patient: str = ""
    study: str = ""
    modality: str = ""
    shown_by_range: bool = False
    orientation: str = ""


EMPTY_DICOM_HEADER = DicomHeader()


def read_dicom_headers(files: Sequence[Path]) -> list[DicomHeader]:
    """Read the headers of several files in parallel; the results are in the order of the files."""
    with ThreadPoolExecutor(READING_THREADS) as pool:
        return list(pool.map(read_dicom_header, files))


def read_dicom_header(content: Path | bytes) -> DicomHeader:
    """Read the header of a DICOM file, given its path or its bytes; for a folder, the header of its first DICOM file.

    A damaged file gives :data:`EMPTY_DICOM_HEADER`.
    """
    # Errors on damaged files are ignored here, and reported when the pixels are decoded.
    try:
        if isinstance(content, Path) and content.is_dir():
            heads = (read_dicom_header(file) for file in sorted(content.iterdir()) if not file.is_dir())
            return next((head for head in heads if head.syntax), EMPTY_DICOM_HEADER)
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as opened:
            if not is_dicom_file(opened.read(132)):
                return EMPTY_DICOM_HEADER
            opened.seek(0)
            head = read_dicom_elements(opened, _HEAD_TAGS)
        refuse_large_dicom_elements(head, _HEAD_TAGS, DEFAULT_LARGEST_MB)
        keywords = ("PatientID", "StudyInstanceUID", "Modality")
        patient, study, modality = (str(head.get(keyword) or "").strip() for keyword in keywords)
        grey = str(head.get("PhotometricInterpretation") or "").startswith("MONOCHROME")
        has_window = False
        # An element that defines a window or a VOI LUT, directly or for each frame.
        for tag in _WINDOW_TAGS if grey else ():
            value: Any = None if (element := head.get_item(tag)) is None else element.value
            if value and tag in _FUNCTIONAL_GROUP_TAGS and isinstance(value, bytes):
                # Not parsed, because there may be thousands of items.
                value = any(mark in value for mark in _FRAME_VOI_TAGS)
            elif value and tag in _FUNCTIONAL_GROUP_TAGS:
                value = "FrameVOILUTSequence" in value[0]
            if has_window := bool(value):
                break
        syntax = str(head.file_meta.get("TransferSyntaxUID", ""))
        orientation = _name_slice_orientation(head.get("ImageOrientationPatient"))
        return DicomHeader(syntax, patient, study, modality, grey and not has_window, orientation)
    except Exception:
        return EMPTY_DICOM_HEADER


_AXIS_END_LETTERS = (("R", "L"), ("A", "P"), ("F", "H"))
"""Letters for the negative and the positive end of each axis of the patient: right, left; anterior (front), posterior
(back); feet, head."""


def _name_slice_orientation(cosines: Any) -> str:
    """Return letters for the directions of rows and columns, such as ``L\\\\P`` for left and back.

    An oblique slice has the letters of the nearest axes.

    Args:
        cosines: ImageOrientationPatient; the result is empty if it is not six numbers.
    """
    try:
        numbers = [float(number) for number in cosines or ()]
    except (TypeError, ValueError):
        return ""
    if len(numbers) != 6:
        return ""
    letters = list[str]()
    for direction in (numbers[:3], numbers[3:]):
        axis = max(range(3), key=lambda index: abs(direction[index]))
        letters.append(_AXIS_END_LETTERS[axis][direction[axis] > 0])
    return "\\".join(letters)


def describe_mirrored_dicom_slices(heads: Sequence[DicomHeader]) -> str:
    """Return a warning if slices of one plane are stored in different orientations; empty if there are none.

    Slices are shown as they are stored, as in viewers of single slices. Some are then mirror images of others.
    """
    planes: dict[frozenset[int], Counter[str]] = {}
    for head in heads:
        if head.orientation:
            axes = (
                next(axis for axis, ends in enumerate(_AXIS_END_LETTERS) if end in ends)
                for end in head.orientation[::2]
            )
            planes.setdefault(frozenset(axes), Counter())[head.orientation] += 1
    mixed = [counts for counts in planes.values() if len(counts) > 1]
    if not mixed:
        return ""
    listed = "; ".join(", ".join(f"{count:,} {name}" for name, count in counts.most_common()) for counts in mixed)
    return f"slices of one plane are stored in different orientations ({listed}), and are shown as they are stored."


def list_dicom_patient_ids(heads: Sequence[DicomHeader]) -> list[str] | None:
    """Return the PatientID of each file; :func:`fill_missing_patients_by_study` replaces missing ones.

    Returns:
        One name per file. None if no file names a patient, or if several files have one and the same PatientID, which
        is probably a placeholder.
    """
    names = {head.patient for head in heads if not is_anonymous_patient(head.patient)}
    if not names or len(names) < min(2, len(heads)):
        return None
    return fill_missing_patients_by_study([head.patient for head in heads], [head.study for head in heads])


def describe_incomparable_dicom_greys(heads: Sequence[DicomHeader]) -> list[str]:
    """Return warnings about DICOM files whose greys are not comparable: mixed modalities, or missing windows."""
    dicoms = [head for head in heads if head.syntax]
    problems = list[str]()
    modalities = Counter(head.modality or "unknown" for head in dicoms)
    if len(modalities) > 1:
        mixed = ", ".join(f"{count:,} {name}" for name, count in modalities.most_common())
        problems.append(f"modalities are mixed: {mixed}. Their grey values mean different things; is that intended?")
    if count := sum(head.shown_by_range for head in dicoms):
        files = format_count_with_noun(len(dicoms), "DICOM file")
        problems.append(
            f"{count:,} of {files} name no window and no VOI LUT: each is shown over its own range of values, so that "
            "one tissue has another grey in each. window = [centre, width] shows all alike, such as [40, 400] for CT."
        )
    return problems
