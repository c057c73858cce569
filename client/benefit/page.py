"""The site's own page on whether it is better off alone: exact figures, which never leave by it, and a line to read."""

import json
from dataclasses import asdict

from client.site.site import Site
from common.metrics.benefit import MODELS, WORDS, Benefit, benefit_sentence
from common.system.files import write_atomically
from common.system.formatting import counted, number, signed, span

FOLDER = "alone"
"""In the site's own folder: page, figures, and the two models, each of the run that was compared last."""
PAGE, FIGURES = "does-it-help.txt", "does-it-help.json"


def write_page(site: Site, run: str, epochs: int, benefit: Benefit | None) -> None:
    """Write page and figures, and tell the person who looks after the site.

    Args:
        epochs: Local epochs that it trained alone.
        benefit: Over all classes of the site; None where no class has both kinds of image on its test part.
    """
    annotated = site.declaration.canonical
    if benefit is None:
        none = "no class has both a positive and a negative test image here"
        sentence = f"Whether {site.name} is better off alone or with the federation cannot be told: {none}."
    else:
        sentence = benefit_sentence(site.name, benefit, annotated)
    folder = site.folder / FOLDER
    about = f"Run {run}. Trained alone for {counted(epochs, 'local epoch')}, as many as in the run."
    text = "\n".join([sentence, "", about, "", *([] if benefit is None else _table(benefit)), *_where()])
    figures = {"run": run, "site": site.name, "epochs": epochs, "benefit": benefit and asdict(benefit)}
    write_atomically(folder / PAGE, f"{text}\n".encode(), durable=site.durable, private=True)
    write_atomically(folder / FIGURES, json.dumps(figures, indent=2).encode(), durable=site.durable, private=True)
    site.tell(f"{sentence} More in {folder / PAGE}")


def _where() -> list[str]:
    return [
        "",
        "Both models that were trained here lie beside this page: model/ (alone) and fine-tuned/. They never leave.",
        "One comparison in 40 calls a site better off alone by chance, where both models are equally good.",
    ]


def _table(benefit: Benefit) -> list[str]:
    """A line for each model, and one for each of its classes, in columns."""
    heads = ("model", "mean AUROC", "95 % interval", "minus alone", "95 % interval", *benefit.classes)
    rows = [heads]
    for model in MODELS:
        mean, gain = benefit.mean[model], benefit.gain.get(model)
        over = ("", "") if gain is None else (signed(gain.value), " to ".join(map(signed, gain.interval)))
        aurocs = [number(benefit.auroc[model][name]) for name in benefit.classes]
        rows.append((WORDS[model], number(mean.value), span(mean.interval), *over, *aurocs))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
