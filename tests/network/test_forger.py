"""A forger among the hospitals while a run goes on: nothing of it counts, it is named, and the model is the same."""

import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub

from common.security.identity import read_connection_kit
from server.coordinator.admission import read_unrevoked_sites
from server.coordinator.folder import read_coordinator_folder
from server.deployment.superlink.control_client import SuperLinkControlClient, convert_openssh_key_to_pem
from server.deployment.superlink.refused_calls import PAUSE_S
from tests.network.federated import EVERYBODY, Federation, events
from tests.network.real import eventually, flwr_client, flwr_server
from tests.signing import SignsCalls

pytestmark = pytest.mark.slow


def nodes_of(federation: Federation) -> Path:
    """Every site's node and public key, which no hospital can list."""
    coordinator = read_coordinator_folder(federation.coordinator.folder)
    admitted = {
        convert_openssh_key_to_pem(site.public_key): site for site in read_unrevoked_sites(coordinator).values()
    }
    with closing(SuperLinkControlClient(coordinator)) as control:
        nodes = {admitted[node.public_key].site: node.node_id for node in control.list_registered_sites()}
    keys = {site.site: site.public_key for site in admitted.values()}
    path = federation.folder / "nodes.json"
    path.write_text(json.dumps({name: (node, keys[name]) for name, node in nodes.items()}), encoding="utf-8")
    return path


def test_a_forger_that_tries_every_call_changes_nothing_and_is_named(federation: Federation) -> None:
    out, forger = federation.folder / "forged.json", federation.south
    state = federation.coordinator.folder / "state"
    arguments = (forger.folder, forger.name, state / "superlink.db", nodes_of(federation), out)
    program = federation.machine.start("forger", "-m", "tests.network.forger", *arguments)
    eventually(out.exists, "the forger is at work")
    begun = time.monotonic()
    run = federation.run("training.epochs=2", once=True)
    federation.ends_unharmed(run, 2, "training.epochs=2")
    program.stop()
    pairs = [name.rsplit(" ", 1) for name in json.loads(out.read_text(encoding="utf-8"))]
    kinds = "activate deactivate heartbeat pull unregister register order reply read write confirm run bundle"
    assert {kind for kind, _ in pairs} == {*kinds.split(), "error reply"}
    assert {status for _, status in pairs} <= {"PERMISSION_DENIED", "UNAUTHENTICATED"}
    refused = events(federation.out, "refused_call")
    assert {event["caller"] for event in refused} == {"south"}
    assert {event["other"] for event in refused} >= {"east", "north"}
    repeated = Counter(tuple(event[key] for key in ("caller", "call", "reason", "other")) for event in refused)
    assert max(repeated.values()) <= (time.monotonic() - begun) / PAUSE_S + 2
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
        "import sys; from server.deployment.superlink.request_signing import RequestSigner; "
        "RequestSigner.sign = lambda self, message: None; "
        "from server.cli import main; main(sys.argv[1:])"
    )
    command = ("run", federation.coordinator.folder, federation.experiment, "--out", federation.out, "--once")
    run = federation.coordinator.lead("-c", unsigned, *command)
    assert run.ends() == 1
    assert "the coordinator did not sign this request for this site: it is not signed" in run.output
    shown = flwr_client("audit", "show", federation.east.folder, "--json", "--tail", 1)
    entry = json.loads(shown.out.splitlines()[-1])
    assert (entry["direction"], entry["decision"], entry["rule"]) == ("in", "deny", "signature")
    assert all(site.program.runs for site in federation.sites)


def test_a_stranger_does_not_keep_an_admitted_site_out(federation: Federation) -> None:
    """What signed a site on for an hour at the first release: its public key and any key of one's own."""
    victim = federation.east
    federation.stop(victim)
    kit, key = read_connection_kit(victim.kit), ec.generate_private_key(ec.SECP256R1())
    request = ActivateNodeRequest(public_key=convert_openssh_key_to_pem(kit.public_key), heartbeat_interval=1800)
    with grpc.secure_channel(kit.address, grpc.ssl_channel_credentials(kit.ca_certificate.encode())) as channel:
        stub = FleetStub(grpc.intercept_channel(channel, SignsCalls(key, key.public_key())))
        with pytest.raises(grpc.RpcError) as refused:
            stub.ActivateNode(request, timeout=20)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    time.sleep(1)
    assert federation.coordinator.now["sites"]["east"]["state"] != "connected"
    victim.start()
    federation.coordinator.sees(victim)
