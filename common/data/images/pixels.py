"""Pictures as tensors for a network: rows of one array that all sites of a process share."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.data.base.image_set import ImageSet

PART_OF_FREE_MEMORY = 0.5
"""Part of a GPU's free memory that pictures may take; a larger set stays with the CPU and is copied batch by batch."""


@dataclass(frozen=True)
class Pixels:
    """uint8 pictures ``(n, channels, height, width)``, read by row.

    Attributes:
        stored: ``(m, channels, height, width)``, on the CPU or on ``device``.
        rows: ``(n,)`` places in ``stored``, on its device; None where they are all of it, in order.
        device: The device on which pictures are used.
    """

    stored: Tensor
    rows: Tensor | None
    device: torch.device

    def __len__(self) -> int:
        return len(self.stored) if self.rows is None else len(self.rows)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the pictures at ``rows``, in that order, on the device."""
        rows = rows.to(self.stored.device)
        return self.stored[rows if self.rows is None else self.rows[rows]].to(self.device)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield all pictures in order, ``size`` at a time, on the device; one empty batch where there are none."""
        for start in range(0, max(len(self), 1), size):
            batch = slice(start, start + size)
            yield self.stored[batch if self.rows is None else self.rows[batch]].to(self.device)


def select_rows(inputs: Tensor | Pixels, rows: NDArray[np.intp]) -> Tensor | Pixels:
    """Return the images or features at ``rows``, in that order, as a network's inputs; no picture is copied."""
    if isinstance(inputs, Tensor):
        return inputs[torch.from_numpy(rows).to(inputs.device)]
    index = torch.from_numpy(rows).to(inputs.stored.device)
    return replace(inputs, rows=index if inputs.rows is None else inputs.rows[index])


def pixels_on_device(images: ImageSet, device: str) -> Pixels:
    """Return the pictures of a set for a device; sets that share their store share it there too."""
    stored = _copy_to_device(images.stored, device)
    rows = None if images.places is None else torch.from_numpy(images.places).to(stored.device)
    return Pixels(stored, rows, torch.device(device))


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Turn ``(n, height, width[, 3])`` into ``(n, channels, height, width)``; shares memory where it can."""
    pixels = np.ascontiguousarray(images)
    tensor = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
    return tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)


_on_devices: dict[tuple[int, str], Tensor] = {}


def _copy_to_device(stored: NDArray[np.uint8], device: str) -> Tensor:
    """Copy an array to the device where there is room, and keep the copy as long as the array lives."""
    if device == "cpu":
        return channels_first(stored)
    key = (id(stored), device)
    if key not in _on_devices:
        tensor, (free, _) = channels_first(stored), torch.cuda.mem_get_info(device)
        _on_devices[key] = tensor.to(device) if stored.nbytes <= PART_OF_FREE_MEMORY * free else tensor
        weakref.finalize(stored, _on_devices.pop, key, None)
    return _on_devices[key]
