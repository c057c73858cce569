"""The gradient of every image of a batch, in one pass, and whether it can be had.

Opacus gives a row for each image where a layer sees a batch as one. Some networks take images apart first, so that a
layer sees windows or patches of several images as its batch; some mix images. Then a row is not what one image changes,
and to clip it would bound nothing. So a network is tried on random images before any of a hospital's goes through it.

Nor may images share a dropout mask: with one patient more other images share it, and no clipping bounds that. Where a
module has parameters beside its layers, Opacus has its whole forward pass run again for all images with one mask.
"""

import contextlib
import copy
import itertools
import math
import secrets
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import BadInput, Fault
from common.models.gpu import on_first_gpu
from common.models.network import SplitNetwork
from strategies.privacy.secret_draws import DROPOUT, SecretDropout

NEAR = 1e-4
"""How far rounding may move a gradient, as a part of the longest of its parameter; 1e-6 was measured."""
NEARLY_NOTHING = 1e-6
"""The same as a part of an image's whole gradient: what is shorter can be rounding alone."""
LEAST = 1e-10
"""Of an image's whole gradient: a parameter whose is shorter was not tried."""


class _Copied(nn.Module):
    """A layer in a form that Opacus 1.6 can take.

    Its output may be overwritten, as some networks do: Opacus hands out a view that may not. Its input lies channels
    first: of a convolution's input in another order Opacus takes the wrong pixels, without a word.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: Tensor) -> Tensor:
        copied: Tensor = self.layer(values.contiguous()).clone()
        return copied


@contextlib.contextmanager
def gradients_by_image(network: SplitNetwork) -> Iterator[list[nn.Parameter]]:
    """Have every backward pass leave each image's gradient behind; yields the parameters that learn."""
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
        setattr(parent, name, _Copied(layer))
    hooked = None
    try:
        hooked = GradSampleModule(network, loss_reduction="sum", strict=False)  # pixel statistics are buffers
        with on_first_gpu(network.backbone), warnings.catch_warnings():
            # The first layer's input has no gradient, and needs none.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            # Attention in a layer that Opacus does not know is slow here, and right.
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet", UserWarning)
            yield [parameter for parameter in network.parameters() if parameter.requires_grad]
    finally:
        if hooked is not None:
            hooked.to_standard_module()
        for parent, name, layer in learning:
            setattr(parent, name, layer)
        for module in overwriting:
            setattr(module, "inplace", True)  # noqa: B010


def taken_gradients(parameter: nn.Parameter, images: int) -> Tensor:
    """Each image's gradient of a parameter, ``(images, *its shape)``, and nothing left for the next batch.

    Where a layer saw several windows of an image, one after the other, their gradients are added up.

    Raises:
        BadInput: If the layer's rows are no whole number an image.
    """
    rows: Tensor = parameter.grad_sample.float()  # type: ignore[attr-defined]
    parameter.grad_sample = None  # type: ignore[attr-defined]
    parameter.grad = None
    if len(rows) == images:
        return rows
    if not len(rows) or len(rows) % images:
        raise _mixed()
    return rows.reshape(images, -1, *parameter.shape).sum(dim=1)


_SEPARATE: WeakKeyDictionary[SplitNetwork, set[tuple[object, ...]]] = WeakKeyDictionary()
"""What has been tried and found good in this process: images of a pack, their shape, the parameters that learn."""


def refuse_mixed_images(network: SplitNetwork, images: int, shape: Sequence[int]) -> None:
    """Try with random weights and images whether the gradient of an image follows from this image alone.

    Neither the received weights nor any of the hospital's images take part: whether it is refused says nothing of them.
    The weights of the trial are drawn anew each time, so that nobody can look for a plan which they do not suit.

    Args:
        network: In training mode, with what does not learn frozen.
        images: As many as go through it at a time.
        shape: Of one image, ``(channels, height, width)``.

    Raises:
        BadInput: If it follows from other images too, or cannot be told from theirs.
    """
    learning = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
    tried = (images, tuple(shape), *learning)
    if tried in _SEPARATE.get(network, ()):
        return
    device = next(network.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed := secrets.randbits(62))
        probe = _with_random_weights(network)
        first, second = (torch.randint(0, 256, (images, *shape), device=device).float() for _ in range(2))
        _try(probe, first, second, seed)
    _SEPARATE.setdefault(network, set()).add(tried)


