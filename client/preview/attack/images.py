"""Attacks that recover training images from one update.

*Imprint*: Fowl et al., "Robbing the Fed", ICLR 2022. Each unit of the first dense layer compares the brightness of an
image with its own threshold; the thresholds rise from unit to unit. The updates of two neighbouring units differ only
by the images whose brightness lies between their thresholds. If this is one image, the difference of the weights'
updates divided by that of the biases' updates is the image.

*Gradient inversion*: Geiping et al., "Inverting Gradients", NeurIPS 2020. The attacker optimises images until their
gradient has the direction of the update. Model and plan are honest, and the attacker knows the labels.
"""

import base64
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from polyclinic.client.preview.attack.adversary import (
    DENSE_LAYER,
    Adversary,
    AttackResult,
    Floats,
    Picture,
    compute_dense_layer_input,
    read_trunk_tensor_update,
    select_fedsld_cnn_layers,
    set_pixel_passing_weights,
)
from polyclinic.common.models.network import SplitNetwork, convert_pixels_for_backbone, set_train_mode
from polyclinic.common.models.state import make_model_layout, read_model_state
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.data.images.reading import encode_png_thumbnail
from polyclinic.strategies.local.losses import PLAIN_LOSSES
from polyclinic.strategies.local.objective import pair_pixels_with_labels

INPUT_SIDE = 112
"""Side of the network's input, in pixels."""
INPUT_SIDE_WITH_BUDGET = 60
"""The same at a site with a privacy budget, where training keeps each image's gradient in memory."""
CROPPED_BORDER = 6
"""Width of the image's border that the dense layer does not receive, in pixels."""
POOLED_SIDE = 4
"""Each input of the dense layer is the mean of 4 x 4 pixels."""
RECOVERED_CORRELATION = 0.99
"""An imprinted image counts as recovered above this correlation with the true image."""
SIMILAR_CORRELATION = 0.9
"""Correlation above which a recovered image is similar to the true one."""
MAX_SHOWN_PICTURES = 12
SEARCH_STEPS = 120


def attack_by_imprinting(adversary: Adversary, size: int = 0) -> AttackResult:
    """Recover training images from the update of one crafted model (Fowl et al., "Robbing the Fed", ICLR 2022).

    Args:
        size: Side in pixels of the network's input; the side of recovered images is about a quarter of it. 0 for the
            default: :data:`INPUT_SIDE`, or :data:`INPUT_SIDE_WITH_BUDGET` at a site with a privacy budget.
    """
    train = adversary.site.train
    size = size or (INPUT_SIDE if adversary.site.policy.epsilon is None else INPUT_SIDE_WITH_BUDGET)
    plan = adversary.make_attack_plan("fedsld_cnn", size, 1e3)
    network = adversary.build_attacked_network(plan)

    # The attacker learns the distribution of brightness from other images.
    similar_images = next((part for part in (adversary.site.test, adversary.site.validation) if len(part)), train)
    _set_weights_to_compare_brightness(network, similar_images)
    reply = adversary.request_training(plan, read_model_state(network))

    truth = compute_dense_layer_input(network, train)
    slices = make_model_layout(network).tensor_slices()
    dense = select_fedsld_cnn_layers(network).dense
    weights, biases = (read_trunk_tensor_update(reply, slices[f"{DENSE_LAYER}.{name}"]) for name in ("weight", "bias"))
    recovered = np.zeros((0, truth.shape[1]))
    if weights is not None and biases is not None:
        used_inputs = (dense.weight[0] != 0).numpy()
        weights = weights.reshape(dense.weight.shape)[:, used_inputs].astype(np.float64)
        biases = biases.astype(np.float64)
        # Differences of neighbouring units depend only on the images between their thresholds.
        weight_differences = -np.diff(weights, axis=0, append=0)
        bias_differences = -np.diff(biases, append=0)
        has_image = np.abs(bias_differences) > 1e-4 * np.abs(biases).max(initial=0)
        recovered = weight_differences[has_image] / bias_differences[has_image, None]

    best, match_rows = _find_best_matching_pictures(truth, recovered)
    side = math.isqrt(truth.shape[1])
    end = size - CROPPED_BORDER
    pixels = convert_pixels_for_backbone(convert_to_channels_first(train.images).float(), plan.model)[
        ..., CROPPED_BORDER:end, CROPPED_BORDER:end
    ]
    shown = functional.avg_pool2d(pixels, POOLED_SIDE).flatten(1).double().numpy() / 255
    similar = int((best > SIMILAR_CORRELATION).sum())
    return AttackResult(
        "imprint",
        "Training images out of one update, by a crafted model",
        f"One request with a crafted model of a permitted network (fedsld_cnn, {size} pixels), said to be of a weights "
        f"file that this site does not have, and one large step over "
        f"{len(train)} of this site's training images. Recovered: a correlation above {RECOVERED_CORRELATION} with the "
        f"image as the network passes it on, at {side} x {side} pixels.",
        int((best > RECOVERED_CORRELATION).sum()),
        len(train),
        "training images",
        '`level = "private"` (noise: `epsilon`, `privacy_unit`). Masks alone do not stop it: a model can be made that '
        "leaves one hospital alone in the sum. Nor does clipping (`maximum_update_norm`).",
        notes=[f"{similar} with a correlation above {SIMILAR_CORRELATION}; median {float(np.median(best)):.4f}"],
        response=adversary.response,
        pictures=_pair_recovered_pictures(shown, recovered, best, match_rows),
    )


