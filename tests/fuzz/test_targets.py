"""No bytes make a reader do anything but what it declares: seeds, mutated, by the thousand."""

import random
import warnings
from functools import lru_cache
from typing import Any

import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.common.wire.codec import encode_record
from tests.fuzz.targets import RECORDS, TARGETS, accepts

_WORDS = b"-1 0 1e999 nan inf \" ' [ ] { } , = true null [[ .. / \\u0000".split()
_BYTES = (b"\n", b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\x80\x00\x00\x00", b"\xff" * 8, b"9" * 25)
TOKENS = (*_WORDS, *_BYTES)
"""Pieces that have broken parsers before."""


def mutated(dice: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    """Overwrite, cut out, double or put in something at one to four places of a seed."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.randint(1, 4)):
        start, length = dice.randint(0, len(data)), dice.randint(0, 12)
        piece = dice.choice(TOKENS) if dice.random() < 0.5 else dice.randbytes(dice.randint(0, 8))
        end = dice.choice((start, start + len(piece), start + length, len(data)))
        data[start:end] = dice.choice((piece, data[start : start + length] * 2))
        if data and dice.random() < 0.2:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


@lru_cache
def _seeds(name: str) -> tuple[bytes, ...]:
    return tuple(TARGETS[name].seeds())


NOISE = (*map(random.Random(5).randbytes, (0, 1, 7, 64, 4096)), bytes(100))


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_written_is_accepted(name: str) -> None:
    for seed in _seeds(name):
        TARGETS[name].check(seed)


def check_mutated(name: str, times: int) -> None:
    dice = random.Random(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a program they are no errors
        for data in (*NOISE, *(mutated(dice, _seeds(name)) for _ in range(times))):
            TARGETS[name].check(data)


@pytest.mark.parametrize("name", TARGETS)
def test_noise_and_mutated_bytes_are_refused_as_declared_or_come_back(name: str) -> None:
    check_mutated(name, 50)


MUTATED = 2000


@pytest.mark.torture
@pytest.mark.parametrize("name", TARGETS)
def test_thousands_of_mutated_bytes_are_refused_as_declared_or_come_back(name: str, record_property: Any) -> None:
    record_property("survived", ("mutated bytes, read", MUTATED))
    check_mutated(name, MUTATED)


WHOLE = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    *(WHOLE, st.floats(), st.text(max_size=5), st.binary(max_size=16), st.booleans()),
    *(st.lists(kind, max_size=4) for kind in (WHOLE, st.floats(), st.text(max_size=5))),
)
NAMES = tuple(sorted({name for record in RECORDS for name in encode_record(record)["fields"]}))


@given(
    which=st.integers(0, len(RECORDS) - 1),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    lost=st.sets(st.sampled_from(NAMES), max_size=1),
)
@settings(max_examples=100)
def test_fields_of_any_value_are_refused_by_a_wire_error_or_come_back(
    which: int, changes: dict[str, Any], lost: set[str]
) -> None:
    content = encode_record(RECORDS[which])
    fields = {**content["fields"], **changes}
    content["fields"] = ConfigRecord({name: value for name, value in fields.items() if name not in lost})
    accepts(content, type(RECORDS[which]))


def test_a_shape_of_hundreds_of_thousands_of_dimensions_takes_no_minutes() -> None:
    content = encode_record(RECORDS[4])
    content["fields"]["statistics/prior/shape"] = [2**62] * 200_000
    accepts(content, type(RECORDS[4]))
