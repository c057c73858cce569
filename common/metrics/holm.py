"""Correction of p-values for several tests of one family."""

from collections.abc import Sequence


def adjust_by_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for multiple testing (Holm, Scand. J. Statist. 1979); ``None`` stays None and is not counted as a
    test.
    """
    ascending = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(ascending):
        largest = max(largest, min(1.0, p * (len(ascending) - rank)))
        adjusted[index] = largest
    return adjusted
