"""Pictures that cannot be read, through ``flwr-sim run``: the names and reasons that a hospital gets."""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from tests.bad_input.catalogue import Case, Ended
from tests.bad_input.data_sets import FOLDER, PIXELS, ROWS, TABLE, run_on

NOISE = np.random.default_rng(5).integers(0, 256, (64, 64), dtype=np.uint8)


def encoded(kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(NOISE).save(content, kind)
    return content.getvalue()


def huge_png(side: int) -> bytes:
    """A PNG of some hundred bytes whose head announces this many pixels a side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def dicom(syntax: str = ExplicitVRLittleEndian, pixels: bytes | None = bytes(16), **elements: Any) -> bytes:
    """A DICOM file of 4 x 4 pixels."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    meta.TransferSyntaxUID = UID(syntax)
    dataset = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    form = {"Rows": 4, "Columns": 4, "BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "PixelRepresentation": 0}
    for name, value in (form | {"SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2"} | elements).items():
        setattr(dataset, name, value)
    if pixels is not None:
        dataset.PixelData = pixels
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = syntax != ExplicitVRLittleEndian
    content = io.BytesIO()
    dataset.save_as(content, enforce_file_format=True)
    return content.getvalue()


def in_folder(folder: Path, bad: Sequence[bytes]) -> str:
    """Pictures beside a table, the first ones these; the [data] table that names them."""
    (folder / "pictures").mkdir()
    (folder / "labels.csv").write_text(TABLE, encoding="utf-8")
    for row in range(ROWS):
        Image.fromarray(PIXELS[row]).save(folder / "pictures" / f"{row:02d}.png")
    for row, content in enumerate(bad):
        (folder / "pictures" / f"{row:02d}.png").write_bytes(content)
    return FOLDER


def among_good_ones(*bad: bytes, budget: str = "0") -> Callable[[Path], Ended]:
    return lambda folder: run_on(folder, f"{in_folder(folder, bad)}skip_budget = {budget}\n")


MPEG4, SPECTRAL = "1.2.840.10008.1.2.4.102", "1.2.840.10008.1.2.4.53"
IN_PARTS = bytes.fromhex(
    "feff00e000000000feff00e004000000ffd8ffd9feffdde000000000"
)  # no offsets, one fragment, the end

CASES = (
    Case("a PNG that is cut off", among_good_ones(encoded("PNG")[:-2000])),
    Case("a JPEG that is cut off", among_good_ones(encoded("JPEG")[:700])),
    Case("the head of a PNG and no more", among_good_ones(b"\x89PNG cut off")),
    Case("zero bytes", among_good_ones(b"")),
    Case("a text file", among_good_ones(b"see the other folder\n")),
    Case("a picture of a kind that is not taken", among_good_ones(encoded("BMP"))),
    Case("a bomb of four billion pixels", among_good_ones(huge_png(65535))),
    Case("a picture of 300 million pixels", among_good_ones(huge_png(17000))),
    Case("a DICOM without pixels", among_good_ones(dicom(pixels=None))),
    Case("a DICOM that is cut off", among_good_ones(dicom()[:-10])),
    Case("a DICOM that ends in its head", among_good_ones(dicom()[:150])),
    Case("a DICOM packed as video", among_good_ones(dicom(MPEG4, IN_PARTS))),
    Case("a DICOM packed in a way that no library here reads", among_good_ones(dicom(SPECTRAL, IN_PARTS))),
    Case("a DICOM of several frames", among_good_ones(dicom(pixels=bytes(32), NumberOfFrames=2))),
    Case("a DICOM bomb", among_good_ones(dicom(Rows=65535, Columns=65535))),
    Case("a DICOM in colours that nobody knows", among_good_ones(dicom(PhotometricInterpretation="ARGB"))),
    Case("a DICOM without its rows", among_good_ones(dicom(Rows=None))),
    Case("more than the budget", among_good_ones(b"", b"text", encoded("PNG")[:-2000], budget="0.2")),
)
