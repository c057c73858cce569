"""``flwr-server verify``: is a finished run what its receipt, its audit and its updates say it is?"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from common.config import Experiment
from common.errors import BadInput, Fault, quoted
from common.models.files import DESCRIPTION
from common.models.saved import load_model, read_description
from common.models.state import layout_of, read_state, state_sha256
from common.plugins import stamp_of
from common.security.audit import FILE as AUDIT
from common.security.audit import Audit, Entry, check
from common.security.authorship import check_authorship
from common.system.formatting import listed
from server.runs.receipt import FILE, Receipt, experiment_sha256, read_receipt, receipt_of
from server.runs.replay import Altered, Replay, why_not


@dataclass
class Verified:
    """What was found: what is right, what could not be looked at, what is wrong."""

    right: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def verify(path: Path, keys: Mapping[str, str] = MappingProxyType({})) -> Verified:
    """Check a receipt, named by itself or by its run folder, with everything beside it.

    Args:
        keys: Public keys of sites that are known from elsewhere, as OpenSSH lines.
    """
    path = path / FILE if path.is_dir() else path
    found = Verified()
    audit = check(path.parent)
    found.faults += audit.faults
    found.unknown += audit.notes
    if not audit.faults and audit.entries:
        found.right.append(f"audit: {audit.entries} entries, unbroken")
    try:
        receipt = read_receipt(path)
    except BadInput as error:
        found.faults += error.faults
        return found
    _check_against_audit(found, path, receipt)
    authorship = check_authorship(receipt.model_dump(mode="json"), keys)
    found.right, found.unknown = found.right + authorship.right, found.unknown + authorship.notes
    found.faults += authorship.faults
    if not receipt.replies and not any(site.public_key for site in receipt.sites.values()):
        _refuse_unsigned(found, path.parent)
    _check_figures(found, path.parent)
    same_code = _check_plugins(found, receipt)
    if same_code:
        _check_model(found, path.parent, receipt)
    experiment = _experiment(found, path.parent, receipt)
    if experiment is not None and same_code:
        _check_sums(found, path.parent, receipt, experiment)
    return found


def _check_against_audit(found: Verified, path: Path, receipt: Receipt) -> None:
    """The receipt is made of the audit's entries, and its hash is the entry after them."""
    entries = list(Audit(path.parent).entries())
    before, after = entries[: receipt.audit.entries], entries[receipt.audit.entries :]
    last = after[0] if after else {}
    faults = []
    if last.get("event") != "receipt" or last.get("before") != receipt.audit.sha256:
        problem = "names another end of the audit than the audit has: one of both was changed."
        faults.append(Fault(f"{path.name}: audit", problem))
    elif last["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
        faults.append(Fault(path.name, f"is not the file that entry {last['n']} of the audit names: changed."))
    faults += _differences(path.name, receipt, before)
    found.faults += faults
    if not faults:
        found.right.append(f"{path.name}: says what the audit says")


def _differences(name: str, receipt: Receipt, entries: list[Entry]) -> list[Fault]:
    try:
        made = receipt_of(entries).model_dump(mode="json")
    except (ValidationError, KeyError, TypeError) as error:
        return [Fault("audit.jsonl", f"does not describe a whole run ({type(error).__name__}): changed.")]
    said = receipt.model_dump(mode="json")
    return [
        Fault(f"{name}: {where}", f"is {now!r}, and {then!r} by the audit: one of both was changed.")
        for where, now, then in _unequal("", {**said, "audit": None}, {**made, "audit": None})
    ]


def _unequal(where: str, now: Any, then: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two trees differ, and in what; the order of names counts."""
    if isinstance(now, dict) and isinstance(then, dict) and list(now) == list(then):
        for key in now:
            yield from _unequal(f"{where}.{key}".removeprefix("."), now[key], then[key])
    elif isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        for place, (one, other) in enumerate(zip(now, then, strict=True)):
            yield from _unequal(f"{where}.{place}", one, other)
    elif now != then or isinstance(now, dict):
        yield where, now, then


def _refuse_unsigned(found: Verified, folder: Path) -> None:
    """A run over the network has signatures; only a simulation has none."""
    try:
        backend = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if backend == "network":
        found.faults.append(Fault(FILE, "has no signatures, and the run was over the network: removed."))


def _check_figures(found: Verified, folder: Path) -> None:
    """The files with the run's figures are those that it wrote when it was done."""
    noted = [entry["sha256"] for entry in Audit(folder).entries() if entry.get("event") == "figures"]
    if not noted:
        problem = "does not name summary.json and rounds.jsonl as the run wrote them: its end was removed."
        found.faults.append(Fault(AUDIT, problem))
        return
    faults = []
    for name, sha256 in noted[-1].items():
        path = folder / name
        if not path.is_file():
            faults.append(Fault(name, "is not there: removed."))
        elif hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            faults.append(Fault(name, "is not the file that the run wrote: changed."))
    found.faults += faults
    if not faults:
        found.right.append(f"{listed(list(noted[-1]))}: as the run wrote them")


def _check_plugins(found: Verified, receipt: Receipt) -> bool:
    """Whether the code of the run's plug-ins is what is installed here; else no model can be built as it was."""
    others = []
    for stamp in receipt.plugins:
        try:
            here = stamp_of(stamp.group, stamp.name)
        except BadInput:
            others.append(f"{stamp} is not installed here")
            continue
        if here == stamp:
            found.right.append(f"plug-in {stamp}: the same files here")
        else:
            others.append(f"the run had {stamp}, here is {here}")
    if others:
        found.unknown.append(f"model and sums: not checked, for {'; '.join(others)}")
    return not others


def _check_model(found: Verified, folder: Path, receipt: Receipt) -> None:
    """The model beside the receipt is the one that it names, of a round that it has."""
    if receipt.result_round not in {0, *(one.round for one in receipt.rounds)}:
        problem = f"is {receipt.result_round}, and the receipt has no such round: changed."
        found.faults.append(Fault("receipt.json: result_round", problem))
    if not (folder / DESCRIPTION).exists():
        found.unknown.append("model: each site has its own in this method; the receipt's hash is that of all of them")
        return
    try:
        network = load_model(folder)
    except BadInput as error:
        found.faults += error.faults
        return
    if (sha256 := state_sha256(read_state(network), layout_of(network))) != receipt.model_sha256:
        found.faults.append(
            Fault("model.safetensors", f"is the model {sha256}, the receipt names {receipt.model_sha256}.")
        )
        return
    found.right.append("model.safetensors: the model that the receipt names")
    if (named := read_description(folder).class_names) != receipt.classes:
        problem = f"names the classes {quoted(named)}, the receipt {quoted(receipt.classes)}: changed."
        found.faults.append(Fault(DESCRIPTION, problem))


def _experiment(found: Verified, folder: Path, receipt: Receipt) -> Experiment | None:
    """The experiment in ``summary.json``, if it is the receipt's."""
    try:
        said = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        experiment = Experiment.model_validate(said["experiment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        found.faults.append(Fault("summary.json: experiment", f"cannot be read ({type(error).__name__})."))
        return None
    if experiment_sha256(experiment) != receipt.experiment_sha256:
        found.faults.append(Fault("summary.json: experiment", "is not the one that the receipt names: changed."))
        return None
    if said.get("model_sha256") != receipt.model_sha256:
        found.faults.append(Fault("summary.json: model_sha256", "is not the one that the receipt names: changed."))
    found.right.append("summary.json: the experiment that the receipt names")
    return experiment


def _check_sums(found: Verified, folder: Path, receipt: Receipt, experiment: Experiment) -> None:
    """Each round's model is what its updates make."""
    if reason := why_not(receipt, experiment):
        found.unknown.append(f"sums: not added up again, for {reason}; their hashes are checked")
        return
    try:
        for one in Replay.of(folder, receipt, experiment).rounds():
            found.right.append(f"round {one.round}: {len(one.sites)} updates make the model {one.model_sha256[:12]}...")
    except Altered as error:
        found.faults.append(error.fault)
