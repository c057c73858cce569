"""A run whose sites say whether they are better off alone: what it costs, what it changes, what its report says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import client.app
from client.benefit.compare import compare
from client.site.site import Site
from common.errors import BadInput
from common.models.saved import read_description
from common.system.plain_text import number
from common.wire.records import BenefitReply, BenefitRequest
from server.federation.benefit import benefit_deadline_s
from server.reporting.run_claims import WITHHELD_BY_SITE, further_limits, prominent_limits, site_comparisons
from server.reporting.run_report import write_run_report
from server.runs.reader import Run, SiteBenefit, read_run
from strategies.registry import STRATEGIES
from tests.federations import federation, finished, needs_of
from tests.server.reports import body_text

ALONE = "evaluation.compare_local=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which one of three sites fails at the comparison, and at nothing else."""
    out = tmp_path_factory.mktemp("alone")

    def failing(site: Site, request: BenefitRequest) -> BenefitReply:
        if site.name == "site-3":
            raise FloatingPointError("training diverged")
        return compare(site, request)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client.app, "compare", failing)
        federation(out, ALONE)
    return out / "run"


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def test_the_models_figures_and_bits_are_those_of_a_run_without(run: Run) -> None:
    _, without = finished()
    assert run.summary.model_sha256 == without["model_sha256"]
    assert {site: one.mean_auroc for site, one in run.summary.per_site.items()} == {
        site: one["mean_auroc"] for site, one in without["per_site"].items()
    }
    assert without["benefit"] == {}


def test_the_model_trained_alone_is_that_of_the_method_individual_bit_for_bit(folder: Path, run: Run) -> None:
    individual, summary = finished("run.method=individual")
    for site in ("site-1", "site-2"):
        models = (folder / "sites" / site / "alone" / "model", individual / "sites" / site / "model")
        assert len({read_description(one).model_sha256 for one in models}) == 1
        found = run.summary.benefit[site].benefit
        assert found is not None
        assert found.mean["alone"].value == pytest.approx(summary["per_site"][site]["mean_auroc"])
        assert found.mean["federated"].value == pytest.approx(run.summary.per_site[site].mean_auroc)


def test_a_site_that_fails_at_it_is_tested_all_the_same_and_the_reason_is_told(run: Run) -> None:
    assert set(run.summary.per_site) == {"site-1", "site-2", "site-3"}
    assert run.summary.benefit["site-3"].benefit is None
    assert "training diverged" in run.summary.benefit["site-3"].reason


def test_the_report_has_a_sentence_for_every_site_with_its_figures(folder: Path, run: Run) -> None:
    text = body_text(write_run_report(folder).read_text(encoding="utf-8"))
    choices = site_comparisons(run)
    assert [one.site for one in choices] == ["site-1", "site-2", "site-3"]
    assert all(one.sentence in text for one in choices)
    for one in choices[:2]:
        assert one.benefit is not None
        assert number(one.benefit.gain["ensemble"].value)[-4:] in one.sentence
    assert "training diverged" in choices[2].sentence
    assert any("one site in 40" in limit for limit in further_limits(run))


def test_the_sites_that_lose_stand_beside_the_runs_result(run: Run) -> None:
    found = run.summary.benefit["site-1"].benefit
    assert found is not None
    worse = {model: replace(gain, interval=(-0.02, -0.01)) for model, gain in found.gain.items()}
    told = {"site-1": SiteBenefit(benefit=replace(found, gain=worse)), "site-2": SiteBenefit()}
    losing = replace(run, summary=run.summary.model_copy(update={"benefit": told}))
    sentence = "1 of 1 site that compared is better off alone than with this model: site-1."
    assert sentence in prominent_limits(losing)
    assert WITHHELD_BY_SITE in site_comparisons(losing)[1].sentence


def test_where_there_is_nothing_to_compare_with_an_experiment_is_refused(tmp_path: Path) -> None:
    for method in ("individual", "centralised"):
        with pytest.raises(BadInput, match=r"evaluation\.compare_local"):
            federation(tmp_path, ALONE, f"run.method={method}")


def test_a_site_has_twice_the_time_of_all_rounds_and_a_rounds_deadline_more() -> None:
    assert benefit_deadline_s(60.0, 500.0, 1.0) == 60 + 2 * 500
    assert benefit_deadline_s(60.0, 500.0, 0.25) == 60 + 2 * 500 * 4


def test_sites_that_hold_rows_of_all_classes_compare_too(tmp_path: Path) -> None:
    summary = federation(tmp_path, ALONE, "run.method=partial_loss", "run.rounds=1")
    assert all(one["benefit"] for one in summary["benefit"].values())


@pytest.mark.long
@pytest.mark.parametrize("method", [one for one in STRATEGIES if one not in ("individual", "centralised")])
def test_every_method_compares(method: str, tmp_path: Path) -> None:
    summary: dict[str, Any] = federation(tmp_path, ALONE, f"run.method={method}", *needs_of(method))
    compared = {site: one["benefit"] for site, one in summary["benefit"].items()}
    trains = {site for site, record in summary["sites"].items() if record["epochs"]}
    assert {site for site, one in compared.items() if one} == trains
    for site in trains:
        federated = compared[site]["mean"]["federated"]["value"]
        assert federated == pytest.approx(summary["per_site"][site]["mean_auroc"])
