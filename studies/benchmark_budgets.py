"""Compare methods of the benchmark at equal numbers of rounds, training steps and bytes, and at equal time.

In a round of averaging, all hospitals train at the same time; in a round of passing, they train one after another. In
both, each hospital takes the same number of training steps in a round. The time of a round is computed with three
assumptions: each hospital has its own machine, each has its own network connection, and the coordinator is not the
bottleneck. A hospital receives the model, trains, and sends the model back. The time for validation and for the
coordinator's sums is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polyclinic.studies.benchmark_partitions import BlockSeed, SiteShare
from polyclinic.studies.benchmark_report import format_block_cell
from polyclinic.studies.benchmark_results import BenchmarkResult, BlockResult, RunResultLine
from polyclinic.studies.claims import format_markdown_table

EQUAL_ROUNDS = ("published", "busi")
"""Variants of the benchmark in which all methods have equally many rounds."""
EQUAL_TIME = ("rounds84", "rounds36", "busi84", "busi36")
"""Variants in which averaging has about as many rounds as fit into the time of a run of passing."""
PASSING = ("fedseq", "polyclinic")
AVERAGING = ("surgical", "partial_loss")
Block = tuple[str, str]
"""Data set and label pattern."""


@dataclass(frozen=True)
class FederationSpeed:
    """The speed of each hospital of a federation.

    Attributes:
        step_s: Seconds of one training step.
        megabits_per_s: Speed of a hospital's link, in both directions.
    """

    step_s: float
    megabits_per_s: float = 100.0


GPU, CPU_CORE = FederationSpeed(step_s=0.00263), FederationSpeed(step_s=0.0275)
"""Speed of ``tiny_cnn`` on a GPU (docs/simulation.md), and on a CPU core (docs/results.md: 2.12 s for 77 steps)."""


@dataclass(frozen=True)
class BlockBudget:
    """The costs of one block (a data set with a label pattern), as means over its seeds.

    Attributes:
        sites: Number of hospitals.
        steps: Training steps of the hospital with the most steps in a round.
        steps_in_sequence: Training steps of all hospitals together in a round.
        model_megabytes: Size of one model in a message, in megabytes.
        megabytes: Method -> megabytes that all hospitals send and receive in a run of ``rounds`` rounds.
        rounds: Number of rounds of the runs in ``megabytes``.
    """

    sites: int
    steps: float
    steps_in_sequence: float
    model_megabytes: float
    megabytes: Mapping[str, float]
    rounds: int

    def compute_round_seconds(self, speed: FederationSpeed, *, passing: bool) -> float:
        """Return the duration of a round in seconds.

        Args:
            passing: True if the model is passed on, so that the hospitals train one after another.
        """
        visit_s = 2 * 8 * self.model_megabytes / speed.megabits_per_s
        if passing:
            return self.sites * visit_s + self.steps_in_sequence * speed.step_s
        return visit_s + self.steps * speed.step_s

    def count_rounds_in_equal_time(self, speed: FederationSpeed) -> float:
        """Return the number of rounds of averaging that take as long as a run of passing."""
        passing, averaging = (self.compute_round_seconds(speed, passing=passing) for passing in (True, False))
        return self.rounds * passing / averaging

    def count_rounds_of_equal_bytes(self) -> float:
        """Return the number of rounds of averaging that send as many bytes as a run of passing."""
        passing, averaging = (
            float(np.mean([self.megabytes[method] for method in methods])) for methods in (PASSING, AVERAGING)
        )
        return self.rounds * passing / averaging


def compute_block_budgets(
    lines: Iterable[RunResultLine], partitions: Mapping[BlockSeed, Sequence[SiteShare]]
) -> dict[Block, BlockBudget]:
    """Compute the costs of each block from its finished runs and its partitions.

    Args:
        lines: Finished runs, all with equally many rounds; runs that choose a learning rate are ignored.
    """
    by_block: dict[Block, list[RunResultLine]] = {}
    for line in lines:
        if not line.tuning and line.method in (*PASSING, *AVERAGING):
            by_block.setdefault((line.data, line.pattern), []).append(line)
    budgets = dict[Block, BlockBudget]()
    for block, runs in by_block.items():
        of_seeds = [partitions[(*block, seed)] for seed in sorted({run.seed for run in runs})]
        sites, rounds = len(of_seeds[0]), runs[0].rounds
        megabytes: dict[str, list[float]] = {}
        for run in runs:
            megabytes.setdefault(run.method, []).append(run.megabytes)
        budgets[block] = BlockBudget(
            sites=sites,
            steps=float(np.mean([max(share.steps for share in shares) for shares in of_seeds])),
            steps_in_sequence=float(np.mean([sum(share.steps for share in shares) for shares in of_seeds])),
            # A run with the fewest bytes sends each site one model each way in a round, and nothing else.
            model_megabytes=min(run.megabytes for run in runs) / (2 * sites * rounds),
            megabytes={method: float(np.mean(values)) for method, values in megabytes.items()},
            rounds=rounds,
        )
    return budgets


def format_budget_tables(
    equal_rounds: Iterable[BenchmarkResult], equal_time: Iterable[BenchmarkResult], budgets: Mapping[Block, BlockBudget]
) -> list[str]:
    """Return two Markdown tables for the blocks in ``equal_time``: the AUROC of methods, and their costs.

    Args:
        equal_rounds: Results of the variants :data:`EQUAL_ROUNDS`.
        equal_time: Results of the variants :data:`EQUAL_TIME`.
        budgets: Costs of each block.
    """
    twelve = {(block.data, block.pattern): block for result in equal_rounds for block in result.blocks}
    longer = [(result.rounds, block) for result in equal_time for block in result.blocks]
    head = ["AUROC, mean ± SD over seeds", *PASSING, *AVERAGING, "rounds", *AVERAGING]
    reached, costs = list[list[str]](), list[list[str]]()
    for rounds, block in longer:
        name = f"{block.data}, {block.pattern}"
        short, budget = twelve[block.data, block.pattern], budgets[block.data, block.pattern]
        cells = [_format_cell(short, method) for method in (*PASSING, *AVERAGING)]
        reached.append([name, *cells, str(rounds), *(_format_cell(block, method) for method in AVERAGING)])
        steps = f"{budget.steps:.0f} and {budget.steps_in_sequence:.0f}"
        seconds = [budget.compute_round_seconds(GPU, passing=passing) for passing in (False, True)]
        costs.append(
            [
                name,
                str(budget.sites),
                steps,
                *(f"{each:.2f}" for each in seconds),
                f"{budget.count_rounds_in_equal_time(GPU):.0f}",
                f"{budget.count_rounds_in_equal_time(CPU_CORE):.0f}",
                f"{budget.count_rounds_of_equal_bytes():.0f}",
            ]
        )
    cost_head = [
        "", "sites", "steps of a round: averaging, passing", "seconds of a round: averaging", "passing",
        "rounds in equal time, GPU", "CPU core", "rounds of equal bytes",
    ]  # fmt: skip
    return [format_markdown_table(head, reached), format_markdown_table(cost_head, costs)]


def _format_cell(block: BlockResult, method: str) -> str:
    return format_block_cell(block.entries.get(method))
