"""Build backbones by name; a backbone maps images ``(batch, channels, size, size)`` to feature vectors.

External backbones come from timm, torchvision, MONAI, TorchXRayVision and plug-ins (packages that a site installed).
They are built without their classifier and with random weights; no weights are downloaded.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from polyclinic.common.errors import BadInput, Fault, quote_names, suggest_nearest_name
from polyclinic.common.models.zoo.imagenet_networks import DenseNet121, ResNet18
from polyclinic.common.models.zoo.networks import (
    EFFICIENTNET_WIDTH,
    EfficientNetLite0,
    fedsld_cnn,
    femnist_cnn,
    find_statistics_beside_batch_norm,
    is_batch_norm,
    make_batch_norms_single_value_safe,
    replace_with_group_norm,
    tiny_cnn,
    tiny_cnn_3d,
    unifed_resnet18,
    unifed_vgg11,
    vgg11,
)
from polyclinic.common.models.zoo.spec import (
    MONAI_SEGMENTATION,
    NEW_HEAD,
    Architecture,
    ModelSpec,
    is_external_network,
    is_segmentation,
)
from polyclinic.common.models.zoo.unet import UNET_WIDTH, TinyUNet
from polyclinic.common.models.zoo.unet_planning import UNetLevels
from polyclinic.common.plugins import (
    MODELS,
    PLUGIN_PREFIX,
    format_plugin_user_name,
    is_local_plugin_name,
    load_plugin_entry_point,
)
from polyclinic.common.system.packages import import_torchvision, refuse_missing_packages
from polyclinic.data.base.spec import VolumeSize, describe_sides

ARCHITECTURE_KEY = "model.architecture"
"""The key of an experiment that names the network, for faults."""
USUAL_SIZES = (32, 64, 96, 128, 160, 224, 256, 299, 384)
"""Image sizes in pixels that are tried where the requested size does not fit."""
_TRIED_VOLUME_SIZES = 3
"""Number of the usual sizes that are tried for volumes, which take more memory."""
CLASSIFIER_NAMES = ("fc", "_fc", "last_linear", "class_layers", "classifier", "heads", "head")
"""Names of the last layers of torchvision's and MONAI's classifiers."""
_TRAINING_CALLS = 3
"""Number of training calls after which a check looks for changed state outside a network's ``state_dict``."""
_MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), "forward"))
"""Attributes that every torch module has."""
SWIN_UNETR = "SwinUNETR"
"""MONAI's network for segmentation; only its encoder is used, as a backbone for volumes."""
_SWIN_FEATURES = 48
"""Feature size of SwinUNETR in the public weights."""
_UNET_FEATURES = (32, 64, 128, 256)
"""Number of features at each level of MONAI's DynUNet; its UNet has all levels but the last."""
MONAI_CLASSIFIERS = r"(DenseNet|SEResNet|SEResNext|resnet)\d+"
"""Regular expression of MONAI's supported classifiers, besides its EfficientNets."""


def build_external_backbone(spec: ModelSpec) -> tuple[nn.Module, int]:
    """Build an external backbone with random weights; return it with its number of features.

    Raises:
        BadInput: If the network does not exist, does not accept the image size, or lacks the layer ``model.head``.
    """
    source, _, inner = spec.architecture.partition(":")
    if spec.strides is not None:
        module = _build_planned_unet(spec)
    else:
        module = _BUILDERS_BY_SOURCE[source](inner, spec.channels, spec.input_size)
    features = _probe_with_noise_image(module, spec)  # the call also initialises lazy layers
    if spec.plugin_head is not None:
        logits = features
        head = _detach_network_head(module, spec, spec.plugin_head)
        try:
            features = _probe_with_noise_image(module, spec)
        except BadInput as bad:  # the network reads the layer's attributes, or reshapes the logits
            problem = f'{format_network_name(spec)} fails without "{spec.head}": {bad.faults[0].problem}'
            raise BadInput([Fault("model.head", problem, "Return the output of that layer as it is.")]) from None
        # The features may belong to several patches, for example.
        if features.shape[1] != head.in_features or not _is_same_output(
            functional.linear(features, head.weight, head.bias), logits
        ):
            raise BadInput([_make_head_position_fault(format_network_name(spec), spec.plugin_head)])
    return module, int(features.shape[1])


def _build_timm_backbone(name: str, channels: int, image_size: int | VolumeSize) -> nn.Module:
    import_torchvision(ARCHITECTURE_KEY)  # timm imports it, and fails with a traceback
    import timm  # takes seconds to import

    if not timm.is_model(name):
        raise _make_unknown_network_error(f"timm:{name}", timm.list_models())
    options: dict[str, Any] = {"pretrained": False, "num_classes": 0, "in_chans": channels}
    try:
        return timm.create_model(name, img_size=image_size, **options)
    except TypeError:  # most networks take images of any size, and have no such option
        return timm.create_model(name, **options)


