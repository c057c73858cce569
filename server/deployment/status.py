"""``flwr-server status``: sites, connections, certificate, and the present run, on one screen; and ``runs``."""

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from common import __version__
from common.errors import quoted
from common.security.identity import fingerprint
from server.coordinator.admission import admitted_sites
from server.coordinator.authority import days_valid
from server.coordinator.connections import read_sign_offs
from server.coordinator.folder import Coordinator, at_work
from server.deployment.superlink.control.client import Control, SuperLinkGone, answers
from server.runs.live_status import Present, part_of, read_present, stopped_at

LINK = {
    "up": "up",
    "starting": "starting: it takes up to a minute",
    "down": "down: start it with flwr-server start",
}


def overview(coordinator: Coordinator) -> dict[str, Any]:
    """Everything that ``status --json`` says."""
    up = answers(coordinator)
    online = _online(coordinator) if up else {}
    present, signed_off = read_present(coordinator.state), read_sign_offs(coordinator.state)
    sites = {
        name: {
            "state": "revoked" if site.revoked else _state_of(name, online, signed_off),
            "stopped": signed_off.get(name),
            "fingerprint": fingerprint(site.public_key),
            "admitted": site.admitted,
            "revoked": site.revoked or None,
            "classes": list(site.classes),
            "max_images": site.max_images,
            "release": present.releases.get(name) if present else None,
        }
        for name, site in admitted_sites(coordinator).items()
    }
    return {
        "name": coordinator.file.name,
        "address": coordinator.public_address,
        "release": __version__,
        "superlink": "up" if up else "starting" if at_work(coordinator, "start") else "down",
        "certificate_days": days_valid(coordinator),
        "sites": sites,
        "run": asdict(present) if present else None,
        "time": time.time(),
    }


def _state_of(site: str, online: Mapping[str, bool], signed_off: Mapping[str, str]) -> str:
    if online.get(site):
        return "connected"
    return "stopped" if site in signed_off else "not connected"


def _online(coordinator: Coordinator) -> Mapping[str, bool]:
    try:
        with closing(Control(coordinator, answer_s=5.0)) as control:
            return {node.name: node.online for node in control.nodes()}
    except SuperLinkGone:
        return {}


def in_words(found: Mapping[str, Any]) -> RenderableType:
    """Return the overview as tables for a person."""
    up = LINK[found["superlink"]]
    heading = f"{found['name']} at {found['address']}: SuperLink {up}; certificate {found['certificate_days']:.0f} days"
    heading += f"; release {found['release']}"
    table = Table("site", "connection", "in the run", "release")
    run = found["run"] or {}
    present = Present(**run) if run else None
    for name, site in found["sites"].items():
        part = part_of(present, name, revoked=site["state"] == "revoked") if present else ""
        when = site.get("stopped") if site["state"] == "stopped" else None
        link = stopped_at(when) if when else site["state"]
        table.add_row(name, link, "" if when else part, Text(site.get("release") or ""))
    # outside the table, which would break them at 80 columns: they are compared by telephone and copied
    keys = [_unbroken(f"{site['fingerprint']}  {name}") for name, site in found["sites"].items()]
    lists = [f"{name} may claim {said}" for name, site in found["sites"].items() if (said := _may_claim(site))]
    return Group(Text(heading), table, *keys, *map(Text, lists), Text(_run_in_words(run, found)))


def _unbroken(line: str) -> Text:
    return Text(line, no_wrap=True, overflow="ignore")


def _may_claim(site: Mapping[str, Any]) -> str:
    """What a site was admitted for; empty where that is anything."""
    classes = quoted(site["classes"]) if site["classes"] else ""
    images = f"{site['max_images']:,} training images at most" if site["max_images"] else ""
    return "; ".join(part for part in (classes, images) if part)


def _run_in_words(run: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if not run:
        return "no run yet"
    lines = [f"run {run['name']} ({run['state']}) in {run['run_folder']}"]
    if run["state"] == "running":
        where = f"round {run['round']} of {run['rounds']}, {run['phase']}" if run["rounds"] else run["phase"]
        left = f"; about {run['seconds_left'] / 60:.1f} min left" if run["seconds_left"] is not None else ""
        lines.append(f"{where}{left}")
        sites = {site: found["sites"].get(site, {}) for site in run["waiting_for"]}
        if waited_for := [site for site, facts in sites.items() if facts.get("state") != "revoked"]:
            names = ", ".join(_waited_for(site, sites[site]) for site in waited_for)
            lines.append(f"waiting for {names}, at most {max(run['deadline'] - found['time'], 0):.0f} s more")
    lines += [f"{site} was left out of {why}" for site, why in sorted(run["left_out"].items())]
    lines += [f"{site} sent too long an update in {done}" for site, done in sorted(run["shortened"].items())]
    if run["last_error"]:
        lines.append(f"last error: {run['last_error']} ({run['last_error_time']})")
    return "\n".join(lines)


def _waited_for(name: str, site: Mapping[str, Any]) -> str:
    """A site that is waited for, with what it takes where it signed off."""
    return f"{name} ({stopped_at(site['stopped'])})" if site.get("state") == "stopped" else name


def runs_in_words(runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The runs as a table for a person."""
    if not runs:
        return Text("no run yet")
    table = Table("began", "run", "state", "rounds", "sites", Column("folder", overflow="fold"))
    for run in runs:
        began = dt.datetime.fromtimestamp(run["began"], dt.UTC).isoformat(" ", timespec="minutes")
        rounds = f"{run['round']} of {run['rounds']}" if run["rounds"] else ""
        folder = run["run_folder"] if run["there"] else f"{run['run_folder']} (moved or removed)"
        table.add_row(began, run["name"], run["state"], rounds, str(len(run["sites"]) or ""), folder)
    return table
