"""Render the page of the live view: the complete page, or the part that changes during a run."""

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
"""Greatest number of sites in the table of sites."""
MAX_POINTS = 300
"""Greatest number of points of a curve."""
MAX_DOTTED_ROUNDS = 40
"""Greatest number of rounds with which each point of a curve has a dot."""
CHART_WIDTH = 480
CHART_HEIGHT = 220
# Margins between the frame of a chart and its edges, in the same units.
LEFT_MARGIN = 52
RIGHT_MARGIN = 12
TOP_MARGIN = 30
BOTTOM_MARGIN = 34

_ASSETS_FOLDER = Path(__file__).parent / "assets"
_TEST_SUMMARY_ADAPTER = TypeAdapter(FinalTestSummary)


def render_live_page(snapshot: RunSnapshot) -> str:
    """Return the complete page, which is readable without JavaScript."""
    style = Markup(_read_page_asset("live.css"))
    script = Markup(_read_page_asset("live.js"))
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
    """Return a Content-Security-Policy that allows only this page's style and script, and requests to its server."""
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

    Screen readers read out the variable ``announcement`` (round and state of the run) whenever it changes.
    """
    run = snapshot.current_run
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
    state_words = "interrupted: --resume goes on" if run.state == "interrupted" else run.state
    done_rounds = max(run.round - 1, 0) if run.phase == "train" and run.state != "done" else run.round
    progress = f"round {done_rounds} of {run.rounds} done" if run.rounds else ""
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
    losses = {
        "training": [line.train_loss for line in rounds],
        "validation": [line.validation_loss for line in rounds],
    }
    aurocs = {"validation": [line.validation_auroc for line in rounds]}
    charts = [
        (name, draw_line_chart(title, [line.round for line in rounds], lines, run.rounds))
        for name, title, lines in (("Loss", "loss", losses), ("Mean AUROC", "mean AUROC", aurocs))
    ]
    return shown | {
        "tab": f"{done_rounds}/{run.rounds} {run.name}" if run.rounds else snapshot.title,
        "announcement": ". ".join(part for part in (state_words, progress) if part),
        "run": run,
        "state_words": state_words,
        "bar": round(100 * done_rounds / run.rounds, 2) if run.rounds else None,
        "bar_words": progress,
        "activity": activity,
        "reason": f"Last problem: {reason}" if reason and run.state == "running" else reason,
        "tiles": _make_key_figure_tiles(snapshot, run, done_rounds),
        "figures": [(name, svg) for name, svg in charts if svg],
    }


def _make_key_figure_tiles(snapshot: RunSnapshot, run: CurrentRun, done_rounds: int) -> list[tuple[str, str]]:
    """Return (number, label) of each key figure at the top of the page."""
    tiles = [(f"{done_rounds} of {run.rounds}" if run.rounds else "–", "rounds done")]
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
        classes = f"{len(headline.classes)} of {len(headline.classes) + len(headline.left_out)} classes"
        tiles.append((format_value_with_error(headline.mean), f"test AUROC, mean over {classes}"))
    return tiles


def draw_line_chart(
    title: str, rounds: Sequence[int], series: Mapping[str, Sequence[float | None]], last_round: int
) -> Markup:
    """Draw a line chart with a line, the name and the newest value of each series; empty without values.

    Args:
        rounds: Round of each value.
        series: Name of a series -> its values; None for a missing value.
        last_round: Last round of the run, where the horizontal axis ends.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, values in series.items():
        points = [
            (server_round, value)
            for server_round, value in zip(rounds, values, strict=True)
            if value is not None and math.isfinite(value)
        ]
        stride = max(1, -(-len(points) // MAX_POINTS))
        if points:  # of many points, only some are drawn, but always the last one
            lines[name] = points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
    if not lines:
        return Markup("")

    # The vertical axis has two to five steps, each 1, 2 or 5 times a power of ten.
    all_values = [value for points in lines.values() for _, value in points]
    smallest, largest = min(all_values), max(all_values)
    height = max(largest - smallest, abs(largest) * 0.02, 1e-6)
    power = 10.0 ** math.floor(math.log10(height / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if height / (power * factor) <= 4)
    lowest_step = math.floor(smallest / step)
    highest_step = max(math.ceil(largest / step), lowest_step + 1)
    low, high = lowest_step * step, highest_step * step
    last = max(last_round, rounds[-1])

    def scale_round_to_x(number: float) -> float:
        return LEFT_MARGIN + (number - 1) / max(last - 1, 1) * (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN)

    def scale_value_to_y(value: float) -> float:
        return TOP_MARGIN + (high - value) / (high - low) * (CHART_HEIGHT - TOP_MARGIN - BOTTOM_MARGIN)

    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [low + index * step for index in range(round((high - low) / step) + 1)]
    drawn_lines = list[dict[str, object]]()
    for name, points in lines.items():
        corners = [(scale_round_to_x(server_round), scale_value_to_y(value)) for server_round, value in points]
        drawn_lines.append({"name": name, "newest": points[-1], "corners": corners})
    frame = {"left": LEFT_MARGIN, "right": CHART_WIDTH - RIGHT_MARGIN, "width": CHART_WIDTH, "height": CHART_HEIGHT}
    labels = [(scale_value_to_y(value), f"{value:.{digits}f}") for value in ticks]
    svg = _render_live_template(
        "curves.svg.j2",
        title=title,
        frame=frame,
        ticks=labels,
        last=last,
        lines=drawn_lines,
        most_dots=MAX_DOTTED_ROUNDS,
    )
    return Markup(svg)
