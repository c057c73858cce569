"""One round's replies on their way into the means: added as they come, or kept until all are there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import FarUpdates
from common.models.state import ModelState
from common.wire.records import TrainReply
from strategies.aggregation.outliers import Lengths, dropped, far_updates, lengths_of
from strategies.base.aggregate import merged_by
from strategies.base.gathering import Assembly, Gathering
from strategies.base.known import Known
from strategies.base.method import Method
from strategies.base.robust_state import Merged


@dataclass(frozen=True)
class Sifted:
    """The sites whose update is far longer than the others', each with the reason.

    Attributes:
        kept: They count all the same.
        dropped: They do not.
    """

    kept: Mapping[str, str]
    dropped: Mapping[str, str]


class Intake:
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

    def merged(self, known: Known, accepted: Mapping[str, TrainReply]) -> Merged:
        """The means of the replies that count, in the order of site names."""
        if isinstance(self._held, Gathering):
            return Merged(self._held.means())
        return merged_by(self._method, known, self._model, self.whole(accepted))

    def whole(self, accepted: Mapping[str, TrainReply]) -> dict[str, TrainReply]:
        """The replies with their updates; only where those were kept."""
        kept = self._held.updates() if isinstance(self._held, Assembly) else {}
        return {site: replace(reply, update=kept.get(site, reply.update)) for site, reply in accepted.items()}
