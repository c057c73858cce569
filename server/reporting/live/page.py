"""The page of the live view, whole or only the part that changes."""

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup
from pydantic import TypeAdapter

from common.metrics.auroc import Summary
from common.metrics.measured import figure
from common.system import plain_text
from common.system.plain_text import page_environment
from server.reporting.live.files import SiteStatus, Snapshot
from server.runs.live_status import PHASES, Present

SITES_SHOWN = 60
POINTS_SHOWN = 300
"""Points of one curve at most."""
MARKED = 40
"""Rounds up to which each point of a curve has a dot."""
WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 34
"""Margins of a figure."""

_ASSETS = Path(__file__).parent / "assets"
_STATES = {
    "running": "running",
    "done": "done",
    "stopped": "stopped",
    "interrupted": "interrupted: --resume goes on",
}
_SUMMARY = TypeAdapter(Summary)


def page(snapshot: Snapshot) -> str:
    """Return the whole page, which needs no script to be read."""
    style, script = Markup(_asset("live.css")), Markup(_asset("live.js"))
    return _environment().get_template("live.html.j2").render(shown=view(snapshot), style=style, script=script)


def changing_part(snapshot: Snapshot) -> str:
    """Return the part of the page that changes."""
    return _environment().get_template("view.html.j2").render(shown=view(snapshot))


@cache
def _environment() -> Environment:
    environment = page_environment(_ASSETS)
    environment.globals.update(say=plain_text, mark=_mark)
    return environment


def _mark(site: SiteStatus) -> str:
    """Return the style of a site's connection."""
    marks = {"connected": "good", "revoked": "bad", "not connected": "away"}
    return "away" if site.link.startswith("stopped by") else marks.get(site.link, "")


