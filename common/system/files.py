"""Files: whether they are there, and writing them so that a reader sees the old content or the new, never a part."""

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

from common.errors import Fault, did_you_mean
from common.system.stopping import block_if_stopping, removed_if_stopped

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The disk, the user's share of it, or the size that a file may have."""
NO_PLACE_TO_WRITE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
"""What a system answers where a person named a place in which this account can make no file."""
_RELATIVE = "Paths are relative to the folder of this file."


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether this is an answer of a disk that holds no more."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def disk_full_message(error: BaseException) -> str:
    """Return what to tell a person of a disk that holds no more; empty where the error is another."""
    if not isinstance(error, OSError) or not is_disk_full(error):
        return ""
    path = error.filename2 or error.filename  # of a copy the second is what is written
    where = f" of {path}" if path else ", where files are written"
    return f"there is no room left on the disk{where}: free some, and try again."


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Within it, an error of the system that names no file, as that of a full disk, is told to be of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_file(path: Path) -> bool:
    """Return whether there is such a file; a name that no file can have, too long for instance, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def missing_file(where: str, path: Path) -> list[Fault]:
    """Return the fault of a file that a config file names and that is not there.

    Args:
        where: The key that names it.
    """
    return [] if is_file(path) else [Fault(where, f"there is no file {path}.", _RELATIVE)]


def missing_folder(where: str, path: Path) -> list[Fault]:
    """Return the fault of a folder that a config file names and that is not there."""
    try:
        there = path.is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        there = False
    return [] if there else [Fault(where, f"there is no folder {path}.", _RELATIVE)]


def missing_input_fault(path: Path) -> Fault:
    """Return a file that a person named and that is not there; its neighbours of the same kind are compared by name.

    Where something else has this name, a folder for instance, that is said.
    """
    problem = ""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        problem = "is a folder, not a file." if is_folder else "is a pipe or a device, not a file."
    except OSError as error:
        known = {errno.ELOOP: "is a loop of links.", errno.ENAMETOOLONG: "is longer than a path can be."}
        problem = known.get(error.errno or 0, "")
    except ValueError:  # a name that no file can have
        pass
    if problem:
        return Fault(str(path), problem, "Name a file.")
    beside = path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() else ()
    hint = did_you_mean(path.stem, (each.stem for each in beside))
    return Fault(str(path), "there is no such file.", hint.replace('"?', f'{path.suffix}"?'))


def output_file_faults(destination: Path) -> list[Fault]:
    """Return why ``--out`` cannot be a new file there; empty where it can."""
    if os.path.lexists(destination):  # a link to nowhere too
        return [Fault(f"--out {destination}", "exists, and nothing is written over.", "Name another file.")]
    if not destination.parent.is_dir():
        return [Fault(f"--out {destination}", "its folder does not exist.", "Make it first.")]
    return []


def existing_output_faults(destination: Path) -> list[Fault]:
    """Return why ``--out`` cannot be a new file there, whose folder may be made; empty where it can."""
    problem, remedy = f"{destination} is there already.", "Name another file, or remove it."
    return [Fault("--out", problem, remedy)] if os.path.lexists(destination) else []


def output_folder_faults(folder: Path, remedy: str = "Name another folder.") -> list[Fault]:
    """Return why ``--out`` cannot be a new folder there; empty where it can.

    Args:
        remedy: Said of a folder that holds something.
    """
    if folder.is_file():
        return [Fault(f"--out {folder}", "is a file, and nothing is written over.", "Name a new folder.")]
    try:
        holds_something = folder.exists() and any(folder.iterdir())
    except OSError as error:
        return [Fault(f"--out {folder}", f"cannot be looked into: {error.strerror}.", "Name another folder.")]
    return [Fault(f"--out {folder}", "is not empty, and nothing is written over.", remedy)] if holds_something else []


Parts = Sequence[bytes | memoryview]
"""A file's content in pieces, so that none of them has to be copied into one."""


def write_atomically(path: Path, content: bytes | Parts, *, durable: bool = True, private: bool = False) -> None:
    """Write beside the file, flush to disk where ``durable``, and rename into place; or leave nothing beside it.

    Args:
        private: Only its owner may read it, at no instant anybody else.
    """
    block_if_stopping()  # nobody would remove what is begun now and is half done when the program ends
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_path(path)
    remove = partial(temporary.unlink, missing_ok=True)
    with removed_if_stopped(remove):  # from before it is there until it has its own name
        try:
            descriptor = _new_file(temporary, 0o600 if private else 0o666)
            with naming_file(path), os.fdopen(descriptor, "wb") as file:
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


def _new_file(path: Path, mode: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    except FileNotFoundError:  # its folder is there: so answers /proc
        raise PermissionError(errno.EACCES, "no file can be made there", str(path.parent)) from None


@contextlib.contextmanager
def atomic_outputs(*made: Path) -> Iterator[None]:
    """Within it these files and folders are made; if that fails or is stopped, those that were not there are removed.

    An error that names no file is told to be of the first.
    """
    new = [path for path in made if not path.exists()]

    def remove() -> None:
        for path in new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    try:
        with naming_file(made[0]), removed_if_stopped(remove):
            yield
    except BaseException:
        remove()
        raise


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file; one that is not there is not locked."""
    with contextlib.suppress(FileNotFoundError), path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


PRIVATE = 0o700


def private_folder(path: Path) -> bool:
    """Make a folder that only its owner can look into; take the others' rights away where it is there already.

    Returns:
        Whether others had rights to it. They keep them where this account is not the folder's owner.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(PRIVATE)
    open_to_others = bool(path.stat().st_mode & 0o077)
    if open_to_others:
        try:
            path.chmod(PRIVATE)
        except PermissionError:
            return False
    return open_to_others


def partial_path(path: Path) -> Path:
    """Return the name under which this thread writes a file until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def remove_partial_files(folder: Path, *, below: bool = False) -> None:
    """Remove what processes that were killed while they wrote left in a folder; for a process that begins.

    Args:
        below: In the folders below it too.
    """
    for path in folder.rglob(".*.part") if below else folder.glob(".*.part"):
        writer = re.search(r"\.(\d+)-\d+\.part$", path.name)
        gone = writer and (int(writer[1]) == os.getpid() or not Path(f"/proc/{writer[1]}").exists())
        if gone and not path.is_dir():
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Have the names of a folder's files on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
