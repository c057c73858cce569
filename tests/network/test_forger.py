"""A forger among the hospitals while a run goes on: nothing of it counts, it is named, and the model is the same."""

import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from server.coordinator.admission import unrevoked_sites
from server.coordinator.folder import read_coordinator
from server.deployment.superlink.control_client import ControlClient, openssh_key_to_pem
from server.deployment.superlink.refused_calls import PAUSE_S
from tests.network.federated import Federation, events, hash_in, sites_by_round, undisturbed
from tests.network.real import eventually, flwr_client, flwr_server

pytestmark = pytest.mark.slow


def nodes_of(federation: Federation, path: Path) -> Path:
    """Every site's node and public key, which no hospital can list."""
    coordinator = read_coordinator(federation.coordinator.folder)
    admitted = {openssh_key_to_pem(site.public_key): site for site in unrevoked_sites(coordinator).values()}
    with closing(ControlClient(coordinator)) as control:
        nodes = {admitted[node.public_key].site: node.node_id for node in control.nodes()}
    keys = {site.site: site.public_key for site in admitted.values()}
    path.write_text(json.dumps({name: (node, keys[name]) for name, node in nodes.items()}), encoding="utf-8")
    return path


def test_a_forger_that_tries_every_call_all_the_time_changes_nothing_and_is_named(
    federation: Federation, tmp_path: Path
) -> None:
    out, forger = tmp_path / "forged.json", federation.south
    state = federation.coordinator.folder / "state"
    arguments = (forger.folder, forger.name, state / "superlink.db", nodes_of(federation, tmp_path / "nodes.json"), out)
    program = federation.machine.start("forger", "-m", "tests.network.forger", *arguments)
    eventually(out.exists, "the forger is at work")
    begun = time.monotonic()
    run = federation.run(tmp_path / "run", "training.epochs=2", once=True)
    assert run.ends() == 0, run.said
    program.stop()
    ended = json.loads(out.read_text(encoding="utf-8"))
    kinds = {name.rsplit(" ", 1)[0] for name in ended}
    assert kinds == {
        "activate", "deactivate", "heartbeat", "pull", "unregister", "register", "order",
        "reply", "error reply", "read", "write", "confirm", "run", "bundle",
    }  # fmt: skip
    assert [name for name in ended if name.endswith(" OK")] == []
    assert {name.rsplit(" ", 1)[1] for name in ended} <= {"PERMISSION_DENIED", "UNAUTHENTICATED"}
    assert sites_by_round(tmp_path / "run") == [["east", "north", "south"]] * len(sites_by_round(tmp_path / "run"))
    assert hash_in(tmp_path / "run") == undisturbed(federation.experiment, tmp_path / "alone", "training.epochs=2")
    told = events(tmp_path / "run", "refused_call")
    assert {one["caller"] for one in told} == {"south"}
    assert {one["other"] for one in told} >= {"east", "north"}
    kinds_of_refusals = Counter((one["caller"], one["call"], one["reason"], one["other"]) for one in told)
    assert max(kinds_of_refusals.values()) <= (time.monotonic() - begun) / PAUSE_S + 2
    verified = flwr_server("verify", tmp_path / "run")
    assert verified.code == 0, verified.out
    assert "each signed by its site" in verified.out
    for site in federation.sites:
        checked = flwr_client("audit", "verify", site.folder, "--receipt", tmp_path / "run" / "receipt.json")
        assert checked.code == 0, checked.out
        assert "requests in this audit, of all runs, each signed by the coordinator." in checked.out


