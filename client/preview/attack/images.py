"""Training images read out of one update.

*Imprint*: Fowl et al., "Robbing the Fed", ICLR 2022. The first dense layer measures one number of each image, here its
brightness, and its units begin to answer at rising thresholds. The changes of two neighbouring units differ by the
images whose brightness lies between their thresholds: of one such image, the change of the weights over that of the
bias is the image.

*Gradient inversion*: Geiping et al., "Inverting Gradients", NeurIPS 2020. Images are searched whose gradient points
where the update does, from an honest model and plan; the attacker is given the labels.
"""

import base64
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from client.preview.attack.adversary import (
    DENSE,
    Adversary,
    Attempt,
    Picture,
    layers_of,
    pass_pixels_through,
    passed_pixels,
)
from common.data.base.image_set import ImageSet
from common.data.images.pixels import channels_first
from common.data.images.reading import png
from common.models.network import SplitNetwork, backbone_pixels, build, train_mode
from common.models.state import layout_of, read_state
from common.models.zoo.spec import ModelSpec
from common.wire.records import TrainReply
from strategies.local.losses import loss_for
from strategies.local.objective import examples_of

SIZE = 112
CROP, POOL = 6, 4
"""One number of the dense layer's input is of 4 x 4 pixels of the image inside a border of 6."""
ALIKE, NEARLY = 0.99, 0.9
SHOWN = 12
Floats = NDArray[np.float64]


def imprinted(at: Adversary, size: int = SIZE) -> Attempt:
    """Send one crafted model, and read the images out of what comes back.

    Args:
        size: In pixels, to which the network brings images; what is recovered has a quarter of it a side.
    """
    train = at.site.train
    model = {"architecture": "fedsld_cnn", "image_size": size}
    plan = at.plan(model, {"optimizer": "sgd", "lr": 1e3, "batch_size": len(train)})
    network = build(plan.model, at.rows, 1)
    _measure_brightness(network, _others(at))
    reply = at.trains(plan, read_state(network))
    truth = passed_pixels(network, train).flatten(1).double().numpy()
    found = np.zeros((0, truth.shape[1])) if reply is None or reply.update.trunk is None else _read_out(reply, network)
    best, place = _best_matches(truth, found)
    side = math.isqrt(truth.shape[1])
    return Attempt(
        "imprint",
        "Training images out of one update, by a crafted model",
        f"One request with a crafted model of a permitted network (fedsld_cnn, {size} pixels), said to be of a weights "
        f"file that this site does not have, and one large step over "
        f"{len(train)} of this site's training images. Recovered: a correlation above {ALIKE} with the image as "
        f"the network passes it on, at {side} x {side} pixels.",
        int((best > ALIKE).sum()),
        len(train),
        "training images",
        '`level = "private"` (noise: `epsilon`, `privacy_unit`). Masks alone do not stop it: a model can be made that '
        "leaves one hospital alone in the sum. Nor does clipping (`maximum_update_norm`).",
        notes=[f"{int((best > NEARLY).sum())} with a correlation above {NEARLY}; median {float(np.median(best)):.4f}"],
        response=at.response,
        pictures=_pictures(_seen(train, plan.model), found, best, place),
    )


def _others(at: Adversary) -> ImageSet:
    """Choose images that the attacker takes for alike: it learns from them how brightness is spread."""
    return next((part for part in (at.site.test, at.site.validation) if len(part)), at.site.train)


@torch.no_grad()
def _measure_brightness(network: SplitNetwork, alike: ImageSet) -> None:
    """Craft the network: its dense units compare an image's mean with rising thresholds."""
    pass_pixels_through(network)
    dense = layers_of(network).dense
    seen = passed_pixels(network, alike)
    numbers, brightness = seen[0].numel(), seen.mean(dim=(1, 2)).double().numpy()
    dense.weight[:, :numbers] = 1 / numbers
    thresholds = np.quantile(_spread(brightness), (np.arange(len(dense.bias)) + 0.5) / len(dense.bias))
    dense.bias.copy_(-torch.from_numpy(thresholds))


def _spread(brightness: Floats) -> Floats:
    """Make a smooth spread with the mean and the deviation of what was seen: each image widened by a part of it."""
    width = 0.3 * float(brightness.std() or 0.1)
    noise = np.random.default_rng(3).normal(0, width, (64, len(brightness)))
    return np.asarray(brightness + noise).ravel()


