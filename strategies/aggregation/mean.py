"""Means of updates: the maths of FedAvg, on plain arrays.

FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017.

All sums run in float64 in the order in which sites are given, so that the same sites in the same order give the same
bits wherever the mean is computed. They run as updates come: one that has been added is not needed any more.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.models.network import Head

Float32 = NDArray[np.float32]

BLOCK = 2**15
"""Numbers added at a time: a quarter of a megabyte in float64, which stays in the processor's cache."""
STRETCH, THREADS = 2**21, 2
"""Numbers that one thread takes on; each number's sum has the same order in any."""


def running_sum(values: Iterable[float]) -> float:
    """Add one after the other: from Python 3.12 on ``sum`` rounds otherwise, and hashes would differ."""
    total = 0.0
    for value in values:
        total += value
    return total


class FlatMean(Protocol):
    """A mean of flat arrays, however it was made."""

    @property
    def mean(self) -> NDArray[np.float64]: ...

    def moved(self, state: Float32) -> Float32: ...


class RowsMean(Protocol):
    """A mean of head rows, class by class: the part of :class:`HeadSum` that moves a model."""

    @property
    def mean(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]: ...

    def moved(self, head: Head) -> Head: ...


@dataclass(frozen=True)
class GivenMean:
    """A mean that is there at once."""

    mean: NDArray[np.float64]

    def moved(self, state: Float32) -> Float32:
        """:func:`moved` by the mean."""
        return moved(state, self.mean)


@dataclass(frozen=True)
class GivenRows:
    """Rows' means that are there at once, as :attr:`WholeHeadMean.mean` has them."""

    mean: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]

    def moved(self, head: Head) -> Head:
        """Move each row by its mean; a row that nobody sent stays as it was."""
        weight, bias, _ = self.mean
        return Head(head.class_names, moved(head.weight, weight), moved(head.bias, bias))


class RunningMean:
    """The weighted mean of flat arrays of one length, which are added one by one."""

    def __init__(self, size: int) -> None:
        self.weight = 0.0
        self._sum = np.zeros(size, np.float64)

    def add(self, array: Float32, weight: float) -> None:
        """Count it ``weight`` times; weights need not sum to one."""
        if array.shape != self._sum.shape:
            raise ValueError(f"expected shape {self._sum.shape}, got {array.shape}")
        times = np.float64(weight)

        def add(block: slice) -> None:
            self._sum[block] += times * array[block]

        in_blocks(len(array), add)
        self.weight += weight

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean of the arrays added so far, at least one."""
        return self._sum / np.float64(self.weight)

    def moved(self, state: Float32) -> Float32:
        """:func:`moved` by the mean, block by block."""
        result = np.empty_like(state)

        def move(block: slice) -> None:
            result[block] = moved(state[block], self._sum[block] / np.float64(self.weight))

        in_blocks(len(state), move)
        return result


class MeanOfAll:
    """The weighted mean of flat arrays of one length, at least one, which are all there.

    The bits are those of :class:`RunningMean`. Each block is added up over all arrays while it is in the processor's
    cache; a running sum of a large model goes through memory once for each array.

    Args:
        arrays: In the order in which they are added.
        weights: One an array; they need not sum to one.
    """

    def __init__(self, arrays: Sequence[Float32], weights: Sequence[float]) -> None:
        if shapes := {array.shape for array in arrays} - {arrays[0].shape}:
            raise ValueError(f"expected shape {arrays[0].shape}, got {shapes.pop()}")
        self._arrays, self._weights = arrays, [np.float64(weight) for weight in weights]
        self._weight = np.float64(running_sum(weights))

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean."""
        result = np.empty(self._arrays[0].shape, np.float64)

        def find(block: slice) -> None:
            result[block] = self._of(block)

        in_blocks(len(result), find)
        return result

    def moved(self, state: Float32) -> Float32:
        """:func:`moved` by the mean, block by block."""
        if state.shape != self._arrays[0].shape:
            raise ValueError(f"expected shape {state.shape}, got {self._arrays[0].shape}")
        result = np.empty_like(state)

        def move(block: slice) -> None:
            result[block] = moved(state[block], self._of(block))

        in_blocks(len(state), move)
        return result

    def _of(self, block: slice) -> NDArray[np.float64]:
        total = np.zeros(len(self._arrays[0][block]), np.float64)
        weighted = np.empty_like(total)
        for array, weight in zip(self._arrays, self._weights, strict=True):
            np.multiply(array[block], weight, out=weighted, dtype=np.float64)
            total += weighted
        total /= self._weight
        return total


class HeadSum(RowsMean, Protocol):
    """A mean of head rows to which sites' heads are added one by one."""

    def add(self, head: Head, share: float) -> None: ...


HeadMean = Callable[[Sequence[str], int], HeadSum]
"""Makes a mean of heads, given the rows of the result and their width."""


class WholeHeadMean:
    """The weighted mean of whole heads: every site sends every row (FedAvg).

    Args:
        class_names: Rows of the result.
        features: Width of a row.
    """

    def __init__(self, class_names: Sequence[str], features: int) -> None:
        self._names = tuple(class_names)
        self._weight = np.zeros((len(self._names), features), np.float64)
        self._bias, self._total = np.zeros(len(self._names), np.float64), 0.0

    def add(self, head: Head, share: float) -> None:
        """Count a site's head ``share`` times.

        Raises:
            ValueError: If it has other rows.
        """
        if head.class_names != self._names:
            raise ValueError(f"expected rows {self._names}, got {head.class_names}")
        self._weight += np.float64(share) * head.weight
        self._bias += np.float64(share) * head.bias
        self._total += share

    @property
    def mean(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Mean weight ``(classes, features)``, mean bias ``(classes,)``, and that every row was sent."""
        divisor = np.float64(self._total)
        return self._weight / divisor, self._bias / divisor, np.ones(len(self._names), np.bool_)

    def moved(self, head: Head) -> Head:
        """Move each row by its mean."""
        return GivenRows(self.mean).moved(head)


def moved(state: Float32, update: NDArray[np.float64]) -> Float32:
    """State plus update, rounded once to float32."""
    return (state.astype(np.float64) + update).astype(np.float32)


def in_blocks(n: int, work: Callable[[slice], None]) -> None:
    """Do all of ``n`` numbers block by block, on a second thread too where there are many."""

    def stretch(begin: int) -> None:
        for start in range(begin, min(begin + STRETCH, n), BLOCK):
            work(slice(start, min(start + BLOCK, n)))

    if n <= STRETCH:
        stretch(0)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(stretch, range(0, n, STRETCH)))
