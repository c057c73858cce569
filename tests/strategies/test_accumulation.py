"""Gradients of several batches that are added up make the step of one large batch where labels are unknown.

Without augmentation and in round 1, where terms of images without labels are 0 or draw nothing.
"""

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import read_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import (
    FrozenNetworkParts,
    TrainingTask,
    make_training_reproducible,
    train_epoch,
)
from polyclinic.strategies.methods import fedlsm
from polyclinic.strategies.registry import STRATEGIES, build_strategy

OF_THE_BATCH = {"fedavg_scaled", "fedsld"}
"""Methods that weigh labels by the label distribution of the batch: several batches have several distributions."""
WITHOUT_DRAWS = {"fedlsm": {"uncertain_share": 0.0}}
"""Parameters with which a method draws no pairs; its strong views are taken to be the images themselves."""
SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16, norm="group")
DRAW = np.random.default_rng(4)
LABELS = DRAW.integers(0, 2, (30, 3)).astype(np.float32)
LABELS[DRAW.random((30, 3)) < 0.6] = np.nan
LABELS[:, 2] = np.nan  # a class that the site does not annotate
EXAMPLES = LabelledExamples(
    torch.from_numpy(DRAW.integers(0, 256, (30, 1, 16, 16), dtype=np.uint8)),
    torch.from_numpy(LABELS),
    torch.tensor([True, True, False]),
)


def step_of(method: str, batch_size: int, steps: int) -> NDArray[np.float32]:
    """The change of the trunk by one step of SGD over all images."""
    spec = TrainingSection.model_validate(
        {"optimizer": "sgd", "lr": 0.1, "batch_size": batch_size, "gradient_accumulation_steps": steps}
    )
    site = build_strategy(method, WITHOUT_DRAWS.get(method, {})).site
    network: SplitNetwork = build_network(SPEC, ("a", "b", "c"), 5)
    before = read_model_state(copy.deepcopy(network)).trunk
    local = site.make_local_round(ClientContext(network, EXAMPLES, {}, {}, 1, spec))
    weight = site.make_batch_weight(EXAMPLES, spec)
    task = TrainingTask(EXAMPLES, local.objective, spec, AugmentationSpec(), FrozenNetworkParts(), None, weight)
    with make_training_reproducible(3, threads=1) as generator:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        train_epoch(network, task, optimizer, generator)
    return read_model_state(network).trunk - before


@pytest.mark.parametrize("method", sorted(STRATEGIES.keys() - OF_THE_BATCH))
def test_added_gradients_are_those_of_one_large_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedlsm, "augment_images_strongly", lambda images, generator: images)
    whole, added = step_of(method, 64, 1), step_of(method, 8, 4)
    assert np.linalg.norm(added - whole) < 1e-4 * np.linalg.norm(whole)
