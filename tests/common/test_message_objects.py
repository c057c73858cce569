"""The objects of a message give the message back; ``test_flower_bytes.py`` compares them with those of Flower."""

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyclinic.common.wire import message_objects
from polyclinic.common.wire.fleet_protocol import list_tree_object_ids
from polyclinic.common.wire.message_objects import (
    BYTES_PER_ARRAY,
    MAX_RECORDS,
    MessageTooLarge,
    count_array_bytes,
    decode_message_objects,
    encode_message_objects,
    forget_array_chunks,
    split_array_into_chunks,
)
from tests.common.flower_messages import ANYTHING, CHUNK, NUMBERS, Record, instruction, message, of_arrays, records

ANY = float("inf")


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(message_objects, "CHUNK_BYTES", CHUNK)
        yield


def objects(whole: Message) -> dict[str, bytes]:
    """What travels: each object of a message under its name."""
    return encode_message_objects(whole)[1]


def name_of(whole: Message) -> str:
    """The name that a message's content gives it."""
    return str(encode_message_objects(whole)[0].object_id)


def joined(whole: Message, parts: Mapping[str, Any]) -> Message:
    return decode_message_objects(name_of(whole), parts, ANY)


def update_in(whole: Message, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the message that these parts make."""
    return {name: array.numpy() for name, array in joined(whole, parts).content.array_records["update"].items()}


@given(records)
@settings(max_examples=40)
def test_any_arrays_come_back_bit_for_bit_and_in_the_same_objects(sent: dict[str, Record]) -> None:
    whole = instruction(of_arrays(sent))
    back = joined(whole, objects(whole)).content
    assert back.keys() == sent.keys()
    for name, record in sent.items():
        assert list(back[name]) == list(record)
        for key, array in record.items():
            returned = back.array_records[name][key].numpy()
            assert (returned.dtype, returned.shape, returned.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert objects(instruction(back)) == objects(whole)


# numpy's own head, 128 bytes, stands before an array's numbers.
ONE_CHUNK = np.random.default_rng(0).bytes(CHUNK - 128)


@pytest.mark.parametrize(
    ("large", "chunks"),
    [
        (np.frombuffer(ONE_CHUNK, np.uint8), 1),
        (np.frombuffer(ONE_CHUNK + b"\1", np.uint8), 2),
        (np.arange(2 * CHUNK, dtype=np.uint32), 9),
        (np.zeros(4 * CHUNK, np.uint8), 3),  # one with numpy's head, three that are one object, a small rest
    ],
    ids=["one chunk to the byte", "a byte more", "nine chunks", "zeros"],
)
def test_a_large_array_comes_back_whole_from_its_chunks(large: NDArray[Any], chunks: int) -> None:
    whole = message(trunk=large, bias=np.array([-1.5, 0.25], np.float32))
    parts = objects(whole)
    assert sum(content.startswith(b"ArrayChunk") for content in parts.values()) == chunks + 1
    update = update_in(whole, parts)
    assert np.array_equal(update["trunk"], large)
    assert objects(instruction(joined(whole, parts).content)) == parts == objects(whole)
    assert update["bias"].tolist() == [-1.5, 0.25]


def test_fields_and_the_address_on_the_envelope_come_back_and_the_message_bears_its_name() -> None:
    whole = message(trunk=np.array([1, -2], np.float32))
    back = joined(whole, objects(whole))
    assert dict(back.content.config_records["fields"]) == {"round": 3, "site": "north"}
    envelope = back.metadata
    assert (envelope.run_id, envelope.dst_node_id, envelope.reply_to_message_id) == (7, 2, "request")
    assert (envelope.group_id, envelope.created_at, envelope.ttl, envelope.message_type) == ("3", 5.0, 60.0, "train")
    assert (envelope.message_id, whole.metadata.message_id) == (name_of(whole), "")


def test_an_error_comes_back_with_its_reason() -> None:
    whole = instruction(None, Error(7, "the app bundle carries evil.py"))
    back = joined(whole, objects(whole))
    assert not back.has_content()
    assert (back.error.code, back.error.reason) == (7, "the app bundle carries evil.py")


@given(records)
@settings(max_examples=40)
def test_every_object_is_named_once_for_each_place_and_after_those_it_is_made_of(sent: dict[str, Record]) -> None:
    whole = instruction(of_arrays(sent))
    tree, contents = encode_message_objects(whole)
    names = list_tree_object_ids(tree)
    assert set(names) == set(contents)
    assert names[-1] == list(contents)[-1] == tree.object_id
    for name, content in contents.items():
        assert name == hashlib.sha256(content).hexdigest()
        _, children, _ = content.partition(b"\0")[0].decode().split(" ")
        for child in filter(None, children.split(",")):
            assert names.index(child) < names.index(name)


def array_in(parts: dict[str, bytes]) -> str:
    """The name of the only array."""
    (name,) = (name for name, content in parts.items() if content.startswith(b"Array "))
    return name


def without(kind: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda parts: {name: content for name, content in parts.items() if not content.startswith(kind)}


def with_array(content: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda parts: {**parts, array_in(parts): content}


DAMAGED = [b"", b"Array", b"Array  x\0{}", b"Array  1\0{"]
NEVER_MADE = [b"Array  2\0{}", b'Array  22\0{"arraychunk_ids": [3]}', b"Evil  0\0"]


@pytest.mark.parametrize(
    "change", [*map(with_array, DAMAGED + NEVER_MADE), *map(without, (b"ArrayChunk ", b"ArrayRecord ", b"RecordDict "))]
)
def test_a_message_with_a_part_that_is_damaged_never_made_by_flower_or_lacking_is_refused(
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> None:
    whole = message(trunk=np.array([1, -2], np.float32))
    with pytest.raises(ValueError, match=r"\w"):
        joined(whole, change(objects(whole)))


def test_an_object_that_is_no_message_is_refused() -> None:
    parts = objects(message(trunk=np.array([1], np.float32)))
    with pytest.raises(ValueError, match=f"object {array_in(parts)[:8]} is no Message"):
        decode_message_objects(array_in(parts), parts, ANY)


@given(st.dictionaries(st.text(max_size=5), ANYTHING, max_size=5), st.dictionaries(st.text(max_size=5), NUMBERS))
def test_values_of_every_type_come_back(fields: dict[str, Any], metrics: dict[str, Any]) -> None:
    whole = instruction(RecordDict({"fields": ConfigRecord(fields), "metrics": MetricRecord(metrics)}))
    tree, contents = encode_message_objects(whole)
    back = decode_message_objects(tree.object_id, contents, ANY).content
    assert list(back.config_records["fields"].items()) == list(fields.items())
    assert list(back.metric_records["metrics"].items()) == list(metrics.items())
    types = [type(value) for value in fields.values()]
    assert [type(value) for value in back.config_records["fields"].values()] == types


def test_an_array_is_cut_once_and_an_error_not_at_all() -> None:
    whole = message(trunk=np.arange(3 * CHUNK, dtype=np.float32))
    array = whole.content.array_records["update"]["trunk"]
    before = split_array_into_chunks(array)
    assert split_array_into_chunks(array) is before
    assert len(before) == 13  # 12,000 bytes, and what numpy writes before them
    array.data = array.data[:CHUNK]
    assert len(split_array_into_chunks(array)) == 1
    _, contents = encode_message_objects(instruction(None, Error(1, "no")))
    assert len(contents) == 1


def test_chunks_that_are_forgotten_leave_the_array_and_are_made_anew() -> None:
    whole = instruction(of_arrays({"update": {"trunk": np.arange(3 * CHUNK)}}))
    (array,) = whole.content.array_records["update"].values()
    before, earlier = vars(array).copy(), objects(whole)
    assert vars(array).keys() > before.keys()
    forget_array_chunks(whole.content)
    assert vars(array) == before
    assert objects(whole) == earlier


def test_parts_that_come_as_views_are_as_good_as_bytes_also_large_ones_of_no_array() -> None:
    fields = ConfigRecord({"weight": bytes(3 * 2**20)})
    whole = instruction(RecordDict({**of_arrays({"update": {"trunk": np.arange(3 * CHUNK)}}), "fields": fields}))
    views = {name: memoryview(content) for name, content in objects(whole).items()}
    np.testing.assert_array_equal(update_in(whole, views)["trunk"], np.arange(3 * CHUNK))
    assert joined(whole, views).content.config_records["fields"] == fields


def test_a_part_that_stands_in_an_array_many_times_is_refused_before_it_takes_memory() -> None:
    whole = instruction(of_arrays({"update": {"trunk": np.zeros(CHUNK, np.uint8)}}))
    (array,) = whole.content.array_records["update"].values()
    vars(array)[message_objects._CHUNKS_ATTRIBUTE] = array.data, [*split_array_into_chunks(array)] * 200_000
    tree, sent = encode_message_objects(whole)
    assert sum(map(len, sent.values())) < 3_000_000
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge):
            decode_message_objects(tree.object_id, sent, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000  # together 200 MB
    finally:
        tracemalloc.stop()


def test_equal_parts_that_were_asked_for_are_put_together() -> None:
    made = instruction(of_arrays({"update": {"trunk": np.zeros(50 * CHUNK, np.uint8)}}))
    tree, sent = encode_message_objects(made)
    most = count_array_bytes(made.content)
    assert most > 50 * CHUNK > 10 * sum(map(len, sent.values()))
    back = decode_message_objects(tree.object_id, sent, most)
    assert back.content.array_records["update"]["trunk"].numpy().sum() == 0
    with pytest.raises(MessageTooLarge):
        decode_message_objects(tree.object_id, sent, most - 1)


def test_what_stands_in_a_record_or_message_many_times_counts_each_time() -> None:
    arrays = instruction(of_arrays({"update": {str(place): np.zeros(10, np.uint8) for place in range(1000)}}))
    size = len(arrays.content.array_records["update"]["0"].data)
    assert count_array_bytes(arrays.content) == 1000 * (size + BYTES_PER_ARRAY)
    records = instruction(RecordDict({str(place): ConfigRecord({"a": 1}) for place in range(MAX_RECORDS + 1)}))
    for whole, most in ((arrays, 50_000), (records, ANY)):
        tree, sent = encode_message_objects(whole)
        assert len(sent) < 10
        with pytest.raises(MessageTooLarge):
            decode_message_objects(tree.object_id, sent, most)
