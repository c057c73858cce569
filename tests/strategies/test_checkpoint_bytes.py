"""The coordinator's state in the safetensors format: we write it, the safetensors library reads it."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load, save

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.strategies.engine.state import (
    _DTYPES,
    FederationState,
    _serialize_as_safetensors_parts,
    deserialize_federation_state,
    serialize_federation_state,
    serialize_federation_state_parts,
)

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
ARRAYS = st.sampled_from(sorted(_DTYPES)).flatmap(
    lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)


def facts(tensors: dict[str, NDArray[np.generic]]) -> dict[str, object]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in tensors.items()}


@given(st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), ARRAYS, max_size=5))
def test_the_library_reads_what_was_written(tensors: dict[str, NDArray[np.generic]]) -> None:
    read = load(b"".join(_serialize_as_safetensors_parts(tensors)))
    assert facts(read) == facts(load(save(tensors))) == facts(tensors)


def state() -> FederationState:
    draws = np.random.default_rng(0)
    trunk, weight = draws.normal(size=1000).astype(np.float32), draws.normal(size=(3, 4)).astype(np.float32)
    model = ModelState(trunk, np.zeros(0, np.float32), Head(("b", "a", "c"), weight, weight[:, 0].copy()))
    moments = {"step": np.array(3), "trunk": draws.normal(size=1000)}
    return FederationState(3, model, best=model, best_round=1, moments=moments)


def test_a_state_s_bytes_are_the_library_s() -> None:
    tensors = load(serialize_federation_state(state()))
    assert serialize_federation_state(state()) == save({name: tensors[name] for name in tensors})


def test_a_large_array_is_not_copied() -> None:
    whole = state()
    places = {
        np.frombuffer(part, np.uint8).__array_interface__["data"][0] for part in serialize_federation_state_parts(whole)
    }
    assert whole.model.trunk.__array_interface__["data"][0] in places
    assert serialize_federation_state(
        deserialize_federation_state(serialize_federation_state(whole))
    ) == serialize_federation_state(whole)


def test_an_array_of_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        _serialize_as_safetensors_parts({"x": np.zeros(3, complex)})
