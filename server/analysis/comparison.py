"""Run folders side by side: read them, average each method over its seeds, test the first method against the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from common.errors import BadInput, Fault, quoted, stop_on
from common.metrics.auroc import ClassMetrics, Summary, mean_and_sd
from common.system.formatting import counted, shortened, spans
from common.system.plain_text import json_text
from server.analysis.site_gains import SiteGain, site_gains
from server.analysis.statistics import PairedTest, Scores, corrected, paired_over_classes, paired_over_classes_and_seeds
from server.runs.reader import MEASURES, Measure, Run

ENSEMBLE = "ensemble"
"""Of local models, as the ``method`` of what is no method of training."""

FEWEST_IMAGES = 10
"""Of a kind, below which a class is named beside the means that it weighs in."""

Subset = Literal["all", "shared", "unique"]
Pairing = Literal["classes", "classes x seeds"]

SUBSETS: tuple[Subset, ...] = get_args(Subset)
PAIRINGS: dict[Pairing, Callable[[Scores, Scores, np.random.Generator], PairedTest]] = {
    "classes": paired_over_classes,
    "classes x seeds": paired_over_classes_and_seeds,
}


@dataclass(frozen=True)
class Spread:
    """Mean and sample SD (ddof 1) over seeds; ``None`` where undefined, the SD also with one seed."""

    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class MethodResult:
    """One method over its seeds.

    Attributes:
        auroc: Subset of classes -> spread over seeds of the mean AUROC over the subset's classes.
        per_class: Class -> AUROC averaged over the seeds in which it is defined.
        intervals: Class -> 95 % bootstrap interval over the test set's patients, its ends averaged over the seeds;
            only where the coordinator has scored one model.
        measures: Those of a task with one class an image that at least one seed has.
    """

    label: str
    seeds: tuple[int, ...]
    note: str
    auroc: dict[Subset, Spread]
    average_precision: Spread
    balanced_accuracy: Spread
    per_class: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    measures: dict[Measure, Spread]


@dataclass(frozen=True)
class Contrast:
    """The reference against one other method. Holm's family is all other methods at this subset and pairing."""

    other: str
    subset: Subset
    pairing: Pairing
    result: PairedTest


