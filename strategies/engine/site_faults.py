"""The faults of the sites that answered a roll call, by the rules of a run; ``status --contract`` has the same rules.

A rule checks one site alone, or compares sites. A site receives all its faults at once. A refused site does not count
in later comparisons, so that no site is refused because of one that is itself refused.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration, find_label_declaration_faults, make_foreign_class_fault
from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.pixel_contract import PixelTerms, find_pixel_faults, find_pixel_faults_of_simulation
from polyclinic.common.vocabulary import Vocabulary, find_vocabulary_faults
from polyclinic.common.wire.versions import find_lacking_feature
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.strategies.engine.admission_limits import (
    SiteAdmissionLimits,
    find_admitted_class_faults,
    find_admitted_count_faults,
    find_contradictory_count_faults,
    find_surplus_class_faults,
)
from polyclinic.strategies.engine.class_words import (
    AlikeClassFault,
    CoordinatorWords,
    find_alike_class_faults,
    list_alike_words,
)
from polyclinic.strategies.engine.run_member import RunMember
from polyclinic.strategies.methods.base import Method


@dataclass(frozen=True)
class RollCallRule:
    """A rule that the answers to a roll call must satisfy.

    Attributes:
        point: The point of the contract that it is about: ``words``, ``pixels``, ``counts`` or ``release``.
        find_faults: Returns the faults of sites; the sites are given in the order in which they were admitted.
        compares: True if a site's faults depend on the answers of other sites.
    """

    point: str
    find_faults: Callable[[Sequence[RunMember]], Sequence[Fault]]
    compares: bool = False


@dataclass(frozen=True)
class SiteFault:
    """A fault of a site, and the point of the contract that it is about."""

    point: str
    fault: Fault


def collect_site_faults(
    members: Sequence[RunMember], rules: Sequence[RollCallRule], *, compares_refused: bool = True
) -> list[SiteFault]:
    """Return all faults of the sites, those of one site together.

    First, each site is checked alone. Second, the sites without a fault are compared with one another; a site that one
    rule leaves out does not count in the next rule. Last, each site that is left out is compared with those that stay,
    so that it learns all its faults. If no site stays, all sites are compared with one another.

    Args:
        members: The sites, in the order in which they were admitted.
        compares_refused: False to leave out the last step.
    """
    faults = {member.answer.site: [list[Fault]() for _ in rules] for member in members}

    def add(place: int, found: Iterable[Fault]) -> None:
        for fault in found:
            faults[fault.site][place].append(fault)

    for place, rule in enumerate(rules):
        if rule.compares:
            for member in members:
                add(place, rule.find_faults([member]))
        else:
            add(place, rule.find_faults(members))
    comparing = [(place, rule) for place, rule in enumerate(rules) if rule.compares]

    def select_fitting() -> list[RunMember]:
        return [member for member in members if not any(faults[member.answer.site])]

    for place, rule in comparing:
        add(place, rule.find_faults(select_fitting()))
    fitting = select_fitting()
    refused = [member for member in members if member not in fitting] if compares_refused else []
    for place, rule in comparing:
        together = {} if fitting else _group_by_site(rule.find_faults(refused))
        for member in refused:
            site = member.answer.site
            # The site comes last, so that it decides nothing.
            alone = _group_by_site(rule.find_faults([*fitting, member])) if fitting else together
            faults[site][place] = alone.get(site) or faults[site][place]
    return [
        SiteFault(rules[place].point, fault)
        for of_rules in faults.values()
        for place, of_rule in enumerate(of_rules)
        for fault in of_rule
    ]


def _group_by_site(faults: Iterable[Fault]) -> dict[str, list[Fault]]:
    by_site = dict[str, list[Fault]]()
    for fault in faults:
        by_site.setdefault(fault.site, []).append(fault)
    return by_site


@dataclass(frozen=True)
class RollCallTerms:
    """The requirements of a run on the labels, pixels and releases of its sites.

    Attributes:
        limits: Site -> the classes and number of images for which it was admitted.
        words: The coordinator's statements about class names.
        pixels: The run's requirements on pixels.
        begun_classes: The classes of a run under way, which no site can add to; empty before round 1.
        is_simulated: True if all sites have one table and one experiment.
        leaves_sites_out: False if every site is needed: the method's own fault then says what it needs.
    """

    plan: HospitalPlan
    method: Method
    limits: Mapping[str, SiteAdmissionLimits]
    words: CoordinatorWords
    pixels: PixelTerms
    begun_classes: tuple[str, ...] = ()
    is_simulated: bool = False
    leaves_sites_out: bool = True

    @property
    def compares_words(self) -> bool:
        """True if the sites choose their own class names: neither in a simulation nor with a vocabulary."""
        return not self.is_simulated and not self.plan.vocabulary

    def collect_faults(self, members: Sequence[RunMember]) -> list[SiteFault]:
        """Return all faults of the sites, which are in the order in which they were admitted.

        In a simulation, all sites belong to one user, so a site that is left out does not get its other faults.
        """
        faults = collect_site_faults(members, self.list_rules(), compares_refused=not self.is_simulated)
        if not (self.compares_words and not self.begun_classes):
            return faults
        # Words of two sites that are both left out are compared, too, if no other fault settles them.
        refused = {each.fault.site for each in faults}
        names = {name for member in members for name in member.answer.class_names}
        settled = set(list_alike_words([each.fault for each in faults]))
        settled |= {name for of_key in _group_class_spellings(names).values() if len(of_key) > 1 for name in of_key}
        of_refused = self._find_alike_faults([member for member in members if member.answer.site in refused])
        return faults + [
            SiteFault("words", fault) for fault in of_refused if not settled & {fault.pair.name, fault.pair.other}
        ]

    def list_rules(self) -> list[RollCallRule]:
        """Return the rules in the order in which a site reads its faults."""
        rules = [RollCallRule("release", partial(find_wire_version_faults, self.plan))]
        if not self.is_simulated:
            rules += [
                RollCallRule("words", partial(find_admitted_class_faults, self.limits)),
                RollCallRule("counts", partial(find_admitted_count_faults, self.limits)),
                RollCallRule("words", partial(find_surplus_class_faults, self.limits), compares=True),
            ]
        rules += [
            RollCallRule("counts", partial(find_contradictory_count_faults, self.plan.model.task)),
            RollCallRule("words", self._find_name_faults),
            RollCallRule("pixels", find_unreadable_form_faults),
            RollCallRule("pixels", self._find_pixel_faults, compares=True),
        ]
        # Of a vocabulary or of a run under way, each word is one of the run's classes or a fault already.
        if not self.plan.vocabulary and not self.begun_classes:
            rules.append(RollCallRule("words", self._find_spelling_faults, compares=True))
            if self.compares_words:
                rules.append(RollCallRule("words", self._find_alike_faults, compares=True))
        if self.leaves_sites_out:
            rules.append(RollCallRule("words", self._find_coverage_faults, compares=True))
        return rules

    def _find_name_faults(self, members: Sequence[RunMember]) -> list[Fault]:
        """Return the faults in a site's own class names, which need no comparison with other sites."""
        declarations = _list_declarations(members)
        vocabulary = self.plan.vocabulary or {}
        faults = find_label_faults(declarations) + find_vocabulary_faults(declarations, vocabulary)
        if self.begun_classes:
            faults += find_foreign_class_faults(declarations, self.begun_classes, vocabulary)
        return faults

    def _find_pixel_faults(self, members: Sequence[RunMember]) -> list[Fault]:
        find_faults = find_pixel_faults_of_simulation if self.is_simulated else find_pixel_faults
        return find_faults(list_pixel_forms(members), self.pixels)

    def _find_spelling_faults(self, members: Sequence[RunMember]) -> list[Fault]:
        return find_class_spelling_faults(_list_declarations(members), self.words.listed)

    def _find_alike_faults(self, members: Sequence[RunMember]) -> list[AlikeClassFault]:
        return find_alike_class_faults(_list_declarations(members), self.words)

    def _find_coverage_faults(self, members: Sequence[RunMember]) -> list[Fault]:
        # A list for a single site may be meant as its limit; lists for all of them say what the run's classes are.
        sites = [member.answer.site for member in members]
        lists = [self.limits[site].classes if site in self.limits else frozenset() for site in sites]
        agreed = frozenset[str]().union(*lists) if all(lists) else frozenset[str]()
        return find_class_coverage_faults(self.method, _list_declarations(members), agreed)


