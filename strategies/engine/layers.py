"""Optional layers around the coordinator's rounds, such as a bound on updates or a rollback of collapsed models.

A layer can choose among the sites of a round, reject or change a reply, return the run to an earlier model, and wrap
the function that merges updates. This module has the interface and all layers except secure aggregation, which has its
own module. A run creates only the layers that it uses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Merges the updates of accepted replies."""


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
    """Lowers a site's number of images where it claims too many (:mod:`polyclinic.strategies.engine.claims`)."""

    coordinator: "Coordinator"

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Return the reply with the number of training images that counts for the site."""
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

    def has_updates_over_norm_bound(self, replies: Mapping[str, TrainReply]) -> bool:
        """Return True if any of the updates is longer than the bound."""
        lengths = list(map(self._lengths.__getitem__, replies))
        medians = compute_median_part_norms(lengths)
        longest = 0.0
        for norms in lengths:
            longest = max(longest, *divide_norms_by_medians(norms, medians).values(), 0.0)
        return longest > self.clip

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

COLLAPSE, STALL = 3.0, 0.98
"""Ratios of a model's loss to the previous model's: above the first it has collapsed, above the second it stalls."""
HARM, HARM_AUROC = 2.0, 0.1
"""An update harms if it raises the loss by this ratio, or lowers the AUROC by this difference."""
LEAST_LOSS = 0.1
"""A lower loss counts as this loss, because a loss of 0.02 near convergence doubles by chance."""
SITES = range(3, 17)
"""Numbers of sites for which leave-one-site-out models are evaluated."""
FEWEST_JUDGES = 2
"""Smallest number of other sites that judge a site's update: a single judge could exclude any other site."""

FEWEST_HARMED = 2
"""Smallest number of sites to which a collapsed model is useless."""

CANNOT_GO_ON = ("diverged", "not a number", "validation_loss")
"""Words in the reasons of sites where training diverged, or the validation loss is not finite."""


class RoundRepetition(Exception):
    """Raised when a round must be trained again; carries the state from which the run continues."""

    def __init__(self, state: FederationState) -> None:
        super().__init__("the round is trained again")
        self.state = state


class ModelCollapse(RoundRepetition):
    """Raised when the current model has collapsed."""


def describe_model_collapse(losses: Mapping[str, float], absent: Mapping[str, str], before: Mapping[str, float]) -> str:
    """Return why a model has collapsed (it is useless to more than half of the sites), or an empty string.

    At least :data:`FEWEST_HARMED` sites must say so: where the others keep their figures, a single site could otherwise
    have each round trained twice.

    Args:
        losses: Site -> validation loss of the current model.
        absent: Site -> why its reply does not count.
        before: Site -> validation loss of the last model that had not collapsed.
    """
    lost, worse = set[str](), list[float]()
    for site, why in absent.items():
        if any(words in why for words in CANNOT_GO_ON):
            lost.add(site)
    for site in losses.keys() & before.keys():
        if (ratio := _compute_loss_ratio(losses[site], before[site])) > COLLAPSE:
            worse.append(ratio)
    voters = len(lost | (before.keys() & (losses.keys() | absent.keys())))
    if len(lost) + len(worse) < FEWEST_HARMED or 2 * (len(lost) + len(worse)) <= voters:
        return ""
    much = f"a validation loss {min(worse):.3g} times as high as before, or more" if worse else "no finite loss"
    return f"{len(lost) + len(worse)} of {voters} sites have {much}"


