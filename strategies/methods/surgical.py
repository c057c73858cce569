"""Surgical aggregation: each class's head row is averaged over the sites that own (annotate) the class.

Kulkarni, Chang, Sanghani, Pasula, Hahn, Zhang et al., "From Competition to Collaboration: Making Toy Datasets on Kaggle
Clinically Useful for Chest X-Ray Diagnosis Using Federated Learning", and its version in ML4H 2024, "Surgical
Aggregation: Federated Class-Heterogeneous Learning".

Coordinator: trunk by FedAvg, FedBN or FedBN+; head rows by :class:`OwnersMean`; a site receives only its own rows.
Hospital: a head in its own class order, binary cross-entropy over its own classes, warm-up of the head before round 1.
If every site owns every class, the method is FedAvg, bit for bit.

Departs from the authors' code in one point (docs/papers.md#surgical-start): all sites start from one common model and
only then warm up.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.models.network import Head
from polyclinic.strategies.aggregation.means import HeadMean
from polyclinic.strategies.local.method_traits import MethodTraits, Payload
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method


class OwnersMean:
    """The mean of each class's head row (weight and bias) over the sites that own the class.

    The paper's mean is uniform (docs/papers.md#surgical-mean).

    Args:
        class_names: Rows of the result.
        features: Width of a row.
    """

    def __init__(self, class_names: Sequence[str], features: int) -> None:
        self._position = {name: row for row, name in enumerate(class_names)}
        classes = len(class_names)
        self._weight, self._bias = np.zeros((classes, features), np.float64), np.zeros(classes, np.float64)
        self._total = np.zeros(classes, np.float64)

    def add(self, head: Head, share: float) -> None:
        """Add the head rows that a site sends, with weight ``share``; they are matched by class name."""
        rows = [self._position[name] for name in head.class_names]
        self._weight[rows] += np.float64(share) * head.weight
        self._bias[rows] += np.float64(share) * head.bias
        self._total[rows] += np.float64(share)

    @property
    def mean(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Return mean weight ``(classes, features)``, mean bias ``(classes,)``, and a mask of the classes with a mean.

        Rows of classes that no site sent are zero.
        """
        sent = self._total > 0
        divisor = np.where(sent, self._total, 1.0)
        return self._weight / divisor[:, None], self._bias / divisor, sent


class SurgicalAggregationSite(SiteMethod):
    """The hospital's half: plain training of the rows of its own classes."""

    traits = MethodTraits("surgical", payload=Payload(rows="own"))


class SurgicalAggregation(Method):
    """The coordinator's half: FedAvg for the trunk; each head row is averaged over its class's annotators (eq. 2)."""

    site_class = SurgicalAggregationSite

    @property
    def head_mean_class(self) -> HeadMean:
        """Return the class that averages each head row over the sites that annotate the row's class."""
        return OwnersMean
