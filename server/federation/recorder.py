"""Writes down how a run goes: events, audit, checkpoints, figures of each round; and shows them to those who watch."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from common import __version__
from common.config import Experiment, plugins_of
from common.contract import LabelContract
from common.errors import quoted
from common.models.state import Layout, ModelState
from common.security.audit import Audit
from server.federation.accounting import RunTotals, as_json
from server.federation.checkpoints import Checkpoint, CheckpointFolder
from server.federation.evaluation import RunContext
from server.runs.audit_log import RunAudit
from server.runs.receipt import experiment_sha256, write_receipt
from strategies.aggregation.bounds import heavy_sites
from strategies.engine.coordinator import Coordinator
from strategies.engine.events import (
    Arrival,
    Callbacks,
    FederationValidation,
    RolledBack,
    RoundRecord,
    RunStopped,
    Waiting,
)
from strategies.engine.state import FederationState


class Watcher(Protocol):
    """Shows a person how the run goes."""

    def waiting(self, waiting: Waiting) -> None: ...

    def began(self, sites: Sequence[str], rounds: int) -> None: ...

    def enrolled(self, releases: Mapping[str, str]) -> None: ...

    def joined(self, server_round: int, site: str) -> None: ...

    def left_out(self, site: str, reason: str) -> None: ...

    def round_done(self, record: RoundRecord, state: FederationState) -> None: ...

    def rolled_back(self, rolled_back: RolledBack) -> None: ...

    def condemned(self, server_round: int, site: str, reason: str) -> None: ...


@dataclass(frozen=True)
class CompositeWatcher:
    """Two watchers as one."""

    first: Watcher
    second: Watcher

    def waiting(self, waiting: Waiting) -> None:
        self.first.waiting(waiting)
        self.second.waiting(waiting)

    def began(self, sites: Sequence[str], rounds: int) -> None:
        self.first.began(sites, rounds)
        self.second.began(sites, rounds)

    def enrolled(self, releases: Mapping[str, str]) -> None:
        self.first.enrolled(releases)
        self.second.enrolled(releases)

    def joined(self, server_round: int, site: str) -> None:
        self.first.joined(server_round, site)
        self.second.joined(server_round, site)

    def left_out(self, site: str, reason: str) -> None:
        self.first.left_out(site, reason)
        self.second.left_out(site, reason)

    def round_done(self, record: RoundRecord, state: FederationState) -> None:
        self.first.round_done(record, state)
        self.second.round_done(record, state)

    def rolled_back(self, rolled_back: RolledBack) -> None:
        self.first.rolled_back(rolled_back)
        self.second.rolled_back(rolled_back)

    def condemned(self, server_round: int, site: str, reason: str) -> None:
        self.first.condemned(server_round, site, reason)
        self.second.condemned(server_round, site, reason)


class Recorder(Callbacks):
    """The run folder's side of a run: :meth:`begin` after the roll call, then :meth:`done` or :meth:`stopped`.

    Attributes:
        books: Figures of rounds and sites.
    """

    books: RunTotals

    def __init__(self, experiment: Experiment, setting: RunContext, watcher: Watcher) -> None:
        self.experiment, self.setting, self.watcher = experiment, setting, watcher
        self._asked = experiment.model_dump(mode="json")
        self._left_out: dict[str, str] = {}

    def begin(self, coordinator: Coordinator, layout: Layout, initial: ModelState) -> None:
        """Open what is written; note what run this is, or that it goes on, and who takes part.

        Raises:
            RunStopped: If the run goes on, and its sites annotate other classes now, or its model was changed.
        """
        setting, folder = self.setting, self.setting.folder.path
        durable, keep = setting.backend == "network", self.experiment.run.keep_updates
        self.coordinator = coordinator
        self.checkpoints = CheckpointFolder(folder, durable=durable)
        self.books = RunTotals(
            setting.folder, 1 if coordinator.method.site.sequential else setting.workers
        )  # a pass is one after another
        if setting.resumed is not None:
            _go_on(setting.resumed, coordinator, self.books, folder)
        self.ledger = RunAudit(folder, layout, keep=keep, durable=durable, key_of=setting.key_of)
        self.backwards = RollbackStore(setting, self.books, self.checkpoints, initial)
        self._note_beginning(initial)
        self._note_left_out("roll call")
        self._note_releases(coordinator.sites.members)
        self.watcher.began(list(coordinator.sites.contract.sites), self.experiment.run.rounds)
        self._warn()

    def _note_beginning(self, initial: ModelState) -> None:
        resumed, sites = self.setting.resumed, self.coordinator.sites
        if resumed is None:
            self.ledger.began(FederationState(0, initial), **_identity(self.experiment, self.setting, sites.contract))
        else:
            self.ledger.resumed(resumed.state, experiment_sha256=experiment_sha256(self.experiment))
        for reply in self.setting.left_replies(self.setting.run):
            self.ledger.arrived_before(reply)
        for site, member in sorted(sites.members.items()):
            self.ledger.enrolled(resumed.state.round if resumed else 0, site, member)

    def _note_releases(self, sites: Iterable[str]) -> None:
        """Show the releases of sites that take part from now on; note those that are not the coordinator's."""
        members = self.coordinator.sites.members
        releases = {site: members[site].answer.version for site in sorted(sites)}
        for site, release in releases.items():
            if release != __version__:
                self.setting.folder.event("other_release", site=site, release=release, coordinator=__version__)
        self.watcher.enrolled(releases)

    def _warn(self) -> None:
        """Note sites that weigh much, and sites that cannot judge a model."""
        members, folder = self.coordinator.sites.members, self.setting.folder
        images = {site: member.answer.train_samples for site, member in members.items()}
        for site, share in heavy_sites(images).items():
            folder.event("heavy_site", site=site, images=images[site], share=round(share, 6))
        if silent := [site for site, member in members.items() if not member.answer.validation_samples]:
            folder.event("no_validation_images", sites=silent)

    def _note_left_out(self, when: int | str) -> None:
        """Note the sites that have declined, or could not be taken in, since the last time."""
        left_out = self.coordinator.sites.left_out
        new = {site: why for site, why in left_out.items() if self._left_out.get(site) != why}
        self._left_out.update(new)
        self.ledger.left_out(when, new)
        for site, reason in new.items():
            self.setting.folder.event("left_out", round=when, site=site, reason=reason)
            self.watcher.left_out(site, reason)

    def _note_refused_calls(self) -> None:
        """Note what hospitals tried that they may not do, with the names of both sites."""
        for call in self.setting.refused_calls():
            self.setting.folder.event("refused_call", **call)

    # ------------------------------------------------------------------ callbacks

    def on_wait(self, waiting: Waiting) -> None:
        """Show it."""
        self.watcher.waiting(waiting)

    def on_join(self, server_round: int, site: str) -> None:
        """Note the late joiner."""
        sites = self.coordinator.sites
        self.setting.folder.event("joined", round=server_round, site=site, hash=sites.contract.hash)
        self.ledger.enrolled(server_round, site, sites.members[site])
        self._note_releases([site])
        self.watcher.joined(server_round, site)

    def on_reply(self, arrival: Arrival) -> None:
        """Note it in the audit."""
        self.ledger.arrived(arrival)

    def on_absent(self, phase: str, absent: Mapping[str, str]) -> None:
        """Note who missed an exchange."""
        self.setting.folder.absent(phase, absent)
        self.ledger.left_out(phase, absent)

    def on_round(self, record: RoundRecord, state: FederationState) -> None:
        """Write the round's line, its audit entry, and the checkpoint, in this order."""
        coordinator = self.coordinator
        self.books.note(record, state, coordinator.method.round_figures(coordinator.context()))
        self._note_left_out(record.round)  # late joiners that declined
        self.ledger.aggregated(record, state, coordinator.sites.contract.hash)
        judged = as_json(coordinator.last_validation)
        self.checkpoints.save(Checkpoint(self.setting.run, state, self._asked, self.books.facts(), judged))
        self.watcher.round_done(record, state)
        self._note_refused_calls()

    def on_exclusion(self, server_round: int, site: str, reason: str) -> None:
        """Note the site that is left out."""
        self.setting.folder.event("condemned", round=server_round, site=site, reason=reason)
        self.ledger.condemned(server_round, site, reason)
        self.watcher.condemned(server_round, site, reason)

    def on_rollback(self, rolled_back: RolledBack) -> FederationState | None:
        """Look for the checkpoint to go back to, and note that the model is taken back."""
        if (state := self.backwards.state_after(rolled_back.to)) is None:
            return None
        self.setting.folder.event(
            "rolled_back",
            round=rolled_back.collapsed,
            to=rolled_back.to,
            because=rolled_back.because,
        )
        self.ledger.rolled_back(rolled_back)
        self.watcher.rolled_back(rolled_back)
        return state

    def on_reset(self, state: FederationState) -> FederationValidation:
        """Take back what was noted since."""
        return self.backwards.go_back(state, self._asked)

    # ------------------------------------------------------------------ the end

    def stopped(self, reason: str) -> None:
        """Note why the run ends before its last round."""
        self.books.finalize(self.coordinator.last_validation, self.coordinator.state)
        self._note_refused_calls()
        self.setting.folder.event("stopped", reason=reason)

    def done(self, summary: Mapping[str, Any]) -> None:
        """Write receipt and summary."""
        folder = self.setting.folder
        self.ledger.done(result_round=self.coordinator.result_round, model_sha256=summary["model_sha256"])
        if reason := write_receipt(self.ledger.audit):
            folder.event("no_receipt", reason=reason)
        self._note_refused_calls()
        folder.summary(summary)
        self.ledger.figures(folder.path)
        folder.event("done", model_sha256=summary["model_sha256"])


