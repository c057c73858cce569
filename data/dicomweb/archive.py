"""Find and download the images of a hospital's PACS, with a cache of images and search results on this machine.

An image is written to the cache under a temporary name and renamed when complete, so that an interrupted program leaves
no partial image. Only the user who owns the folder can read it.
"""

import os
import re
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from pydantic import BaseModel, ValidationError

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.hosts import HostSecret, find_host_secret, normalize_host, refuse_use_without_permission
from polyclinic.common.system.files import (
    is_disk_full,
    make_private_folder,
    open_input_file,
    open_own_descriptor,
    remove_temporary_files,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.data.base.spec import DicomwebDatasetSpec, make_search_use
from polyclinic.data.dicomweb.client import (
    DicomwebClient,
    PacsConnectionSettings,
    PacsServerFailure,
    UnusablePacsResponse,
)
from polyclinic.data.dicomweb.search import SEARCHES, UID_PATTERN, PacsImageLocation
from polyclinic.data.images.file_kinds import is_dicom_file
from polyclinic.data.images.headers import convert_dicom_keywords_to_tags, read_dicom_elements
from polyclinic.data.images.pixel_cache import CACHE_MARK_FILE, CACHE_MARK_TEXT
from polyclinic.data.images.store import FileIdentity

_ANY_TRANSFER_SYNTAX = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_SEARCHES_PER_BATCH = 200
"""Number of searches after which results are written to the cache, so that a killed program loses at most these."""
_SEARCH_RESULTS_FILE = "places.jsonl"
_FILES_BETWEEN_SIZE_CHECKS = 100
"""Number of written files after which the folder's size is measured again, because other programs may use it."""
_FILL_SHARE_AFTER_CLEANUP = 0.9
"""Fraction of the size limit to which a full cache is reduced, so that not every new file removes another one."""


@dataclass(frozen=True)
class PacsImageKey:
    """The identifier with which a table row names an image or study in the PACS.

    Attributes:
        kind: "study", "accession" or "instance".
        value: The UID or AccessionNumber.
    """

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


class PacsSearchResult(BaseModel):
    """The images that one search returned; the cache stores each result as a line of JSON.

    Attributes:
        key: The :class:`PacsImageKey` of the search as text.
    """

    key: str
    images: tuple[PacsImageLocation, ...]


class PacsImageCache:
    """A folder with downloaded image files and with search results, which contain the UIDs of images; thread-safe.

    Attributes:
        largest: Maximum size of the cache in bytes.
    """

    def __init__(self, folder: Path, largest: int) -> None:
        self.folder = folder
        self.largest = largest
        self._lock = threading.Lock()
        self._size = 0  # bytes
        self._written_files = 0

    def open_cache_folder(self) -> None:
        """Create the cache folder, or open an existing one.

        Raises:
            BadInput: If the folder holds files that do not belong to a cache, or cannot be written to.
        """
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise BadInput([Fault("data.cache", f"{self.folder} is no folder.", "Name one that does not exist.")])
            if self.folder.is_dir() and not (self.folder / CACHE_MARK_FILE).is_file() and any(self.folder.iterdir()):
                problem = f"{self.folder} holds files that are not this cache's, which removes files."
                raise BadInput([Fault("data.cache", problem, "Name a folder of its own, or one that does not exist.")])
            make_private_folder(self.folder)
            remove_temporary_files(self.folder)
            if not (self.folder / CACHE_MARK_FILE).is_file():
                write_atomically(self.folder / CACHE_MARK_FILE, CACHE_MARK_TEXT.encode(), private=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no folder can have this name"
            raise BadInput([Fault("data.cache", f"{self.folder} cannot be used: {reason}.")]) from None
        self._size = sum(size for _, size, _ in self._list_cached_images())

    def get_cached_image_path(self, uid: str) -> Path:
        """Return the path of the cached file for an image with this SOPInstanceUID."""
        assert UID_PATTERN.fullmatch(uid)
        return join_plain_name(self.folder, PlainName(uid), ".dcm")

    def read_cached_image(self, uid: str) -> bytes | None:
        """Return the bytes of a cached image file; None if it is not cached, or is no longer a DICOM file."""
        file = self.get_cached_image_path(uid)
        try:
            with open_input_file(file) as opened:
                data = opened.read()
            os.utime(file, follow_symlinks=False)  # used just now
        except OSError:
            return None
        return data if is_dicom_file(data) else None

    def write_image_to_cache(self, uid: str, data: bytes) -> None:
        """Write an image to the cache, and remove the least recently used images if the size limit requires it.

        An image that is larger than the size limit is not written.

        Raises:
            OSError: If the disk is full.
        """
        if len(data) > self.largest:
            return
        with self._lock:
            self._written_files += 1
            if self._size + len(data) > self.largest or self._written_files % _FILES_BETWEEN_SIZE_CHECKS == 0:
                files = sorted(self._list_cached_images())  # the least recently used first
                self._size = sum(size for _, size, _ in files)
                is_full = self._size + len(data) > self.largest
                for _, size, file in files if is_full else ():
                    if self._size + len(data) <= _FILL_SHARE_AFTER_CLEANUP * self.largest:
                        break
                    file.unlink(missing_ok=True)
                    self._size -= size
            write_atomically(self.get_cached_image_path(uid), data, private=True)
            self._size += len(data)

    def _list_cached_images(self) -> list[tuple[float, int, Path]]:
        """Return the time of last use, the size and the path of each cached image."""
        files = []
        for file in self.folder.glob("*.dcm"):
            with suppress(FileNotFoundError):  # another program may remove files as well
                state = file.stat()
                files.append((state.st_mtime, state.st_size, file))
        return files

    def load_cached_search_results(self) -> dict[str, tuple[PacsImageLocation, ...]]:
        """Return the cached search results by search key; damaged lines of the file are skipped."""
        results = dict[str, tuple[PacsImageLocation, ...]]()
        with suppress(OSError):
            for line in (self.folder / _SEARCH_RESULTS_FILE).read_bytes().splitlines():
                with suppress(ValidationError):
                    result = PacsSearchResult.model_validate_json(line)
                    results[result.key] = result.images
        return results

    def append_search_results(self, results: Mapping[str, tuple[PacsImageLocation, ...]]) -> None:
        """Append search results to the cache: for each search key, the images that the PACS returned."""
        lines = [PacsSearchResult(key=key, images=images).model_dump_json() for key, images in results.items()]
        descriptor = open_own_descriptor(
            self.folder / _SEARCH_RESULTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        try:
            # The first line break ends a line that a killed program left incomplete.
            os.write(descriptor, ("\n" + "\n".join(lines) + "\n").encode())
        finally:
            os.close(descriptor)


class PacsArchive:
    """Finds and reads the images of a PACS; implements :class:`polyclinic.data.tables.labels.PictureReader`.

    Attributes:
        largest: Maximum size of one image file in bytes.
        locations: SOPInstanceUID -> location of the image, for the images that :meth:`find_images_by_keys` returned.
    """

    def __init__(self, client: DicomwebClient, cache: PacsImageCache, largest: int) -> None:
        self.client = client
        self.cache = cache
        self.largest = largest
        self.locations = dict[str, PacsImageLocation]()
        self._disk_fault: Fault | None = None

    def keep_connection_open(self) -> AbstractContextManager[object]:
        """Return a context manager inside which the connection to the PACS stays open."""
        return self.client

    def find_reading_faults(self) -> list[Fault]:
        """Return the faults that ended reading too early, a full disk or a failed server; empty if there are none."""
        failure = self.client.failed
        return [fault for fault in (self._disk_fault, failure.fault if failure else None) if fault]

    def identify_image_content(self, file: Path) -> FileIdentity:
        """Identify an image by server address and SOPInstanceUID, because DICOM gives new content a new UID."""
        return FileIdentity(f"{self.client.server.url}\0{file.stem}")

    def find_images_by_keys(self, keys: Iterable[PacsImageKey]) -> dict[PacsImageKey, tuple[PacsImageLocation, ...]]:
        """Search the PACS for the images of each key; searches whose results are in the cache are not repeated.

        Raises:
            BadInput: If the server gives no usable response, or does not respond.
        """
        known_results = self.cache.load_cached_search_results()
        distinct = list(dict.fromkeys(keys))
        new = [key for key in distinct if str(key) not in known_results]
        unusable = list[Fault]()

        def search_images(key: PacsImageKey) -> tuple[PacsImageLocation, ...]:
            try:
                return tuple(SEARCHES[key.kind](self.client, key.value))
            except UnusablePacsResponse as reason:
                unusable.append(Fault("data.url", f'a search for "{key.value}": {reason}.'))
            except PacsServerFailure:  # reported once for all searches, below
                pass
            return ()

        for start in range(0, len(new), _SEARCHES_PER_BATCH):
            batch = new[start : start + _SEARCHES_PER_BATCH]
            with ThreadPoolExecutor(self.client.server.connections) as pool, self.client:
                results = dict(zip(map(str, batch), pool.map(search_images, batch), strict=True))
            raise_faults(self.find_reading_faults())
            raise_faults(unusable[:5])
            # Empty results are not cached, because images may arrive later.
            results = {key: images for key, images in results.items() if images}
            self.cache.append_search_results(results)
            known_results |= results
        images_by_key = {key: known_results.get(str(key), ()) for key in distinct}
        self.locations |= {image.instance: image for images in images_by_key.values() for image in images}
        return images_by_key

    def read_picture_file(self, file: Path) -> bytes | Path:
        """Return an image file from the cache, or download it and store it in the cache.

        Args:
            file: Path of the image in the cache, whose name is the SOPInstanceUID.

        Raises:
            UnusablePacsResponse: If the server does not give this image.
            PacsServerFailure: If this and all further requests fail.
            OSError: If the disk is full.
        """
        uid = file.stem
        if (cached := self.cache.read_cached_image(uid)) is not None:
            return cached
        response = self.client.get(self.locations[uid].wado_path, _ANY_TRANSFER_SYNTAX, self.largest)
        data = extract_dicom_from_response(response.content, response.media_type)
        try:
            head = read_dicom_elements(data, convert_dicom_keywords_to_tags("SOPInstanceUID"))
            instance = str(head.get("SOPInstanceUID", "") or head.file_meta.get("MediaStorageSOPInstanceUID", ""))
        except Exception:  # pydicom raises many kinds of errors on damaged files
            raise UnusablePacsResponse("what the server sent is no DICOM file, or a damaged one") from None
        if instance != uid:
            raise UnusablePacsResponse("the server sent another image than the one that was asked for")
        try:
            self.cache.write_image_to_cache(uid, data)
        except OSError as error:
            reason = "the disk is full" if is_disk_full(error) else error.strerror or "it cannot be written to"
            remedy = "Make room, set a smaller data.cache_gb, or name a folder on another disk."
            self._disk_fault = Fault("data.cache", f"{self.cache.folder}: {reason}.", remedy)
            raise
        return data


def extract_dicom_from_response(content: bytearray, media_type: str) -> bytes:
    """Extract the DICOM file from a WADO-RS response, which is ``multipart/related`` with one part (RFC 2046 and 2387).

    Raises:
        UnusablePacsResponse: If the response has another media type, is incomplete, or has several parts.
    """
    header = Message()
    header["content-type"] = media_type.replace("\n", " ").replace("\r", " ")
    if header.get_content_type() == "application/dicom":  # some servers omit the multipart envelope
        return bytes(content)
    if header.get_content_type() != "multipart/related":
        expected = "where multipart/related with a DICOM file was expected"
        raise UnusablePacsResponse(f"the answer is {_format_media_type(media_type)}, {expected}")
    boundary = header.get_boundary() or ""
    if not 0 < len(boundary) <= 200 or not boundary.isascii():
        raise UnusablePacsResponse("the answer does not say where its parts end (boundary)")
    mark = f"--{boundary}".encode()
    line_mark = f"\r\n--{boundary}".encode()
    start = 0 if content.startswith(mark) else content.find(line_mark, 0, 8192) + 2
    head_end = content.find(b"\r\n\r\n", start, start + 8192)
    after = content[start + len(mark) :][:2] if content.startswith(mark, start) else b"--"
    if head_end < 0 or after == b"--":
        raise UnusablePacsResponse("the answer holds no part")
    head = content[start + len(mark) : head_end].decode("ascii", errors="replace")
    kind = re.search(r"^content-type:\s*(.*?)\s*$", head, re.IGNORECASE | re.MULTILINE)
    if kind and not kind[1].lower().startswith("application/dicom"):
        raise UnusablePacsResponse(f"the part is {_format_media_type(kind[1])}, not a DICOM file")
    begin, end = head_end + 4, content.rfind(line_mark)
    if end < begin or not content.startswith(line_mark + b"--", end):
        raise UnusablePacsResponse("the answer is cut off")
    if content.find(line_mark, begin, end) >= 0:
        raise UnusablePacsResponse("the answer holds several parts, where one image was asked for")
    return bytes(memoryview(content)[begin:end])


def _format_media_type(media_type: str) -> str:
    """Return a short, printable form of the media type that a server sent, for an error message."""
    text = "".join(letter for letter in media_type.strip() if letter.isprintable())[:60]
    return f'"{text}"' if text else "of no kind"


def open_pacs_archive(spec: DicomwebDatasetSpec, base: Path) -> PacsArchive:
    """Prepare access to a PACS without sending a request: find the secret and certificates, and open the cache.

    Args:
        base: The folder to which paths in ``spec`` are relative.

    Raises:
        BadInput: If the user has not agreed to the host and to the data that are sent to it
            (:mod:`polyclinic.common.hosts`), or if a preparation fails; it lists all faults.
    """
    use = make_search_use(spec, base)
    permission = refuse_use_without_permission(use, "data.url")
    faults = list[Fault]()
    secret: HostSecret | None = None
    context: ssl.SSLContext | None = None  # none for plain HTTP
    cache = PacsImageCache(base / spec.cache, int(spec.cache_gb * 1e9))
    with _collect_bad_input_faults(faults):
        secret = find_host_secret(use.host, permission.secrets_path)
    with _collect_bad_input_faults(faults):
        context = _make_tls_context(spec, base, secret, permission.secrets_path)
    with _collect_bad_input_faults(faults):
        cache.open_cache_folder()
    raise_faults(faults)
    server = PacsConnectionSettings(
        url=spec.url,
        context=context,
        authorization=secret.authorization if secret else "",
        secrets_path=permission.secrets_path,
        timeout_s=spec.timeout_s,
        connections=spec.connections,
    )
    return PacsArchive(DicomwebClient(server), cache, spec.largest_mb << 20)


@contextmanager
def _collect_bad_input_faults(faults: list[Fault]) -> Iterator[None]:
    """Catch a :class:`BadInput` raised inside the ``with`` block, and append its faults to a list."""
    try:
        yield
    except BadInput as bad:
        faults += bad.faults


def _make_tls_context(
    spec: DicomwebDatasetSpec, base: Path, secret: HostSecret | None, secrets_path: Path
) -> ssl.SSLContext | None:
    """Return the TLS context that checks the server's certificate; None for plain HTTP.

    The secret is sent to the machine that passes this check. Therefore the CA of a server that needs a secret is named
    in the file of secrets, not in the experiment file. Otherwise the author of an experiment file could name another
    CA, impersonate the PACS and receive the secret.

    Args:
        base: The folder to which paths in ``spec`` are relative.
        secrets_path: The file that holds the secret, for messages.

    Raises:
        BadInput: If the CA is named in the wrong place, or its file cannot be used.
    """
    ca_path = base / spec.ca_file if spec.ca_file else None
    where = "data.ca_file"
    if spec.ca_file and secret is not None:
        problem = f"{normalize_host(spec.url)} is sent a secret, so what it is checked by stands beside the secret."
        remedy = f'Take it out here, and write ca_file = "{spec.ca_file}" below this host in {secrets_path}'
        raise BadInput([Fault(where, problem, f"{remedy} (paths in there start in its folder).")])
    if secret is not None:
        ca_path, where = secret.ca_path, f"{secrets_path}: ca_file"
    if spec.url.startswith("http:"):
        if ca_path:
            raise BadInput([Fault(where, "needs an address that begins with https.")])
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_path) if ca_path else None)
    except (OSError, ValueError) as error:
        reason = "holds no certificate (PEM)" if isinstance(error, ssl.SSLError) else "cannot be read"
        remedy = "Paths are relative to the folder of the file that names it."
        raise BadInput([Fault(where, f"{ca_path} {reason}.", remedy)]) from None
