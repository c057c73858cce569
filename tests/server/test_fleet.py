"""Every call of the hospital link, by the site it belongs to and by everybody else: over real sockets, TLS and keys.

The forger is an admitted site with a stub for all calls; the stranger has a fresh key; the nameless has none.
"""

import datetime as dt
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.fleet_protocol import Envelope
from polyclinic.common.wire.message_objects import encode_message_objects
from polyclinic.common.wire.versions import PRESENT_RELEASE, WIRE_VERSION, StatedRelease, make_release_header
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.coordinator.state import read_site_sign_offs
from polyclinic.server.deployment.superlink import messages
from polyclinic.server.deployment.superlink.authentication import (
    MAX_CLOCK_DIFFERENCE_S,
    MAX_KEY_CACHE_AGE_S,
    MAX_SIGNATURE_AGE_S,
    MIN_KEY_RELOAD_INTERVAL_S,
    CallingSite,
    CallSignatureVerifier,
    HospitalCallRefused,
    RegisteredSiteKeys,
    SignatureAudience,
)
from polyclinic.server.deployment.superlink.fleet_service import MAX_REASON_CHARACTERS, LatestProcessAdmission
from polyclinic.server.deployment.superlink.messages import StoredMessage
from polyclinic.server.deployment.superlink.refused_calls import REFUSED_CALLS_FILE
from polyclinic.server.deployment.superlink.registrations import RUN_HEARTBEAT_TIMEOUT_S, SiteConnectionState
from tests.fleet_stub import FleetStub, RegisterNodeRequest, UnregisterNodeRequest
from tests.network.real import lines_of
from tests.server.superlinks import DATABASE, INTERVAL_S, Hospital, Link, Port, announcement_of, named, refused
from tests.signing import PUBLIC_KEY, SIGNATURE, TIMESTAMP, authority_of, pem, signature_over

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
TOO_EARLY = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
def victim(port: Port) -> Hospital:
    return port.hospital("victim")


@pytest.fixture
def forger(port: Port) -> Hospital:
    return port.hospital("forger")


def refusals(port: Port) -> list[dict[str, Any]]:
    """Return the refused calls that the coordinator has noted."""
    path = port.link.folder / REFUSED_CALLS_FILE
    return lines_of(path) if path.exists() else []


def state_of(port: Port, site: Hospital) -> SiteConnectionState:
    registration = port.link.storage.sites.find_registered_site(site.node_id)
    assert registration is not None
    return registration.state


def reply_envelope(port: Port, name: str) -> Any:
    """Return the envelope of the reply to a message, as the run gets it."""
    (reply,) = port.link.storage.messages.find_replies(port.link.run, [name])
    assert isinstance(reply, StoredMessage)
    return Envelope.FromString(reply.envelope)


def answered(port: Port) -> list[int]:
    """Return the sites whose replies the run would get."""
    replies = port.link.storage.messages.find_replies(port.link.run, list(port.link.sent))
    return [reply.node for reply in replies if isinstance(reply, StoredMessage)]


def contents_of(message: Message) -> dict[str, bytes]:
    return encode_message_objects(message)[1]


# ---------------------------------------------------------------------- what an honest site does


def test_a_site_signs_on_gives_signs_of_life_and_signs_off(port: Port, victim: Hospital) -> None:
    assert victim.sign_on() == victim.node_id
    assert state_of(port, victim) == SiteConnectionState.CONNECTED
    assert victim.beat()
    assert read_site_sign_offs(port.link.folder) == {}
    victim.stub.DeactivateNode(fleet.DeactivateNodeRequest(node_id=victim.node_id))
    assert state_of(port, victim) == SiteConnectionState.SIGNED_OFF
    assert list(read_site_sign_offs(port.link.folder)) == ["victim"]
    victim.sign_on()
    assert read_site_sign_offs(port.link.folder) == {}


def test_a_site_that_falls_silent_is_lost_and_has_not_signed_off(port: Port, victim: Hospital) -> None:
    victim.sign_on()
    port.link.clock.now += 2 * INTERVAL_S + 1
    (site,) = port.link.restarted().sites.list_registered_sites()
    assert site.state == SiteConnectionState.LOST
    assert not port.link.storage.sites.is_site_connected(victim.node_id)
    victim.sign_on()
    assert port.link.storage.sites.is_site_connected(victim.node_id)


