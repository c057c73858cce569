"""``flwr-server verify``: check a finished run against its receipt, its audit and its kept updates.

If the run kept its updates, every aggregation is repeated, and the resulting models are compared with the receipt.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from polyclinic.common.config import Experiment
from polyclinic.common.contract import LabelDeclaration, merge_label_declarations
from polyclinic.common.errors import BadInput, Fault, WireError, quote_names
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.state import (
    ModelState,
    ModelStateLayout,
    hash_model_state,
    make_model_layout,
    read_model_state,
)
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE
from polyclinic.common.plugins import identify_plugin
from polyclinic.common.security.audit import AUDIT_FILE as AUDIT
from polyclinic.common.security.audit import AuditLog, check_audit_log
from polyclinic.common.security.authorship import TrustedKeys, check_receipt_authorship
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.common.wire.canonical_bytes import hash_record, parse_canonical_record
from polyclinic.common.wire.codec import AnyRecord, decode_record
from polyclinic.common.wire.records import Arrays, RollCallAnswer, TrainReply, make_empty_arrays
from polyclinic.server.runs.audit_log import FIGURES, INITIAL, SITE_FILE_ENDING, name_round_updates_folder
from polyclinic.server.runs.folder import UPDATES
from polyclinic.server.runs.receipt import (
    RECEIPT_FILE,
    ReceiptRound,
    RunReceipt,
    hash_experiment_settings,
    make_run_receipt,
    read_run_receipt,
)
from polyclinic.server.runs.retention import find_retention_day
from polyclinic.strategies.aggregation.bounds import Lengths, clip_long_updates
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.engine.aggregator import (
    add_sequential_site_update,
    get_update_norm_limit,
    merge_updates,
    update_global_model,
)
from polyclinic.strategies.engine.state import deserialize_federation_state as state_of_bytes
from polyclinic.strategies.engine.state import make_initial_state
from polyclinic.strategies.methods.base import Method, RoundContext, SequentialMethod
from polyclinic.strategies.registry import build_experiment_strategy


@dataclass
class VerificationReport:
    """The result of verifying a run: correct parts, unverifiable parts, and faults."""

    right: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def verify_run(path: Path, keys: TrustedKeys = MappingProxyType({})) -> VerificationReport:
    """Verify a finished run by its receipt.

    Args:
        path: The receipt, or the folder of the run.
        keys: The sites' public keys, from a source other than the run.
    """
    path = path / RECEIPT_FILE if path.is_dir() else path
    report = VerificationReport()
    audit = check_audit_log(path.parent)
    report.faults += audit.faults
    report.unknown += audit.notes
    if not audit.faults and audit.entries:
        report.right.append(f"audit: {audit.entries} entries, unbroken")
    try:
        receipt = read_run_receipt(path)
    except BadInput as error:
        report.faults += error.faults
        return report
    _check_receipt_against_audit(report, path, receipt)
    authorship = check_receipt_authorship(receipt.model_dump(mode="json"), keys)
    report.right, report.unknown = report.right + authorship.right, report.unknown + authorship.notes
    report.faults += authorship.faults
    if not receipt.replies and not any(site.public_key for site in receipt.sites.values()):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged summary is reported below
            summary = json.loads((path.parent / "summary.json").read_text(encoding="utf-8"))
            if summary["backend"] == "network":  # only a simulation has no signatures
                report.faults.append(
                    Fault(RECEIPT_FILE, "has no signatures, and the run was over the network: removed.")
                )
    _check_metrics_files(report, path.parent)
    same_code = _are_plugins_unchanged(report, receipt)
    if same_code:
        _check_final_model(report, path.parent, receipt)
    experiment = _read_verified_experiment(report, path.parent, receipt)
    if experiment is None or not same_code:
        return report
    if reason := explain_unrepeatable_rounds(receipt, experiment):
        report.unknown.append(f"sums: not added up again, for {reason}; their hashes are checked")
        return report
    if day := find_retention_day(path.parent, UPDATES):
        said = f"sums: not added up again, for {UPDATES}/ was removed by retention on {day}; their hashes are checked"
        report.unknown.append(said)
        return report
    try:
        for replayed in AggregationReplay.make_initial_replay(path.parent, receipt, experiment).repeat_aggregations():
            made = f"{len(replayed.sites)} updates make the model {replayed.model_sha256[:12]}..."
            report.right.append(f"round {replayed.round}: {made}")
    except AlteredRunFile as error:
        report.faults.append(error.fault)
    return report


def _check_receipt_against_audit(report: VerificationReport, path: Path, receipt: RunReceipt) -> None:
    """Check that the receipt agrees with the audit's entries, and that the audit has the receipt's hash."""
    entries = list(AuditLog(path.parent).read_entries())
    before, after = entries[: receipt.audit.entries], entries[receipt.audit.entries :]
    last = after[0] if after else {}
    faults = []
    if last.get("event") != "receipt" or last.get("before") != receipt.audit.sha256:
        problem = "names another end of the audit than the audit has: one of both was changed."
        faults.append(Fault(f"{path.name}: audit", problem))
    elif last["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
        faults.append(Fault(path.name, f"is not the file that entry {last['n']} of the audit names: changed."))
    try:
        by_audit = make_run_receipt(before).model_dump(mode="json") | {"audit": None}
        by_receipt = receipt.model_dump(mode="json") | {"audit": None}
    except (ValidationError, KeyError, TypeError) as error:
        faults.append(Fault("audit.jsonl", f"does not describe a whole run ({type(error).__name__}): changed."))
    else:
        faults += [
            Fault(f"{path.name}: {where}", f"is {now!r}, and {then!r} by the audit: one of both was changed.")
            for where, now, then in _list_json_differences("", by_receipt, by_audit)
        ]
    report.faults += faults
    if not faults:
        report.right.append(f"{path.name}: says what the audit says")


def _list_json_differences(where: str, now: Any, then: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where two JSON trees differ, with both values; the order of keys matters.

    Args:
        where: Dotted place of both trees in the documents; empty for whole documents.
    """
    if isinstance(now, dict) and isinstance(then, dict) and list(now) == list(then):
        for key in now:
            yield from _list_json_differences(f"{where}.{key}".removeprefix("."), now[key], then[key])
    elif isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        for place, values in enumerate(zip(now, then, strict=True)):
            yield from _list_json_differences(f"{where}.{place}", *values)
    elif now != then or isinstance(now, dict):
        yield where, now, then


