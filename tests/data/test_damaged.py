"""A damaged or lying DICOM file is a picture or is refused: it takes neither the process nor the memory with it."""

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydicom import uid

from polyclinic.data.base.spec import PictureRenderingOptions
from tests.data.dicom_files import decode_dicom_pixels, deflated
from tests.data.dicom_syntaxes import by_gdcm, by_pydicom, plain, source

ROOT = Path(__file__).parents[2]


def read_damaged(first: int, count: int, seconds: int) -> list[int]:
    """Pictures and refusals among so many files, read in a process of its own."""
    command = [sys.executable, "-m", "tests.data.damaged", str(first), str(count)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [int(word) for word in ended.stdout.split()]


def test_damaged_files_are_pictures_or_refused() -> None:
    pictures, refused = read_damaged(0, 600, seconds=240)
    assert pictures + refused == 600
    assert min(pictures, refused) > 60


@pytest.mark.long
def test_ten_thousand_damaged_files_are_pictures_or_refused() -> None:
    assert sum(read_damaged(0, 10_000, seconds=1200)) == 10_000


@pytest.mark.parametrize(
    ("syntax", "pack", "before", "kind"),
    [
        (uid.JPEGLosslessSV1, by_gdcm, b"\xff\xc3\0\x0b\x08", ">HH"),
        (uid.JPEGLSLossless, by_gdcm, b"\xff\xf7\0\x0b\x08", ">HH"),
        (uid.JPEG2000Lossless, by_pydicom, b"\xff\x4f\xff\x51\0\x29\0\0", ">II"),
    ],
)
def test_a_frame_that_unpacks_to_another_size_is_refused_before_it_does(
    syntax: str, pack: Callable[[bytes, str], bytes], before: bytes, kind: str
) -> None:
    data = pack(plain(source(8), 8), syntax)
    place = data.index(before) + len(before)  # rows and columns stand there
    data = data[:place] + struct.pack(kind, 65535, 65535) + data[place + struct.calcsize(kind) :]
    with pytest.raises(ValueError, match=r"36 × 52 × 1 .* packed pixels 65535 × 65535"):
        decode_dicom_pixels(data)


def test_jpeg_ls_without_its_end_is_refused_at_once() -> None:
    """CharLS reads 2^31 zeros behind a damaged frame that has no end marker: 4 to 5 CPU seconds."""
    data = plain(source(8, samples=3), 8)
    packed = by_gdcm(data, uid.JPEGLSLossless)
    place = packed.index(b"\xff\xda") + 16
    damaged = packed[:place] + b"\x7f\xeb" + packed[place:].replace(b"\xff\xd9", b"\0\0")
    begin = time.process_time()
    with pytest.raises(ValueError, match="are damaged"):
        decode_dicom_pixels(damaged)
    assert time.process_time() - begin < 0.5


def test_a_deflated_file_is_inflated_only_so_far() -> None:
    bound = PictureRenderingOptions(largest_mb=1)
    data = plain(source(8), 8)
    assert (decode_dicom_pixels(deflated(data, 0), bound) == decode_dicom_pixels(data)).all()
    with pytest.raises(ValueError, match="1 MiB are allowed"):
        decode_dicom_pixels(deflated(data, 1 << 21), bound)
