"""Membership attacks: infer from one update of an honest model if the site trained on an image.

*Matched filter*: after one step over all images at once, an update is the mean of their gradients. The attacker, who
has the images, estimates each image's share in the update by ridge regression.

*LiRA*: Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022, with few shadow models. The
attacker trains models with and without each image, and compares the real model's loss with the losses of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.client.preview.attack.adversary import Adversary, AttackResult, Floats, copy_site_with_images
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.config import HospitalPlan
from polyclinic.common.metrics.auroc import compute_mean_auroc
from polyclinic.common.models.network import SplitNetwork
from polyclinic.common.models.state import ModelState, make_model_layout, read_model_state, write_model_state
from polyclinic.common.wire.records import TrainReply
from polyclinic.data.base.image_set import ImageSet, concatenate_image_sets
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.strategies.local.losses import PLAIN_LOSSES
from polyclinic.strategies.local.objective import LabelledExamples, pair_pixels_with_labels

SHADOW_MODELS = 8
"""Number of models that the attacker of LiRA trains."""
LIRA_EPOCHS = 20
"""Epochs of the plan for LiRA: enough for a small network to memorise its images."""
RELATIVE_RIDGE = 1e-4
"""Ridge term, relative to the mean diagonal of the Gram matrix; a smaller one is lost in single precision."""
FALSE_ALARM_RATE = 0.05
"""Share of strangers that score above the limit of a member."""


def infer_membership_by_matched_filter(adversary: Adversary, strangers: ImageSet, elsewhere: Adversary) -> AttackResult:
    """Infer from one update which images the site trained on (the members), by each image's share in the update.

    Args:
        adversary: The attacker, whose copy of the site trains on the members.
        strangers: Images of this hospital that the attacked copy does not have.
        elsewhere: Control: a copy that trains on neither members nor strangers. A result on its update is due to
            chance, or to differences between the pictures of members and strangers.
    """
    members = len(adversary.site.train)
    batch = min(members, adversary.site.policy.maximum_batch_size or members)
    data = MembershipAttackData.from_images(
        adversary, strangers, adversary.make_attack_plan("tiny_cnn", 32, 0.05, batch, epochs=1)
    )
    replies = data.request_training_replies(adversary, elsewhere)
    scores = [
        np.zeros(len(data.images)) if reply is None else compute_shares_in_update(data, reply) for reply in replies
    ]
    tried = f"One honest update (tiny_cnn, one epoch over {members} training images, {batch} at once)"
    return _make_membership_result("matched filter", tried, scores, data, adversary)


def infer_membership_by_lira(adversary: Adversary, strangers: ImageSet, elsewhere: Adversary) -> AttackResult:
    """Infer from one update which images the site trained on, by LiRA (Carlini et al., S&P 2022).

    For the arguments see :func:`infer_membership_by_matched_filter`.
    """
    epochs = min(LIRA_EPOCHS, adversary.site.policy.maximum_epochs or LIRA_EPOCHS)
    plan = adversary.make_attack_plan("tiny_cnn", 32, 1e-3, 16, optimizer="adam", epochs=epochs)
    data = MembershipAttackData.from_images(adversary, strangers, plan)
    replies = data.request_training_replies(adversary, elsewhere)
    scores = compute_membership_likelihood_ratios(adversary, data, replies)
    tried = (
        f"One honest update (tiny_cnn, {epochs} epochs over {len(adversary.site.train)} training images, "
        f"{SHADOW_MODELS} shadow models)"
    )
    return _make_membership_result("LiRA", tried, scores, data, adversary)


@dataclass(frozen=True)
class MembershipAttackData:
    """The model that the attacker sends, and the images that the attacker tests.

    Attributes:
        images: First the training images of the attacked copy of the site, then images that the copy does not have.
        members: True for the training images, ``(n,)``.
        start: The parameters of the model as sent.
    """

    plan: HospitalPlan
    images: ImageSet
    members: NDArray[np.bool_]
    network: SplitNetwork
    start: ModelState
    examples: LabelledExamples

    @classmethod
    def from_images(cls, adversary: Adversary, strangers: ImageSet, plan: HospitalPlan) -> "MembershipAttackData":
        network = adversary.build_attacked_network(plan)
        # The roll call discloses the hidden classes, so an attacker knows which labels are not trained on.
        site = copy_site_with_images(adversary.site, train=concatenate_image_sets([adversary.site.train, strangers]))
        images = site.get_images_to_train_on("train", plan)
        examples = pair_pixels_with_labels(images, convert_to_channels_first(images.images), network.class_names)
        members = np.arange(len(images)) < len(adversary.site.train)
        return cls(plan, images, members, network, read_model_state(network), examples)

    def request_training_replies(self, *adversaries: Adversary) -> list[TrainReply | None]:
        return [
            adversary.request_training(self.plan, self.start) if len(adversary.site.train) else None
            for adversary in adversaries
        ]

    def get_float_pixels(self) -> Tensor:
        assert isinstance(self.examples.images, Tensor)
        return self.examples.images.float()


def _make_membership_result(
    name: str, tried: str, scores: Sequence[Floats], data: MembershipAttackData, adversary: Adversary
) -> AttackResult:
    """Make the attack's result: the number of members whose score is higher than that of 95 % of the strangers.

    Args:
        tried: Beginning of the attack's description.
        scores: Score of each image, ``(n,)``, first from the attacked update, then from the control update. The result
            of the control update is the level of guessing.
    """
    members = data.members
    strangers = ~data.members
    members_above_limit = list[int]()
    aurocs = list[float]()
    for row in scores:
        limit = np.quantile(row[strangers], 1 - FALSE_ALARM_RATE) if strangers.any() else np.inf
        members_above_limit.append(int((row[members] > limit).sum()))
        aurocs.append(compute_mean_auroc(row[:, None], members[:, None].astype(np.float64)) or 0.5)
    return AttackResult(
        f"membership: {name}",
        f"Whether an image was trained on ({name})",
        f"{tried}, and the same images beside {int(strangers.sum())} of other patients of this hospital. Guessing: the "
        "same with an update that was trained on further images. Found: members that are surer than 95 of 100 others.",
        members_above_limit[0],
        int(members.sum()),
        "members",
        '`level = "private"` (noise that hides patients).',
        by_chance=max(float(members_above_limit[1]), FALSE_ALARM_RATE * int(members.sum())),
        notes=[f"AUROC {aurocs[0]:.3f}; {aurocs[1]:.3f} in the update that was trained on further images"],
        response=adversary.response,
    )


def compute_shares_in_update(data: MembershipAttackData, reply: TrainReply) -> Floats:
    """Estimate each image's share in an update, ``(n,)``, by ridge regression on the images' own gradients."""
    update = reply.update.trunk
    assert update is not None
    network = data.network.eval()
    examples = data.examples
    write_model_state(network, trunk=data.start.trunk, norm=data.start.norm, head=data.start.head)
    loss = PLAIN_LOSSES[network.spec.task, "masked"]
    pixels = data.get_float_pixels()
    slices = make_model_layout(network).tensor_slices()
    names, parameters = zip(*[pair for pair in network.named_parameters() if pair[0] in slices], strict=True)
    target = np.concatenate([update[slices[name]] for name in names])
    steps = np.empty((len(data.images), len(target)), np.float32)
    for row in range(len(steps)):
        value = loss(network(pixels[[row]]), examples.labels[[row]], examples.annotated)
        steps[row] = np.concatenate([-part.numpy().ravel() for part in torch.autograd.grad(value, parameters)])
    products = (steps @ steps.T).astype(np.float64)
    products[np.diag_indices_from(products)] += RELATIVE_RIDGE * np.trace(products) / len(products)
    return np.asarray(np.linalg.solve(products, (steps @ target).astype(np.float64)))


def compute_membership_likelihood_ratios(
    adversary: Adversary, data: MembershipAttackData, replies: Sequence[TrainReply | None]
) -> list[Floats]:
    """Compute for each reply, from each image's loss, the log likelihood ratio of member against stranger, ``(n,)``.

    The losses of members and of strangers are learned from shadow models. The attacker trains these at simulated sites
    of its own without a policy, each on half of the images. If a reply is None, each image is given the mean loss of a
    stranger.
    """
    count = len(data.images)
    halves = np.random.default_rng(5)
    chosen = np.stack([halves.permutation(count) < count // 2 for _ in range(SHADOW_MODELS)])  # (shadows, n)
    open_policy = SitePolicy.model_validate({"level": "trusted", "smallest_count": 0})
    losses = []
    for number, rows in enumerate(chosen):
        images = data.images.select_rows(np.flatnonzero(rows))
        site = replace(
            adversary.site, train=images, policy=open_policy, hidden={"train": frozenset()}, undisclosable_images={}
        )
        reply = Adversary(site, adversary.folder / "shadows" / str(number), adversary.honest).request_training(
            data.plan, data.start
        )
        assert reply is not None, "the attacker's own site answers"
        losses.append(_compute_image_losses(data, reply))
    shadows = np.stack(losses)  # (shadows, n)
    spread = shadows.std() + 1e-6
    member_losses = np.zeros(count)
    stranger_losses = np.zeros(count)
    for row in range(count):
        was_trained_on = chosen[:, row]  # (shadows,)
        if was_trained_on.any():
            member_losses[row] = shadows[was_trained_on, row].mean()
        if not was_trained_on.all():
            stranger_losses[row] = shadows[~was_trained_on, row].mean()
    real = [stranger_losses if reply is None else _compute_image_losses(data, reply) for reply in replies]
    return [np.asarray(((row - stranger_losses) ** 2 - (row - member_losses) ** 2) / spread**2) for row in real]


def _compute_image_losses(data: MembershipAttackData, reply: TrainReply) -> Floats:
    """Compute each image's loss, ``(n,)``, by the sent model plus the reply's update."""
    update = reply.update
    head = reply.update.head
    start = data.start
    assert update.trunk is not None
    weight = start.head.weight
    bias = start.head.bias
    trained_head = (
        start.head if head is None else replace(start.head, weight=weight + head.weight, bias=bias + head.bias)
    )
    write_model_state(data.network, trunk=start.trunk + update.trunk, norm=start.norm, head=trained_head)
    loss = PLAIN_LOSSES[data.network.spec.task, "masked"]
    examples = data.examples
    with torch.no_grad():
        logits = data.network.eval()(data.get_float_pixels())
        rows = range(len(examples))
        return np.array([loss(logits[[r]], examples.labels[[r]], examples.annotated).item() for r in rows])
