"""The trained values of a network as three groups of numpy arrays, for messages, for aggregation and for hashes.

The groups are ``trunk`` (backbone and neck), ``norm`` (batch normalisation), both flat, and ``head``. A
:class:`ModelStateLayout` lists the tensors of the flat groups. Integer buffers, such as BatchNorm's
``num_batches_tracked``, are left out, because they restart in each round. Values that are not trained form a
:class:`FrozenPart`, which each site receives once.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.common.models.network import Head as Head
from polyclinic.common.models.network import Model, SplitNetwork, build_network
from polyclinic.common.models.parts import TensorSlot, find_tensor_slots, get_tensor, has_fixed_modules
from polyclinic.common.models.zoo.networks import is_batch_norm
from polyclinic.common.models.zoo.spec import ModelSpec

Array = NDArray[np.float32]


@dataclass(frozen=True)
class TensorShape:
    """Name (e.g. ``backbone.conv1.weight``) and shape of a tensor of the network."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelStateLayout:
    """The names, shapes and order of the tensors in a model's flat arrays; independent of the classes of a site.

    Attributes:
        architecture: Name of the backbone.
        features: Number of features of a head row.
        trunk: Trained tensors of backbone and neck, without those of batch normalisation.
        norm: Weight, bias, running mean and running variance of every batch normalisation that is trained.
        train: The setting :attr:`ModelSpec.train`, which selects the trained part.
        frozen_sha256: Hash of the frozen part; empty if there is none, or if it is unknown.
    """

    architecture: str
    features: int
    trunk: tuple[TensorShape, ...]
    norm: tuple[TensorShape, ...]
    train: str = "all"
    frozen_sha256: str = ""

    @property
    def layout_sha256(self) -> str:
        """SHA-256 of the layout; only models with the same hash may be averaged."""
        groups = [[[tensor.name, *tensor.shape] for tensor in group] for group in (self.trunk, self.norm)]
        frozen = [] if self.train == "all" else [self.train, self.frozen_sha256]
        return hashlib.sha256(json.dumps([self.architecture, self.features, *groups, *frozen]).encode()).hexdigest()

    @property
    def running_variance_slices(self) -> tuple[slice, ...]:
        """Slices that contain running variances, in the flat array of batch normalisation (:attr:`ModelState.norm`)."""
        slices = self.tensor_slices()
        return tuple(slices[tensor.name] for tensor in self.norm if tensor.name.endswith("running_var"))

    def tensor_slices(self) -> dict[str, slice]:
        """Return the slice of each tensor, by name, in the flat array that contains it (``trunk`` or ``norm``)."""
        return {**_compute_slices_by_name(self.trunk), **_compute_slices_by_name(self.norm)}


@dataclass(frozen=True, eq=False)
class ModelState:
    """All trained values of a model.

    Attributes:
        trunk: Backbone and neck, float32 ``(t,)``.
        norm: Batch normalisation, float32 ``(m,)``.
        head: The head's rows with their class names.

    Raises:
        ValueError: If an array is not flat or not float32.
    """

    trunk: Array
    norm: Array
    head: Head

    def __post_init__(self) -> None:
        for name, values in (("trunk", self.trunk), ("norm", self.norm)):
            if values.ndim != 1 or values.dtype != np.float32:
                raise ValueError(f"{name} is flat float32, got {values.dtype} of shape {values.shape}")


def make_model_layout(network: SplitNetwork) -> ModelStateLayout:
    """Return the layout of a network's trained values."""
    trunk, norm = _get_trunk_and_norm_tensors(network)
    spec = network.spec
    trunk_shapes, norm_shapes = (
        tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in group.items()) for group in (trunk, norm)
    )
    features = network.head.in_features
    frozen = spec.frozen_sha256 or ""
    return ModelStateLayout(spec.architecture, features, trunk_shapes, norm_shapes, spec.train, frozen)


def read_model_state(network: Model) -> ModelState:
    """Return a copy of a network's trained values as numpy arrays; the network may be on any device."""
    trunk, norm = _get_trunk_and_norm_tensors(network)
    head = network.head
    weight = head.weight.detach().cpu().numpy().astype(np.float32, copy=True)
    bias = head.bias.detach().cpu().numpy().astype(np.float32, copy=True)
    return ModelState(_flatten_tensors(trunk), _flatten_tensors(norm), Head(network.class_names, weight, bias))


