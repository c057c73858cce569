"""The gradient of every image of a batch in one pass at a site, and a check that a network allows it.

Opacus returns one gradient row for each element of a layer's batch. Some networks split images first, so that a layer's
batch consists of windows or patches of several images; some networks mix images. Then a row is not the influence of one
image, and clipping the row bounds nothing. So a network is tried on random images before any of the hospital's.

Images must not share a dropout mask either: one more patient would change which images share a mask, and no clipping
bounds that. If a module has parameters beside its layers, Opacus repeats the module's forward pass for all images with
one mask.

All other random numbers in private training come from the site's secret key, never from the run's seed.
"""

import contextlib
import copy
import itertools
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.models.gpu import disable_multi_gpu_batches
from polyclinic.common.models.network import SplitNetwork
from polyclinic.strategies.privacy.noise import NoiseSource

DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class SecretMaskDropout(nn.Module):
    """Dropout whose masks come from a secret key; it drops whole channels if the replaced layer does.

    Attributes:
        p: The dropout rate; networks that fuse their layers read this name.
        sizes: List to which each forward pass in training, also of a copy, appends its number of mask values.
    """

    def __init__(self, rate: float, channels: bool, noise: NoiseSource, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.p, self.channels, self.noise, self.sizes = rate, channels, noise, sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> "SecretMaskDropout":
        return SecretMaskDropout(self.p, self.channels, self.noise, self.sizes).train(self.training)

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return values
        shape = (*values.shape[:2], *[1] * (values.dim() - 2)) if self.channels else values.shape
        if self.sizes is not None:
            self.sizes.append(math.prod(shape))
        if self.p == 0:
            return values
        mask = self.noise.draw_uniform(shape, values.device) >= self.p
        return values * mask / max(1 - self.p, 1e-12)


@contextlib.contextmanager
def replace_dropout_layers(network: nn.Module, noise: NoiseSource) -> Iterator[None]:
    """Replace every dropout layer inside the context by one that draws from the secret noise source."""
    dropouts = [
        (parent, name, layer)
        for parent in network.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, DROPOUT) and layer.p
    ]
    for parent, name, layer in dropouts:
        secret = SecretMaskDropout(layer.p, not isinstance(layer, nn.Dropout), noise)
        setattr(parent, name, secret.train(layer.training))
    try:
        yield
    finally:
        for parent, name, layer in dropouts:
            setattr(parent, name, layer)


@contextlib.contextmanager
def refuse_torch_random_draws(device: torch.device) -> Iterator[None]:
    """Check that nothing inside the context draws from torch's generators, as stochastic depth does.

    Raises:
        BadInput: If something did.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    yield
    if not all(torch.equal(state, generator.get_state()) for state, generator in zip(before, generators, strict=True)):
        problem = "draws random numbers of its own in training, which follow from the run's seed, not from a secret."
        raise BadInput([Fault("model.architecture", problem, "Take a network without stochastic depth.")])


# ---------------------------------------------------------------------- the gradient of every image

PARAMETER_GRADIENT_TOLERANCE = 1e-4
"""Largest change of a gradient by rounding, relative to the parameter's longest gradient; 1e-6 was measured."""
IMAGE_GRADIENT_TOLERANCE = 1e-6
"""Largest change by rounding, relative to an image's whole gradient."""
CONSTANT_BUFFERS: Final = (
    "Take a network whose buffers stay as they are, or keep them out of its state (persistent=False)."
)
_CALLS, _EVALUATIONS = 32, 4
"""Calls of a network before round 1, and of these in evaluation, after which its state must be as before."""
MIN_TESTED_GRADIENT = 1e-10
"""Smallest gradient of a parameter, relative to the whole gradient, that tests the parameter."""


class _LayerForOpacus(nn.Module):
    """Wraps a layer so that Opacus 1.6 can process it.

    The output is a copy, because some networks overwrite it, and Opacus's view must not be overwritten. The input is
    made contiguous, because Opacus silently reads wrong pixels of a convolution's input in another memory format.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        copied: Tensor = self.layer(values.contiguous()).clone()
        return copied


@contextlib.contextmanager
def record_per_image_gradients(network: SplitNetwork) -> Iterator[list[nn.Parameter]]:
    """Record each image's gradient in every backward pass inside the context, which yields the trainable parameters."""
    from opacus.grad_sample import GradSampleModule

    overwriting = [module for module in network.modules() if getattr(module, "inplace", False)]
    learning = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if any(parameter.requires_grad for parameter in child.parameters(recurse=False))
    ]
    for module in overwriting:
        setattr(module, "inplace", False)  # noqa: B010 - torch's types do not know it
    for parent, name, layer in learning:
        setattr(parent, name, _LayerForOpacus(layer))
    hooked = None
    try:
        hooked = GradSampleModule(network, loss_reduction="sum", strict=False)  # pixel statistics are buffers
        with disable_multi_gpu_batches(network.backbone), warnings.catch_warnings():
            # The first layer's input has no gradient, and needs none.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            # Opacus has no fast rule for attention inside an unknown layer; the result is correct but slow.
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet", UserWarning)
            yield [parameter for parameter in network.parameters() if parameter.requires_grad]
    finally:
        if hooked is not None:
            hooked.to_standard_module()
        for parent, name, layer in learning:
            setattr(parent, name, layer)
        for module in overwriting:
            setattr(module, "inplace", True)  # noqa: B010


