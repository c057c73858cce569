"""Image sets as PyTorch tensors for a network, on the CPU or a GPU; all sites in a process share one copy."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.data.base.image_set import ImageSet, LazyPictures
from polyclinic.data.base.masks import LazyMasks
from polyclinic.data.images.patches import PatchPositions, PatchSampling, draw_patch_positions
from polyclinic.data.images.pixel_cache import MemoryMappedPictures

MAX_GPU_MEMORY_SHARE = 0.5
"""Fraction of a GPU's free memory that pictures may take; a larger set stays in CPU memory and is copied in batches."""


@dataclass(frozen=True)
class ImageTensors:
    """The pictures of an image set, uint8 ``(n, channels, height, width)``, read by index as tensors.

    If a user's data set has random transforms, each reading for training applies new ones, with a seed from torch's
    global generator. :meth:`iterate_batches`, for evaluation, always returns the same pictures.

    Attributes:
        stored: The pictures, ``(m, channels, height, width)``, on the CPU or on ``device``; or a :class:`LazyPictures`
            that reads them when needed.
        rows: ``(n,)`` index of each picture in ``stored``; None if picture i is ``stored[i]``.
        device: The device to which pictures are moved for use.
        on_disk: True if ``stored`` is read from the disk, so that prefetching the next batch saves time.
        patches: Positions of patches. If set, index i reads patch i, not picture i.
    """

    stored: Tensor | LazyPictures
    rows: Tensor | None
    device: torch.device
    on_disk: bool = False
    patches: PatchPositions | None = None

    def __len__(self) -> int:
        if self.patches is not None:
            return len(self.patches)
        return len(self.stored) if self.rows is None else len(self.rows)

    @property
    def sides(self) -> tuple[int, ...]:
        """Size of a whole picture: height and width, or depth, height and width of a volume."""
        if isinstance(self.stored, Tensor):
            return tuple(self.stored.shape[2:])
        return tuple(self.stored.shape[1:4] if self.stored.ndim == 5 else self.stored.shape[1:3])

    @property
    def index_tensor_device(self) -> torch.device:
        """The device on which index tensors must be."""
        return self.stored.device if isinstance(self.stored, Tensor) else torch.device("cpu")

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the pictures with these indices, in the given order, on ``device``."""
        return self._read_picture_tensors(rows, self._draw_transform_seed()).to(self.device)

    def iterate_batches(self, size: int) -> Iterator[Tensor]:
        """Yield all pictures in order, in batches of ``size``, on ``device``; an empty set yields one empty batch."""
        if isinstance(self.stored, LazyPictures) or self.on_disk or self.patches is not None:
            yield from self._read_batches_ahead(torch.split(torch.arange(len(self)), size), lambda: 0)
            return
        for start in range(0, max(len(self), 1), size):
            batch = slice(start, start + size)
            yield self.stored[batch if self.rows is None else self.rows[batch]].to(self.device)

    def prefetch_batches(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the pictures of each index tensor in ``parts``; a thread prefetches pictures that are on the disk."""
        return self._read_batches_ahead(parts, self._draw_transform_seed)

    def _read_batches_ahead(self, parts: Iterable[Tensor], draw_seed: Callable[[], int]) -> Iterator[Tensor]:
        if not self.on_disk:
            yield from (self._read_picture_tensors(rows, draw_seed()).to(self.device) for rows in parts)
            return
        with ThreadPoolExecutor(1, "read-ahead") as reader:
            current = None
            for rows in parts:
                following = reader.submit(self._read_picture_tensors, rows, 0)
                if current is not None:
                    # Copy to the device in this thread, because the other thread would disturb CUDA graphs.
                    yield current.result().to(self.device)
                current = following
            if current is not None:
                yield current.result().to(self.device)

    def _draw_transform_seed(self) -> int:
        if isinstance(self.stored, Tensor) or not self.stored.draws:
            return 0
        return int(torch.randint(2**62, (), generator=torch.default_generator))

    def _read_picture_tensors(self, rows: Tensor, seed: int) -> Tensor:
        """Return the pictures with these indices, on the device of ``stored``.

        Args:
            seed: Seed of the random transforms of a user's data set.
        """
        if self.patches is not None:
            return self._read_patch_tensors(rows.cpu().numpy(), self.patches)
        rows = rows.to(self.index_tensor_device)
        places = rows if self.rows is None else self.rows[rows]
        if isinstance(self.stored, Tensor):
            return self.stored[places]
        return convert_to_channels_first(self.stored.read_pictures(places.numpy(), seed))

    def _read_patch_tensors(self, rows: NDArray[np.intp], patches: PatchPositions) -> Tensor:
        """Return the patches with these indices; from a memory-mapped file only the pixels of the patches are read."""
        crops = list[Any]()
        for patch in rows.tolist():
            image = int(patches.rows[patch])
            index = image if self.rows is None else int(self.rows[image])
            slices = patches.make_slices(patch)
            if isinstance(self.stored, Tensor):
                crops.append(self.stored[index][(slice(None), *slices)])
            else:
                crops.append(self.stored.view_picture(index)[slices])
        return torch.stack(crops) if isinstance(self.stored, Tensor) else convert_to_channels_first(np.stack(crops))


