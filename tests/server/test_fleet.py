"""Every call of the hospital link, by the site it belongs to and by everybody else: over real sockets, TLS and keys.

The forger is an admitted site with Flower's own stub; the stranger has a fresh key; the nameless has none.
"""

import datetime as dt
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from common.wire import fleet_protocol
from common.wire.fleet_protocol import Envelope
from server.coordinator.state import read_sign_offs
from server.deployment.superlink import messages
from server.deployment.superlink.authentication import FRESH_S, REFRESH_S, AdmittedKeys, Caller, CallRefused
from server.deployment.superlink.fleet_service import LONGEST_REASON, SiteProcesses
from server.deployment.superlink.messages import MOST_MESSAGES, StoredMessage
from server.deployment.superlink.refused_calls import FILE
from server.deployment.superlink.registrations import RUN_SILENT_S, Presence
from tests.server.superlinks import Hospital, Link, Port, named
from tests.signing import pem, signature_over

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
INTERVAL = 30.0


@pytest.fixture
def victim(port: Port) -> Hospital:
    return port.hospital("victim")


@pytest.fixture
def forger(port: Port) -> Hospital:
    return port.hospital("forger")


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details() or ""


def noted(link: Link) -> list[dict[str, Any]]:
    path = link.folder / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def online(link: Link, hospital: Hospital) -> bool:
    return link.storage.sites.is_connected(hospital.node_id)


def came_to(link: Link, name: str) -> StoredMessage | None:
    """The reply to a message, as the run gets it."""
    (found,) = link.storage.messages.replies(link.run, [name]) or (None,)
    return found if isinstance(found, StoredMessage) else None


def said_of(message: StoredMessage | None) -> Any:
    """What stands on a message's envelope."""
    assert message
    return Envelope.FromString(message.envelope)


# ---------------------------------------------------------------------- what an honest site does


def test_a_site_signs_on_gives_signs_of_life_and_signs_off(port: Port, victim: Hospital) -> None:
    answer = victim.stub.ActivateNode(ActivateNodeRequest(public_key=victim.key, heartbeat_interval=INTERVAL))
    assert answer.node_id == victim.node_id
    assert online(port.link, victim)
    beat = SendNodeHeartbeatRequest(node=victim.node, heartbeat_interval=INTERVAL)
    assert victim.stub.SendNodeHeartbeat(beat).success
    assert read_sign_offs(port.link.folder) == {}
    victim.stub.DeactivateNode(DeactivateNodeRequest(node_id=victim.node_id))
    assert not online(port.link, victim)
    (site,) = port.link.storage.sites.all()
    assert site.state == Presence.SIGNED_OFF
    assert list(read_sign_offs(port.link.folder)) == ["victim"]
    victim.stub.ActivateNode(ActivateNodeRequest(public_key=victim.key, heartbeat_interval=INTERVAL))
    assert read_sign_offs(port.link.folder) == {}


def test_a_site_that_falls_silent_is_lost_and_has_not_signed_off(port: Port, victim: Hospital) -> None:
    victim.stub.ActivateNode(ActivateNodeRequest(public_key=victim.key, heartbeat_interval=INTERVAL))
    port.link.clock.now += 2 * INTERVAL + 1
    (site,) = port.link.restarted().sites.all()
    assert site.state == Presence.LOST
    assert not online(port.link, victim)
    victim.stub.ActivateNode(ActivateNodeRequest(public_key=victim.key, heartbeat_interval=INTERVAL))
    assert online(port.link, victim)


