"""The common round loop as a Flower ``Strategy``: per-site content, aggregation, best model.

One exchange a round: a site first evaluates the model it receives on its validation part, which tells how good the
round before was, then trains. So the validation loss of round *t* is known when the replies of round *t + 1* are in;
one exchange after the last round closes the books. Flower's own loop takes two exchanges a round.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from common.data.base.image_set import Splits
from common.models.network import build
from common.models.state import ModelState, layout_of
from common.wire.records import EvaluateReply, TrainReply
from strategies.aggregation.server_optimizer import Moments
from strategies.base.aggregator import Aggregator, moved_by
from strategies.base.flower_arrays import array_record, is_state_dict, model_of, state_dict_record
from strategies.base.robust_state import Merged
from strategies.base.round_record import FederationValidation, RoundRecord
from strategies.base.state import FederationState, Means, after_round, with_absent, with_judgement
from strategies.rounds.ask_sites import Exchanges
from strategies.rounds.messages.replies import Replies, round_record, too_few, validation_of
from strategies.rounds.rollback import ModelCollapse, culprit
from strategies.rounds.secure_aggregation import Questions, Unmasked, masked_together, queries, unmasked_mean


@dataclass(frozen=True)
class Decided:
    """The replies of a round that count, and the means that they make.

    Attributes:
        arrived: By ``time.monotonic``, when all replies were there.
        closed_rows: Head rows that stayed masked.
    """

    received: Replies[TrainReply]
    merged: Merged
    arrived: float
    closed_rows: tuple[str, ...] = ()


class FederatedAveraging(Exchanges):
    """FedAvg (McMahan et al., AISTATS 2017) and the base of all methods: each departs from it in what it overrides.

    Call :meth:`prepare`, then :meth:`start`, then :meth:`test`. Who needs the contract's classes before the start calls
    ``sites.roll_call`` and :meth:`settle_model` first.
    """

    def use_images(self, own: Splits, class_names: tuple[str, ...], device: str) -> None:
        """Receive the coordinator's own images; FedAvg has no use for them."""

    def summary(self) -> None:
        """Print nothing: the run folder and the progress bar have it all."""

    # ------------------------------------------------------------------ the loop

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
            initial_arrays: The plan's first model, which hospitals compare: of :func:`array_record`, or the
                ``state_dict`` of a network that :func:`common.models.network.build` made for the run's classes.
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
        flat = not is_state_dict(initial_arrays)
        result.arrays = array_record(self.result) if flat else state_dict_record(self.result, self.plan)
        return result

    def _beginning(self, initial_arrays: ArrayRecord) -> FederationState:
        """The state to go on from, or that of a new run."""
        if self._resumed is not None:
            return self._resumed
        return FederationState(0, model_of(initial_arrays, self.sites.contract.class_names, self.plan))

    def _call_the_roll(self, grid: Grid) -> None:
        """Ask anyone who is connected, at least ``min_sites``; settle classes and model."""
        connected = len(list(grid.get_node_ids()))
        contract = self.sites.roll_call(grid, max(connected, self.participation.min_sites, 1))
        network = build(self.plan.model, contract.class_names, self.plan.run.seed)
        self.settle_model(layout_of(network))

    def _all_rounds(self, grid: Grid, arrays: ArrayRecord, num_rounds: int, timeout: float) -> Result:
        """Every round once, that of a model that collapsed again; what comes before the first and after the last."""
        result = Result()
        if not self.state.round:
            self.before_rounds(grid, timeout)
        while True:
            try:
                while (server_round := self.state.round + 1) <= num_rounds and not self.is_over:
                    result.train_metrics_clientapp[server_round] = self.train_round(server_round, arrays, grid, timeout)
                self.after_rounds(arrays, grid, timeout)
            except ModelCollapse as collapse:
                self.state, self.last_validation = collapse.state, self.callbacks.on_reset(collapse.state)
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
        replies = self.exchanged(grid, messages, "train", server_round, timeout)
        return self.aggregate_train(server_round, replies)[1]

    def after_rounds(self, arrays: ArrayRecord, grid: Grid, timeout: float) -> None:
        """Ask once more, to learn how good the last model is."""
        last = self.state.round
        messages = self.configure_evaluate(last, arrays, ConfigRecord(), grid)
        self.aggregate_evaluate(last, self.exchanged(grid, messages, "evaluate", last, timeout))

    # ------------------------------------------------------------------ a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message a site, each with that site's own head rows."""
        self.begin(server_round, grid)
        self.new_requests(server_round)
        chosen = masked_together(self, self.sites.drawn(server_round, self.state.excluded))
        statistics = self.given(server_round)
        return [self.train_message(site, self.state.model, statistics(site)) for site in chosen]

    def begin(self, server_round: int, grid: Grid) -> None:
        """Let sites join that have connected since; note when the round begins."""
        if server_round > 1:
            self.sites.admit_late_joiners(server_round)
        self._began, self._grid = time.monotonic(), grid

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Check the replies, note the validation losses of the round before, move the model.

        Raises:
            TooFewSites: If fewer than ``min_sites`` replies count.
        """
        secure = self.plan.privacy.secure_aggregation
        aggregator = Aggregator(self.state.model, self.requests.expected, self, self.clip, self._scratch)
        came = self.received(replies, TrainReply, aggregator.take, aggregator.leave_out)
        self._refuse_collapse(validation_of(came.accepted).loss, came.absent)
        self._refuse_too_few(server_round, came)
        decided = self._unmasked(server_round, came) if secure else self._merged(server_round, came, aggregator)
        accepted, known = decided.received.accepted, self.known_in(server_round)
        before, validation = self.state, validation_of(accepted)
        model, moments = self._moved(server_round, decided.merged.means)
        self.state = after_round(
            with_judgement(before, validation, self.chosen_by(self.plan.evaluation)),
            server_round,
            accepted,
            decided.received.absent,
            model=model,
            moments=moments,
            statistics=self.aggregate_statistics(known, accepted),
            losses=validation.loss if self.rollback else {},
        )
        # No model: it is in the state, which outlives Flower's loop.
        return None, self.noted(self._record(server_round, decided))

    def _merged(self, server_round: int, came: Replies[TrainReply], aggregator: Aggregator) -> Decided:
        """The means of the updates that count."""
        arrived = time.monotonic()
        losses = validation_of(came.accepted).loss
        if self.rollback and self.rollback.due(self.state, losses, len(came.accepted), too_long=aggregator.too_long()):
            came = self._without_culprit(server_round, aggregator, came)
        return Decided(came, aggregator.merged(self.known_in(server_round), came.accepted), arrived)

    def _without_culprit(
        self, server_round: int, aggregator: Aggregator, came: Replies[TrainReply]
    ) -> Replies[TrainReply]:
        """The replies of a round but for the site whose update harms, if there is one; it is left out from now on."""
        known, sites = self.known_in(server_round), sorted(came.accepted)

        def judged(out: str = "") -> FederationValidation:
            means = aggregator.merged(known, {site: came.accepted[site] for site in sites if site != out}).means
            return self._judged(server_round, sites, self._moved(server_round, means)[0])

        site, reason = culprit(judged(), {site: judged(out=site) for site in sites})
        if not site:  # each pause is longer: a run of 100 rounds has a dozen trials in vain at most
            self.state = replace(self.state, next_trial=server_round + max(server_round // 2, 1))
            return came
        self.callbacks.on_exclusion(server_round, site, reason)
        self.state = replace(self.state, excluded={**self.state.excluded, site: reason})
        aggregator.leave_out(site)
        came = replace(came.without({site: reason}), unfit=came.unfit | {site})
        self._refuse_too_few(server_round, came)
        return came

    def _judged(self, server_round: int, sites: Collection[str], model: ModelState) -> FederationValidation:
        """What the sites say of a model that may become that of this round."""
        training = self.requests
        messages = self.evaluate_messages(server_round, model, sites, test=False)
        deadline_s = self.participation.round_deadline_s
        replies = self.exchanged(self._grid, messages, "evaluate", server_round, deadline_s)
        validation = validation_of(self.received(replies, EvaluateReply).accepted)
        for site, size in self.requests.bytes_down.items():
            training.bytes_down[site] = training.bytes_down.get(site, 0) + size
        self.requests = training
        return validation

    def _record(self, server_round: int, decided: Decided) -> RoundRecord:
        return round_record(
            server_round,
            decided.received.accepted,
            absent=decided.received.absent,
            validation=validation_of(decided.received.accepted),
            bytes_down=dict(self.requests.bytes_down),
            bytes_up=decided.received.bytes_up,
            seconds=time.monotonic() - self._began,
            aggregate_seconds=time.monotonic() - decided.arrived,
            shortened=decided.merged.shortened,
            plain=decided.merged.plain,
            closed_rows=decided.closed_rows,
        )

    def noted(self, record: RoundRecord) -> MetricRecord:
        """Report a round that counted; return the metrics that Flower's result keeps of it."""
        self.callbacks.on_round(record, self.state)
        loss = record.mean_train_loss
        return MetricRecord({} if loss is None else {"train-loss": loss})

    def _refuse_collapse(self, losses: Mapping[str, float], absent: Mapping[str, str]) -> None:
        if self.rollback:
            self.rollback.refuse_collapse(self.state, losses, absent, self.sites.members)

    def _refuse_too_few(self, server_round: int, came: Replies[TrainReply]) -> None:
        if len(came.accepted) < self.needed(came):
            raise too_few(f"round {server_round}", came, len(self.requests.expected))

    def _unmasked(self, server_round: int, came: Replies[TrainReply]) -> Decided:
        """The mean of updates that nobody sees.

        Raises:
            TooFewSites: If too few sites stay to the end.
        """
        contract, asked = self.sites.contract, self.requests.expected
        rows = {site: self.rows_sent(self.rows_of(site, contract), contract.sites[site]) for site in asked}
        questions = Questions(self.run, server_round, queries(self, self._grid))
        unmasked: Unmasked = unmasked_mean(questions, self, self.plan, self.state.model, came, rows=rows)
        self.sites.bytes_up.update(questions.bytes_up)
        self._refuse_too_few(server_round, unmasked.received)
        arrived = time.monotonic()
        return Decided(unmasked.received, Merged(unmasked.means), arrived, closed_rows=unmasked.closed_rows)

    def _moved(self, server_round: int, means: Means) -> tuple[ModelState, Moments]:
        """The global model after these updates."""
        return moved_by(self, server_round, means, self.state.moments)

    # ------------------------------------------------------------------ evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the validation loss of the model as it stands after the last round."""
        return self.evaluate_messages(server_round, self.state.model, self.judges(), test=False)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note what sites state of the last model; it may be the best."""
        came = self.received(replies, EvaluateReply)
        self.callbacks.on_absent("evaluate", came.absent)
        self.last_validation = validation_of(came.accepted)
        self._refuse_collapse(self.last_validation.loss, came.absent)
        mean = self.last_validation.mean_loss
        judged = with_judgement(self.state, self.last_validation, self.chosen_by(self.plan.evaluation))
        self.state = with_absent(judged, "evaluation", came.accepted, came.absent)
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def test(self, grid: Grid) -> Replies[EvaluateReply]:
        """Have sites test the best model, with their own parts of it where they keep any, on their own test parts.

        Raises:
            TooFewSites: If fewer than ``min_sites`` answer and there is no global model to test instead.
        """
        messages = self.evaluate_messages(self.state.round, self.result, self.testers(), test=True)
        replies = self.exchanged(grid, messages, "test", self.state.round, self.participation.round_deadline_s)
        came = self.received(replies, EvaluateReply)
        needed = self.needed(came)
        if not self.has_global_model and len(came.accepted) < needed:
            raise too_few("test", came, needed)
        return came
