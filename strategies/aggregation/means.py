"""Weighted means of the sites' updates and the global model that results: the maths of FedAvg, on plain arrays.

FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017.

All sums run in float64 in the order in which sites are given. So the same sites in the same order give the same bits on
any machine. A running mean takes updates one by one and does not store them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.aggregation.server_optimizer import Moments, ServerOptimizer, compute_server_step

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
HeadArrays = tuple[Float64, Float64, NDArray[np.bool_]]
"""Weight ``(classes, features)``, bias ``(classes,)``, and whether any site sent the row ``(classes,)``."""

NUMBERS_PER_BLOCK = 2**15
"""Numbers added at a time: a quarter of a megabyte in float64, which stays in the processor's cache."""
NUMBERS_PER_TASK, THREADS = 2**21, 2
"""Numbers in one thread's task, and number of threads; the order of additions does not depend on them."""

Weighting = Literal["uniform", "samples"]
"""A site's weight in every mean: 1 each, or its training images."""

Weights = Sequence[float]
"""Weight of each site, in the order of site names; they need not sum to one."""


@dataclass(frozen=True)
class RowWeights:
    """Weights of each site, of which each head row has its own.

    Attributes:
        sites: Each site's weight for trunk and batch normalisation.
        rows: Each site's weight of each head row ``(classes,)``; a row whose weights sum to 0 counts as not sent.
    """

    sites: Weights
    rows: Sequence[Float64]


def sum_in_order(values: Iterable[float]) -> float:
    """Add numbers one after the other; ``sum`` rounds differently from Python 3.12 on and would change hashes."""
    total = 0.0
    for value in values:
        total += value
    return total


def add_update_to_values(state: Float32, update: Float64) -> Float32:
    """Return model values plus an update, added in float64 and then rounded to float32."""
    return (state.astype(np.float64) + update).astype(np.float32)


