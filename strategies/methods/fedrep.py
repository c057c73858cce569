"""FedRep: one trunk for all sites, a head at each site; each round trains first the head, then the trunk.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021 (algorithm 1).

The paper's method. In each round a site takes some steps on its own head with the received trunk fixed, then steps on
the trunk with its head fixed, and sends the trunk alone. The coordinator averages the trunks. Our ``pfl`` differs in
one thing: it trains both at the same time, so that its trunk follows a head that is not yet fitted to it.

The paper counts epochs for each part (10 for the head, 1 for the trunk). Here ``head_share`` divides a round's steps,
so that a round of one epoch has both parts; ``head_share = 0.91`` with ``training.epochs = 11`` is the paper's. A round
of one step trains both in it, and with a frozen trunk (``model.train = "head"``) all steps train the head.

Partial labels, which the paper does not have: a site's head has rows for the classes that it annotates. While the head
trains, running statistics of batch normalisation go on, because the trunk stays in training mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import Field
from torch import Tensor, nn

from polyclinic.common.models.network import Model
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, Objective
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import count_batches
from polyclinic.strategies.methods.base import Method, make_method


class FedRepParameters(Parameters):
    """The ``[method]`` table of ``fedrep``.

    Attributes:
        head_share: Share of a round's steps that train the head, before the others train the trunk.
    """

    head_share: float = Field(0.5, gt=0, lt=1)


def count_head_steps(steps: int, share: float) -> int:
    """Return how many of a round's steps train the head: at least one, and all but one at most.

    Args:
        steps: Number of optimiser steps in the round, at least two.
    """
    return min(max(1, round(share * steps)), steps - 1)


@contextmanager
def hold_trunk(model: Model) -> Iterator[None]:
    """Let no gradient reach the trunk from forward passes in this context."""
    hook = model.head.register_forward_pre_hook(_detach_features)
    try:
        yield
    finally:
        hook.remove()


def _detach_features(head: nn.Module, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in features)


@contextmanager
def hold_head(model: Model) -> Iterator[None]:
    """Let no gradient reach the head's rows from forward passes in this context."""
    model.head.requires_grad_(False)
    try:
        yield
    finally:
        model.head.requires_grad_(True)


class FedRepSite(SiteMethod):
    """The hospital's half of FedRep: head first, then trunk."""

    traits = MethodTraits(
        "fedrep",
        parameters_class=FedRepParameters,
        payload=Payload(head=False, rows="own"),
        looks_at_images=False,
    )
    parameters: FedRepParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: an optimiser changes only what has a gradient, so each batch trains one part."""
        both = super().make_round(context).objective
        spec = context.spec
        batches = count_batches(context.examples.examples_per_epoch, spec.batch_size)
        steps = -(-batches // spec.gradient_accumulation_steps)  # in an epoch
        if spec.epochs * steps == 1:
            return LocalRound(both)
        epochs, rest = divmod(count_head_steps(spec.epochs * steps, self.parameters.head_share), steps)
        head_batches = epochs * batches + rest * spec.gradient_accumulation_steps
        return LocalRound(alternate_objective(both, head_batches))


def alternate_objective(both: Objective, head_batches: int) -> Objective:
    """Return an objective whose gradient is that of the head in the first batches, then that of the trunk."""
    batches_done = 0

    def objective(model: Model, batch: Batch) -> Tensor:
        nonlocal batches_done
        is_head_batch = batches_done < head_batches
        batches_done += 1
        with hold_trunk(model) if is_head_batch or not trains_trunk(model) else hold_head(model):
            return both(model, batch)

    return objective


def trains_trunk(model: Model) -> bool:
    """Return True if training changes any parameter besides the head."""
    head = set(model.head.parameters())
    return any(value.requires_grad for value in model.parameters() if value not in head)


FedRep = make_method(Method, FedRepSite)
"""The coordinator's half of FedRep: FedAvg without the head."""