def has_model_stalled(losses: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Return True if at more than half of the sites a model's loss is not clearly lower than that of the model before.

    A loss is clearly lower if it is at most :data:`STALL` times the loss before, or at most :data:`LEAST_LOSS`.

    Args:
        losses: Site -> validation loss of the model.
        before: Site -> validation loss of the model before; sites without both losses do not count.
    """
    judges, no_better = losses.keys() & before.keys(), 0
    for site in judges:
        no_better += losses[site] > LEAST_LOSS and _compute_loss_ratio(losses[site], before[site]) > STALL
    return 2 * no_better > len(judges) > 0


def find_harmful_site(whole: FederationValidation, without: Mapping[str, FederationValidation]) -> tuple[str, str]:
    """Return the site whose update harms the model most, with the reason; two empty strings if no update harms.

    An update harms if more than half of the other sites, and at least :data:`FEWEST_JUDGES` sites, measure a loss
    :data:`HARM` times as high with the update as without it, or an AUROC lower by :data:`HARM_AUROC`. A site's figures
    do not count for its own update. So, with three or more sites, a single site cannot prevent its own exclusion, even
    by sending no figures. It also cannot cause the exclusion of another site.

    Args:
        whole: The sites' validation figures of the model from all updates; a loss that is not finite is missing.
        without: Site -> all sites' validation figures of the model from all updates except the update of this site.
    """
    harm = dict[str, tuple[float, float]]()  # factor on most other sites' loss, and fall of their AUROC
    for site, trial in without.items():
        judges = (whole.loss.keys() | trial.loss.keys()) - {site}
        pairs = [(whole.loss.get(judge, math.inf), trial.loss.get(judge, math.inf)) for judge in judges]
        ratios = [_compute_loss_ratio(*pair) for pair in pairs]
        tested = (whole.auroc.keys() & trial.auroc.keys()) - {site}
        drops = [trial.auroc[judge] - whole.auroc[judge] for judge in tested]
        harm[site] = _compute_majority_bound(ratios, 1.0), _compute_majority_bound(drops, 0.0)
    site = max(sorted(harm), key=lambda name: harm[name])
    times, drop = harm[site]
    if times < HARM and drop < HARM_AUROC:
        return "", ""
    much = f"{times:.3g} times the validation loss" if math.isfinite(times) else "no finite validation loss"
    return site, f"more than half of the other sites have {much}, or more, with its update, and {drop:.2f} less AUROC"


def _compute_majority_bound(values: list[float], none: float) -> float:
    """Return the largest b such that more than half of the values are >= b.

    Return ``none`` if there are fewer values than :data:`FEWEST_JUDGES`.
    """
    return sorted(values)[(len(values) - 1) // 2] if len(values) >= FEWEST_JUDGES else none


def _compute_loss_ratio(loss: float, other: float) -> float:
    if not math.isfinite(other):
        return 1.0
    return max(loss, LEAST_LOSS) / max(other, LEAST_LOSS) if math.isfinite(loss) else math.inf


class RollbackLayer(CoordinatorRoundLayer):
    """Rolls back a collapsed model, and excludes a harmful site, which leave-one-site-out models reveal.

    A model has *collapsed* if the validation loss of more than half of the sites is three times as high as with the
    previous model, or not finite. The run then returns to the previous model, and the sites train the round again.

    Before the new updates are merged, a *trial* takes place: for each site, the coordinator makes a model without that
    site's update, and every site evaluates it. If one site's update turns out to be harmful, the updates are merged
    without it, and the site is excluded from the rest of the run. A trial also takes place without a rollback, if the
    model has not improved or if an update had to be shortened.

    The layer is off under secure aggregation, with noise, and in sequential training, because no model without one
    site's update can be made there. It does nothing if the number of sites is outside :data:`SITES`. With two sites,
    each would be the only judge of the other; with very many sites, one bounded update has little influence.

    Args:
        bound: The layer that bounds the length of updates; a trial follows if it shortens an update.
    """

    buffered = True

    def __init__(self, coordinator: "Coordinator", bound: UpdateNormBoundLayer) -> None:
        self._coordinator, self._bound = coordinator, bound

    def is_leave_out_trial_due(
        self, state: FederationState, losses: Mapping[str, float], updates: int, *, too_long: bool
    ) -> bool:
        """Return True if leave-one-site-out models must be evaluated before a round's updates are merged.

        Args:
            state: The state before the round.
            losses: Site -> loss of the model at the beginning of the round, for sites with an accepted update.
            updates: Number of accepted updates.
            too_long: True if an update had to be shortened.
        """
        if updates not in SITES or len(losses) < FEWEST_JUDGES:
            return False
        odd = too_long or has_model_stalled(losses, state.sound_losses)
        return state.repeated == state.round + 1 or (odd and state.round + 1 >= state.next_trial)

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Check if the current model has collapsed; a round is repeated at most once.

        Raises:
            ModelCollapse: If the model has collapsed and the state of the round before is stored.
        """
        state = self._coordinator.state
        counting = self._coordinator.sites.members.keys() - state.uncounted.keys()
        if len(counting) not in SITES or state.round <= state.repeated:
            return
        if because := describe_model_collapse(validation.loss, absent, state.sound_losses):
            earlier = self._coordinator.callbacks.on_rollback(RollbackEvent(state.round, state.round - 1, because))
            if earlier is not None:
                raise ModelCollapse(replace(earlier, repeated=state.round, excluded=state.excluded))

    def update_state_after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Store the losses of the model at the beginning of the round, for the next check for a collapse."""
        return replace(state, sound_losses=MappingProxyType({**state.sound_losses, **validation.loss}))

    def wrap_update_merge(self, merge: Merge) -> Merge:
        """Return a function that merges the updates, after a trial of leave-one-site-out models if one is due."""

        def merge_after_leave_out_trial(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            losses = FederationValidation.from_replies(received.accepted).loss
            too_long = self._bound.has_updates_over_norm_bound(received.accepted)
            if self.is_leave_out_trial_due(self._coordinator.state, losses, len(received.accepted), too_long=too_long):
                received = self._exclude_harmful_site(merge, received)
            return merge(received)

        return merge_after_leave_out_trial

    def _exclude_harmful_site(self, merge: Merge, received: ExchangeReplies[TrainReply]) -> ExchangeReplies[TrainReply]:
        """Exclude from the run the site whose update harms the model most, and return the replies of the other sites.

        All replies are returned if no update harms.

        Raises:
            TooFewSites: If too few replies are left.
        """
        coordinator, server_round = self._coordinator, self._coordinator.requests.context.round
        sites = sorted(received.accepted)

        def validate_without_site(out: str = "") -> FederationValidation:
            some = {site: received.accepted[site] for site in sites if site != out}
            means = merge(replace(received, accepted=some)).merged.means
            model, _ = update_global_model(coordinator.method, server_round, means, coordinator.state.moments)
            training = coordinator.requests
            messages = coordinator.make_evaluate_messages(server_round, model, sites, test=False)
            validation = coordinator.collect_site_validation(messages, server_round)
            for receiver, size in coordinator.requests.bytes_down.items():
                training.bytes_down[receiver] = training.bytes_down.get(receiver, 0) + size
            coordinator.requests = training
            return validation

        whole, without = validate_without_site(), {site: validate_without_site(out=site) for site in sites}
        site, reason = find_harmful_site(whole, without)
        state = coordinator.state
        if not site:  # each pause is longer: a run of 100 rounds has a dozen trials in vain at most
            coordinator.state = replace(state, next_trial=server_round + max(server_round // 2, 1))
            return received
        coordinator.callbacks.on_exclusion(server_round, site, reason)
        coordinator.state = replace(state, excluded={**state.excluded, site: reason})
        received = replace(received.drop_site_replies({site: reason}), unfit=received.unfit | {site})
        coordinator.refuse_too_few_replies(server_round, received)
        return received