def _check_metrics_files(report: VerificationReport, folder: Path) -> None:
    """Check by their hashes that the files with the run's metrics are unchanged."""
    hashes = [entry["sha256"] for entry in AuditLog(folder).read_entries() if entry.get("event") == "figures"]
    if not hashes:
        problem = "does not name summary.json and rounds.jsonl as the run wrote them: its end was removed."
        report.faults.append(Fault(AUDIT, problem))
        return
    faults = []
    named = {name: hashes[-1][name] for name in FIGURES if name in hashes[-1]}  # the audit may be somebody else's
    for name, sha256 in named.items():
        path = folder / name
        if not path.is_file():
            faults.append(Fault(name, "is not there: removed."))
        elif hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            faults.append(Fault(name, "is not the file that the run wrote: changed."))
    report.faults += faults
    if not faults:
        report.right.append(f"{join_as_english_list(list(named))}: as the run wrote them")


def _are_plugins_unchanged(report: VerificationReport, receipt: RunReceipt) -> bool:
    """Return whether the run's plug-ins are installed here unchanged; otherwise its models cannot be rebuilt."""
    unequal = []
    for stamp in receipt.plugins:
        try:
            here = identify_plugin(stamp.group, stamp.name)
        except BadInput:
            unequal.append(f"{stamp} is not installed here")
            continue
        if here == stamp:
            report.right.append(f"plug-in {stamp}: the same files here")
        else:
            unequal.append(f"the run had {stamp}, here is {here}")
    if unequal:
        report.unknown.append(f"model and sums: not checked, for {'; '.join(unequal)}")
    return not unequal


