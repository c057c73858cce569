"""Estimates of the memory and disk that a plan takes, made without building its network.

The figures are lower bounds: a plan that they put beyond a machine cannot work there. The tables are held by a test
that lays each network out on torch's "meta" device, whose tensors have shapes and no memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.config import BY_STEP, Plan
from common.models.network import meta_backbone_with_factors, resolve_precision
from common.models.trained import trained_layer_names
from common.models.zoo.registry import meta_backbone
from common.models.zoo.spec import Architecture, ModelSpec, is_external
from common.system.resources import physical_memory
from strategies.local.site_method import SiteMethod
from strategies.privacy.gradients import choose_micro_batch_size

FLOAT32 = 4
COPIES_AT_WORK = 5
"""Of the model, in memory while a site trains: as it came, as received, as trained, its gradient, its change."""
ADAM_MOMENTS = 2
GRADIENTS_AT_ONCE = 3
"""Of each image of a pack, in private training: while a network is tried, those before and after, and half of both."""
FILES_AT_ONCE = 2
"""A site's memory of a round lies beside that of the round before until that round has counted."""


class BackboneCost(NamedTuple):
    """Sizes of a backbone, for estimates.

    Attributes:
        width: Its features.
        activations: Bytes for each pixel of an image that it holds in memory until the gradient is known, rounded down.
        parameters: Its numbers, rounded down; None where a dense layer is as wide as the image.
    """

    width: int
    activations: int
    parameters: int | None = None


BACKBONES: Mapping[Architecture, BackboneCost] = {
    "densenet121": BackboneCost(1024, 2590, 6_950_000),
    "resnet18": BackboneCost(512, 440, 11_170_000),
    "vgg11": BackboneCost(512, 1550, 9_220_000),
    "efficientnet_lite0": BackboneCost(1280, 1580, 3_370_000),
    "fedsld_cnn": BackboneCost(500, 180),
    "femnist_cnn": BackboneCost(2048, 280),
    "unifed_vgg11": BackboneCost(4096, 1550, 28_100_000),
    "unifed_resnet18": BackboneCost(512, 440, 12_550_000),
    "tiny_cnn": BackboneCost(96, 470, 52_000),
}


@dataclass(frozen=True)
class NetworkCost:
    """Parameters and activations of a network.

    Attributes:
        parameters: How many numbers it has.
        trained: How many of them are trained.
        activations: Bytes that one image of a training batch holds until its gradient is known, in float32.
    """

    parameters: int
    trained: int
    activations: int


def estimate_network_cost(spec: ModelSpec, rows: int) -> NetworkCost:
    """Estimate the size of a plan's network, with ``rows`` head rows."""
    if is_external(spec.architecture):
        width, backbone, activations = _measure_network(spec)
    else:
        width, bytes_a_pixel, listed = BACKBONES[spec.architecture]
        backbone = listed or sum(value.numel() for value in meta_backbone(spec).module.parameters())
        activations = bytes_a_pixel * spec.image_size**2
    features = spec.neck or width
    behind = ((width + 1) * spec.neck if spec.neck else 0) + (features + 1) * rows
    trained = behind + (backbone if spec.train == "all" else _count_trained_backbone_parameters(spec))
    return NetworkCost(backbone + behind, trained, activations if spec.train == "all" else 0)


@lru_cache(maxsize=8)
def _count_trained_backbone_parameters(spec: ModelSpec) -> int:
    """Count the trained parameters of a partly frozen backbone.

    Raises:
        BadInput: If ``model.train`` names more layers, or a higher rank, than there are.
    """
    if spec.backbone_frozen:
        return 0
    backbone = meta_backbone_with_factors(spec)
    layers = [backbone.get_submodule(name) for name in trained_layer_names(backbone, spec.train)]
    return sum(value.numel() for layer in layers for value in layer.parameters(recurse=False))


@lru_cache(maxsize=8)
def _measure_network(spec: ModelSpec) -> tuple[int, int, int]:
    """Measure width, parameters and activations of a network that is not ours.

    Raises:
        BadInput: If it cannot be made.
    """
    module, width = meta_backbone(spec)
    device = next((value.device for value in module.parameters()), None)
    image = torch.zeros(1, spec.channels, spec.image_size, spec.image_size, device=device)
    numbers = count_activations(module, image)
    return width, sum(value.numel() for value in module.parameters()), numbers * FLOAT32


def count_activations(network: nn.Module, images: Tensor) -> int:
    """Count the numbers that all layers of a network together put out for these images."""
    counts = list[int]()

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            counts.append(output.numel())

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    network.eval()
    try:
        with torch.no_grad():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)


def estimate_memory_bytes(plan: Plan, rows: int, images: int, device: str, gpus: int = 1) -> int:
    """Estimate the least memory that training by this plan takes at a site: of the machine, or of its fullest GPU.

    Args:
        images: Of the site's training part; no batch holds more.
        device: ``cpu`` or ``cuda``, where activations may be half as wide.
        gpus: How many GPUs each batch is split across; all of it goes through one where noise is added to each step.
    """
    size, training = estimate_network_cost(plan.model, rows), plan.training
    private = plan.privacy.level in BY_STEP
    batch = choose_micro_batch_size(training.batch_size) if private else min(training.batch_size, images)
    narrow = resolve_precision(device, training.precision) != "float32"
    of_batch = batch * size.activations // (2 if narrow else 1) // (1 if private else gpus)
    if private:
        of_batch += GRADIENTS_AT_ONCE * batch * size.trained * FLOAT32
    moments = 0 if training.optimizer == "sgd" else ADAM_MOMENTS
    frozen = size.parameters - size.trained
    return ((COPIES_AT_WORK + moments) * size.trained + frozen) * FLOAT32 + of_batch


def estimate_disk_bytes(plan: Plan, method: SiteMethod, rows: int) -> int:
    """Estimate the most that one run leaves on a site's disk.

    The message at work, its memory of two rounds, its own model; of a frozen part, the message and the file.
    """
    size = estimate_network_cost(plan.model, rows)
    model, frozen = size.trained * FLOAT32, (size.parameters - size.trained) * FLOAT32
    copies = 3 if method.keeps_local_parts else 0  # as trained, as evaluated, of the best round
    moments = 0 if plan.training.reset_optimizer else 1 if plan.training.optimizer == "sgd" else ADAM_MOMENTS
    copies += moments
    copies += method.parameters.compress_update != "float32"
    whole = frozen * (2 + method.keeps_local_parts)
    alone = 0
    if plan.evaluation.compare_local:  # two models that the site trains for itself, and its memory of both trainings
        alone = 2 * (model * (1 + FILES_AT_ONCE * (3 + moments)) + frozen)
    return model * (1 + FILES_AT_ONCE * copies + method.keeps_local_parts) + whole + alone


@lru_cache(maxsize=8)
def measure_machine_memory(device: str) -> int:
    """Return the size in bytes of the machine's memory, or of the GPU's for the device ``cuda``."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return physical_memory()
