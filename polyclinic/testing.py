"""Checks for the tests of a plug-in; each raises AssertionError with the reason if the plug-in fails.

::

    from polyclinic import testing

    def test_my_plug_ins(tmp_path):
        testing.check_network("stairs", channels=1, image_size=16)
        testing.check_loss("absolute")
        testing.check_dataset("stripes", tmp_path, {"images": 100})
        testing.check_metric("youden")
        testing.check_method("louder", {"factor": 2.0})
        testing.check_transform("brighter")
        testing.check_optimizer("steady")
        testing.check_schedule("steps")

The plug-in's package must be installed (``pip install -e .``), because plug-ins are named by their entry points. A
plug-in that fails would stop a run, or train different models in simulation and over the network.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.common.config import TrainingSection
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import compute_plugin_metric, load_plugin_metrics
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.models.state import hash_model_state, make_model_layout, read_model_state, write_model_state
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.plugins import LOSSES, PLUGIN_PREFIX, load_plugin_entry_point
from polyclinic.data.base.spec import AugmentationSpec, PluginDatasetSpec
from polyclinic.data.images.augmentation import augment_images_weakly
from polyclinic.data.load import load_dataset
from polyclinic.strategies.local.losses import adapt_plugin_loss
from polyclinic.strategies.local.optimisation import compute_learning_rate_factor, make_optimizer

TEST_CLASSES = ("first", "second", "third")


def check_network(name: str, channels: int = 3, image_size: int = 64, batch: int = 4) -> None:
    """Check a network plug-in, an entry point of ``polyclinic.models``.

    Equal seeds must build equal networks. The state must be readable and writable. In evaluation mode, an image's
    features must not depend on other images. Every trainable parameter must receive a gradient.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, or does not take such images.
    """
    table = {"architecture": PLUGIN_PREFIX + name, "channels": channels, "image_size": image_size, "dropout": 0.0}
    spec = ModelSpec.model_validate(table)
    first, second, other = (build_network(spec, TEST_CLASSES, seed) for seed in (1, 1, 2))
    same = _hash_network(first) == _hash_network(second)
    assert same, f"{name}: two networks of one seed differ; it must draw all its numbers from torch's generator"
    state = read_model_state(first)
    write_model_state(other, trunk=state.trunk, norm=state.norm, head=state.head)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (batch, channels, image_size, image_size), generator=generator).float()
    with torch.no_grad():
        batch_features = first.eval()(images)
        copied_features = other.eval()(images)
        single_features = torch.cat([first(image[None]) for image in images])
    assert batch_features.isfinite().all(), f"{name}: some features are not finite"
    assert torch.allclose(batch_features, copied_features, atol=1e-4), (
        f"{name}: with the state of another it says something else; what it holds beside parameters and running "
        "statistics is lost when a model travels"
    )
    assert torch.allclose(batch_features, single_features, atol=1e-3), (
        f"{name}: in evaluation an image's features depend on others"
    )
    first.train()(images).square().sum().backward()
    without_gradient = [key for key, value in first.named_parameters() if value.requires_grad and value.grad is None]
    names = ", ".join(without_gradient[:5])
    assert not without_gradient, f"{name}: no gradient reaches {names}; leave them out, or make them buffers"


def check_loss(name: str, images: int = 16) -> None:
    """Check a loss plug-in, an entry point of ``polyclinic.losses``.

    The loss must be a finite scalar, be deterministic, ignore unknown labels, and not change its input.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed.
    """
    loss = adapt_plugin_loss(load_plugin_entry_point(LOSSES, name))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(images, len(TEST_CLASSES), generator=generator, requires_grad=True)
    labels = (torch.rand(images, len(TEST_CLASSES), generator=generator) < 0.5).float()
    labels[::3, 1] = float("nan")
    annotated = torch.tensor([True, True, False])
    before = labels.clone()
    labels[:, 2] = before[:, 2] = float("nan")
    value = loss(logits, labels, annotated)
    assert isinstance(value, Tensor), f"{name}: returns {type(value).__name__}, not a tensor"
    assert value.ndim == 0, f"{name}: returns a tensor of shape {tuple(value.shape)}, not a scalar"
    assert value.isfinite(), f"{name}: is {float(value.detach())}; labels are NaN where they are unknown"
    value.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None, f"{name}: does not depend on the logits"
    assert logits.grad.isfinite().all(), f"{name}: has a gradient that is not finite"
    assert not logits.grad[labels.isnan()].any(), f"{name}: moves logits whose label is unknown"
    assert torch.equal(labels.nan_to_num(-1), before.nan_to_num(-1)), f"{name}: changes the labels that it is given"
    assert torch.equal(loss(logits, labels, annotated), value), f"{name}: says something else the second time"


def check_method(name: str, parameters: Mapping[str, Any] | None = None) -> None:
    """Check a method plug-in, an entry point of ``polyclinic.methods``, in a simulation with three sites.

    The method must train two rounds, send only data that it declares, and give equal models in two runs. ``parameters``
    is the table ``[method]``.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, is not a method, or does not take the parameters.
    """
    from polyclinic.runs import simulate

    settings = {"run.method": f"plugin:{name}", "run.rounds": 2, "simulation.backend": "inline", "method": {}}
    settings |= {f"method.{key}": value for key, value in (parameters or {}).items()}
    with TemporaryDirectory() as folder:
        runs = [simulate("digits_surgical", settings=settings, out=Path(folder, out)) for out in ("first", "second")]
        for run in runs:
            absent = run.rounds["absent"].sum()
            assert not absent, f"{name}: {absent} replies did not count; {run.folder}/rounds.jsonl says why"
        hashes = {run.model_sha256 for run in runs}
    assert len(hashes) == 1, f"{name}: two runs of one seed end in two models; draw from the batch's generator"


def check_transform(name: str, channels: int = 3, image_size: int = 32, batch: int = 4) -> None:
    """Check an augmentation plug-in, an entry point of ``polyclinic.transforms``.

    The transform must keep shape and dtype, draw from generators that can be seeded, and not change its input.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, or does not return images of that shape and dtype.
    """
    spec = AugmentationSpec(transform=PLUGIN_PREFIX + name)
    generator = torch.Generator().manual_seed(1)
    images = 255 * torch.rand(batch, channels, image_size, image_size, generator=generator)
    before = images.clone()
    first, second = (augment_images_weakly(images, spec, torch.Generator().manual_seed(2)) for _ in range(2))
    assert first.isfinite().all(), f"{name}: some pixels are not finite"
    assert torch.equal(first, second), f"{name}: two runs of one seed differ; draw from a generator that can be seeded"
    assert torch.equal(images, before), f"{name}: changes the images that it is given"


def check_optimizer(name: str) -> None:
    """Check an optimiser plug-in, an entry point of ``polyclinic.optimizers``.

    The optimiser must change every parameter to a finite value, be deterministic, and use the learning rate.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, or does not return an optimiser.
    """
    network_hashes = []
    for rate in (0.01, 0.01, 0.001):
        network = build_network(ModelSpec(architecture="tiny_cnn", channels=1, image_size=16), TEST_CLASSES, 1)
        before = [parameter.detach().clone() for parameter in network.parameters()]
        optimizer = make_optimizer(network, TrainingSection(optimizer=PLUGIN_PREFIX + name, weight_decay=0.01), rate)
        for step in range(3):
            images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad(set_to_none=True)
            network(255 * images).square().sum().backward()
            optimizer.step()
        pairs = zip(network.named_parameters(), before, strict=True)
        unchanged = [key for (key, parameter), old in pairs if torch.equal(parameter, old)]
        assert not unchanged, f"{name}: does not move {', '.join(unchanged[:5])}"
        assert all(parameter.isfinite().all() for parameter in network.parameters()), f"{name}: does not stay finite"
        network_hashes.append(_hash_network(network))
    assert network_hashes[0] == network_hashes[1], f"{name}: two runs of one seed differ"
    assert network_hashes[0] != network_hashes[2], f"{name}: the learning rate does not count"


def check_schedule(name: str, rounds: int = 20) -> None:
    """Check a schedule plug-in, an entry point of ``polyclinic.schedules``: finite, non-negative, repeatable factors.

    Raises:
        AssertionError: If a factor differs when computed twice, or all factors are 0.
        BadInput: If the plug-in is not installed, or returns something else.
    """
    spec = TrainingSection(schedule=PLUGIN_PREFIX + name)
    factors = list[float]()
    for server_round in range(1, rounds + 1):
        factors.append(compute_learning_rate_factor(spec, server_round, rounds))
        same = factors[-1] == compute_learning_rate_factor(spec, server_round, rounds)
        assert same, f"{name}: says something else the second time, for round {server_round} of {rounds}"
    assert any(factors), f"{name}: no round trains"


def check_dataset(name: str, folder: Path, options: Mapping[str, Any] | None = None) -> None:
    """Check a data set plug-in, an entry point of ``polyclinic.datasets``, on existing data.

    Two reads must give equal data, no part may be empty, and at least one class must have both positive and negative
    training images.

    Args:
        folder: Folder that the plug-in receives in place of the experiment's or hospital's folder.
        options: The table ``[data.options]``.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, or returns arrays that do not fit.
    """
    spec = PluginDatasetSpec.model_validate({"kind": "plugin", "name": name, "options": dict(options or {})})
    first = load_dataset(spec, folder)
    second = load_dataset(spec, folder)
    for part in ("train", "validation", "test"):
        images = getattr(first, part)
        again = getattr(second, part)
        same = all(
            np.array_equal(getattr(images, key), getattr(again, key), equal_nan=key == "labels")
            for key in ("images", "labels", "patients")
        )
        assert len(images), f"{name}: there is no image in the {part} part"
        assert same, f"{name}: the {part} part differs when it is read again"
    labels = first.train.labels
    has_both_labels = ((labels == 1).any(axis=0) & (labels == 0).any(axis=0)).any()
    assert has_both_labels, f"{name}: no class has a positive and a negative training image"


def check_metric(name: str, images: int = 50) -> None:
    """Check a metric plug-in, an entry point of ``polyclinic.metrics``.

    The metric must return a number or None for any scores, including ties, 0 and 1, and not depend on the order of
    images.

    Raises:
        AssertionError: If a check fails, with the reason.
        BadInput: If the plug-in is not installed, raises an exception, or returns something else.
    """
    key = PLUGIN_PREFIX + name
    metric = load_plugin_metrics([key])[key]
    random = np.random.default_rng(1)
    labels = np.arange(images) % 2.0
    for scores in (random.random(images), np.full(images, 0.5), labels.copy(), 1 - labels):
        order = random.permutation(images)
        first = compute_plugin_metric(key, metric, scores, labels)
        second = compute_plugin_metric(key, metric, scores[order], labels[order])
        same = first == second or (first is not None and second is not None and np.isclose(first, second))
        assert same, f"{name}: is {first}, and {second} with the images in another order"
    for count in (1, 2):  # fewest images that a class can be tested on
        compute_plugin_metric(key, metric, np.array([0.2, *[0.7] * count]), np.array([0.0, *[1.0] * count]))


def _hash_network(network: SplitNetwork) -> str:
    return hash_model_state(read_model_state(network), make_model_layout(network))


__all__ = [
    "BadInput",
    "check_dataset",
    "check_loss",
    "check_method",
    "check_metric",
    "check_network",
    "check_optimizer",
    "check_schedule",
    "check_transform",
]
