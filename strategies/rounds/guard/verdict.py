"""Whose update harms the model: found by leaving one out and having the other sites judge.

An update is first *odd* (:func:`odd`): unlike the others of its round, or far longer than earlier ones. That costs
nothing and blames nobody. Then the model is made with and without it, and every site says the validation loss and AUROC
of both. A site's own word about its own update does not count. ``gain`` is log(loss with it / loss without it) at one
judge; the rules ask for it at more than half of the judges, so that a lying judge decides nothing among three or more.

Measured on honest runs (digits with 2 to 10 sites, like and unlike classes, up to 12 rounds; HAM10000 and NIH chest
X-rays as in ``experiments/``): a gain up to 0.64, where two sites have no class in common, and 0.65 on HAM10000.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strategies.aggregation.outliers import Lengths
from strategies.rounds.guard.odd_updates import Alignment, Signs

LONG = 4.0
"""Times the usual length from which on an update is odd."""
ABSURD = 100.0
"""Times the usual length that need no judge."""
FAR_TOO_LONG = 20.0
ALIGNED, OPPOSED = 0.2, -0.7
"""Alignment below which an update is unlike the others, and below which it is against them."""
AGREE = 0.6
"""Alignment of the others from which on they agree with one another."""
UNLIKE = 0.05
"""Gain, over the number of sites, that condemns an update that points elsewhere than the others'."""
SHORT = 0.5
"""An update under this part of the usual length does no harm by being unlike the others."""
LONG_GAIN, FAR_TOO_LONG_GAIN = 0.7, 0.3
"""Gain that condemns an update of such a length."""
ONLY_GAIN = 0.4
"""The same for a long update, where the model is better without it and not better without any other."""
CLEAR = 0.02
"""Of two updates against one another: the least log ratio to the loss before by which each is better or worse alone."""
LEAST_HARM = 0.1
"""Difference of the two losses, over the number of sites, under which no gain counts. Where training has settled, a
validation loss of 0.02 doubles by chance: of six honest runs of 20 rounds on digits, four lost a site without this."""
BROKEN = 1.5
"""A gain (4.5 times the loss) that condemns without any other sign. Honest sites with unlike images reached 0.65."""


@dataclass(frozen=True)
class Judged:
    """What sites say of a model: validation loss, infinite where the model gives none, and AUROC where it has one."""

    loss: Mapping[str, float]
    auroc: Mapping[str, float]


@dataclass(frozen=True)
class Oddity:
    """Why an update is odd.

    Attributes:
        times: Its length over the usual length of its worst part.
        unlike: Whether it points elsewhere than the others' updates, which agree.
        opposed: Whether it points against them.
        against: The same, whether or not there are two others that agree.
        impossible: Whether no training makes it.
        reason: In words; empty where nothing is odd.
    """

    times: float
    unlike: bool
    opposed: bool
    against: bool
    impossible: bool
    reason: str


def odd(signs: Mapping[str, Signs], earlier: Mapping[str, Lengths]) -> dict[str, Oddity]:
    """What is odd about each update of a round.

    Args:
        signs: By site.
        earlier: Site -> lengths of its last update that counted.
    """
    return {site: _oddity(site, signs, earlier) for site in signs}


def _oddity(site: str, signs: Mapping[str, Signs], earlier: Mapping[str, Lengths]) -> Oddity:
    one = signs[site]
    part, times = _longest(site, signs, earlier)
    long_enough = {name: _over_usual(name, site, signs, earlier) >= SHORT for name in one.lengths}
    head = _unlike(one.head) and long_enough.get("trunk", True)
    opposed = _opposed(one.head)
    reasons = [
        _long(part, times) if times >= LONG else "",
        one.impossible,
        f"its head rows have a cosine of {one.head.own:.2f} with the others'" if head or opposed else "",
    ]
    against = one.head.own is not None and one.head.own <= OPPOSED
    return Oddity(times, head, opposed, against, bool(one.impossible), "; ".join(filter(None, reasons)))


def _long(part: str, times: float) -> str:
    if math.isinf(times):
        return f"its {part} moves, and no other's does"
    return f"its {part} moves {times:.3g} times as far as usual"


def _unlike(alignment: Alignment) -> bool:
    """Whether it points elsewhere than the others, who agree, or of whom there is only one."""
    own, others = alignment.own, alignment.others
    return own is not None and own < ALIGNED and (others is None or others >= AGREE)


def _opposed(alignment: Alignment) -> bool:
    own, others = alignment.own, alignment.others
    return own is not None and own <= OPPOSED and others is not None and others >= AGREE


def _longest(site: str, signs: Mapping[str, Signs], earlier: Mapping[str, Lengths]) -> tuple[str, float]:
    """The part of an update that is longest beside its usual length, and how many times that."""
    times = {part: _over_usual(part, site, signs, earlier) for part in signs[site].lengths}
    part = max(sorted(times), key=times.__getitem__, default="update")
    return part, times.get(part, 0.0)


def _over_usual(part: str, site: str, signs: Mapping[str, Signs], earlier: Mapping[str, Lengths]) -> float:
    """Divide a part's length by the longer of two medians: the others' in this round, and all sites' earlier ones."""
    others = [one.lengths[part] for name, one in signs.items() if name != site and part in one.lengths]
    before = [lengths[part] for lengths in earlier.values() if part in lengths]
    usual = max((statistics.median(values) for values in (others, before) if values), default=0.0)
    length = signs[site].lengths.get(part, 0.0)
    return length / usual if usual else (math.inf if length and (others or before) else 0.0)


