"""The common round loop as a Flower ``Strategy``: per-site content, aggregation, best model.

One exchange a round: a site first evaluates the model it receives on its validation part, which tells how good the
round before was, then trains. So the validation loss of round *t* is known when the replies of round *t + 1* are in;
one exchange after the last round closes the books. Flower's own loop takes two exchanges a round.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from common.config import ParticipationSection, Plan
from common.contract import LabelContract
from common.data.base.image_set import Splits
from common.errors import BadInput, Fault, quoted
from common.models.network import build
from common.models.state import Head, Layout, ModelState, layout_of, read_state, write_state
from common.system.plain_text import shown
from common.wire.codec import Written, encode, payload_bytes
from common.wire.records import Arrays, EvaluateReply, EvaluateRequest, Groups, TrainReply, TrainRequest
from strategies.aggregation.largest_share import counted_images
from strategies.aggregation.server_optimizer import Moments
from strategies.base.aggregate import moved_by
from strategies.base.aggregator import Intake
from strategies.base.callbacks import Callbacks
from strategies.base.known import Known
from strategies.base.method import Method
from strategies.base.robust_state import Merged
from strategies.base.round_record import Arrival, FederationValidation, RoundRecord, TooFewSites, Waiting
from strategies.base.state import (
    FederationState,
    Means,
    groups_expected,
    groups_for,
    with_absent,
    with_validation,
)
from strategies.privacy.secure_aggregation.supported import largest_change
from strategies.rounds.guard.broken import JUMP_SEEN, JUMP_UNSEEN, RolledBack, broken
from strategies.rounds.guard.signs import Variances
from strategies.rounds.guard.trial import UpdateTrial
from strategies.rounds.guard.verdict import Judged
from strategies.rounds.messages.exchange import Patience, exchange
from strategies.rounds.messages.plausible import SentAt, too_long, too_many_epochs
from strategies.rounds.messages.replies import Replies, Reply, decoded, is_unfit, told_by, validation_of
from strategies.rounds.messages.update_checks import fault_in, statistics_fault
from strategies.rounds.participation.claims import ClaimsBySite, no_lists
from strategies.rounds.participation.client_manager import Membership
from strategies.rounds.participation.roll_call import Registered
from strategies.rounds.secure_aggregation import Questions, Unmasked, unmasked_mean

Q = TypeVar("Q", TrainRequest, EvaluateRequest)


class FederatedAveraging(Method):
    """FedAvg (McMahan et al., AISTATS 2017) and the base of all methods: each departs from it in what it overrides.

    Call :meth:`prepare`, then :meth:`start`, then :meth:`test`. Who needs the contract's classes before the start calls
    ``sites.roll_call`` and :meth:`settle_model` first.

    Attributes:
        sites: Who takes part.
        state: Of the coordinator, after the last round.
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
    ) -> Self:
        """Make ready to coordinate one run; a hospital never does.

        Args:
            plan: The part of the experiment that hospitals receive.
            run: Identifier of the run.
            callbacks: Receive what happens.
            registered: The names of nodes; None in simulation.
            claims: What each site was admitted for.
            scratch: Folder for what must wait on disk; the system's own for temporary files where None.
        """
        self.plan, self.participation, self.run = plan, participation, run
        self.callbacks, self._scratch = callbacks or Callbacks(), scratch
        self._resumed: FederationState | None = None
        self._variance_places: tuple[slice, ...] = ()
        self.sites = Membership(
            self, plan, participation, run, callbacks=self.callbacks, registered=registered, claims=claims
        )
        self.state: FederationState
        self.last_validation = FederationValidation()
        self._sent: dict[str, Groups] = {}
        self._written: Written = {}  # this exchange's arrays as they travel, once for all sites
        self._down: dict[str, int] = {}
        self._asked: dict[str, SentAt] = {}
        self._plan_json = plan.model_dump_json()
        return self

    def settle_model(self, layout: Layout) -> LabelContract:
        """Fix the layout of the model, after the roll call; see :meth:`Membership.settle_model`."""
        places = layout.slices()
        self._variance_places = tuple(places[one.name] for one in layout.norm if one.name.endswith("running_var"))
        return self.sites.settle_model(layout.signature)

    def resume(self, state: FederationState, last_validation: FederationValidation) -> None:
        """Have :meth:`start` go on from a state of this run, and from what was said of its model."""
        self._resumed, self.last_validation = state, last_validation

    def use_images(self, own: Splits, class_names: tuple[str, ...], device: str) -> None:
        """Receive the coordinator's own images; FedAvg has no use for them."""

    def summary(self) -> None:
        """Print nothing: the run folder and the progress bar have it all."""

    # ------------------------------------------------------------------ the loop

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
        """The round whose model the federation chose by validation loss; None where nobody chose, or each site did."""
        chooses = self.selection == "federation" and self.plan.evaluation.result == "best"
        return self.state.best_round if chooses and self.state.best_round >= 0 else None

    @property
    def known(self) -> Known:
        """What the coordinator knows after the last round."""
        return self.sites.known(self.state.round, self.state.statistics)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train ``num_rounds`` rounds from the initial model, or from where :meth:`resume` says.

        The roll call is made here where nobody has made it.

        Args:
            grid: Flower's connection to the sites.
            initial_arrays: The initial model: of :func:`array_record`, or the ``state_dict`` of a network that
                :func:`common.models.network.build` made for the run's classes.
            num_rounds: Rounds in all, those before a resumed state included.
            timeout: Seconds for each exchange.

        Returns:
            The model that the run ends with, in the form of ``initial_arrays``.

        Raises:
            RunStopped: If a round stays under ``min_sites``, or the coordinator's own training diverges.
            BadInput: If the labels contradict one another, the method does not fit them, or the initial model is not of
                the run's network and classes.
        """
        if train_config or evaluate_config or evaluate_fn:
            warnings.warn("the plan settles training and evaluation; the extra arguments are ignored", stacklevel=2)
        if not self.sites.members:
            self._call_the_roll(grid)
        self.state = self._beginning(initial_arrays)
        result = self._all_rounds(grid, initial_arrays, num_rounds, timeout)
        of_network = "trunk" not in initial_arrays
        result.arrays = state_dict_record(self.result, self.plan) if of_network else array_record(self.result)
        return result

    def _call_the_roll(self, grid: Grid) -> None:
        """Ask whoever is connected, at least ``min_sites``; settle classes and model."""
        connected = len(list(grid.get_node_ids()))
        contract = self.sites.roll_call(grid, max(connected, self.participation.min_sites, 1))
        network = build(self.plan.model, contract.class_names, self.plan.run.seed)
        self.settle_model(layout_of(network))

    def _all_rounds(self, grid: Grid, arrays: ArrayRecord, num_rounds: int, timeout: float) -> Result:
        """Every round once, a broken model's round again; what comes before the first and after the last."""
        result = Result()
        if not self.state.round:
            self.before_rounds(grid, timeout)
        while True:
            try:
                while (server_round := self.state.round + 1) <= num_rounds and not self.is_over:
                    result.train_metrics_clientapp[server_round] = self.train_round(server_round, arrays, grid, timeout)
                self.after_rounds(arrays, grid, timeout)
            except ModelBroken as found:
                self._go_back(found.state)
                continue
            return result

    def before_rounds(self, grid: Grid, timeout: float) -> None:
        """Do what a new run begins with: in FedAvg nothing."""

    @property
    def is_over(self) -> bool:
        """Whether the run ends before its last round."""
        return False

    def train_round(self, server_round: int, arrays: ArrayRecord, grid: Grid, timeout: float) -> MetricRecord:
        """Ask all sites of the round, and aggregate their replies."""
        messages = self.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = self._exchanged(grid, messages, "train", server_round, timeout)
        return self.aggregate_train(server_round, replies)[1]

    def after_rounds(self, arrays: ArrayRecord, grid: Grid, timeout: float) -> None:
        """Ask once more, to learn how good the last model is."""
        last = self.state.round
        messages = self.configure_evaluate(last, arrays, ConfigRecord(), grid)
        self.aggregate_evaluate(last, self._exchanged(grid, messages, "evaluate", last, timeout))

    # ------------------------------------------------------------------ the guard

    @property
    def guarded(self) -> bool:
        """Whether sites that harm the model are looked for."""
        return self.participation.guard == "on" and not self.shares_nothing and self.pooled == "no"

    @property
    def _sees_updates(self) -> bool:
        """Whether single updates can be judged by all sites from the same model."""
        return not self.plan.privacy.secure_aggregation and not self.sequential

    def _take_back_if_broken(self, losses: Mapping[str, float], absent: Mapping[str, str]) -> None:
        """Look at what the sites say of the present model.

        Raises:
            ModelBroken: If it is broken, and there is a round to go back to.
        """
        state, guard = self.state, self.state.guard
        jump = JUMP_SEEN if self._sees_updates else JUMP_UNSEEN
        # Where a later round was taken back, this model was judged before: to take it back too would never end.
        judged = self.guarded and state.round >= max(guard.repeated, 1)
        because = broken(losses, absent, guard.losses, jump) if judged else ""
        if guard.held and guard.repeated == state.round and losses and not because:
            self._condemn(state.round, {guard.held: f"without it the model of round {state.round} is sound"})
        if not because:
            return
        repeated = guard.repeated == state.round
        if repeated and (self._sees_updates or not (guard.held or guard.to_hold or not guard.tried_all)):
            return  # it was done again, and nobody was found: the federation itself diverges
        again = guard.next_try(state.round, sorted(set(self.sites.members) - set(guard.liars)))
        earlier = self.callbacks.on_rollback(RolledBack(state.round, state.round - 1, because, again.held))
        if earlier is not None:
            raise ModelBroken(replace(earlier, guard=again.over(earlier.guard)))

    def _go_back(self, state: FederationState) -> None:
        self.state, self.last_validation = state, self.callbacks.on_reset(state)

    def _condemn(self, server_round: int, reasons: Mapping[str, str]) -> None:
        """Leave sites out for the rest of the run."""
        self.state = replace(self.state, guard=self.state.guard.without(reasons))
        for site, reason in reasons.items():
            self.callbacks.on_liar(server_round, site, reason)

    def _trial(self, server_round: int, intake: Intake, accepted: Mapping[str, TrainReply]) -> dict[str, str]:
        """Have the sites judge odd updates of this round; the ones that harm, with the reasons."""
        if not self.guarded or not self._sees_updates or len(accepted) < 2:
            return {}
        known = self._known(server_round)

        def model_of(sites: Collection[str]) -> ModelState:
            merged = intake.merged(known, {site: accepted[site] for site in sites})
            return self._moved(server_round, merged.means)[0]

        updates = {site: reply.update for site, reply in intake.whole(accepted).items()}
        trial = UpdateTrial(
            model_of, partial(self._judged, server_round, sorted(accepted)), self._variances(self.state.model)
        )
        losses = validation_of(accepted).loss
        lengths, annotated = intake.lengths(accepted), self.sites.contract.sites
        guard, reasons = trial.held(server_round, updates, lengths, annotated, guard=self.state.guard, judges=losses)
        self.state = replace(self.state, guard=guard)
        self._condemn(server_round, reasons)
        return reasons

    def _variances(self, model: ModelState) -> Variances:
        """Noise may make a variance negative, so with privacy none is looked at."""
        return Variances(model.norm, self._variance_places if self.plan.privacy.level == "none" else ())

    def _judged(self, server_round: int, sites: Collection[str], model: ModelState) -> Judged:
        """What sites say of a model that may become that of this round."""
        sent, down = self._sent, self._down
        messages = self._evaluate_messages(server_round, model, test=False, sites=sites)
        deadline_s = self.participation.round_deadline_s
        replies = self._exchanged(self._grid, messages, "evaluate", server_round, deadline_s)
        found = validation_of(self._received(server_round, replies, EvaluateReply).accepted)
        down.update({site: down.get(site, 0) + size for site, size in self._down.items()})
        self._sent, self._down = sent, down
        return Judged(found.loss, found.auroc)

    # ------------------------------------------------------------------ a round

    def _beginning(self, initial_arrays: ArrayRecord) -> FederationState:
        """The state to go on from, or that of a new run."""
        if self._resumed is not None:
            return self._resumed
        names = self.sites.contract.class_names
        if "trunk" in initial_arrays:
            return FederationState(0, model_state(initial_arrays, names))
        return FederationState(0, model_of_state_dict(initial_arrays, names, self.plan))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message a site, each with that site's own head rows."""
        if server_round > 1:
            self.sites.admit_late_joiners(server_round)
        self._began, self._grid = time.monotonic(), grid
        self._begin_exchange()
        chosen, told = self.sites.drawn(server_round, self.state.guard.excluded), self._told(server_round)
        return [self._train_message(server_round, site, self.state.model, told(site)) for site in chosen]

    def _told(self, server_round: int) -> Callable[[str], Arrays]:
        """What the method tells each site in this round."""
        return self.statistics_for(self._known(server_round))

    def _known(self, server_round: int) -> Known:
        return self.sites.known(server_round, self.state.statistics)

    def _begin_exchange(self) -> None:
        self._sent, self._down, self._written, self._asked = {}, {}, {}, {}

    def _train_message(self, server_round: int, site: str, model: ModelState, told: Arrays) -> Message:
        request = self._request(partial(TrainRequest, statistics=told), server_round, site, model)
        without_update = server_round == 0 or self.plan.privacy.secure_aggregation
        self._sent[site] = (
            Groups() if without_update else groups_expected(request.model, self, self.sites.contract.sites[site])
        )
        return self._message(site, MessageType.TRAIN, server_round, encode(request, self._written))

    def _request(self, make: Callable[..., Q], server_round: int, site: str, model: ModelState) -> Q:
        """A request of this run and round, and the model with that site's own head rows."""
        rows = self.rows_of(site, self.sites.contract)
        return make(
            run=self.run,
            round=server_round,
            plan=self._plan_json,
            contract=self.sites.contract.hash,
            class_names=tuple(rows),
            counted=self.state.counted.get(site, 0),
            best=self.result_round,
            left_out=self.state.left_out.get(site, ""),
            model=groups_for(model, rows),
        )

    def _message(self, site: str, kind: str, server_round: int, content: RecordDict) -> Message:
        size = payload_bytes(content)
        self._down[site] = self._down.get(site, 0) + size
        self.sites.bytes_down[site] += size
        self._asked[site] = SentAt()
        deadline = self.participation.round_deadline_s
        return Message(content, self.sites.members[site].node_id, kind, group_id=str(server_round), ttl=deadline)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Check the replies, note the validation losses of the round before, move the model.

        Raises:
            TooFewSites: If fewer than ``min_sites`` replies count.
        """
        needed = self.sites.needed(len(self._sent))
        secure = self.plan.privacy.secure_aggregation
        far = "off" if secure else self.participation.far_updates
        whole = self.guarded and self._sees_updates
        intake = Intake(self.state.model, self._sent, self, far, self._scratch, whole=whole)
        received = self._received(server_round, replies, TrainReply, intake.take, intake.leave_out)
        self._take_back_if_broken(validation_of(received.accepted).loss, received.absent)
        self._refuse_too_few(server_round, received)
        unmasked = self._unmasked(server_round, received) if secure else None
        if unmasked:
            received = unmasked.received
            self._refuse_too_few(server_round, received)
        arrived = time.monotonic()
        condemned = self._trial(server_round, intake, received.accepted)
        for site in condemned:
            intake.leave_out(site)
        received = received.without(condemned)
        self._refuse_too_few(server_round, received, len(condemned))
        sifted = intake.sifted(min(needed, len(received.accepted)))
        received = received.without(sifted.dropped)
        accepted, known = received.accepted, self._known(server_round)
        validation = validation_of(accepted)
        judged = with_validation(self.state, validation.loss)
        merged = Merged(unmasked.means) if unmasked else intake.merged(known, accepted)
        model, moments = self._moved(server_round, merged.means)
        counted = MappingProxyType({**self.state.counted, **dict.fromkeys(accepted, server_round)})
        learned = self.aggregate_statistics(known, accepted)
        self.state = replace(
            with_absent(judged, f"round {server_round}", accepted, received.absent),
            round=server_round,
            model=model,
            counted=counted,
            moments=moments,
            statistics=learned,
            guard=self.state.guard.after(intake.lengths(accepted), validation.loss),
        )
        record = RoundRecord(
            round=server_round,
            sites=tuple(accepted),
            absent=received.absent,
            train_loss=told_by(accepted, "train_loss"),
            validation=validation,
            site_seconds={site: reply.seconds for site, reply in accepted.items()},
            bytes_down=dict(self._down),
            bytes_up=received.bytes_up,
            seconds=time.monotonic() - self._began,
            aggregate_seconds=time.monotonic() - arrived,
            epochs={site: reply.epochs for site, reply in accepted.items()},
            far=sifted.kept,
            plain=merged.plain,
            closed_rows=unmasked.closed_rows if unmasked else (),
            epsilon=told_by(accepted, "epsilon"),
        )
        # No model: it is in the state, which outlives Flower's loop.
        return None, self._noted(record)

    def _noted(self, record: RoundRecord) -> MetricRecord:
        """Report a round that counted; return the metrics that Flower's result keeps of it."""
        self.callbacks.on_round(record, self.state)
        loss = record.mean_train_loss
        return MetricRecord({} if loss is None else {"train-loss": loss})

    def _refuse_too_few(self, server_round: int, received: Replies[TrainReply], condemned: int = 0) -> None:
        if len(received.accepted) < self._needed(received, condemned):
            raise too_few(f"round {server_round}", received, len(self._sent))

    def _needed(self, received: Replies[Reply], condemned: int = 0) -> int:
        """How many replies to an exchange make it count.

        With ``min_sites = 0`` that is every site. But a site that sends what cannot count must not end the run for the
        others, so the guard does not wait for it; one that is away or gives up with an error is still waited for.
        """
        out = condemned + (len(received.unfit) if self.guarded else 0)
        return max(self.sites.needed(len(self._sent) - out), 1)

    def _unmasked(self, server_round: int, received: Replies[TrainReply]) -> Unmasked:
        """The mean of updates that nobody sees.

        Raises:
            TooFewSites: If too few sites stay to the end.
        """
        contract = self.sites.contract
        rows = {site: self.rows_sent(self.rows_of(site, contract), contract.sites[site]) for site in self._sent}
        largest = largest_change(self.plan, self)
        questions = Questions(self.run, server_round, partial(self._queried, server_round))
        unmasked = unmasked_mean(questions, self, self.state.model, received, rows=rows, largest=largest)
        self.sites.bytes_up.update(questions.bytes_up)
        return unmasked

    def _queried(
        self, server_round: int, contents: Mapping[str, RecordDict], kind: str, enough: int
    ) -> Iterator[tuple[str, Message]]:
        """Send a query to some sites of the round; yield the replies with the sites' names."""
        names = {self.sites.members[site].node_id: site for site in contents}
        messages = [self._message(site, kind, server_round, content) for site, content in contents.items()]
        enough = max(enough, min(self.sites.needed(len(self._sent)), len(messages)))
        replies = self._exchanged(
            self._grid, messages, "masking", server_round, self.participation.round_deadline_s, enough
        )
        for reply in replies:
            yield names[reply.metadata.src_node_id], reply

    def _moved(self, server_round: int, means: Means) -> tuple[ModelState, Moments]:
        """The global model after these updates."""
        return moved_by(self, server_round, means, self.state.moments)

    # ------------------------------------------------------------------ evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the validation loss of the model as it stands after the last round."""
        return self._evaluate_messages(server_round, self.state.model, test=False)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note the last model's validation losses; it may be the best."""
        received = self._received(server_round, replies, EvaluateReply)
        self.callbacks.on_absent("evaluate", received.absent)
        self.last_validation = validation_of(received.accepted)
        self._take_back_if_broken(self.last_validation.loss, received.absent)
        mean = self.last_validation.mean_loss
        judged = with_validation(self.state, self.last_validation.loss)
        self.state = with_absent(judged, "evaluation", received.accepted, received.absent)
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def test(self, grid: Grid) -> Replies[EvaluateReply]:
        """Have every site test the best model, with its own parts of it where it keeps any, on its own test part.

        Raises:
            TooFewSites: If fewer than ``min_sites`` answer and there is no global model to test instead.
        """
        messages = self._evaluate_messages(self.state.round, self.result, test=True)
        replies = self._exchanged(grid, messages, "test", self.state.round, self.participation.round_deadline_s)
        received = self._received(self.state.round, replies, EvaluateReply)
        needed = self._needed(received)
        if not self.has_global_model and len(received.accepted) < needed:
            raise too_few("test", received, needed)
        return received

    def _evaluate_messages(
        self, server_round: int, model: ModelState, *, test: bool, sites: Collection[str] | None = None
    ) -> list[Message]:
        self._begin_exchange()
        messages = []
        taking_part = set(self.sites.members) - set(self.state.guard.liars)
        for site in sorted(taking_part if sites is None else sites):
            request = self._request(partial(EvaluateRequest, test=test), server_round, site, model)
            self._sent[site] = Groups()
            messages.append(self._message(site, MessageType.EVALUATE, server_round, encode(request, self._written)))
        return messages

    # ------------------------------------------------------------------ replies

    def _exchanged(
        self,
        grid: Grid,
        messages: Iterable[Message],
        phase: str,
        server_round: int,
        deadline_s: float,
        enough: int | None = None,
    ) -> Iterator[Message]:
        """Send, and yield replies as they come, telling whoever watches who is waited for.

        Args:
            enough: Good replies that make it worth not waiting for lost sites; ``min_sites`` where left out.
        """
        names = {member.node_id: site for site, member in self.sites.members.items()}
        ends = time.monotonic() + deadline_s

        def waiting(silent: Collection[int], lost: Collection[int]) -> None:
            sites, gone = (tuple(sorted(names[node] for node in nodes)) for nodes in (silent, lost))
            self.callbacks.on_wait(Waiting(phase, server_round, sites, gone, ends - time.monotonic()))

        sent = list(messages)
        enough = self.sites.needed(len(sent)) if enough is None else enough
        return exchange(grid, sent, Patience(deadline_s, enough), waiting)

    def _received(
        self,
        server_round: int,
        replies: Iterable[Message],
        expected: type[Reply],
        keep: Callable[[Reply], Reply] = lambda reply: reply,
        refuse: Callable[[str], None] = lambda site: None,
    ) -> Replies[Reply]:
        """Decode, match and quarantine replies as they come; whoever is left out has a reason.

        Args:
            keep: What is kept of a good reply.
            refuse: Told at once of a site whose reply does not count.
        """
        names = {member.node_id: site for site, member in self.sites.members.items()}
        known = self._known(server_round)
        absent = dict.fromkeys(self._sent, f"no reply within {self.participation.round_deadline_s:.0f} s")
        accepted: dict[str, Reply] = {}
        sizes: dict[str, int] = {}
        unfit: set[str] = set()
        for message in replies:
            site = names.get(message.metadata.src_node_id, "")
            if site not in self._sent:
                continue
            record, reason = decoded(message, expected)
            if record is not None:
                reason = shown(self._mismatch(record, site, known))
                sizes[site] = payload_bytes(message.content)
                self.sites.bytes_up[site] += sizes[site]
            content = message.content if message.has_content() else None
            self.callbacks.on_reply(Arrival(expected.__name__, server_round, site, content, reason))
            if record is None or reason:
                absent[site] = reason
                refuse(site)
                if is_unfit(message):
                    unfit.add(site)
                continue
            absent.pop(site, None)
            accepted[site] = keep(self._capped(record, site))
        return Replies({site: accepted[site] for site in sorted(accepted)}, absent, sizes, frozenset(unfit))

    def _capped(self, record: Reply, site: str) -> Reply:
        """The reply, with as many images as count where one site may not weigh more than a share of all."""
        if not isinstance(record, TrainReply) or self.participation.largest_share >= 1:
            return record
        images = {one: self.sites.members[one].answer.train_samples for one in self._sent}
        counted = counted_images(images, self.participation.largest_share)
        capped: Reply = replace(record, train_samples=counted[site])  # type: ignore[call-arg]
        return capped

    def _mismatch(self, record: TrainReply | EvaluateReply, site: str, known: Known) -> str:
        """Why a well-formed reply does not belong here, or an empty string."""
        came, wanted = (record.run, record.round, record.site), (self.run, known.round, site)
        if came != wanted:
            return f"reply belongs to run, round, site {came}, expected {wanted}"
        if isinstance(record, TrainReply):
            if record.train_samples != (said := self.sites.members[site].answer.train_samples):
                return f"trained on {record.train_samples} images, said {said} at the roll call"
            expected = self.statistics_shape(known, site, self.state.model.head.features)
            return (
                fault_in(record.update, self._sent[site])
                or statistics_fault(record.statistics, expected)
                or too_many_epochs(record, self, self.plan)
                or too_long(record, self._asked.get(site))
            )
        strangers = sorted(set(record.class_names) - set(self.sites.contract.sites[site]))
        return f"tested {quoted(strangers)}, which it does not annotate" if strangers else ""


