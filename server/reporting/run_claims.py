"""What one run supports: its result in a sentence, and what limits that result."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.metrics.auroc import FEWEST_POSITIVES, GLOBAL_MODEL, SUMS, ClassGroup, ClassMetrics, Summary
from common.metrics.benefit import Benefit, Choice, benefit_sentence
from common.metrics.bootstrap import Interval
from common.metrics.measured import LARGEST_ERROR, TOO_WIDE, figure
from common.system.plain_text import counted, listed, number, shortened, span, spans
from server.runs.reader import Run, RunSummary

"""Positive or negative test images below which an AUROC is said to rest on few."""
CHANCE = 0.5
RANKED_WELL, DECIDED_BADLY = 0.8, 0.6
"""AUROC from which, and balanced accuracy up to which, a threshold of 0.5 is said not to fit."""
NAMED = 8
"""Names in one sentence; more are counted."""
UNTOLD = "its policy tells no such figures, or no class has both a positive and a negative test image there"
NOT_OPENED = "fewer sites tested it than a sum needs, so its counts stayed masked"
UNKNOWN_PATIENTS = (
    "The data does not say which images belong to one patient: images of one patient may be in training and in test "
    "data, so that figures may be too good, and intervals are over images."
)


@dataclass(frozen=True)
class Limit:
    """One sentence on what a run does not show.

    Attributes:
        prominent: Whether it belongs beside the result itself; the others stand in a list below.
    """

    text: str
    prominent: bool


def run_result(run: Run) -> str:
    """Say what the run resulted in, over exactly the classes that were tested."""
    summary, test = run.summary, run.summary.test
    which = "" if summary.best_round in (None, summary.rounds) else f" (the model is {tested_model(summary)})"
    training = f"After {counted(summary.rounds, 'round')} with {sites_taking_part(run)}{which}"
    accuracy = (
        f" Accuracy is {number(test.multi_class.accuracy)} over {counted(test.multi_class.images, 'image')}."
        if test.multi_class
        else ""
    ) + where_tested(summary)
    if test.mean_auroc is None:
        why = f": {test.withheld}" if test.withheld else ""
        return f"{training}, none of {counted(len(summary.classes), 'class', 'classes')} has an AUROC{why}.{accuracy}"
    headline = test.headline()
    if headline.mean is None:
        most = max(headline.left_out.values())
        why = f"at most {most:,} of the test images show a class, and a mean counts those that {FEWEST_POSITIVES} show"
        return f"{training}, no mean AUROC can be given: {why}.{accuracy}"
    interval = interval_of_mean(summary)
    beside = f" ({interval})" if interval else ""
    scored = "on the test set" if test.note == GLOBAL_MODEL else f"({test.note})"
    result = f"{training}, the mean AUROC {scored} is {figure(headline.mean)}{beside}"
    result += f" over {over_which_classes(summary)}"
    parts = list(_parts(summary))
    result = f"{result}: {listed(parts)}.{accuracy}" if parts else f"{result}.{accuracy}"
    return " ".join(filter(None, (result, external_result(summary))))


def external_result(summary: RunSummary) -> str:
    """Say how good the model is on the external test set, beside the other test images; empty without one."""
    if (external := summary.external) is None:
        return ""
    both = [(name, result.auroc) for name, result in external.per_class.items() if result.auroc is not None]
    if not both:
        return "On the external test set no class has an AUROC."
    images = max((result.images or 0 for result in external.per_class.values()), default=0)
    spread = external.intervals and external.intervals.mean_auroc
    beside = f" (95 % interval {span(spread)})" if spread else ""
    where = f"On the external test set ({counted(images, 'labelled image')})"
    mean = f"{where} the mean AUROC is {number(external.mean_auroc)}{beside}"
    mean += f" over {counted(len(both), 'class', 'classes')}"
    inside = {name: result.auroc for name, result in summary.test.per_class.items()}
    pairs = [(value, own) for name, value in both if (own := inside.get(name)) is not None]
    if not pairs:
        return f"{mean}."
    own = sum(inner for _, inner in pairs) / len(pairs)
    return f"{mean}; over the same classes it is {number(own)} on the run's other test images."


def tested_model(summary: RunSummary) -> str:
    """Return which model was tested: ``"that of round 3"``, ``"the initial one"``."""
    if summary.untrained:
        return "the initial one"
    return "that of the last round" if summary.best_round is None else f"that of round {summary.best_round}"


def interval_of_mean(summary: RunSummary) -> str:
    """Return the interval of the mean AUROC, and for what it holds; empty where there is none."""
    intervals, sampled = summary.test.intervals, summary.test.sampled
    if summary.test.headline().left_out:
        return ""  # both are of the mean over all classes
    if intervals and intervals.mean_auroc:
        return f"95 % interval {span(intervals.mean_auroc)}"
    if sampled and sampled.mean_auroc:
        return f"95 % interval {span(sampled.mean_auroc)} for all {counted(sampled.of, 'site')}"
    return ""


def where_tested(summary: RunSummary) -> str:
    """Say at how many sites the model was tested, where a sample was asked; else empty."""
    if summary.drawn_to_test is None:
        return ""
    own = "On the sites’ own images it was" if summary.test.note == GLOBAL_MODEL else "It was"
    summed = (
        {site for each in summary.test.pooled.per_class.values() for site in each.sites} if summary.test.pooled else ()
    )
    tested = len({*summed, *(site for site, result in summary.per_site.items() if result.per_class)})
    silent = len(summary.drawn_to_test) - tested
    more = f"; {silent:,} more that {'was' if silent == 1 else 'were'} drawn told no figures" if silent else ""
    return f" {own} tested at {tested:,} of {counted(len(summary.sites), 'site')}, drawn at random{more}."


def asked_to_test(summary: RunSummary) -> tuple[str, ...]:
    """Return the sites that were asked to test the model."""
    return tuple(summary.sites) if summary.drawn_to_test is None else summary.drawn_to_test


def sites_taking_part(run: Run) -> str:
    """Return how many of the sites took part in a round: ``"3 sites"``, ``"1 of 2 sites"``."""
    taking = {site for each in run.rounds for site in each.sites} & run.summary.sites.keys()
    every = counted(len(run.summary.sites), "site")
    return every if len(taking) == len(run.summary.sites) or not run.rounds else f"{len(taking):,} of {every}"


def _parts(summary: RunSummary) -> Iterator[str]:
    """Yield the result on shared and on unique classes, where these are not all classes and all were tested."""
    if not summary.test.per_class.keys() >= set(summary.classes):
        return
    groups: tuple[tuple[ClassGroup, str], ...] = (
        (summary.test.shared_classes, "every site annotates"),
        (summary.test.unique_classes, "only one site annotates"),
    )
    for group, who in groups:
        mean = summary.test.headline(group.classes).mean
        if mean is not None and len(group.classes) < len(summary.classes):
            yield f"{figure(mean)} on {how_many_counted(summary, group.classes, 'the ')} that {who}"


def over_which_classes(summary: RunSummary) -> str:
    """Return over which classes the mean is: ``"3 of 5 classes that 30 test images or more show, without A (12)"``."""
    names = tuple(dict.fromkeys((*summary.classes, *summary.test.per_class)))
    left_out = summary.test.headline().left_out
    if not left_out:
        return how_many_counted(summary, names)
    few = listed([f"{name} ({count:,})" for name, count in left_out.items()])
    return f"{how_many_counted(summary, names)} that {FEWEST_POSITIVES} test images or more show, without {few}"


def how_many_counted(summary: RunSummary, names: Sequence[str], article: str = "") -> str:
    """Return how many of the classes the mean counts: ``"3 of the 5 classes"``, ``"the 5 classes"``."""
    number_of = len(summary.test.headline(names).classes)
    every = counted(len(names), "class", "classes")
    return f"{article}{every}" if number_of == len(names) else f"{number_of} of {article}{every}"


def why_undefined(result: ClassMetrics | None) -> str:
    """Return why a class has no AUROC, or an empty string if it has one."""
    if result is None:
        return "not among the test set's labels"
    if result.auroc is not None:
        return ""
    if "auroc" in result.errors:
        return TOO_WIDE
    if result.positives is None:
        return "no site tells: each has too few patients with it, or without, or its policy keeps such figures"
    if not result.positives and not result.negatives:
        return "no test image has a known label, or no site tells its results"
    if not result.positives:
        return "no positive test image"
    return "the model has no output for it" if result.negatives else "no negative test image"


def why_untested(summary: RunSummary, name: str) -> str:
    """Return why a class of the run has no AUROC, or an empty string if it has one."""
    reason = why_undefined(summary.test.per_class.get(name))
    if reason and summary.test.withheld:
        return summary.test.withheld
    if not reason or summary.test.note == GLOBAL_MODEL or not (of_class := set(summary.owners.get(name, ()))):
        return reason
    if not of_class & set(asked_to_test(summary)):
        return "no site with this class was drawn to test the model"
    if summary.test.note == SUMS:
        return reason if name in (summary.test.pooled.per_class if summary.test.pooled else {}) else NOT_OPENED
    return reason if of_class & summary.per_site.keys() else "no site with this class tested the model"


def extremes(accuracies: Mapping[str, float]) -> str:
    """Return the sites at both ends: ``"0.700 (north) to 0.930 (south)"``; of equals the first by name."""
    ends = (min(sorted(accuracies), key=accuracies.__getitem__), max(sorted(accuracies), key=accuracies.__getitem__))
    return " to ".join(f"{number(accuracies[site])} ({site})" for site in ends)


def condemned(site: str, reason: str) -> str:
    """Say that a site's update harmed the model."""
    return f"{site} harmed the model and was left out for the rest of the run: {reason}."


