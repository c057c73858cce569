"""Sequential training: the coordinator passes one model from hospital to hospital.

If a hospital is lost, the next one continues. In a round each hospital receives and returns the model once, one after
the other. The deadline of a round applies to each hospital separately.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from polyclinic.common.config import HospitalPlan, ParticipationSection
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import SplitNetwork, build_network, unfreeze_network
from polyclinic.common.models.state import FrozenPart, ModelState, read_model_state, write_model_state
from polyclinic.common.system.hashing import derive_seed
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.images.pixels import load_pixels_on_device
from polyclinic.strategies.aggregation.bounds import Lengths
from polyclinic.strategies.aggregation.means import mix_models
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.engine.aggregator import add_sequential_site_update, get_update_norm_limit
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import CoordinatorTrainingRecord, FederationValidation, RoundRecord, RunStopped
from polyclinic.strategies.engine.exchange import ExchangeReplies, make_too_few_sites_error
from polyclinic.strategies.engine.layers import CoordinatorRoundLayer, UpdateNormBoundLayer
from polyclinic.strategies.engine.state import make_state_after_round, record_model_validation
from polyclinic.strategies.local.objective import LabelledExamples, pair_pixels_with_labels, plain, read_in_patches
from polyclinic.strategies.local.optimisation import make_optimizer, restore_optimizer_state, save_optimizer_state
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.training import (
    EarlyStopCriterion,
    FrozenNetworkParts,
    TrainingTask,
    make_training_reproducible,
    refuse_diverged_training,
    train_until_loss_settles,
    validate_network,
)
from polyclinic.strategies.methods.base import Method, SequentialMethod, ServerTrainingSettings

COORDINATOR = "coordinator"
"""Name of the coordinator in figures by site."""


@dataclass
class CoordinatorLocalTraining:
    """Trains and validates a network on the coordinator's own images."""

    images: DatasetSplits
    plan: HospitalPlan
    method: SiteMethod
    class_names: tuple[str, ...]
    device: str = "cpu"
    frozen: FrozenPart | None = None
    network: SplitNetwork = field(init=False)

    def __post_init__(self) -> None:
        spec = self.plan.model.model_copy(update={"weights": None})
        network = build_network(spec, self.class_names, self.plan.run.seed)
        if self.frozen is not None:
            self.frozen.write_to_network(network)
        self.network = move_network_to_device(network, self.device)

        def load_labelled_examples(images: ImageSet) -> LabelledExamples:
            return pair_pixels_with_labels(images, load_pixels_on_device(images, self.device), self.class_names)

        self.train_examples = read_in_patches(load_labelled_examples(self.images.train), spec, self.plan.training)
        self.validation_examples = load_labelled_examples(self.images.validation)

    def load_model_into_network(self, model: ModelState) -> None:
        write_model_state(self.network, trunk=model.trunk, norm=model.norm, head=model.head)

    def train_model(
        self, model: ModelState, server_round: int, server: ServerTrainingSettings, optimizer_state: Moments
    ) -> tuple[ModelState, Moments, CoordinatorTrainingRecord]:
        """Train a model until its loss settles; return the trained model, the optimiser's new state, and figures.

        Raises:
            FloatingPointError: If training diverged.
        """
        began = time.monotonic()
        spec = self.plan.training
        self.load_model_into_network(model)
        unfreeze_network(self.network)
        optimizer = make_optimizer(self.network, spec, spec.lr)
        if not spec.reset_optimizer:
            restore_optimizer_state(self.network, optimizer, optimizer_state)
        frozen = FrozenNetworkParts(norm=self.method.parts.freezes_batch_norm)
        objective = plain(self.method.choose_training_loss(self.train_examples, spec))
        batch_weight = self.method.make_batch_weight(self.train_examples, spec)
        task = TrainingTask(
            self.train_examples, objective, spec, self.plan.augmentation, frozen, batch_weight=batch_weight
        )
        criterion = EarlyStopCriterion(self.validation_examples, self.method.loss, server.early_stopping)
        seed = derive_seed(self.plan.run.seed, server_round, "\0", COORDINATOR)
        with make_training_reproducible(seed, spec.threads) as generator:
            done = train_until_loss_settles(self.network, task, optimizer, generator, criterion)
        record = CoordinatorTrainingRecord(done.last_loss, done.epochs, time.monotonic() - began)
        state = read_model_state(self.network)
        refuse_diverged_training(ModelGroups.from_model(state), done.last_loss)
        return state, {} if spec.reset_optimizer else save_optimizer_state(self.network, optimizer), record

    def validate_model(self, model: ModelState) -> FederationValidation:
        """Return loss and AUROC of a model on the coordinator's validation images."""
        self.load_model_into_network(model)
        with make_training_reproducible(0, self.plan.training.threads):
            validation = validate_network(self.network, self.validation_examples, self.method.loss, self.plan.training)
        figures = validation.loss, validation.mean_auroc
        loss, auroc = ({COORDINATOR: value} if value is not None and math.isfinite(value) else {} for value in figures)
        return FederationValidation(loss, auroc)


