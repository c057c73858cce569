"""What a site's training made of a received model; and what stands for it where training failed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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


JudgedModel = tuple[tuple[Validation, Validation], TestCounts]
"""What the site chooses a round by and what it tells about the received model; how many test images that gets right."""
Answer = tuple[JudgedModel, TrainedHere]
NOT_JUDGED: Final[JudgedModel] = (Validation(), Validation()), NOT_TESTED


def judged_or_nothing(work: Work, judge: Callable[[], JudgedModel]) -> JudgedModel:
    """Judge the received model; one that cannot be judged has no figures.

    Raises:
        Exception: What judging raised, in a run without masks and noise at a site that tells exact figures.
    """
    try:
        return judge()
    except Exception as error:
        if work.site.policy.exact_figures and not work.plan.privacy.covers:
            raise
        work.site.tell(f"the model could not be judged: {error}")
        return NOT_JUDGED


def trained_or_nothing(work: Work, request: TrainRequest, train: Callable[[], Answer], *, hides: bool) -> Answer:
    """Train; where masks or noise on the update have to hide that it failed, return what stands for it.

    Noise in the steps does not cover a change of zero: there a failure is an error, which costs what an answer costs.

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
    return NOT_JUDGED, result