def limits(run: Run) -> list[Limit]:
    """Return what the run's own figures say against its result, the most important first."""
    prominent = [Limit(text, prominent=True) for rule in PROMINENT for text in rule(run)]
    return prominent + [Limit(text, prominent=False) for rule in FURTHER for text in rule(run)]


def _untested(run: Run) -> Iterator[str]:
    summary = run.summary
    by_reason: dict[str, list[str]] = {}
    for name in summary.classes:
        if reason := why_untested(summary, name):
            by_reason.setdefault(reason, []).append(name)
    of_all = f"of {counted(len(summary.classes), 'class', 'classes')}"
    for reason, names in by_reason.items():
        verb = "was" if len(names) == 1 else "were"
        yield f"{len(names)} {of_all} {verb} not tested: {_named(names)} ({reason})."


def _lost(run: Run) -> Iterator[str]:
    """Name the sites that were absent when the run ended."""
    last = run.rounds[-1] if run.rounds else None
    for site in sorted(last.absent if last else ()):
        if site in run.summary.condemned:
            continue  # said already
        took_part = [each.round for each in run.rounds if site in each.sites]
        if took_part:
            last_part = f"round {took_part[-1]:,} of {run.summary.rounds:,}"
            yield f"{site} took part last in {last_part}, and was absent at the end."
        else:
            without = "" if run.summary.untrained else ": the model was trained without it"
            yield f"{site} took part in no round{without}."


