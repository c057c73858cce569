"""No sentence of a result says more than the figures carry: each is read again, number by number, over odd runs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import t as scipy_t
from scipy.stats import ttest_rel, wilcoxon

from common.metrics.auroc import GLOBAL_MODEL, ClassMetrics, summarise
from common.metrics.bootstrap import Intervals
from common.metrics.calibration import Decisions, Quality
from common.metrics.pooled import SiteSample
from server.analysis.comparison import Comparison, Spread, compare
from server.analysis.study.results import PublishedNumber, StudyResult, TableResult
from server.reporting.comparison_claims import headline, large_effects, standing, verdicts
from server.reporting.pages.gains import gain_sentences
from server.reporting.pages.run import write_run_report
from server.reporting.run_claims import FEW, NAMED, limits, run_result
from server.reporting.study_claims import study_headline
from server.runs.reader import RoundLine, Run, RunSummary, read_run
from tests.server.reports import body_text

CLASSES = ("edema", "hernia", "mass", "nodule", "fibrosis", "effusion")
SITES = ("north", "south", "east", "west")
PRINTED = 0.0005 + 1e-9  # three decimals
OF_SITES = "mean over the sites' own test parts"
MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOME = settings(MANY, max_examples=MANY.max_examples // 5)  # each writes a whole report

AUROCS = st.sampled_from([0.2, 0.5, 0.7, 0.7, 0.9, 1.0]) | st.floats(0, 1)  # with ties


@st.composite
def class_results(draw: st.DrawFn) -> ClassMetrics:
    """A class that was tested, or could not be for each reason there is."""
    positives = draw(st.sampled_from([None, 0, 1, FEW - 1, FEW, 400]))
    negatives = None if positives is None else draw(st.sampled_from([0, 1, FEW - 1, FEW, 900]))
    if not positives or not negatives:
        return ClassMetrics(None, None, None, positives, negatives)
    auroc = draw(AUROCS)
    return ClassMetrics(auroc, auroc, draw(AUROCS), positives, negatives)


@st.composite
def decisions(draw: st.DrawFn, result: ClassMetrics) -> Decisions:
    positives, negatives = result.positives or 0, result.negatives or 0
    found = draw(st.sampled_from(sorted({0, min(1, positives), positives})))
    alarms = draw(st.sampled_from(sorted({0, negatives})))
    return Decisions(found, positives - found, alarms, negatives - alarms)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run as simulations and networks write them: with sites lost, classes untested, unknown patients, no rounds."""
    names = draw(st.permutations(CLASSES).map(lambda found: tuple(found[: draw(st.integers(1, 6))])))
    sites = SITES[: draw(st.integers(1, 4))]
    classes = {site: tuple(n for n in names if draw(st.booleans())) or names[:1] for site in sites}
    owned = {name: [site for site in sites if name in classes[site]] for name in names}
    tested = {name: draw(class_results()) for name in names if draw(st.integers(0, 9))}
    shared = {name for name in names if len(owned[name]) == len(sites)}
    unique = {name for name in names if len(owned[name]) == 1 and len(sites) > 1}
    note = draw(st.sampled_from([GLOBAL_MODEL, OF_SITES]))
    test = asdict(summarise(tested, shared, unique, note))
    if note == GLOBAL_MODEL and draw(st.booleans()):
        ends = {name: tuple(sorted((draw(AUROCS), draw(AUROCS)))) for name, one in tested.items() if one.auroc}
        test["intervals"] = asdict(
            Intervals((0.1, 0.9) if ends else None, ends, over=draw(st.sampled_from(["images"])))
        )
        test["quality"] = asdict(Quality({}, {name: draw(decisions(one)) for name, one in tested.items()}))
    asked = draw(st.none() | st.sets(st.sampled_from(sites), min_size=1).map(sorted))
    if asked is not None:
        mean_auroc = (0.1, 0.9) if note != GLOBAL_MODEL and draw(st.booleans()) else None
        test["sampled"] = asdict(SiteSample(len(asked), len(sites), mean_auroc))
    count, tells = draw(st.integers(0, 4)), draw(st.booleans())
    rounds = []
    for number in range(1, count + 1):
        absent = {site: "late" for site in sites if not draw(st.integers(0, 2))}
        taking = tuple(site for site in sites if site not in absent and draw(st.integers(0, 5)))
        long = {site: "its trunk was 9 times" for site in taking if not draw(st.integers(0, 5))}
        rounds.append(RoundLine(round=number, sites=taking, absent=absent, shortened=long))
    content = {
        "method": "surgical",
        "rounds": count,
        "seed": draw(st.integers(0, 9)),
        "classes": names,
        "sites": {
            site: {
                "classes": of_site,
                "validation_samples": draw(st.sampled_from([None, 1, FEW, 400])),
                "positives": {name: draw(st.sampled_from([None, 0, 12])) for name in of_site} if tells else {},
            }
            for site, of_site in classes.items()
        },
        "best_round": draw(st.sampled_from([None, *range(count + 1)])),
        "patients_known": draw(st.sampled_from([None, True, False])),
        "condemned": {sites[0]: "its trunk moves too far"} if draw(st.booleans()) and len(sites) > 1 else {},
        "per_site": {
            site: {"per_class": {n: asdict(tested[n]) for n in classes[site] if n in tested and draw(st.booleans())}}
            for site in asked or sites
            if draw(st.booleans())
        },
        "drawn_to_test": asked,
        "experiment": {"evaluation": {"result": draw(st.sampled_from(["best", "last"]))}}
        if draw(st.booleans())
        else {},
        "test": test,
    }
    return Run(Path("run"), RunSummary.model_validate(content), tuple(rounds))


