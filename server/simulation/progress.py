"""How far a grid of runs is, and how long the rest will take."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PaceRow:
    """One experiment of the table of progress.

    Attributes:
        done, total: Runs.
        rounds: Of each run at work: rounds done and rounds in all.
        seconds: That a run takes, as far as this is known.
    """

    label: str
    done: int
    total: int
    rounds: tuple[tuple[int, int], ...]
    seconds: float | None


@dataclass
class Pace:
    """What is known of the runs' lengths.

    Attributes:
        totals: Label -> runs.
        done: Label -> finished runs, those that were there before among them.
        lengths: Label -> seconds of the runs that finished here.
    """

    totals: Mapping[str, int]
    done: dict[str, int]
    lengths: dict[str, list[float]] = field(default_factory=dict)

    def finished(self, label: str, seconds: float) -> None:
        """Note a run that ended well."""
        self.done[label] = self.done.get(label, 0) + 1
        self.lengths.setdefault(label, []).append(seconds)

    def typical(self, label: str) -> float | None:
        """Median length of the experiment's runs; of all runs where none of it has finished; None where none has."""
        known = self.lengths.get(label) or [seconds for each in self.lengths.values() for seconds in each]
        return statistics.median(known) if known else None

    def left(self, at_work: Sequence["AtWork"], jobs: int) -> float | None:
        """Seconds until all is done, so many at a time; None before the first run or the first rounds say anything."""
        waiting = [label for label, total in self.totals.items() for _ in range(total - self.done.get(label, 0))]
        for run in at_work:
            waiting.remove(run.label)
        whole = [run.whole for run in at_work if run.whole is not None]
        guess = statistics.median(whole) if whole else None
        rest = [self.typical(label) or guess for label in waiting]
        rest += [run.left(self.typical(run.label)) for run in at_work]
        known = [seconds for seconds in rest if seconds is not None]
        if not rest or not known:
            return 0.0 if not rest else None
        return statistics.fmean(known) * len(rest) / min(jobs, len(rest))


@dataclass(frozen=True)
class AtWork:
    """A run at work, for so many seconds and rounds.

    Attributes:
        name: Of its folder.
    """

    label: str
    seconds: float
    rounds_done: int
    rounds: int
    name: str = ""

    @property
    def whole(self) -> float | None:
        """Seconds that it will have taken, by its rounds so far."""
        return self.seconds / self.rounds_done * self.rounds if self.rounds_done else None

    def left(self, typical: float | None) -> float | None:
        """Estimate the seconds left, from its own rounds where it has some, else from runs like it."""
        if self.whole is not None:
            return max(self.whole - self.seconds, 0.0)
        return None if typical is None else max(typical - self.seconds, 0.0)


def rows(pace: Pace, at_work: Sequence[AtWork]) -> list[PaceRow]:
    """The table of progress, in the order of the experiments."""
    return [
        PaceRow(
            label,
            pace.done.get(label, 0),
            total,
            tuple((run.rounds_done, run.rounds) for run in at_work if run.label == label),
            pace.typical(label) if label in pace.lengths else None,
        )
        for label, total in pace.totals.items()
    ]
