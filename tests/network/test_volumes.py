"""Over the network: hospitals with volumes train the model that simulation trains; one of pictures is refused."""

from pathlib import Path

import numpy as np
import pytest

from tests.network.federated import connected, undisturbed
from tests.network.real import summary_of

pytestmark = pytest.mark.slow

EXPERIMENT = """
[run]
method = "surgical"
rounds = 2
seed = 3

[model]
architecture = "tiny_cnn_3d"
channels = 1
image_size = [8, 12, 12]

[training]
batch_size = 8
lr = 0.003

[augmentation]
rotation = 0.05
translate = 0.1
horizontal_flip = true

[data]
kind = "npz"
path = "volumes.npz"
classes = ["a", "b", "c"]
patient_key = "patient"

[partition]
kind = "class_lists"
[partition.lists]
east = ["a", "b"]
north = ["b", "c"]
south = ["c", "a"]
"""


def write_volumes(path: Path) -> None:
    """Write volumes ``(n, 8, 12, 12)``, as MedMNIST3D has them; each class is a bright part of its own."""
    random, arrays = np.random.default_rng(0), {}
    for part, count in {"train": 60, "val": 24, "test": 24}.items():
        labels = random.integers(0, 2, (count, 3)).astype(np.float32)
        volumes = random.integers(0, 90, (count, 8, 12, 12)).astype(np.uint8)
        for place in range(3):
            volumes[labels[:, place] == 1, 2 * place + 1, 3:9, 3:9] += 120
        patients = np.array([f"{part} {row}" for row in range(count)])
        arrays |= {f"{part}_images": volumes, f"{part}_labels": labels, f"{part}_patient": patients}
    np.savez(path, **arrays)


def test_hospitals_with_volumes_train_the_model_that_simulation_trains(tmp_path: Path) -> None:
    write_volumes(tmp_path / "volumes.npz")
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(EXPERIMENT, encoding="utf-8")
    with connected(experiment, tmp_path / "machine") as (coordinator, _):
        run = coordinator.run(experiment, tmp_path / "network", once=True)
        simulated = undisturbed(experiment, tmp_path / "simulation")
        run.succeeds()
    assert summary_of(tmp_path / "network")["model_sha256"] == simulated
