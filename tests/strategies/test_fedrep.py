"""FedRep trains the head with the trunk fixed, then the trunk with the head fixed."""

import copy
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import SplitNetwork, build_network, set_train_mode
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.optimisation import make_optimizer
from polyclinic.strategies.local.training import MiniBatch, count_batches, shuffle_into_batches
from polyclinic.strategies.methods.fedrep import FedRepSite, alternate_objective, count_head_steps, trains_trunk
from tests.federations import finished

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
GENERATOR = torch.Generator().manual_seed(1)
IMAGES = torch.randint(0, 256, (20, 1, 16, 16), generator=GENERATOR, dtype=torch.uint8)
LABELS = torch.randint(0, 2, (20, 2), generator=GENERATOR).float()
ANNOTATED = torch.tensor([True, True])
PARTS = torch.split(torch.arange(20), 5)


def train_by_objective(share: float, spec: TrainingSection) -> list[SplitNetwork]:
    """The network after each of four batches."""
    network = build_network(SPEC, ("a", "b"), seed=3)
    examples = LabelledExamples(IMAGES, LABELS, ANNOTATED)
    local = FedRepSite({"head_share": share}).make_local_round(
        ClientContext(network, examples, NO_ARRAYS, NO_ARRAYS, 1, spec)
    )
    optimizer = make_optimizer(network, spec, spec.lr)
    set_train_mode(network)
    after = []
    for rows in PARTS:
        batch = MiniBatch(rows, IMAGES[rows], LABELS[rows], ANNOTATED, None, nullcontext(), GENERATOR)
        optimizer.zero_grad(set_to_none=True)
        local.objective(network, batch).backward()
        optimizer.step()
        after.append(copy.deepcopy(network))
    return after


def train_with_two_optimizers(head_batches: int, lr: float) -> SplitNetwork:
    """As the authors' pseudo-code: an optimiser of the head, then one of everything else, plain SGD."""
    network = build_network(SPEC, ("a", "b"), seed=3)
    head = list(network.head.parameters())
    trunk = [value for value in network.parameters() if not any(value is row for row in head)]
    optimizers = torch.optim.SGD(head, lr=lr), torch.optim.SGD(trunk, lr=lr)
    network.train()
    for number, rows in enumerate(PARTS):
        optimizer = optimizers[number >= head_batches]
        network.zero_grad()
        binary_cross_entropy_with_logits(network(IMAGES[rows].float()), LABELS[rows]).backward()
        optimizer.step()
    return network


def test_a_round_is_that_of_two_optimisers_one_after_the_other() -> None:
    ours = train_by_objective(0.5, TrainingSection(optimizer="sgd", lr=0.1, batch_size=5))[-1]
    theirs = train_with_two_optimizers(2, 0.1)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_neither_momentum_nor_weight_decay_moves_the_part_that_is_fixed(optimizer: str) -> None:
    momentum = 0.9 if optimizer == "sgd" else 0.0
    spec = TrainingSection(optimizer=optimizer, lr=0.01, batch_size=5, momentum=momentum, weight_decay=0.1)
    begin, *states = [
        read_model_state(network) for network in (build_network(SPEC, ("a", "b"), 3), *train_by_objective(0.5, spec))
    ]
    for before, after in pairwise((begin, *states[:2])):
        assert np.array_equal(before.trunk, after.trunk)
        assert not np.array_equal(before.head.weight, after.head.weight)
    for before, after in pairwise(states[1:]):
        assert not np.array_equal(before.trunk, after.trunk)
        assert np.array_equal(before.head.weight, after.head.weight)
        assert np.array_equal(before.head.bias, after.head.bias)


def test_the_head_has_its_share_of_steps_and_each_part_at_least_one() -> None:
    assert [count_head_steps(11, share) for share in (0.01, 0.5, 10 / 11, 0.99)] == [1, 6, 10, 10]
    assert count_head_steps(2, 0.9) == 1


@pytest.mark.parametrize(("accumulated", "of_the_head"), [(1, [True, True, False, False]), (3, [True] * 3 + [False])])
def test_batches_of_one_step_train_the_same_part(accumulated: int, of_the_head: list[bool]) -> None:
    spec = TrainingSection(optimizer="sgd", lr=0.1, batch_size=5, gradient_accumulation_steps=accumulated)
    states = [read_model_state(network) for network in train_by_objective(0.5, spec)]
    begin = read_model_state(build_network(SPEC, ("a", "b"), 3))
    moved = [not np.array_equal(before.head.bias, now.head.bias) for before, now in pairwise((begin, *states))]
    assert moved == of_the_head


def test_a_frozen_trunk_leaves_all_steps_to_the_head() -> None:
    network = build_network(SPEC, ("a", "b"), seed=3)
    network.backbone.requires_grad_(False)
    assert not trains_trunk(network)
    objective = alternate_objective(lambda model, batch: model(IMAGES.float()).sum(), 0)
    objective(network, MiniBatch(PARTS[0], IMAGES, LABELS, ANNOTATED, None, nullcontext(), GENERATOR)).backward()
    assert network.head.bias.grad is not None


def test_batches_are_counted_as_they_are_made() -> None:
    for n in range(1, 40):
        for size in (1, 2, 3, 8, 64):
            assert count_batches(n, size) == len(shuffle_into_batches(n, size, GENERATOR))


def test_the_heads_stay_and_the_model_is_neither_that_of_pfl_nor_of_another_share() -> None:
    runs = [("run.method=pfl",), *(("run.method=fedrep", f"method.head_share={share}") for share in (0.5, 0.8))]
    shared = "partition.shared=2", "training.batch_size=16"
    folders: list[Path] = [finished(*run, *shared)[0] for run in runs]
    hashes = {(folder / "sites" / "site-1" / "model" / "model.safetensors").read_bytes() for folder in folders}
    assert len(hashes) == 3
