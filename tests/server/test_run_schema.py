"""What a run writes into ``summary.json`` and ``rounds.jsonl`` is what the same classes read, entry by entry."""

import json
from pathlib import Path

import pytest

from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.server.runs.schema import RoundFileLine, RunSummary
from tests.federations import federation, needs_of

RUNS = {
    "surgical": (),
    "individual": (),  # with an ensemble of local models
    "fedmlp": (),  # with figures of its own in rounds and summary
    "unifed": (),  # with training at the coordinator
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    method = request.param
    federation(folder, f"run.method={method}", *needs_of(method), "run.rounds=2", *RUNS[method])
    return folder / "run"


def test_a_summary_is_written_again_byte_by_byte(run: Path) -> None:
    text = (run / "summary.json").read_text(encoding="utf-8")
    again = RunSummary.model_validate_json(text).to_json_object()
    assert format_as_json_text(again, indent=1) + "\n" == text
    assert list(json.loads(text)) == list(RunSummary.model_fields)


def test_the_lines_of_rounds_are_written_again_byte_by_byte(run: Path) -> None:
    for text in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines():
        again = RoundFileLine.model_validate_json(text).to_json_object()
        assert format_as_json_text(again) == text
        assert list(json.loads(text)) == list(RoundFileLine.model_fields)


def test_figures_of_a_method_in_a_package_of_its_own_are_kept() -> None:
    line = RoundFileLine.model_validate({"round": 1, "learned": {"hardness": {"north": 0.5}}})
    assert line.to_json_object()["learned"] == {"hardness": {"north": 0.5}}
