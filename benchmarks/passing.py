"""What passing one model from site to site costs in time: steps and seconds of a round that follow one another.

PYTHONPATH=. python benchmarks/passing.py [--form published] [--rounds 4]

Sites that train at the same time take as long as the slowest of them; sites that one model passes through take as long
as all of them together. For each pattern of labels, on its first data set, seed 0: `partial_loss` and `fedseq` at one
learning rate, in this process, which trains one site at a time, so that the seconds of a site are its own. A site's
seconds are those of its fastest round. Messages are not counted.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from polyclinic.common.config import Experiment, read_experiment
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.local.training import shuffle_into_batches
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan
from polyclinic.studies.claims import format_markdown_table

FOLDER = Path("experiments/benchmark")
AT_THE_SAME_TIME, ONE_AFTER_ANOTHER = "partial_loss", "fedseq"


def site_steps(run: RunFolderContent, experiment: Experiment) -> list[int]:
    """Return the optimiser steps of each site in a round."""
    training, generator = experiment.training, torch.Generator()
    images = [record.train_samples or 0 for record in run.summary.sites.values()]
    return [training.epochs * len(shuffle_into_batches(count, training.batch_size, generator)) for count in images]


def site_seconds(run: RunFolderContent) -> list[float]:
    """Return the seconds of each site in its fastest round."""
    return [min(line.site_seconds[site] for line in run.rounds) for site in run.summary.sites]


def measured_run(
    plan: BenchmarkVariantPlan, block: tuple[str, str], name: str, rounds: int
) -> tuple[RunFolderContent, Experiment]:
    """Run a method on a block for a few rounds."""
    method = next(each for each in plan.variant_methods if each.label == name)
    planned = plan.make_planned_run(*block, method, plan.benchmark.learning_rates[0], 0)
    file = read_experiment(planned.experiment, (*planned.overrides, f"run.rounds={rounds}"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        simulate(file, out, Console(quiet=True), pages=False)
        return read_run(out), file.experiment


def main() -> None:
    """Print a table with a row for each block."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--form", default="published")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    plan, rows = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, options.form), list[list[str]]()
    first: dict[str, tuple[str, str]] = {}
    for data, pattern in plan.form.blocks:
        first.setdefault(pattern, (data, pattern))
    for block in first.values():
        side_by_side, experiment = measured_run(plan, block, AT_THE_SAME_TIME, options.rounds)
        passed, _ = measured_run(plan, block, ONE_AFTER_ANOTHER, options.rounds)
        steps = site_steps(side_by_side, experiment)
        slowest, together = max(site_seconds(side_by_side)), sum(site_seconds(passed))
        sites = str(len(side_by_side.summary.sites))
        counts = [str(max(steps)), str(sum(steps)), f"{sum(steps) / max(steps):.1f}"]
        rows.append(
            [", ".join(block), sites, *counts, f"{slowest:.2f}", f"{together:.2f}", f"{together / slowest:.1f}"]
        )
    head = ["", "sites", "steps: averaging", "passing", "times", "seconds: averaging", "passing", "times"]
    print(format_markdown_table(head, rows))


if __name__ == "__main__":
    main()
