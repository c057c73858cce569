"""What a study's tables can show of a run, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # read_study checks names by these, and a wrong study.toml is refused before SciPy is imported
    from server.runs.reader import Run, RunSummary

MEGA = 1e6

Reading = Callable[["Run"], float | None]


def _one_class(name: str) -> Reading:
    return lambda run: getattr(run.summary.test.multi_class, name, None)


def _of_clients(name: str) -> Reading:
    return lambda run: getattr(run.summary.client_accuracy, name, None)


def _traffic(summary: "RunSummary") -> float:
    return sum((site.bytes_up or 0) + (site.bytes_down or 0) for site in summary.sites.values()) / MEGA


def _epochs(run: "Run") -> float:
    return float(sum(sum(each.epochs.values()) for each in run.rounds))


READINGS: Mapping[str, tuple[str, Reading]] = {
    "auroc": ("AUROC", lambda run: run.summary.test.mean_auroc),
    "auroc_sd": ("SD of AUROC over classes", lambda run: run.summary.test.sd_auroc),
    "auroc_shared": ("AUROC, shared classes", lambda run: run.summary.test.shared_classes.mean_auroc),
    "auroc_unique": ("AUROC, unique classes", lambda run: run.summary.test.unique_classes.mean_auroc),
    "average_precision": ("mean average precision", lambda run: run.summary.test.mean_average_precision),
    "balanced_accuracy": ("balanced accuracy", lambda run: run.summary.test.mean_balanced_accuracy),
    "accuracy": ("accuracy", _one_class("accuracy")),
    "sensitivity": ("sensitivity", _one_class("sensitivity")),
    "specificity": ("specificity", _one_class("specificity")),
    "f1": ("F1", _one_class("f1")),
    "bmcta": ("BMCTA", _of_clients("best_mean_client_test_accuracy")),
    "bta": ("BTA", _of_clients("best_test_accuracy")),
    "rounds": ("rounds", lambda run: float(run.summary.rounds)),
    "epochs": ("epochs at hospitals", _epochs),
    "megabytes": ("MB sent and received", lambda run: _traffic(run.summary)),
    "seconds": ("seconds", lambda run: run.summary.seconds.get("total")),
}
"""Name in a ``study.toml`` -> heading, and how it is read off a run; None where the run has none."""


def of_classes(classes: Sequence[str]) -> Reading:
    """Mean AUROC over these classes."""
    return lambda run: _mean_auroc(run, classes)


def _mean_auroc(run: "Run", classes: Sequence[str]) -> float | None:
    from common.metrics.auroc import mean_and_sd

    return mean_and_sd(each.auroc for name, each in run.summary.test.per_class.items() if name in classes)[0]
