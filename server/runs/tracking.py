"""Send a run's metrics to tracking tools: always to TensorBoard files, on request also to MLflow."""

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

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.system.packages import refuse_missing_packages

if TYPE_CHECKING:  # these imports are slow, and commands without a run do not need them
    from tensorboardX.proto.event_pb2 import Event

    from polyclinic.common.config import Experiment
    from polyclinic.common.metrics.auroc import FinalTestSummary
    from polyclinic.server.runs.folder import RunFolder
    from polyclinic.server.runs.schema import RoundFileLine

Ending = Literal["finished", "stopped", "interrupted"]
DEFAULT_EXPERIMENT_NAME = "polyclinic"
MAX_PARAMETERS_PER_REQUEST = 100
MAX_METRICS_PER_REQUEST = 1000
# MLflow refuses longer texts, and a refused request ends the record of the run.
MAX_VALUE_CHARACTERS = 6000
"""Greatest length of a parameter's value in MLflow."""
MAX_NAME_CHARACTERS = 240
"""Greatest length of a name in MLflow, without the number that makes equal names distinct."""

_MLFLOW_STATUSES: dict[Ending, str] = {"finished": "FINISHED", "stopped": "FAILED", "interrupted": "KILLED"}
_MLFLOW_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a run must send nothing to MLflow's authors
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # so that an unreachable server delays a run only by seconds
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class TrackingService(StrEnum):
    """Tracking services in addition to TensorBoard: the values of the option ``--track``."""

    mlflow = "mlflow"


class MetricsTracker(Protocol):
    """Receives the metrics of a run."""

    def store_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Store the metrics (tag -> value) of round ``step`` durably."""

    def close(self, ending: Ending) -> None:
        """Finish the record of the run, with the way in which the run ended."""


@contextmanager
def send_metrics_to_trackers(
    folder: "RunFolder", experiment: "Experiment", store: "NewRun | None", tell: Callable[[str], None]
) -> Iterator[None]:
    """Send all metrics of the ``with`` block's run also to TensorBoard and, if requested, to MLflow.

    Args:
        store: Begins a run in MLflow (:func:`open_mlflow_store`); None for TensorBoard only.
        tell: Function that prints a sentence if MLflow fails; the run continues without MLflow.
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


def extract_round_scalars(line: "RoundFileLine") -> dict[str, float]:
    """Return tag -> value for the metrics of a round; undefined ones are left out."""
    accuracy, coordinator = line.test_accuracy, line.coordinator
    figures = {
        "loss/train": line.train_loss,
        "loss/validation": line.validation_loss,
        "auroc/validation": line.validation_auroc,
        "test accuracy/mean over sites": accuracy.mean if accuracy else None,
        "test accuracy/over all images": accuracy.pooled if accuracy else None,
        "loss/train, coordinator": coordinator.train_loss if coordinator else None,
        "seconds/coordinator": coordinator.seconds if coordinator else None,
        "sites/took part": len(line.sites),
        "sites/absent": len(line.absent),
        "bytes/up": line.bytes_up,
        "bytes/down": line.bytes_down,
        "seconds/round": line.seconds,
    }
    for site, losses in line.site_losses.items():
        figures[f"site train loss/{site}"] = losses.train_loss
        figures[f"site validation loss/{site}"] = losses.validation_loss
    for site, seconds in line.site_seconds.items():
        figures[f"site seconds/{site}"] = seconds
    return {tag: value for tag, value in figures.items() if value is not None}


def extract_final_test_scalars(test: "FinalTestSummary") -> dict[str, float]:
    """Return tag -> value for the metrics of the final test; undefined ones are left out."""
    figures = {
        "test/mean auroc": test.mean_auroc,
        "test/mean auroc, shared classes": test.shared_classes.mean_auroc,
        "test/mean auroc, unique classes": test.unique_classes.mean_auroc,
        "test/mean average precision": test.mean_average_precision,
        "test/mean balanced accuracy": test.mean_balanced_accuracy,
    }
    figures |= {f"test/mean {name}": value for name, value in test.mean_more.items()}
    for name in ("accuracy", "sensitivity", "specificity", "f1"):
        figures[f"test/{name}"] = getattr(test.multi_class, name, None)
    for name, result in test.per_class.items():
        figures[f"test auroc/{name}"] = result.auroc
        figures[f"test average precision/{name}"] = result.average_precision
        figures[f"test balanced accuracy/{name}"] = result.balanced_accuracy
        figures |= {f"test {metric}/{name}": value for metric, value in result.more.items()}
    return {tag: value for tag, value in figures.items() if value is not None}


def flatten_nested_tables(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested tables; a key is, for example, ``training.lr``."""
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_nested_tables(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flatten_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of nested settings; an empty value is a dash, a list is joined by commas."""
    for key, value in flatten_nested_tables(settings):
        yield key, _format_setting_value(value)


def _format_setting_value(value: object) -> str:
    if value is None or value in ("", [], {}):
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_format_setting_value, value))
    return str(value)


# ---------------------------------------------------------------------- TensorBoard


