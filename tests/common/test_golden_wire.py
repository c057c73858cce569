"""What a release sends stays readable, and does not change without a new wire version."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyclinic.common.wire.canonical_bytes import hash_record, iterate_canonical_bytes, parse_canonical_record
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.versions import WIRE_FORMATS, WIRE_VERSION, write_in_version
from tests.common.flower_messages import same
from tests.golden.write import derive_golden_values, encode_golden_records, make_golden_records

GOLDEN = Path(__file__).parents[1] / "golden"
PREFIX = "polyclinic."
CHANGED = (
    f"what is sent has changed, and WIRE_VERSION is still {WIRE_VERSION}: hospitals of the present release would not "
    "understand it. Undo the change, or raise the version: tests/golden/README.md says how"
)
RECORDS = {type(record).__name__: record for record in make_golden_records(PREFIX)}
SPOKEN = [
    (name, version) for version in WIRE_FORMATS for name in RECORDS if name not in WIRE_FORMATS[version].added_records
]
"""Each record class with each version that has it."""


def read_derived(version: int) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / f"wire-{version}" / "derived.json").read_text(encoding="utf-8")))


def test_there_are_golden_files_of_each_spoken_version_and_of_no_other() -> None:
    assert {path.name for path in GOLDEN.glob("wire-*")} == {f"wire-{version}" for version in WIRE_FORMATS}
    for version in WIRE_FORMATS:
        names = {path.stem for path in (GOLDEN / f"wire-{version}").glob("*.record")}
        assert names == RECORDS.keys() - WIRE_FORMATS[version].added_records, f"wire-{version}"


@pytest.mark.parametrize("name", RECORDS)
def test_this_release_sends_the_bytes_of_its_wire_version(name: str) -> None:
    golden = (GOLDEN / f"wire-{WIRE_VERSION}" / f"{name}.record").read_bytes()
    assert encode_golden_records(PREFIX)[name] == golden, CHANGED


def test_this_release_derives_the_hashes_and_keys_of_its_wire_version() -> None:
    assert derive_golden_values(PREFIX) == read_derived(WIRE_VERSION), CHANGED


@pytest.mark.parametrize(("name", "version"), SPOKEN)
def test_a_record_of_each_spoken_version_is_read_as_an_equal_record(name: str, version: int) -> None:
    golden = parse_canonical_record((GOLDEN / f"wire-{version}" / f"{name}.record").read_bytes())
    unsaid = dict.fromkeys(WIRE_FORMATS[version].statements.get(name, ()), "")
    assert same(decode_record(golden, type(RECORDS[name])), replace(RECORDS[name], **unsaid))


@pytest.mark.parametrize(("name", "version"), SPOKEN)
def test_a_record_is_written_for_an_earlier_release_in_the_bytes_that_it_would_write(name: str, version: int) -> None:
    present = parse_canonical_record((GOLDEN / f"wire-{WIRE_VERSION}" / f"{name}.record").read_bytes())
    written = write_in_version(present, version)
    golden = (GOLDEN / f"wire-{version}" / f"{name}.record").read_bytes()
    assert b"".join(iterate_canonical_bytes(written)) == golden
    assert hash_record(written) == read_derived(version)["hash of each record"][name]


@pytest.mark.parametrize("version", WIRE_FORMATS)
def test_what_both_sides_derive_is_the_same_in_each_spoken_version(version: int) -> None:
    by_record = "hash of each record"  # which has the version in it, and records that others lack
    derived, present = read_derived(version), read_derived(WIRE_VERSION)
    assert {**derived, by_record: None} == {**present, by_record: None}
