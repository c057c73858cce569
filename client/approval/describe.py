"""Description of a stored plan in plain words, for the person who approves or denies it.

It names the coordinator, the training and the data that leaves, which follow from the plan and this site's policy. The
words come from the data dictionary (:mod:`polyclinic.client.preview.data_dictionary`). A test compares the list with
the records of a preview.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from polyclinic.client.gate.incoming_request import PlanRefused, read_plan
from polyclinic.client.gate.policy_rules import RequestedWork
from polyclinic.client.preview.data_dictionary import COMMON_FIELD_MEANINGS, FIELD_MEANINGS, STATISTIC_MEANINGS
from polyclinic.client.site.authority_record import read_authority_record
from polyclinic.client.site.plans import COUNT_KIND, EVALUATION_KIND, TRAINING_KIND, PlanStore, StoredText
from polyclinic.client.site.policy import LEVEL_SENTENCES, SitePolicy
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.config import HospitalPlan
from polyclinic.common.counts import TABLE_MENU, parse_count_question
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.evaluation.question import SentModel, parse_evaluation_question
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.security.plan_decisions import DecisionFault, parse_decision
from polyclinic.common.system.plain_text import format_count_with_noun, make_printable_line
from polyclinic.strategies.registry import get_cached_site_method

TECHNICAL_FIELDS = frozenset(
    {"layout", "version", "holds_frozen", "seconds", "epochs", "arithmetic", "model_sha256", "level"}
)
"""Fields of sent records that describe the program and the machine, not the data."""
_VALIDATING = ("TrainReply", "EvaluateReply")
TEST_SCORES_MEANING = (
    "How the model's scores are spread on the test images: for each class, counts of images by score (1,024 steps), "
    "of those that show it and of those that do not"
)
VALIDATION_SCORES_MEANING = "The same on the validation images, to choose thresholds"
FIELD_DESCRIPTIONS: Mapping[tuple[str, str], str] = {
    ("RollCallAnswer", "names"): "The classes that this hospital annotates, in its own words",
    ("RollCallAnswer", "class_names"): "The same classes in the words of the study",
    ("RollCallAnswer", "train_samples"): "The number of training images",
    ("RollCallAnswer", "validation_samples"): "The number of validation images",
    ("RollCallAnswer", "patients"): "The number of patients of the training images",
    ("RollCallAnswer", "smallest_count"): "Below how many patients this hospital hides a class",
    ("RollCallAnswer", "pixels"): "How this hospital's images become pixels: colour or grey, size, window",
    ("RollCallAnswer", "positives"): "How many training images show each class",
    ("RollCallAnswer", "negatives"): "How many training images do not show each class",
    ("RollCallAnswer", "shown"): "Whether any training image shows each class",
    ("RollCallAnswer", "fingerprint"): (
        "Voxel sizes and lengths of the training volumes as means over groups of patients, and how many outlined "
        "voxels have each grey value"
    ),
    ("TrainReply", "train_samples"): "The number of training images",
    ("TrainReply", "train_loss"): "The model's mean error (loss) on the training images",
    ("TrainReply", "update"): "The change of the network's numbers by training here",
    ("EvaluateReply", "class_names"): "The classes that were tested",
    ("EvaluateReply", "positives"): "How many test images show each class",
    ("EvaluateReply", "negatives"): "How many test images do not show each class",
    ("EvaluateReply", "masked_classes"): f"{TEST_SCORES_MEANING}; only in a sum over several hospitals",
    **{
        ("EvaluateReply", name): TEST_SCORES_MEANING
        for name in ("histogram_classes", "positive_scores", "negative_scores")
    },
    **{
        ("EvaluateReply", f"validation_{name}"): VALIDATION_SCORES_MEANING
        for name in ("classes", "positive_scores", "negative_scores")
    },
}
"""(record class, field) -> description without technical terms; it replaces the data dictionary's text."""
_OVERLAP_METRICS = "Dice and 95 % Hausdorff distance"
_OVERLAP_COUNTS_MEANING = f"For each class, counts of test patients by {_OVERLAP_METRICS} (1,024 steps)"
_OUTLINED_MEANING = "In how many test patients each class is outlined"
SEGMENTATION_FIELD_DESCRIPTIONS: Mapping[tuple[str, str], str] = {
    **{(record, "validation_auroc"): "The model's mean Dice on the validation images" for record in _VALIDATING},
    ("EvaluateReply", "positives"): _OUTLINED_MEANING,
    ("EvaluateReply", "negatives"): _OUTLINED_MEANING,
    ("EvaluateReply", "metric_names"): f"{_OVERLAP_METRICS} of each class, as means over the test patients",
    ("EvaluateReply", "metric_values"): f"{_OVERLAP_METRICS} of each class, as means over the test patients",
    ("EvaluateReply", "masked_classes"): f"{_OVERLAP_COUNTS_MEANING}; only in a sum over several hospitals",
    **{
        ("EvaluateReply", name): _OVERLAP_COUNTS_MEANING
        for name in ("histogram_classes", "positive_scores", "negative_scores")
    },
}
"""(record class, field) -> description for a segmentation model, whose metrics travel in the same fields."""
MASKED_RECORDS = ("KeysAnswer", "SharesAnswer", "MaskedAnswer", "RevealAnswer")


