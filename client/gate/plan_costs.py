"""Estimates of the memory and disk space that a plan takes, without building its network in memory.

The estimates are lower bounds: a plan whose estimate exceeds a machine's memory cannot work there. A test compares them
with each network on torch's "meta" device, whose tensors have shapes but no memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyclinic.common.config import STEP_NOISE_LEVELS, HospitalPlan
from polyclinic.common.models.network import build_meta_lora_backbone, resolve_precision
from polyclinic.common.models.trained import list_trained_layers
from polyclinic.common.models.zoo.registry import build_meta_backbone
from polyclinic.common.models.zoo.spec import Architecture, ModelSpec, is_external_network, is_segmentation
from polyclinic.common.system.resources import measure_physical_memory
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.privacy.gradients import choose_micro_batch_size

FLOAT32_BYTES = 4
MODEL_COPIES_IN_TRAINING = 5
"""Copies of the model in memory during training: message, received, trained, gradient, difference."""
ADAM_MOMENT_COUNT = 2
GRADIENT_COPIES = 3
"""Maximum number of copies of each image's gradient in memory at a time, in training with noise."""
_LOSS_NUMBERS_PER_PIXEL_AND_CLASS = 8
"""Float32 numbers that a segmentation loss keeps in memory for each pixel and class."""
STATE_FILES_PER_RUN = 2
"""Number of state files of a run on disk: a round's file stays until the next round has counted."""


class BackboneCost(NamedTuple):
    """Measured sizes of a backbone, from which memory and traffic of a plan are estimated.

    Attributes:
        width: Number of its output features.
        activations: Bytes of activations for each pixel, or voxel, of an image in training, rounded down.
        parameters: Number of its parameters, rounded down; None if a dense layer grows with the image size.
    """

    width: int
    activations: int
    parameters: int | None = None


BACKBONE_COSTS: Mapping[Architecture, BackboneCost] = {
    "densenet121": BackboneCost(1024, 2590, 6_950_000),
    "resnet18": BackboneCost(512, 440, 11_170_000),
    "vgg11": BackboneCost(512, 1550, 9_220_000),
    "efficientnet_lite0": BackboneCost(1280, 1580, 3_370_000),
    "fedsld_cnn": BackboneCost(500, 180),
    "femnist_cnn": BackboneCost(2048, 280),
    "unifed_vgg11": BackboneCost(4096, 1550, 28_100_000),
    "unifed_resnet18": BackboneCost(512, 440, 12_550_000),
    "tiny_cnn": BackboneCost(96, 470, 52_000),
    "tiny_unet": BackboneCost(16, 1190, 118_000),
    "tiny_cnn_3d": BackboneCost(64, 200, 69_000),
}


@dataclass(frozen=True)
class NetworkCost:
    """Numbers of parameters of a network, and memory of its activations.

    Attributes:
        parameters: Number of all parameters.
        trained: Number of trained parameters.
        activations: Bytes of float32 activations for each image of a training batch.
    """

    parameters: int
    trained: int
    activations: int


def estimate_network_cost(spec: ModelSpec, rows: int) -> NetworkCost:
    """Estimate parameters and activations of a plan's network whose head has ``rows`` rows, one for each class."""
    if is_external_network(spec.architecture):
        width, backbone, activations = _measure_external_network(spec)
    else:
        width, bytes_a_pixel, listed = BACKBONE_COSTS[spec.architecture]
        backbone = listed or sum(value.numel() for value in build_meta_backbone(spec).module.parameters())
        activations = bytes_a_pixel * math.prod(spec.sides)
    if is_segmentation(spec.task):  # logits and labels of each pixel, and the steps of the loss between them
        activations += rows * _LOSS_NUMBERS_PER_PIXEL_AND_CLASS * FLOAT32_BYTES * math.prod(spec.sides)
    features = spec.neck or width
    head = ((width + 1) * spec.neck if spec.neck else 0) + (features + 1) * rows  # neck and head, with biases
    trained = head + (backbone if spec.train == "all" else _count_trained_backbone_parameters(spec))
    return NetworkCost(backbone + head, trained, activations if spec.train == "all" else 0)


