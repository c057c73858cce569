"""What a study supports: how many of the paper's numbers it reproduced, beyond the spread of its own seeds."""

from collections.abc import Iterable
from dataclasses import dataclass

from scipy.stats import t

from common.system.formatting import counted
from server.analysis.statistics import FEWEST_SEEDS
from server.analysis.study.results import PublishedNumber, StudyResult

LEVEL = 0.95


@dataclass(frozen=True)
class Reproduced:
    """How many published numbers lie in the interval of ours over the seeds, above it and below it."""

    within: int
    above: int
    below: int


def side(entry: PublishedNumber, seeds: int) -> int | None:
    """Where the paper's number lies: 0 in the t-interval of our mean, 1 above it, -1 below it; None where unknown."""
    if entry.paper is None or entry.ours.mean is None or entry.ours.sd is None or seeds < FEWEST_SEEDS:
        return None
    half = float(t.ppf((1 + LEVEL) / 2, seeds - 1)) * entry.ours.sd / seeds**0.5
    distance = entry.paper - entry.ours.mean
    return 0 if abs(distance) <= half else 1 if distance > 0 else -1


def reproduced(entries: Iterable[PublishedNumber], seeds: int) -> Reproduced:
    """Count them."""
    sides = [side(entry, seeds) for entry in entries]
    return Reproduced(sides.count(0), sides.count(1), sides.count(-1))


def study_headline(result: StudyResult) -> str:
    """The study's outcome in a sentence or two."""
    every = [e for table in result.tables for row in table.entries for column in row for e in column]
    published = [entry for entry in every if entry.paper is not None]
    if not published:
        return "The paper gives no numbers for what was run."
    numbers, seeds = counted(len(published), "published number"), len(result.seeds)
    if seeds < FEWEST_SEEDS:
        few = f"{counted(seeds, 'seed')}, and a verdict needs {FEWEST_SEEDS}"
        return f"Whether the paper’s {numbers} are reproduced is open: this study has {few}."
    found = reproduced(published, seeds)
    rest = len(published) - found.within - found.above - found.below
    beside = f"{found.above} lie above it and {found.below} below"
    open_still = f"; {rest} cannot be compared" if rest else ""
    return (
        f"Of {numbers}, {found.within} lie in the 95 % interval of ours over {counted(seeds, 'seed')}; "
        f"{beside}{open_still}."
    )
