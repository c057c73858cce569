"""A lost worker is not a lost hospital: kills of workers and raylets change nothing in the model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.federations import DIGITS
from tests.server.ray_kills import rounds_of, run_under_fire

KILLS = 10


@pytest.mark.long
@pytest.mark.parametrize(("seed", "needed"), [(0, 0), (1, 1), (2, 0)])
def test_ten_kills_of_workers_and_raylets_change_nothing(
    seed: int, needed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Args: ``needed`` is ``participation.min_sites``: 0 for all, 1 for a round that would do without the others."""
    from tests.federations import federation

    record_property("survived", ("SIGKILL of a process of Ray", KILLS))
    record_property("same model", "SIGKILL of a process of Ray")
    settings = ["run.rounds=80", "evaluation.checkpoint=last", f"run.seed={seed}"]
    settings.append(f"participation.min_sites={needed or 3}")
    (tmp_path / "fire.toml").write_text(DIGITS, encoding="utf-8")
    overrides = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "fire"
    killed, left = run_under_fire(["run", str(tmp_path / "fire.toml"), *overrides], out, seed, KILLS)
    print(seed, dict(killed), "starts", len(left))
    assert killed.total() == KILLS
    assert killed["worker"] > 0  # a worker that is not found is not killed
    assert [line["absent"] for line in rounds_of(out) if line["absent"]] == []
    summary = json.loads((out / "summary.json").read_text())
    assert summary["model_sha256"] == federation(tmp_path, *settings, out="undisturbed")["model_sha256"]
    assert [processes for processes in left if processes] == []
