"""DICOM files of every transfer syntax, damaged by a seeded hand; and a program that reads them under a memory limit.

``python -m tests.common.data.damaged FIRST COUNT`` prints how many were pictures, and how many were refused.
"""

import io
import logging
import random
import resource
import sys
import warnings

import imagecodecs
import pydicom
from pydicom import uid

from common.data.images.reading import ImageForm, decode_all
from tests.common.data.dicom_syntaxes import as_jpeg, by_gdcm, by_pydicom, in_fragments, plain, saved, source

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


def damaged(data: bytes, hand: random.Random) -> bytes:
    """The file with one to four places overwritten, flipped, cut out or filled; half of them in its head."""
    changed = bytearray(data)
    for _ in range(hand.randint(1, 4)):
        place = hand.randrange(132, min(len(changed), 900) if hand.random() < 0.5 else len(changed))
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
    files, form, pictures, refused = valid_files(), ImageForm(8, color=False, resize="pad"), 0, 0
    for seed in range(first, first + count):
        hand = random.Random(seed)
        data = damaged(hand.choice(files), hand)
        found = decode_all(["it"], lambda row, data=data: data, form)  # type: ignore[misc]
        pictures += len(found.kept)
        refused += sum(bool(skipped.reason) for skipped in found.skipped)
    print(pictures, refused)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    main(int(sys.argv[1]), int(sys.argv[2]))
