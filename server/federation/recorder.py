"""Recording of a run while it proceeds: events, audit, checkpoints, and metrics of each round."""

import platform
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter

from polyclinic.common import __version__
from polyclinic.common.config import Experiment, list_plugin_identities
from polyclinic.common.errors import quote_names
from polyclinic.common.metrics.multi_class import CorrectPredictionCount, compute_round_accuracy
from polyclinic.common.models.state import ModelState, ModelStateLayout
from polyclinic.common.models.weights import WarmStart
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.common.wire.versions import WIRE_VERSION, StatedRelease
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.server.federation.checkpoints import Checkpoint, CheckpointFolder
from polyclinic.server.federation.evaluation import RunContext
from polyclinic.server.reporting.run_claims import make_run_claims
from polyclinic.server.runs.audit_log import RunAuditWriter
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.progress import SilentRunProgress
from polyclinic.server.runs.reader import RunFolderContent, read_rounds
from polyclinic.server.runs.receipt import hash_experiment_settings, write_run_receipt
from polyclinic.server.runs.schema import (
    CoordinatorTraining,
    RoundFileLine,
    RoundMethodStatistics,
    RunClaims,
    RunSummary,
    SiteLosses,
)
from polyclinic.strategies.aggregation.bounds import find_dominant_sites
from polyclinic.strategies.engine.admission_limits import describe_lowered_claim
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import (
    FederationValidation,
    MissingReplyStatus,
    ReplyArrival,
    RollbackEvent,
    RoundRecord,
    RunCallbacks,
    RunStopped,
)
from polyclinic.strategies.engine.state import FederationState, make_initial_state

_ROUND_RECORD_ADAPTER = TypeAdapter(RoundRecord)
_TALLIES_ADAPTER = TypeAdapter(dict[str, CorrectPredictionCount])
_VALIDATION_ADAPTER = TypeAdapter(FederationValidation)
_SUM_ATTRIBUTES = (
    *("train_seconds", "aggregate_seconds", "round_seconds", "site_seconds", "epochs", "epsilon", "arithmetic"),
    *("bytes_down", "bytes_up"),
)
"""Attributes of :class:`RunTotals` that a checkpoint stores without conversion."""
NO_ANSWER_REASON = "it is admitted, and has not answered the roll call"