def condemned(
    oddities: Mapping[str, Oddity], whole: Judged, without: Mapping[str, Judged], *, judges: Mapping[str, float]
) -> dict[str, str]:
    """The site whose update harms the model most, with the reason; empty where none does.

    Args:
        oddities: Of every site of the round.
        whole: The model made of all updates.
        without: Site -> the model made without its update.
        judges: Site -> its validation loss of the model before the round; only these judge.
    """
    by_gain = sorted(without, key=lambda site: (-_middle(_gains(site, whole, without[site], judges)), site))
    for site in by_gain:
        if reason := _why(site, oddities, whole, without, judges):
            return {site: reason}
    return {}


def _why(
    site: str,
    oddities: Mapping[str, Oddity],
    whole: Judged,
    without: Mapping[str, Judged],
    judges: Mapping[str, float],
) -> str:
    oddity, sites = oddities[site], len(oddities)
    gains = _gains(site, whole, without[site], judges, LEAST_HARM / sites)
    said = _in_words(site, gains, oddity)
    if oddity.impossible or (oddity.times >= ABSURD and sites > 2):
        return said
    if sites == 2:  # either update may be the odd one: an honest one is long beside one that is next to nothing
        return said if _one_of_two(site, oddities, whole, without, judges) else ""
    least = BROKEN
    if oddity.times >= LONG:
        long = ONLY_GAIN if _only(site, whole, without, judges, sites) else LONG_GAIN
        least = FAR_TOO_LONG_GAIN if oddity.times >= FAR_TOO_LONG else long
    if oddity.unlike:
        least = UNLIKE / sites
    if oddity.opposed:
        # Another's far longer update bends the sum that this one opposes: an honest site then pulls the model back.
        bent = any(other.times >= LONG for name, other in oddities.items() if name != site)
        least = 0.05 if sites < 5 or bent else -math.inf
    if least == -math.inf:
        return said
    return said if gains and _more_than_half(gain >= least for gain in gains) else ""


def _only(site: str, whole: Judged, without: Mapping[str, Judged], judges: Mapping[str, float], sites: int) -> bool:
    """Whether the model is no better without any other site; False where not every site was left out once."""
    others = [_middle(_gains(one, whole, judged, judges)) for one, judged in without.items() if one != site]
    return len(without) == sites and max(others) <= 0


def _one_of_two(
    site: str,
    oddities: Mapping[str, Oddity],
    whole: Judged,
    without: Mapping[str, Judged],
    judges: Mapping[str, float],
) -> bool:
    """Whether one of two sites harms: each is the other's only judge, so both have to say the same.

    Only where its length speaks against it, the other's word alone is enough.
    """
    (other,) = set(oddities) - {site}
    gains = _gains(site, whole, without[site], judges, LEAST_HARM / len(oddities))
    if not gains:
        return False
    if oddities[site].against and other in without and _turned(site, other, without, judges):
        return True
    if oddities[site].times >= LONG and oddities[other].times < LONG:
        return gains[0] >= BROKEN
    against = gains[0], _auroc_gain(other, whole, without[site])
    in_favour = _gains(other, whole, without[other], judges) if other in without else []
    if not in_favour:
        return False
    for_other = in_favour[0], _auroc_gain(site, whole, without[other])
    if not oddities[site].unlike:
        return against[0] >= BROKEN and for_other[0] <= -0.1
    by_loss = against[0] >= 0.3 and for_other[0] <= -0.1
    return by_loss or (against[1] >= 0.1 and for_other[1] <= -0.1)


def _turned(site: str, other: str, without: Mapping[str, Judged], judges: Mapping[str, float]) -> bool:
    """Whether its update alone makes the model worse at both sites, and the other's alone makes it better at both.

    No honest site says so of its own update.
    """
    both = (site, other)
    if not all(judge in judges for judge in both):
        return False
    by_it = [_log_ratio(without[other].loss.get(judge, math.inf), judges[judge]) for judge in both]
    by_other = [_log_ratio(without[site].loss.get(judge, math.inf), judges[judge]) for judge in both]
    return min(by_it) >= CLEAR and max(by_other) <= -CLEAR


def _gains(
    site: str, whole: Judged, without: Judged, judges: Mapping[str, float], least_harm: float = 0.0
) -> list[float]:
    """Return the gain at each judge but the site itself.

    It is 0 where both models break down, and where the loss is higher by less than ``least_harm``.
    """
    found = []
    for judge in sorted(judges):
        if judge != site:
            with_it, left_out = (one.loss.get(judge, math.inf) for one in (whole, without))
            slight = 0 < with_it - left_out < least_harm
            found.append(0.0 if slight else _log_ratio(with_it, left_out))
    return found


def _log_ratio(above: float, below: float) -> float:
    if not math.isfinite(above) and not math.isfinite(below):
        return 0.0
    if not math.isfinite(above) or not math.isfinite(below):
        return math.inf if math.isfinite(below) else -math.inf
    return math.log(max(above, 1e-9) / max(below, 1e-9))


def _auroc_gain(judge: str, whole: Judged, without: Judged) -> float:
    if judge not in without.auroc:
        return 0.0
    return without.auroc[judge] - whole.auroc.get(judge, 0.5)


def _middle(gains: list[float]) -> float:
    return statistics.median(gains) if gains else 0.0


def _more_than_half(votes: Iterable[bool]) -> bool:
    said = list(votes)
    return 2 * sum(said) > len(said)


def _in_words(site: str, gains: list[float], oddity: Oddity) -> str:
    middle = _middle(gains)
    if middle > 0:
        judged = (
            f"the other sites' validation loss is {math.exp(middle):.3g} times as high with its update as without it"
        )
        if math.isinf(middle):
            judged = "the other sites have no finite validation loss with its update, and have one without it"
    else:
        judged = ""
    return "; ".join(filter(None, [oddity.reason, judged])) or "its update harms the model"
