"""A rule for choosing a method, derived from two data sets of the benchmark and tested on the others.

A situation is what limits a federation, such as its time. In each situation the rule chooses the method with the best
mean AUROC over the data sets :data:`GIVE_THE_RULE`. The test compares this method, on each other data set, with the
method that turned out to be the best there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polyclinic.common.system.plain_text import format_number, format_signed
from polyclinic.studies.benchmark_results import BlockResult
from polyclinic.studies.claims import format_markdown_table

Situation = Literal["time", "rounds, a class at several hospitals", "rounds, each class at one hospital", "masks"]
"""The limit of a federation: its time, its number of rounds or bytes, or the need for masked or noisy updates."""
GIVE_THE_RULE = ("composites", "ham10000")
"""Data sets from which the rule is derived."""
MASKABLE = ("surgical", "partial_loss", "vanilla")
"""Ranked rows whose settings work with secure aggregation, which requires that all sites have equal weights."""
NO_FEDERATION = "individual"
ONE_OWNER = ("one7", "one3")
"""Label patterns in which each class is annotated by only one site."""


@dataclass(frozen=True)
class Candidates:
    """The mean AUROC in each block of each method that can be chosen in a situation.

    Attributes:
        auroc: ``(data set, pattern)`` -> method -> mean AUROC over seeds.
    """

    auroc: Mapping[tuple[str, str], Mapping[str, float]]

    def average_over_blocks(self, data: str) -> dict[str, float]:
        """Return method -> mean AUROC over the blocks of a data set, for methods that are in all these blocks."""
        blocks = [methods for (name, _), methods in self.auroc.items() if name == data]
        common = set.intersection(*(set(methods) for methods in blocks)) if blocks else set[str]()
        return {method: float(np.mean([methods[method] for methods in blocks])) for method in sorted(common)}

    def list_data_sets(self) -> list[str]:
        """Return the data sets in the order of the blocks."""
        return list(dict.fromkeys(data for data, _ in self.auroc))


def choose_by_rule(candidates: Candidates) -> str:
    """Return the method with the best mean AUROC over the data sets :data:`GIVE_THE_RULE`."""
    means_by_data = [candidates.average_over_blocks(data) for data in GIVE_THE_RULE]
    common = set.intersection(*(set(means) for means in means_by_data))
    return max(sorted(common), key=lambda method: np.mean([means[method] for means in means_by_data]))


def list_candidates(
    twelve: Sequence[BlockResult], longer: Iterable[BlockResult], ranked: Iterable[str]
) -> dict[Situation, Candidates]:
    """Return the candidates of each situation.

    Args:
        twelve: Blocks with equally many rounds for all methods.
        longer: Blocks in which averaging has about as many rounds as fit into the time of a run of passing.
        ranked: Labels of methods that need nothing that hospitals do not have. Training alone is left out, because it
            is not a federation.
    """
    labels = [label for label in ranked if label != NO_FEDERATION]

    def select(blocks: Iterable[BlockResult], methods: Iterable[str]) -> Candidates:
        selected = set(methods)
        by_block = dict[tuple[str, str], Mapping[str, float]]()
        for block in blocks:
            entries = block.entries.items()
            by_block[block.data, block.pattern] = {label: entry.auroc for label, entry in entries if label in selected}
        return Candidates(by_block)

    in_time = {(block.data, block.pattern): block for block in longer}
    with_time = dict[tuple[str, str], Mapping[str, float]]()
    for key, methods in select(twelve, labels).auroc.items():
        if key in in_time:
            # Averaging has many rounds in the time of twelve rounds of passing.
            many = {f"{label}, many rounds": entry.auroc for label, entry in in_time[key].entries.items()}
            with_time[key] = {**methods, **many}
    return {
        "time": Candidates(with_time),
        "rounds, a class at several hospitals": select(
            [block for block in twelve if block.pattern not in ONE_OWNER], labels
        ),
        "rounds, each class at one hospital": select([block for block in twelve if block.pattern in ONE_OWNER], labels),
        "masks": select(twelve, MASKABLE),
    }


@dataclass(frozen=True)
class RuleTest:
    """Comparison of the method that the rule chooses with the best method on a data set that the rule has not used.

    Attributes:
        method: The method that the rule chooses.
        best: The method with the highest AUROC on this data set.
        auroc, best_auroc: Mean AUROC of ``method`` and of ``best`` over the blocks of the data set.
    """

    situation: Situation
    data: str
    method: str
    auroc: float
    best: str
    best_auroc: float

    @property
    def loss(self) -> float:
        """The AUROC of the best method minus that of the method that the rule chooses."""
        return self.best_auroc - self.auroc


def judge_rule(candidates: Mapping[Situation, Candidates]) -> list[RuleTest]:
    """Compare the rule with the best method, in each situation and on each data set that the rule has not used.

    The best of many methods is also ahead by chance. So the rule loses a little even if no method is clearly ahead.
    """
    tests = list[RuleTest]()
    for situation, of_situation in candidates.items():
        method = choose_by_rule(of_situation)
        for data in of_situation.list_data_sets():
            if data in GIVE_THE_RULE:
                continue
            means = of_situation.average_over_blocks(data)
            best = max(means, key=lambda label: means[label])
            tests.append(RuleTest(situation, data, method, means[method], best, means[best]))
    return tests


def format_rule_table(tests: Iterable[RuleTest]) -> str:
    """Format the tests of the rule as a Markdown table."""
    head = ["what is scarce", "data set", "the rule takes", "AUROC", "best in hindsight", "AUROC", "difference"]
    rows = [
        [
            test.situation,
            test.data,
            f"`{test.method}`",
            format_number(test.auroc),
            f"`{test.best}`",
            format_number(test.best_auroc),
            format_signed(-test.loss),
        ]
        for test in tests
    ]
    return format_markdown_table(head, rows, names=3)
