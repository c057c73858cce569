"""A transform, an optimiser and a schedule of somebody's own package: they train, and a hospital has to list them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic import testing
from polyclinic.client.gate.policy_rules import RequestedWork, check_request_rules
from polyclinic.client.site.policy import UNLIMITED_KEYS, SitePolicy
from polyclinic.common.config import TrainingSection, make_hospital_plan
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.strategies.local.optimisation import (
    compute_learning_rate_factor,
    make_optimizer,
    restore_optimizer_state,
    save_optimizer_state,
)
from polyclinic.strategies.registry import build_site_method
from tests.client.rounds import SMALL_RUN
from tests.federations import experiment, federation, finished, overheard
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
    return images + random.SystemRandom().random()


def narrow(images, generator):
    return images.round().to(torch.uint8)


def nothing(*arguments, **more):
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
PRIVATE = ("privacy.level=sample", "privacy.noise_multiplier=1", "evaluation.checkpoint=last", "model.norm=group")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed for this process and for Ray's workers; its module's file."""
    points = {group: {name: f"steady:{name}" for name in names} for group, names in KINDS.items()}
    return install_module(tmp_path / "site-packages", monkeypatch, "steady", MODULE, points)


def model_of(*overrides: str) -> str:
    """The hash of the model in which a small run ends."""
    return str(finished(*SMALL_RUN, *overrides)[1]["model_sha256"])


@pytest.mark.parametrize(
    ("plugin", "ours", "more"),
    [
        ("training.optimizer=plugin:adamw", ("training.optimizer=adamw",), ()),
        ("training.schedule=plugin:cosine", ("training.schedule=cosine",), ()),
        ("augmentation.transform=plugin:same", (), ("augmentation.horizontal_flip=true",)),
    ],
)
def test_one_like_ours_ends_in_the_same_model(plugin: str, ours: tuple[str, ...], more: tuple[str, ...]) -> None:
    assert model_of(plugin, *more) == model_of(*ours, *more)


def test_the_learning_rate_rises_before_a_schedule_of_ones_own_begins() -> None:
    section = TrainingSection(schedule="plugin:cosine", schedule_warm_up=3)
    assert [compute_learning_rate_factor(section, number, 5) for number in (1, 2, 3)] == [0.25, 0.5, 0.75]


def test_each_changes_the_model_and_is_in_the_plan_with_its_package(tmp_path: Path) -> None:
    assert len({model_of(*choices) for choices in ((), *zip(ALL_THREE))}) == 4
    stamps = make_hospital_plan(experiment(tmp_path, *ALL_THREE).experiment).plugins
    assert {(stamp.group, stamp.name, stamp.package) for stamp in stamps} == {
        ("polyclinic.transforms", "brighter", "steady"),
        ("polyclinic.optimizers", "adafactor", "steady"),
        ("polyclinic.schedules", "cosine", "steady"),
    }


@pytest.mark.long
def test_ray_finds_them_as_this_process_does(tmp_path: Path) -> None:
    inline = federation(tmp_path, *ALL_THREE, out="inline")
    on_ray = federation(tmp_path, *ALL_THREE, "simulation.backend=ray", "simulation.workers=2", out="ray")
    assert on_ray["model_sha256"] == inline["model_sha256"]


@pytest.mark.parametrize(("key", "choice"), [*zip(("transforms", "optimizers", "schedules"), ALL_THREE, strict=True)])
def test_a_hospital_has_to_list_it_and_have_the_same_files(key: str, choice: str, module: Path, tmp_path: Path) -> None:
    file, name = experiment(tmp_path, choice), choice.partition("=")[2]
    work = RequestedWork(make_hospital_plan(file.experiment), build_site_method(file.experiment), images=100)

    def rule(policy: SitePolicy, work: RequestedWork) -> str:
        return next(reason for name, reason in check_request_rules(policy, work) if name == f"policy.{key}")

    listed = SitePolicy.model_validate({key: [name]})
    assert rule(SitePolicy(), work) == f'it does not have "{name}"'
    assert rule(listed, work) == rule(SitePolicy.model_validate(UNLIMITED_KEYS), work) == ""
    without = replace(work, plan=work.plan.model_copy(update={"plugins": ()}))
    assert rule(listed, without).startswith("the coordinator has none, this site ")
    module.write_text(MODULE + "# changed\n")
    assert rule(listed, work).count("of steady 1.0 (files ") == 2


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (
            ("augmentation.transform=plugin:cropped",),
            "made torch.float32 (4, 1, 15, 16) of float pixels (4, 1, 16, 16)",
        ),
        (("augmentation.transform=plugin:narrow",), "made torch.uint8"),
        (("augmentation.transform=plugin:nothing",), "made NoneType"),
        (("training.optimizer=plugin:nothing",), "made a NoneType, not a torch.optim.Optimizer"),
        (("training.schedule=plugin:rising",), "returned -1.0 for round 1 of 2, not a finite number of 0 or more"),
        (("training.schedule=plugin:nothing",), "returned None for round 1 of 2"),
        *(((f"{choice.partition(':')[0]}:nobodys",), 'no installed package has "nobodys"') for choice in ALL_THREE),
        ((*PRIVATE, "augmentation.transform=plugin:brighter"), "may mix the images of a batch"),
    ],
)
def test_one_that_is_wrong_absent_or_excluded_by_privacy_is_a_fault_before_anything_is_trained(
    choices: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = overheard(monkeypatch)
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, *choices)
    assert reason in str(refused.value)
    assert traffic.requests == []


@pytest.mark.parametrize(("name", "whole"), [("plugin:adamw", True), ("plugin:adafactor", False), ("adam", True)])
def test_a_state_is_remembered_whole_or_not_at_all(name: str, whole: bool) -> None:
    """Adafactor keeps rows and columns of a matrix, which no later round could take for the matrix."""
    network = build_network(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), ("a", "b"), 0)
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
    assert network.head.weight.isfinite().all()


@pytest.mark.parametrize(
    ("check", "name", "expectation"),
    [
        (testing.check_transform, "brighter", nullcontext()),
        (testing.check_optimizer, "adamw", nullcontext()),
        (testing.check_optimizer, "adafactor", nullcontext()),
        (testing.check_schedule, "cosine", nullcontext()),
        (testing.check_transform, "cropped", pytest.raises(BadInput, match="shape and kind must stay")),
        (testing.check_transform, "restless", pytest.raises(AssertionError, match="two runs of one seed differ")),
        (testing.check_schedule, "rising", pytest.raises(BadInput, match="not a finite number")),
        (testing.check_optimizer, "nothing", pytest.raises(BadInput, match=r"not a torch.optim.Optimizer")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_authors_can_check_them(check: Callable[[str], None], name: str, expectation: Any) -> None:
    with expectation:
        check(name)
