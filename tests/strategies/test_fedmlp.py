"""FedMLP at work: when statistics are told, what becomes of tags, and what each part of the ablation turns off."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from client.site.memory import parse_memory
from common.contract import LabelContract
from common.wire.codec import decode
from common.wire.records import Groups, TrainReply, TrainRequest
from server.runs.reader import read_run
from strategies.methods.base import RoundContext
from strategies.methods.fedmlp import FedMLP
from tests.federations import Traffic, federation, finished, of_type, overheard

FEW_CLASSES = (
    "run.method=fedmlp",
    'partition={kind = "missing_classes", sites = 3, missing = 6}',
    "run.rounds=4",
    "method.stage_one_rounds=2",
    "method.tag_rate_negative=0.1",
    "method.tag_rate_positive=0.1",
)


NAN = float("nan")


def replies(traffic: Traffic) -> list[TrainReply]:
    return [decode(content, TrainReply) for content in of_type(traffic.up, "train")]


def tags_of(run: Path, site: str, server_round: int) -> np.ndarray:
    """A site's tags after a round, from its own disk; the memory of the round before the last is not kept."""
    (path,) = (run / "sites" / site / "memory").glob(f"*/round-{server_round:06d}.safetensors")
    return parse_memory(path.read_bytes()).method_state["tags"]


def test_prototypes_and_difficulties_are_told_from_the_last_round_of_stage_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = overheard(monkeypatch)
    federation(tmp_path, *FEW_CLASSES)
    for reply in replies(traffic):
        assert set(reply.statistics) == ({"prototypes", "difficulty"} if reply.round >= 2 else set())
    requests = [decode(content, TrainRequest) for content in of_type(traffic.down, "train")]
    for request in requests:
        assert set(request.statistics) == ({"prototypes", "difficulty"} if request.round >= 3 else set())


def test_a_site_tells_prototypes_of_its_own_classes_and_difficulties_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = overheard(monkeypatch)
    summary = federation(tmp_path, *FEW_CLASSES)
    names = summary["classes"]
    for reply in (reply for reply in replies(traffic) if reply.round >= 2):
        own = np.array([name in summary["sites"][reply.site]["classes"] for name in names])
        np.testing.assert_array_equal(np.isnan(reply.statistics["prototypes"]).all(axis=(1, 2)), ~own)
        np.testing.assert_array_equal(np.isnan(reply.statistics["difficulty"]), own)


def test_the_run_folder_says_how_sure_the_model_is_of_each_class_and_how_alike_classes_are() -> None:
    folder, summary = finished(*FEW_CLASSES, pages=True)
    run = read_run(folder)
    assert [list(each.learned.difficulty) for each in run.rounds] == [[], *[summary["classes"]] * 3]
    found = run.summary.learned.prototypes
    assert found is not None
    np.testing.assert_allclose(np.diag(np.array(found.positives, float)), 1, rtol=1e-6)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "What the model makes of the classes" in page


def test_tags_grow_and_none_is_ever_changed(tmp_path: Path) -> None:
    kept = {}
    for rounds in (2, 3, 4):
        run = finished(*FEW_CLASSES, pages=True)[0] if rounds == 4 else tmp_path / f"run-{rounds}"
        if rounds < 4:
            federation(tmp_path, *FEW_CLASSES, f"run.rounds={rounds}", out=run.name)
        # At some sites the first round of stage two may tag none: difficulties of 0.
        kept[rounds] = np.concatenate([tags_of(run, f"site-{number}", rounds) for number in (1, 2, 3)])
    assert (kept[2] == -1).all()
    assert 0 < (kept[3] >= 0).sum() < (kept[4] >= 0).sum()
    tagged = kept[3] >= 0
    np.testing.assert_array_equal(kept[4][tagged], kept[3][tagged])


def test_only_classes_that_a_site_does_not_annotate_are_tagged() -> None:
    folder, summary = finished(*FEW_CLASSES, pages=True)
    own = [name in summary["sites"]["site-2"]["classes"] for name in summary["classes"]]
    tags = tags_of(folder, "site-2", 4)
    assert (tags[:, own] == -1).all()
    assert (tags[:, np.logical_not(own)] >= 0).any(axis=0).all()


