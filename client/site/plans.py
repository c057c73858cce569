"""Stored texts of requests, such as the plan of a run: each once under its hash, with the decisions of people.

``flwr-client plans`` and ``flwr-client record`` show these files. :mod:`polyclinic.client.site.approvals` decides by
them if a request is carried out.

A coordinator can send any number of plans, so their number and size are limited. A plan on which a person has decided
is never removed.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.client.site.authority_record import read_authority_record
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.security.identity import write_secret_file
from polyclinic.common.system.files import make_private_folder, write_atomically
from polyclinic.common.system.plain_names import HashName, PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_utc_now, make_printable_line

if TYPE_CHECKING:
    from polyclinic.client.site.site import Site

PLANS_FOLDER = "plans"
MAX_UNDECIDED_TEXTS = 1000
"""Maximum number of stored texts without a decision; the oldest are removed."""
MAX_TEXT_BYTES = 128_000
"""Maximum size of a text; by default, ``policy.maximum_plan_kb`` allows half of this. All texts take at most 128 MB."""
TRAINING_KIND = "training"
COUNT_KIND = "count"
EVALUATION_KIND = "evaluation"
TEXT_FIELDS: Mapping[str, tuple[str, str]] = {
    "RollCall": (TRAINING_KIND, "plan"),
    "TrainRequest": (TRAINING_KIND, "plan"),
    "EvaluateRequest": (TRAINING_KIND, "plan"),
    "BenefitRequest": (TRAINING_KIND, "plan"),
    "CountRequest": (COUNT_KIND, "question"),
    "ScoringRequest": (EVALUATION_KIND, "question"),
}
"""Record class of a request -> the kind of its text, and the field that contains the text.

A new kind of request needs a line here, and a function in
:data:`polyclinic.client.approval.describe.DESCRIBE_BY_KIND`.
"""
MIN_HASH_DIGITS = 6
"""Minimum number of digits by which a person may name a hash."""
_TEXT_FILE = "text"
_FACTS_FILE = "facts.json"
_DECISION_FILE_NAME = re.compile(r"decision-(\d{4})\.json")


@dataclass(frozen=True)
class RequestText:
    """The text by which a request asks a site to work, such as a run's plan as JSON.

    Attributes:
        kind: ``training`` for a run's plan, ``count`` for a question for counts, ``evaluation`` for one for figures.
    """

    kind: str
    text: str

    @property
    def content(self) -> bytes:
        return self.text.encode(errors="surrogatepass")

    @property
    def sha256(self) -> HashName:
        return HashName(hashlib.sha256(self.content).hexdigest())

    @property
    def is_too_large(self) -> bool:
        return len(self.content) > MAX_TEXT_BYTES


def read_request_text(fields: Mapping[str, Any]) -> RequestText | None:
    """Return the text of a request, given the small fields of its record; None for a request without a text."""
    kind, field = TEXT_FIELDS.get(str(fields.get("wire.record")), ("", ""))
    text = fields.get(field)
    return RequestText(kind, text) if isinstance(text, str) else None


class RequestFacts(BaseModel):
    """Facts that a site stores when a text arrives for the first time: the sender, and the site's data at that time.

    Attributes:
        time: UTC time (ISO 8601) of the arrival.
        coordinator, authority: Name of the coordinator, and SHA-256 of the public key of its authority.
        classes: The site's own class name -> the study's name.
        train, validation, test: Numbers of images, without those of patients who had opted out.
        patients: Number of patients of the training images.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: str
    time: str
    coordinator: str = ""
    authority: str = ""
    classes: dict[str, str] = {}
    train: int = 0
    validation: int = 0
    test: int = 0
    patients: int = 0


@dataclass(frozen=True)
class StoredText:
    """A stored text with its hash and the facts of its arrival."""

    sha256: str
    text: str
    facts: RequestFacts

    @property
    def title(self) -> str:
        """The title of the run or question in the text, made safe to print; empty without a title."""
        return self._read_word("run", "name") if self.facts.kind == TRAINING_KIND else self._read_word("title")

    @property
    def purpose(self) -> str:
        """The study's purpose in the plan, made safe to print; empty without a purpose."""
        return self._read_word("run", "purpose")

    def _read_word(self, *keys: str) -> str:
        """Return a value of the text's JSON by its nested keys, made safe to print; empty if it is missing."""
        try:
            value = json.loads(self.text)
            for key in keys:
                value = value.get(key, "")
            return make_printable_line(str(value))
        except (ValueError, AttributeError, RecursionError):
            return ""


