"""The methods' classes by name, for coordinator and hospitals; the list of names is
:mod:`polyclinic.strategies.method_list`.
"""

from collections.abc import Mapping
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from polyclinic.common.config import (
    MAX_CACHED_PLAN_CHARACTERS,
    STEP_NOISE_LEVELS,
    Experiment,
    HospitalPlan,
    parse_plan_json,
)
from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.models.zoo.spec import Task, is_segmentation
from polyclinic.common.plugins import METHODS, PLUGIN_PREFIX, load_plugin_entry_point
from polyclinic.common.system.toml import describe_validation_error, suggest_nearest_literal
from polyclinic.strategies.aggregation.robust import RobustMeanRule
from polyclinic.strategies.aggregation.server_optimizer import ServerOptimizer
from polyclinic.strategies.local.losses import find_loss_setting_faults
from polyclinic.strategies.local.method_faults import find_parameter_faults
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.method_list import METHOD_CLASS_PATHS, find_unknown_method_fault
from polyclinic.strategies.methods.base import Method
from polyclinic.strategies.privacy.mechanism import find_privacy_faults, find_secure_aggregation_faults

STRATEGIES: Mapping[str, type[Method]] = {name: resolve_name(place) for name, place in METHOD_CLASS_PATHS.items()}
"""Name -> class of the method's coordinator half, whose ``site_class`` is the hospital's half."""

PARAMETER_TABLES: Mapping[str, type[BaseModel]] = {"server_optimizer": ServerOptimizer, "mean": RobustMeanRule}
"""Keys of ``[method]`` that are tables, and their schemas."""


def find_method_class(name: str) -> type[Method]:
    """Return the class of the coordinator's half of a method, by its name or that of a plug-in.

    Raises:
        BadInput: If there is no such method, or the plug-in is not installed or is no method.
    """
    if name.startswith(PLUGIN_PREFIX):
        kind = load_plugin_entry_point(METHODS, name.removeprefix(PLUGIN_PREFIX))
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            problem = f'"{name}" is {kind!r}, not a subclass of polyclinic.methods.Method.'
            raise BadInput([Fault("run.method", problem)])
        return kind
    if name not in STRATEGIES:
        raise BadInput([find_unknown_method_fault(name)])
    return STRATEGIES[name]


def build_strategy(name: str, parameters: Mapping[str, Any], task: Task = "multi_label") -> Method:
    """Build a method from its name and its ``[method]`` table; the name is in :data:`STRATEGIES` or of a plug-in.

    Raises:
        BadInput: With all faults: an unknown name, unknown keys, invalid or contradictory values.
    """
    kind = find_method_class(name)
    try:
        method = kind(parameters, task)
    except ValidationError as error:
        schema = kind.site_class.traits.parameters_class
        faults = list[Fault]()
        for detail in error.errors(include_url=False):
            key = ".".join(str(step) for step in detail["loc"])
            if detail["type"] == "extra_forbidden":
                table, _, below = key.partition(".")
                valid_keys = PARAMETER_TABLES[table].model_fields if below else schema.model_fields
                nearest = suggest_nearest_name(key.rpartition(".")[2], valid_keys)
                remedy = nearest or f"Known: {quote_names(valid_keys)}."
                faults.append(Fault(f"method.{key}", "is not a parameter of this method.", remedy))
            elif not key:  # a fault of the whole table
                faults.append(Fault("[method]", f"{detail['msg'].removeprefix('Value error, ').rstrip('.')}."))
            else:
                problem = describe_validation_error(dict(detail))
                faults.append(Fault(f"method.{key}", problem, suggest_nearest_literal(dict(detail))))
        raise BadInput(faults) from None
    raise_faults(find_parameter_faults(method.site))
    return method


def list_statistic_meanings() -> dict[str, str]:
    """Return the statistics that sites send in any method: name -> meaning, with the methods in brackets."""
    sent: dict[str, tuple[str, list[str]]] = {}
    for method in (strategy.site_class for strategy in STRATEGIES.values()):
        for statistic in method.traits.payload.statistics:
            sent.setdefault(statistic.name, (statistic.meaning, []))[1].append(f"`{method.traits.name}`")
    return {name: f"{meaning} ({', '.join(methods)})" for name, (meaning, methods) in sent.items()}


def find_segmentation_faults(experiment: Experiment | HospitalPlan, method: SiteMethod) -> list[Fault]:
    """Return a fault for each setting that needs one label for each image, if the task labels each pixel."""
    settings = {
        "privacy.level": (
            experiment.privacy.level in STEP_NOISE_LEVELS,
            f'"{experiment.privacy.level}" clips the gradient of each image\'s label, and here each pixel has one.',
        ),
        "augmentation.transform": (
            experiment.augmentation.transform is not None,
            "moves pixels, and no mask would move with them.",
        ),
        "evaluation.metrics": (bool(experiment.evaluation.metrics), "compute figures of one score for each image."),
        "external_test": (
            getattr(experiment, "external_test", None) is not None and not method.parts.has_global_model,
            f"tests one model, and with {method.name} each site has its own.",
        ),
        "evaluation.compare_local": (experiment.evaluation.compare_local, "compares AUROCs, and there are none."),
    }
    return [Fault(key, problem, "Leave it out.") for key, (is_set, problem) in settings.items() if is_set]


