"""flwr-sim as a person types it, and what a run leaves in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_real_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is absent: no real images")
PROGRAM = "from polyclinic.studies.cli import main; main()"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run that may not have begun yet."""
    path = run / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
