"""The requests of one exchange: one a site, and what its reply is held against."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from flwr.app import Message, MessageType, RecordDict

from common.config import Plan
from common.models.state import FROZEN_PART_MISSING, FrozenPart, ModelState
from common.models.zoo.spec import ModelSpec
from common.wire.codec import Written, encode, payload_bytes
from common.wire.records import Arrays, EvaluateRequest, Groups, Request, TrainRequest
from strategies.engine.state import FederationState, groups_expected, groups_for
from strategies.methods.base import Method, RoundContext


@dataclass
class FrozenSupply:
    """The frozen part, and who has it.

    Attributes:
        part: None where everything is trained.
        held: Sites that have answered a request that needed it.
        lost: Sites that said that they do not have it any more.
    """

    part: FrozenPart | None = None
    held: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, spec: ModelSpec, part: FrozenPart | None) -> "FrozenSupply":
        """Make the supply of the frozen part that a plan's model names.

        Raises:
            ValueError: If the model has a frozen part, and this is not it.
        """
        if spec.train != "all" and (part is None or part.sha256 != spec.frozen_sha256):
            raise ValueError("the plan's model has a frozen part; pass it as frozen, and name its hash in the plan")
        return cls(part)

    def for_site(self, site: str, *, had: bool) -> Groups:
        """Return the frozen part for a site that still needs it, or nothing.

        Args:
            had: Whether it said at the roll call that it has it; each process that leads a run calls the roll.
        """
        needed = site in self.lost or not (had or site in self.held)
        return Groups(trunk=self.part.values) if self.part is not None and needed else Groups()

    def note(self, site: str, fault: str = "") -> None:
        """Note whether a site has the frozen part, as its reply shows.

        Args:
            fault: Why the reply does not count; empty where it does.
        """
        if not fault:
            self.held.add(site)
            self.lost.discard(site)
        elif FROZEN_PART_MISSING in fault:
            self.lost.add(site)


SLACK, SLACK_S = 1.1, 60.0
"""A site's clock may run a little faster than the coordinator's."""

Q = TypeVar("Q", bound=Request)


@dataclass(frozen=True)
class SentAt:
    """When a request was sent, by both clocks: the one stands still while a machine sleeps, the other may be set."""

    monotonic: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)

    @property
    def longest_s(self) -> float:
        """Seconds that a site can have worked on it."""
        return SLACK * max(time.monotonic() - self.monotonic, time.time() - self.wall) + SLACK_S


@dataclass
class Requests:
    """Makes the requests of one exchange.

    Attributes:
        plan_json: The plan as hospitals receive it.
        deadline_s: Seconds after which nobody waits for a reply.
        context: The contract, the sites' answers to the roll call, and the round.
        state: The coordinator's state when the exchange begins.
        best: Round of the model that the run would end with as things stand; -1 for none.
        nodes: Site -> number of its Flower node.
        total_down: Site -> bytes sent in the whole run; counted up here.
        frozen: The part of the model that is sent once.
        variances: Places of the running variances in batch normalisation that no reply may make negative.
        expected: Site -> the groups that its reply must hold, as they were sent; empty where no update is expected.
        sent_at: Site -> when its last request was sent.
        bytes_down: Site -> bytes of its requests.
    """

    method: Method
    plan: Plan
    plan_json: str
    run: str
    deadline_s: float
    context: RoundContext
    state: FederationState
    best: int
    nodes: Mapping[str, int]
    total_down: Counter[str]
    frozen: FrozenSupply = field(default_factory=FrozenSupply)
    variances: tuple[slice, ...] = ()
    expected: dict[str, Groups] = field(default_factory=dict)
    sent_at: dict[str, SentAt] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    written: Written = field(default_factory=dict)  # the arrays as they travel, written once for all sites

    def train(self, site: str, model: ModelState, statistics: Arrays, *, update: bool) -> Message:
        """Ask a site to train this model.

        Args:
            statistics: Sent with the model.
            update: Whether the reply holds an update.
        """
        request = self.request(partial(TrainRequest, statistics=statistics), site, model)
        annotated = self.context.contract.sites[site]
        self.expected[site] = groups_expected(request.model, self.method.site, annotated) if update else Groups()
        return self.message(site, MessageType.TRAIN, encode(request, self.written))

    def evaluate(self, site: str, model: ModelState, *, test: bool) -> Message:
        """Ask a site how good this model is on its validation part, or on its test part."""
        request = self.request(partial(EvaluateRequest, test=test), site, model)
        self.expected[site] = Groups()
        return self.message(site, MessageType.EVALUATE, encode(request, self.written))

    def message(self, site: str, kind: str, content: RecordDict) -> Message:
        """Address a content to a site, and note its size and the time."""
        size = payload_bytes(content)
        self.bytes_down[site] = self.bytes_down.get(site, 0) + size
        self.total_down[site] += size
        self.sent_at[site] = SentAt()
        return Message(content, self.nodes[site], kind, group_id=str(self.context.round), ttl=self.deadline_s)

    def request(self, make: Callable[..., Q], site: str, model: ModelState) -> Q:
        """A request of this run and round, and the model with that site's own head rows."""
        rows = self.method.site.rows_of(site, self.context.contract)
        had = self.context.answers[site].holds_frozen
        return make(
            run=self.run,
            round=self.context.round,
            plan=self.plan_json,
            contract=self.context.contract.hash,
            class_names=tuple(rows),
            counted=self.state.counted.get(site, 0),
            best=self.best,
            left_out=self.state.left_out.get(site, ""),
            model=groups_for(model, rows),
            frozen=self.frozen.for_site(site, had=had),
        )