class PlanStore:
    """The folder ``plans`` of a site's state folder: a subfolder for each text, with the decisions on the text.

    Args:
        state: The site's state folder.
    """

    def __init__(self, state: Path) -> None:
        self.folder = state / PLANS_FOLDER

    def has_text(self, sha256: HashName) -> bool:
        return (join_plain_name(self.folder, sha256) / _TEXT_FILE).exists()

    def store_text(self, request: RequestText, facts: RequestFacts) -> None:
        """Store a new text; if there are too many, remove the oldest texts on which nobody has decided."""
        self._remove_oldest_texts(MAX_UNDECIDED_TEXTS - 1)
        folder = join_plain_name(self.folder, request.sha256)
        make_private_folder(folder)
        write_atomically(folder / _FACTS_FILE, facts.model_dump_json().encode(), private=True)
        # The text is written last, so that a stored text always has its facts.
        write_atomically(folder / _TEXT_FILE, request.content, private=True)

    def _remove_oldest_texts(self, limit: int) -> None:
        folders = self._list_folders()
        if len(folders) <= limit:
            return
        undecided = [path for path in folders if not list(_list_decision_files(path))]
        undecided.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in undecided[: max(len(undecided) - limit, 0)]:
            shutil.rmtree(path, ignore_errors=True)

    def _list_folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if HashName.pattern.fullmatch(path.name)]

    def list_texts(self) -> list[StoredText]:
        """Return the stored texts in the order of their arrival."""
        texts = [text for path in self._list_folders() if (text := self.read_text(path.name)) is not None]
        return sorted(texts, key=lambda text: (text.facts.time, text.sha256))

    def read_text(self, sha256: str) -> StoredText | None:
        """Return a stored text; None if it is missing, or its bytes have another hash."""
        try:
            folder = join_plain_name(self.folder, HashName(sha256))
            content = (folder / _TEXT_FILE).read_bytes()
            facts = RequestFacts.model_validate_json((folder / _FACTS_FILE).read_bytes())
        except (OSError, ValueError, ValidationError):
            return None
        if hashlib.sha256(content).hexdigest() != sha256:
            return None
        return StoredText(sha256, content.decode(errors="surrogatepass"), facts)

    def find_text(self, digits: str) -> StoredText:
        """Return the text whose hash begins with these digits.

        Raises:
            BadInput: If no hash or several hashes begin with the digits, or if the digits are too few.
        """
        matches = [text for text in self.list_texts() if text.sha256.startswith(digits.lower())]
        if len(digits) >= MIN_HASH_DIGITS and len(matches) == 1:
            return matches[0]
        problem = "is the hash of no plan here." if not matches else f"is the beginning of {len(matches)} hashes."
        if len(digits) < MIN_HASH_DIGITS:
            problem = f"is too short: {MIN_HASH_DIGITS} digits of the hash or more are needed."
        raise BadInput([Fault(digits, problem, "flwr-client plans list DIR has all of them.")])

    # ------------------------------------------------------------------ decisions

    def list_decisions(self, sha256: str) -> list[Path]:
        """Return the files of the decisions on a text, oldest first; their content is not verified."""
        try:
            folder = join_plain_name(self.folder, HashName(sha256))
        except ValueError:
            return []
        return sorted(_list_decision_files(folder))

    def add_decision(self, sha256: str, content: bytes) -> Path:
        """Write the file of a new decision on a text, with the next number; return its path."""
        folder = join_plain_name(self.folder, HashName(sha256))
        earlier = self.list_decisions(sha256)
        number = 1 + (int(earlier[-1].stem.removeprefix("decision-")) if earlier else 0)
        path = join_plain_name(folder, PlainName(f"decision-{number:04d}"), ".json")
        write_secret_file(path, content)
        return path


def _list_decision_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if _DECISION_FILE_NAME.fullmatch(path.name))


def store_request_text(site: "Site", request: RequestText) -> None:
    """Store the text of a request to a site, unless it is stored already or too large."""
    store = PlanStore(site.folder)
    if not request.is_too_large and not store.has_text(request.sha256):
        store.store_text(request, _collect_request_facts(request, site))


def _collect_request_facts(request: RequestText, site: "Site") -> RequestFacts:
    from polyclinic.client.site.disclosure import count_patients
    from polyclinic.common.config import parse_plan_json

    if request.kind == TRAINING_KIND:
        site = site.name_classes_by(parse_plan_json(request.text).vocabulary)
    coordinator, authority = read_coordinator_identity(site.folder)
    return RequestFacts(
        kind=request.kind,
        time=format_utc_now(),
        coordinator=coordinator,
        authority=authority,
        classes=dict(zip(site.declaration.names, site.declaration.canonical_names, strict=True)),
        train=len(site.train),
        validation=len(site.validation),
        test=len(site.test),
        patients=count_patients(site.train),
    )


def read_coordinator_identity(state: Path) -> tuple[str, str]:
    """Return name and key hash of the site's recorded coordinator; empty texts if there is no record."""
    record = read_authority_record(state)
    return ("", "") if record is None else (record.coordinator, record.key_hash)
