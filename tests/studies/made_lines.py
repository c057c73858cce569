"""A line of a benchmark's results file, with figures of two classes of which one has too few positives."""

from polyclinic.studies.benchmark_results import RunResultLine


def a_line(**values: object) -> RunResultLine:
    figures = {"auroc": 0.8, "average_precision": 0.3, "balanced_accuracy": 0.7, "interval": (0.7, 0.9)}
    classes = {name: {"positives": count, "negatives": 100, **figures} for name, count in (("a", 40), ("b", 29))}
    run = {"key": "k", "code": "c", "data": "d", "pattern": "p", "method": "m", "lr": 0.1, "seed": 0, "tuning": False}
    result = {"validation_auroc": 0.8, "interval": (0.7, 0.9), "best_round": 1, "rounds": 2}
    cost = {"cpu_seconds": 10.0, "megabytes": 1.0}
    return RunResultLine.model_validate({**run, **result, **cost, "classes": classes, **values})