def _read_out(reply: TrainReply, network: SplitNetwork) -> Floats:
    """Read candidates for images ``(units, numbers)`` out of an update."""
    assert reply.update.trunk is not None
    places, dense = layout_of(network).slices(), layers_of(network).dense
    used = (dense.weight[0] != 0).numpy()
    weights = reply.update.trunk[places[f"{DENSE}.weight"]].reshape(dense.weight.shape)[:, used].astype(np.float64)
    biases = reply.update.trunk[places[f"{DENSE}.bias"]].astype(np.float64)
    between, alone = -np.diff(weights, axis=0, append=0), -np.diff(biases, append=0)
    answered = np.abs(alone) > 1e-4 * np.abs(biases).max(initial=0)
    return np.asarray(between[answered] / alone[answered, None])


def _seen(images: ImageSet, spec: ModelSpec) -> Floats:
    """Bring images to what they would be at the dense layer's resolution, ``(n, numbers)``, by means over pixels."""
    end = spec.image_size - CROP
    pixels = backbone_pixels(channels_first(images.images).float(), spec)[..., CROP:end, CROP:end]
    return np.asarray(functional.avg_pool2d(pixels, POOL).flatten(1).double().numpy() / 255)


def _best_matches(truth: Floats, found: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Find the highest correlation of each image with any candidate, and which candidate it is."""
    if not len(found):
        return np.zeros(len(truth)), np.zeros(len(truth), np.intp)
    alike = _standard(truth) @ _standard(found).T
    return alike.max(axis=1), alike.argmax(axis=1)


def _standard(rows: Floats) -> Floats:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12))


def _pictures(truth: Floats, found: Floats, best: Floats, place: NDArray[np.intp]) -> list[Picture]:
    shown = [row for row in np.argsort(-best)[:SHOWN] if best[row] > NEARLY]
    return [(_png(truth[row]), _png(found[place[row]])) for row in shown]


def _png(values: Floats) -> str:
    side = int(np.sqrt(len(values)))
    low, high = np.quantile(values, [0.01, 0.99])
    grey = np.clip((values - low) / max(high - low, 1e-9), 0, 1) * 255
    return base64.b64encode(png(grey.reshape(side, side).astype(np.uint8), side)).decode()


STEPS = 120


def inverted(at: Adversary) -> Attempt:
    """Search images whose gradient points where an honest update does."""
    train = at.site.train
    plan = at.plan(
        {"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 0.1, "batch_size": len(train)}
    )
    network = build(plan.model, at.rows, 1)
    reply = at.trains(plan, read_state(network))
    truth = backbone_pixels(channels_first(train.images).float(), plan.model).flatten(1).double().numpy()
    arrived = reply is not None and reply.update.trunk is not None
    found = _searched(reply, network, train) if reply is not None and arrived else np.zeros((0, truth.shape[1]))
    best, place = _best_matches(truth, found)
    return Attempt(
        "gradient inversion",
        "Training images out of one update, by search",
        f"One step from an honest initial model (tiny_cnn, 16 pixels) over {len(train)} training images whose "
        f"labels the attacker was given; {STEPS} steps of search. Recovered: a correlation above {NEARLY}.",
        int((best > NEARLY).sum()),
        len(train),
        "training images",
        'more images in a step; `level = "private"`; under an honest model also `masked_only` with `peers`.',
        notes=[f"median correlation {float(np.median(best)):.3f}, largest {float(best.max()):.3f}"],
        response=at.response,
        pictures=_pictures(truth, found, best, place),
    )


def _searched(reply: TrainReply, network: SplitNetwork, train: ImageSet) -> Floats:
    assert reply.update.trunk is not None
    target = -torch.from_numpy(reply.update.trunk.copy())
    train_mode(network)
    examples = examples_of(train, channels_first(train.images), network.class_names)
    loss = loss_for(network.spec.task, "masked")
    trunk = [value for name, value in network.named_parameters() if not name.startswith("head.")]
    guess = torch.rand(len(train), 1, 16, 16, generator=torch.Generator().manual_seed(4)).mul(255).requires_grad_()
    search = torch.optim.Adam([guess], lr=8.0)
    for _ in range(STEPS):
        search.zero_grad()
        value = loss(network(guess), examples.labels, examples.annotated)
        gradients = torch.autograd.grad(value, trunk, create_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        rough = _roughness(guess) * 1e-4
        (1 - functional.cosine_similarity(flat, target, dim=0) + rough).backward()  # type: ignore[no-untyped-call]
        search.step()
        guess.data.clamp_(0, 255)
    return np.asarray(guess.detach().flatten(1).double().numpy())


def _roughness(images: Tensor) -> Tensor:
    return (images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()) / 255
