"""The runs and models that hold something of one hospital: what ``flwr-server remove`` lists when it leaves."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.saved import SavedModelDescription, read_model_description
from polyclinic.common.security.audit import AUDIT_FILE as AUDIT
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_rounds_in_words
from polyclinic.server.runs.receipt import RECEIPT_FILE as RECEIPT
from polyclinic.server.runs.receipt import ReceiptDraft, read_run_receipt


@dataclass(frozen=True)
class AffectedRun:
    """A run whose model contains contributions of a site: its own updates, or those in the model it began with.

    Attributes:
        folder: The run's folder.
        name: The run's title.
        rounds: The rounds in which an update of the site was aggregated, up to the round of the final model.
        began_from: The folder of the affected run with whose model this one began; empty if the site trained itself.
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
        """Return in words how the site's images came into the model."""
        ways = []
        if self.rounds:
            ways.append(f"trained in {format_rounds_in_words(self.rounds)}")
        if self.began_from:
            ways.append(f"began with the model of {self.began_from}")
        return "; ".join(ways)


@dataclass(frozen=True)
class SiteTraces:
    """The runs of a coordinator, by whether they contain contributions of one site.

    Attributes:
        affected: The runs whose models contain contributions of the site, oldest first.
        unaffected: Folders of runs in which the site took no part.
        unreadable: Folder -> why nobody can say if the site took part.
    """

    affected: tuple[AffectedRun, ...]
    unaffected: tuple[str, ...]
    unreadable: dict[str, str]


@dataclass(frozen=True)
class _RunRecord:
    """What a run's receipt, or the audit of a run that has not ended, says about its sites.

    Attributes:
        sites_by_round: Round -> the sites whose updates were aggregated, up to the round of the final model.
        model: Description of the final model; None if the run has none.
    """

    folder: Path
    name: str
    sites: tuple[str, ...]
    sites_by_round: Mapping[int, Collection[str]]
    model: SavedModelDescription | None


def find_traces_of_site(site: str, folders: Iterable[Path]) -> SiteTraces:
    """Find the runs whose models hold something of a site, by the receipts in their folders.

    A model that began with the weights of an affected run is affected too, also over several runs.

    Args:
        site: The site's name in the federation.
        folders: Folders of runs, oldest first.
    """
    records, unreadable = list[_RunRecord](), dict[str, str]()
    for folder in dict.fromkeys(folders):
        try:
            records.append(_read_run_record(folder))
        except BadInput as bad:
            unreadable[str(folder)] = str(bad.faults[0])
    affected, unaffected, weights = list[AffectedRun](), list[str](), dict[str, str]()
    for record in records:
        rounds = tuple(number for number, sites in record.sites_by_round.items() if site in sites)
        start = record.model.initial_weights_sha256 if record.model else None
        began_from = weights.get(start or "", "")
        if not rounds and not began_from:
            unaffected.append(str(record.folder))
            continue
        if record.model:
            weights[record.model.safetensors_sha256] = str(record.folder)
        others = tuple(name for name in record.sites if name != site)
        sha256 = record.model.model_sha256 if record.model else ""
        affected.append(AffectedRun(str(record.folder), record.name, rounds, began_from, sha256, others))
    return SiteTraces(tuple(affected), tuple(unaffected), unreadable)


def write_removal_record(path: Path, site: str, reason: str, when: str, traces: SiteTraces) -> None:
    """Write what was found when a site left, for the coordinator's own files."""
    record: dict[str, Any] = {"site": site, "removed": when, "reason": reason, **asdict(traces)}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode(), private=True)


def _read_run_record(folder: Path) -> _RunRecord:
    """Read a run's receipt, or the audit of a run that has not ended.

    Raises:
        BadInput: If the folder is no run's, or its files are damaged.
    """
    if (folder / RECEIPT).is_file() or not (folder / AUDIT).is_file():
        receipt = read_run_receipt(folder / RECEIPT)
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
        raise BadInput([Fault(str(folder / AUDIT), f"cannot be read ({type(error).__name__}): changed.")]) from None
    sites_by_round = {number: draft.rounds[number].sites for number in sorted(draft.rounds)}
    return _RunRecord(folder, str(draft.fields.get("name", "")), tuple(draft.sites), sites_by_round, None)
