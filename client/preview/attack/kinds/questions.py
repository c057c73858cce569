"""How often a coordinator may ask, and whether a request to evaluate walks round a budget."""

import numpy as np

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from common.config import Plan
from common.models.network import build
from common.models.state import read_state

ASKED = 60


def _small(at: Adversary, *, private: bool = True) -> Plan:
    plan = at.plan({"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 0.01})
    return plan if private else plan.model_copy(update={"privacy": type(plan.privacy)()})


def repeated(at: Adversary) -> Attempt:
    """Ask about many models in one round of one run."""
    plan, run, answered = _small(at), at.new_run(), 0
    model = read_state(build(plan.model, at.rows, 1))
    at.trains(plan, model, run)  # the site has seen the model grow then, and tells figures of one like it
    for _ in range(ASKED):
        model.trunk[:] *= np.float32(0.99999)
        reply = at.judges(plan, model, run)
        answered += reply is not None and reply.validation_loss is not None
    return Attempt(
        "repeated questions",
        "Many questions in one round",
        f"{ASKED} models that differ a little, to be judged in round 1 of one run. A round needs one answer.",
        max(answered - 1, 0),
        ASKED - 1,
        "answers with a figure that the round did not need",
        "`extra_questions`; `training_figures = false`",
        said=at.said,
    )


def round_the_budget(at: Adversary) -> Attempt:
    """Where the site takes part with privacy only: ask it to evaluate without."""
    budget = at.site.policy.epsilon is not None
    answered = False
    if budget:
        plan = _small(at, private=False)
        reply = at.judges(plan, read_state(build(plan.model, at.rows, 1)), test=True)
        answered = reply is not None and (reply.validation_loss is not None or bool(reply.class_names))
    return Attempt(
        "round the budget",
        "An evaluation that walks round a privacy budget",
        "A request to evaluate and test a model, in a run without privacy."
        + ("" if budget else " This site has no budget (`epsilon`)."),
        int(answered),
        int(budget),
        "requests",
        "`epsilon` is asked at every request",
        said=at.said,
    )
