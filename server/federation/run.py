"""One run from roll call to summary, on whatever ``Grid`` it is given: simulated sites or real ones."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Protocol

from flwr.serverapp import Grid
from pydantic import TypeAdapter

from common import __version__
from common.config import Experiment, plan_of
from common.contract import LabelContract
from common.errors import quoted
from common.metrics.multi_class import client_accuracy
from common.models.network import SplitNetwork, build
from common.models.state import ModelState, layout_of, read_state
from common.wire.records import UNKNOWN_COUNT, RollCallAnswer
from server.federation.accounting import Books, as_json
from server.federation.checkpoints import Checkpoint, CheckpointFolder
from server.federation.evaluation import Outcome, Setting, outcome_of
from server.federation.rollback import Backwards, GuardLog
from server.runs.audit_log import RunAudit
from server.runs.receipt import experiment_sha256, write_receipt
from strategies.aggregation.largest_share import heavy_sites
from strategies.base.round_record import FederationValidation, RoundRecord, RunStopped, Waiting
from strategies.base.state import FederationState
from strategies.registry import method_of
from strategies.rounds.guard.broken import RolledBack
from strategies.rounds.strategy import FederatedAveraging, array_record


class Watcher(Protocol):
    """Shows a person how the run goes."""

    def waiting(self, waiting: Waiting) -> None: ...

    def began(self, sites: Sequence[str], rounds: int) -> None: ...

    def joined(self, server_round: int, site: str) -> None: ...

    def left_out(self, site: str, reason: str) -> None: ...

    def round_done(self, record: RoundRecord, state: FederationState) -> None: ...

    def rolled_back(self, rolled_back: RolledBack) -> None: ...

    def condemned(self, server_round: int, site: str, reason: str) -> None: ...


@dataclass(frozen=True)
class Both:
    """Two watchers as one."""

    first: Watcher
    second: Watcher

    def waiting(self, waiting: Waiting) -> None:
        self.first.waiting(waiting)
        self.second.waiting(waiting)

    def began(self, sites: Sequence[str], rounds: int) -> None:
        self.first.began(sites, rounds)
        self.second.began(sites, rounds)

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


def federate(grid: Grid, experiment: Experiment, setting: Setting, watcher: Watcher) -> dict[str, Any]:
    """Run an experiment over ``grid``; write the run folder; return the summary.

    Raises:
        RunStopped: If not enough sites answer, or the coordinator's own training diverges.
        BadInput: If labels contradict one another or the method does not fit.
    """
    began = time.monotonic()
    strategy = strategy_of(experiment, setting.run)
    strategy.sites.registered, strategy.sites.on_wait = setting.registered, watcher.waiting
    strategy.sites.claims = setting.claims
    contract, network = _gathered(grid, experiment, setting, strategy)
    layout, durable = layout_of(network), setting.backend == "network"
    strategy.scratch = setting.folder.path
    places = layout.slices()
    strategy.variances = tuple(places[one.name] for one in layout.norm if one.name.endswith("running_var"))
    checkpoints = CheckpointFolder(setting.folder.path, durable=durable)
    if setting.own is not None:
        strategy.use_images(setting.own, contract.class_names, setting.device)
    books = Books(setting.folder, 1 if strategy.sequential else setting.workers)  # a pass is one after another

    initial = read_state(network)
    if setting.resumed is not None:
        _go_on(setting.resumed, strategy, books)
    keep = experiment.run.keep_updates
    ledger = RunAudit(setting.folder.path, layout, keep=keep, durable=durable, key_of=setting.key_of)
    _note_beginning(ledger, experiment, setting, strategy, initial)
    told = dict[str, str]()

    def tell_left_out(when: int | str) -> None:
        new = {site: why for site, why in strategy.sites.left_out.items() if told.get(site) != why}
        told.update(new)
        ledger.left_out(when, new)
        for site, reason in new.items():
            setting.folder.event("left_out", round=when, site=site, reason=reason)
            watcher.left_out(site, reason)

    tell_left_out("roll call")
    asked = experiment.model_dump(mode="json")

    def on_round(record: RoundRecord, state: FederationState) -> None:
        books.note(record, state, strategy.round_figures(strategy.known))
        judged = as_json(strategy.last_validation)
        tell_left_out(record.round)  # late joiners that declined
        ledger.aggregated(record, state, strategy.sites.contract.hash)
        checkpoints.save(Checkpoint(setting.run, state, asked, books.facts(), judged))
        watcher.round_done(record, state)
        _note_refused_calls(setting)

    def on_join(server_round: int, site: str) -> None:
        setting.folder.event("joined", round=server_round, site=site, hash=strategy.sites.contract.hash)
        ledger.enrolled(server_round, site, strategy.sites.members[site])
        watcher.joined(server_round, site)

    def on_absent(phase: str, absent: Mapping[str, str]) -> None:
        for site, reason in absent.items():
            setting.folder.event("absent", round=phase, site=site, reason=reason)
        ledger.left_out(phase, absent)

    backwards = Backwards(setting, strategy, books, checkpoints, initial)
    guard_log = GuardLog(setting.folder, ledger, watcher)

    def on_rollback(rolled_back: RolledBack) -> FederationState | None:
        if (state := backwards.state_after(rolled_back.to)) is not None:
            guard_log.rolled_back(rolled_back)
        return state

    strategy.on_rollback, strategy.on_reset = on_rollback, lambda state: backwards.go_back(state, asked)
    strategy.on_liar = guard_log.condemned
    strategy.on_reply = ledger.arrived
    strategy.on_round, strategy.sites.on_join, strategy.on_absent = on_round, on_join, on_absent
    watcher.began(list(contract.sites), experiment.run.rounds)
    images = {site: member.answer.train_samples for site, member in strategy.sites.members.items()}
    for site, share in heavy_sites(images).items():
        setting.folder.event("heavy_site", site=site, images=images[site], share=round(share, 6))
    if silent := [site for site, member in strategy.sites.members.items() if not member.answer.validation_samples]:
        setting.folder.event("no_validation_images", sites=silent)
    try:
        deadline_s = experiment.participation.round_deadline_s
        strategy.start(grid, array_record(initial), experiment.run.rounds, deadline_s)
        books.close(strategy.last_validation, strategy.state)
        outcome = outcome_of(network, strategy, strategy.test(grid), setting)
    except RunStopped as error:
        books.close(strategy.last_validation, strategy.state)
        _note_refused_calls(setting)
        setting.folder.event("stopped", reason=str(error))
        raise
    summary = _summary(experiment, setting, strategy, outcome, books, time.monotonic() - began)
    ledger.done(result_round=strategy.result_round, model_sha256=outcome.model_sha256)
    if reason := write_receipt(ledger.audit):
        setting.folder.event("no_receipt", reason=reason)
    _note_refused_calls(setting)
    setting.folder.summary(summary)
    ledger.figures(setting.folder.path)
    setting.folder.event("done", model_sha256=summary["model_sha256"])
    return summary


def _note_refused_calls(setting: Setting) -> None:
    """Put into the run's events what hospitals tried that they may not do, with the names of both sites."""
    for call in setting.refused_calls():
        setting.folder.event("refused_call", **call)


