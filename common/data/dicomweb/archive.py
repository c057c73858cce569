"""A hospital's PACS as a place of pictures: where each one lies, its bytes, and what is kept of both on this machine.

A file in the cache has its name when it is whole, so a program that is killed leaves nothing half. The folder is its
owner's alone.
"""

import base64
import json
import os
import re
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from common.data.base.spec import DicomwebSpec
from common.data.dicomweb.client import DicomwebClient, ResponseUnusable, Server, ServerFailed
from common.data.dicomweb.search import SEARCHES, UID, Instance
from common.data.images.headers import dataset_of, tags_of
from common.errors import BadInput, Fault, stop_on
from common.system.files import is_disk_full, private_folder, remove_partial_files, write_atomically

_AS_STORED = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_AT_ONCE = 200
"""Searches whose results are written down together: a kill loses no more."""
MOST_IMAGES = 2_000_000
"""Images of one table: more is a mistake, or meant to fill the memory."""
MARK = "CACHEDIR.TAG"
"""Tells programs that back up files, and ourselves, that the folder may be emptied (bford.info/cachedir)."""
_MARK_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Images of a PACS, kept by Polyclinic. May be removed.\n"
_PLACES = "places.jsonl"
_COUNTED_ANEW = 100
"""Files written, after which the folder is looked at again: another program may use it."""
_LEFT = 0.9
"""Part of the limit that is kept when files have to go, so that not each new file makes another one go."""
_LONGEST_SECRET = 16384


@dataclass(frozen=True)
class ArchiveKey:
    """What a row of the table names: ``kind`` is "study", "accession" or "instance"."""

    kind: str
    value: str

    @property
    def key(self) -> str:
        """The key as one text."""
        return f"{self.kind}:{self.value}"


