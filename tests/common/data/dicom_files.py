"""DICOM files made by hand."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage


def dicom(pixels: NDArray[np.uint16], **elements: Any) -> bytes:
    """A secondary capture of 12-bit grey pixels ``(rows, columns)``."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
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
        setattr(dataset, name, value)
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()
