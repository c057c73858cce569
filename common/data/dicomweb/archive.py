"""A hospital's PACS as a place of pictures: where each one lies, its bytes, and what is kept of both."""

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from common.data.base.spec_tables import DicomwebSpec
from common.data.dicomweb import search
from common.data.dicomweb.answers import Instance
from common.data.dicomweb.cache import Cache
from common.data.dicomweb.connection import DicomwebConnection, Server
from common.data.dicomweb.multipart import instance_in
from common.data.dicomweb.refusals import NotGiven, ServerFailed
from common.data.dicomweb.secret import authorization
from common.data.images.dataset import dataset_of, tags_of
from common.errors import BadInput, Fault, stop_on
from common.system.files import no_room

_AS_STORED = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_AT_ONCE = 200
"""Searches whose results are kept together: a kill loses no more."""
_SHOWN = 5
_SOP_INSTANCE = tags_of("SOPInstanceUID")
MOST_IMAGES = 2_000_000
"""Found for one table: more is a mistake, or meant to fill the memory."""


@dataclass(frozen=True)
class ArchiveKey:
    """What a row of the table names: ``kind`` is "study", "accession" or "instance"."""

    kind: str
    value: str

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.value}"


_SEARCHES: Mapping[str, Callable[[DicomwebConnection, str], list[Instance]]] = {
    "study": search.images_of_study,
    "accession": search.images_of_accession,
    "instance": search.image,
}


class Archive:
    """Gives pictures as :class:`common.data.tables.labels.Reader` says."""

    def __init__(self, connection: DicomwebConnection, cache: Cache, largest: int) -> None:
        self.connection, self.cache, self.largest = connection, cache, largest
        self.places = dict[str, Instance]()
        self._disk: Fault | None = None

    def opened(self) -> AbstractContextManager[object]:
        return self.connection

    def faults(self) -> list[Fault]:
        failed = self.connection.failed
        return [fault for fault in (self._disk, failed.fault if failed else None) if fault]

    def find(self, asked: Iterable[ArchiveKey]) -> dict[ArchiveKey, tuple[Instance, ...]]:
        """Find the images that these name; what was found before is not asked for again.

        Raises:
            BadInput: If the server gives no usable answer.
        """
        known, wanted = self.cache.places(), list(dict.fromkeys(asked))
        new = [one for one in wanted if one.key not in known]
        for start in range(0, len(new), _AT_ONCE):
            found = self._searched(new[start : start + _AT_ONCE])
            self.cache.keep_places(found)
            known |= found
            if sum(map(len, known.values())) > MOST_IMAGES:
                problem = f"{self.connection.server.name} names more than {MOST_IMAGES:,} images for the table."
                raise BadInput([Fault("data.url", problem, "Name fewer studies, or keep fewer data.modalities.")])
        images = {one: known.get(one.key, ()) for one in wanted}
        self.places |= {image.instance: image for of_one in images.values() for image in of_one}
        return images

    def _searched(self, asked: Sequence[ArchiveKey]) -> dict[str, tuple[Instance, ...]]:
        """Results of searches that have one; what was not found may arrive later, and is asked for again.

        Raises:
            BadInput: With the first answers that cannot be used.
        """
        refused = dict[str, str]()

        def searched(one: ArchiveKey) -> tuple[Instance, ...]:
            try:
                return tuple(_SEARCHES[one.kind](self.connection, one.value))
            except NotGiven as reason:
                refused[one.value] = str(reason)
            except ServerFailed:  # told below, once
                pass
            return ()

        with ThreadPoolExecutor(self.connection.server.connections) as pool, self.connection:
            found = dict(zip((one.key for one in asked), pool.map(searched, asked), strict=True))
        stop_on(self.faults())
        stop_on(
            [Fault("data.url", f'a search for "{value}": {reason}.') for value, reason in [*refused.items()][:_SHOWN]]
        )
        return {key: images for key, images in found.items() if images}

    def read(self, file: Path) -> bytes | Path:
        """Return an image from the cache, or from the server and into the cache.

        Raises:
            NotGiven: If the server does not give this one.
            ServerFailed: If it gives no more; or OSError if the disk has no room.
        """
        uid = file.stem
        if (kept := self.cache.read(uid)) is not None:
            return kept
        answer = self.connection.get(self.places[uid].path, _AS_STORED, self.largest)
        data = instance_in(answer.content, answer.kind)
        _refuse_another(data, uid)
        try:
            self.cache.keep(uid, data)
        except OSError as error:
            reason = "the disk is full" if no_room(error) else error.strerror or "it cannot be written to"
            remedy = "Make room, set a smaller data.cache_gb, or name a folder on another disk."
            self._disk = Fault("data.cache", f"{self.cache.folder}: {reason}.", remedy)
            raise
        return data


def _refuse_another(data: bytes, uid: str) -> None:
    """Labels belong to the image that was asked for, and to no other.

    Raises:
        NotGiven: If the file is of another image, or is no DICOM file.
    """
    try:
        head = dataset_of(data, _SOP_INSTANCE)
        found = str(head.get("SOPInstanceUID", "") or head.file_meta.get("MediaStorageSOPInstanceUID", ""))
    except Exception:  # pydicom raises many kinds on damaged files
        raise NotGiven("what the server sent is no DICOM file, or a damaged one") from None
    if found != uid:
        raise NotGiven("the server sent another image than the one that was asked for")


def opened_archive(spec: DicomwebSpec, base: Path) -> Archive:
    """Read the secret and the certificates, and open the cache; nothing is asked for yet.

    Raises:
        BadInput: With every fault of these.
    """
    faults = list[Fault]()
    context, header = None, ""
    cache = Cache(base / spec.cache, int(spec.cache_gb * 1e9))
    for step in (lambda: _context(spec, base), lambda: authorization(spec, base), cache.open):
        try:
            result = step()
        except BadInput as bad:
            faults += bad.faults
        else:
            context, header = (result, header) if isinstance(result, ssl.SSLContext) else (context, result or header)
    stop_on(faults)
    server = Server(spec.url, context, header, spec.timeout_s, spec.connections)
    return Archive(DicomwebConnection(server), cache, spec.largest_mb << 20)


def _context(spec: DicomwebSpec, base: Path) -> ssl.SSLContext | None:
    """How the server's certificate is judged; there is no way not to judge it.

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
