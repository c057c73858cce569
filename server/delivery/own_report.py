"""A hospital's own report of a run: the federated model against its own model, when it took part, and what left it.

The page has figures of this hospital alone.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.metrics.benefit import COMPARED_SITE_MODELS, MODEL_LABELS, FederationBenefit
from polyclinic.common.system.plain_text import format_rounds_in_words
from polyclinic.server.reporting import run_claims
from polyclinic.server.reporting.page import write_template_page
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.receipt import RunReceipt

TEMPLATE = "own_report.html.j2"
MOST_ABSENCES = 20
"""Most reasons why a site was missing that the page lists."""
NO_COMPARISON = (
    "The run did not compare the federated model with one that this hospital trains alone: "
    "evaluation.compare_local was off."
)
REPLY_WORDS: Mapping[str, str] = {
    "RollCallAnswer": "answer to the roll call: name, classes, numbers of images and patients",
    "TrainReply": "update of the model, with training figures",
    "EvaluateReply": "figures of the model on this hospital's images",
    "BenefitReply": "comparison of the federated model with this hospital's own",
}
"""Record class that hospitals sign -> its content in words."""
EVALUATE_NOTE = (
    "Figures by class did not leave this hospital, or there are none. flwr-client evaluate scores the model on this "
    "hospital's own images, and nothing leaves."
)
COMPARED_AT_HOME = (
    "Each hospital also keeps its comparison, with all its classes, in state/alone/does-it-help.txt of its folder."
)


@dataclass(frozen=True)
class SentRecords:
    """The signed replies of one kind that came from a hospital.

    Attributes:
        record: Name of the record class, as in the hospital's own audit log.
        what: The same in words.
        count: Number of them; ``accepted`` of them counted.
    """

    record: str
    what: str
    count: int
    accepted: int


@dataclass(frozen=True)
class ClassRow:
    """A class with the AUROC of each model on the hospital's own test images; None where there is none."""

    name: str
    aurocs: tuple[float | None, ...]
    positives: int | None


def list_sent_records(receipt: RunReceipt, site: str) -> list[SentRecords]:
    """Count the signed replies of a hospital in a receipt, by kind of record; unsigned replies are not in it."""
    replies = [reply for reply in receipt.replies if reply.site == site]
    counts = Counter(reply.record for reply in replies)
    accepted = Counter(reply.record for reply in replies if reply.counts)
    return [SentRecords(name, REPLY_WORDS.get(name, ""), counts[name], accepted[name]) for name in counts]


def make_class_rows(run: RunFolderContent, site: str, benefit: FederationBenefit | None) -> list[ClassRow]:
    """Return the report's rows: one for each class with an AUROC on the hospital's own test images.

    Args:
        benefit: The comparison with models trained alone. Without it, rows have the federated model's AUROC only.
    """
    result = run.summary.per_site.get(site)
    tested = result.per_class if result else {}
    positives = {name: metrics.positives for name, metrics in tested.items()}
    if benefit is not None:
        names = benefit.compared_classes
        return [
            ClassRow(n, tuple(benefit.auroc[model][n] for model in COMPARED_SITE_MODELS), positives.get(n))
            for n in names
        ]
    rows = (ClassRow(name, (metrics.auroc,), metrics.positives) for name, metrics in tested.items())
    return [row for row in rows if row.aurocs != (None,)]


def write_own_report(
    destination: Path, run: RunFolderContent, receipt: RunReceipt, site: str, coordinator: str, time: str
) -> Path:
    """Write a hospital's own report of a run.

    Args:
        coordinator: Name of the coordinator.
        time: UTC time of the package (ISO 8601).
    """
    summary = run.summary
    choices = {choice.site: choice for choice in run_claims.describe_site_benefits(run)}
    choice = choices.get(site)
    benefit = choice.benefit if choice else None
    rounds = [line.round for line in receipt.rounds if site in line.sites]
    used = [number for number in rounds if number <= receipt.result_round]
    absences = [absence for absence in receipt.absences if absence.site == site]
    own = summary.sites.get(site)
    return write_template_page(
        TEMPLATE,
        destination,
        private=True,
        site=site,
        title=summary.name or receipt.run,
        purpose=summary.purpose,
        receipt=receipt,
        summary=summary,
        coordinator=coordinator,
        time=time[:16].replace("T", " "),
        comparison=choice.sentence if choice else NO_COMPARISON,
        benefit=benefit,
        models=[MODEL_LABELS[model] for model in COMPARED_SITE_MODELS] if benefit else [MODEL_LABELS["federated"]],
        rows=make_class_rows(run, site, benefit),
        mean=summary.per_site[site].mean_auroc if site in summary.per_site else None,
        at_home=f"{EVALUATE_NOTE} {COMPARED_AT_HOME}" if choice else EVALUATE_NOTE,
        trained=f"in {format_rounds_in_words(rounds)} of {len(receipt.rounds)}" if rounds else "in no round",
        used=format_rounds_in_words(used) if used else "no round",
        absences=absences[:MOST_ABSENCES],
        more_absences=len(absences) - MOST_ABSENCES,
        sent=list_sent_records(receipt, site),
        own=own,
        own_classes=", ".join(own.classes) if own else "",
        classes=", ".join(summary.classes),
        unlearned=summary.unlearned,
        maybe_unlearned=summary.maybe_unlearned,
    )
