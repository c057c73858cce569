"""Output of ``flwr-server status`` and ``runs``: sites, connections, certificate and runs, as JSON or as tables."""

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyclinic.common import __version__
from polyclinic.common.errors import quote_names
from polyclinic.common.security.identity import compute_public_key_fingerprint
from polyclinic.common.security.phrase import compute_certificate_phrase
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.versions import WIRE_VERSION, StatedRelease, describe_needed_update
from polyclinic.server.coordinator.admission import read_all_admitted_sites
from polyclinic.server.coordinator.authority import count_certificate_days_left, read_authority_certificate
from polyclinic.server.coordinator.folder import CoordinatorFolder, is_coordinator_command_running
from polyclinic.server.coordinator.state import read_site_sign_offs
from polyclinic.server.deployment.superlink.control_client import (
    SuperLinkControlClient,
    SuperLinkUnreachable,
    is_superlink_answering,
)
from polyclinic.server.deployment.superlink.registrations import RegisteredSite
from polyclinic.server.runs.live_status import (
    APPROVAL_PENDING,
    CurrentRun,
    describe_site_activity,
    describe_site_sign_off,
    read_current_runs,
)

SUPERLINK_STATES = {
    "up": "up",
    "starting": "starting: it takes up to a minute",
    "down": "down: start it with flwr-server start",
}
"""State of the SuperLink -> its description for the terminal."""


def collect_server_status(coordinator: CoordinatorFolder) -> dict[str, Any]:
    """Return the content of ``flwr-server status --json``."""
    is_up = is_superlink_answering(coordinator)
    nodes = list[RegisteredSite]()
    if is_up:
        with suppress(SuperLinkUnreachable), closing(SuperLinkControlClient(coordinator, timeout_s=5.0)) as control:
            nodes = control.list_registered_sites()
    online = {node.name for node in nodes if node.is_online}
    stated = {node.name: node.stated for node in nodes if node.stated is not None}
    signed_off = read_site_sign_offs(coordinator.state_path)
    runs = read_current_runs(coordinator.state_path)
    latest_run = runs[-1] if runs else None
    releases = {name: release for run in runs for name, release in run.releases.items()}
    sites = {}
    for name, site in read_all_admitted_sites(coordinator).items():
        state = "connected" if name in online else "stopped" if name in signed_off else "not connected"
        sites[name] = {
            "state": "revoked" if site.revoked else state,
            "stopped": signed_off.get(name),
            "fingerprint": compute_public_key_fingerprint(site.public_key),
            "admitted": site.admitted,
            "revoked": site.revoked or None,
            "classes": list(site.classes),
            "max_images": site.max_images,
            "release": (stated[name].release if name in stated else "") or releases.get(name),
            "wire": stated[name].wire if name in stated else None,
        }
    return {
        "name": coordinator.file.name,
        "address": coordinator.public_address,
        "phrase": compute_certificate_phrase(read_authority_certificate(coordinator)),
        "release": __version__,
        "wire": WIRE_VERSION,
        "superlink": "up" if is_up else "starting" if is_coordinator_command_running(coordinator, "start") else "down",
        "certificate_days": count_certificate_days_left(coordinator),
        "sites": sites,
        "run": asdict(latest_run) if latest_run else None,
        "runs": [asdict(run) for run in runs],
        "time": time.time(),
    }


def format_server_status(status: Mapping[str, Any]) -> RenderableType:
    """Format the result of :func:`collect_server_status` as tables for the terminal."""
    state = SUPERLINK_STATES[status["superlink"]]
    heading = f"{status['name']} at {status['address']}: SuperLink {state}; "
    heading += f"certificate {status['certificate_days']:.0f} days; release {status['release']}"
    table, claims = fold_long_words(Table("site", "connection", "in the run", "release")), []
    runs = [CurrentRun(**run) for run in status["runs"]]
    for name, site in status["sites"].items():
        revoked = site["state"] == "revoked"
        part = ", ".join(filter(None, (describe_site_activity(run, name, revoked=revoked) for run in runs)))
        when = site.get("stopped") if site["state"] == "stopped" else None
        link = describe_site_sign_off(when) if when else site["state"]
        table.add_row(name, link, "" if when else part, Text(site.get("release") or ""))
        if (wire := site.get("wire")) not in (None, WIRE_VERSION) and site["state"] != "revoked":
            claims.append(Text(f"{name} {describe_needed_update(StatedRelease(wire, site['release'] or ''))}"))
        limits = [quote_names(site["classes"])] if site["classes"] else []
        limits += [f"{site['max_images']:,} training images at most"] if site["max_images"] else []
        if limits:
            claims.append(Text(f"{name} may claim {'; '.join(limits)}"))
    # Fingerprints are compared by telephone and copied. In the table they would be broken at 80 columns.
    keys = [f"{site['fingerprint']}  {name}" for name, site in status["sites"].items()]
    if phrase := status.get("phrase"):
        keys.insert(0, f"{phrase}  the coordinator's own phrase")
    sites: list[RenderableType] = [table, *(Text(key, no_wrap=True, overflow="ignore") for key in keys), *claims]
    shown = "\n".join(_format_run(run, status) for run in status["runs"]) or "no run yet"
    return Group(Text(heading), *sites, Text(shown))


def _format_run(run: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return the lines of the status about one run."""
    lines = [f"run {run['name']} ({run['state']}) in {run['run_folder']}"]
    if run["state"] == "running":
        where = f"round {run['round']} of {run['rounds']}, {run['phase']}" if run["rounds"] else run["phase"]
        left = f"; about {run['seconds_left'] / 60:.1f} min left" if run["seconds_left"] is not None else ""
        lines.append(f"{where}{left}")
        awaited = []
        for name in run["waiting_for"]:
            site = status["sites"].get(name, {})
            if site.get("state") != "revoked":
                sign_off = f" ({describe_site_sign_off(site['stopped'])})" if site.get("state") == "stopped" else ""
                awaited.append(f"{name}{sign_off}")
        if awaited:
            left_s = max(run["deadline"] - status["time"], 0)
            lines.append(f"waiting for {', '.join(awaited)}, at most {left_s:.0f} s more")
    lines += [f"{name} {APPROVAL_PENDING}" for name in run.get("awaiting_approval", ())]
    lines += [f"{name} was left out of {why}" for name, why in sorted(run["left_out"].items())]
    lines += [f"{name} sent too long an update in {done}" for name, done in sorted(run["shortened"].items())]
    if run["last_error"]:
        lines.append(f"last error: {run['last_error']} ({run['last_error_time']})")
    return "\n".join(lines)


def format_runs_table(runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Format the runs of :func:`polyclinic.server.runs.live_status.read_run_history` as a table for the terminal."""
    if not runs:
        return Text("no run yet")
    table = fold_long_words(Table("began", "run", "state", "rounds", "sites", "folder"))
    for run in runs:
        began = dt.datetime.fromtimestamp(run["began"], dt.UTC).isoformat(" ", timespec="minutes")
        rounds = f"{run['round']} of {run['rounds']}" if run["rounds"] else ""
        folder = run["run_folder"] if run["there"] else f"{run['run_folder']} (moved or removed)"
        table.add_row(began, run["name"], run["state"], rounds, str(len(run["sites"]) or ""), folder)
    return table
