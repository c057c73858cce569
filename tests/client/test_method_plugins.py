"""A method of somebody's own package: it trains, on Ray too; a hospital declines it before it is imported."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from polyclinic.client.gate.incoming_request import PlanRefused, read_requested_work
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.config import HospitalPlan, make_hospital_plan
from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import METHODS, identify_plugin
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.server.runs.receipt import read_run_receipt
from polyclinic.server.runs.verify import verify_run
from polyclinic.testing import check_method
from tests.client.rounds import SMALL_RUN
from tests.client.rounds import site as site_of
from tests.federations import experiment, federation, finished
from tests.third_parties import forget, install_module

METHOD = """
from pathlib import Path

from polyclinic.methods import Batch, ClientContext, LocalRound, Method, MethodTraits, Parameters, SiteMethod
from polyclinic.methods import SplitNetwork, plain
from polyclinic.strategies.local.early_stopping import EarlyStopping

Path(__file__).with_suffix(".imported").touch()


class Weighed(Parameters):
    factor: float = 1.0


class LouderSite(SiteMethod):
    "FedAvg over partial labels whose hospitals minimise a multiple of the loss."

    traits = MethodTraits("louder", parameters_class=Weighed)

    def make_round(self, context: ClientContext) -> LocalRound:
        def objective(network: SplitNetwork, batch: Batch):
            return self.parameters.factor * plain(self.loss)(network, batch)

        return LocalRound(objective)


class SilentSite(LouderSite):
    "A method whose author says nothing of what its client does."

    traits = MethodTraits("silent", parameters_class=Weighed)

    def make_round(self, context: ClientContext) -> LocalRound:
        return super().make_round(context)


class SettlingSite(SiteMethod):
    "A method that trains until its loss settles."

    traits = MethodTraits("settling")
    early_stopping = EarlyStopping(patience=2)


class RestlessSite(LouderSite):
    "A method that forgets where random numbers come from."

    traits = MethodTraits("restless", parameters_class=Weighed)

    def make_round(self, context: ClientContext) -> LocalRound:
        import random

        def objective(network: SplitNetwork, batch: Batch):
            return (1 + random.SystemRandom().random()) * plain(self.loss)(network, batch)

        return LocalRound(objective)


class HastySite(LouderSite):
    "A method that returns its objective alone."

    traits = MethodTraits("hasty", parameters_class=Weighed)

    def make_round(self, context: ClientContext) -> LocalRound:
        return super().make_round(context).objective


class Hasty(Method):
    site_class = HastySite


class Louder(Method):
    site_class = LouderSite


class Silent(Method):
    site_class = SilentSite


class Settling(Method):
    site_class = SettlingSite


class Restless(Method):
    site_class = RestlessSite


no_method = 3
"""
LOUDER = ("run.method=plugin:louder", *SMALL_RUN)
PRIVATE = ("privacy.level=sample", "privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed for this process and for Ray's workers; its module's file."""
    points = {
        "louder": "louder:Louder",
        "restless": "louder:Restless",
        "settling": "louder:Settling",
        "silent": "louder:Silent",
        "three": "louder:no_method",
        "hasty": "louder:Hasty",
    }
    return install_module(tmp_path / "site-packages", monkeypatch, "louder", METHOD, {"polyclinic.methods": points})


def test_it_trains_and_its_parameter_counts(module: Path, tmp_path: Path) -> None:
    once = federation(tmp_path, *LOUDER, out="once")
    plainly = finished("run.method=partial_loss", *SMALL_RUN)[1]
    louder = federation(tmp_path, *LOUDER, "method.factor=3", 'training.optimizer="sgd"', out="louder")
    assert once["model_sha256"] == plainly["model_sha256"]  # Adam, and a factor of 1
    assert louder["model_sha256"] != once["model_sha256"]
    (stamp,) = make_hospital_plan(experiment(tmp_path, *LOUDER).experiment).plugins
    assert (stamp.group, stamp.name, stamp.package) == ("polyclinic.methods", "louder", "louder")


