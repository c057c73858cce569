"""``flwr-server plan``: what other deadlines and fewer sites would have made of a run, by its recorded times.

Plain arithmetic, no model of the network. A site's time in a round is what it trained, as recorded, and what a round
took beside training (the median over rounds in which nobody was absent; nothing in a simulation, whose sites share one
machine and are taken as if each had its own). A round waits for every site at work until its deadline, and counts if
``min_sites`` sites are in time. A site that was absent stays absent: one that had not replied is waited for until the
deadline, any other is not.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.config import Experiment, ParticipationSection
from common.errors import BadInput, Fault, did_you_mean, quoted, stop_on
from server.run_files import RoundRecord, Run, read_run

SUGGESTED_QUANTILE, SUGGESTED_FACTOR = 0.95, 1.5
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TOO_LATE = "no reply within"


@dataclass(frozen=True)
class Past:
    """What a run's files say of times.

    Attributes:
        images: Training images of each site.
        beside_s: What a round took beside training.
        passing: Whether the model went from site to site, one after another.
    """

    rounds: tuple[RoundRecord, ...]
    images: Mapping[str, int]
    participation: ParticipationSection
    beside_s: float
    passing: bool

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return sum(each.seconds or 0.0 for each in self.rounds)


@dataclass(frozen=True)
class WhatIf:
    """Another run of the same federation.

    Attributes:
        dropped: Sites that are never there.
        late: Site -> seconds that each of its rounds takes longer.
        min_sites: 0 for all that are asked.
    """

    min_sites: int
    deadline_s: float
    dropped: frozenset[str] = frozenset()
    late: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Replayed:
    """One round of it.

    Attributes:
        left_out: Site -> why its work would not have counted.
        counts: Whether enough sites were in time; else the run stops here.
    """

    round: int
    counted: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float
    counts: bool


@dataclass(frozen=True)
class Replay:
    """All of it.

    Attributes:
        stopped: Why the run would not have come to its end; empty if it would.
        roll_call_s: Waited for dropped sites before round 1.
        hours_lost: More than the run took as recorded; negative for less.
        images_lost: Training images times rounds that the recorded run learnt from and this one would not.
    """

    rounds: tuple[Replayed, ...]
    stopped: str
    roll_call_s: float
    seconds: float
    hours_lost: float
    images_lost: int
    images_share: float


def past_of(folder: Path) -> Past:
    """Read a finished run.

    Raises:
        BadInput: If it is none, or has no times.
    """
    from strategies.registry import method_of

    run: Run = read_run(folder)
    rounds = tuple(each for each in run.rounds if each.seconds is not None and each.site_seconds)
    if not rounds:
        remedy = "Name the folder of a run in which sites trained."
        raise BadInput([Fault(str(folder / "rounds.jsonl"), "has no times of any site.", remedy)])
    experiment = Experiment.model_validate(run.summary.experiment)
    passing = method_of(experiment).passing is not None
    images = {name: site.train_samples or 0 for name, site in run.summary.sites.items()}
    beside = _beside(rounds, passing) if run.summary.backend == "network" else 0.0
    return Past(rounds, images, experiment.participation, beside, passing)


def _beside(rounds: Sequence[RoundRecord], passing: bool) -> float:
    together = sum if passing else max
    spent = [(each.seconds or 0.0) - together(each.site_seconds.values()) for each in rounds if not each.absent]
    return max(statistics.median(spent), 0.0) if spent else 0.0


def replay(past: Past, what_if: WhatIf) -> Replay:
    """Go through the run again."""
    remaining = [name for name in past.images if name not in what_if.dropped]
    roll_call_s = past.participation.roll_call_deadline_s if what_if.dropped else 0.0
    needed = what_if.min_sites or len(past.images)
    done = list[Replayed]()
    stopped = ""
    if len(remaining) < needed:
        stopped = f"it would not have begun: {len(remaining)} of {needed} sites at the roll call"
    else:
        for each in past.rounds:
            done.append(_round(past, each, what_if))
            if not done[-1].counts:
                asked = len(done[-1].counted) + len(done[-1].left_out)
                enough = what_if.min_sites or asked
                stopped = f"it would have stopped in round {each.round}: {len(done[-1].counted)} of {enough} in time"
                break
    seconds = roll_call_s + sum(each.seconds for each in done)
    learnt = sum(_images(past, each.sites) for each in past.rounds)
    lost = learnt - sum(_images(past, each.counted) for each in done if each.counts)
    return Replay(
        tuple(done),
        stopped,
        roll_call_s,
        seconds,
        (seconds - past.seconds) / 3600,
        lost,
        lost / learnt if learnt else 0,
    )


def _images(past: Past, sites: Sequence[str]) -> int:
    return sum(past.images.get(site, 0) for site in sites)


def _round(past: Past, record: RoundRecord, what_if: WhatIf) -> Replayed:
    asked = [site for site in (*record.sites, *record.absent) if site not in what_if.dropped]
    times = {site: _time(past, record, what_if, site) for site in asked}
    counted = tuple(site for site in asked if times[site] <= what_if.deadline_s)
    left_out = {site: _why(record, site, times[site], what_if.deadline_s) for site in asked if site not in counted}
    waited = [min(times[site], what_if.deadline_s) for site in asked if not math.isnan(times[site])]
    seconds = sum(waited) + past.beside_s if past.passing else max(waited, default=0.0)
    counts = len(counted) >= (what_if.min_sites or len(asked)) and bool(counted)
    return Replayed(record.round, counted, left_out, seconds, counts)


def _time(past: Past, record: RoundRecord, what_if: WhatIf, site: str) -> float:
    """Seconds until its reply; infinite if it never came, not a number if it was not waited for."""
    if site in record.absent:
        return math.inf if record.absent[site].startswith(_TOO_LATE) else math.nan
    beside = 0.0 if past.passing else past.beside_s
    return record.site_seconds.get(site, 0.0) + beside + what_if.late.get(site, 0.0)


def _why(record: RoundRecord, site: str, seconds: float, deadline_s: float) -> str:
    if site in record.absent:
        return f"absent, as recorded: {record.absent[site]}"
    return f"{seconds:.0f} s, {seconds - deadline_s:.0f} s too late"


def suggested_deadline_s(past: Past, what_if: WhatIf) -> float:
    """Whole minutes: 1.5 times what 95 % of the recorded replies of sites neither dropped nor late took."""
    others = [
        seconds + (0.0 if past.passing else past.beside_s)
        for each in past.rounds
        for site, seconds in each.site_seconds.items()
        if site not in what_if.dropped and site not in what_if.late
    ]
    if not others:
        return what_if.deadline_s
    usual = float(np.quantile(others, SUGGESTED_QUANTILE))
    return max(math.ceil(usual * SUGGESTED_FACTOR / 60), 1) * 60.0


def seconds_of(text: str) -> float:
    """``"2h"``, ``"90m"``, ``"45 s"``, ``"1.5d"`` or plain seconds.

    Raises:
        ValueError: If it is none of them.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", text.strip())
    if found is None:
        raise ValueError(f'"{text}" is no time; write it like 45s, 90m, 2h or 1d')
    return float(found[1]) * _UNITS[found[2] or ""]


