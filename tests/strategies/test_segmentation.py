"""Federations that segment: head rows are 1x1 convolutions, and what nobody outlined is never background."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network, decide_class_areas, logits_to_probabilities
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.image_set import deserialize_dataset_splits, hash_dataset, serialize_dataset_splits
from polyclinic.data.base.spec import AugmentationSpec, DrawnOrgansDatasetSpec
from polyclinic.data.images.augmentation import augment_images_with_labels
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.data.sources.drawn_organs import load_drawn_organs
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.local.objective import pair_pixels_with_labels
from polyclinic.strategies.registry import STRATEGIES, build_strategy
from tests.federations import AT_COORDINATOR, FULL_COVERAGE, federation, finished, needs_of
from tests.organs import ALL_OUTLINED, ORGANS, SEGMENTING, TASKS, VOLUMES
from tests.server.killing import Killed, kill_at

OWN_ORGANS = 'server_data={kind = "organs", images = 30, image_size = 32, seed = 9}'
SPLITS = load_drawn_organs(DrawnOrgansDatasetSpec(kind="organs", images=24, image_size=16))
OUTLINED = {"east": ["Liver", "Pancreas"], "north": ["Kidney", "Liver"], "south": ["Pancreas", "Spleen"]}
IMAGE_METHODS = sorted(STRATEGIES.keys() - set(SEGMENTING))


@pytest.mark.parametrize("task", TASKS)
def test_where_all_hospitals_outline_all_organs_surgical_aggregation_is_fedavg(task: str) -> None:
    setting = (*ALL_OUTLINED, f"model.task={task}", "method.weighting=samples")
    models = [finished(*setting, f"run.method={method}")[1]["model_sha256"] for method in ("surgical", "fedavg")]
    assert models[0] == models[1]


@pytest.mark.parametrize("task", TASKS)
def test_volumes_are_segmented_and_surgical_aggregation_is_fedavg_there_too(task: str) -> None:
    alike = next(setting for setting in ALL_OUTLINED[::-1] if setting.startswith("partition"))
    setting = (*VOLUMES, alike, f"model.task={task}", "method.weighting=samples", "augmentation.rotation=0.05")
    runs = [finished(*setting, f"run.method={method}")[1] for method in ("surgical", "fedavg")]
    assert runs[0]["model_sha256"] == runs[1]["model_sha256"]
    assert runs[0]["test"]["segmentation"]["mean_dice"] is not None


@pytest.mark.parametrize("method", SEGMENTING)
def test_a_method_that_segments_ends_with_a_dice_for_each_organ(method: str) -> None:
    needs = [need for need in needs_of(method) if not need.startswith(("partition", "server_data"))]
    own = [OWN_ORGANS] if method in AT_COORDINATOR else []
    settings = ALL_OUTLINED if method in FULL_COVERAGE else ORGANS
    if method == "fedbn_plus":
        needs = ["model.norm=group"]
    _, summary = finished(*settings, f"run.method={method}", *needs, *own, "run.rounds=1")
    per_class = summary["test"]["per_class"]
    assert sorted(per_class) == ["Kidney", "Liver", "Pancreas", "Spleen"]
    assert all(0 <= metrics["more"]["dice"] <= 1 for metrics in per_class.values())
    assert all(metrics["auroc"] is None for metrics in per_class.values())


@pytest.mark.parametrize("method", IMAGE_METHODS)
def test_a_method_of_whole_images_is_refused_with_its_reason(method: str) -> None:
    with pytest.raises(BadInput) as refused:
        build_strategy(method, {}, "segmentation")
    (fault,) = refused.value.faults
    assert fault.where == "run.method"
    assert STRATEGIES[method].site_class.traits.reason_against_segmentation in fault.problem


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", [ORGANS, VOLUMES], ids=["pictures", "volumes"])
def test_killed_and_resumed_it_ends_in_the_same_model(tmp_path: Path, task: str, kind: tuple[str, ...]) -> None:
    setting = (*kind, f"model.task={task}", "run.rounds=3")
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, Coordinator, "configure_train", 3)
        with pytest.raises(Killed):
            federation(tmp_path, *setting, out="killed")
    resumed = federation(tmp_path, *setting, out="killed", resume=True)
    assert resumed["model_sha256"] == finished(*setting)[1]["model_sha256"]


def test_the_saved_model_gives_the_logits_of_the_trained_one() -> None:
    folder, _ = finished(*ORGANS)
    network = load_model(folder)
    logits = network(torch.zeros(2, 1, 32, 32))
    assert logits.shape == (2, 4, 32, 32)
    assert network.head.weight.shape == (4, 16)


def test_labels_of_pixels_are_the_masks_and_nan_where_a_class_is_not_annotated() -> None:
    images = SPLITS.train.select_label_columns(("Liver",))
    examples = pair_pixels_with_labels(images, load_pixels_on_device(images, "cpu"), ("Kidney", "Liver"))
    labels = examples.get_labels(torch.tensor([3, 0]))
    assert labels.shape == (2, 2, 16, 16)
    assert bool(labels[:, 0].isnan().all())
    assert images.masks is not None
    expected = images.masks.read_class_areas(np.array([3, 0]), ("Liver",))[:, 0]
    assert np.array_equal(labels[:, 1].numpy(), expected)


def test_an_image_label_of_0_is_a_mask_of_0() -> None:
    images = SPLITS.train
    labels = np.zeros_like(images.labels)
    empty = replace(images, labels=labels)
    examples = pair_pixels_with_labels(empty, load_pixels_on_device(empty, "cpu"), images.class_names)
    assert not examples.get_labels(torch.arange(len(images))).any()


def test_masks_follow_their_images_through_selection_renaming_and_merging() -> None:
    chosen = SPLITS.train.select_rows(np.array([2, 5]))
    merged = chosen.merge_label_columns([("Liver", "Spleen")]).rename_classes(("A", "B", "C"))
    assert merged.class_names == ("A", "B", "C")
    assert merged.masks is not None
    assert chosen.masks is not None
    both = chosen.masks.read_class_areas(np.arange(2), ("Liver", "Spleen")).any(1)
    assert np.array_equal(merged.masks.read_class_areas(np.arange(2), ("B",))[:, 0], both)


def test_masks_reach_another_process_unchanged() -> None:
    layout, arrays = serialize_dataset_splits(SPLITS)
    again = deserialize_dataset_splits(layout, arrays)
    assert hash_dataset(*again.parts) == hash_dataset(*SPLITS.parts)


def test_another_mask_is_another_data_set() -> None:
    train = SPLITS.train
    assert train.masks is not None
    stored = train.masks.stored.copy()
    stored[train.masks.places[0], 3, 3] ^= 1
    changed = replace(train, masks=replace(train.masks, stored=stored))
    assert hash_dataset(changed) != hash_dataset(train)


def test_labels_move_with_their_pixels() -> None:
    images = torch.zeros(4, 1, 8, 8)
    images[:, 0, 1:4, 2:5] = 255.0
    labels = torch.cat([(images > 0).float(), torch.full_like(images, torch.nan)], 1)
    spec = AugmentationSpec(rotation=0.1, horizontal_flip=True, zoom=0.2, translate=0.2, contrast=0.3)
    moved, of_pixels = augment_images_with_labels(images, labels, spec, torch.Generator().manual_seed(2))
    assert bool(of_pixels[:, 1].isnan().all())
    assert set(of_pixels[:, 0].unique().tolist()) == {0.0, 1.0}
    inside = moved[:, 0] > moved.amax((1, 2, 3))[:, None, None] * 0.75
    assert not torch.equal(of_pixels[:, 0], labels[:, 0])
    assert float((inside == (of_pixels[:, 0] > 0)).float().mean()) > 0.9


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", [ORGANS, VOLUMES], ids=["pictures", "volumes"])
def test_a_hospital_tests_the_model_that_the_run_saves(kind: tuple[str, ...], task: str) -> None:
    # Every hospital tests on all test images, so its Dice of an organ is that of the saved model. With its own rows
    # alone, the pixels of the other hospitals' organs would go to its own.
    _, summary = finished(*kind, f"model.task={task}", "run.rounds=3")
    of_model = summary["test"]["per_class"]
    assert summary["test"]["mean_more"]["dice"] > 0
    assert {site: list(record["per_class"]) for site, record in summary["per_site"].items()} == OUTLINED
    for record in summary["per_site"].values():
        assert {name: each["more"] for name, each in record["per_class"].items()} == {
            name: of_model[name]["more"] for name in record["per_class"]
        }


def test_a_flip_alone_moves_labels_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(6, 1, 5, 7, generator=generator) * 255
    labels = (images > 127).float()
    spec = AugmentationSpec(horizontal_flip=True)
    moved, of_pixels = augment_images_with_labels(images, labels, spec, generator)
    assert torch.equal(of_pixels, (moved > 127).float())
    assert not torch.equal(moved, images)


def spec_of(task: str, **more: object) -> ModelSpec:
    form = {"architecture": "tiny_unet", "channels": 1, "image_size": 16, "task": task, **more}
    return ModelSpec.model_validate(form)


def test_the_head_is_a_convolution_of_one_pixel() -> None:
    network = build_network(spec_of("segmentation"), ("a", "b"), seed=0).eval()
    images = torch.rand(2, 1, 16, 16) * 255
    features = network.features(images)
    head = network.head
    expected = torch.nn.functional.conv2d(features, head.weight[:, :, None, None], head.bias)
    torch.testing.assert_close(network(images), expected)


def test_logits_have_the_size_of_the_images() -> None:
    network = build_network(spec_of("segmentation"), ("a",), seed=0).eval()
    assert network(torch.zeros(2, 1, 40, 24)).shape == (2, 1, 40, 24)


def test_exclusive_classes_share_the_pixels_with_the_background() -> None:
    logits = torch.tensor([[[[1.0, -2.0, 3.0]], [[2.0, -1.0, -4.0]]]])  # (1, 2, 1, 3)
    probabilities = logits_to_probabilities(logits, "exclusive_segmentation")
    whole = 1 + np.e + np.e**2
    assert probabilities[0, :, 0, 0].tolist() == pytest.approx([np.e / whole, np.e**2 / whole])
    areas = decide_class_areas(logits, "exclusive_segmentation")
    assert areas[0, :, 0].tolist() == [[False, False, True], [True, False, False]]
    assert decide_class_areas(logits, "segmentation")[0, :, 0].tolist() == [[True, False, True], [True, False, False]]


REFUSED: Sequence[tuple[str, ...]] = (
    ("training.loss=focal",),
    ("training.class_weights=true",),
    ("evaluation.compare_local=true",),
    ("privacy.level=sample", "privacy.noise_multiplier=1.0", "evaluation.checkpoint=last", "model.norm=group"),
    ("model.architecture=tiny_cnn",),
    ('data={kind = "digits", image_size = 32}', 'partition={kind = "class_subsets", sites = 3, shared = 2}'),
)


@pytest.mark.parametrize("overrides", REFUSED, ids=[each[0] for each in REFUSED])
def test_settings_of_image_labels_are_refused_by_name(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as refused:
        federation(tmp_path, *ORGANS, *overrides)
    key = overrides[0].partition("=")[0].removesuffix(".architecture")
    assert any(key in fault.where for fault in refused.value.faults), refused.value.faults


@pytest.mark.parametrize("architecture", ["monai:UNet", "monai:DynUNet"])
@pytest.mark.parametrize("size", [32, (8, 16, 16)])
def test_networks_of_monai_segment_pictures_and_volumes(architecture: str, size: int | tuple[int, ...]) -> None:
    pytest.importorskip("monai")
    spec = spec_of("exclusive_segmentation", architecture=architecture, image_size=size)
    network = build_network(spec, ("a", "b"), seed=0)
    images = torch.rand(2, *spec.input_shape) * 255
    logits = network(images)
    assert logits.shape == (2, 2, *spec.sides)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