def write_model_state(
    network: Model, trunk: Array | None = None, norm: Array | None = None, head: Head | None = None
) -> None:
    """Overwrite the trained values of a network in place.

    Args:
        network: The network.
        trunk: New values of backbone and neck, flat; None to keep the old ones.
        norm: New values of batch normalisation, flat; None to keep the old ones.
        head: New head rows, matched by class name; rows of classes that the network does not have are ignored. None
            to keep the old rows.

    Raises:
        ValueError: If an argument does not fit the network; then nothing is written.
        LookupError: If ``head`` lacks one of the network's classes; then nothing is written.
    """
    own_trunk, own_norm = _get_trunk_and_norm_tensors(network)
    if head is not None and head.features != network.head.in_features:
        raise ValueError(f"head rows of this network have {network.head.in_features} features, got {head.features}")
    own_rows = None if head is None else head.select_rows(network.class_names)
    for group, flat, tensors in (("trunk", trunk, own_trunk), ("norm", norm, own_norm)):
        expected = sum(map(Tensor.numel, tensors.values()))
        if flat is not None and flat.shape != (expected,):
            raise ValueError(f"{group} of this network is flat and holds {expected} values, got shape {flat.shape}")
    with torch.no_grad():
        _copy_flat_array_into_tensors(trunk, own_trunk)
        _copy_flat_array_into_tensors(norm, own_norm)
        if own_rows is not None:
            network.head.weight.copy_(torch.from_numpy(own_rows.weight))
            network.head.bias.copy_(torch.from_numpy(own_rows.bias))


def split_state_into_tensors(state: ModelState, layout: ModelStateLayout) -> dict[str, Array]:
    """Return a state's values as one array for each tensor of the network, by name; the arrays are views."""
    views = dict[str, Array]()
    for flat, group in ((state.trunk, layout.trunk), (state.norm, layout.norm)):
        start = 0
        for tensor in group:
            end = start + tensor.size
            views[tensor.name] = flat[start:end].reshape(tensor.shape)
            start = end
        assert start == len(flat), (start, len(flat))
    return {**views, "head.weight": state.head.weight, "head.bias": state.head.bias}


def join_tensors_into_state(
    tensors: Mapping[str, Array], layout: ModelStateLayout, class_names: Sequence[str]
) -> ModelState:
    """Rebuild a state from the arrays that :func:`split_state_into_tensors` returned; the values are copied.

    Raises:
        ValueError: If a tensor is missing or unknown, or its shape does not match the layout and class names.
    """
    classes = len(class_names)
    expected = {tensor.name: tensor.shape for tensor in (*layout.trunk, *layout.norm)}
    expected |= {"head.weight": (classes, layout.features), "head.bias": (classes,)}
    actual = {name: values.shape for name, values in tensors.items()}
    wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if wrong:
        listed = "; ".join(
            f"{name}: expected {expected.get(name, 'none')}, got {actual.get(name, 'none')}" for name in wrong[:5]
        )
        raise ValueError(f"{len(wrong)} tensors differ, the first ones: {listed}")
    head = Head(tuple(class_names), tensors["head.weight"].copy(), tensors["head.bias"].copy())
    return ModelState(_flatten_group_arrays(tensors, layout.trunk), _flatten_group_arrays(tensors, layout.norm), head)


def hash_arrays(*arrays: NDArray[Any]) -> str:
    """Return the SHA-256 of arrays and their shapes; values are hashed as little-endian float32."""
    digest = hashlib.sha256()
    for array in arrays:
        written = np.ascontiguousarray(array, "<f4")
        digest.update(f"{written.shape}\0".encode())
        digest.update(_view_array_as_bytes(written))
    return digest.hexdigest()


def hash_model_state(state: ModelState, layout: ModelStateLayout) -> str:
    """Return the SHA-256 of a model's values by tensor name, with the frozen part represented by its own hash."""
    digest = hashlib.sha256(layout.frozen_sha256.encode())
    for name, values in sorted(split_state_into_tensors(state, layout).items()):
        digest.update(f"{name}\0float32\0{list(values.shape)}\0".encode())
        digest.update(_view_array_as_bytes(np.ascontiguousarray(values, "<f4")))
    return digest.hexdigest()


def _view_array_as_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array without a copy."""
    return array.reshape(-1).view(np.uint8).data


_TENSOR_SLOTS_BY_NETWORK: WeakKeyDictionary[Model, tuple[dict[str, TensorSlot], dict[str, TensorSlot]]] = (
    WeakKeyDictionary()
)
"""Network -> places of its trained tensors (trunk, norm), cached because every request needs them."""


def _get_trunk_and_norm_tensors(network: Model) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the network's trained float tensors by name: those of backbone and neck, and those of batch normalisation.

    The result contains the tensors of the network, not copies.
    """
    slots = _TENSOR_SLOTS_BY_NETWORK.get(network)
    if slots is None:
        slots = _find_trunk_and_norm_slots(network)
        if has_fixed_modules(cast(nn.Module, network)):
            _TENSOR_SLOTS_BY_NETWORK[network] = slots
    trunk, norm = ({name: get_tensor(slot) for name, slot in group.items()} for group in slots)
    return trunk, norm


