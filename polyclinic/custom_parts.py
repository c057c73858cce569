"""Custom networks, losses, data sets and other parts of a run that a Python caller passes as objects."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.config import ExperimentFile, read_experiment, validate_experiment
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.plugins import (
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OPTIMIZERS,
    PLUGIN_PREFIX,
    SCHEDULES,
    TRANSFORMS,
    is_local_plugin_name,
    register_local_plugin,
)
from polyclinic.data.sources.dataset_items import MapStyleDataset
from polyclinic.data.sources.plugin import GIVEN_IMAGES_ATTRIBUTE, DatasetPlugin, LabelledImages

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


Network = Callable[[int, int], "nn.Module"]
"""``network(channels, image_size)``: images ``(batch, channels, size, size)`` in, features ``(batch, width)`` out."""
TrainingLoss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""``loss(logits, labels, annotated)`` returns a scalar; see docs/experiments.md."""
ImageTransform = Callable[["Tensor", "torch.Generator"], "Tensor"]
"""``transform(images, generator)`` returns changed images: float pixels 0..255 ``(batch, channels, height, width)``."""
OptimizerFactory = Callable[..., "torch.optim.Optimizer"]
"""``optimizer(parameters, lr=..., weight_decay=...)`` returns a ``torch.optim.Optimizer``."""
RateSchedule = Callable[[int, int], float]
"""``schedule(server_round, rounds)`` returns a factor of 0 or more; rounds count from 1."""
CustomImages = LabelledImages | MapStyleDataset
"""Custom images with their labels."""
ClassMetric = Callable[[NDArray[Any], NDArray[Any]], float]
"""``metric(scores, labels)`` returns the value of one class; both arguments have the shape ``(images,)``."""
CustomDataset = CustomImages | Mapping[str, CustomImages] | DatasetPlugin
"""Custom images, a dictionary part name -> images, or the function of a data set plug-in."""


