"""Sentences about one run for its report: its result, and the limitations of that result."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyclinic.common.metrics.auroc import (
    GLOBAL_MODEL_NOTE,
    MIN_POSITIVES,
    SUMMED_HISTOGRAMS_NOTE,
    ClassMetrics,
    FinalTestSummary,
    compute_mean_and_sd,
)
from polyclinic.common.metrics.benefit import FederationBenefit, format_benefit_sentence
from polyclinic.common.metrics.measured import LARGE_ERROR_NOTE, MAX_METRIC_ERROR, format_value_with_error
from polyclinic.common.models.zoo.spec import DICE_METRIC, is_segmentation
from polyclinic.common.reporting.limits import UNKNOWN_PATIENTS, warn_about_few_images
from polyclinic.common.system.plain_text import (
    format_count_with_noun,
    format_interval,
    format_number,
    format_rounds,
    join_as_english_list,
    join_first_and_count,
    list_first_and_count_rest,
)
from polyclinic.common.wire.flower_messages import APPROVAL_ERROR_MESSAGE
from polyclinic.data.base.image_set import describe_skipped_images
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import RunClaims, RunSummary
from polyclinic.server.runs.unlearned import NO_POSITIVE_REASON, describe_classes_of_unknown_learning

CHANCE_AUROC = 0.5
HIGH_AUROC = 0.8
LOW_BALANCED_ACCURACY = 0.6
"""A threshold of 0.5 does not fit a class with at least this AUROC and at most this balanced accuracy."""
ONE_SCORE_CAUSE = (
    "A usual cause is batch normalisation after few training steps, because its running statistics do not fit the "
    'images yet: model.norm = "group" replaces it. Another is a training.lr that is too high.'
)
MAX_NAMES = 8
"""Greatest number of names in one sentence; a sentence with more names only counts the others."""
WITHHELD_REASON = (
    "its policy tells no such figures, or for each class too few of its test patients have the finding, or do not"
)
STAYED_MASKED_REASON = "fewer sites tested it than a sum needs, so its counts stayed masked"
THRESHOLDS_HEADING = "Thresholds chosen on validation images"
"""Heading of the page's table of thresholds."""


def make_run_claims(run: RunFolderContent) -> RunClaims:
    """Return the claims that a run's summary and rounds support."""
    is_auroc = run.summary.test.figure_name == "AUROC"
    mean = run.summary.test.compute_headline_auroc().mean if is_auroc else None
    return RunClaims(
        result=describe_run_result(run),
        mean_auroc=None if mean is None else mean.value,
        mean_auroc_error=0.0 if mean is None else mean.error,
        no_mean_because=explain_missing_mean_auroc(run.summary) if is_auroc else "a segmentation has a mean Dice",
        cautions=tuple(list_prominent_limitations(run)),
        limits=tuple(list_further_limitations(run)),
    )


def describe_run_result(run: RunFolderContent) -> str:
    """Return the result of a run in one sentence that names the number of tested classes."""
    summary = run.summary
    test = summary.test
    model = "" if summary.best_round in (None, summary.rounds) else f" (the model is {describe_tested_model(summary)})"
    training = f"After {format_count_with_noun(summary.rounds, 'round')} with {format_participating_sites(run)}{model}"
    accuracy = describe_sites_drawn_for_test(summary)
    if (scored := test.multi_class) is not None:
        accuracy = (
            f" Accuracy is {format_number(scored.accuracy)} over "
            f"{format_count_with_noun(scored.images, 'image')}.{accuracy}"
        )
    if reason := explain_missing_mean_auroc(summary):
        return f"{training}, {reason}.{accuracy} {describe_external_test(summary)}".rstrip()
    mean = format_value_with_error(test.compute_headline_auroc().mean)
    interval = f" ({text})" if (text := describe_auroc_interval(summary)) else ""
    images = "on the test set" if test.note == GLOBAL_MODEL_NOTE else f"({test.note})"
    subsets = []
    for group, owners in (
        (test.shared_classes, "every site annotates"),
        (test.unique_classes, "only one site annotates"),
    ):
        tested = test.per_class.keys() >= set(summary.classes) and len(group.classes) < len(summary.classes)
        if tested and (subset := test.compute_headline_auroc(group.classes).mean) is not None:
            classes = describe_averaged_class_count(summary, group.classes, "the ")
            subsets.append(f"{format_value_with_error(subset)} on {classes} that {owners}")
    groups = f": {join_as_english_list(subsets)}" if subsets else ""
    over = describe_classes_in_mean_auroc(summary)
    result = f"the mean {test.figure_name} {images} is {mean}{interval} over {over}{groups}"
    return f"{training}, {result}.{accuracy} {describe_external_test(summary)}".rstrip()


