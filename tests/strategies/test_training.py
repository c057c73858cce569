"""The training loop: seeds, batches, what is frozen, and an optimiser that outlives a round."""

import numpy as np
import pytest
import torch

from common.config import TrainingSection
from common.data.augmentation.spec import AugmentationSpec
from common.models.network import SplitNetwork, build
from common.models.state import layout_of as layout
from common.models.state import read_state, state_sha256
from common.models.zoo.spec import ModelSpec
from strategies.local.early_stopping import Settling
from strategies.local.losses import known_entries
from strategies.local.training import (
    Examples,
    Exercise,
    Frozen,
    Judge,
    Trained,
    batches,
    optimizer_arrays,
    optimizer_for,
    plain,
    reproducible,
    restore_optimizer,
    train_epoch,
    train_until_settled,
    validate,
)

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, neck=8, dropout=0.5)
RNG = np.random.default_rng(11)
EXAMPLES = Examples(
    torch.from_numpy(RNG.integers(0, 256, (33, 1, 16, 16), dtype=np.uint8)),
    torch.from_numpy(RNG.integers(0, 2, (33, 2)).astype(np.float32)),
    torch.tensor([True, True]),
)
ADAM = TrainingSection(batch_size=8, lr=0.01)
WEAK = AugmentationSpec(rotation=0.02, horizontal_flip=True)


def network() -> SplitNetwork:
    return build(SPEC, ("a", "b"), 5)


def sha256(model: SplitNetwork) -> str:
    return state_sha256(read_state(model), layout(model))


NOTHING = Frozen()


def epochs(model: SplitNetwork, optimizer: torch.optim.Optimizer, seeds: list[int], frozen: Frozen = NOTHING) -> None:
    for seed in seeds:
        with reproducible(seed, threads=1) as generator:
            train_epoch(model, Exercise(EXAMPLES, plain(known_entries), ADAM, WEAK, frozen), optimizer, generator)


@pytest.mark.parametrize("spec", [ADAM, TrainingSection(optimizer="sgd", lr=0.01, momentum=0.9, batch_size=8)])
def test_an_optimiser_put_back_from_disk_goes_on_exactly_where_it_was(spec: TrainingSection) -> None:
    through = network()
    optimizer = optimizer_for(through, spec, spec.lr)
    epochs(through, optimizer, [1, 2])
    stopped = network()
    before = optimizer_for(stopped, spec, spec.lr)
    epochs(stopped, before, [1])
    arrays = optimizer_arrays(stopped, before)
    after = optimizer_for(stopped, spec, spec.lr)
    restore_optimizer(stopped, after, arrays)
    epochs(stopped, after, [2])
    assert arrays
    assert sha256(stopped) == sha256(through)


def test_a_fresh_optimiser_does_not() -> None:
    through, stopped = network(), network()
    epochs(through, optimizer_for(through, ADAM, ADAM.lr), [1, 2])
    for seed in (1, 2):
        epochs(stopped, optimizer_for(stopped, ADAM, ADAM.lr), [seed])
    assert sha256(stopped) != sha256(through)


def test_the_same_seed_trains_the_same_model_whatever_was_drawn_before() -> None:
    hashes = []
    for noise in (0, 1000):
        torch.rand(noise)
        model = network()
        epochs(model, optimizer_for(model, ADAM, ADAM.lr), [9])
        hashes.append(sha256(model))
    assert hashes[0] == hashes[1]


def test_training_leaves_the_processes_own_random_state_and_threads_alone() -> None:
    torch.manual_seed(4)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(4)
    model = network()
    epochs(model, optimizer_for(model, ADAM, ADAM.lr), [9])
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_warming_up_leaves_the_backbone_bit_for_bit() -> None:
    model, fresh = network(), network()
    epochs(model, optimizer_for(model, ADAM, ADAM.lr), [1], Frozen(backbone=True))
    pairs = zip(model.backbone.state_dict().values(), fresh.backbone.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(model.head.weight, fresh.head.weight)


def test_every_image_is_in_one_batch_and_no_batch_is_of_one() -> None:
    parts = batches(33, 8, torch.Generator().manual_seed(0))
    assert [len(part) for part in parts] == [8, 8, 8, 9]
    assert sorted(torch.cat(parts).tolist()) == list(range(33))


def test_validation_of_nothing_is_not_a_number_but_none() -> None:
    nothing = Examples(EXAMPLES.images[:0], EXAMPLES.labels[:0], EXAMPLES.annotated)
    unlabelled = Examples(EXAMPLES.images, torch.full_like(EXAMPLES.labels, torch.nan), EXAMPLES.annotated)
    for examples in (nothing, unlabelled):
        found = validate(network(), examples, known_entries, ADAM)
        assert (found.loss, found.mean_auroc) == (None, None)


def settled(losses: list[float], patience: int = 2) -> tuple[SplitNetwork, Trained, torch.optim.Optimizer, list[str]]:
    """Train until scripted validation losses settle; also the hash after every epoch."""
    model, hashes, said = network(), list[str](), iter(losses)
    spec = TrainingSection(optimizer="sgd", lr=0.01, momentum=0.9, batch_size=8, epochs=3)
    optimizer = optimizer_for(model, spec, spec.lr)

    def loss(logits: torch.Tensor, labels: torch.Tensor, annotated: torch.Tensor) -> torch.Tensor:
        hashes.append(sha256(model))
        return torch.tensor(next(said))

    exercise = Exercise(EXAMPLES, plain(known_entries), spec, WEAK, NOTHING)
    with reproducible(1, threads=1) as generator:
        done = train_until_settled(model, exercise, optimizer, generator, Judge(EXAMPLES, loss, Settling(patience)))
    return model, done, optimizer, hashes


def test_training_until_it_settles_ends_with_the_weights_of_the_lowest_loss() -> None:
    model, done, _, hashes = settled([0.9, 0.5, 0.7, 0.6])
    assert done.epochs == 4
    assert sha256(model) == hashes[1] != hashes[3]
    assert done.last_loss == pytest.approx(done.losses.reshape(4, -1)[1].mean())


def test_a_loss_that_is_no_number_is_worse_than_any() -> None:
    model, done, _, hashes = settled([0.9, float("nan"), float("nan")])
    assert done.epochs == 3
    assert sha256(model) == hashes[0]


def test_without_validation_images_training_takes_the_experiments_epochs() -> None:
    nothing = Examples(EXAMPLES.images[:0], EXAMPLES.labels[:0], EXAMPLES.annotated)
    model, spec = network(), TrainingSection(batch_size=8, epochs=3)
    exercise = Exercise(EXAMPLES, plain(known_entries), spec, WEAK, NOTHING)
    with reproducible(1, threads=1) as generator:
        judge = Judge(nothing, known_entries, Settling(2))
        done = train_until_settled(model, exercise, optimizer_for(model, spec, spec.lr), generator, judge)
    assert (done.epochs, len(done.losses)) == (3, 12)