@dataclass
class SequentialModelPass:
    """The progress of one round, in which the model passes through the sites.

    Attributes:
        model: The model after the last accepted update.
        result: The result of the round if it ended after the last accepted update.
        replies: Accepted replies, in the order of visits.
        absent: Site -> why the site was skipped.
        unfit: Those of the skipped sites whose reply was refused.
        lengths: Site -> lengths of the parts of its last accepted update, earlier rounds included.
        shortened: Site -> a sentence that says how its update was shortened, for updates that were too long.
        site_models: Site -> the model as it was passed on from there, if the method stores such models.
    """

    model: ModelState
    result: ModelState
    lengths: Mapping[str, Lengths]
    replies: dict[str, TrainReply] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    shortened: dict[str, str] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    site_models: dict[str, ModelState] = field(default_factory=dict)


class SequentialCoordinator(Coordinator):
    """A coordinator that passes one model from hospital to hospital, and can train on its own images."""

    method: SequentialMethod
    _own: CoordinatorLocalTraining | None = None

    def receive_coordinator_images(self, own: DatasetSplits, class_names: tuple[str, ...], device: str) -> None:
        """Receive the coordinator's own images, for validation and, in methods such as UniFed, for training."""
        frozen = self.frozen.part if self.frozen else None
        self._own = CoordinatorLocalTraining(own, self.plan, self.method.site, class_names, device, frozen)

    def _should_stop_early(self) -> bool:
        """Return True if the best model is older, in rounds, than the patience of the method or of the experiment.

        The method's patience counts only if the best model is better than the initial one
        (docs/papers.md#unifed-patience).
        """
        server = self.method.server_training_settings
        best = self.state.best_round
        settled = server is not None and best > 0 and self.state.round - best >= server.patience
        return settled or super()._should_stop_early()

    @property
    def _newest_validated_round(self) -> int:
        """Return the newest round whose model is validated.

        A round of passing ends with the validation of its model. A model of averaging is validated in the next round.
        """
        is_averaged = self.state.round > 0 and self.method.site.averages_in_round(self.state.round)
        return self.state.round - is_averaged

    def _iterate_round_layers(self) -> Iterator[CoordinatorRoundLayer]:
        """Yield the layers of every coordinator, and for rounds of averaging a bound on the length of updates."""
        yield from super()._iterate_round_layers()
        clip = get_update_norm_limit(self.method.site, self.participation, self.plan.privacy)
        if self.method.site.traits.has_averaging_rounds and clip is not None:
            yield UpdateNormBoundLayer(clip)

    def _prepare_before_rounds(self) -> None:
        """Train one epoch at all sites from the same model, if the method orders sites by their losses."""
        if not self.method.site.traits.ranks_sites:
            return
        self.requests = requests = self.begin_message_exchange(0)
        statistics = self.method.statistics_for(requests.context)
        sites = sorted(self.sites.members)
        model = self.state.model
        messages = [requests.make_train_message(site, model, statistics(site), update=False) for site in sites]
        received = self.collect_checked_replies(requests, self.exchange_messages(messages, "train", 0), TrainReply)
        needed = self._count_needed_replies(received, len(messages))
        if len(received.accepted) < needed:
            raise make_too_few_sites_error("ranking the sites", received, needed)
        self.callbacks.on_absent_sites("ranking", received.absent)
        ranking = self.method.aggregate_statistics(requests.context, received.accepted)
        self.state = replace(self.state, statistics=ranking)

    def _choose_final_validation_sites(self) -> list[str]:
        """Return the sites that validate each round's model: the same in all rounds, so that losses are comparable."""
        if self._tests_on_site_sample:
            return self.sites.draw_evaluating_sites(0, self.state.excluded)
        return super()._choose_final_validation_sites()

    def _train_round(self, server_round: int) -> RoundRecord:
        """Pass the model through the sites, mix it with the coordinator's own model, and validate the mixture.

        In a round of averaging all sites train at once, as under any other coordinator.
        """
        if self.method.site.averages_in_round(server_round):
            return super()._train_round(server_round)
        self._begin_round(server_round, self.grid)
        done = self._pass_model_through_sites(server_round)
        arrived = time.monotonic()
        before = self.state
        validated = self.last_validation
        model, moments, coordinator = self._mix_with_coordinator_model(done.result, server_round)
        uncounted = self.uncounted_sites
        context = self.sites.make_round_context(server_round, before.statistics, uncounted)
        context = self._drop_uncounted_statistics(context, done.unfit)
        context = replace(context, site_models=done.site_models)
        state = make_state_after_round(
            before,
            server_round,
            done.replies,
            done.absent,
            refused=done.unfit,
            model=model,
            moments=moments,
            statistics=self.method.aggregate_statistics(context, done.replies),
        )
        self.state = replace(state, lengths=done.lengths)
        seconds = time.monotonic() - arrived - (coordinator.seconds if coordinator else 0.0)
        # Validate on the coordinator's images, or at the sites if it has no labelled ones. If the experiment tests in
        # each round, the sites also count correct predictions on their test images.
        own = self._own
        validation = FederationValidation()
        judges = self._count_participants()
        if self.plan.evaluation.test_each_round or not (own and own.validation_examples.has_known_labels):
            messages = self.configure_evaluate()
            validation = self.collect_site_validation(self.requests, messages)
            validation = validation.without_sites(self.uncounted_sites)
        if own and own.validation_examples.has_known_labels:
            validation = replace(own.validate_model(self.state.model), tallies=validation.tallies)
            judges = 1  # the coordinator alone, which needs no majority against itself
        self.last_validation = validation
        self.state = record_model_validation(self.state, validation, self.criterion, judges)
        record = RoundRecord.from_replies(
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
            images=self._find_lowered_images(done.replies),
            uncounted=tuple(sorted(uncounted)),
        )
        self.report_uncounted_sites(server_round, before)
        self.callbacks.on_round_end(record, self.state)
        return record

    def _pass_model_through_sites(self, server_round: int) -> SequentialModelPass:
        """Pass the model from site to site, and return the completed pass.

        Raises:
            TooFewSites: As soon as the model can no longer pass through ``min_sites`` sites in total.
        """
        context = self.sites.make_round_context(server_round, self.state.statistics, self.uncounted_sites)
        order = self.method.order_sites(context, self.sites.draw_training_sites(server_round, self.state.excluded))
        statistics = self.method.statistics_for(context)
        done = SequentialModelPass(self.state.model, self.state.model, self.state.lengths)
        needed = self.sites.count_needed_replies(len(order))
        clip = get_update_norm_limit(self.method.site, self.participation, self.plan.privacy)
        for place, site in enumerate(order):
            self.requests = requests = self.begin_message_exchange(server_round)
            message = requests.make_train_message(site, done.model, statistics(site), update=True)
            dispensable = len(done.replies) + len(order) - place - 1 >= needed
            replies = self.exchange_messages([message], "train", server_round, enough=0 if dispensable else 1)
            received = self.collect_checked_replies(requests, replies, TrainReply)
            done.absent.update(received.absent)
            done.bytes_down.update(requests.bytes_down)
            done.bytes_up.update(received.bytes_up)
            for reply in received.accepted.values():
                passed = add_sequential_site_update(done.model, reply, clip, done.lengths)
                if passed.reason:
                    done.absent[site] = passed.reason
                    continue
                if passed.shortened:
                    done.shortened[site] = passed.shortened
                done.replies[site] = reply
                done.model = passed.model
                done.lengths = passed.lengths
                if self.method.site.traits.stores_site_models:
                    done.site_models[site] = passed.model
                rounds_left = self.plan.run.rounds - reply.round
                done.result = self.method.result_after_site_visit(
                    server_round, rounds_left, len(done.replies), done.result, done.model
                )
            if site in received.unfit or (site in received.accepted and site not in done.replies):
                done.unfit.add(site)
                needed = max(self.sites.count_needed_replies(len(order) - len(done.unfit)), 1)
            if len(done.replies) + len(order) - place - 1 < needed:
                counted = ExchangeReplies(done.replies, done.absent, {})
                raise make_too_few_sites_error(f"round {server_round}", counted, len(order))
        return done

    def _mix_with_coordinator_model(
        self, hospitals: ModelState, server_round: int
    ) -> tuple[ModelState, Moments, CoordinatorTrainingRecord | None]:
        """Train the previous model on the coordinator's images, and mix the result with the hospitals' model.

        Return the hospitals' model unchanged if the method does not train at the coordinator.

        Raises:
            RunStopped: If the coordinator's training diverged.
        """
        server = self.method.server_training_settings
        state = self.state
        if server is None:
            return hospitals, state.moments, None
        assert self._own is not None, "checked before the run"
        try:
            trained, moments, record = self._own.train_model(state.model, server_round, server, state.moments)
        except FloatingPointError as error:
            raise RunStopped(f"round {server_round}, the coordinator's own training: {error}") from error
        return mix_models(hospitals, trained, server.alpha), MappingProxyType(dict(moments)), record


def make_coordinator(
    method: Method, plan: HospitalPlan, participation: ParticipationSection, run: str, **options: Any
) -> Coordinator:
    """Return the coordinator for a run of this method; the arguments are those of :class:`Coordinator`."""
    engine = SequentialCoordinator if isinstance(method, SequentialMethod) else Coordinator
    return engine(method, plan, participation, run, **options)
