"""Render the page of the live view, completely or only the part that changes."""

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

from polyclinic.common.metrics.auroc import FinalTestSummary
from polyclinic.common.metrics.measured import format_value_with_error
from polyclinic.common.system import plain_text
from polyclinic.common.system.plain_text import make_jinja_environment
from polyclinic.server.reporting.live.files import RunSnapshot, SiteStatusRow
from polyclinic.server.runs.live_status import PHASES, SIGNED_OFF, CurrentRun

MAX_SITES = 60
MAX_POINTS = 300
"""Largest number of points of a curve."""
MAX_DOTTED_ROUNDS = 40
"""Rounds up to which each point of a curve has a dot."""
CHART_WIDTH, CHART_HEIGHT = 480, 220
LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 52, 12, 30, 34
"""Margins of a figure."""

_ASSETS_FOLDER = Path(__file__).parent / "assets"
_TEST_SUMMARY_ADAPTER = TypeAdapter(FinalTestSummary)


def render_live_page(snapshot: RunSnapshot) -> str:
    """Return the complete page, which is readable without JavaScript."""
    style, script = Markup(_read_page_asset("live.css")), Markup(_read_page_asset("live.js"))
    shown = make_live_template_variables(snapshot)
    return _render_live_template("live.html.j2", shown=shown, style=style, script=script)


def render_changing_page_part(snapshot: RunSnapshot) -> str:
    """Return the part of the page that changes during a run."""
    return _render_live_template("view.html.j2", shown=make_live_template_variables(snapshot))


def _render_live_template(template: str, **variables: object) -> str:
    return _make_live_template_environment().get_template(template).render(**variables)


@cache
def _make_live_template_environment() -> Environment:
    css_classes = {"connected": "good", "revoked": "bad", "not connected": "away"}

    def choose_site_css_class(site: SiteStatusRow) -> str:
        return "away" if site.link.startswith(SIGNED_OFF) else css_classes.get(site.link, "")

    environment = make_jinja_environment(_ASSETS_FOLDER)
    environment.globals.update(say=plain_text, mark=choose_site_css_class)
    return environment


