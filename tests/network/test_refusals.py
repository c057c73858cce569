"""Whom a site refuses, and who is refused: each with a reason that a person can act on, and an exit code."""

import json
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import Node

from client.connection.exit_codes import ExitCode
from server.coordinator.authority import issue_server_certificate
from server.coordinator.folder import read_coordinator
from tests.network.conftest import Trial
from tests.network.real import Coordinator, Site, flwr_client, flwr_server

pytestmark = pytest.mark.slow

Hospital = Callable[[str], Site]
GONE = "its key is not admitted any more"
NEWER = (
    "import sys, common.wire.codec; common.wire.codec.WIRE_VERSION = 99; "
    "from client.cli import main; main(sys.argv[1:])"
)
"""A site of another release."""


def to_another_address(site: Site, trial: Trial, address: str) -> Site:
    site.edit(site.kit, (f"127.0.0.1:{trial.coordinator.port}", address))
    return site


# ---------------------------------------------------------------------- the site refuses


@contextmanager
def plain_tcp() -> Iterator[int]:
    """A server that answers anything in clear text."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


@contextmanager
def plain_grpc() -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("server", [plain_tcp, plain_grpc])
def test_a_site_talks_to_nobody_without_tls(
    server: Callable[..., Iterator[int]], trial: Trial, hospital: Hospital
) -> None:
    site = hospital(f"warded-{server.__name__}")
    with server() as port:
        to_another_address(site, trial, f"127.0.0.1:{port}").start()
        assert site.program.ends() == ExitCode.NO_TLS == 10
    (reason,) = site.program.said.splitlines()  # refused before it says who it is
    assert f"stopped 127.0.0.1:{port} does not speak TLS; this site talks to nobody without." in reason


def test_a_site_refuses_the_certificate_of_another_authority(trial: Trial, hospital: Hospital, tmp_path: Path) -> None:
    site, stranger = hospital("misled"), tmp_path / "stranger"
    assert flwr_server("init", stranger, "--name", "stranger", "--host", "127.0.0.1").code == 0
    ours, theirs = (folder / "authority" / "ca.crt" for folder in (trial.coordinator.folder, stranger))
    kit = site.kit.read_text(encoding="utf-8")
    one_line = [path.read_text(encoding="ascii").replace("\n", "\\n") for path in (ours, theirs)]
    site.edit(site.kit, (one_line[0], one_line[1]))
    assert site.kit.read_text(encoding="utf-8") != kit
    assert site.start().ends() == ExitCode.OTHER_AUTHORITY == 11
    assert "127.0.0.1 does not show the certificate of this kit's coordinator" in site.program.said


def test_a_site_refuses_a_certificate_for_another_host(trial: Trial, hospital: Hospital) -> None:
    site = to_another_address(hospital("astray"), trial, f"127.0.0.2:{trial.coordinator.port}")
    assert site.start().ends() == ExitCode.WRONG_HOST == 12
    assert "stopped the coordinator's certificate is not for 127.0.0.2." in site.program.said
    assert "--renew --host" in site.program.said


@contextmanager
def tls(coordinator: Coordinator) -> Iterator[int]:
    """A server that shows a coordinator's certificate, whatever it is worth, and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = coordinator.folder / "authority"
    context.load_cert_chain(authority / "server.crt", authority / "server.key")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


def test_an_expired_certificate_is_refused_by_a_site_and_not_served_by_the_coordinator(trial: Trial) -> None:
    coordinator = Coordinator(trial.machine, "expired")
    issue_server_certificate(read_coordinator(coordinator.folder), days=-1)
    site = coordinator.admit(coordinator.site(trial.sites[0], "punctual"))
    with tls(coordinator) as port:
        site.edit(site.kit, (f"127.0.0.1:{coordinator.port}", f"127.0.0.1:{port}"))
        assert site.start().ends() == ExitCode.EXPIRED == 13
    assert "stopped the coordinator's certificate has expired." in site.program.said
    start = trial.machine.start("expired", "-m", "server.cli", "start", coordinator.folder)
    assert start.ends() == 2
    assert re.search(
        r"authority/server.crt: expired on [-0-9]{10} [:0-9]{5} UTC; this machine's clock says ", start.said
    )
    assert f"Run: flwr-server init {coordinator.folder} --renew" in start.said


# ---------------------------------------------------------------------- the coordinator refuses


