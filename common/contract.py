"""The label contract: the classes of a run, and the sites that annotate each class.

Each hospital declares its own label names and, where they differ from the run's canonical names, a map of synonyms;
no name is guessed. The coordinator merges the declarations into one contract, whose hash is stored in every saved
model. A class that a site does not annotate is unknown there, not absent.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyclinic.common.errors import Fault, quote_names, raise_faults, suggest_nearest_name
from polyclinic.common.system.plain_text import PLAIN_NAME
from polyclinic.data.base.names import make_class_spelling_key

PooledLabels = Literal["no", "negative", "masked", "known"]
"""How missing labels count if a simulation pools all images at one site; ``no`` if it does not pool."""

CONTRACT_RUN = "contract"
"""Prefix of the run name of a roll call by ``flwr-server status --contract``, which no round follows."""


@dataclass(frozen=True)
class LabelDeclaration:
    """The label names that one site declares to the coordinator.

    Attributes:
        site: Registered name of the site.
        names: The site's own label names, in the order of its label columns.
        synonyms: The site's name -> canonical name, for names that differ.
    """

    site: str
    names: tuple[str, ...]
    synonyms: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def canonical_names(self) -> tuple[str, ...]:
        """The canonical names of the site's labels, in the order of ``names``."""
        return tuple(self.synonyms.get(name, name) for name in self.names)


@dataclass(frozen=True)
class LabelContract:
    """The classes of a run, and the classes that each site annotates.

    Attributes:
        class_names: Sorted union of the canonical names; the order of the global head's rows.
        sites: Site name -> its canonical class names in the site's own order; keys sorted.
    """

    class_names: tuple[str, ...]
    sites: Mapping[str, tuple[str, ...]]

    def annotating_sites(self, class_name: str) -> tuple[str, ...]:
        """Return the sites that annotate the class, sorted by name."""
        return self._annotating_sites_by_class.get(class_name, ())

    @cached_property
    def _annotating_sites_by_class(self) -> dict[str, tuple[str, ...]]:
        """Class -> the sites that annotate it, cached because counting for each class would read all declarations each
        time.
        """
        sites: dict[str, list[str]] = {}
        for site, names in self.sites.items():
            for name in dict.fromkeys(names):
                sites.setdefault(name, []).append(site)
        return {name: tuple(annotating) for name, annotating in sites.items()}

    @cached_property
    def shared_classes(self) -> tuple[str, ...]:
        """Classes that every site annotates."""
        return tuple(name for name in self.class_names if len(self.annotating_sites(name)) == len(self.sites))

    @cached_property
    def unique_classes(self) -> tuple[str, ...]:
        """Classes that exactly one site annotates; empty if there is only one site."""
        return tuple(name for name in self.class_names if len(self.annotating_sites(name)) == 1 < len(self.sites))

    def annotation_matrix(self) -> NDArray[np.bool_]:
        """Return a mask ``(sites, classes)``, True where the site annotates the class; rows are in the order of
        ``sites``.
        """
        return np.array([self.annotated_class_mask(site) for site in self.sites])

    def annotated_class_mask(self, site: str) -> NDArray[np.bool_]:
        """Return a mask ``(classes,)``, True for each class that the site annotates."""
        annotated = frozenset(self.sites[site])
        return np.array([name in annotated for name in self.class_names], dtype=np.bool_)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the class names and each site's classes; independent of the order in which sites answered."""
        text = json.dumps({"classes": self.class_names, "sites": {s: sorted(n) for s, n in self.sites.items()}})
        return hashlib.sha256(text.encode()).hexdigest()


