"""Admission limits: the coordinator's limits on the classes and image counts that a site states at the roll call."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import Fault, quote_names

# Only for type checks: commands that admit a site do not import torch.
if TYPE_CHECKING:
    from strategies.engine.membership import RunMember


MOST_UNLISTED_CLASSES = 1_000
"""Most classes of a run for which the coordinator has no list: as many as a hospital's policy allows by default
(``maximum_classes``). With more, honest hospitals would decline the model because of classes that one site invents."""


@dataclass(frozen=True)
class SiteAdmissionLimits:
    """Limits on a site's statements at the roll call, set when the coordinator admitted the site.

    Attributes:
        classes: Canonical names of the classes that the site may annotate; empty for any.
        images: Largest number of training images; 0 for any number.
        order: Place of the site in the order of first admissions, which decides between sites that contradict each
            other. A site cannot choose it.
    """

    classes: frozenset[str] = frozenset()
    images: int = 0
    order: int = 0


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


def find_surplus_class_faults(claims: ClaimsBySite, members: Iterable["RunMember"]) -> list[Fault]:
    """Return a fault for each site that is left out because the run would have too many classes.

    While there are more classes than :data:`MOST_UNLISTED_CLASSES`, or than the coordinator has listed, the site is
    left out that adds the most: classes that no other site annotates and that are on no list. Of several the one that
    was admitted last. So no site can be left out because of another one's classes, unless it adds more itself.

    Args:
        claims: Returns site -> its limits.
        members: The sites with their answers to the roll call.
    """
    limits, faults = claims(), list[Fault]()
    listed = frozenset[str]().union(*(limit.classes for limit in limits.values()))
    most = max(MOST_UNLISTED_CLASSES, len(listed))
    classes = {member.answer.site: frozenset(member.answer.class_names) for member in members}
    owners = Counter(name for names in classes.values() for name in names)
    while len(owners) > most and len(classes) > 1:
        added = {site: sum(owners[name] == 1 for name in names - listed) for site, names in classes.items()}
        site = max(classes, key=lambda name: (added[name], limits.get(name, ANYTHING).order, name))
        if not added[site]:
            break
        problem = f"the run would have {len(owners):,} classes; without a list of the coordinator's it has {most:,} at "
        problem += f"most. {site} adds the most, {added[site]:,} that no other site annotates."
        remedy = "Leave some out of data.annotates; or the coordinator lists them as classes = [...] in"
        faults.append(Fault(f"site {site}", problem, f"{remedy} sites/{site}.toml.", site))
        owners -= Counter(classes.pop(site))
    return faults
