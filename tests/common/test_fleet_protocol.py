"""The hospital link's messages are those of the installed Flower: same numbers, kinds and names."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from polyclinic.client.connection.fleet_client import RESPONSES
from polyclinic.common.wire import fleet_protocol
from polyclinic.common.wire.fleet_protocol import (
    COORDINATOR_NODE_ID,
    MESSAGE_DEFINITIONS,
    append_protobuf_field,
    extract_protobuf_field,
)
from tests.flower_internals import FLOWER, flower_module

FLOWERS = ("fleet", "message", "node", "error", "run", "fab", "heartbeat", "recorddict")
MAP_ENTRIES = {"Result": ("PushMessagesResponse", "results")}
"""What Flower calls a map travels as a list of entries."""
OURS = [line.partition(":")[0] for line in MESSAGE_DEFINITIONS.strip().splitlines()]


def flowers(name: str) -> Any:
    """Flower's message of this name."""
    if name in MAP_ENTRIES:
        owner, field = MAP_ENTRIES[name]
        return flowers(owner).fields_by_name[field].message_type
    modules = [flower_module(f"proto.{module}_pb2") for module in FLOWERS]
    descriptors = [getattr(module, name).DESCRIPTOR for module in modules if hasattr(module, name)]
    assert descriptors, f"{FLOWER} has no message {name} any more"
    return descriptors[0]


def repeated(field: Any) -> bool:
    """Protobuf's new releases warn of ``label``, its old ones have nothing else."""
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED


@pytest.mark.parametrize("name", OURS)
def test_every_field_has_the_number_and_kind_that_it_has_in_flower(name: str) -> None:
    theirs = {field.name: field for field in flowers(name).fields}
    for field in fleet_protocol._MESSAGE_CLASSES[name].DESCRIPTOR.fields:
        if field.name == fleet_protocol.SMALL_CONTENTS:
            assert field.number not in {other.number for other in theirs.values()}, "Flower has this number now"
            continue
        assert field.name in theirs, f"{FLOWER}: {name} has no {field.name} any more"
        other = theirs[field.name]
        same = (field.number, field.type, repeated(field)) == (other.number, other.type, repeated(other))
        assert same, f"{FLOWER}: {name}.{field.name} is another field now"
        if field.type == FieldDescriptor.TYPE_MESSAGE and name not in MAP_ENTRIES:
            assert field.message_type.name in (other.message_type.name, *MAP_ENTRIES)


def test_the_calls_are_flowers() -> None:
    services = flower_module("proto.fleet_pb2").DESCRIPTOR.services_by_name
    if not services:
        pytest.skip(f"{FLOWER} has no gRPC service to compare with")
    (service,) = services.values()
    calls = {method.name: method.output_type.name for method in service.methods}
    assert service.full_name == fleet_protocol.FLEET_SERVICE
    assert {name: calls[name] for name in RESPONSES} == {name: kind.DESCRIPTOR.name for name, kind in RESPONSES.items()}
    assert {"PushObject", "PullObject"} < calls.keys()


def test_the_superlinks_own_number_is_flowers() -> None:
    assert flower_module("common.constant").SUPERLINK_NODE_ID == COORDINATOR_NODE_ID


def test_a_message_has_at_most_a_hundred_fields_beside_the_one_that_is_split_off() -> None:
    others = b"\x08\x01" * 100
    assert extract_protobuf_field(append_protobuf_field(others, 3, b"content"), 3) == (others, b"content")
    with pytest.raises(ValueError, match="more than 100 other fields"):
        extract_protobuf_field(others + b"\x08\x01", 3)