def _identity(experiment: Experiment, setting: RunContext, contract: LabelContract) -> dict[str, Any]:
    """Return the identity of the run for its receipt."""
    return {
        "run": setting.run,
        "name": experiment.run.name or experiment.run.method,
        "method": experiment.run.method,
        "versions": versions(),
        "experiment_sha256": experiment_sha256(experiment),
        "plugins": [stamp.model_dump() for stamp in plugins_of(experiment)],
        "contract_sha256": contract.hash,
        "classes": list(contract.class_names),
    }


def _go_on(checkpoint: Checkpoint, coordinator: Coordinator, books: RunTotals, folder: Path) -> None:
    """Put a run back where it was.

    Raises:
        RunStopped: If the sites annotate other classes now, or the checkpoint is not what a run writes.
    """
    began, now = checkpoint.class_names, coordinator.sites.contract.class_names
    if began != now:
        away = sorted(_enrolled(folder) - coordinator.sites.members.keys())
        missing = f" Not there of the sites that took part: {quoted(away)}. Start them, and resume." if away else ""
        missing += " One that was revoked has to be admitted again, or begin a new run without it." if away else ""
        problem = f"resume: the run began with the classes {quoted(began)}; the sites now have {quoted(now)}."
        raise RunStopped(problem + missing)
    try:
        judged = TypeAdapter(FederationValidation).validate_python(checkpoint.last_validation)
        coordinator.resume(checkpoint.state, judged)
        books.go_on_from(checkpoint.books, checkpoint.state.round)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"the checkpoint of round {checkpoint.state.round} is not what a run writes ({type(error).__name__})."
        raise RunStopped(f"resume: {problem} Put a copy of checkpoints/ back, or take a new --out.") from None