def _left_behind(run: Run) -> Iterator[str]:
    """Name the classes whose sites were all gone while the rest of the model was still trained."""
    summary = run.summary
    if summary.untrained:
        return  # said of the whole model
    end = summary.best_round or (run.rounds[-1].round if run.rounds else 0)
    counted_rounds = [each for each in run.rounds if each.round <= end]
    by_round: dict[int, list[str]] = {}
    for name in summary.classes:
        of_class = set(summary.owners.get(name, ()))
        last = max((each.round for each in counted_rounds if of_class & set(each.sites)), default=0)
        if any(of_class & each.absent.keys() for each in counted_rounds if each.round > last):
            by_round.setdefault(last, []).append(name)
    for last, names in sorted(by_round.items()):
        if last:
            since = f"after round {last:,}; the model is that of round {end:,}"
            yield f"No site that annotates {_named(names)} took part {since}."
        else:
            verb, them, scores = (
                ("was", "it", "its score is") if len(names) == 1 else ("were", "them", "their scores are")
            )
            why = f"no site that annotates {them} took part"
            yield f"{_named(names)} {verb} never trained: {why}; {scores} no result."


def _not_testing(run: Run) -> Iterator[str]:
    summary = run.summary
    asked = asked_to_test(summary)
    silent = [site for site in asked if site not in summary.per_site]
    if silent and summary.test.note != GLOBAL_MODEL:
        sites = counted(len(asked), "site" if summary.drawn_to_test is None else "drawn site")
        yield f"{len(asked) - len(silent)} of {sites} tested the model; {_named(silent)} did not."