def is_segmentation_run(summary: RunSummary) -> bool:
    """Return True if the run's model is a segmentation model, which labels each pixel."""
    return is_segmentation(str((summary.experiment.get("model") or {}).get("task", "")))


def explain_missing_mean_auroc(summary: RunSummary) -> str:
    """Return why a run has no mean AUROC, as a clause; empty if it has one."""
    test = summary.test
    if test.main_mean is None:
        classes = format_count_with_noun(len(summary.classes), "class", "classes")
        metric = "a Dice" if is_segmentation_run(summary) else "an AUROC"
        return f"none of {classes} has {metric}" + (f": {test.withheld}" if test.withheld else "")
    headline = test.compute_headline_auroc()
    if headline.mean is not None:
        return ""
    most = max(headline.left_out.values())
    reason = f"at most {most:,} of the test images show a class, and a mean counts those that {MIN_POSITIVES} show"
    return f"no mean AUROC can be given: {reason}"


def describe_way_to_mean_auroc(summary: RunSummary) -> str:
    """Return a remedy for a run without a mean AUROC, because all classes have too few positive test images.

    The result is empty if the run has a mean AUROC.
    """
    headline = summary.test.compute_headline_auroc()
    if summary.test.main_mean is None or headline.mean is not None:
        return ""
    beside = "The AUROC of each class stands in the table."
    most = max(headline.left_out.values())
    times = f"{format_number(MIN_POSITIVES / most, 1)} times as many test images" if most else "more test images"
    if "split_column" in (summary.experiment.get("data") or {}):
        where = 'add to [data] split_column = "part", the name of a column that says train, val or test of each picture'
    else:
        where = (
            "move images from the training part to the test part, or test on images of another place: [external_test]"
        )
    return f"{beside} A mean AUROC needs about {times}: {where}."


def describe_external_test(summary: RunSummary) -> str:
    """Compare in one sentence the mean AUROC on external and on other test images; empty without external images."""
    if (external := summary.external) is None:
        return ""
    if all(result.auroc is None for result in external.per_class.values()):
        return "On the external test set no class has an AUROC."
    headline = external.compute_headline_auroc()
    names = headline.classes
    if headline.mean is None:
        return f"On the external test set no class is shown by {MIN_POSITIVES} images, as a mean AUROC requires."
    images = max(result.images or 0 for result in external.per_class.values())
    interval = external.intervals and not headline.left_out and external.intervals.mean_auroc
    beside = f" (95 % interval {format_interval(interval)})" if interval else ""
    mean = (
        f"the mean AUROC is {format_value_with_error(headline.mean)}{beside} over "
        f"{format_count_with_noun(len(names), 'class', 'classes')}"
    )
    sentence = f"On the external test set ({format_count_with_noun(images, 'labelled image')}) {mean}"
    inside, _ = compute_mean_and_sd(each.auroc for name, each in summary.test.per_class.items() if name in names)
    if inside is None:
        return f"{sentence}."
    return f"{sentence}; over the same classes it is {format_number(inside)} on the run's other test images."


def describe_tested_model(summary: RunSummary) -> str:
    """Describe the tested model: ``"that of round 3"``, ``"that of the last round"`` or ``"the initial one"``."""
    if summary.is_initial_model_tested:
        return "the initial one"
    return "that of the last round" if summary.best_round is None else f"that of round {summary.best_round}"


def describe_auroc_interval(summary: RunSummary) -> str:
    """Format the 95 % interval of the mean AUROC or Dice, such as ``"95 % interval 0.81–0.87"``; empty without one."""
    intervals = summary.test.intervals
    sampled = summary.test.sampled
    segmentation = summary.test.segmentation
    if segmentation is not None and segmentation.interval is not None:
        return f"95 % interval {format_interval(segmentation.interval)}"
    if summary.test.compute_headline_auroc().left_out:
        return ""  # the intervals below are of the mean over all classes
    if intervals and intervals.mean_auroc:
        return f"95 % interval {format_interval(intervals.mean_auroc)}"
    if sampled and sampled.mean_auroc:
        sites = format_count_with_noun(sampled.of, "site")
        return f"95 % interval {format_interval(sampled.mean_auroc)} for all {sites}"
    return ""


