"""Surgical aggregation: each class's head row is averaged over the sites that own it.

Kulkarni et al., "Surgical Aggregation: Federated Class-Heterogeneous Learning", ML4H 2024 (specs 1.5).

Coordinator: trunk by FedAvg, FedBN or FedBN+; head rows by :func:`strategies.aggregation.mean.owners_mean`; a site
receives only its own rows. Hospital: a head in its own class order, binary cross-entropy over its own classes, warm-up
of the head before round 1. With every class owned by every site it is FedAvg, bit for bit.

Departs from the authors' code in one point (specs S5): all sites start from one common model and only then warm up.
"""

from strategies.base.method import Traffic
from strategies.rounds.strategy import FederatedAveraging


class SurgicalAggregation(FederatedAveraging):
    """Trunk by FedAvg; head row c is the mean over the sites that annotate c (eq. 2); a site has only its own rows."""

    name = "surgical"
    declared = Traffic(rows="own")
