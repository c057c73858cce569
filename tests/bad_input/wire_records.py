"""Records that the other side may send: what is said of each, to anyone who runs the side that refuses it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from polyclinic.common.errors import WireError
from polyclinic.common.metrics.score_histograms import SCORE_BINS
from polyclinic.common.models.network import Head
from polyclinic.common.wire.codec import RAW_FORMAT, decode_record, encode_record
from polyclinic.common.wire.counts import CountReply
from polyclinic.common.wire.evaluation import ScoringReply
from polyclinic.common.wire.records import (
    BenefitReply,
    EvaluateReply,
    ModelGroups,
    Record,
    Refusal,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.common.wire.versions import describe_spoken_versions
from tests.bad_input.catalogue import Case, Ended

HEAD = Head(("b", "a"), np.array([[1.5, -2], [0, 3]], np.float32), np.array([-1, 0.5], np.float32))
MODEL = ModelGroups(np.array([0.25, -7], np.float32), None, HEAD)
NAN, INFINITE = float("nan"), float("inf")
STATISTICS = {"prior": np.array([[0.25, NAN], [-3, 0.5]], np.float32), "none": np.zeros((0, 2), np.float32)}
REQUEST = TrainRequest("run", 4, "{}", "hash", ("b", "a"), 3, -1, "round 3: too late", MODEL, STATISTICS)
REPLY = TrainReply("run", 4, "north", 12, 0.5, None, 0.75, 1.25, MODEL, 3, STATISTICS, 9, 4)


def counts(first: int = 0, last: int = 0) -> NDArray[np.int64]:
    """One class whose scores all lie in the first and the last bin."""
    return np.array([first] + [0] * (SCORE_BINS - 2) + [last], np.int64)


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
    histogram_classes=("a",),
    positive_scores=counts(last=1),
    negative_scores=counts(first=2),
    validation_classes=("a",),
    validation_positive_scores=counts(last=3),
    validation_negative_scores=counts(first=4),
)
COMPARED = BenefitReply(
    *("run", 4, "north", ("b", "a")),
    (0.75, 0.5, 1.0, 0.25, 0.75, 0.75, 0.875, 0.5),
    *((0.625, 0.625, 0.75, 0.6875), (0.5, 0.5, 0.625, 0.5), (0.75, 0.75, 0.875, 0.75)),
    *((0.0, 0.125, 0.0625), (-0.25, -0.125, -0.0625), (0.25, 0.25, 0.125)),
    True,
)
COUNTED = CountReply(
    *("run", "north", "trusted", "2026-11-30", 10, ("b", "a"), ("class", "sex"), ("age",), ("year",)),
    *(("class", "sex"), ("b", ""), ("present", "all"), ("", "female"), (12, 30), (15, 41)),
)
SCORED = ScoringReply(
    *("run", "north", "trusted", 10, 40, 20, ("b", "a"), ("a",), True, ("age",)),
    *(("m", "m"), ("b", "b"), ("", "sex"), ("", "female"), (1, 0), (2, 1), (1, 0), (2, 1)),
    *((0.5, NAN), (0.25, NAN), (0.75, NAN), (0.5, NAN), (NAN, NAN), (NAN, NAN), (0.125, 0.25), (0.0625, 0.5)),
    *(np.concatenate([counts(last=1), counts()]), np.concatenate([counts(first=2), counts(first=1)])),
    *((0.0,) * 9 + (1.0,) + (0.0,) * 10, (0, 0), ("stated", "none fixed"), (0.25, 0.5), (1, 1), (0, 1)),
    *((0.25, 0.5), (0.75, 1.0), (0.5, NAN), (0.75, NAN)),
    *(("b",), ("m",), ("n",), (-0.25,), (-0.5,), (0.0,), (0.125,), ("DeLong",)),
)
OVERFLOWING = np.full(4, 3e38, np.float32).tobytes()
ONES = np.ones(2, np.float32)


def refused(content: RecordDict, kind: Any = TrainReply) -> Ended:
    """No program ends by it: what is said goes into the log, or to the other side."""
    try:
        decode_record(content, kind)
    except WireError as error:
        return Ended(0, "", str(error).replace(f"this one {describe_spoken_versions()}", "this one {version}"))
    raise AssertionError("accepted")


def field(name: str, value: object, record: Record = REPLY) -> Callable[[Path], Ended]:
    """A good record with one field of another value."""
    return with_fields({name: value}, record)


def with_fields(changed: Mapping[str, object], record: Record) -> Callable[[Path], Ended]:
    """A good record with some fields of other values."""

    def done(folder: Path) -> Ended:
        content = encode_record(record)
        content["fields"] = ConfigRecord({**content["fields"], **changed})  # type: ignore[dict-item]
        return refused(content, type(record))

    return done


def without(name: str, record: Record = REPLY) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        content = encode_record(record)
        del content["fields"][name]
        return refused(content, type(record))

    return done


def trunk(**other: Any) -> Callable[[Path], Ended]:
    """A reply whose trunk is told of otherwise than it is."""
    array = {"dtype": "float32", "shape": (2,), "stype": RAW_FORMAT, "data": ONES.tobytes()} | other
    return arrays({"trunk": Array(**array)})


def arrays(named: Mapping[str, Array]) -> Callable[[Path], Ended]:
    return record("update", ArrayRecord(dict(named)))


def record(name: str, value: Any) -> Callable[[Path], Ended]:
    def done(folder: Path) -> Ended:
        content = encode_record(REPLY)
        content[name] = value
        return refused(content)

    return done


def saying(text: str, case: Callable[[Path], Ended]) -> Case:
    return Case(text, case, code=0)


CASES = (
    saying("of an earlier release", field("wire.version", 1)),
    saying("of a version that is text", field("wire.version", "6")),
    saying("another record", lambda folder: refused(encode_record(ANSWER))),
    saying("no fields", lambda folder: refused(RecordDict({"arrays": ArrayRecord()}))),
    saying("fields without a version", without("wire.version")),
    saying("a record that nobody declared", record("pixels", ArrayRecord({"0": Array(np.zeros(3))}))),
    saying("a field that nobody declared", field("patients", ["Jones"])),
    saying("a field is missing", without("site")),
    saying("text for a number", field("round", "4")),
    saying("yes for a number", field("round", True)),
    saying("a whole number for a loss", field("train_loss", 1)),
    saying("text for a list", field("class_names", "b", ANSWER)),
    saying("no images", field("train_samples", 0)),
    saying("a loss that is no number", field("train_loss", NAN)),
    saying("a loss without end", field("train_loss", INFINITE)),
    saying("a loss that is there and is no number", field("validation_loss", NAN)),
    saying("an AUROC without end", field("auroc", [INFINITE], SCORES)),
    saying("more right than there are", field("test_correct", 10)),
    saying("right ones of unknown many", without("test_images")),
    saying("a run that leads elsewhere", field("run", "../../etc", REQUEST)),
    saying("a roll call for a run that leads elsewhere", field("run", "a/b", RollCall("run", "{}"))),
    saying("norm as numbers", field("update.norm", [1.0])),
    saying("norm of seven bytes", field("update.norm", b"1234567")),
    saying("head rows without names", field("update.classes", [])),
    saying("half a head", without("update.bias")),
    saying("names that are numbers", field("update.classes", [1, 2])),
    saying("a class twice", field("update.classes", ["a", "a"])),
    saying("three weights for two classes", field("update.weight", bytes(12))),
    saying("three biases for two classes", field("update.bias", bytes(12))),
    saying("no weights", field("update.weight", b"")),
    saying("a trunk of another type", trunk(dtype="float64", data=bytes(16))),
    saying("a trunk that is pickled", trunk(stype="numpy.ndarray")),
    saying("a trunk of two dimensions", trunk(shape=(1, 2))),
    saying("a trunk below zero", trunk(shape=(-2,))),
    saying("a trunk that announces terabytes", trunk(shape=(10**13,))),
    saying("a trunk that is cut off", trunk(data=bytes(7))),
    saying("a trunk of int8 whose scale is none", trunk(dtype="int8", data=bytes([121, 1, 1]))),
    saying("no trunk in its record", arrays({"body": Array(ONES)})),
    saying("a trunk and more", arrays({"trunk": Array(ONES), "more": Array(ONES)})),
    saying("a trunk that is no array", record("update", ConfigRecord({"trunk": b"1234"}))),
    saying("statistics without names", without("statistics.names")),
    saying("statistics that lead elsewhere", field("statistics.names", ["a/b"])),
    saying("statistics of three bytes", field("statistics/prior", b"123")),
    saying("statistics of another shape", field("statistics/prior/shape", [3])),
    saying("statistics below zero", field("statistics/prior/shape", [-2, -2])),
    saying("statistics of 65 dimensions", field("statistics/prior/shape", [1] * 65)),
    saying("statistics of a shape that no array has", field("statistics/none/shape", [0, 2**62, 2**62])),
    saying("statistics without end", field("statistics/prior", np.full(4, np.inf, np.float32).tobytes())),
    saying("statistics that nobody named", field("statistics/more", b"")),
    saying("one name for two classes", field("names", ["A"], ANSWER)),
    saying("more images than any hospital has", field("train_samples", 10**15, ANSWER)),
    saying("fewer than no images", field("validation_samples", -2, ANSWER)),
    saying("counts of one kind", field("negatives", [], ANSWER)),
    saying("counts below unknown", field("negatives", [-2, -1], ANSWER)),
    saying("more counted than there are", field("positives", [2**62, 0], ANSWER)),
    saying("a refusal of an unknown kind", field("kind", "mood", Refusal("run", "name", "why"))),
    saying("a metric for no class", field("positives", [3, 4], SCORES)),
    saying("scores of a class that was not tested", field("histogram_classes", ["c"], SPREAD)),
    saying("scores of a class twice", field("histogram_classes", ["a", "a"], SPREAD)),
    saying("scores of no class", field("histogram_classes", [], SPREAD)),
    saying("validation scores of a class twice", field("validation_classes", ["a", "a"], SPREAD)),
    saying("validation scores without their classes", field("validation_classes", [], SPREAD)),
    saying("too few validation scores", field("validation_positive_scores", b"1", SPREAD)),
    saying("too few scores", field("positive_scores", b"1", SPREAD)),
    saying("scores as a list", field("negative_scores", [2] + [0] * (SCORE_BINS - 1), SPREAD)),
    saying("more scores than images", field("negative_scores", bytes([3]) + bytes(SCORE_BINS - 1), SPREAD)),
    saying("scores of three bytes each", field("negative_scores/width", 3, SPREAD)),
    saying(
        "scores of half a count",
        with_fields({"positive_scores": bytes(SCORE_BINS + 1), "positive_scores/width": 2}, SPREAD),
    ),
    saying("scores without their width", without("positive_scores/width", SPREAD)),
    saying(
        "scores of more images than any hospital has",
        with_fields({"positive_scores": b"\xff" * 4 * SCORE_BINS, "positive_scores/width": 4}, SPREAD),
    ),
    saying(
        "validation scores of more images in all bins than any hospital has",
        with_fields(
            {"validation_positive_scores": b"\x00\x00\x10\x00" * SCORE_BINS, "validation_positive_scores/width": 4},
            SPREAD,
        ),
    ),
    saying("an AUROC of 77", field("auroc", [77.0], SCORES)),
    saying("a loss below 0", field("validation_loss", -1e300)),
    saying("seconds of a thousand centuries", field("seconds", 1e300)),
    saying("epochs below 0", field("epochs", -(2**40))),
    saying("a class name that clears the screen", field("class_names", ["\x1b[2Jb", "a"], ANSWER)),
    saying("a site name that is written from right to left", field("site", "gnp.\u202e", ANSWER)),
    saying("a head row whose name has two lines", field("update.classes", ["b\nc", "a"])),
    saying("a release of a million characters", field("version", "1" * 10**6, ANSWER)),
    saying("more patients than images", field("patients", 13, ANSWER)),
    saying("a class tested twice", field("class_names", ["b", "b"], SPREAD)),
    saying("statistics that add up to more than float32 holds", field("statistics/prior", OVERFLOWING)),
)
