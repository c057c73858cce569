import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import load_file

from polyclinic.common.models.network import Head, SplitNetwork, build_network, draw_initial_head
from polyclinic.common.models.saved import load_model, save_model
from polyclinic.common.models.state import (
    ModelState,
    hash_model_state,
    join_tensors_into_state,
    make_model_layout,
    read_model_state,
    split_state_into_tensors,
    write_model_state,
)
from polyclinic.common.models.zoo.spec import ModelSpec

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=5)
NAMES = ("Atelectasis", "Effusion", "Mass", "Nodule", "Pneumonia")


def network(names: tuple[str, ...] = NAMES, seed: int = 0) -> SplitNetwork:
    return build_network(SPEC, names, seed)


def head() -> Head:
    weight = np.array([[1.0, -2.0], [3.5, 4.0], [-5.0, 6.0]], dtype=np.float32)
    return Head(("a", "b", "c"), weight, np.array([7.0, -8.0, 9.0], dtype=np.float32))


def test_trunk_and_norm_hold_everything_but_the_head_and_the_counters() -> None:
    layout = make_model_layout(network())
    # Convolutions 216 + 10,368 + 41,472 and neck 96*5 + 5; BatchNorm four tensors each of 24, 48, 96.
    sizes = [sum(tensor.size for tensor in group) for group in (layout.trunk, layout.norm)]
    assert (*sizes, layout.features) == (52_541, 672, 5)
    grouped = [tensor.name for tensor in (*layout.trunk, *layout.norm)]
    others = set(network().state_dict()) - set(grouped)
    assert others == {"head.weight", "head.bias", *(f"backbone.{block}.1.num_batches_tracked" for block in range(3))}
    first = [tensor.name for tensor in layout.norm][:4]
    assert first == [f"backbone.0.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]


@settings(max_examples=25)
@given(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), seed=st.integers(0, 5))
def test_a_state_written_into_another_network_is_read_back_bit_for_bit_row_by_name(names: list[str], seed: int) -> None:
    source, target = network(seed=seed), network(tuple(names), seed + 1)
    state = read_model_state(source)
    trunk, norm, weight, bias = (
        np.frombuffer(values.tobytes(), np.float32)  # read-only, as they come off the wire
        for values in (state.trunk, state.norm, state.head.weight, state.head.bias)
    )
    write_model_state(target, trunk, norm, Head(NAMES, weight.reshape(5, 5), bias))
    again, rows = read_model_state(target), state.head.select_rows(names)
    assert again.trunk.tobytes() == state.trunk.tobytes()
    assert again.norm.tobytes() == state.norm.tobytes()
    assert again.head.weight.tobytes() == rows.weight.tobytes()
    assert again.head.bias.tobytes() == rows.bias.tobytes()


def test_a_read_state_is_a_copy_and_a_written_one_is_not_held_on_to() -> None:
    source = network()
    state = read_model_state(source)
    before = hash_model_state(state, make_model_layout(source))
    write_model_state(source, state.trunk + 1, state.norm + 1)
    assert hash_model_state(state, make_model_layout(source)) == before
    write_model_state(source, state.trunk, state.norm, state.head)
    with torch.no_grad():
        source.head.weight.zero_()
        source.backbone.get_parameter("0.0.weight").zero_()
    assert hash_model_state(state, make_model_layout(source)) == before


def test_groups_that_are_not_given_stay() -> None:
    source = network()
    state = read_model_state(source)
    write_model_state(source, norm=state.norm * 2)
    assert np.array_equal(read_model_state(source).trunk, state.trunk)
    assert np.array_equal(read_model_state(source).norm, state.norm * 2)


def test_a_wrong_size_is_refused_before_anything_is_written() -> None:
    source = network()
    state = read_model_state(source)
    with pytest.raises(ValueError, match=r"norm of this network is flat and holds 672 values, got shape \(671,\)"):
        write_model_state(source, state.trunk * 0, state.norm[1:])
    assert np.array_equal(read_model_state(source).trunk, state.trunk)


def test_rows_come_by_name_in_the_order_asked_and_a_missing_one_is_named() -> None:
    rows = head().select_rows(("c", "a"))
    assert rows.class_names == ("c", "a")
    assert rows.weight.tolist() == [[-5.0, 6.0], [1.0, -2.0]]
    assert rows.bias.tolist() == [9.0, 7.0]
    with pytest.raises(LookupError, match='no row for "d"; this head has "a", "b", "c"'):
        head().select_rows(("a", "d"))


@pytest.mark.parametrize(
    ("names", "weight", "bias"),
    [
        (("a", "a"), np.zeros((2, 3), np.float32), np.zeros(2, np.float32)),
        (("a", "b"), np.zeros((2, 3), np.float64), np.zeros(2, np.float32)),
        (("a", "b"), np.zeros((3, 3), np.float32), np.zeros(2, np.float32)),
        (("a", "b"), np.zeros(2, np.float32), np.zeros(2, np.float32)),
        (("a", "b"), np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)),
    ],
)
def test_a_head_that_does_not_fit_together_is_refused(
    names: tuple[str, ...], weight: np.ndarray, bias: np.ndarray
) -> None:
    with pytest.raises(ValueError, match=r"head|expected"):
        Head(names, weight, bias)


