"""A transform, an optimiser and a schedule of somebody's own package: they train, and a hospital has to list them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from client.gate.policy_rules import RequestedWork, request_rules
from client.site.policy import WITHOUT_LIMITS, Policy
from common.config import TrainingSection, make_plan
from common.errors import BadInput
from common.models.network import build
from common.models.zoo.spec import ModelSpec
from polyclinic import testing
from strategies.engine.events import TooFewSites
from strategies.local.optimisation import make_optimizer, restore_optimizer_state, save_optimizer_state
from strategies.registry import build_site_method
from tests.federations import experiment, federation, finished
from tests.third_parties import install_module

MODULE = """
import math
import random

import torch


def same(images, generator):
    return images


def brighter(images, generator):
    return images + 40 * torch.rand(len(images), 1, 1, 1, generator=generator)


def adamw(parameters, lr, weight_decay):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, eps=1e-7, fused=True)


def adafactor(parameters, lr, weight_decay):
    return torch.optim.Adafactor(parameters, lr=lr, weight_decay=weight_decay)


def cosine(server_round, rounds):
    return 0.5 * (1 + math.cos(math.pi * (server_round - 1) / rounds))


def cropped(images, generator):
    return images[:, :, 1:]


def restless(images, generator):
    return images + random.random()


def narrow(images, generator):
    return images.round().to(torch.uint8)


def nothing(*given, **more):
    return None


def rising(server_round, rounds):
    return -1.0
"""
KINDS = {
    "polyclinic.transforms": ("same", "brighter", "cropped", "restless", "narrow", "nothing"),
    "polyclinic.optimizers": ("adamw", "adafactor", "nothing"),
    "polyclinic.schedules": ("cosine", "rising", "nothing"),
}
ALL_THREE = (
    "augmentation.transform=plugin:brighter",
    "training.optimizer=plugin:adafactor",
    "training.schedule=plugin:cosine",
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed for this process and for Ray's workers; its module's file."""
    points = {group: {name: f"steady:{name}" for name in names} for group, names in KINDS.items()}
    return install_module(tmp_path / "site-packages", monkeypatch, "steady", MODULE, points)


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        (("training.optimizer=plugin:adamw",), ("training.optimizer=adamw",)),
        (("training.schedule=plugin:cosine",), ("training.schedule=cosine",)),
        (
            ("training.schedule=plugin:cosine", "training.schedule_warm_up=1", "run.rounds=1"),
            ("training.schedule_warm_up=1", "run.rounds=1"),
        ),
        (
            ("augmentation.transform=plugin:same", "augmentation.horizontal_flip=true"),
            ("augmentation.horizontal_flip=true",),
        ),
    ],
)
def test_one_that_does_what_ours_does_ends_in_the_same_model(
    own: tuple[str, ...], ours: tuple[str, ...], tmp_path: Path
) -> None:
    assert federation(tmp_path, *own)["model_sha256"] == finished(*ours)[1]["model_sha256"]


@pytest.mark.parametrize("choice", ALL_THREE)
def test_each_changes_the_model(choice: str, tmp_path: Path) -> None:
    assert federation(tmp_path, choice)["model_sha256"] != finished()[1]["model_sha256"]


@pytest.mark.slow
def test_ray_finds_them_as_this_process_does(tmp_path: Path) -> None:
    inline = federation(tmp_path, *ALL_THREE, out="inline")
    on_ray = federation(tmp_path, *ALL_THREE, "simulation.backend=ray", "simulation.workers=2", out="ray")
    assert on_ray["model_sha256"] == inline["model_sha256"]


def test_the_plan_names_each_with_its_package(tmp_path: Path) -> None:
    stamps = make_plan(experiment(tmp_path, *ALL_THREE).experiment).plugins
    assert {(one.group, one.name, one.package) for one in stamps} == {
        ("polyclinic.transforms", "brighter", "steady"),
        ("polyclinic.optimizers", "adafactor", "steady"),
        ("polyclinic.schedules", "cosine", "steady"),
    }


