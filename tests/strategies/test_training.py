"""The training loop: seeds, batches, what is frozen, and an optimiser that outlives a round."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.models import network as networks
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import hash_model_state, read_model_state
from polyclinic.common.models.state import make_model_layout as layout
from polyclinic.common.models.zoo.spec import ModelSpec, Task
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local import optimisation
from polyclinic.strategies.local.early_stopping import EarlyStopping
from polyclinic.strategies.local.losses import (
    PLAIN_LOSSES,
    BatchWeight,
    LossFunction,
    count_known_labels,
    make_batch_weight,
    make_training_loss,
    partial_loss,
)
from polyclinic.strategies.local.objective import LabelledExamples, plain
from polyclinic.strategies.local.optimisation import (
    compute_learning_rate_factor,
    make_optimizer,
    restore_optimizer_state,
    save_optimizer_state,
)
from polyclinic.strategies.local.training import (
    EarlyStopCriterion,
    FrozenNetworkParts,
    LocalTrainingMetrics,
    TrainingTask,
    make_training_reproducible,
    shuffle_into_batches,
    train_epoch,
    train_until_loss_settles,
    validate_network,
)
from tests.federations import federation, finished

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=8, dropout=0.5)
RNG = np.random.default_rng(11)
EXAMPLES = LabelledExamples(
    torch.from_numpy(RNG.integers(0, 256, (33, 1, 16, 16), dtype=np.uint8)),
    torch.from_numpy(RNG.integers(0, 2, (33, 2)).astype(np.float32)),
    torch.tensor([True, True]),
)
EMPTY = LabelledExamples(EXAMPLES.images[:0], EXAMPLES.labels[:0], EXAMPLES.annotated)
ADAM = TrainingSection(batch_size=8, lr=0.01)
ADAMW = TrainingSection(optimizer="adamw", weight_decay=0.05, lr=0.01, batch_size=8)
MOMENTUM = TrainingSection(optimizer="sgd", lr=0.01, momentum=0.9, batch_size=8)
WEAK = AugmentationSpec(rotation=0.02, horizontal_flip=True)
NOTHING = FrozenNetworkParts()


def network() -> SplitNetwork:
    return build_network(SPEC, ("a", "b"), 5)


def sha256(model: SplitNetwork) -> str:
    return hash_model_state(read_model_state(model), layout(model))


def epochs(
    model: SplitNetwork,
    optimizer: torch.optim.Optimizer,
    seeds: list[int],
    frozen: FrozenNetworkParts = NOTHING,
    spec: TrainingSection = ADAM,
) -> None:
    for seed in seeds:
        with make_training_reproducible(seed, threads=1) as generator:
            train_epoch(model, TrainingTask(EXAMPLES, plain(partial_loss), spec, WEAK, frozen), optimizer, generator)


@pytest.mark.parametrize("spec", [ADAM, ADAMW, MOMENTUM])
def test_an_optimiser_put_back_from_disk_goes_on_exactly_where_it_was_and_a_fresh_one_does_not(
    spec: TrainingSection,
) -> None:
    through, stopped = network(), network()
    optimizer, before = (make_optimizer(model, spec, spec.lr) for model in (through, stopped))
    epochs(through, optimizer, [1, 2])
    epochs(stopped, before, [1])
    arrays = save_optimizer_state(stopped, before)
    anew = copy.deepcopy(stopped)
    after = make_optimizer(stopped, spec, spec.lr)
    restore_optimizer_state(stopped, after, arrays)
    epochs(stopped, after, [2])
    epochs(anew, make_optimizer(anew, spec, spec.lr), [2])
    assert arrays
    assert sha256(stopped) == sha256(through) != sha256(anew)


def test_a_seed_trains_one_model_and_leaves_the_processes_own_random_state_and_threads_alone() -> None:
    torch.manual_seed(4)
    expected, threads, hashes = torch.rand(3), torch.get_num_threads(), set[str]()
    for drawn in (0, 1000):
        torch.rand(drawn)
        torch.manual_seed(4)
        model = network()
        epochs(model, make_optimizer(model, ADAM, ADAM.lr), [9])
        hashes.add(sha256(model))
        assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert len(hashes) == 1


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("choices", "theirs"),
    [
        ({"optimizer": "sgd"}, torch.optim.SGD),
        ({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
        ({"optimizer": "adam", "weight_decay": 0.01}, partial(torch.optim.Adam, eps=1e-7)),
        ({"optimizer": "adamw", "weight_decay": 0.01}, partial(torch.optim.AdamW, eps=1e-7)),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_an_optimiser_steps_as_torchs_own(
    choices: dict[str, Any], theirs: Callable[..., torch.optim.Optimizer], clip: float | None
) -> None:
    spec = TrainingSection.model_validate({**choices, "batch_size": 8, "clip_gradients": clip})
    ours, same = network(), network()
    settings = {"weight_decay": 0.0, **choices, "lr": 0.01, "fused": True}
    del settings["optimizer"]
    epochs(ours, make_optimizer(ours, spec, 0.01), [1, 2], spec=spec)
    epochs(same, theirs(same.parameters(), **settings), [1, 2], spec=spec)
    assert torch.is_grad_enabled()
    assert sha256(ours) == sha256(same) != sha256(network())


def test_warming_up_leaves_the_backbone_bit_for_bit() -> None:
    model, fresh = network(), network()
    epochs(model, make_optimizer(model, ADAM, ADAM.lr), [1], FrozenNetworkParts(backbone=True))
    pairs = zip(model.backbone.state_dict().values(), fresh.backbone.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(model.head.weight, fresh.head.weight)


def test_every_image_is_in_one_batch_and_no_batch_is_of_one() -> None:
    parts = shuffle_into_batches(33, 8, torch.Generator().manual_seed(0))
    assert [len(part) for part in parts] == [8, 8, 8, 9]
    assert sorted(torch.cat(parts).tolist()) == list(range(33))


def test_validation_of_nothing_is_not_a_number_but_none() -> None:
    unlabelled = LabelledExamples(EXAMPLES.images, torch.full_like(EXAMPLES.labels, torch.nan), EXAMPLES.annotated)
    for examples in (EMPTY, unlabelled):
        figures = validate_network(network(), examples, partial_loss, ADAM)
        assert (figures.loss, figures.mean_auroc) == (None, None)


def settled(losses: list[float]) -> tuple[SplitNetwork, LocalTrainingMetrics, list[str]]:
    """Train until scripted validation losses settle; also the hash after every epoch."""
    model, hashes, script = network(), list[str](), iter(losses)
    spec = MOMENTUM.model_copy(update={"epochs": 3})

    def loss(logits: torch.Tensor, labels: torch.Tensor, annotated: torch.Tensor) -> torch.Tensor:
        hashes.append(sha256(model))
        return torch.tensor(next(script))

    task = TrainingTask(EXAMPLES, plain(partial_loss), spec, WEAK, NOTHING)
    criterion = EarlyStopCriterion(EXAMPLES, loss, EarlyStopping(2))
    with make_training_reproducible(1, threads=1) as generator:
        figures = train_until_loss_settles(model, task, make_optimizer(model, spec, spec.lr), generator, criterion)
    return model, figures, hashes


def test_training_until_it_settles_ends_with_the_weights_of_the_lowest_loss() -> None:
    model, figures, hashes = settled([0.9, 0.5, 0.7, 0.6])
    assert figures.epochs == 4
    assert sha256(model) == hashes[1] != hashes[3]
    assert figures.last_loss == pytest.approx(figures.losses.reshape(4, -1)[1].mean())
    model, figures, hashes = settled([0.9, float("nan"), float("nan")])  # worse than any number
    assert figures.epochs == 3
    assert sha256(model) == hashes[0]


def test_training_until_it_settles_uses_the_epochs_of_a_privacy_layer() -> None:
    model, calls = network(), list[int]()

    def epoch(network: SplitNetwork, task: TrainingTask, *others: Any) -> Any:
        calls.append(len(calls))
        return train_epoch(network, replace(task, epoch=None), *others)

    task = TrainingTask(EXAMPLES, plain(partial_loss), MOMENTUM, WEAK, NOTHING, epoch)
    criterion = EarlyStopCriterion(EXAMPLES, partial_loss, EarlyStopping(2, cap=3))
    with make_training_reproducible(1, threads=1) as generator:
        figures = train_until_loss_settles(model, task, make_optimizer(model, MOMENTUM, 0.1), generator, criterion)
    assert figures.epochs == len(calls) > 0


def test_without_validation_images_training_takes_the_experiments_epochs() -> None:
    model, spec = network(), TrainingSection(batch_size=8, epochs=3)
    task = TrainingTask(EXAMPLES, plain(partial_loss), spec, WEAK, NOTHING)
    criterion = EarlyStopCriterion(EMPTY, partial_loss, EarlyStopping(2))
    with make_training_reproducible(1, threads=1) as generator:
        figures = train_until_loss_settles(model, task, make_optimizer(model, spec, spec.lr), generator, criterion)
    assert (figures.epochs, len(figures.losses)) == (3, 12)


def untrained() -> SplitNetwork:
    return build_network(SPEC.model_copy(update={"dropout": 0.0, "norm": "group"}), ("a", "b"), 5)


def trained_by(
    spec: TrainingSection,
    examples: LabelledExamples = EXAMPLES,
    loss: LossFunction = partial_loss,
    batch_weight: BatchWeight = count_known_labels,
) -> SplitNetwork:
    """One epoch without dropout or augmentation."""
    model = untrained()
    task = TrainingTask(examples, plain(loss), spec, AugmentationSpec(), NOTHING, batch_weight=batch_weight)
    with make_training_reproducible(3, threads=1) as generator:
        train_epoch(model, task, make_optimizer(model, spec, spec.lr), generator)
    return model


def sgd(**more: object) -> TrainingSection:
    return TrainingSection.model_validate({"optimizer": "sgd", "lr": 0.1, "batch_size": 8, **more})


@pytest.mark.parametrize("steps", [4, 4096])  # four batches fill a step, or are all that there are
@pytest.mark.parametrize("settings", [{}, {"loss": "focal"}, {"class_weights": True}], ids=str)
@pytest.mark.parametrize("task", ["multi_label", "multi_class"])
def test_added_gradients_make_the_step_of_one_large_batch_where_labels_are_unknown(
    task: Task, settings: dict[str, object], steps: int
) -> None:
    # 30 images are batches of 8, 8, 8 and 6, each with another number of known labels.
    draw = np.random.default_rng(4)
    labels = draw.integers(0, 2, (30, 2)).astype(np.float32)
    if task == "multi_class":
        labels[:, 1] = 1 - labels[:, 0]
    labels[draw.random(30) < 0.6] = np.nan
    examples = LabelledExamples(EXAMPLES.images[:30], torch.from_numpy(labels), torch.ones(2, dtype=torch.bool))
    plain_loss = PLAIN_LOSSES[task, "masked"]

    def trunk_after(spec: TrainingSection) -> NDArray[np.float32]:
        loss = make_training_loss(spec, plain_loss, task, "masked", examples.labels)
        weight = make_batch_weight(spec, task, "masked", examples.labels)
        return read_model_state(trained_by(spec, examples, loss, weight)).trunk

    whole = trunk_after(sgd(batch_size=64, **settings))
    added = trunk_after(sgd(batch_size=8, gradient_accumulation_steps=steps, **settings))
    assert np.abs(whole - read_model_state(untrained()).trunk).max() > 1e-3
    np.testing.assert_allclose(added, whole, rtol=1e-4, atol=1e-6)


def test_a_batch_without_known_labels_changes_no_step() -> None:
    unknown = torch.full_like(EXAMPLES.labels[:16], torch.nan)
    few = LabelledExamples(EXAMPLES.images[:16], unknown, EXAMPLES.annotated)
    trained = trained_by(sgd(batch_size=8, gradient_accumulation_steps=2), few)
    assert sha256(trained) == sha256(untrained())


def test_no_step_is_longer_than_the_bound_and_a_high_bound_changes_nothing() -> None:
    after = trained_by(sgd(batch_size=64, clip_gradients=0.01))
    moved = [(now - was).square().sum() for now, was in zip(after.parameters(), untrained().parameters(), strict=True)]
    assert float(torch.stack(moved).sum().sqrt().detach()) == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert sha256(trained_by(sgd(clip_gradients=1e9))) == sha256(trained_by(sgd()))


def test_the_schedule_rises_falls_and_never_ends_at_nothing() -> None:
    def factors(rounds: Iterable[int], of: int, **choices: object) -> list[float]:
        return [compute_learning_rate_factor(sgd(**choices), number, of) for number in rounds]

    assert factors((1, 2, 3, 4), 4) == [1.0] * 4
    assert factors((1, 2, 3, 4, 5), 5, schedule_warm_up=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = factors(range(1, 6), 5, schedule="cosine", schedule_warm_up=1)
    assert cosine[:2] == [0.5, 1.0]
    assert cosine[1:] == sorted(cosine[1:], reverse=True)
    assert 0 < cosine[-1] < 0.2
    last, longer = factors((5, 9), 5, schedule="cosine")
    assert longer == last  # a run made longer


@pytest.mark.parametrize(
    "override", ["schedule=cosine", "schedule_warm_up=1", "clip_gradients=0.1", "gradient_accumulation_steps=3"]
)
def test_each_reaches_the_sites_of_a_federation(override: str, tmp_path: Path) -> None:
    _, plain_run = finished()
    assert federation(tmp_path, f"training.{override}")["model_sha256"] != plain_run["model_sha256"]


def test_float16_takes_the_steps_of_float32_and_leaves_out_one_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, as on a GPU: without the scale these gradients would be 0 in float16."""
    single = trained_by(sgd(precision="fp16"))
    assert sha256(single) == sha256(trained_by(sgd(precision="float32")))  # half precision is for GPUs
    before = read_model_state(untrained()).trunk
    monkeypatch.setattr(networks, "HALF_PRECISION_DEVICES", ("cpu",))
    for choices in ({}, {"gradient_accumulation_steps": 2}, {"clip_gradients": 0.5}):
        models = [trained_by(sgd(precision=precision, **choices)) for precision in ("fp16", "float32")]
        steps = [read_model_state(model).trunk - before for model in models]
        assert np.corrcoef(*steps)[0, 1] > 0.999
        assert (steps[0] != steps[1]).any()
    monkeypatch.setattr(optimisation, "INITIAL_GRADIENT_SCALE", 2.0**30)
    stopped = trained_by(sgd(precision="fp16", gradient_accumulation_steps=4096))
    assert (read_model_state(stopped).trunk == before).all()


@pytest.mark.parametrize("override", ["clip_gradients=0.1", "gradient_accumulation_steps=3", "precision=fp16"])
def test_what_changes_a_step_is_refused_where_each_image_is_covered_by_noise(override: str, tmp_path: Path) -> None:
    private = ('privacy={level = "sample", noise_multiplier = 1.0}', "model.norm=group", "evaluation.checkpoint=last")
    with pytest.raises(BadInput, match=f"leave out training.{override.partition('=')[0]}"):
        federation(tmp_path, f"training.{override}", *private)
