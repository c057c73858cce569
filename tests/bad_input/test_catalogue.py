"""Every malformed thing of the catalogue: the whole message that the user gets, and how the program ends."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.catalogue import Case, expected, told

pytestmark = pytest.mark.catalogue

KINDS = {
    "experiment_files": 20,
    "site_files": 15,
    "coordinator_files": 15,
    "data_sets": 15,
    "images": 8,
    "credentials": 10,
    "checkpoints": 5,
    "wire_records": 12,
    "model_files": 4,
}
"""Each with the number of cases that it has at least."""
SOUP = re.compile(
    r"Traceback|Errno|\b[A-Z]\w+(Error|Exception|Warning)\b|<class|\bobject at 0x|https?://\S*(pydantic|cryptography)"
)
"""What tells a programmer something, and a hospital's IT at six in the evening nothing."""

ANOTHER_VOICE = re.compile(
    r"^error [^:]+: (\w[\w.\[\]-]*: )*[A-Z][a-z]"
    r"|\bshould (be|have|not|match)\b|\b1 (images|lines|sites|patients|rounds)\b"
)
"""What follows file and key goes on in small letters; a rule is a "must"; one thing is one."""


def cases_of(kind: str) -> tuple[Case, ...]:
    cases: tuple[Case, ...] = importlib.import_module(f"tests.bad_input.{kind}").CASES
    return cases


def _every() -> list[Any]:
    return [
        pytest.param(kind, case, marks=case.marks, id=f"{kind}: {case.name}")
        for kind in KINDS
        for case in cases_of(kind)
    ]


@pytest.mark.parametrize(("kind", "case"), _every())
def test_the_whole_message_is_told_and_no_more(
    kind: str, case: Case, tmp_path: Path, record_property: Any, restored_signals: None
) -> None:
    record_property("survived", f"bad input: {kind.replace('_', ' ')}")
    ended = case.done(tmp_path)
    said = told(ended, tmp_path)
    assert said == expected(kind)[case.name]
    assert ended.code == case.code


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_has_its_message_and_every_message_its_case(kind: str) -> None:
    names = [case.name for case in cases_of(kind)]
    assert len(set(names)) == len(names) >= KINDS[kind]
    assert sorted(names) == sorted(expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_speaks_to_programmers(kind: str) -> None:
    for name, said in expected(kind).items():
        assert not SOUP.search(said), name
        for line in said.splitlines():
            assert len(line) < 700, name
            assert not ANOTHER_VOICE.search(line), name
            assert line.rstrip('"').endswith((".", "?", "...", ")")) or kind == "credentials", (name, line)