@dataclass(frozen=True)
class PlanSection:
    """A section of a plan's description: a heading, and lines that are sentences or entries of a list."""

    heading: str
    lines: tuple[str, ...]


def describe_text(stored: StoredText, settings: SiteSettings) -> list[PlanSection]:
    """Return the sections that describe a stored text.

    If this release does not know the text's kind, or cannot read the text, the sections show the text itself.
    """
    describe = DESCRIBE_BY_KIND.get(stored.facts.kind)
    sections = [PlanSection("Kind", (f"a request of the kind {stored.facts.kind}",)), _show_text(stored)]
    if describe is not None:
        try:
            sections = describe(stored, settings)
        except (PlanRefused, BadInput) as error:
            problem = f"This release cannot read it: {make_printable_line(str(error))}"
            sections = [PlanSection("Problem", (problem,)), _show_text(stored)]
    decisions = tuple(_describe_decisions(stored, settings))
    return [*sections, PlanSection("Decided so far; the last one counts", decisions)] if decisions else sections


def _describe_decisions(stored: StoredText, settings: SiteSettings) -> Iterator[str]:
    """Yield a line for each stored decision about a text, oldest first; an unreadable file gives its error."""
    for path in PlanStore(settings.state_folder).list_decisions(stored.sha256):
        try:
            decision, _ = parse_decision(path.read_bytes())
        except (OSError, DecisionFault) as error:
            yield f"{path.name}: {error}"
            continue
        if decision.is_approval:
            verdict = f"approved by {decision.approver} until {decision.until[:10]} (UTC)"
            explanation = f"; purpose: {decision.purpose}" if decision.purpose else ""
        else:
            verdict = f"denied by {decision.approver}"
            explanation = f"; reason: {decision.reason}"
        yield make_printable_line(f"{decision.time[:10]}: {verdict}{explanation}", 1200)


def _show_text(stored: StoredText) -> PlanSection:
    return PlanSection("The text as the coordinator sent it", (make_printable_line(stored.text, 20_000),))


# ---------------------------------------------------------------------- a run's plan


def describe_training_plan(stored: StoredText, settings: SiteSettings) -> list[PlanSection]:
    """Return the description of a run's plan.

    Raises:
        PlanRefused: If the text is no plan.
        BadInput: If its method is not known here.
    """
    plan = read_plan(stored.text, None)
    method = get_cached_site_method(settings.file.name, stored.text)
    work = RequestedWork(plan, method, plan.run.rounds)
    policy = settings.file.policy
    study = [f"Title: {make_printable_line(plan.run.name) or 'none given'}"]
    study.append(f"Purpose: {make_printable_line(plan.run.purpose) or 'none given: ask the coordinator'}")
    leaving = [PlanSection(heading, tuple(lines)) for heading, lines in _describe_leaving(work, policy) if lines]
    return [
        PlanSection("The study", tuple(study)),
        PlanSection("Who asks, and receives what leaves", tuple(describe_coordinator(stored, settings))),
        PlanSection("What is trained on what", tuple(_describe_training(work, stored))),
        PlanSection("How what leaves is protected", tuple(_describe_protection(plan, policy))),
        *leaving,
    ]