def _find_trunk_and_norm_slots(network: Model) -> tuple[dict[str, TensorSlot], dict[str, TensorSlot]]:
    """Return the places of the trained float tensors, by name, in the order of the network's ``state_dict``."""
    norms = {name for name, module in network.named_modules() if is_batch_norm(module)}
    stored = find_tensor_slots(cast(nn.Module, network))
    trunk = dict[str, TensorSlot]()
    norm = dict[str, TensorSlot]()
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and not name.startswith("head.") and name not in network.frozen:
            group = norm if name.rpartition(".")[0] in norms else trunk
            group[name] = stored[name]
    return trunk, norm


def _compute_slices_by_name(tensors: Sequence[TensorShape]) -> dict[str, slice]:
    bounds = pairwise(accumulate((tensor.size for tensor in tensors), initial=0))
    return {tensor.name: slice(*bound) for tensor, bound in zip(tensors, bounds, strict=True)}


def _flatten_group_arrays(tensors: Mapping[str, Array], group: Sequence[TensorShape]) -> Array:
    parts = [tensors[tensor.name].reshape(-1) for tensor in group]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _flatten_tensors(tensors: Mapping[str, Tensor]) -> Array:
    """Copy tensors into one flat numpy array; they are concatenated on their device, for a single transfer."""
    if not tensors:
        return np.zeros(0, dtype=np.float32)
    sizes = list(map(Tensor.numel, tensors.values()))
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        joined = torch.from_numpy(np.empty(sum(sizes), np.float32))  # numpy allocates large memory pages
    else:
        joined = torch.empty(sum(sizes), device=device)
    for part, tensor in zip(torch.split(joined, sizes), tensors.values(), strict=True):
        part.view(tensor.shape).copy_(tensor.detach())
    flat: Array = joined.cpu().numpy()
    return flat


@cache
def _consume_read_only_array_warning() -> None:
    """Trigger torch's warning about read-only arrays silently; torch gives it only once in a process."""
    array = np.zeros(1, np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.from_numpy(array)


def _copy_flat_array_into_tensors(flat: Array | None, tensors: Mapping[str, Tensor]) -> None:
    if flat is None or not tensors:
        return
    device = next(iter(tensors.values())).device
    _consume_read_only_array_warning()
    values = torch.from_numpy(flat).to(device)  # arrays from the wire are read-only; this function only reads them
    sizes = list(map(Tensor.numel, tensors.values()))
    for part, tensor in zip(torch.split(values, sizes), tensors.values(), strict=True):
        tensor.copy_(part.view(tensor.shape))


FROZEN_PART_MISSING = "the frozen part of the model is not on this site's disk"
"""Error message of a site without the frozen part; the coordinator then sends the frozen part again."""


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """The values of the tensors of a network that are not trained.

    Attributes:
        values: float32 ``(n,)``: all tensors one after another, in the order of the network's ``state_dict``.
    """

    values: NDArray[np.float32]

    @classmethod
    def from_network(cls, network: SplitNetwork) -> "FrozenPart":
        """Return a copy of a network's frozen part."""
        return cls(_flatten_tensors(list_frozen_tensors(network)))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the values as little-endian bytes; names and shapes are not hashed, because the plan determines
        them.
        """
        return hashlib.sha256(self.values.astype("<f4", copy=False).tobytes()).hexdigest()

    def write_to_network(self, network: SplitNetwork) -> None:
        """Overwrite a network's frozen tensors in place.

        Raises:
            ValueError: If the network has another number of frozen values; then nothing is written.
        """
        tensors = list_frozen_tensors(network)
        size = sum(map(Tensor.numel, tensors.values()))
        if len(self.values) != size:
            has = f"has {size:,} frozen values"
            raise ValueError(f"the frozen part of the model holds {len(self.values):,} values, and this network {has}.")
        with torch.no_grad():
            _copy_flat_array_into_tensors(self.values, tensors)


def list_frozen_tensors(network: SplitNetwork) -> dict[str, Tensor]:
    """Return name -> frozen tensor of the network (not a copy), in the order of its ``state_dict``."""
    return {name: tensor for name, tensor in network.state_dict().items() if name in network.frozen}


def build_initial_frozen_part(spec: ModelSpec, seed: int, base: Path) -> FrozenPart | None:
    """Return the frozen part of a newly built network; None if all tensors are trained.

    Raises:
        BadInput: See :func:`polyclinic.common.models.network.build_network`.
    """
    return None if spec.train == "all" else FrozenPart.from_network(build_network(spec, ("",), seed, base))


def add_frozen_hash_to_spec(spec: ModelSpec, frozen: FrozenPart | None) -> ModelSpec:
    """Return a copy of the specification with the hash of the frozen part; unchanged if ``frozen`` is None."""
    return spec if frozen is None else spec.model_copy(update={"frozen_sha256": frozen.sha256})