def pop_per_image_gradients(parameter: nn.Parameter, images: int) -> Tensor:
    """Return each image's gradient of a parameter, ``(images, *its shape)``, and remove it from the parameter.

    If a layer saw several windows of each image, one image after the other, the windows' gradients are added.

    Raises:
        BadInput: If the number of rows is not a multiple of the number of images.
    """
    rows: Tensor = parameter.grad_sample.float()  # type: ignore[attr-defined]
    parameter.grad_sample = None  # type: ignore[attr-defined]
    parameter.grad = None
    if len(rows) == images:
        return rows
    if not len(rows) or len(rows) % images:
        raise _make_mixed_images_error()
    return rows.reshape(images, -1, *parameter.shape).sum(dim=1)


_SEPARATE: WeakKeyDictionary[SplitNetwork, set[tuple[object, ...]]] = WeakKeyDictionary()
"""Checks that a network has passed in this process: number of images, their shape, trainable parameters."""


def check_image_gradients_separate(network: SplitNetwork, images: int, shape: Sequence[int]) -> None:
    """Check with random weights and images that the gradient of an image depends on this image alone.

    Neither the received weights nor the hospital's images are used, so a refusal reveals nothing about them. The random
    weights are new each time, so that nobody can prepare a plan that defeats the check.

    Args:
        network: A network in training mode, with frozen parts frozen.
        images: Number of images that pass through the network at a time.
        shape: Shape of one image, ``(channels, height, width)``.

    Raises:
        BadInput: If the gradient also depends on other images, or cannot be separated from theirs; or if the network's
            state stores information of the images, which would leave with the update and without noise.
    """
    learning = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
    tried = (images, tuple(shape), *learning)
    if tried in _SEPARATE.get(network, ()):
        return
    device = next(network.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed := secrets.randbits(62))
        # A copy with random weights, without dropout, and with usual pixel scaling. Weights of 0, such as those of a
        # residual block's last layer at the start, would hide the block's other layers.
        probe = copy.deepcopy(network)
        probe.pixel_mean.fill_(127.5)
        probe.pixel_std.fill_(64.0)
        for module in probe.modules():
            if isinstance(module, (*DROPOUT, SecretMaskDropout)):
                module.p = 0.0
            elif isinstance(module, _BatchNorm):
                module.reset_running_stats()
        for name, layer in probe.neck.named_children():
            if isinstance(layer, nn.ReLU):
                setattr(probe.neck, name, nn.LeakyReLU(0.5))  # in a narrow neck a closed unit would hide the backbone
        with torch.no_grad():
            for name, parameter in probe.named_parameters():
                drawn = torch.randn_like(parameter)
                if parameter.dim() > 1:
                    parameter.copy_(drawn / math.sqrt(parameter[0].numel()))
                else:
                    parameter.copy_(0.1 * drawn + (0 if name.endswith("bias") else 1))
        first, second = (torch.randint(0, 256, (images, *shape), device=device).float() for _ in range(2))
        _check_gradients_of_random_images(probe, first, second, seed)
    _SEPARATE.setdefault(network, set()).add(tried)


