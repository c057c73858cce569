"""Read npz files safely: first the array headers, then arrays that are not larger than their headers state."""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.files import find_missing_file_faults

_MAX_HEADER_BYTES = 10_000
"""numpy's limit for a header; numpy checks it only after it has read the header."""
_MAX_DEFLATE_RATIO = 1100
"""Maximum ratio of decompressed to compressed size that deflate can reach."""
_BLOCK_BYTES = 1 << 20
_DAMAGED_FILE_REMEDY = "Copy it again, or write it again with numpy.savez."


@dataclass(frozen=True)
class NpyArrayHeader:
    """The shape, data type and memory order of an array, from the header of its file.

    Attributes:
        fortran: True if the first axis varies fastest.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def byte_size(self) -> int:
        """The number of bytes of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def report_npz_damage_as_fault(where: str, name: str) -> Iterator[None]:
    """Catch the errors that a damaged file causes inside the ``with`` block, and raise one :class:`BadInput` instead.

    Args:
        where: The configuration key that the fault names.
        name: Name of the file, for the message.
    """
    subject = "" if where.endswith(name) else f"{name} "
    damaged = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, SyntaxError, LookupError, MemoryError)
    try:
        yield
    except (*damaged, RecursionError, TypeError, OverflowError, struct.error, TokenError):
        raise BadInput([Fault(where, f"{subject}is damaged, cut off, or no npz file.", _DAMAGED_FILE_REMEDY)]) from None
    except (NotImplementedError, RuntimeError):
        problem = f"{subject}is a zip file that is locked or packed in an unusual way."
        raise BadInput([Fault(where, problem, _DAMAGED_FILE_REMEDY)]) from None


class NpzArrayReader:
    """The arrays of an open npz file by name; each access reads the array from the file.

    Raises:
        BadInput: If an array cannot be read.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path, where: str) -> None:
        self.path, self._archive, self._where = path, archive, where
        self._entries = _list_zip_entries(archive)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> NDArray[Any]:
        with report_npz_damage_as_fault(self._where, self.path.name):
            read_array_header(self._archive, self._entries[key])
            with self._archive.open(self._entries[key]) as member:
                return np.asarray(np.lib.format.read_array(member, allow_pickle=False))

    def read_array_header_by_name(self, key: str) -> NpyArrayHeader:
        """Return the shape and data type of an array, without reading the array."""
        with report_npz_damage_as_fault(self._where, self.path.name):
            return read_array_header(self._archive, self._entries[key])

    def read_array_rows(self, key: str, rows: NDArray[np.intp]) -> NDArray[Any]:
        """Read the entries of an array at these ascending indices; at most one block of other entries is in memory."""
        header = self.read_array_header_by_name(key)
        if len(rows) == header.shape[0]:
            return self[key]
        entries = np.empty((len(rows), *header.shape[1:]), header.dtype)
        end = 0
        for block in self.iterate_array_blocks(key, rows):
            entries[end : end + len(block)] = block
            end += len(block)
        return entries

    def iterate_array_blocks(self, key: str, rows: NDArray[np.intp]) -> Iterator[NDArray[Any]]:
        """Yield the entries of an array at these ascending indices, in blocks."""
        header = self.read_array_header_by_name(key)
        if header.fortran or not header.byte_size:
            yield np.asarray(self[key][rows])
            return
        with report_npz_damage_as_fault(self._where, self.path.name), self._archive.open(self._entries[key]) as member:
            _parse_npy_header(member)
            step = max(1, _BLOCK_BYTES * header.shape[0] // header.byte_size)
            for start in range(0, header.shape[0], step):
                count = min(step, header.shape[0] - start)
                block = np.frombuffer(
                    _read_exact_byte_count(member, count * header.byte_size // header.shape[0]), header.dtype
                )
                first, last = np.searchsorted(rows, (start, start + count))
                yield block.reshape(count, *header.shape[1:])[rows[first:last] - start]


@contextmanager
def open_npz_arrays(path: Path, where: str = "data.path") -> Iterator[NpzArrayReader]:
    """Open the arrays of an npz file that :func:`read_npz_headers` has already checked.

    Args:
        where: The configuration key that a fault names.
    """
    with report_npz_damage_as_fault(where, path.name):
        archive = zipfile.ZipFile(path)
        arrays = NpzArrayReader(archive, path, where)
    with archive:
        yield arrays


def read_npz_headers(path: Path, where: str = "data.path") -> dict[str, NpyArrayHeader]:
    """Read the headers of all arrays in an npz file, by array name.

    Args:
        where: The configuration key that the fault names.

    Raises:
        BadInput: If the file is missing or is not an npz file, or an array has another size than its header states.
    """
    raise_faults(find_missing_file_faults(where, path))
    with report_npz_damage_as_fault(where, path.name), zipfile.ZipFile(path) as archive:
        return {name: read_array_header(archive, info) for name, info in _list_zip_entries(archive).items()}


def _list_zip_entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the zip entries of an npz file by array name.

    Raises:
        ValueError: If two entries have the same name, because programs differ in which of the two they read.
        NotImplementedError: If an entry is compressed with bzip2 or LZMA, because zipfile may then decompress gigabytes
            at once.
    """
    if not {info.compress_type for info in archive.infolist()} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise NotImplementedError("packed otherwise than numpy does")
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise ValueError("two arrays have one name")
    return members


def read_array_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NpyArrayHeader:
    """Read the header of one array, and check that the zip entry has the size that the header states.

    Raises:
        ValueError: If the sizes differ. Errors of numpy and zipfile are not caught.
    """
    with archive.open(info) as member:
        header = _parse_npy_header(member)
        content = info.file_size - member.tell()
    if min(header.shape, default=0) < 0:
        raise ValueError(f"{info.filename} has a negative side")
    possible = info.compress_size * _MAX_DEFLATE_RATIO
    if not header.dtype.hasobject and (content != header.byte_size or info.file_size > possible):
        raise ValueError(f"{info.filename} announces another size than it has")
    return header


def _parse_npy_header(member: IO[bytes]) -> NpyArrayHeader:
    """Parse an npy header; afterwards the file position is at the first byte of the array."""
    version = np.lib.format.read_magic(member)
    form = "<H" if version == (1, 0) else "<I"
    prefix = _read_exact_byte_count(member, struct.calcsize(form))
    (length,) = struct.unpack(form, prefix)
    if length > _MAX_HEADER_BYTES:
        raise ValueError("the header is too long")
    text = io.BytesIO(prefix + _read_exact_byte_count(member, length))
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(text)
    return NpyArrayHeader(shape, dtype, fortran)


def _read_exact_byte_count(member: IO[bytes], size: int) -> bytes:
    """Read exactly ``size`` bytes; raise an ``EOFError`` if the file ends earlier."""
    data = member.read(size)
    if len(data) < size:
        raise EOFError
    return data
