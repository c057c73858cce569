"""A site's folder and its ``site.toml``: reading without torch, and creation by ``flwr-client init``."""

import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from polyclinic.client.site.policy import LEVEL_SENTENCES, SitePolicy
from polyclinic.client.site.policy_comments import format_policy_comments
from polyclinic.common.config import Experiment, HospitalPlan
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.hosts import SECRETS_FILE, permit_hosts
from polyclinic.common.patients.opt_out import SITE_FILE, read_opt_out_key
from polyclinic.common.security.identity import (
    SiteAdmissionRequest,
    SiteConnectionKit,
    check_site_name,
    compute_public_key_fingerprint,
    create_private_key,
    format_public_key_line,
    is_same_public_key,
    read_connection_kit,
    read_private_key,
    write_commented_toml_file,
)
from polyclinic.common.security.phrase import compute_public_key_phrase
from polyclinic.common.system.files import (
    is_disk_full,
    is_file,
    make_private_folder,
    remove_outputs_on_failure,
    write_atomically,
)
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import format_as_json_text, quote_for_shell
from polyclinic.common.system.toml import TomlSection, read_toml, validate_tables
from polyclinic.common.vocabulary import CLASS_PLACEHOLDER, Vocabulary
from polyclinic.data.base.names import normalize_name
from polyclinic.data.base.pixel_form import SITE_SPECIFIC_KEY, format_setting
from polyclinic.data.base.spec import (
    DEFAULT_SEPARATOR,
    MISSING_CLASSES_MESSAGE_START,
    NO_FINDING,
    DataSpec,
    list_dataset_uses,
)
from polyclinic.data.tables.cells import count_rows_by_finding
from polyclinic.data.tables.class_folders import list_class_folders
from polyclinic.data.tables.csv import read_csv_table

PLAN_FILE = "plan.json"
MAX_NAMED_CLASSES = 5
MAX_NAMED_FINDINGS = 20
"""Maximum number of a column's findings that a message names."""
MIN_PRINTED_ROWS = 10
"""A message prints no number of rows below this."""
OLD_KEYS_FILE = "old-keys"
"""File in the state folder with earlier public keys, one OpenSSH line each, for the check of old receipts."""


class SiteTomlContent(TomlSection):
    """The keys of ``site.toml``, except some of ``[data]`` (see :class:`SiteSettings`).

    These are ``annotates``, ``synonyms`` and ``opt_out``.

    Attributes:
        name: The site's name, as registered with the coordinator.
        kit: File that the coordinator sent back; ``NAME.kit`` by default.
        key: File of the private key; ``NAME.key`` by default.
        device: ``auto`` chooses a GPU if there is one.
        gpus: Number of GPUs that share each batch.
        policy: Rules for runs and for data that leaves.
        approvers: Name -> public key of the people who approve plans, where ``policy.approval`` is ``required``.
    """

    name: str
    kit: str = ""
    key: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: int = Field(1, ge=1)
    policy: SitePolicy = SitePolicy()
    approvers: dict[str, str] = Field(default_factory=dict)
    data: DataSpec = Field(discriminator="kind")

    _name = field_validator("name")(check_site_name)

    @field_validator("approvers")
    @classmethod
    def _check_approvers(cls, table: dict[str, str]) -> dict[str, str]:
        if table:  # without approvers, the library for keys is not imported
            from polyclinic.common.security.plan_decisions import check_approvers

            check_approvers(table)
        return table


@dataclass(frozen=True)
class SiteSettings:
    """The checked settings of one hospital's folder.

    Attributes:
        labels: The classes that the site annotates, with its own names in its own order; empty for all classes.
        synonyms: The site's own class name -> canonical name.
    """

    folder: Path
    file: SiteTomlContent
    labels: tuple[str, ...]
    synonyms: Mapping[str, str]

    @property
    def kit_path(self) -> Path:
        if self.file.kit:
            return self.folder / self.file.kit
        return join_plain_name(self.folder, PlainName(self.file.name), ".kit")

    @property
    def key_path(self) -> Path:
        if self.file.key:
            return self.folder / self.file.key
        return join_plain_name(self.folder, PlainName(self.file.name), ".key")

    @property
    def secrets_path(self) -> Path:
        """Path of the file with passwords and tokens for hosts (:mod:`polyclinic.common.hosts`)."""
        return self.folder / SECRETS_FILE

    def permit_data_hosts(self) -> AbstractContextManager[None]:
        """Return a context manager in which the program may connect to the hosts of the site's data."""
        return permit_hosts(list_dataset_uses(self.file.data, self.folder), self.secrets_path)

    @property
    def state_folder(self) -> Path:
        """Path of the folder with files that the program writes for itself."""
        return self.folder / "state"


