"""Every method on volumes: it trains a network of three dimensions, and the same run gives the same model."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import save_file

from polyclinic.common.config import read_experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.registry import STRATEGIES
from tests.federations import AT_COORDINATOR, NEEDS, temporary_folder

SIDES = (8, 10, 8)
TEXT = f"""
[run]
method = "surgical"
rounds = 2
seed = 3
[model]
architecture = "tiny_cnn_3d"
channels = 1
image_size = {list(SIDES)}
[training]
batch_size = 16
lr = 0.003
[augmentation]
rotation = 0.05
horizontal_flip = true
translate = 0.1
[simulation]
backend = "inline"
[partition]
kind = "class_subsets"
sites = 3
shared = 2
"""


@cache
def volumes() -> str:
    """The table of a data set of small volumes with four classes, each a bright part of its own."""
    random, arrays = np.random.default_rng(0), {}
    for part, count in {"train": 60, "val": 24, "test": 24}.items():
        labels = random.integers(0, 2, (count, 4)).astype(np.float32)
        images = random.integers(0, 90, (count, *SIDES)).astype(np.uint8)
        for place in range(4):
            images[labels[:, place] == 1, 2 * place : 2 * place + 2, 2:6, 2:6] += 120
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    file = temporary_folder("polyclinic-volumes-") / "volumes.npz"
    np.savez(file, **arrays)
    return f'{{kind = "npz", path = "{file}", classes = ["a", "b", "c", "d"]}}'


PICTURES_ONLY = {"fedfixmatch", "fedlsm"}


@cache
def weights() -> str:
    """The override that names pretrained weights of the network."""
    spec = ModelSpec(architecture="tiny_cnn_3d", channels=1, image_size=SIDES)
    file = temporary_folder("polyclinic-weights-3d-") / "tiny.safetensors"
    save_file(dict(build_network(spec, ("a",), seed=3).backbone.state_dict()), file)
    return f'model.weights="{file}"'


def needs_of(method: str) -> tuple[str, ...]:
    """What a method cannot do without, with volumes in place of digits."""
    needs = tuple(each.replace("shared=10", "shared=4") for each in NEEDS.get(method, ()))
    own = (f"server_data={volumes()}",) if method in AT_COORDINATOR else ()
    return (*needs, *own, *((weights(),) if method == "fedbn_plus" else ()))


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "experiment.toml").write_text(TEXT, encoding="utf-8")
    file = read_experiment(folder / "experiment.toml", (f"data={volumes()}", *overrides))
    with patch("polyclinic.server.federation.set_up.write_run_pages"):
        return simulate(file, folder / "run", Console(quiet=True))


@pytest.mark.parametrize("method", sorted(set(STRATEGIES) - PICTURES_ONLY))
def test_every_method_trains_volumes_and_the_same_run_gives_the_same_model(method: str, tmp_path: Path) -> None:
    overrides = (f"run.method={method}", *needs_of(method))
    first, second = (train(tmp_path / name, *overrides) for name in ("first", "second"))
    assert first["rounds"] >= 1
    assert first["model_sha256"] == second["model_sha256"]


@pytest.mark.parametrize("method", sorted(PICTURES_ONLY))
def test_a_method_that_changes_pictures_by_rules_of_its_own_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{method} changes images by rules for pictures"):
        train(tmp_path / "run", f"run.method={method}")


def test_if_every_site_owns_every_class_surgical_aggregation_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    same = ("partition.shared=4", "method.weighting=samples")
    surgical = train(tmp_path / "surgical", "run.method=surgical", *same)
    assert train(tmp_path / "fedavg", "run.method=fedavg", *same)["model_sha256"] == surgical["model_sha256"]


@pytest.mark.parametrize(
    "protection",
    [
        ("privacy.secure_aggregation=true",),
        ('privacy.level="sample"', "privacy.epsilon=8", 'evaluation.checkpoint="last"', 'model.norm="group"'),
        ('privacy.level="patient"', "privacy.epsilon=8", 'evaluation.checkpoint="last"', 'model.norm="group"'),
    ],
    ids=["masks", "noise for each volume", "noise for each patient"],
)
def test_updates_of_volumes_are_protected_as_those_of_pictures(protection: tuple[str, ...], tmp_path: Path) -> None:
    summary = train(tmp_path / "run", *protection)
    assert summary["rounds"] == 2
