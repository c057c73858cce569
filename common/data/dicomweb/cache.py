"""What a PACS has answered, kept on this machine within a limit: images as files, and where they lie as lines.

A file has its name when it is whole, so a program that is killed leaves nothing half. The folder is its owner's alone.
"""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from common.data.dicomweb.answers import UID, Instance, instance_of
from common.errors import BadInput, Fault
from common.system.files import private_folder, remove_parts, write_atomically

MARK = "CACHEDIR.TAG"
"""Tells programs that back up files, and ourselves, that the folder may be emptied (bford.info/cachedir)."""
_MARK_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Images of a PACS, kept by Polyclinic. May be removed.\n"
_PLACES = "places.jsonl"
_COUNTED_ANEW = 100
"""Files written, after which the folder is looked at again: another program may use it."""
_LEFT = 0.9
"""Of the limit, when files had to go: so that not each new file makes another one go."""


class Cache:
    """One folder; methods may be called from several threads."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._changing = threading.Lock()
        self._size, self._written = 0, 0

    def open(self) -> None:
        """Make the folder, or look at what is there.

        Raises:
            BadInput: If it holds files of somebody else, or cannot be written to.
        """
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise BadInput([Fault("data.cache", f"{self.folder} is no folder.", "Name one that does not exist.")])
            others = self.folder.is_dir() and not (self.folder / MARK).is_file() and any(self.folder.iterdir())
            if others:
                problem = f"{self.folder} holds files that are not this cache's, which removes files."
                raise BadInput([Fault("data.cache", problem, "Name a folder of its own, or one that does not exist.")])
            private_folder(self.folder)
            remove_parts(self.folder)
            if not (self.folder / MARK).is_file():
                write_atomically(self.folder / MARK, _MARK_TEXT.encode(), private=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no folder can have this name"
            raise BadInput([Fault("data.cache", f"{self.folder} cannot be used: {reason}.")]) from None
        self._size = sum(size for _, size, _ in self._files())

    def file(self, uid: str) -> Path:
        """Where an image lies, or would."""
        assert UID.fullmatch(uid)
        return self.folder / f"{uid}.dcm"

    def read(self, uid: str) -> bytes | None:
        """An image that is kept; None where it is not, or no longer whole."""
        file = self.file(uid)
        try:
            data = file.read_bytes()
            os.utime(file)  # used just now
        except OSError:
            return None
        return data if data[128:132] == b"DICM" else None

    def keep(self, uid: str, data: bytes) -> None:
        """Write an image, after others have gone where there is no room within the limit.

        Raises:
            OSError: If the disk has no room.
        """
        if len(data) > self.most:
            return
        with self._changing:
            self._written += 1
            if self._size + len(data) > self.most or self._written % _COUNTED_ANEW == 0:
                self._make_room(len(data))
            write_atomically(self.file(uid), data, private=True)
            self._size += len(data)

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        if self._size + wanted <= self.most:
            return
        for _, size, file in files:
            if self._size + wanted <= _LEFT * self.most:
                break
            file.unlink(missing_ok=True)
            self._size -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """Last use, size and path of all images."""
        found = []
        for file in self.folder.glob("*.dcm"):
            with suppress(FileNotFoundError):  # another program may remove files as well
                state = file.stat()
                found.append((state.st_mtime, state.st_size, file))
        return found

    def places(self) -> dict[str, tuple[Instance, ...]]:
        """What was found out before by :meth:`keep_places`; lines that are not whole are left out."""
        known = dict[str, tuple[Instance, ...]]()
        try:
            lines = (self.folder / _PLACES).read_bytes().splitlines()
        except OSError:
            return known
        for line in lines:
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                said = json.loads(line)
                images = tuple(filter(None, map(instance_of, said["images"])))
                if isinstance(said["key"], str) and len(images) == len(said["images"]):
                    known[said["key"]] = images
        return known

    def keep_places(self, found: Mapping[str, tuple[Instance, ...]]) -> None:
        """Add where images lie, by what they were asked for."""
        lines = [json.dumps({"key": key, "images": [one.as_json() for one in images]}) for key, images in found.items()]
        descriptor = os.open(self.folder / _PLACES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # A line that a kill has cut off ends here, and one that is cut off now ends at the next begin.
            os.write(descriptor, ("\n" + "\n".join(lines) + "\n").encode())
        finally:
            os.close(descriptor)
