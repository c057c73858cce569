"""The round loop in which one model goes from hospital to hospital, the coordinator relaying it (specs 2.4).

A lost hospital is skipped: the pass goes on from the last good model. A round moves the model down and up once a
hospital, as in FedAvg, but one hospital after the other. The deadline of a round is that of each hop.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from common.data.base.image_set import Splits
from common.errors import Fault
from common.models.state import ModelState
from common.wire.records import EvaluateReply, TrainReply
from strategies.aggregation.norm_bound import Lengths
from strategies.aggregation.server_optimizer import Moments
from strategies.base.aggregator import visit
from strategies.base.flower_arrays import array_record
from strategies.base.round_record import CoordinatorRound, FederationValidation, RunStopped
from strategies.base.state import after_round, with_judgement
from strategies.rounds.messages.replies import Replies, round_record, too_few, validation_of
from strategies.rounds.strategy import FederatedAveraging
from strategies.unifed.server_training import OwnTraining, ServerTraining, mixture


@dataclass
class Pass:
    """One pass, as it goes.

    Attributes:
        model: The last good one.
        result: What the round would end with after the last hop.
        replies: Of whom it has passed through, in that order.
        absent: Whom it could not, with the reasons.
        lengths: Site -> lengths of its last update that counted, earlier rounds included.
        shortened: Whose update was too long, with what was done.
    """

    model: ModelState
    result: ModelState
    lengths: Mapping[str, Lengths]
    replies: dict[str, TrainReply] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    shortened: dict[str, str] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)


class SequentialPassing(FederatedAveraging):
    """One model is passed on from hospital to hospital, round by round: averaging over cohorts of one."""

    sequential = True
    missing = "negative"
    own: OwnTraining | None = None

    def use_images(self, own: Splits, class_names: tuple[str, ...], device: str) -> None:
        """Receive the coordinator's own images; they validate, and train where :attr:`server` says how."""
        self.own = OwnTraining(own, self.plan, self, class_names, device, self.frozen.part)

    @property
    def server(self) -> ServerTraining | None:
        """How the coordinator trains; None where it does not."""
        return None

    @property
    def trains_at_coordinator(self) -> bool:
        """Whether the coordinator trains on images of its own."""
        return self.server is not None

    def order(self, server_round: int) -> tuple[str, ...]:
        """The sites of a round in the order in which the model passes through them: by name."""
        return tuple(self.sites.drawn(server_round, self.state.excluded))

    def after_hop(self, left: int, hops: int, result: ModelState, passed: ModelState) -> ModelState:
        """What a round would end with after one more hop: the model as it was passed on.

        Args:
            left: Rounds that follow this one.
            hops: In this round, this one included.
            result: The same after the hop before; the model that the round began with before the first.
            passed: The model after this hop.
        """
        return passed

    def image_faults(self, own: Splits | None) -> list[Fault]:
        """A coordinator that trains needs images of its own."""
        if not self.trains_at_coordinator or (own and len(own.train) and len(own.validation)):
            return []
        problem = f"{self.name} trains on images of the coordinator's own, and judges by them; there are none."
        remedy = 'Name them in [server_data]; in simulation partition.kind = "tasks" sets some aside too.'
        return [Fault("run.method", problem, remedy)]

    def of_averaging(self) -> list[str]:
        """A pass hands every site a model to stay near, too; and it has no weights and no warm-up."""
        given, found = self.parameters, super().of_averaging()
        if self.hospitals_train:
            found = [key for key in found if key != "proximal_mu"]
        found += ["weighting"] if given.weighting != "uniform" else []
        return found + (["warm_up_epochs"] if given.warm_up_epochs else [])

    def why_nothing_is_averaged(self) -> str:
        """The reason."""
        return "the model is passed on, not averaged"

    def contradictions(self) -> list[Fault]:
        """The whole network is passed on."""
        found = super().contradictions()
        if self.parameters.trunk == "fedbn":
            problem = f"makes no sense in {self.name}: the whole network is passed on, batch normalisation too."
            found.append(Fault("method.trunk", problem, 'Use "fedavg" or "fedbn_plus".'))
        return found

    @property
    def is_over(self) -> bool:
        """Whether too many rounds have passed since the best mixed model (specs 2.4, step 7)."""
        best = self.state.best_round
        return self.server is not None and best > 0 and self.state.round - best >= self.server.patience

    def before_rounds(self, grid: Grid, timeout: float) -> None:
        """Where sites are ranked, all train an epoch side by side, from the same model, and tell the slope."""
        if not self.ranks_sites:
            return
        self.new_requests(0)
        given, sites = self.given(0), sorted(self.sites.members)
        messages = [self.train_message(site, self.state.model, given(site)) for site in sites]
        came = self.received(self.exchanged(grid, messages, "train", 0, timeout), TrainReply)
        needed = self.needed(came)
        if len(came.accepted) < needed:
            raise too_few("ranking the sites", came, needed)
        self.callbacks.on_absent("ranking", came.absent)
        self.state = replace(self.state, statistics=self.aggregate_statistics(self.known_in(0), came.accepted))

    def after_rounds(self, arrays: ArrayRecord, grid: Grid, timeout: float) -> None:
        """Ask nobody: each round validates its own model."""

    def judges(self) -> list[str]:
        """The sites that validate each round's model: of a sample the same ones in all rounds, to be compared."""
        return self.sites.drawn_to_evaluate(0, self.state.excluded) if self.samples_sites else super().judges()

    def train_round(self, server_round: int, arrays: ArrayRecord, grid: Grid, timeout: float) -> MetricRecord:
        """One pass, the coordinator's own training, the mixture; and how good it is."""
        self.begin(server_round, grid)
        done = self._passed(grid, server_round, timeout)
        arrived, before, validated = time.monotonic(), self.state, self.last_validation
        model, moments, coordinator = self._with_own_training(done.result, server_round)
        self.state = after_round(
            before,
            server_round,
            done.replies,
            done.absent,
            model=model,
            moments=moments,
            statistics=self.aggregate_statistics(self.known_in(server_round), done.replies),
        )
        self.state = replace(self.state, lengths=done.lengths)
        seconds = time.monotonic() - arrived - (coordinator.seconds if coordinator else 0.0)
        self._judge(grid, server_round, timeout)
        record = round_record(
            server_round,
            done.replies,
            absent=done.absent,
            validation=validated,
            bytes_down=done.bytes_down,
            bytes_up=done.bytes_up,
            seconds=time.monotonic() - self._began,
            aggregate_seconds=seconds,
            coordinator=coordinator,
            shortened=done.shortened,
            after=self.last_validation,
        )
        return self.noted(record)

    # ------------------------------------------------------------------ the pass

    def _passed(self, grid: Grid, server_round: int, timeout: float) -> Pass:
        """Send the model through the sites.

        Raises:
            TooFewSites: As soon as it cannot pass through ``min_sites``.
        """
        order, given = self.order(server_round), self.given(server_round)
        done = Pass(self.state.model, self.state.model, self.state.lengths)
        needed, unfit = self.sites.needed(len(order)), set[str]()
        for place, site in enumerate(order):
            self.new_requests(server_round)
            message = self.train_message(site, done.model, given(site))
            dispensable = len(done.replies) + len(order) - place - 1 >= needed
            replies = self.exchanged(grid, [message], "train", server_round, timeout, enough=0 if dispensable else 1)
            came = self.received(replies, TrainReply)
            self._note_hop(done, site, came)
            if site in came.unfit or (site in came.accepted and site not in done.replies):
                unfit.add(site)
                needed = max(self.sites.needed(len(order) - len(unfit)), 1)
            if len(done.replies) + len(order) - place - 1 < needed:
                raise too_few(f"round {server_round}", Replies(done.replies, done.absent, {}), len(order))
        return done

    def _note_hop(self, done: Pass, site: str, came: Replies[TrainReply]) -> None:
        done.absent.update(came.absent)
        done.bytes_down.update(self.requests.bytes_down)
        done.bytes_up.update(came.bytes_up)
        for reply in came.accepted.values():
            passed = visit(done.model, reply, self.clip, done.lengths)
            if passed.reason:
                done.absent[site] = passed.reason
                continue
            if passed.shortened:
                done.shortened[site] = passed.shortened
            done.replies[site] = reply
            done.model, done.lengths = passed.model, passed.lengths
            left = self.plan.run.rounds - reply.round
            done.result = self.after_hop(left, len(done.replies), done.result, done.model)

    # ------------------------------------------------------------------ the coordinator's own images

    def _with_own_training(
        self, hospitals: ModelState, server_round: int
    ) -> tuple[ModelState, Moments, CoordinatorRound | None]:
        """Mix the hospitals' model with what the coordinator makes of the mixed model of the round before."""
        server, state = self.server, self.state
        if server is None:
            return hospitals, state.moments, None
        assert self.own is not None, "checked before the run"
        try:
            trained, moments, record = self.own.trained(state.model, server_round, server, state.moments)
        except FloatingPointError as error:
            raise RunStopped(f"round {server_round}, the coordinator's own training: {error}") from error
        return mixture(hospitals, trained, server.alpha), MappingProxyType(dict(moments)), record

    def _judge(self, grid: Grid, server_round: int, timeout: float) -> None:
        """Validate the model as it stands: on the coordinator's images, or else, and where asked, at the sites."""
        at_sites = self.plan.evaluation.test_each_round or not (self.own and self.own.validation.any_known)
        found = FederationValidation()
        if at_sites:
            messages = self.configure_evaluate(server_round, array_record(self.state.model), ConfigRecord(), grid)
            came = self.received(self.exchanged(grid, messages, "evaluate", server_round, timeout), EvaluateReply)
            found = validation_of(came.accepted)
        if self.own and self.own.validation.any_known:
            found = replace(self.own.judged(self.state.model), tallies=found.tallies)
        self.last_validation = found
        self.state = with_judgement(self.state, found, self.chosen_by(self.plan.evaluation))