def describe_coordinator(stored: StoredText, settings: SiteSettings) -> Iterator[str]:
    """Yield lines with the name, key fingerprint and phrase of the coordinator who sent a stored text."""
    facts = stored.facts
    record = read_authority_record(settings.state_folder)
    yield f"Coordinator: {facts.coordinator or 'unknown'}"
    if facts.authority:
        yield f"Fingerprint of its key: SHA256 {facts.authority}"
    if record is not None and record.key_hash == facts.authority:
        confirmed = f"confirmed by telephone on {record.confirmed[:10]}" if record.confirmed else "not confirmed yet"
        yield f"Phrase of its key: {record.phrase} ({confirmed})"
    elif record is not None:
        yield "This is not the coordinator that this site connects to now."


def _describe_training(work: RequestedWork, stored: StoredText) -> Iterator[str]:
    plan = work.plan
    facts = stored.facts
    images = format_count_with_noun(facts.train, "training image")
    patients = format_count_with_noun(facts.patients, "patient")
    other_parts = f"{facts.validation:,} for validation, {facts.test:,} for the test"
    yield f"Images of this hospital: {images} of {patients}, {other_parts}"
    names = [f"{own} (in the study: {name})" if own != name else own for own, name in facts.classes.items()]
    yield f"Classes, in this hospital's words: {', '.join(names)}"
    rounds = format_count_with_noun(plan.run.rounds, "round")
    epochs = format_count_with_noun(work.epochs_per_round, "pass", "passes")
    yield f"Training: at most {rounds} of {epochs} over the training images each"
    size = plan.model.describe_input("x")
    start = "from a given model" if plan.weights_sha256 else "from random numbers"
    yield (
        f"Model: the network {make_printable_line(plan.model.architecture)} on {size}, trained {start} "
        f"by the method {make_printable_line(plan.run.method)}"
    )
    if plan.planning is not None:
        yield (
            "Nothing is trained by this plan: the coordinator asks for sums over the volumes, chooses the size of the "
            "network, and sends a second plan with it"
        )
    if plan.plugins:
        yield f"Code of plug-ins: {', '.join(make_printable_line(str(plugin)) for plugin in plan.plugins)}"


def _describe_protection(plan: HospitalPlan, policy: SitePolicy) -> Iterator[str]:
    yield f'Level of this hospital\'s policy: "{policy.level}". {LEVEL_SENTENCES[policy.level]}'
    if policy.smallest_count:
        few = f"fewer than {policy.smallest_count} patients here"
        yield f"No count and no figure leaves of a class that {few} show, or do not show."
    if plan.privacy.secure_aggregation:
        yield "The coordinator receives sums over several hospitals (secure aggregation), not one hospital's change."
    else:
        yield "The coordinator receives what training here changed in the network, by itself."
    if plan.privacy.level == "none":
        yield "No noise is added to what leaves."
    else:
        unit = "single images" if plan.privacy.level == "sample" else "this hospital's whole update"
        yield f"Noise is added that hides {unit} (differential privacy, level {plan.privacy.level})."
    if not plan.privacy.secure_aggregation and plan.privacy.level == "none":
        yield "Somebody who has that change can compute images of this hospital from it (docs/privacy.md)."


# ---------------------------------------------------------------------- what leaves


def _describe_leaving(work: RequestedWork, policy: SitePolicy) -> Iterator[tuple[str, list[str]]]:
    """Yield a heading for each moment at which a record leaves, with one line for each kind of figure in it."""
    fields = list_leaving_fields(work, policy)
    words = {**FIELD_DESCRIPTIONS, **(SEGMENTATION_FIELD_DESCRIPTIONS if is_segmentation(work.plan.model.task) else {})}
    technical = dict[str, None]()
    for record, heading in _HEADINGS.items():
        lines = []
        for field in fields.get(record, ()):
            meaning = words.get((record, field)) or _format_meaning(FIELD_MEANINGS[record][field])
            if field in TECHNICAL_FIELDS:
                technical[meaning] = None
            elif field == "statistics":
                lines += [_format_meaning(STATISTIC_MEANINGS[name]) for name in work.method.payload.names]
            else:
                lines.append(meaning)
        yield heading, list(dict.fromkeys(lines))
    yield "Leaves too, about the program and the machine", list(technical)
    yield "Leaves too, in words", ["That and why this site declines a request, or that an error stopped its work"]


