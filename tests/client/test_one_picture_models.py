"""Models that fail on one picture, and parts that stay: without trust in the coordinator no figure says anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polyclinic.client.site.policy import Level, SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.features import FEATURE_BATCH_SIZE, FeatureCache
from polyclinic.common.config import HospitalPlan
from polyclinic.common.models.network import build_network
from polyclinic.common.plugins import MODELS, PLUGIN_PREFIX, identify_plugin, register_local_plugin
from polyclinic.common.wire.records import BenefitReply, EvaluateReply, TrainReply
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import load_pixels_on_device
from tests.client.rounds import (
    beginning,
    benefit_request,
    evaluate_request,
    images,
    plan,
    private_plan,
    record_of,
    request,
    send,
    site,
    trained,
)

SOUGHT = 255
"""First pixel of the picture that the coordinator looks for; others have 0."""


def failing(channels: int, image_size: int) -> nn.Module:
    """A linear network whose features are no numbers for a picture that begins with :data:`SOUGHT`."""

    class Fails(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            first = (1 - images[:, :1, 0, 0]).clamp(min=0)  # pixels lie between -1 and 1
            return images.flatten(1) * (first / first)

    return nn.Sequential(Fails(), nn.Linear(channels * image_size**2, 8, bias=False))


NETWORK = register_local_plugin(MODELS, failing)


def crafted(**tables: Any) -> HospitalPlan:
    tree = plan(batch_size=64, optimizer="sgd").model_dump(mode="json")
    tree["model"] |= {"architecture": PLUGIN_PREFIX + NETWORK, "neck": None}
    tree["evaluation"] |= {"compare_local": True, "checkpoint": "last"}
    of = HospitalPlan.model_validate({**tree, **{name: {**tree[name], **keys} for name, keys in tables.items()}})
    return of.model_copy(update={"plugins": (identify_plugin(MODELS, NETWORK),)})


def with_picture(images: ImageSet, count: int) -> ImageSet:
    stored = images.stored.copy()
    stored[:, 0, 0] = 0
    stored[:count, 0, 0] = SOUGHT
    return replace(images, stored=stored)


def hospital(folder: Path, level: Level, validation: int = 0, test: int = 0, **policy: Any) -> Site:
    """A hospital with so many pictures that the model fails on."""
    at, keys = site(folder), {"level": level, "networks": ("*",), **policy}
    parts = {"validation": with_picture(at.validation, validation), "test": with_picture(at.test, test)}
    return replace(at, **parts, train=with_picture(at.train, 0), policy=SitePolicy.model_validate(keys))


def judged(at: Site, of: HospitalPlan, *, test: bool = False, counted: int = 1) -> EvaluateReply:
    return record_of(send(at, "evaluate", evaluate_request(request(of, counted=counted), test=test)), EvaluateReply)


PRIVACY: dict[Level, dict[str, Any]] = {
    "masked": {"secure_aggregation": True},
    "private": {"level": "patient", "noise_multiplier": 20.0},
}


@pytest.mark.parametrize("level", PRIVACY)
def test_no_figure_of_a_model_that_fails_on_one_picture_leaves_where_the_coordinator_is_not_trusted(
    level: Level, tmp_path: Path
) -> None:
    of, answers = crafted(privacy=PRIVACY[level]), []
    comparison = benefit_request(of, beginning(of), beginning(of), 1, 1)
    for number, (validation, test) in enumerate([(0, 0), (1, 0), (0, 1)]):
        at = hospital(tmp_path / str(number), level, validation, test, smallest_count=0)
        replies = [judged(at, of, test=test) for test in (False, True)]
        # Arrays as bytes, which compare.
        fields = [
            getattr(value, "tobytes", lambda value=value: value)()
            for reply in replies
            for value in vars(reply).values()
        ]
        answers.append((record_of(send(at, "query.benefit", comparison), BenefitReply), fields))
    assert answers[0] == answers[1] == answers[2]


def test_a_trusted_hospital_answers_without_an_error_where_a_model_fails_on_one_test_image(tmp_path: Path) -> None:
    of = crafted()
    for pictures, scored in ((0, 2), (1, 0)):
        at = hospital(tmp_path / str(pictures), "trusted", test=pictures, smallest_count=0)
        assert len(judged(at, of, test=True).auroc) == scored


def test_where_noise_covers_updates_nothing_says_what_a_part_that_stays_holds(tmp_path: Path) -> None:
    hashes = {}
    for name, noise, count in (("bare", {}, 5), ("covered", {"level": "update", "noise_multiplier": 1.0}, 0)):
        of = private_plan(plan("pfl", batch_size=64), **noise)
        at = site(tmp_path / name, smallest_count=0, metrics_outside_privacy=True)
        before = judged(at, of, test=True, counted=0)
        reply = record_of(trained(at, of), TrainReply)
        after = judged(at, of, test=True)
        figures = [reply.train_loss, reply.validation_loss, after.validation_loss, *after.auroc]
        assert len([value for value in figures if value is not None]) == count
        assert bool(after.validation_classes) == bool(count)
        hashes[name] = {before.model_sha256, after.model_sha256}
    assert (len(hashes["bare"]), len(hashes["covered"])) == (2, 1)


def test_how_many_test_images_are_right_leaves_without_those_of_hidden_classes_alone(tmp_path: Path) -> None:
    of, counts = crafted(evaluation={"test_each_round": True}), []
    for smallest in (0, 3):
        at = hospital(tmp_path / str(smallest), "trusted", smallest_count=smallest)
        labels = np.eye(2, dtype=np.float32)[[0] * 14 + [1] * 2]
        patients = np.array([f"p{row}" for row in range(16)])
        at = replace(at, test=replace(at.test, labels=labels, patients=patients))
        counts.append(record_of(trained(at, of), TrainReply).test_images)
        assert judged(at, of).test_images == counts[-1]
    assert counts == [16, 0]  # both classes are hidden: fewer than three patients show the second


def test_features_of_a_frozen_backbone_do_not_say_by_failing_that_one_image_is_left_over(tmp_path: Path) -> None:
    """Some layers fail on a batch of one: whether there is one hangs on the exact number of images."""

    class NotOfOne(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            assert len(images) > 1
            return images.flatten(1)

    of = plan()
    network = build_network(of.model, ("a",), 1)
    network.backbone = NotOfOne()
    pixels = load_pixels_on_device(images(1, FEATURE_BATCH_SIZE + 1), "cpu")
    assert (
        len(FeatureCache(tmp_path, None, False).get_or_compute_features(network, "train", pixels, of))
        == FEATURE_BATCH_SIZE + 1
    )


def test_features_on_the_disk_are_read_by_the_key_that_they_were_written_with(tmp_path: Path) -> None:
    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise AssertionError

    of = plan()
    network = build_network(of.model, ("a",), 1)
    network.backbone = nn.Flatten()
    pixels = load_pixels_on_device(images(1, 3), "cpu")
    computed = FeatureCache(tmp_path, bytes(32), False).get_or_compute_features(network, "train", pixels, of)
    network.backbone = Failing()
    assert torch.equal(
        FeatureCache(tmp_path, bytes(32), False).get_or_compute_features(network, "train", pixels, of), computed
    )
    with pytest.raises(AssertionError):
        FeatureCache(tmp_path, b"1" * 32, False).get_or_compute_features(network, "train", pixels, of)
