"""Noise on a count sheet, and its price in the patients' privacy budget.

A patient is in one cell of each line of a table: of each class in the table of classes and in each table of classes by
an attribute, and once in each table of an attribute alone. So adding or removing a patient changes ``cells`` numbers by
1, a Euclidean distance of the root of ``cells``. The sheet is one Gaussian mechanism of that sensitivity.
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
from polyclinic.common.counts import CLASS, COMBINATIONS, COUNT_TABLES
from polyclinic.strategies.privacy.mechanism import NoisySteps, find_noise_multiplier
from polyclinic.strategies.privacy.noise import (
    SCALE_BITS,
    SecretBitStream,
    draw_discrete_gaussian,
    make_secret_noise_source,
)

UNNOISED = (COMBINATIONS, "device", "class_by_device")
"""Tables that never leave with noise: their lines depend on who the patients are."""


@dataclass(frozen=True)
class NoisySheetPrice:
    """The noise of a sheet, and what it costs.

    Attributes:
        epsilon, delta: What the sheet costs each patient.
        tables: The tables of the sheet.
        cells: Largest number of cells that one patient is in.
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
            if table in policy.counts and table not in UNNOISED and table not in data.missing_tables
        )
        by_class = sum(table == CLASS or table.startswith("class_by_") for table in tables)
        cells = by_class * len(data.class_names) + len(tables) - by_class
        return cls(policy.counts_epsilon, policy.delta, tables, max(cells, 1))

    @cached_property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity."""
        return find_noise_multiplier(self.epsilon, self.delta, sample_rate=1.0, count=1, accountant="prv")

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on each number."""
        return self.noise_multiplier * math.sqrt(self.cells)

    @contextmanager
    def charge(self, site: Site, run: str) -> Iterator[None]:
        """Reserve the cost of a sheet, make the sheet in the ``with`` block, and spend the cost.

        Raises:
            BadInput: If the budget of one of the patients does not suffice. Nothing is charged then.
        """
        steps = NoisySteps(self.noise_multiplier, 1.0, 1)
        cost = PrivacyCostEntry(run, 0, f"counts {run}", steps.noise_multiplier, 1.0, 1, make_cost_id())
        own = open_privacy_ledger(site)
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
        own.write_privacy_cost(cost)
        if patients is not None:
            patients.spend_costs(own.entries)


def add_noise_to_counts(
    counts: NDArray[np.int64], deviation: float, bits: SecretBitStream | None = None
) -> tuple[NDArray[np.int64], float]:
    """Add discrete Gaussian noise to counts; return whole numbers, which may be below 0, and the noise's deviation.

    The noise is drawn on a grid, where one patient counts a whole number of steps, so that no float is involved.

    Args:
        deviation: Smallest standard deviation of the noise.
        bits: Source of the random bits; a new secret one where left out.
    """
    steps = max(int(2**SCALE_BITS / deviation), 1)
    source = make_secret_noise_source().bits if bits is None else bits
    noisy = counts * steps + draw_discrete_gaussian(len(counts), source)
    return (2 * noisy + steps) // (2 * steps), 2**SCALE_BITS / steps