@dataclass(frozen=True)
class CustomParts:
    """The custom objects that a caller passes to ``simulate`` or ``compare``; an attribute is None if it is not passed.

    The objects exist only in this process, so a run with any of them trains all sites in this process.
    """

    model: nn.Module | Network | None = None
    head: str | None = None
    dataset: CustomDataset | None = None
    loss: TrainingLoss | None = None
    transform: ImageTransform | None = None
    optimizer: OptimizerFactory | None = None
    schedule: RateSchedule | None = None
    metrics: Sequence[ClassMetric] = ()

    def __bool__(self) -> bool:
        """Return True if the caller passes at least one object; the name of a head alone does not count."""
        return bool(self.metrics) or self.dataset is not None or bool(self._list_replaced_settings())

    def _list_replaced_settings(self) -> dict[str, tuple[str, Any]]:
        """Return setting -> (entry-point group, object), for each object except data set and metrics."""
        parts = {
            "model.architecture": (MODELS, self.model),
            "training.loss": (LOSSES, self.loss),
            "augmentation.transform": (TRANSFORMS, self.transform),
            "training.optimizer": (OPTIMIZERS, self.optimizer),
            "training.schedule": (SCHEDULES, self.schedule),
        }
        return {key: group_and_part for key, group_and_part in parts.items() if group_and_part[1] is not None}

    def make_overrides(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Register the objects in this process as local plug-ins; return the overrides of an experiment that use them.

        Args:
            settings: Further settings of the caller, which become overrides too.

        Raises:
            BadInput: If an object is not a function where one is needed.
        """
        self._refuse_wrong_parts()
        all_settings = dict(settings)
        for key, (group, part) in self._list_replaced_settings().items():
            # MONAI's transforms store their last draw: the caller's own object would have another hash in the next run.
            registered = _copy_if_possible(part) if group == TRANSFORMS else part
            all_settings[key] = PLUGIN_PREFIX + register_local_plugin(group, registered)
        if self.head is not None:
            all_settings["model.head"] = self.head
        if self.metrics:
            names = [PLUGIN_PREFIX + register_local_plugin(METRICS, metric) for metric in self.metrics]
            all_settings["evaluation.metrics"] = names
        plugin_values = [
            value for value in settings.values() if isinstance(value, str) and value.startswith(PLUGIN_PREFIX)
        ]
        if self or any(map(is_local_plugin_name, plugin_values)):
            all_settings.setdefault("simulation.backend", "inline")
        overrides = convert_settings_to_overrides(all_settings)
        if self.dataset is not None:
            name = register_local_plugin(DATASETS, wrap_as_dataset_plugin(self.dataset))
            # Keys such as data.keep may be among the settings.
            overrides = ["data=none", *overrides, 'data.kind="plugin"', f"data.name={format_toml_value(name)}"]
        return tuple(overrides)

    def _refuse_wrong_parts(self) -> None:
        functions = {
            "loss": self.loss,
            "transform": self.transform,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        faults = [
            Fault(name, f"is {type(part).__name__}, not a function.", f"Pass the function itself: {name}=my_{name}.")
            for name, part in functions.items()
            if part is not None and not callable(part)
        ]
        is_list = isinstance(self.metrics, Sequence) and not isinstance(self.metrics, str)
        if not is_list or not all(map(callable, self.metrics)):
            problem = f"is {type(self.metrics).__name__}, not a list of functions."
            remedy = "Pass a list: metrics=[my_metric]; the function's name is the metric's name."
            faults.append(Fault("metrics", problem, remedy))
        raise_faults(faults)

    def refuse_other_processes(self, file: ExperimentFile) -> None:
        """Refuse an experiment that runs on Ray, because Ray's workers are other processes without these objects.

        Raises:
            BadInput: If there is an object, and the experiment chooses Ray.
        """
        if self and file.experiment.simulation.backend == "ray":
            problem = "ray: its workers are other processes, which do not know what was given to this one."
            raise BadInput([Fault("simulation.backend", problem, 'Set "inline", or make a package of it.')])


def _copy_if_possible(part: Any) -> Any:
    try:
        return copy.deepcopy(part)
    except Exception:  # the copy runs code of the caller, which may raise anything
        return part


def read_python_experiment(
    experiment: str | Path | Mapping[str, Any], overrides: Sequence[str], name: str = "experiment"
) -> ExperimentFile:
    """Read an experiment that is given as a path, the name of an example, or its tables.

    Args:
        name: Name of the tables in faults.

    Raises:
        BadInput: With all faults.
    """
    from polyclinic.strategies.registry import find_method_faults

    if isinstance(experiment, Mapping):
        return validate_experiment(copy_tables(experiment), Path("experiment"), overrides, find_method_faults, name)
    return read_experiment(Path(experiment), overrides, find_method_faults)


def copy_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of an experiment's tables; the caller may change the copy."""
    return dict(json.loads(json.dumps(dict(tables))))


def wrap_as_dataset_plugin(images: CustomDataset) -> DatasetPlugin:
    """Wrap images as a data set plug-in, named after the type of the images; return a function unchanged."""
    are_images = isinstance(images, Mapping | LabelledImages) or hasattr(images, "__getitem__")
    if callable(images) and not are_images:
        return images

    def wrap_images(part: Any) -> LabelledImages:
        return part if isinstance(part, LabelledImages) else LabelledImages(part)

    wrapped: LabelledImages | Mapping[str, LabelledImages]
    # Messages about faults call the data set by this name.
    if isinstance(images, Mapping):
        wrapped = {name: wrap_images(part) for name, part in images.items()}
        name = "parts"
    else:
        wrapped = wrap_images(images)
        is_array = isinstance(wrapped.images, np.ndarray)
        name = type(wrapped if is_array else wrapped.images).__name__

    def dataset(folder: Path, options: Mapping[str, Any]) -> LabelledImages | Mapping[str, LabelledImages]:
        return wrapped

    setattr(dataset, GIVEN_IMAGES_ATTRIBUTE, wrapped)
    dataset.__name__ = name
    return dataset


def convert_settings_to_overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={format_toml_value(value)}" for key, value in settings.items()]


def format_toml_value(value: Any) -> str:
    """Format a value as TOML on one line; numpy numbers are allowed."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(key)} = {format_toml_value(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_toml_value, value)) + "]"
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except TypeError:
        problem = f"{value!r} is a {type(value).__name__}, which no experiment file can hold."
        raise BadInput([Fault("settings", problem)]) from None
