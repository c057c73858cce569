"""A run's figures for tools that plot them: TensorBoard's files always, MLflow on request."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from common.errors import BadInput, Fault

if TYPE_CHECKING:  # a program that only names a tracker does not wait for these
    from tensorboardX.proto.event_pb2 import Event

    from common.config import Experiment
    from server.runs.folder import RunFolder

Ending = Literal["finished", "stopped", "interrupted"]
EXPERIMENT = "polyclinic"
PARAMETERS, METRICS = 100, 1000
"""Most parameters and figures in one request to MLflow."""
LONGEST_VALUE, LONGEST_NAME = 6000, 240
"""Most characters of a parameter's value and of a name (with room for a number): one that MLflow refuses ends the
record of the whole run."""

_STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "FAILED", "interrupted": "KILLED"}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing of ours calls home
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a server that is gone holds a run up for seconds
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class TrackingStore(StrEnum):
    """The values of ``--track``: a store of figures beside TensorBoard's files, which are always written."""

    mlflow = "mlflow"


class Tracker(Protocol):
    """Stores the figures of a run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Store the figures of round ``step``, by tag; on return they outlast this process."""

    def close(self, ending: Ending) -> None:
        """End the record of figures, because the run is over."""


@contextmanager
def track_run(
    folder: "RunFolder", experiment: "Experiment", store: "NewRun | None", tell: Callable[[str], None]
) -> Iterator[None]:
    """Send the figures that are written to the run folder to the trackers too, until the run ends.

    Args:
        tell: Prints a sentence if the store fails; the run goes on without the store.
    """

    def report_failed_store(reason: str) -> None:
        folder.append_event("tracking_stopped", reason=reason)
        tell(f"MLflow takes no more figures of this run, which goes on: {reason}")

    folder.trackers.append(TensorBoardTracker(folder.path / "tensorboard"))
    if store is not None:
        folder.trackers.append(store(experiment, report_failed_store))
    ending: Ending = "interrupted"
    try:
        yield
        ending = "finished"
    except Exception:
        ending = "stopped"
        raise
    finally:
        while folder.trackers:
            folder.trackers.pop().close(ending)


# ---------------------------------------------------------------------- figures


def round_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures in a line of ``rounds.jsonl``, by tag, without those that the round does not have."""
    accuracy, coordinator = line["test_accuracy"] or {}, line["coordinator"] or {}
    figures = {
        "loss/train": line["train_loss"],
        "loss/validation": line["validation_loss"],
        "auroc/validation": line["validation_auroc"],
        "test accuracy/mean over sites": accuracy.get("mean"),
        "test accuracy/over all images": accuracy.get("pooled"),
        "loss/train, coordinator": coordinator.get("train_loss"),
        "seconds/coordinator": coordinator.get("seconds"),
        "sites/took part": len(line["sites"]),
        "sites/absent": len(line["absent"]),
        "bytes/up": line["bytes_up"],
        "bytes/down": line["bytes_down"],
        "seconds/round": line["seconds"],
    }
    for site, losses in line["site_losses"].items():
        figures[f"site train loss/{site}"] = losses["train_loss"]
        figures[f"site validation loss/{site}"] = losses["validation_loss"]
    for site, seconds in line["site_seconds"].items():
        figures[f"site seconds/{site}"] = seconds
    return {tag: value for tag, value in figures.items() if value is not None}


def final_test_scalars(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the final test in ``summary.json``, by tag, without those that are undefined."""
    test = summary["test"]
    figures = {
        "test/mean auroc": test["mean_auroc"],
        "test/mean auroc, shared classes": test["shared_classes"]["mean_auroc"],
        "test/mean auroc, unique classes": test["unique_classes"]["mean_auroc"],
        "test/mean average precision": test["mean_average_precision"],
        "test/mean balanced accuracy": test["mean_balanced_accuracy"],
    }
    figures |= {f"test/mean {name}": value for name, value in test.get("mean_more", {}).items()}
    multi_class = test["multi_class"] or {}
    figures |= {f"test/{name}": multi_class.get(name) for name in ("accuracy", "sensitivity", "specificity", "f1")}
    for name, result in test["per_class"].items():
        figures[f"test auroc/{name}"] = result["auroc"]
        figures[f"test average precision/{name}"] = result["average_precision"]
        figures[f"test balanced accuracy/{name}"] = result["balanced_accuracy"]
        figures |= {f"test {metric}/{name}": value for metric, value in result.get("more", {}).items()}
    return {tag: value for tag, value in figures.items() if value is not None}


