"""The report of one run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config import Experiment
from common.metrics.auroc import SUMS
from server.reporting.coverage import ClassesOfGroup, class_groups, owners
from server.reporting.figures import accuracy, auroc, methods
from server.reporting.figures.subsets import coverage_of_many
from server.reporting.pages.page import write_page
from server.reporting.pages.quality import mean_of_sites, quality_section
from server.reporting.run_claims import (
    how_many_counted,
    interval_of_mean,
    limits,
    over_which_classes,
    run_result,
    tested_model,
)
from server.reporting.site_claims import site_choices
from server.reporting.wording import count, duration, figure, number, size, spans
from server.runs.reader import Run, RunSummary, SiteRecord, SiteResult, read_run
from server.runs.settings import flattened

SITES_SHOWN = 60  # of more sites, tables show the first and participation is not drawn
DOTS_SHOWN = 4000


@dataclass(frozen=True)
class SiteRow:
    """One line of the table of sites."""

    name: str
    record: SiteRecord
    result: SiteResult
    rounds: int
    accuracy: float | None


@dataclass(frozen=True)
class Absence:
    """A site's absences for one reason."""

    site: str
    reason: str
    rounds: str
    times: int


@dataclass(frozen=True)
class Phase:
    """One line of the table of time spent."""

    name: str
    seconds: float
    share: float


def write_run_report(folder: Path) -> Path:
    """Write ``report.html`` into a finished run's folder and return its path.

    Raises:
        BadInput: If ``summary.json`` or ``rounds.jsonl`` is missing or is not what a run writes.
    """
    summary = (run := read_run(folder)).summary
    groups = class_groups(summary)
    return write_page(
        "run.html.j2",
        folder / "report.html",
        summary=summary,
        sentence=run_result(run),
        limits=limits(run),
        key_figures=_key_figures(summary),
        groups=groups,
        owners={name: owners(summary, name) for name in summary.classes},
        site_rows=_site_rows(run)[:SITES_SHOWN],
        choices=site_choices(run)[:SITES_SHOWN],
        rounds=run.rounds,
        samples=run.samples,
        coverage=coverage_of_many(summary.sites, groups),
        absences=_absences(run),
        phases=_phases(summary.seconds),
        provenance=_provenance(summary),
        facts=_facts(summary),
        changed=_changed(summary.experiment),
        settings=list(flattened(summary.experiment)),
        curves=auroc.learning_curves(run.rounds, summary.best_round) if run.rounds else "",
        bars=_bars(summary, groups),
        quality=quality_section(summary.test, groups),
        beside_pooled=mean_of_sites(summary.test),
        of_sums=summary.test.note == SUMS,
        participation=_participation(run),
        **_accuracy_figures(run),
        **_method_figures(run),
    )


def _facts(summary: RunSummary) -> list[str]:
    """What stands below the title: data, seed, when the run ended, release."""
    data = summary.experiment.get("data") or {}
    source = data.get("path") or data.get("labels") or data.get("name") or ""
    of_sites = not data or summary.backend == "network"
    named = "images of the sites" if of_sites else f"{data.get('kind')} {Path(str(source)).name}".strip()
    ended = [f"ended {summary.ended[:16].replace('T', ' ')} UTC"] if summary.ended else []
    release = [f"Polyclinic {summary.versions['polyclinic']}"] if "polyclinic" in summary.versions else []
    return [f"method {summary.method}", f"data: {named}", f"seed {summary.seed}", *ended, *release]


