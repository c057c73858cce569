"""The network that every method trains: backbone, neck, and a linear head with one row for each class name."""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.models.gpu import GRAPH_ATTRIBUTE, PARALLEL_ATTRIBUTE, compute_backbone_features
from polyclinic.common.models.parts import (
    get_tensor,
    has_fixed_modules,
    list_parts,
    require_gradients,
    set_training_flag,
)
from polyclinic.common.models.sliding_window import refuse_missing_sliding_window, slide_over_images
from polyclinic.common.models.trained import (
    add_low_rank_factors,
    list_frozen_tensor_names,
    list_trained_layers,
    make_standardising_layers,
    refuse_unfit_train_setting,
    register_frozen_constants,
)
from polyclinic.common.models.weights import WarmStart, WeightsFile, find_weights_path, read_weights_file
from polyclinic.common.models.zoo.networks import is_batch_norm, replace_with_group_norm
from polyclinic.common.models.zoo.registry import (
    build_backbone,
    build_backbone_for_check,
    build_meta_backbone,
)
from polyclinic.common.models.zoo.spec import ModelSpec, Task, is_external_network, is_segmentation
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import ImageTensors

MemoryFormat = Literal["channels_last", "contiguous"]
"""The order of an image's numbers in memory: all channels of a pixel together, or all pixels of a channel together."""
_LUMINANCE_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, eq=False)
class Head:
    """The last layer of a classifier as arrays; each row belongs to a class name.

    Attributes:
        class_names: Unique class names, in the order of the rows.
        weight: float32 ``(classes, features)``.
        bias: float32 ``(classes,)``.

    Raises:
        ValueError: If names repeat, or arrays have another type or shape.
    """

    class_names: tuple[str, ...]
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        classes = len(self.class_names)
        if len(set(self.class_names)) != classes:
            raise ValueError(f"a head's class names must differ, got {quote_names(self.class_names)}")
        if self.weight.dtype != np.float32 or self.bias.dtype != np.float32:
            raise ValueError(f"a head is float32, got weight {self.weight.dtype} and bias {self.bias.dtype}")
        if self.weight.ndim != 2 or len(self.weight) != classes or self.bias.shape != (classes,):
            expected = f"weight ({classes}, features) and bias ({classes},)"
            raise ValueError(f"expected {expected}, got {self.weight.shape} and {self.bias.shape}")

    @property
    def features(self) -> int:
        """Number of features of each row."""
        return int(self.weight.shape[1])

    def select_rows(self, names: Sequence[str]) -> "Head":
        """Return copies of the rows of ``names``, in that order.

        Raises:
            LookupError: If the head lacks one of these rows.
        """
        index = np.arange(len(self.class_names))
        if tuple(names) != self.class_names:
            position = dict(zip(self.class_names, index, strict=True))
            if missing := [name for name in names if name not in position]:
                raise LookupError(f"no row for {quote_names(missing)}; this head has {quote_names(self.class_names)}")
            index = np.array([position[name] for name in names], dtype=np.intp)
        return Head(tuple(names), self.weight[index], self.bias[index])


def draw_initial_head(class_names: Sequence[str], features: int, seed: int) -> Head:
    """Return a new random head; each row depends only on the seed and its class name, so all sites draw the same row.

    Values are uniform between -1/sqrt(features) and 1/sqrt(features), as in :class:`torch.nn.Linear`.

    Args:
        class_names: Class names of the rows.
        features: Number of features of each row.
        seed: Seed of the run.
    """
    rows = np.empty((len(class_names), features + 1), np.float32)  # each row: weights, then the bias
    for row, name in zip(rows, class_names, strict=True):
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        unit = np.random.default_rng(int.from_bytes(digest)).random(features + 1, dtype=np.float32)
        row[:] = (2 * unit - 1) / np.float32(np.sqrt(features))
    return Head(tuple(class_names), np.ascontiguousarray(rows[:, :-1]), rows[:, -1].copy())


