"""Runs made by hand, and their comparison."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results
from polyclinic.server.runs.reader import RunFolderContent
from polyclinic.server.runs.schema import RunSummary
from polyclinic.studies.comparison import MethodComparison, compare_methods


def metrics(aurocs: Mapping[str, float | None], positives: int = 30, negatives: int = 9) -> dict[str, ClassMetrics]:
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
        "test": asdict(summarise_test_results(metrics(aurocs), shared, set(unique))),
        **more,
    }


def run_of(content: Mapping[str, Any], folder: str = "run") -> RunFolderContent:
    return RunFolderContent(Path(folder), RunSummary.model_validate(content), ())


def compared(*contents: Mapping[str, Any]) -> MethodComparison:
    return compare_methods([run_of(content, str(number)) for number, content in enumerate(contents)])
