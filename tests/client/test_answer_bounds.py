"""Each answer that a site reads has a bound that follows from its call, and each message one from the policy."""

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import polyclinic.client.connection.fleet_client
from polyclinic.client.check.findings import FindingSeverity
from polyclinic.client.connection.answer_bounds import MAX_ANSWER_BYTES, SPARE_BYTES, compute_message_size_bound
from polyclinic.client.connection.exit_codes import ClientExitCode, CoordinatorUnreachable
from polyclinic.client.connection.fleet_client import (
    RESPONSES,
    FleetClient,
    MessageUnreadable,
    RequestRefused,
    UnacceptableAnswer,
)
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.wire.codec import unpack_numbers
from polyclinic.common.wire.fleet_protocol import (
    CHUNK_BYTES,
    HELLO_METHOD,
    append_protobuf_field,
    extract_protobuf_field,
)
from polyclinic.common.wire.message_objects import (
    MAX_SMALL_BYTES,
    MessageTooLarge,
    count_array_bytes,
    decode_message_objects,
    encode_message_objects,
    make_announcement,
)
from tests.client.check.sites import Hospital
from tests.client.hostile_answers import (
    CHUNK,
    Answer,
    HostileFleet,
    compressed,
    endless_headers,
    envelope,
    long_trailers,
    object_named,
    plain,
    pulled,
    raw_coordinator,
    serialized,
    serving,
    trickle,
)
from tests.common.flower_messages import instruction

KEY = ec.generate_private_key(ec.SECP256R1())
MB = 10**6
SMALL_MEMORY = SitePolicy(maximum_memory_gb=0.3)
"""A policy whose messages have at most 100 MB."""


def link_to(port: int, hospital: Hospital) -> FleetClient:
    authority = hospital.coordinator.ca_certificate_path.read_bytes()
    return FleetClient(f"127.0.0.1:{port}", authority, KEY, policy=SMALL_MEMORY)


# ---------------------------------------------------------------------- one answer


RAW: dict[str, tuple[Answer, str]] = {
    "gzip": (compressed(64 * 2**20, "gzip"), "compressed"),
    "deflate": (compressed(64 * 2**20, "deflate"), "compressed"),
    "in clear": (plain(64 * 2**20), "larger than any answer"),
    "announced and endless": (plain(2**32 - 2**20), "larger than any answer"),
    "endless headers": (endless_headers, "headers"),
    "a reason of 4 MB": (long_trailers(4 * MB), "headers"),
}


@pytest.mark.parametrize(("answer", "words"), RAW.values(), ids=RAW.keys())
def test_an_answer_that_no_coordinator_gives_is_refused_before_it_is_read(
    answer: Answer, words: str, hospital: Hospital
) -> None:
    with (
        raw_coordinator(hospital.coordinator, answer) as port,
        link_to(port, hospital) as link,
        pytest.raises(CoordinatorUnreachable, match=words),
    ):
        link.exchange_hello()


def test_a_reason_that_fits_into_the_headers_is_cut(hospital: Hospital) -> None:
    with (
        raw_coordinator(hospital.coordinator, long_trailers(7000)) as port,
        link_to(port, hospital) as link,
        pytest.raises(UnacceptableAnswer) as refused,
    ):
        link.exchange_hello()
    assert len(str(refused.value)) <= len("failed precondition: ") + 500


def test_every_call_has_a_bound() -> None:
    assert MAX_ANSWER_BYTES.keys() == {*RESPONSES, "PullObject", HELLO_METHOD}


CALLS: Mapping[str, Callable[[FleetClient], object]] = {
    HELLO_METHOD: lambda link: link.exchange_hello(),
    "ActivateNode": lambda link: link.activate_node(0),
    "SendNodeHeartbeat": lambda link: link.send_heartbeat(),
    "PullMessages": lambda link: link.receive_message(),
    "GetRun": lambda link: link.check_run_active(7),
    "ConfirmMessageReceived": lambda link: link.confirm_receipt(envelope(1)),
}


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_larger_than_its_call_asks_for_is_refused(
    call: str, compression: grpc.Compression, hospital: Hospital
) -> None:
    hostile = HostileFleet({call: lambda request: bytes(2 * MB)}, compression)
    with (
        serving(hospital.coordinator, hostile) as port,
        link_to(port, hospital) as link,
        pytest.raises(CoordinatorUnreachable, match="was not read"),
    ):
        CALLS[call](link)


