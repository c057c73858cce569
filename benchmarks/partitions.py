"""Write who has which images and labels in each block of the benchmark, as a csv file that needs no images to be read.

PYTHONPATH=. python benchmarks/partitions.py [--forms published,busi,centres12,frozen60] [--out FILE]

A line is a site of a block with one seed: its training and validation images, the optimiser steps of a round, and the
classes that it annotates. The partition does not follow the method; rows with all labels at all sites have the same
images.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from polyclinic.common.simulation import load_simulated_data
from polyclinic.strategies.local.training import count_batches
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.benchmark_partitions import PARTITIONS_HEADING

FOLDER = Path("experiments/benchmark")


def list_sites(form: str) -> Iterator[list[str]]:
    """Yield a line for each site of each block and seed of a variant."""
    plan = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, form)
    reference = next(method for method in plan.variant_methods if method.label == plan.benchmark.reference)
    for data, pattern in plan.form.blocks:
        for seed in range(plan.form.seeds):
            planned = plan.make_planned_run(data, pattern, reference, plan.benchmark.learning_rates[0], seed)
            file = planned.experiment_file
            training = file.experiment.training
            for part in load_simulated_data(file.experiment, file.base_folder).parts:
                steps = training.epochs * count_batches(len(part.train), training.batch_size)
                counts = (len(part.train), len(part.validation), steps)
                yield [data, pattern, str(seed), part.site, *map(str, counts), ";".join(part.class_names)]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forms", default="published,busi,centres12,frozen60")
    parser.add_argument("--out", type=Path, default=FOLDER / "partitions.csv")
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PARTITIONS_HEADING)
        for form in options.forms.split(","):
            writer.writerows(list_sites(form))


if __name__ == "__main__":
    main()
