"""Searches of a PACS by QIDO-RS, page by page: which images a study has, where an image lies."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.data.dicomweb.answers import TAGS, Instance, instances_in, objects, uid_of, value_of
from common.data.dicomweb.connection import DicomwebConnection
from common.data.dicomweb.refusals import NotGiven

PAGE = 500
"""Objects asked for at a time; a server may send fewer."""
MOST_PAGES, MOST_OBJECTS = 200, 20_000
"""Of one search, in at most so many pages; a study of a CT has up to a few thousand."""
MOST_BYTES = 8 << 20
"""Of one page."""
JSON = "application/dicom+json"
_WANTED = ",".join(TAGS[name] for name in ("modality", "patient", "rows", "study"))


def images_of_study(connection: DicomwebConnection, study: str) -> list[Instance]:
    """Find all pictures of a study, by StudyInstanceUID; none where the server does not have it.

    Raises:
        NotGiven, ServerFailed: If the answer cannot be used; see :mod:`refusals`.
    """
    pages = _pages(connection, f"/studies/{study}/instances", {"includefield": _WANTED})
    return [image for page in pages for image in instances_in(page, study)]


def images_of_accession(connection: DicomwebConnection, number: str) -> list[Instance]:
    """Find all pictures under an AccessionNumber.

    Raises:
        NotGiven: If it names several studies, or the answer cannot be used; ServerFailed as above.
    """
    asked = {"AccessionNumber": number}
    pages = _pages(connection, "/studies", asked)
    found = {(uid_of(one, "study"), value_of(one, "accession")) for page in pages for one in page}
    # A server may ignore what it is asked for.
    studies = {study for study, accession in found if accession == number}
    if found and not studies:
        raise NotGiven("the server answered a search for one AccessionNumber with others")
    if len(studies) > 1:
        raise NotGiven("the AccessionNumber names several studies")
    return [image for study in studies for image in images_of_study(connection, study)]


def image(connection: DicomwebConnection, uid: str) -> list[Instance]:
    """Find where an image lies, by SOPInstanceUID.

    Raises:
        NotGiven, ServerFailed: If the answer cannot be used.
    """
    asked = {"SOPInstanceUID": uid, "includefield": _WANTED}
    found = [one for page in _pages(connection, "/instances", asked) for one in instances_in(page, "")]
    own = [one for one in found if one.instance == uid]
    if found and not own:
        raise NotGiven("the server answered a search for one SOPInstanceUID with others")
    return own[:1]


def _pages(connection: DicomwebConnection, path: str, asked: Mapping[str, str]) -> Iterator[list[Mapping[str, Any]]]:
    """Ask until a page brings nothing new: a server may send fewer than asked, and may ignore where a page begins.

    Raises:
        NotGiven: If there is no end.
    """
    seen = set[str]()
    identity = _identity("study" if path == "/studies" else "instance")
    for _ in range(MOST_PAGES):
        parameters = {**asked, "limit": str(PAGE), "offset": str(len(seen))}
        try:
            answer = connection.get(path, JSON, MOST_BYTES, parameters)
        except NotGiven as refused:
            if str(refused).endswith("(404)"):
                return
            raise
        new = {identity(one): one for one in objects(answer.content, answer.kind) if identity(one) not in seen}
        if not new:
            return
        seen |= new.keys()
        yield list(new.values())
        if len(seen) > MOST_OBJECTS:
            break
    raise NotGiven(f"a search has no end: more than {MOST_PAGES} pages, or than {MOST_OBJECTS} results")


def _identity(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: uid_of(found, name)
