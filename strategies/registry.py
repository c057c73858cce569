"""The methods by name: one registry, read on both sides of the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from common.errors import BadInput, Fault, did_you_mean, quoted
from strategies import baselines
from strategies.method import Method, Parameters
from strategies.surgical import surgical


@dataclass(frozen=True)
class Entry:
    """A method's builder with the schema of its ``[method]`` table."""

    build: Callable[[Any], Method]
    parameters: type[Parameters] = Parameters


STRATEGIES: Mapping[str, Entry] = {
    "surgical": Entry(surgical),
    "vanilla": Entry(baselines.vanilla),
    "partial_loss": Entry(baselines.partial_loss),
    "pfl": Entry(baselines.pfl),
    "individual": Entry(baselines.individual),
    "centralised": Entry(baselines.centralised, baselines.CentralisedParameters),
    "fedavg": Entry(baselines.fedavg, baselines.FedAvgParameters),
    "fedbn": Entry(baselines.fedbn, baselines.FedBNParameters),
    "fedbn_plus": Entry(baselines.fedbn_plus, baselines.FedBNPlusParameters),
}


def method_named(name: str, parameters: Mapping[str, Any]) -> Method:
    """Build a method from its name and its ``[method]`` table.

    Raises:
        BadInput: For an unknown name, unknown keys or bad values, all at once.
    """
    if name not in STRATEGIES:
        remedy = did_you_mean(name, STRATEGIES) or f"Methods: {quoted(STRATEGIES)}."
        raise BadInput([Fault("run.method", f'"{name}" is not a method.', remedy)])
    entry = STRATEGIES[name]
    try:
        return entry.build(entry.parameters.model_validate(dict(parameters)))
    except ValidationError as error:
        raise BadInput([_explain(dict(one), entry.parameters) for one in error.errors(include_url=False)]) from None


def _explain(one: dict[str, Any], schema: type[Parameters]) -> Fault:
    key = ".".join(str(step) for step in one["loc"])
    if one["type"] == "extra_forbidden":
        known = schema.model_fields
        return Fault(
            f"method.{key}",
            "is not a parameter of this method.",
            did_you_mean(key, known) or f"Known: {quoted(known)}.",
        )
    return Fault(f"method.{key}", f"{one['msg'].rstrip('.')}; got {one.get('input')!r}.")