def _list_declarations(members: Iterable[RunMember]) -> list[LabelDeclaration]:
    return [member.label_declaration for member in members]


def list_pixel_forms(members: Iterable[RunMember]) -> list[tuple[str, PixelForm]]:
    """Return the sites that state the form of their pixels, in the order of the members."""
    return [(member.answer.site, form) for member in members if (form := member.read_pixel_form()) is not None]


def find_model_layout_faults(members: Iterable[RunMember], layout: str) -> list[Fault]:
    """Return a fault for each site whose software release builds a model of another layout from the same plan.

    Args:
        members: The sites, which stated the hash of their layout at the roll call.
        layout: Hash of the layout of the coordinator's model: names, shapes and order of its tensors.
    """
    return [
        Fault(
            f"site {member.answer.site}",
            f"builds another model from this plan (its release is {member.answer.release}).",
            "Install the coordinator's release there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if member.answer.layout != layout
    ]


def find_wire_version_faults(plan: HospitalPlan, members: Iterable[RunMember]) -> list[Fault]:
    """Return a fault for each site whose wire version lacks something that the run needs."""
    return [
        Fault(
            f"site {member.answer.site}",
            f"has release {member.answer.release}: {reason}",
            f"Install release {__version__} there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if (reason := find_lacking_feature(member.wire, plan))
    ]


# ---------------------------------------------------------------------- the form of the sites' pixels


def find_unreadable_form_faults(members: Iterable[RunMember]) -> list[Fault]:
    """Return a fault for each site that states a form of its pixels which this release cannot read."""
    return [
        Fault(
            f"site {member.answer.site}",
            f"states how its images become pixels in words that this release does not know (its release is "
            f"{member.answer.release}).",
            f"Install release {__version__} there.",
            member.answer.site,
        )
        for member in sorted(members, key=lambda member: member.answer.site)
        if member.answer.pixels and member.read_pixel_form() is None
    ]


# ---------------------------------------------------------------------- faults in the sites' labels

Choice = TypeVar("Choice")


def find_label_faults(declarations: Iterable[LabelDeclaration]) -> list[Fault]:
    """Return the faults in each site's own labels: no label, a repeated label, or two spellings of one class."""
    faults = list[Fault]()
    for declaration in declarations:
        faults += [replace(fault, site=declaration.site) for fault in find_label_declaration_faults(declaration)]
        for spellings in _count_class_spellings([declaration]).values():
            if len(spellings) > 1:
                problem = f"{quote_names(sorted(spellings))} look like one class."
                where = f"site.toml of {declaration.site}: data.annotates"
                faults.append(Fault(where, problem, "Keep one of them.", declaration.site))
    return faults


@dataclass(frozen=True)
class _RunSpelling:
    """The spelling of a class that counts in the run.

    Attributes:
        names: The spelling; several only if the coordinator itself names the class in several ways.
        author: The coordinator or the site with the first spelling, for the message to a site with another one.
        reason: Clause that says why this spelling counts.
    """

    names: tuple[str, ...]
    author: str
    reason: str


def find_class_spelling_faults(declarations: Sequence[LabelDeclaration], listed: Collection[str] = ()) -> list[Fault]:
    """Return a fault for each site that spells a class otherwise than the run does.

    The run's spelling is that of the coordinator's lists of classes. Without one it is that of most sites that
    annotate the class. On a tie it is that of the site that was admitted first, because no site can choose this.
    A site that one of these rules leaves out does not count in the next rules.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
        listed: The class names that the coordinator has written for any site (``flwr-server admit --classes``).
    """
    by_list = dict[str, _RunSpelling]()
    for key, names in _group_class_spellings(sorted(listed)).items():
        by_list[key] = _RunSpelling(names, "the coordinator's list of classes", "the list counts")
    fitting, _ = _separate_unlike_spellings(declarations, by_list)
    authors = dict[str, str]()  # spelling -> the first site that has it
    for declaration in fitting:
        for name in declaration.canonical_names:
            authors.setdefault(name, f"site {declaration.site}")
    by_majority = dict[str, _RunSpelling]()
    for key, spellings in _count_class_spellings(fitting).items():
        if name_of_most := _find_strict_majority(spellings):
            by_majority[key] = _RunSpelling((name_of_most,), authors[name_of_most], "most sites write the first")
    fitting, _ = _separate_unlike_spellings(fitting, by_majority)
    by_admission = dict[str, _RunSpelling]()
    for declaration in fitting:
        _, faults_of_site = _separate_unlike_spellings([declaration], by_admission)
        if not faults_of_site:
            first = declaration.site
            for key, names in _group_class_spellings(declaration.canonical_names).items():
                spelling = _RunSpelling(names, f"site {first}", f"{first} was admitted first")
                by_admission.setdefault(key, spelling)
    # A site learns all its faults, also those of words that a later rule settles.
    _, faults = _separate_unlike_spellings(declarations, by_list, by_majority, by_admission)
    return faults


def _separate_unlike_spellings(
    declarations: Iterable[LabelDeclaration], *run_spellings: Mapping[str, _RunSpelling]
) -> tuple[list[LabelDeclaration], list[Fault]]:
    """Return the declarations that spell each class as the run does, and the faults of the others.

    Args:
        run_spellings: Comparison key of a class (:func:`make_class_spelling_key`) -> its spelling. If a word
            contradicts several, the fault names the first one.
    """
    fitting = list[LabelDeclaration]()
    faults = list[Fault]()
    for declaration in declarations:
        site = declaration.site
        faults_of_site = list[Fault]()
        for local, name in zip(declaration.names, declaration.canonical_names, strict=True):
            key = make_class_spelling_key(name)
            of_key = [spellings[key] for spellings in run_spellings if key in spellings]
            spelling = next((each for each in of_key if name not in each.names), None)
            if spelling is None:
                continue
            run_name = spelling.names[0]
            both = f'"{run_name}" ({spelling.author}) and "{name}" (site {site})'
            problem = f"{both} look like one class; {spelling.reason}."
            remedy = f"This line under [data.synonyms] in site.toml of {site} settles it:\n"
            remedy += f'    "{local}" = "{run_name}"\n'
            remedy += f'If they are two classes, give this one a name of its own there: "{local}" = "{name} of {site}"'
            faults_of_site.append(Fault("label contract", problem, remedy, site))
        faults += faults_of_site
        if not faults_of_site:
            fitting.append(declaration)
    return fitting, faults


def find_class_coverage_faults(
    method: Method, declarations: Sequence[LabelDeclaration], listed: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each site that annotates other classes than the run's, if the method needs equal classes.

    The run's classes are those of the coordinator's lists, if any site annotates exactly these; else the choice of most
    sites; on a tie that of the site that was admitted first.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
        listed: The class names in the coordinator's lists, if each site has one; else empty.
    """
    if not method.site.traits.needs_full_coverage or not declarations:
        return []
    choices = [frozenset(declaration.canonical_names) for declaration in declarations]
    choice_of_most = _find_strict_majority(Counter(choices))
    if frozenset(listed) in choices:
        run_classes = frozenset(listed)
        reason = "the coordinator's list has"
    elif choice_of_most is not None:
        run_classes = choice_of_most
        reason = "most sites annotate"
    else:
        run_classes = choices[0]
        reason = f"{declarations[0].site}, which was admitted first, annotates"
    return [
        Fault(
            f"site.toml of {declaration.site}: data.annotates",
            f"{method.site.name} needs the same classes at every site: {reason} {quote_names(sorted(run_classes))}, "
            f"this one {quote_names(sorted(declaration.canonical_names))}.",
            "",
            declaration.site,
        )
        for declaration, choice in zip(declarations, choices, strict=True)
        if choice != run_classes
    ]


def find_foreign_class_faults(
    declarations: Iterable[LabelDeclaration], class_names: Collection[str], vocabulary: Vocabulary
) -> list[Fault]:
    """Return a fault for each class that a site annotates and that is not among the classes of a run under way.

    A word that is not in the vocabulary gets no fault here, because it has another fault already.
    """
    return [
        make_foreign_class_fault(declaration, local, name, class_names)
        for declaration in declarations
        for local, name in zip(declaration.names, declaration.canonical_names, strict=True)
        if name not in class_names and (not vocabulary or name in vocabulary)
    ]


def _group_class_spellings(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return comparison key -> the different names that have it, in the order of ``names``."""
    groups = dict[str, tuple[str, ...]]()
    for name in dict.fromkeys(names):
        key = make_class_spelling_key(name)
        groups[key] = (*groups.get(key, ()), name)
    return groups


def _count_class_spellings(declarations: Iterable[LabelDeclaration]) -> dict[str, Counter[str]]:
    """Count the sites that use each spelling of a class name, grouped by the normalised class name."""
    spellings: dict[str, Counter[str]] = {}
    for declaration in declarations:
        for name in set(declaration.canonical_names):
            spellings.setdefault(make_class_spelling_key(name), Counter())[name] += 1
    return spellings


def _find_strict_majority(votes: Counter[Choice]) -> Choice | None:
    """Return the choice with more than half of all votes; None if there is no such choice."""
    return next((choice for choice, count in votes.items() if 2 * count > votes.total()), None)
