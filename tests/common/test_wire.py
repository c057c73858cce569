"""The wire says exactly what it declares, and refuses everything else with a reason."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WireError
from common.models.network import Head
from common.system.plain_text import is_plain_text
from common.wire.codec import RAW, count_payload_bytes, decode_record, encode_record
from common.wire.records import EvaluateReply, ModelGroups, Record, RollCall, TrainReply, TrainRequest
from common.wire.secure_aggregation import KeysAnswer, MaskedAnswer, MaskedRequest, RevealAnswer, SharesRequest
from tests.bad_input.wire_records import ANSWER, COMPARED, MODEL, ONES, REPLY, REQUEST, SCORES, SPREAD
from tests.common.flower_messages import same

MASKING = (
    KeysAnswer("run", 4, "north", b"{}", b"", "line"),
    SharesRequest("run", 4, (b"{}", b"{ }"), (b"", b"s"), ("", "line")),
    MaskedRequest("run", 4, ("south",), (b"letter",), 3),
    MaskedAnswer("run", 4, "north", np.array([0, 2**32 - 1, 7], np.uint32)),
    RevealAnswer("run", 4, "north", ("north", "south"), ("", "b"), (b"1", b"2"), (), ()),
)


@pytest.mark.parametrize(
    "record",
    [RollCall("run", "{}"), ANSWER, REQUEST, REPLY, SCORES, SPREAD, COMPARED, *MASKING],
    ids=lambda r: type(r).__name__,
)
def test_every_record_comes_back_as_it_went(record: Record) -> None:
    assert same(decode_record(encode_record(record), type(record)), record)


@given(
    trunk=st.lists(st.floats(width=32, allow_nan=False), max_size=5),
    rows=st.lists(st.text(min_size=1, max_size=8).filter(is_plain_text), unique=True, max_size=4),
)
def test_any_groups_come_back_bit_for_bit(trunk: list[float], rows: list[str]) -> None:
    rng = np.random.default_rng(len(rows))
    head = Head(tuple(rows), rng.normal(size=(len(rows), 3)).astype(np.float32), np.ones(len(rows), np.float32))
    groups = ModelGroups(np.array(trunk, np.float32), None, head if rows else None)
    back = decode_record(encode_record(TrainReply("r", 1, "s", 1, 0.0, None, None, 0.0, groups)), TrainReply).update
    assert back.trunk.tobytes() == np.array(trunk, np.float32).tobytes()
    assert back.norm is None
    assert repr(back.head) == repr(groups.head)


def refusal(content: RecordDict, expected: type = TrainReply) -> str:
    with pytest.raises(WireError) as caught:
        decode_record(content, expected)
    return str(caught.value)


def test_bytes_are_those_of_the_arrays_and_the_text() -> None:
    empty = count_payload_bytes(encode_record(replace(REPLY, update=ModelGroups())))
    # 2 + 4 + 2 values of 4 bytes, and the class names
    assert 32 <= count_payload_bytes(encode_record(REPLY)) - empty <= 32 + 20


def test_an_array_that_many_records_share_is_written_once_and_none_is_taken_for_another() -> None:
    trunk, written = np.ones(3, np.float32), {}
    replies = [
        replace(REPLY, site=site, update=ModelGroups(trunk, np.full(2, row, np.float32)))
        for row, site in enumerate(("east", "north", "south"))
    ]
    contents = [encode_record(reply, written) for reply in replies]
    assert len({id(content["update"]["trunk"]) for content in contents}) == 1
    assert [decode_record(content, TrainReply).update.norm.tolist() for content in contents] == [[0, 0], [1, 1], [2, 2]]


def test_a_metric_may_be_undefined_but_not_infinite() -> None:
    content = encode_record(SCORES)
    assert np.isnan(decode_record(content, EvaluateReply).auroc[0])
    content["fields"] = ConfigRecord({**content["fields"], "auroc": [float("inf")]})
    assert refusal(content, EvaluateReply) == "EvaluateReply.auroc must be finite."


def test_whatever_is_small_travels_in_one_record() -> None:
    content = encode_record(TrainReply("run", 4, "north", 12, 0.5, None, 0.75, 1.25, replace(MODEL, norm=ONES)))
    assert set(content) == {"fields", "update"}
    assert list(content["update"]) == ["trunk"]


@pytest.mark.parametrize("run", ["", "../../etc", "a/b", "-x", "x" * 65, "a\0b", "run\n"])
def test_a_run_that_could_lead_out_of_a_sites_folder_is_refused(run: str) -> None:
    for content, kind in ((encode_record(REQUEST), TrainRequest), (encode_record(RollCall("run", "{}")), RollCall)):
        content["fields"] = ConfigRecord({**content["fields"], "run": run})
        assert refusal(content, kind).startswith("run must be small letters, digits, dashes and underscores, not ")


def test_scores_come_back_as_histograms_of_the_classes_that_were_told() -> None:
    histograms = decode_record(encode_record(SPREAD), EvaluateReply).histograms
    assert list(histograms) == ["a"]
    assert (histograms["a"].positives[-1], histograms["a"].negatives[0]) == (1, 2)
    assert decode_record(encode_record(SCORES), EvaluateReply).histograms == {}
    chosen_on = decode_record(encode_record(SPREAD), EvaluateReply).validation_histograms
    assert (list(chosen_on), chosen_on["a"].positives[-1], chosen_on["a"].negatives[0]) == (["a"], 3, 4)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array("float32", (2,), RAW, bytes(8)), f"vector must be flat uint32 as {RAW}, not float32 as {RAW}."),
        (Array("uint32", (2,), "pickle", bytes(8)), f"vector must be flat uint32 as {RAW}, not uint32 as pickle."),
        (Array("uint32", (3,), RAW, bytes(8)), "vector announces shape (3,) and has 8 bytes."),
    ],
)
def test_a_masked_vector_that_is_none_is_refused(array: Array, reason: str) -> None:
    content = encode_record(MASKING[3])
    content["vector"] = ArrayRecord({"vector": array})
    assert refusal(content, MaskedAnswer) == reason


def test_letters_without_a_sender_are_refused() -> None:
    content = encode_record(MASKING[2])
    content["fields"]["letters"] = []
    assert refusal(content, MaskedRequest) == "letters must have one entry a site."
