"""The most that a site may state of itself at the roll call, by the list made when it was admitted."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import Fault, quoted

# For its type alone: commands that admit a site do not wait for torch.
if TYPE_CHECKING:
    from strategies.engine.roll_call import Member


@dataclass(frozen=True)
class Claims:
    """The most that a site may claim.

    Attributes:
        classes: Canonical names that it may annotate; empty for any.
        images: Most training images; 0 for any number.
    """

    classes: frozenset[str] = frozenset()
    images: int = 0


ClaimsBySite = Callable[[], Mapping[str, Claims]]
"""Looks the lists up; a site may be admitted with another one while a run goes on."""
ANYTHING = Claims()


def no_lists() -> Mapping[str, Claims]:
    """Return no lists: in a simulation no site is admitted."""
    return {}


def claim_faults(members: Iterable["Member"], claims: Mapping[str, Claims]) -> list[Fault]:
    """Return a fault for each site that claims more than it was admitted for."""
    faults = list[Fault]()
    for answer in (member.answer for member in members):
        site, may = answer.site, claims.get(answer.site, ANYTHING)
        if may.classes and (foreign := sorted(set(answer.class_names) - may.classes)):
            allowed = quoted(sorted(may.classes))
            problem = f"claims {quoted(foreign)}, which it was not admitted for. It may annotate {allowed}."
            remedy = (
                "Leave them out of data.annotates, or map them in data.synonyms; or the coordinator admits it for them."
            )
            faults.append(Fault(f"site {site}", problem, remedy, site))
        if 0 < may.images < answer.train_samples:
            problem = f"claims {answer.train_samples:,} training images; it was admitted for {may.images:,} at most."
            faults.append(Fault(f"site {site}", problem, "The coordinator can admit it for more.", site))
    return faults