@dataclass(frozen=True)
class MaskTensors:
    """The masks of an image set, from which labels for each pixel and each row of the network's head are made.

    Attributes:
        stored: Integers ``(m, *spatial)`` on the CPU or on the disk; a bit is set where a class is present.
        places: ``(n,)`` index of each image's mask in ``stored``.
        bits: Integers ``(rows,)``, the bits of each head row's class; 0 for a class without masks.
        spacing: ``(n, axes)``, size of a pixel along each axis in mm; None if unknown.
        device: The device to which labels are moved.
        patches: Positions of patches. If set, index i reads the mask of patch i, not of image i.
    """

    stored: Tensor | LazyMasks
    places: Tensor
    bits: Tensor
    spacing: NDArray[np.float64] | None
    device: torch.device
    patches: PatchPositions | None = None

    @property
    def sides(self) -> tuple[int, ...]:
        """Size of the mask of a whole picture."""
        return tuple(self.stored.shape[1:])

    def select_rows(self, rows: NDArray[np.intp]) -> "MaskTensors":
        """Return the masks of the images with these indices."""
        spacing = None if self.spacing is None else self.spacing[rows]
        return replace(self, places=self.places[torch.from_numpy(rows)], spacing=spacing)

    def make_pixel_labels(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return labels ``(batch, head rows, *spatial)``: 1 where a class is present, 0 elsewhere.

        All pixels of a class that is not annotated in an image are NaN.

        Args:
            rows: Indices ``(batch,)`` of the images.
            labels: Labels of the images, ``(batch, head rows)``: 1 present, 0 absent, NaN not annotated.
        """
        masks = self._read_mask_tensors(rows.cpu())
        ones = [1] * (masks.ndim - 1)
        present = ((masks[:, None] & self.bits.reshape(1, -1, *ones)) != 0).to(self.device, torch.float32)
        return present * labels.reshape(*labels.shape, *ones)  # NaN * 0 is NaN

    def _read_mask_tensors(self, rows: Tensor) -> Tensor:
        """Return the integers of the masks, or of the patches, with these indices, ``(batch, *spatial)``."""
        if self.patches is None:
            places = self.places[rows]
            if isinstance(self.stored, Tensor):
                return self.stored[places]
            return _view_as_tensor(self.stored[places.numpy()])
        crops = list[Tensor]()
        for patch in rows.tolist():
            index = int(self.places[int(self.patches.rows[patch])])
            crops.append(self._view_mask(index)[self.patches.make_slices(patch)])
        return torch.stack(crops)

    def _view_mask(self, index: int) -> Tensor:
        return self.stored[index] if isinstance(self.stored, Tensor) else _view_as_tensor(self.stored.view_mask(index))

    def draw_patches(self, labels: Tensor, sampling: PatchSampling, generator: torch.Generator) -> PatchPositions:
        """Draw the positions of the patches for one training epoch.

        Args:
            labels: Labels ``(n, head rows)`` of the images, on any device.
        """
        shows = ((labels == 1).cpu() & (self.bits != 0)).numpy()

        def find_pixels(row: int, column: int) -> NDArray[np.intp]:
            mask = self._view_mask(int(self.places[row]))
            return np.flatnonzero(((mask & self.bits[column]) != 0).numpy())

        return draw_patch_positions(sampling, self.sides, shows, find_pixels, generator)


def make_mask_tensors(images: ImageSet, class_names: Sequence[str], device: torch.device) -> MaskTensors | None:
    """Return the masks of an image set, with one head row for each class; None if the image set has no masks."""
    masks = images.masks
    if masks is None:
        return None
    stored = (
        masks.stored if isinstance(masks.stored, LazyMasks) else _view_as_tensor(np.ascontiguousarray(masks.stored))
    )
    kind = torch.from_numpy(np.zeros(0, masks.stored.dtype)).dtype
    bits = torch.tensor([masks.bits.get(name, 0) for name in class_names], dtype=kind)
    return MaskTensors(stored, torch.from_numpy(masks.places), bits, masks.spacing, device)


def _view_as_tensor(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array; the caller must not write to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array may be read-only
        return torch.from_numpy(array)


def select_input_rows(inputs: Tensor | ImageTensors, rows: NDArray[np.intp]) -> Tensor | ImageTensors:
    """Return the network inputs (images or features) with these indices, in the given order; pictures are no copies."""
    if isinstance(inputs, Tensor):
        return inputs[torch.from_numpy(rows).to(inputs.device)]
    index = torch.from_numpy(rows).to(inputs.index_tensor_device)
    return replace(inputs, rows=index if inputs.rows is None else inputs.rows[index])


def load_pixels_on_device(images: ImageSet, device: str) -> ImageTensors:
    """Return the pictures of an image set, on ``device`` if its memory suffices, else on the CPU or the disk.

    Image sets with the same ``stored`` share one copy.
    """
    stored = images.stored
    on_disk = isinstance(stored, LazyPictures) and not stored.draws
    pixels: Tensor | LazyPictures = stored if isinstance(stored, LazyPictures) else _copy_to_device(stored, device)
    if isinstance(stored, MemoryMappedPictures) and device != "cpu":
        copy = _copy_to_device(stored.array, device)
        if copy.device.type != "cpu":
            stored.verify_all_picture_digests()
            pixels, on_disk = copy, False
    rows = None
    if images.places is not None:
        rows = torch.from_numpy(images.places)
        rows = rows.to(pixels.device) if isinstance(pixels, Tensor) else rows
    return ImageTensors(pixels, rows, torch.device(device), on_disk)


def convert_to_channels_first(images: NDArray[Any]) -> Tensor:
    """Convert ``(n, height, width[, 3])`` to a tensor ``(n, channels, height, width)``, without a copy if possible.

    Volumes ``(n, depth, height, width, channels)`` become ``(n, channels, depth, height, width)``.
    """
    tensor = _view_as_tensor(np.ascontiguousarray(images))
    if tensor.ndim == 5 and tensor.shape[4] == 1:
        # With movedim, the stride of the only channel would look like channels-last memory, for which torch chooses
        # another algorithm with slightly different results.
        return tensor[..., 0][:, None]
    return tensor[:, None] if tensor.ndim == 3 else tensor.movedim(-1, 1)


_device_tensors: dict[tuple[int, str], Tensor] = {}
"""Key: ``id`` of an array of pictures, and a device. Value: the copy of the pictures for this device."""


def _copy_to_device(stored: NDArray[np.uint8], device: str) -> Tensor:
    """Return an array of pictures as a tensor ``(n, channels, height, width)``, if possible on ``device``.

    If the array would take more than :data:`MAX_GPU_MEMORY_SHARE` of the device's free memory, the tensor is on the CPU
    instead. For a device other than the CPU, the tensor is cached as long as the array exists.
    """
    if device == "cpu":
        return convert_to_channels_first(stored)
    key = (id(stored), device)
    if key not in _device_tensors:
        tensor, (free, _) = convert_to_channels_first(stored), torch.cuda.mem_get_info(device)
        _device_tensors[key] = tensor.to(device) if stored.nbytes <= MAX_GPU_MEMORY_SHARE * free else tensor
        weakref.finalize(stored, _device_tensors.pop, key, None)
    return _device_tensors[key]