_HEADINGS = {
    "RollCallAnswer": "Leaves before round 1, once",
    "TrainReply": "Leaves in each round",
    "KeysAnswer": "Leaves in each round: to agree on masks",
    "SharesAnswer": "Leaves in each round: for the other hospitals, encrypted",
    "MaskedAnswer": "Leaves in each round, masked",
    "RevealAnswer": "Leaves in each round: to take the masks off the sum",
    "EvaluateReply": "Leaves when a model is evaluated, and in the final test",
    "BenefitReply": "Leaves at the end: comparison with training here alone",
}


def _format_meaning(meaning: str) -> str:
    """Return a text of the data dictionary without keys in brackets and without backticks, with a capital first."""
    text = re.sub(r" \(`\w+`\)", "", meaning).replace("`", "")
    return text[0].upper() + text[1:]


def list_leaving_fields(work: RequestedWork, policy: SitePolicy) -> dict[str, tuple[str, ...]]:
    """Return the fields of each sent record that are not empty, by record class, under a plan and a site's policy."""
    plan = work.plan
    method = work.method
    masked = plan.privacy.secure_aggregation
    private = plan.privacy.level != "none"
    figures_leave = not policy.withholds_unnoised_figures(plan.privacy.level)
    training_figures_leave = policy.training_figures and figures_leave
    test_metrics_leave = policy.test_metrics and figures_leave and not masked
    round_tests_leave = policy.test_metrics and figures_leave and plan.evaluation.test_each_round
    histograms_leave = policy.score_histograms and plan.evaluation.pooled
    absent = set[tuple[str, str]]()

    def leave_out(is_absent: bool, record: str, *names: str) -> None:
        absent.update((record, name) for name in names if is_absent)

    counts = method.payload.label_counts and policy.label_counts
    leave_out(not counts, "RollCallAnswer", "positives", "negatives")
    sums = policy.label_counts and figures_leave
    leave_out(not sums, "RollCallAnswer", "shown")
    leave_out(not (sums and plan.planning is not None), "RollCallAnswer", "fingerprint")
    leave_out(not training_figures_leave, "TrainReply", "train_loss", "validation_loss", "validation_auroc")
    leave_out(not round_tests_leave, "TrainReply", "test_images", "test_correct")
    leave_out(not work.required_update_groups or masked, "TrainReply", "update")
    leave_out(not method.payload.names, "TrainReply", "statistics")
    leave_out(not private, "TrainReply", "epsilon")
    leave_out(not training_figures_leave, "EvaluateReply", "validation_loss", "validation_auroc")
    leave_out(not round_tests_leave, "EvaluateReply", "test_images", "test_correct")
    metrics, outlines = ("auroc", "average_precision", "balanced_accuracy"), is_segmentation(plan.model.task)
    leave_out(not test_metrics_leave, "EvaluateReply", "class_names", "positives", "negatives")
    leave_out(not test_metrics_leave or outlines, "EvaluateReply", *metrics)
    leave_out(not (test_metrics_leave and plan.test_metrics), "EvaluateReply", "metric_names", "metric_values")
    scores = ("histogram_classes", "positive_scores", "negative_scores")
    leave_out(not (histograms_leave and test_metrics_leave), "EvaluateReply", *scores)
    choices = ("validation_classes", "validation_positive_scores", "validation_negative_scores")
    leave_out(not (histograms_leave and training_figures_leave) or masked or outlines, "EvaluateReply", *choices)
    leave_out(not (histograms_leave and masked), "EvaluateReply", "masked_classes")
    records = dict(_HEADINGS)
    if not (plan.evaluation.compare_local and test_metrics_leave):
        del records["BenefitReply"]
    if not masked:
        for record in MASKED_RECORDS:
            del records[record]
    leaving = dict[str, tuple[str, ...]]()
    for record in records:
        fields = [field for field in FIELD_MEANINGS[record] if field not in COMMON_FIELD_MEANINGS]
        leaving[record] = tuple(field for field in fields if (record, field) not in absent)
    return leaving


# ---------------------------------------------------------------------- questions

NO_TRAINING_SECTION = PlanSection(
    "Nothing is trained", ("No picture, no label of a patient and no identifier leaves.",)
)


def _describe_who_asks(title: str, stored: StoredText, settings: SiteSettings) -> list[PlanSection]:
    return [
        PlanSection("The question", (f"Title: {make_printable_line(title) or 'none given'}",)),
        PlanSection("Who asks, and receives what leaves", tuple(describe_coordinator(stored, settings))),
    ]


