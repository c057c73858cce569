"""The means of sites' updates, group by group, and the model that they make: plain means, and means by a robust rule.

A robust rule takes trunk and batch normalisation as one vector, and each head row over its owners. Where fewer sites
sent a group or row than the rule needs, it gets their plain mean, and :class:`Merged` names it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.models.network import Head
from common.models.state import Array, ModelState
from common.wire.records import Groups, TrainReply
from strategies.aggregation.mean import (
    FlatMean,
    Float32,
    GivenMean,
    GivenRows,
    HeadMean,
    HeadSum,
    MeanOfAll,
    RowsMean,
    RunningMean,
    moved,
)
from strategies.aggregation.robust import RobustMean, robust_mean
from strategies.aggregation.server_optimizer import Float64, Moments, ServerOptimizer, stepped

Weighting = Literal["uniform", "samples"]
"""A site's weight in every mean: 1 each, or its training images."""

Weights = Sequence[float]
"""One a site, in the order of site names; they need not sum to one."""


@dataclass(frozen=True)
class Means:
    """The means of sites' updates, group by group; None where nobody sent a group.

    Attributes:
        model: What the sites started from.
    """

    model: ModelState
    trunk: FlatMean | None = None
    norm: FlatMean | None = None
    head: RowsMean | None = None

    def moved(self) -> ModelState:
        """The model, moved by the means; a group that nobody sent stays as it was."""
        model = self.model
        return ModelState(
            trunk=self.trunk.moved(model.trunk) if self.trunk else model.trunk,
            norm=self.norm.moved(model.norm) if self.norm else model.norm,
            head=self.head.moved(model.head) if self.head else model.head,
        )

    def stepped(self, optimizer: ServerOptimizer, moments: Moments) -> tuple[ModelState, Moments]:
        """The model, moved by a server optimiser's steps along the means.

        Batch normalisation moves by the mean itself: a running variance has no gradient. A head row that nobody sent
        stays, and so do its moments.
        """
        trunk, norm, head = self.model.trunk, self.model.norm, self.model.head
        if self.trunk:
            step, moments = stepped(optimizer, self.trunk.mean, moments, "trunk")
            trunk = moved(trunk, step)
        if self.norm:
            norm = self.norm.moved(norm)
        if self.head:
            head, moments = _stepped_head(optimizer, head, self.head.mean, moments)
        return ModelState(trunk, norm, head), MappingProxyType(dict(moments))


class RunningMeans:
    """:class:`Means` to which updates are added one by one.

    Args:
        model: What the sites started from.
        head_mean: How head rows are averaged.
    """

    def __init__(self, model: ModelState, head_mean: HeadMean) -> None:
        self._model, self._head_mean = model, head_mean
        self._trunk: RunningMean | None = None
        self._norm: RunningMean | None = None
        self._head: HeadSum | None = None

    def add(self, update: Groups, weight: float) -> None:
        """Add the groups that a site sent; they are not kept."""
        if update.trunk is not None:
            self._trunk = self._trunk or RunningMean(len(self._model.trunk))
            self._trunk.add(update.trunk, weight)
        if update.norm is not None:
            self._norm = self._norm or RunningMean(len(self._model.norm))
            self._norm.add(update.norm, weight)
        if update.head is not None:
            self._head = self._head or self._head_mean(self._model.head.class_names, self._model.head.features)
            self._head.add(update.head, weight)

    @property
    def means(self) -> Means:
        """Means of the updates added so far."""
        return Means(self._model, self._trunk, self._norm, self._head)


def _stepped_head(
    optimizer: ServerOptimizer, head: Head, mean: tuple[Float64, Float64, NDArray[np.bool_]], moments: Moments
) -> tuple[Head, Moments]:
    weight, bias, sent = mean
    for row in np.flatnonzero(sent):
        update = np.append(weight[row], bias[row])  # (features + 1,)
        step, moments = stepped(optimizer, update, moments, f"head {head.class_names[row]}")
        weight[row], bias[row] = step[:-1], step[-1]
    return Head(head.class_names, moved(head.weight, weight), moved(head.bias, bias)), moments


def site_weight(reply: TrainReply, weighting: Weighting) -> float:
    """A site's plain weight in every mean."""
    return float(reply.train_samples) if weighting == "samples" else 1.0


def means_of(model: ModelState, replies: Sequence[TrainReply], weights: Weights, head_mean: HeadMean) -> Means:
    """The means of the sites' updates.

    Args:
        model: What the sites started from.
        replies: Accepted replies in the order of site names; at least one.
        weights: One a reply.
        head_mean: How head rows are averaged.
    """
    updates, heads = [reply.update for reply in replies], RunningMeans(model, head_mean)
    for update, weight in zip(updates, weights, strict=True):
        heads.add(Groups(head=update.head), weight)
    trunk = _mean_of([update.trunk for update in updates], weights, model.trunk)
    return replace(heads.means, trunk=trunk, norm=_mean_of([update.norm for update in updates], weights, model.norm))