@pytest.mark.parametrize(("key", "choice"), [*zip(("transforms", "optimizers", "schedules"), ALL_THREE, strict=True)])
def test_a_hospital_has_to_list_it_and_to_have_the_same_files(
    key: str, choice: str, module: Path, tmp_path: Path
) -> None:
    file, name = experiment(tmp_path, choice), choice.partition("=")[2]
    work = RequestedWork(make_plan(file.experiment), build_site_method(file.experiment), images=100)

    def rule(policy: Policy, work: RequestedWork) -> str:
        return next(reason for name, reason in request_rules(policy, work) if name == f"policy.{key}")

    listed = Policy.model_validate({key: [name]})
    assert rule(Policy(), work) == f'it does not have "{name}"'
    assert rule(listed, work) == ""
    assert rule(Policy.model_validate(WITHOUT_LIMITS), work) == ""
    without = replace(work, plan=work.plan.model_copy(update={"plugins": ()}))
    assert rule(listed, without).startswith("the coordinator has none, this site ")
    module.write_text(MODULE + "# changed\n")
    assert rule(listed, work).count("of steady 1.0 (files ") == 2


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("augmentation.transform=plugin:cropped", "made torch.float32 (64, 1, 15, 16) of float pixels (64, 1, 16, 16)"),
        ("augmentation.transform=plugin:narrow", "made torch.uint8"),
        ("augmentation.transform=plugin:nothing", "made NoneType"),
        ("training.optimizer=plugin:nothing", "made a NoneType, not a torch.optim.Optimizer"),
        ("training.schedule=plugin:rising", "returned -1.0 for round 1 of 2, not a finite number of 0 or more"),
        ("training.schedule=plugin:nothing", "returned None for round 1 of 2"),
    ],
)
def test_one_that_returns_something_else_is_named(choice: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TooFewSites) as stopped:
        federation(tmp_path, choice)
    assert said in str(stopped.value)


@pytest.mark.parametrize("choice", ALL_THREE)
def test_one_that_nobody_has_is_a_fault_before_anything_is_trained(choice: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='no installed package has "nobodys"'):
        federation(tmp_path, choice.partition(":")[0] + ":nobodys")


def test_privacy_of_single_images_takes_no_transform_that_sees_a_batch(tmp_path: Path) -> None:
    private = ("privacy.level=sample", "privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")
    with pytest.raises(BadInput, match="may mix the images of a batch"):
        federation(tmp_path, *private, "augmentation.transform=plugin:brighter")


@pytest.mark.parametrize(("name", "whole"), [("plugin:adamw", True), ("plugin:adafactor", False), ("adam", True)])
def test_a_state_is_remembered_whole_or_not_at_all(name: str, whole: bool) -> None:
    """Adafactor keeps rows and columns of a matrix, which no later round could take for the matrix."""
    network = build(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), ("a", "b"), 0)
    spec = TrainingSection(optimizer=name)
    optimizer = make_optimizer(network, spec, 0.01)
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    network(images).square().sum().backward()
    optimizer.step()
    remembered = save_optimizer_state(network, optimizer)
    assert any(path.startswith("head.weight/") for path in remembered) == whole
    again = make_optimizer(network, spec, 0.01)
    restore_optimizer_state(network, again, remembered)
    again.step()  # half a state would end here
    parameter: nn.Parameter = network.head.weight
    assert parameter.isfinite().all()


def test_authors_can_check_them() -> None:
    testing.check_transform("brighter")
    testing.check_optimizer("adamw")
    testing.check_optimizer("adafactor")
    testing.check_schedule("cosine")
    with pytest.raises(BadInput, match=r"shape and kind must stay"):
        testing.check_transform("cropped")
    with pytest.raises(AssertionError, match="restless: two runs of one seed differ"):
        testing.check_transform("restless")
    with pytest.raises(BadInput, match="not a finite number"):
        testing.check_schedule("rising")
    with pytest.raises(BadInput, match=r"not a torch.optim.Optimizer"):
        testing.check_optimizer("nothing")
