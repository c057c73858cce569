"""The model card in Markdown: a model's origin, its metrics and their limits."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.saved import read_model_description
from polyclinic.common.models.zoo.spec import DESCRIPTION_FILE, is_segmentation
from polyclinic.common.system import plain_text
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import format_count
from polyclinic.server.reporting import run_claims
from polyclinic.server.reporting.page import SHARED_VARIABLES, TEMPLATES_FOLDER
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.schema import RunSummary
from polyclinic.server.runs.tracking import flatten_settings

MODEL_CARD_FILE = "MODEL_CARD.md"
CARD_SETTINGS = (
    "run",
    "method",
    "model",
    "training",
    "augmentation",
    "evaluation",
    "participation",
    "privacy",
    "pixels",
)
"""Tables of the experiment that the card shows. The table ``[data]`` is left out, because it has paths of a machine."""
UNKNOWN_TEXT = "unknown"


def write_model_card(folder: Path) -> Path | None:
    """Write the model card into a finished run's folder; return None if the run has no global model."""
    if not (folder / DESCRIPTION_FILE).is_file():
        return None
    write_atomically(folder / MODEL_CARD_FILE, render_model_card(folder).encode())
    return folder / MODEL_CARD_FILE


def render_model_card(folder: Path) -> str:
    """Return the model card as Markdown, from ``summary.json``, ``rounds.jsonl`` and ``model.json`` of the run folder.

    Raises:
        BadInput: If a file cannot be read, or the summary belongs to another model.
    """
    run = read_run(folder)
    saved = read_model_description(folder)
    summary = run.summary
    if summary.model_sha256 != saved.model_sha256:
        problem = f"summary.json is of the model {summary.model_sha256}, {DESCRIPTION_FILE} of {saved.model_sha256}."
        raise BadInput([Fault(str(folder), problem, "A model card needs both of one run.")])
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES_FOLDER),
        autoescape=False,  # Markdown, not HTML: see finalize
        finalize=escape_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    settings = flatten_settings({name: summary.experiment.get(name) for name in CARD_SETTINGS})
    return environment.get_template("model_card.md.j2").render(
        **SHARED_VARIABLES,
        run_claims=run_claims,
        run=run,
        summary=summary,
        saved=saved,
        segments=is_segmentation(saved.model.task),
        simulated=summary.backend != "network",
        training_images_that_show=format_positive_image_count,
        all_tested=all(run.round_count_by_site[site] for site in summary.per_site if site in summary.sites),
        settings=[pair for pair in settings if pair[1] != "–"],
        data_kind=(summary.experiment.get("data") or {}).get("kind"),
    )


def escape_markdown(value: object) -> str:
    """Escape a text for Markdown, on one line and safe in tables; return ``unknown`` for None."""
    if value is None:
        return UNKNOWN_TEXT
    text = plain_text.escape_unplain_characters(" ".join(str(value).split()))
    return re.sub(r"([\\`*_{}\[\]<>|#~&!$])", r"\\\1", text)


def format_positive_image_count(summary: RunSummary, name: str) -> str:
    """Format the number of positive training images of a class, with a note on sites that hide their number."""
    counts = [site.positives.get(name) for site in summary.sites.values() if name in site.classes]
    visible = [images for images in counts if images is not None]
    if not visible:
        return UNKNOWN_TEXT
    total = format_count(sum(visible))
    if len(visible) == len(counts):
        return total
    return f"{total} at {len(visible)} of {len(counts)} sites, else {UNKNOWN_TEXT}"