def _build_torchvision(name: str, channels: int, image_size: int | VolumeSize) -> nn.Module:
    import_torchvision(ARCHITECTURE_KEY)
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise _make_unknown_network_error(f"torchvision:{name}", names)
    builder = models.get_model_builder(name)
    options = {"weights": None}
    if "image_size" in inspect.signature(builder).parameters or name.startswith("vit_"):
        options["image_size"] = image_size  # type: ignore[assignment]
    if name.startswith(("inception", "googlenet")):
        options["init_weights"] = options["aux_logits"] = False  # type: ignore[assignment]
    try:
        network = cast(nn.Module, builder(**options))
    except AssertionError as error:  # a transformer needs a multiple of its patch size
        problem = f"torchvision:{name} does not take images of {image_size} pixels: {str(error).rstrip('!')}."
        remedy = "Use 224, or another multiple of the size of its patches."
        raise BadInput([Fault("model.image_size", problem, remedy)]) from error
    _remove_last_dense_layer(network, f"torchvision:{name}")
    if channels != 3:
        modules = network.named_modules()
        path, first = next((path, module) for path, module in modules if isinstance(module, nn.Conv2d))
        form: dict[str, Any] = {key: getattr(first, key) for key in ("kernel_size", "stride", "padding", "dilation")}
        stem = nn.Conv2d(channels, first.out_channels, bias=first.bias is not None, **form)
        network.set_submodule(path, stem)
    return network


class _SwinEncoder(nn.Module):
    """The encoder of MONAI's SwinUNETR, with its features averaged over the volume.

    Its tensors have the names of the public weights, which begin with ``swinViT``.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.swinViT = encoder

    def forward(self, volumes: Tensor) -> Tensor:
        """Return ``(batch, 768)`` for volumes ``(batch, channels, depth, height, width)``."""
        maps: Tensor = self.swinViT(volumes, True)[-1]
        return maps.mean((2, 3, 4))


def _build_monai_backbone(name: str, channels: int, image_size: int | VolumeSize) -> nn.Module:
    """Build one of MONAI's networks without its last layer; a tuple as ``image_size`` means volumes."""
    refuse_missing_packages(ARCHITECTURE_KEY, "monai")
    from monai.networks import nets

    takes_volumes = isinstance(image_size, tuple)
    if f"monai:{name}" in MONAI_SEGMENTATION:
        return _build_monai_unet(nets, name, channels, dimensions=3 if takes_volumes else 2)
    names = [network for network in dir(nets) if re.fullmatch(MONAI_CLASSIFIERS, network)]
    names += [f"efficientnet-b{number}" for number in range(9)]
    names += [SWIN_UNETR] if takes_volumes else []
    if name not in names:
        raise _make_unknown_network_error(f"monai:{name}", names)
    if name == SWIN_UNETR:
        refuse_missing_packages(ARCHITECTURE_KEY, "einops")  # MONAI imports it for this network alone
        whole: Any = getattr(nets, SWIN_UNETR)(channels, 1, feature_size=_SWIN_FEATURES)
        return _SwinEncoder(whole.swinViT)
    options: dict[str, Any] = {"spatial_dims": 3 if takes_volumes else 2}
    options["n_input_channels" if name.startswith("resnet") else "in_channels"] = channels
    options["out_channels" if name.startswith("DenseNet") else "num_classes"] = 1
    if name.startswith("efficientnet"):
        options |= {"model_name": name, "pretrained": False}
        name = "EfficientNetBN"
    network = cast(nn.Module, getattr(nets, name)(**options))
    _remove_last_dense_layer(network, f"monai:{name}")
    return network


def _build_monai_unet(nets: Any, name: str, channels: int, *, dimensions: int) -> nn.Module:
    """Build one of MONAI's networks for segmentation, which returns a feature map in place of class scores."""
    if name == "UNet":
        widths = _UNET_FEATURES[:-1]
        halvings = [2] * (len(widths) - 1)
        return cast(nn.Module, nets.UNet(dimensions, channels, widths[0], widths, halvings, num_res_units=2))
    levels = len(_UNET_FEATURES)
    strides = [1] + [2] * (levels - 1)
    return _build_dyn_unet(dimensions, channels, [3] * levels, strides, _UNET_FEATURES)


def _build_planned_unet(spec: ModelSpec) -> nn.Module:
    """Build a DynUNet with the levels of the specification."""
    refuse_missing_packages(ARCHITECTURE_KEY, "monai")
    assert spec.kernel_sizes is not None, "checked with the model"
    assert spec.strides is not None, "checked with the model"
    levels = UNetLevels(spec.kernel_sizes, spec.strides)
    return _build_dyn_unet(len(spec.sides), spec.channels, levels.kernel_sizes, levels.strides, levels.features)


