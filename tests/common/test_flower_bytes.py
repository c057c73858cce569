"""Our objects of a message, codes and app bundles are those of the installed Flower, byte for byte.

This file and ``test_fleet_protocol.py`` alone look into Flower. They compare, and are skipped where a Flower no longer
has what they compare with: no program of ours needs it.
"""

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.client.connection.fleet_client import BUNDLE_REFUSED_ERROR_CODE, SITE_ERROR_CODE, find_app_bundle_fault
from polyclinic.common.wire import message_objects
from polyclinic.common.wire.message_objects import encode_message_objects, make_announcement
from polyclinic.server.deployment.superlink.fleet_service import APP_BUNDLE_CONFIG
from polyclinic.strategies.engine.exchange import MESSAGE_GONE, NODE_UNAVAILABLE
from tests.common.flower_messages import ANYTHING, CHUNK, NUMBERS, Record, instruction, message, of_arrays, records
from tests.flower_internals import FLOWER, flower_module
from tests.strategies.scripted import LOST


@pytest.fixture(scope="module")
def flowers() -> Iterator[Any]:
    """Flower's own cutting of messages into objects, with chunks as small as ours here."""
    array, inflatable = flower_module("app.message.array"), flower_module("supercore.inflatable.inflatable_object")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", CHUNK)
        patched.setattr(message_objects, "CHUNK_BYTES", CHUNK)
        yield inflatable


def check_same(whole: Message, flowers: Any) -> None:
    """Compare the objects of a message, their order in the tree and the message's name."""
    tree, contents = encode_message_objects(whole)
    assert contents == {name: part.deflate() for name, part in flowers.get_all_nested_objects(whole).items()}
    assert tree.SerializeToString() == flowers.get_object_tree(whole).SerializeToString()
    assert list(contents)[-1] == tree.object_id == whole.object_id


@given(records)
@settings(max_examples=40)
def test_a_message_that_we_have_cut_is_the_one_that_flower_would_have_sent(
    flowers: Any, sent: dict[str, Record]
) -> None:
    check_same(instruction(of_arrays(sent)), flowers)


@pytest.mark.parametrize("size", [CHUNK - 128, CHUNK - 127, 9 * CHUNK])
def test_large_and_equal_arrays_are_cut_at_the_same_places(flowers: Any, size: int) -> None:
    check_same(message(trunk=np.arange(size, dtype=np.uint8), zeros=np.zeros(size, np.uint8)), flowers)


@given(st.dictionaries(st.text(max_size=5), ANYTHING, max_size=5), st.dictionaries(st.text(max_size=5), NUMBERS))
def test_values_of_every_type_are_encoded_as_flower_does(
    flowers: Any, fields: dict[str, Any], metrics: dict[str, Any]
) -> None:
    check_same(instruction(RecordDict({"fields": ConfigRecord(fields), "metrics": MetricRecord(metrics)})), flowers)


def test_an_error_and_an_announcement_are_as_flower_makes_them(flowers: Any) -> None:
    check_same(instruction(None, Error(7, "no")), flowers)
    serde, made = flower_module("common.serde"), flower_module("app.message")
    for whole in (message(trunk=np.zeros(3)), instruction(None, Error(7, "no"))):
        bare = made.remove_content_from_message(whole) if whole.has_content() else whole
        assert make_announcement(whole, "").SerializeToString() == serde.message_to_proto(bare).SerializeToString()


def test_the_codes_are_flowers() -> None:
    codes = flower_module("common.constant").ErrorCode
    assert NODE_UNAVAILABLE == codes.NODE_UNAVAILABLE == LOST
    assert set(MESSAGE_GONE) == {codes.MESSAGE_UNAVAILABLE, codes.REPLY_MESSAGE_UNAVAILABLE}
    assert (SITE_ERROR_CODE, BUNDLE_REFUSED_ERROR_CODE) == (codes.CLIENT_APP_RAISED_EXCEPTION, codes.INVALID_FAB), (
        FLOWER
    )


def test_a_site_takes_the_bundle_that_flower_would_make_of_our_app_and_none_with_code() -> None:
    build = flower_module("cli.build").build_fab_from_files
    for more, fault in ({}, ""), ({"client/app.py": b"app = None"}, "carries client/app.py;"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pathspec's, of a word that Flower uses
            content = build({"pyproject.toml": APP_BUNDLE_CONFIG.encode(), **more})[0]
        said = find_app_bundle_fault(content, hashlib.sha256(content).hexdigest())
        assert (fault in said) if fault else said == ""
