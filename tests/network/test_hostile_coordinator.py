"""A coordinator with a true certificate cannot fill the memory of a hospital's program by any answer."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import psutil
import pytest
from flwr.app import Error

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.gate.gate import UNREADABLE_RULE
from polyclinic.common.wire import fleet_protocol as fleet
from polyclinic.common.wire.fleet_protocol import append_protobuf_field
from polyclinic.common.wire.flower_messages import make_message
from polyclinic.common.wire.message_objects import encode_message_objects, make_announcement
from tests.client.check.sites import Hospital, hospital_in
from tests.client.hostile_answers import (
    CHUNK,
    NODE,
    RUN,
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
)
from tests.network.real import Machine, Program, eventually, machine

pytestmark = pytest.mark.slow
GB, MB = 10**9, 10**6
MEMORY = "\n[policy]\nmaximum_memory_gb = 1\n"
MOST_AT_START, MOST_IN_CHECK = 1_300 * MB, 2 * GB
"""Bound of a program's memory: 0.8 GB of it are torch's and Flower's code, and the check trains a model for a step."""


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    """A hospital whose policy allows one gigabyte."""
    hospital = hospital_in(tmp_path / "north")
    with (hospital.folder / "site.toml").open("a", encoding="utf-8") as file:
        file.write(MEMORY)
    return hospital


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path / "machine") as started:
        yield started


