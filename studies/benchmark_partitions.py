"""Read the file of the benchmark's partitions, with the images and the classes of each site in each block.

``benchmarks/partitions.py`` writes the file. No images are needed to read it.
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
    """The data of one site in one block.

    Attributes:
        site: Name of the site.
        steps: Optimiser steps of the site in one round.
        class_names: The classes that the site annotates.
    """

    site: str
    training_images: int
    validation_images: int
    steps: int
    class_names: tuple[str, ...]


def read_partitions(path: Path) -> Mapping[BlockSeed, Sequence[SiteShare]]:
    """Read the data of all sites for each block and seed.

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