class ModelBroken(Exception):
    """The present model is broken; carries the state to go on from."""

    def __init__(self, state: FederationState) -> None:
        super().__init__("the model is broken")
        self.state = state


def too_few(what: str, received: Replies[Reply], wanted: int) -> TooFewSites:
    """Who replied to what, and why the others did not."""
    reasons = "; ".join(f"{site}: {why}" for site, why in received.absent.items())
    return TooFewSites(f"{what}: {len(received.accepted)} of {wanted} sites replied. {reasons}")


def array_record(model: ModelState) -> ArrayRecord:
    """The global model as Flower's loop carries it."""
    return ArrayRecord({name: Array(array) for name, array in Groups.of_model(model).named().items()})


def model_state(arrays: ArrayRecord, class_names: tuple[str, ...]) -> ModelState:
    """The inverse of :func:`array_record`."""
    head = Head(class_names, arrays["head.weight"].numpy(), arrays["head.bias"].numpy())
    return ModelState(arrays["trunk"].numpy(), arrays["norm"].numpy(), head)


def model_of_state_dict(arrays: ArrayRecord, class_names: tuple[str, ...], plan: Plan) -> ModelState:
    """The global model from a network's ``state_dict``, as Flower's examples have it.

    Raises:
        BadInput: If it is not of the plan's network with a head row for each class.
    """
    network = build(plan.model, class_names, plan.run.seed)
    try:
        network.load_state_dict(arrays.to_torch_state_dict())
    except RuntimeError as error:
        problem = f"is no state_dict of the plan's network with the classes {quoted(class_names)}: {error}"
        raise BadInput([Fault("initial_arrays", problem)]) from None
    return read_state(network)


def state_dict_record(model: ModelState, plan: Plan) -> ArrayRecord:
    """The inverse of :func:`model_of_state_dict`."""
    network = build(plan.model, model.head.class_names, plan.run.seed)
    write_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    return ArrayRecord(network.state_dict())
