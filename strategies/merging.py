"""How one round's replies become means: as they come, or, where a rule has to see all of them, when all are there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config import FarUpdates
from common.models.state import ModelState
from common.wire import TrainReply
from strategies.far_updates import Lengths, dropped, far_updates, lengths_of
from strategies.gathering import Assembly, Gathering
from strategies.guidance import Known
from strategies.method import Method
from strategies.robust_state import Merged, robust_means
from strategies.sharing import plain_shares
from strategies.state import RunningMeans, means_of, site_weight


@dataclass(frozen=True)
class Sifted:
    """The sites whose update is far longer than the others', each with the reason.

    Attributes:
        kept: They count all the same.
        dropped: They do not.
    """

    kept: Mapping[str, str]
    dropped: Mapping[str, str]


class Merging:
    """Takes one round's good replies, in any order.

    Updates are added as they come, unless the method weighs or merges them by what all of them are, or the far ones
    are to be dropped.

    Args:
        model: What the sites started from.
        sites: Those that were asked.
        far: What becomes of updates that are far longer than the others'.
        folder: For files of updates that wait.
    """

    def __init__(
        self, model: ModelState, sites: Collection[str], method: Method, far: FarUpdates, folder: Path | None
    ) -> None:
        self._model, self._method, self._far = model, method, far
        self._lengths: dict[str, Lengths] = {}
        self._held: Gathering | Assembly | None = None  # None: replies keep their updates
        if method.shares is plain_shares:
            together = method.mean is not None or far == "drop"
            kept = Assembly(method.weighting, folder) if together else None
            self._held = kept or Gathering(model, sites, method.weighting, folder)

    def take(self, reply: TrainReply) -> TrainReply:
        """Take a good reply's update; return what is kept of the reply."""
        if self._far != "off":
            self._lengths[reply.site] = lengths_of(reply.update)
        return self._held.take(reply) if self._held else reply

    def leave_out(self, site: str) -> None:
        """This site's reply does not count."""
        if self._held:
            self._held.leave_out(site)

    def sifted(self, needed: int) -> Sifted:
        """When all replies are in: whose update is far. Those to be dropped are left out from here on.

        Args:
            needed: Sites that must stay.
        """
        far = far_updates(self._lengths)
        out = dropped(far, len(self._lengths), needed) if self._far == "drop" else ()
        for site in out:
            self.leave_out(site)
        reasons = {site: one.reason for site, one in far.items()}
        return Sifted(
            {site: reason for site, reason in reasons.items() if site not in out}, {site: reasons[site] for site in out}
        )

    def merged(self, known: Known, accepted: Mapping[str, TrainReply]) -> Merged:
        """The means of the replies that count, in the order of site names."""
        if isinstance(self._held, Gathering):
            return Merged(self._held.means())
        if self._held is None:
            replies = list(accepted.values())
            plain = [site_weight(reply, self._method.weighting) for reply in replies]
            return Merged(means_of(self._model, replies, self._method.shares(known, accepted, plain)))
        kept = self._held.updates().values()
        if self._method.mean is not None:
            updates, weights = [update for update, _ in kept], [weight for _, weight in kept]
            return robust_means(self._model, updates, weights, self._method.mean)
        running = RunningMeans(self._model)
        for update, weight in kept:
            running.add(update, weight)
        return Merged(running.means)
