"""A small federation of two sites, and pictures with lines and bars for it."""

from typing import Any

import numpy as np

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
