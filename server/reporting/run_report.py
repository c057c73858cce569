"""The report of one run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config import Experiment
from common.metrics.auroc import FEWEST_POSITIVES, SUMS, Summary, mean_and_sd
from server.reporting import class_figures, run_claims, run_figures
from server.reporting.page import write_page
from server.reporting.wording import ClassGroup, class_groups, count, duration, figure, number, size, spans
from server.runs.reader import Run, RunSummary, SiteResult, read_run
from server.runs.tracking import flattened

SITES_SHOWN = 60
"""Of more sites, tables show the first and participation is not drawn."""
DOTS_SHOWN = 4000


def write_run_report(folder: Path) -> Path:
    """Write ``report.html`` into a finished run's folder and return its path.

    Raises:
        BadInput: If ``summary.json`` or ``rounds.jsonl`` is missing or is not what a run writes.
    """
    summary = (run := read_run(folder)).summary
    groups, sites, best = class_groups(summary), list(summary.sites), summary.client_accuracy
    intervals = summary.test.intervals or summary.test.sampled
    aurocs = {name: result.measured("auroc") for name, result in summary.test.per_class.items()}
    drawn = 0 < len(sites) <= SITES_SHOWN and 0 < len(sites) * len(run.rounds) <= DOTS_SHOWN
    prototypes = summary.learned.prototypes
    return write_page(
        "run.html.j2",
        folder / "report.html",
        run_claims=run_claims,
        summary=summary,
        sentence=run_claims.run_result(run),
        limits=run_claims.limits(run),
        key_figures=_key_figures(summary),
        groups=groups,
        owners={name: summary.owners.get(name, ()) for name in summary.classes},
        site_rows=_site_rows(run),
        choices=run_claims.site_choices(run)[:SITES_SHOWN],
        rounds=run.rounds,
        samples=run.samples,
        coverage=run_figures.coverage_of_many(summary.sites, groups),
        absences=_absences(run),
        phases=_phases(summary.seconds),
        provenance=_provenance(summary),
        facts=_facts(summary),
        changed=_changed(summary.experiment),
        settings=list(flattened(summary.experiment)),
        curves=run_figures.learning_curves(run.rounds, summary.best_round) if run.rounds else "",
        bars=run_figures.auroc_bars(groups, aurocs, intervals.per_class if intervals else {}),
        quality=quality_section(summary.test, groups),
        beside_pooled=mean_of_sites(summary.test),
        of_sums=summary.test.note == SUMS,
        participation=run_figures.participation(run.rounds, sites) if drawn else "",
        accuracy_by_round=run_figures.accuracy_by_round(run.rounds, best) if best else "",
        density=run_figures.density_of_sites(list(best.per_site.values())) if best else "",
        order=run_figures.order_of_passes(run.rounds, sites),
        prototypes=run_figures.prototype_similarity(prototypes) if prototypes else "",
        difficulty=run_figures.difficulty_by_round(run.rounds),
    )


def _facts(summary: RunSummary) -> list[str]:
    """Return what stands below the title: data, seed, when the run ended, release."""
    data = summary.experiment.get("data") or {}
    source = data.get("path") or data.get("labels") or data.get("name") or ""
    of_sites = not data or summary.backend == "network"
    named = "images of the sites" if of_sites else f"{data.get('kind')} {Path(str(source)).name}".strip()
    ended = [f"ended {summary.ended[:16].replace('T', ' ')} UTC"] if summary.ended else []
    release = [f"Polyclinic {summary.versions['polyclinic']}"] if "polyclinic" in summary.versions else []
    return [f"method {summary.method}", f"data: {named}", f"seed {summary.seed}", *ended, *release]


def _changed(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that differ from the defaults; all of them where another release wrote the file."""
    try:
        changed = Experiment.model_validate(experiment).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return list(flattened(experiment))
    return [pair for pair in flattened(changed) if pair[1] != "–"]


