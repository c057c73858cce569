"""The wire says exactly what it declares, and refuses everything else with a reason."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polyclinic.common.errors import WireError
from polyclinic.common.models.network import Head
from polyclinic.common.system.plain_text import is_plain_text
from polyclinic.common.wire.canonical_bytes import (
    RecordField,
    hash_record,
    iterate_canonical_bytes,
    list_record_fields,
    parse_canonical_record,
)
from polyclinic.common.wire.codec import (
    INT8_BLOCK_LENGTH,
    RAW_FORMAT,
    compute_largest_rounding_errors,
    count_packed_bytes,
    count_payload_bytes,
    decode_record,
    encode_record,
    pack_numbers,
    round_to_number_format,
    unpack_numbers,
)
from polyclinic.common.wire.records import (
    NUMBER_FORMATS,
    EvaluateReply,
    ModelGroups,
    NumberFormat,
    Record,
    RollCall,
    TrainReply,
    TrainRequest,
)
from polyclinic.common.wire.secure_aggregation import (
    KeysAnswer,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    SharesRequest,
)
from tests.bad_input.wire_records import ANSWER, COMPARED, COUNTED, MODEL, ONES, REPLY, REQUEST, SCORED, SCORES, SPREAD
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
    [RollCall("run", "{}"), ANSWER, REQUEST, REPLY, SCORES, SPREAD, COMPARED, COUNTED, SCORED, *MASKING],
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
        (
            Array("float32", (2,), RAW_FORMAT, bytes(8)),
            f"vector must be flat uint32 as {RAW_FORMAT}, not float32 as {RAW_FORMAT}.",
        ),
        (
            Array("uint32", (2,), "pickle", bytes(8)),
            f"vector must be flat uint32 as {RAW_FORMAT}, not uint32 as pickle.",
        ),
        (Array("uint32", (3,), RAW_FORMAT, bytes(8)), "vector announces shape (3,) and has 8 bytes."),
    ],
)
def test_a_masked_vector_that_is_none_and_letters_without_a_sender_are_refused(array: Array, reason: str) -> None:
    content, letters = encode_record(MASKING[3]), encode_record(MASKING[2])
    content["vector"] = ArrayRecord({"vector": array})
    letters["fields"]["letters"] = []
    assert refusal(content, MaskedAnswer) == reason
    assert refusal(letters, MaskedRequest) == "letters must have one entry a site."


# ---------------------------------------------------------------------- a record's one form of bytes

WHOLE = replace(REPLY, update=replace(MODEL, norm=ONES))


def test_a_record_comes_back_from_its_bytes_and_has_their_hash() -> None:
    content = encode_record(WHOLE)
    data = b"".join(iterate_canonical_bytes(content))
    again = parse_canonical_record(data)
    assert b"".join(iterate_canonical_bytes(again)) == data
    assert same(decode_record(again, TrainReply), WHOLE)
    assert hash_record(content) == hashlib.sha256(data.partition(b"\n")[0] + b"\n").hexdigest()


def test_every_byte_of_a_kept_record_is_held_to_its_hash() -> None:
    data = b"".join(iterate_canonical_bytes(encode_record(WHOLE)))
    begin = data.index(b"\n") + 1
    for place in range(begin, len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(ValueError, match="not those that the first line names"):
            parse_canonical_record(changed)


def test_the_order_in_which_fields_are_kept_does_not_matter() -> None:
    content = encode_record(WHOLE)
    turned = RecordDict({name: content[name] for name in reversed(list(content))})
    turned["fields"] = ConfigRecord(dict(reversed(list(content["fields"].items()))))
    assert hash_record(turned) == hash_record(content)


def test_every_value_counts_also_that_of_an_array_whose_bytes_are_replaced() -> None:
    contents = [encode_record(WHOLE) for _ in range(6)]
    assert len({hash_record(content) for content in contents}) == 1
    changes = {"train_loss": 0.25, "site": "south", "round": 5, "update.norm": bytes(8)}
    for content, (name, value) in zip(contents, changes.items(), strict=False):
        content["fields"][name] = value
    contents[-1].array_records["update"]["trunk"].data = bytes(8)
    assert len({hash_record(content) for content in contents}) == 6  # the fifth is as it was


def test_the_parts_have_names_shapes_and_sizes() -> None:
    fields = {field.name: field for field in list_record_fields(encode_record(WHOLE))}
    assert fields["update/trunk"] == RecordField("update/trunk", (2,), 8)
    assert fields["statistics/prior"] == RecordField("statistics/prior", (2, 2), 16)
    assert fields["update.norm"] == RecordField("update.norm", (2,), 8)
    assert fields["train_loss"].shape is None


@pytest.mark.parametrize("data", [b"", b"[]\n", b"{}", b'{"fields": {"a": {"bytes": 9}}}\n1234', b"{}\nmore"])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_canonical_record(data)


# ---------------------------------------------------------------------- numbers in fewer bytes

NUMBERS = arrays.arrays(
    np.float32, st.integers(0, 40), elements=st.floats(-(2.0**110), 2.0**110, width=32, allow_subnormal=True)
)


@given(NUMBERS, st.sampled_from(NUMBER_FORMATS))
@settings(max_examples=60)
def test_what_was_rounded_comes_back_bit_for_bit_and_is_not_rounded_again(
    values: np.ndarray, form: NumberFormat
) -> None:
    once = round_to_number_format(values, form)
    data = pack_numbers(once, form)
    assert len(data) == count_packed_bytes(len(values), form)
    np.testing.assert_array_equal(unpack_numbers(data, len(values), form), once)
    np.testing.assert_array_equal(round_to_number_format(once, form), once)


@pytest.mark.parametrize(
    "size", [1, INT8_BLOCK_LENGTH - 1, INT8_BLOCK_LENGTH, INT8_BLOCK_LENGTH + 1, 5 * INT8_BLOCK_LENGTH + 7]
)
def test_each_block_has_a_scale_of_its_own(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    values[INT8_BLOCK_LENGTH:] *= 1e-4
    once = round_to_number_format(values, "int8")
    np.testing.assert_array_equal(unpack_numbers(pack_numbers(once, "int8"), size, "int8"), once)
    for start in range(0, size, INT8_BLOCK_LENGTH):
        block = slice(start, start + INT8_BLOCK_LENGTH)
        assert np.abs(values[block] - once[block]).max() <= np.abs(values[block]).max() / 127


def test_float16_errs_by_a_two_thousandth_and_ends_at_its_largest_number() -> None:
    values = np.array([1.0, 3.14159, -1e-3, 1e6, -1e30], np.float32)
    once = round_to_number_format(values, "float16")
    np.testing.assert_allclose(once[:3], values[:3], rtol=2**-11)
    np.testing.assert_array_equal(once[3:], [65504, -65504])


@pytest.mark.parametrize("form", NUMBER_FORMATS)
def test_no_number_was_further_away_than_its_largest_rounding_error(form: NumberFormat) -> None:
    values = np.random.default_rng(3).normal(size=3 * INT8_BLOCK_LENGTH + 5).astype(np.float32)
    values[:INT8_BLOCK_LENGTH] *= 1e-7  # among them subnormal numbers of float16
    once = round_to_number_format(values, form)
    errors = compute_largest_rounding_errors(once, form)
    assert (np.abs(values - once) <= errors).all()
    # They are no larger than needed: half of the distance between two numbers of the format.
    largest = np.abs(values[INT8_BLOCK_LENGTH:]).max()
    assert errors.max() <= {"float32": 0.0, "float16": largest * 2**-11, "int8": largest / 127}[form]


@pytest.mark.parametrize("form", NUMBER_FORMATS)
def test_zeros_stay_zeros(form: NumberFormat) -> None:
    packed = pack_numbers(round_to_number_format(np.zeros(2000, np.float32), form), form)
    assert not unpack_numbers(packed, 2000, form).any()


@pytest.mark.parametrize(
    ("data", "n", "form", "reason"),
    [
        (b"123", 1, "float16", "take 2 bytes, not 3"),
        (b"", 3, "int8", "take 4 bytes, not 0"),
        (bytes([121, 1]), 1, "int8", "scale of a block"),
        (bytes([128, 1]), 1, "int8", "scale of a block"),
    ],
)
def test_bytes_that_are_no_such_numbers_are_refused(data: bytes, n: int, form: NumberFormat, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_numbers(data, n, form)
