"""One run from roll call to summary, on whatever ``Grid`` it is given: simulated sites or real ones."""

import hashlib
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.serverapp import Grid

from common import __version__
from common.config import Experiment, plan_of
from common.contract import LabelContract
from common.data.image_set import ImageSet
from common.inference import channels_first, label_matrix, logits_of
from common.metrics import ClassMetrics, Summary, mean_and_sd, per_class, summarise
from common.models.network import SplitNetwork, build
from common.models.saved import save_model
from common.models.state import ModelState, read_state, write_state
from common.wire import EvaluateReply
from server.run_folder import RunFolder
from strategies.registry import method_named
from strategies.rounds import Replies, RoundRecord, RoundStrategy, Validation, array_record
from strategies.state import FederationState

GLOBAL_MODEL = "global model"
OWN_MODELS = "mean over the owning sites' own models"


class Watcher(Protocol):
    """Whoever shows a person how the run goes."""

    def began(self, sites: Sequence[str], rounds: int) -> None: ...

    def round_done(self, record: RoundRecord, state: FederationState) -> None: ...


@dataclass(frozen=True)
class Setting:
    """What a run needs beside its experiment.

    Attributes:
        base: Folder that the experiment's paths start from.
        folder: Where everything is written.
        run: Identifier of this run.
        sites: Sites expected at the roll call.
        workers: Sites that train at a time.
        backend: Word for the summary.
        device: Where the coordinator evaluates.
        test: The coordinator's own test images; None in a real federation that has none.
        coverage: The sites and classes that shared and unique are counted by; None takes the run's own contract.
    """

    base: Path
    folder: RunFolder
    run: str
    sites: int
    workers: int
    backend: str
    device: str = "cpu"
    test: ImageSet | None = None
    coverage: LabelContract | None = None


@dataclass
class Books:
    """Sums over rounds, for the summary."""

    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    pending: RoundRecord | None = None


def federate(grid: Grid, experiment: Experiment, setting: Setting, watcher: Watcher) -> dict[str, Any]:
    """Run an experiment over ``grid``; write the run folder; return the summary.

    Raises:
        TooFewSites: If not enough sites answer.
        BadInput: If labels contradict one another or the method does not fit.
    """
    began = time.monotonic()
    strategy = RoundStrategy(
        method_named(experiment.run.method, experiment.method),
        plan_of(experiment),
        experiment.participation,
        setting.run,
    )
    contract = strategy.roll_call(grid, setting.sites)
    setting.folder.event(
        "roll_call", sites=list(contract.sites), classes=list(contract.class_names), hash=contract.hash
    )
    network = build(experiment.model, contract.class_names, experiment.run.seed, setting.base)
    books = Books()

    def on_round(record: RoundRecord, state: FederationState) -> None:
        _note(books, record, state, setting)
        watcher.round_done(record, state)

    strategy.on_round = on_round
    watcher.began(list(contract.sites), experiment.run.rounds)
    strategy.start(
        grid, array_record(read_state(network)), experiment.run.rounds, experiment.participation.round_deadline_s
    )
    _write_round(books, strategy.last_validation, strategy.state, setting)
    replies = strategy.test(grid)
    outcome = _outcome(network, strategy, replies, setting)
    summary = _summary(experiment, setting, strategy, outcome, books, time.monotonic() - began)
    setting.folder.summary(summary)
    setting.folder.event("done", model_sha256=summary["model_sha256"])
    return summary


# ---------------------------------------------------------------------- rounds


def _note(books: Books, record: RoundRecord, state: FederationState, setting: Setting) -> None:
    """Add a round up, and write the one before: only now are its validation losses known."""
    _write_round(books, record.validation, state, setting)
    books.pending = record
    books.bytes_up.update(record.bytes_up)
    books.bytes_down.update(record.bytes_down)
    spent = list(record.site_seconds.values())
    books.train_seconds += max(max(spent), sum(spent) / min(setting.workers, len(spent)))
    books.aggregate_seconds += record.aggregate_seconds
    for site, reason in record.absent.items():
        setting.folder.event("absent", round=record.round, site=site, reason=reason)


def _write_round(books: Books, validation: Validation, state: FederationState, setting: Setting) -> None:
    """Write the pending round's line with the validation figures of the model that it made."""
    record = books.pending
    if record is None:
        return
    books.pending = None
    setting.folder.round(
        {
            "round": record.round,
            "sites": list(record.sites),
            "absent": dict(record.absent),
            "train_loss": float(np.mean(list(record.train_loss.values()))),
            "validation_loss": validation.mean_loss,
            "validation_auroc": validation.mean_auroc,
            "best": state.best_round == record.round,
            "site_losses": {
                site: {"train_loss": record.train_loss[site], "validation_loss": validation.loss.get(site)}
                for site in record.sites
            },
            "seconds": record.seconds,
            "bytes_up": sum(record.bytes_up.values()),
            "bytes_down": sum(record.bytes_down.values()),
        }
    )


# ---------------------------------------------------------------------- outcome


@dataclass(frozen=True)
class Outcome:
    """What the run ends with."""

    test: Summary
    per_site: Mapping[str, Any]
    model_sha256: str


