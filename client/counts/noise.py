"""Differentially private noise on a count sheet, and its cost in the patients' privacy budget.

A patient counts in one cell for each class of the table of classes and of each table of classes by an attribute, and in
one cell of each table of an attribute. So adding or removing a patient changes ``cells`` numbers by 1, which is a
Euclidean distance of sqrt(``cells``). The sheet is one Gaussian mechanism of this sensitivity.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.counts.units import CountedData
from polyclinic.client.site.patient_ledger import PatientCosts, PrivacyCostEntry, make_cost_id
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.privacy import (
    open_patient_ledger,
    open_privacy_ledger,
    refuse_cost_over_budget,
)
from polyclinic.common.counts import CLASS_TABLE, COMBINATIONS_TABLE, COUNT_TABLES
from polyclinic.strategies.privacy.mechanism import NoisySteps, find_noise_multiplier
from polyclinic.strategies.privacy.noise import (
    SCALE_BITS,
    SecretBitStream,
    draw_discrete_gaussian,
    make_secret_noise_source,
)

TABLES_WITHOUT_NOISE = (COMBINATIONS_TABLE, "device", "class_by_device")
"""Tables that are never sent with noise, because the data decides which lines they have."""


@dataclass(frozen=True)
class NoisySheetPrice:
    """The privacy cost of a noisy count sheet, which determines its noise.

    Attributes:
        epsilon, delta: Cost of the sheet for each patient.
        tables: The tables of the sheet.
        cells: Maximum number of cells in which one patient counts.
    """

    epsilon: float
    delta: float
    tables: tuple[str, ...]
    cells: int

    @classmethod
    def of_policy(cls, policy: SitePolicy, data: CountedData) -> "NoisySheetPrice | None":
        """Return the price of a site's sheet; None if the policy has no budget, so that the sheet has no noise."""
        if policy.epsilon is None:
            return None
        tables = tuple(
            table
            for table in COUNT_TABLES
            if table in policy.counts and table not in TABLES_WITHOUT_NOISE and table not in data.missing_tables
        )
        by_class = sum(table == CLASS_TABLE or table.startswith("class_by_") for table in tables)
        cells = by_class * len(data.class_names) + len(tables) - by_class
        return cls(policy.counts_epsilon, policy.delta, tables, max(cells, 1))

    @cached_property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise, divided by the sensitivity."""
        return find_noise_multiplier(self.epsilon, self.delta, sample_rate=1.0, count=1, accountant="prv")

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on each number."""
        return self.noise_multiplier * math.sqrt(self.cells)

    @contextmanager
    def charge(self, site: Site, run: str) -> Iterator[None]:
        """Context manager: reserve the cost, run the ``with`` block that makes the sheet, then spend the cost.

        Raises:
            BadInput: If the budget of a patient does not suffice. Nothing is charged then.
        """
        steps = NoisySteps(self.noise_multiplier, 1.0, 1)
        cost = PrivacyCostEntry(run, 0, f"counts {run}", steps.noise_multiplier, 1.0, 1, make_cost_id())
        site_ledger = open_privacy_ledger(site)
        patients = open_patient_ledger(site)

        def refuse(costs: PatientCosts | None) -> None:
            refuse_cost_over_budget(site, costs, steps)

        if patients is None:
            refuse(None)
        else:
            cost = patients.reserve_cost(cost, refuse)
        try:
            yield
        except BaseException:
            if patients is not None:
                patients.release_cost(cost)  # no number has left
            raise
        site_ledger.write_privacy_cost(cost)
        if patients is not None:
            patients.spend_costs(site_ledger.entries)


def add_noise_to_counts(
    counts: NDArray[np.int64], deviation: float, bits: SecretBitStream | None = None
) -> tuple[NDArray[np.int64], float]:
    """Add discrete Gaussian noise to counts; return whole numbers, possibly negative, and the standard deviation used.

    The noise is drawn on a grid in which one patient is a whole number of steps, so that no float is involved.

    Args:
        deviation: Minimum standard deviation of the noise.
        bits: Source of the random bits; None for a new secret one.
    """
    steps = max(int(2**SCALE_BITS / deviation), 1)
    source = make_secret_noise_source().bits if bits is None else bits
    noisy = counts * steps + draw_discrete_gaussian(len(counts), source)
    return (2 * noisy + steps) // (2 * steps), 2**SCALE_BITS / steps