def said(run: Run, prominent: bool | None = None) -> list[str]:
    return [limit.text for limit in limits(run) if prominent is None or limit.prominent == prominent]


def quoted_names(sentence: str) -> list[str]:
    return re.findall("“([^”]+)”", sentence)


def aurocs(run: Run, names: Iterable[str] | None = None) -> list[float]:
    """AUROCs of the tested classes, from the record itself."""
    per_class = run.summary.test.per_class
    found = [per_class[name].auroc for name in (per_class if names is None else names) if name in per_class]
    return [value for value in found if value is not None]


@MANY
@given(runs())
def test_the_result_counts_the_classes_that_were_tested_and_no_others(run: Run) -> None:
    sentence, tested = run_result(run), aurocs(run)
    enough = {name for name, each in run.summary.test.per_class.items() if (each.positives or 0) >= FEW}
    every = aurocs(run, enough)
    taking = {site for each in run.rounds for site in each.sites}
    some = f"{len(taking)} of " if run.rounds and len(taking) < len(run.summary.sites) else ""
    assert re.match(rf"After {len(run.rounds)} rounds? with {some}{len(run.summary.sites)} site", sentence)
    if not tested:
        assert f"none of {len(run.summary.classes)} class" in sentence
        return
    if not every:
        assert "no mean AUROC can be given: at most" in sentence
        assert not re.search(r"\d\.\d{3}", sentence.split("Accuracy")[0])
        return
    whole = re.search(r"is (\d\.\d{3})(?: \(95 % interval [^)]*\))? over (?:(\d+) of )?(\d+) class", sentence)
    assert whole is not None, sentence
    assert float(whole[1]) == pytest.approx(mean(every), abs=PRINTED)
    assert int(whole[2] or whole[3]) == len(every)
    assert int(whole[3]) == len(run.summary.classes)
    few = {name: each.positives for name, each in run.summary.test.per_class.items() if each.auroc is not None}
    few = {name: count for name, count in few.items() if name not in enough}
    assert all(f"{name} ({count})" in sentence for name, count in few.items())
    assert not few or "95 % interval" not in sentence
    parts = re.findall(r"(\d\.\d{3}) on (?:(\d+) of )?the (\d+) class(?:es)? that (every|only one) site", sentence)
    for value, counts, of_all, who in parts:
        owners = {n: sum(n in s.classes for s in run.summary.sites.values()) for n in run.summary.classes}
        wanted = len(run.summary.sites) if who == "every" else 1
        names = [name for name, count in owners.items() if count == wanted]
        assert int(of_all) == len(names)
        assert int(counts or of_all) == len(aurocs(run, enough & set(names)))
        assert float(value) == pytest.approx(mean(aurocs(run, enough & set(names))), abs=PRINTED)


