"""FedMLP at work: when statistics are told, what becomes of tags, and what each part of the ablation turns off."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from polyclinic.client import app, simulation
from polyclinic.common.contract import LabelContract
from polyclinic.common.wire.records import TrainReply, TrainRequest
from polyclinic.server.runs.reader import read_run
from polyclinic.strategies.methods.base import RoundContext
from polyclinic.strategies.methods.fedmlp import FedMLP, align_stored_tags, split_digests
from tests.federations import ALL_DIGITS, Traffic, federation, finished
from tests.strategies.leading import site_notes
from tests.strategies.states import make_reply

FEW_CLASSES = (
    ALL_DIGITS, "run.method=fedmlp", 'partition={kind = "missing_classes", sites = 3, missing = 6}', "run.rounds=4",
    "method.stage_one_rounds=2", "method.tag_rate_negative=0.1", "method.tag_rate_positive=0.1",
)  # fmt: skip
NAN = float("nan")


def context(server_round: int, contract: LabelContract | None = None, **statistics: np.ndarray) -> RoundContext:
    """Two sites, each of which annotates one of two classes, unless the contract says otherwise."""
    each_one = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("b",)}))
    return RoundContext("multi_label", contract or each_one, {}, statistics, server_round)


def test_prototypes_and_difficulties_are_told_after_stage_one(tmp_path: Path, traffic: Traffic) -> None:
    summary = federation(tmp_path, *FEW_CLASSES, "run.rounds=3")
    for reply in traffic.replies:
        assert set(reply.statistics) == ({"prototypes", "difficulty"} if reply.round >= 2 else set())
    for request in traffic.requests:
        assert set(request.statistics) == ({"prototypes", "difficulty"} if request.round >= 3 else set())
    for reply in (reply for reply in traffic.replies if reply.round >= 2):
        own = np.array([name in summary["sites"][reply.site]["classes"] for name in summary["classes"]])
        np.testing.assert_array_equal(np.isnan(reply.statistics["prototypes"]).all(axis=(1, 2)), ~own)
        np.testing.assert_array_equal(np.isnan(reply.statistics["difficulty"]), own)


def test_the_run_folder_says_how_sure_the_model_is_of_each_class_and_how_alike_classes_are() -> None:
    folder, summary = finished(*FEW_CLASSES, pages=True)
    run = read_run(folder)
    assert [list(each.learned.difficulty) for each in run.rounds] == [[], *[summary["classes"]] * 3]
    prototypes = run.summary.learned.prototypes
    np.testing.assert_allclose(np.diag(np.array(prototypes.positives, float)), 1, rtol=1e-6)
    assert "What the model makes of the classes" in (folder / "report.html").read_text(encoding="utf-8")


def test_tags_grow_and_none_is_ever_changed(tmp_path: Path) -> None:
    def tags_at_all_sites(run: Path, rounds_ago: int = 0) -> np.ndarray:
        return np.concatenate([site_notes(run, f"site-{number}", rounds_ago)["tags"] for number in (1, 2, 3)])

    federation(tmp_path, *FEW_CLASSES, "run.rounds=3")
    assert (tags_at_all_sites(tmp_path / "run", 1) == -1).all()
    folder, _ = finished(*FEW_CLASSES, pages=True)
    before, after = tags_at_all_sites(folder, 1), tags_at_all_sites(folder)
    # At some sites the first round of stage two may tag none: difficulties of 0.
    assert 0 < (before >= 0).sum() < (after >= 0).sum()
    np.testing.assert_array_equal(after[before >= 0], before[before >= 0])


def test_only_classes_that_a_site_does_not_annotate_are_tagged() -> None:
    folder, summary = finished(*FEW_CLASSES, pages=True)
    own = [name in summary["sites"]["site-2"]["classes"] for name in summary["classes"]]
    tags = site_notes(folder, "site-2")["tags"]
    assert (tags[:, own] == -1).all()
    assert (tags[:, np.logical_not(own)] >= 0).any(axis=0).all()


def test_a_site_that_starts_anew_keeps_its_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Between rounds, every trace of the site in memory goes: what a restart leaves is its folder.
    straight = finished(*FEW_CLASSES, pages=True)[1]["model_sha256"]
    train = app.train_with_privacy_layers

    def after_a_restart(site: Any, request: TrainRequest, masks: Any) -> TrainReply:
        simulation._get_cached_run_sites.cache_clear()
        return train(site, request, masks)

    monkeypatch.setattr(app, "train_with_privacy_layers", after_a_restart)
    assert federation(tmp_path, *FEW_CLASSES, out="restarted")["model_sha256"] == straight


def test_without_detection_nothing_is_told_and_nothing_tagged(tmp_path: Path, traffic: Traffic) -> None:
    federation(tmp_path, *FEW_CLASSES, "method.detection=false", "run.rounds=3")
    assert all(not reply.statistics for reply in traffic.replies)
    assert (site_notes(tmp_path / "run", "site-1")["tags"] == -1).all()


def reply_of(site: str, prototypes: list[float], difficulty: list[float]) -> TrainReply:
    pairs = np.repeat(np.array(prototypes, np.float32)[:, None, None], 2, axis=1)  # (classes, 2, 1)
    return make_reply(site, prototypes=pairs, difficulty=difficulty)


def test_a_site_has_no_say_in_what_its_contract_does_not_give_it_and_what_nobody_tells_stays() -> None:
    replies = {
        "north": reply_of("north", [1.0, 99.0], [99.0, 0.5]),
        "south": reply_of("south", [99.0, 3.0], [7.0, 99.0]),
    }
    statistics = FedMLP().aggregate_statistics(context(2), replies)
    np.testing.assert_allclose(statistics["prototypes"][:, 0, 0], [1.0, 3.0])
    np.testing.assert_allclose(statistics["difficulty"], [1.0, 0.5])
    before = {"prototypes": np.full((2, 2, 1), 5.0, np.float32), "difficulty": np.array([0.25, 0.75], np.float32)}
    statistics = FedMLP().aggregate_statistics(
        context(3, **before), {"north": reply_of("north", [1.0, NAN], [NAN, 0.5])}
    )
    np.testing.assert_allclose(statistics["prototypes"][:, 0, 0], [1.0, 5.0])
    np.testing.assert_allclose(statistics["difficulty"], [0.25, 0.5])


def test_figures_say_how_alike_prototypes_are_and_leave_out_what_every_site_labels() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("a", "b")}))
    prototypes = np.array([[[1, 0], [3, 4]], [[0, 0], [4, 3]]], np.float32)  # nobody has a negative of b
    later = context(3, contract, prototypes=prototypes, difficulty=np.array([1.0, 0.25]))
    figures = FedMLP().compute_summary_figures(later)["prototypes"]
    assert figures["signs"] == [pytest.approx(0.6), None]
    assert figures["positives"][0] == pytest.approx([1, 0.96])
    assert FedMLP().compute_round_figures(later) == {"difficulty": {"a": None, "b": 0.25}}
    assert (FedMLP().compute_summary_figures(context(1)), FedMLP().compute_round_figures(context(1))) == ({}, {})


def test_tags_follow_their_images_when_a_patient_opts_out() -> None:
    digests = split_digests(np.array([11, 2**63 + 5, 7, 7], np.uint64))
    tags = np.array([[1, -1], [0, 1], [-1, 0], [1, 1]], np.float32)
    stored = {"tags": tags, "images": digests}
    np.testing.assert_array_equal(align_stored_tags(stored, digests, (4, 2)), tags)
    # The first image is gone, one is new, the others have changed places; equal pictures keep their order.
    present = split_digests(np.array([7, 99, 2**63 + 5, 7], np.uint64))
    expected = [[-1, 0], [-1, -1], [0, 1], [1, 1]]
    assert align_stored_tags(stored, present, (4, 2)).tolist() == expected
    assert align_stored_tags({"tags": tags}, digests, (4, 2)).tolist() == tags.tolist()  # of release 0.1.0
    assert (align_stored_tags({"tags": tags}, digests[1:], (3, 2)) == -1).all()
    assert (align_stored_tags({}, digests, (4, 2)) == -1).all()
