"""Secure aggregation in whole federations: what is on the wire, and that the model is the plain one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from common.errors import BadInput
from common.wire.codec import decode
from common.wire.records import EvaluateReply, TrainReply
from common.wire.secure_aggregation import TEST_ROUND, MaskedAnswer
from server.simulation.backends import inline as backends
from strategies.privacy.mechanism import find_secure_aggregation_faults
from strategies.registry import build_strategy
from tests.federations import FULL_COVERAGE, experiment, federation, of_type, overheard

MASKED = "privacy.secure_aggregation=true"
ONE_ROUND = ("run.rounds=1", "partition.shared=2")


def model_of(folder: Path, out: str) -> dict[str, np.ndarray]:
    return load_file(folder / out / "model.safetensors")


def rows_that_stayed(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return next(event["classes"] for event in events if event["event"] == "rows_stayed_masked")


@pytest.mark.slow
def test_the_model_is_the_plain_one_within_the_resolution_and_no_update_is_on_the_wire(
    tmp_path: Path, monkeypatch: Any
) -> None:
    federation(tmp_path, *ONE_ROUND, out="plain")
    traffic = overheard(monkeypatch)
    summary = federation(tmp_path, *ONE_ROUND, MASKED, out="masked")

    replies = [decode(content, TrainReply) for content in of_type(traffic.up, "train")]
    rounds = [decode(content, MaskedAnswer).round for content in of_type(traffic.up, "query.masked_update")]
    assert len(replies) == rounds.count(1) == rounds.count(TEST_ROUND) == len(rounds) / 2 == 3
    assert all(not reply.update.named() for reply in replies)

    plain, masked = model_of(tmp_path, "plain"), model_of(tmp_path, "masked")
    alone = rows_that_stayed(tmp_path / "masked")
    rows = [row for row in range(10) if str(row) not in alone]
    assert 0 < len(rows) < 10  # the experiment has classes of one owner and of more
    assert sorted(summary["test"]["pooled"]["per_class"]) == [str(row) for row in rows]  # nor are their counts opened
    heads = {name for name in plain if len(plain[name]) == 10 and name.startswith("head")}
    worst = max(float(np.abs(plain[name] - masked[name]).max()) for name in plain.keys() - heads)
    worst_row = max(float(np.abs(plain[name][rows] - masked[name][rows]).max()) for name in heads)
    assert 0 < worst < 2e-7  # 3 sites' halves of 16 / 2**30, and one rounding to float32
    assert 0 < worst_row < 2e-7


@pytest.mark.slow
def test_a_site_lost_between_training_and_masking_costs_its_own_update_only(tmp_path: Path, monkeypatch: Any) -> None:
    answered = backends.InlineGrid._call

    def losing(grid: backends.InlineGrid, message: Message) -> Message:
        reply = answered(grid, message)
        if message.metadata.message_type == "query.masked_update" and reply.content["fields"]["site"] == "site-1":
            reply.content["fields"]["site"] = "nobody"
        return reply

    monkeypatch.setattr(backends.InlineGrid, "_call", losing)
    federation(tmp_path, *ONE_ROUND, MASKED, "participation.min_sites=2")
    line = (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8")
    assert '"site-1": "reply belongs to run, round, site' in line
    assert '"sites": ["site-2", "site-3"]' in line


@pytest.mark.parametrize(
    ("method", "parameters", "reason"),
    [
        ("fedmlp", {}, "its statistics would travel beside the update, unmasked"),
        ("rscfed", {}, "it weighs each update by what that update is"),
        ("unifed", {}, "the model is passed on from site to site"),
        ("individual", {}, "every site trains by itself, and nothing is summed"),
        ("centralised", {}, "there is one pseudo-site"),
        ("surgical", {"mean": {"kind": "coordinate_median"}}, "a robust mean looks at each update by itself"),
        ("surgical", {"compress_update": "int8"}, "masked numbers take the same room"),
    ],
)
def test_a_method_that_needs_more_than_sums_is_refused_with_the_reason(
    method: str, parameters: dict[str, Any], reason: str
) -> None:
    found = [str(fault) for fault in find_secure_aggregation_faults(build_strategy(method, parameters).site)]
    assert any(reason in fault for fault in found)


@pytest.mark.parametrize(
    "method", ["surgical", "fedprox", "partial_loss", "vanilla", "pfl", "fedsld", *sorted(FULL_COVERAGE)]
)
def test_averaging_methods_can_do_with_sums_of_sites_that_count_alike(method: str) -> None:
    assert find_secure_aggregation_faults(build_strategy(method, {"weighting": "uniform"}).site) == []
    (fault,) = find_secure_aggregation_faults(build_strategy(method, {"weighting": "samples"}).site)
    assert (fault.where, fault.remedy) == ("method.weighting", 'Set method.weighting = "uniform".')


def test_ray_is_refused_as_its_sites_keep_nothing_in_memory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"inline\" with privacy.secure_aggregation"):
        federation(tmp_path, MASKED, "simulation.backend=ray")


def test_the_experiment_says_so_to_the_sites(tmp_path: Path) -> None:
    assert experiment(tmp_path, MASKED).experiment.privacy.secure_aggregation


@pytest.mark.slow
def test_test_figures_are_those_of_all_sites_images_together_and_no_reply_holds_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    bare = federation(tmp_path, *ONE_ROUND, "partition.shared=10", "run.method=vanilla", out="bare")
    traffic = overheard(monkeypatch)
    summary = federation(tmp_path, *ONE_ROUND, "partition.shared=10", "run.method=vanilla", MASKED, out="masked")

    tested = [decode(content, EvaluateReply) for content in of_type(traffic.up, "evaluate")]
    assert all((one.class_names, one.histogram_classes, one.validation_classes) == ((), (), ()) for one in tested)
    assert len([one for one in tested if one.masked_classes]) == 3
    pooled, plain = summary["test"]["pooled"], bare["test"]["pooled"]
    assert {name: one["sites"] for name, one in pooled["per_class"].items()} == dict.fromkeys(
        summary["classes"], ("site-1", "site-2", "site-3")
    )
    for name, one in pooled["per_class"].items():
        same = plain["per_class"][name]  # the same model within 2e-7, and every site tests on the same images here
        assert (one["positives"], one["negatives"]) == (same["positives"], same["negatives"])
        assert one["auroc"]["value"] == pytest.approx(same["auroc"]["value"], abs=2e-3)