def test_nothing_leaves_the_port_for_hospitals_in_clear_text(trial: Trial) -> None:
    address, request = f"127.0.0.1:{trial.coordinator.port}", ActivateNodeRequest(public_key=b"any")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        FleetStub(channel).ActivateNode(request, timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", trial.coordinator.port), timeout=20) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert plain.recv(1000) == b""


@pytest.mark.parametrize("call", ["ActivateNode", "PullMessages"])
def test_a_caller_with_the_right_authority_but_no_key_is_refused(call: str, trial: Trial) -> None:
    authority = (trial.coordinator.folder / "authority" / "ca.crt").read_bytes()
    requests = {
        "ActivateNode": ActivateNodeRequest(public_key=b"any", heartbeat_interval=30),
        "PullMessages": PullMessagesRequest(node=Node(node_id=1)),
    }
    address, credentials = f"127.0.0.1:{trial.coordinator.port}", grpc.ssl_channel_credentials(authority)
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        getattr(FleetStub(channel), call)(requests[call], timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_key_that_was_never_admitted_is_refused(trial: Trial, hospital: Hospital) -> None:
    admitted, stranger = hospital("known"), trial.coordinator.site(trial.sites[0], "stranger")
    public = [site.folder.joinpath(f"{site.name}.request").read_text(encoding="utf-8") for site in (admitted, stranger)]
    old, new = (text.split('public_key = "')[1].split('"')[0] for text in public)
    shutil.copy(admitted.kit, stranger.kit)
    stranger.edit(stranger.kit, ('site = "known"', 'site = "stranger"'), (old, new))
    assert stranger.start().ends() == ExitCode.KEY == 14
    assert "stopped the coordinator does not accept this site's key" in stranger.program.said
    assert "Ask the coordinator whether this site is admitted" in stranger.program.said


@pytest.mark.network
def test_a_site_that_is_revoked_while_connected_is_turned_out_and_does_not_come_in_again(
    trial: Trial, hospital: Hospital
) -> None:
    site = hospital("leaver")
    site.start().says("connected to trial")
    trial.coordinator.sees(site)
    assert "To come back it makes a new key." in trial.coordinator.revoke(site).out
    assert site.program.ends() == ExitCode.KEY == 14
    assert "stopped the coordinator does not accept this site's key" in site.program.said
    assert trial.coordinator.now["sites"]["leaver"]["state"] == "revoked"
    assert site.start().ends() == ExitCode.KEY
    assert "connected to trial" not in site.program.said


@pytest.mark.parametrize("lost_before", [False, True])
def test_work_is_promised_to_no_site_that_is_revoked_in_mid_run_and_nobody_waits_for_it(
    lost_before: bool, trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    stays, goes = hospital(f"stays-{lost_before}"), hospital(f"goes-{lost_before}")
    for site in (stays, goes):
        site.start().says("connected to trial")
    trial.coordinator.sees(stays, goes)
    options = ("run.rounds=400", "participation.round_deadline_s=600", f"participation.min_sites={1 + lost_before}")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2)
    run.says("round 1 of 400")
    goes.program.process.send_signal(signal.SIGSTOP)
    try:
        if lost_before:  # the run needs both, and waits
            run.says(f"lost contact with {goes.name}")
        before = len(run.said)
        assert trial.coordinator.revoke(goes).code == 0
        run.says(GONE)
        assert "work again" not in run.said[before:]
        words = flwr_server("status", trial.coordinator.folder).out
        assert "may come back" not in words
        assert f"waiting for {goes.name}" not in words
        present = trial.coordinator.now["run"]
        assert goes.name not in [*present["lost"], *present["waiting_for"]]
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()]
        assert {event["reason"] for event in events if event.get("site") == goes.name} <= {GONE}
        if lost_before:
            assert run.ends() == 1
        else:
            run.says("round 20 of 400")
            assert run.said.count(f"without {goes.name}: its key") == 1
    finally:
        goes.program.process.send_signal(signal.SIGCONT)
        run.stop() if run.runs else None


def test_a_site_that_uses_another_sites_name_is_refused_at_the_roll_call(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    site = hospital("impostor")
    for path in (site.toml, site.kit):
        site.edit(path, ('"impostor"', '"north"'))
    for suffix in ("kit", "key"):
        site.folder.joinpath(f"impostor.{suffix}").rename(site.folder / f"north.{suffix}")
    site.start().says("connected to trial")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    reason = 'it calls itself "north", but its key is registered for "impostor".'
    assert f"impostor: {reason}" in run.said
    assert site.program.ends() == ExitCode.NAME == 16
    assert reason in site.program.said
    trial.coordinator.sees(site, state="stopped")  # so that the next run does not wait for its signs of life to end


def test_a_site_does_not_even_start_with_the_kit_of_another(hospital: Hospital) -> None:
    site = hospital("mistaken")
    site.edit(site.toml, ('name = "mistaken"', 'name = "other"\nkit = "mistaken.kit"\nkey = "mistaken.key"'))
    ended = flwr_client("start", site.folder)
    assert ended.code == ExitCode.BAD_INPUT == 2
    assert 'site.toml: name: is "other", but the kit is for "mistaken".' in ended.err


def test_a_site_of_another_wire_version_is_refused_and_both_sides_say_why(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    site = hospital("newer")
    site.start_by("-c", NEWER, "start", site.folder).says("connected to trial")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    assert site.program.ends() == ExitCode.VERSION == 17
    for said in (run.said, site.program.said):
        assert "wire version" in said


def test_why_a_site_was_refused_stands_when_it_has_gone_before_another_answers(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    """The one of another release leaves at once; the run waits for the slow one alone, and goes on with it."""
    newer, slow = hospital("later"), hospital("slow")
    newer.start_by("-c", NEWER, "start", newer.folder).says("connected to trial")
    slow.start_by("-m", "client.cli", "start", slow.folder).says("connected to trial")
    slow.program.process.send_signal(signal.SIGSTOP)
    try:
        out = tmp_path / "run"
        options = ("participation.min_sites=1", "participation.roll_call_deadline_s=120")
        run = trial.coordinator.run(trial.experiment, out, *options, sites=2, once=True)
        assert newer.program.ends() == ExitCode.VERSION
        trial.coordinator.sees(newer, state="stopped")
    finally:
        slow.program.process.send_signal(signal.SIGCONT)
    began = time.monotonic()
    assert run.ends() == 0, run.said
    assert time.monotonic() - began < 60
    assert "the run goes on without later: " in run.said
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    (left_out,) = [event for event in events if event["event"] == "left_out"]
    assert "wire version" in left_out["reason"]


@pytest.mark.network
def test_labels_that_look_like_one_class_stop_the_run_with_the_two_lines_that_mend_it(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    upper, lower = hospital("upper"), hospital("zlower")
    for site, name in ((upper, "Effusion"), (lower, "effusion")):
        site.toml.write_text(
            f'{site.toml.read_text(encoding="utf-8")}[data.synonyms]\n"1" = "{name}"\n', encoding="utf-8"
        )
        site.start().says("connected to trial")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=2)
    assert run.ends() == 2
    assert lower.program.ends() == ExitCode.LABELS == 18
    fix = 'Two lines in site.toml of zlower settle it:\n    [data.synonyms]\n    "1" = "Effusion"'
    for said in (run.said, lower.program.said):
        assert '"Effusion" (site upper) and "effusion" (site zlower) look like one class.' in said
        assert fix in said
    assert upper.program.runs
    lower.edit(lower.toml, ('"1" = "effusion"', '"1" = "Effusion"'))
    lower.start().says("connected to trial")
    fixed = trial.coordinator.run(trial.experiment, tmp_path / "fixed", "run.rounds=1", sites=2)
    assert fixed.ends() == 0, fixed.said


SHIPPING = """
import sys
from server.deployment.superlink import fleet_service as service
service.BUNDLE = service.app_bundle(service.APP.replace("installed:at_the_site", "evil:app"))
import hashlib, io, zipfile
archive = io.BytesIO(service.BUNDLE)
with zipfile.ZipFile(archive, "a") as made:
    made.writestr("evil.py", f"open({MARKER!r}, 'w').write('ran'); app = None")
service.BUNDLE = archive.getvalue()
service.BUNDLE_SHA256 = hashlib.sha256(service.BUNDLE).hexdigest()
from server.deployment.superlink.program import main
main(sys.argv[1:])
"""
STARTING = """
import sys
from server.deployment.superlink import process
honest = process.superlink_command
def shipping(coordinator):
    python, _, _, _, *arguments = honest(coordinator)
    return [python, "-c", SHIPPING, *arguments]
process.superlink_command = shipping
from server.cli import main
main(sys.argv[1:])
"""


def test_code_that_a_coordinator_sends_is_refused_reported_and_not_run(trial: Trial, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    coordinator = Coordinator(trial.machine, "shipping")
    superlink = f"MARKER = {str(marker)!r}{SHIPPING}"
    coordinator.start_by("-c", f"SHIPPING = {superlink!r}{STARTING}", "start", coordinator.folder)
    site = coordinator.admit(coordinator.site(trial.sites[0], "wary"))
    site.start().says("connected to shipping")
    run = coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    reason = "the app bundle carries evil.py; this site runs only what its own image holds"
    assert reason in run.said
    assert "refused a message of run" in site.program.said
    assert reason in site.program.said
    assert site.program.runs
    assert not marker.exists()
    site.end()
    coordinator.program.stop()


# ---------------------------------------------------------------------- one program a folder, one a port


@pytest.mark.network
def test_a_folder_has_one_client(hospital: Hospital) -> None:
    site = hospital("single")
    first = site.start()
    first.says("connected to trial")
    assert site.start().ends() == ExitCode.BAD_INPUT == 2
    assert "another flwr-client runs on this folder." in site.program.said
    assert first.runs
    assert first.stop() == ExitCode.STOPPED == 0


@pytest.mark.network
def test_of_two_processes_with_one_key_the_later_one_stays_and_the_earlier_one_says_why_it_stops(
    hospital: Hospital, trial: Trial, tmp_path: Path
) -> None:
    site = hospital("copied")
    first = site.start()
    first.says("connected to trial")
    shutil.copytree(site.folder, tmp_path / "copied", ignore=shutil.ignore_patterns("lock"))
    second = Site(trial.machine, tmp_path / "copied")
    second.start().says("connected to trial")
    assert first.ends() == ExitCode.KEY == 14
    assert "another process has signed on with this site's key since" in first.said
    assert second.program.runs
    refused = (trial.coordinator.folder / "state" / "refused-calls.jsonl").read_text(encoding="utf-8")
    assert '"caller": "copied"' in refused
    assert second.program.stop() == ExitCode.STOPPED