@MANY
@given(runs())
def test_what_limits_a_result_is_said_exactly_where_the_figures_show_it(run: Run) -> None:
    summary, prominent = run.summary, said(run, prominent=True)
    per_class = summary.test.per_class
    untested = [s for s in prominent if "not tested:" in s]
    without = [n for n in summary.classes if n not in per_class or per_class[n].auroc is None]
    assert sorted(name for s in untested for name in quoted_names(s)) == sorted(without)
    for sentence in untested:
        count = re.match(r"(\d+) of (\d+) class", sentence)
        assert count is not None
        assert (int(count[1]), int(count[2])) == (len(quoted_names(sentence)), len(summary.classes))
    blind = [n for s in prominent if "finds none of the positive" in s for n in quoted_names(s)]
    made = summary.test.quality.decisions if summary.test.quality else {}
    assert sorted(blind) == sorted(n for n, d in made.items() if d.sensitivity == 0)
    ends = summary.test.intervals.per_class if summary.test.intervals else {}
    chance = [n for s in prominent if "includes an AUROC of 0.5" in s for n in quoted_names(s)]
    assert sorted(chance) == sorted(n for n, (low, high) in ends.items() if low <= 0.5 <= high)
    worse = [n for s in prominent if "lies below an AUROC of 0.5" in s for n in quoted_names(s)]
    assert sorted(worse) == sorted(n for n, (_, high) in ends.items() if high < 0.5)
    unfit = [n for s in prominent if s.startswith("A threshold of 0.5") for n in quoted_names(s)]
    badly = [n for n, one in per_class.items() if one.auroc and one.auroc >= 0.8 and one.balanced_accuracy <= 0.6]
    assert sorted(unfit) == sorted(badly)
    assert any("which images belong to one patient" in s for s in prominent) == (summary.patients_known is False)
    untrained = any("Validation was best before the first" in s for s in prominent)
    assert untrained == (summary.best_round == 0 and summary.rounds > 0)
    improving = any("more rounds may give" in s for s in prominent)
    by_validation = summary.experiment.get("evaluation", {}).get("result", "best") == "best"
    assert improving == (by_validation and summary.rounds > 1 and summary.best_round == summary.rounds)


@MANY
@given(runs())
def test_sites_that_were_lost_or_did_not_test_are_named(run: Run) -> None:
    summary, prominent = run.summary, said(run, prominent=True)
    at_end = set(run.rounds[-1].absent) - set(summary.condemned) if run.rounds else set()
    lost = {s.split(" took part ")[0]: s for s in prominent if " took part " in s and not s.startswith("No site")}
    assert set(lost) == at_end
    for site, sentence in lost.items():
        taken = [each.round for each in run.rounds if site in each.sites]
        assert (
            (f"last in round {taken[-1]} of {len(run.rounds)}," in sentence) if taken else ("in no round" in sentence)
        )
    testing = [s for s in prominent if s.split(";")[0].endswith(" tested the model")]
    asked, kind = (summary.sites, "") if summary.drawn_to_test is None else (summary.drawn_to_test, "drawn ")
    silent = set(asked) - set(summary.per_site)
    assert bool(testing) == (summary.test.note != GLOBAL_MODEL and bool(silent))
    if testing:
        assert set(quoted_names(testing[0])) == silent
        assert testing[0].startswith(f"{len(summary.per_site)} of {len(asked)} {kind}site")
    harmed = [s.split(" harmed ")[0] for s in prominent if " harmed the model" in s]
    assert harmed == list(summary.condemned)
    long = [re.findall(r"update of (\S+) was too long in (\d+) of", s)[0] for s in said(run) if "too long" in s]
    rounds = [site for each in run.rounds for site in each.shortened]
    assert long == [(site, str(rounds.count(site))) for site in sorted(set(rounds))]