def _gathered(
    grid: Grid, experiment: Experiment, setting: Setting, strategy: FederatedAveraging
) -> tuple[LabelContract, SplitNetwork]:
    """Call the roll; settle who takes part, the classes, and the network."""
    contract = strategy.sites.roll_call(grid, setting.sites)
    while True:
        classes = contract.class_names
        setting.folder.event("roll_call", sites=list(contract.sites), classes=list(classes), hash=contract.hash)
        network = build(experiment.model, classes, experiment.run.seed, setting.base)
        before, contract = contract, strategy.sites.settle_model(layout_of(network).signature)
        if contract == before:  # else sites were left out that build another network, and their classes with them
            return contract, network


def _note_beginning(
    ledger: RunAudit, experiment: Experiment, setting: Setting, strategy: FederatedAveraging, initial: ModelState
) -> None:
    """What run this is, or that it goes on; who takes part, and who does not."""
    resumed, sites = setting.resumed, strategy.sites
    if resumed is None:
        ledger.began(FederationState(0, initial), **_identity(experiment, setting, sites.contract))
    else:
        ledger.resumed(resumed.state.round, experiment_sha256=experiment_sha256(experiment))
    for site, member in sorted(sites.members.items()):
        ledger.enrolled(resumed.state.round if resumed else 0, site, member)


