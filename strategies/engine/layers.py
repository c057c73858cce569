"""Optional layers around the coordinator's rounds, such as a bound on updates or a rollback of collapsed models.

A layer can choose among the sites of a round, reject or change a reply, return the run to an earlier model, and wrap
the function that merges updates. This module has the interface and all layers except secure aggregation, which has its
own module. A run creates only the layers that it uses.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.aggregation.bounds import (
    Lengths,
    cap_image_counts,
    clip_long_updates,
    compute_median_part_norms,
    compute_update_part_norms,
    divide_norms_by_medians,
)
from polyclinic.strategies.aggregation.means import MergedUpdates
from polyclinic.strategies.engine.aggregator import update_global_model
from polyclinic.strategies.engine.events import FederationValidation, RollbackEvent
from polyclinic.strategies.engine.exchange import ExchangeReplies
from polyclinic.strategies.engine.state import FederationState
from polyclinic.strategies.engine.trials import (
    MAX_STORED_CHANGES,
    MIN_JUDGES,
    UpdateTrial,
    compute_loss_change,
    compute_loss_ratio,
    find_opposing_sites,
    has_loss_risen_beyond_noise,
    has_model_stalled,
    order_by_suspicion,
)

if TYPE_CHECKING:
    from polyclinic.strategies.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundOutcome:
    """The accepted replies of a round, and the means of their updates.

    Attributes:
        arrived: Time by ``time.monotonic`` when all replies had arrived.
        closed_rows: Head rows that stayed masked under secure aggregation.
    """

    received: ExchangeReplies[TrainReply]
    merged: MergedUpdates
    arrived: float
    closed_rows: tuple[str, ...] = ()


Merge = Callable[[ExchangeReplies[TrainReply]], RoundOutcome]
"""Function that makes the next model from the accepted replies of a round."""


class CoordinatorRoundLayer:
    """Base class of optional layers around the coordinator's rounds, such as secure aggregation.

    This class changes nothing; a layer overrides the steps of a round that it changes.

    Attributes:
        buffered: True if all updates of a round must arrive before any is merged.
        updates_in_replies: True if replies contain updates; False if masked updates are sent separately.
    """

    buffered: ClassVar[bool] = False
    updates_in_replies: ClassVar[bool] = True

    def filter_sites_of_round(self, sites: list[str]) -> list[str]:
        """Return those of the drawn sites that can take part in the round."""
        return sites

    def find_update_rejection_reason(self, update: ModelGroups, sent: ModelGroups) -> str:
        """Return why an update must be rejected, or an empty string; ``sent`` is the model that the site received."""
        return ""

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Receive an accepted reply on arrival; return it unchanged or changed."""
        return reply

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Receive the sites' validation figures of the current model, and why other sites' replies do not count."""

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return the function that merges a round's updates instead of ``merge``; it may call ``merge``."""
        return merge

    def update_state_after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Return the state after a round, with the values that this layer stores in the state.

        Args:
            validation: The sites' validation figures of the model at the beginning of the round.
        """
        return state


@dataclass
class RunningVarianceCheckLayer(CoordinatorRoundLayer):
    """Rejects updates that would make a running variance of batch normalisation negative.

    Attributes:
        variances: Slices of the ``norm`` group that hold running variances.
    """

    variances: Sequence[slice]

    def find_update_rejection_reason(self, update: ModelGroups, sent: ModelGroups) -> str:
        """Return a reason if the update makes a running variance negative beyond rounding errors; otherwise empty.

        Args:
            update: The update that the site sent.
            sent: The model that the site received.
        """
        if update.norm is None or sent.norm is None:
            return ""
        for place in self.variances:
            before = sent.norm[place].astype(np.float64)
            if (before + update.norm[place] < -1e-3 * (1 + np.abs(before))).any():
                return "it makes a variance of batch normalisation negative"
        return ""


@dataclass
class ImageClaimLayer(CoordinatorRoundLayer):
    """Lowers a site's number of images if it claims too many (:mod:`polyclinic.strategies.engine.admission_limits`)."""

    coordinator: "Coordinator"

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Return the reply; if it claims too many training images, with the lower number that counts."""
        images = self.coordinator.requests.images.get(reply.site)
        return reply if images is None else replace(reply, train_samples=images)


@dataclass
class ImageShareCapLayer(CoordinatorRoundLayer):
    """Limits one site's weight to a maximal share of the images that count
    (:mod:`polyclinic.strategies.aggregation.bounds`).

    The shares are of the sites whose updates are merged, because a site whose reply does not count must not change the
    weights of the others.

    Attributes:
        largest_share: Largest share of one site.
    """

    largest_share: float
    buffered: ClassVar[bool] = True

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return a function that lowers the numbers of images to the cap before ``merge`` merges the updates."""

        def merge_capped_updates(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            images = {site: reply.train_samples for site, reply in received.accepted.items()}
            capped = cap_image_counts(images, self.largest_share)
            replies = {site: replace(reply, train_samples=capped[site]) for site, reply in received.accepted.items()}
            return merge(replace(received, accepted=replies))

        return merge_capped_updates


class UpdateNormBoundLayer(CoordinatorRoundLayer):
    """Shortens updates that are much longer than the median update (:mod:`polyclinic.strategies.aggregation.bounds`).

    Args:
        clip: The largest length of an update, in median lengths of the round.
    """

    buffered = True

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self._lengths: dict[str, Lengths] = {}  # of each site's last update

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Measure the update's length on arrival, before other sites have replied; return the reply unchanged."""
        self._lengths[reply.site] = compute_update_part_norms(reply.update)
        return reply

    def compute_relative_lengths(self, replies: Mapping[str, TrainReply]) -> dict[str, float]:
        """Return the length of each site's update, in median lengths of the round: that of its longest part."""
        lengths = {site: self._lengths[site] for site in replies}
        medians = compute_median_part_norms(lengths.values())
        relative = dict[str, float]()
        for site, norms in lengths.items():
            relative[site] = max(divide_norms_by_medians(norms, medians).values(), default=0.0)
        return relative

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return a function that shortens long updates before ``merge`` merges them."""

        def merge_bounded_updates(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            replies, shortened = clip_long_updates(received.accepted, self.clip, self._lengths)
            outcome = merge(replace(received, accepted=replies))
            accepted = dict[str, TrainReply]()
            for site, reply in outcome.received.accepted.items():
                accepted[site] = replace(reply, update=received.accepted[site].update)  # as the site sent it
            result = replace(outcome.received, accepted=accepted)
            return replace(outcome, received=result, merged=replace(outcome.merged, shortened=shortened))

        return merge_bounded_updates


# ---------------------------------------------------------------------- rollback of a collapsed model

COLLAPSE_LOSS_RATIO = 3.0
"""Ratio of a model's loss to the previous model's, above which it has collapsed."""
TRIAL_SITE_COUNTS = range(3, 17)
"""Numbers of sites for which leave-one-site-out models are evaluated."""
TRIAL_PAUSE_FACTOR = 3
"""Pause between trials while the loss falls: a long update without harm in round r is tried again from round 3 r."""

MIN_SITES_WITH_USELESS_MODEL = 2
"""Smallest number of sites that must find a model useless before it counts as collapsed."""

DIVERGENCE_WORDS = ("diverged", "not a number", "validation_loss")
"""Words in a site's reason that show that its training diverged, or that its validation loss is not finite."""


class RoundRepetition(Exception):
    """Raised when a round must be trained again; carries the state from which the run continues."""

    def __init__(self, state: FederationState) -> None:
        super().__init__("the round is trained again")
        self.state = state


class ModelCollapse(RoundRepetition):
    """Raised when the current model has collapsed."""


def describe_model_collapse(losses: Mapping[str, float], absent: Mapping[str, str], before: Mapping[str, float]) -> str:
    """Return why a model has collapsed (it is useless to more than half of the sites), or an empty string.

    At least :data:`MIN_SITES_WITH_USELESS_MODEL` sites must report it. Otherwise, if the other sites send no figures, a
    single site could have every round trained twice.

    Args:
        losses: Site -> validation loss of the current model.
        absent: Site -> why its reply does not count.
        before: Site -> validation loss of the last model that had not collapsed.
    """
    diverged_sites = {site for site, why in absent.items() if any(words in why for words in DIVERGENCE_WORDS)}
    ratios = [compute_loss_ratio(losses[site], before[site]) for site in losses.keys() & before.keys()]
    high_ratios = [ratio for ratio in ratios if ratio > COLLAPSE_LOSS_RATIO]
    harmed = len(diverged_sites) + len(high_ratios)
    voters = len(diverged_sites | (before.keys() & (losses.keys() | absent.keys())))
    if harmed < MIN_SITES_WITH_USELESS_MODEL or 2 * harmed <= voters:
        return ""
    if not high_ratios:
        return f"{harmed} of {voters} sites have no finite loss"
    lowest = min(high_ratios)
    return f"{harmed} of {voters} sites have a validation loss {lowest:.3g} times as high as before, or more"


@dataclass(frozen=True)
class TrialSuspects:
    """The sites whose updates a trial tests for harm.

    Attributes:
        are_all: True if all sites of the round are suspects, because nothing points to a single site.
    """

    sites: tuple[str, ...] = ()
    are_all: bool = False


class RollbackLayer(CoordinatorRoundLayer):
    """Rolls back a collapsed model, and excludes a harmful site, which leave-one-site-out models reveal.

    A model has *collapsed* if the validation loss of more than half of the sites is three times as high as with the
    previous model, or not finite. The run then returns to the previous model, and the sites train the round again.

    Before updates are merged, a *trial* may take place (:mod:`polyclinic.strategies.engine.trials`): sites evaluate
    models without the updates of some sites. If one site's update turns out to be harmful, the updates are merged
    without it, and the site is excluded from the rest of the run. A trial takes place after a rollback, if the loss of
    the model rose beyond what the rounds before explain, or if an update had to be shortened. Among three or four
    sites, an update can be as long as all others together without being shortened; it is tried if the loss does not
    fall.

    The layer is off under secure aggregation, with noise, and in sequential training, because no model without one
    site's update can be made there. It does nothing if the number of sites is outside :data:`TRIAL_SITE_COUNTS`. With
    two sites, each would be the only judge of the other; with very many sites, one bounded update has little influence.

    Args:
        bound: The layer that bounds the length of updates; a trial may follow if it shortens an update.
    """

    buffered = True

    def __init__(self, coordinator: "Coordinator", bound: UpdateNormBoundLayer) -> None:
        self._coordinator = coordinator
        self._bound = bound

    def find_trial_suspects(
        self, state: FederationState, losses: Mapping[str, float], relative_lengths: Mapping[str, float]
    ) -> TrialSuspects:
        """Return the sites whose updates must be tried before a round's updates are merged; usually none.

        Args:
            state: The state before the round.
            losses: Site -> loss of the model at the beginning of the round, for sites with an accepted update.
            relative_lengths: Site -> length of its accepted update, in median lengths of the round.
        """
        server_round = state.round + 1
        if len(relative_lengths) not in TRIAL_SITE_COUNTS or len(losses) < MIN_JUDGES:
            return TrialSuspects()
        if state.repeated == server_round:
            return TrialSuspects(tuple(relative_lengths), are_all=True)
        change = compute_loss_change(losses, state.sound_losses)
        if has_loss_risen_beyond_noise(change, state.loss_changes) and server_round >= state.next_trial:
            return TrialSuspects(tuple(relative_lengths), are_all=True)
        long = {site for site, length in relative_lengths.items() if length > self._bound.clip}
        has_stalled = has_model_stalled(losses, state.sound_losses)
        if has_stalled:
            long.update(find_opposing_sites(relative_lengths))
        due = list[str]()
        for site in sorted(long):
            last = state.tried.get(site, 0)
            first = compute_round_of_next_trial(last) if has_stalled else TRIAL_PAUSE_FACTOR * last
            if server_round >= first:
                due.append(site)
        return TrialSuspects(tuple(due))

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Check if the current model has collapsed; a round is repeated at most once.

        Raises:
            ModelCollapse: If the model has collapsed and the state of the round before is stored.
        """
        state = self._coordinator.state
        counting = self._coordinator.sites.members.keys() - state.uncounted.keys()
        if len(counting) not in TRIAL_SITE_COUNTS or state.round <= state.repeated:
            return
        because = describe_model_collapse(validation.loss, absent, state.sound_losses)
        if because:
            earlier = self._coordinator.callbacks.on_rollback(RollbackEvent(state.round, state.round - 1, because))
            if earlier is not None:
                raise ModelCollapse(replace(earlier, repeated=state.round, excluded=state.excluded))

    def update_state_after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Store the losses of the model at the beginning of the round, and their change, for the next checks."""
        changes = state.loss_changes
        change = compute_loss_change(validation.loss, state.sound_losses)
        if change is not None and math.isfinite(change):
            changes = (*changes, change)[-MAX_STORED_CHANGES:]
        losses = MappingProxyType({**state.sound_losses, **validation.loss})
        return replace(state, sound_losses=losses, loss_changes=changes)

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return a function that merges the updates, after a trial of models without some sites if one is due."""

        def merge_after_trial(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            losses = FederationValidation.from_replies(received.accepted).loss
            lengths = self._bound.compute_relative_lengths(received.accepted)
            suspects = self.find_trial_suspects(self._coordinator.state, losses, lengths)
            if suspects.are_all:
                updates = {site: reply.update for site, reply in received.accepted.items()}
                suspects = replace(suspects, sites=tuple(order_by_suspicion(updates, lengths)))
            if suspects.sites:
                received = self._exclude_harmful_site(merge, received, suspects, losses)
            return merge(received)

        return merge_after_trial

    def _exclude_harmful_site(
        self,
        merge: Merge,
        received: ExchangeReplies[TrainReply],
        suspects: TrialSuspects,
        losses: Mapping[str, float],
    ) -> ExchangeReplies[TrainReply]:
        """Exclude from the run the suspect whose update harms the model, and return the replies of the other sites.

        All replies are returned if no update harms.

        Args:
            losses: Site -> loss that it stated; only these sites can judge.

        Raises:
            TooFewSites: If too few replies are left.
        """
        coordinator = self._coordinator
        server_round = coordinator.requests.context.round
        # Sites without suspicion judge first, by name; then the suspects, the most suspicious one last.
        suspicion_places = {site: place for place, site in enumerate(suspects.sites)}
        judges = sorted(losses, key=lambda site: (-suspicion_places.get(site, len(losses)), site))
        trial = UpdateTrial(partial(self._validate_without_sites, merge, received), judges)
        site, reason = trial.find_harmful_site(suspects.sites)
        state = coordinator.state
        if not site:
            coordinator.state = _put_off_next_trial(state, server_round, suspects)
            return received
        coordinator.callbacks.on_exclusion(server_round, site, reason)
        coordinator.state = replace(state, excluded={**state.excluded, site: reason})
        received = replace(received.drop_site_replies({site: reason}), unfit=received.unfit | {site})
        coordinator.refuse_too_few_replies(server_round, received)
        return received

    def _validate_without_sites(
        self, merge: Merge, received: ExchangeReplies[TrainReply], out: Collection[str], judges: Collection[str]
    ) -> FederationValidation:
        """Return the judges' validation figures of the round's model without the updates of some sites."""
        coordinator = self._coordinator
        server_round = coordinator.requests.context.round
        some = {site: reply for site, reply in received.accepted.items() if site not in out}
        means = merge(replace(received, accepted=some)).merged.means
        model, _ = update_global_model(coordinator.method, server_round, means, coordinator.state.moments)
        trial, messages = coordinator.make_evaluate_messages(server_round, model, judges, test=False)
        validation = coordinator.collect_site_validation(trial, messages)
        bytes_of_round = coordinator.requests.bytes_down
        for receiver, size in trial.bytes_down.items():
            bytes_of_round[receiver] = bytes_of_round.get(receiver, 0) + size
        return validation


def _put_off_next_trial(state: FederationState, server_round: int, suspects: TrialSuspects) -> FederationState:
    """Return the state after a trial that found no harm, with the first round of the next one.

    Pauses between trials grow, so that a run of 100 rounds has at most a dozen trials.
    """
    if suspects.are_all:
        return replace(state, next_trial=compute_round_of_next_trial(server_round))
    tried = dict.fromkeys(suspects.sites, server_round)
    return replace(state, tried=MappingProxyType({**state.tried, **tried}))


def compute_round_of_next_trial(server_round: int) -> int:
    """Return the first round of the next trial after a trial without harm: half as many rounds later, at least one."""
    return server_round + max(server_round // 2, 1)
