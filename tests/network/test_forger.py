"""A forger among the hospitals while a run goes on: nothing of it counts, it is named, and the model is the same."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import grpc
import pytest

from polyclinic.common.security.identity import read_connection_kit, read_private_key
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.server.coordinator.folder import read_coordinator_folder
from polyclinic.server.deployment.superlink.control_client import SuperLinkControlClient
from polyclinic.server.deployment.superlink.refused_calls import REPEAT_INTERVAL_S
from polyclinic.server.deployment.superlink.registrations import RegisteredSite
from tests.fleet_stub import FleetStub, UnregisterNodeRequest
from tests.network.federated import EVERYBODY, SLOW, Federation, events
from tests.network.real import flwr_client, flwr_server
from tests.signing import SignsCalls

pytestmark = pytest.mark.slow


def calls_in_the_name_of(site: RegisteredSite, stub: FleetStub) -> list[tuple[Callable[..., Any], Any]]:
    """What a site does with its own node; tests/server/test_fleet.py has every call, and those about a message."""
    node = fleet.Node(node_id=site.node_id)
    return [
        (stub.ActivateNode, fleet.ActivateNodeRequest(public_key=site.public_key, heartbeat_interval=1800)),
        (stub.SendNodeHeartbeat, fleet.SendNodeHeartbeatRequest(node=node, heartbeat_interval=1800)),
        (stub.PullMessages, fleet.PullMessagesRequest(node=node)),
        (stub.PushMessages, fleet.PushMessagesRequest(node=node)),
        (stub.DeactivateNode, fleet.DeactivateNodeRequest(node_id=site.node_id)),
        (stub.UnregisterNode, UnregisterNodeRequest(node_id=site.node_id)),
    ]


def test_a_forger_that_calls_in_others_names_all_through_a_run_changes_nothing_and_is_named(
    federation: Federation,
) -> None:
    kit = read_connection_kit(federation.south.kit)
    key = read_private_key(federation.south.folder / "south.key")
    with closing(SuperLinkControlClient(read_coordinator_folder(federation.coordinator.folder))) as control:
        victims = [site for site in control.list_registered_sites() if site.name in ("east", "north")]
    credentials = grpc.ssl_channel_credentials(kit.ca_certificate.encode())
    begun, statuses = time.monotonic(), set[grpc.StatusCode]()
    signs = SignsCalls(key, key.public_key(), kit.ca_certificate.encode())
    with grpc.secure_channel(kit.address, credentials) as channel:
        stub = FleetStub(grpc.intercept_channel(channel, signs))
        run = federation.run(SLOW, once=True)
        federation.north.works_on("train", 1)  # so that the first refusals, which are written at once, are of this run
        while run.runs:
            for call, request in itertools.chain(*(calls_in_the_name_of(victim, stub) for victim in victims)):
                with pytest.raises(grpc.RpcError) as refusal:
                    call(request, timeout=20)
                statuses.add(refusal.value.code())
            time.sleep(0.05)
    federation.ends_unharmed(run, 2, SLOW)
    assert statuses <= {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
    refused = events(federation.out, "refused_call")
    assert {event["caller"] for event in refused} == {"south"}
    assert {event["other"] for event in refused} >= {"east", "north"}
    repeated = Counter(tuple(event[key] for key in ("caller", "call", "reason", "other")) for event in refused)
    assert max(repeated.values()) <= (time.monotonic() - begun) / REPEAT_INTERVAL_S + 2
    verified = flwr_server("verify", federation.out)
    assert verified.code == 0, verified.out
    assert "each signed by its site" in verified.out
    for site in federation.sites:
        checked = flwr_client("audit", "verify", site.folder, "--receipt", federation.out / "receipt.json")
        assert checked.code == 0, checked.out
        assert "each signed by the coordinator." in checked.out


def test_signatures_are_in_the_receipt_and_a_reply_that_is_removed_is_missed(federation: Federation) -> None:
    federation.run("run.rounds=3", once=True).succeeds()
    path = federation.out / "receipt.json"
    receipt = json.loads(path.read_text(encoding="utf-8"))
    replies = {(reply["site"], reply["record"], reply["round"]): reply for reply in receipt["replies"]}
    expected = [("RollCallAnswer", 0), *(("TrainReply", n) for n in (1, 2, 3)), *[("EvaluateReply", 3)] * 2]
    for site in EVERYBODY:
        own = [(reply["record"], reply["round"]) for reply in receipt["replies"] if reply["site"] == site]
        assert own == expected
    receipt["replies"].remove(replies["north", "TrainReply", 2])
    path.write_text(json.dumps(receipt), encoding="utf-8")
    verified = flwr_server("verify", federation.out)
    assert verified.code == 1
    assert "1 reply of north (number 3 by its own count)" in verified.out
    receipt["replies"] = [reply for reply in receipt["replies"] if reply["record"] != "EvaluateReply"]
    path.write_text(json.dumps(receipt), encoding="utf-8")
    checked = flwr_client("audit", "verify", federation.east.folder, "--receipt", path)
    assert checked.code == 1
    assert "2 replies of east (number 5, 6 by its own count)" in " ".join(checked.out.split())


def test_a_request_that_is_not_signed_is_refused_and_can_be_shown(federation: Federation) -> None:
    """A SuperLink, or anyone who has its disk, that makes requests up: the run's own signing is switched off."""
    unsigned = (
        "import sys; from polyclinic.server.deployment.superlink.request_signing import RequestSigner; "
        "RequestSigner.sign_request = lambda self, message: None; "
        "from polyclinic.server.cli import main; main(sys.argv[1:])"
    )
    command = ("run", federation.coordinator.folder, federation.experiment, "--out", federation.out, "--once")
    run = federation.coordinator.lead("-c", unsigned, *command)
    assert run.ends() == 1
    assert "the coordinator did not sign this request for this site: it is not signed" in run.output
    shown = flwr_client("audit", "show", federation.east.folder, "--json", "--tail", 1)
    entry = json.loads(shown.out.splitlines()[-1])
    assert (entry["direction"], entry["decision"], entry["rule"]) == ("in", "deny", "signature")
    assert all(site.program.runs for site in federation.sites)