def _key_figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return value, name and a remark of each key figure."""
    test, tiles = summary.test, []
    if scored := test.multi_class:
        tiles.append((number(scored.accuracy), "accuracy", f"over {count(scored.images)} test images"))
    if best := summary.client_accuracy:
        accuracy, remark = best.best_mean_client_test_accuracy, f"round {best.best_mean_round}"
        tiles.append((number(accuracy), "best mean accuracy of sites", remark))
    over = f"over {run_claims.over_which_classes(summary)}; no interval"
    tiles.append((figure(test.headline().mean), "mean AUROC", run_claims.interval_of_mean(summary) or over))
    for name, group, who in (
        ("shared", test.shared_classes, "every site annotates"),
        ("unique", test.unique_classes, "one site annotates"),
    ):
        remark = f"{run_claims.how_many_counted(summary, group.classes)} that {who}"
        tiles.append((figure(test.headline(group.classes).mean), f"AUROC, {name} classes", remark))
    traffic = [n for site in summary.sites.values() for n in (site.bytes_up, site.bytes_down) if n is not None]
    samples = [site.train_samples for site in summary.sites.values() if site.train_samples is not None]
    return [
        *tiles,
        (count(len(summary.sites)), "sites", f"{count(sum(samples))} training images"),
        (count(summary.rounds), "rounds", f"the model is {run_claims.tested_model(summary)}"),
        (duration(summary.seconds.get("total")), "wall-clock time", f"{size(sum(traffic))} sent both ways"),
    ]


def _site_rows(run: Run) -> list[dict[str, object]]:
    """Return the lines of the table of sites, as far as it goes."""
    summary, best, taken = run.summary, run.summary.client_accuracy, run.rounds_taken
    return [
        {
            "name": name,
            "record": record,
            "result": summary.per_site.get(name, SiteResult()),
            "rounds": taken[name],
            "accuracy": best.per_site.get(name) if best else None,
        }
        for name, record in list(summary.sites.items())[:SITES_SHOWN]
    ]


def _absences(run: Run) -> list[tuple[str, str, str, int]]:
    """Return site, reason, rounds as text and their number, for each reason why a site was absent."""
    rounds: dict[tuple[str, str], list[int]] = {}
    for each in run.rounds:
        for site, reason in each.absent.items():
            rounds.setdefault((site, reason), []).append(each.round)
    return [(site, reason, spans(missed), len(missed)) for (site, reason), missed in sorted(rounds.items())]


def _phases(seconds: Mapping[str, float | None]) -> list[tuple[str, float, float]]:
    """Return name, seconds and share of the total time of each phase."""
    total = seconds.get("total") or 0.0
    parts = {name: spent for name, spent in seconds.items() if name != "total" and spent is not None}
    return [(name, spent, min(1.0, spent / total) if total else 0.0) for name, spent in parts.items()]


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


def mean_of_sites(test: Summary) -> tuple[float | None, float | None]:
    """Return mean AUROC and average precision of the sites over the classes that have a pooled value beside them."""
    pooled = test.pooled.per_class if test.pooled else {}
    both = [test.per_class[name] for name, each in pooled.items() if each.auroc is not None and name in test.per_class]
    return mean_and_sd(each.auroc for each in both)[0], mean_and_sd(each.average_precision for each in both)[0]


def quality_section(test: Summary, groups: Sequence[ClassGroup]) -> dict[str, object] | None:
    """Return what ``quality.html.j2`` says of calibration, decisions and thresholds; None where there is nothing.

    All comes from the coordinator's test images, else from the sites' histograms.
    """
    own = test.quality
    of_sites = test.pooled.per_class if test.pooled else {}
    all_calibrations = own.calibration if own else {name: each.calibration for name, each in of_sites.items()}
    all_decisions = own.decisions if own else {name: each.decisions for name, each in of_sites.items()}
    all_curves = own.curves if own else {name: each.curve for name, each in of_sites.items()}
    order = [name for group in groups for name in group.classes]
    calibrations = {name: each for name in order if (each := all_calibrations.get(name)) is not None}
    if not calibrations:
        return None
    curves = {name: curve for name in order if (curve := all_curves.get(name)) is not None}
    decisions = {name: all_decisions[name] for name in calibrations}
    points = {name: chosen for name in order if (chosen := test.operating_points.get(name))}
    few = FEWEST_POSITIVES
    return {
        "pooled_only": own is None,
        "calibrations": calibrations,
        "decisions": decisions,
        "reliability": class_figures.reliability(calibrations),
        "decided": class_figures.decisions_chart(decisions),
        "confusion": class_figures.confusion_matrix(own.confusion, list(test.per_class))
        if own and own.confusion
        else "",
        "roc": class_figures.roc(curves),
        "precision_recall": class_figures.precision_recall(curves),
        "within": max(each.within for each in calibrations.values()),
        "untested": [name for name in order if name not in calibrations],
        "points": points,
        "few": few,
        "chosen_on_few": [name for name, (point, *_) in points.items() if min(point.chosen_on) < few],
        "without_points": [name for name in calibrations if name not in points],
        "left_out": max(0, len(calibrations) - class_figures.MOST),
    }
