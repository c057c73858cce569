"""Which values a hidden count can have, given all that is known: a system of equations over whole numbers.

A count is safe if the system has two solutions in which it differs by enough. A solution is a proof; a missing solution
is not, so a count without a proof is treated as computable.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a start of the program does not need it
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix

SEARCH_SECONDS, SYSTEM_SECONDS = 0.5, 10.0
"""Longest search for one solution, and for all of one system."""
JOINT_SEARCHES, IDLE_SEARCHES = 24, 2
"""Searches that move many counts at once: at most, and without any new proof."""
GAP = 0.3
"""A search need not find the best solution: it ends within this share of it."""

Indices = NDArray[np.intp]


@dataclass
class FeasibleCounts:
    """A system of unknown whole numbers, with sums that are known.

    Attributes:
        truth: ``(unknowns,)``, the true numbers, which are one solution.
        targets: Name -> the unknowns whose sum is a hidden count.
    """

    truth: NDArray[np.int64]
    targets: dict[Hashable, Indices] = field(default_factory=dict)
    _rows: list[tuple[Indices, NDArray[np.float64]]] = field(default_factory=list)
    _lows: list[float] = field(default_factory=list)
    _highs: list[float] = field(default_factory=list)

    def add_sum(self, unknowns: Indices, low: float, high: float) -> None:
        """State that the sum of these unknowns is from ``low`` to ``high``."""
        self.add_combination(unknowns, np.ones(len(unknowns)), low, high)

    def add_known_sum(self, unknowns: Indices) -> None:
        """State that the sum of these unknowns is as in the true population."""
        total = float(self.truth[unknowns].sum())
        self.add_sum(unknowns, total, total)

    def add_combination(self, unknowns: Indices, factors: NDArray[np.float64], low: float, high: float) -> None:
        """State that the sum of these unknowns, each times its factor, is from ``low`` to ``high``."""
        if len(unknowns):
            self._rows.append((unknowns, factors))
            self._lows.append(low)
            self._highs.append(high)

    def find_unsafe_targets(self, width: int) -> list[Hashable]:
        """Return the targets without two solutions that differ by ``width`` or more."""
        if not self.targets or not len(self.truth):
            return list(self.targets)
        from scipy.optimize import LinearConstraint

        names = list(self.targets)
        deadline = time.monotonic() + SYSTEM_SECONDS
        sums = _make_matrix([(unknowns, np.ones(len(unknowns))) for unknowns in self.targets.values()], len(self.truth))
        lows = sums @ self.truth
        highs = lows.copy()
        known = self._make_constraints()
        random = np.random.default_rng(0)
        idle = 0
        for _ in range(JOINT_SEARCHES):
            narrow = np.flatnonzero(highs - lows < width)
            if not len(narrow) or idle >= IDLE_SEARCHES or time.monotonic() > deadline:
                break
            weights = np.zeros(len(names))
            weights[narrow] = random.choice([-1.0, 1.0], len(narrow)) * random.uniform(0.5, 1.5, len(narrow))
            solution = self._search(sums.T @ weights, known)
            if solution is not None:
                lows = np.minimum(lows, sums @ solution)
                highs = np.maximum(highs, sums @ solution)
            has_new_proof = (highs - lows >= width)[narrow].any()
            idle = 0 if has_new_proof else idle + 1
        for target in np.flatnonzero(highs - lows < width).tolist():
            row = sums[[target]]
            # Any number far enough from the lowest or the highest one so far is a proof.
            for low, high in ((lows[target] + width, np.inf), (-np.inf, highs[target] - width)):
                if highs[target] - lows[target] >= width or time.monotonic() > deadline or high < 0:
                    continue
                solution = self._search(np.zeros(len(self.truth)), [*known, LinearConstraint(row, low, high)])
                if solution is not None:
                    lows = np.minimum(lows, sums @ solution)
                    highs = np.maximum(highs, sums @ solution)
        return [name for name, low, high in zip(names, lows, highs, strict=True) if high - low < width]

    def _make_constraints(self) -> "list[LinearConstraint]":
        from scipy.optimize import LinearConstraint

        if not self._rows:
            return []
        matrix = _make_matrix(self._rows, len(self.truth))
        return [LinearConstraint(matrix, np.array(self._lows), np.array(self._highs))]

    def _search(
        self, objective: NDArray[np.float64], constraints: "Sequence[LinearConstraint]"
    ) -> NDArray[np.int64] | None:
        """Return a solution with a large value of the objective; None if none is found in time."""
        from scipy.optimize import Bounds, milp

        result = milp(
            -objective,
            integrality=np.ones(len(self.truth), np.int64),
            bounds=Bounds(0, np.inf),
            constraints=constraints,
            options={"time_limit": SEARCH_SECONDS, "mip_rel_gap": GAP},
        )
        if result.x is None:
            return None
        solution = np.rint(result.x).astype(np.int64)
        return solution if self.is_solution(solution) else None

    def is_solution(self, numbers: NDArray[np.int64]) -> bool:
        """Return True if these whole numbers satisfy all that is known, exactly."""
        if (numbers < 0).any():
            return False
        if not self._rows:
            return True
        sums = _make_matrix(self._rows, len(self.truth)) @ numbers
        return bool((sums >= np.array(self._lows)).all() and (sums <= np.array(self._highs)).all())


def _make_matrix(rows: Sequence[tuple[Indices, NDArray[np.float64]]], width: int) -> "csr_matrix":
    """Return a sparse matrix from the columns and factors of each row."""
    from scipy.sparse import csr_matrix

    lengths = [len(unknowns) for unknowns, _ in rows]
    row_numbers = np.repeat(np.arange(len(rows)), lengths)
    columns = np.concatenate([unknowns for unknowns, _ in rows])
    factors = np.concatenate([factors for _, factors in rows])
    return csr_matrix((factors, (row_numbers, columns)), shape=(len(rows), width))
