"""Runs made by hand, and their comparison."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.metrics.auroc import ClassMetrics, summarise
from server.runs.reader import Run, RunSummary
from studies.comparison import Comparison, compare


def metrics(aurocs: Mapping[str, float | None], positives: int = 5, negatives: int = 9) -> dict[str, ClassMetrics]:
    """Make results of classes whose three measures are equal; a class without an AUROC has no positive image."""
    return {
        name: ClassMetrics(auroc, auroc, auroc, 0 if auroc is None else positives, negatives)
        for name, auroc in aurocs.items()
    }


def summary(
    name: str, aurocs: Mapping[str, float | None], unique: Collection[str] = (), *, seed: int = 0, **more: Any
) -> dict[str, Any]:
    """Make the content of a summary of two sites, of which ``south`` does not annotate the unique classes."""
    shared = set(aurocs) - set(unique)
    return {
        "name": name,
        "method": name,
        "rounds": 2,
        "seed": seed,
        "classes": list(aurocs),
        "sites": {"north": {"classes": list(aurocs)}, "south": {"classes": sorted(shared)}},
        "test": asdict(summarise(metrics(aurocs), shared, set(unique))),
        **more,
    }


def run_of(content: Mapping[str, Any], folder: str = "run") -> Run:
    return Run(Path(folder), RunSummary.model_validate(content), ())


def compared(*contents: Mapping[str, Any]) -> Comparison:
    return compare([run_of(content, str(number)) for number, content in enumerate(contents)])