def _mean_of(arrays: Sequence[Array | None], weights: Weights, before: Array) -> MeanOfAll | None:
    """The mean of a group that some sites sent; None where nobody did.

    Raises:
        ValueError: If one is not as long as the model's.
    """
    sent = [(array, weight) for array, weight in zip(arrays, weights, strict=True) if array is not None]
    if wrong := [array.shape for array, _ in sent if array.shape != before.shape]:
        raise ValueError(f"expected shape {before.shape}, got {wrong[0]}")
    return MeanOfAll([array for array, _ in sent], [weight for _, weight in sent]) if sent else None


@dataclass(frozen=True)
class Merged:
    """A round's means.

    Attributes:
        plain: What got the plain mean instead of the method's own: ``trunk``, and classes whose head rows too few sent.
        shortened: Sites whose update was too long, with what was done.
    """

    means: Means
    plain: tuple[str, ...] = ()
    shortened: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def robust_means(model: ModelState, updates: Sequence[Groups], weights: Weights, rule: RobustMean) -> Merged:
    """The means of the sites' updates by a rule.

    Args:
        model: What the sites started from.
        updates: In the order of site names; at least one; with the same groups.
        weights: One a site, for plain means only.
    """
    flat = [[array for array in (update.trunk, update.norm) if array is not None] for update in updates]
    of_trunk = iter(map(GivenMean, _mean(flat, weights, rule)))
    rows, first = _rows_by_class(model, updates), updates[0]
    means = Means(
        model,
        trunk=None if first.trunk is None else next(of_trunk),
        norm=None if first.norm is None else next(of_trunk),
        head=None if first.head is None else _mean_rows(rows, model.head.features, weights, rule),
    )
    few = [name for name, owners in rows.items() if 0 < len(owners) < rule.fewest]
    return Merged(means, (*(["trunk"] if flat[0] and len(updates) < rule.fewest else []), *few))


Rows = Mapping[str, Mapping[int, Float32]]
"""Class -> place of a site that sent its row -> the row with its bias, ``(features + 1,)``."""


def _mean_rows(rows: Rows, features: int, weights: Weights, rule: RobustMean) -> GivenRows:
    mean, sent = np.zeros((len(rows), features + 1)), np.zeros(len(rows), np.bool_)
    for row, owners in enumerate(rows.values()):
        if owners:
            (mean[row],) = _mean([[array] for array in owners.values()], [weights[site] for site in owners], rule)
            sent[row] = True
    return GivenRows((mean[:, :-1], mean[:, -1], sent))


def _rows_by_class(model: ModelState, updates: Sequence[Groups]) -> Rows:
    rows: dict[str, dict[int, Float32]] = {name: {} for name in model.head.class_names}
    for site, update in enumerate(updates):
        if update.head is not None:
            for row, name in enumerate(update.head.class_names):
                rows[name][site] = np.append(update.head.weight[row], update.head.bias[row])
    return rows


def _mean(vectors: Sequence[Sequence[Float32]], weights: Weights, rule: RobustMean) -> list[Float64]:
    """Return the robust mean where there are enough sites, else the plain one."""
    if not vectors[0]:
        return []
    if len(vectors) >= rule.fewest:
        return robust_mean(vectors, rule)
    return [MeanOfAll([site[place] for site in vectors], weights).mean for place in range(len(vectors[0]))]


def mixed(clients: Float32, server: Float32, alpha: float) -> Float32:
    """Mix two models' tensors, or flat groups of them, of one shape.

    Args:
        clients: What the last hospital of the round returned.
        server: What the server trained by itself.
        alpha: Share of ``clients``, 0 to 1.
    """
    mixture = np.float64(alpha) * clients.astype(np.float64) + np.float64(1 - alpha) * server.astype(np.float64)
    return mixture.astype(np.float32)


def mixture(hospitals: ModelState, server: ModelState, alpha: float) -> ModelState:
    """Mix all of two models, running means and variances too; a head row is mixed with that of its name."""
    other = server.head.rows(hospitals.head.class_names)
    weight, bias = mixed(hospitals.head.weight, other.weight, alpha), mixed(hospitals.head.bias, other.bias, alpha)
    return ModelState(
        mixed(hospitals.trunk, server.trunk, alpha),
        mixed(hospitals.norm, server.norm, alpha),
        Head(hospitals.head.class_names, np.asarray(weight), np.asarray(bias)),
    )
