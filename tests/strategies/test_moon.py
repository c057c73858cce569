"""MOON: the contrast as in the authors' code, what a site keeps, and when the method is FedAvg."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS, Arrays
from polyclinic.strategies.local.losses import partial_loss
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods.moon import MoonSite, compute_model_contrast, store_trained_model
from tests.federations import experiment, federation
from tests.strategies.leading import lead, site_notes

SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
NAN = float("nan")


def test_the_contrast_is_the_cross_entropy_of_the_authors_code() -> None:
    generator = torch.Generator().manual_seed(3)
    current, received, previous = (torch.randn(6, 5, generator=generator) for _ in range(3))
    # Theirs: cross_entropy of the two cosines over the temperature, with the received model as the class.
    cosines = torch.stack([cosine_similarity(current, other, dim=-1) for other in (received, previous)], dim=1)
    expected = cross_entropy(cosines / 0.5, torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(compute_model_contrast(current, received, previous, 0.5), expected)


def test_the_contrast_by_hand() -> None:
    # Like the received model, unlike the previous one: cosines 1 and 0, over 1/2: log(1 + exp(-2)).
    current, received, previous = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    assert float(compute_model_contrast(current, received, previous, 0.5)) == pytest.approx(0.126928)


def value_with(state: Arrays) -> tuple[float, float, float]:
    """The objective with a stored state, the plain loss, and the contrast with the previous model."""
    network, previous = (build_network(SPEC, ("a", "b"), seed).eval() for seed in (3, 4))
    received = build_network(SPEC, ("a", "b"), 3).eval()
    images = torch.randint(0, 256, (4, 1, 16, 16), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    annotated = torch.tensor([True, False])
    labels = torch.tensor([[1.0, NAN], [0.0, NAN], [1.0, NAN], [0.0, NAN]])
    context = ClientContext(
        network, LabelledExamples(images, labels, annotated), NO_ARRAYS, state, 2, TrainingSection()
    )
    objective = MoonSite({"contrast": 2.0}).make_local_round(context).objective
    batch = MiniBatch(torch.arange(4), images, labels, annotated, None, nullcontext(), torch.Generator())
    with torch.no_grad():
        for value in network.backbone.parameters():  # training has moved it
            value.mul_(1.2)
        features = [model.features(images.float()) for model in (network, received, previous)]
        plain = partial_loss(network(images.float()), labels, annotated)
        value = objective(network, batch)
    return float(value), float(plain), float(compute_model_contrast(*features, 0.5))


def test_a_site_minimises_its_loss_plus_the_contrast_with_its_last_model() -> None:
    stored = store_trained_model(build_network(SPEC, ("a", "b"), 4))
    value, plain, contrast = value_with(stored)
    assert value == pytest.approx(plain + 2.0 * contrast, rel=1e-5)
    assert abs(contrast - 0.693147) > 1e-3
    first, plain, _ = value_with(NO_ARRAYS)
    assert first == plain


def test_without_the_contrast_a_run_is_that_of_the_partial_loss(tmp_path: Path) -> None:
    same = ("partition.shared=2", "method.weighting=samples", "run.rounds=3")
    runs = [("run.method=moon", "method.contrast=0"), ("run.method=partial_loss",), ("run.method=moon",)]
    off, plain, on = (
        federation(tmp_path, *run, *same, out=str(number))["model_sha256"] for number, run in enumerate(runs)
    )
    assert off == plain != on


def test_a_site_keeps_the_model_that_it_trained(tmp_path: Path) -> None:
    file = experiment(tmp_path, "run.method=moon", "partition.shared=2")
    lead(file, tmp_path / "run", 2)
    last, before = (site_notes(tmp_path / "run", "site-1", ago)["previous/trunk"] for ago in (0, 1))
    assert last.shape == before.shape
    assert (last != before).any()
