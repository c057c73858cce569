"""No file takes more memory than the rule allows, whatever it claims or unpacks to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.bombs import READERS
from tests.data.conftest import long

MOST = 320
"""MiB: the 256 of the rule, and what a reader has beside."""
READ = {"PNG of many texts", "PNG that goes on", "nii.gz that goes on", "header and directory state ten bytes"}
"""Files that are read as their heads say; the rest of them is not."""


LONG = ("items", "heads")
"""Readers whose bombs are like those of "picture" and "head"."""


@pytest.fixture(scope="module", params=[[name for name in READERS if name not in LONG], *long([LONG])])
def outcomes(request: pytest.FixtureRequest) -> list[tuple[str, str, int, str]]:
    """By reader and bomb, the MiB that reading it took, and what became of it; read in a process of its own."""
    command = [sys.executable, "-m", "tests.data.bombs", *request.param]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [tuple(outcome) for outcome in json.loads(ended.stdout.splitlines()[-1])]


def test_no_bomb_takes_the_memory(outcomes: list[tuple[str, str, int, str]]) -> None:
    assert [outcome for outcome in outcomes if outcome[2] > MOST] == []


def test_bombs_are_refused_with_a_reason(outcomes: list[tuple[str, str, int, str]]) -> None:
    others = [outcome for outcome in outcomes if "head" not in outcome[0] and outcome[1] not in READ]
    assert [outcome for outcome in others if "refused: " not in outcome[3]] == []