def flatten_tables(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their dotted keys, such as ``training.lr``."""
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_tables(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield nested settings as pairs of dotted key and value, in the form of the command line."""
    for key, value in flatten_tables(settings):
        yield key, _format_setting(value)


def _format_setting(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_format_setting, value))
    return str(value)


# ---------------------------------------------------------------------- TensorBoard


class TensorBoardTracker:
    """Writes one event file, which ``tensorboard --logdir`` draws. A :class:`Tracker`.

    The library's own ``SummaryWriter`` is not used, because its thread may die in silence, it removes characters from
    tags, and it puts the machine's name into the file's name.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.proto.event_pb2 import Event  # here: a wrong call does not wait for it
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)  # it is there where a run goes on
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._write(Event(file_version="brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(step=step, summary=summary))

    def close(self, ending: Ending) -> None:
        self._records.close()

    def _write(self, event: "Event") -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


# ---------------------------------------------------------------------- MLflow


NewRun = Callable[["Experiment", Callable[[str], None]], "MLflowTracker"]
"""Begins a run of an experiment in a store; the second argument is called with the reason once the store fails."""


def open_store(track: TrackingStore | None) -> NewRun | None:
    """Open the store that ``MLFLOW_TRACKING_URI`` names, or MLflow's own default in the present folder.

    A run opens it before anything else, so that a missing store is not noticed at the run's end.

    Raises:
        BadInput: If MLflow is not installed, or the store cannot be used.
    """
    if track is None:
        return None
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ModuleNotFoundError:
        remedy = "pip install 'polyclinic[mlflow]', or leave --track out: TensorBoard's files are always written."
        raise BadInput([Fault("--track mlflow", "MLflow is not installed here.", remedy)]) from None
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    try:
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(name)
        store = experiment.experiment_id if experiment else client.create_experiment(name)
        return partial(begin_mlflow_run, client, store)
    except (mlflow.MlflowException, OSError, ImportError) as error:
        problem = f"{mlflow.get_tracking_uri()} cannot be used: {_first_line(error)}."
        raise BadInput([Fault("--track mlflow", problem, "Set MLFLOW_TRACKING_URI to a store that can.")]) from None


def begin_mlflow_run(client: Any, store: str, experiment: "Experiment", lost: Callable[[str], None]) -> "MLflowTracker":
    """Begin a run with the experiment's settings as its parameters.

    Args:
        client: ``mlflow.MlflowClient``.
        store: MLflow's identifier of the runs that belong together.
        lost: Called with the reason once the store fails.
    """
    run = MLflowTracker(client, "", lost)

    def begin() -> None:
        from mlflow.entities import Param

        label = f"{experiment.run.name or experiment.run.method} seed {experiment.run.seed}"
        run.identifier = client.create_run(store, run_name=label).info.run_id
        settings = flatten_settings(experiment.model_dump(mode="json"))
        parameters = [Param(run.metric_name(key), value[:LONGEST_VALUE]) for key, value in settings]
        for start in range(0, len(parameters), PARAMETERS):
            client.log_batch(run.identifier, params=parameters[start : start + PARAMETERS])

    run.try_request(begin)
    return run


@dataclass
class MLflowTracker:
    """Sends figures to a run in MLflow's store, until the store fails. A :class:`Tracker`."""

    client: Any
    identifier: str
    lost: Callable[[str], None]
    _names: dict[str, str] = field(default_factory=dict)
    _works: bool = True

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        def log() -> None:
            from mlflow.entities import Metric

            now_ms = time.time_ns() // 1_000_000
            metrics = [Metric(self.metric_name(tag), value, now_ms, step) for tag, value in values.items()]
            for start in range(0, len(metrics), METRICS):
                self.client.log_batch(self.identifier, metrics=metrics[start : start + METRICS])

        self.try_request(log)

    def close(self, ending: Ending) -> None:
        self.try_request(lambda: self.client.set_terminated(self.identifier, _STATUS[ending]))

    def try_request(self, request: Callable[[], None]) -> None:
        """Send a request, unless the store has failed before."""
        from mlflow import MlflowException

        try:
            if self._works:
                request()
        except (MlflowException, OSError) as error:
            self._works = False
            self.lost(_first_line(error))

    def metric_name(self, tag: str) -> str:
        """Return the name under which MLflow accepts a tag; of two tags with the same name, the later gets a number."""
        if tag not in self._names:
            parts = [re.sub(r"[^\w .:-]|^\.*$", "_", part) for part in tag.split("/", 1)]
            plain = name = "/".join(parts)[:LONGEST_NAME]
            number = 1
            while name in self._names.values():
                name = f"{plain} {(number := number + 1)}"
            self._names[tag] = name
        return self._names[tag]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