def test_a_client_that_checks_says_that_no_coordinator_answers_so(hospital: Hospital) -> None:
    with raw_coordinator(hospital.coordinator, compressed(64 * 2**20, "gzip")) as port:
        areas = hospital.connection_at(port).areas
    (finding,) = [finding for finding in areas[0].findings if finding.severity == FindingSeverity.FAULT]
    assert finding.exit_code == ClientExitCode.NO_ANSWER
    assert "compressed" in finding.problem
    assert "HTTP/2" not in finding.remedy


def test_an_answer_that_trickles_ends_with_the_time_of_its_call(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polyclinic.client.connection.fleet_client, "TLS_TIMEOUT_S", 1.0)
    with (
        raw_coordinator(hospital.coordinator, trickle) as port,
        link_to(port, hospital) as link,
        pytest.raises(CoordinatorUnreachable, match="no answer in time"),
    ):
        link.exchange_hello()


# ---------------------------------------------------------------------- a message


def fetched(hospital: Hospital, hostile: HostileFleet, announced: bytes) -> Message:
    with serving(hospital.coordinator, hostile) as port, link_to(port, hospital) as link:
        return link.fetch_message_content(announced)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_an_object_larger_than_one_part_is_refused(compression: grpc.Compression, hospital: Hospital) -> None:
    hostile = HostileFleet({"PullObject": lambda request: pulled(bytes(6 * MB))}, compression)
    with pytest.raises(RequestRefused, match="was not read"):
        fetched(hospital, hostile, envelope(1))


def test_many_parts_are_refused_once_their_sum_is_more_than_the_policy_allows(hospital: Hospital) -> None:
    hostile = HostileFleet({"PullObject": lambda request: pulled(CHUNK)})
    with pytest.raises(RequestRefused, match=r"larger than 100 MB.*maximum_memory_gb") as refused:
        fetched(hospital, hostile, envelope(500))
    assert refused.value.rule == "policy.maximum_memory_gb"
    assert hostile.calls["PullObject"] <= 100 * MB // CHUNK_BYTES + 3


def test_bytes_beside_the_content_of_a_part_count_too(hospital: Hospital) -> None:
    """A view of an answer's content keeps the whole answer in memory."""
    hidden = append_protobuf_field(pulled(b"x"), 1000, bytes(4 * MB))
    hostile = HostileFleet({"PullObject": lambda request: hidden})
    with pytest.raises(RequestRefused, match="larger than 100 MB"):
        fetched(hospital, hostile, envelope(500))


def test_more_parts_than_a_message_has_are_refused_before_any_is_asked_for(hospital: Hospital) -> None:
    hostile = HostileFleet({"PullObject": lambda request: pulled(b"x")})
    with pytest.raises(RequestRefused, match="announces 5,000 parts"):
        fetched(hospital, hostile, envelope(5000))
    assert "PullObject" not in hostile.calls


def message_with_array(size: int, form: str = "float32", **fields: object) -> Message:
    content = RecordDict({"fields": ConfigRecord(fields)})  # type: ignore[arg-type]
    content["model"] = record = ArrayRecord()
    record["trunk"] = Array(form, (size,), "raw-little-endian", bytes(size))
    return instruction(content)


def announced_message(size: int) -> tuple[bytes, HostileFleet]:
    """An honest message with an array of so many bytes, and a coordinator that has its objects."""
    tree, contents = encode_message_objects(message := message_with_array(size))
    announced = serialized(
        "PullMessagesResponse", messages_list=[make_announcement(message, tree.object_id)], message_object_trees=[tree]
    )
    return announced, HostileFleet({"PullObject": lambda request: pulled(contents[object_named(request)])})


@pytest.mark.parametrize("call", ["GetRun", "GetFab"])
def test_a_run_or_app_bundle_that_is_too_large_refuses_the_message(call: str, hospital: Hospital) -> None:
    announced, coordinator = announced_message(3 * MB)
    hostile = HostileFleet({**coordinator.answers, call: lambda request: bytes(MB)})
    with pytest.raises(RequestRefused, match="was not read"):
        fetched(hospital, hostile, announced)


