"""What a PACS answers to QIDO-RS: images of a study, as DICOM JSON, of which nothing is believed unseen."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.data.dicomweb.refusals import NotGiven

UID = re.compile(r"[0-9][0-9.]{0,63}")
"""Digits and dots: such a name is safe in an address and as the name of a file."""
TAGS = {
    "modality": "00080060",
    "patient": "00100020",
    "rows": "00280010",
    "accession": "00080050",
    "study": "0020000D",
    "series": "0020000E",
    "instance": "00080018",
}
_NO_PICTURES = {"SR", "PR", "KO", "AU", "DOC", "ECG", "RTSTRUCT", "RTPLAN", "RTRECORD", "REG", "FID", "PLAN", "SEG"}
"""Modalities whose objects are no pictures, or are not to be looked at as such."""
_LONGEST = 256


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
        return f"/studies/{self.study}/series/{self.series}/instances/{self.instance}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def instance_of(values: Any) -> Instance | None:
    """An instance as it was written down; None where that is damaged."""
    try:
        found = Instance(**values)
    except TypeError:
        return None
    whole = all(isinstance(value, str) for value in values.values())
    return found if whole and all(map(UID.fullmatch, (found.study, found.series, found.instance))) else None


def objects(content: bytearray, kind: str) -> list[Mapping[str, Any]]:
    """The objects of one page.

    Raises:
        NotGiven: If it is no list of DICOM JSON.
    """
    if not content.strip():
        return []
    if "json" not in kind.lower():
        raise NotGiven("the answer to a search is no DICOM JSON; data.url may be that of another service")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise NotGiven("the answer to a search is damaged JSON") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise NotGiven("the answer to a search is no list of objects")
    return found


def value_of(found: Mapping[str, Any], name: str) -> str:
    """The first value of an attribute, empty where there is none."""
    element = found.get(TAGS[name])
    values = element.get("Value") if isinstance(element, dict) else None
    first = values[0] if isinstance(values, list) and values else ""
    return str(first).strip()[:_LONGEST] if isinstance(first, str | int) else ""


def uid_of(found: Mapping[str, Any], name: str) -> str:
    """A UID of an object.

    Raises:
        NotGiven: If it has none that is one.
    """
    uid = value_of(found, name)
    if not UID.fullmatch(uid):
        raise NotGiven(f"the answer to a search holds an object without the UID ({name}) of digits and dots")
    return uid


def instances_in(page: list[Mapping[str, Any]], study: str) -> Iterator[Instance]:
    """Pictures of one page; of the study that was asked for, where one was.

    Raises:
        NotGiven: If the answer is about something else.
    """
    for found in page:
        # A server that ignores what it is asked for would give one patient's labels to another's images.
        if study and value_of(found, "study") not in ("", study):
            raise NotGiven("the server answered a search for one study with another one")
        modality = value_of(found, "modality")
        if modality not in _NO_PICTURES and not _says_no_rows(found):
            own = study or uid_of(found, "study")
            series, instance = uid_of(found, "series"), uid_of(found, "instance")
            yield Instance(own, series, instance, modality, value_of(found, "patient"))


def _says_no_rows(found: Mapping[str, Any]) -> bool:
    return TAGS["rows"] in found and value_of(found, "rows") in ("", "0")