@dataclass
class RunTotals:
    """Sums over the rounds of a run, and the last round, whose validation metrics are not known yet.

    Attributes:
        folder: The run folder, whose ``rounds.jsonl`` receives a line per round.
        workers: Number of sites that train at the same time.
        train_seconds: Sum over rounds of the sites' training time, plus the coordinator's own training. The time of a
            round is the time of its slowest site or, if larger, the sum over sites divided by the number of workers.
        aggregate_seconds: Computing time of the coordinator.
        round_seconds: Duration of all rounds by the coordinator's clock.
        site_seconds: Site -> training time over all rounds.
        epochs: Site -> number of local epochs over all rounds.
        epsilon: Site -> privacy budget spent so far (epsilon), under differential privacy.
        arithmetic: Site -> device and number format in its last report.
        bytes_down: Site -> bytes sent to the site in all exchanges.
        bytes_up: Site -> bytes received from the site in all exchanges.
        tallies: Round -> site -> number of correct predictions of the round's model on the site's test part.
    """

    folder: RunFolder
    workers: int
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    round_seconds: float = 0.0
    tallies: dict[int, Mapping[str, CorrectPredictionCount]] = field(default_factory=dict)
    site_seconds: Counter[str] = field(default_factory=Counter)
    epochs: Counter[str] = field(default_factory=Counter)
    epsilon: dict[str, float] = field(default_factory=dict)
    arithmetic: dict[str, str] = field(default_factory=dict)
    bytes_down: Counter[str] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    _pending: tuple[RoundRecord, Mapping[str, Any]] | None = None
    _plain: tuple[str, ...] = ()

    def add_round_to_totals(self, record: RoundRecord, state: FederationState, learned: Mapping[str, Any]) -> None:
        """Add a round to the sums; write the line of the previous round, whose validation metrics are now complete.

        Args:
            learned: Statistics that are specific to the run's method
                (:meth:`polyclinic.strategies.methods.base.Method.compute_round_figures`).
        """
        self.write_pending_round_line(record.validation, state)
        self._pending = record, learned
        if seconds := record.site_seconds.values():
            self.train_seconds += max(max(seconds), sum(seconds) / min(self.workers, len(seconds)))
        if record.coordinator:
            self.train_seconds += record.coordinator.seconds
        self.aggregate_seconds += record.aggregate_seconds
        self.round_seconds += record.seconds
        self.site_seconds.update(record.site_seconds)
        self.epochs.update(record.epochs)
        self.epsilon.update(record.epsilon)
        self.arithmetic.update(record.arithmetic)
        self.folder.append_absence_events(record.round, record.absent, record.sites)
        for site, done in record.shortened.items():
            self.folder.append_event("shortened_update", round=record.round, site=site, done=done)
        if record.plain != self._plain:
            self.folder.append_event("plain_mean", round=record.round, of=list(record.plain))
            self._plain = record.plain
        if record.closed_rows:
            self.folder.append_event("rows_stayed_masked", round=record.round, classes=list(record.closed_rows))
        if record.after is not None:
            self.write_pending_round_line(record.after, state)

    def write_pending_round_line(self, validation: FederationValidation, state: FederationState) -> None:
        """Write the line of the last round, with validation metrics of its model, unless it was written before."""
        if self._pending is None:
            return
        (record, learned), self._pending = self._pending, None
        self.tallies[record.round] = validation.tallies
        accuracy = compute_round_accuracy(validation.tallies) if validation.tallies else None
        site_losses = {
            site: SiteLosses(train_loss=record.train_loss.get(site), validation_loss=validation.loss.get(site))
            for site in record.sites
        }
        coordinator = record.coordinator and CoordinatorTraining(**asdict(record.coordinator))
        self.folder.append_round_line(
            RoundFileLine(
                round=record.round,
                sites=record.sites,
                absent=dict(record.absent),
                shortened=dict(record.shortened),
                closed_rows=record.closed_rows,
                train_loss=record.mean_train_loss,
                validation_loss=validation.mean_loss,
                validation_auroc=validation.mean_auroc,
                test_accuracy=accuracy,
                best=state.best_round == record.round,
                site_losses=site_losses,
                epochs=dict(record.epochs),
                epsilon=dict(record.epsilon),
                arithmetic=dict(record.arithmetic),
                coordinator=coordinator,
                learned=RoundMethodStatistics.model_validate(learned),
                site_seconds=dict(record.site_seconds),
                seconds=record.seconds,
                bytes_up=sum(record.bytes_up.values()),
                bytes_down=sum(record.bytes_down.values()),
            )
        )

    def totals_as_json(self) -> dict[str, Any]:
        """Return the sums, and the round whose line is not written yet, as JSON values for a checkpoint."""
        pending = None
        if self._pending is not None:
            pending = {"record": make_json_object(self._pending[0]), "learned": dict(self._pending[1])}
        tallies = dict[str, dict[str, Any]]()
        for number, site_tallies in self.tallies.items():
            tallies[str(number)] = {site: make_json_object(tally) for site, tally in site_tallies.items()}
        sums = dict(zip(_SUM_ATTRIBUTES, map(copy, attrgetter(*_SUM_ATTRIBUTES)(self)), strict=True))
        return {**sums, "tallies": tallies, "pending": pending}

    def restore_totals(self, facts: Mapping[str, Any], last_round: int) -> None:
        """Restore the sums from a checkpoint, and remove the lines of later rounds from ``rounds.jsonl``.

        Args:
            facts: Result of :meth:`totals_as_json`.
            last_round: Round of the checkpoint.
        """
        for name in _SUM_ATTRIBUTES:
            setattr(self, name, type(getattr(self, name))(facts[name]))
        self.tallies = {
            int(number): _TALLIES_ADAPTER.validate_python(tallies) for number, tallies in facts["tallies"].items()
        }
        self._pending = None
        if (pending := facts["pending"]) is not None:
            self._pending = _ROUND_RECORD_ADAPTER.validate_python(pending["record"]), pending["learned"]
        self.folder.remove_rounds_after(last_round if pending is None else last_round - 1)


