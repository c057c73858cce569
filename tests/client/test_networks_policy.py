"""``policy.networks``: a hospital builds others' networks only where it allows them, and only from the same files."""

from pathlib import Path

import pytest

from polyclinic.client.gate.policy_rules import RequestedWork, check_request_rules
from polyclinic.client.site.policy import UNLIMITED_KEYS, SitePolicy
from polyclinic.common.config import make_hospital_plan
from polyclinic.common.plugins import METRICS
from polyclinic.strategies.registry import build_site_method
from tests.client.rounds import changed_plan
from tests.federations import experiment
from tests.third_parties import forget, install


def requested(folder: Path, *overrides: str) -> RequestedWork:
    file = experiment(folder, *overrides)
    return RequestedWork(make_hospital_plan(file.experiment), build_site_method(file.experiment), images=100)


def refusal(policy: SitePolicy, work: RequestedWork, rule: str = "policy.networks") -> str:
    return next((reason for name, reason in check_request_rules(policy, work) if name == rule), "")


@pytest.mark.parametrize("loss", ["plain", "focal", "asymmetric"])
def test_our_own_networks_and_losses_need_no_permission(loss: str, tmp_path: Path) -> None:
    work = requested(tmp_path, f"training.loss={loss}")
    assert refusal(SitePolicy(networks=()), work) == refusal(SitePolicy(), work, "policy.losses") == ""


RESNET = ("model.architecture=timm:resnet18", "model.image_size=32")


@pytest.mark.parametrize(
    ("networks", "refused"), [(("timm:*",), ""), (("timm:vit_*",), "it does not have"), ((), "it")]
)
def test_a_pattern_allows_what_it_matches(networks: tuple[str, ...], refused: str, tmp_path: Path) -> None:
    reason = refusal(SitePolicy(networks=networks), requested(tmp_path, *RESNET))
    assert reason.startswith(refused)
    assert bool(reason) == bool(refused)


@pytest.mark.parametrize(
    ("key", "name", "choice"),
    [
        ("networks", "stairs", "model.architecture=plugin:stairs"),
        ("losses", "absolute", "training.loss=plugin:absolute"),
    ],
)
def test_a_plug_in_is_declined_unless_it_is_listed_with_its_stamp_and_the_same_files(
    key: str, name: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install(tmp_path / "site-packages", monkeypatch)
    work, rule, listed = requested(tmp_path, choice), f"policy.{key}", SitePolicy.model_validate({key: ["plugin:*"]})
    assert refusal(SitePolicy(), work, rule) == f'it does not have "plugin:{name}"'
    by_name = SitePolicy.model_validate({key: [f"plugin:{name}"]})
    for policy in (by_name, listed, SitePolicy.model_validate(UNLIMITED_KEYS)):
        assert refusal(policy, work, rule) == ""
    module.write_text(module.read_text() + "\n")
    forget(monkeypatch)
    assert refusal(listed, work, rule).count(f"{name} of stairs 1.0 (files ") == 2
    other_kind = tuple(stamp.model_copy(update={"group": METRICS}) for stamp in work.plan.plugins)
    for stamps in ((), other_kind):  # a stamp of another kind does not stand for one of the same name
        bare = RequestedWork(work.plan.model_copy(update={"plugins": stamps}), work.method)
        assert refusal(listed, bare, rule).startswith("the coordinator has none, this site ")


def test_a_plug_in_that_is_not_installed_here_is_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as there:
        install(tmp_path / "site-packages", there)
        work = requested(tmp_path, "model.architecture=plugin:stairs")
    assert 'no installed package has "stairs"' in refusal(SitePolicy(networks=("plugin:*",)), work)


def test_a_network_that_is_not_ours_is_counted_and_one_that_nobody_has_is_declined(tmp_path: Path) -> None:
    work, rule = requested(tmp_path, *RESNET), "policy.maximum_parameters"
    assert refusal(SitePolicy(maximum_parameters=12_000_000), work, rule) == ""
    assert "11,1" in refusal(SitePolicy(maximum_parameters=11_000_000), work, rule)
    unknown = changed_plan(work.plan, model={"architecture": "timm:resnet18_of_somebody"})
    assert '"timm:resnet18_of_somebody"' in refusal(SitePolicy(), RequestedWork(unknown, work.method))