def _build_dyn_unet(
    dimensions: int, channels: int, kernel_sizes: Sequence[Any], strides: Sequence[Any], features: Sequence[int]
) -> nn.Module:
    """Build MONAI's DynUNet, which returns a feature map in place of class scores.

    Args:
        dimensions: 2 for pictures, 3 for volumes.
        channels: Number of input channels.
        kernel_sizes, strides, features: One value per level, from the full resolution down.
    """
    from monai.networks.nets.dynunet import DynUNet

    network: Any = DynUNet(dimensions, channels, 1, kernel_sizes, strides, strides[1:], filters=features)
    network.output_block = nn.Identity()
    return cast(nn.Module, network)


def _build_torchxrayvision_backbone(name: str, channels: int, image_size: int | VolumeSize) -> nn.Module:
    refuse_missing_packages(ARCHITECTURE_KEY, "torchxrayvision")
    import_torchvision(ARCHITECTURE_KEY)  # torchxrayvision imports it
    from torchxrayvision import models

    if name != "densenet121":
        raise _make_unknown_network_error(f"torchxrayvision:{name}", ["densenet121"])
    network = cast(nn.Module, models.DenseNet(in_channels=channels, **models.get_densenet_params("densenet121")))
    network.classifier = nn.Identity()
    return network


def _build_plugin_network(name: str, channels: int, image_size: int | VolumeSize) -> nn.Module:
    """Build a plug-in's network by its factory function, or copy the module that was passed to ``pc.simulate``."""
    network = load_plugin_entry_point(MODELS, name)
    if not isinstance(network, nn.Module):
        remedy = "A network is a torch.nn.Module, or a function of (channels, image_size) that returns one."
        if not callable(network):
            raise BadInput(
                [Fault(format_plugin_user_name("model", name), f"is a {type(network).__name__}: {network!r}.", remedy)]
            )
        try:
            network = network(channels, image_size) if _accepts_channels_and_size(network) else network()
        except (Exception, SystemExit) as error:  # code of a plug-in may raise anything
            size = describe_image_size(image_size)
            problem = f"cannot be made for {channels} channels and {size}: {type(error).__name__}: {error}"
            remedy = _suggest_network_function(network) if isinstance(network, type) else remedy
            raise BadInput([Fault(format_plugin_user_name("model", name), problem, remedy)]) from error
    network = getattr(network, "_orig_mod", network)  # the graph of torch.compile would keep the head
    if not isinstance(network, nn.Module):
        problem = f"made a {type(network).__name__}, not a torch.nn.Module."
        raise BadInput([Fault(format_plugin_user_name("model", name), problem)])
    for path, layer in network.named_modules():
        for hook in layer._forward_pre_hooks.values():
            if type(hook).__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"):
                old = type(hook).__module__.rpartition(".")[2]
                problem = f'uses torch.nn.utils.{old} in "{path}", which cannot be copied.'
                remedy = f"Use torch.nn.utils.parametrizations.{old}, or torch.nn.utils.remove_{old}."
                raise BadInput([Fault(format_plugin_user_name("model", name), problem, remedy)])
    # The caller may still use the module, so training must not change it; a change would also rename the plug-in.
    if is_local_plugin_name(name):
        sides = image_size if isinstance(image_size, tuple) else (image_size, image_size)
        network = _copy_network(network, format_plugin_user_name("model", name), torch.zeros(1, channels, *sides))
    network.register_forward_hook(_take_logits)
    return network.float()


def _suggest_network_function(network: type) -> str:
    """Return a remedy with a function that makes a network of this class, with the arguments that have no default."""
    parameters = list(inspect.signature(network).parameters.values())
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    arguments = ", ".join(f"{name}=..." for name in required)
    return f"Give a function that makes it: model=lambda channels, size: {network.__name__}({arguments})."


def _copy_network(network: nn.Module, where: str, image: Tensor) -> nn.Module:
    """Return a copy of a network; lazy normalisation layers cannot be copied, and are first initialised with ``image``.

    Args:
        network: The network.
        where: Name of the network in a fault.
        image: A batch of one image, ``(1, channels, *sides)``.

    Raises:
        BadInput: If the network cannot be copied.
    """
    try:
        return copy.deepcopy(network)
    except Exception:  # raised by torch's lazy buffers, or by code of a plug-in
        was_training = network.training
        try:
            with torch.no_grad():
                network.eval()(image)
            return copy.deepcopy(network.train(was_training))
        except Exception as error:
            problem = f"cannot be copied: {type(error).__name__}: {error}".rstrip(".") + "."
            raise BadInput([Fault(where, problem, "A network must be one that copy.deepcopy copies.")]) from error


