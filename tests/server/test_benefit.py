"""Sites that train alone: whether they are better off, and the ensemble of their models."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import polyclinic.client.app
from polyclinic.client.benefit.compare import compare_with_local_only_training
from polyclinic.client.site.site import Site
from polyclinic.common.contract import LabelContract
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.benefit import FederationBenefit
from polyclinic.common.models.network import build_network, compute_image_probabilities
from polyclinic.common.models.saved import load_model, read_model_description, save_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system.plain_text import format_number
from polyclinic.common.wire.records import BenefitReply, BenefitRequest
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.server.federation.benefit import compute_comparison_deadline_s
from polyclinic.server.federation.ensemble import evaluate_ensemble, find_local_model_folders
from polyclinic.server.reporting.run_claims import (
    WITHHELD_REASON,
    describe_site_benefits,
    list_further_limitations,
    list_prominent_limitations,
)
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.reader import RunFolderContent, read_run
from polyclinic.server.runs.schema import SiteBenefit
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import federation, finished, needs_of
from tests.server.reports import body_text

ALONE, ROUND = "evaluation.compare_local=true", "run.rounds=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one of three sites fails at the comparison, and at nothing else."""
    out = tmp_path_factory.mktemp("alone")

    def failing(site: Site, request: BenefitRequest) -> BenefitReply:
        if site.name == "site-3":
            raise FloatingPointError("training diverged")
        return compare_with_local_only_training(site, request)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(polyclinic.client.app, "compare_with_local_only_training", failing)
        federation(out, ALONE, ROUND)
    return out / "run"


@pytest.fixture(scope="module")
def run(folder: Path) -> RunFolderContent:
    return read_run(folder)


def benefit_of(run: RunFolderContent, site: str) -> FederationBenefit:
    benefit = run.summary.benefit[site].benefit
    assert benefit is not None
    return benefit


def test_the_models_figures_and_bits_are_those_of_a_run_without(run: RunFolderContent) -> None:
    _, without = finished(ROUND)
    assert run.summary.model_sha256 == without["model_sha256"]
    assert {site: result.mean_auroc for site, result in run.summary.per_site.items()} == {
        site: result["mean_auroc"] for site, result in without["per_site"].items()
    }
    assert without["benefit"] == {}


def test_the_model_trained_alone_is_that_of_the_method_individual_bit_for_bit(
    folder: Path, run: RunFolderContent
) -> None:
    individual, summary = finished("run.method=individual", ROUND)
    for site in ("site-1", "site-2"):
        models = (folder / "sites" / site / "alone" / "model", individual / "sites" / site / "model")
        assert len({read_model_description(model).model_sha256 for model in models}) == 1
        mean = benefit_of(run, site).mean
        assert mean["alone"].value == pytest.approx(summary["per_site"][site]["mean_auroc"])
        assert mean["federated"].value == pytest.approx(run.summary.per_site[site].mean_auroc)


def test_a_site_that_fails_at_it_is_tested_all_the_same_and_has_its_reason(run: RunFolderContent) -> None:
    assert set(run.summary.per_site) == {"site-1", "site-2", "site-3"}
    assert run.summary.benefit["site-3"].benefit is None
    assert "training diverged" in run.summary.benefit["site-3"].reason


def test_the_report_has_a_sentence_for_every_site_with_its_figures(folder: Path, run: RunFolderContent) -> None:
    text = body_text(write_run_report(folder).read_text(encoding="utf-8"))
    choices = describe_site_benefits(run)
    assert [choice.site for choice in choices] == ["site-1", "site-2", "site-3"]
    assert all(choice.sentence in text for choice in choices)
    for choice in choices[:2]:
        assert format_number(benefit_of(run, choice.site).gain["ensemble"].value)[-4:] in choice.sentence
    assert "training diverged" in choices[2].sentence
    assert any("one site in 40" in limit for limit in list_further_limitations(run))


def test_the_sites_that_lose_stand_beside_the_runs_result(run: RunFolderContent) -> None:
    benefit = benefit_of(run, "site-1")
    worse = {model: replace(gain, interval=(-0.02, -0.01)) for model, gain in benefit.gain.items()}
    sites = {"site-1": SiteBenefit(benefit=replace(benefit, gain=worse)), "site-2": SiteBenefit()}
    losing = replace(run, summary=run.summary.model_copy(update={"benefit": sites}))
    assert any("1 of 1 site that compared is better off alone" in limit for limit in list_prominent_limitations(losing))
    assert WITHHELD_REASON in describe_site_benefits(losing)[1].sentence


