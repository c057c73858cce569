import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.models.network import Head, SplitNetwork, build_network, draw_initial_head
from common.models.state import (
    ModelState,
    hash_model_state,
    join_tensors_into_state,
    make_model_layout,
    read_model_state,
    split_state_into_tensors,
    write_model_state,
)
from common.models.zoo.spec import ModelSpec

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


@settings(max_examples=20)
@given(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), seed=st.integers(0, 5))
def test_a_state_written_into_another_network_is_read_back_bit_for_bit(names: list[str], seed: int) -> None:
    source, target = network(tuple(names), seed), network(tuple(reversed(names)), seed + 1)
    state = read_model_state(source)
    write_model_state(target, state.trunk, state.norm, state.head)
    again = read_model_state(target)
    assert again.trunk.tobytes() == state.trunk.tobytes()
    assert again.norm.tobytes() == state.norm.tobytes()
    assert again.head.select_rows(names).weight.tobytes() == state.head.weight.tobytes()
    assert again.head.select_rows(names).bias.tobytes() == state.head.bias.tobytes()


@settings(max_examples=20)
@given(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
def test_a_network_takes_its_own_rows_of_a_larger_head(names: list[str]) -> None:
    whole, site = read_model_state(network()), network(tuple(names), seed=1)
    write_model_state(site, head=whole.head)
    np.testing.assert_array_equal(read_model_state(site).head.weight, whole.head.select_rows(names).weight)


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


def test_read_only_arrays_as_they_come_off_the_wire_are_accepted() -> None:
    source, target = network(), network(seed=1)
    state = read_model_state(source)
    trunk, norm, weight, bias = (
        np.frombuffer(values.tobytes(), np.float32)
        for values in (state.trunk, state.norm, state.head.weight, state.head.bias)
    )
    write_model_state(target, trunk, norm, Head(NAMES, weight.reshape(5, 5), bias))
    assert hash_model_state(read_model_state(target), make_model_layout(target)) == hash_model_state(
        state, make_model_layout(source)
    )


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


def test_named_tensors_and_back_is_the_same_state() -> None:
    state, layout = read_model_state(network()), make_model_layout(network())
    again = join_tensors_into_state(split_state_into_tensors(state, layout), layout, NAMES)
    assert hash_model_state(again, layout) == hash_model_state(state, layout)


def test_named_tensors_of_another_shape_are_refused_by_name() -> None:
    layout = make_model_layout(network())
    named = split_state_into_tensors(read_model_state(network()), layout) | {"head.bias": np.zeros(9, np.float32)}
    with pytest.raises(ValueError, match=r"head\.bias: expected \(5,\), got \(9,\)"):
        join_tensors_into_state(named, layout, NAMES)


def test_the_hash_notices_one_changed_bit() -> None:
    state, layout = read_model_state(network()), make_model_layout(network())
    norm = state.norm.copy()
    norm[0] = np.nextafter(norm[0], np.float32(2))
    assert hash_model_state(ModelState(state.trunk, norm, state.head), layout) != hash_model_state(state, layout)


def test_a_new_row_for_a_late_class_needs_no_other_class() -> None:
    late = draw_initial_head(("Hernia",), features=5, seed=0)
    assert np.array_equal(
        late.weight, read_model_state(network((*NAMES, "Hernia"))).head.select_rows(("Hernia",)).weight
    )
