"""The elements of a DICOM file, with a bound on what they take in memory."""

import io
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import pydicom
from pydicom.dataelem import RawDataElement
from pydicom.filereader import _read_file_meta_info, read_dataset, read_preamble
from pydicom.tag import BaseTag, Tag
from pydicom.uid import DeflatedExplicitVRLittleEndian

from common.data.base.decoded_size import LARGEST_MB, largest_picture, refuse_larger

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
