"""Stratified splits by scikit-learn, with our words for what cannot be split."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from common.errors import Fault, quoted, stop_on

Numbers = NDArray[np.intp]
VALIDATION, TEST = 0.1, 0.2
REMEDY = "Take fewer sites_per_task, more images, or a larger server_fraction."


@dataclass(frozen=True)
class Share:
    """Somebody's patients, by number."""

    train: Numbers
    validation: Numbers
    test: Numbers


@dataclass(frozen=True)
class Stratified:
    """Splits patients so that both sides have each class in proportion.

    Attributes:
        classes: ``(patients,)`` column of each patient's class; the number of columns where it has none.
        class_names: Names of the columns.
        seed: Of each split anew.
    """

    classes: Numbers
    class_names: Sequence[str]
    seed: int

    def two(self, numbers: Numbers, fraction: float, holder: str) -> tuple[Numbers, Numbers]:
        """Return what is left and a ``fraction``, both shuffled; ``holder`` begins the sentence of a fault.

        Raises:
            BadInput: If a class has a single patient, or one side has no room for all classes.
        """
        from sklearn.model_selection import train_test_split  # here: its import takes two seconds

        classes = self.classes[numbers]
        stop_on(self._faults(classes, ceil(fraction * len(numbers)), holder))
        left, taken = train_test_split(numbers, test_size=fraction, random_state=self.seed, stratify=classes)
        return left, taken

    def share(self, numbers: Numbers, holder: str) -> Share:
        """Divide 70/10/20, the test part first."""
        left, test = self.two(numbers, TEST, holder)
        train, validation = self.two(left, VALIDATION / (1 - TEST), holder)
        return Share(train, validation, test)

    def _faults(self, classes: Numbers, taken: int, holder: str) -> list[Fault]:
        present, counts = np.unique(classes, return_counts=True)
        single = [[*self.class_names, "no class"][column] for column in present[counts == 1]]
        if single:
            problem = f"{holder} has a single patient of {quoted(single)}, which cannot be divided over parts."
        elif min(taken, len(classes) - taken) < max(1, len(present)):
            problem = (
                f"{holder} has {len(classes)} patients to divide, too few for each part to have {len(present)} classes."
            )
        else:
            return []
        return [Fault("partition.sites_per_task", problem, REMEDY)]