def run_in_blocks(n: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` with consecutive slices that together cover ``n`` numbers; two threads share long arrays."""

    def run_block_range(begin: int) -> None:
        for start in range(begin, min(begin + NUMBERS_PER_TASK, n), NUMBERS_PER_BLOCK):
            work(slice(start, min(start + NUMBERS_PER_BLOCK, n)))

    if n <= NUMBERS_PER_TASK:
        run_block_range(0)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run_block_range, range(0, n, NUMBERS_PER_TASK)))


# ---------------------------------------------------------------------- means of flat arrays


class FlatMean(ABC):
    """The mean of flat arrays of the length ``size``, computed block by block."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def compute_mean_of_block(self, block: slice) -> Float64:
        """Return the mean of the numbers in one slice of the arrays."""

    @property
    def mean(self) -> Float64:
        """Return the mean of all entries, float64; two threads share a long array."""
        result = np.empty(self._size, np.float64)

        def fill_block(block: slice) -> None:
            result[block] = self.compute_mean_of_block(block)

        run_in_blocks(self._size, fill_block)
        return result

    def add_mean_to_values(self, state: Float32) -> Float32:
        """Return flat model values plus the mean update, added block by block."""
        if state.shape != (self._size,):
            raise ValueError(f"expected shape {state.shape}, got {(self._size,)}")
        result = np.empty_like(state)

        def add_block(block: slice) -> None:
            result[block] = add_update_to_values(state[block], self.compute_mean_of_block(block))

        run_in_blocks(self._size, add_block)
        return result


class PrecomputedMean(FlatMean):
    """A :class:`FlatMean` whose values are already computed, for example by a robust mean."""

    def __init__(self, values: Float64) -> None:
        super().__init__(len(values))
        self._values = values

    def compute_mean_of_block(self, block: slice) -> Float64:
        """Return the mean of the entries in ``block``, float64."""
        return self._values[block]


class RunningMean(FlatMean):
    """The weighted mean of flat arrays, which are added one by one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight = 0.0
        self._sum = np.zeros(size, np.float64)

    def add_array(self, array: Float32, weight: float) -> None:
        """Add an array with a weight; weights need not sum to one."""
        if array.shape != self._sum.shape:
            raise ValueError(f"expected shape {self._sum.shape}, got {array.shape}")
        times = np.float64(weight)

        def add_block(block: slice) -> None:
            self._sum[block] += times * array[block]

        run_in_blocks(len(array), add_block)
        self.weight += weight

    def compute_mean_of_block(self, block: slice) -> Float64:
        """Return one block of the mean of the arrays added so far, at least one."""
        return self._sum[block] / np.float64(self.weight)


class BlockwiseMean(FlatMean):
    """The weighted mean of one or more flat arrays that are all in memory.

    The result has the same bits as that of :class:`RunningMean`. It is faster, because each block is summed over all
    arrays while it is in the processor's cache.

    Args:
        weighted: Each array with its weight, in the order of addition; weights need not sum to one.
    """

    def __init__(self, weighted: Sequence[tuple[Float32, float]]) -> None:
        first = weighted[0][0]
        self._weighted = weighted
        total = 0.0
        super().__init__(len(first))
        for array, weight in weighted:
            if array.shape != first.shape:
                raise ValueError(f"expected shape {first.shape}, got {array.shape}")
            total += weight
        self._weight = np.float64(total)

    def compute_mean_of_block(self, block: slice) -> Float64:
        """Compute the mean of the entries in ``block``, float64, in the order in which arrays were added."""
        total = np.zeros(len(self._weighted[0][0][block]), np.float64)
        weighted = np.empty_like(total)
        for array, weight in self._weighted:
            np.multiply(array[block], np.float64(weight), out=weighted, dtype=np.float64)
            total += weighted
        total /= self._weight
        return total


# ---------------------------------------------------------------------- means of head rows


class HeadRowsMean(Protocol):
    """The finished mean of the head rows, one row for each class, with a mask of the classes that any site sent."""

    @property
    def mean(self) -> HeadArrays: ...


class RunningHeadMean(HeadRowsMean, Protocol):
    """A mean of head rows to which sites' heads are added one by one."""

    def add(self, head: Head, share: float) -> None: ...


HeadMean = Callable[[Sequence[str], int], RunningHeadMean]
"""Makes a mean of head rows from the class names and the width of a row."""


@dataclass(frozen=True)
class PrecomputedHeadMean:
    """A mean of head rows that is already computed, for example by a robust mean."""

    mean: HeadArrays


def average_head_rows(heads: Sequence[Head], row_weights: Sequence[Float64]) -> PrecomputedHeadMean:
    """Return the mean of whole heads in which each site has a weight of its own for each row.

    Args:
        heads: One head for each site, all with the same rows.
        row_weights: Each site's weight of each row ``(classes,)``; a row whose weights sum to 0 counts as not sent.

    Raises:
        ValueError: If the heads have different rows.
    """
    weight, bias = np.zeros(heads[0].weight.shape, np.float64), np.zeros(heads[0].bias.shape, np.float64)
    total = np.zeros_like(bias)
    for head, weights in zip(heads, row_weights, strict=True):
        if head.class_names != heads[0].class_names:
            raise ValueError(f"expected rows {heads[0].class_names}, got {head.class_names}")
        weight += weights[:, None] * head.weight
        bias += weights * head.bias
        total += weights
    sent = total > 0
    divisor = np.where(sent, total, 1.0)
    return PrecomputedHeadMean((weight / divisor[:, None], bias / divisor, sent))


class WholeHeadMean:
    """The weighted mean of heads of which every site sends all rows (FedAvg)."""

    def __init__(self, class_names: Sequence[str], features: int) -> None:
        self._names = tuple(class_names)
        self._weight = np.zeros((len(self._names), features), np.float64)
        self._bias = np.zeros(len(self._names), np.float64)
        self._total = 0.0

    def add(self, head: Head, share: float) -> None:
        """Add a site's update of the head with weight ``share``.

        Raises:
            ValueError: If the update's rows are not exactly those of the mean.
        """
        if head.class_names != self._names:
            raise ValueError(f"expected rows {self._names}, got {head.class_names}")
        self._weight += np.float64(share) * head.weight
        self._bias += np.float64(share) * head.bias
        self._total += share

    @property
    def mean(self) -> HeadArrays:
        """Return mean weight, mean bias, and True for every row, because every site sends all rows."""
        divisor = np.float64(self._total)
        return self._weight / divisor, self._bias / divisor, np.ones(len(self._names), np.bool_)


def add_mean_to_head(head: Head, mean: HeadArrays) -> Head:
    """Return a head with the mean update added to each row; the mean update of a row that no site sent is 0."""
    weight, bias, _ = mean
    return Head(head.class_names, add_update_to_values(head.weight, weight), add_update_to_values(head.bias, bias))


# ---------------------------------------------------------------------- means of updates, group by group


@dataclass(frozen=True)
class UpdateMeans:
    """The mean updates of the parts of a model: trunk, batch normalisation, head.

    Attributes:
        model: The model that the sites started training from.
        trunk, norm, head: Mean update of each part; None if no site sent the part.
    """

    model: ModelState
    trunk: FlatMean | None = None
    norm: FlatMean | None = None
    head: HeadRowsMean | None = None

    def add_means_to_model(self) -> ModelState:
        """Return the model plus the mean updates; a part that no site sent is unchanged."""
        model = self.model
        return ModelState(
            trunk=self.trunk.add_mean_to_values(model.trunk) if self.trunk else model.trunk,
            norm=self.norm.add_mean_to_values(model.norm) if self.norm else model.norm,
            head=add_mean_to_head(model.head, self.head.mean) if self.head else model.head,
        )

    def apply_server_optimizer(self, optimizer: ServerOptimizer, moments: Moments) -> tuple[ModelState, Moments]:
        """Return the model after a server optimiser's step with the mean updates, and the optimiser's new moments.

        Batch normalisation gets the plain mean update, because a running variance has no gradient. A head row that no
        site sent is unchanged, and so are the moments of that row.
        """
        trunk = self.model.trunk
        norm = self.model.norm
        head = self.model.head
        if self.trunk:
            step, moments = compute_server_step(optimizer, self.trunk.mean, moments, "trunk")
            trunk = add_update_to_values(trunk, step)
        if self.norm:
            norm = self.norm.add_mean_to_values(norm)
        if self.head:
            weight, bias, sent = self.head.mean
            for row in np.flatnonzero(sent):
                update = np.append(weight[row], bias[row])  # (features + 1,)
                step, moments = compute_server_step(optimizer, update, moments, f"head {head.class_names[row]}")
                weight[row], bias[row] = step[:-1], step[-1]
            head = add_mean_to_head(head, (weight, bias, sent))
        return ModelState(trunk, norm, head), MappingProxyType(dict(moments))


@dataclass(frozen=True)
class MergedUpdates:
    """The mean updates of a round, with notes on exceptions.

    Attributes:
        plain: Parts that have the plain mean although the experiment has a robust mean, because too few sites sent
            them. A part is ``trunk`` (with batch normalisation), or the name of a class for its head row.
        shortened: Site -> a sentence that says how its update was shortened, for updates that were too long.
    """

    means: UpdateMeans
    plain: tuple[str, ...] = ()
    shortened: Mapping[str, str] = field(default_factory=dict)


class RunningUpdateMeans:
    """Computes the mean updates of a round from updates that are added one by one.

    Args:
        model: The model that the sites started training from.
        head_mean: Makes the object that averages head rows.
    """

    def __init__(self, model: ModelState, head_mean: HeadMean) -> None:
        self._model, self._head_mean = model, head_mean
        self._trunk: RunningMean | None = None
        self._norm: RunningMean | None = None
        self._head: RunningHeadMean | None = None

    def add_update(self, update: ModelGroups, weight: float) -> None:
        """Add a site's update to the means; the update is not stored."""
        if update.trunk is not None:
            self._trunk = self._trunk or RunningMean(len(self._model.trunk))
            self._trunk.add_array(update.trunk, weight)
        if update.norm is not None:
            self._norm = self._norm or RunningMean(len(self._model.norm))
            self._norm.add_array(update.norm, weight)
        if update.head is not None:
            self._head = self._head or self._head_mean(self._model.head.class_names, self._model.head.features)
            self._head.add(update.head, weight)

    @property
    def current_means(self) -> UpdateMeans:
        """Return the means of the updates that were added until now."""
        return UpdateMeans(self._model, self._trunk, self._norm, self._head)


def compute_site_weight(reply: TrainReply, weighting: Weighting) -> float:
    """Return a site's weight in every mean: its number of training images, or 1 for ``uniform`` weighting."""
    return float(reply.train_samples) if weighting == "samples" else 1.0


def average_updates(
    model: ModelState, replies: Sequence[TrainReply], weights: Weights | RowWeights, head_mean: HeadMean
) -> UpdateMeans:
    """Return the weighted means of the sites' updates.

    Args:
        model: The model that the sites started training from.
        replies: At least one accepted reply, in the order of site names.
        weights: One weight for each reply, or also one for each of its head rows; then every reply has all rows.
        head_mean: Makes the object that averages head rows, if they have no weights of their own.
    """
    trunks, norms = list[tuple[Float32, float]](), list[tuple[Float32, float]]()
    head: RunningHeadMean | None = None
    sites, rows = (weights.sites, weights.rows) if isinstance(weights, RowWeights) else (weights, None)
    for reply, weight in zip(replies, sites, strict=True):
        update = reply.update
        if update.trunk is not None:
            trunks.append((update.trunk, weight))
        if update.norm is not None:
            norms.append((update.norm, weight))
        if update.head is not None:
            head = head or head_mean(model.head.class_names, model.head.features)
            head.add(update.head, weight)
    head_rows: HeadRowsMean | None = head
    if rows is not None:
        head_rows = average_head_rows([reply.update.head for reply in replies if reply.update.head], rows)
    trunk, norm = (BlockwiseMean(arrays) if arrays else None for arrays in (trunks, norms))
    return UpdateMeans(model, trunk, norm, head_rows)


def mix_tensors(clients: Float32, server: Float32, alpha: float) -> Float32:
    """Return ``alpha * clients + (1 - alpha) * server`` for two arrays of one shape, computed in float64."""
    mixture = np.float64(alpha) * clients.astype(np.float64) + np.float64(1 - alpha) * server.astype(np.float64)
    return mixture.astype(np.float32)


def mix_models(hospitals: ModelState, server: ModelState, alpha: float) -> ModelState:
    """Return the model ``alpha * hospitals + (1 - alpha) * server``, with head rows matched by class name."""
    other = server.head.select_rows(hospitals.head.class_names)
    weight = mix_tensors(hospitals.head.weight, other.weight, alpha)
    head = Head(other.class_names, weight, mix_tensors(hospitals.head.bias, other.bias, alpha))
    trunk, norm = mix_tensors(hospitals.trunk, server.trunk, alpha), mix_tensors(hospitals.norm, server.norm, alpha)
    return ModelState(trunk, norm, head)