def describe_sites_drawn_for_test(summary: RunSummary) -> str:
    """Return a sentence with the number of sites that tested the model; empty unless they were drawn at random."""
    if summary.drawn_to_test is None:
        return ""
    subject = "On the sites’ own images it was" if summary.test.note == GLOBAL_MODEL_NOTE else "It was"
    pooled = summary.test.pooled.per_class.values() if summary.test.pooled else ()
    tested = {site for result in pooled for site in result.sites}
    tested |= {site for site, result in summary.per_site.items() if result.per_class}
    silent = len(summary.drawn_to_test) - len(tested)
    rest = f"; {silent:,} more that {'was' if silent == 1 else 'were'} drawn told no figures" if silent else ""
    return (
        f" {subject} tested at {len(tested):,} of {format_count_with_noun(len(summary.sites), 'site')}, drawn at "
        f"random{rest}."
    )


def format_participating_sites(run: RunFolderContent) -> str:
    """Format the number of sites that took part in at least one round: ``"3 sites"``, ``"1 of 2 sites"``."""
    active = _list_active_sites(run) & run.summary.sites.keys()
    all_sites = format_count_with_noun(len(run.summary.sites), "site")
    if len(active) == len(run.summary.sites) or not run.rounds:
        return all_sites
    return f"{len(active):,} of {all_sites}"


def _list_active_sites(run: RunFolderContent) -> set[str]:
    """Return the sites that took part in at least one round."""
    return {site for line in run.rounds for site in line.sites}


def describe_classes_in_mean_auroc(summary: RunSummary) -> str:
    """Describe the classes in the mean AUROC, and name the other classes with their numbers of positive test images.

    Example: ``"3 of 5 classes that 30 test images or more show, without A (12) and B (7)"``.
    """
    names = tuple(dict.fromkeys((*summary.classes, *summary.test.per_class)))
    left_out = summary.test.compute_headline_auroc().left_out
    classes = describe_averaged_class_count(summary, names)
    if not left_out:
        return classes
    rare = join_as_english_list([f"{name} ({count:,})" for name, count in left_out.items()])
    return f"{classes} that {MIN_POSITIVES} test images or more show, without {rare}"


def describe_averaged_class_count(summary: RunSummary, names: Sequence[str], article: str = "") -> str:
    """Format the number of these classes that are in the mean AUROC: ``"3 of the 5 classes"``, ``"the 5 classes"``.

    Args:
        article: Text before the number of all classes, such as ``"the "``.
    """
    averaged = len(summary.test.compute_headline_auroc(names).classes)
    all_classes = format_count_with_noun(len(names), "class", "classes")
    return f"{article}{all_classes}" if averaged == len(names) else f"{averaged} of {article}{all_classes}"


def explain_missing_auroc(result: ClassMetrics | None) -> str:
    """Return the reason why a class has no AUROC; empty if it has one.

    Args:
        result: The class's test result; None if the test images have no labels of the class.
    """
    if result is None:
        return "not among the test set's labels"
    if result.main_figure is not None:
        return ""
    if DICE_METRIC in result.more and result.positives == 0:
        return "no test image shows it"
    if "auroc" in result.errors:
        return LARGE_ERROR_NOTE
    if result.positives is None:
        return "no site tells: each has too few patients with it, or without, or its policy keeps such figures"
    if not result.positives and not result.negatives:
        return "no test image has a known label, or no site tells its results"
    if not result.positives:
        return "no positive test image"
    return "the model has no output for it" if result.negatives else "no negative test image"


def explain_untested_class(summary: RunSummary, name: str) -> str:
    """Return the reason why a class of a run has no AUROC in the final test; empty if it has one."""
    reason = explain_missing_auroc(summary.test.per_class.get(name))
    owners = set(summary.annotating_sites_by_class.get(name, ()))
    if reason and summary.test.withheld:
        return summary.test.withheld
    if not reason or summary.test.note == GLOBAL_MODEL_NOTE or not owners:
        return reason
    if not owners & set(list_sites_asked_to_test(summary)):
        return "no site with this class was drawn to test the model"
    if summary.test.note == SUMMED_HISTOGRAMS_NOTE:
        return reason if summary.test.pooled and name in summary.test.pooled.per_class else STAYED_MASKED_REASON
    return reason if owners & summary.per_site.keys() else "no site with this class tested the model"


def list_sites_asked_to_test(summary: RunSummary) -> tuple[str, ...]:
    """Return the sites that were asked to test the model."""
    return tuple(summary.sites) if summary.drawn_to_test is None else summary.drawn_to_test