def _outcome(
    network: SplitNetwork, strategy: RoundStrategy, replies: Replies[EvaluateReply], setting: Setting
) -> Outcome:
    """Save the model where there is one, and test it."""
    answers = list(replies.accepted.values())
    contract = setting.coverage or strategy.contract
    if strategy.method.has_global_model:
        sha256 = _save(network, strategy.state.selected, strategy.contract, setting)
        own_test = setting.test is not None and len(setting.test) > 0
        results = _tested(network, setting) if own_test else _mean_over_sites(answers, strategy.contract)
        note = GLOBAL_MODEL if own_test else "mean over the sites' own test parts"
    else:
        # Each site has its own model; the run's identity is that of all of them.
        sha256 = _joint_sha256(answers)
        results, note = _mean_over_sites(answers, strategy.contract), OWN_MODELS
    test = summarise(results, contract.shared_classes, contract.unique_classes, note)
    return Outcome(test, {answer.site: _site_result(answer) for answer in answers}, sha256)


def _save(network: SplitNetwork, model: ModelState, contract: LabelContract, setting: Setting) -> str:
    write_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    return save_model(setting.folder.path, network, label_contract_sha256=contract.hash).model_sha256


def _tested(network: SplitNetwork, setting: Setting) -> dict[str, ClassMetrics]:
    """The global model on the coordinator's test images."""
    assert setting.test is not None
    network.to(setting.device)
    images = channels_first(setting.test.images).to(setting.device)
    scores = logits_of(network, images).sigmoid().cpu().numpy()
    return per_class(scores, label_matrix(setting.test, network.class_names).numpy(), network.class_names)


def _mean_over_sites(answers: Sequence[EvaluateReply], contract: LabelContract) -> dict[str, ClassMetrics]:
    """Per class, the mean over the sites that annotate it; None where no site could say."""
    by_class: dict[str, list[ClassMetrics]] = {name: [] for name in contract.class_names}
    for answer in answers:
        for name, metrics in _metrics(answer).items():
            by_class[name].append(metrics)
    return {name: _mean_metrics(metrics) for name, metrics in by_class.items()}


def _mean_metrics(metrics: Sequence[ClassMetrics]) -> ClassMetrics:
    return ClassMetrics(
        auroc=mean_and_sd(one.auroc for one in metrics)[0],
        average_precision=mean_and_sd(one.average_precision for one in metrics)[0],
        balanced_accuracy=mean_and_sd(one.balanced_accuracy for one in metrics)[0],
        positives=max((one.positives for one in metrics), default=0),
        negatives=max((one.negatives for one in metrics), default=0),
    )


def _metrics(answer: EvaluateReply) -> dict[str, ClassMetrics]:
    """A reply's columns as one record a class; the wire's NaN becomes None."""
    return {
        name: ClassMetrics(
            auroc=_defined(answer.auroc[row]),
            average_precision=_defined(answer.average_precision[row]),
            balanced_accuracy=_defined(answer.balanced_accuracy[row]),
            positives=answer.positives[row],
            negatives=answer.negatives[row],
        )
        for row, name in enumerate(answer.class_names)
    }


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else value


def _joint_sha256(answers: Sequence[EvaluateReply]) -> str:
    return hashlib.sha256("".join(a.model_sha256 for a in answers).encode()).hexdigest()


def _site_result(answer: EvaluateReply) -> dict[str, Any]:
    metrics = _metrics(answer)
    return {
        "validation_loss": answer.validation_loss,
        "mean_auroc": mean_and_sd(one.auroc for one in metrics.values())[0],
        "per_class": {name: asdict(one) for name, one in metrics.items()},
    }


def _summary(
    experiment: Experiment,
    setting: Setting,
    strategy: RoundStrategy,
    outcome: Outcome,
    books: Books,
    total: float,
) -> dict[str, Any]:
    """Everything ``summary.json`` says."""
    sites = {
        site: {
            "classes": list(strategy.contract.sites[site]),
            "train_samples": member.answer.train_samples,
            "validation_samples": member.answer.validation_samples,
            "bytes_up": books.bytes_up[site],
            "bytes_down": books.bytes_down[site],
        }
        for site, member in sorted(strategy.members.items())
    }
    idle = max(total - books.train_seconds - books.aggregate_seconds, 0.0)
    return {
        "name": experiment.run.name or experiment.run.method,
        "method": experiment.run.method,
        "backend": setting.backend,
        "rounds": strategy.state.round,
        "best_round": strategy.state.best_round if strategy.method.selection == "federation" else None,
        "seed": experiment.run.seed,
        "classes": list(strategy.contract.class_names),
        "sites": sites,
        "test": asdict(outcome.test),
        "per_site": dict(outcome.per_site),
        "seconds": {
            "total": total,
            "train": books.train_seconds,
            "aggregate": books.aggregate_seconds,
            "idle": idle,
        },
        "model_sha256": outcome.model_sha256,
        "contract_hash": strategy.contract.hash,
        "versions": _versions(),
        "experiment": experiment.model_dump(mode="json"),
    }


def _versions() -> dict[str, str]:
    names = ("flwr", "torch", "numpy", "scikit-learn")
    return {"polyclinic": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