class Cache:
    """Images as files and where they lie as lines, in one folder; methods may be called from several threads."""

    def __init__(self, folder: Path, largest: int) -> None:
        self.folder, self.largest = folder, largest
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
            if self.folder.is_dir() and not (self.folder / MARK).is_file() and any(self.folder.iterdir()):
                problem = f"{self.folder} holds files that are not this cache's, which removes files."
                raise BadInput([Fault("data.cache", problem, "Name a folder of its own, or one that does not exist.")])
            private_folder(self.folder)
            remove_partial_files(self.folder)
            if not (self.folder / MARK).is_file():
                write_atomically(self.folder / MARK, _MARK_TEXT.encode(), private=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no folder can have this name"
            raise BadInput([Fault("data.cache", f"{self.folder} cannot be used: {reason}.")]) from None
        self._size = sum(size for _, size, _ in self._files())

    def file(self, uid: str) -> Path:
        """Return where an image lies, or would."""
        assert UID.fullmatch(uid)
        return self.folder / f"{uid}.dcm"

    def read(self, uid: str) -> bytes | None:
        """Return an image that is kept; None where it is not, or no longer whole."""
        file = self.file(uid)
        try:
            data = file.read_bytes()
            os.utime(file)  # used just now
        except OSError:
            return None
        return data if data[128:132] == b"DICM" else None

    def keep(self, uid: str, data: bytes) -> None:
        """Write an image; the least recently used go first where there is no room within the limit.

        Raises:
            OSError: If the disk has no room.
        """
        if len(data) > self.largest:
            return
        with self._changing:
            self._written += 1
            if self._size + len(data) > self.largest or self._written % _COUNTED_ANEW == 0:
                self._make_room(len(data))
            write_atomically(self.file(uid), data, private=True)
            self._size += len(data)

    def _make_room(self, needed: int) -> None:
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        if self._size + needed <= self.largest:
            return
        for _, size, file in files:
            if self._size + needed <= _LEFT * self.largest:
                break
            file.unlink(missing_ok=True)
            self._size -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return last use, size and path of all images."""
        files = []
        for file in self.folder.glob("*.dcm"):
            with suppress(FileNotFoundError):  # another program may remove files as well
                state = file.stat()
                files.append((state.st_mtime, state.st_size, file))
        return files

    def places(self) -> dict[str, tuple[Instance, ...]]:
        """Return the results of searches that :meth:`keep_places` wrote down; lines that are not whole are left out."""
        places = dict[str, tuple[Instance, ...]]()
        with suppress(OSError):
            for line in (self.folder / _PLACES).read_bytes().splitlines():
                with suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
                    entry = json.loads(line)
                    images = tuple(map(_instance, entry["images"]))
                    if isinstance(entry["key"], str):
                        places[entry["key"]] = images
        return places

    def keep_places(self, results: Mapping[str, tuple[Instance, ...]]) -> None:
        """Write down where images lie, by the key of the search."""
        lines = [json.dumps({"key": key, "images": list(map(asdict, images))}) for key, images in results.items()]
        descriptor = os.open(self.folder / _PLACES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # A line that a kill has cut off ends here, and one that is cut off now ends at the next begin.
            os.write(descriptor, ("\n" + "\n".join(lines) + "\n").encode())
        finally:
            os.close(descriptor)


def _instance(values: Any) -> Instance:
    """Return an instance from its fields in a file.

    Raises:
        TypeError, ValueError: If they are damaged.
    """
    instance = Instance(**values)
    if not all(isinstance(value, str) for value in values.values()):
        raise TypeError("a field is no text")
    if not all(map(UID.fullmatch, (instance.study, instance.series, instance.instance))):
        raise ValueError("a UID is of other characters")
    return instance


class Archive:
    """Gives pictures as :class:`common.data.tables.labels.Reader` says."""

    def __init__(self, client: DicomwebClient, cache: Cache, largest: int) -> None:
        self.client, self.cache, self.largest = client, cache, largest
        self.places = dict[str, Instance]()
        self._disk: Fault | None = None

    def opened(self) -> AbstractContextManager[object]:
        """Return the connection, which is open while pictures are read."""
        return self.client

    def faults(self) -> list[Fault]:
        """Return why no picture could be read any more: the disk, the server."""
        failed = self.client.failed
        return [fault for fault in (self._disk, failed.fault if failed else None) if fault]

    def find(self, keys: Iterable[ArchiveKey]) -> dict[ArchiveKey, tuple[Instance, ...]]:
        """Find the images that these keys name; what the cache knows is not asked for again.

        Raises:
            BadInput: If the server gives no usable answer.
        """
        places, wanted = self.cache.places(), list(dict.fromkeys(keys))
        new = [key for key in wanted if key.key not in places]
        for start in range(0, len(new), _AT_ONCE):
            results = self._searched(new[start : start + _AT_ONCE])
            self.cache.keep_places(results)
            places |= results
            if sum(map(len, places.values())) > MOST_IMAGES:
                problem = f"{self.client.server.name} names more than {MOST_IMAGES:,} images for the table."
                raise BadInput([Fault("data.url", problem, "Name fewer studies, or keep fewer data.modalities.")])
        images = {key: places.get(key.key, ()) for key in wanted}
        self.places |= {image.instance: image for of_key in images.values() for image in of_key}
        return images

    def _searched(self, keys: Sequence[ArchiveKey]) -> dict[str, tuple[Instance, ...]]:
        """Return the results of searches that have one; what is not there yet may arrive, and is asked for again.

        Raises:
            BadInput: With the first answers that cannot be used.
        """
        refused = list[Fault]()

        def search(key: ArchiveKey) -> tuple[Instance, ...]:
            try:
                return tuple(SEARCHES[key.kind](self.client, key.value))
            except ResponseUnusable as reason:
                refused.append(Fault("data.url", f'a search for "{key.value}": {reason}.'))
            except ServerFailed:  # one fault of all, below
                pass
            return ()

        with ThreadPoolExecutor(self.client.server.connections) as pool, self.client:
            results = dict(zip((key.key for key in keys), pool.map(search, keys), strict=True))
        stop_on(self.faults())
        stop_on(refused[:5])
        return {key: images for key, images in results.items() if images}

    def read(self, file: Path) -> bytes | Path:
        """Return an image from the cache, or from the server and into the cache.

        Raises:
            ResponseUnusable: If the server does not give this one.
            ServerFailed: If it gives no more; or OSError if the disk has no room.
        """
        uid = file.stem
        if (kept := self.cache.read(uid)) is not None:
            return kept
        response = self.client.get(self.places[uid].path, _AS_STORED, self.largest)
        data = instance_in(response.content, response.media_type)
        _refuse_another_image(data, uid)
        try:
            self.cache.keep(uid, data)
        except OSError as error:
            reason = "the disk is full" if is_disk_full(error) else error.strerror or "it cannot be written to"
            remedy = "Make room, set a smaller data.cache_gb, or name a folder on another disk."
            self._disk = Fault("data.cache", f"{self.cache.folder}: {reason}.", remedy)
            raise
        return data


def instance_in(content: bytearray, media_type: str) -> bytes:
    """Return the one part of a ``multipart/related`` answer (RFC 2046 and 2387), as WADO-RS sends an instance.

    Raises:
        ResponseUnusable: If it is of another kind, cut off, or not of one part.
    """
    header = Message()
    header["content-type"] = media_type.replace("\n", " ").replace("\r", " ")
    if header.get_content_type() == "application/dicom":  # some servers leave the envelope out
        return bytes(content)
    if header.get_content_type() != "multipart/related":
        problem = f"the answer is {_shown(media_type)}, where multipart/related with a DICOM file was expected"
        raise ResponseUnusable(problem)
    boundary = header.get_boundary() or ""
    if not 0 < len(boundary) <= 200 or not boundary.isascii():
        raise ResponseUnusable("the answer does not say where its parts end (boundary)")
    mark, line_mark = f"--{boundary}".encode(), f"\r\n--{boundary}".encode()
    start = 0 if content.startswith(mark) else content.find(line_mark, 0, 8192) + 2
    head_end = content.find(b"\r\n\r\n", start, start + 8192)
    after = content[start + len(mark) :][:2] if content.startswith(mark, start) else b"--"
    if head_end < 0 or after == b"--":
        raise ResponseUnusable("the answer holds no part")
    head = content[start + len(mark) : head_end].decode("ascii", errors="replace")
    kind = re.search(r"^content-type:\s*(.*?)\s*$", head, re.IGNORECASE | re.MULTILINE)
    if kind and not kind[1].lower().startswith("application/dicom"):
        raise ResponseUnusable(f"the part is {_shown(kind[1])}, not a DICOM file")
    begin, end = head_end + 4, content.rfind(line_mark)
    if end < begin or not content.startswith(line_mark + b"--", end):
        raise ResponseUnusable("the answer is cut off")
    if content.find(line_mark, begin, end) >= 0:
        raise ResponseUnusable("the answer holds several parts, where one image was asked for")
    return bytes(memoryview(content)[begin:end])


def _shown(media_type: str) -> str:
    """Return a content type of somebody else, short and printable."""
    text = "".join(letter for letter in media_type.strip() if letter.isprintable())[:60]
    return f'"{text}"' if text else "of no kind"


def _refuse_another_image(data: bytes, uid: str) -> None:
    """Raise :class:`ResponseUnusable` if the file is of another image than was asked for, or is no DICOM file."""
    try:
        head = dataset_of(data, tags_of("SOPInstanceUID"))
        actual = str(head.get("SOPInstanceUID", "") or head.file_meta.get("MediaStorageSOPInstanceUID", ""))
    except Exception:  # pydicom raises many kinds on damaged files
        raise ResponseUnusable("what the server sent is no DICOM file, or a damaged one") from None
    if actual != uid:
        raise ResponseUnusable("the server sent another image than the one that was asked for")


def open_archive(spec: DicomwebSpec, base: Path) -> Archive:
    """Read the secret and the certificates, and open the cache; nothing is asked of the server yet.

    Raises:
        BadInput: With every fault of these.
    """
    faults, context, header = list[Fault](), None, ""
    cache = Cache(base / spec.cache, int(spec.cache_gb * 1e9))
    try:
        context = _tls_context(spec, base)
    except BadInput as bad:
        faults += bad.faults
    try:
        header = _authorization(spec, base)
    except BadInput as bad:
        faults += bad.faults
    try:
        cache.open()
    except BadInput as bad:
        faults += bad.faults
    stop_on(faults)
    server = Server(spec.url, context, header, spec.timeout_s, spec.connections)
    return Archive(DicomwebClient(server), cache, spec.largest_mb << 20)


def _tls_context(spec: DicomwebSpec, base: Path) -> ssl.SSLContext | None:
    """Return how the server's certificate is checked; there is no way to leave the check out.

    Raises:
        BadInput: If the file of certificates cannot be used.
    """
    if spec.url.startswith("http:"):
        if spec.ca_file:
            raise BadInput([Fault("data.ca_file", "needs an address that begins with https.")])
        return None
    if spec.ca_file is None:
        return ssl.create_default_context()
    path = base / spec.ca_file
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ValueError) as error:
        reason = "holds no certificate (PEM)" if isinstance(error, ssl.SSLError) else "cannot be read"
        remedy = "Paths are relative to the folder of this file."
        raise BadInput([Fault("data.ca_file", f"{path} {reason}.", remedy)]) from None


def _authorization(spec: DicomwebSpec, base: Path) -> str:
    """Return the value of the header ``Authorization``, empty where none is sent.

    Raises:
        BadInput: If there is no such file or variable, others may read the file, or it holds no secret.
    """
    if spec.authentication is None:
        return ""
    where = "data.secret_env" if spec.secret_env else "data.secret_file"
    if spec.secret_env:
        secret = os.environ.get(spec.secret_env, "").strip()
        if not secret:
            problem = f"the environment variable {spec.secret_env} is not set, or is empty."
            raise BadInput([Fault(where, problem, "Set it where this program is started.")])
    else:
        secret = _secret_in(base / str(spec.secret_file)).strip()
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", secret):
        # Nothing of it is repeated in the message.
        raise BadInput([Fault(where, "must hold one line of letters, digits and signs (ASCII).")])
    if spec.authentication == "bearer":
        return f"Bearer {secret}"
    if ":" not in secret:
        raise BadInput([Fault(where, 'must hold NAME:PASSWORD, because data.authentication is "basic".')])
    return f"Basic {base64.b64encode(secret.encode()).decode()}"


def _secret_in(path: Path) -> str:
    """Read a file that only its owner may read.

    Raises:
        BadInput: If it cannot be read, others may read it, or it is too large.
    """
    where = "data.secret_file"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = b"" if mode & 0o077 else file.read(_LONGEST_SECRET + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        problem, remedy = f"{path} cannot be read: {reason}.", "Paths are relative to the folder of this file."
        raise BadInput([Fault(where, problem, remedy)]) from None
    if mode & 0o077:
        problem = f"{path} may be read by others (mode {mode & 0o777:o})."
        raise BadInput([Fault(where, problem, f"Run: chmod 600 {path.name}")])
    if len(content) > _LONGEST_SECRET:
        raise BadInput([Fault(where, f"{path} is too large for a secret.")])
    return content.decode("ascii", errors="replace")
