"""Checks of paths from a user, atomic writes of files, file locks, and messages about full disks."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, overload

from polyclinic.common.errors import BadInput, Fault, suggest_nearest_name
from polyclinic.common.examples import suggest_examples
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.common.system.stopping import block_thread_if_stopping, remove_output_if_stopped

_FULL_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, a used-up quota, or a file at its size limit."""
UNWRITABLE_PLACE_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
"""Error numbers of a place where this account cannot create files."""
UNWRITABLE_PLACE_ERRORS |= {errno.ELOOP, errno.ENAMETOOLONG}
"""Error numbers of a place in which this account can make no file."""
_NOT_A_FILE_REASON = "it is a pipe or a device, not a file"
_RELATIVE_PATH_REMEDY = "Paths are relative to the folder of this file."


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if an error means that the disk is full."""
    return isinstance(error, OSError) and error.errno in _FULL_DISK_ERRORS


def make_disk_full_message(error: BaseException) -> str:
    """Return a message for the user if an error means that the disk is full; empty for any other error."""
    if not isinstance(error, OSError) or not is_disk_full(error):
        return ""
    path = error.filename2 or error.filename  # the second file of a copy is the written one
    where = f" of {path}" if path else ", where files are written"
    return f"there is no room left on the disk{where}: free some, and try again."


@contextlib.contextmanager
def add_file_name_to_errors(path: Path) -> Iterator[None]:
    """Add ``path`` as the file name to an ``OSError`` without a file name that is raised inside the ``with`` block."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_file(path: Path) -> bool:
    """Return True if the path is a file; False also for an invalid path, for instance one that is too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def find_missing_file_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if the file that the key ``where`` of a config file names is missing; else an empty list."""
    return _find_missing_path_faults(where, path, "file")


def find_missing_folder_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if the folder that the key ``where`` of a config file names is missing; else an empty list."""
    return _find_missing_path_faults(where, path, "folder")


def _find_missing_path_faults(where: str, path: Path, kind: str) -> list[Fault]:
    try:
        there = path.is_file() if kind == "file" else path.is_dir()
    except PermissionError:
        problem = f"{path} cannot be reached: permission denied."
        return [Fault(where, problem, "Give the account that runs this program the right to enter its folders.")]
    except (OSError, ValueError):  # the name is not valid for a file
        there = False
    if there:
        return []
    if re.search(r"[\t\n\r\f\b]", str(path)):
        problem = f"there is no {kind} {json.dumps(str(path))[1:-1]}: \\n, \\t and others are signs of their own."
        return [Fault(where, problem, "Write the path in 'single quotes', or with / for \\.")]
    return [Fault(where, f"there is no {kind} {path}.", _RELATIVE_PATH_REMEDY)]


def make_missing_input_fault(path: Path) -> Fault:
    """Return the fault of an input path that is not a file: another kind of path, or missing with a similar name."""
    problem = ""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        problem = "is a folder, not a file." if is_folder else "is a pipe or a device, not a file."
    except OSError as error:
        problems = {errno.ELOOP: "is a loop of links.", errno.ENAMETOOLONG: "is longer than a path can be."}
        problem = problems.get(error.errno or 0, "")
    except ValueError:  # the name is not valid for a file
        pass
    if problem:
        return Fault(str(path), problem, "Name a file.")
    if remedy := suggest_examples(path):
        return Fault(str(path), "there is no such file.", remedy)
    beside = path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() else ()
    hint = suggest_nearest_name(path.stem, (each.stem for each in beside))
    return Fault(str(path), "there is no such file.", hint.replace('"?', f'{path.suffix}"?'))


def find_output_file_faults(destination: Path) -> list[Fault]:
    """Return the faults of an ``--out`` path that must be a new file in an existing folder; empty if it is valid."""
    if os.path.lexists(destination):  # True for a broken link, too
        return [Fault(f"--out {destination}", "exists, and nothing is written over.", "Name another file.")]
    if not destination.parent.is_dir():
        return [Fault(f"--out {destination}", "its folder does not exist.", "Make it first.")]
    return []


def find_existing_output_faults(destination: Path) -> list[Fault]:
    """Return a fault if an ``--out`` path, which must be a new file or folder, already exists; else an empty list."""
    problem = f"{destination} is there already."
    remedy = "Name another file, or remove it."
    return [Fault("--out", problem, remedy)] if os.path.lexists(destination) else []


def find_output_folder_faults(folder: Path, remedy: str = "Name another folder.") -> list[Fault]:
    """Return a fault if an ``--out`` path is not a new or empty folder; ``remedy`` is the remedy for a folder with
    files.
    """
    if folder.is_file():
        return [Fault(f"--out {folder}", "is a file, and nothing is written over.", "Name a new folder.")]
    try:
        holds_something = folder.exists() and any(folder.iterdir())
    except OSError as error:
        return [Fault(f"--out {folder}", f"cannot be looked into: {error.strerror}.", "Name another folder.")]
    return [Fault(f"--out {folder}", "is not empty, and nothing is written over.", remedy)] if holds_something else []


def open_own_descriptor(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file that a program of ours writes, without following a link in its place; return the descriptor.

    Users pass experiments, run folders and caches to one another. A link in such a folder could lead to another file of
    the user, to which we would append, or which we would empty. Links to *folders* are followed, because people put
    ``runs/`` and caches on another disk, and our programs choose the file names in them.

    Args:
        path: The file.
        flags: As for ``os.open``.
        mode: The mode of a new file, as for ``os.open``.

    Raises:
        OSError: With ``errno.ELOOP`` if the path is a link, or ``errno.EEXIST`` if it is a pipe or a device.
    """
    try:
        # O_NONBLOCK does not matter for a file; without it, a pipe without a reader would block the program.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link to another file; remove it", str(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.EEXIST, _NOT_A_FILE_REASON, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, _NOT_A_FILE_REASON, str(path))
    return descriptor


