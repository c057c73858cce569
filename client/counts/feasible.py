"""The possible values of hidden counts under all disclosed sums: a system of linear bounds over whole numbers.

A hidden count is safe if the system has two solutions in which the count differs by enough. The two solutions are a
proof. A count without a proof is treated as computable, because the search may have missed a solution.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # scipy is imported late, because a start of the program does not need it
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix

SEARCH_TIMEOUT_S = 0.5
"""Maximum time of the search for one solution."""
SYSTEM_TIMEOUT_S = 10.0
"""Maximum time of all searches of one system."""
MAX_JOINT_SEARCHES = 24
"""Maximum number of searches that change many counts at once."""
MAX_IDLE_SEARCHES = 2
"""The joint searches end after this many in a row without a new proof."""
RELATIVE_GAP = 0.3
"""A search ends at a solution whose objective is at most this share below the best possible one."""

Indices = NDArray[np.intp]


@dataclass
class FeasibleCounts:
    """A system of unknown whole numbers with bounds on their sums.

    Attributes:
        truth: ``(unknowns,)``, the true numbers, which are one solution.
        targets: Name of a hidden count -> the unknowns whose sum it is.
    """

    truth: NDArray[np.int64]
    targets: dict[Hashable, Indices] = field(default_factory=dict)
    _rows: list[tuple[Indices, NDArray[np.float64]]] = field(default_factory=list)
    _lows: list[float] = field(default_factory=list)
    _highs: list[float] = field(default_factory=list)

    def add_sum(self, unknowns: Indices, low: float, high: float) -> None:
        """Add the bound that the sum of these unknowns is between ``low`` and ``high``."""
        self.add_combination(unknowns, np.ones(len(unknowns)), low, high)

    def add_known_sum(self, unknowns: Indices) -> None:
        """Add the equation that the sum of these unknowns is the same as in the true population."""
        total = float(self.truth[unknowns].sum())
        self.add_sum(unknowns, total, total)

    def add_combination(self, unknowns: Indices, factors: NDArray[np.float64], low: float, high: float) -> None:
        """Add the bound that the sum of these unknowns, each times its factor, is between ``low`` and ``high``."""
        if len(unknowns):
            self._rows.append((unknowns, factors))
            self._lows.append(low)
            self._highs.append(high)

    def find_unsafe_targets(self, width: int) -> list[Hashable]:
        """Return the names of the targets for which no two solutions were found that differ by at least ``width``."""
        if not self.targets or not len(self.truth):
            return list(self.targets)
        from scipy.optimize import LinearConstraint

        names = list(self.targets)
        deadline = time.monotonic() + SYSTEM_TIMEOUT_S
        sums = _make_matrix([(unknowns, np.ones(len(unknowns))) for unknowns in self.targets.values()], len(self.truth))
        lows = sums @ self.truth
        highs = lows.copy()
        known = self._make_constraints()
        random = np.random.default_rng(0)
        idle = 0

        for _ in range(MAX_JOINT_SEARCHES):
            narrow = np.flatnonzero(highs - lows < width)
            if not len(narrow) or idle >= MAX_IDLE_SEARCHES or time.monotonic() > deadline:
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
            # A solution far enough from the lowest or from the highest number so far completes a proof.
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
        """Return a solution with a large value of the objective; None if the search finds none in time."""
        from scipy.optimize import Bounds, milp

        result = milp(
            -objective,
            integrality=np.ones(len(self.truth), np.int64),
            bounds=Bounds(0, np.inf),
            constraints=constraints,
            options={"time_limit": SEARCH_TIMEOUT_S, "mip_rel_gap": RELATIVE_GAP},
        )
        if result.x is None:
            return None
        solution = np.rint(result.x).astype(np.int64)
        return solution if self.is_solution(solution) else None

    def is_solution(self, numbers: NDArray[np.int64]) -> bool:
        """Return True if these numbers are not negative and satisfy all bounds exactly."""
        if (numbers < 0).any():
            return False
        if not self._rows:
            return True
        sums = _make_matrix(self._rows, len(self.truth)) @ numbers
        return bool((sums >= np.array(self._lows)).all() and (sums <= np.array(self._highs)).all())


def _make_matrix(rows: Sequence[tuple[Indices, NDArray[np.float64]]], width: int) -> "csr_matrix":
    """Return a sparse matrix of ``width`` columns; each row is given by its column numbers and factors."""
    from scipy.sparse import csr_matrix

    lengths = [len(unknowns) for unknowns, _ in rows]
    row_numbers = np.repeat(np.arange(len(rows)), lengths)
    columns = np.concatenate([unknowns for unknowns, _ in rows])
    factors = np.concatenate([factors for _, factors in rows])
    return csr_matrix((factors, (row_numbers, columns)), shape=(len(rows), width))
