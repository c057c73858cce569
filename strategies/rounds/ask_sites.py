"""What every method does with its sites: prepare a run, ask, collect the replies that count.

The rounds that are made of it: :mod:`strategies.rounds.strategy`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Self

from flwr.app import Message
from flwr.serverapp import Grid

from common.config import ParticipationSection, Plan
from common.contract import LabelContract
from common.models.state import FrozenPart, Layout, ModelState
from common.wire.records import Arrays
from strategies.base.aggregator import longest_update
from strategies.base.callbacks import Callbacks
from strategies.base.round_context import RoundContext
from strategies.base.round_record import FederationValidation, Waiting
from strategies.base.state import FederationState
from strategies.rounds.evaluation_sites import EvaluationSites
from strategies.rounds.messages.deadline import Patience, exchange
from strategies.rounds.messages.frozen_supply import FrozenSupply
from strategies.rounds.messages.refused_replies import received
from strategies.rounds.messages.replies import Replies, Reply
from strategies.rounds.messages.requests import Requests
from strategies.rounds.participation.claims import ClaimsBySite, no_lists
from strategies.rounds.participation.client_manager import Membership
from strategies.rounds.participation.roll_call import Registered
from strategies.rounds.rollback import Rollback


class Exchanges(EvaluationSites):
    """The base of :class:`~strategies.rounds.strategy.FederatedAveraging`: one exchange with the sites after the other.

    Attributes:
        sites: Who takes part.
        state: The coordinator's, after the last round.
        last_validation: What the sites said of the present model.
        requests: Of the exchange that is going on, or was the last.
        clip: The longest update that counts as it is, in median lengths; None for any, and where none is seen.
        rollback: Takes back a model that collapses; None where none is.
    """

    def prepare(
        self,
        plan: Plan,
        participation: ParticipationSection,
        run: str,
        *,
        callbacks: Callbacks | None = None,
        registered: Registered | None = None,
        claims: ClaimsBySite = no_lists,
        scratch: Path | None = None,
        frozen: FrozenPart | None = None,
    ) -> Self:
        """Make ready to coordinate one run; a hospital never does.

        Args:
            plan: The part of the experiment that hospitals receive.
            run: Identifier of the run.
            callbacks: Receive what happens.
            registered: The names of nodes; None in simulation.
            claims: What each site was admitted for.
            scratch: Folder for what must wait on disk; the system's own for temporary files where None.
            frozen: The part of the model that nobody trains, whose hash the plan names.
        """
        self.plan, self.participation, self.run = plan, participation, run
        self.callbacks, self._scratch = callbacks or Callbacks(), scratch
        self._resumed: FederationState | None = None
        self.frozen = FrozenSupply.of(plan.model, frozen)
        self.clip = longest_update(self, participation, plan.privacy)
        judged = self.clip is not None and not self.sequential and plan.privacy.level == "none"
        self.rollback = Rollback(self.callbacks) if judged else None
        self._variances: tuple[slice, ...] = ()
        self.sites = Membership(
            self, plan, participation, run, callbacks=self.callbacks, registered=registered, claims=claims
        )
        self.state: FederationState
        self.last_validation = FederationValidation()
        self.requests: Requests  # of the exchange that is going on, or was the last
        self._plan_json = plan.model_dump_json()
        return self

    def settle_model(self, layout: Layout) -> LabelContract:
        """Fix the layout of the model, after the roll call; see :meth:`Membership.settle_model`."""
        self._variances = layout.variances if self.plan.privacy.level == "none" else ()  # noise may make one negative
        return self.sites.settle_model(layout.signature)

    def resume(self, state: FederationState, last_validation: FederationValidation) -> None:
        """Have :meth:`start` go on from a state of this run, and from what was said of its model."""
        self._resumed, self.last_validation = state, last_validation

    @property
    def result(self) -> ModelState:
        """The model that the run ends with, as things stand."""
        return self.state.model if self.plan.evaluation.result == "last" else self.state.selected

    @property
    def result_round(self) -> int:
        """Round of the result; -1 where no model was judged yet."""
        return self.state.round if self.plan.evaluation.result == "last" else self.state.best_round

    @property
    def chosen_round(self) -> int | None:
        """The round whose model the federation chose on validation; None where nobody chose, or each site did."""
        chooses = self.selection == "federation" and self.plan.evaluation.result == "best"
        return self.state.best_round if chooses and self.state.best_round >= 0 else None

    @property
    def known(self) -> RoundContext:
        """What the coordinator knows after the last round."""
        return self.sites.known(self.state.round, self.state.statistics)

    # ------------------------------------------------------------------ requests

    def new_requests(self, server_round: int) -> Requests:
        """Begin an exchange."""
        self.requests = Requests(
            method=self,
            plan=self.plan,
            plan_json=self._plan_json,
            run=self.run,
            deadline_s=self.participation.round_deadline_s,
            known=self.known_in(server_round),
            state=self.state,
            best=self.result_round,
            nodes={site: member.node_id for site, member in self.sites.members.items()},
            total_down=self.sites.bytes_down,
            frozen=self.frozen,
            variances=self._variances,
        )
        return self.requests

    def given(self, server_round: int) -> Callable[[str], Arrays]:
        """What gives the statistics that each site receives in this round."""
        return self.statistics_for(self.known_in(server_round))

    def known_in(self, server_round: int) -> RoundContext:
        """What the coordinator knows when a round begins or ends."""
        return self.sites.known(server_round, self.state.statistics)

    def train_message(self, site: str, model: ModelState, statistics: Arrays) -> Message:
        """Ask a site to train; before round 1 and in secure aggregation its reply holds no update."""
        update = self.requests.known.round > 0 and not self.plan.privacy.secure_aggregation
        return self.requests.train(site, model, statistics, update=update)

    def evaluate_messages(
        self, server_round: int, model: ModelState, sites: Collection[str], *, test: bool
    ) -> list[Message]:
        requests = self.new_requests(server_round)
        return [requests.evaluate(site, model, test=test) for site in sorted(sites)]

    # ------------------------------------------------------------------ replies

    def exchanged(
        self,
        grid: Grid,
        messages: Iterable[Message],
        phase: str,
        server_round: int,
        deadline_s: float,
        enough: int | None = None,
    ) -> Iterator[Message]:
        """Send, and yield replies as they come; the callbacks receive who is waited for.

        Args:
            enough: Good replies that make it worth not waiting for lost sites; ``min_sites`` where left out.
        """
        names = {member.node_id: site for site, member in self.sites.members.items()}
        sent, ends = list(messages), time.monotonic() + deadline_s
        good = self.sites.needed(len(sent)) if enough is None else enough

        def waiting(silent: Collection[int], lost: Collection[int]) -> None:
            waited_for = silent if len(sent) - len(lost) < good else set(silent) - set(lost)
            sites, gone = (tuple(sorted(names[node] for node in nodes)) for nodes in (waited_for, lost))
            self.callbacks.on_wait(Waiting(phase, server_round, sites, gone, ends - time.monotonic()))

        return exchange(grid, sent, Patience(deadline_s, good), waiting, self.sites.registered)

    def received(
        self,
        replies: Iterable[Message],
        expected: type[Reply],
        keep: Callable[[Reply], Reply] = lambda reply: reply,
        refuse: Callable[[str], None] = lambda site: None,
    ) -> Replies[Reply]:
        """Pass the replies to the present requests through the quarantine; see :func:`received` there."""
        came = received(
            self.requests,
            replies,
            expected,
            on_reply=self.callbacks.on_reply,
            largest_share=self.participation.largest_share,
            keep=keep,
            refuse=refuse,
        )
        self.sites.bytes_up.update(came.bytes_up)
        return came

    def needed(self, came: Replies[Reply]) -> int:
        """How many replies to an exchange make it count.

        With ``min_sites = 0`` that is every site but those that sent what cannot count, which must not end the run for
        the others; one that is away or gives up with an error still is needed.
        """
        return max(self.sites.needed(len(self.requests.expected) - len(came.unfit)), 1)