# ---------------------------------------------------------------------- a question for counts


def describe_count_question(stored: StoredText, settings: SiteSettings) -> list[PlanSection]:
    """Return the description of a question for counts.

    Raises:
        BadInput: If the text is no question.
    """
    try:
        question = parse_count_question(stored.text)
    except ValueError as error:
        raise BadInput([Fault("question", str(error))]) from None
    policy = settings.file.policy
    counted_tables = [TABLE_MENU[table] for table in question.asked_tables if table in policy.counts]
    refused_tables = [TABLE_MENU[table] for table in question.asked_tables if table not in policy.counts]
    classes = ", ".join(map(make_printable_line, question.classes)) or "all that this hospital annotates"
    protection = [f'Level of this hospital\'s policy: "{policy.level}". {LEVEL_SENTENCES[policy.level]}']
    if policy.epsilon is not None:
        protection.append(f"Noise is added to each number; it costs each patient {policy.counts_epsilon:g} of epsilon")
        protection[-1] += ", once for all questions."
    elif policy.masked_only:
        protection.append(f"The numbers leave only in a sum over at least {policy.smallest_cohort} hospitals.")
    if policy.epsilon is None and policy.smallest_count:
        protection.append(f"A number of fewer than {policy.smallest_count} patients is hidden, and what reveals it.")
    return [
        *_describe_who_asks(question.title, stored, settings),
        PlanSection("What is counted: images and patients", (*counted_tables, f"Classes: {classes}")),
        *(
            [PlanSection("What is not counted, by this hospital's policy", tuple(refused_tables))]
            if refused_tables
            else []
        ),
        PlanSection("How what leaves is protected", tuple(protection)),
        NO_TRAINING_SECTION,
    ]


# ---------------------------------------------------------------------- a question for figures of models


def describe_evaluation_question(stored: StoredText, settings: SiteSettings) -> list[PlanSection]:
    """Return the description of a question for figures of models.

    Raises:
        BadInput: If the text is no question.
    """
    try:
        question = parse_evaluation_question(stored.text)
    except ValueError as error:
        raise BadInput([Fault("question", str(error))]) from None
    policy = settings.file.policy
    leaves = [
        f"The number of test images ({stored.facts.test} when the question came) and of their patients.",
        "For each model and class: how many test images and patients show it and do not show it; AUROC, average "
        "precision, Brier score and calibration error, with 95 % intervals.",
        "For each two models: the difference of their AUROCs, with its standard error.",
    ]
    if policy.score_histograms:
        leaves.append(f"{TEST_SCORES_MEANING}. The sums of the scores in each tenth.")
        leaves.append("How many decisions are right and wrong at fixed thresholds.")
    if subgroup_columns := [column for column in question.groups if f"class_by_{column}" in policy.counts]:
        leaves.append(f"The same by {' and by '.join(subgroup_columns)}, unless a group is of few patients.")
    protection = [f'Level of this hospital\'s policy: "{policy.level}". {LEVEL_SENTENCES[policy.level]}']
    if policy.smallest_count:
        few = f"fewer than {policy.smallest_count} patients of the test part show, or do not show"
        protection.append(f"No figure leaves of a class that {few}.")
    models = tuple(map(_describe_sent_model, question.models))
    return [
        *_describe_who_asks(question.title, stored, settings),
        PlanSection("Models that are scored on the test images here", models),
        PlanSection("What leaves", tuple(leaves)),
        PlanSection("How what leaves is protected", tuple(protection)),
        NO_TRAINING_SECTION,
    ]


def _describe_sent_model(model: SentModel) -> str:
    kind = "a model of a federated run" if model.is_run else f"a model in {model.files[0].name}"
    if model.described is not None:
        names = [name for name in model.described.classes if name]
        kind = f"a model of others that scores {', '.join(map(make_printable_line, names))}"
    return f"{model.name}: {kind}. SHA-256 {model.sha256}"


DescribeText = Callable[[StoredText, SiteSettings], list[PlanSection]]
DESCRIBE_BY_KIND: Mapping[str, DescribeText] = {
    TRAINING_KIND: describe_training_plan,
    COUNT_KIND: describe_count_question,
    EVALUATION_KIND: describe_evaluation_question,
}
"""Kind of a stored text -> function that describes it."""