def find_method_faults(tree: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Return the method's faults in an experiment file that has other faults; empty if the method cannot be read.

    Args:
        tree: The experiment file, parsed from TOML.
    """
    run, parameters, model = (tree.get(name, {}) for name in ("run", "method", "model"))
    if not all(isinstance(table, dict) for table in (run, parameters, model)) or not isinstance(run.get("method"), str):
        return ()
    task = model.get("task", "multi_label")
    try:
        build_strategy(run["method"], parameters, task if task in get_args(Task) else "multi_label")
    except BadInput as bad:
        return bad.faults
    return ()


def build_site_method(experiment: Experiment | HospitalPlan) -> SiteMethod:
    """Return the hospital's half of the method of an experiment, or of the plan that a hospital receives.

    Raises:
        BadInput: As :func:`build_experiment_strategy`.
    """
    return build_experiment_strategy(experiment).site


def get_cached_site_method(site: str, plan_text: str) -> SiteMethod:
    """Return the hospital's half of the method of a plan in JSON for one site; cached for all requests of a run.

    Raises:
        BadInput: As :func:`build_experiment_strategy`.
    """
    if len(plan_text) > MAX_CACHED_PLAN_CHARACTERS:
        return build_site_method(parse_plan_json(plan_text))
    return _build_cached_site_method(site, plan_text)


@lru_cache(maxsize=256)
def _build_cached_site_method(site: str, plan_text: str) -> SiteMethod:
    return build_site_method(parse_plan_json(plan_text))


def build_experiment_strategy(experiment: Experiment | HospitalPlan) -> Method:
    """Return the coordinator's half of an experiment's method, after checks of the experiment's other settings.

    Raises:
        BadInput: As :func:`build_strategy`; also if loss, privacy, model or evaluation settings do not fit the method,
            or if the method cannot work with secure aggregation.
    """
    strategy = build_strategy(experiment.run.method, experiment.method, experiment.model.task)
    method = strategy.site
    training = experiment.training
    level = experiment.privacy.level
    raise_faults(find_loss_setting_faults(training, experiment.model.task, method.traits.allows_other_loss, level))
    model = experiment.model
    evaluation = experiment.evaluation
    faults = method.find_training_faults(training)
    if method.parts.freezes_batch_norm and model.norm == "batch":
        # A plan names no weights, because its reader starts from what it gets; a plug-in may bring some.
        trained = model.weights is not None or model.architecture.startswith(PLUGIN_PREFIX)
        trained = trained or isinstance(experiment, HospitalPlan)
        if model.backbone_frozen:  # the layer that standardises features would never learn their mean and variance
            problem = f'"{model.train}" standardises features by batch normalisation, which {method.name} freezes.'
            hint = 'Set model.norm = "group", which standardises each image by itself.'
            faults.append(Fault("model.train", problem, hint))
        elif not trained:
            problem = f"there are none, and {method.name} freezes batch normalisation as it is in pre-trained weights."
            hint = 'Give weights (make weights downloads some), or set method.trunk = "fedavg" or model.norm = "group".'
            faults.append(Fault("model.weights", problem, hint))
    if model.takes_volumes and not method.traits.supports_volumes:
        problem = f"{method.name} changes images by rules for pictures, and the network takes volumes."
        faults.append(Fault("run.method", problem, 'Use "surgical" or "partial_loss", which train on volumes.'))
    if evaluation.sites and not method.parts.has_global_model:
        ends = "in this run each site ends with a model of its own, which its own test chooses"
        problem = f"is {evaluation.sites}, but {ends}."
        hint = "Leave it out: all sites are asked."
        faults.append(Fault("evaluation.sites", problem, hint))
    if evaluation.compare_local and (method.pooled_missing_labels != "no" or method.parts.trains_alone):
        alone = method.pooled_missing_labels == "no"
        why = "every site trains alone already" if alone else "all images are in one place"
        faults.append(Fault("evaluation.compare_local", f"makes no sense in {method.name}: {why}.", "Leave it out."))
    if is_segmentation(model.task):
        faults += find_segmentation_faults(experiment, method)
    raise_faults(faults)
    raise_faults(find_privacy_faults(method, experiment))
    if experiment.privacy.secure_aggregation:
        raise_faults(find_secure_aggregation_faults(method))
    return strategy