def _check_final_model(report: VerificationReport, folder: Path, receipt: RunReceipt) -> None:
    """Check that the model file has the hash and classes in the receipt, and that the receipt has its round."""
    if receipt.result_round not in {0, *(each.round for each in receipt.rounds)}:
        problem = f"is {receipt.result_round}, and the receipt has no such round: changed."
        report.faults.append(Fault("receipt.json: result_round", problem))
    if not (folder / DESCRIPTION_FILE).exists():
        report.unknown.append("model: each site has its own in this method; the receipt's hash is that of all of them")
        return
    try:
        network = load_model(folder)
    except BadInput as error:
        report.faults += error.faults
        return
    if (sha256 := hash_model_state(read_model_state(network), make_model_layout(network))) != receipt.model_sha256:
        problem = f"is the model {sha256}, the receipt names {receipt.model_sha256}."
        report.faults.append(Fault("model.safetensors", problem))
        return
    report.right.append("model.safetensors: the model that the receipt names")
    if (class_names := read_model_description(folder).class_names) != receipt.classes:
        problem = f"names the classes {quote_names(class_names)}, the receipt {quote_names(receipt.classes)}: changed."
        report.faults.append(Fault(DESCRIPTION_FILE, problem))


def _read_verified_experiment(report: VerificationReport, folder: Path, receipt: RunReceipt) -> Experiment | None:
    """Return the experiment in ``summary.json``; None, with a fault in the report, if its hash is not the receipt's."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        experiment = Experiment.model_validate(summary["experiment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        report.faults.append(Fault("summary.json: experiment", f"cannot be read ({type(error).__name__})."))
        return None
    if hash_experiment_settings(experiment) != receipt.experiment_sha256:
        report.faults.append(Fault("summary.json: experiment", "is not the one that the receipt names: changed."))
        return None
    if summary.get("model_sha256") != receipt.model_sha256:
        report.faults.append(Fault("summary.json: model_sha256", "is not the one that the receipt names: changed."))
    report.right.append("summary.json: the experiment that the receipt names")
    return experiment


class AlteredRunFile(Exception):
    """Raised for a file of the run whose hash is not that in the receipt."""

    def __init__(self, where: Path, problem: str) -> None:
        super().__init__(problem)
        self.fault = Fault(f"{UPDATES}/{where}", problem)


def explain_unrepeatable_rounds(receipt: RunReceipt, experiment: Experiment) -> str:
    """Return why the run's aggregations cannot be repeated; empty if they can."""
    method = build_experiment_strategy(experiment)
    if not receipt.updates_kept:
        return "the run did not keep its updates (run.keep_updates)"
    if experiment.privacy.secure_aggregation:
        return "under secure aggregation updates came masked, and what unmasks them is not kept"
    if isinstance(method, SequentialMethod) and method.server_training_settings is not None:
        return "the coordinator trained on images of its own, which are no part of the receipt"
    return ""


