"""Trials: find the site whose update harms a round's model, with few extra models that few sites evaluate.

A trial compares the model from all updates with models from which some updates are left out. It costs evaluations and
the traffic of whole models, so it needs a reason. One is that an update had to be shortened, or that an update as long
as all others together may stop their progress. Another is that the model collapsed, or that its loss rose beyond what
earlier rounds explain. A loss that stops falling is no reason alone: in every honest run it does so near the end.

If single updates are the reason, only their sites are suspects. Otherwise all sites are, and the suspects are halved
until one is left. The half with the longest updates, and then with the widest angles to the sum of the other updates,
is tried first. Only the last comparison, of the model without the update of this site alone, counts against a site.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyclinic.common.wire.records import ModelGroups
from polyclinic.strategies.engine.events import FederationValidation

HARMFUL_LOSS_RATIO, HARMFUL_AUROC_DROP = 2.0, 0.1
"""An update harms if it raises the loss by this ratio, or lowers the AUROC by this difference."""
HARMFUL_GROUP_LOSS_RATIO, HARMFUL_GROUP_AUROC_DROP = 1.4, 0.05
"""Limits for a group of updates, which is then divided; they are lower, because honest updates hide some harm."""
MIN_COMPARED_LOSS = 0.1
"""Lower losses count as this loss, because near convergence a loss of 0.02 may double by chance."""
MIN_JUDGES, MAX_JUDGES = 2, 5
"""Smallest and largest number of other sites that judge an update.

A single judge could exclude any other site; five are enough for a majority against one that lies.
"""
OPPOSING_LENGTH_SHARE = 0.85
"""Share of the length of all other updates together, from which on an update can cancel them."""
CLEAR_FALL_RATIO = 0.98
"""A loss has clearly fallen if it is at most this multiple of the previous one."""
CLEAR_RISE_RATIO, CLEAR_RISE_DEVIATIONS, MIN_EARLIER_CHANGES = 1.5, 5.0, 5
"""A loss has risen beyond noise if it is more than 1.5 times the one before, and the change of its logarithm is more
than five robust standard deviations above the median of the changes before, of which there must be five."""
ROBUST_DEVIATION = 1.4826
"""Standard deviation of normal values, divided by their median absolute deviation."""
MAX_STORED_CHANGES = 20
"""Number of the latest changes of the loss that are compared."""

Losses = Mapping[str, float]


def compute_loss_ratio(loss: float, other: float) -> float:
    """Return how many times as high a loss is as another; infinite if it alone is not finite."""
    if not math.isfinite(other):
        return 1.0
    return max(loss, MIN_COMPARED_LOSS) / max(other, MIN_COMPARED_LOSS) if math.isfinite(loss) else math.inf


# ---------------------------------------------------------------------- reasons for a trial


def compute_loss_change(losses: Losses, before: Losses) -> float | None:
    """Return the median over sites of the change of the loss's logarithm; None without a site that has both losses."""
    judges = sorted(losses.keys() & before.keys())
    changes = [math.log(compute_loss_ratio(losses[site], before[site])) for site in judges]
    return statistics.median(changes) if changes else None


def has_model_stalled(losses: Losses, before: Losses) -> bool:
    """Return True if at more than half of the sites a model's loss is not clearly lower than that of the model before.

    A loss is clearly lower if it is at most :data:`CLEAR_FALL_RATIO` times the loss before, or at most
    :data:`MIN_COMPARED_LOSS`.

    Args:
        losses: Site -> validation loss of the model.
        before: Site -> validation loss of the model before; sites without both losses do not count.
    """
    judges = losses.keys() & before.keys()
    no_better = 0
    for site in judges:
        no_better += (
            losses[site] > MIN_COMPARED_LOSS and compute_loss_ratio(losses[site], before[site]) > CLEAR_FALL_RATIO
        )
    return 2 * no_better > len(judges) > 0


def find_opposing_sites(relative_lengths: Mapping[str, float]) -> list[str]:
    """Return the sites whose updates are long enough to cancel all others.

    Args:
        relative_lengths: Site -> length of its update, in median lengths of the round.
    """
    least = OPPOSING_LENGTH_SHARE * (len(relative_lengths) - 1)
    return [site for site, length in relative_lengths.items() if length > least]


def has_loss_risen_beyond_noise(change: float | None, earlier: Sequence[float]) -> bool:
    """Return True if a loss rose by more than the changes of earlier rounds explain.

    Args:
        change: Change of the logarithm of the loss (:func:`compute_loss_change`).
        earlier: The changes of the rounds before.
    """
    if change is None or change <= math.log(CLEAR_RISE_RATIO) or len(earlier) < MIN_EARLIER_CHANGES:
        return False
    middle = statistics.median(earlier)
    deviation = ROBUST_DEVIATION * statistics.median(abs(value - middle) for value in earlier)
    return change > middle + CLEAR_RISE_DEVIATIONS * deviation


def order_by_suspicion(updates: Mapping[str, ModelGroups], relative_lengths: Mapping[str, float]) -> list[str]:
    """Return the sites, the most suspicious first: those with the longest updates or the widest angles to the others.

    Args:
        updates: Site -> its update.
        relative_lengths: Site -> length of its update, in median lengths of the round.
    """
    cosines = _compute_cosines_to_others(updates)

    def suspicion(site: str) -> tuple[float, float, str]:
        # Lengths of honest updates differ by chance: only much longer ones count before the angle.
        return -max(round(relative_lengths.get(site, 0.0)), 2), cosines.get(site, 0.0), site

    return sorted(updates, key=suspicion)