def test_a_state_that_is_not_flat_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="norm is flat float32, got float64"):
        ModelState(np.zeros(1, np.float32), np.zeros(1), head())


def test_the_signature_is_the_same_for_other_classes_and_differs_for_another_model() -> None:
    signature = make_model_layout(network()).layout_sha256
    assert make_model_layout(network(("Fracture",))).layout_sha256 == signature
    others = [SPEC.model_copy(update={"neck": 6}), SPEC.model_copy(update={"channels": 3})]
    assert len({signature, *(make_model_layout(build_network(spec, NAMES, 0)).layout_sha256 for spec in others)}) == 3


def test_slices_find_a_tensor_in_its_group() -> None:
    source = network()
    where = make_model_layout(source).tensor_slices()["backbone.1.1.running_var"]
    assert where == slice(4 * 24 + 3 * 48, 4 * 24 + 4 * 48)
    assert read_model_state(source).norm[where].tolist() == [1.0] * 48


def test_named_tensors_and_back_is_the_same_state_and_another_shape_is_refused_by_name() -> None:
    state, layout = read_model_state(network()), make_model_layout(network())
    named = split_state_into_tensors(state, layout)
    again = join_tensors_into_state(named, layout, NAMES)
    assert hash_model_state(again, layout) == hash_model_state(state, layout)
    with pytest.raises(ValueError, match=r"head\.bias: expected \(5,\), got \(9,\)"):
        join_tensors_into_state(named | {"head.bias": np.zeros(9, np.float32)}, layout, NAMES)


def test_the_hash_notices_one_changed_bit() -> None:
    state, layout = read_model_state(network()), make_model_layout(network())
    norm = state.norm.copy()
    norm[0] = np.nextafter(norm[0], np.float32(2))
    assert hash_model_state(ModelState(state.trunk, norm, state.head), layout) != hash_model_state(state, layout)


def test_a_new_row_for_a_late_class_needs_no_other_class() -> None:
    late = draw_initial_head(("Hernia",), features=5, seed=0)
    whole = read_model_state(network((*NAMES, "Hernia"))).head
    assert np.array_equal(late.weight, whole.select_rows(("Hernia",)).weight)


def test_a_saved_model_is_loaded_with_nothing_else_at_hand_and_described(tmp_path: Path) -> None:
    source = network(("Mass", "Effusion")).eval()
    saved = save_model(tmp_path, source, label_contract_sha256="c0ffee")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    description = json.loads((tmp_path / "model.json").read_text())
    assert description["class_names"] == ["Mass", "Effusion"]
    assert description["label_contract_sha256"] == "c0ffee"
    assert description["model"]["mean"] == [0.5]
    tensors = (tmp_path / "model.safetensors").read_bytes()
    assert description["safetensors_sha256"] == hashlib.sha256(tensors).hexdigest()
    loaded = load_model(tmp_path)
    images = torch.arange(2 * 16 * 16, dtype=torch.float32).reshape(2, 1, 16, 16) % 256
    assert loaded.class_names == ("Mass", "Effusion")
    assert not loaded.training
    assert torch.equal(loaded(images), source(images))
    assert saved.model_sha256 == hash_model_state(read_model_state(loaded), make_model_layout(loaded))


def test_all_faults_are_reported_at_once() -> None:
    fields = {"architecture": "tiny_cnn", "channels": 1, "image_size": 8, "mean": [0.5, 0.5], "colour": True}
    with pytest.raises(ValidationError) as refused:
        ModelSpec.model_validate(fields)
    assert {fault["loc"] for fault in refused.value.errors()} == {("image_size",), ("mean",), ("colour",)}


def test_normalisation_follows_the_architecture_where_it_is_not_given() -> None:
    lite = ModelSpec(architecture="efficientnet_lite0", image_size=32).normalisation
    assert lite.mean == (127 / 255,) * 3
    assert lite.std == (128 / 255,) * 3
    grey = ModelSpec(architecture="tiny_cnn", image_size=16, channels=1, mean=(0.25,)).normalisation
    assert (grey.mean, grey.std) == ((0.25,), (0.5,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_of_one_number_keeps_its_shape_and_is_saved_as_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Networks such as timm's dm_nfnet_f0 scale a block by one number."""
    scaled = network()
    scaled.backbone.gain = torch.nn.Parameter(torch.tensor(0.5, dtype=dtype))
    save_model(tmp_path, scaled, label_contract_sha256="")
    saved = load_file(tmp_path / "model.safetensors")["backbone.gain"]
    assert (saved.shape, saved.dtype, float(saved)) == ((), np.float32, 0.5)
    expected = split_state_into_tensors(read_model_state(scaled), make_model_layout(scaled))
    assert set(load_file(tmp_path / "model.safetensors")) == set(expected)