def describe_worst_and_best_site(accuracies: Mapping[str, float]) -> str:
    """Format the accuracies of the worst and the best site: ``"0.7 (north) to 0.9 (south)"``.

    Of sites with equal accuracies, the first by name is shown.
    """
    ends = (min(sorted(accuracies), key=accuracies.__getitem__), max(sorted(accuracies), key=accuracies.__getitem__))
    return " to ".join(f"{format_number(accuracies[site])} ({site})" for site in ends)


# ---------------------------------------------------------------------- limits of the result


def list_prominent_limitations(run: RunFolderContent) -> list[str]:
    """Return sentences on the limitations that are shown beside the run's result, most severe first."""
    summary = run.summary
    test = summary.test
    harmed = "harmed the model and was left out for the rest of the run"
    limits = [f"{site} {harmed}: {reason}." for site, reason in summary.excluded.items()]
    if summary.is_initial_model_tested:
        # A tie counts as no improvement. So the sentence must not say that validation was best before training.
        rounds = format_count_with_noun(summary.rounds, "round")
        before = f"In {rounds} validation did not get better than before training"
        limits.append(f"{before}: all figures are of the initial model, which no site of this run has trained.")
    if gives_all_images_one_score(run):
        limits.append(f"The model gives all test images of every class one score. {ONE_SCORE_CAUSE}")
    benefits = describe_site_benefits(run)
    alone = [each.site for each in benefits if each.benefit and each.benefit.recommended_training == "alone"]
    if alone:
        compared = format_count_with_noun(sum(each.benefit is not None for each in benefits), "site")
        better = f"{_choose_verb_form(alone, 'is', 'are')} better off alone than with this model"
        limits.append(f"{len(alone)} of {compared} that compared {better}: {join_first_and_count(alone, MAX_NAMES)}.")
    limits += _describe_sites_outside_run(run)
    limits += [*_describe_untested_classes(summary), *_describe_lost_sites_and_classes(run)]
    limits += _describe_counting_statistics(summary)
    limits += _describe_unlearned_classes(run)
    if summary.patients_known is False:
        limits.append(UNKNOWN_PATIENTS)
    limits += _describe_unlike_pixels(summary)
    limits += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary.start]
    limits += _describe_classes_of_one_site(summary)
    if sentence := describe_skipped_images(summary.skipped_images):
        limits.append(sentence)
    limits += [*summary.notes, *_describe_poorly_detected_classes(test)]
    if sentence := describe_way_to_mean_auroc(summary):
        limits.append(sentence)
    if reason := summary.last_model_because:
        limits.append(f"No best round was chosen by validation: {reason}.")
    if is_last_round_best(summary):
        limits.append(
            f"Validation was best in the last of {summary.rounds:,} rounds: more rounds may give a better model. "
            "The run goes on with a larger run.rounds and --resume, or resume=True in Python."
        )
    return limits


def _describe_unlearned_classes(run: RunFolderContent) -> Iterator[str]:
    """Yield sentences on classes that the model has not learned, and on classes of which this is not known."""
    summary = run.summary
    hidden = find_hidden_count_classes(summary)
    if hidden:
        verb = _choose_verb_form(hidden, "is", "are")
        few = f"{_quote_names(hidden)} {verb} annotated only by sites with too few patients to tell a count"
        rows = _choose_verb_form(hidden, "this row was", "these rows were")
        yield f"{few}: where a site's policy has train_hidden_classes = false, {rows} not trained there."
    closed = [set(line.closed_rows) for line in run.rounds]
    if names := [name for name in summary.classes if closed and all(name in rows for rows in closed)]:
        rows = f"{_choose_verb_form(names, 'its head row', 'their head rows')} stayed masked in every round"
        verb, few = _choose_verb_form(names, "was", "were"), "fewer hospitals than smallest_cohort sent it"
        yield f"{_quote_names(names)} {verb} not learned: {rows}, because {few}."
    if names := [name for name, reason in summary.unlearned.items() if reason == NO_POSITIVE_REASON]:
        verb, them = _choose_verb_form(names, "was", "were"), _choose_verb_form(names, "it", "them")
        yield f"{_quote_names(names)} {verb} not learned: no training image of the run shows {them}."
    names = [name for name in summary.maybe_unlearned if name not in hidden]
    if sentence := describe_classes_of_unknown_learning(names):
        yield sentence


