"""A site that compares the run's model with its own: what it finds, what it keeps, what may leave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from polyclinic.client.benefit import home_training
from polyclinic.client.benefit.compare import BENEFIT_JSON_FILE, BENEFIT_PAGE_FILE, LOCAL_TRAINING_FOLDER
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.privacy import open_privacy_ledger
from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import WireError
from polyclinic.common.wire.records import BenefitReply, ModelGroups, TrainRequest
from tests.client.rounds import Killed, beginning, benefit_request, images, log, plan, record_of, send, site, trained


def asking(**tables: Any) -> HospitalPlan:
    tree = plan(batch_size=32).model_dump(mode="json")
    tree["run"]["rounds"] = 4
    tree["evaluation"] |= {"compare_local": True, "checkpoint": "last"}
    tree["model"]["norm"] = "group"
    return HospitalPlan.model_validate({**tree, **tables})


def compared(at: Site, of: HospitalPlan, epochs: int = 4) -> Message:
    """The answer to the comparison of a model that moved a little from the one that the run began with."""
    first = beginning(of)
    later = replace(first, trunk=first.trunk + np.float32(1e-4))
    return send(at, "query.benefit", benefit_request(of, later, first, 4, epochs))


def reply(at: Site, of: HospitalPlan) -> BenefitReply:
    return record_of(compared(at, of), BenefitReply)


def own_figures(at: Site) -> Any:
    return json.loads((at.folder / LOCAL_TRAINING_FOLDER / BENEFIT_JSON_FILE).read_text(encoding="utf-8"))["benefit"]


def test_a_trusted_site_tells_what_its_own_page_says_and_the_same_again(tmp_path: Path) -> None:
    at, lines = site(tmp_path / "first", smallest_count=0), list[str]()
    released = reply(replace(at, tell=lines.append), asking())
    figures = own_figures(at)
    assert released.class_names == ("b", "a")
    assert released.mean == pytest.approx([place["value"] for place in figures["mean"].values()])
    assert released.gain_low == pytest.approx([place["interval"][0] for place in figures["gain"].values()])
    page = (at.folder / LOCAL_TRAINING_FOLDER / BENEFIT_PAGE_FILE).read_text(encoding="utf-8")
    assert page.splitlines()[0] in lines[-1]
    assert f"{released.mean[0]:.3f}" in page
    assert {path.name for path in (at.folder / LOCAL_TRAINING_FOLDER).iterdir()} >= {"model", "fine-tuned"}
    assert reply(site(tmp_path / "again", smallest_count=0), asking()) == released


SILENT = {
    "figures are forbidden": ({"test_metrics": False}, {}),
    "no noise covers them": ({"epsilon": 0.5}, {"privacy": {"level": "update", "noise_multiplier": 1000.0}}),
    "masks cover what these models hold": ({}, {"privacy": {"secure_aggregation": True}}),
    "the coordinator sees sums only": ({"level": "masked"}, {"privacy": {"secure_aggregation": True}}),
}


@pytest.mark.parametrize(("policy", "tables"), SILENT.values(), ids=SILENT)
def test_nothing_leaves_and_the_hospital_sees_it(
    policy: dict[str, Any], tables: dict[str, Any], tmp_path: Path
) -> None:
    at = site(tmp_path, smallest_count=0, **policy)
    assert reply(at, asking(**tables)) == BenefitReply("run", 4, "north")
    assert set(own_figures(at)["mean"]) == {"alone", "federated", "fine_tuned", "ensemble"}
    assert open_privacy_ledger(at).entries == ()  # training alone spends nothing of a budget
    assert "better off" in (at.folder / LOCAL_TRAINING_FOLDER / BENEFIT_PAGE_FILE).read_text(encoding="utf-8")


def test_a_gate_stops_figures_that_the_policy_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, of = site(tmp_path, smallest_count=0), asking()
    figures = reply(at, of)
    monkeypatch.setattr("polyclinic.client.app.compare_with_local_only_training", lambda site, request: figures)
    other = replace(at, folder=tmp_path / "other", policy=SitePolicy(test_metrics=False))
    refused = compared(other, of)
    assert "policy.test_metrics" in refused.error.reason
    assert [entry["decision"] for entry in log(other) if entry.get("record") == "BenefitReply"] == ["deny"]


def test_figures_of_a_class_of_few_patients_stay_and_the_others_are_exact(tmp_path: Path) -> None:
    test = images(3, 60)
    test.labels[:, 1] = np.arange(60) < 5
    patients = np.array([f"p{row}" for row in range(60)])
    train = replace(images(1, 40), patients=patients[:40])
    at = replace(site(tmp_path), test=replace(test, patients=patients), train=train)
    of = asking()
    assert not trained(at, of).has_error()
    released = reply(at, of)
    assert released.class_names == ("b",)
    assert set(own_figures(at)["auroc"]["alone"]) == {"b", "a"}
    exact = [of_model["b"] for of_model in own_figures(at)["auroc"].values()]
    assert [*released.auroc, *released.mean] == pytest.approx([*exact, *exact])
    bounds = zip(released.mean_low, released.mean, released.mean_high, strict=True)
    assert all(low <= mean <= high for low, mean, high in bounds)


def test_the_model_at_home_of_a_run_that_tells_nothing_is_no_start_for_one_that_does(tmp_path: Path) -> None:
    """The one may have learned labels of hidden classes, of which no figure may say anything."""
    at, first = site(tmp_path), ModelGroups.from_model(beginning(asking()))
    without = images(1, 40)
    without.labels[:, 0] = np.nan
    sites = (at, replace(at, train=without))
    assert len({home_training.LocalOnlyTraining(place, asking(), first)._local_run_name for place in sites}) == 2


def test_more_epochs_than_the_run_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="at most 4"):
        compared(site(tmp_path / "a"), asking(), epochs=5)
    with pytest.raises(WireError, match="does not ask"):
        compared(site(tmp_path / "b"), asking(evaluation={"compare_local": False}))


def test_a_site_without_test_images_says_so_and_trains_nothing(tmp_path: Path) -> None:
    at = replace(site(tmp_path, smallest_count=0), test=images(3, 16).select_rows(np.arange(0)))
    assert reply(at, asking()) == BenefitReply("run", 4, "north")
    assert "cannot be told" in (at.folder / LOCAL_TRAINING_FOLDER / BENEFIT_PAGE_FILE).read_text(encoding="utf-8")
    assert not (at.folder / LOCAL_TRAINING_FOLDER / "memory").exists()


def test_a_killed_site_goes_on_from_the_round_that_it_had_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reply(site(tmp_path / "whole", smallest_count=0), asking())
    trains, done = home_training.train_with_privacy_layers, list[int]()

    def dying(at: Site, request: TrainRequest) -> Any:
        if len(done) == 2:
            done.append(0)
            raise Killed
        done.append(request.round)
        return trains(at, request)

    monkeypatch.setattr(home_training, "train_with_privacy_layers", dying)
    at = site(tmp_path / "killed", smallest_count=0)
    with pytest.raises(Killed):
        compared(at, asking())
    assert reply(replace(at), asking()) == whole
    assert done == [1, 2, 0, 3, 4, 1]  # alone 1 and 2, killed, alone 3 and 4, then one to fine-tune
