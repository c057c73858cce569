"""Promises of the methods, kept by whole federations on real digits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client import app
from polyclinic.client.training.figures import RequestedMetricsComputer
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.state import read_model_state
from polyclinic.common.wire.codec import count_payload_bytes
from polyclinic.common.wire.records import TrainReply, TrainRequest
from polyclinic.server.runs.verify import verify_run
from polyclinic.strategies.engine.events import TooFewSites
from polyclinic.strategies.methods.base import SequentialMethod
from polyclinic.strategies.registry import STRATEGIES, build_strategy
from tests.federations import (
    ALL_SHARED,
    FULL_COVERAGE,
    Traffic,
    experiment,
    federation,
    finished,
    given_weights,
    json_lines,
    needs_of,
    text_of,
)

SUMMARY = {
    "method", "backend", "rounds", "seed", "classes", "sites", "test", "per_site", "seconds", "model_sha256",
}  # fmt: skip


@pytest.mark.parametrize("trunk", ["fedavg", "fedbn_plus"])
def test_with_every_class_owned_by_every_site_surgical_is_fedavg_bit_for_bit(tmp_path: Path, trunk: str) -> None:
    same = (ALL_SHARED, "method.weighting=uniform", f"method.trunk={trunk}", given_weights())
    surgical = federation(tmp_path, "run.method=surgical", *same, out="surgical")
    fedavg = federation(tmp_path, "run.method=fedavg", *same, out="fedavg")
    assert surgical["model_sha256"] == fedavg["model_sha256"]


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    again, other = (federation(tmp_path, f"run.seed={seed}", out=f"{seed}")["model_sha256"] for seed in (3, 4))
    assert again == finished()[1]["model_sha256"] != other


def test_a_site_receives_and_sends_only_its_own_head_rows(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, "partition.shared=0")
    own = {name: site["classes"] for name, site in summary["sites"].items()}
    assert len(traffic.requests) == len(traffic.replies) == 6
    for request, reply in zip(traffic.requests, traffic.replies, strict=True):
        assert list(request.model.head.class_names) == own[reply.site] == list(reply.update.head.class_names)
        assert request.model.head.weight.shape[0] == len(own[reply.site])


def test_nothing_that_a_site_receives_names_another_sites_classes(tmp_path: Path, traffic: Traffic) -> None:
    lists = 'partition={kind = "class_lists", lists = {north = ["Alpha", "Beta"], south = ["Gamma"]}}'
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (60, 1), dtype=np.uint8)
    arrays = {f"{part}_images": rng.integers(0, 256, (60, 16, 16), dtype=np.uint8) for part in ("train", "val", "test")}
    np.savez(tmp_path / "data.npz", **arrays, **{f"{part}_labels": labels for part in ("train", "val", "test")})
    data = f'data={{kind = "npz", path = "{tmp_path / "data.npz"}", classes = ["Alpha", "Beta", "Gamma"]}}'
    federation(tmp_path, data, lists)
    sent_to_south = [text_of(content) for _, content in traffic.down if "Gamma" in text_of(content)]
    assert len(sent_to_south) == 4
    assert not [text for text in sent_to_south if "Alpha" in text or "Beta" in text]


WITH_PAGES = {"surgical", "individual", "unifed"}
"""Whose report ``make test`` draws, which takes longer than the run; ``make test-network`` draws those of all."""


@pytest.mark.parametrize(
    ("method", "pages"),
    [pytest.param(name, name in WITH_PAGES, id=name) for name in sorted(STRATEGIES)]
    + [
        pytest.param(name, True, id=f"{name} with pages", marks=pytest.mark.long)
        for name in sorted(STRATEGIES.keys() - WITH_PAGES)
    ],
)
def test_every_method_ends_with_a_whole_run_folder(method: str, pages: bool, tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, f"run.method={method}", *needs_of(method), "run.keep_updates=true", pages=pages)
    run = tmp_path / "run"
    assert set(summary) >= SUMMARY
    assert json.loads((run / "summary.json").read_text(encoding="utf-8")) == json.loads(json.dumps(summary))
    assert len(json_lines(run / "rounds.jsonl")) == summary["rounds"]
    assert [page.stat().st_size > 10_000 for page in run.glob("report.html")] == [True] * pages
    assert summary["test"]["mean_auroc"] > 0.5
    assert set(summary["test"]["per_class"]) == set(map(str, range(10)))
    strategy = build_strategy(method, {})
    rule = strategy.site
    for reply in traffic.replies:
        sends = {
            "trunk": rule.payload.trunk,
            "norm": rule.parts.sends_batch_norm,
            "head": rule.payload.head,
        }
        sent = {name: getattr(reply.update, name) is not None for name in sends}
        assert sent == (sends if reply.round else dict.fromkeys(sends, False))
    assert (run / "model.safetensors").exists() == rule.parts.has_global_model
    verdict = verify_run(run / "receipt.json")
    assert verdict.faults == []
    added_up = sum(line.startswith("round ") for line in verdict.verified)
    assert added_up == (
        0 if isinstance(strategy, SequentialMethod) and strategy.server_training_settings else summary["rounds"]
    )


@pytest.mark.parametrize("method", sorted(FULL_COVERAGE))
def test_plain_fedavg_refuses_partial_labels_and_says_what_to_use(method: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f'{method} needs every class annotated by every site; .*"surgical"'):
        federation(tmp_path, f"run.method={method}", given_weights())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("choice", ["run.method=fedbn_plus", "method.trunk=fedbn_plus"])
def test_fedbn_plus_is_refused_where_batch_normalisation_is_of_a_random_network(choice: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.weights: there are none"):
        federation(tmp_path, choice, ALL_SHARED)
    assert not (tmp_path / "run").exists()
    federation(tmp_path, choice, ALL_SHARED, "model.norm=group")


def test_fedbn_plus_leaves_batch_normalisation_as_it_was(tmp_path: Path) -> None:
    run, _ = finished("method.trunk=fedbn_plus", given_weights())
    network = load_model(run)
    began = build_network(experiment(tmp_path).experiment.model, network.class_names, 3)
    np.testing.assert_array_equal(read_model_state(network).norm, read_model_state(began).norm)
    assert not np.array_equal(read_model_state(network).trunk, read_model_state(began).trunk)


def test_every_message_counts_among_a_sites_bytes_and_most_are_arrays(tmp_path: Path, traffic: Traffic) -> None:
    sites = federation(tmp_path, "evaluation.pooled=false")["sites"].values()  # histograms of scores are no few fields
    down, up = (sum(site[name] for site in sites) for name in ("bytes_down", "bytes_up"))
    for counted, passed in ((down, traffic.down), (up, traffic.up)):
        assert counted == sum(count_payload_bytes(content) for _, content in passed)
    arrays = sum(array.nbytes for reply in traffic.replies for array in reply.update.to_named_arrays().values())
    assert arrays < up < arrays + 6 * 2_000


def test_a_site_that_builds_another_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = app.answer_roll_call
    monkeypatch.setattr(app, "answer_roll_call", lambda site, call: replace(honest(site, call), layout="another"))
    with pytest.raises(BadInput, match=r"(?s)site site-1: builds another model .*site site-3"):
        federation(tmp_path)


def test_a_site_that_fails_or_sends_what_is_not_finite_costs_only_its_own_update_and_the_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = app.train_with_privacy_layers

    def harmed(site: Any, request: TrainRequest, masks: Any) -> TrainReply:
        if (site.name, request.round) == ("site-2", 2):
            raise OSError("No space left on device")
        reply = train(site, request, masks)
        spoil = {
            ("site-1", 3): lambda: reply.update.trunk.fill(np.nan),
            ("site-3", 4): lambda: reply.update.head.bias.fill(np.inf),
        }
        spoil.get((site.name, request.round), lambda: None)()
        return reply

    monkeypatch.setattr(app, "train_with_privacy_layers", harmed)
    summary = federation(tmp_path, "participation.min_sites=2", "run.rounds=4")
    lines = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert summary["rounds"] == 4
    assert [set(line["absent"]) for line in lines] == [set(), {"site-2"}, {"site-1"}, {"site-3"}]
    assert [len(line["sites"]) for line in lines] == [3, 2, 2, 2]
    assert "No space left on device" in lines[1]["absent"]["site-2"]
    assert lines[2]["absent"]["site-1"] == "trunk holds values that are not finite"
    assert lines[3]["absent"]["site-3"] == "head.bias holds values that are not finite"
    assert np.isfinite(read_model_state(load_model(tmp_path / "run")).trunk).all()


def test_too_few_sites_stop_the_run_with_who_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = app.train_with_privacy_layers
    monkeypatch.setattr(
        app, "train_with_privacy_layers", lambda site, r, masks: train(site, r, masks) if r.round < 3 else 1 / 0
    )
    with pytest.raises(TooFewSites, match=r"round 3: 0 of 3 sites replied. site-1: .*division by zero.*site-3"):
        federation(tmp_path, "run.rounds=4")
    assert len(json_lines(tmp_path / "run" / "rounds.jsonl")) == 2


def test_a_site_alone_that_diverges_stops_the_run_with_the_reason_and_keeps_no_such_memory(tmp_path: Path) -> None:
    with pytest.raises(TooFewSites, match=r"round \d: 0 of 3 sites replied\. site-1: training diverged"):
        federation(tmp_path, "run.method=individual", "training.lr=1e30", "training.batch_size=5000")
    assert {path.name for path in (tmp_path / "run").rglob("round-*.safetensors")} <= {"round-000001.safetensors"}
    assert '"stopped"' in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")


def test_personal_models_that_cannot_be_tested_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = RequestedMetricsComputer.compute_test_metrics
    monkeypatch.setattr(
        RequestedMetricsComputer,
        "compute_test_metrics",
        lambda self, task: 1 / 0 if task.site.name == "site-2" else tested(self, task),
    )
    with pytest.raises(TooFewSites, match=r"test: 2 of 3 sites replied\. site-2: .*division by zero"):
        federation(tmp_path, "run.method=individual")


def test_each_sites_own_model_is_on_its_disk_and_is_the_one_it_tested(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, "run.method=individual", "run.rounds=3")
    for answer in traffic.evaluations[-3:]:
        description = (tmp_path / "run" / "sites" / answer.site / "model" / "model.json").read_text(encoding="utf-8")
        assert json.loads(description)["model_sha256"] == answer.model_sha256


@pytest.mark.parametrize(
    ("criterion", "figure", "best"), [("loss", "validation_loss", min), ("auroc", "validation_auroc", max)]
)
def test_a_site_alone_ends_with_the_round_that_was_best_on_its_own_validation_part(
    criterion: str, figure: str, best: Callable[..., float], tmp_path: Path, traffic: Traffic
) -> None:
    criterion = f"evaluation.criterion={criterion}"
    federation(tmp_path, "run.method=individual", "run.rounds=6", "training.lr=0.05", criterion)
    ends = traffic.evaluations
    for last, tested in zip(ends[:3], ends[3:], strict=True):
        figures = [getattr(reply, figure) for reply in (*traffic.replies, last) if reply.site == last.site]
        assert getattr(tested, figure) == pytest.approx(best(value for value in figures if value is not None), abs=1e-6)


def test_personal_heads_are_tested_as_they_were_in_the_federations_best_round(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, "run.method=pfl", "run.rounds=7", "training.lr=0.05")
    by_round: dict[int, dict[str, float | None]] = {}
    for reply in traffic.replies:
        by_round.setdefault(reply.round - 1, {})[reply.site] = reply.validation_loss
    ends = [(answer.site, answer.validation_loss) for answer in traffic.evaluations[-6:]]  # those before are of trials
    by_round[7] = dict(ends[:3])
    assert dict(ends[3:]) == pytest.approx(by_round[summary["best_round"]], abs=1e-6)
