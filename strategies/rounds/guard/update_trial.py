"""A round's odd updates before they count: the model is made without each, and the sites judge."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from common.models.state import ModelState
from common.wire.records import Groups
from strategies.aggregation.outliers import Lengths
from strategies.rounds.guard.broken_model import broken
from strategies.rounds.guard.memory import GuardMemory
from strategies.rounds.guard.odd_updates import Variances, signs_of
from strategies.rounds.guard.verdict import Judged, condemned, odd

RISE = 1.1
"""Times the loss of the model before at which every update is judged."""


@dataclass(frozen=True)
class UpdateTrial:
    """Finds the updates of a round that harm the model.

    Attributes:
        model_of: The model that the updates of some sites make.
        judged: What the sites say of a model.
        variances: Of the model that the round began with.
    """

    model_of: Callable[[Collection[str]], ModelState]
    judged: Callable[[ModelState], Judged]
    variances: Variances

    def held(
        self,
        server_round: int,
        updates: Mapping[str, Groups],
        lengths: Mapping[str, Lengths],
        annotated: Mapping[str, Collection[str]],
        *,
        guard: GuardMemory,
        judges: Mapping[str, float],
    ) -> tuple[GuardMemory, dict[str, str]]:
        """Judge what is odd; judge every update where the model has become worse, or was broken by this very round.

        Args:
            updates, lengths: By site.
            annotated: Site -> its classes.
            guard: What is known from earlier rounds.
            judges: Site -> its loss of the model that the round began with.

        Returns:
            What is known now, and the sites to leave out with the reasons: less than half of the sites, one of two.
        """
        found: dict[str, str] = {}
        repeated = guard.repeated == server_round
        quiet = server_round < guard.quiet_until
        worse = not quiet and bool(broken(judges, {}, guard.losses, RISE))
        for _ in range(max((len(updates) - 1) // 2, 1)):
            left = {site: update for site, update in updates.items() if site not in found}
            new = self._one(left, lengths, annotated, guard, judges, quiet=quiet, all_of=repeated or worse)
            if new is None:
                return guard, found
            if not new:
                return (guard if found else guard.acquitted(server_round)), found
            found |= new
        return guard, found

    def _one(
        self,
        updates: Mapping[str, Groups],
        lengths: Mapping[str, Lengths],
        annotated: Mapping[str, Collection[str]],
        guard: GuardMemory,
        judges: Mapping[str, float],
        *,
        quiet: bool,
        all_of: bool,
    ) -> dict[str, str] | None:
        """The worst site; empty where the judges find none, None where none has to be judged."""
        if len(updates) < 2:
            return None
        earlier = {site: lengths for site, lengths in guard.lengths.items() if site not in guard.liars}
        oddities = odd(signs_of(updates, lengths, annotated, self.variances), earlier)
        suspects = [site for site, one in oddities.items() if one.reason]
        certain = any(oddities[site].opposed or oddities[site].impossible for site in suspects)
        if not (all_of or (suspects and (certain or not quiet))):
            return None
        tried = list(updates) if all_of or len(updates) == 2 else suspects
        whole = self.judged(self.model_of(list(updates)))
        without = {site: self.judged(self.model_of([one for one in updates if one != site])) for site in tried}
        return condemned(oddities, whole, without, judges={s: loss for s, loss in judges.items() if s in updates})
