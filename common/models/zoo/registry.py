"""Backbones by name, from images ``(batch, channels, size, size)`` to one vector of features per image.

External backbones are those of timm, torchvision, MONAI, TorchXRayVision and a site's own packages, with random weights
and without their classifier. No weights are downloaded.
"""

import copy
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from common.errors import BadInput, Fault, did_you_mean, quoted
from common.models.zoo.networks import (
    WIDTH,
    EfficientNetLite0,
    fedsld_cnn,
    femnist_cnn,
    make_steady,
    tiny_cnn,
    unifed_resnet18,
    unifed_vgg11,
    vgg11,
)
from common.models.zoo.spec import Architecture, ModelSpec, is_external
from common.plugins import MODELS, PLUGIN, describe_plugin, is_local_name, load_entry_point

USUAL_SIZES = (32, 64, 96, 128, 160, 224, 256, 299, 384)
"""Image sizes in pixels that are tried where the requested size does not fit."""
CLASSIFIERS = ("fc", "_fc", "last_linear", "class_layers", "classifier", "heads", "head")
"""Names of the last layers of torchvision's and MONAI's classifiers."""
MONAI_CLASSIFIERS = r"(DenseNet|SEResNet|SEResNext|resnet)\d+"
"""Pattern of MONAI's networks that are supported beside its EfficientNets."""


def external_backbone(spec: ModelSpec) -> tuple[nn.Module, int]:
    """Return a new external backbone and the width of its features, with values from torch's random state.

    Raises:
        BadInput: If there is no such network, it does not take these images, or has no such head.
    """
    source, _, inner = spec.architecture.partition(":")
    module = _SOURCES[source](inner, spec.channels, spec.image_size)
    features = _apply_to_one_image(module, spec)  # a lazy layer becomes a dense one
    if spec.head is not None:
        _detach_head(module, spec)
        features = _apply_to_one_image(module, spec)
    return module, int(features.shape[1])


def _build_timm(name: str, channels: int, image_size: int) -> nn.Module:
    import timm  # takes seconds to import

    if not timm.is_model(name):
        raise _raise_unknown_network(f"timm:{name}", timm.list_models())
    options: dict[str, Any] = {"pretrained": False, "num_classes": 0, "in_chans": channels}
    try:
        return timm.create_model(name, img_size=image_size, **options)
    except TypeError:  # most networks take images of any size, and have no such option
        return timm.create_model(name, **options)


def _build_torchvision(name: str, channels: int, image_size: int) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise _raise_unknown_network(f"torchvision:{name}", names)
    builder = models.get_model_builder(name)
    options = {"weights": None}
    if "image_size" in inspect.signature(builder).parameters or name.startswith("vit_"):
        options["image_size"] = image_size  # type: ignore[assignment]
    if name.startswith(("inception", "googlenet")):
        options["init_weights"] = options["aux_logits"] = False  # type: ignore[assignment]
    network = cast(nn.Module, builder(**options))
    _remove_classifier(network, f"torchvision:{name}")
    if channels != 3:
        _replace_first_convolution(network, channels)
    return network


def _build_monai(name: str, channels: int, image_size: int) -> nn.Module:
    """Build one of MONAI's classifiers for images of two dimensions."""
    _refuse_missing("monai")
    from monai.networks import nets

    names = [network for network in dir(nets) if re.fullmatch(MONAI_CLASSIFIERS, network)]
    names += [f"efficientnet-b{number}" for number in range(9)]
    if name not in names:
        raise _raise_unknown_network(f"monai:{name}", names)
    options: dict[str, Any] = {"spatial_dims": 2}
    options["n_input_channels" if name.startswith("resnet") else "in_channels"] = channels
    options["out_channels" if name.startswith("DenseNet") else "num_classes"] = 1
    if name.startswith("efficientnet"):
        options |= {"model_name": name, "pretrained": False}
        name = "EfficientNetBN"
    network = cast(nn.Module, getattr(nets, name)(**options))
    _remove_classifier(network, f"monai:{name}")
    return network


def _build_torchxrayvision(name: str, channels: int, image_size: int) -> nn.Module:
    _refuse_missing("torchxrayvision")
    from torchxrayvision import models

    if name != "densenet121":
        raise _raise_unknown_network(f"torchxrayvision:{name}", ["densenet121"])
    network = cast(nn.Module, models.DenseNet(in_channels=channels, **models.get_densenet_params("densenet121")))
    network.classifier = nn.Identity()
    return network


