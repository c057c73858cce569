"""A method of somebody's own package: it trains, on Ray too; a hospital declines it before it is imported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from client.gate.incoming_request import PlanRefused, read_requested_work
from client.site.policy import Policy
from common.config import make_plan
from common.errors import BadInput
from common.plugins import METHODS, stamp_of
from common.wire.fleet_protocol import WIRE_VERSION
from polyclinic.testing import check_method
from server.runs.receipt import read_receipt
from server.runs.verify import verify
from tests.client.rounds import site as site_of
from tests.federations import experiment, federation, finished
from tests.third_parties import forget, install_module

METHOD = """
from pathlib import Path

from polyclinic.methods import Batch, ClientContext, LocalRound, Method, Parameters, SiteMethod, SplitNetwork, plain

Path(__file__).with_suffix(".imported").touch()


class Weighed(Parameters):
    factor: float = 1.0


class LouderSite(SiteMethod):
    "FedAvg over partial labels whose hospitals minimise a multiple of the loss."

    name = "louder"
    table = Weighed
    plain_client = False

    def client(self, context: ClientContext) -> LocalRound:
        def objective(network: SplitNetwork, batch: Batch):
            return self.parameters.factor * plain(self.loss)(network, batch)

        return LocalRound(objective)


class SilentSite(LouderSite):
    "A method whose author says nothing of what its client does."

    name = "silent"

    def client(self, context: ClientContext) -> LocalRound:
        return super().client(context)


class RestlessSite(LouderSite):
    "A method that forgets where random numbers come from."

    name = "restless"

    def client(self, context: ClientContext) -> LocalRound:
        import random

        def objective(network: SplitNetwork, batch: Batch):
            return (1 + random.SystemRandom().random()) * plain(self.loss)(network, batch)

        return LocalRound(objective)


class Louder(Method):
    site_class = LouderSite


class Silent(Method):
    site_class = SilentSite


class Restless(Method):
    site_class = RestlessSite


no_method = 3
"""
LOUDER = ("run.method=plugin:louder",)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed for this process and for Ray's workers; its module's file."""
    points = {
        "louder": "louder:Louder",
        "restless": "louder:Restless",
        "silent": "louder:Silent",
        "three": "louder:no_method",
    }
    return install_module(tmp_path / "site-packages", monkeypatch, "louder", METHOD, {"polyclinic.methods": points})


def test_it_trains_and_its_parameter_counts(module: Path, tmp_path: Path) -> None:
    once = federation(tmp_path, *LOUDER, out="once")
    plainly = finished("run.method=partial_loss")[1]
    louder = federation(tmp_path, *LOUDER, "method.factor=3", 'training.optimizer="sgd"', out="louder")
    assert once["model_sha256"] == plainly["model_sha256"]  # Adam, and a factor of 1
    assert louder["model_sha256"] != once["model_sha256"]
    (stamp,) = make_plan(experiment(tmp_path, *LOUDER).experiment).plugins
    assert (stamp.group, stamp.name, stamp.package) == ("polyclinic.methods", "louder", "louder")


@pytest.mark.long
def test_ray_finds_it_as_this_process_does(module: Path, tmp_path: Path) -> None:
    choices = (*LOUDER, "method.factor=2")
    inline = federation(tmp_path, *choices, out="inline")
    on_ray = federation(tmp_path, *choices, "simulation.backend=ray", "simulation.workers=2", out="ray")
    assert on_ray["model_sha256"] == inline["model_sha256"]


def test_what_is_wrong_with_it_is_a_fault_of_the_experiment(module: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"method.factr: is not a parameter of this method. Did you mean \"factor\""):
        federation(tmp_path, *LOUDER, "method.factr=3")
    with pytest.raises(BadInput, match=r"not a subclass of polyclinic.methods.Method"):
        federation(tmp_path, "run.method=plugin:three")
    with pytest.raises(BadInput, match='no installed package has "quieter"'):
        federation(tmp_path, "run.method=plugin:quieter")


def asked(folder: Path, policy: Policy) -> str:
    """What a hospital with this policy says to the plan; empty where it takes part."""
    plan = make_plan(experiment(folder, *LOUDER).experiment).model_dump_json()
    try:
        read_requested_work({"plan": plan, "wire.version": WIRE_VERSION}, replace(site_of(folder), policy=policy))
    except PlanRefused as refused:
        return f"{refused.rule}: {refused}"
    return ""


def test_a_hospital_that_has_not_listed_it_declines_before_it_is_imported(module: Path, tmp_path: Path) -> None:
    assert asked(tmp_path, Policy()) == 'policy.methods: it does not have "plugin:louder"'
    for listed in (("surgical",), ("*",)):
        assert asked(tmp_path, Policy(methods=listed)) == 'policy.methods: it does not have "plugin:louder"'
    assert not module.with_suffix(".imported").exists()
    assert asked(tmp_path, Policy(methods=("*", "plugin:louder"))) == ""
    assert module.with_suffix(".imported").exists()


def test_a_changed_file_is_declined_before_it_is_imported(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_plan(experiment(tmp_path, *LOUDER).experiment)
    module.write_text(METHOD + "# changed\n")
    forget(monkeypatch)
    hospital = replace(site_of(tmp_path), policy=Policy(methods=("plugin:louder",)))
    with pytest.raises(PlanRefused, match=r"the coordinator has .*louder 1.0"):
        read_requested_work(
            {"plan": json.dumps(theirs.model_dump(mode="json")), "wire.version": WIRE_VERSION}, hospital
        )
    assert not module.with_suffix(".imported").exists()


def test_noise_for_single_images_is_refused_where_the_objective_may_be_another(module: Path, tmp_path: Path) -> None:
    """Trained plainly, such a method would be another one without a word."""
    private = ("privacy.level=sample", "privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")
    with pytest.raises(BadInput, match="minimises more than each image's own loss"):
        federation(tmp_path, "run.method=plugin:silent", *private)


def test_authors_can_check_it(module: Path) -> None:
    check_method("louder", {"factor": 2.0})
    with pytest.raises(AssertionError, match="restless: two runs of one seed end in two models"):
        check_method("restless")
    with pytest.raises(BadInput, match="factr"):
        check_method("louder", {"factr": 2.0})


def test_the_receipt_names_the_package_and_verify_says_which_code_is_here(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation(tmp_path, *LOUDER, "run.keep_updates=true")
    (stamp,) = read_receipt(tmp_path / "run" / "receipt.json").plugins
    assert stamp == stamp_of(METHODS, "louder")
    same = verify(tmp_path / "run")
    assert not same.faults
    assert f"plug-in {stamp}: the same files here" in same.right
    assert any("make the model" in line for line in same.right)
    module.write_text(METHOD + "# changed\n")
    forget(monkeypatch)
    assert "the run had louder of louder 1.0" in not_checked(tmp_path / "run")
    monkeypatch.undo()
    assert "louder of louder 1.0 (files " in not_checked(tmp_path / "run")


def not_checked(run: Path) -> str:
    """What verify says of the model, which the code here does not make."""
    found = verify(run)
    assert not found.faults
    assert not any("make the model" in line or line.startswith("model.safetensors") for line in found.right)
    (said,) = [line for line in found.unknown if line.startswith("model and sums: not checked")]
    return said
