"""The model card: what a model is, what it is not, and how far its figures go, for anyone who is asked to trust it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.errors import BadInput, Fault
from common.metrics.multi_label import GLOBAL_MODEL
from common.models.saved import DESCRIPTION, SavedModel, read_description
from common.system import plain_text
from common.system.files import write_atomically
from server.reporting import wording
from server.reporting.coverage import owners
from server.runs.reader import Run, RunSummary, read_run
from server.runs.settings import flattened

CARD = "MODEL_CARD.md"
FEW = 30
"""Positive or negative test images below which an AUROC is said to rest on few."""
SETTINGS = ("run", "method", "model", "training", "augmentation", "evaluation", "participation", "privacy")
"""Of the experiment; where the images lie on somebody's machine is left out."""
UNKNOWN = "unknown"


@dataclass(frozen=True)
class SiteLine:
    """One site in the card."""

    name: str
    classes: tuple[str, ...]
    train_samples: int | None
    validation_samples: int | None
    rounds: int
    smallest_count: int | None


def write_model_card(folder: Path) -> Path | None:
    """Write the card into a finished run's folder; None where the run has no global model."""
    if not (folder / DESCRIPTION).is_file():
        return None
    write_atomically(folder / CARD, model_card(folder).encode())
    return folder / CARD


def model_card(folder: Path) -> str:
    """The card as Markdown, from ``summary.json``, ``rounds.jsonl`` and ``model.json``.

    Raises:
        BadInput: If one of them cannot be read, or the summary is of another model.
    """
    run, saved = read_run(folder), read_description(folder)
    summary = run.summary
    if summary.model_sha256 != saved.model_sha256:
        problem = f"summary.json is of the model {summary.model_sha256}, {DESCRIPTION} of {saved.model_sha256}."
        raise BadInput([Fault(str(folder), problem, "A model card needs both of one run.")])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # it is not HTML; see finalize
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    settings = [pair for pair in flattened({name: summary.experiment.get(name) for name in SETTINGS}) if pair[1] != "–"]
    return environment.get_template("model_card.md.j2").render(
        say=wording,
        summary=summary,
        saved=saved,
        simulated=summary.backend != "network",
        few=FEW,
        owners={name: owners(summary, name) for name in saved.class_names},
        shown={name: training_images_that_show(summary, name) for name in saved.class_names},
        sites=_sites(run),
        limits=list(limits(run, saved)),
        settings=settings,
        data_kind=(summary.experiment.get("data") or {}).get("kind"),
    )


def escaped(value: object) -> str:
    """Text that Markdown shows as it is, on one line, in a table too; for any name of a site or a class."""
    if value is None:
        return UNKNOWN
    return re.sub(r"([\\`*_{}\[\]<>|#~&!$])", r"\\\1", plain_text.escaped(" ".join(str(value).split())))


def training_images_that_show(summary: RunSummary, name: str) -> str:
    """How many, over the sites that annotate the class, as far as their policies tell."""
    counts = [site.positives.get(name) for site in summary.sites.values() if name in site.classes]
    told = [count for count in counts if count is not None]
    if not told:
        return UNKNOWN
    total = wording.count(sum(told))
    return total if len(told) == len(counts) else f"{total} at {len(told)} of {len(counts)} sites, else {UNKNOWN}"


def limits(run: Run, saved: SavedModel) -> Iterator[str]:
    """What this run's own figures say about where the model should not be trusted, one sentence each."""
    summary = run.summary
    results = summary.test.per_class
    for name in saved.class_names:
        if reason := wording.why_undefined(results.get(name)):
            yield f"Nothing is known of how well it tells “{name}”: {reason}."
        elif (positives := results[name].positives) is None or (negatives := results[name].negatives) is None:
            continue
        elif (least := min(positives, negatives)) < FEW:
            kind = "positive" if positives == least else "negative"
            yield f"The figures for “{name}” rest on {wording.counted(least, f'{kind} test image')}."
    for site in summary.sites if len(summary.sites) > 1 else ():
        if alone := [f"“{name}”" for name in saved.class_names if owners(summary, name) == (site,)]:
            verb, them = ("is", "it") if len(alone) == 1 else ("are", "them")
            reading = f"the model has learned that site's way of reading {them}"
            yield f"{wording.listed(alone)} {verb} annotated by {site} alone: {reading}."
    yield from (wording.condemned(site, reason) for site, reason in summary.condemned.items())
    yield from _absences(run)
    if summary.test.note != GLOBAL_MODEL:
        yield (
            f"What was scored is the {summary.test.note}, and each count of test images is that of the site with most."
        )


def _absences(run: Run) -> Iterator[str]:
    missed: dict[str, list[int]] = {}
    for each in run.rounds:
        for site in each.absent:
            missed.setdefault(site, []).append(each.round)
    for site, rounds in sorted(missed.items()):
        of_all = f"{len(rounds)} of {wording.counted(run.summary.rounds, 'round')}"
        yield f"{site} was absent in {of_all} ({wording.spans(rounds)})."


def _sites(run: Run) -> list[SiteLine]:
    taken = run.rounds_taken
    return [
        SiteLine(name, one.classes, one.train_samples, one.validation_samples, taken[name], one.smallest_count)
        for name, one in run.summary.sites.items()
    ]