def _refuse_missing(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        problem = f"{package} is not installed."
        raise BadInput([Fault("model.architecture", problem, f"pip install {package}")])


def _build_plugin(name: str, channels: int, image_size: int) -> nn.Module:
    """Build the network of a plug-in: of a factory, or a copy of a module that was given to ``polyclinic.simulate``."""
    made = load_entry_point(MODELS, name)
    if not isinstance(made, nn.Module):
        try:
            made = made(channels, image_size) if _accepts_two_arguments(made) else made()
        except (Exception, SystemExit) as error:  # somebody else's code: it may raise anything
            problem = f"cannot be made for {channels} channels and {image_size} pixels: {type(error).__name__}: {error}"
            remedy = "A network is a torch.nn.Module, or a function of (channels, image_size) that returns one."
            raise BadInput([Fault(describe_plugin("model", name), problem, remedy)]) from error
    if not isinstance(made, nn.Module):
        problem = f"made a {type(made).__name__}, not a torch.nn.Module."
        raise BadInput([Fault(describe_plugin("model", name), problem)])
    if is_local_name(name):  # somebody may hold it: training must not change it, nor make it another plug-in
        made = copy.deepcopy(made)
    return made.float()


def _accepts_two_arguments(factory: Callable[..., Any]) -> bool:
    """Return False for a factory without parameters for channels and size, such as a module's class or ``resnet18``."""
    try:
        signature = inspect.signature(factory)
        signature.bind(0, 0)
    except TypeError:
        try:
            signature.bind()
        except TypeError:
            return True  # the call fails, and its error names what is missing
        return False
    except ValueError:  # a function of C has no signature
        return True
    return True


_SOURCES: Mapping[str, Callable[[str, int, int], nn.Module]] = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
    "monai": _build_monai,
    "torchxrayvision": _build_torchxrayvision,
    "plugin": _build_plugin,
}


def _raise_unknown_network(name: str, names: list[str]) -> BadInput:
    source = name.partition(":")[0]
    near = did_you_mean(name, [f"{source}:{network}" for network in names])
    return BadInput([Fault("model.architecture", f'{source} has no network "{name}".', near)])