def test_a_site_that_starts_anew_goes_on_with_the_tags_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between rounds, every trace of the site in memory goes: what a restart leaves is its folder.
    from client import app, simulation

    straight = finished(*FEW_CLASSES, pages=True)[1]["model_sha256"]
    train = app.train_round

    def after_a_restart(site: Any, request: TrainRequest, masks: Any) -> TrainReply:
        simulation._cached_sites_of_run.cache_clear()
        return train(site, request, masks)

    monkeypatch.setattr(app, "train_round", after_a_restart)
    assert federation(tmp_path, *FEW_CLASSES, out="restarted")["model_sha256"] == straight


def test_a_site_whose_disk_was_lost_tags_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from client import app

    train = app.train_round

    def without_memory(site: Any, request: TrainRequest, masks: Any) -> TrainReply:
        if (site.name, request.round) == ("site-1", 4):
            shutil.rmtree(site.folder / "memory")
        return train(site, request, masks)

    monkeypatch.setattr(app, "train_round", without_memory)
    assert federation(tmp_path, *FEW_CLASSES)["rounds"] == 4
    lost, kept = (tags_of(tmp_path / "run", site, 4) for site in ("site-1", "site-2"))
    assert 0 < (lost >= 0).sum() < (kept >= 0).sum()


def test_without_detection_nothing_is_told_and_nothing_tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = overheard(monkeypatch)
    federation(tmp_path, *FEW_CLASSES, "method.detection=false")
    assert all(not reply.statistics for reply in replies(traffic))
    assert (tags_of(tmp_path / "run", "site-1", 4) == -1).all()


def told_of(site: str, prototypes: list[float], difficulty: list[float]) -> TrainReply:
    pairs = np.repeat(np.array(prototypes, np.float32)[:, None, None], 2, axis=1)  # (classes, 2, 1)
    statistics = {"prototypes": pairs, "difficulty": np.array(difficulty, np.float32)}
    return TrainReply("run", 2, site, 10, 0.5, None, None, 1.0, Groups(), 1, statistics)


def test_a_site_has_no_say_in_what_its_contract_does_not_give_it() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("b",)}))
    known = RoundContext("multi_label", contract, {}, {}, 2)
    replies = {"north": told_of("north", [1.0, 99.0], [99.0, 0.5]), "south": told_of("south", [99.0, 3.0], [7.0, 99.0])}
    found = FedMLP().aggregate_statistics(known, replies)
    np.testing.assert_allclose(found["prototypes"][:, 0, 0], [1.0, 3.0])
    np.testing.assert_allclose(found["difficulty"], [1.0, 0.5])


def test_what_nobody_tells_in_a_round_stays_as_it_was() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("b",)}))
    before = {"prototypes": np.full((2, 2, 1), 5.0, np.float32), "difficulty": np.array([0.25, 0.75], np.float32)}
    known = RoundContext("multi_label", contract, {}, before, 3)
    found = FedMLP().aggregate_statistics(known, {"north": told_of("north", [1.0, NAN], [NAN, 0.5])})
    np.testing.assert_allclose(found["prototypes"][:, 0, 0], [1.0, 5.0])
    np.testing.assert_allclose(found["difficulty"], [0.25, 0.5])


def test_what_is_noted_says_how_alike_prototypes_are_and_leaves_out_what_every_site_labels() -> None:
    contract = LabelContract(("a", "b"), MappingProxyType({"north": ("a",), "south": ("a", "b")}))
    prototypes = np.array([[[1, 0], [3, 4]], [[0, 0], [4, 3]]], np.float32)  # nobody has a negative of b
    known = RoundContext(
        "multi_label", contract, {}, {"prototypes": prototypes, "difficulty": np.array([1.0, 0.25])}, 3
    )
    noted = FedMLP().summary_figures(known)["prototypes"]
    assert noted["signs"] == [pytest.approx(0.6), None]
    assert noted["positives"][0] == pytest.approx([1, 0.96])
    assert FedMLP().round_figures(known) == {"difficulty": {"a": None, "b": 0.25}}


def test_before_sites_tell_anything_nothing_is_noted() -> None:
    contract = LabelContract(("a",), MappingProxyType({"north": ("a",)}))
    known = RoundContext("multi_label", contract, {}, {}, 1)
    assert (FedMLP().summary_figures(known), FedMLP().round_figures(known)) == ({}, {})
