"""What Flower's quickstarts keep in ``task.py``: the model, the data of a partition, ``train`` and ``test``."""

from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


def model_named(name: str) -> nn.Module:
    """The same layers as ours."""
    if name == "resnet18":
        model = resnet18(num_classes=10)
        model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
        return cast("nn.Module", model)
    if name == "fedsld_cnn":
        return nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
    layers: list[nn.Module] = []
    for narrow, wide in ((1, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(narrow, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


@lru_cache
def _file(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def loaders(
    path: Path, partition: int, partitions: int, batch_size: int, *, validates: bool = True
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation images of one of equal partitions."""
    arrays = _file(path)
    images = (torch.from_numpy(arrays["train_images"]).float()[:, None] / 255 - 0.5) / 0.5
    classes = torch.from_numpy(arrays["train_labels"]).flatten().long()
    rows = torch.arange(partition, len(images), partitions)
    held_out = len(rows) // 10 if validates else 0
    training = TensorDataset(images[rows[held_out:]], classes[rows[held_out:]])
    validation = TensorDataset(images[rows[:held_out]], classes[rows[:held_out]])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(validation, 256)


def train(model: nn.Module, loader: DataLoader[Any], epochs: int, lr: float) -> float:
    """Plain SGD; returns the mean loss."""
    optimizer, total = torch.optim.SGD(model.parameters(), lr=lr), 0.0
    model.train()
    for _ in range(epochs):
        for images, classes in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), classes)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Mean loss."""
    model.eval()
    return sum(functional.cross_entropy(model(images), classes).item() for images, classes in loader) / len(loader)