@cache
def content_security_policy() -> str:
    """Allow our own style and script, by their hashes, and requests to our own address, nothing else."""
    style, script = (
        base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in ("live.css", "live.js")
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def view(snapshot: Snapshot) -> dict[str, object]:
    """Return the words and figures of the page, for its templates.

    ``said`` is what a screen reader says when it changes: the round and how the run goes, nothing else.
    """
    run = snapshot.present
    sites = sorted(
        snapshot.sites, key=lambda site: (not site.part.startswith(("lost", "at work", "waiting")), site.name)
    )
    words = _STATES.get(run.state, "no run yet") if run else "no run yet"
    done = rounds_done(run) if run else 0
    progress = f"round {done} of {run.rounds} done" if run and run.rounds else ""
    reason = run.last_error if run and run.state != "done" else ""
    return {
        "tab": f"{done}/{run.rounds} {run.name}" if run and run.rounds else snapshot.title,
        "said": ". ".join(part for part in (words, progress) if part),
        "kicker": " · ".join(part for part in (snapshot.title, snapshot.link) if part),
        "heading": run.name if run else "No run yet",
        "state": run.state if run else "none",
        "state_words": words,
        "bar": round(100 * done / run.rounds, 2) if run and run.rounds else None,
        "bar_words": progress,
        "lines": [_activity(run)] if run else [],
        "reason": f"Last problem: {reason}" if reason and run and run.state == "running" else reason,
        "tiles": _tiles(snapshot, run, done) if run else [],
        "figures": _figures(snapshot, run.rounds) if run and snapshot.rounds else [],
        "sites": sites[:SITES_SHOWN],
        "more_sites": max(len(sites) - SITES_SHOWN, 0),
        "linked": any(site.link for site in sites),
        "events": snapshot.events,
    }


def rounds_done(run: Present) -> int:
    """Return the number of rounds that count: the one that trains does not yet."""
    return max(run.round - 1, 0) if run.phase == "train" and run.state != "done" else run.round


def _activity(run: Present) -> str:
    """Say what goes on now."""
    if run.state != "running":
        return f"Run folder: {run.run_folder}"
    phase = PHASES.get(run.phase, run.phase)
    at = f"Round {run.round} of {run.rounds}: {phase}." if run.rounds else f"{phase.capitalize()}."
    if not run.waiting_for:
        return at
    until = time.strftime("%H:%M:%S %Z", time.localtime(run.deadline))
    return f"{at} Waiting for {plain_text.shortened(run.waiting_for, 6)}, at the latest until {until}."


def _tiles(snapshot: Snapshot, run: Present, done: int) -> list[tuple[str, str]]:
    tiles = [(f"{done} of {run.rounds}" if run.rounds else "–", "rounds done")]
    if run.state == "running" and run.seconds_left is not None:
        tiles.append((plain_text.duration(run.seconds_left), "left, by the pace so far"))
    tiles.append((str(len(run.sites)), f"sites take part{f', {len(run.lost)} lost' if run.lost else ''}"))
    for name, key in (("validation loss", "validation_loss"), ("validation AUROC", "validation_auroc")):
        values = [(each.round, value) for each in snapshot.rounds if (value := getattr(each, key)) is not None]
        tiles += [(plain_text.number(value), f"{name}, round {number}") for number, value in values[-1:]]
    test = snapshot.summary.get("test")
    if isinstance(test, Mapping):
        headline = _SUMMARY.validate_python(test).headline()
        over = f"{len(headline.classes)} of {len(headline.classes) + len(headline.left_out)} classes"
        tiles.append((figure(headline.mean), f"test AUROC, mean over {over}"))
    return tiles


def _figures(snapshot: Snapshot, last: int) -> list[tuple[str, Markup]]:
    rounds = snapshot.rounds
    numbers = [each.round for each in rounds]
    losses = {
        "training": [each.train_loss for each in rounds],
        "validation": [each.validation_loss for each in rounds],
    }
    aurocs = {"validation": [each.validation_auroc for each in rounds]}
    figures = [
        ("Loss", curves("loss", numbers, losses, last)),
        ("Mean AUROC", curves("mean AUROC", numbers, aurocs, last)),
    ]
    return [(name, svg) for name, svg in figures if svg]


def curves(title: str, rounds: Sequence[int], series: Mapping[str, Sequence[float | None]], last_round: int) -> Markup:
    """Draw a line a series, with its name and its newest value; empty where there is no value yet.

    Drawn by hand, in the page's own colours, because a look each second has to cost nothing.

    Args:
        last_round: Last round of the run: the axis goes so far, and what is missing of a line is to come.
    """
    lines = {name: points for name, values in series.items() if (points := _points(rounds, values))}
    if not lines:
        return Markup("")
    values = [value for points in lines.values() for _, value in points]
    low, high, step = _axis(min(values), max(values))
    last = max(last_round, rounds[-1])

    def x(number: float) -> float:
        return LEFT + (number - 1) / max(last - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for index in range(round((high - low) / step) + 1):
        value = low + index * step
        parts.append(Markup('<path class="rule" d="M{} {:.1f}H{}"/>').format(LEFT, y(value), WIDTH - RIGHT))
        parts.append(_text(LEFT - 6, y(value) + 4, f"{value:.{digits}f}", "end"))
    parts.append(_text(x(1), HEIGHT - 14, "1", "start"))
    parts.append(_text(x(last), HEIGHT - 14, str(last), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "round", "middle"))
    place = float(LEFT)
    for index, (name, points) in enumerate(lines.items()):
        corners = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in points)
        parts.append(Markup('<polyline class="curve c{}" points="{}"/>').format(index, corners))
        for n, v in points if len(points) <= MARKED else points[-1:]:
            parts.append(Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(index, x(n), y(v)))
        words = f"{name} {points[-1][1]:.3f}"
        parts.append(Markup('<path class="curve c{}" d="M{:.1f} 12h18"/>').format(index, place))
        parts.append(_text(place + 23, 16, words, "start"))
        place += 23 + 9.6 * len(words) + 18
    newest = "; ".join(f"{name} {points[-1][1]:.3f} after round {points[-1][0]}" for name, points in lines.items())
    label = Markup('role="img" aria-label="{}"').format(f"{title} by round: {newest}")
    return Markup('<svg class="figure" viewBox="0 0 {} {}" {}>{}</svg>').format(
        WIDTH, HEIGHT, label, Markup("").join(parts)
    )


def _points(rounds: Sequence[int], values: Sequence[float | None]) -> list[tuple[int, float]]:
    """Return the points of a line, thinned where there are many; the last one stays."""
    points = [(n, v) for n, v in zip(rounds, values, strict=True) if v is not None and math.isfinite(v)]
    stride = -(-len(points) // POINTS_SHOWN)
    return points[:: max(stride, 1)] + (points[-1:] if stride > 1 and (len(points) - 1) % stride else [])


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Return an interval around both that begins and ends at a multiple of its step, in two to five steps."""
    width = max(high - low, abs(high) * 0.02, 1e-6)
    power = 10.0 ** math.floor(math.log10(width / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if width / (power * factor) <= 4)
    return math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step, step


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, words)
