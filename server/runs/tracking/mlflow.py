"""Runs as MLflow keeps them: ``--track mlflow``."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.config import Experiment
from common.errors import BadInput, Fault
from server.runs.scalars import Ending
from server.runs.settings import flattened

EXPERIMENT = "polyclinic"
PARAMETERS, METRICS, LONGEST, LONGEST_NAME = 100, 1000, 6000, 240
"""How many of each one of MLflow's requests takes, and characters of a parameter's value and of a name with room for a
number. One name that it does not take ends the record of the whole run."""

_STATUS: dict[Ending, str] = {"finished": "FINISHED", "stopped": "FAILED", "interrupted": "KILLED"}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing of ours calls home
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a server that is gone holds a run up for seconds
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class MLflowStore:
    """An experiment in MLflow's store, which is there and answers.

    Attributes:
        client: ``mlflow.MlflowClient``.
        experiment: Its identifier.
    """

    client: Any
    experiment: str

    def new_run(self, experiment: Experiment, lost: Callable[[str], None]) -> "MLflowRun":
        """Begin a run with the experiment's settings as its parameters; ``lost`` hears why no more can be kept."""
        label = f"{experiment.run.name or experiment.run.method} seed {experiment.run.seed}"
        run = MLflowRun(self.client, "", lost)
        run.attempt(lambda: run.begin(self.experiment, label, dict(flattened(experiment.model_dump(mode="json")))))
        return run


def mlflow_store() -> MLflowStore:
    """Open the store that ``MLFLOW_TRACKING_URI`` names, or MLflow's own default in the present folder.

    Raises:
        BadInput: If MLflow is not installed, or the store cannot be used.
    """
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
        found = client.get_experiment_by_name(name)
        return MLflowStore(client, found.experiment_id if found else client.create_experiment(name))
    except (mlflow.MlflowException, OSError, ImportError) as error:
        problem = f"{mlflow.get_tracking_uri()} cannot be used: {_first_line(error)}."
        raise BadInput([Fault("--track mlflow", problem, "Set MLFLOW_TRACKING_URI to a store that can.")]) from None


@dataclass
class MLflowRun:
    """A run in the store, a ``Tracker``; what the store does not take is lost, not the run."""

    client: Any
    identifier: str
    lost: Callable[[str], None]
    _names: dict[str, str] = field(default_factory=dict)
    _well: bool = True

    def begin(self, experiment: str, label: str, settings: Mapping[str, str]) -> None:
        """Make the run and give it its parameters."""
        from mlflow.entities import Param

        self.identifier = self.client.create_run(experiment, run_name=label).info.run_id
        parameters = [Param(self._name(key), value[:LONGEST]) for key, value in settings.items()]
        for some in _in_parts(parameters, PARAMETERS):
            self.client.log_batch(self.identifier, params=some)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.attempt(lambda: self._log(values, step))

    def close(self, ending: Ending) -> None:
        self.attempt(lambda: self.client.set_terminated(self.identifier, _STATUS[ending]))

    def attempt(self, what: Callable[[], None]) -> None:
        """Do it, unless the store has failed before."""
        from mlflow import MlflowException

        try:
            if self._well:
                what()
        except (MlflowException, OSError) as error:
            self._well = False
            self.lost(_first_line(error))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(self._name(tag), value, now_ms, step) for tag, value in values.items()]
        for some in _in_parts(metrics, METRICS):
            self.client.log_batch(self.identifier, metrics=some)

    def _name(self, tag: str) -> str:
        """The tag as MLflow takes it, for which it is a path; of two that would be one, the later gets a number."""
        if tag not in self._names:
            parts = [re.sub(r"[^\w .:-]|^\.*$", "_", part) for part in tag.split("/", 1)]
            plain = name = "/".join(parts)[:LONGEST_NAME]
            taken, number = set(self._names.values()), 1
            while name in taken:
                name = f"{plain} {(number := number + 1)}"
            self._names[tag] = name
        return self._names[tag]


def _in_parts(items: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + length] for start in range(0, len(items), length))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