class Model(Protocol):
    """The interface of a classifier that methods train: features, and a linear head with one row for each class.

    :class:`SplitNetwork` implements it; a wrapper can adapt any other torch module.
    """

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names of the head's rows, in their order."""

    @property
    def head(self) -> nn.Linear:
        """The last layer."""

    @property
    def frozen(self) -> Collection[str]:
        """The names of the tensors that are never trained."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes)``."""

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head, ``(batch, features)``."""

    def eval(self) -> Self: ...
    def requires_grad_(self, requires_grad: bool = True) -> Self: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self) -> dict[str, Any]: ...


class SplitNetwork(nn.Module):
    """A classifier of backbone, neck and head: maps pixels 0..255 to one logit for each class.

    Attributes:
        spec: The ``[model]`` table from which the network was built.
        class_names: Class names of the head's rows, in their order.
        backbone: The layers that map images to feature vectors.
        neck: Identity, or a dense layer with ReLU and dropout; averaged over sites like the backbone. After a frozen
            backbone the first layer of the neck standardises features.
        head: The last layer, one row for each class.
        frozen: Names of the tensors that are not trained, see :attr:`ModelSpec.train`.
        initial_counters: Integer buffer -> copy of its value in the new backbone or neck. Training may change such a
            buffer, for example the number of batches behind a running mean, but it is not averaged over sites.
        needs_contiguous: True if the network's code fails on ``channels_last`` images.
        warm_start: The head rows that come from the model of a finished run; None if the network starts from none.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        class_names: Sequence[str],
        *,
        backbone: nn.Module,
        neck: nn.Module,
        head: nn.Linear,
    ) -> None:
        super().__init__()
        assert head.out_features == len(class_names), (head.out_features, class_names)
        self.spec = spec
        self.class_names = tuple(class_names)
        self.backbone = backbone
        self.neck = neck
        self.head = head
        self.frozen = list_frozen_tensor_names(backbone, spec)
        buffers = self.named_buffers()
        self.initial_counters = {name: value.clone() for name, value in buffers if not value.is_floating_point()}
        self.needs_contiguous = False
        self.warm_start: WarmStart | None = None
        normalisation = spec.normalisation
        # Not persistent, because they follow from the spec and do not belong to a model's state.
        sides = len(spec.sides)
        self.register_buffer("pixel_mean", _make_pixel_scale_tensor(normalisation.mean, sides), persistent=False)
        self.register_buffer("pixel_std", _make_pixel_scale_tensor(normalisation.std, sides), persistent=False)

    def with_head(self, class_names: Sequence[str], head: nn.Linear) -> "SplitNetwork":
        """Return a network with another head and the same backbone and neck, which are not copied.

        Args:
            class_names: Class names of the head's rows, in their order.
            head: The new head.
        """
        network = SplitNetwork(self.spec, class_names, backbone=self.backbone, neck=self.neck, head=head)
        network.initial_counters = self.initial_counters
        network.needs_contiguous = self.needs_contiguous
        return network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images: ``(batch, classes)``, or in segmentation ``(batch, classes, *spatial)``.

        The logits of a segmentation have the size of the images. With ``patch_size``, images of another size than a
        patch are computed by a sliding window.

        Args:
            images: uint8 or float pixels 0..255, ``(batch, 1 or 3, height, width)``, or volumes with a depth before the
                height.
        """
        if not is_segmentation(self.spec.task):
            logits: Tensor = self.head(self.features(images))
            return logits
        if self.spec.patch_size is not None and tuple(images.shape[2:]) != self.spec.sides:
            return slide_over_images(self._compute_window_logits, images, self.spec)
        return resize_maps(apply_to_last_axis(self.head, self.features(images)), images.shape[2:])

    def _compute_window_logits(self, windows: Tensor) -> Tensor:
        return apply_doubling_single_image(self, windows).float()

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head, ``(batch, features)``; in segmentation ``(batch, features, *spatial)``."""
        backbone = self.backbone
        pixels = self.preprocess_images(images)
        if PARALLEL_ATTRIBUTE in vars(backbone) or GRAPH_ATTRIBUTE in vars(backbone):
            features: Tensor = compute_backbone_features(backbone, pixels)
        else:
            features = backbone(pixels)
        if is_segmentation(self.spec.task):
            return features if isinstance(self.neck, nn.Identity) else apply_to_last_axis(self.neck, features)
        return self.neck(features)  # type: ignore[no-any-return]

    def preprocess_images(self, images: Tensor) -> Tensor:
        """Convert pixels 0..255 to the backbone's channels and image size, and normalise them."""
        pixels = images.to(self.pixel_mean.dtype)
        spec = self.spec
        if pixels.shape[1:] != spec.input_shape:
            pixels = convert_pixels_for_backbone(pixels, spec)
        return (pixels - self.pixel_mean) / self.pixel_std


