"""The ``[model]`` table of an experiment, validated without importing torch, and the file names of a saved model."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from polyclinic.common.errors import Fault
from polyclinic.common.plugins import NAME_PATTERN, PLUGIN_PREFIX, accept_names_matching
from polyclinic.common.system.toml import SHA256_PATTERN
from polyclinic.data.base.spec import ImageSize, VolumeSize, describe_sides, format_image_size

Architecture = Literal[
    "densenet121",
    "resnet18",
    "vgg11",
    "efficientnet_lite0",
    "fedsld_cnn",
    "femnist_cnn",
    "unifed_vgg11",
    "unifed_resnet18",
    "tiny_cnn",
    "tiny_unet",
    "tiny_cnn_3d",
]

VOLUME_NETWORKS = '"tiny_cnn_3d", MONAI\'s such as "monai:DenseNet121", or a network of your own'
"""Networks for volumes, as a phrase for messages."""
_PREFIXES_OF_ANY_DIMENSIONS = ("monai:", PLUGIN_PREFIX, "tiny_unet")
"""Prefixes of networks that take pictures or volumes, depending on ``image_size``."""
_EXTERNAL_NAME = f"(timm|torchvision|monai|torchxrayvision|plugin):{NAME_PATTERN}"


def is_external_network(architecture: str) -> bool:
    """Return True if an architecture is a network of another library or of a plug-in.

    Such names are ``timm:NAME``, ``torchvision:NAME``, ``monai:NAME``, ``torchxrayvision:NAME``, ``plugin:NAME``.
    """
    return bool(re.fullmatch(_EXTERNAL_NAME, architecture))


Task = Literal["multi_label", "multi_class", "segmentation", "exclusive_segmentation"]
"""``multi_label``: each class is present or absent in an image, sigmoid. ``multi_class``: exactly one class, softmax.

``segmentation``: each class is present or absent in each pixel, sigmoid. ``exclusive_segmentation``: each pixel has one
class or the background, softmax, in which the background has the logit 0.
"""
SEGMENTATION_NETWORKS = ("tiny_unet",)
"""Our architectures that return a feature map; plug-ins and MONAI have further ones."""
PLANNED_NETWORK: str = "monai:DynUNet"
"""The network whose levels can be set in the ``[model]`` table, or planned by the coordinator."""
MONAI_SEGMENTATION = ("monai:UNet", PLANNED_NETWORK)


DICE_METRIC = "dice"
HAUSDORFF_METRIC = "hd95"
SEGMENTATION_METRICS = (DICE_METRIC, HAUSDORFF_METRIC)
"""Metrics of a class that a hospital sends with a segmentation test, in the fields for metrics of plug-ins."""


def is_segmentation(task: str) -> bool:
    """Return True for a task with a label for each pixel."""
    return task.endswith("segmentation")


MIN_UNET_LEVELS = 3
"""Number of levels of the smallest DynUNet that MONAI builds."""
LevelSides = Annotated[
    tuple[Annotated[tuple[Annotated[int, Field(ge=1, le=7)], ...], Field(min_length=2, max_length=3)], ...],
    Field(min_length=MIN_UNET_LEVELS, max_length=12),
]
"""One integer per axis, for each level of a U-Net."""
Sha256 = Annotated[str, Field(pattern=SHA256_PATTERN)]
NEW_HEAD = "new"
"""Value of ``model.head`` for a network that returns features."""
PATCH_KEYS: Final = ("patch_size", "patch_overlap", "patch_blending")
"""Keys of ``[model]`` for a network that reads its images in patches."""
LEVEL_KEYS: Final = ("kernel_sizes", "strides")
"""Keys of ``[model]`` for the levels of MONAI's DynUNet."""
PLANNED_KEYS: Final = ("patch_size", *LEVEL_KEYS, "mean", "std")
"""Keys of ``[model]`` that the coordinator sets if the experiment has a table ``planning``."""
RUN_DETERMINED_KEYS = ("frozen_sha256", "weights_sha256")
"""Keys of ``[model]`` that a run sets if the experiment does not."""


