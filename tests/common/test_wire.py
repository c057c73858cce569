"""The wire says exactly what it declares, and refuses everything else with a reason."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from common.masking_records import KeysAnswer, MaskedAnswer, MaskedRequest, RevealAnswer, SharesRequest
from common.models.head import Head
from common.score_histograms import BINS
from common.wire import (
    RAW,
    WIRE_VERSION,
    EvaluateReply,
    Groups,
    Record,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
    WireError,
    decode,
    encode,
    field_names,
    payload_bytes,
)

HEAD = Head(("b", "a"), np.array([[1.5, -2], [0, 3]], np.float32), np.array([-1, 0.5], np.float32))
MODEL = Groups(np.array([0.25, -7], np.float32), None, HEAD)
NAN = float("nan")
STATISTICS = {"prior": np.array([[0.25, NAN], [-3, 0.5]], np.float32), "none": np.zeros((0, 2), np.float32)}
REQUEST = TrainRequest("run", 4, "{}", "hash", ("b", "a"), 3, -1, "round 3: too late", MODEL, STATISTICS)
REPLY = TrainReply("run", 4, "north", 12, 0.5, None, 0.75, 1.25, MODEL, 3, STATISTICS, 9, 4)
ANSWER = RollCallAnswer("run", "north", ("B", "A"), ("b", "a"), 12, 0, 9, "layout", "0.1.0", (5, -1), (7, -1))
SCORES = EvaluateReply("run", 4, "north", 0.5, None, ("b",), (NAN,), (0.25,), (0.5,), (0,), (7,), "hash")
SPREAD = replace(
    SCORES,
    class_names=("b", "a"),
    auroc=(NAN, 0.5),
    average_precision=(0.25, 0.5),
    balanced_accuracy=(0.5, 0.5),
    positives=(4, 1),
    negatives=(7, 2),
    told_classes=("a",),
    positive_scores=(0,) * (BINS - 1) + (1,),
    negative_scores=(2,) + (0,) * (BINS - 1),
)
MASKING = (
    KeysAnswer("run", 4, "north", b"{}", b"", "line"),
    SharesRequest("run", 4, (b"{}", b"{ }"), (b"", b"s"), ("", "line")),
    MaskedRequest("run", 4, ("south",), (b"letter",), 12.0, 3),
    MaskedAnswer("run", 4, "north", np.array([0, 2**32 - 1, 7], np.uint32)),
    RevealAnswer("run", 4, "north", ("north", "south"), ("", "b"), (b"1", b"2"), (), ()),
)


def same(left: Record, right: Record) -> bool:
    """Equality that looks into arrays and takes NaN for equal to itself."""
    return type(left) is type(right) and all(
        shown(getattr(left, name)) == shown(getattr(right, name)) for name in field_names(type(left))
    )


def shown(value: object) -> str:
    return repr(sorted(value.items()) if isinstance(value, Mapping) else value)


@pytest.mark.parametrize(
    "record", [RollCall("run", "{}"), ANSWER, REQUEST, REPLY, SCORES, SPREAD, *MASKING], ids=lambda r: type(r).__name__
)
def test_every_record_comes_back_as_it_went(record: Record) -> None:
    assert same(decode(encode(record), type(record)), record)


@given(
    trunk=st.lists(st.floats(width=32, allow_nan=False), max_size=5),
    rows=st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=4),
)
def test_any_groups_come_back_bit_for_bit(trunk: list[float], rows: list[str]) -> None:
    rng = np.random.default_rng(len(rows))
    head = Head(tuple(rows), rng.normal(size=(len(rows), 3)).astype(np.float32), np.ones(len(rows), np.float32))
    groups = Groups(np.array(trunk, np.float32), None, head if rows else None)
    back = decode(encode(TrainReply("r", 1, "s", 1, 0.0, None, None, 0.0, groups)), TrainReply).update
    assert back.trunk is not None
    assert back.trunk.tobytes() == np.array(trunk, np.float32).tobytes()
    assert back.norm is None
    assert repr(back.head) == repr(groups.head)


def refusal(content: RecordDict, expected: type = TrainReply) -> str:
    with pytest.raises(WireError) as caught:
        decode(content, expected)
    return str(caught.value)


def test_another_wire_version_is_told_to_install_the_same_release() -> None:
    content = encode(REPLY)
    content["fields"]["wire.version"] = 99
    said = f"the other side speaks wire version 99, this one {WIRE_VERSION}. Install the same release on both."
    assert refusal(content) == said


def test_another_record_is_refused_by_name() -> None:
    assert refusal(encode(ANSWER)) == "expected TrainReply, got 'RollCallAnswer'."


def test_records_without_a_version_are_refused() -> None:
    reason = "expected TrainReply, got records ['{}'] without a wire version."
    assert refusal(RecordDict({"arrays": ArrayRecord()})) == reason.format("arrays")
    assert refusal(RecordDict({"fields": ConfigRecord({"run": "r"})})) == reason.format("fields")


def test_a_record_that_nobody_declared_is_refused() -> None:
    content = encode(REPLY)
    content["pixels"] = ArrayRecord({"0": Array(np.zeros(3))})
    assert refusal(content) == "TrainReply does not have pixels."


def with_field(name: str, value: object) -> RecordDict:
    content = encode(REPLY)
    content["fields"] = ConfigRecord({**content["fields"], name: value})  # type: ignore[dict-item]
    return content


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("patients", ["Jones"], "TrainReply does not have patients."),
        ("round", "4", "TrainReply.round must be int."),
        ("round", True, "TrainReply.round must be int."),
        ("train_loss", 1, "TrainReply.train_loss must be float."),
        ("train_samples", 0, "train_samples must be positive, not 0."),
        ("validation_loss", NAN, "TrainReply.validation_loss is not a number; leave it out where it is not defined."),
        ("update.norm", [1.0], "norm of update must be the bytes of float32 numbers."),
        ("update.norm", b"123", "norm of update must be the bytes of float32 numbers."),
        ("update.bias", bytes(12), "head of update: "),
        ("update.weight", bytes(12), "head of update: 3 weights cannot be those of 2 classes."),
        ("update.weight", b"", "head of update: 0 weights cannot be those of 2 classes."),
        ("update.classes", [], "update has head rows without class names, or class names without head rows."),
    ],
)
def test_a_field_that_is_not_as_declared_is_refused(name: str, value: object, reason: str) -> None:
    assert refusal(with_field(name, value)).startswith(reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("statistics.names", ["a/b"], "statistics must name its arrays."),
        ("statistics/prior", b"123", "statistics/prior must be the bytes of float32 numbers."),
        ("statistics/prior/shape", [3], "statistics/prior announces shape (3,) and has 4 numbers."),
        ("statistics/prior/shape", [-2, -2], "statistics/prior must be float32 numbers with a shape."),
        ("statistics/prior/shape", [1] * 65 + [4], "statistics/prior announces a shape that no array has: "),
        ("statistics/none/shape", [0, 2**62, 2**62], "statistics/none announces a shape that no array has: "),
        ("statistics/prior", np.full(4, np.inf, np.float32).tobytes(), "statistics/prior holds infinite values."),
        ("statistics/more", b"", "TrainReply does not have statistics/more."),
        ("test_correct", 10, "of 9 test images 10 cannot be right."),
    ],
)
def test_statistics_that_are_not_as_declared_are_refused(name: str, value: object, reason: str) -> None:
    assert refusal(with_field(name, value)).startswith(reason)


@pytest.mark.parametrize(
    ("positives", "negatives", "reason"),
    [
        ((5,), (7,), "label counts must be one a class, of both kinds."),
        ((5, 3), (), "label counts must be one a class, of both kinds."),
        ((5, -2), (7, 3), "label counts must be from 0 to the training images together, or -1 for unknown."),
        ((5, 2**62), (7, 0), "label counts must be from 0 to the training images together, or -1 for unknown."),
    ],
)
def test_label_counts_that_cannot_be_are_refused(
    positives: tuple[int, ...], negatives: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(WireError) as caught:
        replace(ANSWER, positives=positives, negatives=negatives)
    assert str(caught.value) == reason


def test_a_missing_field_is_named() -> None:
    content = encode(REPLY)
    content["fields"] = ConfigRecord({k: v for k, v in content["fields"].items() if k != "site"})
    assert refusal(content) == "TrainReply lacks site."


def raw(values: np.ndarray, **other: Any) -> Array:
    told: dict[str, Any] = {"dtype": str(values.dtype), "shape": values.shape, "stype": RAW, "data": values.tobytes()}
    return Array(**{**told, **other})


def with_arrays(**arrays: Array) -> RecordDict:
    content = encode(REPLY)
    content["update"] = ArrayRecord({**dict(content["update"]), **arrays})
    return content


ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (
            {"trunk": raw(np.zeros(2))},
            "trunk of update must be float32, float16, int8 as raw-little-endian, not float64",
        ),
        ({"trunk": raw(np.zeros((2, 2), np.float32))}, "trunk of update announces shape (2, 2) and has 16 bytes."),
        ({"extra": raw(ONES)}, "the record update must hold one array, trunk."),
        ({"trunk": raw(ONES, data=b"")}, "trunk of update announces shape (2,) and has 0 bytes."),
        ({"trunk": raw(ONES, data=ONES.tobytes()[:-1])}, "trunk of update announces shape (2,) and has 7 bytes."),
        (
            {"trunk": raw(ONES, shape=(1,), data=ONES.tobytes()[:-1])},
            "trunk of update announces shape (1,) and has 7 bytes.",
        ),
        ({"trunk": raw(ONES, shape=(-2,))}, "trunk of update announces shape (-2,) and has 8 bytes."),
        ({"trunk": raw(ONES, shape=(-1, -2))}, "trunk of update announces shape (-1, -2) and has 8 bytes."),
        ({"trunk": raw(ONES, shape=(10**13,))}, "trunk of update announces shape (10000000000000,) and has 8 bytes."),
    ],
)
def test_arrays_that_are_not_as_declared_are_refused(arrays: dict[str, Array], reason: str) -> None:
    assert refusal(with_arrays(**arrays)).startswith(reason)


@pytest.mark.parametrize("stype", ["numpy.ndarray", "torch.Tensor", "pickle"])
def test_another_way_to_write_arrays_is_refused_unread(stype: str) -> None:
    data = io.BytesIO()
    np.save(data, ONES)
    reason = refusal(with_arrays(trunk=raw(ONES, stype=stype, data=data.getvalue())))
    assert reason == f"trunk of update must be float32, float16, int8 as raw-little-endian, not float32 as {stype}."


def test_bytes_are_those_of_the_arrays_and_the_text() -> None:
    empty = payload_bytes(encode(replace(REPLY, update=Groups())))
    # 2 + 4 + 2 values of 4 bytes, and the class names
    assert 32 <= payload_bytes(encode(REPLY)) - empty <= 32 + 20


def test_an_array_that_many_records_share_is_written_once_and_none_is_taken_for_another() -> None:
    trunk, written = np.ones(3, np.float32), {}  # type: ignore[var-annotated]
    contents = [
        encode(
            TrainReply("run", 4, site, 12, 0.5, None, 0.75, 1.25, Groups(trunk, np.full(2, row, np.float32))), written
        )
        for row, site in enumerate(("east", "north", "south"))
    ]
    assert len({id(content["update"]["trunk"]) for content in contents}) == 1
    assert [decode(content, TrainReply).update.norm.tolist() for content in contents] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("train_loss", float("inf")), ("seconds", NAN), ("validation_loss", float("-inf"))],
)
def test_a_number_that_no_json_can_hold_is_refused(name: str, value: float) -> None:
    assert refusal(with_field(name, value)) == f"TrainReply.{name} must be finite."


def test_a_metric_may_be_undefined_but_not_infinite() -> None:
    content = encode(SCORES)
    assert np.isnan(decode(content, EvaluateReply).auroc[0])
    content["fields"] = ConfigRecord({**content["fields"], "auroc": [float("inf")]})  # type: ignore[dict-item]
    assert refusal(content, EvaluateReply) == "EvaluateReply.auroc must be finite."


def test_head_rows_whose_names_are_no_text_are_refused() -> None:
    assert refusal(with_field("update.classes", [1, 2])) == "class names of update must be a list of str."


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_half_a_head_is_refused(part: str) -> None:
    content = encode(REPLY)
    del content["fields"][f"update.{part}"]
    assert refusal(content) == "update has head rows without class names, or class names without head rows."


def test_a_trunk_that_is_no_array_is_refused() -> None:
    content = encode(REPLY)
    content["update"] = ConfigRecord({"trunk": b"1234"})
    assert refusal(content) == "the record update must hold one array, trunk."


def test_whatever_is_small_travels_in_one_record() -> None:
    content = encode(TrainReply("run", 4, "north", 12, 0.5, None, 0.75, 1.25, replace(MODEL, norm=ONES)))
    assert set(content) == {"fields", "update"}
    assert list(content["update"]) == ["trunk"]


def test_a_roll_call_answer_has_one_canonical_name_a_label() -> None:
    content = encode(ANSWER)
    content["fields"] = ConfigRecord({**content["fields"], "names": ["A"]})  # type: ignore[dict-item]
    assert refusal(content, RollCallAnswer) == "names and class_names must have one entry a label."


def test_each_metric_has_one_entry_a_class() -> None:
    content = encode(SCORES)
    content["fields"] = ConfigRecord({**content["fields"], "positives": [3, 4]})  # type: ignore[dict-item]
    assert refusal(content, EvaluateReply) == "each metric must have one entry a class."


@pytest.mark.parametrize("run", ["", "../../etc", "a/b", "-x", "x" * 65, "a\0b", "run\n"])
def test_a_run_that_could_lead_out_of_a_sites_folder_is_refused(run: str) -> None:
    for content, kind in ((encode(REQUEST), TrainRequest), (encode(RollCall("run", "{}")), RollCall)):
        content["fields"] = ConfigRecord({**content["fields"], "run": run})  # type: ignore[dict-item]
        assert refusal(content, kind).startswith("run must be letters, digits, dashes and underscores, not ")


def test_scores_come_back_as_histograms_of_the_classes_that_were_told() -> None:
    histograms = decode(encode(SPREAD), EvaluateReply).histograms
    assert list(histograms) == ["a"]
    assert (histograms["a"].positives[-1], histograms["a"].negatives[0]) == (1, 2)
    assert decode(encode(SCORES), EvaluateReply).histograms == {}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("told_classes", ["c"], "scores must be told of tested classes, once each."),
        ("told_classes", ["a", "a"], "scores must be told of tested classes, once each."),
        ("told_classes", [], f"scores of positives must be {BINS} counts for each class told of."),
        ("positive_scores", [1], f"scores of positives must be {BINS} counts for each class told of."),
        (
            "negative_scores",
            [-2, 4] + [0] * (BINS - 2),
            f"scores of negatives must be {BINS} counts for each class told of.",
        ),
        ("negative_scores", [3] + [0] * (BINS - 1), "scores of negatives must be as many as there are negatives."),
    ],
)
def test_scores_that_cannot_be_are_refused(name: str, value: list[int] | list[str], reason: str) -> None:
    content = encode(SPREAD)
    content["fields"] = ConfigRecord({**content["fields"], name: value})  # type: ignore[dict-item]
    assert refusal(content, EvaluateReply) == reason


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array("float32", (2,), RAW, bytes(8)), f"vector must be flat uint32 as {RAW}, not float32 as {RAW}."),
        (Array("uint32", (2,), "pickle", bytes(8)), f"vector must be flat uint32 as {RAW}, not uint32 as pickle."),
        (Array("uint32", (3,), RAW, bytes(8)), "vector announces shape (3,) and has 8 bytes."),
    ],
)
def test_a_masked_vector_that_is_none_is_refused(array: Array, reason: str) -> None:
    content = encode(MASKING[3])
    content["vector"] = ArrayRecord({"vector": array})
    assert refusal(content, MaskedAnswer) == reason


def test_letters_without_a_sender_are_refused() -> None:
    content = encode(MASKING[2])
    content["fields"]["letters"] = []
    assert refusal(content, MaskedRequest) == "letters must have one entry a site."
