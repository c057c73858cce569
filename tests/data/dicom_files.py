"""DICOM files made by hand."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from polyclinic.data.base.spec import DEFAULT_RENDERING, PictureRenderingOptions
from polyclinic.data.images.dicom import render_dicom_file


def decode_dicom_pixels(data: bytes, rendering: PictureRenderingOptions = DEFAULT_RENDERING) -> NDArray[np.uint8]:
    """Decode a DICOM file to uint8 pixels."""
    return render_dicom_file(data, rendering).pixels


def dicom(pixels: NDArray[Any], *, syntax: UID = ExplicitVRLittleEndian, **elements: Any) -> bytes:
    """A secondary capture of 12-bit grey pixels ``(rows, columns)``; an element that is None is left out."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    meta.TransferSyntaxUID = syntax
    dataset = FileDataset(
        "", {}, file_meta=meta, preamble=b"\0" * 128, is_implicit_VR=False, is_little_endian=syntax.is_little_endian
    )
    settings: dict[str, Any] = {
        "SOPClassUID": SecondaryCaptureImageStorage,
        "SOPInstanceUID": "1.2.3",
        "Rows": pixels.shape[-2],
        "Columns": pixels.shape[-1],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": 16,
        "BitsStored": 12,
        "HighBit": 11,
        "PixelRepresentation": 0,
        "PixelData": pixels.tobytes(),
        **elements,
    }
    for name, value in settings.items():
        if value is not None:
            setattr(dataset, name, value)
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def deflated(data: bytes, more: int) -> bytes:
    """The file in the deflated transfer syntax, with ``more`` zero bytes behind it."""
    end = 144 + struct.unpack_from("<I", data, 140)[0]
    before, after = (name.encode() for name in (ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian))
    head = data[:end].replace(before + b"\0", after)
    head = head[:140] + struct.pack("<I", len(head) - 144) + head[144:]
    place = head.index(after) - 2
    head = head[:place] + struct.pack("<H", len(after)) + head[place + 2 :]
    packer = zlib.compressobj(wbits=-15)
    return head + packer.compress(data[end:]) + packer.compress(bytes(more)) + packer.flush()