def _compute_cosines_to_others(updates: Mapping[str, ModelGroups]) -> dict[str, float]:
    """Return the cosine of the angle between each site's trunk and the sum of the others', all made equally long."""
    directions = dict[str, np.ndarray]()
    for site, update in updates.items():
        if update.trunk is not None:
            scaled = update.trunk / max(float(np.abs(update.trunk).max(initial=0.0)), 1e-30)
            directions[site] = scaled / max(float(np.linalg.norm(scaled)), 1e-30)
    if not directions:
        return {}
    total = np.sum(list(directions.values()), axis=0)
    cosines = dict[str, float]()
    for site, direction in directions.items():
        others = total - direction
        cosines[site] = float(direction @ others) / max(float(np.linalg.norm(others)), 1e-30)
    return cosines


# ---------------------------------------------------------------------- harm


@dataclass(frozen=True, order=True)
class Harm:
    """How much worse a model is with some updates than without them, for more than half of the judges.

    Attributes:
        loss_ratio: Validation loss with the updates, divided by the one without.
        auroc_drop: AUROC without the updates, minus the one with them.
    """

    loss_ratio: float
    auroc_drop: float

    @property
    def excludes_site(self) -> bool:
        """Return True if the harm is large enough to exclude the site."""
        return self.loss_ratio >= HARMFUL_LOSS_RATIO or self.auroc_drop >= HARMFUL_AUROC_DROP

    @property
    def is_in_group(self) -> bool:
        """Return True if a group with this harm may contain a harmful update."""
        return self.loss_ratio >= HARMFUL_GROUP_LOSS_RATIO or self.auroc_drop >= HARMFUL_GROUP_AUROC_DROP


def measure_harm(whole: FederationValidation, trial: FederationValidation, out: Collection[str]) -> Harm:
    """Return the harm of the updates of some sites.

    A site's figures do not count for its own update. So, with three or more sites, a single site cannot prevent its own
    exclusion, even by sending no figures. It also cannot cause the exclusion of another site.

    Args:
        whole: The sites' validation figures of the model from all updates; a loss that is not finite is missing.
        trial: Those of the model without the updates of the sites in ``out``.
    """
    judges = (whole.loss.keys() | trial.loss.keys()) - set(out)
    pairs = [(whole.loss.get(judge, math.inf), trial.loss.get(judge, math.inf)) for judge in judges]
    ratios = [compute_loss_ratio(*pair) for pair in pairs]
    tested = (whole.auroc.keys() & trial.auroc.keys()) - set(out)
    drops = [trial.auroc[judge] - whole.auroc[judge] for judge in tested]
    return Harm(_compute_majority_bound(ratios, 1.0), _compute_majority_bound(drops, 0.0))


def describe_harm(harm: Harm) -> str:
    """Return the reason for excluding a site whose update does this harm to the model."""
    times = harm.loss_ratio
    much = f"{times:.3g} times the validation loss" if math.isfinite(times) else "no finite validation loss"
    judges = "more than half of the other sites that judge it"
    return f"{judges} have {much}, or more, with its update, and {harm.auroc_drop:.2f} less AUROC"


def _compute_majority_bound(values: list[float], none: float) -> float:
    """Return the largest b such that more than half of the values are >= b.

    Return ``none`` if there are fewer values than :data:`MIN_JUDGES`.
    """
    return sorted(values)[(len(values) - 1) // 2] if len(values) >= MIN_JUDGES else none


# ---------------------------------------------------------------------- the search

Validate = Callable[[Collection[str], Collection[str]], FederationValidation]
"""Makes the model without the updates of the first sites; returns its validation figures at the second sites."""


@dataclass
class UpdateTrial:
    """The search for the site whose update harms the model most.

    Attributes:
        validate: Makes a model and has it evaluated.
        judges: Sites that can judge, in the order in which they are asked.
    """

    validate: Validate
    judges: Sequence[str]
    _whole: FederationValidation = field(default_factory=FederationValidation)
    _judges_of_whole: set[str] = field(default_factory=set)

    def find_harmful_site(self, suspects: Sequence[str]) -> tuple[str, str]:
        """Return the suspect whose update harms the model, with the reason; two empty strings if none does.

        Args:
            suspects: The sites of which one may be harmful, the most suspicious first.
        """
        for site in self._narrow_down(suspects):
            harm = self._measure_harm_of_group([site])
            if harm is not None and harm.excludes_site:
                return site, describe_harm(harm)
        return "", ""

    def _narrow_down(self, suspects: Sequence[str]) -> Iterator[str]:
        """Yield the suspects that must be tried alone; groups without harm are skipped."""
        if len(suspects) < 2:
            yield from suspects
            return
        middle = len(suspects) // 2
        for half in (suspects[:middle], suspects[middle:]):
            if len(half) > 1:
                harm = self._measure_harm_of_group(half)
                if harm is not None and not harm.is_in_group:
                    continue
            yield from self._narrow_down(half)

    def _measure_harm_of_group(self, group: Sequence[str]) -> Harm | None:
        """Return the harm of a group's updates; None if too few other sites can judge it."""
        judges = [site for site in self.judges if site not in group][:MAX_JUDGES]
        if len(judges) < MIN_JUDGES:
            return None
        new = [site for site in judges if site not in self._judges_of_whole]
        if new:
            more = self.validate((), new)
            self._judges_of_whole.update(new)
            self._whole = FederationValidation({**self._whole.loss, **more.loss}, {**self._whole.auroc, **more.auroc})
        without = self.validate(group, judges)
        other_judges = self._judges_of_whole - set(judges)
        return measure_harm(self._whole.without_sites(other_judges), without, group)
