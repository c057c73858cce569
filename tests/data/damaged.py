"""DICOM files of every transfer syntax, and NIfTI files, damaged by a seeded hand; read under a memory limit.

``python -m tests.data.damaged FIRST COUNT`` prints how many were pictures, and how many were refused.
"""

import gzip
import io
import logging
import random
import resource
import sys
import tempfile
import warnings
from pathlib import Path

import imagecodecs
import pydicom
from pydicom import uid

from polyclinic.data.base.spec import PictureRenderingOptions
from polyclinic.data.images.file_kinds import is_dicom_file
from polyclinic.data.images.reading import DecodedImageFormat
from polyclinic.data.images.store import decode_pictures
from tests.data.dicom_syntaxes import as_jpeg, by_gdcm, by_pydicom, in_fragments, plain, saved, source
from tests.data.nifti_files import volume, write

MEMORY = 4 << 30
"""Bytes of address space; libraries alone map about two thirds of it."""


def valid_files() -> list[bytes]:
    """One grey and one coloured file of each transfer syntax."""
    grey, deep, color = source(8), source(12, signed=True), source(8, samples=3)
    files = [plain(grey, 8), plain(deep, 12), plain(color, 8)]
    dataset = pydicom.dcmread(io.BytesIO(files[1]))
    dataset.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    files += [saved(dataset), as_jpeg(files[0], grey), as_jpeg(files[2], color)]
    for syntax in (uid.JPEGLossless, uid.JPEGLosslessSV1, uid.JPEGLSLossless):
        files += [by_gdcm(file, syntax) for file in files[:3]]
    for syntax in (uid.JPEG2000Lossless, uid.RLELossless):
        files += [by_pydicom(file, syntax) for file in files[:3]]
    return [*files, in_fragments(files[0], imagecodecs.htj2k_encode(grey, reversible=True), syntax=uid.HTJ2KLossless)]


def nifti_files(folder: Path) -> list[bytes]:
    """Volumes of several kinds of numbers, packed and not."""
    kinds = (("a.nii", "<i2", 1), ("b.nii.gz", "<i2", 1), ("c.nii", ">f4", 2), ("d.nii.gz", "u1", 1))
    files = [write(folder / name, volume().astype(kind), version=version) for name, kind, version in kinds]
    return [*files, gzip.compress(files[0], 0)]  # not packed by gzip, so that harm reaches the head inside


def damaged(data: bytes, hand: random.Random) -> bytes:
    """The file with one to four places overwritten, flipped, cut out or filled; half of them in its head."""
    changed = bytearray(data)
    first = 132 if is_dicom_file(data) else 0
    for _ in range(hand.randint(1, 4)):
        place = hand.randrange(first, min(len(changed), 900) if hand.random() < 0.5 else len(changed))
        match hand.randrange(6):
            case 0:
                changed[place] = hand.randrange(256)
            case 1:
                changed[place] ^= 1 << hand.randrange(8)
            case 2:
                changed[place : place + 4] = b"\xff" * 4
            case 3:
                del changed[place : place + hand.randrange(1, 9)]
            case 4:
                changed[place:place] = hand.randbytes(hand.randrange(1, 9))
            case _:
                del changed[max(place, 400) :]
    return bytes(changed)


def main(first: int, count: int) -> None:
    """Read so many damaged files, each by its own seed."""
    warnings.simplefilter("ignore")
    logging.disable()
    pictures, refused = 0, 0
    form = DecodedImageFormat(8, color=False, resize="pad", rendering=PictureRenderingOptions("middle"))
    with tempfile.TemporaryDirectory() as folder:
        files, file = [*valid_files(), *nifti_files(Path(folder))], Path(folder, "it")
        for seed in range(first, first + count):
            hand = random.Random(seed)
            file.write_bytes(damaged(hand.choice(files), hand))
            decoded = decode_pictures(["it"], lambda row: file, form)
            pictures += len(decoded.rows)
            refused += sum(bool(skipped.reason) for skipped in decoded.skipped)
    print(pictures, refused)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    main(int(sys.argv[1]), int(sys.argv[2]))