def merge_label_declarations(
    declarations: Iterable[LabelDeclaration], class_names: Sequence[str] | None = None
) -> LabelContract:
    """Merge the sites' declarations into the run's contract.

    Args:
        declarations: One per site, in any order.
        class_names: The run's canonical names, if the coordinator fixed them; by default all that the sites declare.

    Raises:
        BadInput: With all contradictions, each with the lines of configuration that would fix it.
    """
    ordered = sorted(declarations, key=lambda declaration: declaration.site)
    union = tuple(sorted({name for declaration in ordered for name in declaration.canonical_names}))
    faults = [replace(fault, site=site.site) for site in ordered for fault in find_label_declaration_faults(site)]
    counts = Counter(declaration.site for declaration in ordered)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    faults += [Fault(f"site {name}", "answered the roll call twice.", "Each site has one name.") for name in repeated]
    if class_names:
        fixed = frozenset(class_names)
        declared = frozenset(union)
        for declaration in ordered:
            for local, name in zip(declaration.names, declaration.canonical_names, strict=True):
                if name not in fixed:
                    faults.append(make_foreign_class_fault(declaration, local, name, class_names))
        if missing := [name for name in class_names if name not in declared]:
            remedy = "Take it out of the run's classes, or admit a site that annotates it."
            faults.append(Fault("run classes", f"no site annotates {quote_names(missing)}.", remedy))
    else:
        # Canonical name -> a site that uses it, and that site's own name for it.
        owners = dict[str, tuple[str, str]]()
        for declaration in ordered:
            for name, local in zip(declaration.canonical_names, declaration.names, strict=True):
                owners.setdefault(name, (declaration.site, local))
        firsts = dict[str, str]()  # of names that differ only in case, spaces or punctuation
        for second in sorted(owners):
            if (first := firsts.setdefault(make_class_spelling_key(second), second)) != second:
                (site_of_first, _) = owners[first]
                (other, local) = owners[second]
                problem = f'"{first}" (site {site_of_first}) and "{second}" (site {other}) look like one class.'
                where = f"in a simulation's experiment or in site.toml of {other}"
                remedy = f'This line under [data.synonyms], {where}, settles it:\n    "{local}" = "{first}"\n'
                remedy += f'If they are two, give one a name of its own there: "{local}" = "{second} of {other}"'
                faults.append(Fault("label contract", problem, remedy, other))
    raise_faults(faults)
    return LabelContract(union, MappingProxyType({d.site: d.canonical_names for d in ordered}))


def make_foreign_class_fault(
    declaration: LabelDeclaration, local: str, name: str, class_names: Collection[str]
) -> Fault:
    """Return the fault of a site that annotates a class which the run does not have.

    Args:
        declaration: The site's declaration.
        local: The site's word for the class.
        name: The canonical name of the class.
        class_names: The run's classes.
    """
    where = f"site.toml of {declaration.site}: data.annotates"
    problem = f"{quote_names([name])} is not a class of this run. Classes: {quote_names(class_names)}."
    key = make_class_spelling_key(name)
    if alike := next((other for other in class_names if make_class_spelling_key(other) == key), ""):
        remedy = f'This line under [data.synonyms] settles it:\n    "{local}" = "{alike}"'
    else:
        mapped = "Leave it out, or map it in data.synonyms to the class it means."
        remedy = suggest_nearest_name(name, class_names) or mapped
    return Fault(where, problem, remedy, declaration.site)


def find_label_declaration_faults(declaration: LabelDeclaration) -> list[Fault]:
    """Return the faults of one site's declaration that need no other site's declaration to be found."""
    where = f"site.toml of {declaration.site}: data.annotates"
    faults = []
    if not PLAIN_NAME.fullmatch(declaration.site):
        remedy = "Use letters, digits, spaces, dots, dashes and underscores, beginning with a letter or digit."
        faults.append(Fault("site name", f"{quote_names([declaration.site])} cannot name a folder.", remedy))
    if not declaration.names:
        faults.append(Fault(where, "names no label; a site annotates at least one class."))
    for name in sorted({n for n in declaration.names if declaration.names.count(n) > 1}):
        faults.append(Fault(where, f'"{name}" is listed more than once.', "Remove one of them."))
    for name in sorted(set(declaration.synonyms) - set(declaration.names)):
        remedy = suggest_nearest_name(name, declaration.names) or f"Labels are {quote_names(declaration.names)}."
        faults.append(
            Fault(where.replace("annotates", "synonyms"), f'"{name}" is not one of the site\'s labels.', remedy)
        )
    local_names: dict[str, list[str]] = {}  # canonical name -> the site's names for it
    for local in dict.fromkeys(declaration.names):
        local_names.setdefault(declaration.synonyms.get(local, local), []).append(local)
    for name, locals_ in local_names.items():
        if len(locals_) > 1:
            problem = f"{quote_names(locals_)} both mean {quote_names([name])}, so it is not clear which column counts."
            faults.append(Fault(where, problem, "Keep one of them, or map each to a name of its own."))
    return faults