def what_if_of(
    past: Past, drop: Sequence[str], late: Sequence[str], min_sites: int | None, deadline: str | None
) -> WhatIf:
    """From what was typed.

    Raises:
        BadInput: With every fault.
    """
    faults = [fault for site in drop for fault in _site_faults(past, "--drop", site)]
    delays: dict[str, float] = {}
    for each in late:
        site, _, text = each.rpartition("=")
        faults += _site_faults(past, "--late", site)
        try:
            delays[site] = seconds_of(text)
        except ValueError as error:
            faults.append(Fault(f"--late {each}", f"{error}."))
        if site in drop:
            faults.append(Fault(f"--late {each}", f'"{site}" is dropped too.', "Leave one out."))
    deadline_s = past.participation.round_deadline_s
    if deadline is not None:
        try:
            deadline_s = seconds_of(deadline)
        except ValueError as error:
            faults.append(Fault("--deadline", f"{error}."))
    fewest = past.participation.min_sites if min_sites is None else min_sites
    if fewest > len(past.images):
        faults.append(Fault("--min-sites", f"is {fewest}, but the run had {len(past.images)} sites."))
    stop_on(faults)
    return WhatIf(fewest, deadline_s, frozenset(drop), delays)


def _site_faults(past: Past, option: str, site: str) -> list[Fault]:
    if site in past.images:
        return []
    remedy = did_you_mean(site, past.images) or f"Sites: {quoted(sorted(past.images))}."
    return [Fault(f"{option} {site}", "is no site of this run.", remedy)]
