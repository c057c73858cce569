"""The methods by name: one registry, read on both sides of the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from common.config import Experiment, Plan
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from common.models.zoo.spec import Task
from common.system.toml import in_words, near_literal
from strategies.aggregation.robust import RobustMean
from strategies.aggregation.server_optimizer import ServerOptimizer
from strategies.base.method import Method, Parameters
from strategies.comparators import baselines
from strategies.comparators.cbafed import CBAFedParameters, cbafed
from strategies.comparators.fedfixmatch import FedFixMatchParameters, fedfixmatch
from strategies.comparators.fedirm.method import FedIRMParameters, fedirm
from strategies.comparators.fedlsr import FedLSRParameters, fedlsr
from strategies.comparators.fednoro.method import FedNoRoParameters, fednoro
from strategies.comparators.rscfed import RSCFedParameters, rscfed
from strategies.fedmlp.method import FedMLPParameters, fedmlp
from strategies.fedsld.method import FedSLDParameters, ScaledParameters, fedavg_scaled, fedsld
from strategies.privacy.protection import privacy_faults
from strategies.privacy.secure_aggregation.supported import contradictions
from strategies.surgical import surgical
from strategies.unifed.method import (
    SequentialParameters,
    ServerOnlyParameters,
    UniFedParameters,
    fedseq,
    server_only,
    unifed,
)


@dataclass(frozen=True)
class RegisteredMethod:
    """A method's builder with the schema of its ``[method]`` table."""

    build: Callable[[Any, Task], Method]
    parameters: type[BaseModel] = Parameters


STRATEGIES: Mapping[str, RegisteredMethod] = {
    "surgical": RegisteredMethod(surgical),
    "fedsld": RegisteredMethod(fedsld, FedSLDParameters),
    "fedmlp": RegisteredMethod(fedmlp, FedMLPParameters),
    "rscfed": RegisteredMethod(rscfed, RSCFedParameters),
    "cbafed": RegisteredMethod(cbafed, CBAFedParameters),
    "fednoro": RegisteredMethod(fednoro, FedNoRoParameters),
    "unifed": RegisteredMethod(unifed, UniFedParameters),
    "vanilla": RegisteredMethod(baselines.vanilla),
    "partial_loss": RegisteredMethod(baselines.partial_loss),
    "pfl": RegisteredMethod(baselines.pfl),
    "individual": RegisteredMethod(baselines.individual),
    "centralised": RegisteredMethod(baselines.centralised, baselines.CentralisedParameters),
    "fedavg": RegisteredMethod(baselines.fedavg, baselines.FedAvgParameters),
    "fedbn": RegisteredMethod(baselines.fedbn, baselines.FedBNParameters),
    "fedbn_plus": RegisteredMethod(baselines.fedbn_plus, baselines.FedBNPlusParameters),
    "fedprox": RegisteredMethod(baselines.fedprox, baselines.FedProxParameters),
    "fedavg_scaled": RegisteredMethod(fedavg_scaled, ScaledParameters),
    "fedseq": RegisteredMethod(fedseq, SequentialParameters),
    "server_only": RegisteredMethod(server_only, ServerOnlyParameters),
    "fedlsr": RegisteredMethod(fedlsr, FedLSRParameters),
    "fedfixmatch": RegisteredMethod(fedfixmatch, FedFixMatchParameters),
    "fedirm": RegisteredMethod(fedirm, FedIRMParameters),
}

TABLES: Mapping[str, type[BaseModel]] = {"server_optimizer": ServerOptimizer, "mean": RobustMean}
"""Keys of ``[method]`` that are tables."""


def method_named(name: str, parameters: Mapping[str, Any], task: Task = "multi_label") -> Method:
    """Build a method from its name and its ``[method]`` table.

    Raises:
        BadInput: For an unknown name, unknown keys, bad values or values that contradict one another, all at once.
    """
    if name not in STRATEGIES:
        remedy = did_you_mean(name, STRATEGIES) or f"Methods: {quoted(STRATEGIES, limit=len(STRATEGIES))}."
        raise BadInput([Fault("run.method", f'"{name}" is not a method.', remedy)])
    entry = STRATEGIES[name]
    try:
        method = entry.build(entry.parameters.model_validate(dict(parameters)), task)
    except ValidationError as error:
        raise BadInput([_explain(dict(one), entry.parameters) for one in error.errors(include_url=False)]) from None
    stop_on(method.contradictions())
    return method


def statistics_told() -> list[str]:
    """The names of all statistics that sites tell in any method."""
    return sorted({name for method in STRATEGIES for name in method_named(method, {}).tells})


def method_faults(tree: Mapping[str, Any]) -> tuple[Fault, ...]:
    """What is wrong with the method of an experiment file that has other faults, as far as one can tell from it."""
    run, parameters, model = (tree.get(name, {}) for name in ("run", "method", "model"))
    if not all(isinstance(table, dict) for table in (run, parameters, model)) or not isinstance(run.get("method"), str):
        return ()
    task = model.get("task", "multi_label")
    try:
        method_named(run["method"], parameters, "multi_class" if task == "multi_class" else "multi_label")
    except BadInput as bad:
        return bad.faults
    return ()


def method_of(experiment: Experiment | Plan) -> Method:
    """:func:`method_named` by an experiment, or by the part of it that a hospital gets.

    Raises:
        BadInput: Also where the experiment's privacy makes no sense with it, or it asks for secure aggregation and the
            method needs more than sums.
    """
    method = method_named(experiment.run.method, experiment.method, experiment.model.task)
    stop_on(privacy_faults(method, experiment))
    if experiment.privacy.secure_aggregation:
        stop_on(contradictions(method))
    return method


def _explain(one: dict[str, Any], schema: type[BaseModel]) -> Fault:
    key = ".".join(str(step) for step in one["loc"])
    if one["type"] == "extra_forbidden":
        table, _, below = key.partition(".")
        known = TABLES[table].model_fields if below else schema.model_fields
        return Fault(
            f"method.{key}",
            "is not a parameter of this method.",
            did_you_mean(key.rpartition(".")[2], known) or f"Known: {quoted(known)}.",
        )
    if not key:  # of the table as a whole
        return Fault("[method]", f"{one['msg'].removeprefix('Value error, ').rstrip('.')}.")
    return Fault(f"method.{key}", in_words(one), near_literal(one))