@dataclass(frozen=True)
class Comparison:
    """Everything that the comparison's tables and report say.

    Attributes:
        methods: The reference first, then in the order of the runs.
        class_groups: ``"shared"``, ``"some"``, ``"unique"`` or ``"varies"`` (by seed) -> class names.
        contrasts: Per subset and pairing, one for every other method.
        cautions: Sentences on what makes the comparison less than even.
        site_gains: The reference against every other method, site by site.
        kinds: Label -> name of the method.
        external: The same on the external test set; None unless every run has one.
    """

    reference: str
    methods: tuple[MethodResult, ...]
    class_groups: dict[str, tuple[str, ...]]
    contrasts: tuple[Contrast, ...]
    cautions: tuple[str, ...]
    site_gains: tuple[SiteGain, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    external: "Comparison | None" = None

    @property
    def measures(self) -> list[Measure]:
        """Return the measures that at least one method has, in the order of tables."""
        return [measure for measure in MEASURES if any(measure in method.measures for method in self.methods)]

    def contrast(self, other: str, subset: Subset = "all", pairing: Pairing = "classes") -> Contrast:
        """The one contrast asked for; the default is the one that decides."""
        wanted = (other, subset, pairing)
        return next(each for each in self.contrasts if (each.other, each.subset, each.pairing) == wanted)


def compare(runs: Sequence[Run], *, bootstrap_seed: int = 0) -> Comparison:
    """Average each method over its seeds and test the first one against every other.

    Which classes are shared or unique may differ by seed, as the partition is drawn from it; it is read from the
    reference's run of the same seed, so that a method that pools all data is judged on the same classes. Where sites
    trained alone, the ensemble of their models stands as a method of its own after theirs.

    Raises:
        BadInput: If there is no run, or a method has the same seed twice.
    """
    by_method = _by_method(_with_ensembles(runs))
    reference, *others = by_method
    members = _members(by_method)
    scores = {label: auroc_scores(of_seed.values()) for label, of_seed in by_method.items()}
    generator = np.random.default_rng(bootstrap_seed)
    repeated = any(len(by_method[reference].keys() & by_method[other].keys()) > 1 for other in others)
    pairings: list[Pairing] = ["classes", "classes x seeds"] if repeated else ["classes"]
    return Comparison(
        reference=reference,
        methods=tuple(_method_result(label, by_method[label], members) for label in by_method),
        class_groups=_class_groups(members),
        contrasts=tuple(
            contrast
            for pairing in pairings
            for subset in SUBSETS
            for contrast in _contrasts(scores, members[subset], (subset, pairing), generator)
        ),
        cautions=tuple(_cautions(by_method)),
        site_gains=site_gains(by_method),
        kinds={label: next(iter(of_seed.values())).summary.method for label, of_seed in by_method.items()},
        external=compare(elsewhere, bootstrap_seed=bootstrap_seed) if (elsewhere := _on_external(runs)) else None,
    )


def write_comparison(comparison: Comparison, destination: Path) -> Path:
    """Write ``comparison.json``; ``destination`` is the file."""
    destination.write_text(json_text(asdict(comparison), indent=2, allow_nan=True) + "\n", encoding="utf-8")
    return destination


_ByMethod = Mapping[str, Mapping[int, Run]]  # label -> seed -> run
_Members = Mapping[Subset, set[tuple[int, str]]]  # subset -> (seed, class)


def _with_ensembles(runs: Sequence[Run]) -> list[Run]:
    """The runs, and after each the ensemble that it holds, as if it were a run."""
    return [each for run in runs for each in (run, *_ensemble(run))]


def _ensemble(run: Run) -> Iterable[Run]:
    if (found := run.summary.ensemble) is None:
        return
    own = {"method": ENSEMBLE, "name": f"{run.summary.label} (ensemble)", "ensemble": None, "client_accuracy": None}
    yield replace(run, summary=run.summary.model_copy(update={**own, "test": found.test, "per_site": found.per_site}))


def _on_external(runs: Sequence[Run]) -> list[Run]:
    """The runs with the results on their external test set in place of the others; empty unless each has them."""
    found = [(run, run.summary.external) for run in runs]
    less: dict[str, object] = {"external": None, "ensemble": None, "client_accuracy": None, "per_site": {}}
    return [
        replace(run, summary=run.summary.model_copy(update={**less, "test": external}))
        for run, external in found
        if external is not None and all(each for _, each in found)
    ]


def _by_method(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    if not runs:
        raise BadInput([Fault("compare", "there is no run to compare.", "Name at least one run folder.")])
    grouped: dict[str, dict[int, Run]] = {}
    faults = []
    for run in runs:
        first = grouped.setdefault(run.summary.label, {}).setdefault(run.summary.seed, run)
        if first is not run:
            problem = f'"{run.summary.label}" with seed {run.summary.seed} is already in {first.folder}.'
            faults.append(Fault(str(run.folder), problem, "Leave one of them out, or give them different names."))
    stop_on(faults)
    return grouped


def _members(by_method: _ByMethod) -> _Members:
    authority: dict[int, Run] = {}
    for of_seed in reversed(list(by_method.values())):  # the reference comes last and so prevails
        authority.update(of_seed)
    tests = {seed: run.summary.test for seed, run in authority.items()}
    every = (run for of_seed in by_method.values() for run in of_seed.values())
    return {
        "all": {(run.summary.seed, name) for run in every for name in run.summary.classes},
        "shared": {(seed, name) for seed, test in tests.items() for name in test.shared_classes.classes},
        "unique": {(seed, name) for seed, test in tests.items() for name in test.unique_classes.classes},
    }


def auroc_scores(runs: Iterable[Run]) -> Scores:
    """AUROC by seed and class; None where it is not exact: a difference of two may be their errors."""
    per_class = {run.summary.seed: run.summary.test.per_class for run in runs}
    return {
        (seed, name): result.exact("auroc") for seed, results in per_class.items() for name, result in results.items()
    }


def _method_result(label: str, of_seed: Mapping[int, Run], members: _Members) -> MethodResult:
    tests = {seed: run.summary.test for seed, run in sorted(of_seed.items())}
    scores = auroc_scores(of_seed.values())
    names = sorted({name for _, name in scores})
    return MethodResult(
        label=label,
        seeds=tuple(tests),
        note=next(iter(tests.values())).note,
        auroc={subset: _class_mean(tests, members[subset], lambda each: each.exact("auroc")) for subset in SUBSETS},
        average_precision=_class_mean(tests, members["all"], lambda each: each.exact("average_precision")),
        balanced_accuracy=_class_mean(tests, members["all"], lambda each: each.exact("balanced_accuracy")),
        per_class={name: mean_and_sd(scores.get((seed, name)) for seed in tests)[0] for name in names},
        intervals=_intervals(list(tests.values())),
        measures=_measures([run.summary.measures for run in of_seed.values()]),
    )


def _intervals(tests: Sequence[Summary]) -> dict[str, tuple[float, float]]:
    ends: dict[str, list[tuple[float, float]]] = {}
    for test in tests:
        for name, interval in (test.intervals.per_class if test.intervals else {}).items():
            ends.setdefault(name, []).append(interval)
    means = {name: np.mean(of_class, axis=0) for name, of_class in ends.items()}
    return {name: (float(low), float(high)) for name, (low, high) in means.items()}


def _measures(of_seeds: Sequence[Mapping[Measure, float]]) -> dict[Measure, Spread]:
    found = {name: [each[name] for each in of_seeds if name in each] for name in MEASURES}
    return {name: over_seeds(values) for name, values in found.items() if values}


def _class_mean(
    tests: Mapping[int, Summary], members: set[tuple[int, str]], measure: Callable[[ClassMetrics], float | None]
) -> Spread:
    means = [
        mean_and_sd(measure(result) for name, result in test.per_class.items() if (seed, name) in members)[0]
        for seed, test in tests.items()
    ]
    return over_seeds(means)


def over_seeds(of_seeds: Sequence[float | None]) -> Spread:
    """Mean and sample SD over the seeds that have a value."""
    defined = [value for value in of_seeds if value is not None]
    sd = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
    return Spread(mean_and_sd(defined)[0], sd)


def _class_groups(members: _Members) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {"shared": [], "some": [], "unique": [], "varies": []}
    for name in sorted({name for _, name in members["all"]}):
        pairs = {pair for pair in members["all"] if pair[1] == name}
        inside = {"shared": pairs & members["shared"], "unique": pairs & members["unique"]}
        always = [subset for subset, found in inside.items() if found == pairs]
        never = not any(inside.values())
        groups[always[0] if always else "some" if never else "varies"].append(name)
    return {group: tuple(names) for group, names in groups.items() if names}


def _contrasts(
    scores: Mapping[str, Scores],
    members: set[tuple[int, str]],
    kind: tuple[Subset, Pairing],
    generator: np.random.Generator,
) -> list[Contrast]:
    """One family of tests: the reference against every other method at one subset and pairing."""
    chosen = {label: {key: p for key, p in of.items() if key in members} for label, of in scores.items()}
    reference, *others = chosen
    tests = [PAIRINGS[kind[1]](chosen[reference], chosen[other], generator) for other in others]
    return [Contrast(other, *kind, result) for other, result in zip(others, corrected(tests), strict=True)]


def _cautions(by_method: _ByMethod) -> Iterable[str]:
    reference, *others = by_method
    if any(run.summary.patients_known is False for of_seed in by_method.values() for run in of_seed.values()):
        yield "The data does not say which images belong to one patient: intervals of single runs are over images."
    every = [run.summary.test for of_seed in by_method.values() for run in of_seed.values()]
    if any(test.errors for test in every):
        yield "Figures that are known with an error (±) are not compared."
    yield from _untrained(by_method)
    yield from _lost(by_method)
    if rare := _rare(by_method[reference]):
        few = f"fewer than {FEWEST_IMAGES} test images with or without the finding"
        yield f"{quoted(rare)}: {few} in at least one run; the means give such a class the weight of any other."
    for undefined, labels in _undefined(by_method).items():
        which = "Every method" if len(labels) == len(by_method) else ", ".join(labels)
        yield f"{which}: no AUROC for {quoted(undefined)} in at least one run; the means leave it out."
    for label in others:
        yield from _uneven(label, by_method[label], reference, by_method[reference])


def _rare(of_seed: Mapping[int, Run]) -> list[str]:
    """Classes with an AUROC that few test images decide."""
    every = [each for run in of_seed.values() for each in run.summary.test.per_class.items()]
    counts = [(name, (one.positives, one.negatives)) for name, one in every if one.exact("auroc") is not None]
    return sorted({name for name, kinds in counts if any(n is not None and n < FEWEST_IMAGES for n in kinds)})


def _untrained(by_method: _ByMethod) -> Iterable[str]:
    """Methods whose figures are, in some runs, those of the model that the run began with."""
    for label, of_seed in by_method.items():
        if seeds := [seed for seed, run in sorted(of_seed.items()) if run.summary.untrained]:
            which = f"{counted(len(seeds), 'seed')} of {len(of_seed)} ({spans(seeds)})"
            yield f"{label}: with {which} validation was best before round 1; the initial model is tested."


def _lost(by_method: _ByMethod) -> Iterable[str]:
    """Runs at whose end a site was absent, by site."""
    lost: dict[str, list[str]] = {}
    for label, of_seed in by_method.items():
        for seed, run in sorted(of_seed.items()):
            for site in run.rounds[-1].absent if run.rounds else ():
                lost.setdefault(site, []).append(f"{label} with seed {seed}")
    for site, runs in sorted(lost.items()):
        yield f"{site} was absent at the end of {len(runs)} of the runs: {shortened(runs)}."


def _undefined(by_method: _ByMethod) -> dict[tuple[str, ...], list[str]]:
    """Classes without an AUROC in some run -> the methods that lack just these."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for label, of_seed in by_method.items():
        names = {name for run in of_seed.values() for name in run.summary.classes}
        scores = auroc_scores(of_seed.values())
        undefined = tuple(sorted(n for n in names if any(scores.get((seed, n)) is None for seed in of_seed)))
        if undefined:
            grouped.setdefault(undefined, []).append(label)
    return grouped


def _uneven(label: str, of_seed: Mapping[int, Run], reference: str, of_reference: Mapping[int, Run]) -> Iterable[str]:
    common = sorted(of_seed.keys() & of_reference.keys())
    if of_seed.keys() != of_reference.keys():
        yield f"{label} and {reference} were run with different seeds; pairs come from the {len(common)} they share."
    if any(of_seed[seed].summary.contract_hash != of_reference[seed].summary.contract_hash for seed in common):
        yield f"{label} and {reference} did not train on the same sites and labels."
    note = next(iter(of_seed.values())).summary.test.note
    if note != next(iter(of_reference.values())).summary.test.note:
        yield f"{label} is scored as: {note}."