@MANY
@given(runs())
def test_a_result_of_a_sample_of_sites_says_of_how_many_and_what_stands_for_all(run: Run) -> None:
    summary, sentence = run.summary, run_result(run)
    counts = re.search(r"was tested at (\d+) of (\d+) sites?, drawn at random(?:; (\d+) more )?", sentence)
    for_all = re.search(r"95 % interval \S+ for all (\d+) site", sentence)
    assert bool(counts) == (summary.drawn_to_test is not None)
    sampled = summary.test.sampled
    tested = bool(aurocs(run)) and not summary.test.headline().left_out
    assert bool(for_all) == bool(tested and not summary.test.intervals and sampled and sampled.mean_auroc)
    if counts:
        told = sum(bool(one.per_class) for one in summary.per_site.values())
        assert (int(counts[1]), int(counts[2])) == (told, len(summary.sites))
        assert int(counts[3] or 0) == len(summary.drawn_to_test or ()) - told
        assert ("On the sites’ own images" in sentence) == (summary.test.note == GLOBAL_MODEL)
    covered = {name for site in summary.drawn_to_test or summary.sites for name in summary.sites[site].classes}
    annotated = {name for one in summary.sites.values() for name in one.classes}
    missed = [s for s in said(run) if "was drawn to test the model" in s]
    named = {name for s in missed if "No site that annotates" in s or "not tested" in s for name in quoted_names(s)}
    of_mean = summary.test.note != GLOBAL_MODEL
    without = {n for n in summary.classes if n not in covered and n in annotated}
    untested = {n for n in without if n not in summary.test.per_class or summary.test.per_class[n].auroc is None}
    assert named == (untested if of_mean else without)


@MANY
@given(runs())
def test_classes_whose_sites_left_before_the_model_was_done_are_named(run: Run) -> None:
    summary = run.summary
    end, expected = len(run.rounds) if summary.best_round is None else summary.best_round, {}
    for name in summary.classes:
        sites = [site for site, one in summary.sites.items() if name in one.classes]
        present = [each.round for each in run.rounds[:end] if any(site in each.sites for site in sites)]
        later = run.rounds[present[-1] if present else 0 : end]
        if any(site in each.absent for each in later for site in sites):
            expected[name] = present[-1] if present else 0
    found = {}
    for sentence in said(run, prominent=True):
        if sentence.startswith("No site that annotates"):
            last = re.search(rf"took part after round (\d+); the model is that of round {end}\.", sentence)
            assert last is not None
            found |= dict.fromkeys(quoted_names(sentence), int(last[1]))
        elif "never trained: no site that annotates" in sentence:
            found |= dict.fromkeys(quoted_names(sentence), 0)
    assert found == expected


