"""What a site's training made of a received model; and what stands for it where training failed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from client.site.disclosure import few_of_rows, told_statistics
from client.training.figures import NOT_TESTED, TestCounts, counts_of_test, or_no_figures, validation_figures
from client.training.model_and_images import Work, validated
from common.errors import BadInput
from common.models.state import ModelState, write_state
from common.wire.errors import WireError
from common.wire.records import Arrays, TrainRequest
from strategies.local.objective import ClientContext, LocalRound
from strategies.local.optimisation import optimizer_for
from strategies.local.training import Examples, Losses, Validation


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
"""By what the site chooses a round and what leaves about the received model; how many test images that gets right."""
Answer = tuple[JudgedModel, TrainedHere]
NOT_JUDGED: Final[JudgedModel] = (Validation(), Validation()), NOT_TESTED


def judged_here(work: Work, validation: Examples) -> JudgedModel:
    """Judge the received model on the validation part, and on the test part where the plan asks for that."""

    def judge() -> JudgedModel:
        result = validated(work, validation)
        counts = NOT_TESTED if work.method.sequential else counts_of_test(work)  # there it is no model of a round
        return (result, validation_figures(work, result)), counts

    return or_no_figures(work, judge, NOT_JUDGED)


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
    plan, network, received = work.plan, work.network, work.received
    write_state(network, trunk=received.trunk, norm=received.norm, head=received.head)
    statistics: Arrays = {}
    if work.method.traffic.statistics:  # of the received model; noise is on them, as on all that leaves
        local = work.method.local_round(situation_of(work, request))
        statistics = own_statistics(work, local, np.zeros(plan.training.epochs, np.float32))
    optimizer = optimizer_for(network, plan.training, plan.training.lr)
    result = TrainedHere(received, 0.0, plan.training.epochs, optimizer, work.memory.notes, statistics)
    return NOT_JUDGED, result


def situation_of(work: Work, request: TrainRequest) -> ClientContext:
    """What the method's half of this round is made for."""
    examples, notes = work.examples("train"), work.memory.notes
    return ClientContext(work.network, examples, request.statistics, notes, request.round, work.plan.training)


def own_statistics(work: Work, local: LocalRound, losses: Losses) -> Arrays:
    """The method's statistics of the network as it is now, without what rests on few patients."""
    few = few_of_rows(work.site.train, work.network.class_names, work.site.policy)
    own = local.statistics(work.network, losses)
    return told_statistics(own, work.method.traffic.statistics, few, work.site.policy)