def _changed(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings that differ from the defaults; all of them where another release wrote the file."""
    try:
        found = Experiment.model_validate(experiment).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return list(flattened(experiment))
    return [pair for pair in flattened(found) if pair[1] != "–"]


def _key_figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Value, what it is, and a remark."""
    test = summary.test
    traffic = [n for site in summary.sites.values() for n in (site.bytes_up, site.bytes_down) if n is not None]
    samples = [site.train_samples for site in summary.sites.values() if site.train_samples is not None]
    best = f"the model is {tested_model(summary)}"
    shared, unique = test.shared_classes, test.unique_classes
    over = [how_many_counted(summary, group.classes) for group in (shared, unique)]
    return [
        *_measured(summary),
        (figure(test.headline().mean), "mean AUROC", _beside_mean(summary)),
        (figure(test.headline(shared.classes).mean), "AUROC, shared classes", f"{over[0]} that every site annotates"),
        (figure(test.headline(unique.classes).mean), "AUROC, unique classes", f"{over[1]} that one site annotates"),
        (count(len(summary.sites)), "sites", f"{count(sum(samples))} training images"),
        (count(summary.rounds), "rounds", best),
        (duration(summary.seconds.get("total")), "wall-clock time", f"{size(sum(traffic))} sent both ways"),
    ]


def _beside_mean(summary: RunSummary) -> str:
    """The interval of the mean, or over which classes it is where there is none."""
    return interval_of_mean(summary) or f"over {over_which_classes(summary)}; no interval"


def _measured(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    if scored := summary.test.multi_class:
        yield number(scored.accuracy), "accuracy", f"over {count(scored.images)} test images"
    if best := summary.client_accuracy:
        yield (
            number(best.best_mean_client_test_accuracy),
            "best mean accuracy of sites",
            f"round {best.best_mean_round}",
        )


def _bars(summary: RunSummary, groups: Sequence[ClassesOfGroup]) -> str:
    intervals = summary.test.intervals or summary.test.sampled
    aurocs = {name: each.measured("auroc") for name, each in summary.test.per_class.items()}
    return auroc.auroc_bars(groups, aurocs, intervals.per_class if intervals else {})


def _accuracy_figures(run: Run) -> dict[str, str]:
    best = run.summary.client_accuracy
    return {
        "accuracy_by_round": accuracy.accuracy_by_round(run.rounds, best) if best else "",
        "density": accuracy.density_of_sites(list(best.per_site.values())) if best else "",
    }


def _method_figures(run: Run) -> dict[str, str]:
    prototypes = run.summary.learned.prototypes
    return {
        "order": methods.order_of_passes(run.rounds, list(run.summary.sites)),
        "prototypes": methods.alike(prototypes) if prototypes else "",
        "difficulty": methods.difficulty_by_round(run.rounds),
    }


def _site_rows(run: Run) -> list[SiteRow]:
    results, best = run.summary.per_site, run.summary.client_accuracy
    accuracies = best.per_site if best else {}
    taken = run.rounds_taken
    sites = run.summary.sites.items()
    return [
        SiteRow(name, record, results.get(name, SiteResult()), taken[name], accuracies.get(name))
        for name, record in sites
    ]


def _absences(run: Run) -> list[Absence]:
    rounds: dict[tuple[str, str], list[int]] = {}
    for each in run.rounds:
        for site, reason in each.absent.items():
            rounds.setdefault((site, reason), []).append(each.round)
    return [Absence(*key, spans(of_key), len(of_key)) for key, of_key in sorted(rounds.items())]


def _phases(seconds: Mapping[str, float | None]) -> list[Phase]:
    total = seconds.get("total") or 0.0
    parts = {name: spent for name, spent in seconds.items() if name != "total" and spent is not None}
    return [Phase(name, spent, min(1.0, spent / total) if total else 0.0) for name, spent in parts.items()]


def _provenance(summary: RunSummary) -> list[tuple[str, str]]:
    facts = {
        "Method": summary.method,
        "Seed": str(summary.seed),
        "Backend": summary.backend,
        "What was scored": summary.test.note,
        "Model SHA-256": summary.model_sha256,
        "Label contract SHA-256": summary.contract_hash,
    }
    versions = [(f"Version of {name}", str(version)) for name, version in summary.versions.items()]
    return [(name, fact or "n/a") for name, fact in facts.items()] + versions


def _participation(run: Run) -> str:
    sites = list(run.summary.sites)
    few = 0 < len(sites) <= SITES_SHOWN and 0 < len(sites) * len(run.rounds) <= DOTS_SHOWN
    return auroc.participation(run.rounds, sites) if few else ""
