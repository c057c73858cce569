"""How many images show each class, absent, uncertain, blank: small counts hidden, for what is printed gets around."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.check.source import Source
from client.site.site_file import Settings
from common.data.base.spec import ChexpertSpec, LabelColumnsSpec, MimicSpec
from common.data.tables.csv import count_uncertain_and_blank
from common.errors import BadInput

HIDDEN_BELOW = 10
"""Patients. A hospital that hides more in its policy hides more here."""


@dataclass(frozen=True)
class ClassCounts:
    """Images of one class, all parts together.

    Attributes:
        name: The hospital's own.
        unknown: Images that count as neither present nor absent.
        small: Whether those with, and those without, are of so few patients that neither number is told.
        fewest: That limit.
        uncertain, blank: Cells of the table; None where it has no such cells.
    """

    name: str
    present: int
    absent: int
    unknown: int
    small: tuple[bool, bool]
    fewest: int
    uncertain: int | None = None
    blank: int | None = None

    def told(self) -> tuple[str, str]:
        """Present and absent as they may be printed; with one of them the other would be told. A zero is nobody's."""
        few = f"<{self.fewest}"
        counts = (self.present, self.absent)
        present, absent = (
            few if small else "not told" if any(self.small) and count else f"{count:,}"
            for small, count in zip(self.small, counts, strict=True)
        )
        return present, absent

    def as_json(self) -> dict[str, object]:
        present, absent = self.told()
        told = {"present": present, "absent": absent, "unknown": self.unknown}
        return told if self.blank is None else {**told, "uncertain": self.uncertain, "blank": self.blank}


def class_counts(source: Source, settings: Settings) -> list[ClassCounts]:
    """Count, class by class that the site annotates."""
    fewest = max(HIDDEN_BELOW, settings.file.policy.smallest_count)
    cells = _cells(source, settings)
    counted = []
    for name in settings.labels or source.class_names:
        column = source.labels[:, source.class_names.index(name)]
        present, absent = column == 1, column == 0
        with_it, without = (0 < _patients(source, rows) < fewest for rows in (present, absent))
        numbers = int(present.sum()), int(absent.sum()), int(np.isnan(column).sum())
        uncertain, blank = cells.get(name, (None, None))
        counted.append(ClassCounts(name, *numbers, (with_it, without), fewest, uncertain, blank))
    return counted


def _patients(source: Source, rows: NDArray[np.bool_]) -> int:
    return len(np.unique(source.patients[rows]))


def _cells(source: Source, settings: Settings) -> dict[str, tuple[int, int]]:
    """Uncertain and blank cells, of a table that has one column a class."""
    spec = settings.file.data
    if not isinstance(spec, LabelColumnsSpec | ChexpertSpec | MimicSpec):
        return {}
    try:
        return count_uncertain_and_blank(settings.folder / spec.labels, source.class_names, spec.largest_mb)
    except BadInput:  # told already
        return {}
