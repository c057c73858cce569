"""The file of the benchmark's partitions: which site has how many images of each block, and which classes it annotates.

``benchmarks/partitions.py`` writes the file. Reading it needs none of the images.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault

PARTITIONS_HEADING = (
    "data", "pattern", "seed", "site", "training_images", "validation_images", "steps_a_round", "classes",
)  # fmt: skip
BlockSeed = tuple[str, str, int]
"""Data set, label pattern and seed."""


@dataclass(frozen=True)
class SiteShare:
    """The part of a block that one site has.

    Attributes:
        steps: Optimiser steps of the site in one round.
        class_names: The classes that it annotates.
    """

    site: str
    training_images: int
    validation_images: int
    steps: int
    class_names: tuple[str, ...]


def read_partitions(path: Path) -> Mapping[BlockSeed, Sequence[SiteShare]]:
    """Read the sites of each block and seed.

    Raises:
        BadInput: If the file has another heading.
    """
    shares: dict[BlockSeed, list[SiteShare]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != PARTITIONS_HEADING:
            problem = f"the heading is not {','.join(PARTITIONS_HEADING)}."
            raise BadInput([Fault(str(path), problem, "Write it again: python benchmarks/partitions.py")])
        for row in reader:
            share = SiteShare(
                row["site"],
                int(row["training_images"]),
                int(row["validation_images"]),
                int(row["steps_a_round"]),
                tuple(row["classes"].split(";")),
            )
            shares.setdefault((row["data"], row["pattern"], int(row["seed"])), []).append(share)
    return shares