def _apply_to_one_image(module: nn.Module, spec: ModelSpec) -> Tensor:
    """Return a network's output ``(1, width)`` for one image of noise, in evaluation mode, which changes no state.

    Raises:
        BadInput: If the network does not take the image, or does not return a vector.
    """
    name, channels, size = describe_network(spec), spec.channels, spec.image_size
    was_training = module.training
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    image = torch.rand(1, channels, size, size, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    try:
        with torch.no_grad():
            features = module.eval()(image)
    except Exception as error:  # somebody else's code: it may raise anything
        reason = str(error).strip().rstrip(".")
        problem = f"{name} does not take images of {size} pixels and {channels} channels: {reason}."
        raise BadInput([Fault("model.image_size", problem, _find_fitting_size(module, channels, device))]) from error
    module.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 1:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        problem = f"{name} returns {shape} for one image; one vector is needed, (1, width)."
        raise BadInput([Fault(describe_plugin("model", spec.architecture), problem)])
    return features


# ---------------------------------------------------------------------- networks with a head of their own


def _detach_head(module: nn.Module, spec: ModelSpec) -> None:
    """Replace the layer ``model.head`` by the identity, in place, so that the network returns that layer's input.

    Raises:
        BadInput: If there is no such dense layer, or the network's output is not the layer's.
    """
    assert spec.head is not None
    name, layers = describe_network(spec), {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    if (head := layers.get(spec.head)) is None:
        present = f"Its dense layers are {quoted(list(layers), limit=8)}." if layers else "It has no dense layer."
        problem = f'{name} has no torch.nn.Linear "{spec.head}". {present}'
        raise BadInput([Fault("model.head", problem, did_you_mean(spec.head, layers))])
    logits = list[Tensor]()
    hook = head.register_forward_hook(lambda layer, inputs, output: logits.append(output))
    output = _apply_to_one_image(module, spec)
    hook.remove()
    if not logits or logits[-1].shape != output.shape or not (output.is_meta or torch.equal(logits[-1], output)):
        problem = f'{name} does not end with "{spec.head}": its output is not that layer\'s.'
        remedy = "Name the last layer, and return its logits without sigmoid or softmax: the loss applies them."
        raise BadInput([Fault("model.head", problem, remedy)])
    parent, _, last = spec.head.rpartition(".")
    setattr(module.get_submodule(parent), last, nn.Identity())


def head_faults(spec: ModelSpec, classes: int) -> list[Fault]:
    """Return the faults of ``model.head``, and one for a network that returns class scores and does not name its head.

    Behind class scores a second head would be trained, and the user's class rows averaged as a part of the backbone.
    """
    if not spec.architecture.startswith(PLUGIN):
        return []
    with torch.random.fork_rng(devices=[]):
        try:
            module, width = external_backbone(spec)
        except BadInput as bad:
            return list(bad.faults)
    if spec.head is not None or width != classes:
        return []
    problem = (
        f"{describe_network(spec)} returns {width} numbers for an image, one a class: scores of its own classifier."
    )
    layers = [
        name for name, part in module.named_modules() if isinstance(part, nn.Linear) and part.out_features == width
    ]
    if not layers:
        return [Fault("model.head", problem, "Return the features before its last layer, or end in a torch.nn.Linear.")]
    line = f'head="{layers[-1]}"' if is_local_name(spec.architecture) else f'[model] head = "{layers[-1]}"'
    return [Fault("model.head", problem, f"Write {line}: the run's head, with a row a class, takes its place.")]


def describe_network(spec: ModelSpec) -> str:
    """Return a network's name in messages: that of the object which a user passed, or the architecture."""
    return describe_plugin("model", spec.architecture) if is_local_name(spec.architecture) else spec.architecture


def _find_fitting_size(module: nn.Module, channels: int, device: torch.device) -> str:
    """Name the smallest usual image size that a network takes."""
    for size in USUAL_SIZES:
        try:
            with torch.no_grad():
                module(torch.zeros(1, channels, size, size, device=device))
        except Exception:  # somebody else's code: it may raise anything
            continue
        return f"It takes {size} pixels, for instance."
    return "Each network has sizes of its own."


def _remove_classifier(network: nn.Module, name: str) -> None:
    """Remove the last dense layer; earlier layers of the classifier stay."""
    place = next((part for part in CLASSIFIERS if hasattr(network, part)), "")
    layers = [n for n, m in network.named_modules() if n.split(".")[0] == place and isinstance(m, nn.Linear)]
    if not layers:
        problem = f"{name} has no dense layer at its end that could be taken off."
        raise BadInput([Fault("model.architecture", problem, 'Try the same network as "timm:...".')])
    parent, _, last = layers[-1].rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())


def _replace_first_convolution(network: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for another number of channels."""
    modules = network.named_modules()
    name, first = next((name, module) for name, module in modules if isinstance(module, nn.Conv2d))
    parent, _, last = name.rpartition(".")
    stem = nn.Conv2d(
        channels,
        first.out_channels,
        cast(Any, first.kernel_size),
        cast(Any, first.stride),
        cast(Any, first.padding),
        cast(Any, first.dilation),
        bias=first.bias is not None,
    )
    setattr(network.get_submodule(parent), last, stem)


class Backbone(NamedTuple):
    """A feature extractor ``(batch, channels, size, size) -> (batch, width)``, with the width of its features."""

    module: nn.Module
    width: int


def _build_torchvision_backbone(architecture: Literal["densenet121", "resnet18"], channels: int) -> nn.Module:
    """Build torchvision's network without its head, with features after global average pooling."""
    from torchvision import models  # takes seconds to import

    network = models.get_model(architecture, weights=None)
    is_dense = architecture == "densenet121"
    if channels != 3:  # its first convolution for other channels, initialised in torchvision's way
        stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_in" if is_dense else "fan_out", nonlinearity="relu")
        setattr(network.features if is_dense else network, "conv0" if is_dense else "conv1", stem)
    setattr(network, "classifier" if is_dense else "fc", nn.Identity())
    return cast(nn.Module, network)


_BACKBONES: dict[Architecture, Callable[[int, int], Backbone]] = {
    "densenet121": lambda channels, size: Backbone(_build_torchvision_backbone("densenet121", channels), 1024),
    "resnet18": lambda channels, size: Backbone(_build_torchvision_backbone("resnet18", channels), 512),
    "vgg11": lambda channels, size: Backbone(vgg11(channels), 512),
    "efficientnet_lite0": lambda channels, size: Backbone(EfficientNetLite0(channels), WIDTH),
    "fedsld_cnn": lambda channels, size: Backbone(fedsld_cnn(channels, size), 500),
    "femnist_cnn": lambda channels, size: Backbone(femnist_cnn(channels, size), 2048),
    "unifed_vgg11": lambda channels, size: Backbone(unifed_vgg11(channels), 4096),
    "unifed_resnet18": lambda channels, size: Backbone(unifed_resnet18(channels), 512),
    "tiny_cnn": lambda channels, size: Backbone(tiny_cnn(channels), 96),
}


def new_backbone(architecture: Architecture, channels: int, image_size: int, head: str | None = None) -> Backbone:
    """Return a new backbone with values from torch's random state.

    Raises:
        BadInput: If an external backbone cannot be made.
    """
    if is_external(architecture):
        spec = ModelSpec(architecture=architecture, channels=cast(Any, channels), image_size=image_size, head=head)
        backbone = Backbone(*external_backbone(spec))
    else:
        backbone = _BACKBONES[architecture](channels, image_size)
    for layer in backbone.module.modules():
        if getattr(layer, "running_mean", layer) is None:  # it needs other images in evaluation, too
            make_steady(layer)
    return backbone


def meta_backbone(spec: ModelSpec) -> Backbone:
    """Return a backbone on the meta device, whose tensors take no memory, for its names and shapes.

    Only a plug-in whose code reads values, by ``item`` for instance, is made with memory. torch's random state stays.

    Raises:
        BadInput: If an external backbone cannot be made.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return new_backbone(spec.architecture, spec.channels, spec.image_size, spec.head)
        except BadInput:
            if not spec.architecture.startswith(PLUGIN):
                raise
            return new_backbone(spec.architecture, spec.channels, spec.image_size, spec.head)


def first_convolution(backbone: nn.Module) -> str:
    """Return the name of the first convolution's weight; empty where there is no convolution."""
    names = (f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Conv2d))
    return next(names, "")
