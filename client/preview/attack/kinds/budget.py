"""Whether a request to evaluate walks round a privacy budget."""

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from common.config import PrivacySection
from common.models.network import build
from common.models.state import read_state


def round_the_budget(at: Adversary) -> Attempt:
    """Where the site takes part with privacy only: ask it to evaluate without."""
    budget = at.site.policy.epsilon is not None
    answered = False
    if budget:
        plan = at.plan({"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 0.01})
        plan = plan.model_copy(update={"privacy": PrivacySection()})
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