@pytest.mark.parametrize("mu", [0, 0.1])
def test_one_that_returns_a_function_is_told_to_return_a_local_round(mu: float, module: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match=r"hasty: make_round\(\) returned a function, not a LocalRound\. Return LocalRound"
    ):
        federation(tmp_path, "run.method=plugin:hasty", *SMALL_RUN, f"method.proximal_mu={mu}")


@pytest.mark.long
def test_ray_finds_it_as_this_process_does(module: Path, tmp_path: Path) -> None:
    choices = (*LOUDER, "method.factor=2")
    inline = federation(tmp_path, *choices, out="inline")
    on_ray = federation(tmp_path, *choices, "simulation.backend=ray", "simulation.workers=2", out="ray")
    assert on_ray["model_sha256"] == inline["model_sha256"]


@pytest.mark.parametrize(
    ("choices", "fault"),
    [
        ((*LOUDER, "method.factr=3"), r"method.factr: is not a parameter of this method. Did you mean \"factor\""),
        (("run.method=plugin:three",), r"not a subclass of polyclinic.methods.Method"),
        (("run.method=plugin:quieter",), 'no installed package has "quieter"'),
        # Trained plainly, a method whose objective may be another would be another one without a word.
        (("run.method=plugin:silent", *PRIVATE), "minimises more than each image's own loss"),
        (("run.method=plugin:settling", *PRIVATE), "the loss decides how many steps a site trains"),
    ],
    ids=["a parameter", "no method", "not installed", "noise for single images", "noise in an unknown number of steps"],
)
def test_what_is_wrong_with_it_is_a_fault_of_the_experiment(
    choices: tuple[str, ...], fault: str, module: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=fault):
        federation(tmp_path, *choices)


def refusal(policy: SitePolicy, plan: HospitalPlan, folder: Path) -> str:
    """Why a hospital with this policy refuses the plan; empty where it takes part."""
    fields = {"plan": plan.model_dump_json(), "wire.version": WIRE_VERSION}
    try:
        read_requested_work(fields, replace(site_of(folder), policy=policy))
    except PlanRefused as refused:
        return f"{refused.rule}: {refused}"
    return ""


def test_a_hospital_declines_before_it_is_imported_what_is_not_listed_or_has_other_files(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_hospital_plan(experiment(tmp_path, *LOUDER).experiment)
    for methods in (None, ("surgical",), ("*",)):
        reason = 'policy.methods: it does not have "plugin:louder"'
        assert refusal(SitePolicy(methods=methods), plan, tmp_path) == reason
    listed = SitePolicy(methods=("*", "plugin:louder"))
    module.write_text(METHOD + "# changed\n")
    forget(monkeypatch)
    assert re.search(r"the coordinator has .*louder 1.0", refusal(listed, plan, tmp_path))
    assert not module.with_suffix(".imported").exists()
    module.write_text(METHOD)
    forget(monkeypatch)
    assert refusal(listed, plan, tmp_path) == ""
    assert module.with_suffix(".imported").exists()


def test_authors_can_check_it(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **more: None)
    check_method("louder", {"factor": 2.0})
    with pytest.raises(AssertionError, match="restless: two runs of one seed end in two models"):
        check_method("restless")
    with pytest.raises(BadInput, match="factr"):
        check_method("louder", {"factr": 2.0})


def test_receipt_and_verify_name_the_package(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation(tmp_path, *LOUDER, "run.keep_updates=true")
    (stamp,) = read_run_receipt(tmp_path / "run" / "receipt.json").plugins
    assert stamp == identify_plugin(METHODS, "louder")
    same = verify_run(tmp_path / "run")
    assert not same.faults
    assert f"plug-in {stamp}: the same files here" in same.verified
    assert any("make the model" in line for line in same.verified)
    module.write_text(METHOD + "# changed\n")
    forget(monkeypatch)
    assert "the run had louder of louder 1.0" in not_checked(tmp_path / "run")
    monkeypatch.undo()
    assert "louder of louder 1.0 (files " in not_checked(tmp_path / "run")


def not_checked(run: Path) -> str:
    """What verify says of the model, which the code here does not make."""
    verified = verify_run(run)
    assert not verified.faults
    assert not any("make the model" in line or line.startswith("model.safetensors") for line in verified.verified)
    (words,) = [line for line in verified.unverified if line.startswith("model and sums: not checked")]
    return words
