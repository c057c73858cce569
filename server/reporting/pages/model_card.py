"""The model card: what a model is, what it is not, and how far its figures go, for anyone who is asked to trust it."""

import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.errors import BadInput, Fault
from common.models.files import DESCRIPTION
from common.models.saved import read_description
from common.system import plain_text
from common.system.files import write_atomically
from server.reporting import wording
from server.reporting.coverage import owners
from server.reporting.run_claims import limits, run_result, sites_taking_part, tested_model
from server.runs.reader import Run, RunSummary, read_run
from server.runs.settings import flattened

CARD = "MODEL_CARD.md"
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
    release: str | None


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
    return environment.get_template("model_card.md.j2").render(
        say=wording,
        summary=summary,
        saved=saved,
        simulated=summary.backend != "network",
        owners={name: owners(summary, name) for name in saved.class_names},
        shown={name: training_images_that_show(summary, name) for name in saved.class_names},
        sites=_sites(run),
        limits=limits(run),
        tested_model=tested_model(run.summary),
        trained_by=sites_taking_part(run),
        all_tested=all(run.rounds_taken[site] for site in summary.per_site if site in summary.sites),
        result=run_result(run),
        settings=_settings(summary),
        data_kind=(summary.experiment.get("data") or {}).get("kind"),
    )


def _settings(summary: RunSummary) -> list[tuple[str, str]]:
    """The settings in the parts of the experiment that shape a model, where they have a value."""
    parts = {name: summary.experiment.get(name) for name in SETTINGS}
    return [pair for pair in flattened(parts) if pair[1] != "–"]


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


def _sites(run: Run) -> list[SiteLine]:
    taken = run.rounds_taken
    return [
        SiteLine(
            name,
            one.classes,
            one.train_samples,
            one.validation_samples,
            taken[name],
            one.smallest_count,
            one.release,
        )
        for name, one in run.summary.sites.items()
    ]
