"""The report of a run for one hospital: benefit over local training, rounds in which it trained, records that it sent.

The page shows no figures of other hospitals.
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

OWN_REPORT_TEMPLATE = "own_report.html.j2"
MAX_LISTED_ABSENCES = 20
"""Greatest number of absences of the hospital, with reasons, that the page lists."""
NO_COMPARISON_NOTE = (
    "The run did not compare the federated model with one that this hospital trains alone: "
    "evaluation.compare_local was off."
)
REPLY_DESCRIPTIONS: Mapping[str, str] = {
    "RollCallAnswer": "answer to the roll call: name, classes, numbers of images and patients",
    "TrainReply": "update of the model, with training figures",
    "EvaluateReply": "figures of the model on this hospital's images",
    "BenefitReply": "comparison of the federated model with this hospital's own",
}
"""Class of a signed record -> description of its content."""
EVALUATE_NOTE = (
    "Figures by class did not leave this hospital, or there are none. flwr-client evaluate scores the model on this "
    "hospital's own images, and nothing leaves."
)
LOCAL_COMPARISON_NOTE = (
    "Each hospital also keeps its comparison, with all its classes, in state/alone/does-it-help.txt of its folder."
)


@dataclass(frozen=True)
class SentRecords:
    """The signed replies of one record class from a hospital.

    Attributes:
        record: Name of the record class, as in the hospital's own audit log.
        description: Content of the records in words.
        count: Number of replies.
        accepted: Number of replies that the run used.
    """

    record: str
    description: str
    count: int
    accepted: int


@dataclass(frozen=True)
class ClassRow:
    """One class's results on the hospital's own test images.

    Attributes:
        aurocs: AUROC of each compared model; None where it is not defined.
        positives: Number of positive images; None if unknown.
    """

    name: str
    aurocs: tuple[float | None, ...]
    positives: int | None


def list_sent_records(receipt: RunReceipt, site: str) -> list[SentRecords]:
    """Count a hospital's signed replies in a receipt by record class. A receipt has no unsigned replies."""
    replies = [reply for reply in receipt.replies if reply.site == site]
    counts = Counter(reply.record for reply in replies)
    accepted = Counter(reply.record for reply in replies if reply.counts)
    return [SentRecords(name, REPLY_DESCRIPTIONS.get(name, ""), counts[name], accepted[name]) for name in counts]


def make_class_rows(run: RunFolderContent, site: str, benefit: FederationBenefit | None) -> list[ClassRow]:
    """Return one row for each class with an AUROC on the hospital's own test images.

    Args:
        benefit: Comparison of the federated model with local training. If None, a row has only the federated model's
            AUROC.
    """
    result = run.summary.per_site.get(site)
    tested = result.per_class if result else {}
    positives = {name: metrics.positives for name, metrics in tested.items()}
    if benefit is not None:
        names = benefit.compared_classes
        return [
            ClassRow(name, tuple(benefit.auroc[model][name] for model in COMPARED_SITE_MODELS), positives.get(name))
            for name in names
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
    site_benefits = {each.site: each for each in run_claims.describe_site_benefits(run)}
    site_benefit = site_benefits.get(site)
    benefit = site_benefit.benefit if site_benefit else None
    rounds = [line.round for line in receipt.rounds if site in line.sites]
    used = [number for number in rounds if number <= receipt.result_round]
    absences = [absence for absence in receipt.absences if absence.site == site]
    own = summary.sites.get(site)
    return write_template_page(
        OWN_REPORT_TEMPLATE,
        destination,
        private=True,
        site=site,
        title=summary.name or receipt.run,
        purpose=summary.purpose,
        receipt=receipt,
        summary=summary,
        coordinator=coordinator,
        time=time[:16].replace("T", " "),
        comparison=site_benefit.sentence if site_benefit else NO_COMPARISON_NOTE,
        benefit=benefit,
        models=[MODEL_LABELS[model] for model in COMPARED_SITE_MODELS] if benefit else [MODEL_LABELS["federated"]],
        rows=make_class_rows(run, site, benefit),
        mean=summary.per_site[site].mean_auroc if site in summary.per_site else None,
        at_home=f"{EVALUATE_NOTE} {LOCAL_COMPARISON_NOTE}" if site_benefit else EVALUATE_NOTE,
        trained=f"in {format_rounds_in_words(rounds)} of {len(receipt.rounds)}" if rounds else "in no round",
        used=format_rounds_in_words(used) if used else "no round",
        absences=absences[:MAX_LISTED_ABSENCES],
        more_absences=len(absences) - MAX_LISTED_ABSENCES,
        sent=list_sent_records(receipt, site),
        own=own,
        own_classes=", ".join(own.classes) if own else "",
        classes=", ".join(summary.classes),
        unlearned=summary.unlearned,
        maybe_unlearned=summary.maybe_unlearned,
    )
