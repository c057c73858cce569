"""The aggregator: one round's updates on their way into the model, by the method's own rule.

Updates are added as they come, or kept until all are there; either way in the order of site names, so that the bits are
the same no matter who was first. The same rules, from updates on disk, check a run afterwards.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from common.config import ParticipationSection, PrivacySection
from common.models.state import ModelState
from common.wire.records import Groups, TrainReply
from strategies.aggregation.mean import HeadMean, WholeHeadMean
from strategies.aggregation.norm_bound import Lengths, lengths_of, medians_of, shortened, times_of
from strategies.aggregation.server_optimizer import Moments
from strategies.aggregation.waiting import WaitingUpdates
from strategies.base.method import Method, Weighting
from strategies.base.robust_state import Merged, robust_means
from strategies.base.round_context import RoundContext
from strategies.base.state import Means, RunningMeans, means_of, site_weight


class Aggregator:
    """Takes one round's good replies, in any order.

    Updates are added as they come, unless the method weighs or merges them by what all of them are, or any may be
    shortened or left out when all are there.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        clip: The longest update, in median lengths of the round; None for any.
        folder: For files of updates that wait.
    """

    def __init__(
        self, model: ModelState, sites: Collection[str], method: Method, clip: float | None, folder: Path | None
    ) -> None:
        self._model, self._method, self._clip = model, method, clip
        self._lengths: dict[str, Lengths] = {}
        self._held: Gathering | Assembly | None = None  # None: replies keep their updates
        if not method.weighs_updates:
            together = method.parameters.mean is not None or clip is not None
            kept = Assembly(folder) if together else None
            self._held = kept or Gathering(model, sites, method.parameters.weighting, method.head_mean, folder)

    def take(self, reply: TrainReply) -> TrainReply:
        """Take a good reply's update; return what is kept of the reply."""
        if self._clip is not None:
            self._lengths[reply.site] = lengths_of(reply.update)
        return self._held.take(reply) if self._held else reply

    def leave_out(self, site: str) -> None:
        """This site's reply does not count."""
        self._lengths.pop(site, None)
        if self._held:
            self._held.leave_out(site)

    def too_long(self) -> bool:
        """Return whether an update is longer than it may be."""
        medians, clip = medians_of(self._lengths.values()), self._clip
        return clip is not None and any(
            times > clip for one in self._lengths.values() for times in times_of(one, medians).values()
        )

    def merged(self, known: RoundContext, accepted: Mapping[str, TrainReply]) -> Merged:
        """The means of the replies that count, in the order of site names."""
        if isinstance(self._held, Gathering):
            return Merged(self._held.means())
        kept = self._held.updates() if isinstance(self._held, Assembly) else {}
        whole = {site: replace(reply, update=kept.get(site, reply.update)) for site, reply in accepted.items()}
        return merged_by(self._method, known, self._model, whole, self._clip, self._lengths)


class Gathering:
    """Takes one reply a site, in any order, and keeps no more of the updates than has to wait.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        head_mean: How head rows are averaged.
        folder: For files of updates that wait; the system's own for temporary files where None.
    """

    def __init__(
        self,
        model: ModelState,
        sites: Iterable[str],
        weighting: Weighting,
        head_mean: HeadMean,
        folder: Path | None = None,
    ) -> None:
        self._means, self._weighting = RunningMeans(model, head_mean), weighting
        self._next, self._waiting = deque(sorted(sites)), WaitingUpdates(folder)
        self._weights: dict[str, float] = {}

    def take(self, reply: TrainReply) -> TrainReply:
        """Add a good reply's update, now or when those before it are there; return the reply without it."""
        self._weights[reply.site] = site_weight(reply, self._weighting)
        self._waiting.put(reply.site, reply.update, briefly=self._next[0] == reply.site)
        self._add()
        return replace(reply, update=Groups())

    def leave_out(self, site: str) -> None:
        """Wait no longer for this site's update: it came and does not count."""
        self._next.remove(site)
        self._add()

    def means(self) -> Means:
        """The means of all that came."""
        self._next = deque(sorted(self._waiting))
        self._add()
        return self._means.means

    def _add(self) -> None:
        while self._next and self._next[0] in self._waiting:
            site = self._next.popleft()
            self._means.add(self._waiting.take(site), self._weights[site])


