"""What one hospital may send instead of what it trained, as a change of its replies in a simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.client.training.secure_aggregation import HeldUpdateStore, SiteMaskingLayer
from polyclinic.common.config import parse_plan_json
from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import TrainReply, TrainRequest
from polyclinic.strategies.registry import build_site_method

Array = NDArray[np.float32]
Change = Callable[[Array, int], Array]
"""Of one array of an update, in a round."""

Answer = Callable[[Site, TrainRequest], TrainReply]


def changed(change: Change) -> Answer:
    """Train, and change what is sent."""

    def answer(site: Site, request: TrainRequest) -> TrainReply:
        reply = train_with_privacy_layers(site, request)
        as_sent = reply.update.apply_to_arrays(lambda array: change(array, request.round).astype(np.float32))
        return replace(reply, update=as_sent)

    return answer


def flipped(site: Site, request: TrainRequest) -> TrainReply:
    """Train on the opposite of every label; NaN stays NaN."""
    train = site.train
    return train_with_privacy_layers(replace(site, train=replace(train, labels=1 - train.labels)), request)


def one_row(site: Site, request: TrainRequest) -> TrainReply:
    """Send the row of its first class turned round and fifty times as long, the rest as trained."""
    reply = train_with_privacy_layers(site, request)
    assert reply.update.head is not None
    weight, bias = reply.update.head.weight.copy(), reply.update.head.bias.copy()
    weight[0], bias[0] = -50 * weight[0], -50 * bias[0]
    return replace(reply, update=replace(reply.update, head=Head(reply.update.head.class_names, weight, bias)))


def negative_variances(site: Site, request: TrainRequest) -> TrainReply:
    """Make every running variance, and all else in batch normalisation, negative."""
    reply = train_with_privacy_layers(site, request)
    assert request.model.norm is not None
    return replace(reply, update=replace(reply.update, norm=-2 * np.abs(request.model.norm)))


def _noise(array: Array, server_round: int) -> Array:
    spread = float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
    return np.random.default_rng(server_round).normal(0, spread, array.shape).astype(np.float32)


LIES: Mapping[str, Answer] = {
    "1e30": changed(lambda array, n: np.full_like(array, 1e30)),
    "turned round": changed(lambda array, n: -array),
    "turned round 10 times": changed(lambda array, n: -10 * array),
    "10 times": changed(lambda array, n: 10 * array),
    "100 times": changed(lambda array, n: 100 * array),
    "1000 times": changed(lambda array, n: 1000 * array),
    "flipped labels": flipped,
    "constant": changed(lambda array, n: np.full_like(array, 0.01)),
    "noise": changed(_noise),
    "one class": one_row,
    "negative variances": negative_variances,
    "growing": changed(lambda array, n: -(2.0 ** (n - 1)) * array),
    "from round 3": changed(lambda array, n: -20 * array if n >= 3 else array),
    "once": changed(lambda array, n: -20 * array if n == 2 else array),
    "every second round": changed(lambda array, n: -20 * array if n % 2 else array),
}


@dataclass(frozen=True)
class Lying:
    """In the place of ``polyclinic.client.app.train_with_privacy_layers``: one site lies, the others train.

    Attributes:
        liar: Its name.
        answer: What it does.
    """

    liar: str
    answer: Answer

    def __call__(self, site: Site, request: TrainRequest, masks: HeldUpdateStore) -> TrainReply:
        if site.name != self.liar:
            return train_with_privacy_layers(site, request, masks)
        plan = parse_plan_json(request.plan)
        if not plan.privacy.secure_aggregation:
            return self.answer(site, request)
        masked = SiteMaskingLayer(masks, site, plan, build_site_method(plan))
        return masked.wrap_answer(lambda train: self.answer(site, train), request)


def shifted_trunk(site: Site, request: TrainRequest) -> TrainReply:
    """Turn the trunk round from round 2 on, three and a half times as long."""
    reply = train_with_privacy_layers(site, request)
    if request.round < 2 or reply.update.trunk is None:
        return reply
    return replace(reply, update=replace(reply.update, trunk=np.float32(-3.5) * reply.update.trunk))
