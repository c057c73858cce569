"""The authors' own numbers for surgical aggregation: executed there, reproduced here."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.engine.state import FederationState, update_best_model
from polyclinic.strategies.local.losses import missing_as_negative_loss, partial_loss
from tests.federations import read_vectors
from tests.strategies.folds import aggregated, owners_mean
from tests.strategies.states import TINY

VECTOR = read_vectors("surgical.json")
pytestmark = pytest.mark.skipif(not VECTOR, reason="../shared/vectors/surgical.json is absent")
CASES = {case["name"]: case for case in VECTOR.get("head_aggregation", [])}


def head(labels: list[str], values: dict[str, Any]) -> Head:
    """A Keras head, kernel [in, classes], as ours."""
    weight = np.array(values["kernel_in_out"], np.float32).T.copy()
    return Head(tuple(labels), weight, np.array(values["bias"], np.float32))


@pytest.mark.parametrize("name", sorted(CASES))
def test_global_head_and_every_clients_head_are_the_authors(name: str) -> None:
    case = CASES[name]
    heads = [head(*pair) for pair in zip(case["local_labels"], case["local_heads_in"], strict=True)]
    names = tuple(case["global_labels_sorted_union"])
    assert names == tuple(sorted({label for labels in case["local_labels"] for label in labels}))
    weight, bias, sent = owners_mean(heads, [1.0] * len(heads), names)
    expected = head(list(names), case["expected_global_head"])
    assert sent.all()
    np.testing.assert_allclose(weight, expected.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected.bias, rtol=1e-5, atol=1e-6)
    merged = Head(names, weight.astype(np.float32), bias.astype(np.float32))
    for labels, out in zip(case["local_labels"], case["expected_local_heads_out"], strict=True):
        local, theirs = merged.select_rows(tuple(labels)), head(labels, out)
        np.testing.assert_allclose(local.weight, theirs.weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(local.bias, theirs.bias, rtol=1e-5, atol=1e-6)


NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def backbone(index: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's dense layer and batch normalisation, flat."""
    vector = VECTOR["backbone_aggregation"]
    dense, norm = vector["dense_in"][index], vector["bn_in"][index]
    trunk = np.concatenate([np.ravel(dense["kernel_in_out"]), dense["bias"]])
    return trunk.astype(np.float32), np.concatenate([norm[k] for k in NORM]).astype(np.float32)


def reply(trunk: np.ndarray, norm: np.ndarray | None) -> TrainReply:
    return TrainReply("run", 1, "site", 10, 0.5, None, None, 1.0, ModelGroups(trunk, norm))


@pytest.mark.parametrize("trunk_rule", ["FedAvg", "FedBN"])
def test_the_backbone_is_averaged_with_or_without_batch_normalisation(trunk_rule: str) -> None:
    vector = VECTOR["backbone_aggregation"]
    expected = vector[trunk_rule]
    began = np.concatenate([vector["global_bn_before"][key] for key in NORM]).astype(np.float32)
    clients = [backbone(index) for index in range(3)]
    start = np.full_like(clients[0][0], 0.25)
    sends_norm = trunk_rule == "FedAvg"
    replies = [reply(trunk - start, norm - began if sends_norm else None) for trunk, norm in clients]
    before = ModelState(start, began, Head(("a",), np.zeros((1, 2), np.float32), np.zeros(1, np.float32)))
    after = aggregated(before, replies, [1.0] * 3)
    dense = np.concatenate([np.ravel(expected["dense_kernel_in_out"]), expected["dense_bias"]])
    averaged = expected.get("bn_all_clients_and_global", vector["global_bn_before"])
    np.testing.assert_allclose(after.trunk, dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.norm, np.concatenate([averaged[key] for key in NORM]), rtol=1e-5, atol=1e-6)


def test_partial_and_full_loss_are_the_authors() -> None:
    # The vector's "full" loss takes its y as it stands, a positive of a class the client does not label included.
    vector = VECTOR["partial_loss"]
    names, own = vector["global_labels"], vector["local_labels"]
    annotated = torch.tensor([name in own for name in names])
    truth = torch.tensor(vector["y"])
    labels = torch.where(annotated, truth, torch.nan)
    logits = torch.logit(torch.tensor(vector["prob"]))
    partial = partial_loss(logits, labels, annotated)
    full = missing_as_negative_loss(logits, truth, torch.ones(len(names), dtype=torch.bool))
    assert float(partial) == pytest.approx(vector["expected_partial_bce"], rel=1e-5)
    assert float(full) == pytest.approx(vector["expected_full_bce_missing_as_negative"], rel=1e-5)


def test_vanilla_takes_what_a_site_does_not_annotate_as_absent_and_leaves_the_uncertain_out() -> None:
    logits = torch.logit(torch.tensor([[0.9, 0.2, 0.4]], dtype=torch.float64))
    labels = torch.tensor([[float("nan"), 1.0, float("nan")]], dtype=torch.float64)
    annotated = torch.tensor([False, True, True])
    # a: not annotated -> absent, -ln(1 - .9); b: present, -ln(.2); c: annotated but uncertain -> left out
    expected = (2.302585093 + 1.609437912) / 2
    assert float(missing_as_negative_loss(logits, labels, annotated)) == pytest.approx(expected, rel=1e-6)
    assert float(partial_loss(logits, labels, annotated)) == pytest.approx(1.609437912, rel=1e-6)


@pytest.mark.parametrize("case", VECTOR.get("model_selection", {}).get("cases", []))
def test_the_rounds_saved_as_best_are_the_authors(case: dict[str, Any]) -> None:
    stop = case["stop_round_index"]
    losses = case["mean_val_loss"][: None if stop is None else stop + 1]
    state, saved = FederationState(0, TINY), []
    for index, loss in enumerate(losses):
        state = update_best_model(replace(state, round=index), {"north": loss - 0.1, "south": loss + 0.1}, 2)
        saved += [index] if state.best_round == index else []
    assert saved == case["rounds_saved_as_best"]
