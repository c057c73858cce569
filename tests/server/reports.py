"""Run folders made by hand, and the pages that are written of them."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results

RESULTS = {
    "edema": ClassMetrics(0.81, 0.4, 0.7, 40, 160),
    "hernia": ClassMetrics(None, None, None, 0, 200),
    "mass": ClassMetrics(0.42, 0.3, 0.5, 30, 170),
    "$x_1$ & <i>node</i>": ClassMetrics(0.77, 0.35, 0.6, 50, 150),
    "结节": ClassMetrics(0.66, 0.2, 0.55, 20, 180),
}
NAMES = list(RESULTS)
SITES = {"<b>x</b>": NAMES[:3], "north": [NAMES[0], *NAMES[3:]], "south": [NAMES[0], NAMES[1]]}


def write(folder: Path, **more: Any) -> Path:
    """Write the files of a run of three rounds, of which one site took no part."""
    folder.mkdir()
    counts = {"train_samples": 1200, "validation_samples": 90, "bytes_up": 1_530_000, "bytes_down": 9}
    content = {
        "name": "surgical <script>alert(1)</script>",
        "method": "surgical",
        "backend": "inline",
        "rounds": 3,
        "seed": 1,
        "best_round": 2,
        "criterion": "auroc",
        "classes": NAMES,
        "sites": {name: {"classes": classes, **counts} for name, classes in SITES.items()},
        "test": asdict(summarise_test_results(RESULTS, {"edema"}, set(NAMES[2:]))),
        "per_site": {"north": {"validation_loss": 0.25, "mean_auroc": 0.8, "per_class": {}}},
        "seconds": {"total": 100.0, "train": 75.0, "aggregate": 5.0, "idle": 20.0},
        "model_sha256": "ab" * 32,
        "contract_hash": "cd" * 32,
        "versions": {"polyclinic": "0.1.0"},
        "experiment": {"training": {"lr": 5e-5, "schedule": None}, "run": {"seed": 1}},
        **more,
    }
    (folder / "summary.json").write_text(json.dumps(content))
    taking = {"sites": ["<b>x</b>", "north"], "absent": {"south": "no <answer>"}}
    with (folder / "rounds.jsonl").open("w") as file:
        for n in (1, 2, 3):
            validation = {"validation_loss": None if n == 1 else 0.5, "validation_auroc": 0.5 + n / 10}
            line = {"round": n, **taking, "train_loss": 1 / n, "best": n == 2, **validation}
            file.write(json.dumps(line) + "\n")
    return folder


def check_page(html: str) -> None:
    """Check that a page is well formed and whole, its references have targets, its figures take the page's colours."""
    root = ElementTree.fromstring(html)
    assert root.tag == "html"
    tags = {element.tag for element in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "image", "foreignObject"})
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\((?!#)", html)
    assert "default-src 'none'" in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', html)) == set(ids)
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert figures
    assert not re.search(r"(?:fill|stroke): #", "".join(figures))


def body_text(html: str) -> str:
    text = "".join(ElementTree.fromstring(html).itertext())
    return re.sub(r"\s+", " ", text)