@dataclass(frozen=True)
class PixelNormalisation:
    """Mean and std of pixels, one value per channel, for the normalisation ``(pixel / 255 - mean) / std``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class ArchitectureTraits:
    """Fixed properties of an architecture.

    Attributes:
        minimum_size: Smallest image side at which every layer still has an output of at least one pixel.
        colour: Default normalisation of images with three channels.
        grey: Default normalisation of images with one channel.
        takes_volumes: True if it takes volumes instead of pictures.
    """

    minimum_size: int
    colour: PixelNormalisation
    grey: PixelNormalisation
    takes_volumes: bool = False


_HALF_NORMALISATION = (PixelNormalisation((0.5,) * 3, (0.5,) * 3), PixelNormalisation((0.5,), (0.5,)))
_LITE_NORMALISATION = (
    PixelNormalisation((127 / 255,) * 3, (128 / 255,) * 3),
    PixelNormalisation((127 / 255,), (128 / 255,)),
)
# For grey images: the mean over the three channels, because no value fits all three.
_IMAGENET_NORMALISATION = (
    PixelNormalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    PixelNormalisation((0.449,), (0.226,)),
)

TRAITS_BY_ARCHITECTURE: dict[Architecture, ArchitectureTraits] = {
    "densenet121": ArchitectureTraits(32, *_IMAGENET_NORMALISATION),
    "resnet18": ArchitectureTraits(32, *_IMAGENET_NORMALISATION),
    "vgg11": ArchitectureTraits(32, *_IMAGENET_NORMALISATION),
    "efficientnet_lite0": ArchitectureTraits(32, *_LITE_NORMALISATION),
    "fedsld_cnn": ArchitectureTraits(16, *_HALF_NORMALISATION),
    "femnist_cnn": ArchitectureTraits(16, *_HALF_NORMALISATION),
    "unifed_vgg11": ArchitectureTraits(32, *_HALF_NORMALISATION),
    "unifed_resnet18": ArchitectureTraits(32, *_HALF_NORMALISATION),
    "tiny_cnn": ArchitectureTraits(16, *_HALF_NORMALISATION),
    "tiny_unet": ArchitectureTraits(8, *_HALF_NORMALISATION),
    "tiny_cnn_3d": ArchitectureTraits(8, *_HALF_NORMALISATION, takes_volumes=True),
}


# TorchXRayVision's networks see pixels from -1024 to 1024.
_XRAY_NORMALISATION = (PixelNormalisation((0.5,) * 3, (0.5 / 1024,) * 3), PixelNormalisation((0.5,), (0.5 / 1024,)))


def get_architecture_traits(architecture: str) -> ArchitectureTraits:
    """Return the traits of an architecture; external networks accept any size and use ImageNet's normalisation."""
    if not is_external_network(architecture):
        return TRAITS_BY_ARCHITECTURE[cast(Architecture, architecture)]
    return ArchitectureTraits(
        1, *(_XRAY_NORMALISATION if architecture.startswith("torchxrayvision:") else _IMAGENET_NORMALISATION)
    )


