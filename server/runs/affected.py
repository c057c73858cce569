"""Find the runs and models to which one hospital contributed, for ``flwr-server remove``."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.saved import SavedModelDescription, read_model_description
from polyclinic.common.security.audit import AUDIT_FILE, AuditLog
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_rounds_in_words
from polyclinic.server.runs.receipt import RECEIPT_FILE, ReceiptDraft, read_run_receipt


@dataclass(frozen=True)
class AffectedRun:
    """A run to whose model a site contributed, by its updates or by the model with which the run began.

    Attributes:
        folder: The run's folder.
        name: The run's title.
        rounds: The rounds in which an update of the site was aggregated, up to the round of the final model.
        began_from: Folder of another affected run, with whose model this run began; empty if there is none.
        model_sha256: Hash of the final model; empty if the run has not ended.
        other_sites: The other sites of the run.
    """

    folder: str
    name: str
    rounds: tuple[int, ...]
    began_from: str
    model_sha256: str
    other_sites: tuple[str, ...]

    def describe(self) -> str:
        """Describe the contributions, such as "trained in rounds 1 to 3; began with the model of FOLDER"."""
        contributions = []
        if self.rounds:
            contributions.append(f"trained in {format_rounds_in_words(self.rounds)}")
        if self.began_from:
            contributions.append(f"began with the model of {self.began_from}")
        return "; ".join(contributions)


@dataclass(frozen=True)
class SiteTraces:
    """The runs of a coordinator to which one site contributed, and the other runs.

    Attributes:
        affected: The runs to whose models the site contributed, oldest first.
        unaffected: Folders of runs to whose models it did not contribute.
        unreadable: Folder of another run -> reason why it is not known whether the site took part.
    """

    affected: tuple[AffectedRun, ...]
    unaffected: tuple[str, ...]
    unreadable: dict[str, str]


@dataclass(frozen=True)
class _RunRecord:
    """The sites and the model of a run, read from its receipt, or from the audit log of a run that has not ended.

    Attributes:
        folder: The run's folder.
        name: The run's title.
        sites: All sites of the run.
        sites_by_round: Round -> the sites whose updates were aggregated, up to the round of the final model.
        model: Description of the final model; None if the run has none.
    """

    folder: Path
    name: str
    sites: tuple[str, ...]
    sites_by_round: Mapping[int, Collection[str]]
    model: SavedModelDescription | None


def find_traces_of_site(site: str, folders: Iterable[Path]) -> SiteTraces:
    """Find the runs to whose models a site contributed, by the receipts in their folders.

    A run that began with the model of an affected run is affected too.

    Args:
        site: The site's name in the federation.
        folders: Folders of runs, oldest first.
    """
    records = list[_RunRecord]()
    unreadable = dict[str, str]()
    for folder in dict.fromkeys(folders):
        try:
            records.append(_read_run_record(folder))
        except BadInput as bad:
            unreadable[str(folder)] = str(bad.faults[0])
    affected = list[AffectedRun]()
    unaffected = list[str]()
    affected_weights = dict[str, str]()  # hash of an affected model's file -> folder of its run
    for record in records:
        rounds = tuple(number for number, sites in record.sites_by_round.items() if site in sites)
        start = record.model.initial_weights_sha256 if record.model else None
        began_from = affected_weights.get(start or "", "")
        if not rounds and not began_from:
            unaffected.append(str(record.folder))
            continue
        if record.model:
            affected_weights[record.model.safetensors_sha256] = str(record.folder)
        others = tuple(name for name in record.sites if name != site)
        sha256 = record.model.model_sha256 if record.model else ""
        affected.append(AffectedRun(str(record.folder), record.name, rounds, began_from, sha256, others))
    return SiteTraces(tuple(affected), tuple(unaffected), unreadable)


def write_removal_record(path: Path, site: str, reason: str, when: str, traces: SiteTraces) -> None:
    """Write the file ``removed/NAME.json`` about a site that left: time, reason, and the runs of the coordinator."""
    record: dict[str, Any] = {"site": site, "removed": when, "reason": reason, **asdict(traces)}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode(), private=True)


def _read_run_record(folder: Path) -> _RunRecord:
    """Read a run's receipt, or the audit of a run that has not ended.

    Raises:
        BadInput: If the folder is not a run folder, or its files are damaged.
    """
    if (folder / RECEIPT_FILE).is_file() or not (folder / AUDIT_FILE).is_file():
        receipt = read_run_receipt(folder / RECEIPT_FILE)
        sites_by_round = {line.round: line.sites for line in receipt.rounds if line.round <= receipt.result_round}
        return _RunRecord(folder, receipt.name, tuple(receipt.sites), sites_by_round, read_model_description(folder))
    draft = ReceiptDraft()
    try:
        for entry in AuditLog(folder).read_entries():
            if entry.get("event") == "run":
                draft = ReceiptDraft({"name": entry["name"]})
            else:
                draft.add_audit_entry(entry)
    except (OSError, KeyError, ValueError) as error:
        problem = f"cannot be read ({type(error).__name__}): changed."
        raise BadInput([Fault(str(folder / AUDIT_FILE), problem)]) from None
    sites_by_round = {number: draft.rounds[number].sites for number in sorted(draft.rounds)}
    return _RunRecord(folder, str(draft.fields.get("name", "")), tuple(draft.sites), sites_by_round, None)
