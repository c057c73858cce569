"""Read the state of a run for the live view. It is read only from files, so that the run is not disturbed."""

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyclinic.server.coordinator.admission import read_all_admitted_sites
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.state import read_site_connections, read_site_sign_offs
from polyclinic.server.runs.live_status import (
    PHASES,
    CurrentRun,
    JsonLinesReader,
    describe_site_activity,
    describe_site_sign_off,
    read_last_run_state,
)
from polyclinic.server.runs.schema import RoundFileLine

MAX_EVENTS = 12
"""Greatest number of events on the page."""
MAX_SENTENCE_CHARACTERS = 240
"""Greatest length of the sentence of an event."""

EVENT_SENTENCES = {
    "begun": "the run began",
    "data_read": "the data were read",
    "begun_anew": "the run began again from round 1: there is no checkpoint that can be read",
    "resumed": "the run was resumed after round {round}",
    "checkpoint_broken": "checkpoint {file} could not be read: {reason}",
    "last_model": "no best round was chosen: {because}",
    "ended_early": "the run ended after round {round}: no model after that of round {best_round} was better",
    "warm_start": "{sentences}",
    "roll_call": "roll call: {sites} take part; classes: {classes}",
    "planned": "the network was planned from {volumes} volumes of {sites}",
    "heavy_site": "{site} states {images} images, {share:.0%} of all; participation.largest_share can bound its weight",
    "no_training_images": "without training images, and not in the run: {sites}",
    "no_validation_images": "without validation images: {sites}",
    "patients_unknown": "the data set does not say which images are of one patient",
    "table_note": "the table of labels: {note}",
    "image_skipped": "image {image} of the {part} part could not be read and was left out: {reason}",
    "other_release": "{site} runs release {release}, the coordinator {coordinator}",
    "other_wire": "{site} speaks wire version {wire}, the coordinator {coordinator}",
    "pixels_unknown": "{site} does not state how its images become pixels (release {release})",
    "classes_of_one_site": "one site alone annotates {classes}; participation.distinct_classes confirms it",
    "joined": "{site} joined in round {round}",
    "absent": "{when} went on without {site}: {reason}",
    "awaits_approval": "{site} waits for approval at the hospital; it joins when it is approved there",
    "left_out": "{site} was left out in {when}: {reason}",
    "shortened_update": "round {round}: the update of {site} is too long: {done}",
    "plain_mean": "round {round}: plain mean instead of the robust one for {of}",
    "rows_stayed_masked": "round {round}: the head rows of {classes} stayed masked and did not change",
    "lowered_claim": "{site} claims {claimed} training images, far more than the others: {counted} count",
    "uncounted": "nothing that {site} states counts until a reply of it is accepted ({reason})",
    "counted_again": "what {site} states counts again from round {round} on",
    "repeated_round": "round {round} is done again without the statistics of {sites}, which do not count",
    "excluded": "{site} harmed the model in round {round} and is left out: {reason}",
    "rolled_back": "the model of round {round} was rejected and the run went back to round {to}: {because}",
    "refused_call": "a call of {caller} was refused ({call}): {reason}",
    "tracking_stopped": "MLflow receives no more figures of this run: {reason}",
    "died": "the process of the run {how}",
    "no_receipt": "the receipt could not be written: {reason}",
    "stopped": "the run stopped: {reason}",
    "refused": "the run was refused: {reason}",
    "done": "the run is done; model {model_sha256}",
    "working_files_removed": "{folders} were removed, {days} days after the end of the run (retention)",
}
"""Name of an event in ``events.jsonl`` -> sentence with the event's fields in braces."""


