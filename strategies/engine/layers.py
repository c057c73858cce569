"""Layers that may be switched on around the rounds of a run: each is one object, and one that is off is absent.

A layer stands between the coordinator and the method: it may choose among the sites of a round, change a reply, refuse
a model, and wrap the merging of updates. Here are the interface and the two short layers; secure aggregation and
rollback have modules of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from common.wire.records import TrainReply
from strategies.aggregation.bounds import Lengths, bounded, counted_images, lengths_of, medians_of, times_of
from strategies.aggregation.means import Merged
from strategies.engine.replies import Replies
from strategies.engine.round_record import FederationValidation
from strategies.engine.state import FederationState

if TYPE_CHECKING:
    from strategies.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundOutcome:
    """The replies of a round that count, and the means that they make.

    Attributes:
        arrived: By ``time.monotonic``, when all replies were there.
        closed_rows: Head rows that stayed masked.
    """

    received: Replies[TrainReply]
    merged: Merged
    arrived: float
    closed_rows: tuple[str, ...] = ()


Merge = Callable[[Replies[TrainReply]], RoundOutcome]
"""Merges the updates of replies that count."""


class Layer:
    """One concern around the rounds; a layer overrides what it changes.

    Attributes:
        buffered: All updates of a round must be there before any is merged.
        updates_in_replies: Replies hold updates; False where they travel otherwise.
    """

    buffered: ClassVar[bool] = False
    updates_in_replies: ClassVar[bool] = True

    def choose_sites(self, sites: list[str]) -> list[str]:
        """Return those of the drawn sites that can take part in the round."""
        return sites

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Receive a good reply as it comes; return it as it counts."""
        return reply

    def on_validation(self, validation: FederationValidation, absent: Mapping[str, str]) -> None:
        """Receive what sites state of the present model, and why others state nothing."""

    def around(self, merge: Merge) -> Merge:
        """Wrap the merging of a round's updates."""
        return merge

    def after_round(self, state: FederationState, validation: FederationValidation) -> FederationState:
        """Note something in the state after a round; the validation is that of the model before."""
        return state


@dataclass
class LargestShare(Layer):
    """No site counts for more than a share of all images of a round (:mod:`strategies.aggregation.bounds`)."""

    coordinator: "Coordinator"

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Lower the number of images that the reply counts for."""
        requests, share = self.coordinator.requests, self.coordinator.participation.largest_share
        images = {site: requests.context.answers[site].train_samples for site in requests.expected}
        return replace(reply, train_samples=counted_images(images, share)[reply.site])


class NormBound(Layer):
    """No update moves the model by more than a multiple of the usual length (:mod:`strategies.aggregation.bounds`).

    Args:
        clip: The longest update, in median lengths of the round.
    """

    buffered = True

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self._lengths: dict[str, Lengths] = {}  # of each site's last update

    def on_reply(self, reply: TrainReply) -> TrainReply:
        """Measure an update while others are on their way."""
        self._lengths[reply.site] = lengths_of(reply.update)
        return reply

    def shortens(self, replies: Mapping[str, TrainReply]) -> bool:
        """Return whether an update is longer than it may be."""
        lengths = [self._lengths[site] for site in replies]
        medians = medians_of(lengths)
        return any(times > self.clip for of_site in lengths for times in times_of(of_site, medians).values())

    def around(self, merge: Merge) -> Merge:
        """Shorten updates that are too long before they are merged."""

        def bound(received: Replies[TrainReply]) -> RoundOutcome:
            replies, shortened = bounded(received.accepted, self.clip, self._lengths)
            outcome = merge(replace(received, accepted=replies))
            return replace(outcome, received=received, merged=replace(outcome.merged, shortened=shortened))

        return bound
