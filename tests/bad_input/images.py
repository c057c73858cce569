"""Pictures that cannot be read, through ``flwr-sim run``: the names and reasons that a hospital gets."""

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.bad_input.catalogue import Case, Ended
from tests.bad_input.data_sets import FOLDER, PIXELS, ROWS, TABLE, run_on
from tests.data.dicom_files import dicom
from tests.data.dicom_syntaxes import in_fragments

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


def small(**elements: Any) -> bytes:
    """A DICOM file of 4 x 4 pixels of 8 bits."""
    form = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}
    return dicom(np.zeros((4, 4), np.uint8), **{**form, **elements})


def packed(syntax: str) -> bytes:
    return in_fragments(small(), b"\xff\xd8\xff\xd9", syntax=syntax)


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
CASES = (
    Case("a PNG that is cut off", among_good_ones(encoded("PNG")[:-2000])),
    Case("a JPEG that is cut off", among_good_ones(encoded("JPEG")[:700])),
    Case("the head of a PNG and no more", among_good_ones(b"\x89PNG cut off")),
    Case("zero bytes", among_good_ones(b"")),
    Case("a text file", among_good_ones(b"see the other folder\n")),
    Case("a picture of a kind that is not taken", among_good_ones(encoded("BMP"))),
    Case("a bomb of four billion pixels", among_good_ones(huge_png(65535))),
    Case("a picture of 300 million pixels", among_good_ones(huge_png(17000))),
    Case("a DICOM without pixels", among_good_ones(small(PixelData=None))),
    Case("a DICOM that is cut off", among_good_ones(small()[:-10])),
    Case("a DICOM that ends in its head", among_good_ones(small()[:150])),
    Case("a DICOM packed as video", among_good_ones(packed(MPEG4))),
    Case("a DICOM packed in a way that no library here reads", among_good_ones(packed(SPECTRAL))),
    Case("a DICOM of several frames", among_good_ones(small(PixelData=bytes(32), NumberOfFrames=2))),
    Case("a DICOM bomb", among_good_ones(small(Rows=65535, Columns=65535))),
    Case("a DICOM in colours that nobody knows", among_good_ones(small(PhotometricInterpretation="ARGB"))),
    Case("a DICOM without its rows", among_good_ones(small(Rows=None))),
    Case("more than the budget", among_good_ones(b"", b"text", encoded("PNG")[:-2000], budget="0.2")),
)
