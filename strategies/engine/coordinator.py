"""The coordinator of one run: the loop of rounds, the steps of a round, evaluation and test, on any Flower ``Grid``.

A round needs one exchange of messages: each site first evaluates the received model on its validation part, then
trains. So the validation loss of round *t* arrives with the replies of round *t + 1*. One more exchange after the last
round evaluates the last model. Flower's own loop needs two exchanges in each round.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from polyclinic.common.config import HospitalPlan, ParticipationSection
from polyclinic.common.contract import LabelContract
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import FrozenPart, ModelState, ModelStateLayout, make_model_layout
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.wire.records import NO_ARRAYS, EvaluateReply, TrainReply, have_equal_arrays
from polyclinic.data.base.image_set import DatasetSplits
from polyclinic.strategies.engine.admission_limits import ClaimsBySite
from polyclinic.strategies.engine.aggregator import (
    Aggregator,
    UpdateStorage,
    get_update_norm_limit,
    make_aggregator,
    update_global_model,
)
from polyclinic.strategies.engine.events import FederationValidation, MissingReplyStatus, RoundRecord, RunCallbacks
from polyclinic.strategies.engine.exchange import (
    ExchangeReplies,
    ExchangeRequests,
    FrozenModelPartDelivery,
    Reply,
    check_exchange_replies,
    make_too_few_sites_error,
    send_and_receive,
)
from polyclinic.strategies.engine.layers import (
    CoordinatorRoundLayer,
    ImageClaimLayer,
    ImageShareCapLayer,
    Merge,
    RollbackLayer,
    RoundOutcome,
    RoundRepetition,
    RunningVarianceCheckLayer,
    UpdateNormBoundLayer,
)
from polyclinic.strategies.engine.membership import Registered, RunMembership, SiteProcesses
from polyclinic.strategies.engine.secure_aggregation import SecureAggregationLayer
from polyclinic.strategies.engine.state import (
    MIN_SITES_TO_OUTVOTE,
    FederationState,
    find_uncounted_sites,
    is_state_dict,
    make_initial_state,
    make_model_array_record,
    make_state_after_round,
    make_state_dict_record,
    read_global_model,
    record_absent_sites,
    record_model_validation,
)
from polyclinic.strategies.methods.base import Method, RoundContext


class Coordinator:
    """Leads one run of a method: :meth:`start`, then :meth:`test_result_model`.

    A caller that needs the run's classes before :meth:`start` first calls ``sites.call_roll`` and
    :meth:`fix_run_model_layout`.

    Args:
        method: The coordinator's half of the method; it holds no state of the run.
        plan: The part of the experiment that hospitals receive.
        participation: Number of sites that take part, and deadlines for their replies.
        callbacks: Receive the events of the run.
        registered: Returns the site name of each registered node; None in simulation.
        claims: Returns the sites' limits, the order in which they were admitted, and the coordinator's lists of
            classes; None if nobody admits sites.
        processes: Returns the process of each node, which shows that a site was restarted; None in simulation.
        storage: Where a round's updates wait; None for memory and the system's temporary folder.
        frozen: The part of the model that is not trained; the plan names the hash of this part.

    Attributes:
        sites: The sites that take part.
        state: The coordinator's state after the last round.
        last_validation: The sites' validation figures of the current model.
        requests: Requests of the round's training or evaluation, from its configuration to its aggregation.
        grid: Flower's connection to the sites; set when the run starts.
        deadline_s: Seconds after which an exchange ends without the sites that have not replied.
        criterion: The criterion by which the best model is chosen.
    """

    def __init__(
        self,
        method: Method,
        plan: HospitalPlan,
        participation: ParticipationSection,
        run: str,
        *,
        callbacks: RunCallbacks | None = None,
        registered: Registered | None = None,
        claims: ClaimsBySite | None = None,
        processes: SiteProcesses | None = None,
        storage: UpdateStorage | None = None,
        frozen: FrozenPart | None = None,
    ) -> None:
        self.method, self.plan, self.participation, self.run = method, plan, participation, run
        self.callbacks = callbacks or RunCallbacks()
        self._storage = storage or UpdateStorage()
        if plan.model.train != "all" and (frozen is None or frozen.sha256 != plan.model.frozen_sha256):
            raise ValueError("the plan's model has a frozen part; pass it as frozen, and name its hash in the plan")
        self.frozen = None if frozen is None else FrozenModelPartDelivery(frozen)
        rules = registered, claims, processes
        self.sites = RunMembership(method, plan, participation, run, self.callbacks, *rules)
        self.state: FederationState
        self.last_validation = FederationValidation()
        self.requests: ExchangeRequests
        self.grid: Grid
        self.deadline_s = participation.round_deadline_s
        self.criterion = method.site.choose_selection_criterion(plan.evaluation)
        self._variance_slices: Sequence[slice] = ()
        self._resumed: FederationState | None = None
        self._lowered: dict[str, int] = {}  # claims that the callbacks know to be lowered
        self._plan_json = plan.model_dump_json()

    @cached_property
    def layers(self) -> tuple[CoordinatorRoundLayer, ...]:
        """Return the optional layers that this run uses around its rounds, outermost first; made at their first use."""
        return tuple(self._iterate_round_layers())

    def _iterate_round_layers(self) -> Iterator[CoordinatorRoundLayer]:
        """Yield the optional layers that this run uses around its rounds, such as secure aggregation."""
        privacy = self.plan.privacy
        if self._variance_slices and privacy.level == "none":  # noise may make one negative
            yield RunningVarianceCheckLayer(self._variance_slices)
        yield ImageClaimLayer(self)
        if privacy.secure_aggregation:
            yield SecureAggregationLayer(self)
        clip = get_update_norm_limit(self.method.site, self.participation, privacy)
        if clip is not None and not self.method.site.traits.sequential:
            bound = UpdateNormBoundLayer(clip)
            if privacy.level == "none":
                yield RollbackLayer(self, bound)
            yield bound
        if self.participation.largest_share < 1:
            yield ImageShareCapLayer(self.participation.largest_share)

    @property
    def _needs_all_updates(self) -> bool:
        """True if all updates of a round must arrive before any is merged."""
        traits = self.method.site.traits
        return traits.weighs_updates or traits.reads_updates or any(layer.buffered for layer in self.layers)

    def fix_run_model_layout(self, layout: ModelStateLayout) -> LabelContract:
        """Fix the order and shapes of the model's values; refuse sites whose software would build another model.

        Returns:
            The label contract of the remaining sites: the run's classes, and the classes that each site annotates.
        """
        assert "layers" not in vars(self), "the layers are of the model's layout, which comes first"
        self._variance_slices = layout.running_variance_slices
        return self.sites.fix_run_model_layout(layout.layout_sha256)

    def receive_coordinator_images(self, own: DatasetSplits, class_names: tuple[str, ...], device: str) -> None:
        """Receive the coordinator's own images; this class ignores the images, and a subclass trains on them."""

    def set_resume_state(self, state: FederationState, last_validation: FederationValidation) -> None:
        """Set the stored state from which :meth:`start` continues, and the validation figures of the stored model."""
        self._resumed, self.last_validation = state, last_validation

    @property
    def result_model(self) -> ModelState:
        """Return the current result model of the run: the last or the best one, as the experiment chooses."""
        return self.state.model if self.plan.evaluation.checkpoint == "last" else self.state.best_or_last_model

    @property
    def result_round(self) -> int:
        """Return the round of :attr:`result_model`.

        -1 if the experiment asks for the best model (``checkpoint = "best"``) and none is validated yet.
        """
        return self.state.round if self.plan.evaluation.checkpoint == "last" else self.state.best_round

    @property
    def round_chosen_by_validation(self) -> int | None:
        """Return the round of the best model, as chosen by the mean of the sites' validation figures.

        None if the last model is the result, if each site chooses its own best round, or if no model is validated yet.
        """
        chooses = self.method.site.traits.selection == "federation" and self.plan.evaluation.checkpoint == "best"
        return self.state.best_round if chooses and self.state.best_round >= 0 else None

    @property
    def reason_for_last_model(self) -> str:
        """Return why the experiment's choice of the best model did not take place; empty if it did."""
        chooses = self.method.site.traits.selection == "federation" and self.plan.evaluation.checkpoint == "best"
        members = self._count_participants()
        judges = len(self.state.best_losses)
        if not chooses or (self.state.best_round >= 0 and not judges < MIN_SITES_TO_OUTVOTE <= members):
            return ""
        if members < MIN_SITES_TO_OUTVOTE:
            remedy = "give a hospital validation images with known labels"
            return (
                f"no hospital sent a validation figure. The last model is the result. To have a round chosen, {remedy}"
            )
        is_last = self.state.best_round in (-1, self.state.round)
        model = "last model" if is_last else f"model of round {self.result_round}"
        figure = "Dice" if is_segmentation(self.plan.model.task) else "AUROC"
        measure = figure if self.state.criterion == "auroc" else "loss"
        few = (
            f"fewer than {MIN_SITES_TO_OUTVOTE} of {members} hospitals sent a validation {measure} to compare rounds by"
        )
        rule = f"and one hospital alone must not choose. The {model} is the result"
        remedy = (
            "give more hospitals validation images with known labels, of policy.smallest_count patients or more: a"
            " hospital with fewer sends no figure"
        )
        if measure == "Dice":
            remedy = (
                'set evaluation.criterion = "loss", or give more hospitals validation images with an organ outlined'
            )
        elif measure == "AUROC":
            remedy = (
                'set evaluation.criterion = "loss", or give more hospitals validation images with and without a finding'
            )
        return f"{few}, {rule}. To have a round chosen, {remedy}"

    def _count_participants(self) -> int:
        """Return the number of members that are neither excluded nor without any accepted reply."""
        return len(self.sites.members.keys() - self.uncounted_sites.keys())

    def make_final_round_context(self) -> RoundContext:
        """Return the data for the method's rules after the last round: contract, roll call answers, statistics."""
        return self.sites.make_round_context(self.state.round, self.state.statistics, self.uncounted_sites)

    @property
    def uncounted_sites(self) -> dict[str, str]:
        """Return the sites whose statistics do not count now, with the reasons: uncounted or excluded sites."""
        return {**self.state.uncounted, **self.state.excluded}

    # ------------------------------------------------------------------ the loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Train ``num_rounds`` rounds from the initial model, or continue from the state given to
        :meth:`set_resume_state`.

        Makes the roll call first, unless ``sites.call_roll`` was called before.

        Args:
            initial_arrays: The initial model, built from the plan's seed or weights file; hospitals build the same
                model and compare. Either the result of :func:`make_model_array_record`, or the ``state_dict`` of a
                network from :func:`polyclinic.common.models.network.build_network` for the run's classes.
            num_rounds: Total number of rounds, including those before a resumed state.
            timeout: Seconds for each exchange, instead of ``participation.round_deadline_s``.
            should_stop: Called after each round with the round's number and the result so far, as by Flower's own
                strategies since 1.43. If it returns True, the run ends as after its last round: the sites still
                validate the model. The result so far has the rounds' training losses and no model yet.

        Returns:
            Flower's result; its ``arrays`` hold the result model in the same form as ``initial_arrays``.

        Raises:
            RunStopped: If fewer than ``min_sites`` replies of a round count, or the coordinator's own training
                diverges.
            BadInput: If the labels contradict one another, the method does not fit them, or the initial model does not
                fit the run's network and classes.
        """
        self.grid = grid
        self.deadline_s = self.participation.round_deadline_s if timeout is None else timeout
        if not self.sites.members:
            connected = len(list(grid.get_node_ids()))
            contract = self.sites.call_roll(grid, max(connected, self.participation.min_sites, 1))
            network = build_network(self.plan.model, contract.class_names, self.plan.run.seed)
            self.fix_run_model_layout(make_model_layout(network))
        as_state_dict = is_state_dict(initial_arrays)
        initial = read_global_model(initial_arrays, self.sites.contract.class_names, self.plan)
        self.state = self._resumed or make_initial_state(self.method.site, initial)
        result = Result()
        del initial, initial_arrays  # two models, which would stay in memory for the whole run
        if not self.state.round:
            self._prepare_before_rounds()
        while True:
            try:
                while (server_round := self.state.round + 1) <= num_rounds and not self._should_stop_early():
                    loss = self._train_round(server_round).mean_train_loss
                    metrics = MetricRecord({} if loss is None else {"train-loss": loss})
                    result.train_metrics_clientapp[server_round] = metrics
                    if should_stop is not None and should_stop(server_round, result):
                        break
                if self._newest_validated_round < self.state.round:
                    messages = self.configure_evaluate()
                    self.aggregate_evaluate(self.exchange_messages(messages, "evaluate", self.state.round))
            except RoundRepetition as repetition:  # the round is done again
                self.last_validation = self.callbacks.on_state_reset(repetition.state)
                self.state = repetition.state
                continue
            break
        model = self.result_model
        result.arrays = make_state_dict_record(model, self.plan) if as_state_dict else make_model_array_record(model)
        return result

    def _prepare_before_rounds(self) -> None:
        """Prepare a new run before the first round; this class does nothing, and subclasses override the method."""

    def _should_stop_early(self) -> bool:
        """Return True if the best model is older than ``evaluation.patience`` rounds, so that the run ends early."""
        patience = self.plan.evaluation.patience
        best = self.state.best_round
        return patience is not None and best >= 0 and self._newest_validated_round - best >= patience

    @property
    def _newest_validated_round(self) -> int:
        """Return the newest round whose model is validated: sites validate a round's model in the next round."""
        return self.state.round - 1

    def _train_round(self, server_round: int) -> RoundRecord:
        """Request training from all sites of a round, and aggregate the replies."""
        messages = self.configure_train(server_round, self.grid)
        return self.aggregate_train(server_round, self.exchange_messages(messages, "train", server_round))

    # ------------------------------------------------------------------ a round

    def configure_train(self, server_round: int, grid: Grid) -> list[Message]:
        """Return the training messages of a round: one for each drawn site, with the head rows of that site."""
        self._begin_round(server_round, grid)
        self.requests = requests = self.begin_message_exchange(server_round)
        chosen = self.sites.draw_training_sites(server_round, self.state.excluded)
        for layer in self.layers:
            chosen = layer.filter_sites_of_round(chosen)
        update_in_reply = all(layer.updates_in_replies for layer in self.layers)
        uncounted = self.uncounted_sites
        statistics = self.method.statistics_for(requests.context)
        messages = list[Message]()
        for site in chosen:
            of_site = statistics(site)
            if site in uncounted:
                # It trains as if its statistics counted, so that they are right for it when its reply is accepted.
                others = uncounted.keys() - {site}
                context = self.sites.make_round_context(server_round, self.state.statistics, others)
                of_site = self.method.statistics_for(context)(site)
            messages.append(requests.make_train_message(site, self.state.model, of_site, update=update_in_reply))
        return messages

    def _begin_round(self, server_round: int, grid: Grid) -> None:
        """Admit sites that have connected since the last round, and record the start time of the round."""
        self.grid = grid
        if server_round > 1:
            self.sites.admit_late_joiners(server_round)
        lowered = self.sites.lower_image_claims(self.uncounted_sites)
        if new := {site: images for site, images in lowered.items() if site not in self._lowered}:
            self.callbacks.on_lowered_claims(new)
            self._lowered.update(new)
        self._began = time.monotonic()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> RoundRecord:
        """Check the replies, record the validation losses of the previous model, and update the global model.

        Raises:
            TooFewSites: If fewer than ``min_sites`` replies count.
        """
        requests = self.requests
        before = self.state.model
        context = requests.context
        aggregator = make_aggregator(
            self.method, before, requests.due_updates, self._storage, buffered=self._needs_all_updates
        )
        received = self.collect_checked_replies(requests, replies, TrainReply, aggregator)
        validation = FederationValidation.from_replies(received.accepted)
        voters = {site: why for site, why in received.absent.items() if site not in self.uncounted_sites}
        for layer in self.layers:
            layer.on_validation(validation, voters)
        self._repeat_round_with_uncounted_statistics(context, received, received.unfit)
        self.refuse_too_few_replies(server_round, received)
        self._repeat_round_with_uncounted_statistics(context, received, received.absent)
        received = replace(received, accepted=aggregator.restore_stored_updates(received.accepted))
        outcome = self._merge_updates(received, aggregator, context)
        accepted = outcome.received.accepted
        absent = outcome.received.absent
        refused = received.unfit | outcome.received.unfit
        validation = FederationValidation.from_replies(accepted)
        model, moments = update_global_model(self.method, server_round, outcome.merged.means, self.state.moments)
        state = make_state_after_round(
            record_model_validation(self.state, validation, self.criterion, self._count_participants()),
            server_round,
            accepted,
            absent,
            refused=refused,
            model=model,
            moments=moments,
            statistics=self.method.aggregate_statistics(self._drop_uncounted_statistics(context, refused), accepted),
        )
        for layer in self.layers:
            state = layer.update_state_after_round(state, validation)
        earlier = self.state
        self.state = state
        record = RoundRecord.from_replies(
            server_round,
            accepted,
            images=self._find_lowered_images(accepted),
            uncounted=tuple(sorted(context.uncounted)),
            absent=absent,
            validation=validation,
            bytes_down=dict(requests.bytes_down),
            bytes_up=outcome.received.bytes_up,
            seconds=time.monotonic() - self._began,
            aggregate_seconds=time.monotonic() - outcome.arrived,
            shortened=outcome.merged.shortened,
            plain=outcome.merged.plain,
            closed_rows=outcome.closed_rows,
        )
        self.report_uncounted_sites(server_round, earlier)
        self.callbacks.on_round_end(record, state)
        return record

    # ------------------------------------------------------------------ sites whose statistics do not count

    def _repeat_round_with_uncounted_statistics(
        self, context: RoundContext, received: ExchangeReplies[TrainReply], candidates: Collection[str]
    ) -> None:
        """Let the sites train the round again if they received statistics of a site that turns out not to count.

        This happens at most once for each site: in the first round in which the site is asked to train. A run with
        noise or masks repeats no round, because a repetition costs privacy budget, and a site masks each round once.

        Args:
            context: The data from which the statistics were made that the sites received.
            candidates: The sites whose reply does not count for a certain reason.

        Raises:
            RoundRepetition: If the statistics without those sites are others.
        """
        privacy = self.plan.privacy
        state = self.state
        if privacy.level != "none" or privacy.secure_aggregation:
            return
        new = {site: received.absent[site] for site in candidates if not state.counted.get(site)}
        new = {site: why for site, why in new.items() if site not in context.uncounted}
        if not new:
            return
        server_round = context.round
        uncounted = context.uncounted | new.keys()
        without = self.sites.make_round_context(server_round, context.statistics, uncounted)
        sent, due = self.method.statistics_for(context), self.method.statistics_for(without)
        if all(have_equal_arrays(sent(site), due(site)) for site in self.requests.due_updates if site not in uncounted):
            return
        self.callbacks.on_round_repetition(server_round, sorted(new))
        reasons = find_uncounted_sites(state, server_round, (), new, new)
        state = replace(state, uncounted=MappingProxyType({**state.uncounted, **reasons}))
        before = self.state
        self.state = state
        self.report_uncounted_sites(server_round, before)
        raise RoundRepetition(state)

    def _drop_uncounted_statistics(self, context: RoundContext, refused: Collection[str]) -> RoundContext:
        """Return the data for aggregating a round's statistics, without those of sites that were refused in it.

        A mean over sites does not show the part of each site. So if a site that contributed is refused, the means of
        earlier rounds are dropped, and only the statistics of this round remain.
        """
        uncounted = {*context.uncounted, *refused}
        contributed = {site for site in refused if self.state.counted.get(site)} - context.uncounted
        statistics = context.statistics
        if contributed and not self.method.site.traits.stores_statistics_by_site:
            statistics = NO_ARRAYS
        return self.sites.make_round_context(context.round, statistics, uncounted)

    def _find_lowered_images(self, accepted: Mapping[str, TrainReply]) -> dict[str, int]:
        """Return site -> number of images that counts for it, where that is not the number that it stated."""
        answers = self.sites.answers
        images = {site: reply.train_samples for site, reply in accepted.items()}
        return {site: count for site, count in images.items() if count != answers[site].train_samples}

    def report_uncounted_sites(self, server_round: int, before: FederationState) -> None:
        """Report to the callbacks whose statistics have ceased to count since ``before``, and whose count again."""
        earlier = before.uncounted
        now = self.state.uncounted
        reasons = {site: why for site, why in now.items() if site not in earlier}
        counting = sorted(earlier.keys() - now.keys())
        if reasons or counting:
            self.callbacks.on_uncounted_sites(server_round, reasons, counting)

    def _merge_updates(
        self, received: ExchangeReplies[TrainReply], aggregator: Aggregator, context: RoundContext
    ) -> RoundOutcome:
        """Merge the updates by the method's mean; the layers of the run may change the merging."""
        arrived = time.monotonic()

        def merge_by_method(replies: ExchangeReplies[TrainReply]) -> RoundOutcome:
            return RoundOutcome(replies, aggregator.compute_update_means(context, replies.accepted), arrived)

        merge: Merge = merge_by_method
        for layer in reversed(self.layers):
            merge = layer.wrap_update_merge(merge)
        return merge(received)

    def refuse_too_few_replies(self, server_round: int, received: ExchangeReplies[TrainReply]) -> None:
        """Raise :class:`TooFewSites` if fewer replies of a round count than needed."""
        requests = len(self.requests.due_updates)
        if len(received.accepted) < self._count_needed_replies(received, requests):
            raise make_too_few_sites_error(f"round {server_round}", received, requests)

    def _count_needed_replies(self, received: ExchangeReplies[Reply], requests: int) -> int:
        """Return how many replies must count for an exchange to be valid: ``min_sites``, at least 1.

        With ``min_sites = 0`` every site must reply, except sites whose reply was rejected, so that a bad reply cannot
        end the run for the other sites. A missing site, or one that answers with an error, is still needed.

        Args:
            requests: Number of requests that were sent.
        """
        return max(self.sites.count_needed_replies(requests - len(received.unfit)), 1)

    # ------------------------------------------------------------------ evaluation

    def configure_evaluate(self) -> list[Message]:
        """Return the messages that request the validation loss of the current model from the sites."""
        sites = self._choose_final_validation_sites()
        self.requests, messages = self.make_evaluate_messages(self.state.round, self.state.model, sites, test=False)
        return messages

    def aggregate_evaluate(self, replies: Iterable[Message]) -> None:
        """Record the sites' validation figures of the last model, which may become the best model."""
        received = self.collect_checked_replies(self.requests, replies, EvaluateReply)
        self.callbacks.on_absent_sites("evaluate", received.absent)
        uncounted = self.uncounted_sites
        self.last_validation = FederationValidation.from_replies(received.accepted).without_sites(uncounted)
        voters = {site: why for site, why in received.absent.items() if site not in uncounted}
        for layer in self.layers:
            layer.on_validation(self.last_validation, voters)
        members = self._count_participants()
        judged = record_model_validation(self.state, self.last_validation, self.criterion, members)
        self.state = record_absent_sites(judged, "evaluation", received.accepted, received.absent)

    def test_result_model(self, grid: Grid) -> ExchangeReplies[EvaluateReply]:
        """Ask the sites to test the result model, with each site's local parts, on their test images.

        Raises:
            TooFewSites: If too few sites answer, and the run has no global model that could be tested without them.
        """
        self.grid = grid
        drawn = self.sites_drawn_for_test
        sites = self._list_sites_not_excluded() if drawn is None else drawn
        requests, messages = self.make_evaluate_messages(self.state.round, self.result_model, sites, test=True)
        replies = self.exchange_messages(messages, "test", self.state.round)
        received = self.collect_checked_replies(requests, replies, EvaluateReply)
        needed = self._count_needed_replies(received, len(messages))
        if not self.method.site.parts.has_global_model and len(received.accepted) < needed:
            raise make_too_few_sites_error("test", received, needed)
        return received

    @property
    def sites_drawn_for_test(self) -> tuple[str, ...] | None:
        """Return the sites drawn for the final test, which cover all classes if possible; None if all sites test."""
        if not self._tests_on_site_sample:
            return None
        return tuple(self.sites.draw_evaluating_sites(self.state.round, self.state.excluded))

    @property
    def _tests_on_site_sample(self) -> bool:
        """Return True if only a sample of the sites tests the model, False if all do.

        If sites keep local model parts, all sites test, because each site chooses and stores its model during the test.
        """
        return self.method.site.parts.has_global_model and self.sites.evaluates_site_sample

    def _list_sites_not_excluded(self) -> list[str]:
        return sorted(set(self.sites.members) - set(self.state.excluded))

    def _choose_final_validation_sites(self) -> list[str]:
        """Return the sites that validate the model after the last round.

        If only a sample of the sites tests the model, these are the sites that validated the best model so far, because
        only they can compare it with the last model. If the run chooses no best model, they are the sites that the next
        round would draw.
        """
        if not self._tests_on_site_sample:
            return self._list_sites_not_excluded()
        excluded = set(self.state.excluded)
        judges = set[str]()
        if self.plan.evaluation.checkpoint == "best":
            judges = set(self.state.best_losses) & set(self.sites.members)
        return sorted(judges - excluded) or self.sites.draw_training_sites(self.state.round + 1, excluded)

    # ------------------------------------------------------------------ one exchange

    def begin_message_exchange(self, server_round: int) -> ExchangeRequests:
        """Return the object that makes the requests of a new exchange, and records what their replies must contain."""
        return ExchangeRequests(
            method=self.method,
            plan=self.plan,
            plan_json=self._plan_json,
            run=self.run,
            deadline_s=self.deadline_s,
            context=self.sites.make_round_context(server_round, self.state.statistics, self.uncounted_sites),
            answers=self.sites.answers,
            images=self.sites.lower_image_claims(self.uncounted_sites),
            state=self.state,
            result_round=self.result_round,
            nodes={site: member.node_id for site, member in self.sites.members.items()},
            total_down=self.sites.bytes_down,
            frozen=self.frozen,
        )

    def make_evaluate_messages(
        self, server_round: int, model: ModelState, sites: Collection[str], *, test: bool
    ) -> tuple[ExchangeRequests, list[Message]]:
        """Return a new exchange, and its requests for an evaluation on the sites' validation or test images."""
        requests = self.begin_message_exchange(server_round)
        return requests, [requests.make_evaluate_message(site, model, test=test) for site in sorted(sites)]

    def exchange_messages(
        self,
        messages: Collection[Message],
        phase: str,
        server_round: int,
        *,
        deadline_s: float | None = None,
        enough: int | None = None,
    ) -> Iterator[Message]:
        """Send messages and yield the replies as they arrive; the callbacks receive the names of missing sites.

        Args:
            phase: Name of the exchange, as progress displays show it.
            deadline_s: Seconds until the exchange ends; by default :attr:`deadline_s`.
            enough: Number of good replies after which disconnected sites are not waited for; by default ``min_sites``.
        """
        names = {member.node_id: site for site, member in self.sites.members.items()}
        seconds = self.deadline_s if deadline_s is None else deadline_s
        sent = list(messages)
        ends = time.monotonic() + seconds
        good = self.sites.count_needed_replies(len(sent)) if enough is None else enough

        def report_missing_sites(silent: Collection[int], lost: Collection[int]) -> None:
            waited_for = silent if len(sent) - len(lost) < good else set(silent) - set(lost)
            sites = tuple(sorted(map(names.__getitem__, waited_for)))
            gone = tuple(sorted(map(names.__getitem__, lost)))
            status = MissingReplyStatus(phase, server_round, sites, gone, ends - time.monotonic())
            self.callbacks.on_waiting_for_sites(status)

        registered = self.sites.registered
        report = report_missing_sites
        return send_and_receive(self.grid, sent, report, deadline_s=seconds, enough=good, registered=registered)

    def collect_checked_replies(
        self,
        requests: ExchangeRequests,
        replies: Iterable[Message],
        expected: type[Reply],
        aggregator: Aggregator | None = None,
    ) -> ExchangeReplies[Reply]:
        """Check the replies to an exchange's requests as they arrive, and count their bytes.

        Args:
            requests: The exchange.
            replies: Messages in any order.
            expected: Record class of a valid reply.
            aggregator: Receives the updates of accepted training replies, and the names of rejected sites.
        """

        layers = self.layers if expected is TrainReply else ()
        note = self.callbacks.on_reply
        result = check_exchange_replies(requests, replies, expected, note, layers, aggregator)
        self.sites.bytes_up.update(result.bytes_up)
        return result

    def collect_site_validation(
        self, requests: ExchangeRequests, messages: Collection[Message]
    ) -> FederationValidation:
        """Send requests for an evaluation; return the validation figures in the accepted replies."""
        replies = self.exchange_messages(messages, "evaluate", requests.context.round)
        received = self.collect_checked_replies(requests, replies, EvaluateReply)
        return FederationValidation.from_replies(received.accepted)
