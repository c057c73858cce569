"""Files of some bytes to 3 MB that claim or unpack to gigabytes, of every kind that is read here.

``python -m tests.data.bombs READER ...`` reads those of some readers one after the other, and prints as JSON how
many MiB each took at most beyond what the process had, and what became of the file.
"""

import io
import json
import resource
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from polyclinic.common.errors import BadInput
from polyclinic.common.models.weights import convert_checkpoint
from polyclinic.common.prediction.pictures import read_unlabelled_pictures
from polyclinic.data.base.spec import NpzDatasetSpec, PictureRenderingOptions
from polyclinic.data.images.headers import read_dicom_headers
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import decode_pictures
from polyclinic.data.load import load_dataset
from polyclinic.data.tables.csv import read_csv_table

MIB = 1 << 20
GIGABYTES = 2900
"""MiB that the bombs unpack to."""
MEMORY = 9 << 30
"""Bytes of address space of the process that reads, so that a bomb that goes off ends no more than that."""

# ---------------------------------------------------------------------- packed zeros


def deflated(head: bytes = b"", mebibytes: int = GIGABYTES, fill: bytes = b"\0", tail: bytes = b"") -> bytes:
    """Raw deflate of ``head``, so many MiB of a repeated piece, and ``tail``."""

    def block(data: bytes) -> bytes:
        packer = zlib.compressobj(9, wbits=-15)
        return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH)

    middle = block((fill * (MIB // len(fill) + 1))[:MIB])
    return block(head) + middle * mebibytes + block(tail) + b"\x03\0"


def gzipped(head: bytes = b"", mebibytes: int = GIGABYTES, fill: bytes = b"\0", tail: bytes = b"") -> bytes:
    """The same as a gzip file; its checksum is wrong, which a reader finds out when it has unpacked all of it."""
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + deflated(head, mebibytes, fill, tail) + bytes(8)


# ---------------------------------------------------------------------- npz

Entry = tuple[str, bytes, int]
"""Name, raw deflate, and the size that the directory states."""


def zipped(*entries: Entry) -> bytes:
    """A zip archive; checksums of large entries are wrong, see :func:`gzipped`."""
    body, directory = b"", b""
    for name, packed, size in entries:
        checksum = zlib.crc32(zlib.decompressobj(-15).decompress(packed, size)) if size < 64 * MIB else 0
        more = struct.pack("<HHQQ", 1, 16, size, len(packed)) if size >= 2**32 else b""  # zip64
        stated = (2**32 - 1, 2**32 - 1) if more else (len(packed), size)
        facts = struct.pack("<HHHHHIII", 20, 0, 8, 0, 0, checksum, *stated)
        facts += struct.pack("<HH", len(name), len(more))
        directory += b"PK\1\2" + struct.pack("<H", 20) + facts
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode() + more
        body += b"PK\3\4" + facts + name.encode() + more + packed
    count = len(entries)
    return body + directory + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)


def npy_head(shape: str, descr: str = "'|u1'", *, fortran: bool = False, version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text


def array(name: str, shape: str, size: int, **more: Any) -> Entry:
    """An array of zeros, of so many bytes."""
    head = npy_head(shape, **more)
    whole, rest = divmod(size, MIB)
    return f"{name}.npy", deflated(head, whole, tail=bytes(rest)), len(head) + size


def parts(*bombs: Entry) -> bytes:
    """An npz file of an image of one pixel a part, but for the arrays that are given."""
    shapes = {"images": "(1,1,1)", "labels": "(1,1)", "patient": "(1,)"}
    small = [array(f"{part}_{kind}", shapes[kind], 1) for part in ("train", "val", "test") for kind in shapes]
    replaced = {name for name, _, _ in bombs}
    return zipped(*(entry for entry in small if entry[0] not in replaced), *bombs)


def train_arrays(images: str, rows: int, size: int) -> bytes:
    """An npz file of so many training images of a shape, with a label and a patient each."""
    arrays = (array("train_labels", f"({rows},1)", rows), array("train_patient", f"({rows},)", rows))
    return parts(array("train_images", images, size), *arrays)


TOTAL = GIGABYTES * MIB
LARGEST = 2047 * MIB
"""Bytes of an entry of an array, which numpy counts in 31 bits."""


def jpeg_rows() -> bytes:
    """A hundred times the same JPEG of 25 million pixels, once in the file."""
    content = io.BytesIO()
    Image.new("L", (5000, 5000)).save(content, "JPEG", quality=1)
    jpeg, arrays = content.getvalue(), {}
    for part in ("train", "test"):
        arrays[f"{part}_jpeg"] = np.frombuffer(jpeg, np.uint8)
        arrays[f"{part}_offsets"] = np.tile([0, len(jpeg)], 100)[:200]
        arrays[f"{part}_labels"] = np.zeros(199, np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def one_array(name: str, shape: str, descr: str = "'|u1'", size: int = TOTAL, **more: Any) -> Callable[[], bytes]:
    return lambda: parts(array(name, shape, size, descr=descr, **more))


LARGE, LARGE_TEXT = f"(1,{TOTAL},1)", f"'<U{LARGEST // 4}'"
LONG_HEAD = {
    version: deflated(b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<I", TOTAL), fill=b" ") for version in (2, 3)
}
NPZ: Mapping[str, Callable[[], bytes]] = {
    "images of zeros": lambda: train_arrays(f"({TOTAL // 4096},64,64)", TOTAL // 4096, TOTAL),
    "one large image": one_array("train_images", LARGE),
    "in the order of Fortran": one_array("train_images", LARGE, fortran=True),
    "labels as one text": one_array("train_labels", "(1,1)", LARGE_TEXT, LARGEST),
    "labels as one block": one_array("train_labels", "(1,1)", f"'|V{LARGEST}'", LARGEST),
    "labels of many columns": one_array("train_labels", f"(1,{TOTAL})"),
    "labels with a large field": one_array("train_labels", "(1,1)", f"[('a', '|u1', ({LARGEST},))]", LARGEST),
    # few bytes an image, until each has a label and a name
    "many small images": lambda: train_arrays(f"({40 * MIB},1,1)", 40 * MIB, 40 * MIB),
    "one JPEG many times": jpeg_rows,
    "a header of gigabytes": lambda: parts(("train_labels.npy", LONG_HEAD[2], TOTAL + 12)),
    "a header of version 3": lambda: parts(("train_labels.npy", LONG_HEAD[3], TOTAL + 12)),
    "a header that is an expression": one_array("train_labels", f"{'(' * 4000}1{')' * 4000}", size=1),
    "a header with an open bracket": one_array("train_labels", "(1", size=1),
    "a header of minus signs": one_array("train_labels", f"({'-' * 9000}1,)", size=1),
    "one name twice": lambda: parts(array("train_images", LARGE, TOTAL), array("train_images", "(1,1,1)", 1)),
    "one name with an ending and without": lambda: parts(
        ("train_images", *array("train_images", LARGE, TOTAL)[1:]), array("train_images", "(1,1,1)", 1)
    ),
    "sizes of zip64": lambda: parts(
        ("train_images.npy", deflated(npy_head(f"(1,{2**40},1)"), 2000), len(npy_head(f"(1,{2**40},1)")) + 2**40)
    ),
    "sizes of zip64 beyond 63 bits": lambda: parts(
        ("train_images.npy", deflated(npy_head(f"({2**40},{2**40},1)"), 2000), 2**63 + 10)
    ),
    "the directory states ten bytes": lambda: parts(
        (*array("train_images", LARGE, TOTAL)[:2], len(npy_head(LARGE)) + 10)
    ),
    "header and directory state ten bytes": lambda: parts(
        ("train_images.npy", deflated(npy_head("(1,2,5)")), len(npy_head("(1,2,5)")) + 10)
    ),
}

# ---------------------------------------------------------------------- tables


def wide_cell() -> bytes:
    """A cell of 100,000 letters in a column of 20,000 lines."""
    return b"image,Nodule\n" + b"x" * 100_000 + b",1\n" + b"a,1\n" * 20_000


TABLES: Mapping[str, Callable[[], bytes]] = {
    "zeros.csv.gz": gzipped,
    "lines.csv.gz": lambda: gzipped(b"image,Nodule\n", 800, b"a" * 125 + b",1\n"),
    "cells.csv.gz": lambda: gzipped(b"image,Nodule\n", 400, b"ab,", b"\n"),
    "one line.csv.gz": lambda: gzipped(b"image,Nodule\na,", 2000, b"x"),
    "other letters and a wrong checksum.csv.gz": lambda: gzipped(b"image,M\xfcller\na,1\n", 0),
    "one wide cell.csv": wide_cell,
    "many columns.csv": lambda: b",".join(b"%x" % column for column in range(400_000)) + b"\n" + b"," * 399_999,
}

# ---------------------------------------------------------------------- PNG, JPEG


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, color: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*content) for content in (head, *chunks, (b"IEND", b"")))


@cache
def zlibbed(mebibytes: int = GIGABYTES) -> bytes:
    return b"\x78\x9c" + deflated(mebibytes=mebibytes) + bytes(4)


GOOD = (b"IDAT", zlib.compress(bytes(110)))


def jpeg(width: int, height: int, marker: int = 0xC0) -> bytes:
    """A JPEG of 8 x 8 pixels whose head states another size."""
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "JPEG", progressive=marker == 0xC2)
    data = content.getvalue()
    place = data.index(bytes([0xFF, marker, 0, 11, 8])) + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


# ---------------------------------------------------------------------- NIfTI


def nifti(shape: tuple[int, ...], kind: int = 2, *, start: float = 352.0, packed: int = GIGABYTES) -> bytes:
    """A packed volume of NIfTI-1."""
    head = bytearray(352)
    sides = [*shape, 1, 1, 1, 1, 1, 1, 1][:7]
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, len(shape), *sides)
    struct.pack_into("<hh", head, 70, kind, {2: 8, 4: 16, 16: 32, 64: 64}[kind])
    struct.pack_into("<8f", head, 76, *[1.0] * 8)
    struct.pack_into("<3f", head, 108, start, 1.0, 0.0)
    head[344:348] = b"n+1\0"
    return gzipped(bytes(head), packed)


def nifti_2(shape: tuple[int, ...]) -> bytes:
    head = bytearray(544)
    struct.pack_into("<i8s", head, 0, 540, b"n+2\0\r\n\x1a\n")
    struct.pack_into("<hh", head, 12, 2, 8)
    struct.pack_into("<8q", head, 16, len(shape), *[*shape, 1, 1, 1, 1, 1, 1, 1][:7])
    struct.pack_into("<8d", head, 104, *[1.0] * 8)
    struct.pack_into("<q", head, 168, 544)
    return gzipped(bytes(head), 100)


# ---------------------------------------------------------------------- DICOM

DEFLATED, J2K, LS, RLE, PLAIN = (
    "1.2.840.10008.1.2.1.99",
    "1.2.840.10008.1.2.4.90",
    "1.2.840.10008.1.2.4.80",
    "1.2.840.10008.1.2.5",
    "1.2.840.10008.1.2.1",
)
IMPLICIT = "1.2.840.10008.1.2"


def element(tag: int, kind: str, value: bytes) -> bytes:
    head = struct.pack("<HH", tag >> 16, tag & 0xFFFF) + kind.encode()
    long = kind in ("OB", "OW", "SQ", "UN")
    return head + (b"\0\0" + struct.pack("<I", len(value)) if long else struct.pack("<H", len(value))) + value


def implicit(tag: int, value: bytes) -> bytes:
    return struct.pack("<HHI", tag >> 16, tag & 0xFFFF, len(value)) + value


def short(tag: int, *values: int) -> bytes:
    return element(tag, "US", struct.pack(f"<{len(values)}H", *values))


def file_head(syntax: str) -> bytes:
    name = syntax.encode()
    meta = element(0x00020010, "UI", name + b"\0" * (len(name) % 2))
    return bytes(128) + b"DICM" + element(0x00020000, "UL", struct.pack("<I", len(meta))) + meta


def picture_facts(rows: int, columns: int, bits: int = 8, frames: int = 1) -> bytes:
    count = str(frames).encode()
    facts = short(0x00280002, 1) + element(0x00280004, "CS", b"MONOCHROME2 ")
    if frames > 1:
        facts += element(0x00280008, "IS", count + b" " * (len(count) % 2))
    values = {0x10: rows, 0x11: columns, 0x100: bits, 0x101: bits, 0x102: bits - 1, 0x103: 0}
    return facts + b"".join(short(0x00280000 + tag, value) for tag, value in values.items())


SEQUENCE = struct.pack("<HH", 0x0008, 0x1140) + b"SQ\0\0\xff\xff\xff\xff"
ITEM = struct.pack("<HHI", 0xFFFE, 0xE000, 0)
SEQUENCE_END = struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)


PIXELS = element(0x7FE00010, "OB", bytes(100))


def encapsulated(frame: bytes) -> bytes:
    frame += b"\0" * (len(frame) % 2)
    head = struct.pack("<HH", 0x7FE0, 0x0010) + b"OB\0\0\xff\xff\xff\xff"
    return head + ITEM + struct.pack("<HHI", 0xFFFE, 0xE000, len(frame)) + frame + SEQUENCE_END


def in_dicom(frame: bytes, rows: int, columns: int, syntax: str, bits: int = 8, frames: int = 1) -> bytes:
    return file_head(syntax) + picture_facts(rows, columns, bits, frames) + encapsulated(frame)


def jpeg_2000(
    width: int, height: int, *, tile: int = 0, precincts: int = 15, blocks: int = 4, levels: int = 0
) -> bytes:
    """A codestream without packets.

    Args:
        tile: Side of a tile; one tile for all where 0.
        precincts: Exponent of their side.
        blocks: Exponent of the side of a code block, less two.
    """
    sides = (tile or width, tile or height)
    size = struct.pack(">HIIIIIIIIH", 0, width, height, 0, 0, *sides, 0, 0, 1) + b"\x07\x01\x01"
    style = bytes([1, 0, 0, 1, 0, levels, blocks, blocks, 0, 1]) + bytes([precincts * 17]) * (levels + 1)
    steps = bytes([0x40]) + bytes([0x40] * (3 * levels + 1))
    marked = ((0xFF51, size), (0xFF52, style), (0xFF5C, steps))
    main = b"\xff\x4f" + b"".join(struct.pack(">HH", marker, len(data) + 2) + data for marker, data in marked)
    return main + struct.pack(">HHHIBB", 0xFF90, 10, 0, 14 + 4000, 0, 1) + b"\xff\x93" + bytes(4000) + b"\xff\xd9"


def jpeg_ls(*sizes: tuple[int, int]) -> bytes:
    frames = b"".join(b"\xff\xf7\0\x0b\x08" + struct.pack(">HHB", *size, 1) + b"\1\x11\0" for size in sizes)
    return b"\xff\xd8" + frames + b"\xff\xda\0\x08\1\1\0\0\0\0" + bytes(2000) + b"\xff\xd9"


def run_lengths(rows: int, columns: int) -> bytes:
    """RLE of zeros."""
    count = -(-rows * columns // 128)
    return struct.pack("<16I", 1, 64, *[0] * 14) + b"\x81\0" * count


SMALL = {0x2: 1, 0x10: 10, 0x11: 10, 0x100: 8, 0x101: 8, 0x102: 7, 0x103: 0}
FRAME_GROUPS = struct.pack("<HH", 0x5200, 0x9230) + b"SQ\0\0" + struct.pack("<I", 100 * MIB)

DICOM: Mapping[str, Callable[[], bytes]] = {
    "deflated zeros": lambda: (
        file_head(DEFLATED)
        + deflated(picture_facts(10, 10) + struct.pack("<HH", 0x7FE0, 0x0010) + b"OB\0\0" + struct.pack("<I", TOTAL))
    ),
    "deflated items": lambda: (
        file_head(DEFLATED) + deflated(SEQUENCE, 30, ITEM, SEQUENCE_END + picture_facts(10, 10) + PIXELS)
    ),
    "more rows than a picture has": lambda: file_head(PLAIN) + picture_facts(65535, 65535) + PIXELS,
    "no rows": lambda: file_head(PLAIN) + picture_facts(0, 65535) + PIXELS,
    "JPEG 2000 of one-pixel tiles": lambda: in_dicom(jpeg_2000(255, 257, tile=1), 257, 255, J2K),
    "JPEG 2000 of one-pixel precincts": lambda: in_dicom(jpeg_2000(4000, 4000, precincts=0), 4000, 4000, J2K),
    "JPEG 2000 of small blocks": lambda: in_dicom(jpeg_2000(8000, 8000, blocks=0), 8000, 8000, J2K),
    "JPEG 2000 of another size": lambda: in_dicom(jpeg_2000(65535, 65535), 10, 10, J2K),
    "JPEG-LS of another size": lambda: in_dicom(jpeg_ls((65535, 65535)), 10, 10, LS),
    "JPEG-LS of two sizes": lambda: in_dicom(jpeg_ls((10, 10), (50000, 50000)), 10, 10, LS),
    "run lengths of another size": lambda: in_dicom(run_lengths(8000, 20000), 10, 10, RLE),
    "many values": lambda: (
        file_head(IMPLICIT)
        + implicit(0x00280004, b"MONOCHROME2 ")
        + b"".join(implicit(0x00280000 + tag, struct.pack("<H", value)) for tag, value in SMALL.items())
        + implicit(0x00281050, b"1\\" * 1_500_000)
        + implicit(0x00281051, b"1\\" * 10)
        + implicit(0x7FE00010, bytes(100))
    ),
    "many character sets": lambda: file_head(IMPLICIT) + implicit(0x00080005, b"\\ISO_IR 100" * 200_000),
    "many patients": lambda: file_head(IMPLICIT) + implicit(0x00100020, b"1\\" * 1_500_000),
    "items of a length": lambda: (
        file_head(PLAIN) + picture_facts(10, 10) + element(0x52009229, "SQ", ITEM * 390_000) + PIXELS
    ),
    "items of a length, for each frame": lambda: (
        file_head(DEFLATED) + deflated(picture_facts(10, 10) + FRAME_GROUPS, 100, ITEM, PIXELS)
    ),
    "a billion frames": lambda: in_dicom(run_lengths(10, 10), 10, 10, RLE, frames=10**9),
}
ITEMS: Mapping[str, Callable[[], bytes]] = {
    "3 MB of items": lambda: (
        file_head(PLAIN) + SEQUENCE + ITEM * 390_000 + SEQUENCE_END + picture_facts(10, 10) + PIXELS
    ),
}
"""As "deflated items", but not deflated."""
PICTURES: Mapping[str, Callable[[], bytes]] = {
    "PNG of four billion pixels": lambda: png(65535, 65535, GOOD),
    "PNG of a long row": lambda: png(2**31 - 1, 1, GOOD),
    "PNG of no pixels": lambda: png(0, 10, GOOD),
    "PNG of a text": lambda: png(10, 10, (b"zTXt", b"Title\0\0" + zlibbed()), GOOD),
    "PNG of an international text": lambda: png(10, 10, (b"iTXt", b"Title\0\1\0\0\0" + zlibbed()), GOOD),
    "PNG of many texts": lambda: png(10, 10, *[(b"zTXt", b"T%d\0\0" % i + zlibbed(1)) for i in range(600)], GOOD),
    "PNG of a colour profile": lambda: png(10, 10, (b"iCCP", b"Profile\0\0" + zlibbed()), GOOD),
    "PNG that goes on": lambda: png(10, 10, (b"IDAT", zlibbed(1000))),
    "JPEG of four billion pixels": lambda: jpeg(65500, 65500),
    "progressive JPEG of four billion pixels": lambda: jpeg(65500, 65500, 0xC2),
    "JPEG of no rows": lambda: jpeg(65500, 0),
    "TIFF": lambda: b"II*\0\x08\0\0\0\x02\0\0\1\4\0\1\0\0\0\xff\xff\0\0\1\1\4\0\1\0\0\0\xff\xff\0\0" + bytes(4),
    "BMP": lambda: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 65535, 65535, 1, 24, 0, 0, 0, 0, 0, 0),
    "JPEG 2000 without DICOM": lambda: jpeg_2000(65535, 65535),
}
VOLUMES: Mapping[str, Callable[[], bytes]] = {
    "nii.gz of a large plane": lambda: nifti((30000, 30000, 3)),
    "nii.gz of many planes": lambda: nifti((1000, 1000, 3000)),
    "nii.gz of one row": lambda: nifti((32767, 1, 32767)),
    "nii.gz that begins late": lambda: nifti((10, 10, 1), start=2.9e9),
    "nii.gz that begins at infinity": lambda: nifti((10, 10, 1), start=float("inf")),
    "nii.gz that begins before its head": lambda: nifti((10, 10, 1), start=-1e9),
    "nii.gz that goes on": lambda: nifti((10, 10, 1)),
    "nii.gz of a negative side": lambda: nifti((-10, 10, 10)),
    "nii.gz of no side": lambda: nifti((0, 10, 10)),
    "nii.gz of many axes": lambda: nifti((100, 100, 100, 100, 30000)),
    "nii.gz of version 2 whose size has 80 bits": lambda: nifti_2((2**40, 2**40, 1)),
    "nii.gz of version 2 whose size overflows": lambda: nifti_2((2**63 - 1, 2**63 - 1, 2**63 - 1)),
}


def weights() -> bytes:
    """A file of torch whose one storage is packed, as torch itself never writes it."""
    content = io.BytesIO()
    torch.save({"weight": torch.zeros(1)}, content)
    entries = list[Entry]()
    with zipfile.ZipFile(io.BytesIO(content.getvalue())) as archive:
        for info in archive.infolist():
            data = archive.read(info)
            if info.filename.endswith("/data/0"):
                entries.append((info.filename, deflated(), TOTAL))
            else:
                packer = zlib.compressobj(wbits=-15)
                entries.append((info.filename, packer.compress(data) + packer.flush(), len(data)))
    return zipped(*entries)


# ---------------------------------------------------------------------- reading


def images_of(file: Path, **keys: str) -> str:
    spec = NpzDatasetSpec(kind="npz", path=file.name, classes=("a", "b"), **keys)
    return f"{len(load_dataset(spec, file.parent).train)} images"


def read_head(file: Path) -> str:
    return str(read_dicom_headers([file])[0])


def read_picture(file: Path) -> str:
    form = DecodedImageFormat(8, color=False, resize="pad", rendering=PictureRenderingOptions("middle", "coronal"))
    decoded = decode_pictures([file.name], lambda row: file, form)
    return f"refused: {decoded.skipped[0].reason}" if decoded.skipped else "a picture"


Bombs = Mapping[str, Callable[[], bytes]]
FORM = DecodedImageFormat(8, color=False, resize="pad")
READERS: Mapping[str, tuple[Callable[[Path], str], Bombs, str]] = {
    "npz": (images_of, NPZ, ".npz"),
    "patients": (
        partial(images_of, patient_key="patient"),
        {"a patient of a long name": one_array("train_patient", "(1,)", LARGE_TEXT, LARGEST)},
        ".npz",
    ),
    "unlabelled": (
        lambda file: str(read_unlabelled_pictures(file, FORM).names),
        {"one large test image": one_array("test_images", LARGE)},
        ".npz",
    ),
    "table": (lambda file: str(len(read_csv_table(file, "data.labels"))), TABLES, ""),
    "picture": (read_picture, {**PICTURES, **DICOM, **VOLUMES}, ""),
    "items": (read_picture, ITEMS, ""),
    "head": (read_head, {name: DICOM[name] for name in ("many patients", "items of a length")}, ""),
    "heads": (read_head, {**DICOM, **ITEMS}, ""),
    "weights": (
        lambda file: convert_checkpoint("tiny_cnn", file, file.with_suffix(".out")),
        {"a packed storage": weights},
        ".pth",
    ),
}
"""By what is read: the reader, its bombs, and the ending of their files' names."""


def good_files(ending: str) -> list[bytes]:
    """Good files, so that all that reading imports is there before memory is measured."""
    if ending:
        return [parts()] if ending == ".npz" else [b"no weights"]
    return [
        b"image,Nodule\na,1\n",
        png(10, 10, GOOD),
        nifti((10, 10, 3), packed=1),
        file_head(PLAIN) + picture_facts(10, 10) + PIXELS,
        in_dicom(jpeg_2000(10, 10), 10, 10, J2K),
        in_dicom(jpeg_ls((10, 10)), 10, 10, LS),
    ]


def memory(field: str) -> int:
    """MiB of memory that this process has ("VmRSS"), or had at most ("VmHWM"); getrusage begins with its parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) >> 10


def outcome_of(read: Callable[[Path], str], file: Path, content: bytes) -> str:
    file.write_bytes(content)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the most memory is counted anew from here on
    try:
        return read(file)
    except BadInput as bad:
        return f"refused: {bad}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder: Path, readers: Sequence[str]) -> None:
    """Read the bombs of some readers, one after the other, each from this folder."""
    for read, _, ending in map(READERS.__getitem__, readers):
        for place, content in enumerate(good_files(ending)):
            outcome_of(read, folder / f"good{place}{ending}", content)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    outcomes = list[tuple[str, str, int, str]]()
    for reader in readers:
        read, bombs, ending = READERS[reader]
        for name, made in bombs.items():
            content = made()
            assert len(content) < 3_200_000
            before = memory("VmRSS")
            outcome = outcome_of(read, folder / f"{name}{ending}", content)
            outcomes.append((reader, name, memory("VmHWM") - before, " ".join(outcome.split())))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made_folder:
        main(Path(made_folder), sys.argv[1:])
