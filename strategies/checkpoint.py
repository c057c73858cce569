"""The coordinator's state as bytes, and back: tensors by name, facts as JSON; nothing is pickled."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from common.models.state import ModelState
from common.records import Groups, below
from common.toml_files import Section
from strategies.state import FederationState

_FACTS = "facts"


class _Facts(Section):
    round: int
    best_round: int
    best_losses: dict[str, float]
    counted: dict[str, int]
    left_out: dict[str, str]
    class_names: tuple[str, ...]


def to_bytes(state: FederationState) -> bytes:
    """Write a state as safetensors."""
    facts = {
        "round": state.round,
        "best_round": state.best_round,
        "best_losses": dict(state.best_losses),
        "counted": dict(state.counted),
        "left_out": dict(state.left_out),
        "class_names": list(state.model.head.class_names),
    }
    tensors = _named("model", state.model) | (_named("best", state.best) if state.best else {})
    for kind in ("moments", "statistics"):
        tensors |= {f"{kind}/{name}": array for name, array in getattr(state, kind).items()}
    tensors[_FACTS] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    return save({name: np.asarray(array, order="C") for name, array in tensors.items()})


def of_bytes(content: bytes) -> FederationState:
    """The inverse of :func:`to_bytes`.

    Raises:
        ValueError: If they are no state.
    """
    try:
        tensors = load(content)
        facts = _Facts.model_validate_json(tensors[_FACTS].tobytes())
        names = facts.class_names
        return FederationState(
            round=facts.round,
            model=_model("model", tensors, names),
            best=_model("best", tensors, names) if "best/trunk" in tensors else None,
            best_round=facts.best_round,
            best_losses=MappingProxyType(facts.best_losses),
            counted=MappingProxyType(facts.counted),
            moments=MappingProxyType(below("moments", tensors)),
            statistics=MappingProxyType(below("statistics", tensors)),
            left_out=MappingProxyType(facts.left_out),
        )
    except (SafetensorError, LookupError, TypeError) as error:
        raise ValueError(f"it holds no state of a federation: {error}") from None


def _named(prefix: str, model: ModelState) -> dict[str, NDArray[Any]]:
    return {f"{prefix}/{name}": array for name, array in Groups.of_model(model).named().items()}


def _model(prefix: str, tensors: Mapping[str, NDArray[Any]], names: tuple[str, ...]) -> ModelState:
    return Groups.of_named(below(prefix, tensors), names).model()
