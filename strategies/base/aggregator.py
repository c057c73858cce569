"""The aggregator: one round's updates on their way into the model, by the method's own rule.

Updates are added as they come, or kept until all are there; either way in the order of site names, so that the bits are
the same no matter who was first. The same rules, from updates on disk, check a run afterwards.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import FarUpdates
from common.models.state import ModelState
from common.wire.records import Groups, TrainReply
from strategies.aggregation.mean import HeadMean, WholeHeadMean
from strategies.aggregation.outliers import Lengths, dropped, far_updates, lengths_of
from strategies.aggregation.server_optimizer import Moments
from strategies.aggregation.waiting import WaitingUpdates
from strategies.base.method import Method, Weighting
from strategies.base.robust_state import Merged, robust_means
from strategies.base.round_context import RoundContext
from strategies.base.state import Means, RunningMeans, means_of, site_weight


@dataclass(frozen=True)
class Sifted:
    """The sites whose update is far longer than the others', each with the reason.

    Attributes:
        kept: They count all the same.
        dropped: They do not.
    """

    kept: Mapping[str, str]
    dropped: Mapping[str, str]


class Aggregator:
    """Takes one round's good replies, in any order.

    Updates are added as they come, unless the method weighs or merges them by what all of them are, or any may be left
    out when all are there.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        far: What becomes of updates that are far longer than the others'.
        folder: For files of updates that wait.
        whole: Keep every update until the round is decided.
    """

    def __init__(
        self,
        model: ModelState,
        sites: Collection[str],
        method: Method,
        far: FarUpdates,
        folder: Path | None,
        *,
        whole: bool = False,
    ) -> None:
        self._model, self._method, self._far, self._watched = model, method, far, whole
        self._lengths: dict[str, Lengths] = {}
        self._held: Gathering | Assembly | None = None  # None: replies keep their updates
        if not method.weighs_updates:
            together = method.parameters.mean is not None or far == "drop" or whole
            kept = Assembly(folder) if together else None
            self._held = kept or Gathering(model, sites, method.parameters.weighting, method.head_mean, folder)

    def take(self, reply: TrainReply) -> TrainReply:
        """Take a good reply's update; return what is kept of the reply."""
        if self._far != "off" or self._watched:
            self._lengths[reply.site] = lengths_of(reply.update)
        return self._held.take(reply) if self._held else reply

    def leave_out(self, site: str) -> None:
        """This site's reply does not count."""
        self._lengths.pop(site, None)
        if self._held:
            self._held.leave_out(site)

    def sifted(self, needed: int) -> Sifted:
        """When all replies are in: whose update is far. Those to be dropped are left out from here on.

        Args:
            needed: Sites that must stay.
        """
        far = far_updates(self._lengths) if self._far != "off" else {}
        out = dropped(far, len(self._lengths), needed) if self._far == "drop" else ()
        for site in out:
            self.leave_out(site)
        reasons = {site: one.reason for site, one in far.items()}
        return Sifted(
            {site: reason for site, reason in reasons.items() if site not in out}, {site: reasons[site] for site in out}
        )

    def lengths(self, accepted: Collection[str]) -> dict[str, Lengths]:
        """Return the lengths of the updates that count, where lengths are looked at."""
        return {site: lengths for site, lengths in self._lengths.items() if site in accepted}

    def merged(self, known: RoundContext, accepted: Mapping[str, TrainReply]) -> Merged:
        """The means of the replies that count, in the order of site names."""
        if isinstance(self._held, Gathering):
            return Merged(self._held.means())
        return merged_by(self._method, known, self._model, self.whole(accepted))

    def whole(self, accepted: Mapping[str, TrainReply]) -> dict[str, TrainReply]:
        """The replies with their updates; only where those were kept."""
        kept = self._held.updates() if isinstance(self._held, Assembly) else {}
        return {site: replace(reply, update=kept.get(site, reply.update)) for site, reply in accepted.items()}


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


def means_by(method: Method, known: RoundContext, model: ModelState, accepted: Mapping[str, TrainReply]) -> Means:
    """:func:`merged_by`, without what it says beside the means."""
    return merged_by(method, known, model, accepted).means


def merged_by(method: Method, known: RoundContext, model: ModelState, accepted: Mapping[str, TrainReply]) -> Merged:
    """The means of a round's updates, by this method's weights or its robust mean.

    Args:
        known: When the round began.
        model: What the sites started from.
        accepted: In the order of site names.
    """
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
