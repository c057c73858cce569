"""``flwr-server verify``: check a finished run against its receipt, its audit log and its stored updates.

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
from polyclinic.common.security.audit import AUDIT_FILE, AuditLog, check_audit_log
from polyclinic.common.security.authorship import TrustedKeys, check_receipt_authorship
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.common.wire.canonical_bytes import hash_record, parse_canonical_record
from polyclinic.common.wire.codec import AnyRecord, decode_record
from polyclinic.common.wire.records import Arrays, RollCallAnswer, TrainReply, make_empty_arrays
from polyclinic.server.runs.audit_log import (
    INITIAL_STATE_FILE,
    RESULT_FILES,
    SITE_FILE_ENDING,
    name_round_updates_folder,
)
from polyclinic.server.runs.folder import UPDATES_FOLDER
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
from polyclinic.strategies.engine.state import deserialize_federation_state, make_initial_state
from polyclinic.strategies.methods.base import Method, RoundContext, SequentialMethod
from polyclinic.strategies.registry import build_experiment_strategy


@dataclass
class VerificationReport:
    """The result of verifying a run.

    Attributes:
        verified: Sentences on the parts of the run that are correct.
        unverified: Sentences on the parts that cannot be checked, with the reasons.
        faults: The parts that were changed or removed.
    """

    verified: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def verify_run(path: Path, keys: TrustedKeys = MappingProxyType({})) -> VerificationReport:
    """Verify a finished run by its receipt.

    Args:
        path: The receipt, or the folder of the run.
        keys: Site -> public keys of the site, from a source other than the run.
    """
    path = path / RECEIPT_FILE if path.is_dir() else path
    report = VerificationReport()
    audit = check_audit_log(path.parent)
    report.faults += audit.faults
    report.unverified += audit.notes
    if not audit.faults and audit.entries:
        report.verified.append(f"audit: {audit.entries} entries, unbroken")
    try:
        receipt = read_run_receipt(path)
    except BadInput as error:
        report.faults += error.faults
        return report
    _check_receipt_against_audit(report, path, receipt)
    authorship = check_receipt_authorship(receipt.model_dump(mode="json"), keys)
    report.verified += authorship.right
    report.unverified += authorship.notes
    report.faults += authorship.faults
    if not receipt.replies and not any(site.public_key for site in receipt.sites.values()):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged summary is reported below
            summary = json.loads((path.parent / "summary.json").read_text(encoding="utf-8"))
            if summary["backend"] == "network":  # only a simulation has no signatures
                report.faults.append(
                    Fault(RECEIPT_FILE, "has no signatures, and the run was over the network: removed.")
                )
    _check_metrics_files(report, path.parent)
    are_plugins_unchanged = _are_plugins_unchanged(report, receipt)
    if are_plugins_unchanged:
        _check_final_model(report, path.parent, receipt)
    experiment = _read_verified_experiment(report, path.parent, receipt)
    if experiment is None or not are_plugins_unchanged:
        return report
    if reason := explain_unrepeatable_rounds(receipt, experiment):
        report.unverified.append(f"sums: not added up again, for {reason}; their hashes are checked")
        return report
    if day := find_retention_day(path.parent, UPDATES_FOLDER):
        reason = f"{UPDATES_FOLDER}/ was removed by retention on {day}"
        report.unverified.append(f"sums: not added up again, for {reason}; their hashes are checked")
        return report
    try:
        for replayed in AggregationReplay.make_initial_replay(path.parent, receipt, experiment).repeat_aggregations():
            result = f"{len(replayed.sites)} updates make the model {replayed.model_sha256[:12]}..."
            report.verified.append(f"round {replayed.round}: {result}")
    except AlteredRunFile as error:
        report.faults.append(error.fault)
    return report


def _check_receipt_against_audit(report: VerificationReport, path: Path, receipt: RunReceipt) -> None:
    """Check that the receipt agrees with the entries of the audit log, and that the log has the receipt's hash."""
    entries = list(AuditLog(path.parent).read_entries())
    entries_before = entries[: receipt.audit.entries]
    entries_after = entries[receipt.audit.entries :]
    receipt_entry = entries_after[0] if entries_after else {}
    faults = []
    if receipt_entry.get("event") != "receipt" or receipt_entry.get("before") != receipt.audit.sha256:
        problem = "names another end of the audit than the audit has: one of both was changed."
        faults.append(Fault(f"{path.name}: audit", problem))
    elif receipt_entry["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest():
        number = receipt_entry["n"]
        faults.append(Fault(path.name, f"is not the file that entry {number} of the audit names: changed."))
    try:
        by_audit = make_run_receipt(entries_before).model_dump(mode="json") | {"audit": None}
        by_receipt = receipt.model_dump(mode="json") | {"audit": None}
    except (ValidationError, KeyError, TypeError) as error:
        faults.append(Fault("audit.jsonl", f"does not describe a whole run ({type(error).__name__}): changed."))
    else:
        faults += [
            Fault(f"{path.name}: {where}", f"is {actual!r}, and {expected!r} by the audit: one of both was changed.")
            for where, actual, expected in _list_json_differences("", by_receipt, by_audit)
        ]
    report.faults += faults
    if not faults:
        report.verified.append(f"{path.name}: says what the audit says")


def _list_json_differences(where: str, first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, first value, second value) of each difference between two JSON values.

    Args:
        where: Dotted path of both values in their documents; empty for whole documents. The order of keys matters.
    """
    if isinstance(first, dict) and isinstance(second, dict) and list(first) == list(second):
        for key in first:
            yield from _list_json_differences(f"{where}.{key}".removeprefix("."), first[key], second[key])
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, values in enumerate(zip(first, second, strict=True)):
            yield from _list_json_differences(f"{where}.{index}", *values)
    elif first != second or isinstance(first, dict):
        yield where, first, second


def _check_metrics_files(report: VerificationReport, folder: Path) -> None:
    """Check that the files with the run's metrics have the hashes in the audit log."""
    hashes = [entry["sha256"] for entry in AuditLog(folder).read_entries() if entry.get("event") == "figures"]
    if not hashes:
        problem = "does not name summary.json and rounds.jsonl as the run wrote them: its end was removed."
        report.faults.append(Fault(AUDIT_FILE, problem))
        return
    faults = []
    # Only known names, because the audit log may come from an attacker.
    recorded = {name: hashes[-1][name] for name in RESULT_FILES if name in hashes[-1]}
    for name, sha256 in recorded.items():
        path = folder / name
        if not path.is_file():
            faults.append(Fault(name, "is not there: removed."))
        elif hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            faults.append(Fault(name, "is not the file that the run wrote: changed."))
    report.faults += faults
    if not faults:
        report.verified.append(f"{join_as_english_list(list(recorded))}: as the run wrote them")


def _are_plugins_unchanged(report: VerificationReport, receipt: RunReceipt) -> bool:
    """Return True if the plug-ins of the run are installed here unchanged; otherwise its models cannot be rebuilt."""
    differences = []
    for plugin in receipt.plugins:
        try:
            installed = identify_plugin(plugin.group, plugin.name)
        except BadInput:
            differences.append(f"{plugin} is not installed here")
            continue
        if installed == plugin:
            report.verified.append(f"plug-in {plugin}: the same files here")
        else:
            differences.append(f"the run had {plugin}, here is {installed}")
    if differences:
        report.unverified.append(f"model and sums: not checked, for {'; '.join(differences)}")
    return not differences


def _check_final_model(report: VerificationReport, folder: Path, receipt: RunReceipt) -> None:
    """Check that the saved model has the hash and classes in the receipt, and that the receipt has its round."""
    if receipt.result_round not in {0, *(line.round for line in receipt.rounds)}:
        problem = f"is {receipt.result_round}, and the receipt has no such round: changed."
        report.faults.append(Fault("receipt.json: result_round", problem))
    if not (folder / DESCRIPTION_FILE).exists():
        report.unverified.append(
            "model: each site has its own in this method; the receipt's hash is that of all of them"
        )
        return
    try:
        network = load_model(folder)
    except BadInput as error:
        report.faults += error.faults
        return
    sha256 = hash_model_state(read_model_state(network), make_model_layout(network))
    if sha256 != receipt.model_sha256:
        problem = f"is the model {sha256}, the receipt names {receipt.model_sha256}."
        report.faults.append(Fault("model.safetensors", problem))
        return
    report.verified.append("model.safetensors: the model that the receipt names")
    class_names = read_model_description(folder).class_names
    if class_names != receipt.classes:
        problem = f"names the classes {quote_names(class_names)}, the receipt {quote_names(receipt.classes)}: changed."
        report.faults.append(Fault(DESCRIPTION_FILE, problem))


def _read_verified_experiment(report: VerificationReport, folder: Path, receipt: RunReceipt) -> Experiment | None:
    """Return the experiment in ``summary.json``; None, with a fault in the report, if the receipt has another hash."""
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
    report.verified.append("summary.json: the experiment that the receipt names")
    return experiment


class AlteredRunFile(Exception):
    """Raised for a stored update whose hash differs from the hash in the receipt."""

    def __init__(self, where: Path, problem: str) -> None:
        super().__init__(problem)
        self.fault = Fault(f"{UPDATES_FOLDER}/{where}", problem)


def explain_unrepeatable_rounds(receipt: RunReceipt, experiment: Experiment) -> str:
    """Return the reason why the run's aggregations cannot be repeated; empty if they can be repeated."""
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
    """The coordinator's state, computed again round by round from stored updates.

    Attributes:
        updates: The run's folder ``updates/``.
        layout: Names and shapes of the model's tensors.
        model: Model after the last repeated round.
        moments: Moments of the server optimizer.
        statistics: Statistics of the method.
        lengths: Lengths of earlier updates, for clipping in methods that pass the model from site to site.
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
            AlteredRunFile: If the hash of the initial model, or of an answer to the roll call, differs from the
                receipt.
        """
        spec = experiment.model.model_copy(update={"weights": None, "weights_sha256": None})
        layout = make_model_layout(build_network(spec, receipt.classes, seed=0))
        updates = run_folder / UPDATES_FOLDER
        try:
            initial = deserialize_federation_state(_read_update_file(updates, Path(INITIAL_STATE_FILE)))
            model = initial.model
            sha256 = hash_model_state(model, layout)
        except (ValueError, KeyError, AssertionError) as error:
            raise AlteredRunFile(
                Path(INITIAL_STATE_FILE), f"is no model of this run ({type(error).__name__}): changed."
            ) from None
        if sha256 != receipt.initial_model_sha256:
            problem = f"holds the model {sha256}, the receipt names {receipt.initial_model_sha256}."
            raise AlteredRunFile(Path(INITIAL_STATE_FILE), problem)
        method = build_experiment_strategy(experiment)
        expected, moments = (  # shape and type of each array
            {name: (array.shape, array.dtype) for name, array in state.moments.items()}
            for state in (make_initial_state(method.site, model), initial)
        )
        if initial.best is not None or moments != expected or initial.statistics:
            raise AlteredRunFile(Path(INITIAL_STATE_FILE), "holds more than a model to begin with: changed.")
        replay = cls(updates, receipt, experiment, layout, method, model, initial.moments)
        for name, site in receipt.sites.items():
            path = join_plain_name(Path("roll-call"), PlainName(name), SITE_FILE_ENDING)
            replay.answers[name] = replay._read_and_verify_record(path, site.answer_sha256, RollCallAnswer)
        return replay

    def repeat_aggregations(self) -> Iterator[ReceiptRound]:
        """Repeat the aggregations; yield each round whose model has the hash in the receipt.

        Raises:
            AlteredRunFile: At the first update or model whose hash differs from the receipt.
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
            task = self.experiment.model.task
            seed = self.experiment.run.seed
            uncounted = frozenset(expected.uncounted)
            counting = {site: answer for site, answer in answers.items() if site not in uncounted}
            context = RoundContext(task, contract, counting, self.statistics, expected.round, seed, uncounted)
            if isinstance(self.method, SequentialMethod) and not self.method.site.averages_in_round(expected.round):
                passed_model = self.model
                rounds_left = self.experiment.run.rounds - expected.round
                for visits, reply in enumerate(replies.values(), start=1):
                    visit = add_sequential_site_update(passed_model, reply, self.update_clip_limit, self.lengths)
                    passed_model = visit.model
                    self.lengths = visit.lengths
                    self.model = self.method.result_after_site_visit(
                        expected.round, rounds_left, visits, self.model, passed_model
                    )
            else:
                clipped = replies
                if self.update_clip_limit is not None:
                    clipped, _ = clip_long_updates(replies, self.update_clip_limit)
                means = merge_updates(self.method, context, self.model, clipped).means
                self.model, self.moments = update_global_model(self.method, expected.round, means, self.moments)
            self.statistics = self.method.aggregate_statistics(context, replies)
            sha256 = hash_model_state(self.model, self.layout)
            if sha256 != expected.model_sha256:
                raise AlteredRunFile(folder, f"make the model {sha256}, the receipt names {expected.model_sha256}.")
            yield expected

    def _read_and_verify_record(self, where: Path, sha256: str, kind: type[AnyRecord]) -> AnyRecord:
        """Return a stored record.

        Args:
            where: Path of the file in ``updates/``.
            sha256: Hash of the record in the receipt.
            kind: Record class.

        Raises:
            AlteredRunFile: If the file is missing or damaged, or the hash differs.
        """
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
    if (updates / where).exists() and not (updates / where).is_file():  # reading from a pipe might never end
        raise AlteredRunFile(where, "is no file: changed.")
    try:
        return (updates / where).read_bytes()
    except OSError as error:
        raise AlteredRunFile(where, f"cannot be read ({error.strerror}): removed.") from None
