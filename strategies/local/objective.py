"""One round at a site: its objective, the statistics and notes that go with it, and teachers that methods need."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.config import TrainingSection
from common.models.network import BATCH_NORM, SplitNetwork
from common.wire.records import NO_ARRAYS, Arrays
from strategies.local.training import Batch, Examples, Losses, Objective


@dataclass(frozen=True)
class ClientContext:
    """The network, data and memory of a site when a round begins.

    Attributes:
        network: As received, with the site's own parts in place; it is about to be trained, so copy what must last.
        examples: The training part.
        statistics: The federation's statistics, as the coordinator sent them.
        notes: What the method noted down at this site when it last counted.
        round: From 1.
    """

    network: SplitNetwork
    examples: Examples
    statistics: Arrays
    notes: Arrays
    round: int
    spec: TrainingSection


def fixed_copy(network: SplitNetwork) -> SplitNetwork:
    """Return a copy that stays as the network is now, for evaluation: a teacher."""
    return copy.deepcopy(network).eval().requires_grad_(False)


@dataclass(frozen=True)
class LocalRound:
    """One round at one site.

    Attributes:
        objective: What is minimised.
        statistics: What is told besides the update, of the trained network and the losses of all its batches.
        notes: What the site keeps for the method's next round, on its own disk, once the network is trained.
        lr_factor: The learning rate is multiplied by it.
    """

    objective: Objective
    statistics: Callable[[SplitNetwork, Losses], Arrays] = lambda network, losses: NO_ARRAYS
    notes: Callable[[SplitNetwork], Arrays] = lambda network: NO_ARRAYS
    lr_factor: float = 1.0


LocalHalf = Callable[[ClientContext], LocalRound]


def proximal(half: LocalHalf, mu: float, *, head: bool, norm: bool) -> LocalHalf:
    """Add ``mu / 2`` times the squared distance from the received model (FedProx, Li et al., MLSys 2020, eq. 2).

    Args:
        half: Any method's.
        mu: Strength.
        head, norm: Whether these groups come from the federation; the distance runs over what does.
    """

    def local(context: ClientContext) -> LocalRound:
        inner = half(context)
        received = [value.detach().clone() for value in _shared(context.network, head=head, norm=norm)]

        def objective(network: SplitNetwork, batch: Batch) -> Tensor:
            pairs = zip(_shared(network, head=head, norm=norm), received, strict=True)
            distance = torch.stack([(now - before).square().sum() for now, before in pairs]).sum()
            return inner.objective(network, batch) + mu / 2 * distance

        return replace(inner, objective=objective)

    return local


def _shared(network: SplitNetwork, *, head: bool, norm: bool) -> list[Tensor]:
    """Return the parameters that the federation averages."""
    own = set() if head else set(network.head.parameters())
    if not norm:
        own |= {value for part in network.modules() if isinstance(part, BATCH_NORM) for value in part.parameters()}
    return [value for value in network.parameters() if value not in own]


def decay_after(steps: int, decay: float) -> float:
    """The teacher is the plain mean of all students so far until that would be slower than ``decay``."""
    return min(1 - 1 / (steps + 1), decay)


@torch.no_grad()
def follow(teacher: SplitNetwork, student: SplitNetwork, decay: float) -> None:
    """Running mean of parameters, and of batch normalisation's means and variances."""
    now = student.state_dict()
    for name, mean in teacher.state_dict().items():
        if mean.is_floating_point():
            mean.lerp_(now[name], 1 - decay)
