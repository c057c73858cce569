"""Whom a site refuses, and who is refused: each with a reason that a person can act on, and an exit code."""

import shutil
import socket
import time
from pathlib import Path

import grpc
import pytest

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.common.wire import fleet_protocol
from polyclinic.common.wire.versions import WIRE_VERSION
from tests.fleet_stub import FleetStub
from tests.network.conftest import Hospital, Trial
from tests.network.federated import SLOW, events
from tests.network.previous_release import client_of_wire
from tests.network.real import Coordinator, Site, eventually, flwr_client, flwr_server, lines_of

pytestmark = pytest.mark.slow

GONE = "its key is not admitted any more"
OF_ANOTHER_WIRE = client_of_wire(WIRE_VERSION + 2)


def test_nothing_leaves_the_port_for_hospitals_in_clear_text(trial: Trial) -> None:
    address, request = f"127.0.0.1:{trial.coordinator.port}", fleet_protocol.ActivateNodeRequest(public_key=b"any")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        FleetStub(channel).ActivateNode(request, timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", trial.coordinator.port), timeout=20) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert plain.recv(1000) == b""


def never_admitted(trial: Trial, admitted: Site, name: str) -> Site:
    """A site with a kit that it wrote itself, from that of an admitted site."""
    stranger = trial.coordinator.site(trial.sites[0], name)
    public = [site.folder.joinpath(f"{site.name}.request").read_text(encoding="utf-8") for site in (admitted, stranger)]
    old, new = (text.split('public_key = "')[1].split('"')[0] for text in public)
    shutil.copy(admitted.kit, stranger.kit)
    stranger.edit(stranger.kit, (f'site = "{admitted.name}"', f'site = "{name}"'), (old, new))
    return stranger


def test_a_key_that_was_never_admitted_is_refused(trial: Trial, hospital: Hospital) -> None:
    stranger = never_admitted(trial, hospital("known"), "stranger")
    assert stranger.start().ends() == ClientExitCode.KEY == 14
    assert "does not accept this site's key" in stranger.program.output


def test_where_the_wire_versions_differ_a_refused_key_is_not_said_to_be_the_reason(
    trial: Trial, hospital: Hospital
) -> None:
    """Another release may sign its calls in another way: then the key may well be admitted."""
    newer = never_admitted(trial, hospital("older"), "newer")
    assert newer.start_by("-c", OF_ANOTHER_WIRE, "start", newer.folder).ends() == ClientExitCode.VERSION == 17
    assert f"wire version {WIRE_VERSION}" in newer.program.output
    assert "does not accept this site's key" not in newer.program.output


@pytest.mark.network
def test_a_site_that_is_revoked_while_connected_ends_and_does_not_come_in_again(
    trial: Trial, hospital: Hospital
) -> None:
    site = hospital("leaver")
    site.connect()
    trial.coordinator.sees(site)
    assert trial.coordinator.revoke(site).code == 0
    assert site.program.ends() == ClientExitCode.KEY == 14
    assert trial.coordinator.now["sites"]["leaver"]["state"] == "revoked"
    assert site.start().ends() == ClientExitCode.KEY
    assert "connected to trial" not in site.program.output


@pytest.mark.parametrize("lost_before", [False, pytest.param(True, marks=pytest.mark.network)])
def test_work_is_promised_to_no_site_that_is_revoked_in_mid_run_and_nobody_waits_for_it(
    lost_before: bool, trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    stays, goes = hospital(f"stays-{lost_before}"), hospital(f"goes-{lost_before}")
    for site in (stays, goes):
        site.connect()
    trial.coordinator.sees(stays, goes)
    options = ("run.rounds=400", "participation.round_deadline_s=600", f"participation.min_sites={1 + lost_before}")
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2, once=True)
    run.says("round 1 of 400")
    with goes.program.frozen():
        if lost_before:  # the run needs both, and waits
            run.says(f"lost contact with {goes.name}")
        before = len(run.output)
        assert trial.coordinator.revoke(goes).code == 0
        run.says(GONE)
        assert "work again" not in run.output[before:]
        words = flwr_server("status", trial.coordinator.folder).out
        assert "may come back" not in words
        assert f"waiting for {goes.name}" not in words
        present = trial.coordinator.now["run"]
        assert goes.name not in [*present["lost"], *present["waiting_for"]]
        lines = lines_of(tmp_path / "run" / "events.jsonl")
        assert {line["reason"] for line in lines if line.get("site") == goes.name} <= {GONE}
        if lost_before:
            assert run.ends() == 1
        else:
            run.says("round 20 of 400")
            assert run.output.count(f"without {goes.name}: its key") == 1
            run.stop()


def rename(site: Site, name: str) -> None:
    """Let a site call itself by another name than the one that its key is registered for."""
    for path in (site.toml, site.kit):
        site.edit(path, (f'"{site.name}"', f'"{name}"'))
    for suffix in ("kit", "key"):
        site.folder.joinpath(f"{site.name}.{suffix}").rename(site.folder / f"{name}.{suffix}")


def test_a_site_with_anothers_name_is_refused_at_the_roll_call(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    site = hospital("impostor")
    rename(site, "north")
    site.connect()
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    reason = 'it calls itself "north", but its key is registered for "impostor".'
    assert f"impostor: {reason}" in run.output
    assert site.program.ends() == ClientExitCode.NAME == 16
    assert reason in site.program.output
    trial.coordinator.sees(site, state="stopped")  # so that the next run does not wait for its signs of life to end


def test_why_a_site_was_refused_is_noted_though_it_has_gone(trial: Trial, hospital: Hospital, tmp_path: Path) -> None:
    """The one of another name leaves at once; the run waits for the slow one alone, and goes on with it."""
    misnamed, slow = hospital("misnamed"), hospital("slow")
    rename(misnamed, "north")
    misnamed.connect()
    trial.coordinator.sees(misnamed)
    slow.connect()
    options = ("participation.min_sites=1", "participation.roll_call_deadline_s=120")
    with slow.program.frozen():
        run = trial.coordinator.run(trial.experiment, tmp_path / "run", *options, sites=2, once=True)
        assert misnamed.program.ends() == ClientExitCode.NAME == 16
        trial.coordinator.sees(misnamed, state="stopped")
    began = time.monotonic()
    run.succeeds()
    assert time.monotonic() - began < 60
    assert "the run goes on without misnamed: " in run.output
    (left_out,) = events(tmp_path / "run", "left_out")
    for text in (left_out["reason"], misnamed.program.output):
        assert 'its key is registered for "misnamed"' in text


@pytest.mark.network
def test_labels_that_look_like_one_class_stop_the_run(trial: Trial, hospital: Hospital, tmp_path: Path) -> None:
    upper, lower = hospital("upper"), hospital("zlower")
    for site, name in ((upper, "Effusion"), (lower, "effusion")):
        with site.toml.open("a", encoding="utf-8") as file:
            file.write(f'[data.synonyms]\n"1" = "{name}"\n')
        site.connect()
    run = trial.coordinator.run(trial.experiment, tmp_path / "run", sites=2)
    assert run.ends() == 2
    for output in (run.output, lower.program.output):
        assert '"Effusion" (site upper) and "effusion" (site zlower)' in output
        assert 'settles it:\n    "1" = "Effusion"' in output
    assert upper.program.runs
    assert lower.program.runs
    lower.edit(lower.toml, ('"1" = "effusion"', '"1" = "Effusion"'))
    lower.end()
    lower.connect()
    trial.coordinator.run(trial.experiment, tmp_path / "fixed", "run.rounds=1", sites=2).succeeds()


SHIPPING = """
import sys
from polyclinic.server.deployment.superlink import fleet_service as service
config = service.APP_BUNDLE_CONFIG.replace("installed:at_the_site", "evil:app")
service.APP_BUNDLE = service.make_flower_app_bundle(config)
import hashlib, io, zipfile
archive = io.BytesIO(service.APP_BUNDLE)
with zipfile.ZipFile(archive, "a") as made:
    made.writestr("evil.py", f"open({MARKER!r}, 'w').write('ran'); app = None")
service.APP_BUNDLE = archive.getvalue()
service.APP_BUNDLE_SHA256 = hashlib.sha256(service.APP_BUNDLE).hexdigest()
from polyclinic.server.deployment.superlink.program import main
main(sys.argv[1:])
"""
STARTING = """
import sys
from polyclinic.server.deployment.superlink import process
honest = process.make_superlink_command
def shipping(coordinator):
    python, _, _, _, *arguments = honest(coordinator)
    return [python, "-c", SHIPPING, *arguments]
process.make_superlink_command = shipping
from polyclinic.server.cli import main
main(sys.argv[1:])
"""


def test_code_that_a_coordinator_sends_is_refused_reported_and_not_run(trial: Trial, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    coordinator = Coordinator(trial.machine, "shipping")
    superlink = f"MARKER = {str(marker)!r}{SHIPPING}"
    coordinator.start_by("-c", f"SHIPPING = {superlink!r}{STARTING}", "start", coordinator.folder)
    site = coordinator.admit(coordinator.site(trial.sites[0], "wary"))
    site.connect()
    run = coordinator.run(trial.experiment, tmp_path / "run", sites=1, once=True)
    assert run.ends() == 1
    for output in (run.output, site.program.output):
        assert "the app bundle carries evil.py" in output
    assert site.program.runs
    assert not marker.exists()
    site.end()
    coordinator.program.stop()


@pytest.mark.network
def test_of_two_processes_with_one_key_the_later_one_stays_and_the_earlier_one_says_why_it_stops(
    hospital: Hospital, trial: Trial, tmp_path: Path
) -> None:
    site = hospital("copied")
    site.connect()
    first = site.program
    shutil.copytree(site.folder, tmp_path / "copied", ignore=shutil.ignore_patterns("lock"))
    second = Site(trial.machine, tmp_path / "copied")
    second.connect()
    assert first.ends() == ClientExitCode.KEY == 14
    assert "another process has signed on with this site's key since" in first.output
    assert second.program.runs
    refused = (trial.coordinator.folder / "state" / "refused-calls.jsonl").read_text(encoding="utf-8")
    assert '"caller": "copied"' in refused
    assert second.program.stop() == ClientExitCode.STOPPED


def test_a_site_that_is_revoked_and_renews_its_key_takes_part_in_the_run_under_way(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    stays, renews = hospital("stays-renewal"), hospital("renews")
    for site in (stays, renews):
        site.connect()
    trial.coordinator.sees(stays, renews)
    out, options = tmp_path / "run", ("run.rounds=400", "participation.min_sites=1", SLOW)
    run = trial.coordinator.run(trial.experiment, out, *options, sites=2, once=True)
    run.says("round 1 of 400")
    assert trial.coordinator.revoke(renews).code == 0
    assert renews.program.ends() == ClientExitCode.KEY
    run.says(GONE)
    new_request = renews.folder / f"{renews.name}.request"
    old_request = shutil.copy(new_request, tmp_path / "old.request")
    renewed = flwr_client("init", renews.folder, "--renew-key")
    assert renewed.code == 0, renewed.err
    trial.coordinator.admit(renews).connect()
    eventually(
        lambda: lines_of(out / "rounds.jsonl")[-1]["sites"] == [renews.name, stays.name],
        "it trains again",
        output=lambda: run.output + renews.program.output,
    )
    run.stop()
    (joined,) = [event for event in lines_of(out / "events.jsonl") if event["event"] == "joined"]
    assert joined["site"] == renews.name
    # The receipt of this run has replies that were signed with either key.
    rounds = len(lines_of(out / "rounds.jsonl")) + 1
    options = (f"run.rounds={rounds}", "participation.min_sites=1", SLOW)
    trial.coordinator.run(trial.experiment, out, *options, sites=2, options=["--resume"], once=True).succeeds()
    requests = [option for path in (old_request, new_request) for option in ("--request", path)]
    verified = flwr_server("verify", out, *requests)
    assert verified.code == 0, verified.out
    assert flwr_server("verify", out, *requests[2:]).code == 1  # the old key might be anybody's
    renews.end()
    own = flwr_client("audit", "verify", renews.folder, "--receipt", out / "receipt.json")
    assert own.code == 0, own.out