def read_site_toml_without_data(folder: Path) -> SiteSettings:
    """Read and check ``site.toml`` of a folder, without opening the data set that it names.

    Raises:
        BadInput: With every fault.
    """
    settings, faults = read_site_with_faults(folder)
    raise_faults(faults)
    return settings


def read_site_with_faults(folder: Path) -> tuple[SiteSettings, list[Fault]]:
    """Read ``site.toml``; return its settings, and faults that the caller reports together with faults of the data.

    These are the faults of the keys ``annotates``, ``synonyms`` and ``opt_out``.

    Raises:
        BadInput: With every fault, if the file is missing or has any other fault.
    """
    tree = read_toml(refuse_missing_site_file(folder) / SITE_FILE)
    data = tree.get("data")
    labels: Any = ()
    synonyms: Any = {}
    key_faults = list[Fault]()
    if isinstance(data, dict):
        labels = data.pop("annotates", ())
        synonyms = data.pop("synonyms", {})
        # Read from the file again before each round: OptOutSource.
        _, key_faults = read_opt_out_key(data)
        data.pop("opt_out", None)
    if not isinstance(labels, list | tuple) or not all(isinstance(name, str) for name in labels):
        key_faults.append(Fault(f"{SITE_FILE}: data.annotates", "must be a list of class names."))
    if not isinstance(synonyms, dict) or not all(isinstance(name, str) for name in synonyms.values()):
        key_faults.append(
            Fault(f"{SITE_FILE}: data.synonyms", 'must be a table of lines "own name" = "canonical name".')
        )
    elif unstated := [site_name for site_name, name in synonyms.items() if name == CLASS_PLACEHOLDER]:
        problem = f"{quote_names(unstated)} would become the class {CLASS_PLACEHOLDER}."
        remedy = f"Write the class that it means in place of {CLASS_PLACEHOLDER}, or take the line out."
        key_faults.append(Fault(f"{SITE_FILE}: data.synonyms", problem, remedy))
    try:
        file = validate_tables(SiteTomlContent, tree, SITE_FILE)
    except BadInput as error:
        explained = _explain_class_folders(folder, data, error.faults)
        raise BadInput([*_list_findings_of_column(folder, data, explained), *key_faults]) from None
    if not key_faults:  # the names of the data's columns and classes are normalised as well
        labels = map(normalize_name, labels)
        synonyms = {normalize_name(site_name): normalize_name(name) for site_name, name in synonyms.items()}
    return SiteSettings(folder, file, tuple(labels), synonyms), key_faults


