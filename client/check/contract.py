"""The table of ``flwr-client check --experiment``: the points on which this site and the run agree or differ."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from polyclinic.client.check.findings import CheckArea
from polyclinic.client.check.source import SiteImageSource
from polyclinic.client.check.training import PlannedTraining
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.gate.policy_rules import RequestedWork, decide_on_request
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.contract_points import (
    ContractPoint,
    describe_protection,
    describe_release,
    describe_words,
    make_pixel_points,
)
from polyclinic.common.errors import Fault
from polyclinic.common.patients.opt_out import SITE_FILE
from polyclinic.common.pixel_contract import PixelTerms, find_pixel_faults
from polyclinic.common.vocabulary import find_vocabulary_faults, name_declaration_by_vocabulary
from polyclinic.common.wire.versions import WIRE_VERSION, is_spoken
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.strategies.registry import build_site_method


@dataclass(frozen=True)
class DataComparison:
    """A comparison of a site's class names and pixels with a plan, with the faults that the coordinator would find.

    Attributes:
        declaration: The site's classes, with the names of the study's vocabulary.
        form: Colour, size and value range that the site's images get.
        terms: The plan's settings for pixels.
        word_faults: One fault for each class that is not in the study's vocabulary.
        pixel_faults: One fault for each key of ``[data]`` that contradicts the plan.
    """

    declaration: LabelDeclaration
    form: PixelForm
    terms: PixelTerms
    word_faults: tuple[Fault, ...]
    pixel_faults: tuple[Fault, ...]


def compare_data_with_plan(declaration: LabelDeclaration, form: PixelForm, plan: HospitalPlan) -> DataComparison:
    """Compare a site's class names and pixels with a plan, by the same rules as the coordinator.

    Args:
        declaration: The site's classes, with the site's own names.
        form: The site's pixel settings.
    """
    vocabulary = plan.vocabulary or {}
    terms = PixelTerms.from_plan(plan)
    named = name_declaration_by_vocabulary(declaration, vocabulary)
    return DataComparison(
        named,
        form,
        terms,
        tuple(find_vocabulary_faults([named], vocabulary)),
        tuple(find_pixel_faults([(declaration.site, form)], terms)),
    )


def make_contract_points(
    settings: SiteSettings, planned: PlannedTraining, source: SiteImageSource, comparison: DataComparison
) -> tuple[ContractPoint, ...]:
    """Return the compared points: class names, pixels, numbers of images and patients, and the policy's level.

    Raises:
        BadInput: If the plan's method is not installed here, or its parameters are wrong.
    """
    declaration = comparison.declaration
    classes = planned.plan.vocabulary or {}
    return (
        ContractPoint(
            "words", describe_words(declaration), ", ".join(classes) or "no [vocabulary]", comparison.word_faults
        ),
        *make_pixel_points(comparison.form, comparison.terms, comparison.pixel_faults),
        _make_count_point(settings, source),
        _make_level_point(settings, planned, source, declaration),
    )


def _make_count_point(settings: SiteSettings, source: SiteImageSource) -> ContractPoint:
    counts = Counter(source.parts.tolist())
    patients = len(np.unique(source.patients[source.parts == "train"]))
    minimum = settings.file.policy.smallest_count
    faults = list[Fault]()
    if patients < minimum:
        problem = (
            f"training images are of {patients} patients, fewer than smallest_count = {minimum}: this site declines."
        )
        faults.append(
            Fault(f"{SITE_FILE}: policy.smallest_count", problem, "A smaller smallest_count lets it take part.")
        )
    here = f"{counts['train']:,} training, {counts['validation']:,} validation, {counts['test']:,} test images"
    return ContractPoint("counts", here, f"{minimum} patients or more", tuple(faults))


def _make_level_point(
    settings: SiteSettings, planned: PlannedTraining, source: SiteImageSource, named: LabelDeclaration
) -> ContractPoint:
    """Return the compared point "level", with a fault if the policy declines the plan."""
    policy = settings.file.policy
    plan = planned.plan
    rows = len(named.names)
    images = int((source.parts == "train").sum())
    work = RequestedWork(plan, build_site_method(plan), rows=rows, images=images, gpus=settings.file.gpus)
    verdict = decide_on_request(policy, work)
    faults = list[Fault]()
    if not verdict.is_allowed:
        problem = f"this site's policy declines the run: {verdict}"
        remedy = "Ask the coordinator for a run that the policy allows, or change this key in [policy] of "
        faults.append(Fault(f"{SITE_FILE}: {verdict.rule}", problem, f"{remedy}{SITE_FILE}."))
    return ContractPoint("level", policy.level, describe_protection(plan), tuple(faults))


def make_release_point(connection: CheckArea) -> ContractPoint:
    """Return the compared point "release": releases and wire versions of this site and of the coordinator."""
    release = connection.facts.get("release")
    wire = connection.facts.get("newest_wire")
    here = describe_release(__version__, WIRE_VERSION)
    if not isinstance(release, str) or not isinstance(wire, int):
        return ContractPoint("release", here, "not known: the coordinator was not asked")
    faults = list[Fault]()
    if not is_spoken(connection.facts.get("wire")):
        problem = f"the coordinator speaks wire version {wire}, this site {WIRE_VERSION}."
        faults.append(Fault("release", problem, f"Install release {release} here."))
    return ContractPoint("release", here, describe_release(release, wire), tuple(faults))


def add_contract_faults(area: CheckArea, points: tuple[ContractPoint, ...]) -> None:
    """Add to ``area`` the faults of the points "level" and "counts", which no other check reports."""
    for point in points:
        if point.name in ("level", "counts"):
            for fault in point.faults:
                area.add_fault(ClientExitCode.POLICY, f"{fault.where}: {fault.problem}", fault.remedy)
