"""Somebody's own network, losses and data set as plug-ins of Polyclinic."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyclinic.data import LabelledImages


def network(channels: int, image_size: int) -> nn.Module:
    """Images ``(batch, channels, image_size, image_size)`` in, features ``(batch, 64)`` out."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.GELU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.LayerNorm([32, image_size // 4, image_size // 4]), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.GELU()),
    )


def absolute(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    """Mean absolute error over the known entries; ``labels (batch, rows)`` are NaN where unknown."""
    known = ~labels.isnan()
    return (logits.sigmoid() - labels.nan_to_num()).abs()[known].mean()


def stripes(folder: Path, options: Mapping[str, Any]) -> LabelledImages:
    """Grey images with horizontal stripes, vertical stripes, both or none; two of each patient."""
    random, count = np.random.default_rng(options.get("seed", 0)), options.get("images", 300)
    labels = random.integers(0, 2, (count, 2)).astype(np.float32)
    images = random.integers(0, 60, (count, 16, 16), dtype=np.uint8)
    images[labels[:, 0] == 1, ::4] += 150
    images[labels[:, 1] == 1, :, ::4] += 40
    return LabelledImages(images, labels, ("horizontal", "vertical"), [f"patient {row // 2}" for row in range(count)])


def youden(scores: np.ndarray, labels: np.ndarray) -> float:
    """Largest sensitivity plus specificity less 1 over all thresholds, of one class."""
    marks = np.unique(scores)[:, None]
    return float(((scores >= marks)[:, labels == 1].mean(1) - (scores >= marks)[:, labels == 0].mean(1)).max())