@lru_cache(maxsize=8)
def _count_trained_backbone_parameters(spec: ModelSpec) -> int:
    """Count the trained parameters of a partly frozen backbone.

    Raises:
        BadInput: If ``model.train`` names more layers, or a higher rank, than the backbone has.
    """
    if spec.backbone_frozen:
        return 0
    backbone = build_meta_lora_backbone(spec)
    layers = [backbone.get_submodule(name) for name in list_trained_layers(backbone, spec.train)]
    return sum(value.numel() for layer in layers for value in layer.parameters(recurse=False))


@lru_cache(maxsize=8)
def _measure_external_network(spec: ModelSpec) -> tuple[int, int, int]:
    """Measure width, parameters and activations of a network from another library or a plug-in.

    Raises:
        BadInput: If the network cannot be built.
    """
    module, width = build_meta_backbone(spec)
    device = next((value.device for value in module.parameters()), None)
    image = torch.zeros(1, *spec.input_shape, device=device)
    numbers = count_layer_outputs(module, image)
    return width, sum(value.numel() for value in module.parameters()), numbers * FLOAT32_BYTES


def count_layer_outputs(network: nn.Module, images: Tensor) -> int:
    """Count the output numbers of all innermost layers of a network for these images."""
    counts = list[int]()

    def count_output_numbers(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            counts.append(output.numel())

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(count_output_numbers) for leaf in leaves]
    network.eval()
    try:
        with torch.no_grad():
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)


def estimate_training_memory_bytes(plan: HospitalPlan, rows: int, images: int, device: str, gpus: int = 1) -> int:
    """Estimate the bytes of memory that training by this plan takes at least, on the machine or on its fullest GPU.

    Args:
        rows: Number of rows of the model's head, one for each class.
        images: Number of the site's training images; no batch is larger.
        device: ``cpu`` or ``cuda``; activations take half as much in 16-bit precision.
        gpus: Number of GPUs that share each batch. If the plan adds noise to each training step, one GPU has the whole
            batch.
    """
    size = estimate_network_cost(plan.model, rows)
    training = plan.training
    if plan.model.patch_size is not None:
        images *= training.patches_per_volume
    is_float32 = resolve_precision(device, training.precision) == "float32"
    activation_divisor = 1 if is_float32 else 2  # 16-bit activations take half of the bytes
    if plan.privacy.level in STEP_NOISE_LEVELS:
        # Noise in each step needs the gradient of each image, on one GPU.
        batch = choose_micro_batch_size(training.batch_size)
        batch_bytes = batch * size.activations // activation_divisor
        batch_bytes += GRADIENT_COPIES * batch * size.trained * FLOAT32_BYTES
    else:
        batch = min(training.batch_size, images)
        batch_bytes = batch * size.activations // activation_divisor // gpus
    moments = 0 if training.optimizer == "sgd" else ADAM_MOMENT_COUNT
    frozen = size.parameters - size.trained
    return ((MODEL_COPIES_IN_TRAINING + moments) * size.trained + frozen) * FLOAT32_BYTES + batch_bytes


def estimate_run_disk_bytes(plan: HospitalPlan, method: SiteMethod, rows: int) -> int:
    """Estimate the peak of the disk space, in bytes, that one run takes at a site.

    The estimate counts the message that is being answered, the site's stored states of two rounds, and its own model. A
    frozen part counts twice, as a message and as a stored file. If the plan compares with training alone, it also
    counts two models and the states of their trainings.

    Args:
        rows: Number of rows of the model's head, one for each class.
    """
    size = estimate_network_cost(plan.model, rows)
    model = size.trained * FLOAT32_BYTES
    frozen = (size.parameters - size.trained) * FLOAT32_BYTES
    copies = 3 if method.parts.keeps_local_parts else 0  # as trained, as evaluated, of the best round
    moments = 1 if plan.training.optimizer == "sgd" else ADAM_MOMENT_COUNT
    if plan.training.reset_optimizer:
        moments = 0
    copies += moments * (1 + method.traits.trains_own_model)
    copies += method.parameters.compress_update != "float32"
    whole = frozen * (2 + method.parts.keeps_local_parts)
    alone = 0
    if plan.evaluation.compare_local:  # two models that the site trains for itself, and its memory of both trainings
        alone = 2 * (model * (1 + STATE_FILES_PER_RUN * (3 + moments)) + frozen)
    return model * (1 + STATE_FILES_PER_RUN * copies + method.parts.keeps_local_parts) + whole + alone


@lru_cache(maxsize=8)
def measure_machine_memory(device: str) -> int:
    """Return the size in bytes of the machine's memory, or of the GPU's for the device ``cuda``."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return measure_physical_memory()
