"""Questions about class names before round 1: two names that may mean one class, and classes of only one site.

No class name is changed by a guess. Two names of one class would become two classes of the model. So one of their sites
is left out until its staff maps its name to the other one, or the coordinator states that they are two classes.
A class of only one site is legitimate, so its site stays; coordinator and site are only asked about it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polyclinic.common.alike_words import ComparableName
from polyclinic.common.contract import LabelContract, LabelDeclaration
from polyclinic.common.errors import Fault, quote_names
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.vocabulary import CLASS_PLACEHOLDER, format_synonym_line
from polyclinic.data.base.names import make_class_spelling_key
from polyclinic.strategies.engine.admission_limits import SiteAdmissionLimits, list_admitted_classes


@dataclass(frozen=True)
class CoordinatorWords:
    """The coordinator's statements about class names.

    Attributes:
        listed: The names in the lists of classes by which sites were admitted (``flwr-server admit --classes``).
        distinct: Classes that are no other class in other words (``distinct_classes`` of the experiment).
    """

    listed: Collection[str] = ()
    distinct: Sequence[str] = ()

    @classmethod
    def from_limits(cls, limits: Mapping[str, SiteAdmissionLimits], distinct: Sequence[str]) -> "CoordinatorWords":
        """Return the coordinator's words, with the classes of its lists from the sites' admission limits."""
        return cls(list_admitted_classes(limits), distinct)

    def settles_pair(self, first: str, second: str) -> bool:
        """Return True if the coordinator has said that two names are two classes."""
        return first in self.distinct or second in self.distinct or (first in self.listed and second in self.listed)

    def settles_class(self, name: str) -> bool:
        """Return True if the coordinator has said that a name is a class of its own."""
        return name in self.distinct or name in self.listed

    def format_distinct_line(self, names: Iterable[str]) -> str:
        """Return the line of ``[participation]`` that says that further names are classes of their own."""
        return f"distinct_classes = {format_as_json_text([*dict.fromkeys((*self.distinct, *names))])}"


@dataclass(frozen=True)
class AlikeClasses:
    """Two class names that may be one class in two words.

    Attributes:
        name: The name that counts in the run.
        other: The name that may mean the same.
        sites, other_sites: The sites that use each of them, in the order in which they were admitted.
    """

    name: str
    other: str
    sites: tuple[str, ...]
    other_sites: tuple[str, ...]


def find_alike_classes(declarations: Sequence[LabelDeclaration], words: CoordinatorWords) -> list[AlikeClasses]:
    """Return the pairs of class names of different sites that may be one class in two words.

    Two names that one site annotates are two classes. In a pair, the name in the coordinator's lists is the one that
    counts in the run; otherwise the name that more sites use; on a tie that of the site that was admitted first.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
    """
    users = dict[str, dict[str, None]]()  # class -> the sites that use it, in their order
    spellings = dict[str, list[str]]()
    for declaration in declarations:
        for name in declaration.canonical_names:
            users.setdefault(name, {})[declaration.site] = None
    for name in users:
        spellings.setdefault(make_class_spelling_key(name), []).append(name)

    def weigh(name: str) -> tuple[bool, int]:
        return name in words.listed, len(users[name])

    # Of several spellings of one name the one that counts is compared; of equal weight, the first one. The others have
    # faults of their own.
    names = [ComparableName.from_name(max(of_key, key=weigh)) for of_key in spellings.values()]
    sites = {
        name.name: users[name.name].keys() | {site for other in spellings[name.key] for site in users[other]}
        for name in names
    }
    pairs = list[AlikeClasses]()
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            if not sites[first.name].isdisjoint(sites[second.name]) or not first.is_alike(second):
                continue
            if words.settles_pair(first.name, second.name):
                continue
            # Of equal weight, the first one was declared by the site that was admitted first.
            name, other = sorted((first.name, second.name), key=weigh, reverse=True)
            pairs.append(AlikeClasses(name, other, tuple(users[name]), tuple(users[other])))
    return pairs


@dataclass(frozen=True)
class AlikeClassFault(Fault):
    """The fault of a site whose word may mean a class of other sites.

    Attributes:
        pair: Both words, with the sites that use them.
    """

    pair: AlikeClasses = field(kw_only=True)


def find_alike_class_faults(declarations: Sequence[LabelDeclaration], words: CoordinatorWords) -> list[AlikeClassFault]:
    """Return a fault for each word of a site that may mean another site's class.

    Each word is mapped once, to the first in rank of the names that it may mean. So the lines of all remedies can be
    written into one file. :func:`add_distinct_line` adds the coordinator's line for all words.

    Args:
        declarations: The sites' labels, in the order in which the sites were admitted.
    """
    faults = list[AlikeClassFault]()
    own_names = {
        (declaration.site, name): own
        for declaration in declarations
        for own, name in zip(declaration.names, declaration.canonical_names, strict=True)
    }
    for pair in choose_one_meaning(find_alike_classes(declarations, words)):
        problem = _describe_pair(pair)
        for site in pair.other_sites:
            remedy = f"If they are one, this line under [data.synonyms] in site.toml of {site} settles it:\n"
            remedy += f"    {format_synonym_line(own_names[site, pair.other], pair.name)}\n"
            remedy += (
                f'If they are two, the coordinator adds "{pair.other}" to distinct_classes under [participation] of '
            )
            remedy += "the experiment."
            faults.append(AlikeClassFault("label contract", problem, remedy, site, pair=pair))
    return faults


def _describe_pair(pair: AlikeClasses) -> str:
    both = f'"{pair.name}" ({_name_sites(pair.sites)}) and "{pair.other}" ({_name_sites(pair.other_sites)})'
    return f"{both} may be one class in two words, which would become two classes of the model."


def list_alike_pairs(faults: Iterable[Fault]) -> list[AlikeClasses]:
    """Return the pairs of words of each :class:`AlikeClassFault`, once each, in the order of the faults."""
    return list(dict.fromkeys(fault.pair for fault in faults if isinstance(fault, AlikeClassFault)))


def list_alike_words(faults: Iterable[Fault]) -> list[str]:
    """Return the words of each :class:`AlikeClassFault` that may mean classes of other sites, once each."""
    return list(dict.fromkeys(pair.other for pair in list_alike_pairs(faults)))


def add_distinct_line(faults: Sequence[Fault], words: CoordinatorWords) -> list[Fault]:
    """Return the faults with one line ``distinct_classes`` for all words, in the last fault that asks for it."""
    distinct = list_alike_words(faults)
    faults = list(faults)
    last = max((place for place, fault in enumerate(faults) if isinstance(fault, AlikeClassFault)), default=None)
    if last is not None:
        each = "" if len(distinct) == 1 else " If all of these words are classes of their own, it is"
        line = f"{each}:\n    {words.format_distinct_line(distinct)}"
        remedy = faults[last].remedy.removesuffix("." if not each else "") + line
        faults[last] = replace(faults[last], remedy=remedy)
    return faults


def describe_alike_classes_to_others(faults: Iterable[Fault]) -> dict[str, str]:
    """Return site -> text, for the sites whose classes another site's word of :class:`AlikeClassFault` may mean."""
    texts = dict[str, list[str]]()
    for pair in list_alike_pairs(faults):
        text = f"{_describe_pair(pair)} {_name_sites(pair.other_sites)} and the coordinator are asked."
        for site in pair.sites:
            texts.setdefault(site, []).append(text)
    return {site: "\n".join(lines) for site, lines in texts.items()}