def _take_logits(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return ``logits`` of an output that has this attribute (as in the transformers library) or key; else the
    output.
    """
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def _accepts_channels_and_size(factory: Callable[..., Any]) -> bool:
    """Return True if a plug-in's factory should be called with (channels, image size), False if without arguments."""

    def accepts(*arguments: int) -> bool:
        try:
            inspect.signature(factory).bind(*arguments)
        except TypeError:
            return False
        except ValueError:  # a C function has no signature
            return True
        return True

    # If it accepts neither, the call with both arguments raises an error that names the missing ones.
    return accepts(0, 0) or not accepts()


_BUILDERS_BY_SOURCE: Mapping[str, Callable[[str, int, int | VolumeSize], nn.Module]] = {
    "timm": _build_timm_backbone,
    "torchvision": _build_torchvision,
    "monai": _build_monai_backbone,
    "torchxrayvision": _build_torchxrayvision_backbone,
    "plugin": _build_plugin_network,
}


def _make_unknown_network_error(name: str, names: list[str]) -> BadInput:
    source = name.partition(":")[0]
    near = suggest_nearest_name(name, [f"{source}:{network}" for network in names])
    return BadInput([Fault("model.architecture", f'{source} has no network "{name}".', near)])


def _probe_with_noise_image(module: nn.Module, spec: ModelSpec) -> Tensor:
    """Return a network's output for one noise image in evaluation mode, to test that the network works.

    Returns:
        Features ``(1, width)``; in segmentation a feature map ``(1, width, *spatial)``.

    Raises:
        BadInput: If the network does not accept the image, or its output has another shape.
    """
    name = format_network_name(spec)
    channels = spec.channels
    was_training = module.training
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    image = torch.rand(1, *spec.input_shape, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    try:
        with torch.no_grad():
            features = module.eval()(image)
    except Exception as error:  # code of another package may raise anything
        reason = str(error).strip().rstrip(".")
        size = describe_image_size(spec.input_size)
        problem = f"{name} does not take images of {size} and {channels} channels: {reason}."
        if fault := _find_other_channels_fault(module, spec, name):
            raise BadInput([fault]) from error
        remedy = "Each network has sizes of its own."
        for usual in USUAL_SIZES[:_TRIED_VOLUME_SIZES] if spec.takes_volumes else USUAL_SIZES:
            with contextlib.suppress(Exception), torch.no_grad():  # it may raise anything
                module(torch.zeros(1, channels, *[usual] * len(spec.sides), device=device))
                sides = (usual, usual, usual) if spec.takes_volumes else usual
                remedy = f"It takes {describe_image_size(sides)}, for instance."
                break
        raise BadInput([Fault("model.image_size", problem, remedy)]) from error
    module.train(was_training)
    dimensions = 2
    shape = "one vector is needed, (1, width)"
    if is_segmentation(spec.task):
        dimensions = 2 + len(spec.sides)
        shape = "one feature map is needed, (1, width, height, width) for pictures"
    if not isinstance(features, Tensor) or features.ndim != dimensions or len(features) != 1:
        problem = f"returns {_describe_output(features)} for one image; {shape}."
        remedy = _suggest_vector(features)
        raise BadInput([Fault(format_plugin_user_name("model", spec.architecture), problem, remedy)])
    return features


def _find_other_channels_fault(module: nn.Module, spec: ModelSpec, name: str) -> Fault | None:
    """Return a fault with the number of channels that a network accepts at this size; None if it accepts no other
    number.
    """
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    for channels in {1, 3} - {spec.channels}:
        with contextlib.suppress(Exception), torch.no_grad():  # code of another package may raise anything
            module(torch.zeros(1, channels, *spec.sides, device=device))
            problem = f"{name} does not take images of {spec.channels} channels; it takes {channels}."
            remedy = f'Set model.channels = {channels}, in Python settings={{"model.channels": {channels}}}.'
            return Fault("model.channels", problem, remedy)
    return None


def _describe_output(output: Any) -> str:
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {quote_names(map(str, output), limit=5)}"
    return f"a {type(output).__name__} of {len(output)}" if isinstance(output, tuple | list) else type(output).__name__


def _suggest_vector(output: Any) -> str:
    if isinstance(output, Mapping):
        return 'Return the tensor of one entry alone, or call it "logits".'
    if isinstance(output, tuple | list):
        return "Return the tensor of one entry alone: of the features, or of the class scores with head=."
    return ""


# ---------------------------------------------------------------------- networks that contain a head


def _detach_network_head(module: nn.Module, spec: ModelSpec, head: str) -> nn.Linear:
    """Remove the head (last dense layer) of a network, in place, so that the network returns the head's input.

    Args:
        module: The network.
        spec: The ``[model]`` table.
        head: Name of the head in the network.

    Returns:
        The head.

    Raises:
        BadInput: If no dense layer has this name; if the layer is no plain ``nn.Linear``, because it has another
            ``forward``, hooks or a parametrization; or if the network's output is not the layer's output.
    """
    name = format_network_name(spec)
    layers = _find_dense_layers(module)
    if (layer := layers.get(head)) is None:
        present = f"Its dense layers are {quote_names(list(layers), limit=8)}." if layers else "It has no dense layer."
        problem = f'{name} has no torch.nn.Linear "{head}". {present}'
        raise BadInput([Fault("model.head", problem, suggest_nearest_name(head, layers))])
    reasons = {
        "a forward of its own": not _computes_as_plain_layer(layer),
        "hooks": bool(layer._forward_hooks or layer._forward_pre_hooks),
        "a parametrization of its weights": parametrize.is_parametrized(layer),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        problem = f'{name} has a head "{head}" with {reason}, and the run\'s head is a plain torch.nn.Linear.'
        remedy = "End in a plain torch.nn.Linear, and do the rest in a layer before it."
        raise BadInput([Fault("model.head", problem, remedy)])
    scores = torch.linspace(-1e4, 1e4, layer.out_features)
    if not _is_same_output(scores[None], _run_with_layer_output(module, layer, spec, scores)):
        raise BadInput([_make_head_position_fault(name, head)])
    for path, part in list(module.named_modules(remove_duplicate=False)):
        if part is layer:
            module.set_submodule(path, nn.Identity())
    return layer


def _computes_as_plain_layer(layer: nn.Linear) -> bool:
    """Return True if a dense layer, possibly of a subclass, computes the same as ``nn.Linear`` in training and
    evaluation.

    For example, timm's dense layers define ``forward`` anew for TorchScript.
    """
    if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
        return True
    features = 3 * torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    expected = functional.linear(features, layer.weight, layer.bias)
    was_training = layer.training
    try:
        with torch.no_grad():
            return all(_is_same_output(expected, layer.train(mode)(features)) for mode in (True, False))
    except Exception:  # code of another package may raise anything
        return False
    finally:
        layer.train(was_training)


def _find_dense_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return name -> dense layer of a network; a layer with several names is returned under each name."""
    return {name: m for name, m in module.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}


def _run_with_layer_output(module: nn.Module, layer: nn.Module, spec: ModelSpec, scores: Tensor) -> Tensor:
    """Return a network's output for one image, with the output of one of its layers replaced by ``scores``.

    Args:
        module: The network.
        layer: The dense layer or convolution whose output is replaced, in each call.
        spec: The ``[model]`` table.
        scores: One number for each output of the layer; after a convolution, each pixel gets these numbers.
    """

    def return_scores(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (output.ndim - 2)) if isinstance(layer, nn.Conv2d | nn.Conv3d) else (-1,)
        return scores.to(output).reshape(shape).expand_as(output)

    hook = layer.register_forward_hook(return_scores)
    try:
        return _probe_with_noise_image(module, spec)
    finally:
        hook.remove()


def _is_same_output(logits: Tensor, output: Tensor) -> bool:
    """Return True if two outputs are equal up to rounding; on torch's meta device only the shapes are compared."""
    if logits.shape != output.shape or logits.is_meta or output.is_meta:
        return logits.shape == output.shape
    return torch.allclose(logits.to(output), output, rtol=1e-4, atol=1e-6)


def _outputs_scores_of_layer(module: nn.Module, name: str, layer: nn.Module, spec: ModelSpec) -> bool:
    """Return True if a network's output is that of ``layer``, or an increasing odd function of it (a scale, tanh).

    The check replaces the layer's output by fixed numbers that are equal at all pixels, so that a mean or maximum over
    pixels does not change them. After a convolution whose name contains one of :data:`CLASSIFIER_NAMES`, any function
    that never falls (ReLU) is accepted, too.

    Args:
        module: The network.
        name: Name of the layer in the network.
        layer: A dense layer or a 1x1 convolution.
        spec: The ``[model]`` table.
    """
    scores = torch.linspace(-3, 3, int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels))  # type: ignore[arg-type]
    up, down = (_run_with_layer_output(module, layer, spec, sign * scores)[0].cpu() for sign in (1, -1))
    if isinstance(layer, nn.Conv2d | nn.Conv3d) and set(CLASSIFIER_NAMES) & set(name.split(".")):
        return bool((up.diff() >= 0).all() and up[-1] > up[0])
    return bool(up.any() and (up.diff() > 0).all() and torch.allclose(up, -down, rtol=1e-3, atol=1e-5))


def _make_head_position_fault(network: str, head: str) -> Fault:
    problem = f'{network} does not end with "{head}": its output is not always that layer\'s.'
    remedy = "Name the last layer, and return its logits without sigmoid, softmax or dropout: the loss takes logits."
    return Fault("model.head", problem, remedy)


def find_plugin_network_faults(spec: ModelSpec, classes: int, *, keeps_norm: bool = False) -> list[Fault]:
    """Return the faults that make a plug-in's network unfit for a federation; empty for networks that are no plug-ins.

    A network is unfit if it fails in training mode, has a wrong ``model.head``, has state outside its ``state_dict``,
    or has batch normalisation that cannot be replaced or kept as configured. It is also unfit if it returns class
    scores without ``model.head``. A second head would then be trained after its last layer, and the rows of its last
    layer would be averaged over sites as a part of the backbone.

    Args:
        spec: The ``[model]`` table.
        classes: Number of classes of the run.
        keeps_norm: True if batch normalisation stays at the sites, so that the network must have some, and no other
            running statistics.
    """
    if not spec.architecture.startswith(PLUGIN_PREFIX):
        return []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a network with random weights then has the same result in each check
        try:
            if spec.plugin_head is not None:
                build_external_backbone(spec)
            module = _build_plugin_network(
                spec.architecture.removeprefix(PLUGIN_PREFIX), spec.channels, spec.input_size
            )
            _probe_with_noise_image(module, spec)  # initialises lazy layers
            if spec.norm == "group":
                replace_with_group_norm(copy.deepcopy(module))
        except BadInput as bad:
            return list(bad.faults)
        return (
            _find_own_head_faults(module, spec)
            or _find_unsaved_state_faults(module, spec)
            or _find_norm_faults(module, spec, keeps_norm=keeps_norm)
            or _find_training_mode_faults(module, spec)
            or _find_undeclared_head_faults(module, spec, classes)
        )


def _find_norm_faults(module: nn.Module, spec: ModelSpec, *, keeps_norm: bool) -> list[Fault]:
    """Return a fault if a network's batch normalisation cannot be replaced, or kept at the sites, as configured.

    In both cases all running statistics must be in layers that do nothing but batch normalisation. To keep batch
    normalisation at the sites, the network must also have at least one such layer.

    Args:
        module: The network.
        spec: With ``norm = "group"``, group normalisation replaces batch normalisation, unless it is frozen.
        keeps_norm: True if batch normalisation stays at the sites (``fedbn``).
    """
    if not keeps_norm and (spec.norm != "group" or spec.norm_frozen):
        return []
    where = "method.trunk" if keeps_norm else "model.norm"
    name = format_network_name(spec)
    remedy = 'Use "fedavg".' if keeps_norm else 'Use "batch".'
    try:
        statistics = find_statistics_beside_batch_norm(module, (4, *spec.input_shape))
    except Exception:  # code of another package may raise anything, and the next check reports it
        return []
    if statistics:
        problem = f"{name} has {quote_names(statistics, limit=4)}, which training images change and which "
        problem += "no layer of batch normalisation alone holds."
        return [Fault(where, problem, f"{remedy} Or make the normalisation a layer of its own.")]
    is_replaced = spec.norm == "group" and not spec.norm_frozen
    if keeps_norm and (is_replaced or not any(map(is_batch_norm, module.modules()))):
        return [Fault(where, f'"fedbn" keeps batch normalisation at the sites, and {name} has none.', remedy)]
    return []


def describe_missing_batch_norm(spec: ModelSpec) -> str:
    """Return a warning for ``method.trunk = "fedbn"`` if a network has no batch normalisation, else an empty string.

    With "fedbn" each site keeps its batch normalisation layers, so without such layers it keeps nothing. For a
    plug-in's network this is an error, which :func:`find_plugin_network_faults` reports.
    """
    is_replaced = spec.norm == "group" and not spec.norm_frozen
    if is_replaced or not any(map(is_batch_norm, build_meta_backbone(spec).module.modules())):
        network = f"{format_network_name(spec)}{' with group normalisation' if is_replaced else ''}"
        return f'method.trunk "fedbn" keeps nothing at the sites: {network} has no batch normalisation'
    return ""


def _find_own_head_faults(module: nn.Module, spec: ModelSpec) -> list[Fault]:
    """Return a fault if tensors outside a network's head, such as a temperature, change the scores after the head."""
    if spec.plugin_head is None:
        return []
    probe = copy.deepcopy(module)
    head = probe.get_submodule(spec.plugin_head)
    head_tensors = {id(value) for value in (*head.parameters(), *head.buffers())}
    with torch.no_grad():
        for value in (*probe.parameters(), *probe.buffers()):
            if value.is_floating_point() and id(value) not in head_tensors:
                value.add_(1)
    scores = torch.linspace(-3, 3, int(head.out_features))  # type: ignore[arg-type]
    try:
        output = _run_with_layer_output(probe, head, spec, scores)
    except BadInput:  # the network fails with the changed numbers
        return []
    same = _is_same_output(scores[None], output)
    return [] if same else [_make_head_position_fault(format_network_name(spec), spec.plugin_head)]


def _find_unsaved_state_faults(module: nn.Module, spec: ModelSpec) -> list[Fault]:
    """Return a fault if training changes state that affects a network's output but is not saved with the model.

    Only the floats of the ``state_dict`` are averaged and saved. Running statistics in plain attributes, or an integer
    counter, are not.
    """
    size = (4, *spec.input_shape)
    try:
        trained = copy.deepcopy(module).train()
        loaded = copy.deepcopy(module)
        device = next((value.device for value in module.parameters()), torch.device("cpu"))
        with torch.no_grad():
            for _ in range(_TRAINING_CALLS):
                trained(torch.rand(size, device=device))
        floats = {name: value for name, value in trained.state_dict().items() if value.is_floating_point()}
        loaded.load_state_dict(floats, strict=False)
        outputs = list[Tensor]()
        for network in (loaded, loaded, trained):
            torch.default_generator.manual_seed(0)
            outputs.append(_probe_with_noise_image(network, spec))
    except Exception:  # code of another package may raise anything, and the next check reports it
        return []
    repeatable = torch.equal(outputs[0], outputs[1])
    if not repeatable or torch.allclose(outputs[0], outputs[2], rtol=1e-4, atol=1e-6, equal_nan=True):
        return []
    names = [
        f"{path}.{key}".lstrip(".")
        for path, layer in trained.named_modules()
        for key, value in (*vars(layer).items(), *layer.named_buffers(recurse=False))
        if key not in (*_MODULE_ATTRIBUTES, "num_batches_tracked")
        and not isinstance(value, bool | int | str)
        and not _is_equal_value(value, getattr(loaded.get_submodule(path), key, None))
    ]
    what = quote_names(names, limit=5) if names else "state"
    problem = (
        f"{format_network_name(spec)} changes {what} in training, outside the floats of its state_dict, and uses it."
    )
    remedy = "Register running statistics with register_buffer, as floats: else they are neither averaged nor saved."
    return [Fault(format_plugin_user_name("model", spec.architecture), problem, remedy)]


def _is_equal_value(first: Any, second: Any) -> bool:
    try:
        return bool(torch.equal(first, second)) if isinstance(first, Tensor) else bool((first == second) is True)
    except Exception:  # arrays and somebody else's classes may compare to anything
        return False


def _find_training_mode_faults(module: nn.Module, spec: ModelSpec) -> list[Fault]:
    """Return the faults that show in training mode: an exception, a wrong output, or a head that is not last.

    The call changes the network's state, so the network must not be used afterwards.
    """
    name = format_network_name(spec)
    head = None if spec.plugin_head is None else module.get_submodule(spec.plugin_head)
    probe = torch.linspace(-1e4, 1e4, 2 * head.out_features).reshape(2, -1) if isinstance(head, nn.Linear) else None
    hook = None if head is None else head.register_forward_hook(lambda layer, inputs, output: probe)
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    images = torch.rand(2, *spec.input_shape, device=device)
    try:
        with torch.no_grad():
            output = module.train()(images)
    except Exception as error:  # code of another package may raise anything
        problem = f"{name} fails in training: {type(error).__name__}: {error}".rstrip(".") + "."
        return [Fault(format_plugin_user_name("model", spec.architecture), problem)]
    finally:
        if hook is not None:
            hook.remove()
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        kind = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        problem = f"{name} returns {kind} for two images in training; one vector an image is needed, (2, width)."
        return [Fault(format_plugin_user_name("model", spec.architecture), problem, "Switch auxiliary outputs off.")]
    if probe is not None and not torch.equal(output.cpu(), probe):
        return [_make_head_position_fault(name, spec.plugin_head or "")]
    return []


def _find_undeclared_head_faults(module: nn.Module, spec: ModelSpec, classes: int) -> list[Fault]:
    """Return a fault if a network seems to return class scores although ``model.head`` is not set.

    This is so if its output is the output of a dense layer or a 1x1 convolution, if all numbers are probabilities, or
    if there are as many numbers as classes.
    """
    if spec.head is not None:
        return []
    output = _probe_with_noise_image(module, spec)
    width = int(output.shape[1])
    if is_segmentation(spec.task):
        return [] if width != classes else [_make_class_map_fault(spec, width)]
    dense = {name: layer for name, layer in _find_dense_layers(module).items() if layer.out_features == width}
    heads: dict[str, nn.Module] = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, nn.Conv2d | nn.Conv3d) and layer.out_channels == width and set(layer.kernel_size) == {1}
    }
    last_layers = [
        name for name, layer in (heads | dense).items() if _outputs_scores_of_layer(module, name, layer, spec)
    ]
    is_probability = bool(((output > 0) & (output < 1)).all())  # sigmoid or softmax
    is_probability |= width > 1 and abs(float(output.exp().sum()) - 1) < 1e-4  # log_softmax
    if not last_layers and not is_probability and width != classes:
        return []
    problem = (
        f"{format_network_name(spec)} returns {width} numbers for an image, as a classifier with its own head does."
    )
    line = 'head="{}"' if is_local_plugin_name(spec.architecture) else '[model] head = "{}"'
    remedy = "Return the features before its last layer, or end in a torch.nn.Linear."
    if dense_names := [name for name in last_layers or dense if name in dense]:
        scores = torch.linspace(-1e4, 1e4, width)
        is_last = _is_same_output(scores[None], _run_with_layer_output(module, dense[dense_names[-1]], spec, scores))
        write = "Write" if is_last else f'Return the output of "{dense_names[-1]}" as it is, and write'
        remedy = f"{write} {line.format(dense_names[-1])}: the run's head, with a row a class, takes its place."
    return [Fault("model.head", problem, f"{remedy} If these are features, write {line.format(NEW_HEAD)}.")]