def _enrolled(folder: Path) -> set[str]:
    """The sites that took part in a run at any time, by its audit."""
    return {str(entry["site"]) for entry in Audit(folder).entries() if entry.get("event") == "enrolled"}


def versions() -> dict[str, str]:
    """Releases of ourselves and of what computes."""
    names = ("flwr", "torch", "numpy", "scikit-learn")
    return {"polyclinic": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}


@dataclass
class RollbackStore:
    """Puts a run back to the end of an earlier round.

    Attributes:
        initial: The model before round 1, which has no checkpoint.
    """

    setting: RunContext
    books: RunTotals
    checkpoints: CheckpointFolder
    initial: ModelState
    _at_start: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._at_start = RunTotals(self.setting.folder, self.books.workers).facts()

    def state_after(self, server_round: int) -> FederationState | None:
        """The state after a round; None where its checkpoint is not there any more."""
        if server_round == 0:
            return FederationState(0, self.initial)
        checkpoint = self.checkpoints.after(server_round)
        return None if checkpoint is None else checkpoint.state

    def go_back(self, state: FederationState, experiment: Mapping[str, Any]) -> FederationValidation:
        """Take back what was noted since the end of that round; write the state down as its checkpoint.

        Returns:
            What was said of the model that the run goes on from.
        """
        earlier = self.checkpoints.after(state.round) if state.round else None
        judged = {} if earlier is None else earlier.last_validation
        books = self._at_start if earlier is None else earlier.books
        self.books.go_on_from(books, state.round)
        found = TypeAdapter(FederationValidation).validate_python(judged) if judged else FederationValidation()
        self.checkpoints.go_back(Checkpoint(self.setting.run, state, experiment, books, as_json(found)))
        return found
