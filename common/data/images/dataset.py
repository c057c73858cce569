"""The elements of a DICOM file, with a bound on what a deflated one grows to."""

import io
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import pydicom
from pydicom.filereader import _read_file_meta_info, read_dataset, read_preamble
from pydicom.uid import DeflatedExplicitVRLittleEndian

from common.data.base.image_set import MAX_PIXELS

# What it finds in somebody's file is told by our own checks, or is no matter; its texts are for programmers.
warnings.filterwarnings("ignore", category=UserWarning, module=r"pydicom\b")

MOST_INFLATED = 4 * MAX_PIXELS
"""Bytes; 16-bit colour of the largest picture needs 6 a pixel, and is not deflated in practice."""


def dataset_of(data: bytes, tags: Sequence[str] | None = None) -> Any:
    """Read a file.

    Args:
        tags: Read only these elements, of those before the pixels; all where None. Of a deflated file all are read.

    Raises:
        ValueError: If it inflates to more than :data:`MOST_INFLATED` bytes; what pydicom raises passes.
    """
    content = io.BytesIO(data)
    read_preamble(content, force=False)
    meta = _read_file_meta_info(content)
    if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
        only = None if tags is None else list(tags)
        return pydicom.dcmread(io.BytesIO(data), stop_before_pixels=tags is not None, specific_tags=only)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = inflater.decompress(content.read(), MOST_INFLATED)
    if inflater.unconsumed_tail:
        raise ValueError(f"it inflates to more than {MOST_INFLATED >> 20} MiB")
    dataset = read_dataset(io.BytesIO(inflated), is_implicit_VR=False, is_little_endian=True)
    dataset.file_meta = meta
    return dataset
