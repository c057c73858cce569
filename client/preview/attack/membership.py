"""Whether one image was trained on, from one update of an honest model.

*Matched filter*: after one step over all images at once, an update is the mean of their gradients. The attacker, who
has the images, solves for each one's share in it (ridge regression).
*LiRA*: Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022, with few shadow models: the
attacker trains models with and without each image, and asks beside which of the two losses that of the real model lies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.preview.attack.adversary import Adversary, Attempt, training_on
from client.site.policy import Policy
from common.config import Plan
from common.data.base.image_set import ImageSet, joined
from common.data.images.pixels import channels_first
from common.metrics.auroc import mean_auroc
from common.models.network import SplitNetwork, build
from common.models.state import ModelState, layout_of, read_state, write_state
from common.wire.records import TrainReply
from strategies.local.losses import loss_for
from strategies.local.objective import Examples, examples_of

SHADOWS = 8
EPOCHS = 20
"""Of LiRA's plan: enough for a small network to memorise its images."""
RIDGE = 1e-4
"""Added to the images' products, as a share of their mean: single precision leaves no more to solve for."""
FALSE_ALARMS = 0.05
Floats = NDArray[np.float64]


def by_gradient(at: Adversary, strangers: ImageSet, elsewhere: Adversary) -> Attempt:
    """Attack by the matched filter.

    Args:
        strangers: Images of this hospital that the copy of the site was not given.
        elsewhere: A copy that trains on neither: what is found in its update is found by chance, or by how members and
            strangers differ as pictures.
    """
    members = len(at.site.train)
    batch = min(members, at.site.policy.maximum_batch_size or members)
    plan = _plan(at, {"optimizer": "sgd", "lr": 0.05, "batch_size": batch, "epochs": 1})
    known = _Known.of(at, strangers, plan)
    scores = [
        np.zeros(len(known.both)) if reply is None else matched(known, reply) for reply in known.replies(at, elsewhere)
    ]
    tried = f"One honest update (tiny_cnn, one epoch over {members} training images, {batch} at once)"
    return _attempt("matched filter", tried, scores, known, at)


def by_likelihood(at: Adversary, strangers: ImageSet, elsewhere: Adversary) -> Attempt:
    """Attack by LiRA; arguments as of :func:`by_gradient`."""
    allowed = at.site.policy.maximum_epochs or EPOCHS
    plan = _plan(at, {"optimizer": "adam", "lr": 1e-3, "batch_size": 16, "epochs": min(EPOCHS, allowed)})
    known = _Known.of(at, strangers, plan)
    replies = known.replies(at, elsewhere)
    scores = likelihoods(_Shadows(at, at.folder / "shadows"), known, replies)
    tried = (
        f"One honest update (tiny_cnn, {plan.training.epochs} epochs over {len(at.site.train)} training images, "
        f"{SHADOWS} shadow models)"
    )
    return _attempt("LiRA", tried, scores, known, at)


def _plan(at: Adversary, training: Mapping[str, Any]) -> Plan:
    return at.plan({"architecture": "tiny_cnn", "image_size": 32}, training)


@dataclass(frozen=True)
class _Known:
    """The images that the attacker holds, members first, and the model that it sends."""

    plan: Plan
    both: ImageSet
    inside: NDArray[np.bool_]
    network: SplitNetwork
    start: ModelState
    examples: Examples

    @classmethod
    def of(cls, at: Adversary, strangers: ImageSet, plan: Plan) -> "_Known":
        network = build(plan.model, at.rows, 1)
        # The roll call tells which classes are hidden, so an attacker knows which labels are not trained on.
        both = training_on(at.site, joined([at.site.train, strangers])).trained_on("train", plan)
        examples = examples_of(both, channels_first(both.images), network.class_names)
        return cls(plan, both, np.arange(len(both)) < len(at.site.train), network, read_state(network), examples)

    def replies(self, *adversaries: Adversary) -> list[TrainReply | None]:
        return [at.trains(self.plan, self.start) if len(at.site.train) else None for at in adversaries]


def _attempt(name: str, tried: str, scores: Sequence[Floats], known: _Known, at: Adversary) -> Attempt:
    """StopCriterion the scores of the update, beside those of the update that was trained elsewhere."""
    inside = known.inside
    found, by_chance = (_surer(row, inside) for row in scores)
    aurocs = [mean_auroc(row[:, None], inside[:, None].astype(np.float64)) or 0.5 for row in scores]
    members = int(inside.sum())
    return Attempt(
        f"membership: {name}",
        f"Whether an image was trained on ({name})",
        f"{tried}, and the same images beside {int((~inside).sum())} of other patients of this hospital. Guessing: the "
        "same with an update that was trained on further images. Found: members that are surer than 95 of 100 others.",
        found,
        members,
        "members",
        '`level = "private"` (noise that hides patients).',
        by_chance=max(float(by_chance), FALSE_ALARMS * members),
        notes=[f"AUROC {aurocs[0]:.3f}; {aurocs[1]:.3f} in the update that was trained on further images"],
        response=at.response,
    )


