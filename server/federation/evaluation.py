"""The end of a run: save and hash the final model, and test it per class and per site."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelContract
from polyclinic.common.metrics.auroc import (
    FIGURES,
    GLOBAL_MODEL_NOTE,
    SUMMED_HISTOGRAMS_NOTE,
    ClassMetrics,
    FinalTestSummary,
    average_metrics_over_models,
    compute_metrics_per_class,
    load_plugin_metrics,
    make_metrics_of_overlap,
    make_segmentation_metrics,
    summarise_test_results,
)
from polyclinic.common.metrics.bootstrap import bootstrap_auroc_intervals
from polyclinic.common.metrics.calibration import (
    choose_operating_points,
    compute_score_quality,
    count_decisions_at_points,
)
from polyclinic.common.metrics.measured import MAX_METRIC_ERROR, ValueWithError
from polyclinic.common.metrics.multi_class import compute_multi_class_metrics
from polyclinic.common.metrics.pooled import (
    PooledClassMetrics,
    SiteSampleIntervals,
    SummedScoreHistogram,
    compute_pooled_metrics,
    estimate_sampled_site_intervals,
    sum_site_histograms,
)
from polyclinic.common.metrics.score_histograms import ScoreHistogram, compute_score_histogram
from polyclinic.common.metrics.segmentation import (
    SegmentationSummary,
    SiteOverlap,
    compute_patient_figures,
    make_patient_histogram,
    pool_site_overlaps,
    summarise_patients,
)
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import (
    Precision,
    SplitNetwork,
    compute_image_probabilities,
    select_head_row_labels,
)
from polyclinic.common.models.saved import save_model
from polyclinic.common.models.segmenting import compare_with_masks
from polyclinic.common.models.state import write_model_state
from polyclinic.common.models.zoo.spec import DICE_METRIC, HAUSDORFF_METRIC, is_segmentation
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import UNKNOWN_COUNT, EvaluateReply
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, SkippedImage, are_all_patients_known
from polyclinic.data.images.pixels import load_pixels_on_device, make_mask_tensors
from polyclinic.server.federation.checkpoints import Checkpoint
from polyclinic.server.federation.ensemble import (
    LOCAL_MODELS_NOTE,
    compute_mean_auroc,
    evaluate_ensemble,
    evaluate_local_models,
    find_local_model_folders,
)
from polyclinic.server.runs.folder import RunFolder
from polyclinic.server.runs.schema import EnsembleTestResult, SiteTestResult
from polyclinic.server.runs.unlearned import ClassLearning
from polyclinic.strategies.engine.admission_limits import ClaimsBySite
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import ReplyArrival
from polyclinic.strategies.engine.exchange import ExchangeReplies
from polyclinic.strategies.engine.membership import Registered, SiteProcesses

VOLUME_DISTANCE_UNIT = "mm (voxels of a hospital whose spacing is unknown)"
"""Unit of distances in volumes. Hospitals send only histograms, without the spacing of each volume."""
MEAN_OVER_SITES_NOTE = "mean over the sites' own test parts"
MEAN_OVER_PATIENTS_NOTE = "mean over the patients of the sites' own test parts"
"""Note on the metrics of a segmentation model."""
Histograms = Mapping[str, ScoreHistogram]
"""Class -> score histogram."""


@dataclass(frozen=True)
class RunContext:
    """Folder, data, devices and callbacks that a run needs in addition to its experiment.

    Attributes:
        base: Folder from which relative paths in the experiment start.
        folder: The run folder, which receives all output.
        run: Identifier of this run.
        sites: Number of sites expected at the roll call.
        workers: Number of sites that train at the same time.
        backend: Name of the backend in ``summary.json``.
        device: Torch device of the coordinator's own evaluation.
        precision: Number format of the coordinator's own evaluation.
        server_data: The coordinator's own training and validation images; None if it has none.
        test: The coordinator's test images; None if it has none.
        external: Images of another source on which the final model is tested too; None without them.
        site_tests: Loads the test images of simulated sites that have their own; None for real sites.
        coverage: Label contract (which site annotates which classes) of the sites in the data. It determines which
            classes are shared or unique, even if the method pools all data at one site; None for the contract of the
            run.
        registered: Returns node id -> registered name; None in simulation.
        get_site_key: Returns the public key of a site as an OpenSSH line; None in simulation.
        refused_calls: Returns the hospitals' calls that the SuperLink has refused since this function was last called.
        read_unrecorded_replies: Returns the replies to this run that arrived while its process was down.
        claims: Returns the classes and image counts that each site may claim, and the order in which sites were
            admitted; in simulation, only the order in which the experiment lists them.
        processes: Returns node id -> identifier of the site's process, by which a restart is noticed; None in
            simulation.
        positives: Site -> class -> number of positive training images; empty if only the sites know the numbers.
        table_sha256: Hash of the label table; None without a table on this machine.
        patients_known: True if the data names the patient of every image; None if only the sites know.
        skipped: Images of simulated sites that could not be read.
        notes: Sentences about the label table of simulated sites.
        omissions: Sentences with the numbers of images of simulated sites that are left out, and why.
        reproducible: False if a simulated site's data set returned other images for the same seed.
        resumed: Checkpoint from which the run continues; None for a new run.
    """

    base: Path
    folder: RunFolder
    run: str
    sites: int
    workers: int
    backend: str
    device: str = "cpu"
    precision: Precision = "auto"
    server_data: DatasetSplits | None = None
    test: ImageSet | None = None
    external: ImageSet | None = None
    site_tests: Callable[[], Mapping[str, ImageSet]] | None = None
    coverage: LabelContract | None = None
    registered: Registered | None = None
    get_site_key: Callable[[str], str] | None = None
    refused_calls: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    read_unrecorded_replies: Callable[[str], Iterable[ReplyArrival]] = lambda run: ()
    claims: ClaimsBySite | None = None
    processes: SiteProcesses | None = None
    positives: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    table_sha256: str | None = None
    patients_known: bool | None = None
    skipped: Sequence[SkippedImage] = ()
    notes: Sequence[str] = ()
    omissions: Sequence[str] = ()
    reproducible: bool = True
    resumed: Checkpoint | None = None


@dataclass(frozen=True)
class FinalTestOutcome:
    """The test results and the hash of the final model.

    Attributes:
        test: Results on the test images of the coordinator, or of the sites.
        per_site: Site -> results on the site's own test images.
        ensemble: Result of the ensemble of local models; None unless simulated sites train alone.
        external: Results on the external test images; None without such images, or if hospitals keep their own models.
    """

    test: FinalTestSummary
    per_site: Mapping[str, SiteTestResult]
    model_sha256: str
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None


def select_counting_replies(
    replies: ExchangeReplies[EvaluateReply], coordinator: Coordinator
) -> ExchangeReplies[EvaluateReply]:
    """Return the test replies of the sites whose statistics are used; all replies if none of these sites replied."""
    uncounted = coordinator.uncounted_sites
    accepted = {site: reply for site, reply in replies.accepted.items() if site not in uncounted}
    return replace(replies, accepted=accepted) if accepted else replies


def list_tested_classes(answers: Iterable[EvaluateReply]) -> set[str]:
    """Return the classes for which at least one site has an AUROC."""
    return {
        name
        for answer in answers
        for name, auroc in zip(answer.class_names, answer.auroc, strict=True)
        if not math.isnan(auroc)
    }


def save_and_test_model(
    network: SplitNetwork,
    coordinator: Coordinator,
    replies: ExchangeReplies[EvaluateReply],
    run_context: RunContext,
    sums: Mapping[str, SummedScoreHistogram],
    learning: ClassLearning,
) -> FinalTestOutcome:
    """Save the global model, if the method has one; test the final model or models.

    Args:
        network: A network of the run's classes; its weights are overwritten.
        replies: The sites' replies to the request to test.
        sums: Class -> sum of the sites' score histograms, under secure aggregation.
        learning: Classes that the global model has not learned.
    """
    answers = list(replies.accepted.values())
    plan = coordinator.plan
    run_context.folder.append_absence_events("test", replies.absent)
    contract = coordinator.sites.contract
    coverage = run_context.coverage or contract
    groups = coverage.shared_classes, coverage.unique_classes
    # The report shows the metrics of a site whose statistics do not count, but means and thresholds do not use them.
    counting = list(select_counting_replies(replies, coordinator).accepted.values())
    metrics_of_site = {answer.site: _convert_to_class_metrics(answer) for answer in answers}
    metrics_of_counting = {answer.site: metrics_of_site[answer.site] for answer in counting}
    metrics_by_class: dict[str, list[ClassMetrics]] = {name: [] for name in contract.class_names}
    for results in metrics_of_counting.values():
        for name, metrics in results.items():
            metrics_by_class[name].append(metrics)
    means_over_sites = {name: average_metrics_over_models(metrics) for name, metrics in metrics_by_class.items()}
    histograms: Histograms | None = None
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None
    if coordinator.method.site.parts.has_global_model:
        model = coordinator.result_model
        write_model_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
        pixels = coordinator.sites.pixels
        saved = save_model(
            run_context.folder.path,
            network,
            label_contract_sha256=contract.hash,
            pixels=pixels,
            unlearned=learning.unlearned,
            maybe_unlearned=learning.unknown,
            vocabulary=plan.vocabulary,
        )
        sha256 = saved.model_sha256
        test = summarise_test_results(means_over_sites, *groups, MEAN_OVER_SITES_NOTE)
        if run_context.test is not None and len(run_context.test) > 0:
            test, histograms = _test_global_model(network, run_context.test, run_context, groups, plan)
        if run_context.external is not None:
            external = _test_global_model(network, run_context.external, run_context, groups, plan)[0]
    else:
        # Each site has its own model. The hash of the run's result is that of all models together.
        sha256 = hashlib.sha256("".join(f"{a.site}\0{a.model_sha256}\0" for a in answers).encode()).hexdigest()
        test = summarise_test_results(means_over_sites, *groups, LOCAL_MODELS_NOTE)
        folders = find_local_model_folders(run_context.folder.path, coverage)  # empty for real hospitals
        if folders and run_context.external is not None:
            external = evaluate_local_models(
                folders, coverage, run_context.external, run_context.device, run_context.precision
            )
        images, site_tests = run_context.test, run_context.site_tests
        has_labels = not is_segmentation(plan.model.task)  # an ensemble of pixel scores is not supported
        if coordinator.method.site.parts.trains_alone and folders and site_tests is not None and images and has_labels:
            ensemble = evaluate_ensemble(
                folders, coverage, images, site_tests(), run_context.device, run_context.precision
            )
    drawn = coordinator.sites_drawn_for_test
    test = _add_histogram_metrics(
        test, coordinator, counting, histograms, groups, sums, real=run_context.site_tests is None
    )
    figures = (test.mean_auroc, test.pooled, test.segmentation)
    if all(figure is None for figure in figures) and not any(answer.class_names for answer in answers):
        withheld = ""
        if plan.privacy.level != "none":
            withheld = "test figures stay at the sites, because the noise of this run covers updates alone"
        elif plan.privacy.secure_aggregation:
            withheld = "under secure aggregation test figures leave in a sum over sites alone, and none was opened"
        test = replace(test, withheld=withheld)
    if drawn is not None:
        test = replace(test, sampled=_estimate_site_sample_intervals(metrics_of_counting, contract, drawn, test.note))
    per_site = {
        answer.site: SiteTestResult(
            validation_loss=answer.validation_loss,
            mean_auroc=compute_mean_auroc(metrics_of_site[answer.site]),
            per_class=metrics_of_site[answer.site],
            decisions=count_decisions_at_points(answer.histograms, test.operating_points),
        )
        for answer in answers
    }
    return FinalTestOutcome(test, per_site, sha256, ensemble, external)


def _add_histogram_metrics(
    test: FinalTestSummary,
    coordinator: Coordinator,
    answers: Sequence[EvaluateReply],
    own: Histograms | None,
    groups: tuple[Collection[str], Collection[str]],
    masked_sums: Mapping[str, SummedScoreHistogram],
    *,
    real: bool,
) -> FinalTestSummary:
    """Return the test results with pooled metrics and decisions at chosen thresholds, both from score histograms.

    The thresholds are chosen on the sites' validation images. Under secure aggregation, if the coordinator has no test
    images, the pooled metrics become the test results.

    Args:
        test: Test results so far.
        answers: The sites' test replies, with their score histograms.
        own: Class -> score histogram of the coordinator's test images; None if it has none.
        groups: Names of the shared classes, and of the unique classes.
        masked_sums: Class -> sum of the sites' score histograms, under secure aggregation; otherwise empty.
        real: True if each site has its own test images. Otherwise an image may count more than once, and the pooled
            metrics get no intervals.
    """
    contract = coordinator.sites.contract
    drawn = coordinator.sites_drawn_for_test
    testers = frozenset(contract.sites if drawn is None else drawn)
    owners = {
        name: [site for site in contract.annotating_sites(name) if site in testers] for name in contract.class_names
    }
    validation = sum_site_histograms({answer.site: answer.validation_histograms for answer in answers}, owners)
    sums = masked_sums or sum_site_histograms({answer.site: answer.histograms for answer in answers}, owners)
    if is_segmentation(coordinator.plan.model.task):
        pooled = _pool_overlaps(coordinator, answers, owners, masked_sums, real=real)
        if (
            test.segmentation is not None or not pooled.per_class
        ):  # tested on the coordinator's images, or no histograms
            return test
        if test.note == MEAN_OVER_SITES_NOTE:
            per_class = {name: make_metrics_of_overlap(pooled.per_class.get(name)) for name in contract.class_names}
            test = summarise_test_results(
                per_class, *groups, SUMMED_HISTOGRAMS_NOTE if masked_sums else MEAN_OVER_PATIENTS_NOTE
            )
        return replace(test, segmentation=pooled)
    validation_histograms = {name: summed.histogram for name, summed in validation.items()}
    test_histograms = {name: summed.histogram for name, summed in sums.items()} if own is None else own
    sensitivity = coordinator.plan.evaluation.sensitivity
    points = choose_operating_points(validation_histograms, test_histograms, sensitivity)
    # Simulated sites may test on the same images. Then an interval would be too narrow.
    generator = np.random.default_rng(derive_seed(coordinator.plan.run.seed, "pooled intervals")) if real else None
    pooled_metrics = compute_pooled_metrics(sums, owners, generator)
    if own is None and masked_sums and pooled_metrics:
        test = summarise_test_results(
            {
                name: compute_class_metrics_from_sums(pooled_metrics.per_class.get(name))
                for name in contract.class_names
            },
            *groups,
            SUMMED_HISTOGRAMS_NOTE,
        )
    return replace(test, pooled=pooled_metrics, operating_points=points)


def _pool_overlaps(
    coordinator: Coordinator,
    answers: Sequence[EvaluateReply],
    owners: Mapping[str, Sequence[str]],
    masked_sums: Mapping[str, SummedScoreHistogram],
    *,
    real: bool,
) -> SegmentationSummary:
    """Return the metrics of a segmentation model over the patients of all sites.

    Args:
        answers: The sites' test replies, with histograms over patients.
        owners: Class -> sites that annotate the class and tested the model.
        masked_sums: Class -> sum of the sites' histograms, under secure aggregation; otherwise empty.
        real: True to estimate intervals, because each site has its own test images.
    """
    overlaps: dict[str, list[SiteOverlap]] = {
        name: [SiteOverlap(summed.histogram)] for name, summed in masked_sums.items()
    }
    for answer in () if masked_sums else sorted(answers, key=lambda answer: answer.site):
        metrics = _convert_to_class_metrics(answer)
        for name, histogram in answer.histograms.items():
            if answer.site in owners.get(name, ()):
                means = metrics[name].more
                overlap = SiteOverlap(histogram, means.get(DICE_METRIC), means.get(HAUSDORFF_METRIC))
                overlaps.setdefault(name, []).append(overlap)
    overlaps = {name: overlaps[name] for name in owners if name in overlaps}
    seed = derive_seed(coordinator.plan.run.seed, "pooled intervals")
    pooled = pool_site_overlaps(overlaps, np.random.default_rng(seed) if real else None)
    return replace(pooled, unit=VOLUME_DISTANCE_UNIT if coordinator.plan.model.takes_volumes else "pixels")


def compute_class_metrics_from_sums(pooled: PooledClassMetrics | None) -> ClassMetrics:
    """Return the metrics of one class from its pooled metrics; a metric with too large an error becomes None.

    Args:
        pooled: Metrics from summed histograms; for None, all metrics of the result are None.
    """
    if pooled is None:
        return ClassMetrics(None, None, None, None, None)
    balanced = None if pooled.balanced_accuracy is None else ValueWithError(pooled.balanced_accuracy)
    figures = dict(zip(FIGURES, (pooled.auroc, pooled.average_precision, balanced), strict=True))
    auroc, precision, accuracy = (
        figure.value if figure and figure.error <= MAX_METRIC_ERROR else None for figure in figures.values()
    )
    return ClassMetrics(
        auroc,
        precision,
        accuracy,
        positives=pooled.positives,
        negatives=pooled.negatives,
        errors={name: figure.error for name in FIGURES if (figure := figures[name]) and figure.error},
    )


def _test_global_model(
    network: SplitNetwork,
    images: ImageSet,
    run_context: RunContext,
    groups: tuple[Collection[str], Collection[str]],
    plan: HospitalPlan,
) -> tuple[FinalTestSummary, Histograms]:
    """Test the global model on ``images`` of the coordinator.

    Args:
        groups: Names of the shared classes, and of the unique classes.

    Returns:
        The test results; and class -> score histogram.
    """
    move_network_to_device(network, run_context.device)
    names = network.class_names
    task = network.spec.task
    if is_segmentation(task):
        return _test_segmentation_model(network, images, run_context, groups, plan)
    scores = compute_image_probabilities(
        network, load_pixels_on_device(images, run_context.device), run_context.precision
    )
    labels = select_head_row_labels(images, names).numpy()
    generator = np.random.default_rng(derive_seed(plan.run.seed, "intervals"))
    more = load_plugin_metrics(plan.evaluation.metrics)
    patients = images.patients
    resampled: Literal["patients", "images"] = "patients" if are_all_patients_known(patients) else "images"
    histograms = {
        name: compute_score_histogram(scores[:, column], labels[:, column]) for column, name in enumerate(names)
    }
    test = replace(
        summarise_test_results(compute_metrics_per_class(scores, labels, names, more), *groups, GLOBAL_MODEL_NOTE),
        multi_class=compute_multi_class_metrics(scores, labels) if task == "multi_class" else None,
        intervals=replace(bootstrap_auroc_intervals(scores, labels, patients, names, generator), over=resampled),
        quality=compute_score_quality(scores, labels, names, task),
    )
    return test, histograms


def _test_segmentation_model(
    network: SplitNetwork,
    images: ImageSet,
    run_context: RunContext,
    groups: tuple[Collection[str], Collection[str]],
    plan: HospitalPlan,
) -> tuple[FinalTestSummary, Histograms]:
    """Test a global segmentation model on ``images`` of the coordinator; see :func:`_test_global_model`."""
    names = network.class_names
    pixels = load_pixels_on_device(images, run_context.device)
    masks = make_mask_tensors(images, names, pixels.device)
    assert masks is not None, "loading the data checks this"
    labels = select_head_row_labels(images, names).to(pixels.device)
    compared = compare_with_masks(network, pixels, masks, labels, run_context.precision, distances=True)
    figures = {name: compute_patient_figures(compared, images.patients, row) for row, name in enumerate(names)}
    per_class = {name: make_segmentation_metrics(class_figures) for name, class_figures in figures.items()}
    generator = np.random.default_rng(derive_seed(plan.run.seed, "intervals"))
    summary = replace(
        summarise_patients(figures, generator),
        over="patients" if are_all_patients_known(images.patients) else "images",
        unit="pixels" if masks.spacing is None else "mm",
    )
    test = replace(summarise_test_results(per_class, *groups, GLOBAL_MODEL_NOTE), segmentation=summary)
    return test, {name: make_patient_histogram(class_figures) for name, class_figures in figures.items()}


def _estimate_site_sample_intervals(
    metrics_of_site: Mapping[str, Mapping[str, ClassMetrics]],
    contract: LabelContract,
    sites: Collection[str],
    note: str,
) -> SiteSampleIntervals:
    """Return the number of sites drawn to test the model, with estimated intervals of the AUROC over all sites.

    Args:
        metrics_of_site: Site -> class -> metrics.
        sites: The drawn sites.
        note: Note on how the test results were computed. If they are not means over sites, the result has no intervals.
    """
    drawn = frozenset(sites)
    site_count = len(contract.sites)
    if note in (GLOBAL_MODEL_NOTE, SUMMED_HISTOGRAMS_NOTE):
        return SiteSampleIntervals(len(drawn), site_count)
    values: dict[str, dict[str, float]] = {name: {} for name in contract.class_names}
    for site, results in metrics_of_site.items():
        for name, metrics in results.items():
            if metrics.auroc is not None:
                values[name][site] = metrics.auroc
    owners = {name: contract.annotating_sites(name) for name in contract.class_names}
    shares = {name: len(drawn.intersection(sites)) / len(sites) for name, sites in owners.items()}
    return estimate_sampled_site_intervals(values, shares, len(drawn), site_count)


def _convert_to_class_metrics(answer: EvaluateReply) -> dict[str, ClassMetrics]:
    """Return class -> metrics from the columns of a test reply, with None for NaN."""
    return {
        name: ClassMetrics(
            auroc=_nan_to_none(answer.auroc[row]),
            average_precision=_nan_to_none(answer.average_precision[row]),
            balanced_accuracy=_nan_to_none(answer.balanced_accuracy[row]),
            positives=unknown_count_to_none(answer.positives[row]),
            negatives=unknown_count_to_none(answer.negatives[row]),
            more={
                metric: _nan_to_none(answer.metric_values[row * len(answer.metric_names) + column])
                for column, metric in enumerate(answer.metric_names)
            },
        )
        for row, name in enumerate(answer.class_names)
    }


def unknown_count_to_none(count: int) -> int | None:
    """Return a count from a site's reply; None if the site does not disclose it."""
    return None if count == UNKNOWN_COUNT else count


def _nan_to_none(value: float) -> float | None:
    return None if np.isnan(value) else value
