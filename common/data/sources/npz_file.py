"""npz files: the headers of their arrays, and the arrays, of which none takes more memory than its header says."""

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

from common.errors import BadInput, Fault, stop_on
from common.system.files import missing_file

_LONGEST_HEADER = 10_000
"""Bytes, as numpy has it; numpy itself reads a longer one before it refuses it."""
_MOST_THAT_DEFLATE_SAVES = 1100
_BLOCK = 1 << 20
_AGAIN = "Copy it again, or write it again with numpy.savez."


@dataclass(frozen=True)
class Header:
    """What an array looks like, known without reading it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool = False

    @property
    def size(self) -> int:
        """Bytes of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def reading(where: str, name: str) -> Iterator[None]:
    """Read of an npz file inside: any error of zipfile, zlib and numpy on damaged bytes is one fault of the file."""
    subject = "" if where.endswith(name) else f"{name} "
    damaged = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, SyntaxError, LookupError, MemoryError)
    try:
        yield
    except (*damaged, RecursionError, TypeError, OverflowError, struct.error, TokenError):
        raise BadInput([Fault(where, f"{subject}is damaged, cut off, or no npz file.", _AGAIN)]) from None
    except (NotImplementedError, RuntimeError):
        problem = f"{subject}is a zip file that is locked or packed in an unusual way."
        raise BadInput([Fault(where, problem, _AGAIN)]) from None


class NpzArrays:
    """The arrays of an open npz file, each read when it is asked for.

    Raises:
        BadInput: Where what is asked for cannot be read.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path, where: str) -> None:
        self.path, self._archive, self._where = path, archive, where
        self._members = _members(archive)

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def __getitem__(self, key: str) -> NDArray[Any]:
        with reading(self._where, self.path.name):
            header(self._archive, self._members[key])  # of the same entry, and not of another one of its name
            with self._archive.open(self._members[key]) as member:
                return np.asarray(np.lib.format.read_array(member, allow_pickle=False))

    def rows(self, key: str, rows: NDArray[np.intp]) -> NDArray[Any]:
        """Return the entries at ``rows``, which ascend; the others are not in memory together, and nothing is twice."""
        with reading(self._where, self.path.name):
            stated = header(self._archive, self._members[key])
        if len(rows) == stated.shape[0]:
            return self[key]
        if stated.fortran or not stated.size:
            return np.asarray(self[key][rows])
        chosen = np.empty((len(rows), *stated.shape[1:]), stated.dtype)
        with reading(self._where, self.path.name), self._archive.open(self._members[key]) as member:
            _read_header(member)
            step = max(1, _BLOCK * stated.shape[0] // stated.size)
            for start in range(0, stated.shape[0], step):
                count = min(step, stated.shape[0] - start)
                block = np.frombuffer(_exactly(member, count * stated.size // stated.shape[0]), stated.dtype)
                first, last = np.searchsorted(rows, (start, start + count))
                chosen[first:last] = block.reshape(count, *stated.shape[1:])[rows[first:last] - start]
        return chosen


@contextmanager
def opened_npz(path: Path, where: str = "data.path") -> Iterator[NpzArrays]:
    """Open a file whose headers :func:`read_headers` has found to be in order."""
    with reading(where, path.name):
        archive = zipfile.ZipFile(path)
        arrays = NpzArrays(archive, path, where)
    with archive:
        yield arrays


def read_headers(path: Path, where: str = "data.path") -> dict[str, Header]:
    """Return what each array looks like, by its name.

    Raises:
        BadInput: If there is no such file, it is no npz file, or an array has another size than it announces.
    """
    stop_on(missing_file(where, path))
    with reading(where, path.name), zipfile.ZipFile(path) as archive:
        return {name: header(archive, info) for name, info in _members(archive).items()}


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the entries by the names of their arrays.

    Raises:
        ValueError: If two have one name: which of them is meant, every reader decides in its own way.
        NotImplementedError: If one is packed as numpy never does: of bzip2 and LZMA zipfile unpacks all that a piece
            of the file gives, which may be gigabytes.
    """
    if not {info.compress_type for info in archive.infolist()} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise NotImplementedError("packed otherwise than numpy does")
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise ValueError("two arrays have one name")
    return members


def header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    """Read one array's header; the file must have as many bytes as it announces before memory is allocated.

    Raises:
        ValueError: If it has not, or what numpy and zipfile raise on damaged bytes.
    """
    with archive.open(info) as member:
        stated = _read_header(member)
        held = info.file_size - member.tell()
    if min(stated.shape, default=0) < 0:
        raise ValueError(f"{info.filename} has a negative side")
    possible = info.compress_size * _MOST_THAT_DEFLATE_SAVES
    if not stated.dtype.hasobject and (held != stated.size or info.file_size > possible):
        raise ValueError(f"{info.filename} announces another size than it has")
    return stated


def _read_header(member: IO[bytes]) -> Header:
    """Read a header, and leave ``member`` behind it."""
    version = np.lib.format.read_magic(member)
    form = "<H" if version == (1, 0) else "<I"
    counted = _exactly(member, struct.calcsize(form))
    (length,) = struct.unpack(form, counted)
    if length > _LONGEST_HEADER:
        raise ValueError("the header is too long")
    text = io.BytesIO(counted + _exactly(member, length))
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(text)
    return Header(shape, dtype, fortran)


def _exactly(member: IO[bytes], size: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: If there are fewer.
    """
    data = member.read(size)
    if len(data) < size:
        raise EOFError
    return data