def test_a_hospitals_signatures_are_in_the_receipt_and_a_reply_that_is_taken_out_is_missed(
    federation: Federation, tmp_path: Path
) -> None:
    run = federation.run(tmp_path / "run", "run.rounds=3", once=True)
    assert run.ends() == 0, run.said
    path = tmp_path / "run" / "receipt.json"
    receipt = json.loads(path.read_text(encoding="utf-8"))
    replies = [(one["site"], one["record"], one["round"]) for one in receipt["replies"]]
    expected = [("RollCallAnswer", 0), *(("TrainReply", n) for n in (1, 2, 3)), *[("EvaluateReply", 3)] * 2]
    for site in ("east", "north", "south"):
        assert [(record, n) for name, record, n in replies if name == site] == expected
    receipt["replies"] = [
        one for one in receipt["replies"] if (one["site"], one["record"], one["round"]) != ("north", "TrainReply", 2)
    ]
    path.write_text(json.dumps(receipt), encoding="utf-8")
    found = flwr_server("verify", tmp_path / "run")
    assert found.code == 1
    assert "receipt.json: north: 1 reply of north (number 3 by its own count)" in found.out
    receipt["replies"] = [one for one in receipt["replies"] if one["record"] != "EvaluateReply"]
    path.write_text(json.dumps(receipt), encoding="utf-8")
    checked = flwr_client("audit", "verify", federation.east.folder, "--receipt", path)
    assert checked.code == 1
    assert "2 replies of east (number 5, 6 by its own count)" in " ".join(checked.out.split())


def test_a_request_that_the_coordinator_did_not_sign_is_refused_and_can_be_shown(
    federation: Federation, tmp_path: Path
) -> None:
    """A SuperLink, or anyone who has its disk, that makes requests up: the run's own signing is switched off."""
    unsigned = (
        "import sys; from server.deployment.superlink.request_signing import RequestSigner; "
        "RequestSigner.sign = lambda self, message: None; "
        "from server.cli import main; main(sys.argv[1:])"
    )
    command = ("run", federation.coordinator.folder, federation.experiment, "--out", tmp_path / "run", "--once")
    run = federation.coordinator.lead("-c", unsigned, *command)
    assert run.ends() == 1
    reason = "the coordinator did not sign this request for this site: it is not signed"
    assert reason in run.said
    shown = flwr_client("audit", "show", federation.east.folder, "--json", "--tail", 1)
    entry = json.loads(shown.out.splitlines()[-1])
    assert (entry["direction"], entry["decision"], entry["rule"]) == ("in", "deny", "signature")
    assert all(site.program.runs for site in federation.sites)


def test_a_stranger_does_not_keep_an_admitted_site_out(federation: Federation, tmp_path: Path) -> None:
    """What signed a site on for an hour at the first release: its public key and any key of one's own."""
    victim = federation.east
    victim.program.stop()
    federation.coordinator.sees(victim, state="stopped")
    code = (
        "import sys, grpc, pathlib\n"
        "from cryptography.hazmat.primitives.asymmetric import ec\n"
        "from tests.signing import SignsCalls\n"
        "from flwr.proto.fleet_pb2 import ActivateNodeRequest\n"
        "from flwr.proto.fleet_pb2_grpc import FleetStub\n"
        "from common.security.identity import read_kit\n"
        "from server.deployment.superlink.control_client import openssh_key_to_pem\n"
        "kit = read_kit(pathlib.Path(sys.argv[1]))\n"
        "key = ec.generate_private_key(ec.SECP256R1())\n"
        "channel = grpc.secure_channel(kit.address, grpc.ssl_channel_credentials(kit.ca_certificate.encode()))\n"
        "stub = FleetStub(grpc.intercept_channel(channel, SignsCalls(key, key.public_key())))\n"
        "request = ActivateNodeRequest(public_key=openssh_key_to_pem(kit.public_key), heartbeat_interval=1800)\n"
        "try:\n    print(stub.ActivateNode(request))\nexcept grpc.RpcError as error:\n    print(error.code())\n"
    )
    program = federation.machine.start("stranger", "-c", code, victim.kit)
    assert program.ends() == 0
    assert "UNAUTHENTICATED" in program.said
    time.sleep(1)
    assert federation.coordinator.now["sites"]["east"]["state"] != "connected"
    victim.start()
    federation.coordinator.sees(victim)