def _make_class_map_fault(spec: ModelSpec, width: int) -> Fault:
    """Return the fault of a network for segmentation that seems to have its own last convolution."""
    problem = f"{format_network_name(spec)} returns {width} numbers for each pixel, one for each class of the run."
    remedy = 'Return the feature map before its last convolution. If these are features, set model.head = "new".'
    return Fault("model.head", problem, remedy)


def describe_image_size(size: int | VolumeSize) -> str:
    """Return an image size as text: ``64 pixels`` or ``48 × 64 × 64 voxels``."""
    return describe_sides(size) if isinstance(size, tuple) else f"{size} pixels"


def format_network_name(spec: ModelSpec) -> str:
    """Return a network's name for messages: the name of the Python object that a user passed, or the architecture."""
    name = spec.architecture
    return format_plugin_user_name("model", name) if is_local_plugin_name(name) else name


def _remove_last_dense_layer(network: nn.Module, name: str) -> None:
    """Replace a network's last dense layer by the identity, in place; earlier layers of the classifier stay."""
    classifier = next((part for part in CLASSIFIER_NAMES if hasattr(network, part)), "")
    layers = [n for n, m in network.named_modules() if n.split(".")[0] == classifier and isinstance(m, nn.Linear)]
    if not layers:
        problem = f"{name} has no dense layer at its end that could be taken off."
        remedy = 'Take one that has, such as "torchvision:mobilenet_v3_small".'
        raise BadInput([Fault("model.architecture", problem, remedy)])
    network.set_submodule(layers[-1], nn.Identity())


