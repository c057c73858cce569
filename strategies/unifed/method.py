"""UniFed and the two baselines that share its way of training: one model goes from hospital to hospital.

Hassani and Rekik, "UniFed: A Universal Federation of a Mixture of Highly Heterogeneous Medical Image Classification
Tasks", 2024 (specs 2.4). Tasks with class sets of their own share one class space, the label contract's.

Before round 1 all hospitals train one epoch side by side, and the slope of each one's loss is taken. In a round the
model passes from the easiest task to the hardest; each hospital trains until its validation loss settles. The
coordinator trains the mixed model of the round before on images of its own, and mixes both.
"""

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from common.models.network import SplitNetwork
from common.models.zoo.spec import Task
from common.wire.records import Arrays, TrainReply
from strategies.base.coordinator_half import Guidance, Known, finite_by_name
from strategies.base.method import Method, Parameters, Passing, ServerTraining, shared_choices
from strategies.local.early_stopping import Settling
from strategies.local.losses import Missing, loss_for
from strategies.local.objective import LocalHalf, LocalRound, Situation
from strategies.local.training import Losses, plain
from strategies.unifed.difficulty import SlopeRule, loss_slope


class SequentialParameters(Parameters):
    """The ``[method]`` table of ``fedseq``.

    Attributes:
        missing: In a multi-class task, ``negative`` is a softmax over all tasks' classes, as in the paper; ``masked``
            runs over the classes known of an image.
    """

    missing: Missing = "negative"


class ServerOnlyParameters(SequentialParameters):
    """The ``[method]`` table of ``server_only``.

    Attributes:
        tolerance: A fall of the validation loss below this is slight.
        epoch_cap: Most epochs of one training.
        server_patience: Epochs that the coordinator's loss may be worse in a row, or slightly better in all.
        global_patience: Rounds without a lower loss on the coordinator's validation part; then the run ends.
    """

    tolerance: float = Field(0.01, ge=0)
    epoch_cap: int = Field(200, ge=1)
    server_patience: int = Field(10, ge=1)
    global_patience: int = Field(10, ge=1)


class UniFedParameters(ServerOnlyParameters):
    """The ``[method]`` table of ``unifed``.

    Attributes:
        patience: As ``server_patience``, at a hospital.
        alpha: Weight of the hospitals' model in the mixture: 0.7 by the text, 0.3 in the authors' code.
        slope: How a hospital's loss is turned into one number.
    """

    patience: int = Field(7, ge=1)
    alpha: float = Field(0.7, ge=0, le=1)
    slope: SlopeRule = "least_squares"


def unifed(parameters: UniFedParameters, task: Task) -> Method:
    """Build the method from its ``[method]`` table."""
    loss = loss_for(task, parameters.missing)
    return Method(
        "unifed",
        loss,
        tells=("slope",),
        guidance=Guidance(
            learn=_slopes,
            expects=lambda known, site, features: {"slope": (1,)},
            note_round=lambda known: {"slopes": finite_by_name(known.statistics)},
        ),
        passing=Passing("easy_first", _server(parameters, parameters.alpha)),
        local=_telling_slope(parameters.slope, task, parameters.missing),
        settling=Settling(parameters.patience, parameters.tolerance, parameters.epoch_cap),
        **shared_choices(parameters),
    )


def fedseq(parameters: SequentialParameters, task: Task) -> Method:
    """The model goes round in the order of site names, the experiment's number of epochs at each."""
    loss = loss_for(task, parameters.missing)
    return Method("fedseq", loss, passing=Passing("name"), **shared_choices(parameters))


def server_only(parameters: ServerOnlyParameters, task: Task) -> Method:
    """The coordinator trains on its own images alone: what UniFed has to be better than (specs 2.4, at the end)."""
    loss = loss_for(task, parameters.missing)
    passing = Passing("nobody", _server(parameters, 0.0))
    return Method("server_only", loss, passing=passing, **shared_choices(parameters))


def _server(parameters: ServerOnlyParameters, alpha: float) -> ServerTraining:
    settling = Settling(parameters.server_patience, parameters.tolerance, parameters.epoch_cap)
    return ServerTraining(settling, alpha, parameters.global_patience)


def _telling_slope(rule: SlopeRule, task: Task, missing: Missing) -> LocalHalf:
    def told(network: SplitNetwork, losses: Losses) -> Arrays:
        return {"slope": np.array([loss_slope(losses.tolist(), rule)], np.float32)}

    def local(situation: Situation) -> LocalRound:
        return LocalRound(plain(loss_for(task, missing)), told, {"slope": "images"})

    return local


def _slopes(known: Known, replies: Mapping[str, TrainReply]) -> Arrays:
    """Each site's slope when it last trained."""
    return {**known.statistics, **{site: reply.statistics["slope"] for site, reply in replies.items()}}
