"""Which of two models is better, by losses that the sites state: the mean decides, the majority has a veto.

What counts as a site's loss is the *criterion* of the run. ``auroc``: 1 minus the mean AUROC over the site's own
classes on its validation part, which is the share of pairs that the model ranks wrongly. ``loss``: the plain validation
loss. A method that trains adjusted or weighted logits does not minimise the plain loss, which may rise while the
ranking improves. One rule serves both, for both are 0 at best and grow as a model gets worse.

The rule of the paper's code is the lowest uniform mean (specs 1.4). Alone it lets one site choose: who states 0 for one
model, or a huge loss for all others, moves the mean as far as it likes. So each site's loss is also compared with the
lowest that the same site ever stated: their ratio is the site's *regret* for a model, 1 at its own best. A model's
regret is the smallest one that more than half of the sites stay within: one site alone moves it no further than to
the regret of an honest neighbour. Of two models whose regrets are both at most :data:`TOLERATED`, the lower mean is
better, as in the paper. Otherwise the smaller regret is better.

What influence one lying site keeps, of n that judged both models:

==== =============================================================================================================
n    it decides
==== =============================================================================================================
1, 2 everything: nothing tells which of two is lying
3    between models that both honest sites hold within 25 % of their best, also where the two agree which is better
4    the same, with two of the three honest sites
10   the same, with five of the nine
==== =============================================================================================================

Where any model is within 25 % of their best for more than half of the sites, the chosen one is. Closer bounds (each
difference cut to the second largest, trimmed, or counted as a vote) chose worse rounds among honest sites: few of them
see a difference, and the noise of the others outvotes them.
"""

from collections.abc import Mapping
from typing import Literal

from strategies.aggregation.mean import running_sum
from strategies.engine.round_record import FederationValidation

FEWEST = 3
"""Sites of which a majority can outvote one."""
TOLERATED = 1.25
"""Honest losses near their lowest go up and down by some percent from round to round; the mean settles those."""
SMALL = 0.02
"""Added to both losses of a ratio, in nats or in shares of pairs: below it a ratio says nothing."""

Losses = Mapping[str, float]
Criterion = Literal["auroc", "loss"]


def criterion_possible(wanted: Criterion, found: FederationValidation) -> Criterion:
    """The criterion of a run, settled by what sites state of its first judged model.

    It is ``loss`` where not more than half of the sites that state a loss have an AUROC: their validation parts show
    one kind of image only, and the few others, of which one may lie, would decide alone.
    """
    with_auroc = found.auroc.keys() & found.loss.keys()
    return wanted if 2 * len(with_auroc) > len(found.loss) else "loss"


def losses_by(criterion: Criterion, found: FederationValidation) -> Losses:
    """What counts as each site's loss by this criterion; a site that has no AUROC judges nothing by it."""
    return {site: 1 - auroc for site, auroc in found.auroc.items()} if criterion == "auroc" else found.loss


def is_better(now: Losses, before: Losses, lowest: Losses) -> bool:
    """Whether the model of ``now`` is better than the one of ``before``, over the sites that judged both.

    Args:
        now, before: Validation loss of each model, by site.
        lowest: The lowest loss that each site stated up to now, for any model.
    """
    common = sorted(set(now) & set(before))
    regrets = [regret({site: found[site] for site in common}, lowest) for found in (now, before)]
    if len(common) >= FEWEST and max(regrets) > TOLERATED:
        return regrets[0] < regrets[1]
    return running_sum(now[site] for site in common) < running_sum(before[site] for site in common)


def regret(losses: Losses, lowest: Losses) -> float:
    """How many times its lowest loss a model costs a site, at most, for more than half of the sites."""
    ratios = sorted((loss + SMALL) / (lowest[site] + SMALL) for site, loss in losses.items())
    return ratios[len(ratios) // 2] if ratios else 1.0


def lowest_of(losses: Losses, lowest: Losses) -> dict[str, float]:
    """The lowest losses, these taken in."""
    return {**lowest, **{site: min(loss, lowest.get(site, loss)) for site, loss in losses.items()}}