def test_where_there_is_nothing_to_compare_with_an_experiment_is_refused(tmp_path: Path) -> None:
    for method in ("individual", "centralised"):
        with pytest.raises(BadInput, match=r"evaluation\.compare_local"):
            federation(tmp_path, ALONE, f"run.method={method}")


def test_a_site_has_twice_the_time_of_all_rounds_and_a_rounds_deadline_more() -> None:
    deadlines = [compute_comparison_deadline_s(60.0, 500.0, drawn) for drawn in (1.0, 0.25)]
    assert deadlines == [60 + 2 * 500, 60 + 2 * 500 * 4]


def test_sites_that_hold_rows_of_all_classes_compare_too(tmp_path: Path) -> None:
    summary = federation(tmp_path, ALONE, "run.method=partial_loss", ROUND)
    assert all(site["benefit"] for site in summary["benefit"].values())


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in STRATEGIES if name not in ("individual", "centralised")])
def test_every_method_compares(method: str, tmp_path: Path) -> None:
    summary: dict[str, Any] = federation(tmp_path, ALONE, f"run.method={method}", *needs_of(method))
    compared = {site: facts["benefit"] for site, facts in summary["benefit"].items()}
    trains = {site for site, record in summary["sites"].items() if record["epochs"]}
    assert {site for site, benefit in compared.items() if benefit} == trains
    for site in trains:
        federated = compared[site]["mean"]["federated"]["value"]
        assert federated == pytest.approx(summary["per_site"][site]["mean_auroc"])


CONTRACT = LabelContract(("a", "b", "c"), {"north": ("b", "a"), "south": ("c", "b")})
SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)


def images(count: int, seed: int) -> ImageSet:
    generator = np.random.default_rng(seed)
    names = np.array([""] * count)
    pixels = generator.integers(0, 256, (count, 16, 16), dtype=np.uint8)
    return ImageSet(pixels, generator.integers(0, 2, (count, 3)).astype(np.float32), CONTRACT.class_names, names, names)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for seed, (site, names) in enumerate(CONTRACT.sites.items()):
        (tmp_path / "sites" / site / "model").mkdir(parents=True)
        network = build_network(SPEC, names, seed)
        save_model(tmp_path / "sites" / site / "model", network, label_contract_sha256="")
    return find_local_model_folders(tmp_path, CONTRACT)


def own_scores(folders: list[Path], test: ImageSet) -> list[np.ndarray]:
    return [
        compute_image_probabilities(load_model(folder), convert_to_channels_first(test.images)) for folder in folders
    ]


def test_a_class_is_averaged_over_its_owners_and_nobody_else(folders: list[Path]) -> None:
    test = images(60, 5)
    north, south = own_scores(folders, test)
    classes = evaluate_ensemble(folders, CONTRACT, test, {}).test.per_class
    assert classes["a"].auroc == pytest.approx(roc_auc_score(test.labels[:, 0], north[:, 1]))
    assert classes["b"].auroc == pytest.approx(roc_auc_score(test.labels[:, 1], north[:, 0] + south[:, 1]))
    assert classes["c"].auroc == pytest.approx(roc_auc_score(test.labels[:, 2], south[:, 0]))


def test_a_site_with_test_images_of_its_own_is_tested_on_them_for_its_classes(folders: list[Path]) -> None:
    test, own = images(60, 5), images(30, 6)
    result = evaluate_ensemble(folders, CONTRACT, test, {"south": own})
    _, south = own_scores(folders, own)
    of_south = result.per_site["south"].per_class
    assert of_south["c"].auroc == pytest.approx(roc_auc_score(own.labels[:, 2], south[:, 0]))
    assert list(of_south) == ["c", "b"]
    assert result.per_site["north"].per_class["a"] == result.test.per_class["a"]


def test_without_every_sites_model_there_is_none(tmp_path: Path, folders: list[Path]) -> None:
    (folders[0] / "model.json").unlink()
    assert find_local_model_folders(tmp_path, CONTRACT) == []


def test_a_run_has_an_ensemble_where_sites_share_nothing(tmp_path: Path) -> None:
    pfl = federation(tmp_path, "run.method=pfl", ROUND)
    individual, surgical = (finished(*method, ROUND)[0] for method in (("run.method=individual",), ()))
    for run, has in ((individual, True), (tmp_path / "run", False), (surgical, False)):
        copy = Path(shutil.copytree(run, tmp_path / f"copy-{run.parent.name}"))
        assert (read_run(copy).summary.ensemble is not None) is has
        assert ("AUROC, ensemble" in write_run_report(copy).read_text(encoding="utf-8")) is has
    assert pfl["ensemble"] is None
