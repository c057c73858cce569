"""Of three hospitals, two or one keep their figures: the one that lies neither chooses the model nor repeats rounds."""

import html
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyclinic.client import app
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.client.training.secure_aggregation import HeldUpdateStore
from polyclinic.common.wire.records import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest
from polyclinic.server.runs.verify import verify_run
from tests.federations import federation, json_lines

pytestmark = pytest.mark.slow
LIAR, ROUNDS = "site-2", 4
SILENT: Mapping[str, Any] = {"validation_loss": None, "validation_auroc": None}
LIES = {
    "the untrained model is perfect": lambda n: (0.0, 1.0) if n == 1 else (1e6, 0.0),
    "each model has collapsed": lambda n: (min(0.1 * 10.0**n, 1e6), 0.5),
}


def let_keep_figures(monkeypatch: pytest.MonkeyPatch, quiet: set[str], lie: str) -> None:
    """Some sites state no figures, as with `training_figures = false`; the liar's are invented."""

    def figures(site: Site, server_round: int) -> Mapping[str, Any]:
        if site.name == LIAR:
            return dict(zip(SILENT, LIES[lie](server_round), strict=True))
        return SILENT if site.name in quiet else {}

    def train(site: Site, request: TrainRequest, masks: HeldUpdateStore) -> TrainReply:
        return replace(train_with_privacy_layers(site, request, masks), **figures(site, request.round))

    def evaluate(site: Site, request: EvaluateRequest, masks: HeldUpdateStore) -> EvaluateReply:
        reply = evaluate_with_privacy_layers(site, request, masks)
        return replace(reply, **figures(site, request.round + 1))

    monkeypatch.setitem(vars(app), "train_with_privacy_layers", train)
    monkeypatch.setitem(vars(app), "evaluate_with_privacy_layers", evaluate)


@pytest.mark.parametrize("quiet", [{"site-1", "site-3"}, {"site-1"}], ids=["sole", "one of two"])
@pytest.mark.parametrize("lie", LIES)
def test_the_liar_neither_chooses_the_model_nor_has_rounds_repeated(
    lie: str, quiet: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices = ("partition.sites=3", f"run.rounds={ROUNDS}")
    last = federation(tmp_path, *choices, "evaluation.checkpoint=last", out="last")
    let_keep_figures(monkeypatch, quiet, lie)
    summary = federation(tmp_path, *choices, pages=True)
    assert summary["model_sha256"] == last["model_sha256"]
    assert summary["best_round"] in (None, ROUNDS)
    events = json_lines(tmp_path / "run" / "events.jsonl")
    assert "rolled_back" not in {event["event"] for event in events}
    (because,) = [event["because"] for event in events if event["event"] == "last_model"]
    assert because.startswith("fewer than 3 of 3 hospitals sent a validation AUROC to compare rounds by")
    assert summary["last_model_because"] == because
    assert because in html.unescape((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert not verify_run(tmp_path / "run").faults
