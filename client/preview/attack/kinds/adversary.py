"""A coordinator that sends what it likes, played in front of a copy of the site: its gate, its policy, its own images.

What it is told it was told over the wire; what it knows beside stands in each attack. It keeps to the policy where the
site would else decline: it asks for as little noise as the policy takes part with, and for the clipping it wants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict

from client.app import client_app
from client.preview.attack.kinds.attempt import Said
from client.site.site import Site
from common.config import Plan
from common.data.base.image_set import ImageSet
from common.errors import BadInput
from common.models.state import ModelState
from common.wire.benefit import BenefitReply, BenefitRequest
from common.wire.codec import R, Record, decode, encode
from common.wire.flower_objects import act_as
from common.wire.records import EvaluateReply, EvaluateRequest, Groups, TrainReply, TrainRequest

METHODS = ("surgical", "partial_loss", "vanilla", "fedavg")
"""Methods that average updates and need nothing from the site beside; the first that the policy allows."""
BELOW_BUDGET = 0.98


@dataclass
class Adversary:
    """One attacker and the copy of the site that it attacks.

    Attributes:
        site: The copy, in a folder that is removed afterwards.
        honest: The plan that the hospital was asked to take part in.
        said: What the site answered.
    """

    site: Site
    folder: Path
    honest: Plan
    said: Said = field(default_factory=Said)

    def __post_init__(self) -> None:
        act_as(1, 1)  # read by Message()
        self.site = replace(self.site, folder=self.folder, durable=False, tell=lambda text: None)
        self._app = client_app(lambda context: self.site)
        self._runs = count(1)

    @property
    def rows(self) -> tuple[str, ...]:
        """The head rows that a model for this site has."""
        return self.site.declaration.canonical

    def new_run(self) -> str:
        """A run that the site has not heard of."""
        return f"attack-{next(self._runs)}"

    def plan(self, model: Mapping[str, Any], training: Mapping[str, Any]) -> Plan:
        """A plan of the attacker's own making, as far as this site's policy takes part in it."""
        policy = self.site.policy
        allowed = [one for one in METHODS if policy.methods is None or {one, "*"} & set(policy.methods)]
        clip = policy.maximum_update_norm
        unit = "patient" if policy.privacy_unit == "patient" else "sample"
        budget = policy.epsilon and {"level": unit, "epsilon": BELOW_BUDGET * policy.epsilon, "delta": policy.delta}
        return Plan.model_validate(
            {
                "run": {"method": next(iter(allowed), self.honest.run.method), "rounds": 1, "seed": 1},
                "method": {} if clip is None else {"clip_update": clip},
                "model": {"channels": 1, "norm": "group", "task": self.honest.model.task, **model},
                "training": training,
                "augmentation": {},
                "evaluation": {"result": "last"},
                "privacy": budget or {},
                "weights_sha256": "0" * 64,  # of a file that no hospital has, so it cannot compare the first model
            }
        )

    def trains(self, plan: Plan, model: ModelState, run: str = "") -> TrainReply | None:
        """Have the site train from a model in round 1; None where it does not answer."""
        facts = self._facts(plan, model, run)
        return self._asked("train", TrainRequest(**facts), TrainReply)

    def judges(
        self, plan: Plan, model: ModelState, run: str = "", *, test: bool = False, counted: int = 0
    ) -> EvaluateReply | None:
        """Have the site judge a model in round 1; None where it does not answer.

        Args:
            counted: The round whose training the site is to remember; 0 for none.
        """
        facts = {**self._facts(plan, model, run), "counted": counted}
        return self._asked("evaluate", EvaluateRequest(**facts, test=test), EvaluateReply)

    def compares(self, plan: Plan, model: ModelState, run: str) -> BenefitReply | None:
        """Have the site compare a model with one that it trains alone; None where it does not answer."""
        facts = self._facts(plan, model, run)
        return self._asked("query.benefit", BenefitRequest(**facts, initial=facts["model"], epochs=1), BenefitReply)

    def _facts(self, plan: Plan, model: ModelState, run: str) -> dict[str, Any]:
        return {
            "run": run or self.new_run(),
            "round": 1,
            "plan": plan.model_dump_json(),
            "contract": "attack",
            "class_names": model.head.class_names,
            "counted": 0,
            "best": -1,
            "left_out": "",
            "model": Groups.of_model(model),
        }

    def _asked(self, kind: str, record: Record, expected: type[R]) -> R | None:
        message = Message(encode(record), 2, kind)
        try:
            reply = self._app(message, Context(1, 2, {}, RecordDict(), {}))
        except (BadInput, ValueError, FloatingPointError) as error:
            self._refused(f"stopped: {type(error).__name__}")
            return None
        if reply.has_error():
            self._refused(str(reply.error.reason))
            return None
        self.said.records += 1
        return decode(reply.content, expected)

    def _refused(self, reason: str) -> None:
        if reason not in self.said.refusals:
            self.said.refusals.append(reason)


def drawn(images: ImageSet, most: int, seed: int = 0) -> ImageSet:
    """Draw at most so many images at random; they keep their order."""
    rows = np.random.default_rng(seed).permutation(len(images))[:most]
    return images.rows(np.sort(rows))


def training_on(site: Site, train: ImageSet) -> Site:
    """A copy of the site with other training images, which hides the same classes as the site itself."""
    hidden = {part: site.hides(part) for part in ("train", "validation", "test")}
    return replace(site, hidden=hidden, train=train)