def peak_of(program: Program) -> int:
    """The most memory in bytes that the living process has had."""
    status = Path(f"/proc/{program.process.pid}/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def says_within_its_memory(program: Program, words: str, most: int = MOST_AT_START) -> None:
    """Wait until a living program prints this; it must not have taken more than ``most`` bytes until then."""

    def has_answered() -> bool:
        assert psutil.Process(program.process.pid).memory_info().rss < most, program.output
        return words in program.output

    eventually(has_answered, f"it says {words}", within_s=100, output=lambda: program.output)
    assert program.runs
    assert peak_of(program) < most


Opened = Callable[[Hospital], AbstractContextManager[int]]
RAW: dict[str, tuple[Opened, str]] = {
    "1,500 MB of gzip": (
        lambda site: raw_coordinator(site.coordinator, compressed(1500 * 2**20, "gzip")),
        "compressed",
    ),
    "1,500 MB of deflate": (
        lambda site: raw_coordinator(site.coordinator, compressed(1500 * 2**20, "deflate")),
        "compressed",
    ),
    "1,500 MB in clear": (lambda site: raw_coordinator(site.coordinator, plain(1500 * 2**20)), "larger"),
    "endless headers": (lambda site: raw_coordinator(site.coordinator, endless_headers), "headers"),
    "a reason of 100 MB": (lambda site: raw_coordinator(site.coordinator, long_trailers(100 * MB)), "headers"),
}


@pytest.mark.parametrize(("opened", "words"), RAW.values(), ids=RAW.keys())
def test_a_program_that_starts_says_why_it_does_not_read_an_answer_and_tries_again(
    opened: Opened, words: str, hospital: Hospital, here: Machine
) -> None:
    with opened(hospital) as port:
        hospital.at(f"127.0.0.1:{port}")
        program = here.start("north", "-m", "polyclinic.client.cli", "start", hospital.folder)
        says_within_its_memory(program, words)


def test_the_check_of_a_connection_ends_with_its_reason(hospital: Hospital, here: Machine) -> None:
    with raw_coordinator(hospital.coordinator, compressed(1500 * 2**20, "gzip")) as port:
        hospital.at(f"127.0.0.1:{port}")
        program = here.start("check", "-m", "polyclinic.client.cli", "check", hospital.folder)
        says_within_its_memory(program, "compressed", MOST_IN_CHECK)
        assert program.ends() == ClientExitCode.NO_ANSWER


def many_parts(request: bytes) -> bytes:
    return pulled(CHUNK)


def many_fields(request: bytes) -> bytes:
    """A part beside millions of fields of two bytes."""
    return pulled(b"x") + b"\x08\x01" * (2 * MB)


def bytes_beside_a_part(request: bytes) -> bytes:
    return append_protobuf_field(pulled(b"x"), 1000, bytes(4 * MB))


MESSAGES: dict[str, HostileFleet] = {
    "400 parts of 4 MB": HostileFleet({"PullObject": many_parts}),
    "400 parts of one byte beside 4 MB": HostileFleet({"PullObject": bytes_beside_a_part}),
    "parts of millions of fields": HostileFleet({"PullObject": many_fields}),
    "a part of 500 MB of gzip": HostileFleet(
        {"PullObject": lambda request: pulled(bytes(500 * MB))}, grpc.Compression.Gzip
    ),
}


@pytest.mark.parametrize("hostile", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_that_is_too_large_is_answered_with_the_reason_and_the_site_goes_on(
    hostile: HostileFleet, hospital: Hospital, here: Machine
) -> None:
    announced = iter([envelope(400)])
    answers = {**hostile.answers, "PullMessages": lambda request: next(announced, b"")}
    coordinator = HostileFleet(answers, hostile.compression)
    with serving(hospital.coordinator, coordinator) as port:
        hospital.at(f"127.0.0.1:{port}")
        program = here.start("north", "-m", "polyclinic.client.cli", "start", hospital.folder)
        says_within_its_memory(program, "refused a message")
        eventually(lambda: coordinator.calls.get("PullMessages", 0) > 1, "it asks for the next message")
        assert peak_of(program) < MOST_AT_START
    assert [len(reason) < 500 for reason in coordinator.errors] == [True]


def test_an_announcement_of_hundreds_of_megabytes_is_not_read(hospital: Hospital, here: Machine) -> None:
    hostile = HostileFleet({"PullMessages": lambda request: envelope(400) + bytes(400 * MB)})
    with serving(hospital.coordinator, hostile) as port:
        hospital.at(f"127.0.0.1:{port}")
        program = here.start("north", "-m", "polyclinic.client.cli", "start", hospital.folder)
        says_within_its_memory(program, "larger than any answer")


def packed(**files: str) -> bytes:
    """An app bundle of these files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def error_in_place_of_a_request(group: str) -> tuple[bytes, dict[str, bytes]]:
    """The announcement of a message that holds an error and no content, and its objects."""
    metadata = {"run_id": RUN, "message_id": "", "src_node_id": 1, "dst_node_id": NODE, "reply_to_message_id": ""}
    times = {"group_id": group, "created_at": time.time(), "ttl": 1e6, "message_type": "train"}
    message = make_message(Error(1, "x"), metadata | times)
    tree, objects = encode_message_objects(message)
    announced = make_announcement(message, tree.object_id)
    return serialized("PullMessagesResponse", messages_list=[announced], message_object_trees=[tree]), dict(objects)


@pytest.mark.parametrize("bundle", [packed(code=""), packed(**{"pyproject.toml": ""})], ids=["refused", "allowed"])
def test_errors_in_place_of_requests_are_refused_and_audited_and_the_site_goes_on(
    bundle: bytes, hospital: Hospital, here: Machine
) -> None:
    messages = [error_in_place_of_a_request(group) for group in ("1", "2")]
    objects = {name: content for _, parts in messages for name, content in parts.items()}
    announced = iter([announcement for announcement, _ in messages])
    run = fleet.Run(run_id=RUN, fab_hash=hashlib.sha256(bundle).hexdigest())
    coordinator = HostileFleet(
        {
            "PullMessages": lambda request: next(announced, b""),
            "PullObject": lambda request: pulled(objects[object_named(request)]),
            "GetRun": lambda request: serialized("GetRunResponse", run=run),
            "GetFab": lambda request: serialized("GetFabResponse", fab=fleet.Fab(content=bundle)),
        }
    )
    with serving(hospital.coordinator, coordinator) as port:
        hospital.at(f"127.0.0.1:{port}")
        program = here.start("north", "-m", "polyclinic.client.cli", "start", hospital.folder)
        eventually(lambda: len(coordinator.errors) == 2 or not program.runs, "both are answered", within_s=60)
        assert program.runs, program.output
    entries = [json.loads(line) for line in (hospital.folder / "state/audit.jsonl").read_text().splitlines()]
    assert [entry["rule"] for entry in entries if entry.get("decision") == "deny"] == [UNREADABLE_RULE] * 2