@MANY
@given(runs())
def test_few_images_are_counted_and_every_run_says_that_it_has_one_seed(run: Run) -> None:
    further = said(run, prominent=False)
    rest = {quoted_names(s)[0]: s for s in further if " rest on " in s}
    for name, one in run.summary.test.per_class.items():
        known = one.auroc is not None and one.positives is not None and one.negatives is not None
        assert (name in rest) == (known and min(one.positives or 0, one.negatives or 0) < FEW)
        if name in rest:
            assert f"rest on {min(one.positives or 0, one.negatives or 0)} " in rest[name]
    assert sum(f"one run, with seed {run.summary.seed}:" in s for s in further) == 1
    alone = [n for s in further if " alone: " in s for n in quoted_names(s)]
    owners = {n: [k for k, s in run.summary.sites.items() if n in s.classes] for n in run.summary.classes}
    taking = {site for each in run.rounds for site in each.sites}
    single = [n for n, sites in owners.items() if len(sites) == 1 and sites[0] in taking]
    chosen_on = {site: one.validation_samples for site, one in run.summary.sites.items()}
    few = {f"{site} ({count})" for site, count in chosen_on.items() if count is not None and count < FEW}
    said_few = [s for s in further if s.startswith("Few validation images")]
    assert bool(said_few) == (bool(few) and run.summary.best_round is not None)
    assert all(one in said_few[0] for one in few if said_few and len(few) <= NAMED)
    untold = {
        name
        for name, sites in owners.items()
        if sites and all(run.summary.sites[site].positives.get(name, 0) is None for site in sites)
    }
    first = said(run, prominent=True)
    assert {n for s in first if "to tell a count:" in s for n in quoted_names(s)} <= untold
    assert any("to tell a count:" in s for s in first) == bool(untold)
    expected = [name for name in single if name not in untold] if len(run.summary.sites) > 1 else []
    assert sorted(alone) == ([] if run.summary.untrained else sorted(expected))


VERDICT_WORDS = re.compile(
    r"\b(better|best|worse|worst|superior|outperform\w*|gains?|loses?|improve[sd]?|significant\w*)\b"
)


@MANY
@given(runs())
def test_one_run_is_never_called_better_than_anything(run: Run) -> None:
    allowed = ("better than by chance", "worse than by chance", "Validation was best", "may give a better model")
    for sentence in [run_result(run), *said(run)]:
        for phrase in allowed:
            sentence = sentence.replace(phrase, "")
        assert not VERDICT_WORDS.search(sentence), sentence


@SOME
@given(run=runs())
def test_the_page_opens_with_the_result_and_all_grave_limits(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "summary.json").write_text(run.summary.model_dump_json())
    (folder / "rounds.jsonl").write_text("".join(each.model_dump_json() + "\n" for each in run.rounds))
    html = write_run_report(folder).read_text(encoding="utf-8")
    page = body_text(html)
    head = page[: page.index("Who annotates what")]
    for sentence in (run_result(run), *said(run, prominent=True)):
        assert sentence in head
    assert all(sentence in page for sentence in said(run))


# Several runs


def of_seed(method: str, seed: int, values: Mapping[str, float | None], **more: Any) -> Run:
    results = {n: ClassMetrics(v, v, v, 40 if v is not None else 0, 90) for n, v in values.items()}
    site = {"per_class": {n: asdict(one) for n, one in results.items()}}
    content = {
        "method": method,
        "rounds": 1,
        "seed": seed,
        "classes": list(values),
        "sites": {"north": {"classes": list(values)}, "south": {"classes": list(values)}},
        "test": asdict(summarise(results, set(values), set())),
        "per_site": {"north": site, "south": site},
        **more,
    }
    return Run(Path(f"{method}-{seed}"), RunSummary.model_validate(content), ())


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[Comparison, dict[str, list[Run]]]:
    """Two to four methods with one to five seeds each, alike, far apart or in between, some classes untested."""
    names = CLASSES[: draw(st.integers(1, 6))]
    methods: dict[str, list[Run]] = {}
    for method in ("ours", "theirs", "others", "more")[: draw(st.integers(2, 4))]:
        level, noise = draw(st.sampled_from([0.5, 0.6, 0.61, 0.8])), draw(st.sampled_from([0.0, 0.002, 0.15]))
        of_seeds = []
        for seed in range(draw(st.integers(1, 5))):
            values = {
                name: None if not draw(st.integers(0, 9)) else level + noise * draw(st.floats(-1, 1)) for name in names
            }
            of_seeds.append(of_seed(method, seed, values))
        methods[method] = of_seeds
    return compare([run for of_seeds in methods.values() for run in of_seeds]), methods