def make_json_object(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for JSON.

    Unlike :func:`dataclasses.asdict`, it does not copy each value of a mapping. With a thousand sites, the copies would
    take as long as the training at some of them.
    """
    values = dict[str, Any]()
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        if is_dataclass(value):
            value = make_json_object(value)
        elif isinstance(value, Mapping):
            value = {key: make_json_object(each) if is_dataclass(each) else each for key, each in value.items()}
        values[name] = value
    return values


class RunRecorder(RunCallbacks):
    """The coordinator's callbacks that write the run folder.

    The run calls :meth:`begin_run_recording` after the roll call, and :meth:`record_run_end` or :meth:`record_run_stop`
    last.

    Attributes:
        totals: Sums over rounds and sites.
        start: Sentences about the parts of the first model that come from a finished run; empty without such parts.
    """

    totals: RunTotals

    def __init__(self, experiment: Experiment, run_context: RunContext, watchers: Sequence[SilentRunProgress]) -> None:
        self.experiment = experiment
        self.run_context = run_context
        self.watchers = watchers
        self._experiment_json = experiment.model_dump(mode="json")
        self._left_out: dict[str, str] = {}
        self.start: list[str] = []

    def begin_run_recording(self, coordinator: Coordinator, layout: ModelStateLayout, initial: ModelState) -> None:
        """Open the run's files; record the start or resumption of the run, and the sites that take part.

        Raises:
            RunStopped: If the sites of a resumed run annotate other classes than before, or the model has changed.
        """
        run_context = self.run_context
        path = run_context.folder.path
        sites = coordinator.sites
        durable = run_context.backend == "network"
        self.coordinator = coordinator
        self._initial = make_initial_state(coordinator.method.site, initial)
        self.checkpoints = CheckpointFolder(path, durable=durable)
        workers = (
            1 if coordinator.method.site.traits.sequential else run_context.workers
        )  # its sites train one after another
        self.totals = RunTotals(run_context.folder, workers)
        self._totals_at_start = self.totals.totals_as_json()
        if run_context.resumed is not None:
            self._restore_run_from_checkpoint(run_context.resumed)
        self.audit_writer = RunAuditWriter(
            path,
            layout,
            keep=self.experiment.run.keep_updates,
            durable=durable,
            get_site_key=run_context.get_site_key,
        )
        sha256 = hash_experiment_settings(self.experiment)
        plugins = [plugin.model_dump() for plugin in list_plugin_identities(self.experiment)]
        if run_context.resumed is None:
            run = self.experiment.run
            self.audit_writer.record_run_start(
                self._initial,
                run=run_context.run,
                name=run.name or run.method,
                method=run.method,
                versions=collect_software_versions(),
                experiment_sha256=sha256,
                plugins=plugins,
                contract_sha256=sites.contract.hash,
                classes=list(sites.contract.class_names),
            )
        else:
            self.audit_writer.verify_and_record_resumption(run_context.resumed.state, plugins, experiment_sha256=sha256)
        for reply in run_context.read_unrecorded_replies(run_context.run):
            self.audit_writer.record_reply_before_resume(reply)
        first_round = run_context.resumed.state.round if run_context.resumed else 0
        for site, member in sorted(sites.members.items()):
            self.audit_writer.record_enrolment(first_round, site, member)
        self._record_left_out_sites("roll call")
        self._record_absent_sites()
        self._record_site_versions(sites.members)
        metric_name = "Dice" if is_segmentation(self.experiment.model.task) else "AUROC"
        for watcher in self.watchers:
            watcher.show_run_start(list(sites.contract.sites), self.experiment.run.rounds, metric_name)
        images = {site: member.answer.train_samples for site, member in sites.members.items()}
        for site, share in find_dominant_sites(images).items():
            run_context.folder.append_event("heavy_site", site=site, images=images[site], share=round(share, 6))
        without_validation = [site for site, member in sites.members.items() if not member.answer.validation_samples]
        if without_validation:
            run_context.folder.append_event("no_validation_images", sites=without_validation)

    def record_warm_start(self, start: WarmStart | None, pixels: PixelForm | None) -> None:
        """Record which parts of the first model come from a finished run; not in a resumed run, which has recorded it.

        Args:
            start: Class rows of the head that come from a finished run; None if the model does not start from one.
            pixels: Format of this run's pixels; None if no site states it.
        """
        source = self.experiment.model.weights
        if start is None or source is None:
            return
        sentences = [start.describe(source)]
        if start.pixels is not None and pixels is not None and start.pixels.describe() != pixels.describe():
            sentences.append(
                f"{source} learned from other pixels ({start.pixels.describe()}; here {pixels.describe()})"
            )
        self.start = sentences
        if self.run_context.resumed is None:
            self.run_context.folder.append_event("warm_start", sentences=sentences)
            for watcher in self.watchers:
                for sentence in sentences:
                    watcher.show_warm_start(sentence)

    def _restore_run_from_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore the sums and the coordinator's state.

        Raises:
            RunStopped: If the sites annotate other classes than before, or a value in the checkpoint is invalid.
        """
        sites = self.coordinator.sites
        number = checkpoint.state.round
        classes_before = checkpoint.state.model.head.class_names
        classes_now = sites.contract.class_names
        if classes_before != classes_now:
            entries = AuditLog(self.run_context.folder.path).read_entries()
            enrolled = {str(entry["site"]) for entry in entries if entry.get("event") == "enrolled"}
            missing = sorted(enrolled - sites.members.keys())
            problem = f"the run began with the classes {quote_names(classes_before)}; "
            problem += f"the sites now have {quote_names(classes_now)}."
            if missing:
                problem += f" Not there of the sites that took part: {quote_names(missing)}. Start them, and resume."
                problem += " One that was revoked has to be admitted again, or begin a new run without it."
                reasons = sites.left_out_sites
                problem += "".join(f"\n{site}: {why}" for site, why in reasons.items() if site in missing)
            raise RunStopped(f"resume: {problem}")
        try:
            validation = _VALIDATION_ADAPTER.validate_python(checkpoint.last_validation)
            self.coordinator.set_resume_state(checkpoint.state, validation)
            self.totals.restore_totals(checkpoint.totals, number)
            self.coordinator.sites.bytes_down.update(self.totals.bytes_down)
            self.coordinator.sites.bytes_up.update(self.totals.bytes_up)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"the checkpoint of round {number} is not what a run writes ({type(error).__name__})."
            remedy = "Put a copy of checkpoints/ back, or take a new --out."
            raise RunStopped(f"resume: {problem} {remedy}") from None

    def _record_site_versions(self, sites: Iterable[str]) -> None:
        """Show release and wire version of these sites; record each that differs from the coordinator's."""
        members = self.coordinator.sites.members
        releases = {site: StatedRelease(members[site].wire, members[site].answer.release) for site in sorted(sites)}
        for site, stated in releases.items():
            if stated.release != __version__:
                facts = {"release": stated.release, "coordinator": __version__}
                self.run_context.folder.append_event("other_release", site=site, **facts)
            if stated.wire != WIRE_VERSION:
                self.run_context.folder.append_event(
                    "other_wire", site=site, wire=stated.wire, coordinator=WIRE_VERSION
                )
        for watcher in self.watchers:
            watcher.show_enrolled_sites(releases)
        for site in sorted(set(sites) & set(self.coordinator.sites.sites_without_stated_pixels)):
            release = members[site].answer.release
            self.run_context.folder.append_event("pixels_unknown", site=site, release=release)
            for watcher in self.watchers:
                watcher.show_note(f"{site} does not state how its images become pixels (its release is {release})")

    def record_classes_of_one_site(self, question: str) -> None:
        """Record the classes that only one site annotates, and show the question if they are typing errors.

        Args:
            question: The question to the coordinator; empty if there is no such class, or all are confirmed.
        """
        if question:
            self.run_context.folder.append_event(
                "classes_of_one_site", classes=self.coordinator.sites.classes_of_one_site
            )
            self._show_note(question)

    def _record_left_out_sites(self, when: int | str) -> None:
        """Record the sites that declined to take part or were left out since the last call, with the reasons.

        Args:
            when: Number of the round, or name of the exchange.
        """
        new = dict[str, str]()
        for site, reason in self.coordinator.sites.left_out_sites.items():
            if self._left_out.get(site) != reason:
                self._left_out[site] = new[site] = reason
        self.audit_writer.record_left_out_sites(when, new)
        for site in new.keys() & set(self.coordinator.sites.sites_awaiting_approval):
            del new[site]
            self.run_context.folder.append_event("awaits_approval", round=when, site=site)
            for watcher in self.watchers:
                watcher.show_site_awaiting_approval(site)
        for site, reason in new.items():
            self.run_context.folder.append_event("left_out", round=when, site=site, reason=reason)
            for watcher in self.watchers:
                watcher.show_left_out_site(site, reason)

    def _record_absent_sites(self) -> None:
        """Record the admitted sites that have not answered the roll call."""
        if absent := self.coordinator.sites.absent_sites:
            self.on_absent_sites("roll call", dict.fromkeys(absent, NO_ANSWER_REASON))
            for watcher in self.watchers:
                watcher.show_absent_sites(absent)

    def _record_refused_calls(self) -> None:
        """Record an event for each call that the SuperLink has refused since this method was last called."""
        for call in self.run_context.refused_calls():
            self.run_context.folder.append_event("refused_call", **call)

    # ------------------------------------------------------------------ callbacks

    def on_waiting_for_sites(self, waiting: MissingReplyStatus) -> None:
        """Show which sites the run waits for."""
        for watcher in self.watchers:
            watcher.show_waiting_sites(waiting)

    def on_late_join(self, server_round: int, site: str) -> None:
        """Record a site that joins after the roll call."""
        sites = self.coordinator.sites
        self.run_context.folder.append_event("joined", round=server_round, site=site, hash=sites.contract.hash)
        self.audit_writer.record_enrolment(server_round, site, sites.members[site])
        self._record_site_versions([site])
        for watcher in self.watchers:
            watcher.show_joined_site(server_round, site)

    def on_lowered_claims(self, images: Mapping[str, int]) -> None:
        """Record the sites that claim too many images, and show the number of images that counts."""
        answers = self.coordinator.sites.answers
        for site, counted in images.items():
            claimed = answers[site].train_samples
            self.run_context.folder.append_event("lowered_claim", site=site, claimed=claimed, counted=counted)
            self._show_note(describe_lowered_claim(site, claimed, counted))

    def on_uncounted_sites(self, server_round: int, reasons: Mapping[str, str], counting: Collection[str]) -> None:
        """Record the sites whose statistics no longer count, and the sites whose statistics count again."""
        for site, reason in reasons.items():
            self.run_context.folder.append_event("uncounted", round=server_round, site=site, reason=reason)
            self._show_note(f"nothing that {site} states counts until a reply of it is accepted ({reason})")
        for site in counting:
            self.run_context.folder.append_event("counted_again", round=server_round, site=site)
            self._show_note(f"round {server_round}: what {site} states counts again")

    def on_round_repetition(self, server_round: int, sites: Collection[str]) -> None:
        """Record that a round is trained again without the statistics of some sites."""
        self.run_context.folder.append_event("repeated_round", round=server_round, sites=list(sites))
        self.audit_writer.audit.append(event="repeated_round", round=server_round, sites=list(sites))
        names = join_as_english_list(list(sites))
        self._show_note(f"round {server_round} is done again without the statistics of {names}, which do not count")

    def _show_note(self, sentence: str) -> None:
        for watcher in self.watchers:
            watcher.show_note(sentence)

    def on_reply(self, arrival: ReplyArrival) -> None:
        """Record a reply in the audit log."""
        self.audit_writer.record_reply(arrival)

    def on_absent_sites(self, phase: str, absent: Mapping[str, str]) -> None:
        """Record the sites without a valid reply in an exchange."""
        self.run_context.folder.append_absence_events(phase, absent)
        self.audit_writer.record_left_out_sites(phase, absent)

    def on_round_end(self, record: RoundRecord, state: FederationState) -> None:
        """Record a finished round: first its line, then its audit entry, then its checkpoint."""
        coordinator = self.coordinator
        learned = coordinator.method.compute_round_figures(coordinator.make_final_round_context())
        self.totals.add_round_to_totals(record, state, learned)
        self._record_left_out_sites(record.round)  # late joiners that declined
        self.audit_writer.record_aggregation(record, state, coordinator.sites.contract.hash)
        self.totals.bytes_down = coordinator.sites.bytes_down
        self.totals.bytes_up = coordinator.sites.bytes_up
        checkpoint = Checkpoint(
            self.run_context.run,
            state,
            self._experiment_json,
            self.totals.totals_as_json(),
            make_json_object(coordinator.last_validation),
        )
        self.checkpoints.save_checkpoint(checkpoint)
        self.run_context.folder.replace_finished_results()
        for watcher in self.watchers:
            watcher.show_finished_round(record, state)
        self._record_refused_calls()

    def on_exclusion(self, server_round: int, site: str, reason: str) -> None:
        """Record that a site is excluded for the rest of the run."""
        self.run_context.folder.append_event("excluded", round=server_round, site=site, reason=reason)
        self.audit_writer.audit.append(event="excluded", round=server_round, site=site, reason=reason)
        for watcher in self.watchers:
            watcher.show_excluded_site(server_round, site, reason)

    def on_rollback(self, rollback: RollbackEvent) -> FederationState | None:
        """Record a rollback; return the earlier state from its checkpoint, None if that checkpoint is missing."""
        state = self._initial
        if rollback.to:
            checkpoint = self.checkpoints.read_round_checkpoint(rollback.to)
            if checkpoint is None:
                return None
            state = checkpoint.state
        facts = {"round": rollback.collapsed, "to": rollback.to, "because": rollback.because}
        self.run_context.folder.append_event("rolled_back", **facts)
        self.audit_writer.audit.append(event="rolled_back", round=rollback.to, because=rollback.because)
        for watcher in self.watchers:
            watcher.show_rollback(rollback)
        return state

    def on_state_reset(self, state: FederationState) -> FederationValidation:
        """Return to an earlier state: remove the records of later rounds, and make this state the newest checkpoint.

        Returns:
            The latest validation result at that state; an empty result for the initial model, or if the state's
                checkpoint is missing.
        """
        earlier = self.checkpoints.read_round_checkpoint(state.round) if state.round else None
        totals: Mapping[str, Any] = self._totals_at_start
        validation = FederationValidation()
        if earlier is not None:
            totals = earlier.totals
            validation = _VALIDATION_ADAPTER.validate_python(earlier.last_validation)
        self.totals.restore_totals(totals, state.round)
        checkpoint = Checkpoint(self.run_context.run, state, self._experiment_json, totals, asdict(validation))
        self.checkpoints.revert_to_checkpoint(checkpoint)
        return validation

    # ------------------------------------------------------------------ end of the run

    def record_run_stop(self, reason: str) -> None:
        """Record the reason why the run stops before its last round."""
        self.totals.write_pending_round_line(self.coordinator.last_validation, self.coordinator.state)
        self._record_refused_calls()
        self.run_context.folder.append_event("stopped", reason=reason)

    def collect_claims(self, summary: RunSummary) -> RunClaims:
        """Return the claims that the finished run supports, for its summary; all rounds must be recorded."""
        folder = self.run_context.folder
        folder.replace_finished_results()  # the lines of further rounds are only then in the file
        return make_run_claims(RunFolderContent(folder.path, summary, read_rounds(folder.path)))

    def record_run_end(self, summary: RunSummary) -> None:
        """Write the receipt and the summary of a finished run."""
        folder = self.run_context.folder
        chosen = self.coordinator.result_round
        last = self.coordinator.state.round
        result = {"result_round": chosen if chosen >= 0 else last, "model_sha256": summary.model_sha256}
        self.audit_writer.audit.append(event="result", **result)
        if reason := write_run_receipt(self.audit_writer.audit):
            folder.append_event("no_receipt", reason=reason)
        self._record_refused_calls()
        folder.write_summary(summary)
        self.audit_writer.record_result_file_hashes(folder.path)
        folder.append_event("done", model_sha256=summary.model_sha256)


def collect_software_versions() -> dict[str, str]:
    """Return the versions of Polyclinic, Python and the numerical libraries."""
    names = ("flwr", "torch", "numpy", "scikit-learn")
    return {"polyclinic": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
