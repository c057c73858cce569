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
    GLOBAL_MODEL,
    SUMS,
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
from polyclinic.common.metrics.measured import LARGEST_ERROR, ValueWithError
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
from polyclinic.common.models.zoo.spec import DICE, HAUSDORFF, is_segmentation
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import UNKNOWN_COUNT, EvaluateReply
from polyclinic.data.base.image_set import DatasetSplits, ImageSet, SkippedImage, are_all_patients_known
from polyclinic.data.images.pixels import load_pixels_on_device, make_mask_tensors
from polyclinic.server.federation.checkpoints import Checkpoint
from polyclinic.server.federation.ensemble import (
    OWN_MODELS,
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

MM_WHERE_KNOWN = "mm (voxels of a hospital whose spacing is unknown)"
"""The unit of distances in volumes, of which hospitals tell counts alone."""
MEAN_OVER_SITES_NOTE = "mean over the sites' own test parts"
MEAN_OVER_PATIENTS_NOTE = "mean over the patients of the sites' own test parts"
"""Note of the figures of a segmentation."""
Histograms = Mapping[str, ScoreHistogram]


@dataclass(frozen=True)
class RunContext:
    """Folder, data, devices and callbacks that a run needs in addition to its experiment.

    Attributes:
        base: Folder that relative paths in the experiment start from.
        folder: The run folder, which receives all output.
        run: Identifier of this run.
        sites: Number of sites expected at the roll call.
        workers: Number of sites that train at the same time.
        backend: Name of the backend in ``summary.json``.
        device, precision: Device and number format of the coordinator's own evaluation.
        own: The coordinator's own training and validation images; None if it has none.
        test: The coordinator's test images; None if it has none.
        external: Test images from elsewhere, for the final model; None without them.
        site_tests: Loads the test images of simulated sites that have their own; None for real sites.
        coverage: Label contract (which site annotates which classes) of the data's sites. It decides which classes
            count as shared or unique, even if the method pools all data at one site; None for the contract of the run.
        registered: Returns node id -> registered name; None in simulation.
        key_of: Returns the public key of a site as an OpenSSH line; None in simulation.
        refused_calls: Returns the hospitals' calls that the SuperLink has refused since this function was last called.
        left_replies: Returns the replies to this run that arrived while its process was down.
        claims: Returns the classes and image counts that each site may claim, and the order in which sites were
            admitted; in simulation, only the order in which the experiment lists them.
        processes: Returns the process of each node, which shows that a site was restarted; None in simulation.
        positives: Site -> class -> number of positive training images; empty if only the sites know.
        table_sha256: Hash of the label table; None without a table on this machine.
        patients_known: Whether the data names the patient of every image; None if only the sites know.
        skipped: Images of simulated sites that could not be read.
        notes: Sentences about the label table of simulated sites.
        omissions: Sentences that count what is left out of the images of simulated sites.
        reproducible: False if the same seed gave other pictures of a simulated site's data set.
        resumed: Checkpoint that the run continues from; None for a new run.
    """

    base: Path
    folder: RunFolder
    run: str
    sites: int
    workers: int
    backend: str
    device: str = "cpu"
    precision: Precision = "auto"
    own: DatasetSplits | None = None
    test: ImageSet | None = None
    external: ImageSet | None = None
    site_tests: Callable[[], Mapping[str, ImageSet]] | None = None
    coverage: LabelContract | None = None
    registered: Registered | None = None
    key_of: Callable[[str], str] | None = None
    refused_calls: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    left_replies: Callable[[str], Iterable[ReplyArrival]] = lambda run: ()
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
        ensemble: Result of the ensemble of local models; None unless simulated sites train alone.
        external: Results on the external test images; None without such images, or if hospitals keep models of their
            own.
    """

    test: FinalTestSummary
    per_site: Mapping[str, SiteTestResult]
    model_sha256: str
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None


def select_counting_replies(
    replies: ExchangeReplies[EvaluateReply], coordinator: Coordinator
) -> ExchangeReplies[EvaluateReply]:
    """Return the test replies of the sites whose statistics count; all replies if no such site replied."""
    uncounted = coordinator.uncounted_sites
    accepted = {site: reply for site, reply in replies.accepted.items() if site not in uncounted}
    return replace(replies, accepted=accepted) if accepted else replies


def list_tested_classes(answers: Iterable[EvaluateReply]) -> set[str]:
    """Return the classes with an AUROC at one of the sites."""
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
    setting: RunContext,
    sums: Mapping[str, SummedScoreHistogram],
    learning: ClassLearning,
) -> FinalTestOutcome:
    """Save the global model, if the method has one; test the final model or models.

    Args:
        network: A network of the run's classes; its weights are overwritten.
        replies: The sites' replies to the request to test.
        sums: Class -> sum of the sites' score histograms, under secure aggregation.
        learning: Which classes the global model has not learned.
    """
    answers, plan = list(replies.accepted.values()), coordinator.plan
    setting.folder.append_absence_events("test", replies.absent)
    contract, coverage = coordinator.sites.contract, setting.coverage or coordinator.sites.contract
    groups = coverage.shared_classes, coverage.unique_classes
    # A site whose statistics do not count has figures of its own on the page, and no part in means or thresholds.
    counting = list(select_counting_replies(replies, coordinator).accepted.values())
    metrics_of_site = {answer.site: _convert_to_class_metrics(answer) for answer in answers}
    metrics_of_counting = {answer.site: metrics_of_site[answer.site] for answer in counting}
    of_owners: dict[str, list[ClassMetrics]] = {name: [] for name in contract.class_names}
    for results in metrics_of_counting.values():
        for name, metrics in results.items():
            of_owners[name].append(metrics)
    over_sites = {name: average_metrics_over_models(metrics) for name, metrics in of_owners.items()}
    histograms: Histograms | None = None
    ensemble: EnsembleTestResult | None = None
    external: FinalTestSummary | None = None
    if coordinator.method.site.parts.has_global_model:
        model = coordinator.result_model
        write_model_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
        pixels = coordinator.sites.pixels
        saved = save_model(
            setting.folder.path,
            network,
            label_contract_sha256=contract.hash,
            pixels=pixels,
            unlearned=learning.unlearned,
            maybe_unlearned=learning.unknown,
            vocabulary=plan.vocabulary,
        )
        sha256 = saved.model_sha256
        test = summarise_test_results(over_sites, *groups, MEAN_OVER_SITES_NOTE)
        if setting.test is not None and len(setting.test) > 0:
            test, histograms = _test_global_model(network, setting.test, setting, groups, plan)
        if setting.external is not None:
            external = _test_global_model(network, setting.external, setting, groups, plan)[0]
    else:
        # Each site has its own model; the run's identity is that of all of them.
        sha256 = hashlib.sha256("".join(f"{a.site}\0{a.model_sha256}\0" for a in answers).encode()).hexdigest()
        test = summarise_test_results(over_sites, *groups, OWN_MODELS)
        folders = find_local_model_folders(setting.folder.path, coverage)  # none where they lie at the hospitals
        if folders and setting.external is not None:
            external = evaluate_local_models(folders, coverage, setting.external, setting.device, setting.precision)
        images, site_tests = setting.test, setting.site_tests
        has_labels = not is_segmentation(plan.model.task)  # no mean of scores is made of the scores of pixels
        if coordinator.method.site.parts.trains_alone and folders and site_tests is not None and images and has_labels:
            ensemble = evaluate_ensemble(folders, coverage, images, site_tests(), setting.device, setting.precision)
    drawn = coordinator.sites_drawn_for_test
    test = _add_histogram_metrics(
        test, coordinator, counting, histograms, groups, sums, real=setting.site_tests is None
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
    """Add to the test results the pooled metrics, and the decisions at chosen thresholds, both from score histograms.

    The thresholds are chosen on the sites' validation images. Under secure aggregation, if the coordinator has no test
    images, the pooled metrics become the test results.

    Args:
        test: Test results so far.
        answers: The sites' test replies, with their score histograms.
        own: Class -> score histogram of the coordinator's test images; None if it has none.
        groups: Names of the shared classes, and of the unique ones.
        masked_sums: Class -> sum of the sites' score histograms, under secure aggregation; otherwise empty.
        real: Whether each site has test images of its own. If not, no intervals are estimated for the pooled metrics,
            because an image may count more than once.
    """
    contract, drawn = coordinator.sites.contract, coordinator.sites_drawn_for_test
    testers = frozenset(contract.sites if drawn is None else drawn)
    owners = {
        name: [site for site in contract.annotating_sites(name) if site in testers] for name in contract.class_names
    }
    validation = sum_site_histograms({answer.site: answer.validation_histograms for answer in answers}, owners)
    sums = masked_sums or sum_site_histograms({answer.site: answer.histograms for answer in answers}, owners)
    if is_segmentation(coordinator.plan.model.task):
        pooled = _pool_overlaps(coordinator, answers, owners, masked_sums, real=real)
        if test.segmentation is not None or not pooled.per_class:  # the coordinator's own images, or no histogram
            return test
        if test.note == MEAN_OVER_SITES_NOTE:
            of_classes = {name: make_metrics_of_overlap(pooled.per_class.get(name)) for name in contract.class_names}
            test = summarise_test_results(of_classes, *groups, SUMS if masked_sums else MEAN_OVER_PATIENTS_NOTE)
        return replace(test, segmentation=pooled)
    chosen_on = {name: of_sites.histogram for name, of_sites in validation.items()}
    tested = {name: of_sites.histogram for name, of_sites in sums.items()} if own is None else own
    points = choose_operating_points(chosen_on, tested, coordinator.plan.evaluation.sensitivity)
    # In a simulation the sites may test on the same images, which are not as many as they seem.
    generator = np.random.default_rng(derive_seed(coordinator.plan.run.seed, "pooled intervals")) if real else None
    of_all = compute_pooled_metrics(sums, owners, generator)
    if own is None and masked_sums and of_all:
        test = summarise_test_results(
            {name: compute_class_metrics_from_sums(of_all.per_class.get(name)) for name in contract.class_names},
            *groups,
            SUMS,
        )
    return replace(test, pooled=of_all, operating_points=points)


def _pool_overlaps(
    coordinator: Coordinator,
    answers: Sequence[EvaluateReply],
    owners: Mapping[str, Sequence[str]],
    masked_sums: Mapping[str, SummedScoreHistogram],
    *,
    real: bool,
) -> SegmentationSummary:
    """Return the figures of a segmentation over the patients of all sites; arguments as in the caller.

    Under secure aggregation the sum of the sites' histograms is all that is known.
    """
    of_sites: dict[str, list[SiteOverlap]] = {name: [SiteOverlap(each.histogram)] for name, each in masked_sums.items()}
    for answer in () if masked_sums else sorted(answers, key=lambda answer: answer.site):
        metrics = _convert_to_class_metrics(answer)
        for name, histogram in answer.histograms.items():
            if answer.site in owners.get(name, ()):
                means = metrics[name].more
                overlap = SiteOverlap(histogram, means.get(DICE), means.get(HAUSDORFF))
                of_sites.setdefault(name, []).append(overlap)
    of_sites = {name: of_sites[name] for name in owners if name in of_sites}
    seed = derive_seed(coordinator.plan.run.seed, "pooled intervals")
    pooled = pool_site_overlaps(of_sites, np.random.default_rng(seed) if real else None)
    return replace(pooled, unit=MM_WHERE_KNOWN if coordinator.plan.model.takes_volumes else "pixels")


def compute_class_metrics_from_sums(of_class: PooledClassMetrics | None) -> ClassMetrics:
    """Convert a class's pooled metrics; a metric with too large an error becomes None.

    Args:
        of_class: Metrics from summed histograms; for None, all metrics of the result are None.
    """
    if of_class is None:
        return ClassMetrics(None, None, None, None, None)
    balanced = None if of_class.balanced_accuracy is None else ValueWithError(of_class.balanced_accuracy)
    figures = dict(zip(FIGURES, (of_class.auroc, of_class.average_precision, balanced), strict=True))
    auroc, precision, accuracy = (
        figure.value if figure and figure.error <= LARGEST_ERROR else None for figure in figures.values()
    )
    return ClassMetrics(
        auroc,
        precision,
        accuracy,
        positives=of_class.positives,
        negatives=of_class.negatives,
        errors={name: figure.error for name in FIGURES if (figure := figures[name]) and figure.error},
    )


def _test_global_model(
    network: SplitNetwork,
    images: ImageSet,
    setting: RunContext,
    groups: tuple[Collection[str], Collection[str]],
    plan: HospitalPlan,
) -> tuple[FinalTestSummary, Histograms]:
    """Test the global model on ``images`` of the coordinator.

    Args:
        groups: Names of the shared classes, and of the unique ones.

    Returns:
        The test results; and class -> score histogram.
    """
    move_network_to_device(network, setting.device)
    names, task = network.class_names, network.spec.task
    if is_segmentation(task):
        return _test_segmentation_model(network, images, setting, groups, plan)
    scores = compute_image_probabilities(network, load_pixels_on_device(images, setting.device), setting.precision)
    labels = select_head_row_labels(images, names).numpy()
    generator = np.random.default_rng(derive_seed(plan.run.seed, "intervals"))
    more, patients = load_plugin_metrics(plan.evaluation.metrics), images.patients
    resampled: Literal["patients", "images"] = "patients" if are_all_patients_known(patients) else "images"
    spread = {name: compute_score_histogram(scores[:, c], labels[:, c]) for c, name in enumerate(names)}
    test = replace(
        summarise_test_results(compute_metrics_per_class(scores, labels, names, more), *groups, GLOBAL_MODEL),
        multi_class=compute_multi_class_metrics(scores, labels) if task == "multi_class" else None,
        intervals=replace(bootstrap_auroc_intervals(scores, labels, patients, names, generator), over=resampled),
        quality=compute_score_quality(scores, labels, names, task),
    )
    return test, spread


def _test_segmentation_model(
    network: SplitNetwork,
    images: ImageSet,
    setting: RunContext,
    groups: tuple[Collection[str], Collection[str]],
    plan: HospitalPlan,
) -> tuple[FinalTestSummary, Histograms]:
    """Test a global segmentation model on ``images`` of the coordinator, as :func:`_test_global_model`."""
    names, pixels = network.class_names, load_pixels_on_device(images, setting.device)
    masks = make_mask_tensors(images, names, pixels.device)
    assert masks is not None, "checked when the data were loaded"
    labels = select_head_row_labels(images, names).to(pixels.device)
    compared = compare_with_masks(network, pixels, masks, labels, setting.precision, distances=True)
    figures = {name: compute_patient_figures(compared, images.patients, row) for row, name in enumerate(names)}
    per_class = {name: make_segmentation_metrics(of_class) for name, of_class in figures.items()}
    generator = np.random.default_rng(derive_seed(plan.run.seed, "intervals"))
    summary = replace(
        summarise_patients(figures, generator),
        over="patients" if are_all_patients_known(images.patients) else "images",
        unit="pixels" if masks.spacing is None else "mm",
    )
    test = replace(summarise_test_results(per_class, *groups, GLOBAL_MODEL), segmentation=summary)
    return test, {name: make_patient_histogram(of_class) for name, of_class in figures.items()}


def _estimate_site_sample_intervals(
    metrics_of_site: Mapping[str, Mapping[str, ClassMetrics]],
    contract: LabelContract,
    sites: Collection[str],
    note: str,
) -> SiteSampleIntervals:
    """Count the sites that were drawn to test the model; estimate intervals of the AUROC over all sites.

    Args:
        metrics_of_site: Site -> class -> metrics.
        sites: The drawn sites.
        note: How the test results were computed. If they are not means over sites, the result has no intervals.
    """
    drawn, every = frozenset(sites), len(contract.sites)
    if note in (GLOBAL_MODEL, SUMS):
        return SiteSampleIntervals(len(drawn), every)
    values: dict[str, dict[str, float]] = {name: {} for name in contract.class_names}
    for site, results in metrics_of_site.items():
        for name, metrics in results.items():
            if metrics.auroc is not None:
                values[name][site] = metrics.auroc
    owners = {name: contract.annotating_sites(name) for name in contract.class_names}
    shares = {name: len(drawn.intersection(sites)) / len(sites) for name, sites in owners.items()}
    return estimate_sampled_site_intervals(values, shares, len(drawn), every)


def _convert_to_class_metrics(answer: EvaluateReply) -> dict[str, ClassMetrics]:
    """Convert the columns of a test reply to one record per class, with None for NaN."""
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
