"""Every text and every number of every record has a bound, and what is outside is refused or made harmless."""

import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from polyclinic.common.errors import WireError
from polyclinic.common.system.plain_text import MAX_LINES, MAX_REASON_CHARACTERS, make_printable_line
from polyclinic.common.wire.bounds import (
    BOUND_TYPES,
    MAX_LOSS,
    EscapedFreeText,
    LongTextBound,
    clip_reported_loss,
    list_field_bounds,
)
from polyclinic.common.wire.codec import decode_record, encode_record, list_record_field_names
from polyclinic.common.wire.counts import CountRequest
from polyclinic.common.wire.delivery import make_delivery_request
from polyclinic.common.wire.evaluation import make_scoring_request
from polyclinic.common.wire.records import (
    BenefitRequest,
    EvaluateRequest,
    Question,
    Record,
    Refusal,
    RefusalNoted,
    RollCall,
)
from polyclinic.common.wire.secure_aggregation import (
    KeysAnswer,
    KeysRequest,
    MaskedAnswer,
    MaskedRequest,
    RevealAnswer,
    RevealRequest,
    SharesAnswer,
    SharesRequest,
)
from tests.bad_input.wire_records import ANSWER, COMPARED, COUNTED, MODEL, REPLY, REQUEST, SCORED, SCORES, SPREAD
from tests.words import HOSTILE_TEXTS, raw_in

RECORDS: tuple[Any, ...] = (
    RollCall("run", "{}"),
    ANSWER,
    Refusal("run", "name", "why"),
    Question("run", "Is it one class?"),
    RefusalNoted("run", "north"),
    CountRequest("run", "{}"),
    make_delivery_request("run", b"12345"),
    COUNTED,
    make_scoring_request("run", "{}", b"12345"),
    SCORED,
    REQUEST,
    EvaluateRequest("run", 4, "{}", "hash", ("b", "a"), 3, -1, "", MODEL, True),
    REPLY,
    SCORES,
    SPREAD,
    BenefitRequest("run", 4, "{}", "hash", ("b", "a"), 3, -1, "", MODEL, MODEL, 5),
    COMPARED,
    KeysRequest("run", 4, ("north",), 1),
    KeysAnswer("run", 4, "north", b"{}", b"", "line"),
    SharesRequest("run", 4, (b"{}",), (b"",), ("line",)),
    SharesAnswer("run", 4, "north", ("south",), (b"letter",)),
    MaskedRequest("run", 4, ("south",), (b"letter",), 3),
    MaskedAnswer("run", 4, "north", np.array([0, 7], np.uint32)),
    RevealRequest("run", 4, ("north",)),
    RevealAnswer("run", 4, "north", ("north",), ("b",), (b"1",), ("west",), (b"2",)),
)
HOSTILE_NUMBERS: dict[type, tuple[float, ...]] = {
    float: (1e300, -1e300, float("nan"), float("inf"), float("-inf"), 77.0, -1e-3, 1.5),
    int: (2**63 - 1, -(2**63), -(2**40), 2**40, 10**12, -2, 77),
}
PLAIN_TYPES = (str, int, float)


def kind_in(hint: Any) -> type | None:
    """Text or number that a field holds, by itself, in a tuple, or perhaps; None for anything else."""
    arrays = typing.get_origin(hint) is Mapping  # their names are checked where they are read
    inner = [part for part in typing.get_args(hint) if part in PLAIN_TYPES and not arrays] or [hint]
    return inner[0] if inner[0] in PLAIN_TYPES else None


def texts_and_numbers(record: type) -> dict[str, type]:
    hints = typing.get_type_hints(record)
    kinds = {name: kind_in(hints[name]) for name in list_record_field_names(record)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


@pytest.mark.parametrize("kind", typing.get_args(Record), ids=lambda kind: kind.__name__)
def test_every_text_and_number_has_a_bound_beside_its_type(kind: type) -> None:
    assert kind in {type(record) for record in RECORDS} or kind is typing.get_origin(Record)
    assert list_field_bounds(kind).keys() == texts_and_numbers(kind).keys()
    assert all(isinstance(bound, BOUND_TYPES) for bound in list_field_bounds(kind).values())


def changed(record: Any, name: str, value: object) -> Any:
    """A good record, one of its fields changed as it travels: the first entry where it is a list."""
    content = encode_record(record)
    old = content["fields"].get(name)
    new = [value, *old[1:]] if isinstance(old, list) else value
    content["fields"] = ConfigRecord({**content["fields"], name: new})
    return content


def fields_of(*kinds: type) -> list[Any]:
    return [
        pytest.param(record, name, id=f"{type(record).__name__}.{name}")
        for record in RECORDS
        for name, kind in texts_and_numbers(type(record)).items()
        if kind in kinds
    ]


def refusal_of(record: Any, name: str, value: object) -> tuple[str, Any]:
    """Return why it is refused, as both sides repeat it; or the record that it was taken for."""
    try:
        return "", decode_record(changed(record, name, value), type(record))
    except WireError as error:
        return make_printable_line(str(error)), None


def harmless(value: object, bound: object) -> bool:
    """Return whether a text that was accepted can be shown to anybody, or is a document that nobody reads."""
    if isinstance(bound, LongTextBound):
        return len(str(value)) <= bound.longest
    free = isinstance(bound, EscapedFreeText)
    texts = [value] if isinstance(value, str) else list(typing.cast(Any, value))
    most = MAX_LINES * (MAX_REASON_CHARACTERS + 4) if free else 1_000
    return all(raw_in(text, "\n" if free else "") == set() and len(text) <= most for text in texts)


@pytest.mark.parametrize(("record", "name"), fields_of(str))
def test_a_hostile_text_is_refused_or_harmless(record: Any, name: str) -> None:
    bound = list_field_bounds(type(record))[name]
    for what, text in HOSTILE_TEXTS.items():
        reason, accepted = refusal_of(record, name, text)
        assert raw_in(reason, "") == set(), what
        assert len(reason) <= MAX_REASON_CHARACTERS, what
        assert reason or harmless(getattr(accepted, name), bound), what
        assert reason or isinstance(bound, EscapedFreeText | LongTextBound), what


@pytest.mark.parametrize(("record", "name"), fields_of(float, int))
def test_a_hostile_number_is_refused_or_within_its_range(record: Any, name: str) -> None:
    bound = list_field_bounds(type(record))[name]
    span: Any = getattr(bound, "bound", bound)
    assert abs(span.most) < 1e16
    for number in HOSTILE_NUMBERS[texts_and_numbers(type(record))[name]]:
        reason, accepted = refusal_of(record, name, number)
        value = getattr(accepted, name) if not reason else ()
        entries = value if isinstance(value, tuple) else (value,)
        assert reason or all(np.isnan(entry) or span.least <= entry <= span.most for entry in entries), number


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_hostile_names_of_head_rows_statistics_and_fields_are_refused_harmlessly(text: str) -> None:
    refusals = [refusal_of(REPLY, name, text) for name in ("update.classes", "statistics.names")]
    unknown = refusal_of(REPLY, text, 1)
    assert "TrainReply does not have" in unknown[0]
    for reason, accepted in (*refusals, unknown):
        assert accepted is None
        assert raw_in(reason, "") == set()
        assert len(reason) <= MAX_REASON_CHARACTERS


def test_a_site_tells_the_largest_loss_for_any_larger_one_and_for_none_at_all() -> None:
    losses = [clip_reported_loss(loss) for loss in (None, 0.5, 1e30, float("inf"), float("nan"))]
    assert losses == [None, 0.5, MAX_LOSS, MAX_LOSS, MAX_LOSS]
