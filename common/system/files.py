"""Files: faults of named files and folders, and atomic writes, of which a reader sees all or nothing."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from common.errors import BadInput, Fault, suggest_nearest_name
from common.system.stopping import block_if_stopping, removed_if_stopped

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, a used-up quota, or a file at its size limit."""
NO_PLACE_TO_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
NO_PLACE_TO_WRITE |= {errno.ELOOP, errno.ENAMETOOLONG}
"""Error numbers of a place in which this account can make no file."""
_RELATIVE = "Paths are relative to the folder of this file."


def is_disk_full(error: BaseException | None) -> bool:
    """Return True for the error of a full disk."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def disk_full_message(error: BaseException) -> str:
    """Return a message for a person about a full disk; empty for any other error."""
    if not isinstance(error, OSError) or not is_disk_full(error):
        return ""
    path = error.filename2 or error.filename  # of a copy the second is what is written
    where = f" of {path}" if path else ", where files are written"
    return f"there is no room left on the disk{where}: free some, and try again."


@contextlib.contextmanager
def add_file_name_to_errors(path: Path) -> Iterator[None]:
    """Add ``path`` to an ``OSError`` from the ``with`` block if the error names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_file(path: Path) -> bool:
    """Return True if the path is a file; False also for an impossible name, for instance one that is too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def missing_file(where: str, path: Path) -> list[Fault]:
    """Return the fault of a missing file that the key ``where`` of a config file names; empty where the file exists."""
    return [] if is_file(path) else [Fault(where, f"there is no file {path}.", _RELATIVE)]


def missing_folder(where: str, path: Path) -> list[Fault]:
    """Return the fault of a missing folder that a config file names; empty where the folder exists."""
    try:
        there = path.is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        there = False
    return [] if there else [Fault(where, f"there is no folder {path}.", _RELATIVE)]


def missing_input_fault(path: Path) -> Fault:
    """Return the fault of a path that is no file: what it is instead, or a file of a similar name."""
    problem = ""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        problem = "is a folder, not a file." if is_folder else "is a pipe or a device, not a file."
    except OSError as error:
        problems = {errno.ELOOP: "is a loop of links.", errno.ENAMETOOLONG: "is longer than a path can be."}
        problem = problems.get(error.errno or 0, "")
    except ValueError:  # a name that no file can have
        pass
    if problem:
        return Fault(str(path), problem, "Name a file.")
    beside = path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() else ()
    hint = suggest_nearest_name(path.stem, (each.stem for each in beside))
    return Fault(str(path), "there is no such file.", hint.replace('"?', f'{path.suffix}"?'))


def output_file_faults(destination: Path) -> list[Fault]:
    """Return why ``--out`` cannot be a new file in an existing folder; empty where it can."""
    if os.path.lexists(destination):  # a link to nowhere too
        return [Fault(f"--out {destination}", "exists, and nothing is written over.", "Name another file.")]
    if not destination.parent.is_dir():
        return [Fault(f"--out {destination}", "its folder does not exist.", "Make it first.")]
    return []


def existing_output_faults(destination: Path) -> list[Fault]:
    """Return why ``--out`` cannot be a new file or folder; empty where it can."""
    problem, remedy = f"{destination} is there already.", "Name another file, or remove it."
    return [Fault("--out", problem, remedy)] if os.path.lexists(destination) else []


def output_folder_faults(folder: Path, remedy: str = "Name another folder.") -> list[Fault]:
    """Return why ``--out`` cannot be a new folder, with the remedy where it is not empty; empty where it can."""
    if folder.is_file():
        return [Fault(f"--out {folder}", "is a file, and nothing is written over.", "Name a new folder.")]
    try:
        holds_something = folder.exists() and any(folder.iterdir())
    except OSError as error:
        return [Fault(f"--out {folder}", f"cannot be looked into: {error.strerror}.", "Name another folder.")]
    return [Fault(f"--out {folder}", "is not empty, and nothing is written over.", remedy)] if holds_something else []


Parts = Sequence[bytes | memoryview]
"""A file's content in pieces, which need not be copied into one."""


def write_atomically(path: Path, content: bytes | Parts, *, durable: bool = True, private: bool = False) -> None:
    """Write a temporary file, flush it to disk where ``durable``, and rename it into place; on failure remove it.

    Args:
        private: Only the owner may read the file, at any instant.
    """
    block_if_stopping()  # a file begun now would stay half done when the program ends
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_path(path)
    remove = partial(temporary.unlink, missing_ok=True)
    with removed_if_stopped(remove):
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
            except FileNotFoundError:  # its folder is there: so answers /proc
                raise PermissionError(errno.EACCES, "no file can be made there", str(temporary.parent)) from None
            with add_file_name_to_errors(path), os.fdopen(descriptor, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            remove()
            raise
    if durable:
        flush_folder(path.parent)


@contextlib.contextmanager
def remove_outputs_on_failure(*outputs: Path) -> Iterator[None]:
    """Remove the new files and folders ``paths`` if the ``with`` block that writes them fails or is stopped.

    An error that names no file gets the name of the first.
    """
    new = [path for path in outputs if not path.exists()]

    def remove() -> None:
        for path in new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    try:
        with add_file_name_to_errors(outputs[0]), removed_if_stopped(remove):
            yield
    except BaseException:
        remove()
        raise


def lock_file_or_refuse(file: IO[Any] | int, fault: Fault) -> None:
    """Lock an open file or folder until it is closed.

    Raises:
        BadInput: With this fault, if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput([fault]) from None


def is_locked(path: Path) -> bool:
    """Return True while a process holds the lock of a file; False for a missing file."""
    with contextlib.suppress(FileNotFoundError), path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


PRIVATE = 0o700


def make_private_folder(path: Path) -> bool:
    """Make a folder that only its owner may open, or remove the rights of others from an existing one.

    Returns:
        True where rights of others were removed; an account that is not the folder's owner cannot remove them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(PRIVATE)
    if not path.stat().st_mode & 0o077:
        return False
    try:
        path.chmod(PRIVATE)
    except PermissionError:
        return False
    return True


def partial_path(path: Path) -> Path:
    """Return the temporary name under which this thread writes a file until the file is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def remove_partial_files(folder: Path, *, below: bool = False) -> None:
    """Remove the partial files that killed processes left in a folder, or also ``below`` it; call it at a start."""
    for path in folder.rglob(".*.part") if below else folder.glob(".*.part"):
        writer = re.search(r"\.(\d+)-\d+\.part$", path.name)
        gone = writer and (int(writer[1]) == os.getpid() or not Path(f"/proc/{writer[1]}").exists())
        if gone and not path.is_dir():
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush a folder, with the names of its files, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
