"""Contents of messages as files named by their SHA-256, shared by the SuperLink and the coordinator's run.

Both stand on one machine under one user; what one of them has written the other reads without sending it.
"""

import contextlib
import hashlib
import mmap
import os
import re
from collections.abc import Collection
from pathlib import Path

from common.system.files import partial_path


def is_name(object_id: str) -> bool:
    """Whether this is a SHA-256 in hexadecimal digits; names come from hospitals, and no other may become a path."""
    return re.fullmatch("[0-9a-f]{64}", object_id) is not None


class ObjectFiles:
    """One folder; what is no name is not there, cannot be written, and need not be removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def write(self, object_id: str, content: bytes | memoryview) -> None:
        """Write under a name that others see only when it is whole.

        Raises:
            ValueError: If it is no SHA-256.
        """
        if not is_name(object_id):
            raise ValueError(f"{object_id[:80]!r} does not name an object")
        path = self._folder / object_id
        if path.exists():
            return
        part = partial_path(path)
        try:
            part.write_bytes(content)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def read(self, object_id: str) -> bytes | None:
        """The content, or None where it is not there."""
        content = self.view(object_id)
        return None if content is None else bytes(content)

    def view(self, object_id: str) -> memoryview | None:
        """The content where it lies, or None where it is not there; stays good when the file is removed."""
        if not is_name(object_id):
            return None
        try:
            with (self._folder / object_id).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"")
        except FileNotFoundError:
            return None

    def has(self, object_id: str) -> bool:
        return is_name(object_id) and (self._folder / object_id).exists()

    def size(self, object_id: str) -> int:
        """Bytes of the content; 0 where it is not there."""
        try:
            return (self._folder / object_id).stat().st_size if is_name(object_id) else 0
        except FileNotFoundError:
            return 0

    def remove(self, object_id: str) -> None:
        if is_name(object_id):
            (self._folder / object_id).unlink(missing_ok=True)

    def names(self) -> set[str]:
        """All that are whole."""
        return {path.name for path in self._folder.iterdir() if not path.name.startswith(".")}

    def clear(self) -> None:
        for path in list(self._folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def keep_only(self, known: Collection[str]) -> None:
        """Remove files that nobody asks for, that are not whole, or whose content is not what the name says."""
        for path in list(self._folder.iterdir()):
            if path.name not in known or hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                path.unlink()