def apply_to_last_axis(layer: nn.Module, maps: Tensor) -> Tensor:
    """Apply layers of feature vectors to each pixel of maps ``(batch, features, *spatial)``, like a 1x1 convolution."""
    vectors = maps.movedim(1, -1)  # (batch, *spatial, features)
    out: Tensor = layer(vectors.reshape(-1, vectors.shape[-1]))
    return out.reshape(*vectors.shape[:-1], -1).movedim(-1, 1)


def resize_maps(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps ``(batch, rows, *spatial)`` by linear interpolation; return the same tensor if the size is equal."""
    if tuple(maps.shape[2:]) == tuple(size):
        return maps
    return functional.interpolate(maps, tuple(size), mode="trilinear" if len(size) == 3 else "bilinear")


def convert_pixels_for_backbone(images: Tensor, spec: ModelSpec) -> Tensor:
    """Convert float pixels 0..255 to a backbone's number of channels and image size, without normalisation."""
    return convert_pixels(images, spec.channels, spec.sides)


def convert_pixels(images: Tensor, channels: int, sides: tuple[int, ...]) -> Tensor:
    """Convert float pixels 0..255 ``(batch, 1 or 3, height, width)`` to a number of channels and a size.

    Volumes ``(batch, 1 or 3, depth, height, width)`` are resized without antialiasing, which torch supports for
    pictures only.

    Args:
        images: The pixels.
        channels: 1 or 3.
        sides: Height and width; depth, height and width of volumes.
    """
    pixels = convert_channels(images, channels)
    assert pixels.ndim == 2 + len(sides), f"expected images of {len(sides)} sides, got {tuple(pixels.shape)}"
    if pixels.shape[2:] == sides:
        return pixels
    if len(sides) == 3:
        return functional.interpolate(pixels, sides, mode="trilinear")
    return functional.interpolate(pixels, sides, mode="bilinear", antialias=True)


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Convert float pixels ``(batch, 1 or 3, height, width)`` to a number of channels; grey is the luminance."""
    if (images.shape[1], channels) == (1, 3):
        return images.expand(-1, channels, *[-1] * (images.ndim - 2))
    if images.shape[1] == channels:
        return images
    assert images.shape[1] == 3, f"expected images of 1 or 3 channels, got {tuple(images.shape)}"
    weights = images.new_tensor(_LUMINANCE_WEIGHTS).reshape(1, 3, *[1] * (images.ndim - 2))
    return (images * weights).sum(1, keepdim=True)


def build_network(spec: ModelSpec, class_names: Sequence[str], seed: int, base: Path = Path()) -> SplitNetwork:
    """Build a new network from a specification; torch's global random state does not change.

    Args:
        spec: The experiment's ``[model]`` table.
        class_names: Class names of the head's rows, at least one.
        seed: Determines all random weights; a head row depends only on the seed and its class name.
        base: Folder in which the relative path ``spec.weights`` starts.

    Raises:
        BadInput: If the weights file is missing, has another hash or does not fit; if ``model.train`` requires frozen
            layers and none would be frozen; or if a package for the sliding window is not installed.
    """
    refuse_missing_sliding_window(spec)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs too
        backbone, width = build_backbone(spec)
        dense = [nn.Linear(width, spec.neck), nn.ReLU(), nn.Dropout(spec.dropout)] if spec.neck else []
        layers = [*make_standardising_layers(width, spec), *dense]
        neck = nn.Sequential(*layers) if layers else nn.Identity()
    weights: WeightsFile | None = None
    if spec.weights is not None:
        weights = read_weights_file(backbone, find_weights_path(base, spec.weights), spec.weights_sha256, spec)
        if weights.has_group_norm:
            replace_with_group_norm(backbone)
        _copy_tensors(weights.backbone, backbone)
    # Frozen batch normalisation mixes no images, and must stay as it was published.
    if spec.norm == "group" and not spec.norm_frozen:
        replace_with_group_norm(backbone)
    refuse_unfit_train_setting(_adapt_to_train_setting(backbone, spec), spec)
    rows = draw_initial_head(class_names, spec.neck or width, seed)
    warm_start = None if weights is None else weights.plan_warm_start(spec, neck, class_names)
    if weights is not None and warm_start is not None and not warm_start.reason:
        _copy_tensors(weights.select_neck_tensors(neck), neck)
        for name in warm_start.taken:
            row = class_names.index(name)
            rows.weight[row], rows.bias[row] = weights.select_head_row(name)
    head = make_dense_layer(torch.from_numpy(rows.weight), torch.from_numpy(rows.bias))
    network = SplitNetwork(spec, class_names, backbone=backbone, neck=neck, head=head)
    network.warm_start = warm_start
    # Most convolutions and poolings are faster with channels_last, on a CPU too. Volumes need another format of torch.
    network.needs_contiguous = spec.takes_volumes
    set_memory_format(network, "channels_last")
    if is_external_network(spec.architecture) and not _works_on_channels_last(network):
        network.needs_contiguous = True
        set_memory_format(network, "contiguous")
    return network


def _copy_tensors(tensors: Mapping[str, Tensor], module: nn.Module) -> None:
    """Overwrite tensors of a module in place, by their names in its state dict."""
    state = module.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def set_memory_format(network: SplitNetwork, memory_format: MemoryFormat) -> SplitNetwork:
    """Convert the weights of convolutions to a memory format, in place; torch then converts the images itself.

    A network that fails on ``channels_last`` stays ``contiguous``.
    """
    channels_last = memory_format == "channels_last" and not network.needs_contiguous
    return network.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _works_on_channels_last(network: SplitNetwork) -> bool:
    """Return False if the network's code calls ``view`` on ``channels_last`` maps, for which torch raises an error.

    Many networks flatten their maps by ``x.view(len(x), -1)``, which needs contiguous maps. Other errors are reported
    elsewhere.
    """
    spec = network.spec
    images = torch.zeros(2, *spec.input_shape)
    was_training = network.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            network.eval().features(images)
    except Exception as error:  # code of another package may raise anything
        return "view size is not compatible" not in str(error)
    finally:
        network.train(was_training)
    return True


def find_network_build_faults(spec: ModelSpec, base: Path) -> list[Fault]:
    """Return the faults for which :func:`build_network` would fail; torch's global random state does not change."""
    try:
        refuse_missing_sliding_window(spec)
        if spec.weights is None and spec.train == "all" and not is_external_network(spec.architecture):
            return []
        refuse_unfit_train_setting(_adapt_to_train_setting(build_backbone_for_check(spec).module, spec), spec)
    except BadInput as bad:
        return list(bad.faults)
    if spec.weights is None:
        return []
    try:
        plain = build_backbone_for_check(spec).module
        read_weights_file(plain, find_weights_path(base, spec.weights), spec.weights_sha256, spec)
    except BadInput as bad:
        return [replace(fault, where=f"model.weights ({spec.weights})") for fault in bad.faults]
    return []


def build_meta_lora_backbone(spec: ModelSpec) -> nn.Module:
    """Build a backbone on torch's meta device, with low-rank (LoRA) factors if ``model.train`` asks for them.

    Its tensors have no memory for values, see :func:`build_meta_backbone`.

    Raises:
        BadInput: If the network cannot be built, or has no layer for the low-rank factors.
    """
    return _adapt_to_train_setting(build_meta_backbone(spec).module, spec)


def _adapt_to_train_setting(backbone: nn.Module, spec: ModelSpec) -> nn.Module:
    """Add low-rank (LoRA) factors and turn frozen constants into buffers, as ``model.train`` requires.

    Returns:
        The same backbone, changed in place.
    """
    add_low_rank_factors(backbone, spec.train)
    register_frozen_constants(backbone, spec)
    return backbone


def unfreeze_network(network: SplitNetwork) -> None:
    """Undo :func:`freeze_backbone` and :func:`freeze_batch_norm`; layers frozen by ``model.train`` stay frozen.

    Counters restart. Otherwise a running mean over all batches would depend on the sites that the process trained
    before.
    """
    require_gradients(network)
    set_training_flag(network, training=True)
    _reset_counters(network)
    if network.spec.train != "all":
        _disable_frozen_layer_training(network)


def _reset_counters(network: SplitNetwork) -> None:
    """Restore the initial values of the integer buffers."""
    if not network.initial_counters:
        return
    buffers = list_parts(network).buffers
    for name, initial in network.initial_counters.items():
        get_tensor(buffers[name]).copy_(initial)


def _disable_frozen_layer_training(network: SplitNetwork) -> None:
    """Switch off gradients of frozen layers, and put the backbone's frozen layers and dropout in evaluation mode."""
    for name, parameter in network.named_parameters():
        if name in network.frozen:
            parameter.requires_grad_(False)
    training = network.training
    network.backbone.eval()
    for name in list_trained_layers(network.backbone, network.spec.train):
        network.backbone.get_submodule(name).train(training)


def freeze_backbone(network: SplitNetwork) -> None:
    """Freeze the backbone and put it in evaluation mode; neck and head are still trained."""
    network.backbone.requires_grad_(False).eval()


def freeze_batch_norm(network: SplitNetwork) -> None:
    """Freeze weight, bias, mean and variance of each BatchNorm, as in FedBN+ (Kulkarni et al. 2023).

    ``network.train()`` would let mean and variance change again; call :func:`set_train_mode` instead.
    """
    for module in network.modules():
        if is_batch_norm(module):
            module.requires_grad_(False).eval()


def set_train_mode(network: SplitNetwork, *, frozen_batch_norm: bool = False, frozen_backbone: bool = False) -> None:
    """Switch a network to training mode, except for its frozen layers; use this instead of ``network.train()``.

    Only ``model.train`` and the two flags decide which backbone layers are trained; earlier calls of freezing functions
    have no effect. Neck and head keep their ``requires_grad``.
    """
    set_training_flag(network, training=True)
    require_gradients(network.backbone, fixed=has_fixed_modules(network))
    if network.frozen:
        _disable_frozen_layer_training(network)
    if frozen_backbone:
        freeze_backbone(network)
    if frozen_batch_norm:
        freeze_batch_norm(network)


def make_dense_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a dense layer with this weight ``(rows, features)`` and bias ``(rows,)``; no random numbers are drawn."""
    rows, features = weight.shape
    # A layer on the meta device draws no random numbers. Set its tensors, because its to_empty would import sympy.
    head = nn.Linear(features, rows, device="meta")
    head.weight = nn.Parameter(weight)
    head.bias = nn.Parameter(bias)
    return head


def _make_pixel_scale_tensor(values: Sequence[float], sides: int) -> Tensor:
    return 255 * torch.tensor(values, dtype=torch.float32).reshape(1, -1, *[1] * sides)


# ---------------------------------------------------------------------- outputs

EVALUATION_BATCH_SIZE = 256
Precision = Literal["auto", "float32", "bf16", "fp16", "fastest"]
HALF_PRECISION_DEVICES = ("cuda",)
"""Device types that support bfloat16 and float16."""
BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of CPUs with instructions for bfloat16 products; CPUs without any of them emulate bfloat16."""
CPU_INFO_FILE = Path("/proc/cpuinfo")


def select_head_row_labels(images: ImageSet, class_names: tuple[str, ...]) -> Tensor:
    """Return labels ``(n, rows)``, float32, with a column per class name; NaN for classes without a label column."""
    matrix = torch.full((len(images.labels), len(class_names)), float("nan"))
    columns = {name: column for column, name in enumerate(images.class_names)}
    for row, name in enumerate(class_names):
        if name in columns:
            matrix[:, row] = torch.from_numpy(images.labels[:, columns[name]])
    return matrix


def compute_logits(network: Model, images: Tensor | ImageTensors, precision: Precision = "auto") -> Tensor:
    """Compute logits ``(n, rows)`` of uint8 images ``(n, channels, height, width)``, in evaluation mode."""
    return _apply_network_in_batches(network, network, images, precision)


@torch.no_grad()
def compute_features_and_logits(
    network: Model, images: Tensor | ImageTensors, precision: Precision = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute features ``(n, features)`` and logits ``(n, rows)`` of uint8 images, in evaluation mode."""
    features = _apply_network_in_batches(network, network.features, images, precision)
    return features, network.head(features)


@torch.no_grad()
def _apply_network_in_batches(
    network: Model, function: Callable[[Tensor], Tensor], images: Tensor | ImageTensors, precision: Precision
) -> Tensor:
    set_training_flag(cast(nn.Module, network), training=False)
    parts = []
    size = EVALUATION_BATCH_SIZE
    for batch in images.iterate_batches(size) if isinstance(images, ImageTensors) else torch.split(images, size):
        with autocast(batch.device, precision):
            parts.append(apply_doubling_single_image(function, batch.float()).float())
    return torch.cat(parts)


def apply_doubling_single_image(network: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply a network to a batch; a batch of one image is doubled for the call, because some layers fail on
    one image.
    """
    return network(batch) if len(batch) > 1 else network(torch.cat([batch, batch]))[:1]


def logits_to_probabilities(logits: Tensor, task: Task) -> Tensor:
    """Return probabilities ``(n, rows[, *spatial])``: sigmoid of each logit, or softmax over exclusive classes.

    In exclusive segmentation the softmax is over the classes and the background, whose logit is 0; the background has
    no row in the result.
    """
    if task == "exclusive_segmentation":
        return functional.pad(logits.movedim(1, -1), (0, 1)).softmax(dim=-1)[..., :-1].movedim(-1, 1)
    return logits.softmax(dim=1) if task == "multi_class" else logits.sigmoid()


def decide_class_areas(logits: Tensor, task: Task) -> Tensor:
    """Return a mask of each class, bool ``(n, rows, *spatial)``: probability above 0.5, or the highest of all classes.

    In exclusive segmentation the highest probability counts; the background is one of the classes.
    """
    if task == "exclusive_segmentation":
        highest = logits.max(dim=1, keepdim=True)
        rows = torch.arange(logits.shape[1], device=logits.device).reshape(1, -1, *[1] * (logits.ndim - 2))
        return (rows == highest.indices) & (highest.values > 0)
    return logits > 0


def compute_image_probabilities(
    network: SplitNetwork, images: Tensor | ImageTensors, precision: Precision = "auto"
) -> NDArray[np.float32]:
    """Compute probabilities ``(n, rows)`` of uint8 images ``(n, channels, height, width)``, as a numpy array."""
    scores = logits_to_probabilities(compute_logits(network, images, precision), network.spec.task)
    return scores.cpu().numpy()


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for mixed precision (:func:`torch.autocast`); parameters stay float32."""
    if (kind := resolve_precision(device.type, precision)) == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if kind == "fp16" else torch.bfloat16)


def resolve_precision(device: str, precision: Precision) -> Literal["float32", "bf16", "fp16"]:
    """Return the number format that the setting ``training.precision`` stands for on a device.

    ``auto`` is bfloat16 on a GPU and float32 on a CPU, so that all CPUs give equal results. ``bf16`` is float32 on a
    CPU without bfloat16 instructions, and ``fp16`` is float32 on any CPU. ``fastest`` is treated as ``auto``, unless
    :mod:`polyclinic.strategies.local.arithmetic` has measured and replaced it before.
    """
    if device in HALF_PRECISION_DEVICES and precision != "float32":
        return "fp16" if precision == "fp16" else "bf16"
    return "bf16" if precision == "bf16" and device == "cpu" and cpu_supports_bf16() else "float32"


def cpu_supports_bf16() -> bool:
    """Return True if this machine's CPU has instructions for bfloat16; False if that is unknown."""
    return bool(read_cpu_info()[1])


@lru_cache(maxsize=1)
def read_cpu_info() -> tuple[str, frozenset[str]]:
    """Return the CPU's model name, and its flags among :data:`BF16_CPU_FLAGS`; both empty if unknown."""
    try:
        lines = CPU_INFO_FILE.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return name, BF16_CPU_FLAGS.intersection(flags)
