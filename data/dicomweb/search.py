"""Search a PACS with QIDO-RS for the images of a study, or for one image.

Each result is compared with the search, because some servers ignore search parameters. Their results would assign one
patient's labels to another patient's images.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from polyclinic.data.dicomweb.client import DicomwebClient, PacsObjectNotFound, UnusablePacsResponse

UID_PATTERN = re.compile(r"[0-9][0-9.]{0,63}")
"""A DICOM UID: at most 64 digits and dots, which are safe in URLs and file names."""
Uid = Annotated[str, Field(pattern=f"^{UID_PATTERN.pattern}$")]
RESULTS_PER_PAGE = 500
"""Number of results requested per page; a server may send fewer."""
MAX_PAGES = 200
MAX_RESULTS = 20_000
"""Maximum number of results of one search; a CT study has up to a few thousand images."""
MAX_PAGE_BYTES = 8 << 20
"""Maximum size of one page of results in bytes."""
ATTRIBUTE_TAGS = {
    "modality": "00080060",
    "patient": "00100020",
    "rows": "00280010",
    "accession": "00080050",
    "study": "0020000D",
    "series": "0020000E",
    "instance": "00080018",
}
_INCLUDED_TAGS = ",".join(ATTRIBUTE_TAGS[name] for name in ("modality", "patient", "rows", "study"))
_NON_IMAGE_MODALITIES = {
    "SR",
    "PR",
    "KO",
    "AU",
    "DOC",
    "ECG",
    "RTSTRUCT",
    "RTPLAN",
    "RTRECORD",
    "REG",
    "FID",
    "PLAN",
    "SEG",
}
"""Modalities whose objects are not images, such as reports and plans."""
Json = Mapping[str, Any]


@dataclass(frozen=True)
class PacsImageLocation:
    """UIDs of an image in the PACS.

    Attributes:
        study: StudyInstanceUID.
        series: SeriesInstanceUID.
        instance: SOPInstanceUID.
        modality: Modality, such as ``CT``; empty if the server gives none.
        patient: PatientID; empty if the server gives none.
    """

    study: Uid
    series: Uid
    instance: Uid
    modality: str = ""
    patient: str = ""

    @property
    def wado_path(self) -> str:
        """The URL path of the image, relative to the service's address."""
        return f"/studies/{self.study}/series/{self.series}/instances/{self.instance}"


def find_images_by_study_uid(client: DicomwebClient, study: str) -> list[PacsImageLocation]:
    """Find all images of the study with this StudyInstanceUID; empty if the server does not have the study.

    Raises:
        UnusablePacsResponse, PacsServerFailure: If a response cannot be used.
    """
    return [*_search_image_instances(client, f"/studies/{study}/instances", {"includefield": _INCLUDED_TAGS}, study)]


def find_images_by_accession_number(client: DicomwebClient, number: str) -> list[PacsImageLocation]:
    """Find all images of the study with this AccessionNumber; empty if the server does not have it.

    Raises:
        UnusablePacsResponse: If the number belongs to several studies, or a response cannot be used.
        PacsServerFailure: If this and all further requests fail.
    """
    results = list(_search_all_result_pages(client, "/studies", {"AccessionNumber": number}))
    same = [result for result in results if _get_first_attribute_value(result, "accession") == number]
    studies = {_read_uid(result, "study") for result in same}
    if results and not studies:
        raise UnusablePacsResponse("the server answered a search for one AccessionNumber with others")
    if len(studies) > 1:
        raise UnusablePacsResponse("the AccessionNumber names several studies")
    return [image for study in studies for image in find_images_by_study_uid(client, study)]


def find_image_by_instance_uid(client: DicomwebClient, uid: str) -> list[PacsImageLocation]:
    """Find the image with this SOPInstanceUID; the list is empty if the server does not have it.

    Raises:
        UnusablePacsResponse, PacsServerFailure: If a response cannot be used.
    """
    results = [
        *_search_image_instances(client, "/instances", {"SOPInstanceUID": uid, "includefield": _INCLUDED_TAGS}, "")
    ]
    same = [result for result in results if result.instance == uid]
    if results and not same:
        raise UnusablePacsResponse("the server answered a search for one SOPInstanceUID with others")
    return same[:1]


SEARCHES: Mapping[str, Callable[[DicomwebClient, str], list[PacsImageLocation]]] = {
    "study": find_images_by_study_uid,
    "accession": find_images_by_accession_number,
    "instance": find_image_by_instance_uid,
}
"""Kind of the key in a table row -> function that searches the PACS for the images of a key."""