@overload
def open_own_file(path: Path, mode: Literal["a", "w"]) -> IO[str]: ...


@overload
def open_own_file(path: Path, mode: Literal["ab", "ab+", "rb+", "wb"], *, buffering: int = -1) -> IO[bytes]: ...


def open_own_file(path: Path, mode: str, *, buffering: int = -1) -> IO[Any]:
    """Open a file to append, lock or change it, without following a link in its place (:func:`open_own_descriptor`).

    Args:
        path: The file.
        mode: As for ``open``; text is UTF-8.
        buffering: As for ``open``; 0 for a binary file without a buffer.
    """

    def opener(name: str, flags: int) -> int:
        return open_own_descriptor(Path(name), flags)

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering, encoding, opener=opener)


def open_input_file(path: Path) -> BufferedReader:
    """Open a file for reading that a user or another file names; a link to a file is followed.

    Raises:
        OSError: If it cannot be opened, or is a pipe or a device, on which reading could last forever.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)  # otherwise a pipe without a writer blocks the program
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_A_FILE_REASON, name)

    return open(path, "rb", opener=opener)


ContentParts = Sequence[bytes | memoryview]
"""A file's content in several parts, which then need not be copied into one."""


def write_atomically(path: Path, content: bytes | ContentParts, *, durable: bool = True, private: bool = False) -> None:
    """Write a file so that readers see all of its content or nothing: write a temporary file, then rename it.

    A link at ``path`` is replaced; the file to which it leads does not change.

    Args:
        path: The file.
        content: Its content.
        durable: True to flush the file and its folder to the disk before returning.
        private: True if only the owner may read the file, even while it is written.
    """
    block_thread_if_stopping()  # otherwise the program's end would leave an incomplete file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = make_temporary_path(path)
    remove = partial(temporary.unlink, missing_ok=True)
    with remove_output_if_stopped(remove):
        try:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                descriptor = open_own_descriptor(temporary, flags, 0o600 if private else 0o666)
            except FileNotFoundError:  # the folder exists; /proc raises this error
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
    """Remove the new files and folders ``outputs`` if the ``with`` block that writes them fails or is stopped.

    An ``OSError`` without a file name gets the first output's name.
    """
    new = [path for path in outputs if not path.exists()]

    def remove() -> None:
        for path in new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    try:
        with add_file_name_to_errors(outputs[0]), remove_output_if_stopped(remove):
            yield
    except BaseException:
        remove()
        raise


def lock_file(file: IO[Any] | int, fault: Fault, *, shared: bool = False) -> None:
    """Lock an open file or folder against other processes, until it is closed.

    Args:
        file: The open file or its descriptor.
        fault: The fault to raise.
        shared: True to exclude only processes that do not share the lock.

    Raises:
        BadInput: With ``fault``, if another process has the lock.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput([fault]) from None


def is_file_locked(path: Path) -> bool:
    """Return True if any process has locked the file; False also for a missing file."""
    with contextlib.suppress(FileNotFoundError), path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_given_by_root(status: os.stat_result) -> bool:
    """Return True if root owns a file, and this account is not root but in the file's group."""
    return status.st_uid == 0 and os.geteuid() != 0 and status.st_gid in (os.getegid(), *os.getgroups())


def is_exposed_to_others(status: os.stat_result) -> bool:
    """Return True if an account other than this one and root may read or change a file with a secret.

    If root owns the file, a group of this account may read it, unless this account is root. Root can pass a secret to
    an account in this way, as Kubernetes does (mode 440 and the pod's fsGroup), and the account cannot change the file.
    A file that this account owns must not be readable for a group.
    """
    return bool(status.st_mode & (0o037 if _is_given_by_root(status) else 0o077))


def make_exposed_file_remedy(path: Path, status: os.stat_result) -> str:
    """Return the command after which only this account can read a file with a secret."""
    if _is_given_by_root(status):
        return f"Run as root: chmod 440 {quote_for_shell(path)}"
    return f"Run: chmod 600 {quote_for_shell(path)}"


OWNER_ONLY_MODE = 0o700


@contextlib.contextmanager
def write_for_owner_only() -> Iterator[None]:
    """Make files and folders that this process creates inside the ``with`` block readable only for this account."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private_folder(path: Path) -> bool:
    """Create a folder that only its owner can open, or remove other users' permissions from an existing folder.

    Returns:
        True if permissions were removed; only the owner's account can remove them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(OWNER_ONLY_MODE)
    if not path.stat().st_mode & 0o077:
        return False
    try:
        path.chmod(OWNER_ONLY_MODE)
    except PermissionError:
        return False
    return True


def make_temporary_path(path: Path) -> Path:
    """Return the temporary path at which this thread writes a file before it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def remove_temporary_files(folder: Path, *, below: bool = False) -> None:
    """Remove temporary files of killed processes from a folder; with ``below``, from its subfolders, too."""
    for path in folder.rglob(".*.part") if below else folder.glob(".*.part"):
        writer = re.search(r"\.(\d+)-\d+\.part$", path.name)
        is_abandoned = writer and (int(writer[1]) == os.getpid() or not Path(f"/proc/{writer[1]}").exists())
        if is_abandoned and not path.is_dir():
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of file names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
