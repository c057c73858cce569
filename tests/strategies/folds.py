"""Means of all sites at once, as the papers write them; the product adds updates up one by one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import TrainReply
from polyclinic.strategies.aggregation.means import (
    Float32,
    RunningMean,
    add_mean_to_head,
    average_updates,
    sum_in_order,
)
from polyclinic.strategies.aggregation.server_optimizer import Moments, ServerOptimizer
from polyclinic.strategies.engine.state import FederationState
from polyclinic.strategies.methods.surgical import OwnersMean


def weighted_mean(arrays: Sequence[Float32], weights: Sequence[float]) -> NDArray[np.float64]:
    """The plain sum, without blocks, threads or running."""
    total = np.zeros(arrays[0].shape, np.float64)
    for array, weight in zip(arrays, weights, strict=True):
        total += np.float64(weight) * array
    return total / np.float64(sum_in_order(weights))


def moved_by_mean(state: Float32, updates: Sequence[Float32], weights: Sequence[float]) -> Float32:
    running = RunningMean(len(state))
    for update, weight in zip(updates, weights, strict=True):
        running.add_array(update, weight)
    return running.add_mean_to_values(state)


def _owners(heads: Sequence[Head], weights: Sequence[float], class_names: Sequence[str]) -> OwnersMean:
    running = OwnersMean(class_names, heads[0].features)
    for head, weight in zip(heads, weights, strict=True):
        running.add(head, weight)
    return running


def owners_mean(
    heads: Sequence[Head], weights: Sequence[float], class_names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    return _owners(heads, weights, class_names).mean


def moved_head(head: Head, updates: Sequence[Head], weights: Sequence[float]) -> Head:
    return add_mean_to_head(head, _owners(updates, weights, head.class_names).mean)


def aggregated(model: ModelState, replies: Sequence[TrainReply], weights: Sequence[float]) -> ModelState:
    return average_updates(model, replies, weights, OwnersMean).add_means_to_model()


def stepped_by(
    optimizer: ServerOptimizer, state: FederationState, replies: Sequence[TrainReply], weights: Sequence[float]
) -> tuple[ModelState, Moments]:
    return average_updates(state.model, replies, weights, OwnersMean).apply_server_optimizer(optimizer, state.moments)