def test_a_file_that_appears_during_a_call_is_there_at_the_next(
    port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = port.hand(victim)
    view, looks = port.link.files.map_object_into_memory, iter([True])  # the first look comes before the file
    monkeypatch.setattr(
        port.link.files, "map_object_into_memory", lambda name: None if next(looks, False) else view(name)
    )
    first, second = victim.pull_object(name), victim.pull_object(name)
    assert (first.object_found, first.object_available, first.object_content) == (True, False, b"")
    assert second.object_available
    assert second.object_content == port.link.files.read_object(name) != b""


def test_a_site_pulls_its_message_and_sends_its_reply_and_both_lie_in_files(port: Port, victim: Hospital) -> None:
    name = port.ask(victim, "train well")
    assert victim.pull() == [name]
    answer = victim.pull_object(name)
    assert (answer.object_found, answer.object_available) == (True, True)
    assert answer.object_content == port.link.files.read_object(name)
    reply = victim.reply_to(name)
    victim.send(reply)
    assert reply_envelope(port, name).metadata.src_node_id == victim.node_id
    assert all(map(port.link.files.has_object, contents_of(reply)))
    for _ in range(2):
        victim.confirm(name)
        assert not port.link.files.has_object(name)
    assert refusals(port) == []


def test_of_the_same_reply_again_only_what_is_missing_is_sent(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    first = victim.announce(reply)
    assert reply_envelope(port, name)  # the run knows of it before it is whole
    assert set(victim.announce(reply).objects_to_push) == set(first.objects_to_push) != set()
    victim.send(reply)
    assert all(map(port.link.files.has_object, contents_of(reply)))
    assert list(victim.announce(reply).objects_to_push) == []
    assert refusals(port) == []


def test_content_of_another_hash_is_not_stored_and_the_right_one_may_still_come(port: Port, victim: Hospital) -> None:
    reply = victim.reply_to(port.hand(victim))
    session = victim.announce(reply).session_id
    part, right = next(iter(contents_of(reply).items()))
    for content in (b"another content", right):
        assert victim.push(part, content, session) == port.link.files.has_object(part) == (content == right)


def test_a_reply_that_is_not_whole_when_its_time_is_over_is_refused(port: Port, victim: Hospital) -> None:
    """The run waits no longer: a site that counted it would miss it in the receipt."""
    name = port.hand(victim)
    reply = victim.reply_to(name)
    session = victim.announce(reply).session_id
    first, last = list(contents_of(reply).items())[:2]
    assert victim.push(*first, session)
    while port.link.clock.now < port.link.sent[name].metadata.created_at + port.link.sent[name].metadata.ttl:
        port.link.clock.now += RUN_HEARTBEAT_TIMEOUT_S / 2
        assert port.link.storage.runs.record_run_heartbeat(port.link.run)
    assert not victim.push(*last, session)
    assert not port.link.files.has_object(last[0])


def test_nothing_is_handed_out_to_a_run_that_is_over(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    port.link.storage.messages.end_run(port.link.run)
    assert refused(victim.pull_object, name) == (DENIED, "Run is finished.")


def test_a_site_asks_only_about_runs_that_it_takes_part_in(port: Port, victim: Hospital, forger: Hospital) -> None:
    port.hand(victim)
    run = port.link.run
    assert victim.stub.GetRun(fleet.GetRunRequest(node=victim.node, run_id=run)).run.run_id == run
    assert refused(forger.stub.GetRun, fleet.GetRunRequest(node=forger.node, run_id=run))[0] == DENIED
    assert refused(forger.stub.GetFab, fleet.GetFabRequest(node=forger.node, run_id=run, hash_str=""))[0] == DENIED


def test_a_site_that_is_registered_now_is_let_in_soon_and_one_that_is_revoked_is_turned_out(port: Port) -> None:
    early = port.hospital("early")
    early.beat()
    late = port.hospital("late")
    time.sleep(MIN_KEY_RELOAD_INTERVAL_S)
    assert late.sign_on() == late.node_id
    port.link.storage.sites.unregister_site(early.node_id)
    time.sleep(MAX_KEY_CACHE_AGE_S)
    assert refused(early.beat)[0] == UNKNOWN


# ---------------------------------------------------------------------- who is let in at all


CALLS: dict[str, Callable[[Hospital, str], Any]] = {
    "ActivateNode": lambda target, name: fleet.ActivateNodeRequest(public_key=target.key, heartbeat_interval=30),
    "DeactivateNode": lambda target, name: fleet.DeactivateNodeRequest(node_id=target.node_id),
    "SendNodeHeartbeat": lambda target, name: fleet.SendNodeHeartbeatRequest(node=target.node, heartbeat_interval=30),
    "PullMessages": lambda target, name: fleet.PullMessagesRequest(node=target.node),
    "PushMessages": lambda target, name: fleet.PushMessagesRequest(node=target.node),
    "GetRun": lambda target, name: fleet.GetRunRequest(node=target.node, run_id=target.link.run),
    "GetFab": lambda target, name: fleet.GetFabRequest(node=target.node, run_id=target.link.run, hash_str=""),
    "PullObject": lambda target, name: fleet.PullObjectRequest(
        node=target.node, run_id=target.link.run, object_id=name
    ),
    "PushObject": lambda target, name: fleet.PushObjectRequest(
        node=target.node, run_id=target.link.run, object_id=name, object_content=b"x"
    ),
    "ConfirmMessageReceived": lambda target, name: fleet.ConfirmMessageReceivedRequest(
        node=target.node, run_id=target.link.run, message_object_id=name
    ),
    "RegisterNode": lambda target, name: RegisterNodeRequest(public_key=b"new"),
    "UnregisterNode": lambda target, name: UnregisterNodeRequest(node_id=target.node_id),
}
NOBODYS = ("RegisterNode", "UnregisterNode")
"""Calls that no site may make."""


def codes_of(caller: Hospital, target: Hospital, name: str) -> dict[str, grpc.StatusCode]:
    """Make every call in another site's name; return how each ends."""
    return {call: refused(getattr(caller.stub, call), request(target, name))[0] for call, request in CALLS.items()}


def test_every_call_in_anothers_name_is_refused_and_noted(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    codes = codes_of(forger, victim, name)
    assert {call for call, code in codes.items() if code not in (DENIED, UNKNOWN)} == set()
    noted = {line["call"]: (line["caller"], line["other"]) for line in refusals(port)}
    assert noted == dict.fromkeys(CALLS, ("forger", "victim")) | dict.fromkeys(NOBODYS, ("forger", ""))
    assert port.link.files.has_object(name)


def test_every_call_of_a_stranger_is_refused_and_writes_nothing(port: Port, victim: Hospital) -> None:
    for caller in (port.stranger(), replace(port.stranger(), channel=port.channel())):  # the second one is nameless
        assert codes_of(caller, victim, named(b"any")) == dict.fromkeys(CALLS, UNKNOWN)
    assert (state_of(port, victim), refusals(port)) == (SiteConnectionState.NEVER, [])


Headers = Sequence[tuple[str, Any]]


def headers(key: bytes, when: str, signature: bytes) -> Headers:
    return (PUBLIC_KEY, key), (TIMESTAMP, when), (SIGNATURE, signature)


class Signer:
    """Makes the headers of a call that is signed for one coordinator.

    Args:
        authority: Certificate of that coordinator's authority; None for a call that is signed for none.
    """

    def __init__(self, authority: bytes | None) -> None:
        self._end = "" if authority is None else f" {authority_of(authority)}"

    def over(self, key: ec.EllipticCurvePrivateKey, when: str) -> bytes:
        return signature_over(key, f"{when}{self._end}".encode())

    def __call__(self, key: ec.EllipticCurvePrivateKey, when: str) -> Headers:
        return headers(pem(key.public_key()), when, self.over(key, when))


def at(seconds: float) -> str:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)).isoformat()


OWN, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
SPOILT: dict[str, Callable[[Signer], Headers]] = {
    "of six minutes ago": lambda signed: signed(OWN, at(-360)),
    "of a minute ahead": lambda signed: signed(OWN, at(60)),
    "by another key": lambda signed: headers(pem(OWN.public_key()), at(0), signed.over(OTHER, at(0))),
    "of another time": lambda signed: headers(pem(OWN.public_key()), at(1), signed.over(OWN, at(0))),
    "without a zone": lambda signed: signed(OWN, dt.datetime.now().isoformat()),
    "no time at all": lambda signed: signed(OWN, "now"),
    "empty": lambda signed: headers(pem(OWN.public_key()), at(0), b""),
    "long": lambda signed: headers(pem(OWN.public_key()), at(0), b"\0" * 4000),
    "of a key that is none": lambda signed: headers(b"key", at(0), b"signature"),
    "with the key twice": lambda signed: (*signed(OWN, at(0)), (PUBLIC_KEY, pem(OTHER.public_key()))),
    "with the signature missing": lambda signed: signed(OWN, at(0))[:2],
}


def test_every_spoilt_signature_is_refused(port: Port, coordinator: CoordinatorFolder) -> None:
    key, signed = pem(OWN.public_key()), Signer(port.authority)
    port.link.storage.sites.register_site("own", key)
    request = fleet.ActivateNodeRequest(public_key=key, heartbeat_interval=INTERVAL_S)
    activate = FleetStub(port.channel()).ActivateNode
    codes = {kind: refused(activate, request, metadata=spoilt(signed))[0] for kind, spoilt in SPOILT.items()}
    assert codes == dict.fromkeys(SPOILT, UNKNOWN)
    elsewhere = Signer(coordinator.ca_certificate_path.read_bytes())
    assert refused(activate, request, metadata=elsewhere(OWN, at(0))) == (UNKNOWN, "Invalid signature")
    assert activate(request, metadata=signed(OWN, at(0))).node_id


def test_a_site_of_an_earlier_wire_version_is_taken_until_its_key_signs_for_this_coordinator(port: Port) -> None:
    """Another coordinator could repeat a call that is signed for none, even while the site itself is connected."""
    key, unnamed, naming = pem(OWN.public_key()), Signer(None), Signer(port.authority)
    node = port.link.storage.sites.register_site("own", key)
    beat, request = (
        FleetStub(port.channel()).SendNodeHeartbeat,
        fleet.SendNodeHeartbeatRequest(node=fleet.Node(node_id=node), heartbeat_interval=INTERVAL_S),
    )
    assert beat(request, metadata=unnamed(OWN, at(0))).success
    assert port.link.storage.sites.find_registered_site(node).stated == StatedRelease(16)  # type: ignore[union-attr]
    release = make_release_header(WIRE_VERSION)
    assert beat(request, metadata=(*naming(OWN, at(0)), release)).success
    assert port.link.storage.sites.find_registered_site(node).stated == PRESENT_RELEASE  # type: ignore[union-attr]
    code, reason = refused(beat, request, metadata=(*unnamed(OWN, at(0)), release))
    assert code == grpc.StatusCode.UNAVAILABLE  # at which a site tries again
    assert "own has just called by a later release; an earlier one is taken in 30" in reason


def test_a_site_may_go_back_to_an_earlier_release_once_its_last_headers_have_expired() -> None:
    now = 1000.0
    signatures = CallSignatureVerifier("authority", clock=lambda: now)
    signatures.refuse_replay_without_audience("own", b"key", SignatureAudience.THIS_COORDINATOR)
    now += MAX_SIGNATURE_AGE_S + MAX_CLOCK_DIFFERENCE_S - 1
    with pytest.raises(HospitalCallRefused):
        signatures.refuse_replay_without_audience("own", b"key", SignatureAudience.NO_COORDINATOR)
    signatures.refuse_replay_without_audience("other", b"other", SignatureAudience.NO_COORDINATOR)
    now += 1
    signatures.refuse_replay_without_audience("own", b"key", SignatureAudience.NO_COORDINATOR)


@pytest.mark.parametrize("age_s", [0.0, 60.0, 400 * 86_400.0])
@pytest.mark.parametrize("header", ["1 evil", "16 evil", "17 evil", "999999 evil"])
def test_a_repeated_hello_of_any_age_records_no_release(port: Port, age_s: float, header: str) -> None:
    """Another coordinator, which once said that it speaks wire version 16, has the headers of such calls."""
    node = port.link.storage.sites.register_site("own", pem(OWN.public_key()))
    request = fleet.ActivateNodeRequest(public_key=pem(OWN.public_key()), heartbeat_interval=INTERVAL_S)
    present = (*Signer(port.authority)(OWN, at(0)), make_release_header(WIRE_VERSION))
    assert FleetStub(port.channel()).ActivateNode(request, metadata=present).node_id == node
    hello = port.channel().unary_unary(f"/{fleet.HELLO_SERVICE}/{fleet.HELLO_METHOD}")
    repeated = (*Signer(None)(OWN, at(-age_s)), ("polyclinic-release", header))
    answer = fleet.HelloAnswer.model_validate_json(hello(b"", timeout=20, metadata=repeated))
    assert answer.key == "admitted"  # a site with a wrong clock has to learn this
    for sites in (port.link.storage.sites, port.link.restarted().sites):
        assert sites.find_registered_site(node).stated == PRESENT_RELEASE  # type: ignore[union-attr]


@pytest.mark.parametrize("call", ["ActivateNode", "SendNodeHeartbeat"])
def test_an_old_call_that_is_signed_for_no_coordinator_records_no_release(port: Port, call: str) -> None:
    node = port.link.storage.sites.register_site("own", pem(OWN.public_key()))
    requests = {
        "ActivateNode": fleet.ActivateNodeRequest(public_key=pem(OWN.public_key()), heartbeat_interval=INTERVAL_S),
        "SendNodeHeartbeat": fleet.SendNodeHeartbeatRequest(
            node=fleet.Node(node_id=node), heartbeat_interval=INTERVAL_S
        ),
    }
    repeated = (
        *Signer(None)(OWN, at(-MAX_SIGNATURE_AGE_S - MAX_CLOCK_DIFFERENCE_S - 1)),
        ("polyclinic-release", "16 evil"),
    )
    code, reason = refused(getattr(FleetStub(port.channel()), call), requests[call], metadata=repeated)
    assert (code, reason) == (UNKNOWN, "Invalid timestamp")
    assert port.link.storage.sites.find_registered_site(node).stated is None  # type: ignore[union-attr]


@pytest.mark.parametrize("wire", [0, 1, WIRE_VERSION - 2, WIRE_VERSION + 2, 999_999])
def test_a_wire_version_that_is_not_spoken_is_never_stored(link: Link, wire: int) -> None:
    node = link.storage.sites.register_site("own", b"key")
    link.storage.sites.record_site_release(node, StatedRelease(wire, "9.9.9"))
    assert link.storage.sites.find_registered_site(node).stated is None  # type: ignore[union-attr]
    assert link.restarted().sites.find_registered_site(node).stated is None  # type: ignore[union-attr]


def test_of_a_site_that_is_ahead_by_one_the_version_that_both_speak_is_stored(link: Link) -> None:
    node, ahead = link.storage.sites.register_site("own", b"key"), StatedRelease(WIRE_VERSION + 1, "9.9.9")
    link.storage.sites.record_site_release(node, ahead)
    assert link.storage.sites.find_registered_site(node).stated == ahead  # type: ignore[union-attr]
    stored = link.restarted().sites.find_registered_site(node).stated  # type: ignore[union-attr]
    assert stored == StatedRelease(WIRE_VERSION, "9.9.9")


@pytest.mark.parametrize("wire", [1, WIRE_VERSION - 2, WIRE_VERSION + 1])
def test_a_wire_version_that_another_release_has_stored_is_not_read(link: Link, wire: int) -> None:
    node = link.storage.sites.register_site("own", b"key")
    with sqlite3.connect(link.folder / DATABASE) as database:
        database.execute("INSERT OR REPLACE INTO releases VALUES (?, ?, ?)", (str(node), wire, "evil"))
    database.close()
    assert link.restarted().sites.find_registered_site(node).stated is None  # type: ignore[union-attr]


EVIL = "9: run curl evil.example"


@pytest.mark.parametrize("wire", [WIRE_VERSION - 1, WIRE_VERSION, WIRE_VERSION + 1])
def test_no_words_of_a_site_that_stand_for_its_release_are_stored(port: Port, wire: int) -> None:
    node = port.link.storage.sites.register_site("own", pem(OWN.public_key()))
    request = fleet.ActivateNodeRequest(public_key=pem(OWN.public_key()), heartbeat_interval=INTERVAL_S)
    signed = (*Signer(port.authority)(OWN, at(0)), ("polyclinic-release", f"{wire} {EVIL}"))
    assert FleetStub(port.channel()).ActivateNode(request, metadata=signed).node_id == node
    for sites in (port.link.storage.sites, port.link.restarted().sites):
        assert sites.find_registered_site(node).stated.release == "unknown"  # type: ignore[union-attr]


def test_no_words_of_a_site_that_another_release_has_stored_are_read(link: Link) -> None:
    node = link.storage.sites.register_site("own", b"key")
    with sqlite3.connect(link.folder / DATABASE) as database:
        database.execute("INSERT OR REPLACE INTO releases VALUES (?, ?, ?)", (str(node), WIRE_VERSION, EVIL))
    database.close()
    stored = link.restarted().sites.find_registered_site(node).stated  # type: ignore[union-attr]
    assert stored == StatedRelease(WIRE_VERSION, "unknown")


def test_a_refusal_repeats_no_words_of_a_site_that_stand_for_its_release(port: Port) -> None:
    port.link.storage.sites.register_site("own", pem(OWN.public_key()))
    request = fleet.ActivateNodeRequest(public_key=pem(OWN.public_key()), heartbeat_interval=INTERVAL_S)
    signed = (*Signer(port.authority)(OWN, at(0)), ("polyclinic-release", f"{WIRE_VERSION + 2} {EVIL}"))
    _, reason = refused(FleetStub(port.channel()).ActivateNode, request, metadata=signed)
    assert "own has release unknown" in reason
    assert "evil" not in reason + str(refusals(port))


@pytest.mark.parametrize("wire", [WIRE_VERSION - 2, WIRE_VERSION + 2])
def test_a_site_two_wire_versions_apart_is_refused_with_both_releases_and_recorded(port: Port, wire: int) -> None:
    key, stated = pem(OWN.public_key()), ("polyclinic-release", f"{wire} 9.9.9")
    port.link.storage.sites.register_site("own", key)
    signed = (*Signer(port.authority)(OWN, at(0)), stated)
    request = fleet.ActivateNodeRequest(public_key=key, heartbeat_interval=INTERVAL_S)
    code, reason = refused(FleetStub(port.channel()).ActivateNode, request, metadata=signed)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert f"own has release 9.9.9, which speaks wire version {wire}" in reason
    assert f"speaks {WIRE_VERSION} and {WIRE_VERSION - 1}" in reason
    (site,) = port.link.storage.sites.list_registered_sites()
    assert site.stated is None


# ---------------------------------------------------------------------- one process a site


def of(process: str) -> Headers:
    """Return the header by which a site's process tells itself from another."""
    return (("polyclinic-process", process),)


def test_a_process_that_takes_a_sites_place_is_the_only_one_that_is_answered(port: Port, victim: Hospital) -> None:
    victim.sign_on(metadata=of("first"))
    assert refused(victim.sign_on, metadata=of("second"))[0] == TOO_EARLY
    victim.pull(metadata=of("first"))  # an attempt takes nobody's place
    assert victim.beat(metadata=of("second"))
    for call in (victim.pull, victim.beat, victim.sign_on):
        code, reason = refused(call, metadata=of("first"))
        assert (code, "another process has signed on" in reason) == (UNKNOWN, True)
    victim.pull(metadata=of("second"))
    assert {line["caller"] for line in refusals(port)} == {"victim"}
    assert refused(victim.pull, metadata=of("x" * 65))[0] == UNKNOWN


def test_a_sign_of_life_that_arrives_after_the_sign_off_is_refused(port: Port, victim: Hospital) -> None:
    """A slow line delivers them in another order; the next process of this site is answered again."""
    victim.sign_on(metadata=of("first"))
    victim.stub.DeactivateNode(fleet.DeactivateNodeRequest(node_id=victim.node_id), metadata=of("first"))
    assert refused(victim.beat, metadata=of("first")) == (TOO_EARLY, "this process has signed off")
    assert state_of(port, victim) == SiteConnectionState.SIGNED_OFF
    victim.sign_on(metadata=of("second"))
    assert victim.beat(metadata=of("second"))


def test_a_site_that_restarts_for_ever_takes_no_memory() -> None:
    processes = LatestProcessAdmission()
    for number in range(1000):
        processes.register_latest_process(CallingSite(1, "north", b"", f"{number}"))
    with pytest.raises(HospitalCallRefused):
        processes.refuse_earlier_process(CallingSite(1, "north", b"", "998"))
    processes.refuse_earlier_process(CallingSite(1, "north", b"", "0"))  # forgotten by now


# ---------------------------------------------------------------------- replies


def test_a_forger_cannot_answer_another_sites_message(port: Port, victim: Hospital, forger: Hospital) -> None:
    name, own = port.hand(victim), port.hand(forger)
    waiting = port.ask(victim, "train again")  # its owner has not pulled it yet
    attempts = [
        forger.reply_to(name),
        forger.reply_to(name, source=victim.node_id),
        forger.reply_to(waiting),
        forger.reply_to(own, source=victim.node_id),
        forger.reply_to(own, source=1),
        forger.reply_to(named(b"no message")),
        forger.reply_to(""),
        forger.reply_to("", source=1, to=victim.node_id),  # an order, as the coordinator gives it
        forger.reply_to(own, to=victim.node_id),
    ]
    for attempt in attempts:
        assert refused(forger.announce, attempt)[0] == DENIED
        assert refused(forger.announce, attempt, victim.node_id)[0] == UNKNOWN
    assert (victim.pull(), victim.pull()) == ([waiting], [])
    for request in (name, waiting):
        victim.send(victim.reply_to(request))
    assert answered(port) == [victim.node_id] * 2
    assert {line["caller"] for line in refusals(port)} == {"forger"}


def test_a_second_reply_to_one_message_and_one_in_the_name_of_another_run_are_refused(
    port: Port, victim: Hospital
) -> None:
    name = port.hand(victim)
    victim.send(victim.reply_to(name, "first"))
    assert refused(victim.announce, victim.reply_to(name, "second"))[0] == grpc.StatusCode.ALREADY_EXISTS
    (line,) = refusals(port)
    assert (line["caller"], line["other"], line["call"]) == ("victim", "victim", "PushMessages")
    again, other = port.hand(victim, "again"), port.link.storage.runs.begin_run()
    assert refused(victim.announce, victim.reply_to(again, run=other))[0] == TOO_EARLY
    assert answered(port) == [victim.node_id]


def pushing(hospital: Hospital, reply: Message, tree: Any, name: str = "") -> Any:
    """Announce a reply with another tree, or under another name, than its content gives it."""
    proto = announcement_of(reply, name)
    return fleet.PushMessagesRequest(node=hospital.node, messages_list=[proto], message_object_trees=[tree])


def test_a_forger_cannot_give_its_reply_anothers_name(port: Port, victim: Hospital, forger: Hospital) -> None:
    name, own = port.hand(victim), port.hand(forger)
    theirs = victim.reply_to(name)
    victim.send(theirs)
    mine = forger.reply_to(own)
    request = pushing(forger, mine, encode_message_objects(theirs)[0], theirs.metadata.message_id)
    assert refused(forger.stub.PushMessages, request)[0] in (DENIED, grpc.StatusCode.ALREADY_EXISTS)
    assert answered(port) == [victim.node_id]


def test_a_tree_that_is_none_is_refused(port: Port, victim: Hospital) -> None:
    reply = victim.reply_to(port.hand(victim))
    trees = {
        "another root": (named(b"another root"), []),
        "a path": ("../superlink.db", []),
        "a path below": (reply.metadata.message_id, ["/etc/passwd"]),
        "endless": (reply.metadata.message_id, [named(b"%d" % n) for n in range(20_000)]),
    }
    for kind, (root, children) in trees.items():
        tree = fleet.ObjectTree(object_id=root, children=[fleet.ObjectTree(object_id=name) for name in children])
        assert refused(victim.stub.PushMessages, pushing(victim, reply, tree))[0] == DENIED, kind
    victim.send(reply)


def test_endless_words_of_an_error_are_cut_and_those_of_other_fields_are_refused(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    request = pushing(victim, reply, encode_message_objects(reply)[0])
    proto = request.messages_list[0]
    proto.metadata.group_id = "x" * 4_000_000
    assert refused(victim.stub.PushMessages, request)[0] == DENIED
    proto.ClearField("content")
    proto.metadata.group_id, proto.error.code, proto.error.reason = "1", 2, "x" * 4_000_000
    victim.stub.PushMessages(request)
    assert len(reply_envelope(port, name).error.reason) == MAX_REASON_CHARACTERS


def test_a_site_seems_to_be_there_for_two_minutes_at_most_after_its_last_sign(victim: Hospital) -> None:
    for call in (victim.sign_on, victim.beat):
        assert refused(call, 1800)[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_a_reply_cannot_fill_the_disk(port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SPARE_REPLY_BYTES", 3_000_000)
    reply = victim.reply_to(port.hand(victim))
    contents = [bytes([number]) * 1_000_000 for number in range(9)]
    tree = encode_message_objects(reply)[0]
    tree.children.extend(fleet.ObjectTree(object_id=named(content)) for content in contents)
    session = victim.stub.PushMessages(pushing(victim, reply, tree)).session_id
    assert [victim.push(named(content), content, session) for content in contents[:3]] == [True] * 3
    for content in contents[3:]:
        assert refused(victim.push, named(content), content, session)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sum(map(port.link.files.has_object, map(named, contents))) == 3


def test_a_fault_inside_is_told_to_no_caller(port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError("/secret/path is full")

    monkeypatch.setattr(port.link.storage.messages, "hand_out_next_request", broken)
    assert refused(victim.pull) == (grpc.StatusCode.INTERNAL, "the coordinator failed")


# ---------------------------------------------------------------------- small objects come with their message


def announced_with(hospital: Hospital, reply: Message, contents: list[bytes]) -> Any:
    """Announce a reply, with these contents along."""
    request = pushing(hospital, reply, encode_message_objects(reply)[0])
    request.small_contents.extend(contents)
    return hospital.stub.PushMessages(request)


def test_small_objects_come_with_the_message_and_large_ones_do_not(port: Port, victim: Hospital) -> None:
    small, large = port.ask(victim), port.ask(victim, "x" * fleet.MAX_SMALL_OBJECT_BYTES)
    for name in (small, large):
        answer = victim.stub.PullMessages(fleet.PullMessagesRequest(node=victim.node))
        along, objects = fleet.index_by_sha256(answer.small_contents), contents_of(port.link.sent[name])
        assert along == {part: body for part, body in objects.items() if len(body) <= fleet.MAX_SMALL_OBJECT_BYTES}
        assert (along == objects) == (name == small)


def test_the_small_objects_of_one_message_are_bounded_in_all() -> None:
    each, total = fleet.MAX_SMALL_OBJECT_BYTES, fleet.MAX_SMALL_OBJECTS_TOTAL_BYTES
    sizes = [(str(number), each) for number in range(10)]
    assert len(fleet.choose_small_objects(sizes)) == total // each < 10
    assert fleet.choose_small_objects([("empty", 0), ("large", each + 1), ("small", 1)]) == ["small"]


def test_a_reply_whose_objects_come_along_is_whole_at_once(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    contents = contents_of(reply)
    assert list(announced_with(victim, reply, list(contents.values())).objects_to_push) == []
    assert {part: port.link.files.read_object(part) for part in contents} == contents
    assert reply_envelope(port, name)


def test_other_contents_along_with_a_reply_are_not_written(port: Port, victim: Hospital, forger: Hospital) -> None:
    """Another site's object, and a changed one: neither fills a file, and the true one is still asked for."""
    theirs = victim.reply_to(port.hand(victim))
    victim.announce(theirs)
    foreign = contents_of(theirs)
    own = forger.reply_to(port.hand(forger), "my own")
    parts = contents_of(own)
    contents = [*foreign.values(), *(content + b"!" for content in parts.values())]
    assert set(announced_with(forger, own, contents).objects_to_push) == parts.keys()
    assert not any(map(port.link.files.has_object, (*parts, *foreign)))


def test_nothing_of_a_refused_reply_is_written(port: Port, victim: Hospital, forger: Hospital) -> None:
    def check_refused(sender: Hospital, more: bytes, lines: int) -> None:
        reply = sender.reply_to(name)
        parts = contents_of(reply)
        assert refused(announced_with, sender, reply, [*parts.values(), more])[0] == DENIED
        assert not any(map(port.link.files.has_object, parts))
        assert len(refusals(port)) == lines

    name = port.hand(victim)
    check_refused(forger, b"-", 1)  # to whom the message was not handed
    check_refused(victim, bytes(fleet.MAX_SMALL_OBJECTS_TOTAL_BYTES), 2)
    port.link.storage.messages.end_run(port.link.run)
    check_refused(victim, b"-", 2)


# ---------------------------------------------------------------------- objects


def test_objects_of_messages_and_replies_are_for_their_site(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    port.hand(forger, "another")
    assert all(victim.pull_object(part) for part in contents_of(port.link.sent[name]))
    reply = victim.reply_to(name)
    victim.send(reply)
    for part in (*contents_of(port.link.sent[name]), *contents_of(reply)):
        assert refused(forger.pull_object, part)[0] == DENIED


def test_a_forger_cannot_push_into_another_sites_reply_nor_confirm_its_message_or_reply(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    session = victim.announce(reply).session_id
    for part, content in contents_of(reply).items():
        assert refused(forger.push, part, content, session)[0] == DENIED
        assert not port.link.files.has_object(part)
    victim.send(reply)
    for message in (name, reply.metadata.message_id, next(iter(encode_message_objects(reply)[0].children)).object_id):
        assert refused(forger.confirm, message)[0] == DENIED
        assert port.link.files.has_object(message)


def test_no_name_leads_to_the_coordinators_other_files(port: Port, victim: Hospital) -> None:
    secret = port.link.folder / "authority.key"
    secret.write_bytes(b"secret")
    for name in ("../authority.key", str(secret), "", "\0"):
        codes = (refused(victim.pull_object, name)[0], refused(victim.push, name, b"new")[0])
        assert codes == (DENIED, DENIED), name
        victim.confirm(name)
        assert secret.read_bytes() == b"secret", name


# ---------------------------------------------------------------------- after a restart, and in bounds


def test_after_a_restart_a_message_is_its_sites_alone(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    victim.announce(reply)
    messages = port.link.restarted().messages
    assert messages.was_request_handed_out(victim.node_id, name)
    assert messages.find_accepted_reply_id(name) == reply.metadata.message_id
    assert all(messages.may_push_object(victim.node_id, part) for part in contents_of(reply))
    assert not any(messages.may_push_object(forger.node_id, part) for part in contents_of(reply))
    assert messages.may_pull_object(victim.node_id, name)
    assert not messages.may_pull_object(forger.node_id, name)
    assert messages.hand_out_next_request(victim.node_id) is None


def test_of_each_site_the_newest_messages_are_remembered_and_those_that_wait(
    port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FINISHED_MESSAGES", 4)
    names, stored = list[str](), port.link.storage.messages
    for number in range(4 + 5):
        names.append(port.hand(victim, f"train {number}"))
        stored.release_message_objects(names[-1])
    assert [name for name in names if not stored.may_pull_object(victim.node_id, name)] == names[:5]
    waiting = [port.ask(victim, f"wait {number}") for number in range(4 + 5)]
    assert [victim.pull() for _ in waiting] == [[name] for name in waiting]


def test_a_stranger_does_not_have_the_database_read_for_each_of_its_calls() -> None:
    looks = list[int]()

    def look() -> dict[bytes, CallingSite]:
        looks.append(1)
        return {}

    admitted = RegisteredSiteKeys(look)
    assert [admitted.find_caller_by_key(b"%d" % number) for number in range(1000)] == [None] * 1000
    assert len(looks) <= 3


def test_the_same_refusal_a_hundred_times_is_one_line(port: Port, victim: Hospital, forger: Hospital) -> None:
    for _ in range(100):
        refused(forger.stub.DeactivateNode, fleet.DeactivateNodeRequest(node_id=victim.node_id))
    assert len(refusals(port)) == 1
