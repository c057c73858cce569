"""What the live view shows, gathered from files alone: nobody who takes part is asked, so nobody is disturbed."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from server.coordinator.admission import admitted_sites
from server.coordinator.connections import read_connections, read_sign_offs
from server.coordinator.folder import Coordinator
from server.reporting.live.event_text import told
from server.reporting.live.jsonl import Lines
from server.runs.live_status import Present, part_of, read_present, stopped_at
from server.runs.reader import RoundLine

EVENTS_SHOWN = 12


@dataclass(frozen=True)
class SiteSeen:
    """One line of the table of sites.

    Attributes:
        link: ``connected``, ``not connected``, ``revoked``, ``not known``, or empty in a simulation.
        part: What it does in the run now.
        rounds: In which its update counted.
        seconds: That it trained when it last did.
        missed: Why it was last absent, with the round.
    """

    name: str
    link: str
    part: str
    rounds: int = 0
    seconds: float | None = None
    missed: str = ""


@dataclass(frozen=True)
class Seen:
    """All of it at one moment.

    Attributes:
        title: Of the federation, or of the run in a simulation.
        link: What ``flwr-server start`` does; empty in a simulation.
        present: None where no run began yet.
        events: The last ones, newest first: time and text.
        summary: ``summary.json`` of a run that is done.
    """

    title: str
    link: str = ""
    present: Present | None = None
    sites: tuple[SiteSeen, ...] = ()
    rounds: tuple[RoundLine, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Where:
    """Which files to look at.

    Attributes:
        state: Folder of ``present.json``.
        links: The sites that belong to the federation with their connections, looked up each time.
        link: See :class:`Seen`.
    """

    title: str
    state: Path
    links: Callable[[], Mapping[str, str]] = dict
    link: Callable[[], str] = str


def of_coordinator(coordinator: Coordinator) -> Where:
    """The coordinator's present run."""

    def links() -> dict[str, str]:
        online = read_connections(coordinator.state)
        admitted, signed_off = admitted_sites(coordinator), read_sign_offs(coordinator.state)
        return {name: "revoked" if site.revoked else _link(online, name, signed_off) for name, site in admitted.items()}

    def link() -> str:
        if read_connections(coordinator.state) is None:
            return "down: start it with flwr-server start"
        return f"open at {coordinator.public_address}"

    return Where(coordinator.file.name, coordinator.state, links, link)


def _link(online: Mapping[str, bool] | None, name: str, signed_off: Mapping[str, str]) -> str:
    if online is None:
        return "not known"
    if online.get(name):
        return "connected"
    return stopped_at(signed_off[name]) if name in signed_off else "not connected"


class Eye:
    """Looks at a run's files; remembers what it has read of those that grow."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._rounds, self._events = Lines(Path()), Lines(Path())
        self._records: tuple[RoundLine, ...] = ()

    def look(self) -> Seen:
        """Everything as it is now."""
        where = self._where
        if (present := read_present(where.state)) is None:
            sites = tuple(SiteSeen(name, link, "") for name, link in where.links().items())
            return Seen(where.title, where.link(), sites=sites)
        folder = Path(present.run_folder)
        self._turn_to(folder)
        if self._rounds.look():
            self._records = _records(self._rounds.all)
        self._events.look()
        return Seen(
            where.title,
            where.link(),
            present,
            _sites(present, where.links(), self._records),
            self._records,
            tuple(told(event) for event in reversed(self._events.all[-EVENTS_SHOWN:])),
            _summary(folder) if present.state == "done" else {},
        )

    def _turn_to(self, folder: Path) -> None:
        if self._rounds.path.parent != folder:
            self._rounds, self._events = Lines(folder / "rounds.jsonl"), Lines(folder / "events.jsonl")
            self._records = ()


def _records(lines: Sequence[Mapping[str, Any]]) -> tuple[RoundLine, ...]:
    found = []
    for line in lines:
        try:
            found.append(RoundLine.model_validate(line))
        except ValidationError:
            continue
    return tuple(found)


def _sites(present: Present, links: Mapping[str, str], rounds: Sequence[RoundLine]) -> tuple[SiteSeen, ...]:
    took = Counter(site for record in rounds for site in record.sites)
    seconds = {site: value for record in rounds for site, value in record.site_seconds.items()}
    missed = {site: f"round {record.round}: {why}" for record in rounds for site, why in record.absent.items()}
    names = sorted({*links, *present.sites, *present.waiting_for})
    parts = {name: part_of(present, name, revoked=links.get(name) == "revoked") for name in names}
    return tuple(
        SiteSeen(name, links.get(name, ""), parts[name], took[name], seconds.get(name), missed.get(name, ""))
        for name in names
    )


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