def test_a_message_within_the_bound_arrives(hospital: Hospital) -> None:
    announced, coordinator = announced_message(99 * MB)
    message = fetched(hospital, coordinator, announced)
    assert len(message.content.array_records["model"]["trunk"].data) == 99 * MB


def test_equal_parts_that_are_sent_once_count_as_often_as_they_are_joined(hospital: Hospital) -> None:
    announced, coordinator = announced_message(101 * MB)
    with pytest.raises(RequestRefused, match="more than 100 MB"):
        fetched(hospital, coordinator, announced)
    assert coordinator.calls["PullObject"] < 10


def test_the_reason_why_a_message_cannot_be_read_is_short(hospital: Hospital) -> None:
    hostile = HostileFleet({"PullObject": lambda request: pulled(b"Message \x1b" + b"x" * MB + b" 0\0")})
    with pytest.raises(MessageUnreadable) as unreadable:
        fetched(hospital, hostile, envelope(1))
    assert len(str(unreadable.value)) <= 500
    assert "\x1b" not in str(unreadable.value)


@pytest.mark.parametrize(
    ("policy", "size", "rule"),
    [
        ({"maximum_memory_gb": 8.0}, 1_600_000_000 + SPARE_BYTES, "policy.maximum_parameters"),
        ({"maximum_memory_gb": 8.0, "maximum_parameters": 10**9}, 8 * 10**9 // 3, "policy.maximum_memory_gb"),
        ({"maximum_memory_gb": 0.01}, SPARE_BYTES, "policy.maximum_memory_gb"),
        ({"maximum_parameters": 1000}, 8000 + SPARE_BYTES, "policy.maximum_parameters"),
    ],
)
def test_the_bound_of_a_message_follows_from_the_policy(policy: dict[str, float], size: int, rule: str) -> None:
    bound = compute_message_size_bound(SitePolicy(**policy))
    assert (bound.size, bound.rule) == (size, rule)


@pytest.mark.parametrize("gigabytes", ["machine", None])
def test_without_a_number_in_the_policy_the_bound_is_a_third_of_the_machines_memory(gigabytes: Any) -> None:
    policy = SitePolicy.model_construct(maximum_memory_gb=gigabytes, maximum_parameters=None)
    assert compute_message_size_bound(policy).size <= psutil.virtual_memory().total // 3


def test_a_model_of_a_gigabyte_fits_into_eight() -> None:
    assert compute_message_size_bound(SitePolicy(maximum_memory_gb=8.0)).size > 2**30 + SPARE_BYTES


# ---------------------------------------------------------------------- what becomes of bytes once they are here


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that Python has allocated during this work, besides those before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_answer_of_millions_of_tiny_fields_takes_no_more_memory_than_it_has_bytes() -> None:
    tiny = b"\x08\x00" * (2 * MB)

    def split() -> None:
        with pytest.raises(ValueError, match="fields"):
            extract_protobuf_field(tiny, 3)

    assert peak_of(split) < len(tiny)


def test_fields_of_more_bytes_than_one_call_brings_are_refused_before_they_are_decoded() -> None:
    tree, contents = encode_message_objects(message_with_array(4, names=["a"] * (MAX_SMALL_BYTES // 2)))

    def rebuild() -> None:
        with pytest.raises(MessageTooLarge):
            decode_message_objects(tree.object_id, contents, 10**9)

    assert peak_of(rebuild) < MAX_SMALL_BYTES // 4


def test_packed_numbers_count_as_the_float32_that_they_become() -> None:
    counts = {
        form: count_array_bytes(message_with_array(1000, form).content) for form in ("float32", "float16", "int8")
    }
    assert counts == {"float32": 1064, "float16": 2064, "int8": 4064}
    tree, contents = encode_message_objects(message_with_array(MB, "int8"))
    with pytest.raises(MessageTooLarge):
        decode_message_objects(tree.object_id, contents, 2 * MB)


def test_int8_numbers_are_unpacked_in_the_memory_of_their_result() -> None:
    packed = bytes(1000 + 1000 * 1024)
    assert peak_of(lambda: unpack_numbers(packed, 1000 * 1024, "int8")) < 4.2 * len(packed)