def _not_drawn(run: Run) -> Iterator[str]:
    """Name the classes of which no site has figures, beside a test on the coordinator's images, which has them all."""
    summary = run.summary
    if summary.drawn_to_test is None or summary.test.note != GLOBAL_MODEL:
        return
    covered = {name for site in summary.drawn_to_test for name in summary.sites[site].classes}
    if names := [name for name in summary.classes if name not in covered and summary.owners.get(name, ())]:
        yield f"No site that annotates {_named(names)} was drawn to test the model: no site’s figures are of it."


def _unknown_patients(run: Run) -> Iterator[str]:
    if run.summary.patients_known is False:
        yield UNKNOWN_PATIENTS


def _never_better(run: Run) -> Iterator[str]:
    """Say that no round was better than the model that the run began with, which is the one tested."""
    if run.summary.untrained:
        yield (
            f"Validation was best before the first of {counted(run.summary.rounds, 'round')}: all figures are of the "
            "initial model, which no site of this run has trained."
        )


def _still_improving(run: Run) -> Iterator[str]:
    """Say that the best round was the last one, so that nobody knows what further rounds bring."""
    summary = run.summary
    by_validation = (summary.experiment.get("evaluation") or {}).get("checkpoint", "best") == "best"
    if by_validation and 1 < summary.rounds == summary.best_round:
        yield f"Validation was best in the last of {summary.rounds:,} rounds: more rounds may give a better model."


def _detects_nothing(run: Run) -> Iterator[str]:
    test = run.summary.test
    of_sites = {name: each.decisions for name, each in test.pooled.per_class.items()} if test.pooled else {}
    made = test.quality.decisions if test.quality else of_sites
    names = [name for name, each in made.items() if each.false_negatives and not each.true_positives]
    if names:
        yield (
            f"At a threshold of 0.5 the model finds none of the positive test images of {_named(names)} "
            "(sensitivity 0)."
        )


def _wrong_threshold(run: Run) -> Iterator[str]:
    """Name the classes that are ranked well and decided badly."""
    results = run.summary.test.per_class.items()
    pairs = ((name, one.measured("auroc"), one.measured("balanced_accuracy")) for name, one in results)
    if names := [
        name
        for name, ranked, decided in pairs
        if ranked and decided and ranked.low >= RANKED_WELL and decided.high <= DECIDED_BADLY
    ]:
        figures = f"balanced accuracy {DECIDED_BADLY} or less at an AUROC of {RANKED_WELL} or more"
        yield f"A threshold of 0.5 does not fit {_named(names)}: {figures}."


def _no_better_than_chance(run: Run) -> Iterator[str]:
    """Classes whose interval includes, or lies below, an AUROC of 0.5, wherever in its error the AUROC lies."""
    test = run.summary.test
    exact = {name: (interval, 0.0) for name, interval in (test.intervals.per_class if test.intervals else {}).items()}
    by_class = exact if test.intervals else _pooled_intervals(test)
    of_what = "" if test.intervals else " of the test images of all sites that report the class"
    if names := [name for name, ((low, high), error) in by_class.items() if low + error <= CHANCE <= high - error]:
        verb, interval = "is" if len(names) == 1 else "are", f"the 95 % interval{of_what} includes an AUROC of 0.5"
        yield f"{_named(names)} {verb} not detected better than by chance: {interval}."
    if names := [name for name, ((_, high), error) in by_class.items() if high + error < CHANCE]:
        verb, interval = "is" if len(names) == 1 else "are", f"the 95 % interval{of_what} lies below an AUROC of 0.5"
        yield f"{_named(names)} {verb} detected worse than by chance: {interval}."


