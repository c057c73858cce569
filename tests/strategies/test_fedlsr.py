"""FedLSR: mixture, distance and entropy by hand, how the distance's weight grows, and the whole objective."""

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods.fedlsr import (
    compute_mean_prediction_entropy,
    compute_view_distance_weight,
    jensen_shannon_divergence,
    mix_view_predictions,
)
from polyclinic.strategies.registry import build_strategy

NAN = math.nan
some_logits = st.floats(-15, 15)
shares = st.floats(0, 0.999)


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).logit()


def test_the_mixture_is_one_of_probabilities() -> None:
    # .25 * .8 + .75 * .4 = .5; .25 * .1 + .75 * .3 = .25
    mixture = mix_view_predictions(logits(0.8, 0.1), logits(0.4, 0.3), torch.tensor(0.25, dtype=torch.float64))
    np.testing.assert_allclose(mixture.sigmoid(), [0.5, 0.25])


@given(some_logits, some_logits, shares)
def test_a_mixture_and_its_gradient_are_finite_and_between_both(first: float, second: float, share: float) -> None:
    views = [torch.tensor(view, dtype=torch.float64, requires_grad=True) for view in (first, second)]
    mixture = mix_view_predictions(*views, torch.tensor(share, dtype=torch.float64))
    mixture.backward()
    assert min(first, second) - 1e-9 <= float(mixture.detach()) <= max(first, second) + 1e-9
    assert all(view.grad is not None and view.grad.isfinite() for view in views)


@given(st.floats(0.01, 0.99), st.floats(0.2, 3))
def test_dividing_a_logit_is_the_papers_sharpening_with_two_outcomes(p: float, temperature: float) -> None:
    paper = p ** (1 / temperature) / (p ** (1 / temperature) + (1 - p) ** (1 / temperature))
    assert float((logits(p) / temperature).sigmoid()) == pytest.approx(paper, rel=1e-6)


def test_the_distance_is_the_mean_divergence_from_the_middle() -> None:
    # .8 and .4, middle .6: (.8 ln 4/3 + .2 ln 1/2) / 2 + (.4 ln 2/3 + .6 ln 3/2) / 2; .3 and .3: 0
    first = (0.8 * math.log(4 / 3) + 0.2 * math.log(1 / 2) + 0.4 * math.log(2 / 3) + 0.6 * math.log(3 / 2)) / 2
    assert float(jensen_shannon_divergence(logits(0.8, 0.3), logits(0.4, 0.3))) == pytest.approx(first / 2)


@given(some_logits, some_logits)
def test_the_distance_is_the_same_both_ways_and_at_most_ln_2(first: float, second: float) -> None:
    views = torch.tensor([[first]], dtype=torch.float64), torch.tensor([[second]], dtype=torch.float64)
    there, back = (
        float(jensen_shannon_divergence(*views)),
        float(jensen_shannon_divergence(*views[::-1])),
    )
    assert there == pytest.approx(back, abs=1e-12)
    assert -1e-12 <= there <= math.log(2) + 1e-12
    assert float(jensen_shannon_divergence(views[0], views[0])) == pytest.approx(0, abs=1e-12)


def test_the_entropy_is_ln_2_where_nothing_is_known() -> None:
    # .9: -.9 ln .9 - .1 ln .1
    sure = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert float(compute_mean_prediction_entropy(logits(0.5, 0.9))) == pytest.approx((math.log(2) + sure) / 2)


def test_the_distances_weight_grows_evenly_from_nothing_and_then_stays() -> None:
    assert [compute_view_distance_weight(rounds, 4) for rounds in (0, 1, 3, 4, 9)] == [0.0, 0.25, 0.75, 1.0, 1.0]
    assert compute_view_distance_weight(0, 0) == 1.0


TINY = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
ABSENT = torch.tensor([[1.0, 0], [0, 0], [1, 0]])


def unchanged(images: torch.Tensor) -> torch.Tensor:
    return images


def objective_at(
    server_round: int, augmented: Any, missing: str | None = "masked", **parameters: float
) -> tuple[float, torch.Tensor, MiniBatch]:
    """Return its value, with the logits of the image as it lies, and the batch."""
    network = build_network(TINY, ("a", "b"), 3).eval()
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (3, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.tensor([[1, NAN], [0, NAN], [1, NAN]])
    annotated = torch.tensor([True, False])
    method = build_strategy("fedlsr", {**({"missing": missing} if missing else {}), **parameters})
    situation = ClientContext(
        network, LabelledExamples(images, labels, annotated), NO_ARRAYS, NO_ARRAYS, server_round, TrainingSection()
    )
    batch = MiniBatch(torch.arange(3), images, labels, annotated, augmented, contextlib.nullcontext(), generator)
    with torch.no_grad():
        return float(method.site.make_local_round(situation).objective(network, batch)), network(images), batch


def test_of_two_equal_views_only_sharpening_and_entropy_are_left() -> None:
    value, plain, batch = objective_at(99, unchanged, entropy_weight=0.6, balanced=False)
    expected = partial_loss(plain / 0.5, batch.labels, batch.annotated) + 0.6 * compute_mean_prediction_entropy(plain)
    assert value == pytest.approx(float(expected), rel=1e-5)


def test_the_distance_of_cooled_views_is_added_over_all_classes_once_it_has_grown() -> None:
    def darker(images: torch.Tensor) -> torch.Tensor:
        return images / 8

    first, plain, batch = objective_at(1, darker, ramp_rounds=10)
    later, _, _ = objective_at(6, darker, ramp_rounds=10)
    with torch.no_grad():
        other = build_network(TINY, ("a", "b"), 3).eval()(darker(batch.images.float()))
    assert later - first == pytest.approx(0.4 * 0.5 * float(jensen_shannon_divergence(3 * plain, 3 * other)), rel=1e-3)
    assert later > first


def test_by_default_a_missing_label_counts_as_absent() -> None:
    value, plain, batch = objective_at(1, unchanged, missing="negative", balanced=False)
    unset, _, _ = objective_at(1, unchanged, missing=None, balanced=False)
    assert value == unset == pytest.approx(float(partial_loss(plain / 0.5, ABSENT, batch.annotated)), rel=1e-5)


def test_by_default_a_positive_weighs_the_sites_known_labels_over_its_positives() -> None:
    """Of three labels two are positive: 1.5. The class that the site does not label has no positives: 1."""
    value, plain, batch = objective_at(1, unchanged, missing="negative")
    weighed = partial_loss(plain / 0.5, ABSENT, batch.annotated, torch.tensor([1.5, 1.0]))
    assert value == pytest.approx(float(weighed), rel=1e-5)
