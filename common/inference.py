"""From pixels to logits, and from labels to the rows of a head: the same on both sides."""

import contextlib
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.image_set import ImageSet
from common.models.network import SplitNetwork

EVALUATION_BATCH = 256
Precision = Literal["auto", "float32", "bf16"]


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Turn ``(n, height, width[, 3])`` into ``(n, channels, height, width)``; shares memory where it can."""
    pixels = np.ascontiguousarray(images)
    tensor = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
    return tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)


def label_matrix(images: ImageSet, class_names: tuple[str, ...]) -> Tensor:
    """Labels for these head rows, float32 ``(n, rows)``; NaN for classes the images have no column for."""
    position = {name: column for column, name in enumerate(images.class_names)}
    matrix = torch.full((len(images), len(class_names)), float("nan"))
    for row, name in enumerate(class_names):
        if name in position:
            matrix[:, row] = torch.from_numpy(images.labels[:, position[name]])
    return matrix


@torch.no_grad()
def logits_of(network: SplitNetwork, images: Tensor, precision: Precision = "auto") -> Tensor:
    """Logits ``(n, rows)`` of uint8 images ``(n, channels, height, width)``, in evaluation mode."""
    network.eval()
    parts = []
    for batch in torch.split(images, EVALUATION_BATCH):
        with autocast(images.device, precision):
            parts.append(network(batch.float()).float())
    return torch.cat(parts)


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[None]:
    """bf16 on a GPU where the experiment asks for it or leaves it open; float32 elsewhere."""
    if precision == "float32" or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)
