"""Compare runs: average methods over seeds, test the first method against the others, compute the gains of sites."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from scipy.stats import ttest_1samp

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.metrics.auroc import (
    MIN_POSITIVES,
    ClassMetrics,
    FinalTestSummary,
    average_group_auroc,
    compute_mean_and_sd,
)
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.holm import adjust_by_holm
from polyclinic.common.metrics.segmentation import SegmentationSummary
from polyclinic.common.models.zoo.spec import DICE_METRIC
from polyclinic.common.plugins import shorten_metric_names
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import (
    format_as_json_text,
    format_count_with_noun,
    format_rounds,
    join_first_and_count,
    list_first_and_count_rest,
)
from polyclinic.server.reporting.run_claims import (
    MAX_NAMES,
    ONE_SCORE_CAUSE,
    THRESHOLDS_HEADING,
    describe_way_to_mean_auroc,
    find_classes_without_sensitivity,
    find_undetected_classes,
    gives_all_images_one_score,
    is_last_round_best,
)
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import SINGLE_CLASS_MEASURES, Measure, RunSummary
from polyclinic.studies.statistics import (
    ALPHA,
    MIN_SEEDS,
    PairedTest,
    Scores,
    are_differences_equal,
    compare_classes_and_seeds,
    compare_over_classes,
    correct_family_by_holm,
)

ENSEMBLE = "ensemble"
"""Method name of an ensemble of the models that sites trained alone."""

NO_BETTER_ROUND_SENTENCE = "no round was better on validation than before round 1"

MIN_CLASS_IMAGES = 10
"""A class with fewer positive or negative test images is listed in a caution."""

Subset = Literal["all", "shared", "unique"]
Pairing = Literal["classes", "classes x seeds"]
Verdict = Literal["gains", "loses", "open"]
Seeds = Mapping[int, RunFolderContent]  # seed -> run of one method
ByMethod = Mapping[str, Seeds]  # label -> seed -> run
Members = Mapping[Subset, set[tuple[int, str]]]  # subset -> (seed, class)

SUBSETS: tuple[Subset, ...] = get_args(Subset)
TESTS_BY_PAIRING: dict[Pairing, Callable[[Scores, Scores, np.random.Generator], PairedTest]] = {
    "classes": compare_over_classes,
    "classes x seeds": compare_classes_and_seeds,
}


@dataclass(frozen=True)
class MeanAndSd:
    """Mean and sample standard deviation (``n - 1``) over seeds; None if undefined, such as the SD of one seed."""

    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class MethodResult:
    """The results of one method over its seeds.

    Attributes:
        auroc: Subset of classes -> mean and SD over seeds of the mean AUROC over these classes.
        per_class: Class -> AUROC, averaged over the seeds in which it is defined.
        intervals: Class -> 95 % bootstrap interval over the patients of the test set, with ends averaged over the
            seeds; only if the coordinator tested one model.
        measures: Metrics of a multi-class task, if at least one seed has them.
        more: Metric of a plug-in -> mean and SD over seeds of its mean over the classes.
        auroc_by_seed: Subset of classes -> seed -> mean AUROC over these classes; None if no class has an AUROC.
    """

    label: str
    seeds: tuple[int, ...]
    note: str
    auroc: dict[Subset, MeanAndSd]
    average_precision: MeanAndSd
    balanced_accuracy: MeanAndSd
    per_class: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    measures: dict[Measure, MeanAndSd]
    auroc_by_seed: dict[Subset, dict[int, float | None]] = field(default_factory=dict)
    more: dict[str, MeanAndSd] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodContrast:
    """The test of the reference against one other method, over a subset of the classes.

    Holm's correction is over all methods that are tested with the same subset and pairing.
    """

    other: str
    subset: Subset
    pairing: Pairing
    result: PairedTest


@dataclass(frozen=True)
class SiteGain:
    """The difference between the reference and another method at one site, on the same test images.

    Attributes:
        gain: Mean AUROC over the site's classes, reference minus other method, averaged over seeds; None if the methods
            cannot be compared.
        sd: Sample SD of the gain over seeds; None with one seed.
        auroc, other_auroc: Mean AUROC of the reference and of the other method.
        classes: Classes compared in at least one seed.
        losses: Number of these classes on which the reference has the lower AUROC, averaged over seeds.
        seeds: Seeds compared.
        reason: Reason why the methods cannot be compared, or a seed is left out; empty if all seeds are compared.
        p: P-value of a two-sided t-test over seeds; the null hypothesis is a gain of zero. Holm's correction is over
            all sites for the same other method. None with fewer than three seeds, or if all seeds have the same gain.
    """

    site: str
    other: str
    gain: float | None = None
    sd: float | None = None
    auroc: float | None = None
    other_auroc: float | None = None
    classes: tuple[str, ...] = ()
    losses: int = 0
    seeds: tuple[int, ...] = ()
    reason: str = ""
    p: float | None = None

    @property
    def verdict(self) -> Verdict:
        """``gains`` or ``loses`` if the gain is significant over seeds, otherwise ``open``."""
        if self.gain is None or self.p is None or self.p >= ALPHA:
            return "open"
        return "gains" if self.gain > 0 else "loses"


def name_figure_in_text(text: str, figure: str) -> str:
    """Replace the word AUROC in a text by the name of another metric, such as Dice."""
    return text if figure == "AUROC" else text.replace("an AUROC", f"a {figure}").replace("AUROC", figure)


@dataclass(frozen=True)
class MethodComparison:
    """The content of the comparison's tables and report.

    Attributes:
        reference: Label of the method with which each other method is compared.
        methods: Results of the reference, then of the other methods in the order of the runs.
        class_groups: Group -> class names. The group is ``"shared"`` if all sites annotate the class, ``"unique"`` if
            one site does, ``"some"`` for other numbers, and ``"varies"`` if it differs between seeds.
        contrasts: A test for every other method, subset of the classes (all, shared, unique) and pairing (by class, or
            by class and seed).
        cautions: Sentences about conditions that make the comparison uneven.
        site_gains: Differences between the reference and every other method at each site.
        kinds: Label of a method in tables (the run's name, if it has one) -> name of the method, such as ``fedavg``.
        external: The comparison on the external test set; None unless every run has one.
        figure: Name of the metric that is compared, AUROC or Dice. For segmentations, all fields with ``auroc`` in
            their names have the Dice.
        same_models: Label of another method whose final model equals the reference's in each seed -> True if the reason
            is that every site annotates every class; False for another reason, such as an unchanged initial model.
    """

    reference: str
    methods: tuple[MethodResult, ...]
    class_groups: dict[str, tuple[str, ...]]
    contrasts: tuple[MethodContrast, ...]
    cautions: tuple[str, ...]
    site_gains: tuple[SiteGain, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    external: "MethodComparison | None" = None
    same_models: dict[str, bool] = field(default_factory=dict)
    figure: str = "AUROC"

    def name_figure(self, text: str) -> str:
        """Replace the word AUROC in a text by the name of the metric that is compared."""
        return name_figure_in_text(text, self.figure)

    @property
    def available_metrics(self) -> list[Measure]:
        """The multi-class metrics that at least one method has, in the order of tables."""
        return [
            measure for measure in SINGLE_CLASS_MEASURES if any(measure in method.measures for method in self.methods)
        ]

    @property
    def own_metrics(self) -> dict[str, str]:
        """Metric of a plug-in -> its short name for tables."""
        return shorten_metric_names(dict.fromkeys(name for method in self.methods for name in method.more))

    def find_method_contrast(self, other: str, subset: Subset = "all", pairing: Pairing = "classes") -> MethodContrast:
        """Return the test against one other method; by default the main test, over all classes."""
        key = (other, subset, pairing)
        return next(
            contrast for contrast in self.contrasts if (contrast.other, contrast.subset, contrast.pairing) == key
        )


def compare_methods(runs: Sequence[RunFolderContent], *, bootstrap_seed: int = 0) -> MethodComparison:
    """Average each method over its seeds, and test the first method, the reference, against every other.

    The partition depends on the seed, so that shared and unique classes may differ between seeds. They are taken from
    the reference's run with the same seed, so that a method that pools all data is scored on the same classes. If sites
    trained alone, the ensemble of their models counts as another method.

    Raises:
        BadInput: If there is no run, or a method has the same seed twice.
    """
    figures = {run.summary.test.figure_name for run in runs}
    if len(figures) > 1:
        problem = "some runs segment and others classify: a Dice cannot be compared with an AUROC."
        raise BadInput([Fault("compare", problem, "Compare runs of one task.")])
    by_method = _group_by_method([_show_dice_as_auroc(run) for run in runs])
    reference, *others = by_method
    members = _group_classes_by_subset(by_method)
    averaged = _keep_averaged_classes(members, by_method)
    scores = {label: collect_auroc_scores(seeds.values()) for label, seeds in by_method.items()}
    generator = np.random.default_rng(bootstrap_seed)
    repeated = any(len(by_method[reference].keys() & by_method[other].keys()) > 1 for other in others)
    pairings: list[Pairing] = ["classes", "classes x seeds"] if repeated else ["classes"]
    contrasts: list[MethodContrast] = []
    for pairing in pairings:
        for subset in SUBSETS:
            chosen = {
                label: {key: auroc for key, auroc in aurocs.items() if key in averaged[subset]}
                for label, aurocs in scores.items()
            }
            tests = correct_family_by_holm(
                [TESTS_BY_PAIRING[pairing](chosen[reference], chosen[other], generator) for other in others]
            )
            contrasts += [
                MethodContrast(other, subset, pairing, test) for other, test in zip(others, tests, strict=True)
            ]
    class_groups: dict[str, list[str]] = {"shared": [], "some": [], "unique": [], "varies": []}
    for name in sorted({name for _, name in members["all"]}):
        pairs = {pair for pair in members["all"] if pair[1] == name}
        shared = pairs & members["shared"]
        unique = pairs & members["unique"]
        if shared == pairs:
            group = "shared"
        elif unique == pairs:
            group = "unique"
        else:
            group = "varies" if shared or unique else "some"
        class_groups[group].append(name)
    figure = figures.pop() if figures else "AUROC"
    external = None
    if all(run.summary.external is not None for run in runs):
        removed: dict[str, object] = {"external": None, "ensemble": None, "client_accuracy": None, "per_site": {}}
        summaries = [run.summary.model_copy(update={**removed, "test": run.summary.external}) for run in runs]
        external_runs = [replace(run, summary=summary) for run, summary in zip(runs, summaries, strict=True)]
        external = compare_methods(external_runs, bootstrap_seed=bootstrap_seed)
    return MethodComparison(
        reference=reference,
        methods=tuple(
            _average_method_over_seeds(label, seeds, members, averaged) for label, seeds in by_method.items()
        ),
        class_groups={group: tuple(names) for group, names in class_groups.items() if names},
        contrasts=tuple(contrasts),
        cautions=tuple(name_figure_in_text(sentence, figure) for sentence in _list_comparison_cautions(by_method)),
        figure=figure,
        site_gains=compare_methods_at_sites(by_method),
        kinds={label: next(iter(seeds.values())).summary.method for label, seeds in by_method.items()},
        external=external,
        same_models=find_same_models(by_method),
    )


def _show_dice_as_auroc(run: RunFolderContent) -> RunFolderContent:
    """Return a segmentation run with the Dice in the fields for the AUROC, so that the same tables compare it.

    A run of another task is returned unchanged.
    """
    summary = run.summary
    if summary.test.figure_name != "Dice":
        return run
    test = _show_dice_of_test(summary.test)
    external = summary.external and _show_dice_of_test(summary.external)
    per_site = {
        site: result.model_copy(update={"per_class": _show_dice_of_classes(result.per_class)})
        for site, result in summary.per_site.items()
    }
    shown = {"test": test, "external": external, "per_site": per_site}
    return replace(run, summary=summary.model_copy(update=shown))


def _show_dice_of_test(test: FinalTestSummary) -> FinalTestSummary:
    per_class = _show_dice_of_classes(test.per_class)
    everything = average_group_auroc(per_class, per_class)
    overlap = test.segmentation
    intervals = None
    if overlap is not None and overlap.interval is not None:
        of_class = {name: each.interval for name, each in overlap.per_class.items() if each.interval is not None}
        intervals = AurocIntervals(overlap.interval, of_class)
    return replace(
        test,
        per_class=per_class,
        mean_auroc=everything.mean_auroc,
        sd_auroc=everything.sd_auroc,
        shared_classes=average_group_auroc(per_class, test.shared_classes.classes),
        unique_classes=average_group_auroc(per_class, test.unique_classes.classes),
        mean_more={name: mean for name, mean in test.mean_more.items() if name != DICE_METRIC},
        intervals=intervals,
        segmentation=overlap or SegmentationSummary(everything.mean_auroc),
    )


def _show_dice_of_classes(per_class: Mapping[str, ClassMetrics]) -> dict[str, ClassMetrics]:
    return {
        name: replace(
            metrics,
            auroc=metrics.main_figure,
            more={key: value for key, value in metrics.more.items() if key != DICE_METRIC},
        )
        for name, metrics in per_class.items()
    }


def find_same_models(by_method: ByMethod) -> dict[str, bool]:
    """Return the methods whose final model is equal to that of the first method in each seed.

    Returns:
        Label -> True if the reason is that every site annotates every class, which makes many methods equal.
    """
    reference, *others = by_method
    of_reference = by_method[reference]
    same = dict[str, bool]()
    for label in others:
        common = sorted(by_method[label].keys() & of_reference.keys())
        pairs = [(by_method[label][seed].summary, of_reference[seed].summary) for seed in common]
        # An ensemble consists of several models; the hash in its summary is that of another model, the run's.
        is_model = all(ours.method != ENSEMBLE != theirs.method and ours.model_sha256 for ours, theirs in pairs)
        if common and is_model and all(ours.model_sha256 == theirs.model_sha256 for ours, theirs in pairs):
            summaries = [of_reference[seed].summary for seed in common]
            same[label] = all(
                annotates_every_class(summary) and not summary.is_initial_model_tested for summary in summaries
            )
    return same


def annotates_every_class(summary: RunSummary) -> bool:
    """Return True if every site of a run annotates every class."""
    return all(set(summary.classes) <= set(site.classes) for site in summary.sites.values())


def write_comparison(comparison: MethodComparison, destination: Path) -> Path:
    """Write the comparison as a JSON file, and return its path."""
    text = format_as_json_text(asdict(comparison), indent=2, allow_nan=True)
    write_atomically(destination, f"{text}\n".encode())
    return destination


def _group_by_method(runs: Sequence[RunFolderContent]) -> dict[str, dict[int, RunFolderContent]]:
    """Return label -> seed -> run; an ensemble of models that sites trained alone is added as a run with its own label.

    Raises:
        BadInput: If there is no run, or a label has the same seed twice.
    """
    if not runs:
        raise BadInput([Fault("compare", "there is no run to compare.", "Name at least one run folder.")])
    with_ensembles = list[RunFolderContent]()
    for run in runs:
        with_ensembles.append(run)
        if (ensemble := run.summary.ensemble) is not None:
            changes: dict[str, object] = {"method": ENSEMBLE, "name": f"{run.summary.table_label} (ensemble)"}
            changes |= {"ensemble": None, "client_accuracy": None}
            changes |= {"test": ensemble.test, "per_site": ensemble.per_site}
            with_ensembles.append(replace(run, summary=run.summary.model_copy(update=changes)))
    grouped: dict[str, dict[int, RunFolderContent]] = {}
    faults = []
    for run in with_ensembles:
        first = grouped.setdefault(run.summary.table_label, {}).setdefault(run.summary.seed, run)
        if first is not run:
            problem = f'"{run.summary.table_label}" with seed {run.summary.seed} is already in {first.folder}.'
            faults.append(Fault(str(run.folder), problem, "Leave one of them out, or give them different names."))
    raise_faults(faults)
    return grouped


def _group_classes_by_subset(by_method: ByMethod) -> Members:
    tests: dict[int, FinalTestSummary] = {}
    for seeds in reversed(list(by_method.values())):  # the reference comes last and overrides the others
        tests.update({seed: run.summary.test for seed, run in seeds.items()})
    runs = (run for seeds in by_method.values() for run in seeds.values())
    return {
        "all": {(run.summary.seed, name) for run in runs for name in run.summary.classes},
        "shared": {(seed, name) for seed, test in tests.items() for name in test.shared_classes.classes},
        "unique": {(seed, name) for seed, test in tests.items() for name in test.unique_classes.classes},
    }


def _keep_averaged_classes(members: Members, by_method: ByMethod) -> Members:
    """Return the pairs of seed and class that count in the mean AUROC of every run with this seed.

    A class is left out if too few test images show it in a run. So all methods are averaged over the same classes.
    """
    left_out_by_seed = dict[int, set[str]]()
    for seeds in by_method.values():
        for seed, run in seeds.items():
            left_out = run.summary.test.compute_headline_auroc().left_out
            left_out_by_seed.setdefault(seed, set()).update(left_out)
    return {
        subset: {(seed, name) for seed, name in pairs if name not in left_out_by_seed.get(seed, ())}
        for subset, pairs in members.items()
    }


def collect_auroc_scores(runs: Iterable[RunFolderContent]) -> Scores:
    """Return (seed, class) -> AUROC; None if it is undefined or not exact.

    An AUROC from score histograms is not exact, and its error could explain a difference between two methods.
    """
    tests = {run.summary.seed: run.summary.test.per_class for run in runs}
    return {
        (seed, name): result.exact_metric_or_none("auroc")
        for seed, test in tests.items()
        for name, result in test.items()
    }


def _average_method_over_seeds(label: str, seeds: Seeds, members: Members, averaged: Members) -> MethodResult:
    tests = {seed: run.summary.test for seed, run in sorted(seeds.items())}
    scores = collect_auroc_scores(seeds.values())
    ends: dict[str, list[tuple[float, float]]] = {}
    for test in tests.values():
        for name, interval in (test.intervals.per_class if test.intervals else {}).items():
            ends.setdefault(name, []).append(interval)
    intervals = {name: np.mean(of_class, axis=0) for name, of_class in ends.items()}
    more_names = dict.fromkeys(name for test in tests.values() for name in test.mean_more)
    measured = [run.summary.available_metrics for run in seeds.values()]
    measures = {name: [values[name] for values in measured if name in values] for name in SINGLE_CLASS_MEASURES}

    def average_classes_by_seed(
        pairs: Collection[tuple[int, str]], measure: Callable[[ClassMetrics], float | None]
    ) -> dict[int, float | None]:
        means = dict[int, float | None]()
        for seed, test in tests.items():
            results = [result for name, result in test.per_class.items() if (seed, name) in pairs]
            means[seed] = compute_mean_and_sd(map(measure, results))[0]
        return means

    def average_class_values(subset: Subset, measure: Callable[[ClassMetrics], float | None]) -> MeanAndSd:
        return summarise_over_seeds(list(average_classes_by_seed(members[subset], measure).values()))

    auroc_by_seed = {
        subset: average_classes_by_seed(averaged[subset], lambda result: result.exact_metric_or_none("auroc"))
        for subset in SUBSETS
    }
    return MethodResult(
        label=label,
        seeds=tuple(tests),
        note=next(iter(tests.values())).note,
        auroc={subset: summarise_over_seeds(list(by_seed.values())) for subset, by_seed in auroc_by_seed.items()},
        average_precision=average_class_values("all", lambda result: result.exact_metric_or_none("average_precision")),
        balanced_accuracy=average_class_values("all", lambda result: result.exact_metric_or_none("balanced_accuracy")),
        per_class={
            name: compute_mean_and_sd(scores.get((seed, name)) for seed in tests)[0]
            for name in sorted({name for _, name in scores})
        },
        intervals={name: (float(low), float(high)) for name, (low, high) in intervals.items()},
        measures={name: summarise_over_seeds(values) for name, values in measures.items() if values},
        auroc_by_seed=auroc_by_seed,
        more={name: summarise_over_seeds([test.mean_more.get(name) for test in tests.values()]) for name in more_names},
    )


def summarise_over_seeds(values: Sequence[float | None]) -> MeanAndSd:
    """Return mean and sample SD (``n - 1``) over the seeds with a value; the SD is None for one seed."""
    defined = [value for value in values if value is not None]
    sd = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
    return MeanAndSd(compute_mean_and_sd(defined)[0], sd)


def _list_comparison_cautions(by_method: ByMethod) -> Iterator[str]:
    reference, *others = by_method
    summaries = [run.summary for seeds in by_method.values() for run in seeds.values()]
    if any(summary.patients_known is False for summary in summaries):
        yield "The data does not say which images belong to one patient: intervals of single runs are over images."
    if any(summary.test.errors for summary in summaries):
        yield "Figures that are known with an error (±) are not compared."
    for label, seeds in by_method.items():
        if untrained := [seed for seed, run in sorted(seeds.items()) if run.summary.is_initial_model_tested]:
            which = _count_seeds(untrained, len(seeds))
            yield f"{label}: with {which} {NO_BETTER_ROUND_SENTENCE}; the initial model is tested."
    for label, seeds in by_method.items():
        yield from _describe_poor_training(label, seeds)
    yield from _describe_absent_sites(by_method)
    results = [item for run in by_method[reference].values() for item in run.summary.test.per_class.items()]
    counts = [(name, (r.positives, r.negatives)) for name, r in results if r.exact_metric_or_none("auroc") is not None]
    if rare := sorted({name for name, kinds in counts if any(n is not None and n < MIN_CLASS_IMAGES for n in kinds)}):
        few = f"fewer than {MIN_CLASS_IMAGES} test images with or without the finding"
        yield f"{quote_names(rare)}: {few} in at least one run."
    yield from _describe_classes_outside_means(summaries)
    lacking: dict[tuple[str, ...], list[str]] = {}  # classes without an AUROC -> methods that lack exactly these
    for label, seeds in by_method.items():
        names, scores = (
            {name for run in seeds.values() for name in run.summary.classes},
            collect_auroc_scores(seeds.values()),
        )
        if undefined := tuple(sorted(n for n in names if any(scores.get((seed, n)) is None for seed in seeds))):
            lacking.setdefault(undefined, []).append(label)
    for undefined, labels in lacking.items():
        which = "Every method" if len(labels) == len(by_method) else ", ".join(labels)
        yield f"{which}: no AUROC for {quote_names(undefined)} in at least one run; the means leave it out."
    for label in others:
        yield from _describe_uneven_runs(label, by_method[label], reference, by_method[reference])


def _describe_classes_outside_means(summaries: Sequence[RunSummary]) -> Iterator[str]:
    """Yield a caution about the classes that are left out of mean AUROCs, because too few test images show them."""
    counted, left_out = set[tuple[int, str]](), set[tuple[int, str]]()  # pairs of seed and class
    most_positives = dict[str, int]()
    for summary in summaries:
        headline = summary.test.compute_headline_auroc()
        counted.update((summary.seed, name) for name in headline.classes)
        for name, positives in headline.left_out.items():
            left_out.add((summary.seed, name))
            most_positives[name] = max(positives, most_positives.get(name, 0))
    if not left_out:
        return
    words = [f"“{name}” ({positives:,})" for name, positives in sorted(most_positives.items())]
    names = list_first_and_count_rest(words, MAX_NAMES)
    rule = f"mean AUROC counts the classes that {MIN_POSITIVES} test images or more show"
    if counted <= left_out:
        remedy = next(filter(None, map(describe_way_to_mean_auroc, summaries)), "")
        yield f"No mean AUROC can be given, because a {rule}: fewer show {names}.{remedy and f' {remedy}'}"
    else:
        yield f"A {rule}, here without {names}."


def _describe_poor_training(label: str, seeds: Seeds) -> Iterator[str]:
    """Yield cautions about poor runs of a method: equal scores, undetected classes, no sensitivity, few rounds."""
    runs = [run for _, run in sorted(seeds.items())]
    if one_score := [run.summary.seed for run in runs if gives_all_images_one_score(run)]:
        which = _count_seeds(one_score, len(runs))
        yield f"{label}: with {which} the model gives all test images of every class one score. {ONE_SCORE_CAUSE}"
    undetected = Counter[str]()  # class -> number of runs; so too below
    for run in runs:
        by_interval = find_undetected_classes(run.summary.test)
        undetected.update((*by_interval.includes_chance, *by_interval.below_chance))
    if undetected:
        interval = "the 95 % interval does not lie above an AUROC of 0.5"
        listed = _list_classes_with_run_counts(undetected, len(runs))
        yield f"{label}: not detected better than by chance, because {interval}: {listed}."
    missed = Counter(name for run in runs for name in find_classes_without_sensitivity(run.summary.test))
    if missed:
        listed = _list_classes_with_run_counts(missed, len(runs))
        chosen = any(run.summary.test.operating_points.get(name) for run in runs for name in missed)
        remedy = f" The pages of the runs have the better ones: “{THRESHOLDS_HEADING}”." if chosen else ""
        yield f"{label}: at a threshold of 0.5 no positive test image is found (sensitivity 0): {listed}.{remedy}"
    if unfinished := [run.summary.seed for run in runs if is_last_round_best(run.summary)]:
        which = _count_seeds(unfinished, len(runs))
        yield f"{label}: with {which} validation was best in the last round: more rounds may give a better model."


def _list_classes_with_run_counts(counts: Counter[str], total: int) -> str:
    """Return a text with classes and their numbers of runs: ``"“edema” (1 of 2 runs) and “mass” (2 of 2 runs)"``."""
    runs = format_count_with_noun(total, "run")
    return list_first_and_count_rest([f"“{name}” ({count} of {runs})" for name, count in counts.items()], MAX_NAMES)


def _count_seeds(seeds: Sequence[int], total: int) -> str:
    """Return a text with the number of seeds and the seeds: ``"2 seeds of 3 (0 and 2)"``."""
    return f"{format_count_with_noun(len(seeds), 'seed')} of {total} ({format_rounds(seeds)})"


def _describe_absent_sites(by_method: ByMethod) -> Iterator[str]:
    """Yield a caution for each site that was absent at the end of a run."""
    absent: dict[str, list[str]] = {}
    for label, seeds in by_method.items():
        for seed, run in sorted(seeds.items()):
            for site in run.rounds[-1].absent if run.rounds else ():
                absent.setdefault(site, []).append(f"{label} with seed {seed}")
    for site, runs in sorted(absent.items()):
        yield f"{site} was absent at the end of {len(runs)} of the runs: {join_first_and_count(runs)}."


def _describe_uneven_runs(label: str, seeds: Seeds, reference: str, of_reference: Seeds) -> Iterator[str]:
    common = sorted(seeds.keys() & of_reference.keys())
    if seeds.keys() != of_reference.keys():
        yield f"{label} and {reference} were run with different seeds; pairs come from the {len(common)} they share."
    if any(seeds[seed].summary.contract_hash != of_reference[seed].summary.contract_hash for seed in common):
        yield f"{label} and {reference} did not train on the same sites and labels."
    note = next(iter(seeds.values())).summary.test.note
    if note != next(iter(of_reference.values())).summary.test.note:
        yield f"{label} is scored as: {note}."


def compare_methods_at_sites(by_method: ByMethod) -> tuple[SiteGain, ...]:
    """Compare the first method with every other method at each site, on the classes that the site annotates."""
    reference, *others = by_method
    sites = sorted({site for run in by_method[reference].values() for site in run.summary.sites})
    corrected_gains: list[SiteGain] = []
    for other in others:
        gains = [_compute_site_gain(site, other, by_method[reference], by_method[other]) for site in sites]
        p_values = adjust_by_holm([gain.p for gain in gains])
        corrected_gains += [replace(gain, p=p) for gain, p in zip(gains, p_values, strict=True)]
    return tuple(corrected_gains)


def _compute_site_gain(site: str, other: str, of_reference: Seeds, of_other: Seeds) -> SiteGain:
    pairs, reasons = dict[int, dict[str, tuple[float, float]]](), list[str]()
    for seed in sorted(of_reference.keys() & of_other.keys()):
        if reason := _explain_incomparable_runs(site, of_reference[seed], of_other[seed]):
            reasons.append(reason)
            continue
        ours, theirs = (runs[seed].summary.per_site[site].per_class for runs in (of_reference, of_other))
        both = {name: (ours[name].auroc, theirs[name].auroc) for name in ours if name in theirs}
        if aurocs := {name: (a, b) for name, (a, b) in both.items() if a is not None and b is not None}:
            pairs[seed] = aurocs
        else:
            reasons.append("no class of the site has an AUROC with both")
    if not pairs:
        return SiteGain(site, other, reason=reasons[0] if reasons else "no seed in common")
    means = np.array([np.mean(list(aurocs.values()), axis=0) for aurocs in pairs.values()])  # (seeds, 2)
    gains = means[:, 0] - means[:, 1]
    tested = len(gains) >= MIN_SEEDS and not are_differences_equal(gains)
    classes = tuple(dict.fromkeys(name for aurocs in pairs.values() for name in aurocs))
    by_class = [[aurocs[name] for aurocs in pairs.values() if name in aurocs] for name in classes]
    return SiteGain(
        site=site,
        other=other,
        gain=float(gains.mean()),
        sd=float(gains.std(ddof=1)) if len(gains) > 1 else None,
        auroc=float(means[:, 0].mean()),
        other_auroc=float(means[:, 1].mean()),
        classes=classes,
        losses=sum((compute_mean_and_sd(a - b for a, b in of_class)[0] or 0.0) < 0 for of_class in by_class),
        seeds=tuple(pairs),
        reason=reasons[0] if reasons else "",
        p=float(ttest_1samp(gains, 0.0).pvalue) if tested else None,
    )


def _explain_incomparable_runs(site: str, reference: RunFolderContent, other: RunFolderContent) -> str:
    """Return the reason why two runs cannot be compared at this site; empty if they can."""
    ours, theirs = reference.summary, other.summary
    if site not in theirs.sites:
        return "it has no such site"
    if site not in ours.per_site or site not in theirs.per_site:
        return "the site was not tested with both"
    if set(ours.sites[site].classes) != set(theirs.sites[site].classes):
        return "the site annotates other classes there"
    first, second = (
        {name: (result.positives, result.negatives) for name, result in summary.per_site[site].per_class.items()}
        for summary in (ours, theirs)
    )
    same = all(first[name] == second[name] for name in first.keys() & second.keys())
    return "" if same else "it was tested on other images there"