def class_means(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[list[float], list[float], set[int]]:
    """AUROC of each class over the seeds that both have, and these seeds: from the runs themselves."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    seeds = set()
    for one in ours:
        for other in theirs:
            if one.summary.seed != other.summary.seed:
                continue
            for name, result in one.summary.test.per_class.items():
                theirs_of = other.summary.test.per_class[name].auroc
                if result.auroc is not None and theirs_of is not None:
                    pairs.setdefault(name, []).append((result.auroc, theirs_of))
                    seeds.add(one.summary.seed)
    first = [mean(a for a, _ in of_class) for of_class in pairs.values()]
    return first, [mean(b for _, b in of_class) for of_class in pairs.values()], seeds


@MANY
@given(comparisons())
def test_better_and_worse_need_three_seeds_a_test_and_an_interval_without_zero(
    drawn: tuple[Comparison, dict[str, list[Run]]],
) -> None:
    comparison, methods = drawn
    reference, *others = methods
    for other, sentence in zip(others, verdicts(comparison), strict=True):
        ours, theirs, seeds = class_means(methods[reference], methods[other])
        verdict = re.search(r" is (better|worse) than ", sentence)
        if not verdict or "Whether" in sentence:
            continue
        assert len(seeds) >= 3
        difference = mean(ours) - mean(theirs)
        assert (difference > 0) == (verdict[1] == "better")
        uncorrected = min(ttest_rel(ours, theirs).pvalue, wilcoxon(ours, theirs).pvalue)
        assert uncorrected < 0.05
        interval = re.search(r"95 % interval ([+−]?[\d.]+) to ([+−]?[\d.]+)", sentence)
        assert interval is not None
        low, high = (float(end.replace("−", "-").replace("+", "")) for end in interval.groups())
        assert low > 0 if difference > 0 else high < 0
        assert f"{len(ours)} classes and {len(seeds)} seeds" in sentence


@MANY
@given(comparisons())
def test_the_headline_says_of_each_method_what_its_own_sentence_says(
    drawn: tuple[Comparison, dict[str, list[Run]]],
) -> None:
    comparison, methods = drawn
    _, *others = methods
    line = headline(comparison)
    for other, sentence in zip(others, verdicts(comparison), strict=True):
        parts = [part for part in line.removesuffix(".").split("; it ") if re.search(rf"\b{other}\b", part)]
        assert len(parts) == 1
        stands = standing(comparison.contrast(other).result)
        if stands in ("better", "worse"):
            assert f"is {stands} than" in parts[0]
            assert f"is {stands} than" in sentence
        else:
            assert "better" not in parts[0]
            assert "worse" not in parts[0]


@MANY
@given(comparisons())
def test_every_large_difference_has_its_sentence_and_no_other_has(
    drawn: tuple[Comparison, dict[str, list[Run]]],
) -> None:
    comparison, _ = drawn
    reference, *others = comparison.methods
    said = "\n".join(large_effects(comparison))
    for other in others:
        for name, ours, theirs, subset in (
            ("AUROC on shared classes", reference.auroc["shared"], other.auroc["shared"], "shared"),
            ("AUROC on unique classes", reference.auroc["unique"], other.auroc["unique"], "unique"),
            ("average precision", reference.average_precision, other.average_precision, None),
            ("balanced accuracy", reference.balanced_accuracy, other.balanced_accuracy, None),
        ):
            pattern = rf"{name} \([^)]*\) is (higher|lower) than that of {re.escape(other.label)} \([^;]*; ([^)]*)\)"
            found = re.findall(pattern, said)
            large = ours.mean is not None and theirs.mean is not None and abs(ours.mean - theirs.mean) >= 0.05 - 1e-12
            assert len(found) == large
            for side, tested in found:
                assert (side == "higher") == ((ours.mean or 0) > (theirs.mean or 0))
                of_subset = subset and standing(comparison.contrast(other.label, subset).result)  # type: ignore[arg-type]
                assert tested == (f"paired test: {of_subset}" if of_subset else "not tested")


@MANY
@given(comparisons())
def test_a_site_gains_or_loses_only_where_seeds_show_it(drawn: tuple[Comparison, dict[str, list[Run]]]) -> None:
    comparison, methods = drawn
    reference, *others = methods
    for other, sentence in zip(others, gain_sentences(comparison), strict=True):
        ours, theirs, seeds = class_means(methods[reference], methods[other])
        if " gain" in sentence or " lose" in sentence:
            assert len(seeds) >= 3
            assert (mean(ours) > mean(theirs)) == (" gain" in sentence)


def test_a_clear_and_constant_lead_is_called_better_and_each_limit_of_that_counts() -> None:
    """The rule can also say yes: else the properties above would hold of silence."""
    names = dict.fromkeys(CLASSES, 0.0)
    high = [of_seed("ours", s, {n: 0.8 + 0.01 * i + 0.001 * s for i, n in enumerate(names)}) for s in range(3)]
    low = [of_seed("theirs", s, {n: 0.7 + 0.012 * i for i, n in enumerate(names)}) for s in range(3)]
    assert (
        headline(compare([*high, *low])) == "By mean AUROC on these test images, ours is better than theirs (+0.096)."
    )
    assert headline(compare([*low, *high])) == "By mean AUROC on these test images, theirs is worse than ours (−0.096)."
    assert "fewer than the 3 seeds that a verdict needs" in headline(compare([*high[:2], *low[:2]]))
    assert gain_sentences(compare([*high, *low]))[0].startswith("All 2 sites gain over theirs")


def test_runs_of_unknown_patients_and_lost_sites_are_cautioned_in_a_comparison(tmp_path: Path) -> None:
    known = of_seed("ours", 0, {"edema": 0.8})
    lost = of_seed("theirs", 0, {"edema": 0.8}, patients_known=False)
    line = RoundLine(round=1, sites=("north",), absent={"south": "late"})
    cautions = compare([known, Run(lost.folder, lost.summary, (line,))]).cautions
    assert (
        "The data does not say which images belong to one patient: intervals of single runs are over images."
        in cautions
    )
    assert "south was absent at the end of 1 of the runs: theirs with seed 0." in cautions


def test_a_run_folder_of_the_version_before_is_read_without_claims_about_patients(tmp_path: Path) -> None:
    run = of_seed("ours", 0, {"edema": 0.8})
    content = json.loads(run.summary.model_dump_json())
    del content["patients_known"]
    (tmp_path / "summary.json").write_text(json.dumps(content))
    (tmp_path / "rounds.jsonl").write_text("")
    assert not any("patient" in limit.text for limit in limits(read_run(tmp_path)))


# A study beside its paper

ENTRIES = st.lists(
    st.tuples(st.floats(0, 1), st.none() | st.just(0.0) | st.floats(1e-6, 0.1), st.none() | st.floats(0, 1)),
    min_size=1,
    max_size=12,
)


@MANY
@given(ENTRIES, st.integers(1, 6))
def test_a_published_number_is_reproduced_where_it_lies_in_the_interval_of_ours(
    drawn: list[tuple[float, float | None, float | None]], seeds: int
) -> None:
    entries = tuple(PublishedNumber(Spread(mean, sd), paper) for mean, sd, paper in drawn)
    table = TableResult("", (), (), (), (), ((entries,),), "", (), (), (), (), ())
    sentence = study_headline(StudyResult("", "", tuple(range(seeds)), (), (table,)))
    published = [(ours, sd, paper) for ours, sd, paper in drawn if paper is not None]
    if not published or seeds < 3:
        assert " lie in " not in sentence
        assert ("gives no numbers" in sentence) == (not published)
        return
    within = above = below = 0
    for ours, sd, paper in published:
        if sd is None:
            continue
        low, high = scipy_t.interval(0.95, seeds - 1, ours, sd / seeds**0.5) if sd else (ours, ours)
        within, above, below = within + (low <= paper <= high), above + (paper > high), below + (paper < low)
    counts = re.search(r"Of (\d+) published numbers?, (\d+) lie in .*; (\d+) lie above it and (\d+) below", sentence)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [len(published), within, above, below]