@dataclass(frozen=True)
class SiteStatusRow:
    """A row of the live view's table of sites.

    Attributes:
        link: Connection state: ``connected``, ``not connected``, ``revoked`` or ``not known``; empty in a simulation.
        part: Description of the site's present activity in the run.
        rounds: Number of rounds in which the site's update was used.
        seconds: Duration of the site's last training.
        missed: Round and reason of the site's last absence.
    """

    name: str
    link: str
    part: str
    rounds: int = 0
    seconds: float | None = None
    missed: str = ""


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run at one moment, for the live view.

    Attributes:
        title: Name of the federation; in a simulation, name of the program.
        link: State of the server of ``flwr-server start``; empty in a simulation.
        current_run: State of the current or last run; None if there was no run yet.
        sites: Rows of the table of sites.
        rounds: The completed rounds.
        events: Time and text of the latest events, newest first.
        summary: Content of ``summary.json`` of a finished run; empty before.
    """

    title: str
    link: str = ""
    current_run: CurrentRun | None = None
    sites: tuple[SiteStatusRow, ...] = ()
    rounds: tuple[RoundFileLine, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStateSource:
    """The files and functions from which the live view reads the state of a run.

    Attributes:
        title: Name of the federation; in a simulation, name of the program.
        state: Folder with ``present.json``, the state of the current run.
        links: Returns site -> connection state.
        link: Returns the state of the server of ``flwr-server start``.
    """

    title: str
    state: Path
    links: Callable[[], Mapping[str, str]] = dict
    link: Callable[[], str] = str


def make_current_run_source(coordinator: CoordinatorFolder) -> RunStateSource:
    """Return the source from which the live view reads a coordinator's current run."""

    def read_site_connection_states() -> dict[str, str]:
        online = read_site_connections(coordinator.state_path)
        signed_off = read_site_sign_offs(coordinator.state_path)
        states = {}
        for name, site in read_all_admitted_sites(coordinator).items():
            if site.revoked:
                states[name] = "revoked"
            elif online is None:
                states[name] = "not known"
            elif online.get(name):
                states[name] = "connected"
            elif name in signed_off:
                states[name] = describe_site_sign_off(signed_off[name])
            else:
                states[name] = "not connected"
        return states

    def read_server_connection_state() -> str:
        if read_site_connections(coordinator.state_path) is None:
            return "down: start it with flwr-server start"
        return f"open at {coordinator.public_address}"

    return RunStateSource(
        coordinator.file.name, coordinator.state_path, read_site_connection_states, read_server_connection_state
    )


class RunFileWatcher:
    """Reads the state of a run repeatedly; from growing files it reads only the new lines."""

    def __init__(self, source: RunStateSource) -> None:
        self._source = source
        self._rounds = JsonLinesReader(Path())
        self._events = JsonLinesReader(Path())
        self._records: tuple[RoundFileLine, ...] = ()

    def poll_run_snapshot(self) -> RunSnapshot:
        """Read the new lines of the files; return the state of the run."""
        source = self._source
        links = source.links()
        current_run = read_last_run_state(source.state)
        if current_run is None:
            idle_sites = tuple(SiteStatusRow(name, link, "") for name, link in links.items())
            return RunSnapshot(source.title, source.link(), sites=idle_sites)
        folder = Path(current_run.run_folder)
        if self._rounds.path.parent != folder:  # another run has begun
            self._rounds = JsonLinesReader(folder / "rounds.jsonl")
            self._events = JsonLinesReader(folder / "events.jsonl")
            self._records = ()
        if self._rounds.poll_new_lines():
            records = []
            for line in self._rounds.all:
                with suppress(ValidationError):
                    records.append(RoundFileLine.model_validate(line))
            self._records = tuple(records)
        self._events.poll_new_lines()
        round_counts = Counter(site for record in self._records for site in record.sites)
        seconds = dict[str, float]()
        missed = dict[str, str]()
        for record in self._records:
            seconds |= record.site_seconds
            missed |= {site: f"round {record.round}: {why}" for site, why in record.absent.items()}
        sites = list[SiteStatusRow]()
        for name in sorted({*links, *current_run.sites, *current_run.waiting_for}):
            link = links.get(name, "")
            part = describe_site_activity(current_run, name, revoked=link == "revoked")
            sites.append(SiteStatusRow(name, link, part, round_counts[name], seconds.get(name), missed.get(name, "")))
        summary = None
        if current_run.state == "done":
            with suppress(OSError, ValueError):
                summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return RunSnapshot(
            source.title,
            source.link(),
            current_run,
            tuple(sites),
            self._records,
            tuple(format_run_event(event) for event in reversed(self._events.all[-MAX_EVENTS:])),
            summary if isinstance(summary, dict) else {},
        )


def format_run_event(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return time and sentence of an event in ``events.jsonl``.

    The time of today's events is shown without the date. An event without a sentence is shown by its fields.
    """
    fields = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in event.items()
        if name not in ("time", "event") and value is not None
    }
    name = str(event.get("event", "event"))
    phase = event.get("round")
    when = f"round {phase}" if isinstance(phase, int) else f"the {PHASES.get(str(phase), phase)}"
    try:
        text = EVENT_SENTENCES[name].format(**fields, when=when)
    except (KeyError, IndexError, ValueError):  # another release wrote the event
        text = ", ".join([name.replace("_", " "), *(f"{key} {value}" for key, value in fields.items())])
    clock = ""
    with suppress(ValueError):
        moment = dt.datetime.fromisoformat(str(event.get("time", ""))).astimezone()
        is_today = moment.date() == dt.datetime.now(moment.tzinfo).date()
        clock = moment.strftime("%H:%M:%S %Z" if is_today else "%Y-%m-%d %H:%M %Z")
    return clock, text if len(text) <= MAX_SENTENCE_CHARACTERS else f"{text[:MAX_SENTENCE_CHARACTERS]}…"