class ModelSpec(BaseModel):
    """The ``[model]`` table of an experiment.

    Attributes:
        architecture: Name of the backbone: one of ours, or another library's (:func:`is_external_network`).
        task: ``multi_label``: each class is present or absent. ``multi_class``: exactly one is present.
            ``segmentation`` and ``exclusive_segmentation``: the same for each pixel (:data:`Task`).
        channels: Input channels of the backbone; images with another number of channels are converted.
        image_size: Side in pixels to which the network resizes images; for a network of volumes depth, height and
            width in voxels. With ``patch_size`` images are not resized, and this is the usual size of a whole image.
        patch_size: Side of the patches, or depth, height and width of those of volumes, on which the network trains,
            and of the window that slides over a whole image; None for whole images. Segmentation only.
        patch_overlap: Share of a window that the next window covers again, along each axis.
        patch_blending: Weights with which overlapping windows are averaged: ``gaussian`` gives less weight to the
            borders of a window, ``constant`` the same to all its pixels.
        kernel_sizes: For ``monai:DynUNet``, the side of the convolutions of each level along each axis, from the full
            resolution down; None for four levels with sides of 3.
        strides: For ``monai:DynUNet``, the factor by which each level is smaller than the level before, along each
            axis; 1 at the first level. None halves all axes.
        head: Name of the dense layer in a plug-in's network that the run's head replaces; ``new`` for a network that
            returns features. None means ``new``, but a network that seems to return class scores is then rejected.
        neck: Width of the dense layer between backbone and head; None for no such layer.
        dropout: Dropout probability after the neck; ``unifed_vgg11`` has its own dropout besides.
        norm: ``group`` replaces batch normalisation, which mixes the images of a batch, by group normalisation.
        train: The trained part; the other layers are frozen. ``all``; ``head``; ``neck``: neck and head; ``last:N``:
            neck, head and the last N layers of the backbone that have parameters; ``lora:RANK``: neck, head and LoRA
            factors of this rank for the backbone's weights. With ``head`` and ``neck`` the features of the backbone are
            standardised.
        frozen_sha256: Hash of the frozen part; the coordinator writes it into the plan.
        weights: Local safetensors file of pretrained weights, or the folder of a finished run, relative to the
            experiment's folder.
        weights_sha256: The required hash of the file ``weights``.
        mean: Pixel mean per channel after division by 255; default by architecture.
        std: Pixel standard deviation per channel after division by 255; default by architecture.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    architecture: Annotated[Architecture, accept_names_matching(_EXTERNAL_NAME)]
    task: Task = "multi_label"
    channels: Literal[1, 3] = 3
    image_size: ImageSize
    patch_size: ImageSize | None = None
    patch_overlap: Annotated[float, Field(ge=0, le=0.9)] = 0.5
    patch_blending: Literal["gaussian", "constant"] = "gaussian"
    kernel_sizes: LevelSides | None = None
    strides: LevelSides | None = None
    head: Annotated[str, Field(min_length=1)] | None = None
    neck: Annotated[int, Field(ge=1, le=65536)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3
    norm: Literal["batch", "group"] = "batch"
    train: Annotated[str, Field(pattern=r"^(all|head|neck|last:[1-9][0-9]{0,3}|lora:[1-9][0-9]{0,3})$")] = "all"
    frozen_sha256: Sha256 | None = None
    weights: Annotated[str, Field(min_length=1)] | None = None
    weights_sha256: Sha256 | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None

    @field_validator("image_size", "patch_size")
    @classmethod
    def _check_image_size(cls, size: int | VolumeSize | None, info: ValidationInfo) -> int | VolumeSize | None:
        architecture: Architecture | None = info.data.get("architecture")  # missing if it has a fault itself
        if not architecture or size is None:
            return size
        traits = get_architecture_traits(architecture)
        takes_any = architecture.startswith(_PREFIXES_OF_ANY_DIMENSIONS)
        if isinstance(size, tuple) and not traits.takes_volumes and not takes_any:
            problem = f"{architecture} takes pictures, whose image_size is one number"
            raise ValueError(f"{problem}; volumes go into {VOLUME_NETWORKS}, got {list(size)}")
        if isinstance(size, int) and traits.takes_volumes:
            raise ValueError(f"{architecture} takes volumes: write [depth, height, width] in voxels, got {size}")
        smallest = min(size) if isinstance(size, tuple) else size
        if smallest < traits.minimum_size:
            minimum = traits.minimum_size
            raise ValueError(f"{architecture} needs images of at least {minimum} pixels a side, got {smallest}")
        return size

    @field_validator("head")
    @classmethod
    def _check_head(cls, head: str | None, info: ValidationInfo) -> str | None:
        architecture: Architecture | None = info.data.get("architecture")
        if head and architecture and not architecture.startswith(PLUGIN_PREFIX):
            raise ValueError(f"{architecture} comes without its classifier; only a network of your own needs this key")
        return head

    @field_validator("train")
    @classmethod
    def _check_train_and_neck(cls, train: str, info: ValidationInfo) -> str:
        neck = info.data.get("neck")
        if train == "neck" and neck is None:
            raise ValueError("there is no neck to train; set model.neck to its width, or train the head")
        if train == "head" and neck is not None:
            raise ValueError("the neck would keep its random weights; train the neck, or leave model.neck out")
        return train

    @field_validator("frozen_sha256")
    @classmethod
    def _check_frozen_hash(cls, sha256: str | None, info: ValidationInfo) -> str | None:
        if sha256 and info.data.get("train") == "all":
            raise ValueError('nothing is frozen under train = "all"; leave it out')
        return sha256

    @field_validator("weights_sha256")
    @classmethod
    def _check_weights_hash(cls, sha256: str | None, info: ValidationInfo) -> str | None:
        if sha256 and "weights" in info.data and info.data["weights"] is None:
            raise ValueError("a hash was given but no weights file; name the file in weights")
        return sha256

    @field_validator("mean", "std")
    @classmethod
    def _check_value_per_channel(
        cls, values: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        channels: int | None = info.data.get("channels")
        if values is not None and channels and len(values) != channels:
            raise ValueError(f"expected one value for each of {channels} channels, got {len(values)}")
        return values

    @model_validator(mode="after")
    def _check_network_of_task(self) -> Self:
        networks = (*SEGMENTATION_NETWORKS, *MONAI_SEGMENTATION)
        is_own = self.architecture.startswith(PLUGIN_PREFIX)
        segments = self.architecture in networks or (is_own and is_segmentation(self.task))
        if self.plugin_head is not None and is_segmentation(self.task):
            problem = "head names the last layer of a classifier; a network for segmentation returns its feature map"
            raise ValueError(f"{problem}, to which the run adds a row for each class. Leave head out")
        if segments and not is_segmentation(self.task):
            problem = f"{self.architecture} gives a label for each pixel, and model.task asks for one for each image"
            raise ValueError(f'{problem}: set model.task = "segmentation", or "exclusive_segmentation"')
        if is_segmentation(self.task) and not segments:
            problem = f"{self.architecture} gives a label for each image, and model.task asks for one for each pixel"
            raise ValueError(f"{problem}: set model.architecture to one of {', '.join(networks)}, or a plug-in")
        return self

    @model_validator(mode="after")
    def _check_patches(self) -> Self:
        if self.patch_size is None:
            if given := sorted(self.model_fields_set.intersection(PATCH_KEYS) - {"patch_size"}):
                raise ValueError(f"{given[0]} goes with patch_size: without it the network sees whole images")
            return self
        if not is_segmentation(self.task):
            problem = "the label of an image says nothing about one of its patches: patch_size goes with a task"
            raise ValueError(f'{problem} such as "segmentation"')
        if isinstance(self.patch_size, tuple) != self.takes_volumes:
            needed = "[depth, height, width]" if self.takes_volumes else "one number"
            raise ValueError(f"patch_size must be {needed}, as image_size is, got {format_image_size(self.patch_size)}")
        whole = self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)
        if any(side > most for side, most in zip(self.sides, whole, strict=True)):
            size = format_image_size(self.patch_size)
            problem = f"patch_size is {size}, larger than image_size, {format_image_size(self.image_size)}"
            raise ValueError(f"{problem}: a patch is a part of an image")
        return self

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        given = [key for key in LEVEL_KEYS if getattr(self, key) is not None]
        if not given:
            return self
        if self.architecture != PLANNED_NETWORK:
            raise ValueError(f"{given[0]} is for {PLANNED_NETWORK}; {self.architecture} has levels of its own")
        if self.kernel_sizes is None or self.strides is None:
            raise ValueError("kernel_sizes and strides go together, with one entry for each level")
        if len(self.kernel_sizes) != len(self.strides):
            raise ValueError(f"there are {len(self.kernel_sizes)} kernel_sizes and {len(self.strides)} strides")
        if any(len(level) != len(self.sides) for level in (*self.kernel_sizes, *self.strides)):
            raise ValueError(f"each level of kernel_sizes and strides has {len(self.sides)} numbers, one for each axis")
        if any(side % 2 == 0 for level in self.kernel_sizes for side in level):
            raise ValueError("kernel_sizes are odd: the output of a convolution has the size of its input")
        divisors = [math.prod(axis) for axis in zip(*self.strides, strict=True)]
        if max(self.strides[0]) > 1 or any(side % most for side, most in zip(self.sides, divisors, strict=True)):
            problem = f"strides begin with 1 and divide the input, {self.describe_input()}, by {divisors}"
            raise ValueError(f"{problem} down to the last level: choose sides that they divide")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_patches(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Keep the JSON of models without patches as it was before these keys existed, so that older releases read it.
        table: dict[str, Any] = serialize(self)
        absent = [*([] if self.patch_size else PATCH_KEYS), *([] if self.strides else LEVEL_KEYS)]
        return {key: value for key, value in table.items() if key not in absent}

    @property
    def input_size(self) -> int | VolumeSize:
        """Size of the network's input, in the form of ``image_size``: of a patch, or of a whole image."""
        return self.image_size if self.patch_size is None else self.patch_size

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of the network's input, an image or a patch; depth, height and width of volumes."""
        return self.input_size if isinstance(self.input_size, tuple) else (self.input_size, self.input_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one image or patch in the backbone: the channels, then the sides."""
        return (self.channels, *self.sides)

    def describe_input(self, times: str = "×") -> str:
        """Return the size of one image or patch as text: ``64 × 64 pixels``, or ``48 × 64 × 64 voxels``.

        Args:
            times: The sign between two sides.
        """
        return describe_sides(self.sides, times)

    @property
    def takes_volumes(self) -> bool:
        """True if the network takes volumes."""
        return isinstance(self.image_size, tuple)

    @property
    def plugin_head(self) -> str | None:
        """Name of the last layer of a plug-in's network, which the run's head replaces; None if the network returns
        features.
        """
        return None if self.head == NEW_HEAD else self.head

    @property
    def backbone_frozen(self) -> bool:
        """True if the whole backbone is frozen."""
        return self.train in ("head", "neck")

    @property
    def norm_frozen(self) -> bool:
        """True if no normalisation layer of the backbone is trained."""
        return self.backbone_frozen or self.train.startswith("lora:")

    @property
    def normalisation(self) -> PixelNormalisation:
        """The normalisation of pixels: this table's mean and std, or by default those of the architecture."""
        traits = get_architecture_traits(self.architecture)
        default = traits.grey if self.channels == 1 else traits.colour
        return PixelNormalisation(self.mean or default.mean, self.std or default.std)


# ---------------------------------------------------------------------- a saved model's files

TENSORS_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"


def make_unreadable_model_fault(path: Path, error: OSError) -> Fault:
    """Return the fault of a model file that cannot be read."""
    remedy = "Name the folder of a finished run, or of a model that a site keeps."
    return Fault(str(path), f"cannot be read: {error.strerror}.", remedy)


def find_model_folder_faults(folder: Path) -> list[Fault]:
    """Return the faults of a folder that should contain a saved model: missing or unreadable files."""
    for name in (DESCRIPTION_FILE, TENSORS_FILE):
        try:
            (folder / name).open("rb").close()
        except OSError as error:
            return [make_unreadable_model_fault(folder / name, error)]
    return []
