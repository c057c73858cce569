"""Admission limits: the coordinator's limits on the classes and image counts that a site states at the roll call."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import Fault, quote_names

# Only for type checks: commands that admit a site do not import torch.
if TYPE_CHECKING:
    from strategies.engine.membership import RunMember


@dataclass(frozen=True)
class SiteAdmissionLimits:
    """Limits on a site's statements at the roll call, set when the coordinator admitted the site.

    Attributes:
        classes: Canonical names of the classes that the site may annotate; empty for any.
        images: Largest number of training images; 0 for any number.
    """

    classes: frozenset[str] = frozenset()
    images: int = 0


ClaimsBySite = Callable[[], Mapping[str, SiteAdmissionLimits]]
"""Returns the current limits of each site; they may change during a run."""
ANYTHING = SiteAdmissionLimits()


def find_admission_limit_faults(claims: ClaimsBySite, members: Iterable["RunMember"]) -> list[Fault]:
    """Return a fault for each site whose stated classes or images exceed its admission limits.

    Args:
        claims: Returns site -> its limits; a site that is not in the result has no limits.
        members: The sites with their answers to the roll call.
    """
    faults, limits = list[Fault](), claims()
    for member in members:
        answer, site = member.answer, member.answer.site
        limit = limits.get(site, ANYTHING)
        if limit.classes and (foreign := sorted(set(answer.class_names) - limit.classes)):
            allowed = quote_names(sorted(limit.classes))
            problem = f"claims {quote_names(foreign)}, which it was not admitted for. It may annotate {allowed}."
            remedy = "Leave them out of data.annotates, or map them in data.synonyms"
            faults.append(Fault(f"site {site}", problem, f"{remedy}; or the coordinator admits it for them.", site))
        if 0 < limit.images < answer.train_samples:
            problem = f"claims {answer.train_samples:,} training images; it was admitted for {limit.images:,} at most."
            faults.append(Fault(f"site {site}", problem, "The coordinator can admit it for more.", site))
    return faults
