"""A small federation of two sites, pictures with lines and bars for it, and parts of one's own."""

from typing import Any

import numpy as np
from torch import Tensor, nn

import polyclinic as pc

SMALL = {
    "run": {"method": "surgical", "rounds": 1},
    "model": {"architecture": "tiny_cnn", "channels": 1, "image_size": 16},
    "training": {"batch_size": 16, "lr": 0.01},
    "evaluation": {"checkpoint": "last"},
    "participation": {"clip": "off"},
    "partition": {"kind": "class_lists", "lists": {"east": ["lines", "bars"], "north": ["bars"]}},
}


def pictures(seed: int = 0, count: int = 120, **more: Any) -> pc.LabelledImages:
    """Make images ``(count, 16, 16)``, some with lines and some with bars."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, (count, 2)).astype(np.float32)
    images = random.integers(0, 60, (count, 16, 16), dtype=np.uint8)
    images[labels[:, 0] == 1, ::4] += 150
    images[labels[:, 1] == 1, :, ::4] += 40
    return pc.LabelledImages(images=images, labels=labels, class_names=("lines", "bars"), **more)


def tiny(channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(channels * (image_size // 4) ** 2, 12), nn.ReLU())


def squared(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    labelled = ~labels.isnan()
    return ((logits.sigmoid() - labels.nan_to_num()) ** 2 * labelled).sum() / labelled.sum().clamp(min=1)


def share_above(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    return float((scores > 0.5).mean())
