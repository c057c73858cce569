"""The answer of ``flwr-server plan``, for a person and for a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.amounts import count, counted, duration, shortened
from server.planning import Past, Replay, WhatIf, replay, suggested_deadline_s

ROUNDS_SHOWN = 30


@dataclass(frozen=True)
class Row:
    """One way to set the two keys, and what comes of it."""

    name: str
    what_if: WhatIf
    replay: Replay


@dataclass(frozen=True)
class Plan:
    """The run's own settings, those tried, and those suggested; the last two only where they differ."""

    past: Past
    rows: tuple[Row, ...]

    @property
    def tried(self) -> Row:
        """What the rounds are listed of."""
        return next((row for row in self.rows if row.name == "tried"), self.rows[0])

    @property
    def suggested(self) -> WhatIf:
        return self.rows[-1].what_if


def plan_of(past: Past, asked: WhatIf) -> Plan:
    """Replay the run under each of them."""
    own = past.participation
    recorded = replace(asked, min_sites=own.min_sites, deadline_s=own.round_deadline_s)
    in_time = len(past.images) - len(asked.dropped | set(asked.late))
    better = replace(asked, deadline_s=suggested_deadline_s(past, asked))
    if asked.dropped or asked.late:
        better = replace(better, min_sites=max(in_time, 1))
    ways = {"the run's own": recorded, "tried": asked, "suggested": better}
    if asked == recorded:
        del ways["tried"]
    return Plan(past, tuple(Row(name, way, replay(past, way)) for name, way in ways.items()))


def as_json(plan: Plan) -> dict[str, Any]:
    """For a machine."""
    rows = {
        row.name: {"min_sites": row.what_if.min_sites, "round_deadline_s": row.what_if.deadline_s, **asdict(row.replay)}
        for row in plan.rows
    }
    return {"recorded_seconds": plan.past.seconds, "recorded_rounds": len(plan.past.rounds), "ways": rows}


def in_words(plan: Plan) -> RenderableType:
    """For a person."""
    past = plan.past
    heading = (
        f"As recorded: {counted(len(past.rounds), 'round')} in {duration(past.seconds)}. "
        "Of the same times, with other settings:"
    )
    suggested = plan.suggested
    lines = (
        f"--set participation.min_sites={suggested.min_sites} "
        f"--set participation.round_deadline_s={suggested.deadline_s:.0f}"
    )
    return Group(Text(heading), _ways(plan.rows), Text(""), _rounds(plan.tried), Text(f"Suggested: {lines}"))


def _ways(rows: Sequence[Row]) -> Table:
    table = Table("settings", "min_sites", "deadline", "rounds", "time", "against recorded", "images not learnt from")
    for row in rows:
        what_if, done = row.what_if, row.replay
        table.add_row(
            row.name,
            str(what_if.min_sites or "all"),
            duration(what_if.deadline_s),
            str(sum(each.counts for each in done.rounds)),
            duration(done.seconds),
            _difference(done),
            f"{count(done.images_lost)} ({done.images_share:.0%})",
        )
        if done.stopped:
            table.add_row("", "", "", "", "", Text(done.stopped), "")
    return table


def _difference(done: Replay) -> str:
    word = "longer" if done.hours_lost >= 0 else "shorter"
    return f"{duration(abs(done.hours_lost) * 3600)} {word}"


def _rounds(row: Row) -> Table:
    table = Table("round", "time", "counted", "left out", title=f"Round by round ({row.name})", title_justify="left")
    for each in row.replay.rounds[:ROUNDS_SHOWN]:
        counts = shortened(each.counted, 8) if each.counts else f"too few: {shortened(each.counted, 8) or 'nobody'}"
        table.add_row(str(each.round), duration(each.seconds), Text(counts), Text(_reasons(each.left_out)))
    if len(row.replay.rounds) > ROUNDS_SHOWN:
        table.add_row("...", "", f"{len(row.replay.rounds) - ROUNDS_SHOWN} more rounds: --json", "")
    return table


def _reasons(left_out: Mapping[str, str]) -> str:
    return "; ".join(f"{site}: {why}" for site, why in left_out.items())