@dataclass
class AggregationReplay:
    """The coordinator's state, recomputed round by round from kept updates.

    Attributes:
        updates: The run's folder ``updates/``.
        answers: Site -> its answer to the roll call.
    """

    updates: Path
    receipt: RunReceipt
    experiment: Experiment
    layout: ModelStateLayout
    method: Method
    model: ModelState
    moments: Moments = field(default_factory=lambda: MappingProxyType({}))
    statistics: Arrays = field(default_factory=make_empty_arrays)
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))
    answers: dict[str, RollCallAnswer] = field(default_factory=dict)

    @property
    def update_clip_limit(self) -> float | None:
        """Return the clipping limit of updates as a multiple of their median length; None without clipping."""
        return get_update_norm_limit(self.method.site, self.experiment.participation, self.experiment.privacy)

    @classmethod
    def make_initial_replay(cls, run_folder: Path, receipt: RunReceipt, experiment: Experiment) -> "AggregationReplay":
        """Return a replay with the coordinator's state before round 1.

        Raises:
            AlteredRunFile: If the hash of the initial model or of an answer to the roll call is not that in the
                receipt.
        """
        spec = experiment.model.model_copy(update={"weights": None, "weights_sha256": None})
        layout = make_model_layout(build_network(spec, receipt.classes, seed=0))
        updates = run_folder / UPDATES
        try:
            initial = state_of_bytes(_read_update_file(updates, Path(INITIAL)))
            model, sha256 = initial.model, hash_model_state(initial.model, layout)
        except (ValueError, KeyError, AssertionError) as error:
            raise AlteredRunFile(Path(INITIAL), f"is no model of this run ({type(error).__name__}): changed.") from None
        if sha256 != receipt.initial_model_sha256:
            problem = f"holds the model {sha256}, the receipt names {receipt.initial_model_sha256}."
            raise AlteredRunFile(Path(INITIAL), problem)
        method = build_experiment_strategy(experiment)
        expected, moments = (
            {name: (array.shape, array.dtype) for name, array in state.moments.items()}
            for state in (make_initial_state(method.site, model), initial)
        )
        if initial.best is not None or moments != expected or initial.statistics:
            raise AlteredRunFile(Path(INITIAL), "holds more than a model to begin with: changed.")
        replay = cls(updates, receipt, experiment, layout, method, model, initial.moments)
        for name, site in receipt.sites.items():
            path = join_plain_name(Path("roll-call"), PlainName(name), SITE_FILE_ENDING)
            replay.answers[name] = replay._read_and_verify_record(path, site.answer_sha256, RollCallAnswer)
        return replay

    def repeat_aggregations(self) -> Iterator[ReceiptRound]:
        """Repeat the aggregations; yield each round whose model has the hash in the receipt.

        Raises:
            AlteredRunFile: At the first update or model whose hash is not that in the receipt.
        """
        for expected in self.receipt.rounds:
            folder = Path(name_round_updates_folder(expected.round))
            replies = {
                site: self._read_and_verify_record(
                    join_plain_name(folder, PlainName(site), SITE_FILE_ENDING), sha256, TrainReply
                )
                for site, sha256 in expected.sites.items()
            }
            sites = sorted(self.receipt.sites.items())
            for site, images in expected.images.items():
                replies[site] = replace(replies[site], train_samples=images)
            answers = {name: self.answers[name] for name, site in sites if site.joined <= expected.round}
            declarations = [
                LabelDeclaration(answer.site, answer.names, dict(zip(answer.names, answer.class_names, strict=True)))
                for answer in answers.values()
            ]
            contract = merge_label_declarations(declarations, self.receipt.classes)
            task, seed = self.experiment.model.task, self.experiment.run.seed
            uncounted = frozenset(expected.uncounted)
            counting = {site: answer for site, answer in answers.items() if site not in uncounted}
            context = RoundContext(task, contract, counting, self.statistics, expected.round, seed, uncounted)
            if isinstance(self.method, SequentialMethod) and not self.method.site.averages_in_round(expected.round):
                passed, left = self.model, self.experiment.run.rounds - expected.round
                for hops, reply in enumerate(replies.values(), start=1):
                    visited = add_sequential_site_update(passed, reply, self.update_clip_limit, self.lengths)
                    passed, self.lengths = visited.model, visited.lengths
                    self.model = self.method.result_after_site_visit(expected.round, left, hops, self.model, passed)
            else:
                bounded = replies
                if self.update_clip_limit is not None:
                    bounded, _ = clip_long_updates(replies, self.update_clip_limit)
                means = merge_updates(self.method, context, self.model, bounded).means
                self.model, self.moments = update_global_model(self.method, expected.round, means, self.moments)
            self.statistics = self.method.aggregate_statistics(context, replies)
            if (sha256 := hash_model_state(self.model, self.layout)) != expected.model_sha256:
                raise AlteredRunFile(folder, f"make the model {sha256}, the receipt names {expected.model_sha256}.")
            yield expected

    def _read_and_verify_record(self, where: Path, sha256: str, kind: type[AnyRecord]) -> AnyRecord:
        data = _read_update_file(self.updates, where)
        try:
            content = parse_canonical_record(data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise AlteredRunFile(where, f"is no record that was kept ({error}): changed.") from None
        if (actual := hash_record(content)) != sha256:
            raise AlteredRunFile(where, f"has SHA-256 {actual}, the receipt names {sha256}: changed.")
        try:
            return decode_record(content, kind)
        except (WireError, ValueError) as error:
            raise AlteredRunFile(where, f"is none of this release's records: {error}") from None


def _read_update_file(updates: Path, where: Path) -> bytes:
    if (updates / where).exists() and not (updates / where).is_file():  # a pipe would be waited for
        raise AlteredRunFile(where, "is no file: changed.")
    try:
        return (updates / where).read_bytes()
    except OSError as error:
        raise AlteredRunFile(where, f"cannot be read ({error.strerror}): removed.") from None
