"""Secure aggregation in whole federations: what is on the wire, and that the model is the plain one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from polyclinic.common.errors import BadInput
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.secure_aggregation import TEST_ROUND, MaskedAnswer
from polyclinic.server.simulation.backends import inline as backends
from polyclinic.strategies.privacy.mechanism import find_secure_aggregation_faults
from polyclinic.strategies.registry import build_strategy
from tests.federations import FULL_COVERAGE, Traffic, experiment, federation, json_lines, of_type

MASKED = "privacy.secure_aggregation=true"
ONE_ROUND = ("run.rounds=1", "partition.shared=2")


@pytest.mark.slow
def test_the_model_is_the_plain_one_and_no_update_is_on_the_wire(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, *ONE_ROUND, out="plain")
    traffic.up.clear()
    summary = federation(tmp_path, *ONE_ROUND, MASKED, out="masked")
    rounds = [decode_record(content, MaskedAnswer).round for content in of_type(traffic.up, "query.masked_update")]
    assert len(traffic.replies) == rounds.count(1) == rounds.count(TEST_ROUND) == len(rounds) / 2 == 3
    assert all(not reply.update.to_named_arrays() for reply in traffic.replies)

    plain, masked = (load_file(tmp_path / out / "model.safetensors") for out in ("plain", "masked"))
    (stayed,) = (
        line for line in json_lines(tmp_path / "masked" / "events.jsonl") if line["event"] == "rows_stayed_masked"
    )
    rows = [row for row in range(10) if str(row) not in stayed["classes"]]
    assert 0 < len(rows) < 10  # the experiment has classes of one owner and of more
    assert sorted(summary["test"]["pooled"]["per_class"]) == [str(row) for row in rows]  # nor are their counts opened
    heads = {name for name in plain if len(plain[name]) == 10 and name.startswith("head")}
    worst = max(float(np.abs(plain[name] - masked[name]).max()) for name in plain.keys() - heads)
    worst_row = max(float(np.abs(plain[name][rows] - masked[name][rows]).max()) for name in heads)
    assert 0 < worst < 2e-7  # 3 sites' halves of 16 / 2**30, and one rounding to float32
    assert 0 < worst_row < 2e-7


@pytest.mark.slow
def test_a_site_lost_before_masking_costs_its_own_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = backends.InlineGrid.answer_message

    def losing(grid: backends.InlineGrid, message: Message) -> Message:
        reply = answered(grid, message)
        if message.metadata.message_type == "query.masked_update" and reply.content["fields"]["site"] == "site-1":
            reply.content["fields"]["site"] = "nobody"
        return reply

    monkeypatch.setattr(backends.InlineGrid, "answer_message", losing)
    federation(tmp_path, *ONE_ROUND, MASKED, "participation.min_sites=2")
    (line,) = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert line["absent"]["site-1"].startswith("reply belongs to run, round, site")
    assert line["sites"] == ["site-2", "site-3"]


@pytest.mark.parametrize(
    ("method", "parameters", "reason"),
    [
        ("fedmlp", {}, "its statistics would travel beside the update"),
        ("rscfed", {}, "it weighs each update"),
        ("unifed", {}, "the model is passed on"),
        ("individual", {}, "every site trains by itself"),
        ("centralised", {}, "there is one pseudo-site"),
        ("surgical", {"mean": {"kind": "coordinate_median"}}, "a robust mean"),
        ("surgical", {"compress_update": "int8"}, "masked numbers take the same room"),
    ],
)
def test_a_method_that_needs_more_than_sums_is_refused(method: str, parameters: dict[str, Any], reason: str) -> None:
    faults = map(str, find_secure_aggregation_faults(build_strategy(method, parameters).site))
    assert any(reason in fault for fault in faults)


@pytest.mark.parametrize(
    "method", ["surgical", "fedprox", "partial_loss", "vanilla", "pfl", "fedsld", *sorted(FULL_COVERAGE)]
)
def test_averaging_methods_can_do_with_sums_of_sites_that_count_alike(method: str) -> None:
    assert find_secure_aggregation_faults(build_strategy(method, {"weighting": "uniform"}).site) == []
    (fault,) = find_secure_aggregation_faults(build_strategy(method, {"weighting": "samples"}).site)
    assert (fault.where, fault.remedy) == ("method.weighting", 'Set method.weighting = "uniform".')


def test_a_masked_round_begins_with_a_model_in_fewer_bits(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, *ONE_ROUND, MASKED, 'method.compress_model="int8"')
    assert [request.model.form for request in traffic.requests] == ["int8"] * 3
    (line,) = json_lines(tmp_path / "run" / "rounds.jsonl")
    assert line["sites"] == ["site-1", "site-2", "site-3"]


def test_ray_is_refused_as_its_sites_keep_nothing_in_memory(tmp_path: Path) -> None:
    assert experiment(tmp_path, MASKED).experiment.privacy.secure_aggregation
    with pytest.raises(BadInput, match=r"inline\" with privacy.secure_aggregation"):
        federation(tmp_path, MASKED, "simulation.backend=ray")


@pytest.mark.slow
def test_test_figures_are_of_all_images_and_no_reply_holds_one(tmp_path: Path, traffic: Traffic) -> None:
    choices = (*ONE_ROUND, "partition.shared=10", "run.method=vanilla")
    bare = federation(tmp_path, *choices, out="bare")
    traffic.up.clear()
    summary = federation(tmp_path, *choices, MASKED, out="masked")
    tests = traffic.evaluations
    assert all(
        (reply.class_names, reply.histogram_classes, reply.validation_classes) == ((), (), ()) for reply in tests
    )
    assert len([reply for reply in tests if reply.masked_classes]) == 3
    pooled, plain = (run["test"]["pooled"]["per_class"] for run in (summary, bare))
    sites = ["site-1", "site-2", "site-3"]
    assert {name: figures["sites"] for name, figures in pooled.items()} == dict.fromkeys(summary["classes"], sites)
    for name, figures in pooled.items():
        same = plain[name]  # the same model within 2e-7, and every site tests on the same images here
        assert (figures["positives"], figures["negatives"]) == (same["positives"], same["negatives"])
        assert figures["auroc"]["value"] == pytest.approx(same["auroc"]["value"], abs=2e-3)