def _surer(scores: Floats, inside: NDArray[np.bool_]) -> int:
    """Count the members that have a higher score than 95 of 100 strangers."""
    limit = np.quantile(scores[~inside], 1 - FALSE_ALARMS) if (~inside).any() else np.inf
    return int((scores[inside] > limit).sum())


def matched(known: _Known, reply: TrainReply) -> Floats:
    """Each image's share in the update: ridge regression of the update on the images' own steps, ``(n,)``."""
    update = reply.update.trunk
    assert update is not None
    network = known.network.eval()
    write_state(network, trunk=known.start.trunk, norm=known.start.norm, head=known.start.head)
    loss, pixels = loss_for(network.spec.task, "masked"), _pixels(known.examples)
    places = layout_of(network).slices()
    named = [(name, value) for name, value in network.named_parameters() if name in places]
    wanted = np.concatenate([update[places[name]] for name, _ in named])
    steps = np.empty((len(known.both), len(wanted)), np.float32)
    for row in range(len(steps)):
        part = slice(row, row + 1)
        value = loss(network(pixels[part]), known.examples.labels[part], known.examples.annotated)
        gradients = torch.autograd.grad(value, [parameter for _, parameter in named])
        steps[row] = np.concatenate([-gradient.numpy().ravel() for gradient in gradients])
    products = (steps @ steps.T).astype(np.float64)
    products[np.diag_indices_from(products)] += RIDGE * np.trace(products) / len(products)
    return np.asarray(np.linalg.solve(products, (steps @ wanted).astype(np.float64)))


class _Shadows:
    """Sites of the attacker's own, without a policy, that train on images of its choice."""

    def __init__(self, at: Adversary, plan_folder: Path) -> None:
        self._at, self._folder = at, plan_folder

    def reply(self, number: int, images: ImageSet, plan: Plan, start: ModelState) -> TrainReply | None:
        policy = Policy.model_validate({"level": "trusted", "smallest_count": 0})
        site = replace(self._at.site, train=images, policy=policy, hidden={"train": frozenset()}, unsaid={})
        shadow = Adversary(site, self._folder / str(number), self._at.honest)
        return shadow.trains(plan, start)


def likelihoods(shadows: _Shadows, known: _Known, replies: Sequence[TrainReply | None]) -> list[Floats]:
    """For each reply: log likelihood of each image's loss as a member's, less that as a stranger's, ``(n,)``."""
    both = len(known.both)
    halves = np.random.default_rng(5)
    chosen = np.stack([halves.permutation(both) < both // 2 for _ in range(SHADOWS)])
    losses = []
    for number, rows in enumerate(chosen):
        made = shadows.reply(number, known.both.rows(np.flatnonzero(rows)), known.plan, known.start)
        assert made is not None, "the attacker's own site answers"
        losses.append(_losses(known, made))
    every = np.stack(losses)
    spread = every.std() + 1e-6
    members, others = (
        np.array([every[had[:, row], row].mean() if had[:, row].any() else 0 for row in range(both)])
        for had in (chosen, ~chosen)
    )
    real = [others if reply is None else _losses(known, reply) for reply in replies]
    return [np.asarray(((row - others) ** 2 - (row - members) ** 2) / spread**2) for row in real]


def _losses(known: _Known, reply: TrainReply) -> Floats:
    """Compute the loss of each image under the model that an update makes."""
    update, head, start = reply.update, reply.update.head, known.start
    assert update.trunk is not None
    weight, bias = start.head.weight, start.head.bias
    moved = start.head if head is None else replace(start.head, weight=weight + head.weight, bias=bias + head.bias)
    write_state(known.network, trunk=start.trunk + update.trunk, norm=start.norm, head=moved)
    loss, examples = loss_for(known.network.spec.task, "masked"), known.examples
    with torch.no_grad():
        logits = known.network.eval()(_pixels(examples))
        rows = range(len(examples))
        return np.array([loss(logits[[r]], examples.labels[[r]], examples.annotated).item() for r in rows])


def _pixels(examples: Examples) -> Tensor:
    assert isinstance(examples.images, Tensor)
    return examples.images.float()
