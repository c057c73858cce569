"""Searches of a PACS by QIDO-RS, page by page: which images a study has, where an image lies.

No answer is used before it is checked: a server that ignores what it is asked for, as some do, would give one patient's
labels to another's images.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.data.dicomweb.client import DicomwebClient, NotStored, ResponseUnusable

UID = re.compile(r"[0-9][0-9.]{0,63}")
"""Digits and dots: such a name is safe in an address and as the name of a file."""
PAGE = 500
"""Objects asked for at a time; a server may send fewer."""
MOST_PAGES, MOST_OBJECTS = 200, 20_000
"""Bounds of one search; a study of a CT has up to a few thousand images."""
MOST_BYTES = 8 << 20
"""Bytes of one page."""
TAGS = {
    "modality": "00080060",
    "patient": "00100020",
    "rows": "00280010",
    "accession": "00080050",
    "study": "0020000D",
    "series": "0020000E",
    "instance": "00080018",
}
_INCLUDED = ",".join(TAGS[name] for name in ("modality", "patient", "rows", "study"))
_NO_PICTURES = {"SR", "PR", "KO", "AU", "DOC", "ECG", "RTSTRUCT", "RTPLAN", "RTRECORD", "REG", "FID", "PLAN", "SEG"}
"""Modalities whose objects are no pictures, or are not to be looked at as such."""
_LONGEST = 256
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Instance:
    """Where an image lies in the PACS; ``patient`` is its PatientID, empty where the server does not say."""

    study: str
    series: str
    instance: str
    modality: str = ""
    patient: str = ""

    @property
    def path(self) -> str:
        """The path of the image below the service's address."""
        return f"/studies/{self.study}/series/{self.series}/instances/{self.instance}"


def images_of_study(client: DicomwebClient, study: str) -> list[Instance]:
    """Find all pictures of a study, by StudyInstanceUID; none where the server does not have it.

    Raises:
        ResponseUnusable, ServerFailed: If the answer cannot be used.
    """
    return [*_instances(client, f"/studies/{study}/instances", {"includefield": _INCLUDED}, study)]


def images_of_accession(client: DicomwebClient, number: str) -> list[Instance]:
    """Find all pictures under an AccessionNumber.

    Raises:
        ResponseUnusable: If it names several studies, or the answer cannot be used; ServerFailed as above.
    """
    results = [
        (_uid(one, "study"), _value(one, "accession"))
        for one in _search(client, "/studies", {"AccessionNumber": number})
    ]
    studies = {study for study, accession in results if accession == number}
    if results and not studies:
        raise ResponseUnusable("the server answered a search for one AccessionNumber with others")
    if len(studies) > 1:
        raise ResponseUnusable("the AccessionNumber names several studies")
    return [image for study in studies for image in images_of_study(client, study)]


def image(client: DicomwebClient, uid: str) -> list[Instance]:
    """Find where an image lies, by SOPInstanceUID.

    Raises:
        ResponseUnusable, ServerFailed: If the answer cannot be used.
    """
    results = [*_instances(client, "/instances", {"SOPInstanceUID": uid, "includefield": _INCLUDED}, "")]
    own = [result for result in results if result.instance == uid]
    if results and not own:
        raise ResponseUnusable("the server answered a search for one SOPInstanceUID with others")
    return own[:1]


SEARCHES: Mapping[str, Callable[[DicomwebClient, str], list[Instance]]] = {
    "study": images_of_study,
    "accession": images_of_accession,
    "instance": image,
}
"""The search for what a line of a table names, by the kind of its key."""


def _instances(client: DicomwebClient, path: str, parameters: Mapping[str, str], study: str) -> Iterator[Instance]:
    """Yield the pictures among the results of a search; all of ``study``, unless that is empty."""
    for result in _search(client, path, parameters):
        if study and _value(result, "study") not in ("", study):
            raise ResponseUnusable("the server answered a search for one study with another one")
        modality = _value(result, "modality")
        without_pixels = TAGS["rows"] in result and _value(result, "rows") in ("", "0")
        if modality not in _NO_PICTURES and not without_pixels:
            own = study or _uid(result, "study")
            yield Instance(own, _uid(result, "series"), _uid(result, "instance"), modality, _value(result, "patient"))


def _search(client: DicomwebClient, path: str, parameters: Mapping[str, str]) -> Iterator[Json]:
    """Yield results until a page brings nothing new: a server may send fewer than asked, and may ignore the offset.

    Raises:
        ResponseUnusable: If there is no end, or a page is no list of DICOM JSON.
    """
    identity, uids = "study" if path == "/studies" else "instance", set[str]()
    for _ in range(MOST_PAGES):
        page = {**parameters, "limit": str(PAGE), "offset": str(len(uids))}
        try:
            response = client.get(path, "application/dicom+json", MOST_BYTES, page)
        except NotStored:
            return
        new = {
            uid: result
            for result in _objects(response.content, response.media_type)
            if (uid := _uid(result, identity)) not in uids
        }
        if not new:
            return
        uids |= new.keys()
        yield from new.values()
        if len(uids) > MOST_OBJECTS:
            break
    raise ResponseUnusable(f"a search has no end: more than {MOST_PAGES} pages, or than {MOST_OBJECTS} results")


def _objects(content: bytearray, media_type: str) -> list[Json]:
    if not content.strip():
        return []
    if "json" not in media_type.lower():
        raise ResponseUnusable("the answer to a search is no DICOM JSON; data.url may be that of another service")
    try:
        page = json.loads(content)
    except (ValueError, RecursionError):
        raise ResponseUnusable("the answer to a search is damaged JSON") from None
    if not isinstance(page, list) or not all(isinstance(result, dict) for result in page):
        raise ResponseUnusable("the answer to a search is no list of objects")
    return page


def _value(result: Json, name: str) -> str:
    """Return the first value of an attribute, empty where there is none."""
    element = result.get(TAGS[name])
    values = element.get("Value") if isinstance(element, dict) else None
    first = values[0] if isinstance(values, list) and values else ""
    return str(first).strip()[:_LONGEST] if isinstance(first, str | int) else ""


def _uid(result: Json, name: str) -> str:
    """Return a UID of an object.

    Raises:
        ResponseUnusable: If it has none that is one.
    """
    uid = _value(result, name)
    if not UID.fullmatch(uid):
        raise ResponseUnusable(f"the answer to a search holds an object without the UID ({name}) of digits and dots")
    return uid
