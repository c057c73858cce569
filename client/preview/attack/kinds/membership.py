"""Whether one image was trained on, from one honest update.

*Matched filter*: an image that was trained on lies along the update: minus its gradient, times the update, is larger.
*LiRA*: Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022, with few shadow models: the
attacker trains models with and without each image, and asks beside which of the two losses that of the real model lies.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from client.site.policy import Policy
from common.config import Plan
from common.data.base.image_set import ImageSet, joined
from common.data.images.pixels import channels_first
from common.metrics.auroc import mean_auroc
from common.models.network import SplitNetwork, build
from common.models.state import ModelState, layout_of, read_state, write_state
from common.wire.records import TrainReply
from strategies.local.losses import loss_for
from strategies.local.training import Examples, examples_of

SHADOWS = 8
FALSE_ALARMS = 0.05
Floats = NDArray[np.float64]


def memberships(at: Adversary, strangers: ImageSet) -> list[Attempt]:
    """Both attacks on one update.

    Args:
        strangers: Images of this hospital that the copy of the site was not given.
    """
    members = at.site.train
    training = {"optimizer": "sgd", "lr": 0.05, "batch_size": 16, "epochs": 2}
    plan = at.plan({"architecture": "tiny_cnn", "image_size": 32}, training)
    network = build(plan.model, at.rows, 1)
    start = read_state(network)
    reply = at.trains(plan, start)
    both = joined([members, strangers])
    inside = np.arange(len(both)) < len(members)
    update = None if reply is None else reply.update.trunk
    examples = examples_of(both, channels_first(both.images), network.class_names)
    filtered = np.zeros(len(both)) if update is None else matched(network, examples, update)
    ratio = np.zeros(len(both))
    if reply is not None and update is not None:
        ratio = likelihoods(_Shadows(at, plan_folder=at.folder / "shadows"), start, reply, both, examples, plan)
    tried = (
        f"One honest update (tiny_cnn, two epochs over {len(members)} training images), and the same images beside "
        f"{len(strangers)} of this hospital that were not trained on."
    )
    return [
        _attempt("matched filter", tried, filtered, inside, at),
        _attempt("LiRA", f"{tried} {SHADOWS} shadow models.", ratio, inside, at),
    ]


def _attempt(name: str, tried: str, scores: Floats, inside: NDArray[np.bool_], at: Adversary) -> Attempt:
    limit = np.quantile(scores[~inside], 1 - FALSE_ALARMS) if (~inside).any() else np.inf
    found, members = int((scores[inside] > limit).sum()), int(inside.sum())
    auroc = mean_auroc(scores[:, None], inside[:, None].astype(np.float64))
    return Attempt(
        f"membership: {name}",
        f"Whether an image was trained on ({name})",
        f"{tried} Found: members that are surer than 95 of 100 strangers.",
        found,
        members,
        "members",
        '`level = "strict"` (noise that hides patients); more images, fewer epochs.',
        by_chance=FALSE_ALARMS * members,
        notes=[f"AUROC {auroc or 0.5:.3f}; 0.5 is guessing"],
        said=at.said,
    )


def matched(network: SplitNetwork, examples: Examples, update: NDArray[np.float32]) -> Floats:
    """How far each image's own step lies along the update, ``(n,)``."""
    network.eval()
    loss = loss_for(network.spec.task, "masked")
    layout = layout_of(network)
    places, scores = layout.slices(), []
    direction = {one.name: torch.from_numpy(update[places[one.name]].copy()).reshape(one.shape) for one in layout.trunk}
    named = [(value, direction[name]) for name, value in network.named_parameters() if name in direction]
    pixels = _pixels(examples)
    for row in range(len(examples)):
        part = slice(row, row + 1)
        value = loss(network(pixels[part]), examples.labels[part], examples.annotated)
        gradients = torch.autograd.grad(value, [one for one, _ in named])
        along = sum(float((gradient * way).sum()) for gradient, (_, way) in zip(gradients, named, strict=True))
        length = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        scores.append(-along / max(length, 1e-12))
    return np.array(scores)


class _Shadows:
    """Sites of the attacker's own, without a policy, that train on images of its choice."""

    def __init__(self, at: Adversary, plan_folder: Path) -> None:
        self._at, self._folder = at, plan_folder

    def reply(self, number: int, images: ImageSet, plan: Plan, start: ModelState) -> TrainReply | None:
        policy = Policy.model_validate({"level": "open", "smallest_count": 0})
        site = replace(self._at.site, train=images, policy=policy, hidden={"train": frozenset()}, unsaid={})
        shadow = Adversary(site, self._folder / str(number), self._at.honest)
        return shadow.trains(plan, start)


def likelihoods(
    shadows: _Shadows, start: ModelState, reply: TrainReply, both: ImageSet, examples: Examples, plan: Plan
) -> Floats:
    """Log likelihood of each image's loss as a member's, less that as a stranger's, ``(n,)``."""
    spec = plan.model
    network = build(spec, start.head.class_names, 1)
    halves = np.random.default_rng(5)
    chosen = np.stack([halves.permutation(len(both)) < len(both) // 2 for _ in range(SHADOWS)])
    losses = []
    for number, rows in enumerate(chosen):
        made = shadows.reply(number, both.rows(np.flatnonzero(rows)), plan, start)
        assert made is not None, "the attacker's own site answers"
        losses.append(_losses(network, start, made, examples))
    every, real = np.stack(losses), _losses(network, start, reply, examples)
    spread = every.std() + 1e-6
    members = np.array([every[chosen[:, row], row].mean() if chosen[:, row].any() else 0 for row in range(len(both))])
    others = np.array(
        [every[~chosen[:, row], row].mean() if (~chosen[:, row]).any() else 0 for row in range(len(both))]
    )
    return np.asarray(((real - others) ** 2 - (real - members) ** 2) / spread**2)


def _losses(network: SplitNetwork, start: ModelState, reply: TrainReply, examples: Examples) -> Floats:
    """The loss of each image under the model that an update makes."""
    update, head = reply.update, reply.update.head
    assert update.trunk is not None
    weight, bias = start.head.weight, start.head.bias
    moved = start.head if head is None else replace(start.head, weight=weight + head.weight, bias=bias + head.bias)
    write_state(network, trunk=start.trunk + update.trunk, norm=start.norm, head=moved)
    loss = loss_for(network.spec.task, "masked")
    with torch.no_grad():
        logits = network.eval()(_pixels(examples))
        rows = range(len(examples))
        return np.array([loss(logits[[r]], examples.labels[[r]], examples.annotated).item() for r in rows])


def _pixels(examples: Examples) -> Tensor:
    assert isinstance(examples.images, Tensor)
    return examples.images.float()
