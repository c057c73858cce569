"""The coordinator's state as bytes, and back: tensors by name, facts as JSON; nothing is pickled."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load

from common.errors import quoted
from common.models.state import ModelState
from common.system.files import Parts
from common.system.toml import Section
from common.wire.records import Groups, arrays_under
from strategies.engine.state import FederationState
from strategies.local.site_method import Criterion

_FACTS, _KINDS = "facts", ("model", "best", "moments", "statistics")
_DTYPES = {
    **{"<u8": "U64", "<i8": "I64", "<f8": "F64", "<f4": "F32", "<u4": "U32", "<i4": "I32"},
    **{"<f2": "F16", "<u2": "U16", "<i2": "I16", "|i1": "I8", "|u1": "U8", "|b1": "BOOL"},
}
"""As safetensors calls them, in its own order: the widest first, so that each lies at a multiple of its width."""


class _Facts(Section):
    round: int
    best_round: int
    best_losses: dict[str, float]
    lowest_losses: dict[str, float] = Field(default_factory=dict)
    criterion: Criterion | None = None
    counted: dict[str, int]
    left_out: dict[str, str]
    class_names: tuple[str, ...]
    excluded: dict[str, str] = Field(default_factory=dict)
    sound_losses: dict[str, float] = Field(default_factory=dict)
    repeated: int = 0
    next_trial: int = 0
    lengths: dict[str, dict[str, float]] = Field(default_factory=dict)


def to_bytes(state: FederationState) -> bytes:
    """Write a state as safetensors."""
    return b"".join(to_parts(state))


def to_parts(state: FederationState) -> Parts:
    """Return what :func:`to_bytes` joins: parts that hold the arrays themselves.

    To copy a large model takes as long as to write it.
    """
    facts = {
        "round": state.round,
        "best_round": state.best_round,
        "best_losses": dict(state.best_losses),
        "lowest_losses": dict(state.lowest_losses),
        "criterion": state.criterion,
        "counted": dict(state.counted),
        "left_out": dict(state.left_out),
        "class_names": list(state.model.head.class_names),
        "excluded": dict(state.excluded),
        "sound_losses": dict(sorted(state.sound_losses.items())),  # the same bytes no matter who replied first
        "repeated": state.repeated,
        "next_trial": state.next_trial,
        "lengths": {site: dict(state.lengths[site]) for site in sorted(state.lengths)},
    }
    tensors = _named("model", state.model) | (_named("best", state.best) if state.best else {})
    for kind in ("moments", "statistics"):
        tensors |= {f"{kind}/{name}": array for name, array in getattr(state, kind).items()}
    tensors[_FACTS] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    return _parts({name: np.asarray(array, order="C") for name, array in tensors.items()})


def _parts(tensors: Mapping[str, NDArray[Any]]) -> Parts:
    """The format of safetensors: the length of the header (8 bytes), the header as JSON, the tensors."""
    widest_first = list(_DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (widest_first.index(item[1].dtype.str), item[0]))
    header, end = dict[str, object](), 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.str], "shape": array.shape, "data_offsets": (begin, end)}
    written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    written += b" " * (-len(written) % 8)
    data = [array.reshape(-1).view(np.uint8).data for _, array in ordered if array.nbytes]
    return [len(written).to_bytes(8, "little"), written, *data]


def of_bytes(content: bytes) -> FederationState:
    """The inverse of :func:`to_bytes`.

    Raises:
        ValueError: If they are no state.
    """
    try:
        tensors = load(content)
        facts = _Facts.model_validate_json(tensors[_FACTS].tobytes())
        if more := sorted(name for name in tensors if name != _FACTS and name.partition("/")[0] not in _KINDS):
            raise ValueError(f"it holds {quoted(more)}, which no state has")
        names = facts.class_names
        return FederationState(
            round=facts.round,
            model=_model("model", tensors, names),
            best=_model("best", tensors, names) if "best/trunk" in tensors else None,
            best_round=facts.best_round,
            best_losses=MappingProxyType(facts.best_losses),
            # An earlier release did not write them: the best model's own are a beginning.
            lowest_losses=MappingProxyType(facts.lowest_losses or facts.best_losses),
            # An earlier release knew validation losses only: a run that began with them goes on with them.
            criterion=facts.criterion or ("loss" if facts.best_losses else None),
            counted=MappingProxyType(facts.counted),
            moments=MappingProxyType(arrays_under("moments", tensors)),
            statistics=MappingProxyType(arrays_under("statistics", tensors)),
            left_out=MappingProxyType(facts.left_out),
            excluded=MappingProxyType(facts.excluded),
            sound_losses=MappingProxyType(facts.sound_losses),
            repeated=facts.repeated,
            next_trial=facts.next_trial,
            lengths=MappingProxyType(facts.lengths),
        )
    except (SafetensorError, LookupError, TypeError) as error:
        raise ValueError(f"it holds no state of a federation: {error}") from None


def _named(prefix: str, model: ModelState) -> dict[str, NDArray[Any]]:
    return {f"{prefix}/{name}": array for name, array in Groups.of_model(model).named().items()}


def _model(prefix: str, tensors: Mapping[str, NDArray[Any]], names: tuple[str, ...]) -> ModelState:
    return Groups.of_named(arrays_under(prefix, tensors), names).model()
