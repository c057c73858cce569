"""The model card: what a model is, what it is not, and how far its figures go, for anyone who is asked to trust it."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.errors import BadInput, Fault
from common.models.saved import read_description
from common.models.zoo.spec import DESCRIPTION
from common.system import plain_text
from common.system.files import write_atomically
from server.reporting import wording
from server.reporting.page import TEMPLATES
from server.reporting.run_claims import limits, run_result, sites_taking_part, tested_model
from server.runs.reader import RunSummary, read_run
from server.runs.tracking import flattened

CARD = "MODEL_CARD.md"
SETTINGS = ("run", "method", "model", "training", "augmentation", "evaluation", "participation", "privacy")
"""Parts of the experiment in the card; where the images lie on somebody's machine is left out."""
UNKNOWN = "unknown"


def write_model_card(folder: Path) -> Path | None:
    """Write the card into a finished run's folder; None where the run has no global model."""
    if not (folder / DESCRIPTION).is_file():
        return None
    write_atomically(folder / CARD, model_card(folder).encode())
    return folder / CARD


def model_card(folder: Path) -> str:
    """Return the card as Markdown, from ``summary.json``, ``rounds.jsonl`` and ``model.json``.

    Raises:
        BadInput: If one of them cannot be read, or the summary is of another model.
    """
    run, saved = read_run(folder), read_description(folder)
    summary, taken = run.summary, run.rounds_taken
    if summary.model_sha256 != saved.model_sha256:
        problem = f"summary.json is of the model {summary.model_sha256}, {DESCRIPTION} of {saved.model_sha256}."
        raise BadInput([Fault(str(folder), problem, "A model card needs both of one run.")])
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,  # it is not HTML; see finalize
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Settings that shape a model, where they have a value.
    settings = flattened({name: summary.experiment.get(name) for name in SETTINGS})
    return environment.get_template("model_card.md.j2").render(
        say=wording,
        summary=summary,
        saved=saved,
        simulated=summary.backend != "network",
        owners={name: summary.owners.get(name, ()) for name in saved.class_names},
        shown={name: training_images_that_show(summary, name) for name in saved.class_names},
        taken=taken,
        limits=limits(run),
        tested_model=tested_model(summary),
        trained_by=sites_taking_part(run),
        all_tested=all(taken[site] for site in summary.per_site if site in summary.sites),
        result=run_result(run),
        settings=[pair for pair in settings if pair[1] != "–"],
        data_kind=(summary.experiment.get("data") or {}).get("kind"),
    )


def escaped(value: object) -> str:
    """Return text that Markdown shows as it is, on one line, in a table too; for any name of a site or a class."""
    if value is None:
        return UNKNOWN
    return re.sub(r"([\\`*_{}\[\]<>|#~&!$])", r"\\\1", plain_text.escaped(" ".join(str(value).split())))


def training_images_that_show(summary: RunSummary, name: str) -> str:
    """Count the images over the sites that annotate the class, as far as their policies tell."""
    counts = [site.positives.get(name) for site in summary.sites.values() if name in site.classes]
    visible = [count for count in counts if count is not None]
    if not visible:
        return UNKNOWN
    total = wording.count(sum(visible))
    return total if len(visible) == len(counts) else f"{total} at {len(visible)} of {len(counts)} sites, else {UNKNOWN}"
