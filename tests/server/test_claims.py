"""No sentence of a result says more than the figures carry: each is read again, number by number, over odd runs."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyclinic.common.metrics.auroc import GLOBAL_MODEL_NOTE, ClassMetrics, summarise_test_results
from polyclinic.common.metrics.auroc import MIN_POSITIVES as FEW
from polyclinic.common.metrics.bootstrap import AurocIntervals
from polyclinic.common.metrics.calibration import DecisionCounts, ScoreQuality
from polyclinic.common.metrics.pooled import SiteSampleIntervals
from polyclinic.server.reporting.run_claims import (
    MAX_NAMES,
    describe_run_result,
    list_further_limitations,
    list_prominent_limitations,
)
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.server.runs.schema import RoundFileLine, RunSummary
from tests.server.reports import body_text, write

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
def decisions(draw: st.DrawFn, result: ClassMetrics) -> DecisionCounts:
    positives, negatives = result.positives or 0, result.negatives or 0
    hits = draw(st.sampled_from(sorted({0, min(1, positives), positives})))
    alarms = draw(st.sampled_from(sorted({0, negatives})))
    return DecisionCounts(hits, positives - hits, alarms, negatives - alarms)


@st.composite
def runs(draw: st.DrawFn) -> RunFolderContent:
    """A run as simulations and networks write them: with sites lost, classes untested, unknown patients, no rounds."""
    names = draw(st.permutations(CLASSES).map(lambda order: tuple(order[: draw(st.integers(1, 6))])))
    sites = SITES[: draw(st.integers(1, 4))]
    classes = {site: tuple(n for n in names if draw(st.booleans())) or names[:1] for site in sites}
    owned = {name: [site for site in sites if name in classes[site]] for name in names}
    tested = {name: draw(class_results()) for name in names if draw(st.integers(0, 9))}
    shared = {name for name in names if len(owned[name]) == len(sites)}
    unique = {name for name in names if len(owned[name]) == 1 and len(sites) > 1}
    note = draw(st.sampled_from([GLOBAL_MODEL_NOTE, OF_SITES]))
    test = asdict(summarise_test_results(tested, shared, unique, note))
    if note == GLOBAL_MODEL_NOTE and draw(st.booleans()):
        ends = {name: tuple(sorted((draw(AUROCS), draw(AUROCS)))) for name, each in tested.items() if each.auroc}
        test["intervals"] = asdict(AurocIntervals((0.1, 0.9) if ends else None, ends, over="images"))
        test["quality"] = asdict(ScoreQuality({}, {name: draw(decisions(each)) for name, each in tested.items()}))
    drawn = draw(st.none() | st.sets(st.sampled_from(sites), min_size=1).map(sorted))
    if drawn is not None:
        mean_auroc = (0.1, 0.9) if note != GLOBAL_MODEL_NOTE and draw(st.booleans()) else None
        test["sampled"] = asdict(SiteSampleIntervals(len(drawn), len(sites), mean_auroc))
    count, tells = draw(st.integers(0, 4)), draw(st.booleans())
    rounds = []
    for number in range(1, count + 1):
        absent = {site: "late" for site in sites if not draw(st.integers(0, 2))}
        taking = tuple(site for site in sites if site not in absent and draw(st.integers(0, 5)))
        long = {site: "its trunk was 9 times" for site in taking if not draw(st.integers(0, 5))}
        rounds.append(RoundFileLine(round=number, sites=taking, absent=absent, shortened=long))
    by_validation = {"evaluation": {"checkpoint": draw(st.sampled_from(["best", "last"]))}}
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
        "excluded": {sites[0]: "its trunk moves too far"} if draw(st.booleans()) and len(sites) > 1 else {},
        "per_site": {
            site: {"per_class": {n: asdict(tested[n]) for n in classes[site] if n in tested and draw(st.booleans())}}
            for site in drawn or sites
            if draw(st.booleans())
        },
        "drawn_to_test": drawn,
        "experiment": by_validation if draw(st.booleans()) else {},
        "test": test,
    }
    return RunFolderContent(Path("run"), RunSummary.model_validate(content), tuple(rounds))


def every_limit(run: RunFolderContent) -> list[str]:
    return [*list_prominent_limitations(run), *list_further_limitations(run)]


def names_in(sentences: Iterable[str], words: str = "") -> list[str]:
    """Return the quoted names of the sentences that hold these words, sorted."""
    return sorted(name for sentence in sentences if words in sentence for name in re.findall("“([^”]+)”", sentence))


def aurocs(run: RunFolderContent, names: Iterable[str] | None = None) -> list[float]:
    """Return the AUROCs of the tested classes, from the record itself."""
    per_class = run.summary.test.per_class
    values = [per_class[name].auroc for name in (per_class if names is None else names) if name in per_class]
    return [value for value in values if value is not None]


def owners(run: RunFolderContent, name: str) -> list[str]:
    return [site for site, record in run.summary.sites.items() if name in record.classes]


def took_part(run: RunFolderContent) -> set[str]:
    return {site for line in run.rounds for site in line.sites}


def check_the_result_counts_the_classes_that_were_tested_and_no_others(run: RunFolderContent) -> None:
    sentence, tested, summary = describe_run_result(run), aurocs(run), run.summary
    enough = {name for name, each in summary.test.per_class.items() if (each.positives or 0) >= FEW}
    every, taking = aurocs(run, enough), took_part(run)
    some = f"{len(taking)} of " if run.rounds and len(taking) < len(summary.sites) else ""
    assert re.match(rf"After {len(run.rounds)} rounds? with {some}{len(summary.sites)} site", sentence)
    if not tested:
        assert f"none of {len(summary.classes)} class" in sentence
        return
    if not every:
        assert "no mean AUROC can be given: at most" in sentence
        assert not re.search(r"\d\.\d{3}", sentence.split("Accuracy")[0])
        return
    whole = re.search(r"is (\d\.\d{3})(?: \(95 % interval [^)]*\))? over (?:(\d+) of )?(\d+) class", sentence)
    assert whole is not None, sentence
    assert float(whole[1]) == pytest.approx(mean(every), abs=PRINTED)
    assert (int(whole[2] or whole[3]), int(whole[3])) == (len(every), len(summary.classes))
    few = {
        name: each.positives
        for name, each in summary.test.per_class.items()
        if each.auroc is not None and name not in enough
    }
    assert all(f"{name} ({count})" in sentence for name, count in few.items())
    assert not few or "95 % interval" not in sentence
    parts = re.findall(r"(\d\.\d{3}) on (?:(\d+) of )?the (\d+) class(?:es)? that (every|only one) site", sentence)
    for value, counts, of_all, who in parts:
        sites = len(summary.sites) if who == "every" else 1
        names = {name for name in summary.classes if len(owners(run, name)) == sites}
        assert int(of_all) == len(names)
        assert int(counts or of_all) == len(aurocs(run, enough & names))
        assert float(value) == pytest.approx(mean(aurocs(run, enough & names)), abs=PRINTED)


def check_what_limits_a_result_is_said_exactly_where_the_figures_show_it(run: RunFolderContent) -> None:
    summary, prominent = run.summary, list_prominent_limitations(run)
    per_class = summary.test.per_class
    untested = [n for n in summary.classes if n not in per_class or per_class[n].auroc is None]
    assert names_in(prominent, "not tested:") == sorted(untested)
    for sentence in prominent:
        if "not tested:" in sentence:
            count = re.match(r"(\d+) of (\d+) class", sentence)
            assert count is not None
            assert (int(count[1]), int(count[2])) == (len(names_in([sentence])), len(summary.classes))
    made = summary.test.quality.decisions if summary.test.quality else {}
    assert names_in(prominent, "finds none of the positive") == sorted(n for n, d in made.items() if d.sensitivity == 0)
    ends = summary.test.intervals.per_class if summary.test.intervals else {}
    chance = sorted(n for n, (low, high) in ends.items() if low <= 0.5 <= high)
    assert names_in(prominent, "includes an AUROC of 0.5") == chance
    assert names_in(prominent, "lies below an AUROC of 0.5") == sorted(n for n, (_, end) in ends.items() if end < 0.5)
    unfit = [n for n, each in per_class.items() if (each.auroc or 0) >= 0.8 and each.balanced_accuracy <= 0.6]
    assert names_in(prominent, "A threshold of 0.5") == sorted(unfit)
    assert any("which images belong to one patient" in s for s in prominent) == (summary.patients_known is False)
    untrained = any("better than before training" in s for s in prominent)
    assert untrained == (summary.best_round == 0 and summary.rounds > 0)
    improving = any("more rounds may give" in s for s in prominent)
    by_validation = summary.experiment.get("evaluation", {}).get("checkpoint", "best") == "best"
    is_ranked = summary.test.mean_auroc is not None or bool(summary.test.withheld)
    assert improving == (
        by_validation
        and is_ranked
        and not summary.last_model_because
        and summary.rounds > 1
        and summary.best_round == summary.rounds
    )


def check_sites_that_were_lost_or_did_not_test_are_named(run: RunFolderContent) -> None:
    summary, prominent = run.summary, list_prominent_limitations(run)
    at_end = set(run.rounds[-1].absent) - set(summary.excluded) if run.rounds else set()
    lost = {s.split(" took part ")[0]: s for s in prominent if " took part " in s and not s.startswith("No site")}
    assert set(lost) == at_end
    for site, sentence in lost.items():
        rounds = [line.round for line in run.rounds if site in line.sites]
        assert (f"last in round {rounds[-1]} of {len(run.rounds)}," if rounds else "in no round") in sentence
    testing = [s for s in prominent if s.split(";")[0].endswith(" tested the model")]
    testers, kind = (summary.sites, "") if summary.drawn_to_test is None else (summary.drawn_to_test, "drawn ")
    silent = set(testers) - set(summary.per_site)
    assert bool(testing) == (summary.test.note != GLOBAL_MODEL_NOTE and bool(silent))
    if testing:
        assert names_in(testing) == sorted(silent)
        assert testing[0].startswith(f"{len(summary.per_site)} of {len(testers)} {kind}site")
    harmed = [s.split(" harmed ")[0] for s in prominent if " harmed the model" in s]
    assert harmed == list(summary.excluded)
    long = [re.findall(r"update of (\S+) was too long in (\d+) of", s)[0] for s in every_limit(run) if "too long" in s]
    shortened = [site for line in run.rounds for site in line.shortened]
    assert long == [(site, str(shortened.count(site))) for site in sorted(set(shortened))]


def check_a_result_of_a_sample_of_sites_says_of_how_many_and_what_stands_for_all(run: RunFolderContent) -> None:
    summary, sentence = run.summary, describe_run_result(run)
    counts = re.search(r"was tested at (\d+) of (\d+) sites?, drawn at random(?:; (\d+) more )?", sentence)
    for_all = re.search(r"95 % interval \S+ for all (\d+) site", sentence)
    assert bool(counts) == (summary.drawn_to_test is not None)
    sampled = summary.test.sampled
    tested = bool(aurocs(run)) and not summary.test.compute_headline_auroc().left_out
    assert bool(for_all) == bool(tested and not summary.test.intervals and sampled and sampled.mean_auroc)
    if counts:
        answers = sum(bool(site.per_class) for site in summary.per_site.values())
        assert (int(counts[1]), int(counts[2])) == (answers, len(summary.sites))
        assert int(counts[3] or 0) == len(summary.drawn_to_test or ()) - answers
        assert ("On the sites’ own images" in sentence) == (summary.test.note == GLOBAL_MODEL_NOTE)
    covered = {name for site in summary.drawn_to_test or summary.sites for name in summary.sites[site].classes}
    missed = [s for s in every_limit(run) if "was drawn to test the model" in s]
    named = {*names_in(missed, "No site that annotates"), *names_in(missed, "not tested")}
    without = {n for n in summary.classes if n not in covered and owners(run, n)}
    untested = {n for n in without if n not in summary.test.per_class or summary.test.per_class[n].auroc is None}
    assert named == (without if summary.test.note == GLOBAL_MODEL_NOTE else untested)


def check_classes_whose_sites_left_before_the_model_was_done_are_named(run: RunFolderContent) -> None:
    summary, expected = run.summary, {}
    end = len(run.rounds) if summary.best_round is None else summary.best_round
    for name in summary.classes:
        sites = owners(run, name)
        present = [line.round for line in run.rounds[:end] if any(site in line.sites for site in sites)]
        later = run.rounds[present[-1] if present else 0 : end]
        if any(site in line.absent for line in later for site in sites):
            expected[name] = present[-1] if present else 0
    named = dict.fromkeys(names_in(list_prominent_limitations(run), "never trained: no site that annotates"), 0)
    for sentence in list_prominent_limitations(run):
        if sentence.startswith("No site that annotates"):
            last = re.search(rf"took part after round (\d+); the model is that of round {end}\.", sentence)
            assert last is not None
            named |= dict.fromkeys(names_in([sentence]), int(last[1]))
    assert named == expected


def check_few_images_are_counted_and_every_run_says_that_it_has_one_seed(run: RunFolderContent) -> None:
    summary, further, first = run.summary, list_further_limitations(run), list_prominent_limitations(run)
    rest = {names_in([s])[0]: s for s in further if " rest on " in s}
    for name, each in summary.test.per_class.items():
        fewest = min(each.positives or 0, each.negatives or 0)
        counted = None not in (each.auroc, each.positives, each.negatives)
        assert (name in rest) == (counted and fewest < FEW)
        assert name not in rest or f"rest on {fewest} " in rest[name]
    assert sum(f"one run, with seed {summary.seed}:" in s for s in further) == 1
    chosen_on = {site: record.validation_samples for site, record in summary.sites.items()}
    few = {f"{site} ({count})" for site, count in chosen_on.items() if count is not None and count < FEW}
    sentences = [s for s in further if s.startswith("Few validation images")]
    assert bool(sentences) == (bool(few) and summary.best_round is not None)
    assert all(text in sentences[0] for text in few if sentences and len(few) <= MAX_NAMES)
    sites_of = {name: owners(run, name) for name in summary.classes}
    untold = {
        name
        for name, sites in sites_of.items()
        if sites and all(summary.sites[site].positives.get(name, 0) is None for site in sites)
    }
    assert set(names_in(first, "to tell a count:")) <= untold
    assert any("to tell a count:" in s for s in first) == bool(untold)
    single = {name for name, sites in sites_of.items() if len(sites) == 1 and sites[0] in took_part(run)}
    expected = sorted(single - untold) if len(summary.sites) > 1 and not summary.is_initial_model_tested else []
    assert names_in(further, " alone: ") == expected


VERDICT_WORDS = re.compile(
    r"\b(better|best|worse|worst|superior|outperform\w*|gains?|loses?|improve[sd]?|significant\w*)\b"
)


def check_one_run_is_never_called_better_than_anything(run: RunFolderContent) -> None:
    allowed = (
        "better than by chance",
        "worse than by chance",
        "Validation was best",
        "validation did not get better than before",
        "may give a better model",
    )
    for sentence in [describe_run_result(run), *every_limit(run)]:
        for phrase in allowed:
            sentence = sentence.replace(phrase, "")
        assert not VERDICT_WORDS.search(sentence), sentence


@MANY
@given(runs())
def test_no_sentence_says_more_or_less_than_the_figures_carry(run: RunFolderContent) -> None:
    check_the_result_counts_the_classes_that_were_tested_and_no_others(run)
    check_what_limits_a_result_is_said_exactly_where_the_figures_show_it(run)
    check_sites_that_were_lost_or_did_not_test_are_named(run)
    check_a_result_of_a_sample_of_sites_says_of_how_many_and_what_stands_for_all(run)
    check_classes_whose_sites_left_before_the_model_was_done_are_named(run)
    check_few_images_are_counted_and_every_run_says_that_it_has_one_seed(run)
    check_one_run_is_never_called_better_than_anything(run)


@SOME
@given(run=runs())
def test_the_page_opens_with_the_result_and_grave_limits(
    run: RunFolderContent, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "summary.json").write_text(run.summary.model_dump_json())
    (folder / "rounds.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in run.rounds))
    page = body_text(write_run_report(folder).read_text(encoding="utf-8"))
    head = page[: page.index("Who annotates what")]
    assert all(sentence in head for sentence in (describe_run_result(run), *list_prominent_limitations(run)))
    assert all(sentence in page for sentence in every_limit(run))


def test_a_run_folder_of_the_version_before_is_read_without_claims_about_patients(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    assert "patients_known" not in (folder / "summary.json").read_text()
    assert not any("patient" in limit for limit in every_limit(read_run(folder)))
