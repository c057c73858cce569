"""Differential privacy measured from outside: who took part is guessed from one step of training, canary by canary.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023: each of m canaries takes part
by the toss of a coin; from what is released some are guessed. Under (epsilon, delta) the right guesses are few.
"""

from bisect import bisect_right

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import SplitNetwork
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.spec import AugmentationSpec
from polyclinic.strategies.local.losses import PLAIN_LOSSES
from polyclinic.strategies.local.objective import LabelledExamples, plain
from polyclinic.strategies.local.training import FrozenNetworkParts, TrainingTask
from polyclinic.strategies.privacy.gradients import PrivateEpochTrainer
from polyclinic.strategies.privacy.mechanism import NoisySteps, compute_epsilon
from polyclinic.strategies.privacy.noise import make_seeded_noise_source

SIZE = 64
CANARIES = SIZE * SIZE
DELTA = 1e-5
BCE = PLAIN_LOSSES["multi_label", "masked"]
LONG = (2.0, 1, False), (0.8, 5, True), (2.0, 5, True)


class Brightest(nn.Module):
    """One feature a pixel, large for the brightest: every canary has a gradient of its own, as large as may be."""

    def forward(self, pixels: Tensor) -> Tensor:
        flat = pixels.flatten(1)
        return 1000.0 * (flat == flat.amax(dim=1, keepdim=True)).float()


def canaries(present: NDArray[np.int64]) -> LabelledExamples:
    """An image for each canary that takes part: one bright pixel, at the place of its number."""
    images = torch.zeros(len(present), CANARIES, dtype=torch.uint8)
    images[torch.arange(len(present)), torch.from_numpy(present)] = 255
    labels = torch.ones(len(present), 1)
    return LabelledExamples(images.reshape(-1, 1, SIZE, SIZE), labels, torch.tensor([True]))


def scores(
    taking_part: NDArray[np.bool_], noise_multiplier: float, images_each: int, *, hides_patients: bool
) -> Tensor:
    """What one noisy step did to each canary's weight; the larger, the likelier it took part."""
    spec = ModelSpec.model_validate({"architecture": "tiny_cnn", "channels": 1, "image_size": SIZE})
    head = nn.Linear(CANARIES, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    network = SplitNetwork(spec, ("a",), backbone=Brightest(), neck=nn.Identity(), head=head)
    present = np.repeat(np.flatnonzero(taking_part), images_each)
    training = TrainingSection(batch_size=256, lr=1.0, optimizer="sgd")
    exercise = TrainingTask(canaries(present), plain(BCE), training, AugmentationSpec(), FrozenNetworkParts())
    owners = torch.from_numpy(np.unique(present, return_inverse=True)[1]) if hides_patients else None
    step = PrivateEpochTrainer(BCE, 1.0, noise_multiplier, 1.0, 1, 1.0, make_seeded_noise_source(11), owners)
    step(network, exercise, torch.optim.SGD(network.parameters(), lr=1.0), torch.Generator())
    return head.weight.detach()[0]


def proven_epsilon(taking_part: NDArray[np.bool_], scores: NDArray[np.float32], guesses: int) -> float:
    """The lower bound on epsilon, at confidence 0.95, that so many guesses prove, half of them of each kind."""
    order = np.argsort(scores)
    right = int(taking_part[order[-guesses // 2 :]].sum() + (~taking_part[order[: guesses // 2]]).sum())

    def probability(epsilon: float) -> float:
        """At most so likely are as many right guesses under this epsilon (theorem 5.2)."""
        binomial = stats.binom(guesses, 1 / (1 + np.exp(-epsilon)))
        fewer = np.arange(1, right + 1)
        slack = float(np.max((binomial.cdf(right - 1) - binomial.cdf(right - fewer - 1)) / fewer)) if right else 0.0
        return float(binomial.sf(right - 1)) + 2 * len(scores) * DELTA * slack

    candidates = np.arange(0.0, 12.0, 0.01).tolist()
    return candidates[max(bisect_right(candidates, 0.05, key=probability) - 1, 0)]


@pytest.mark.parametrize(
    ("noise_multiplier", "images_each", "hides_patients"),
    [(0.8, 1, False), (2.0, 3, True), *(pytest.param(*long, marks=pytest.mark.long) for long in LONG)],
)
def test_the_guesses_prove_no_more_than_is_stated(
    noise_multiplier: float, images_each: int, hides_patients: bool
) -> None:
    taking_part = np.random.default_rng(3).random(CANARIES) < 0.5
    released = scores(taking_part, noise_multiplier, images_each, hides_patients=hides_patients).numpy()
    stated = compute_epsilon([NoisySteps(noise_multiplier, 1.0, 1)], DELTA, "prv")
    proven = proven_epsilon(taking_part, released, guesses=128)
    assert stated / 3 <= proven <= stated


def test_images_hidden_one_by_one_do_not_hide_a_patient_of_many() -> None:
    """The audit can fail: with five images each, a patient is found beyond the epsilon of an image."""
    taking_part = np.random.default_rng(3).random(CANARIES) < 0.5
    released = scores(taking_part, 2.0, 5, hides_patients=False).numpy()
    stated = compute_epsilon([NoisySteps(2.0, 1.0, 1)], DELTA, "prv")
    assert proven_epsilon(taking_part, released, guesses=512) > stated
