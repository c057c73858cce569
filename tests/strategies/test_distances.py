"""Distances of models from one another and from their mean, by the inner products of their updates."""

import numpy as np
import pytest

from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.aggregation import robust
from polyclinic.strategies.aggregation.robust import (
    compute_distances_between_models,
    compute_distances_from_mean_model,
    compute_update_inner_products,
)


def update(*values: float) -> ModelGroups:
    """Two values in the trunk, one in batch normalisation, one row of one weight and its bias."""
    arrays = np.array(values, np.float32)
    return ModelGroups(arrays[:2], arrays[2:3], Head(("a",), arrays[3:4][None], arrays[4:5]))


def test_inner_products_run_over_trunk_norm_and_head() -> None:
    # 1*2 - 2*1 + 3*(-1) + 0.5*4 + 1*3 = 2; 1 + 4 + 9 + 0.25 + 1 = 15.25; 4 + 1 + 1 + 16 + 9 = 31
    products = compute_update_inner_products([update(1, -2, 3, 0.5, 1), update(2, 1, -1, 4, 3)])
    np.testing.assert_allclose(products, [[15.25, 2.0], [2.0, 31.0]])


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    updates = [ModelGroups(rng.normal(size=1000).astype(np.float32)) for _ in range(3)]
    whole = compute_update_inner_products(updates)
    monkeypatch.setattr(robust, "NUMBERS_PER_BLOCK", 7)
    np.testing.assert_allclose(compute_update_inner_products(updates), whole, rtol=1e-12)


def test_distances_are_those_of_the_models_themselves() -> None:
    rng = np.random.default_rng(1)
    models = rng.normal(size=(4, 50)).astype(np.float32) * [[1], [3], [0.1], [2]]
    weights = np.array([1.0, 5.0, 2.0, 0.5])
    products = compute_update_inner_products([ModelGroups(model.astype(np.float32)) for model in models])
    mean = (weights[:, None] * models).sum(axis=0) / weights.sum()
    np.testing.assert_allclose(
        compute_distances_from_mean_model(products, weights), np.linalg.norm(models - mean, axis=1), rtol=1e-5
    )
    by_hand = [[np.linalg.norm(model - other) for other in models] for model in models]
    np.testing.assert_allclose(compute_distances_between_models(products), by_hand, rtol=1e-5, atol=1e-6)


def test_equal_models_are_at_no_distance() -> None:
    products = compute_update_inner_products([update(0.1, 0.2, 0.3, 0.4, 0.5)] * 3)
    assert (compute_distances_between_models(products) < 1e-7).all()
    assert (compute_distances_from_mean_model(products, np.array([1.0, 2.0, 3.0])) < 1e-7).all()
