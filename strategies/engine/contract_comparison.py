"""The points on which connected sites and an experiment agree or differ, from the sites' answers to a roll call.

The comparison has the rules of a run's roll call, and refuses nobody.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from polyclinic.common.pixel_contract import PixelTerms, find_pixel_faults
from polyclinic.common.vocabulary import find_vocabulary_faults
from polyclinic.strategies.engine.claims import (
    SiteAdmissionLimits,
    find_admission_limit_faults,
    find_admission_place,
)
from polyclinic.strategies.engine.class_words import (
    CoordinatorWords,
    describe_classes_of_one_site,
    find_alike_class_faults,
    find_alike_classes,
    find_classes_of_one_site,
)
from polyclinic.strategies.engine.membership import (
    RunMember,
    find_class_coverage_faults,
    find_class_spelling_faults,
    find_label_faults,
    find_unreadable_form_faults,
    find_wire_version_faults,
    read_pixel_form,
)
from polyclinic.strategies.methods.base import Method


@dataclass(frozen=True)
class ContractComparison:
    """The points of the contract of all sites that answered.

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
    word_faults, question = _find_word_faults(ordered, plan, method, limits, distinct_classes)
    terms = PixelTerms.from_plan(plan)
    forms = [(member.answer.site, form) for member in ordered if (form := read_pixel_form(member)) is not None]
    pixel_faults = [*find_unreadable_form_faults(ordered), *find_pixel_faults(forms, terms)]
    count_faults = find_admission_limit_faults(lambda: _without_classes(limits), ordered)
    release_faults = find_wire_version_faults(plan, ordered)
    classes = ", ".join(plan.vocabulary) if plan.vocabulary else ""
    protection = describe_protection(plan)

    def select(faults: Sequence[Fault], site: str) -> tuple[Fault, ...]:
        return tuple(fault for fault in faults if fault.site == site)

    points = dict[str, tuple[ContractPoint, ...]]()
    for member in ordered:
        answer, site, form = member.answer, member.answer.site, read_pixel_form(member)
        counts = f"{answer.train_samples:,} training images, {answer.patients:,} patients"
        limit = limits[site].images if site in limits else 0
        points[site] = (
            ContractPoint("words", describe_words(member.label_declaration), classes, select(word_faults, site)),
            *make_pixel_points(form, terms, select(pixel_faults, site)),
            ContractPoint("counts", counts, f"{limit:,} at most" if limit else "", select(count_faults, site)),
            ContractPoint("level", answer.level or NOT_STATED, protection),
            ContractPoint("release", describe_release(answer.release, member.wire), "", select(release_faults, site)),
        )
    return ContractComparison(MappingProxyType(points), question)


def _find_word_faults(
    ordered: Sequence[RunMember],
    plan: HospitalPlan,
    method: Method,
    limits: Mapping[str, SiteAdmissionLimits],
    distinct_classes: Sequence[str],
) -> tuple[list[Fault], str]:
    """Return the faults of the sites' words, and the coordinator's question about classes of one site."""
    declarations = [member.label_declaration for member in ordered]
    words = CoordinatorWords.from_limits(limits, distinct_classes)
    faults = find_admission_limit_faults(lambda: _without_images(limits), ordered)
    faults += find_label_faults(declarations)
    faults += find_vocabulary_faults(declarations, plan.vocabulary or {})
    if plan.vocabulary:
        return faults + find_class_coverage_faults(method, declarations), ""
    spelling_faults = find_class_spelling_faults(declarations, words.listed)
    misspelling = {fault.site for fault in spelling_faults}
    others = [declaration for declaration in declarations if declaration.site not in misspelling]
    names = tuple(sorted({name for declaration in declarations for name in declaration.canonical_names}))
    contract = LabelContract(names, {each.site: each.canonical_names for each in declarations})
    asked = {name for pair in find_alike_classes(declarations, words) for name in (pair.name, pair.other)}
    of_one_site = {name: site for name, site in find_classes_of_one_site(contract, words).items() if name not in asked}
    alike_faults, _ = find_alike_class_faults(others, words, line_follows=bool(of_one_site))
    alike = sorted({pair.other for pair in find_alike_classes(others, words)})
    question = describe_classes_of_one_site(of_one_site, words, alike) if of_one_site else ""
    coverage_faults = find_class_coverage_faults(method, declarations)
    return [*faults, *spelling_faults, *alike_faults, *coverage_faults], question


def _without_classes(limits: Mapping[str, SiteAdmissionLimits]) -> dict[str, SiteAdmissionLimits]:
    return {site: replace(limit, classes=frozenset()) for site, limit in limits.items()}


def _without_images(limits: Mapping[str, SiteAdmissionLimits]) -> dict[str, SiteAdmissionLimits]:
    return {site: replace(limit, images=0) for site, limit in limits.items()}
