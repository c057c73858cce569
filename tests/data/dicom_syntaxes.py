"""One picture in every transfer syntax that can be written here, by gdcm or by pydicom's encoders."""

import io
import tempfile
from pathlib import Path
from typing import Any

import gdcm
import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom import uid
from pydicom.encaps import encapsulate
from pydicom.uid import UID, JPEGBaseline8Bit

from tests.data.dicom_files import dicom


def source(bits: int, *, signed: bool = False, samples: int = 1) -> NDArray[Any]:
    """A slope with noise, ``(36, 52)`` or ``(36, 52, 3)``, over the range of so many bits."""
    rows, columns = np.mgrid[:36, :52]
    slope = (rows * 52 + columns) * ((1 << bits) - 1) / (36 * 52 - 1)
    noise = np.random.default_rng(bits).integers(-3, 4, (36, 52))
    values = np.clip(np.round(slope) + noise, 0, (1 << bits) - 1) - ((1 << bits - 1) if signed else 0)
    kind = f"{'i' if signed else 'u'}{1 if bits <= 8 else 2}"
    grey = values.astype(kind)
    return grey if samples == 1 else np.stack([grey, grey[::-1], grey[:, ::-1]], axis=2)


def plain(pixels: NDArray[Any], bits: int, **elements: Any) -> bytes:
    """The picture, not packed."""
    depth = {"BitsAllocated": 8 * pixels.itemsize, "BitsStored": bits, "HighBit": bits - 1}
    settings = {**depth, "PixelRepresentation": int(pixels.dtype.kind == "i"), "Rows": 36, "Columns": 52}
    if pixels.ndim == 3:
        settings |= {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "PhotometricInterpretation": "RGB"}
    return dicom(pixels, **{**settings, **elements})


def by_gdcm(data: bytes, syntax: str) -> bytes:
    """The file in another transfer syntax, packed by gdcm."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = str(Path(folder, "before")), str(Path(folder, "after"))
        Path(before).write_bytes(data)
        reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
        reader.SetFileName(before)
        assert reader.Read()
        change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.GetTSType(syntax)))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer.SetFileName(after)
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        assert writer.Write()
        return Path(after).read_bytes()


def by_gdcm_pixels(data: bytes) -> NDArray[Any]:
    """The pixels of a grey file as gdcm reads them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "it.dcm")
        file.write_bytes(data)
        reader = gdcm.ImageReader()
        reader.SetFileName(str(file))
        assert reader.Read()
        image = reader.GetImage()
        if image.GetPhotometricInterpretation().GetString().strip() != "MONOCHROME2":
            raise AssertionError("gdcm reads another picture")
        form, columns, rows = image.GetPixelFormat(), image.GetDimension(0), image.GetDimension(1)
        kind = f"{'i' if form.GetPixelRepresentation() else 'u'}{form.GetBitsAllocated() // 8}"
        buffer = image.GetBuffer()
        if buffer is None:
            raise AssertionError("gdcm reads no pixels")
        buffer = buffer.encode("utf-8", "surrogateescape")
        return np.frombuffer(buffer, kind).reshape(rows, columns)


def by_pydicom(data: bytes, syntax: str, **settings: Any) -> bytes:
    """The file in another transfer syntax, packed by one of pydicom's encoders."""
    dataset = pydicom.dcmread(io.BytesIO(data))
    dataset.compress(UID(syntax), generate_instance_uid=False, **settings)
    return saved(dataset)


def as_jpeg(data: bytes, pixels: NDArray[np.uint8], syntax: str = JPEGBaseline8Bit) -> bytes:
    """The file with its pixels as a JPEG of quality 95, packed by Pillow."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=95, subsampling=0)
    elements = {"PhotometricInterpretation": "YBR_FULL"} if pixels.ndim == 3 else {}
    return in_fragments(data, content.getvalue(), syntax=syntax, **elements)


def in_fragments(data: bytes, *frames: bytes, syntax: str, **elements: Any) -> bytes:
    """The file with these packed frames as its pixels."""
    dataset = pydicom.dcmread(io.BytesIO(data))
    dataset.PixelData = encapsulate(list(frames))
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    dataset.file_meta.TransferSyntaxUID = UID(syntax)
    for name, value in elements.items():
        setattr(dataset, name, value)
    return saved(dataset)


def saved(dataset: Any) -> bytes:
    """The bytes of a dataset."""
    content = io.BytesIO()
    dataset.save_as(content, enforce_file_format=True)
    return content.getvalue()


def unpacked_as(data: bytes, syntax: str) -> bytes:
    """The file in a transfer syntax that packs nothing."""
    dataset = pydicom.dcmread(io.BytesIO(data))
    little = syntax != uid.ExplicitVRBigEndian
    if not little and dataset.BitsAllocated == 16:
        dataset.PixelData = np.frombuffer(dataset.PixelData, "<u2").byteswap().tobytes()
        for keyword in ("ModalityLUTSequence", "VOILUTSequence"):
            for item in dataset.get(keyword) or ():
                item.LUTData = np.frombuffer(item.LUTData, "<u2").byteswap().tobytes()
    dataset.file_meta.TransferSyntaxUID = uid.UID(syntax)
    content = io.BytesIO()
    implicit = syntax == uid.ImplicitVRLittleEndian
    pydicom.dcmwrite(content, dataset, implicit_vr=implicit, little_endian=little, enforce_file_format=True)
    return content.getvalue()