def test_an_object_whose_file_appears_while_it_is_asked_for_is_there_at_the_next_look(
    port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = port.hand(victim)
    view, looks = port.link.files.view, iter([True])  # the first look comes before the file
    monkeypatch.setattr(port.link.files, "view", lambda name: None if next(looks, False) else view(name))
    request = PullObjectRequest(node=victim.node, run_id=port.link.run, object_id=name)
    first, second = victim.stub.PullObject(request), victim.stub.PullObject(request)
    assert (first.object_found, first.object_available, first.object_content) == (True, False, b"")
    assert second.object_available
    assert second.object_content == port.link.files.read(name) != b""


def test_a_site_pulls_its_message_and_sends_its_reply_and_both_lie_in_files(port: Port, victim: Hospital) -> None:
    name = port.ask(victim, "train well")
    pulled, _ = victim.pull()
    assert pulled == name
    request = PullObjectRequest(node=victim.node, run_id=port.link.run, object_id=name)
    answer = victim.stub.PullObject(request)
    assert (answer.object_found, answer.object_available) == (True, True)
    assert answer.object_content == port.link.files.read(name)
    reply = victim.reply_to(name)
    victim.send(reply)
    assert said_of(came_to(port.link, name)).metadata.src_node_id == victim.node_id
    assert all(port.link.files.has(part) for part in get_all_nested_objects(reply))
    confirm = ConfirmMessageReceivedRequest(node=victim.node, run_id=port.link.run, message_object_id=name)
    victim.stub.ConfirmMessageReceived(confirm)
    assert not port.link.files.has(name)
    victim.stub.ConfirmMessageReceived(confirm)  # said twice
    assert noted(port.link) == []


def test_the_same_reply_again_is_the_same_reply(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    first = victim.announce(reply)
    assert set(victim.announce(reply).objects_to_push) == set(first.objects_to_push) != set()
    victim.send(reply)
    assert list(victim.announce(reply).objects_to_push) == []
    assert noted(port.link) == []


def test_a_site_that_lost_the_line_while_the_run_knew_of_its_reply_sends_what_is_missing(
    port: Port, victim: Hospital
) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    victim.announce(reply)
    assert came_to(port.link, name)
    victim.send(reply)
    assert all(port.link.files.has(part) for part in get_all_nested_objects(reply))


def test_content_of_another_hash_is_not_kept_and_the_right_one_may_still_come(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    session = victim.announce(reply).session_id
    part, content = next(iter(get_all_nested_objects(reply).items()))
    assert not victim.push(part, b"another content", session)
    assert not port.link.files.has(part)
    assert victim.push(part, content.deflate(), session)
    assert port.link.files.has(part)


def test_a_reply_that_is_not_whole_when_its_time_is_over_is_not_taken(port: Port, victim: Hospital) -> None:
    """The run waits no longer: a site that counted it would miss it in the receipt."""
    name = port.hand(victim)
    reply = victim.reply_to(name)
    session = victim.announce(reply).session_id
    first, last = list(get_all_nested_objects(reply).items())[:2]
    assert victim.push(first[0], first[1].deflate(), session)
    while port.link.clock.now < port.link.sent[name].metadata.created_at + port.link.sent[name].metadata.ttl:
        port.link.clock.now += RUN_SILENT_S / 2
        assert port.link.storage.runs.heartbeat(port.link.run)
    assert not victim.push(last[0], last[1].deflate(), session)
    assert not port.link.files.has(last[0])


def test_nothing_is_handed_out_to_a_run_that_is_over(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    port.link.storage.messages.end(port.link.run)
    request = PullObjectRequest(node=victim.node, run_id=port.link.run, object_id=name)
    assert refused(lambda: victim.stub.PullObject(request)) == (DENIED, "Run is finished.")


def test_a_site_learns_of_its_run_and_its_bundle(port: Port, victim: Hospital) -> None:
    port.hand(victim)
    run = victim.stub.GetRun(GetRunRequest(node=victim.node, run_id=port.link.run)).run
    assert run.run_id == port.link.run


def test_a_site_that_is_registered_now_is_let_in_soon_and_one_that_is_revoked_is_turned_out(port: Port) -> None:
    early = port.hospital("early")
    beat = SendNodeHeartbeatRequest(node=early.node, heartbeat_interval=INTERVAL)
    early.stub.SendNodeHeartbeat(beat)
    late = port.hospital("late")
    time.sleep(REFRESH_S)
    activation = ActivateNodeRequest(public_key=late.key, heartbeat_interval=INTERVAL)
    assert late.stub.ActivateNode(activation).node_id == late.node_id
    port.link.storage.sites.unregister(early.node_id)
    time.sleep(FRESH_S)
    assert refused(lambda: early.stub.SendNodeHeartbeat(beat))[0] == UNKNOWN


# ---------------------------------------------------------------------- who is let in at all


CALLS: dict[str, Callable[[Hospital, Hospital, str], Any]] = {
    "ActivateNode": lambda caller, target, name: ActivateNodeRequest(public_key=target.key, heartbeat_interval=30),
    "DeactivateNode": lambda caller, target, name: DeactivateNodeRequest(node_id=target.node_id),
    "SendNodeHeartbeat": lambda caller, target, name: SendNodeHeartbeatRequest(node=target.node, heartbeat_interval=30),
    "PullMessages": lambda caller, target, name: PullMessagesRequest(node=target.node),
    "PushMessages": lambda caller, target, name: PushMessagesRequest(node=target.node),
    "GetRun": lambda caller, target, name: GetRunRequest(node=target.node, run_id=target.link.run),
    "GetFab": lambda caller, target, name: GetFabRequest(node=target.node, run_id=target.link.run, hash_str=""),
    "PullObject": lambda caller, target, name: PullObjectRequest(
        node=target.node, run_id=target.link.run, object_id=name
    ),
    "PushObject": lambda caller, target, name: PushObjectRequest(
        node=target.node, run_id=target.link.run, object_id=name, object_content=b"x"
    ),
    "ConfirmMessageReceived": lambda caller, target, name: ConfirmMessageReceivedRequest(
        node=target.node, run_id=target.link.run, message_object_id=name
    ),
    "RegisterNode": lambda caller, target, name: RegisterNodeFleetRequest(public_key=b"new"),
    "UnregisterNode": lambda caller, target, name: UnregisterNodeFleetRequest(node_id=target.node_id),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_another_sites_name_is_refused_and_noted_with_both_names(
    call: str, port: Port, victim: Hospital, forger: Hospital
) -> None:
    name = port.hand(victim)
    request = CALLS[call](forger, victim, name)
    code, _ = refused(lambda: getattr(forger.stub, call)(request))
    assert code in (DENIED, UNKNOWN)
    (line,) = noted(port.link)
    assert (line["caller"], line["call"]) == ("forger", call)
    assert line["other"] == ("" if call in ("RegisterNode", "UnregisterNode") else "victim")
    assert port.link.files.has(name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("who", ["stranger", "nameless"])
def test_a_call_by_nobody_who_is_admitted_is_refused_and_writes_nothing(
    call: str, who: str, port: Port, victim: Hospital
) -> None:
    caller = port.stranger() if who == "stranger" else replace(port.stranger(), stub=port.stub())
    code, _ = refused(lambda: getattr(caller.stub, call)(CALLS[call](caller, victim, named(b"any"))))
    assert code == UNKNOWN
    assert not online(port.link, victim)
    assert noted(port.link) == []


Headers = Sequence[tuple[str, Any]]


def headers(key: bytes, when: str, signature: bytes) -> Headers:
    return (PUBLIC_KEY_HEADER, key), (TIMESTAMP_HEADER, when), (SIGNATURE_HEADER, signature)


def signed(key: ec.EllipticCurvePrivateKey, when: str) -> Headers:
    return headers(pem(key.public_key()), when, signature_over(key, when.encode()))


def at(seconds: float) -> str:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)).isoformat()


OWN, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
SPOILT: dict[str, Callable[[], Headers]] = {
    "of six minutes ago": lambda: signed(OWN, at(-360)),
    "of a minute ahead": lambda: signed(OWN, at(60)),
    "by another key": lambda: headers(pem(OWN.public_key()), at(0), signature_over(OTHER, at(0).encode())),
    "of another time": lambda: headers(pem(OWN.public_key()), at(1), signature_over(OWN, at(0).encode())),
    "without a zone": lambda: signed(OWN, dt.datetime.now().isoformat()),
    "no time at all": lambda: signed(OWN, "now"),
    "empty": lambda: headers(pem(OWN.public_key()), at(0), b""),
    "long": lambda: headers(pem(OWN.public_key()), at(0), b"\0" * 4000),
    "of a key that is none": lambda: headers(b"key", at(0), b"signature"),
    "with the key twice": lambda: (*signed(OWN, at(0)), (PUBLIC_KEY_HEADER, pem(OTHER.public_key()))),
    "with the signature missing": lambda: signed(OWN, at(0))[:2],
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_signature_is_refused(kind: str, port: Port) -> None:
    key = pem(OWN.public_key())
    port.link.storage.sites.register("own", key)
    request = ActivateNodeRequest(public_key=key, heartbeat_interval=INTERVAL)
    assert refused(lambda: port.stub().ActivateNode(request, metadata=SPOILT[kind]()))[0] == UNKNOWN
    assert port.stub().ActivateNode(request, metadata=signed(OWN, at(0))).node_id


# ---------------------------------------------------------------------- one process a site


def by(process: str) -> Headers:
    """Signed by our key, in this process of the site."""
    return (*signed(OWN, at(0)), ("polyclinic-process", process))


def test_a_process_that_takes_a_sites_place_is_the_only_one_that_is_answered(port: Port) -> None:
    key = pem(OWN.public_key())
    node = port.link.storage.sites.register("own", key)
    first, second = port.stub(), port.stub()

    request = ActivateNodeRequest(public_key=key, heartbeat_interval=INTERVAL)
    beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=INTERVAL)
    pull = PullMessagesRequest(node=Node(node_id=node))
    first.ActivateNode(request, metadata=by("first"))
    code, _ = refused(lambda: second.ActivateNode(request, metadata=by("second")))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    first.PullMessages(pull, metadata=by("first"))  # an attempt takes nobody's place
    assert second.SendNodeHeartbeat(beat, metadata=by("second")).success
    for call, message in ((first.PullMessages, pull), (first.SendNodeHeartbeat, beat), (first.ActivateNode, request)):
        code, reason = refused(lambda call=call, message=message: call(message, metadata=by("first")))  # type: ignore[misc]
        assert (code, "another process has signed on" in reason) == (UNKNOWN, True)
    second.PullMessages(pull, metadata=by("second"))
    assert {line["caller"] for line in noted(port.link)} == {"own"}
    assert refused(lambda: second.PullMessages(pull, metadata=by("x" * 65)))[0] == UNKNOWN


def test_a_sign_of_life_that_arrives_after_the_sign_off_is_refused(port: Port) -> None:
    """A slow line delivers them in another order; the next process of this site is answered again."""
    key = pem(OWN.public_key())
    node, stub = port.link.storage.sites.register("own", key), port.stub()

    activation = ActivateNodeRequest(public_key=key, heartbeat_interval=INTERVAL)
    beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=INTERVAL)
    stub.ActivateNode(activation, metadata=by("first"))
    stub.DeactivateNode(DeactivateNodeRequest(node_id=node), metadata=by("first"))
    code, reason = refused(lambda: stub.SendNodeHeartbeat(beat, metadata=by("first")))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "this process has signed off")
    found = port.link.storage.sites.get(node)
    assert found is not None
    assert found.state == Presence.SIGNED_OFF
    stub.ActivateNode(activation, metadata=by("second"))
    assert stub.SendNodeHeartbeat(beat, metadata=by("second")).success


def test_a_site_that_restarts_for_ever_takes_no_memory() -> None:
    one = SiteProcesses()
    for number in range(1000):
        one.sign_on(Caller(1, "north", b"", f"{number}"))
    with pytest.raises(CallRefused):
        one.refuse_earlier(Caller(1, "north", b"", "998"))
    one.refuse_earlier(Caller(1, "north", b"", "0"))  # forgotten by now


# ---------------------------------------------------------------------- replies


def answered(port: Port) -> list[int]:
    """The sites whose replies the run would get."""
    found = port.link.storage.messages.replies(port.link.run, list(port.link.sent))
    return [one.node for one in found if isinstance(one, StoredMessage)]


def test_a_forger_cannot_answer_another_sites_message_in_any_way(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name, own = port.hand(victim), port.hand(forger)
    attempts = [
        forger.reply_to(name),
        forger.reply_to(name, source=victim.node_id),
        forger.reply_to(own, source=victim.node_id),
        forger.reply_to(own, source=1),
        forger.reply_to(named(b"no message")),
        forger.reply_to(""),
        forger.reply_to(own, to=victim.node_id),
    ]
    for attempt in attempts:
        assert refused(lambda attempt=attempt: forger.announce(attempt))[0] == DENIED
        assert refused(lambda attempt=attempt: forger.announce(attempt, victim.node_id))[0] == UNKNOWN
    victim.send(victim.reply_to(name))
    assert answered(port) == [victim.node_id]
    assert {line["caller"] for line in noted(port.link)} == {"forger"}


def test_a_reply_in_the_name_of_another_run_is_not_taken(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    other = port.link.storage.runs.begin()
    assert refused(lambda: victim.announce(victim.reply_to(name, run=other)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    assert answered(port) == []


def test_a_forger_cannot_answer_a_message_that_its_owner_has_not_pulled_yet(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name = port.ask(victim)
    assert refused(lambda: forger.announce(forger.reply_to(name)))[0] == DENIED
    victim.pull()
    victim.send(victim.reply_to(name))
    assert answered(port) == [victim.node_id]


def test_a_site_cannot_send_a_message_that_is_no_reply_to_another_site(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    order = forger.reply_to("", source=1, to=victim.node_id)
    assert refused(lambda: forger.announce(order))[0] == DENIED
    assert len(victim.stub.PullMessages(PullMessagesRequest(node=victim.node)).messages_list) == 0


def test_a_second_reply_to_one_message_is_told_to_its_sender_and_noted(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    victim.send(victim.reply_to(name, "first"))
    code, reason = refused(lambda: victim.announce(victim.reply_to(name, "second")))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "another reply to this message was taken before")
    (line,) = noted(port.link)
    assert (line["caller"], line["other"], line["call"]) == ("victim", "victim", "PushMessages")


def test_a_forger_cannot_call_its_reply_as_another_site_called_its_own(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name, own = port.hand(victim), port.hand(forger)
    theirs = victim.reply_to(name)
    victim.send(theirs)
    mine = forger.reply_to(own)
    mine.metadata.__dict__["_message_id"] = theirs.object_id
    request = pushing(forger, _proto(mine, theirs.object_id), get_object_tree(theirs))
    assert refused(lambda: forger.stub.PushMessages(request))[0] in (DENIED, grpc.StatusCode.ALREADY_EXISTS)
    assert answered(port) == [victim.node_id]


def _proto(message: Any, name: str) -> Any:
    proto = message_to_proto(remove_content_from_message(message))
    proto.metadata.message_id = name
    return proto


def pushing(hospital: Hospital, proto: Any, tree: ObjectTree) -> PushMessagesRequest:
    return PushMessagesRequest(node=hospital.node, messages_list=[proto], message_object_trees=[tree])


@pytest.mark.parametrize(
    "tree",
    [
        ObjectTree(object_id=named(b"another root")),
        ObjectTree(object_id="../superlink.db"),
        ObjectTree(object_id="{root}", children=[ObjectTree(object_id="/etc/passwd")]),
        ObjectTree(object_id="{root}", children=[ObjectTree(object_id=named(b"%d" % n)) for n in range(20_000)]),
    ],
    ids=["another root", "a path", "a path below", "endless"],
)
def test_a_tree_that_is_none_is_refused(tree: ObjectTree, port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    tree.object_id = tree.object_id.replace("{root}", reply.object_id)
    request = pushing(victim, _proto(reply, reply.object_id), tree)
    assert refused(lambda: victim.stub.PushMessages(request))[0] == DENIED
    victim.send(reply)


def test_endless_words_of_an_error_are_cut_and_reach_the_run_and_those_of_other_fields_are_refused(
    port: Port, victim: Hospital
) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    proto, tree = _proto(reply, reply.object_id), get_object_tree(reply)
    proto.metadata.group_id = "x" * 4_000_000
    assert refused(lambda: victim.stub.PushMessages(pushing(victim, proto, tree)))[0] == DENIED
    proto.ClearField("content")
    proto.metadata.group_id, proto.error.code, proto.error.reason = "1", 2, "x" * 4_000_000
    victim.stub.PushMessages(pushing(victim, proto, tree))
    assert len(said_of(came_to(port.link, name)).error.reason) == LONGEST_REASON


def test_a_site_seems_to_be_there_for_two_minutes_at_most_after_its_last_sign(port: Port, victim: Hospital) -> None:
    for call in (
        lambda: victim.stub.ActivateNode(ActivateNodeRequest(public_key=victim.key, heartbeat_interval=1800)),
        lambda: victim.stub.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=victim.node, heartbeat_interval=1800)),
    ):
        assert refused(call)[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_a_reply_cannot_fill_the_disk(port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ROOM_BYTES", 3_000_000)
    name = port.hand(victim)
    reply = victim.reply_to(name)
    contents = [bytes([number]) * 1_000_000 for number in range(9)]
    tree = get_object_tree(reply)
    tree.children.extend(ObjectTree(object_id=named(content)) for content in contents)
    request = pushing(victim, _proto(reply, reply.object_id), tree)
    session = victim.stub.PushMessages(request).session_id
    assert [victim.push(named(content), content, session) for content in contents[:3]] == [True] * 3
    for content in contents[3:]:
        code, _ = refused(lambda content=content: victim.push(named(content), content, session))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sum(map(port.link.files.has, map(named, contents))) == 3


def test_a_caller_learns_nothing_of_a_fault_inside(
    port: Port, victim: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError("/secret/path is full")

    monkeypatch.setattr(port.link.storage.messages, "hand_out_next", broken)
    code, reason = refused(lambda: victim.stub.PullMessages(PullMessagesRequest(node=victim.node)))
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "the coordinator failed")


# ---------------------------------------------------------------------- small objects come with their message


def pulled_small(hospital: Hospital) -> dict[str, bytes]:
    """The next message's small objects by name, as they come with it."""
    answer = hospital.stub.PullMessages(PullMessagesRequest(node=hospital.node))
    ours = fleet_protocol.PullMessagesResponse.FromString(answer.SerializeToString())
    return fleet_protocol.name_by_sha256(ours.small_contents)


def announced_with(hospital: Hospital, reply: Message, contents: list[bytes]) -> Any:
    """Announce a reply, with these contents along; Flower's own class keeps the field that it does not know."""
    announced = pushing(hospital, _proto(reply, reply.object_id), get_object_tree(reply))
    ours = fleet_protocol.PushMessagesRequest.FromString(announced.SerializeToString())
    ours.small_contents.extend(contents)
    return hospital.stub.PushMessages(PushMessagesRequest.FromString(ours.SerializeToString()))


def test_small_objects_come_with_the_message_and_large_ones_do_not(port: Port, victim: Hospital) -> None:
    small, large = port.ask(victim), port.ask(victim, "x" * fleet_protocol.SMALL_BYTES)
    for name in (small, large):
        came = pulled_small(victim)
        objects = {part: one.deflate() for part, one in get_all_nested_objects(port.link.sent[name]).items()}
        short = {part: one for part, one in objects.items() if len(one) <= fleet_protocol.SMALL_BYTES}
        assert came == short
        assert (came == objects) == (name == small)


def test_the_small_objects_of_one_message_are_bounded_in_all() -> None:
    each, total = fleet_protocol.SMALL_BYTES, fleet_protocol.SMALL_BYTES_IN_ALL
    sizes = [(str(number), each) for number in range(10)]
    assert len(fleet_protocol.choose_small_objects(sizes)) == total // each < 10
    assert fleet_protocol.choose_small_objects([("empty", 0), ("large", each + 1), ("small", 1)]) == ["small"]


def test_a_reply_whose_objects_come_along_is_whole_at_once(port: Port, victim: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    contents = {part: one.deflate() for part, one in get_all_nested_objects(reply).items()}
    assert list(announced_with(victim, reply, list(contents.values())).objects_to_push) == []
    assert {part: port.link.files.read(part) for part in contents} == contents
    assert came_to(port.link, name) is not None


def test_what_comes_along_and_is_no_part_of_the_reply_is_not_written(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    """Another site's object, and a changed one: neither fills a file, and the true one is still asked for."""
    first, second = port.hand(victim), port.hand(forger)
    theirs = victim.reply_to(first)
    victim.announce(theirs)
    foreign = [one.deflate() for one in get_all_nested_objects(theirs).values()]
    own = forger.reply_to(second, "my own")
    parts = {part: one.deflate() for part, one in get_all_nested_objects(own).items()}
    wanted = announced_with(forger, own, [*foreign, *(content + b"!" for content in parts.values())]).objects_to_push
    assert set(wanted) == parts.keys()
    assert not any(port.link.files.has(part) for part in (*parts, *get_all_nested_objects(theirs)))


@pytest.mark.parametrize("case", ["not handed", "too many bytes", "run over"])
def test_nothing_of_a_refused_reply_is_written(case: str, port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    reply = (forger if case == "not handed" else victim).reply_to(name)
    parts = {part: one.deflate() for part, one in get_all_nested_objects(reply).items()}
    contents = [*parts.values(), bytes(fleet_protocol.SMALL_BYTES_IN_ALL) if case == "too many bytes" else b"-"]
    if case == "run over":
        port.link.storage.messages.end(port.link.run)
    sender = forger if case == "not handed" else victim
    assert refused(lambda: announced_with(sender, reply, contents))[0] == DENIED
    assert not any(port.link.files.has(part) for part in parts)
    assert bool(noted(port.link)) == (case != "run over")


# ---------------------------------------------------------------------- objects


def test_an_object_is_handed_out_only_to_whom_its_message_is_for(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name = port.hand(victim)
    for part in get_all_nested_objects(port.link.sent[name]):
        own = PullObjectRequest(node=forger.node, run_id=port.link.run, object_id=part)
        assert refused(lambda own=own: forger.stub.PullObject(own))[0] == DENIED
        assert victim.stub.PullObject(PullObjectRequest(node=victim.node, run_id=port.link.run, object_id=part))


def test_a_site_does_not_get_another_sites_reply(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    port.hand(forger)
    reply = victim.reply_to(name)
    victim.send(reply)
    for part in get_all_nested_objects(reply):
        asked = PullObjectRequest(node=forger.node, run_id=port.link.run, object_id=part)
        assert refused(lambda asked=asked: forger.stub.PullObject(asked))[0] == DENIED


def test_a_forger_cannot_push_into_another_sites_reply(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    session = victim.announce(reply).session_id
    for part, content in get_all_nested_objects(reply).items():
        request = PushObjectRequest(
            node=forger.node, run_id=port.link.run, session_id=session, object_id=part, object_content=content.deflate()
        )
        assert refused(lambda request=request: forger.stub.PushObject(request))[0] == DENIED
    assert not any(port.link.files.has(part) for part in get_all_nested_objects(reply))


def test_a_forger_cannot_confirm_another_sites_message_or_reply(port: Port, victim: Hospital, forger: Hospital) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    victim.send(reply)
    for message in (name, reply.object_id, next(iter(get_object_tree(reply).children)).object_id):
        request = ConfirmMessageReceivedRequest(node=forger.node, run_id=port.link.run, message_object_id=message)
        assert refused(lambda request=request: forger.stub.ConfirmMessageReceived(request))[0] == DENIED
        assert port.link.files.has(message)


@pytest.mark.parametrize("name", ["../authority.key", "{folder}/authority.key", "", "\0"])
def test_no_name_leads_to_the_coordinators_other_files(name: str, port: Port, victim: Hospital) -> None:
    secret = port.link.folder / "authority.key"
    secret.write_bytes(b"secret")
    asked = name.format(folder=port.link.folder)
    pull = PullObjectRequest(node=victim.node, run_id=port.link.run, object_id=asked)
    assert refused(lambda: victim.stub.PullObject(pull))[0] == DENIED
    push = PushObjectRequest(node=victim.node, run_id=port.link.run, object_id=asked, object_content=b"new")
    assert refused(lambda: victim.stub.PushObject(push))[0] == DENIED
    confirm = ConfirmMessageReceivedRequest(node=victim.node, run_id=port.link.run, message_object_id=asked)
    victim.stub.ConfirmMessageReceived(confirm)
    assert secret.read_bytes() == b"secret"


def test_a_site_asks_only_about_runs_that_it_takes_part_in(port: Port, victim: Hospital, forger: Hospital) -> None:
    port.hand(victim)
    run = port.link.run
    assert refused(lambda: forger.stub.GetRun(GetRunRequest(node=forger.node, run_id=run)))[0] == DENIED
    bundle = GetFabRequest(node=forger.node, run_id=run, hash_str="")
    assert refused(lambda: forger.stub.GetFab(bundle))[0] == DENIED


# ---------------------------------------------------------------------- after a restart, and in bounds


def test_after_a_restart_a_site_goes_on_with_its_messages_and_nobody_else_does(
    port: Port, victim: Hospital, forger: Hospital
) -> None:
    name = port.hand(victim)
    reply = victim.reply_to(name)
    victim.announce(reply)
    known = port.link.restarted().messages
    assert known.was_handed(victim.node_id, name)
    assert known.reply_to(name) == reply.object_id
    assert all(known.may_push(victim.node_id, part) for part in get_all_nested_objects(reply))
    assert not any(known.may_push(forger.node_id, part) for part in get_all_nested_objects(reply))
    assert known.may_pull(victim.node_id, name)
    assert not known.may_pull(forger.node_id, name)
    assert known.hand_out_next(victim.node_id) is None


def test_of_each_site_the_newest_messages_are_remembered_and_those_that_wait(port: Port, victim: Hospital) -> None:
    names, known = list[str](), port.link.storage.messages
    for number in range(MOST_MESSAGES + 5):
        names.append(port.hand(victim, f"train {number}"))
        known.release(names[-1])
    assert [name for name in names if not known.may_pull(victim.node_id, name)] == names[:5]
    waiting = [port.ask(victim, f"wait {number}") for number in range(MOST_MESSAGES + 5)]
    assert [victim.pull()[0] for _ in waiting] == waiting


def test_a_stranger_does_not_have_the_database_read_for_each_of_its_calls() -> None:
    looks = list[int]()

    def look() -> dict[bytes, Caller]:
        looks.append(1)
        return {}

    admitted = AdmittedKeys(look)
    assert [admitted.caller(b"%d" % number) for number in range(1000)] == [None] * 1000
    assert len(looks) <= 3


def test_the_same_refusal_a_thousand_times_is_one_line(port: Port, victim: Hospital, forger: Hospital) -> None:
    for _ in range(1000):
        refused(lambda: forger.stub.DeactivateNode(DeactivateNodeRequest(node_id=victim.node_id)))
    assert len(noted(port.link)) == 1