def _pooled_intervals(test: Summary) -> dict[str, tuple[Interval, float]]:
    """Return each class's interval with the error of its AUROC, where that is exact enough to be judged."""
    per_class = test.pooled.per_class if test.pooled else {}
    return {
        name: (each.interval, each.auroc.error)
        for name, each in per_class.items()
        if each.interval is not None and each.auroc is not None and each.auroc.error <= LARGEST_ERROR
    }


def _left_out(run: Run) -> Iterator[str]:
    yield from (condemned(site, reason) for site, reason in run.summary.condemned.items())


def _few_images(run: Run) -> Iterator[str]:
    for name in run.summary.classes:
        result = run.summary.test.per_class.get(name)
        if result is None or result.auroc is None:
            continue
        positives, negatives = run.summary.test.counts(name)
        if positives is None or negatives is None:
            continue
        yield from few_images(name, positives, negatives, "test image")


def few_images(name: str, positives: int, negatives: int, images: str) -> Iterator[str]:
    """Yield a sentence where the figures of a class rest on few images that show it, or that do not.

    Args:
        images: What one of them is called, such as ``"test image"``.
    """
    least = min(positives, negatives)
    if least < FEWEST_POSITIVES:
        kind = "positive" if positives == least else "negative"
        yield f"The figures for “{name}” rest on {counted(least, f'{kind} {images}')}."


def _few_validation_images(run: Run) -> Iterator[str]:
    """Name sites with few validation images, where a round was chosen by them."""
    if run.summary.best_round is None:
        return
    few = {
        site: record.validation_samples
        for site, record in run.summary.sites.items()
        if record.validation_samples is not None and record.validation_samples < FEWEST_POSITIVES
    }
    if few:
        each = [f"{site} ({count})" for site, count in few.items()]
        yield f"Few validation images chose the round that is tested: {_first(each)}."


def _one_way_of_reading(run: Run) -> Iterator[str]:
    summary, untold = run.summary, _untold(run.summary)
    if summary.untrained:
        return
    taking = {site for each in run.rounds for site in each.sites}
    for site in [each for each in summary.sites if each in taking] if len(summary.sites) > 1 else ():
        names = [name for name in summary.classes if summary.owners.get(name, ()) == (site,) and name not in untold]
        if names:
            verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
            reading = f"the model has learned that site's way of reading {them}"
            yield f"{listed([f'“{name}”' for name in names])} {verb} annotated by {site} alone: {reading}."


def _untold(summary: RunSummary) -> list[str]:
    """Return the classes of which no owner may tell a count, in a run in which policies may keep rows."""
    privacy = summary.experiment.get("privacy") or {}
    if privacy.get("secure_aggregation") or privacy.get("level", "none") != "none":
        return []
    found = []
    for name in summary.classes:
        owning = [summary.sites[site] for site in summary.owners.get(name, ()) if site in summary.sites]
        if owning and all(name in site.positives and site.positives[name] is None for site in owning):
            found.append(name)
    return found


def _untrained_rows(run: Run) -> Iterator[str]:
    if names := _untold(run.summary):
        verb, rows = ("is", "this row was") if len(names) == 1 else ("are", "these rows were")
        few = f"{_named(names)} {verb} annotated only by sites with too few patients to tell a count"
        yield f"{few}: where a site's policy has train_hidden_classes = false, {rows} not trained there."


def _rows_never_opened(run: Run) -> Iterator[str]:
    """Classes that secure aggregation never let the model learn."""
    in_each_round = [set(each.closed_rows) for each in run.rounds]
    never = set.intersection(*in_each_round) if in_each_round else set[str]()
    if names := [name for name in run.summary.classes if name in never]:
        verb, rows = ("was", "its head row") if len(names) == 1 else ("were", "their head rows")
        few = "fewer hospitals than smallest_cohort sent it"
        yield f"{_named(names)} {verb} not learned: {rows} stayed masked in every round, because {few}."


def _absences(run: Run) -> Iterator[str]:
    missed: dict[str, list[int]] = {}
    for each in run.rounds:
        for site in each.absent:
            missed.setdefault(site, []).append(each.round)
    for site, rounds in sorted(missed.items()):
        if site in run.summary.condemned:
            continue  # left out for the rest of the run, which another sentence says
        of_all = f"{len(rounds)} of {counted(run.summary.rounds, 'round')}"
        yield f"{site} was absent in {of_all} ({spans(rounds)})."


