"""Limits on the classes and image counts that a site states at the roll call, which nobody can check.

A site that was admitted for a number of images is refused if it claims more. The claim of any other site is lowered to
:data:`MAX_CLAIM_IN_MEDIANS` times the median claim of the other sites, and its label counts in proportion. So an
invented billion counts as a large hospital. Real hospitals differ in size by a factor of a hundred, and keep their
numbers. Among few sites, a claim that is lowered though it was true loses little of its share.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.models.zoo.spec import Task

# Only for type checks: commands that admit a site do not import torch.
if TYPE_CHECKING:
    from polyclinic.common.wire.records import RollCallAnswer
    from polyclinic.strategies.engine.run_member import RunMember

MAX_CLAIM_IN_MEDIANS = 100
"""Largest claim that is not lowered, as a multiple of the median claim of the other sites."""
MIN_SITES_FOR_MEDIAN_CLAIM = 3
"""Smallest number of sites whose claims are compared; of two sites, nothing shows which one is wrong."""


MAX_UNLISTED_CLASSES = 1_000
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
NO_LIMITS = SiteAdmissionLimits()


def list_admitted_classes(limits: Mapping[str, SiteAdmissionLimits]) -> frozenset[str]:
    """Return the class names in all lists by which the coordinator admitted sites (``flwr-server admit --classes``)."""
    return frozenset[str]().union(*(limit.classes for limit in limits.values()))


def find_admission_place(site: str, limits: Mapping[str, SiteAdmissionLimits]) -> tuple[int, str]:
    """Return the key that sorts sites by their first admission; a site without limits comes last."""
    order = limits[site].order if site in limits else len(limits)
    return order, site


def find_admitted_class_faults(
    limits: Mapping[str, SiteAdmissionLimits], members: Iterable["RunMember"]
) -> list[Fault]:
    """Return a fault for each site that states classes which it was not admitted for.

    Args:
        limits: Site -> its limits; a site that is not in it has none.
        members: The sites with their answers to the roll call.
    """
    faults = list[Fault]()
    for member in members:
        site = member.answer.site
        allowed = limits.get(site, NO_LIMITS).classes
        foreign = sorted(set(member.answer.class_names) - allowed)
        if allowed and foreign:
            problem = f"claims {quote_names(foreign)}, which it was not admitted for. It may annotate "
            problem += f"{quote_names(sorted(allowed))}."
            remedy = "Leave them out of data.annotates, or map them in data.synonyms"
            faults.append(Fault(f"site {site}", problem, f"{remedy}; or the coordinator admits it for them.", site))
    return faults


def find_admitted_count_faults(
    limits: Mapping[str, SiteAdmissionLimits], members: Iterable["RunMember"]
) -> list[Fault]:
    """Return a fault for each site that states more training images than it was admitted for.

    Args:
        limits: Site -> its limits; a site that is not in it has none.
        members: The sites with their answers to the roll call.
    """
    faults = list[Fault]()
    for member in members:
        site = member.answer.site
        claim = member.answer.train_samples
        allowed = limits.get(site, NO_LIMITS).images
        if 0 < allowed < claim:
            problem = f"claims {claim:,} training images; it was admitted for {allowed:,} at most."
            faults.append(Fault(f"site {site}", problem, "The coordinator can admit it for more.", site))
    return faults


def find_contradictory_count_faults(task: Task, members: Iterable["RunMember"]) -> list[Fault]:
    """Return a fault for each site that counts more images of all classes together than it has.

    Only in a multi-class task, in which an image shows one class: the prior of such counts would exceed 1. Counts of
    one class are checked on receipt (:class:`polyclinic.common.wire.records.RollCallAnswer`).
    """
    faults = list[Fault]()
    for member in members if task == "multi_class" else ():
        answer = member.answer
        site = member.answer.site
        shown = sum(count for count in answer.positives if count > 0)  # below 0: the site does not tell
        if shown > answer.train_samples:
            problem = f"counts {shown:,} images of its classes together, and states {answer.train_samples:,} images."
            remedy = "Each image shows one class in this task. Install the coordinator's release there."
            faults.append(Fault(f"site {site}", problem, remedy, site))
    return faults


def lower_image_claims(
    images: Mapping[str, int], counting: Collection[str], admitted: Collection[str] = ()
) -> dict[str, int]:
    """Return site -> the number of images that counts for it, for the sites whose claim is too large.

    Args:
        images: Site -> number of training images that it claims.
        counting: Sites whose claims make the medians.
        admitted: Sites that were admitted for a number of images, which bounds their claims already.
    """
    ordered = sorted(images[site] for site in counting if images[site] > 0)
    if len(ordered) < MIN_SITES_FOR_MEDIAN_CLAIM - 1:
        return {}
    # The median of a site's others is never lower than the one without the largest claim.
    lowest_bound = int(MAX_CLAIM_IN_MEDIANS * _find_median_of_others(ordered, ordered[-1]))
    lowered = dict[str, int]()
    for site, claim in images.items():
        if claim <= lowest_bound:
            continue
        others = len(ordered) - (site in counting and claim > 0)
        if site in admitted or others < MIN_SITES_FOR_MEDIAN_CLAIM - 1:
            continue
        bound = int(MAX_CLAIM_IN_MEDIANS * _find_median_of_others(ordered, claim if site in counting else None))
        if claim > bound:
            lowered[site] = bound
    return lowered


def _find_median_of_others(ordered: list[int], own: int | None) -> float:
    """Return the median of the sorted claims, without the claim ``own`` of one site unless it is None."""
    skipped = len(ordered) if own is None else bisect.bisect_left(ordered, own)
    count = len(ordered) - (own is not None)
    middle = [ordered[place + (place >= skipped)] for place in ((count - 1) // 2, count // 2)]
    return sum(middle) / 2


def lower_answer_claims(answer: "RollCallAnswer", images: int) -> "RollCallAnswer":
    """Return a site's answer with ``images`` training images, fewer than it claims, and its counts in proportion."""

    def scale(counts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(count * images // answer.train_samples if count > 0 else count for count in counts)

    return replace(
        answer,
        train_samples=images,
        patients=min(answer.patients, images),
        positives=scale(answer.positives),
        negatives=scale(answer.negatives),
    )


def describe_lowered_claim(site: str, claim: int, counted: int) -> str:
    """Return a sentence for people: whose claim is too large, how much of it counts, and what to do if it is true."""
    return (
        f"{site} claims {claim:,} training images, more than {MAX_CLAIM_IN_MEDIANS} times the median of the other "
        f"sites: {counted:,} of them count. "
        f"If it has so many, admit it for them: flwr-server admit --max-images {claim}"
    )


def find_surplus_class_faults(limits: Mapping[str, SiteAdmissionLimits], members: Iterable["RunMember"]) -> list[Fault]:
    """Return a fault for each site that is left out because the run would have too many classes.

    While there are more classes than :data:`MAX_UNLISTED_CLASSES`, or than the coordinator has listed, the site is
    left out that adds most classes which no other site annotates and which are on no list. Among sites that add equally
    many, the one that was admitted last is left out. So a site
    that adds few classes is never left out because of the classes of another one.

    Args:
        limits: Site -> its limits.
        members: The sites with their answers to the roll call.
    """
    faults = list[Fault]()
    listed = list_admitted_classes(limits)
    most = max(MAX_UNLISTED_CLASSES, len(listed))
    classes = {member.answer.site: frozenset(member.answer.class_names) for member in members}
    owners = Counter(name for names in classes.values() for name in names)
    while len(owners) > most and len(classes) > 1:
        added = {site: sum(owners[name] == 1 for name in names - listed) for site, names in classes.items()}
        site = max(classes, key=lambda name: (added[name], limits.get(name, NO_LIMITS).order, name))
        if not added[site]:
            break
        problem = f"the run would have {len(owners):,} classes; without a list of the coordinator's it has {most:,} at "
        problem += f"most. {site} adds the most, {added[site]:,} that no other site annotates."
        remedy = "Leave some out of data.annotates; or the coordinator lists them as classes = [...] in"
        faults.append(Fault(f"site {site}", problem, f"{remedy} sites/{site}.toml.", site))
        owners -= Counter(classes.pop(site))
    return faults