def _search_image_instances(
    client: DicomwebClient, path: str, parameters: Mapping[str, str], study: str
) -> Iterator[PacsImageLocation]:
    """Search the PACS for instances, and yield the instances that are images.

    Args:
        path: URL path of the search, relative to the service's address.
        parameters: The query of the search.
        study: The StudyInstanceUID that all results must have; empty to allow any study.

    Raises:
        UnusablePacsResponse: If a result is of another study, or a response cannot be used.
    """
    results = list(_search_all_result_pages(client, path, parameters))
    # Some servers return the key "Rows" without a value for every instance; then it says nothing.
    has_rows = any(_get_first_attribute_value(result, "rows") for result in results)
    for result in results:
        if study and _get_first_attribute_value(result, "study") not in ("", study):
            raise UnusablePacsResponse("the server answered a search for one study with another one")
        modality = _get_first_attribute_value(result, "modality")
        rows = _get_first_attribute_value(result, "rows")
        without_pixels = rows == "0" or (has_rows and not rows and ATTRIBUTE_TAGS["rows"] in result)
        if modality not in _NON_IMAGE_MODALITIES and not without_pixels:
            yield PacsImageLocation(
                study=study or _read_uid(result, "study"),
                series=_read_uid(result, "series"),
                instance=_read_uid(result, "instance"),
                modality=modality,
                patient=_get_first_attribute_value(result, "patient"),
            )


def _search_all_result_pages(client: DicomwebClient, path: str, parameters: Mapping[str, str]) -> Iterator[Json]:
    """Request one page of search results after the other, and yield the results.

    The search stops at a page without new results, because some servers ignore the offset and repeat a page.

    Raises:
        UnusablePacsResponse: If a response is damaged, or the search has too many pages or results.
    """
    identity = "study" if path == "/studies" else "instance"
    uids = set[str]()
    for _ in range(MAX_PAGES):
        query = {**parameters, "limit": str(RESULTS_PER_PAGE), "offset": str(len(uids))}
        try:
            response = client.get(path, "application/dicom+json", MAX_PAGE_BYTES, query)
        except PacsObjectNotFound:
            return
        if not response.content.strip():
            return
        if "json" not in response.media_type.lower():
            problem = "the answer to a search is no DICOM JSON; data.url may be that of another service"
            raise UnusablePacsResponse(problem)
        try:
            page = json.loads(response.content)
        except (ValueError, RecursionError):
            raise UnusablePacsResponse("the answer to a search is damaged JSON") from None
        if not isinstance(page, list) or not all(isinstance(result, dict) for result in page):
            raise UnusablePacsResponse("the answer to a search is no list of objects")
        new = {uid: result for result in page if (uid := _read_uid(result, identity)) not in uids}
        if not new:
            return
        uids |= new.keys()
        yield from new.values()
        if len(uids) > MAX_RESULTS:
            break
    raise UnusablePacsResponse(f"a search has no end: more than {MAX_PAGES} pages, or than {MAX_RESULTS} results")


def _get_first_attribute_value(result: Json, name: str) -> str:
    """Return the first value of a DICOM attribute in a search result; empty if there is none.

    Numbers, bare values without a list, and values in the form of a person's name are read too.

    Args:
        name: Key of the attribute in ``TAGS``, such as "modality".

    Raises:
        UnusablePacsResponse: If a value has another form, or if there are several PatientIDs.
    """
    element = result.get(ATTRIBUTE_TAGS[name])
    values = element.get("Value") if isinstance(element, dict) else element
    texts = list[str]()
    for value in values if isinstance(values, list) else [values]:
        text = value.get("Alphabetic") if isinstance(value, dict) else value
        if isinstance(text, float) and text.is_integer():
            text = int(text)
        if text is not None and (isinstance(text, bool) or not isinstance(text, str | int)):
            problem = f"the answer to a search holds a value ({name}) that is no text and no whole number"
            raise UnusablePacsResponse(problem)
        texts += [text for text in [str("" if text is None else text).strip()] if text]
    if name == "patient" and len(set(texts)) > 1:
        raise UnusablePacsResponse("the answer to a search names several PatientIDs of one image")
    return texts[0] if texts else ""


def _read_uid(result: Json, name: str) -> str:
    """Return a UID of a search result.

    Args:
        name: "study", "series" or "instance".

    Raises:
        UnusablePacsResponse: If the result has no valid UID of this kind.
    """
    uid = _get_first_attribute_value(result, name)
    if not UID_PATTERN.fullmatch(uid):
        problem = f"the answer to a search holds an object without the UID ({name}) of digits and dots"
        raise UnusablePacsResponse(problem)
    return uid