def _with_random_weights(network: SplitNetwork) -> SplitNetwork:
    """A copy without dropout that sees pixels in a usual scale.

    Weights of 0, such as those of the last layer of a residual block at the start, would hide what lies behind them.
    """
    probe = copy.deepcopy(network)
    probe.pixel_mean.fill_(127.5)
    probe.pixel_std.fill_(64.0)
    for module in probe.modules():
        if isinstance(module, (*DROPOUT, SecretDropout)):
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
    return probe


def _try(probe: SplitNetwork, first: Tensor, second: Tensor, seed: int) -> None:
    """Replace every image beside every other once, and see whether a gradient moves that should not.

    One image more has to make as many rows more in every layer as each of the others: a layer that sees a table and no
    images may have as many rows as there are images. The same holds for the numbers that a dropout layer draws.

    Raises:
        BadInput: If one does.
    """
    images = len(first)
    numbers = torch.arange(images, device=first.device)
    weights = torch.randn(images + 1, len(probe.class_names), device=first.device)
    masks = _mask_sizes(probe)
    with gradients_by_image(probe) as learning:
        gradients = partial(_gradients, probe, learning, masks, seed=seed)
        before = gradients(first, weights[:images])
        _, longer = gradients(torch.cat([first, second[:1]]), weights)
        if longer != before[1]:
            raise _mixed()
        # Of two numbers one bit differs: one of the two is kept and the other replaced, then the other way round.
        for bit, value in itertools.product(range((images - 1).bit_length()), (0, 1)):
            kept = (numbers >> bit) % 2 == value
            mixed = torch.where(kept.view(-1, *[1] * (first.dim() - 1)), first, second)
            after, _ = gradients(mixed, weights[:images])
            if not _alike([one[kept] for one in before[0]], [one[kept] for one in after]):
                raise _mixed()


def _gradients(
    probe: SplitNetwork,
    learning: Sequence[nn.Parameter],
    masks: list[int],
    images: Tensor,
    weights: Tensor,
    *,
    seed: int,
) -> tuple[list[Tensor], list[float]]:
    """Each image's gradient of each parameter, flat; and an image's share of each layer's rows and dropout's draws.

    Raises:
        BadInput: If they do not add up to the gradient of the batch.
    """
    masks.clear()
    torch.manual_seed(seed)  # the same, should the network draw
    (probe(images) * weights).sum().backward()
    wholes = [parameter.grad for parameter in learning]
    rows = [len(parameter.grad_sample) for parameter in learning]  # type: ignore[attr-defined]
    found = [taken_gradients(parameter, len(images)) for parameter in learning]
    sums = [gradients.sum(dim=0)[None].flatten(1) for gradients in found]
    if not _alike([whole[None].flatten(1) for whole in wholes if whole is not None], sums):
        raise _mixed()
    return [gradients.flatten(1) for gradients in found], [count / len(images) for count in (*rows, *masks)]


def _mask_sizes(probe: SplitNetwork) -> list[int]:
    """A list to which each dropout layer will add how many numbers it would draw, call by call."""
    sizes = list[int]()
    for layer in probe.modules():
        if isinstance(layer, SecretDropout):
            layer.sizes = sizes
    return sizes


def _alike(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether rows are finite, there, and no further from one another than rounding brings them."""
    lengths = torch.stack([rows.norm(dim=1) for rows in before])  # (parameters, rows)
    apart = torch.stack([(one - other).norm(dim=1) for one, other in zip(before, after, strict=True)])
    longest, whole = lengths.max(dim=1, keepdim=True).values, lengths.square().sum(dim=0).sqrt()
    near = apart <= NEAR * longest + NEARLY_NOTHING * whole
    there = longest > LEAST * whole.max()
    return bool(near.all() and there.all() and lengths.isfinite().all())


@contextlib.contextmanager
def no_gradient_an_image() -> Iterator[None]:
    """Turn what a trial raises, in which no image of the hospital takes part, into a refusal of the plan.

    Raises:
        BadInput: If anything is raised.
    """
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        problem = f"gives no gradient for each image: {type(error).__name__}: {error}".rstrip(".")
        hint = 'Take another network, train less of it (model.train), or set privacy.level = "update".'
        raise BadInput([Fault("model.architecture", f"{problem}.", hint)]) from error


def _mixed() -> BadInput:
    problem = (
        "mixes the images of a batch, takes them apart or has one dropout mask for several: "
        "what one image changes cannot be limited."
    )
    hint = 'Take a network that looks at each image by itself, or privacy.level = "update".'
    return BadInput([Fault("model.architecture", problem, hint)])