@torch.no_grad()
def _set_weights_to_compare_brightness(network: SplitNetwork, similar_images: ImageSet) -> None:
    """Set the weights so that the dense units compare an image's mean brightness with rising thresholds.

    Args:
        similar_images: Images from which the thresholds are computed, as quantiles of their brightness.
    """
    set_pixel_passing_weights(network)
    dense = select_fedsld_cnn_layers(network).dense
    inputs = compute_dense_layer_input(network, similar_images)
    dense.weight[:, : inputs.shape[1]] = 1 / inputs.shape[1]
    # Random noise makes the distribution of brightness smooth.
    brightness = inputs.mean(axis=1)
    width = 0.3 * float(brightness.std() or 0.1)
    spread = brightness + np.random.default_rng(3).normal(0, width, (64, len(brightness)))
    thresholds = np.quantile(spread, (np.arange(len(dense.bias)) + 0.5) / len(dense.bias))
    dense.bias.copy_(-torch.from_numpy(thresholds))


def invert_gradients(adversary: Adversary) -> AttackResult:
    """Recover training images from an honest update (Geiping et al., "Inverting Gradients", NeurIPS 2020)."""
    train = adversary.site.train
    plan = adversary.make_attack_plan("tiny_cnn", 16, 0.1)
    network = adversary.build_attacked_network(plan)
    update = read_trunk_tensor_update(adversary.request_training(plan, read_model_state(network)), slice(None))
    truth = (
        convert_pixels_for_backbone(convert_to_channels_first(train.images).float(), plan.model)
        .flatten(1)
        .double()
        .numpy()
    )

    recovered = np.zeros((0, truth.shape[1]))
    if update is not None:  # optimise images until their gradient has the direction of the update
        target = -torch.from_numpy(update.copy())
        set_train_mode(network)
        examples = pair_pixels_with_labels(train, convert_to_channels_first(train.images), network.class_names)
        loss = PLAIN_LOSSES[network.spec.task, "masked"]
        trunk = [value for name, value in network.named_parameters() if not name.startswith("head.")]
        generator = torch.Generator().manual_seed(4)
        guess = torch.rand(len(train), 1, 16, 16, generator=generator).mul(255).requires_grad_()
        search = torch.optim.Adam([guess], lr=8.0)
        for _ in range(SEARCH_STEPS):
            search.zero_grad()
            value = loss(network(guess), examples.labels, examples.annotated)
            gradient = torch.cat([part.flatten() for part in torch.autograd.grad(value, trunk, create_graph=True)])
            distance = 1 - functional.cosine_similarity(gradient, target, dim=0)
            roughness = (guess.diff(dim=2).abs().mean() + guess.diff(dim=3).abs().mean()) / 255
            (distance + roughness * 1e-4).backward()  # type: ignore[no-untyped-call]
            search.step()
            guess.data.clamp_(0, 255)
        recovered = guess.detach().flatten(1).double().numpy()  # (n, 256)

    best, match_rows = _find_best_matching_pictures(truth, recovered)
    return AttackResult(
        "gradient inversion",
        "Training images out of one update, by search",
        f"One step from an honest initial model (tiny_cnn, 16 pixels) over {len(train)} training images whose "
        f"labels the attacker was given; {SEARCH_STEPS} steps of search. "
        f"Recovered: a correlation above {SIMILAR_CORRELATION}.",
        int((best > SIMILAR_CORRELATION).sum()),
        len(train),
        "training images",
        'more images in a step; `level = "private"`; under an honest model also `masked_only` with `peers`.',
        notes=[f"median correlation {float(np.median(best)):.3f}, largest {float(best.max()):.3f}"],
        response=adversary.response,
        pictures=_pair_recovered_pictures(truth, recovered, best, match_rows),
    )


def _find_best_matching_pictures(truth: Floats, recovered: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Return the highest correlation of each true image with a recovered one, and the row of that recovered image.

    Args:
        truth: The true images, ``(n, pixels)``.
        recovered: The recovered images, ``(m, pixels)``; if there are none, all correlations are 0.
    """
    if not len(recovered):
        return np.zeros(len(truth)), np.zeros(len(truth), np.intp)
    normalised = []
    for rows in (truth, recovered):
        centred = rows - rows.mean(axis=1, keepdims=True)
        normalised.append(centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12))
    correlations = normalised[0] @ normalised[1].T  # (n, m)
    return correlations.max(axis=1), correlations.argmax(axis=1)


def _pair_recovered_pictures(
    truth: Floats, recovered: Floats, best: Floats, match_rows: NDArray[np.intp]
) -> Sequence[Picture]:
    rows = [row for row in np.argsort(-best)[:MAX_SHOWN_PICTURES] if best[row] > SIMILAR_CORRELATION]
    return [(_encode_grey_png(truth[row]), _encode_grey_png(recovered[match_rows[row]])) for row in rows]


def _encode_grey_png(values: Floats) -> str:
    """Encode a square grey image, given as a flat array, as PNG in base64; its contrast is stretched."""
    side = math.isqrt(len(values))
    low, high = np.quantile(values, [0.01, 0.99])
    grey = np.clip((values - low) / max(high - low, 1e-9), 0, 1) * 255
    return base64.b64encode(encode_png_thumbnail(grey.reshape(side, side).astype(np.uint8), side)).decode()
