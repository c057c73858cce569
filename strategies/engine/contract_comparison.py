"""The points on which connected sites and an experiment agree or differ, from the sites' answers to a roll call.

The comparison has the rules of a run's roll call, and refuses nobody.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelContract
from polyclinic.common.contract_points import (
    NOT_STATED,
    ContractPoint,
    describe_protection,
    describe_release,
    describe_words,
    make_pixel_points,
)
from polyclinic.common.errors import Fault
from polyclinic.common.pixel_contract import PixelTerms
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.strategies.engine.admission_limits import SiteAdmissionLimits, find_admission_place
from polyclinic.strategies.engine.class_words import (
    CoordinatorWords,
    add_distinct_line,
    describe_classes_of_one_site,
    find_classes_of_one_site,
    list_alike_pairs,
    list_alike_words,
)
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.engine.site_faults import RollCallTerms, SiteFault
from polyclinic.strategies.methods.base import Method


@dataclass(frozen=True)
class ContractComparison:
    """The result of a comparison of all sites that answered.

    Attributes:
        points: Site -> its points, in the order in which the sites were admitted.
        question: The coordinator's question about classes of one site alone; empty for none.
    """

    points: Mapping[str, tuple[ContractPoint, ...]]
    question: str = ""


def compare_sites_with_plan(
    members: Collection[RunMember],
    plan: HospitalPlan,
    method: Method,
    limits: Mapping[str, SiteAdmissionLimits],
    distinct_classes: Sequence[str] = (),
) -> ContractComparison:
    """Compare the answers of sites with a plan and with one another.

    Args:
        limits: Site -> what it was admitted for, and its place in the order of admissions.
        distinct_classes: Classes of which the coordinator says that they are no other class in other words.
    """
    ordered = sorted(members, key=lambda member: find_admission_place(member.answer.site, limits))
    words = CoordinatorWords.from_limits(limits, distinct_classes)
    pixels = PixelTerms.from_plan(plan)
    terms = RollCallTerms(plan, method, limits, words, pixels)
    site_faults, question = _ask_about_words(ordered, terms.collect_faults(ordered), terms)
    classes = ", ".join(plan.vocabulary) if plan.vocabulary else ""
    protection = describe_protection(plan)

    def select(point: str, site: str) -> tuple[Fault, ...]:
        return tuple(each.fault for each in site_faults if each.point == point and each.fault.site == site)

    points = dict[str, tuple[ContractPoint, ...]]()
    for member in ordered:
        answer = member.answer
        site = member.answer.site
        counts = f"{answer.train_samples:,} training images, {answer.patients:,} patients"
        limit = limits[site].images if site in limits else 0
        points[site] = (
            ContractPoint("words", describe_words(member.label_declaration), classes, select("words", site)),
            *make_pixel_points(member.read_pixel_form(), pixels, select("pixels", site)),
            ContractPoint("counts", counts, f"{limit:,} at most" if limit else "", select("counts", site)),
            ContractPoint("level", answer.level or NOT_STATED, protection),
            ContractPoint("release", describe_release(answer.release, member.wire), "", select("release", site)),
        )
    return ContractComparison(MappingProxyType(points), question)


def _ask_about_words(
    ordered: Sequence[RunMember], site_faults: Sequence[SiteFault], terms: RollCallTerms
) -> tuple[list[SiteFault], str]:
    """Return the faults, and the coordinator's question about classes of only one site.

    The line ``distinct_classes`` for the experiment is in one of the two texts. A word with a fault is not asked about.
    """
    faults = [each.fault for each in site_faults]
    declarations = [member.label_declaration for member in ordered]
    names = tuple(sorted({name for declaration in declarations for name in declaration.canonical_names}))
    contract = LabelContract(names, {each.site: each.canonical_names for each in declarations})
    spellings = Counter(make_class_spelling_key(name) for name in names)
    in_faults = {name for pair in list_alike_pairs(faults) for name in (pair.name, pair.other)}
    in_faults.update(name for name in names if spellings[make_class_spelling_key(name)] > 1)
    of_one_site = {
        name: site for name, site in find_classes_of_one_site(contract, terms.words).items() if name not in in_faults
    }
    if terms.compares_words and of_one_site:
        question = describe_classes_of_one_site(of_one_site, terms.words, sorted(list_alike_words(faults)))
        return list(site_faults), question
    with_line = add_distinct_line(faults, terms.words)
    return [SiteFault(each.point, fault) for each, fault in zip(site_faults, with_line, strict=True)], ""
