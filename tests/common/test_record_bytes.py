"""A record's one form of bytes: the same on both sides of the wire, and back again."""

import hashlib

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from common.models.network import Head
from common.wire.canonical_bytes import (
    RecordField,
    hash_record,
    iterate_canonical_bytes,
    list_record_fields,
    parse_canonical_record,
)
from common.wire.codec import decode_record, encode_record
from common.wire.records import ModelGroups, TrainReply


def reply() -> TrainReply:
    head = Head(("a", "b"), np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32))
    update = ModelGroups(np.arange(5, dtype=np.float32), np.full(4, 2, np.float32), head)
    statistics = {"prototypes": np.zeros((2, 2), np.float32)}
    return TrainReply("run", 3, "north", 40, 0.5, None, 0.25, 1.5, update, statistics=statistics)


def test_a_record_comes_back_from_its_bytes_and_has_their_hash() -> None:
    content = encode_record(reply())
    data = b"".join(iterate_canonical_bytes(content))
    again = parse_canonical_record(data)
    assert b"".join(iterate_canonical_bytes(again)) == data
    assert decode_record(again, TrainReply).update.head.class_names == ("a", "b")
    assert hash_record(content) == hashlib.sha256(data.partition(b"\n")[0] + b"\n").hexdigest()


def test_an_array_whose_bytes_are_replaced_is_hashed_anew() -> None:
    content = encode_record(reply())
    before = hash_record(content)
    array = content.array_records["update"]["trunk"]
    array.data = bytes(len(array.data))
    assert hash_record(content) != before


def test_every_byte_of_a_kept_record_is_held_to_its_hash() -> None:
    data = b"".join(iterate_canonical_bytes(encode_record(reply())))
    begin = data.index(b"\n") + 1
    for place in range(begin, len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(ValueError, match="not those that the first line names"):
            parse_canonical_record(changed)


def test_the_order_in_which_fields_are_kept_does_not_matter() -> None:
    content = encode_record(reply())
    turned = RecordDict({name: content[name] for name in reversed(list(content))})
    turned["fields"] = ConfigRecord(dict(reversed(list(content["fields"].items()))))
    assert hash_record(turned) == hash_record(content)


def test_every_value_counts() -> None:
    content = encode_record(reply())
    before = hash_record(content)
    for name, value in {"train_loss": 0.25, "site": "south", "round": 4, "update.norm": bytes(16)}.items():
        changed = encode_record(reply())
        changed["fields"][name] = value
        assert hash_record(changed) != before


def test_the_parts_have_names_shapes_and_sizes() -> None:
    fields = {field.name: field for field in list_record_fields(encode_record(reply()))}
    assert fields["update/trunk"] == RecordField("update/trunk", (5,), 20)
    assert fields["statistics/prototypes"] == RecordField("statistics/prototypes", (2, 2), 16)
    assert fields["update.norm"] == RecordField("update.norm", (4,), 16)
    assert fields["train_loss"].shape is None


@pytest.mark.parametrize("data", [b"", b"[]\n", b"{}", b'{"fields": {"a": {"bytes": 9}}}\n1234', b"{}\nmore"])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_canonical_record(data)