@cache
def make_content_security_policy() -> str:
    """Return a Content-Security-Policy that allows only our style and script (by hash), and requests to our server."""
    style, script = (
        base64.b64encode(hashlib.sha256(_read_page_asset(name).encode()).digest()).decode()
        for name in ("live.css", "live.js")
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _read_page_asset(name: str) -> str:
    return (_ASSETS_FOLDER / name).read_text(encoding="utf-8")


def make_live_template_variables(snapshot: RunSnapshot) -> dict[str, object]:
    """Return the variables of the page's templates.

    ``announcement`` (round and state of the run) is read out by screen readers whenever it changes.
    """
    run = snapshot.present
    urgent = ("lost", "at work", "waiting")
    sites = sorted(snapshot.sites, key=lambda site: (not site.part.startswith(urgent), site.name))
    shown: dict[str, object] = {
        "kicker": " · ".join(part for part in (snapshot.title, snapshot.link) if part),
        "sites": sites[:MAX_SITES],
        "more_sites": max(len(sites) - MAX_SITES, 0),
        "linked": any(site.link for site in sites),
        "events": snapshot.events,
    }
    if run is None:
        return shown | {"tab": snapshot.title, "announcement": "no run yet", "run": None}
    words = "interrupted: --resume goes on" if run.state == "interrupted" else run.state
    done = max(run.round - 1, 0) if run.phase == "train" and run.state != "done" else run.round  # rounds
    progress = f"round {done} of {run.rounds} done" if run.rounds else ""
    activity = f"Run folder: {run.run_folder}"
    if run.state == "running":
        phase = PHASES.get(run.phase, run.phase)
        activity = f"Round {run.round} of {run.rounds}: {phase}." if run.rounds else f"{phase.capitalize()}."
        if run.waiting_for:
            until = time.strftime("%H:%M:%S %Z", time.localtime(run.deadline))
            names = plain_text.join_first_and_count(run.waiting_for, 6)
            activity += f" Waiting for {names}, at the latest until {until}."
    reason = run.last_error if run.state != "done" else ""
    rounds = snapshot.rounds
    losses = {"training": [r.train_loss for r in rounds], "validation": [r.validation_loss for r in rounds]}
    aurocs = {"validation": [line.validation_auroc for line in rounds]}
    charts = [
        (name, draw_line_chart(title, [line.round for line in rounds], lines, run.rounds))
        for name, title, lines in (("Loss", "loss", losses), ("Mean AUROC", "mean AUROC", aurocs))
    ]
    return shown | {
        "tab": f"{done}/{run.rounds} {run.name}" if run.rounds else snapshot.title,
        "announcement": ". ".join(part for part in (words, progress) if part),
        "run": run,
        "state_words": words,
        "bar": round(100 * done / run.rounds, 2) if run.rounds else None,
        "bar_words": progress,
        "activity": activity,
        "reason": f"Last problem: {reason}" if reason and run.state == "running" else reason,
        "tiles": _make_key_figure_tiles(snapshot, run, done),
        "figures": [(name, svg) for name, svg in charts if svg],
    }


def _make_key_figure_tiles(snapshot: RunSnapshot, run: CurrentRun, done: int) -> list[tuple[str, str]]:
    tiles = [(f"{done} of {run.rounds}" if run.rounds else "–", "rounds done")]
    if run.state == "running" and run.seconds_left is not None:
        tiles.append((plain_text.format_duration(run.seconds_left), "left, by the pace so far"))
    lost = f", {len(run.lost)} lost" if run.lost else ""
    tiles.append((str(len(run.sites)), f"sites take part{lost}"))
    for name, key in (("validation loss", "validation_loss"), ("validation AUROC", "validation_auroc")):
        values = [(each.round, value) for each in snapshot.rounds if (value := getattr(each, key)) is not None]
        tiles += [(plain_text.format_number(value), f"{name}, round {number}") for number, value in values[-1:]]
    test = snapshot.summary.get("test")
    if isinstance(test, Mapping):
        headline = _TEST_SUMMARY_ADAPTER.validate_python(test).compute_headline_auroc()
        over = f"{len(headline.classes)} of {len(headline.classes) + len(headline.left_out)} classes"
        tiles.append((format_value_with_error(headline.mean), f"test AUROC, mean over {over}"))
    return tiles


def draw_line_chart(
    title: str, rounds: Sequence[int], series: Mapping[str, Sequence[float | None]], last_round: int
) -> Markup:
    """Draw a line chart with one line per series, its name and its newest value; empty without values.

    The vertical axis has two to five steps.

    Args:
        last_round: Last round of the run, where the axis ends.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, values in series.items():
        points = [(n, v) for n, v in zip(rounds, values, strict=True) if v is not None and math.isfinite(v)]
        stride = max(1, -(-len(points) // MAX_POINTS))
        if points:  # thinned where there are many; the last one stays
            lines[name] = points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
    if not lines:
        return Markup("")
    every = [value for points in lines.values() for _, value in points]
    height, last = max(max(every) - min(every), abs(max(every)) * 0.02, 1e-6), max(last_round, rounds[-1])
    power = 10.0 ** math.floor(math.log10(height / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if height / (power * factor) <= 4)
    lowest = math.floor(min(every) / step)  # in steps
    low, high = lowest * step, max(math.ceil(max(every) / step), lowest + 1) * step

    def scale_round_to_x(number: float) -> float:
        return LEFT_MARGIN + (number - 1) / max(last - 1, 1) * (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN)

    def scale_value_to_y(value: float) -> float:
        return TOP_MARGIN + (high - value) / (high - low) * (CHART_HEIGHT - TOP_MARGIN - BOTTOM_MARGIN)

    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [low + index * step for index in range(round((high - low) / step) + 1)]
    drawn = [
        {"name": name, "newest": points[-1], "corners": [(scale_round_to_x(n), scale_value_to_y(v)) for n, v in points]}
        for name, points in lines.items()
    ]
    frame = {"left": LEFT_MARGIN, "right": CHART_WIDTH - RIGHT_MARGIN, "width": CHART_WIDTH, "height": CHART_HEIGHT}
    labels = [(scale_value_to_y(value), f"{value:.{digits}f}") for value in ticks]
    svg = _render_live_template(
        "curves.svg.j2", title=title, frame=frame, ticks=labels, last=last, lines=drawn, most_dots=MAX_DOTTED_ROUNDS
    )
    return Markup(svg)