def _identity(experiment: Experiment, setting: Setting, contract: LabelContract) -> dict[str, Any]:
    """What run this is, for its receipt."""
    return {
        "run": setting.run,
        "name": experiment.run.name or experiment.run.method,
        "method": experiment.run.method,
        "versions": _versions(),
        "experiment_sha256": experiment_sha256(experiment),
        "contract_sha256": contract.hash,
        "classes": list(contract.class_names),
    }


def _go_on(checkpoint: Checkpoint, strategy: FederatedAveraging, books: Books) -> None:
    """Put a run back where it was.

    Raises:
        RunStopped: If the sites annotate other classes now.
    """
    began, now = checkpoint.class_names, strategy.sites.contract.class_names
    if began != now:
        raise RunStopped(f"resume: the run began with the classes {quoted(began)}; the sites now have {quoted(now)}.")
    strategy.resumed = checkpoint.state
    strategy.last_validation = TypeAdapter(FederationValidation).validate_python(checkpoint.last_validation)
    books.go_on_from(checkpoint.books, checkpoint.state.round)


def strategy_of(experiment: Experiment, run: str) -> FederatedAveraging:
    """The experiment's method, ready to coordinate the run."""
    return method_of(experiment).prepare(plan_of(experiment), experiment.participation, run)


def _summary(
    experiment: Experiment,
    setting: Setting,
    strategy: FederatedAveraging,
    outcome: Outcome,
    books: Books,
    total: float,
) -> dict[str, Any]:
    """Everything ``summary.json`` says."""
    sites = {
        site: {
            "classes": list(strategy.sites.contract.sites[site]),
            "train_samples": member.answer.train_samples,
            "validation_samples": _known(member.answer.validation_samples),
            "positives": _told(member.answer),
            "smallest_count": member.answer.smallest_count,
            "bytes_up": strategy.sites.bytes_up[site],
            "bytes_down": strategy.sites.bytes_down[site],
            "seconds": books.site_seconds[site],
            "epochs": books.epochs[site],
        }
        for site, member in sorted(strategy.sites.members.items())
    }
    idle = max(total - books.train_seconds - books.aggregate_seconds, 0.0)
    return {
        "name": experiment.run.name or experiment.run.method,
        "method": experiment.run.method,
        "backend": setting.backend,
        "rounds": strategy.state.round,
        "best_round": strategy.chosen_round,
        "seed": experiment.run.seed,
        "condemned": dict(strategy.state.guard.liars),
        "classes": list(strategy.sites.contract.class_names),
        "sites": sites,
        "test": asdict(outcome.test),
        "per_site": dict(outcome.per_site),
        "ensemble": outcome.ensemble,
        "learned": dict(strategy.summary_figures(strategy.known)),
        "privacy": _privacy(experiment, strategy, books),
        "client_accuracy": (accuracy := client_accuracy(books.tallies)) and asdict(accuracy),
        "seconds": {
            "total": total,
            "train": books.train_seconds,
            "aggregate": books.aggregate_seconds,
            "idle": idle,
        },
        "model_sha256": outcome.model_sha256,
        "contract_hash": strategy.sites.contract.hash,
        "versions": _versions(),
        "experiment": experiment.model_dump(mode="json"),
    }


def _privacy(experiment: Experiment, strategy: FederatedAveraging, books: Books) -> dict[str, Any] | None:
    """What the run cost each site that took part, None where a site's noise was none; None for a run without."""
    section = experiment.privacy
    if section.level == "none":
        return None
    said = {site: books.epsilon.get(site) for site in sorted(strategy.sites.members) if books.epochs[site]}
    return {"level": section.level, "delta": section.delta, "accountant": section.accountant, "epsilon": said}


def _told(answer: RollCallAnswer) -> dict[str, int | None]:
    """Training images that show each class, None where the site keeps a count; empty where it keeps all."""
    return dict(zip(answer.class_names, map(_known, answer.positives), strict=False))


def _known(count: int) -> int | None:
    return None if count == UNKNOWN_COUNT else count


def _versions() -> dict[str, str]:
    names = ("flwr", "torch", "numpy", "scikit-learn")
    return {"polyclinic": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