class Backbone(NamedTuple):
    """A network from images ``(batch, *spec.input_shape)`` to features ``(batch, width)``, and its number of
    features.
    """

    module: nn.Module
    width: int


_BACKBONES: dict[Architecture, Callable[[int, Any], Backbone]] = {
    "densenet121": lambda channels, size: Backbone(DenseNet121(channels), 1024),
    "resnet18": lambda channels, size: Backbone(ResNet18(channels), 512),
    "vgg11": lambda channels, size: Backbone(vgg11(channels), 512),
    "efficientnet_lite0": lambda channels, size: Backbone(EfficientNetLite0(channels), EFFICIENTNET_WIDTH),
    "fedsld_cnn": lambda channels, size: Backbone(fedsld_cnn(channels, size), 500),
    "femnist_cnn": lambda channels, size: Backbone(femnist_cnn(channels, size), 2048),
    "unifed_vgg11": lambda channels, size: Backbone(unifed_vgg11(channels), 4096),
    "unifed_resnet18": lambda channels, size: Backbone(unifed_resnet18(channels), 512),
    "tiny_cnn": lambda channels, size: Backbone(tiny_cnn(channels), 96),
    "tiny_unet": lambda channels, size: Backbone(TinyUNet(channels, 3 if isinstance(size, tuple) else 2), UNET_WIDTH),
    "tiny_cnn_3d": lambda channels, size: Backbone(tiny_cnn_3d(channels), 64),
}