class Assembly:
    """Keeps a round's updates until all are there, for rules that look at all of them together.

    The first stay in memory; the trunks of the others lie in a file and are read from there, a piece at a time.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._waiting = WaitingUpdates(folder)

    def take(self, reply: TrainReply) -> TrainReply:
        """Keep a good reply's update; return the reply without it."""
        self._waiting.put(reply.site, reply.update)
        return replace(reply, update=Groups())

    def leave_out(self, site: str) -> None:
        """This site's update does not count, whether it is here or not."""
        if site in self._waiting:
            self._waiting.take(site)

    def updates(self) -> Mapping[str, Groups]:
        """Every site's update."""
        return dict(self._waiting)


# ---------------------------------------------------------------------- the rules


def longest_update(method: Method, participation: ParticipationSection, privacy: PrivacySection) -> float | None:
    """The longest update that counts as it is, in median lengths; None for any, and where none is seen or averaged."""
    seen = not method.shares_nothing and method.pooled == "no" and not privacy.secure_aggregation
    return participation.clip if seen and participation.clip != "off" else None


def merged_by(
    method: Method,
    known: RoundContext,
    model: ModelState,
    accepted: Mapping[str, TrainReply],
    clip: float | None = None,
    lengths: Mapping[str, Lengths] = MappingProxyType({}),
) -> Merged:
    """The means of a round's updates, by this method's weights or its robust mean.

    Args:
        known: When the round began.
        model: What the sites started from.
        accepted: In the order of site names.
        clip: The longest update, in median lengths of the round; None for any.
        lengths: Of the updates, where they are known.
    """
    if clip is None:
        return _merged(method, known, model, accepted)
    found = {site: lengths.get(site) or lengths_of(reply.update) for site, reply in accepted.items()}
    medians, done, bounded = medians_of(found.values()), dict[str, str](), dict[str, TrainReply]()
    for site, reply in accepted.items():
        update, what = shortened(reply.update, found[site], medians, clip)
        bounded[site] = replace(reply, update=update) if what else reply
        if what:
            done[site] = what
    return replace(_merged(method, known, model, bounded), shortened=done)


def _merged(method: Method, known: RoundContext, model: ModelState, accepted: Mapping[str, TrainReply]) -> Merged:
    replies = list(accepted.values())
    plain = [site_weight(reply, method.parameters.weighting) for reply in replies]
    if method.parameters.mean is not None:
        return robust_means(model, [reply.update for reply in replies], plain, method.parameters.mean)
    return Merged(means_of(model, replies, method.site_weights(known, accepted, plain), method.head_mean))


def moved_by(method: Method, server_round: int, means: Means, moments: Moments) -> tuple[ModelState, Moments]:
    """The global model after the round."""
    optimizer = method.parameters.server_optimizer
    stepped = (means.moved(), moments) if optimizer is None else means.stepped(optimizer, moments)
    return method.finalize(server_round, *stepped)


def passed_on(model: ModelState, reply: TrainReply) -> ModelState:
    """The model after it passed through one site."""
    return means_of(model, [reply], [1.0], WholeHeadMean).moved()


UNTRAINED = 10.0
"""Times the longest update that counts: no training moves a model so far."""


@dataclass(frozen=True)
class Visit:
    """What a site that a model passes through makes of it.

    Attributes:
        model: That goes on; the same that came where the update cannot count.
        lengths: Site -> lengths of its last update, as it counted.
        shortened: What was done to too long an update, in words.
        reason: Why the update cannot count; empty where it does.
    """

    model: ModelState
    lengths: Mapping[str, Lengths]
    shortened: str = ""
    reason: str = ""


def visit(model: ModelState, reply: TrainReply, clip: float | None, lengths: Mapping[str, Lengths]) -> Visit:
    """Pass a model through one site, whose update may be ``clip`` times as long as the median of those before.

    Until three sites were visited there is no such median; then no part may be longer than the model's own.
    """
    if clip is None:
        return Visit(passed_on(model, reply), lengths)
    own, usual = lengths_of(reply.update), medians_of(lengths.values())
    if not usual:
        usual = {part: length / clip for part, length in lengths_of(Groups.of_model(model)).items() if length}
    if (times := max(times_of(own, usual).values(), default=0.0)) > UNTRAINED * clip:
        return Visit(
            model, lengths, reason=f"its update is {times:.3g} times as long as usual: no training moves so far"
        )
    update, done = shortened(reply.update, own, usual, clip)
    lengths = MappingProxyType({**lengths, reply.site: lengths_of(update)})
    return Visit(passed_on(model, replace(reply, update=update)), lengths, done)
