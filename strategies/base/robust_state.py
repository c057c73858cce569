"""A round's means by a robust rule: trunk with batch normalisation as one vector, each head row over its owners.

What a rule cannot be applied to, because fewer sites sent it than the rule needs, gets their plain mean; which groups
and rows that were is told with the means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from common.models.state import ModelState
from common.wire.records import Groups
from strategies.aggregation.mean import Float32, GivenMean, GivenRows, MeanOfAll
from strategies.aggregation.robust import Float64, RobustMean, robust_mean
from strategies.base.method import Weights
from strategies.base.state import Means


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
    found: dict[str, dict[int, Float32]] = {name: {} for name in model.head.class_names}
    for site, update in enumerate(updates):
        if update.head is not None:
            for row, name in enumerate(update.head.class_names):
                found[name][site] = np.append(update.head.weight[row], update.head.bias[row])
    return found


def _mean(vectors: Sequence[Sequence[Float32]], weights: Weights, rule: RobustMean) -> list[Float64]:
    """Return the robust mean where there are enough sites, else the plain one."""
    if not vectors[0]:
        return []
    if len(vectors) >= rule.fewest:
        return robust_mean(vectors, rule)
    return [MeanOfAll([site[place] for site in vectors], weights).mean for place in range(len(vectors[0]))]
