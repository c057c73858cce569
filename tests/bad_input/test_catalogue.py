"""Every malformed thing of the catalogue: the whole message that the user gets, and how the program ends."""

import html
import importlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyclinic.client.cli
from tests.bad_input.catalogue import Case, changed, expected, message, simulation
from tests.bad_input.data_sets import DATA, TWO_SITES
from tests.bad_input.images import encoded, in_folder
from tests.federations import DIGITS

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


EVERY = [
    pytest.param(kind, case, marks=case.marks, id=f"{kind}: {case.name}") for kind in KINDS for case in cases_of(kind)
]


@pytest.fixture
def restored_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave this process as it was: ``start`` handles SIGTERM and changes malloc for a process of its own."""
    monkeypatch.setattr(polyclinic.client.cli, "reuse_large_buffers", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("kind", "case"), EVERY)
def test_the_whole_message_is_told_and_no_more(
    kind: str, case: Case, tmp_path: Path, record_property: Any, restored_signals: None
) -> None:
    record_property("survived", f"bad input: {kind.replace('_', ' ')}")
    ended = case.done(tmp_path)
    assert message(ended, tmp_path) == expected(kind)[case.name]
    assert ended.code == case.code


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_has_its_message_and_every_message_its_case(kind: str) -> None:
    names = [case.name for case in cases_of(kind)]
    assert len(set(names)) == len(names) >= KINDS[kind]
    assert sorted(names) == sorted(expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_speaks_to_programmers(kind: str) -> None:
    for name, text in expected(kind).items():
        assert not SOUP.search(text), name
        for line in text.splitlines():
            assert len(line) < 700, name
            assert not ANOTHER_VOICE.search(line), name
            assert line.rstrip('"').endswith((".", "?", "...", ")")) or kind == "credentials", (name, line)


def test_a_few_corrupt_images_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    table = in_folder(tmp_path, [encoded("PNG")[:-2000], b""])
    text = changed(DIGITS, (DATA, f"{table}skip_budget = 0.2\n"), TWO_SITES, ("rounds = 2", "rounds = 1"))
    (tmp_path / "good.toml").write_text(text, encoding="utf-8")
    ended = simulation("run", tmp_path / "good.toml", "--out", tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    skipped = [event for event in map(json.loads, lines) if event["event"] == "image_skipped"]
    assert ended.code == 0, ended.err
    assert sorted((event["image"], event["reason"]) for event in skipped) == [
        ("00.png", "damaged or cut off"),
        ("01.png", "empty"),
    ]
    sentence = "2 images could not be read, and are left out: 00.png (damaged or cut off) and 01.png (empty)."
    assert sentence in " ".join(ended.out.split())
    assert sentence in html.unescape((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert sentence in (tmp_path / "run" / "MODEL_CARD.md").read_text(encoding="utf-8").replace("\\", "")
