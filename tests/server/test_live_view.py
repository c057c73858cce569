"""The live view: files in, a page out; a token before it; nobody disturbed."""

import ast
import asyncio
import base64
import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate
from rich.console import Console

from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results
from polyclinic.common.security.identity import SiteAdmissionRequest, create_private_key, format_public_key_line
from polyclinic.server.coordinator.admission import admit_site, revoke_site
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.state import write_site_connections
from polyclinic.server.reporting.live.files import (
    EVENT_SENTENCES,
    RunFileWatcher,
    RunSnapshot,
    RunStateSource,
    format_run_event,
    make_current_run_source,
)
from polyclinic.server.reporting.live.page import draw_line_chart, render_live_page
from polyclinic.server.reporting.live.server import (
    MAX_CONNECTIONS,
    REQUEST_TIMEOUT_S,
    LiveViewServer,
    make_tls_server_context,
    open_listening_socket,
    serve_live_view_during_run,
)
from polyclinic.server.runs.live_status import PRESENT_FILE, CurrentRun, JsonLinesReader
from polyclinic.server.simulation.simulate import simulate
from tests.federations import experiment
from tests.network.real import ROOT, eventually
from tests.server.chromium import View, layout, needs_browser, open_page

TOKEN = "a-token"


def appended(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def running(tmp_path: Path) -> CurrentRun:
    """A run in its third round, written as a run writes: its present state lies beside its folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    sites = ("east", "north")
    present = CurrentRun(str(folder), "chest <b>x-rays</b>", phase="train", round=3, rounds=5, sites=sites)
    present = replace(present, pid=os.getpid(), waiting_for=sites, lost=("north",), deadline=time.time() + 600)
    write_present(tmp_path, present)
    figures = {"validation_auroc": 0.75, "site_seconds": {"east": 61.0, "north": 7.5}, "seconds": 62.0}
    for number, loss, absent in ((1, 0.9, {}), (2, 0.5, {"west": "no reply within 60 s"})):
        losses = {"train_loss": loss, "validation_loss": loss + 0.125}
        line = {"round": number, "sites": sites, "absent": absent, **losses, **figures}
        appended(folder / "rounds.jsonl", line)
    joined = {"time": "2026-01-02T03:04:05.678+00:00", "event": "joined", "round": 2, "site": "<i>"}
    appended(folder / "events.jsonl", joined)
    return present


def write_present(state: Path, present: CurrentRun) -> None:
    (state / PRESENT_FILE).write_text(json.dumps(asdict(present)), encoding="utf-8")


def look(state: Path, links: Mapping[str, str] | None = None) -> RunSnapshot:
    """Return what the view finds in the files."""
    return RunFileWatcher(RunStateSource("trial", state, lambda: links or {})).poll_run_snapshot()


@contextmanager
def served(source: RunStateSource, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[str]:
    """Serve the view as its own process does, in a thread; yield its address."""
    with open_listening_socket("127.0.0.1", port) as listener:
        server = LiveViewServer(listener, source, TOKEN, tls)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve_requests()))
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(20)
            assert not thread.is_alive()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def address(tmp_path: Path, running: CurrentRun) -> Iterator[str]:
    with served(RunStateSource("trial", tmp_path)) as address:
        yield address


def test_lines_are_read_as_they_come_and_a_line_half_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    lines = JsonLinesReader(path)
    assert not lines.poll_new_lines()
    path.write_text('{"round": 1}\n{"rou')
    assert (lines.poll_new_lines(), lines.all) == (True, [{"round": 1}])
    with path.open("a") as file:
        file.write('nd": 2}\nnot json\n[3]\n')
    assert (lines.poll_new_lines(), lines.all) == (True, [{"round": 1}, {"round": 2}])
    assert not lines.poll_new_lines()
    appended(tmp_path / "new", {"round": 1}, {"round": 9}, {"round": 10})
    (tmp_path / "new").replace(path)  # as a resumed run does: it is read from its beginning
    assert (lines.poll_new_lines(), [line["round"] for line in lines.all]) == (True, [1, 9, 10])


def test_each_site_has_its_part_rounds_seconds_and_last_absence(tmp_path: Path, running: CurrentRun) -> None:
    sites = look(tmp_path, {"east": "connected", "west": "not connected"}).sites
    assert [(site.name, site.link, site.part, site.rounds, site.seconds) for site in sites] == [
        ("east", "connected", "at work (training)", 2, 61.0),
        ("north", "", "lost, may come back", 2, 7.5),
        ("west", "not connected", "", 0, None),
    ]
    assert sites[2].missed == "round 2: no reply within 60 s"


def test_connections_are_unknown_where_flwr_server_start_is_gone(
    coordinator: CoordinatorFolder, tmp_path: Path
) -> None:
    for name in ("east", "west"):
        key = format_public_key_line(create_private_key(tmp_path / f"{name}.key"), "comment")
        admit_site(coordinator, SiteAdmissionRequest(site=name, public_key=key))
    revoke_site(coordinator, "west")
    source = make_current_run_source(coordinator)
    assert source.links() == {"east": "not known", "west": "revoked"}
    assert "down" in source.link()
    write_site_connections(coordinator.state_path, {"east": True})
    assert source.links() == {"east": "connected", "west": "revoked"}
    assert source.link() == f"open at {coordinator.public_address}"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "absent", "round": 3, "site": "east", "reason": "why"}, "round 3 went on without east: why"),
        ({"event": "absent", "round": "test", "site": "east", "reason": "why"}, "the test went on without east: why"),
        ({"event": "roll_call", "sites": ["a", "b"], "classes": ["x"]}, "roll call: a, b take part; classes: x"),
        ({"event": "joined"}, "joined"),
        (
            {"event": "rolled_back", "round": 6, "to": 5, "because": "why"},
            "the model of round 6 was rejected and the run went back to round 5: why",
        ),
        ({"event": "something_new", "how": {"much": 1}}, "something new, how {'much': 1}"),
    ],
)
def test_events_are_sentences_and_those_without_one_their_fields(event: dict[str, Any], text: str) -> None:
    assert format_run_event(event) == ("", text)


def test_every_event_that_is_written_has_a_sentence() -> None:
    calls = [
        node
        for file in (ROOT / "server").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append_event"
    ]
    assert {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)} == set(EVENT_SENTENCES)


def test_an_event_of_today_has_its_time_of_day_an_older_one_its_date_and_a_long_text_is_cut() -> None:
    now, past = dt.datetime.now(dt.UTC), dt.datetime(2026, 1, 2, 12, 4, 5, tzinfo=dt.UTC)
    when, text = format_run_event({"time": now.isoformat(), "event": "stopped", "reason": "x" * 1000})
    assert when == now.astimezone().strftime("%H:%M:%S %Z")
    assert len(text) < 300
    when, _ = format_run_event({"time": past.isoformat(), "event": "begun"})
    assert when == past.astimezone().strftime("%Y-%m-%d %H:%M %Z")


def test_a_curve_lies_where_its_values_are_and_a_value_that_is_none_is_left_out() -> None:
    figure = str(draw_line_chart("loss", [1, 2, 3], {"training": [4.0, None, 2.0], "validation": [None] * 3}, 5))
    (points,) = re.findall(r'<polyline class="curve c0" points="([^"]*)"', figure)
    (x1, y1), (x3, y3) = (map(float, point.split(",")) for point in points.split())
    # Of 52 to 468, for rounds 1 to 5: the third is half way.
    assert (x1, x3, y1 < y3) == (52.0, 260.0, True)
    assert ("training 2.000 after round 3" in figure, "c1" in figure) == (True, False)


def test_ten_thousand_rounds_are_a_few_hundred_points_and_the_last_is_among_them() -> None:
    rounds = range(1, 10_001)
    figure = str(draw_line_chart("loss", rounds, {"training": [1 / n for n in rounds]}, 10_000))
    (points,) = re.findall(r'<polyline[^>]*points="([^"]*)"', figure)
    assert (len(points.split()) <= 301, points.split()[-1].startswith("468.0,")) == (True, True)


def test_the_names_of_runs_and_sites_stay_text(tmp_path: Path, running: CurrentRun) -> None:
    text = render_live_page(look(tmp_path))
    assert "chest &lt;b&gt;x-rays&lt;/b&gt;" in text
    assert not {"<b>", "<i>"} & set(re.findall("<.>", text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["running", "2 of 5", "Waiting for east, north", "1 lost"]),
        ({"state": "stopped", "last_error": "1 of 2 sites"}, ["stopped", "2 of 5", "1 of 2 sites"]),
        ({"pid": 2**22 + 1}, ["interrupted: --resume goes on"]),
        ({"state": "done", "phase": "test", "round": 5, "last_error": "by-gone"}, ["done", "5 of 5", "1 of 2 classes"]),
    ],
    ids=["running", "stopped", "killed", "done"],
)
def test_the_page_shows_the_state_of_the_run(
    tmp_path: Path, running: CurrentRun, change: dict[str, Any], words: list[str]
) -> None:
    write_present(tmp_path, replace(running, **change))
    results = {"edema": ClassMetrics(0.8123, 0.5, 0.5, 40, 60), "mass": ClassMetrics(0.2, 0.5, 0.5, 9, 60)}
    summary = {"test": asdict(summarise_test_results(results, (), ()))}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    text = render_live_page(look(tmp_path))
    assert [word for word in words if word not in text] == []
    assert ("0.812" in text) == (change.get("state") == "done")
    assert "by-gone" not in text


def test_before_the_first_run_the_page_says_so_and_lists_the_sites(tmp_path: Path) -> None:
    text = render_live_page(look(tmp_path, {"east": "connected"}))
    assert "No run yet" in text
    assert '<td class="wordy link good">connected</td>' in text


def test_without_the_right_token_nothing_is_shown_and_nothing_but_get_is_answered(address: str) -> None:
    for path in ("/", "/view", "/nothing"):
        for query in ("", "?token=", "?token=a-toke", "?token=a-token2", "?token=%C3%A4&token=a-token"):
            answer = httpx.get(address + path + query)
            assert (answer.status_code, "east" in answer.text) == (403, False)
    assert httpx.get(f"{address}/?token={TOKEN}").status_code == 200
    assert httpx.get(f"{address}/nothing?token={TOKEN}").status_code == 404
    for method in ("POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
        for path in ("/", "/view"):
            assert httpx.request(method, f"{address}{path}?token={TOKEN}").status_code == 405


def test_the_page_allows_no_style_script_or_connection_but_its_own(address: str) -> None:
    answer = httpx.get(f"{address}/?token={TOKEN}")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert not re.search(r"(src|href)=\"(?!data:)", answer.text)
    assert not re.search(r" (style|on[a-z]+)=", answer.text)


def test_each_look_shows_the_present_state(tmp_path: Path, running: CurrentRun, address: str) -> None:
    assert "round 2 of 5 done" in httpx.get(f"{address}/view?token={TOKEN}").text
    write_present(tmp_path, replace(running, round=4))
    eventually(lambda: "round 3 of 5 done" in httpx.get(f"{address}/view?token={TOKEN}").text, "it is shown", 10)


def test_viewers_that_hang_neither_stop_the_others_nor_the_end(tmp_path: Path, running: CurrentRun) -> None:
    began = time.monotonic()
    with served(RunStateSource("trial", tmp_path)) as address, contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            hanging = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(address))))
            hanging.sendall(f"GET /view?token={TOKEN} HTTP/1.1\r\nX: ".encode())
        assert httpx.get(f"{address}/?token={TOKEN}").status_code == 200
    assert time.monotonic() - began < REQUEST_TIMEOUT_S


def test_a_connection_without_a_whole_request_is_closed_in_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.server.reporting.live.server.REQUEST_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", port_of(address)), timeout=5) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(1) == b""  # closed without an answer


def trusting(coordinator: CoordinatorFolder) -> ssl.SSLContext:
    """Trust the authority's certificate, as a program that was given it does."""
    return ssl.create_default_context(cafile=coordinator.ca_certificate_path)


@pytest.mark.parametrize(
    ("connections", "seconds"), [(300, 3), pytest.param(4000, 60, marks=pytest.mark.torture)], ids=["short", "full"]
)
@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.torture), True])
def test_a_crowd_of_idle_and_half_sent_connections_blinds_no_viewer_and_leaves_nothing(
    tls: bool, connections: int, seconds: float, coordinator: CoordinatorFolder
) -> None:
    kinds = "silent,hello,request-in-tls" if tls else "silent,request"
    with (
        served(make_current_run_source(coordinator), make_tls_server_context(coordinator) if tls else None) as address,
        httpx.Client(verify=trusting(coordinator)) as client,
    ):
        assert client.get(f"{address}/?token={TOKEN}", headers={"Connection": "close"}).status_code == 200
        before, answers_s = psutil.Process().num_fds(), list[float]()
        options = [str(word) for word in (port_of(address), connections, seconds, "--kinds", kinds)]
        command = [sys.executable, "-m", "tests.network.flood", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == "begun\n"
                while flood.poll() is None:
                    with httpx.Client(verify=trusting(coordinator), timeout=20) as viewer:
                        began = time.monotonic()
                        assert viewer.get(f"{address}/?token={TOKEN}").status_code == 200
                        answers_s.append(time.monotonic() - began)
                    assert psutil.Process().num_fds() < before + 2 * MAX_CONNECTIONS  # open, and about to close
                    time.sleep(0.2)
                figures = json.loads(flood.stdout.readlines()[-1])
            finally:
                flood.kill()
        assert sum(figures["opened"].values()) >= connections
        assert sorted(answers_s)[len(answers_s) // 2] < 2
        eventually(lambda: psutil.Process().num_fds() <= before + 2, "the descriptors are back", 30)


def test_the_coordinators_view_speaks_tls_with_its_certificate_and_nothing_plain(
    coordinator: CoordinatorFolder,
) -> None:
    with served(make_current_run_source(coordinator), make_tls_server_context(coordinator)) as address:
        with httpx.Client(verify=trusting(coordinator)) as client:
            assert "No run yet" in client.get(f"{address}/?token={TOKEN}").text
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{address.replace('https', 'http')}/?token={TOKEN}")


@pytest.mark.torture
def test_a_simulation_that_is_shown_ends_in_the_same_model_and_its_view_ends_with_it(tmp_path: Path) -> None:
    hashes, children = [], []
    for out, web_port in (("plain", None), ("shown", 0)):
        file = experiment(tmp_path, "run.rounds=1")
        summary = simulate(file, tmp_path / out, Console(quiet=True), web_port=web_port)
        hashes.append(summary["model_sha256"])
        children.append(psutil.Process().children())  # Python's own tracker of resources, where anything has begun it
    assert hashes[0] == hashes[1]
    assert children[0] == children[1]
    snapshot = RunFileWatcher(RunStateSource("flwr-sim", tmp_path / "shown")).poll_run_snapshot()
    assert snapshot.current_run is not None
    assert (snapshot.current_run.state, snapshot.current_run.round, len(snapshot.sites)) == ("done", 1, 3)
    assert not (tmp_path / "plain" / PRESENT_FILE).exists()


def test_a_port_in_use_is_a_fault_before_anything_is_trained(tmp_path: Path) -> None:
    with open_listening_socket("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadInput, match=f"--port {port}: cannot be listened on"):
            simulate(experiment(tmp_path), tmp_path / "run", Console(quiet=True), web_port=port)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_a_view_beside_a_run_shows_it_and_its_last_state(tmp_path: Path, running: CurrentRun) -> None:
    lines, looks = list[str](), [""]

    def follow(url: str) -> None:
        """Look each second, as a page does, until nobody answers."""
        with contextlib.suppress(httpx.HTTPError):
            while True:
                looks.append(httpx.get(url, timeout=20).text)
                time.sleep(1)

    with serve_live_view_during_run(tmp_path, 0, lines.append):
        url = lines[0].removeprefix("live view: ")
        view = url.replace("/?", "/view?")
        assert "round 2 of 5 done" in httpx.get(view, timeout=60).text
        assert httpx.get(url.partition("?")[0]).status_code == 403
        follower = threading.Thread(target=follow, args=(view,))
        follower.start()
        eventually(lambda: bool(looks[-1]), "somebody looks on", 20)
        write_present(tmp_path, replace(running, round=5, phase="test", state="done"))
    follower.join(20)
    assert "round 5 of 5 done" in looks[-1]


@pytest.mark.slow
@needs_browser
def test_an_open_page_follows_the_run_and_finds_back(
    tmp_path: Path, running: CurrentRun, coordinator: CoordinatorFolder
) -> None:
    tls = make_tls_server_context(coordinator)
    source = replace(make_current_run_source(coordinator), state=tmp_path)
    key = load_pem_x509_certificate((coordinator.authority_path / "server.crt").read_bytes()).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    with contextlib.ExitStack() as stack:
        with served(source, tls) as address:
            url = f"{address}/?token={TOKEN}"
            page = stack.enter_context(open_page(url, View(400, dark=True), base64.b64encode(digest).decode()))
            assert page.value("document.title").startswith("2/5")
            write_present(tmp_path, replace(running, round=5))
            page.until("document.title.startsWith('4/5')")
            assert page.value("document.getElementById('announcement').textContent") == "running. round 4 of 5 done"
            assert page.value("document.getElementById('link').hidden")
            assert page.value("[document.documentElement.scrollWidth, innerWidth]") == [400, 400]
        page.until("!document.getElementById('link').hidden")
        assert "Round 5 of 5: training" in page.value("document.body.innerText")
        write_present(tmp_path, replace(running, round=5, state="done"))
        with served(source, tls, port=port_of(address)):
            page.until("document.title.startsWith('5/5')")
            assert page.value("document.getElementById('link').hidden")


@needs_browser
@pytest.mark.parametrize("view", [View(1400), View(500, dark=True)], ids=["desk by day", "phone by night"])
def test_nothing_overlaps_is_cut_too_pale_or_beyond_the_edge(tmp_path: Path, running: CurrentRun, view: View) -> None:
    (tmp_path / "page.html").write_text(render_live_page(look(tmp_path)), encoding="utf-8")
    measured = layout(tmp_path / "page.html", view)
    assert measured["page"][0] <= measured["page"][1]
    assert [measured[name] for name in ("beyond", "overlapping", "cut", "pale")] == [[], [], [], []]