def build_backbone(spec: ModelSpec) -> Backbone:
    """Build a model's backbone, with random weights from torch's global generator.

    Raises:
        BadInput: If an external backbone cannot be built.
    """
    if is_external_network(spec.architecture):
        backbone = Backbone(*build_external_backbone(spec))
    else:
        backbone = _BACKBONES[spec.architecture](spec.channels, spec.input_size)
    make_batch_norms_single_value_safe(backbone.module)
    return backbone


def build_backbone_for_check(spec: ModelSpec) -> Backbone:
    """Build a backbone to check that it can be built, and to learn the names and shapes of its tensors.

    One of our own backbones is built on torch's meta device, without memory. An external backbone is built in memory,
    because convolutions on the meta device would import torch.compile and sympy, which takes five seconds. torch's
    global random state does not change.

    Raises:
        BadInput: If an external backbone cannot be built.
    """
    if not is_external_network(spec.architecture):
        return build_meta_backbone(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_backbone(spec)


def build_meta_backbone(spec: ModelSpec) -> Backbone:
    """Build a backbone on torch's meta device, without memory, to learn the names and shapes of its tensors.

    A plug-in whose code reads values of tensors is built in memory. torch's global random state does not change.

    Raises:
        BadInput: If an external backbone cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build_backbone(spec)
        except BadInput:
            if not spec.architecture.startswith(PLUGIN_PREFIX):
                raise
            return build_backbone(spec)