class TensorBoardTracker:
    """Writes the metrics to one event file for ``tensorboard --logdir``. A :class:`MetricsTracker`.

    The library's ``SummaryWriter`` is not used, because its thread may fail silently, it changes tags, and it puts the
    machine's name into the file name.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here, so that a call with a fault does not wait for the import.
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)  # it exists if the run is resumed
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._write_tensorboard_event(Event(file_version="brain.Event:2"))

    def store_scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write_tensorboard_event(Event(step=step, summary=summary))

    def close(self, ending: Ending) -> None:
        self._records.close()

    def _write_tensorboard_event(self, event: "Event") -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


# ---------------------------------------------------------------------- MLflow


NewRun = Callable[["Experiment", Callable[[str], None]], "MLflowTracker"]
"""A function that begins an MLflow run of an experiment. Its second argument is called with the reason of a failure."""


def open_mlflow_store(track: TrackingService | None) -> NewRun | None:
    """Open the MLflow store at ``MLFLOW_TRACKING_URI``, or MLflow's default store in the current folder.

    A run opens the store before its first round, so that a missing store is reported at the start.

    Returns:
        A function that begins a run in the store; None if ``track`` is None.

    Raises:
        BadInput: If MLflow is not installed, or the store cannot be used.
    """
    if track is None:
        return None
    for name, value in _MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    otherwise = "Leave --track out, for TensorBoard's files are always written"
    refuse_missing_packages("--track mlflow", "mlflow", otherwise=otherwise)
    import mlflow

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_EXPERIMENT_NAME)
    try:
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(name)
        store = experiment.experiment_id if experiment else client.create_experiment(name)
        return partial(begin_mlflow_run, client, store)
    except (mlflow.MlflowException, OSError, ImportError) as error:
        store_address = hide_password_in_urls(mlflow.get_tracking_uri())
        problem = f"{store_address} cannot be used: {_extract_first_error_line(error)}."
        raise BadInput([Fault("--track mlflow", problem, "Set MLFLOW_TRACKING_URI to a store that can.")]) from None


def begin_mlflow_run(
    client: Any, store: str, experiment: "Experiment", report_failure: Callable[[str], None]
) -> "MLflowTracker":
    """Begin an MLflow run, with the experiment's settings as its parameters.

    Args:
        client: ``mlflow.MlflowClient``.
        store: Id of the MLflow experiment that receives the run.
        report_failure: Called with the reason if the store fails.
    """
    run = MLflowTracker(client, "", report_failure)

    def create_mlflow_run() -> None:
        from mlflow.entities import Param

        label = f"{experiment.run.name or experiment.run.method} seed {experiment.run.seed}"
        run.identifier = client.create_run(store, run_name=label).info.run_id
        settings = flatten_settings(experiment.model_dump(mode="json"))
        parameters = [Param(run.make_mlflow_name(key), value[:MAX_VALUE_CHARACTERS]) for key, value in settings]
        for start in range(0, len(parameters), MAX_PARAMETERS_PER_REQUEST):
            client.log_batch(run.identifier, params=parameters[start : start + MAX_PARAMETERS_PER_REQUEST])

    run.send_unless_mlflow_failed(create_mlflow_run)
    return run


@dataclass
class MLflowTracker:
    """Sends the metrics to an MLflow run until the store fails. A :class:`MetricsTracker`.

    Attributes:
        client: ``mlflow.MlflowClient``.
        identifier: MLflow's id of the run; empty before the run is created.
        report_failure: Called with the reason if the store fails.
        _names: Tag -> name in MLflow.
        _works: False after a failure; then nothing more is sent.
    """

    client: Any
    identifier: str
    report_failure: Callable[[str], None]
    _names: dict[str, str] = field(default_factory=dict)
    _works: bool = True

    def store_scalars(self, values: Mapping[str, float], step: int) -> None:
        def log_mlflow_scalars() -> None:
            from mlflow.entities import Metric

            now_ms = time.time_ns() // 1_000_000
            metrics = [Metric(self.make_mlflow_name(tag), value, now_ms, step) for tag, value in values.items()]
            for start in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
                self.client.log_batch(self.identifier, metrics=metrics[start : start + MAX_METRICS_PER_REQUEST])

        self.send_unless_mlflow_failed(log_mlflow_scalars)

    def close(self, ending: Ending) -> None:
        self.send_unless_mlflow_failed(lambda: self.client.set_terminated(self.identifier, _MLFLOW_STATUSES[ending]))

    def send_unless_mlflow_failed(self, request: Callable[[], None]) -> None:
        """Send a request to MLflow, unless an earlier request has failed."""
        from mlflow import MlflowException

        try:
            if self._works:
                request()
        except (MlflowException, OSError) as error:
            self._works = False
            self.report_failure(_extract_first_error_line(error))

    def make_mlflow_name(self, tag: str) -> str:
        """Return a name for a tag that MLflow accepts; append a number if another tag has the same name."""
        if tag not in self._names:
            parts = [re.sub(r"[^\w .:-]|^\.*$", "_", part) for part in tag.split("/", 1)]
            first_name = "/".join(parts)[:MAX_NAME_CHARACTERS]
            name = first_name
            number = 1
            while name in self._names.values():
                number += 1
                name = f"{first_name} {number}"
            self._names[tag] = name
        return self._names[tag]


def _extract_first_error_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return hide_password_in_urls(lines[0].rstrip("."))


def hide_password_in_urls(text: str) -> str:
    """Return a text with user names and passwords removed from its URLs, because MLflow's address may have them."""
    return re.sub(r"://[^/\s]*@", "://", text)
