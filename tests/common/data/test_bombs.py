"""No file takes more memory than the rule allows, whatever it claims or unpacks to."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.common.data.bombs import READERS

ROOT = Path(__file__).parents[3]
MOST = 320
"""MiB: the 256 of the rule, and what a reader has beside."""
READ = {
    "PNG of many texts",
    "PNG that goes on",
    "nii.gz that goes on",
    "header and directory state ten bytes",
}
"""Files that are read as their heads say; the rest of them is not."""
Outcomes = Mapping[str, tuple[int, str]]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By bomb, the MiB that reading it took, and what became of it; read in a process of its own."""
    reader = request.param
    folder = tmp_path_factory.mktemp(reader)
    _, bombs, ending = READERS[reader]
    for name, made in bombs.items():
        content = made()
        assert len(content) < 3_200_000
        (folder / f"{name}{ending}").write_bytes(content)
    command = [sys.executable, "-m", "tests.common.data.bombs", reader, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("outcomes", READERS, indirect=True)
def test_no_bomb_takes_the_memory(outcomes: Outcomes) -> None:
    assert {name: mebibytes for name, (mebibytes, _) in outcomes.items() if mebibytes > MOST} == {}


@pytest.mark.parametrize("outcomes", ["npz", "patients", "unlabelled", "table", "picture", "weights"], indirect=True)
def test_bombs_are_refused_with_a_reason(outcomes: Outcomes) -> None:
    assert {name: text for name, (_, text) in outcomes.items() if name not in READ and "refused: " not in text} == {}
