"""Whose labels do not fit those of the others, where a run can go on without some sites.

One site alone must not be able to push honest ones out by what it says of itself. So nobody is left out for what
another site says, unless a strict majority of the sites that are concerned says the same; without a majority nothing
here decides, and the run stops with the contradiction, as it does where every site is needed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from common.contract import Declaration, faults_of_one, folded
from common.errors import Fault, quoted
from strategies.base.method import Method

Choice = TypeVar("Choice")


def own_faults(declarations: Iterable[Declaration]) -> list[Fault]:
    """What sites got wrong by themselves: no label, one twice, two spellings of one class at one site."""
    found = list[Fault]()
    for one in declarations:
        found += [replace(fault, site=one.site) for fault in faults_of_one(one)]
        for spellings in _spellings([one]).values():
            if len(spellings) > 1:
                problem = f"{quoted(sorted(spellings))} look like one class."
                where = f"site.toml of {one.site}: data.annotates"
                found.append(Fault(where, problem, "Keep one of them.", one.site))
    return found


def minority_faults(declarations: Sequence[Declaration]) -> list[Fault]:
    """The sites that spell a class otherwise than most sites that annotate it."""
    return [
        fault
        for spellings in _spellings(declarations).values()
        if len(spellings) > 1 and (usual := _strict_majority(spellings))
        for fault in _otherwise(declarations, usual, spellings)
    ]


def coverage_faults(method: Method, declarations: Sequence[Declaration]) -> list[Fault]:
    """For a method that needs every class at every site: the sites whose classes are not those of most sites."""
    sets = Counter(frozenset(one.canonical) for one in declarations)
    usual = _strict_majority(sets)
    if not method.full_coverage or usual is None:
        return []
    return [
        Fault(
            f"site.toml of {one.site}: data.annotates",
            f"{method.name} needs the same classes at every site: most sites annotate {quoted(sorted(usual))}, "
            f"this one {quoted(sorted(one.canonical))}.",
            "",
            one.site,
        )
        for one in declarations
        if frozenset(one.canonical) != usual
    ]


def _spellings(declarations: Iterable[Declaration]) -> dict[str, Counter[str]]:
    """Folded name -> by how many sites each spelling of it is used."""
    found: dict[str, Counter[str]] = {}
    for one in declarations:
        for name in set(one.canonical):
            found.setdefault(folded(name), Counter())[name] += 1
    return found


def _strict_majority(votes: Counter[Choice]) -> Choice | None:
    """What more than half of those who voted chose; None where nothing was."""
    return next((choice for choice, count in votes.items() if 2 * count > votes.total()), None)


def _otherwise(declarations: Iterable[Declaration], usual: str, spellings: Iterable[str]) -> Iterator[Fault]:
    others = set(spellings) - {usual}
    for one in declarations:
        for local, name in zip(one.names, one.canonical, strict=True):
            if name in others:
                problem = f'"{name}" (site {one.site}) looks like "{usual}", as most sites that annotate it write it.'
                remedy = (
                    f'Two lines in site.toml of {one.site} settle it:\n    [data.synonyms]\n    "{local}" = "{usual}"'
                )
                yield Fault("label contract", problem, remedy, one.site)