def _shortened(run: Run) -> Iterator[str]:
    """Name the sites whose updates were over ``participation.clip`` medians, with what was done the last time."""
    done: dict[str, list[tuple[int, str]]] = {}
    for each in run.rounds:
        for site, what in each.shortened.items():
            done.setdefault(site, []).append((each.round, what))
    for site, rounds in sorted(done.items()):
        number, what = rounds[-1]
        of_all = f"{len(rounds)} of {counted(run.summary.rounds, 'round')}"
        yield f"The update of {site} was too long in {of_all}; in round {number:,} {what}."


def _one_seed(run: Run) -> Iterator[str]:
    yield f"This is one run, with seed {run.summary.seed}: it does not show how far figures move with another seed."


def _not_one_model(run: Run) -> Iterator[str]:
    test = run.summary.test
    if test.note not in (GLOBAL_MODEL, SUMS):
        most = ", and each count of test images is that of the site with most" if test.pooled is None else ""
        yield f"The score is the {test.note}{most}."


def _named(names: Iterable[str]) -> str:
    return _first([f"“{name}”" for name in names])


def _first(words: Sequence[str]) -> str:
    rest = len(words) - NAMED
    return listed([*words[:NAMED], f"{rest:,} more"] if rest > 0 else words)


@dataclass(frozen=True)
class SiteChoice:
    """One site's comparison with training alone.

    Attributes:
        benefit: None where nothing was compared, or told.
    """

    site: str
    sentence: str
    benefit: Benefit | None

    @property
    def choice(self) -> Choice:
        """Return where the site is better off; ``open`` also where nobody knows."""
        return "open" if self.benefit is None else self.benefit.choice


def site_choices(run: Run) -> list[SiteChoice]:
    """Return a sentence for every site, in the order of their names; none where the run did not ask."""
    choices = []
    for site, answer in sorted(run.summary.benefit.items()):
        if (benefit := answer.benefit) is not None:
            sentence = benefit_sentence(site, benefit, run.summary.sites[site].classes)
        else:
            reason = f"was not compared with training alone ({answer.reason})"
            why = reason if answer.reason else f"says nothing ({UNTOLD})"
            sentence = f"Whether {site} is better off alone is not known: it {why}."
        choices.append(SiteChoice(site, sentence, benefit))
    return choices


def _better_alone(run: Run) -> Iterator[str]:
    """Name the sites that lose by the federation, in one sentence beside the run's result."""
    choices = site_choices(run)
    alone = [each.site for each in choices if each.choice == "alone"]
    compared = sum(each.benefit is not None for each in choices)
    if alone:
        verb = "is" if len(alone) == 1 else "are"
        of_all = f"{len(alone)} of {counted(compared, 'site')} that compared"
        yield f"{of_all} {verb} better off alone than with this model: {shortened(alone, NAMED)}."


def _by_chance(run: Run) -> Iterator[str]:
    """Say how often a verdict on a site is wrong."""
    compared = sum(each.benefit is not None for each in site_choices(run))
    if compared:
        yield (
            f"Whether a site is better off alone rests on a 95 % interval for each of {counted(compared, 'site')} by "
            "itself: where both models are equally good, one site in 40 is called better off alone by chance. The "
            "intervals are over test images and say nothing of another training."
        )


Rule = Callable[[Run], Iterator[str]]
PROMINENT: tuple[Rule, ...] = (
    _left_out,
    _never_better,
    _better_alone,
    _untested,
    _not_testing,
    _lost,
    _left_behind,
    _untrained_rows,
    _rows_never_opened,
    _unknown_patients,
    _no_better_than_chance,
    _detects_nothing,
    _wrong_threshold,
    _still_improving,
)
FURTHER: tuple[Rule, ...] = (
    _few_images,
    _few_validation_images,
    _not_drawn,
    _one_way_of_reading,
    _absences,
    _shortened,
    _one_seed,
    _by_chance,
    _not_one_model,
)
