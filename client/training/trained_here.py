"""What a site's training made of a received model; and what stands for it where training failed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from client.site.disclosure import few_of_rows, told_statistics
from client.training.model_and_images import Work
from client.training.score_release import NOT_TESTED, TestCounts
from common.errors import BadInput
from common.models.state import ModelState, write_state
from common.wire.errors import WireError
from common.wire.records import Arrays, TrainRequest
from strategies.local.objective import Situation
from strategies.local.optimisation import optimizer_for
from strategies.local.training import Validation


@dataclass(frozen=True)
class TrainedHere:
    """What training made: ``notes`` stay here for the next round, ``statistics`` leave beside the update."""

    state: ModelState
    last_loss: float
    epochs: int
    optimizer: torch.optim.Optimizer
    notes: Arrays
    statistics: Arrays


Answer = tuple[tuple[Validation, Validation], TestCounts, TrainedHere]
"""What the site chooses a round by, what it tells about the received model, how many test images it gets right; and
what training made of it."""


def trained_or_nothing(work: Work, request: TrainRequest, train: Callable[[], Answer], *, hides: bool) -> Answer:
    """Train; where masks or noise have to hide that it failed, return what stands for it.

    Raises:
        BadInput, WireError: If the request cannot be trained by, no matter on which images.
        Exception: What training raised, where nothing has to hide that.
    """
    try:
        return train()
    except (BadInput, WireError):
        raise
    except Exception as error:
        if not hides:
            raise
        work.site.tell(f"nothing of this round is in the update: {error}")
        return _nothing(work, request)


def _nothing(work: Work, request: TrainRequest) -> Answer:
    """Give what a round comes to whose training failed, where masks or noise have to hide that: no change at all."""
    plan, method, network, received = work.plan, work.method, work.network, work.received
    write_state(network, trunk=received.trunk, norm=received.norm, head=received.head)
    statistics: Arrays = {}
    if method.traffic.statistics:  # of the received model; noise is on them, as on all that leaves
        situation = Situation(
            *(network, work.examples("train"), request.statistics, work.memory.notes, request.round, plan.training)
        )
        own = method.local_round(situation).statistics(network, np.zeros(plan.training.epochs, np.float32))
        few = few_of_rows(work.site.train, network.class_names, work.site.policy)
        statistics = told_statistics(own, method.traffic.statistics, few, work.site.policy)
    optimizer = optimizer_for(network, plan.training, plan.training.lr)
    result = TrainedHere(received, 0.0, plan.training.epochs, optimizer, work.memory.notes, statistics)
    return (Validation(), Validation()), NOT_TESTED, result
