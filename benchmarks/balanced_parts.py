"""Measure how balanced training, validation and test parts are: drawn by the paper's procedure, and by identifier.

Run: python benchmarks/balanced_parts.py
"""

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.splits import (
    assign_images_to_parts,
    assign_patients_by_name,
    choose_balanced_split_seed,
    find_positive_images,
    split_patients,
)

SIZES = (20, 50, 100, 900, 5000)
HOSPITALS = 20
FREQUENCIES = (0.3, 0.1, 0.05, 0.02, 0.2)


def draw_parts(patients: NDArray[np.str_], labels: NDArray[np.float32], seed: int) -> list[NDArray[np.str_]]:
    """Return the part of each patient, ``(n,)``, by the paper's procedure, by identifier, and with a chosen seed."""
    stratified = split_patients(patients, find_positive_images(labels), seed)
    return [
        assign_images_to_parts(patients, stratified),
        assign_patients_by_name(patients, seed),
        assign_patients_by_name(patients, choose_balanced_split_seed(patients, labels)),
    ]


def main() -> None:
    random = np.random.default_rng(0)
    for size in SIZES:
        shares: list[list[float]] = [[], [], []]
        positives: list[list[NDArray[np.float64]]] = [[], [], []]
        for hospital in range(HOSPITALS):
            patients = np.array([f"{hospital}-{number}" for number in range(size)])
            labels = (random.random((size, len(FREQUENCIES))) < FREQUENCIES).astype(np.float32)
            for place, parts in enumerate(draw_parts(patients, labels, hospital)):
                is_test = parts == "test"
                shares[place].append(is_test.mean())
                positives[place].append(labels[is_test].sum(axis=0) / labels.sum(axis=0).clip(1))
        cells = []
        for of_patients, of_classes in zip(shares, positives, strict=True):
            cells.append(f"{np.std(of_patients):.3f}; {np.std(of_classes, axis=0).mean():.3f}")
        print(f"| {size:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