def _explain_class_folders(folder: Path, data: Any, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults, with a remedy for a missing ``data.labels`` if the pictures are in class folders."""
    where = f"{SITE_FILE}: data.labels"
    images = data.get("images") if isinstance(data, dict) else None
    if not isinstance(images, str) or where not in {fault.where for fault in faults}:
        return list(faults)
    classes = list_class_folders(folder / images)
    if not classes:
        return list(faults)
    problem = f"is missing: {images} has a folder for each class ({quote_names(list(classes)[:MAX_NAMED_CLASSES])})."
    command = f"flwr-sim init {quote_for_shell(folder / images)} --out {quote_for_shell(folder / 'data.toml')}"
    remedy = (
        f"This command writes a table of them, data.csv, and its [data] into data.toml: {command}\n"
        f"Then copy [data] from there into {SITE_FILE}."
    )
    return [Fault(where, problem, remedy) if fault.where == where else fault for fault in faults]


def _list_findings_of_column(folder: Path, data: Any, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults, with the findings of the table's column as a remedy for a missing ``data.classes``."""
    is_missing = [MISSING_CLASSES_MESSAGE_START in fault.problem for fault in faults]
    if not any(is_missing):
        return list(faults)
    try:
        columns = read_csv_table(folder / str(data.get("labels")), f"{SITE_FILE}: data.labels")
        column = columns.get_column(normalize_name(str(data.get("finding_column"))), with_line_ends=True)
        rows = count_rows_by_finding(column, str(data.get("separator", DEFAULT_SEPARATOR)))
        absent = {str(word).casefold() for word in data.get("no_finding", NO_FINDING)}
    except (BadInput, KeyError, TypeError):  # another fault, which is reported once the key exists
        return list(faults)
    findings = {name: count for name, count in rows.items() if name.casefold() not in absent}
    named = list(findings)[:MAX_NAMED_FINDINGS]
    if not named:
        return list(faults)
    counts = (str(count) if count >= MIN_PRINTED_ROWS else f"under {MIN_PRINTED_ROWS}" for count in findings.values())
    listed = ", ".join(f"{quote_names([name])} ({count})" for name, count in zip(named, counts, strict=False))
    rarer = len(findings) - len(named)
    more = f" and {rarer:,} rarer ones" if rarer else ""
    remedy = (
        f"The column has, with numbers of rows: {listed}{more}. This line under [data] keeps those that are named; "
    )
    remedy += f"take out what is no class, and list it in other_findings:\n    classes = {format_as_json_text(named)}"
    return [
        replace(fault, remedy=remedy) if missing else fault for fault, missing in zip(faults, is_missing, strict=True)
    ]


def read_and_check_connection_kit(settings: SiteSettings) -> SiteConnectionKit:
    """Read the coordinator's kit, and check that it belongs to this site and to its key.

    Raises:
        BadInput: With every fault.
    """
    faults = list[Fault]()
    try:
        key = read_private_key(settings.key_path)
    except BadInput as error:
        faults += error.faults
    if not settings.kit_path.is_file():
        problem = f"there is no {settings.kit_path.name} in {settings.folder}."
        if others := sorted(path.name for path in settings.folder.glob("*.kit")):
            problem += f" {quote_names(others)} is there: the kit of another site, or under another name."
        remedy = f"Send {settings.file.name}.request to the coordinator, who admits it and sends the kit back."
        raise_faults([*faults, Fault(f"{SITE_FILE}: kit", problem, remedy)])
    try:
        kit = read_connection_kit(settings.kit_path)
    except BadInput as error:
        faults += error.faults
    raise_faults(faults)
    if kit.site != settings.file.name:
        problem = f'is "{settings.file.name}", but the kit is for "{kit.site}".'
        faults.append(Fault(f"{SITE_FILE}: name", problem, "A site uses the name it is registered by."))
    if not is_same_public_key(kit.public_key, format_public_key_line(key, "")):
        problem = f"is not the key that {settings.kit_path.name} was written for."
        remedy = "Ask for a kit for this key, or put the old key back."
        if any(is_same_public_key(kit.public_key, old) for old in read_old_public_keys(settings.state_folder)):
            remedy = (
                f"The key was renewed after that. Send {settings.file.name}.request to the coordinator, who admits "
            )
            remedy += "the new key and sends a new kit back."
        faults.append(Fault(settings.key_path.name, problem, remedy))
    raise_faults(faults)
    return kit


def read_old_public_keys(state: Path) -> list[str]:
    """Return the public keys that the site had before renewals, as OpenSSH lines, the oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return (state / OLD_KEYS_FILE).read_text(encoding="utf-8").splitlines()
    return []


def refuse_missing_site_file(folder: Path) -> Path:
    """Check that a folder contains ``site.toml``; return the folder.

    Raises:
        BadInput: If the file or the folder does not exist.
    """
    if is_file(folder / SITE_FILE):
        return folder
    problem = f"is no site's folder: it holds no {SITE_FILE}."
    remedy = "Make one with flwr-client init."
    if not folder.exists():
        problem = "there is no such folder."
    elif not folder.is_dir():
        problem = "is a file; a site's folder is wanted."
        remedy = f"Name the folder that holds {SITE_FILE}."
    raise BadInput([Fault(str(folder), problem, remedy)])


# ---------------------------------------------------------------------- the last plan


def store_last_plan(state: Path, plan: str) -> None:
    """Store the plan of the last roll call, for ``flwr-client check``."""
    write_atomically(state / PLAN_FILE, plan.encode())


def read_last_plan(state: Path) -> HospitalPlan | None:
    """Return the plan of the last roll call; None if there was none, or this release cannot read it."""
    try:
        return HospitalPlan.model_validate_json((state / PLAN_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


# ---------------------------------------------------------------------- flwr-client init


PIXEL_LINES = (
    ("color", False, "true: red, green and blue; false: grey"),
    ("image_size", 224, "height and width, in pixels; [depth, height, width] of volumes"),
    ("resize", "pad", '"pad" keeps the aspect ratio, with black beside; "stretch" does not'),
    ("window", (40, 400), "of DICOM and NIfTI files: centre and width; the file's own where left out"),
    ("spacing", (3, 1, 1), "of volumes: mm between voxels, along depth, height and width"),
    ("value_range", (0, 4095), "of PNG and JPEG files: black and white; 0 and 255 where left out"),
)
"""Keys of ``[data]`` for pixels in the ``site.toml`` of a new site: key, value in the comment, and explanation."""


def make_site_toml(name: str, experiment: Experiment | None = None) -> str:
    """Return the ``site.toml`` of a new site, with a comment for every key.

    Args:
        experiment: The coordinator's experiment, whose pixel settings are filled in and whose vocabulary is added as
            comments; None if it is not known yet.
    """
    text = (Path(__file__).parent / "site.toml.template").read_text(encoding="utf-8")
    stated = {} if experiment is None else list_stated_pixel_settings(experiment)
    comments = {key: comment for key, _, comment in PIXEL_LINES}
    lines = {key: f"# {format_setting(key, value)}" for key, value, _ in PIXEL_LINES}
    lines |= {key: format_setting(key, value) for key, value in stated.items()}
    pixels = "".join(
        f"{line:<31} # {comments[key]}\n" if key in comments else f"{line}\n" for key, line in lines.items()
    )
    levels = {str(level): sentence for level, sentence in LEVEL_SENTENCES.items()}
    classes = "" if experiment is None else _format_classes_as_comment(experiment.vocabulary or {})
    policy = format_policy_comments()
    return Template(text).substitute(levels, name=name, pixels=pixels, policy=policy, classes=classes)


def _format_classes_as_comment(vocabulary: Vocabulary) -> str:
    """Return the study's classes, with definitions and synonyms, as comment lines for a TOML file."""
    lines = ["# The study's classes:"] if vocabulary else []
    for name, entry in vocabulary.items():
        facts = [entry.definition] if entry.definition else []
        facts += [f"synonyms: {', '.join(entry.synonyms)}"] if entry.synonyms else []
        text = f"{format_as_json_text(name)}: {'; '.join(facts)}" if facts else format_as_json_text(name)
        lines += textwrap.wrap(text, 118, initial_indent="#   ", subsequent_indent="#       ")
    return "".join(f"{line}\n" for line in lines)


def list_stated_pixel_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the pixel settings in ``[data]`` that an experiment sets for every hospital, as key -> value."""
    model = experiment.model
    table = experiment.pixels or {}
    stated = {"color": model.channels == 3 and not model.takes_volumes, "image_size": model.image_size}
    return stated | {key: value for key, value in table.items() if key != SITE_SPECIFIC_KEY and value is not None}


def make_site_folder(folder: Path, name: str, experiment: Experiment | None = None) -> list[str]:
    """Make the missing files of a site's folder, and overwrite none.

    Args:
        experiment: The coordinator's experiment, whose pixel settings ``site.toml`` gets; None if it is not known yet.

    Returns:
        Lines for the person who ran the command.

    Raises:
        BadInput: If the name is not allowed, the folder is a file, or the key cannot be read or written.
    """
    try:
        check_site_name(name)
    except ValueError as error:
        raise BadInput([Fault("--name", f"{error}.")]) from None
    if folder.exists() and not folder.is_dir():
        raise BadInput([Fault(str(folder), "is a file; a site's folder is made here.", "Name another folder.")])
    with remove_outputs_on_failure(folder, *(folder / file for file in (f"{name}.key", f"{name}.request", SITE_FILE))):
        if not folder.exists():
            make_private_folder(folder)
        key_path = join_plain_name(folder, PlainName(name), ".key")
        request = join_plain_name(folder, PlainName(name), ".request")
        lines = []
        if key_path.exists():
            key = read_private_key(key_path)
            lines.append(f"{key_path} is there already and stays.")
        else:
            try:
                key = create_private_key(key_path)
            except OSError as error:
                if is_disk_full(error):
                    raise
                raise BadInput([Fault(str(key_path), f"cannot be written: {error.strerror}.")]) from None
            lines.append(f"{key_path}: this site's private key. It stays here; nobody else needs it.")

        line = format_public_key_line(key, name)
        write_commented_toml_file(
            request, SiteAdmissionRequest(site=name, public_key=line), "For the coordinator. Holds no secret."
        )
        lines.append(f"{request}: send this file to the coordinator, who calls you and asks for this phrase:")
        lines.append(f"    {compute_public_key_phrase(line)}")
        lines.append("    or for the fingerprint, which says the same of the same key:")
        lines.append(f"    {compute_public_key_fingerprint(line)}")
        lines.append("    Write down the phrase that the coordinator reads out to you in the same call.")

        if (folder / SITE_FILE).exists():
            lines.append(f"{folder / SITE_FILE} is there already and stays.")
        else:
            write_atomically(folder / SITE_FILE, make_site_toml(name, experiment).encode())
            lines.append(f"{folder / SITE_FILE}: say there where this hospital's images and labels are.")

        lines.append(
            f"The coordinator sends {name}.kit back; put it into {folder}, then type the phrase that you wrote"
        )
        quoted_folder = quote_for_shell(folder)
        lines.append(
            f"down: flwr-client confirm {quoted_folder} PHRASE, and at last: flwr-client start {quoted_folder}"
        )
    return lines
