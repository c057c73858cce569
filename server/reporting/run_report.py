"""Write the HTML report of one run."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from polyclinic.common.config import Experiment
from polyclinic.common.metrics.auroc import MIN_POSITIVES, SUMMED_HISTOGRAMS_NOTE, FinalTestSummary, compute_mean_and_sd
from polyclinic.common.metrics.benefit import MODEL_LABELS as SITE_MODELS
from polyclinic.common.system.plain_text import format_rounds
from polyclinic.data.images.outlines import COLOR_LEGEND
from polyclinic.server.reporting import class_figures, run_claims, run_figures
from polyclinic.server.reporting.by_hospital import describe_unknown_figures, tabulate_hospitals
from polyclinic.server.reporting.page import AnnotatedClassGroup, group_classes_by_annotation, write_template_page
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.tracking import flatten_settings

MAX_SITES = 60
"""If there are more sites, tables show only the first sites, and participation is not drawn."""
MAX_PARTICIPATION_DOTS = 4000
"""Greatest number of sites times rounds with which participation is drawn."""


def write_run_report(folder: Path) -> Path:
    """Write ``report.html`` into a finished run's folder and return its path.

    Raises:
        BadInput: If ``summary.json`` or ``rounds.jsonl`` is missing or invalid.
    """
    run = read_run(folder)
    summary = run.summary
    groups = group_classes_by_annotation(summary)
    sites = list(summary.sites)
    accuracy = summary.client_accuracy

    intervals = summary.test.intervals or summary.test.sampled
    aurocs = {name: result.main_figure_with_error for name, result in summary.test.per_class.items()}
    class_intervals = intervals.per_class if intervals else {}
    if (segmentation := summary.test.segmentation) is not None:
        class_intervals = {name: each.interval for name, each in segmentation.per_class.items() if each.interval}
    metric_name = "Dice" if run_claims.is_segmentation_run(summary) else "AUROC"
    chosen = None if summary.last_model_because else summary.best_round
    draws_participation = 0 < len(sites) <= MAX_SITES and 0 < len(sites) * len(run.rounds) <= MAX_PARTICIPATION_DOTS
    prototypes = summary.learned.prototypes
    missed: dict[tuple[str, str], list[int]] = {}  # site, reason -> rounds
    for line in run.rounds:
        for site, reason in line.absent.items():
            missed.setdefault((site, reason), []).append(line.round)
    try:
        changed = Experiment.model_validate(summary.experiment).model_dump(mode="json", exclude_defaults=True)
        changed_settings = [pair for pair in flatten_settings(changed) if pair[1] != "–"]
    except ValidationError:  # another release wrote the file
        changed_settings = list(flatten_settings(summary.experiment))
    data = summary.experiment.get("data") or {}
    source = data.get("path") or data.get("labels") or data.get("name") or ""
    at_sites = not data or summary.backend == "network"
    images = "images of the sites" if at_sites else f"{data.get('kind')} {Path(str(source)).name}".strip()
    facts = [f"method {summary.method}", f"data: {images}", f"seed {summary.seed}"]
    facts += [f"ended {summary.ended[:16].replace('T', ' ')} UTC"] if summary.ended else []
    facts += [f"Polyclinic {summary.versions['polyclinic']}"] if "polyclinic" in summary.versions else []
    # Sample images that the experiment requests may be of patients. Sample images by default are never of patients.
    sample_grid = (summary.experiment.get("evaluation") or {}).get("sample_grid")
    return write_template_page(
        "run.html.j2",
        folder / "report.html",
        private=run.samples is not None and sample_grid is True,
        run_claims=run_claims,
        run=run,
        summary=summary,
        groups=groups,
        sites=list(summary.sites.items())[:MAX_SITES],
        choices=run_claims.describe_site_benefits(run)[:MAX_SITES],
        SITE_MODELS=SITE_MODELS,
        rounds=run.rounds,
        samples=run.samples,
        colours=COLOR_LEGEND,
        coverage=run_figures.draw_label_coverage(summary.sites, groups),
        absences=[(*key, format_rounds(rounds), len(rounds)) for key, rounds in sorted(missed.items())],
        facts=facts,
        changed=changed_settings,
        settings=list(flatten_settings(summary.experiment)),
        curves=run_figures.draw_learning_curves(run.rounds, chosen, metric_name) if run.rounds else "",
        bars=run_figures.draw_auroc_bars(groups, aurocs, class_intervals, metric_name),
        figure_name=metric_name,
        quality=make_quality_template_variables(summary.test, groups),
        beside_pooled=compute_means_over_sites(summary.test),
        by_hospital=tabulate_hospitals(summary),
        unknown_figures=describe_unknown_figures(summary),
        of_sums=summary.test.note == SUMMED_HISTOGRAMS_NOTE,
        participation=run_figures.draw_site_participation(run.rounds, sites) if draws_participation else "",
        accuracy_by_round=run_figures.draw_accuracy_by_round(run.rounds, accuracy) if accuracy else "",
        density=run_figures.draw_accuracy_density(list(accuracy.per_site.values())) if accuracy else "",
        order=run_figures.draw_model_pass_order(run.rounds, sites),
        prototypes=run_figures.draw_prototype_similarity(prototypes) if prototypes else "",
        difficulty=run_figures.draw_confident_share_by_round(run.rounds),
    )


def compute_means_over_sites(test: FinalTestSummary) -> tuple[float | None, float | None]:
    """Return the mean AUROC and the mean average precision over classes, from each class's mean over sites.

    The means are over the classes that also have a pooled AUROC (of the images of all sites together), so that the
    report can compare them with the pooled means. A mean is None if no class has a value.
    """
    pooled = test.pooled.per_class if test.pooled else {}
    names = [name for name, each in pooled.items() if each.auroc is not None and name in test.per_class]
    mean_auroc, _ = compute_mean_and_sd(test.per_class[name].auroc for name in names)
    mean_precision, _ = compute_mean_and_sd(test.per_class[name].average_precision for name in names)
    return mean_auroc, mean_precision


def make_quality_template_variables(
    test: FinalTestSummary, groups: Sequence[AnnotatedClassGroup]
) -> dict[str, object] | None:
    """Return the variables of ``quality.html.j2`` (calibration, decisions, thresholds); None without calibration.

    The values come from the coordinator's test images; without such images, from the sites' score histograms.
    """
    quality = test.quality
    pooled = test.pooled.per_class if test.pooled else {}
    order = [name for group in groups for name in group.classes]
    calibration = quality.calibration if quality else {name: each.calibration for name, each in pooled.items()}
    calibrations = {name: each for name in order if (each := calibration.get(name)) is not None}
    if not calibrations:
        return None
    decisions = quality.decisions if quality else {name: each.decisions for name, each in pooled.items()}
    decisions = {name: decisions[name] for name in calibrations}
    all_curves = quality.curves if quality else {name: each.curve for name, each in pooled.items()}
    curves = {name: curve for name in order if (curve := all_curves.get(name)) is not None}
    points = {name: class_points for name in order if (class_points := test.operating_points.get(name))}
    confusion = quality.confusion if quality else None
    return {
        "pooled_only": quality is None,
        "calibrations": calibrations,
        "decisions": decisions,
        "reliability": class_figures.draw_reliability_diagrams(calibrations),
        "decided": class_figures.draw_sensitivity_and_specificity(decisions),
        "confusion": class_figures.draw_confusion_matrix(confusion, list(test.per_class)) if confusion else "",
        "roc": class_figures.draw_roc_curves(curves),
        "precision_recall": class_figures.draw_precision_recall_curves(curves),
        "within": max(each.within for each in calibrations.values()),
        "untested": [name for name in order if name not in calibrations],
        "points": points,
        "few": MIN_POSITIVES,
        "chosen_on_few": [name for name, (point, *_) in points.items() if min(point.chosen_on) < MIN_POSITIVES],
        "without_points": [name for name in calibrations if name not in points],
        "left_out": max(0, len(calibrations) - class_figures.MAX_PANELS),
    }
