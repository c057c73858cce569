"""From what was seen to the page, whole or only the part that changes."""

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup
from pydantic import TypeAdapter

from common.metrics.auroc import Summary
from common.metrics.measured import figure
from common.system import formatting
from common.system.pages import page_environment
from server.reporting.live.curves import curves
from server.reporting.live.snapshot import Seen, SiteSeen
from server.runs.live_status import PHASES, Present
from server.runs.reader import RoundLine

SITES_SHOWN = 60
_HERE = Path(__file__).parent / "assets"
_STATES = {
    "running": "running",
    "done": "done",
    "stopped": "stopped",
    "interrupted": "interrupted: --resume goes on",
}

_SUMMARY = TypeAdapter(Summary)


@dataclass(frozen=True)
class Shown:
    """The words and figures of the page.

    Attributes:
        tab: Title of the window.
        said: What a screen reader says when it changes: the round and how the run goes, nothing else.
        bar: Share of the rounds that are done, in percent; None without a run.
        lines: What goes on now, one sentence each.
        reason: Why the run ended before its time, or its last trouble.
        linked: Whether sites have connections; those of a simulation have not.
    """

    tab: str
    said: str
    kicker: str
    heading: str
    state: str
    state_words: str
    bar: float | None
    bar_words: str
    lines: Sequence[str]
    reason: str
    tiles: Sequence[tuple[str, str]]
    figures: Sequence[tuple[str, Markup]]
    sites: Sequence[SiteSeen]
    more_sites: int
    linked: bool
    events: Sequence[tuple[str, str]]


def shown(seen: Seen) -> Shown:
    """Return the words and figures of the page."""
    run = seen.present
    state = run.state if run else "none"
    words = _STATES.get(state, "no run yet")
    done = rounds_done(run) if run else 0
    where = f"round {done} of {run.rounds} done" if run and run.rounds else ""
    sites = sorted(seen.sites, key=lambda site: (not site.part.startswith(("lost", "at work", "waiting")), site.name))
    return Shown(
        tab=f"{done}/{run.rounds} {run.name}" if run and run.rounds else seen.title,
        said=". ".join(part for part in (words, where) if part),
        kicker=" · ".join(part for part in (seen.title, seen.link) if part),
        heading=run.name if run else "No run yet",
        state=state,
        state_words=words,
        bar=round(100 * done / run.rounds, 2) if run and run.rounds else None,
        bar_words=where,
        lines=_lines(seen, run) if run else (),
        reason=_reason(run) if run else "",
        tiles=_tiles(seen, run, done) if run else (),
        figures=_figures(seen.rounds, run.rounds) if run and seen.rounds else (),
        sites=sites[:SITES_SHOWN],
        more_sites=max(len(sites) - SITES_SHOWN, 0),
        linked=any(site.link for site in sites),
        events=seen.events,
    )


def rounds_done(run: Present) -> int:
    """Rounds that count: the one that trains does not yet."""
    return max(run.round - 1, 0) if run.phase == "train" and run.state != "done" else run.round


def _lines(seen: Seen, run: Present) -> list[str]:
    if run.state != "running":
        return [f"Run folder: {run.run_folder}"]
    phase = PHASES.get(run.phase, run.phase)
    at = f"Round {run.round} of {run.rounds}: {phase}." if run.rounds else f"{phase.capitalize()}."
    if not run.waiting_for:
        return [at]
    until = time.strftime("%H:%M:%S %Z", time.localtime(run.deadline))
    return [f"{at} Waiting for {formatting.shortened(run.waiting_for, 6)}, at the latest until {until}."]


def _reason(run: Present) -> str:
    if not run.last_error or run.state == "done":
        return ""
    return run.last_error if run.state != "running" else f"Last problem: {run.last_error}"


def _tiles(seen: Seen, run: Present, done: int) -> list[tuple[str, str]]:
    tiles = [(f"{done} of {run.rounds}" if run.rounds else "–", "rounds done")]
    if run.state == "running" and run.seconds_left is not None:
        tiles.append((formatting.duration(run.seconds_left), "left, by the pace so far"))
    away = f", {len(run.lost)} lost" if run.lost else ""
    tiles.append((str(len(run.sites)), f"sites take part{away}"))
    tiles += [
        (formatting.number(value), f"{name}, round {number}")
        for name, key in (("validation loss", "validation_loss"), ("validation AUROC", "validation_auroc"))
        for number, value in _newest(seen.rounds, key)
    ]
    test = seen.summary.get("test")
    if isinstance(test, Mapping):
        headline = _SUMMARY.validate_python(test).headline()
        over = f"{len(headline.classes)} of {len(headline.classes) + len(headline.left_out)} classes"
        tiles.append((figure(headline.mean), f"test AUROC, mean over {over}"))
    return tiles


def _newest(rounds: Sequence[RoundLine], key: str) -> list[tuple[int, float]]:
    return [(each.round, value) for each in rounds if (value := getattr(each, key)) is not None][-1:]


def _figures(rounds: Sequence[RoundLine], last: int) -> list[tuple[str, Markup]]:
    numbers = [each.round for each in rounds]
    losses = {
        "training": [each.train_loss for each in rounds],
        "validation": [each.validation_loss for each in rounds],
    }
    aurocs = {"validation": [each.validation_auroc for each in rounds]}
    drawn = [
        ("Loss", curves("loss", numbers, losses, last)),
        ("Mean AUROC", curves("mean AUROC", numbers, aurocs, last)),
    ]
    return [(name, figure) for name, figure in drawn if figure]


def _mark(site: SiteSeen) -> str:
    marks = {"connected": "good", "revoked": "bad", "not connected": "away"}
    return "away" if site.link.startswith("stopped by") else marks.get(site.link, "")


@cache
def _environment() -> Environment:
    environment = page_environment(_HERE)
    environment.globals.update(say=formatting, mark=_mark)
    return environment


def part(seen: Seen) -> str:
    """The part of the page that changes."""
    return _environment().get_template("view.html.j2").render(shown=shown(seen))


def page(seen: Seen) -> str:
    """The whole page, which needs no script to be read."""
    style, script = (Markup(_text(name)) for name in ("live.css", "live.js"))
    return _environment().get_template("live.html.j2").render(shown=shown(seen), style=style, script=script)


@cache
def content_security_policy() -> str:
    """Allow our own style and script, by their hashes, and our own stream of events, nothing else."""
    return (
        f"default-src 'none'; style-src {_source('live.css')}; script-src {_source('live.js')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _source(name: str) -> str:
    digest = base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