def choose_one_meaning(pairs: Sequence[AlikeClasses]) -> list[AlikeClasses]:
    """Return one pair for each word: with the name that counts among all names that the word may mean.

    If that name may itself mean another class, the word is paired with the other class: ``lympho`` with
    ``Lymphocyte``, not with ``Lymphozyt``.

    Args:
        pairs: Pairs as :func:`find_alike_classes` returns them; the name of a pair counts more than the other.
    """
    chosen = dict[str, AlikeClasses]()
    for pair in pairs:
        best = chosen.get(pair.other, pair)
        # Of two names that a word may mean, the one that is no other name's word counts more.
        is_word_of_other = any(each.other == best.name and each.name == pair.name for each in pairs)
        chosen[pair.other] = pair if is_word_of_other else best
    resolved = list[AlikeClasses]()
    for pair in chosen.values():
        main = pair
        # A site that uses both words means two classes by them.
        while main.name in chosen and not set(chosen[main.name].sites) & set(pair.other_sites):
            main = chosen[main.name]
        resolved.append(replace(pair, name=main.name, sites=main.sites))
    return resolved


def find_classes_of_one_site(contract: LabelContract, words: CoordinatorWords) -> dict[str, str]:
    """Return class -> site, for classes of only one of several sites that the coordinator has not confirmed."""
    return {
        name: contract.annotating_sites(name)[0] for name in contract.unique_classes if not words.settles_class(name)
    }


def describe_classes_of_one_site(classes: Mapping[str, str], words: CoordinatorWords, alike: Sequence[str] = ()) -> str:
    """Return the coordinator's question about the classes of :func:`find_classes_of_one_site`.

    Args:
        alike: Words of the faults of :func:`find_alike_class_faults`, which ``distinct_classes`` may name too.
    """
    by_site = dict[str, list[str]]()
    for name, site in classes.items():
        by_site.setdefault(site, []).append(name)
    listed = "; ".join(f"{quote_names(names)} ({site})" for site, names in sorted(by_site.items()))
    question = (
        f"One site alone annotates: {listed}. Is it another site's class in other words? Then that site maps it under "
        "[data.synonyms] in its site.toml. If these are classes of their own, this line under [participation] of the "
        f"experiment says so:\n    {words.format_distinct_line(classes)}"
    )
    return f"{question}\nAdd {quote_names(alike)} to the same line if it is no other class." if alike else question


def describe_own_classes_to_site(own_names: Mapping[str, str], run_classes: Collection[str]) -> str:
    """Return the question to a site about the classes that no other site annotates.

    Args:
        own_names: Class -> the site's own word for it, of these classes.
        run_classes: The classes of the run.
    """
    others = [name for name in run_classes if name not in own_names]
    text = f"No other site annotates {quote_names(own_names)}."
    if not others:
        return text
    text += (
        f" The other classes of the run: {quote_names(others)}. If one of them means the same, write it in place of "
    )
    text += f"{CLASS_PLACEHOLDER} under [data.synonyms] in site.toml:"
    return "\n    ".join((text, *(format_synonym_line(own, CLASS_PLACEHOLDER) for own in own_names.values())))


def _name_sites(sites: Sequence[str]) -> str:
    names = ", ".join(sites[:3])
    more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
    return f"site {names}" if len(sites) == 1 else f"sites {names}{more}"
