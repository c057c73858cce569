"""Optional layers around the rounds of a run, such as a bound on updates or a rollback of collapsed models.

A layer stands between the coordinator and the method: it may choose among the sites of a round, reject or change a
reply, take a model back, and wrap the merging of updates. Here are the interface and all layers except secure
aggregation, which has a module of its own. A run has objects only for the layers that it uses.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.models.state import ModelState
from common.wire.records import EvaluateReply, ModelGroups, TrainReply
from strategies.aggregation.bounds import (
    Lengths,
    cap_image_counts,
    compare_with_medians,
    compute_median_lengths,
    measure_update_lengths,
    shorten_long_updates,
)
from strategies.aggregation.means import MergedUpdates
from strategies.engine.aggregator import update_global_model
from strategies.engine.events import FederationValidation, RollbackEvent
from strategies.engine.exchange import ExchangeReplies, ExchangeRequests
from strategies.engine.state import FederationState

if TYPE_CHECKING:
    from strategies.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundOutcome:
    """The replies of a round that count, and the means of their updates.

    Attributes:
        arrived: Time by ``time.monotonic`` when all replies were there.
        closed_rows: Head rows that stayed masked.
    """

    received: ExchangeReplies[TrainReply]
    merged: MergedUpdates
    arrived: float
    closed_rows: tuple[str, ...] = ()


Merge = Callable[[ExchangeReplies[TrainReply]], RoundOutcome]
"""Merges the updates of replies that count."""


class CoordinatorRoundLayer:
    """Base of all layers, which changes nothing; a layer overrides the steps of a round that it changes.

    Attributes:
        buffered: True if all updates of a round must be there before any is merged.
        updates_in_replies: True if replies hold updates; False where masked updates are sent apart from the replies.
    """

    buffered: ClassVar[bool] = False
    updates_in_replies: ClassVar[bool] = True

    def choose_sites(self, sites: list[str]) -> list[str]:
        """Return those of the drawn sites that can take part in the round."""
        return sites

    def find_fault(self, update: ModelGroups, sent: ModelGroups) -> str:
        """Return why a site's update cannot count, or an empty string; ``sent`` is the model that the site received."""
        return ""

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Receive a good reply as it comes; return it, changed or unchanged, as it is to count."""
        return reply

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Receive the sites' validation figures of the present model, and why other sites did not reply."""

    def wrap_merge(self, merge: Merge) -> Merge:
        """Return a function that merges a round's updates in the place of ``merge``, which it may call."""
        return merge

    def after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Return the state after a round with what this layer stores in it.

        Args:
            validation: The sites' figures of the model that the round began with.
        """
        return state


@dataclass
class VarianceCheckLayer(CoordinatorRoundLayer):
    """Rejects updates that would make a running variance of batch normalisation negative.

    Attributes:
        variances: Slices of the ``norm`` group that hold running variances.
    """

    variances: Sequence[slice]

    def find_fault(self, update: ModelGroups, sent: ModelGroups) -> str:
        """Return a fault if the update makes a variance negative by more than rounding errors explain."""
        if update.norm is None or sent.norm is None:
            return ""
        for place in self.variances:
            before = sent.norm[place].astype(np.float64)
            if (before + update.norm[place] < -1e-3 * (1 + np.abs(before))).any():
                return "it makes a variance of batch normalisation negative"
        return ""


@dataclass
class ImageShareCapLayer(CoordinatorRoundLayer):
    """Caps the share of a round's images that one site counts for (:mod:`strategies.aggregation.bounds`)."""

    coordinator: "Coordinator"
    _counted: tuple[ExchangeRequests, Mapping[str, int]] | None = None  # the exchange, and its sites' capped images

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Return the reply with the number of images that the site may count for."""
        requests = self.coordinator.requests
        if self._counted is None or self._counted[0] is not requests:
            images = {site: requests.context.answers[site].train_samples for site in requests.expected}
            self._counted = requests, cap_image_counts(images, self.coordinator.participation.largest_share)
        return replace(reply, train_samples=self._counted[1][reply.site])


class NormBoundLayer(CoordinatorRoundLayer):
    """Shortens updates that are much longer than the median update (:mod:`strategies.aggregation.bounds`).

    Args:
        clip: The longest update, in median lengths of the round.
    """

    buffered = True

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self._lengths: dict[str, Lengths] = {}  # of each site's last update

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Measure the lengths of an update while others are still being sent; return the reply unchanged."""
        self._lengths[reply.site] = measure_update_lengths(reply.update)
        return reply

    def has_long_updates(self, replies: Mapping[str, TrainReply]) -> bool:
        """Return True if any of the updates is longer than the bound."""
        lengths = list(map(self._lengths.__getitem__, replies))
        medians = compute_median_lengths(lengths)
        for measured in lengths:
            if max(compare_with_medians(measured, medians).values(), default=0.0) > self.clip:
                return True
        return False

    def wrap_merge(self, merge: Merge) -> Merge:
        """Shorten updates that are too long before they are merged."""

        def bound(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            replies, shortened = shorten_long_updates(received.accepted, self.clip, self._lengths)
            outcome = merge(replace(received, accepted=replies))
            return replace(outcome, received=received, merged=replace(outcome.merged, shortened=shortened))

        return bound


# ---------------------------------------------------------------------- a model that collapses is taken back

COLLAPSE, STALL = 3.0, 0.98
"""Ratio of a model's loss to that of the model before, above which it has collapsed, and above which it stalls."""
HARM, HARM_AUROC = 2.0, 0.1
"""Ratio of losses, and difference of AUROCs, of the models with and without a site, from which its update harms."""
LEAST_LOSS = 0.1
"""A lower loss counts as this one: where training has settled, a loss of 0.02 doubles by chance."""
SITES = range(3, 17)
"""Numbers of sites of a round in which models are tried."""
FEWEST_JUDGES = 2
"""Sites beside the suspect that must state their figures: a single one could have any other left out."""

CANNOT_GO_ON = ("diverged", "not a number", "validation_loss")
"""Words in the reasons of sites at which the model broke training, or the validation loss."""


class ModelCollapse(Exception):
    """The present model has collapsed; carries the state to go on from."""

    def __init__(self, state: FederationState) -> None:
        super().__init__("the model has collapsed")
        self.state = state


def describe_collapse(losses: Mapping[str, float], absent: Mapping[str, str], before: Mapping[str, float]) -> str:
    """Return why a model has collapsed, that is, is useless to more than half of the sites; or an empty string.

    Args:
        losses: Site -> validation loss of the present model.
        absent: Site -> why its reply does not count.
        before: Site -> validation loss of the last model that had not collapsed.
    """
    lost, worse = set[str](), list[float]()
    for site, why in absent.items():
        if any(words in why for words in CANNOT_GO_ON):
            lost.add(site)
    for site in losses.keys() & before.keys():
        if (ratio := _loss_ratio(losses[site], before[site])) > COLLAPSE:
            worse.append(ratio)
    voters = len(lost | (before.keys() & (losses.keys() | absent.keys())))
    if 2 * (len(lost) + len(worse)) <= voters:
        return ""
    much = f"a validation loss {min(worse):.3g} times as high as before, or more" if worse else "no finite loss"
    return f"{len(lost) + len(worse)} of {voters} sites have {much}"


def has_stalled(losses: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Return whether more than half of the sites find a model no better than the one before."""
    judges, no_better = losses.keys() & before.keys(), 0
    for site in judges:
        no_better += losses[site] > LEAST_LOSS and _loss_ratio(losses[site], before[site]) > STALL
    return 2 * no_better > len(judges) > 0


def find_harmful_site(whole: FederationValidation, without: Mapping[str, FederationValidation]) -> tuple[str, str]:
    """Return the site whose update harms most, with the reason; two empty strings where none does.

    More than half of the other sites that state figures, at least :data:`FEWEST_JUDGES`, must have a loss :data:`HARM`
    times as high with its update as without it, or an AUROC lower by :data:`HARM_AUROC`. The site's own figures do not
    count, so that one site of three or more can neither save itself, not even by silence, nor have another left out.

    Args:
        whole: The sites' validation figures of the model that all updates make; a loss that is not finite is missing.
        without: Site -> the same figures of the model made without that site's update.
    """
    harm = dict[str, tuple[float, float]]()  # factor on most other sites' loss, and fall of their AUROC
    for site, trial in without.items():
        judges = (whole.loss.keys() | trial.loss.keys()) - {site}
        ratios = [_loss_ratio(whole.loss.get(judge, math.inf), trial.loss.get(judge, math.inf)) for judge in judges]
        tested = (whole.auroc.keys() & trial.auroc.keys()) - {site}
        drops = [trial.auroc[judge] - whole.auroc[judge] for judge in tested]
        harm[site] = _majority_bound(ratios, 1.0), _majority_bound(drops, 0.0)
    site = max(sorted(harm), key=lambda name: harm[name])
    times, drop = harm[site]
    if times < HARM and drop < HARM_AUROC:
        return "", ""
    much = f"{times:.3g} times the validation loss" if math.isfinite(times) else "no finite validation loss"
    return site, f"more than half of the other sites have {much}, or more, with its update, and {drop:.2f} less AUROC"


def _majority_bound(values: list[float], none: float) -> float:
    """Return the largest b such that more than half of the values are >= b.

    With fewer values than :data:`FEWEST_JUDGES`, ``none`` is returned.
    """
    return sorted(values)[(len(values) - 1) // 2] if len(values) >= FEWEST_JUDGES else none


def _loss_ratio(loss: float, other: float) -> float:
    if not math.isfinite(other):
        return 1.0
    return max(loss, LEAST_LOSS) / max(other, LEAST_LOSS) if math.isfinite(loss) else math.inf


class RollbackLayer(CoordinatorRoundLayer):
    """Takes back a model that collapses, and finds the harmful site by trying models without one update each.

    A model has *collapsed* where more than half of the sites have three times the validation loss of the model before,
    or none that is finite. Then the run goes back one round, and the sites train that round again. Before the
    new updates count, a model is made without each site in turn, and every site evaluates it: one trial for each site.
    The same trials are made, without going back, where a model has merely not become better, or an update had to be
    shortened.

    The layer is absent under secure aggregation, with noise, and where a model is passed on: there no model can be made
    without one site. Of two sites each is the only judge of the other; among very many a bounded update moves the mean
    by little.

    Args:
        bound: The bound on the length of updates; trials are made where it shortens an update.
    """

    buffered = True

    def __init__(self, coordinator: "Coordinator", bound: NormBoundLayer) -> None:
        self._coordinator, self._bound = coordinator, bound

    def is_trial_due(
        self, state: FederationState, losses: Mapping[str, float], updates: int, *, too_long: bool
    ) -> bool:
        """Return True if leave-one-site-out models must be evaluated before a round's updates count.

        Args:
            state: The state before the round.
            losses: Site -> its loss of the model that the round began with, for sites whose updates count.
            updates: Number of sites whose updates count.
            too_long: True if an update had to be shortened.
        """
        if updates not in SITES or len(losses) < FEWEST_JUDGES:
            return False
        odd = too_long or has_stalled(losses, state.sound_losses)
        return state.repeated == state.round + 1 or (odd and state.round + 1 >= state.next_trial)

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Check whether the present model has collapsed; a round is repeated at most once.

        Raises:
            ModelCollapse: If it has collapsed, and there is a round to go back to.
        """
        state = self._coordinator.state
        if len(self._coordinator.sites.members) not in SITES or state.round <= state.repeated:
            return
        if because := describe_collapse(validation.loss, absent, state.sound_losses):
            earlier = self._coordinator.callbacks.on_rollback(RollbackEvent(state.round, state.round - 1, because))
            if earlier is not None:
                raise ModelCollapse(replace(earlier, repeated=state.round, excluded=state.excluded))

    def after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Store the losses of the model that the round began with, which had not collapsed, for the next comparison."""
        return replace(state, sound_losses=MappingProxyType({**state.sound_losses, **validation.loss}))

    def wrap_merge(self, merge: Merge) -> Merge:
        """Return the merging with a trial before it: if one is due, models that leave out one site each are tested."""

        def tried(received: ExchangeReplies[TrainReply]) -> RoundOutcome:
            losses = FederationValidation.of_replies(received.accepted).loss
            too_long = self._bound.has_long_updates(received.accepted)
            if self.is_trial_due(self._coordinator.state, losses, len(received.accepted), too_long=too_long):
                received = self._exclude_harmful_site(merge, received)
            return merge(received)

        return tried

    def _exclude_harmful_site(self, merge: Merge, received: ExchangeReplies[TrainReply]) -> ExchangeReplies[TrainReply]:
        """Return the replies without the site whose update harms most; it is excluded for the rest of the run.

        All replies are returned where no update harms.
        """
        coordinator, server_round = self._coordinator, self._coordinator.requests.context.round
        sites = sorted(received.accepted)

        def validate_without_site(out: str = "") -> FederationValidation:
            some = {site: received.accepted[site] for site in sites if site != out}
            means = merge(replace(received, accepted=some)).merged.means
            model, _ = update_global_model(coordinator.method, server_round, means, coordinator.state.moments)
            return self._validate(server_round, sites, model)

        site, reason = find_harmful_site(
            validate_without_site(), {site: validate_without_site(out=site) for site in sites}
        )
        state = coordinator.state
        if not site:  # each pause is longer: a run of 100 rounds has a dozen trials in vain at most
            coordinator.state = replace(state, next_trial=server_round + max(server_round // 2, 1))
            return received
        coordinator.callbacks.on_exclusion(server_round, site, reason)
        coordinator.state = replace(state, excluded={**state.excluded, site: reason})
        received = replace(received.without({site: reason}), unfit=received.unfit | {site})
        coordinator.refuse_too_few(server_round, received)
        return received

    def _validate(self, server_round: int, sites: Collection[str], model: ModelState) -> FederationValidation:
        """Have sites validate a model that may become this round's model; return their figures."""
        coordinator, training = self._coordinator, self._coordinator.requests
        messages = coordinator.evaluate_messages(server_round, model, sites, test=False)
        replies = coordinator.exchange_messages(messages, "evaluate", server_round)
        validation = FederationValidation.of_replies(coordinator.collect_replies(replies, EvaluateReply).accepted)
        for site, size in coordinator.requests.bytes_down.items():
            training.bytes_down[site] = training.bytes_down.get(site, 0) + size
        coordinator.requests = training
        return validation