def _describe_unlike_pixels(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on images that may have been converted to pixels in another way than the user meant."""
    if names := summary.pixels.unknown:
        whose = _choose_verb_form(names, "its", "their")
        text = f"did not state how {whose} images become pixels, because of {whose} release"
        yield f"{join_first_and_count(names, MAX_NAMES)} {text}: nobody compared colour, size and window."
    pixel_form = summary.pixels.form
    channels = (summary.experiment.get("model") or {}).get("channels")
    if pixel_form is not None and channels == 3 and not pixel_form.color and not pixel_form.only_grey:
        yield "Images that have colour were read in grey (color = false), though the network takes colour."


def _describe_classes_of_one_site(summary: RunSummary) -> Iterator[str]:
    """Yield a sentence on classes that only one site annotates and that may be synonyms of other sites' classes."""
    if names := summary.classes_of_one_site:
        verb = _choose_verb_form(names, "is", "are")
        statement = _choose_verb_form(names, "it is a class of its own", "they are classes of their own")
        yield (
            f"{_quote_names(names)} {verb} annotated by one site alone. Nobody has confirmed (by "
            f"participation.distinct_classes) that {statement}, and not another site's class in other words."
        )


def list_further_limitations(run: RunFolderContent) -> list[str]:
    """Return sentences on less important limitations, in addition to :func:`list_prominent_limitations`."""
    summary = run.summary
    test = summary.test
    limits = list[str]()
    planned = (summary.experiment.get("run") or {}).get("rounds", 0)
    if summary.rounds < planned:
        later = "no later model was better on validation"
        limits.append(f"The run ended after {summary.rounds:,} of at most {planned:,} rounds, because {later}.")
    limits += summary.omissions
    for name in summary.classes:
        positives, negatives = test.get_class_image_counts(name) if name in test.per_class else (None, None)
        if positives is not None and negatives is not None and test.per_class[name].main_figure is not None:
            unit = "test patient" if test.figure_name == "Dice" else "test image"
            limits += warn_about_few_images(name, positives, negatives, unit)
    samples = {site: record.validation_samples for site, record in summary.sites.items()}
    few = [f"{site} ({n})" for site, n in samples.items() if n is not None and n < MIN_POSITIVES]
    if few and summary.best_round is not None and not summary.last_model_because:
        names = list_first_and_count_rest(few, MAX_NAMES)
        limits.append(f"Few validation images chose the tested model: {names}.")
    if summary.drawn_to_test is not None and test.note == GLOBAL_MODEL_NOTE:
        drawn_classes = {name for site in summary.drawn_to_test for name in summary.sites[site].classes}
        annotated = [name for name in summary.classes if summary.annotating_sites_by_class.get(name, ())]
        untested = [name for name in annotated if name not in drawn_classes]
        if untested:
            drawn = f"No site that annotates {_quote_names(untested)} was drawn to test the model"
            limits.append(f"{drawn}: no site’s figures are of it.")
    limits += [*_describe_single_site_classes(run), *_describe_missed_or_clipped_rounds(run)]
    unknown = "it does not show how far figures move with another seed"
    limits.append(f"This is one run, with seed {summary.seed}: {unknown}.")
    if compared := sum(each.benefit is not None for each in describe_site_benefits(run)):
        limits.append(
            "Whether a site is better off alone rests on a 95 % interval for each of "
            f"{format_count_with_noun(compared, 'site')} by "
            "itself: where both models are equally good, one site in 40 is called better off alone by chance. The "
            "intervals are over test images and say nothing of another training."
        )
    if test.note not in (GLOBAL_MODEL_NOTE, SUMMED_HISTOGRAMS_NOTE):
        most = ", and each count of test images is that of the site with most" if test.pooled is None else ""
        limits.append(f"The score is the {test.note}{most}.")
    return limits


def _describe_counting_statistics(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on sites whose statistics do not count, or whose claimed number of images was lowered."""
    statistics = summary.statistics
    for site, reason in statistics.uncounted.items():
        if site not in summary.excluded:
            yield f"What {site} states has no part in statistics, means or thresholds: {reason}."
    if statistics.uncounted and statistics.counted:
        names = join_first_and_count(list(statistics.counted), MAX_NAMES)
        all_sites = format_count_with_noun(len(summary.sites), "site")
        yield f"The statements of {len(statistics.counted):,} of {all_sites} count: {names}."
    for site, claim in statistics.lowered.items():
        yield f"{site} claims {claim.claimed:,} training images, far more than the others: {claim.counted:,} count."


def _describe_untested_classes(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on classes without an AUROC, by reason, and on sites that did not test the model."""
    by_reason: dict[str, list[str]] = {}
    for name in summary.classes:
        if reason := explain_untested_class(summary, name):
            by_reason.setdefault(reason, []).append(name)
    all_classes = format_count_with_noun(len(summary.classes), "class", "classes")
    for reason, names in by_reason.items():
        verb = _choose_verb_form(names, "was", "were")
        yield f"{len(names)} of {all_classes} {verb} not tested: {_quote_names(names)} ({reason})."
    sites = list_sites_asked_to_test(summary)
    silent = [site for site in sites if site not in summary.per_site]
    if silent and summary.test.note != GLOBAL_MODEL_NOTE:
        sites_to_test = format_count_with_noun(len(sites), "site" if summary.drawn_to_test is None else "drawn site")
        yield f"{len(sites) - len(silent)} of {sites_to_test} tested the model; {_quote_names(silent)} did not."


def _describe_sites_outside_run(run: RunFolderContent) -> Iterator[str]:
    """Yield sentences on admitted sites that were left out, or never answered the roll call."""
    summary = run.summary
    without = "" if summary.is_initial_model_tested else ": the model was trained without"
    for site, reason in summary.left_out.items():
        if reason == APPROVAL_ERROR_MESSAGE:
            end = without and f"{without} it"
            yield f"At {site} nobody approved the plan{_describe_earlier_rounds(run, site)}{end}."
            continue
        yield f"{site} was left out{_describe_earlier_rounds(run, site)}: {' '.join(reason.split()).rstrip('.')}."
    earlier = {site: _describe_earlier_rounds(run, site) for site in summary.absent}
    for site in [site for site, text in earlier.items() if text]:
        yield f"{site} did not answer when the run was resumed{earlier[site]}."
    if names := [site for site, text in earlier.items() if not text]:
        verb, them = _choose_verb_form(names, "is", "are"), _choose_verb_form(names, "it", "them")
        end = without and f"{without} {them}"
        yield f"{join_first_and_count(names, MAX_NAMES)} {verb} admitted and never answered the roll call{end}."


def _describe_earlier_rounds(run: RunFolderContent, site: str) -> str:
    """Return the end of a clause with the last round in which a site took part; empty if it took part in none."""
    rounds = [line.round for line in run.rounds if site in line.sites]
    return f", after it took part last in round {rounds[-1]:,} of {run.summary.rounds:,}" if rounds else ""


def _describe_lost_sites_and_classes(run: RunFolderContent) -> Iterator[str]:
    """Yield sentences on sites absent in the last round, and on classes that were not trained in the last rounds.

    Sites that were excluded as harmful are left out. Only rounds up to the round of the final model are considered. A
    class is named if a site that annotates it was absent after the last round in which such a site took part.
    """
    summary = run.summary
    absent = run.rounds[-1].absent.keys() if run.rounds else set[str]()
    for site in sorted(absent - summary.excluded.keys()):
        if rounds := [line.round for line in run.rounds if site in line.sites]:
            yield f"{site} took part last in round {rounds[-1]:,} of {summary.rounds:,}, and was absent at the end."
        else:
            without = "" if summary.is_initial_model_tested else ": the model was trained without it"
            yield f"{site} took part in no round{without}."
    if summary.is_initial_model_tested:
        return
    end = summary.best_round or (run.rounds[-1].round if run.rounds else 0)
    model_rounds = [line for line in run.rounds if line.round <= end]
    by_round: dict[int, list[str]] = {}
    for name in summary.classes:
        owners = set(summary.annotating_sites_by_class.get(name, ()))
        last = max([line.round for line in model_rounds if owners & set(line.sites)], default=0)
        if [line for line in model_rounds if line.round > last and owners & line.absent.keys()]:
            by_round.setdefault(last, []).append(name)
    for last, names in sorted(by_round.items()):
        if last:
            since = f"after round {last:,}; the model is that of round {end:,}"
            yield f"No site that annotates {_quote_names(names)} took part {since}."
        else:
            why = f"no site that annotates {_choose_verb_form(names, 'it', 'them')} took part"
            scores = _choose_verb_form(names, "its score is", "their scores are")
            verb = _choose_verb_form(names, "was", "were")
            yield f"{_quote_names(names)} {verb} never trained: {why}; {scores} no result."


def _describe_poorly_detected_classes(test: FinalTestSummary) -> Iterator[str]:
    """Yield sentences on classes that the model detects no better than by chance, or for which threshold 0.5 fails.

    Detection is no better than by chance if the AUROC's interval includes 0.5 or lies below it. If an AUROC is known
    only up to an error, this must hold for every shift of the interval by at most the error. The threshold fails if it
    finds no positive test image, or if the balanced accuracy is low although the AUROC is high.
    """
    images = "" if test.intervals else " of the test images of all sites that report the class"
    undetected = find_undetected_classes(test)
    for classes, detected, where in (
        (undetected.includes_chance, "not detected better", "includes"),
        (undetected.below_chance, "detected worse", "lies below"),
    ):
        if classes:
            verb = _choose_verb_form(classes, "is", "are")
            interval = f"the 95 % interval{images} {where} an AUROC of 0.5"
            yield f"{_quote_names(classes)} {verb} {detected} than by chance: {interval}."
    if names := find_classes_without_sensitivity(test):
        images = f"none of the positive test images of {_quote_names(names)}"
        remedy = describe_chosen_thresholds(names, test)
        yield f"At a threshold of 0.5 the model finds {images} (sensitivity 0).{remedy and f' {remedy}'}"
    names = []
    for name, result in test.per_class.items():
        auroc = result.metric_with_error("auroc")
        accuracy = result.metric_with_error("balanced_accuracy")
        if auroc and accuracy and auroc.low >= HIGH_AUROC and accuracy.high <= LOW_BALANCED_ACCURACY:
            names.append(name)
    if names:
        reason = f"balanced accuracy {LOW_BALANCED_ACCURACY} or less at an AUROC of {HIGH_AUROC} or more"
        remedy = describe_chosen_thresholds(names, test)
        yield f"A threshold of 0.5 does not fit {_quote_names(names)}: {reason}.{remedy and f' {remedy}'}"


def describe_chosen_thresholds(names: Iterable[str], test: FinalTestSummary) -> str:
    """Return a sentence with the thresholds for these classes that the run chose; empty if it chose none."""
    thresholds = {name: points[0].threshold for name in names if (points := test.operating_points.get(name))}
    if not thresholds:
        return ""
    listed = list_first_and_count_rest([f"{value:.4g} for “{name}”" for name, value in thresholds.items()], MAX_NAMES)
    chosen = "Thresholds chosen on validation images are on the run's page"
    return f"{chosen} under “{THRESHOLDS_HEADING}”: {listed}."


def find_classes_without_sensitivity(test: FinalTestSummary) -> list[str]:
    """Return the classes of which the model finds no positive test image at a threshold of 0.5."""
    pooled = test.pooled.per_class.items() if test.pooled else ()
    decisions = test.quality.decisions if test.quality else {name: each.decisions for name, each in pooled}
    return [name for name, each in decisions.items() if each.false_negatives and not each.true_positives]


@dataclass(frozen=True)
class UndetectedClasses:
    """Classes that a model detects no better than by chance, by the 95 % interval of their AUROC.

    Attributes:
        includes_chance: Classes whose interval includes 0.5.
        below_chance: Classes whose interval lies below 0.5.
    """

    includes_chance: tuple[str, ...]
    below_chance: tuple[str, ...]


def find_undetected_classes(test: FinalTestSummary) -> UndetectedClasses:
    """Return the classes that a model detects no better than by chance; a class without an interval is left out."""
    if test.figure_name != "AUROC":  # there is no value of Dice that chance gives
        return UndetectedClasses((), ())
    if test.intervals:
        bounds = {name: (*ends, 0.0) for name, ends in test.intervals.per_class.items()}
    else:
        bounds = {
            name: (*each.interval, each.auroc.error)
            for name, each in (test.pooled.per_class if test.pooled else {}).items()
            if each.interval is not None and each.auroc is not None and each.auroc.error <= MAX_METRIC_ERROR
        }
    includes = [name for name, (low, high, error) in bounds.items() if low + error <= CHANCE_AUROC <= high - error]
    below = [name for name, (_, high, error) in bounds.items() if high + error < CHANCE_AUROC]
    return UndetectedClasses(tuple(includes), tuple(below))


def gives_all_images_one_score(run: RunFolderContent) -> bool:
    """Return True if, by the metrics, the model gives all test images of a class the same score, for every class.

    Then the AUROC is exactly 0.5, and the average precision is the share of positive images.
    """
    test = run.summary.test
    if test.note == GLOBAL_MODEL_NOTE:
        tested = list(test.per_class.values())
    else:  # a mean over sites may be 0.5 by accident
        tested = [metrics for site in run.summary.per_site.values() for metrics in site.per_class.values()]
    defined = [metrics for metrics in tested if metrics.auroc is not None]
    return bool(defined) and all(map(_has_figures_of_one_score, defined))


def _has_figures_of_one_score(metrics: ClassMetrics) -> bool:
    """Return True if a class's metrics are those of equal scores for all images."""
    if metrics.errors or metrics.auroc != CHANCE_AUROC or metrics.balanced_accuracy != CHANCE_AUROC:
        return False
    if metrics.average_precision is None or metrics.positives is None or not metrics.images:
        return False
    return math.isclose(metrics.average_precision, metrics.positives / metrics.images, abs_tol=1e-6)


def is_last_round_best(summary: RunSummary) -> bool:
    """Return True if validation chose the last of several rounds, so that more rounds may give a better model."""
    by_validation = (summary.experiment.get("evaluation") or {}).get("checkpoint", "best") == "best"
    # If all labels are equal, the loss decreases in every round although no round ranks images better than another.
    is_ranked = summary.test.main_mean is not None or bool(summary.test.withheld)
    return by_validation and is_ranked and not summary.last_model_because and 1 < summary.rounds == summary.best_round


def _describe_single_site_classes(run: RunFolderContent) -> Iterator[str]:
    """Yield sentences on classes that only one site annotates: the model learns this site's way of reading images."""
    summary = run.summary
    if summary.is_initial_model_tested or len(summary.sites) < 2:
        return
    hidden = find_hidden_count_classes(summary)
    active = _list_active_sites(run)
    annotating_sites = summary.annotating_sites_by_class
    for site in summary.sites:
        if site not in active:
            continue
        names = [name for name in summary.classes if annotating_sites.get(name, ()) == (site,) and name not in hidden]
        if names:
            reading = f"the model has learned that site's way of reading {_choose_verb_form(names, 'it', 'them')}"
            alone = f"{_choose_verb_form(names, 'is', 'are')} annotated by {site} alone"
            yield f"{join_as_english_list([f'“{name}”' for name in names])} {alone}: {reading}."


def find_hidden_count_classes(summary: RunSummary) -> list[str]:
    """Return the classes for which every annotating site hides its number of positive training images.

    It is not known whether any site trained such a class. Under secure aggregation or differential privacy, the result
    is empty.
    """
    privacy = summary.experiment.get("privacy") or {}
    if privacy.get("secure_aggregation") or privacy.get("level", "none") != "none":
        return []
    positives = {
        name: [summary.sites[site].positives.get(name, 0) for site in summary.annotating_sites_by_class.get(name, ())]
        for name in summary.classes
    }
    return [name for name, counts in positives.items() if counts and all(count is None for count in counts)]


def _describe_missed_or_clipped_rounds(run: RunFolderContent) -> Iterator[str]:
    """Yield sentences on sites that missed rounds, and on sites whose updates were clipped as too long."""
    missed: dict[str, list[int]] = {}
    clipped: dict[str, list[tuple[int, str]]] = {}
    for line in run.rounds:
        for site in line.absent:
            missed.setdefault(site, []).append(line.round)
        for site, done in line.shortened.items():
            clipped.setdefault(site, []).append((line.round, done))
    all_rounds = format_count_with_noun(run.summary.rounds, "round")
    for site in sorted(missed.keys() - run.summary.excluded.keys()):
        yield f"{site} was absent in {len(missed[site])} of {all_rounds} ({format_rounds(missed[site])})."
    for site, updates in sorted(clipped.items()):
        last, done = updates[-1]
        yield f"The update of {site} was too long in {len(updates)} of {all_rounds}; in round {last:,} {done}."


def _quote_names(names: Iterable[str]) -> str:
    return list_first_and_count_rest([f"“{name}”" for name in names], MAX_NAMES)


def _choose_verb_form(names: Collection[str], singular: str, plural: str) -> str:
    return singular if len(names) == 1 else plural


# ---------------------------------------------------------------------- sites that compared with training alone


@dataclass(frozen=True)
class SiteBenefitSentence:
    """A sentence that compares the run's model with the model that a site trained alone.

    Attributes:
        site: Name of the site.
        sentence: The sentence.
        benefit: The comparison; None if it was not made or is not disclosed.
    """

    site: str
    sentence: str
    benefit: FederationBenefit | None


def describe_site_benefits(run: RunFolderContent) -> list[SiteBenefitSentence]:
    """Return a sentence for each site, sorted by name, that compares the run's model with training alone.

    The result is empty if the run did not request the comparison.
    """
    benefits = []
    for site, answer in sorted(run.summary.benefit.items()):
        if answer.benefit is not None:
            sentence = format_benefit_sentence(site, answer.benefit, run.summary.sites[site].classes)
        else:
            reason = f"says nothing ({WITHHELD_REASON})"
            if answer.reason:
                reason = f"was not compared with training alone ({answer.reason})"
            sentence = f"Whether {site} is better off alone is not known: it {reason}."
        benefits.append(SiteBenefitSentence(site, sentence, answer.benefit))
    return benefits
