"""Means of updates: the maths of FedAvg and of surgical aggregation, on plain arrays.

Surgical aggregation: Kulkarni, Chang, Sanghani, Pasula, Hahn, Zhang et al., "From Competition to Collaboration: Making
Toy Datasets on Kaggle Clinically Useful for Chest X-Ray Diagnosis Using Federated Learning" and its ML4H 2024 version,
"Surgical Aggregation: Federated Class-Heterogeneous Learning" (specs 1.5).
FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017.

All sums run in float64 in the order in which sites are given, so that the same sites in the same order give the same
bits wherever the mean is computed.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from common.models.state import Head

Float32 = NDArray[np.float32]

BLOCK = 2**15
"""Numbers averaged at a time: a quarter of a megabyte in float64."""
STRETCH, THREADS = 2**21, 2
"""Numbers that one thread takes on; each number's sum has the same order in any."""


def weighted_mean(arrays: Sequence[Float32], weights: Sequence[float]) -> NDArray[np.float64]:
    """Average arrays of one shape with weights that need not sum to one."""
    total = np.zeros(arrays[0].shape, np.float64)
    for array, weight in zip(arrays, weights, strict=True):
        total += np.float64(weight) * array
    return total / np.float64(sum(weights))


def owners_mean(
    heads: Sequence[Head], weights: Sequence[float], class_names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Average each class's head row, weight and bias alike, over the sites that own it (specs 1.5 step 3).

    Args:
        heads: One a site, each with the rows of that site's own classes in its own order.
        weights: One a site.
        class_names: Rows of the result.

    Returns:
        Mean weight ``(classes, features)``, mean bias ``(classes,)``, and which classes any site sent; rows of the
        others are zero.
    """
    position = {name: row for row, name in enumerate(class_names)}
    weight_sum = np.zeros((len(class_names), heads[0].weight.shape[1]), np.float64)
    bias_sum, total = np.zeros(len(class_names), np.float64), np.zeros(len(class_names), np.float64)
    for head, share in zip(heads, weights, strict=True):
        rows = [position[name] for name in head.class_names]
        weight_sum[rows] += np.float64(share) * head.weight
        bias_sum[rows] += np.float64(share) * head.bias
        total[rows] += np.float64(share)
    sent = total > 0
    divisor = np.where(sent, total, 1.0)
    return weight_sum / divisor[:, None], bias_sum / divisor, sent


def moved(state: Float32, update: NDArray[np.float64]) -> Float32:
    """State plus update, rounded once to float32."""
    return (state.astype(np.float64) + update).astype(np.float32)


def moved_by_mean(state: Float32, updates: Sequence[Float32], weights: Sequence[float]) -> Float32:
    """:func:`moved` by the :func:`weighted_mean`, block by block, so that float64 stays in the processor's cache.

    Args:
        state: ``(n,)``, as every update.
    """
    result = np.empty_like(state)

    def move(begin: int) -> None:
        for start in range(begin, min(begin + STRETCH, len(state)), BLOCK):
            block = slice(start, start + BLOCK)
            result[block] = moved(state[block], weighted_mean([update[block] for update in updates], weights))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(move, range(0, len(state), STRETCH)))
    return result


def moved_head(head: Head, updates: Sequence[Head], weights: Sequence[float]) -> Head:
    """Move each row by the mean update of its owners; a row that nobody sent stays as it was."""
    weight, bias, _ = owners_mean(updates, weights, head.class_names)
    return Head(head.class_names, moved(head.weight, weight), moved(head.bias, bias))
