"""The figures of a run that tools can plot, and what such a tool is to us."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, Protocol

Ending = Literal["finished", "stopped", "interrupted"]


class Track(StrEnum):
    """What ``--track`` names: where figures go beside TensorBoard's files, which are always written."""

    mlflow = "mlflow"


class Tracker(Protocol):
    """Keeps figures, and knows nothing of what they mean."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Keep these figures, by tag; on return they outlast this process. ``step`` is their round."""

    def close(self, ending: Ending) -> None:
        """End the record: no more values follow."""


def round_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures in a line of ``rounds.jsonl``, by tag; what a round does not have is left out."""
    return {tag: value for tag, value in _of_round(line) if value is not None}


def summary_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of the final test in ``summary.json``, by tag; a class without an AUROC has none here."""
    return {tag: value for tag, value in _of_test(summary) if value is not None}


def _of_round(line: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield "loss/train", line["train_loss"]
    yield "loss/validation", line["validation_loss"]
    yield "auroc/validation", line["validation_auroc"]
    if accuracy := line["test_accuracy"]:
        yield "test accuracy/mean over sites", accuracy["mean"]
        yield "test accuracy/over all images", accuracy["pooled"]
    if coordinator := line["coordinator"]:
        yield "loss/train, coordinator", coordinator["train_loss"]
        yield "seconds/coordinator", coordinator["seconds"]
    yield "sites/took part", len(line["sites"])
    yield "sites/absent", len(line["absent"])
    yield "bytes/up", line["bytes_up"]
    yield "bytes/down", line["bytes_down"]
    yield "seconds/round", line["seconds"]
    for site, losses in line["site_losses"].items():
        yield f"site train loss/{site}", losses["train_loss"]
        yield f"site validation loss/{site}", losses["validation_loss"]
    for site, seconds in line["site_seconds"].items():
        yield f"site seconds/{site}", seconds


def _of_test(summary: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    test = summary["test"]
    yield "test/mean auroc", test["mean_auroc"]
    yield "test/mean auroc, shared classes", test["shared_classes"]["mean_auroc"]
    yield "test/mean auroc, unique classes", test["unique_classes"]["mean_auroc"]
    yield "test/mean average precision", test["mean_average_precision"]
    yield "test/mean balanced accuracy", test["mean_balanced_accuracy"]
    for name, value in test.get("mean_more", {}).items():
        yield f"test/mean {name}", value
    for measure in ("accuracy", "sensitivity", "specificity", "f1"):
        yield f"test/{measure}", (test["multi_class"] or {}).get(measure)
    for name, result in test["per_class"].items():
        yield f"test auroc/{name}", result["auroc"]
        yield f"test average precision/{name}", result["average_precision"]
        yield f"test balanced accuracy/{name}", result["balanced_accuracy"]
        for metric, value in result.get("more", {}).items():
            yield f"test {metric}/{name}", value