def check_network_state_constant(network: SplitNetwork, images: int, shape: Sequence[int]) -> None:
    """Check with random images that many calls in training and evaluation do not change the network's state.

    Args:
        network: A network in training mode, with frozen parts frozen.
        images: Number of images that pass through the network at a time.
        shape: Shape of one image, ``(channels, height, width)``.

    Raises:
        BadInput: If the network changes its state by itself, perhaps only after some calls.
    """
    device = next(network.parameters()).device
    probe = copy.deepcopy(network)
    state = {name: value.clone() for name, value in probe.state_dict().items() if isinstance(value, Tensor)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for call in range(_CALLS):
            if call == _CALLS - _EVALUATIONS:
                probe.eval()
            probe(torch.randint(0, 256, (images, *shape), device=device).float())
    _refuse_changed_network_state(state, probe)


def _refuse_changed_network_state(state: Mapping[str, Tensor], probe: SplitNetwork) -> None:
    """Check that passes of images through a network have not changed its state.

    Args:
        state: The tensors of the network's ``state_dict`` before the passes.
        probe: The network after the passes.

    Raises:
        BadInput: If a tensor has changed.
    """
    after = probe.state_dict()
    for name, value in state.items():
        if not torch.equal(value, after[name]):
            problem = f'changes "{name.removeprefix("backbone.")}" by itself: what it keeps of images has no noise.'
            raise BadInput([Fault("model.architecture", problem, CONSTANT_BUFFERS)])


def _check_gradients_of_random_images(probe: SplitNetwork, first: Tensor, second: Tensor, seed: int) -> None:
    """Replace images in a series of trials, and check that the gradients of the unchanged images stay equal.

    For every two images some trial replaces only one of them. In a further trial with one more image, each layer must
    get the same number of rows per image as before, and each dropout mask the same number of values per image. This
    finds a layer that sees a table instead of images, and by chance has as many rows as there are images.

    Args:
        probe: A copy of the network with random weights.
        first: The images, ``(images, channels, height, width)``.
        second: Their replacements, of the same shape.
        seed: Seed of torch's random numbers in every trial.

    Raises:
        BadInput: If a check fails, or the network's state has changed.
    """
    images = len(first)
    numbers = torch.arange(images, device=first.device)
    weights = torch.randn(images + 1, len(probe.class_names), device=first.device)
    masks = list[int]()  # each dropout layer adds the size of its mask at every call
    for layer in probe.modules():
        if isinstance(layer, SecretMaskDropout):
            layer.sizes = masks
    state = {name: value.clone() for name, value in probe.state_dict().items() if isinstance(value, Tensor)}
    with record_per_image_gradients(probe) as learning:

        def compute_gradients(batch: Tensor, factors: Tensor) -> tuple[list[Tensor], list[float]]:
            """Return each image's gradient by parameter, and per image the numbers of layer rows and mask values."""
            masks.clear()
            torch.manual_seed(seed)  # the same, should the network draw
            (probe(batch) * factors).sum().backward()
            wholes = [parameter.grad for parameter in learning]
            rows = [len(parameter.grad_sample) for parameter in learning]  # type: ignore[attr-defined]
            by_image = [pop_per_image_gradients(parameter, len(batch)) for parameter in learning]
            sums = [gradients.sum(dim=0)[None].flatten(1) for gradients in by_image]
            if not _are_gradients_almost_equal([whole[None].flatten(1) for whole in wholes if whole is not None], sums):
                raise _make_mixed_images_error()
            return [gradients.flatten(1) for gradients in by_image], [count / len(batch) for count in (*rows, *masks)]

        before = compute_gradients(first, weights[:images])
        _, longer = compute_gradients(torch.cat([first, second[:1]]), weights)
        if longer != before[1]:
            raise _make_mixed_images_error()
        # Two different numbers differ in some bit, so some trial replaces only one of any two images.
        for bit, value in itertools.product(range((images - 1).bit_length()), (0, 1)):
            stays = (numbers >> bit) % 2 == value
            mixed = torch.where(stays.view(-1, *[1] * (first.dim() - 1)), first, second)
            after, _ = compute_gradients(mixed, weights[:images])
            if not _are_gradients_almost_equal([rows[stays] for rows in before[0]], [rows[stays] for rows in after]):
                raise _make_mixed_images_error()
    with torch.no_grad():
        probe.eval()(second)
    _refuse_changed_network_state(state, probe)


def _are_gradients_almost_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Return True if all gradients are finite, and those before and after differ by no more than rounding errors.

    Return False if all gradients of some parameter are 0, because such a parameter tests nothing.

    Args:
        before, after: For each parameter, one row for each image.
    """
    lengths = torch.stack([rows.norm(dim=1) for rows in before])  # (parameters, rows)
    apart = torch.stack([(rows - others).norm(dim=1) for rows, others in zip(before, after, strict=True)])
    longest = lengths.max(dim=1, keepdim=True).values
    whole = lengths.square().sum(dim=0).sqrt()
    near = apart <= PARAMETER_GRADIENT_TOLERANCE * longest + IMAGE_GRADIENT_TOLERANCE * whole
    there = longest > MIN_TESTED_GRADIENT * whole.max()
    return bool(near.all() and there.all() and lengths.isfinite().all())


@contextlib.contextmanager
def refuse_plan_on_error() -> Iterator[None]:
    """Convert any error inside the context into a refusal of the plan.

    Use it where a network is tried with random images. An error that depended on a hospital's images would disclose
    something about them.

    Raises:
        BadInput: If anything is raised.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        problem = f"gives no gradient for each image: {type(error).__name__}: {error}".rstrip(".")
        if isinstance(error, AttributeError) and isinstance(error.obj, _LayerForOpacus):
            problem = f'uses "{error.name}" of a layer outside the call of that layer: no gradient for each image'
        hint = 'Take another network, train less of it (model.train), or set privacy.level = "update".'
        raise BadInput([Fault("model.architecture", f"{problem}.", hint)]) from error


def _make_mixed_images_error() -> BadInput:
    problem = (
        "mixes the images of a batch, takes them apart or has one dropout mask for several: "
        "what one image changes cannot be limited."
    )
    hint = 'Take a network that looks at each image by itself, or privacy.level = "update".'
    return BadInput([Fault("model.architecture", problem, hint)])
