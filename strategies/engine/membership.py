"""The sites of a run: the roll call, the label contract, late joiners, the draw of a round's sites.

The sites of an exchange are drawn from the run's seed and the round, and from nothing else: a run that was killed and
goes on asks the same sites, and so does the same run over the network or in simulation."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from flwr.serverapp import Grid

from common.config import ParticipationSection, Plan
from common.contract import Declaration, LabelContract, declaration_faults, fold_spelling, merge_declarations
from common.errors import BadInput, Fault, quoted, stop_on
from common.system.timers import JOIN_DEADLINE_S
from common.wire.records import NO_ARRAYS, Arrays, RollCall
from strategies.engine.callbacks import Callbacks
from strategies.engine.claims import ClaimsBySite, claim_faults, no_lists
from strategies.engine.roll_call import Member, Registered, Roll, call_the_roll, model_faults, refuse_faulty
from strategies.methods.base import Method, RoundContext

FEW = 100
"""Sites that are all asked how good a model is; of more, so many are drawn, or as many as train in a round."""
EVALUATION = 1
"""Added to the seed of an evaluation, so that it does not draw the sites of a round."""


def evaluated(asked: int | None, sites_per_round: int) -> int:
    """Return how many sites are asked how good a model is; 0 stands for all.

    Args:
        asked: What the experiment says; None where it leaves it open. Then all are asked wherever all train.
    """
    if asked is not None:
        return asked
    return max(FEW, sites_per_round) if sites_per_round else 0


def drawn(names: Collection[str], size: int, seed: Sequence[int]) -> list[str]:
    """Draw ``size`` of the names, sorted, each set as likely as any other; all where ``size`` is 0 or not smaller."""
    ordered = sorted(names)
    if not 0 < size < len(ordered):
        return ordered
    return sorted(np.random.default_rng(seed).choice(ordered, size, replace=False).tolist())


def drawn_to_cover(
    annotated: Mapping[str, Collection[str]], size: int, seed: Sequence[int], excluded: Collection[str] = ()
) -> list[str]:
    """Draw so many sites, sorted, that each class is annotated by one of them, where that many can.

    A plain draw that covers the classes stays as it is. Else sites that annotate what it misses come first, of several
    the one that annotates most of it, and the last ones drawn are left out. With at least as many sites as classes each
    class is covered; with fewer, as many as this greedy choice finds.

    Args:
        annotated: Site -> its classes; who is excluded counts in the draw, so that the others' places stay the same.
        size: 1 or more.
    """
    names = sorted(annotated)
    places = np.random.default_rng(seed).permutation(len(names)).tolist()
    classes = {name: frozenset(annotated[name]) for name in names if name not in set(excluded)}
    order, needed = [names[place] for place in places if names[place] in classes], list[str]()
    every = frozenset[str]().union(*classes.values())
    while True:
        chosen = [*needed, *(site for site in order if site not in needed)][:size]
        missing = every.difference(*(classes[site] for site in chosen))
        if not missing or len(needed) == len(chosen):
            return sorted(chosen)
        needed.append(max(order, key=lambda site: len(classes[site] & missing)))


Choice = TypeVar("Choice")


def own_faults(declarations: Iterable[Declaration]) -> list[Fault]:
    """Return what sites got wrong by themselves: no label, one twice, two spellings of one class at one site."""
    faults = list[Fault]()
    for declaration in declarations:
        faults += [replace(fault, site=declaration.site) for fault in declaration_faults(declaration)]
        for spellings in _spellings([declaration]).values():
            if len(spellings) > 1:
                problem = f"{quoted(sorted(spellings))} look like one class."
                where = f"site.toml of {declaration.site}: data.annotates"
                faults.append(Fault(where, problem, "Keep one of them.", declaration.site))
    return faults


def minority_faults(declarations: Sequence[Declaration]) -> list[Fault]:
    """Return a fault for each site that spells a class otherwise than most sites that annotate it."""
    return [
        fault
        for spellings in _spellings(declarations).values()
        if len(spellings) > 1 and (usual := _strict_majority(spellings))
        for fault in _otherwise(declarations, usual, spellings)
    ]


def coverage_faults(method: Method, declarations: Sequence[Declaration]) -> list[Fault]:
    """Return the sites whose classes are not those of most, for a method that needs every class everywhere."""
    sets = Counter(frozenset(declaration.canonical) for declaration in declarations)
    usual = _strict_majority(sets)
    if not method.site.full_coverage or usual is None:
        return []
    return [
        Fault(
            f"site.toml of {declaration.site}: data.annotates",
            f"{method.site.name} needs the same classes at every site: most sites annotate {quoted(sorted(usual))}, "
            f"this one {quoted(sorted(declaration.canonical))}.",
            "",
            declaration.site,
        )
        for declaration in declarations
        if frozenset(declaration.canonical) != usual
    ]


def _spellings(declarations: Iterable[Declaration]) -> dict[str, Counter[str]]:
    """Folded name -> by how many sites each spelling of it is used."""
    spellings: dict[str, Counter[str]] = {}
    for declaration in declarations:
        for name in set(declaration.canonical):
            spellings.setdefault(fold_spelling(name), Counter())[name] += 1
    return spellings


def _strict_majority(votes: Counter[Choice]) -> Choice | None:
    """Return the choice of more than half of all votes; None where there is none."""
    return next((choice for choice, count in votes.items() if 2 * count > votes.total()), None)


def _otherwise(declarations: Iterable[Declaration], usual: str, spellings: Iterable[str]) -> Iterator[Fault]:
    others = set(spellings) - {usual}
    for declaration in declarations:
        for local, name in zip(declaration.names, declaration.canonical, strict=True):
            if name in others:
                problem = (
                    f'"{name}" (site {declaration.site}) looks like "{usual}", as most sites that annotate it write it.'
                )
                where = f"site.toml of {declaration.site}"
                remedy = f'Two lines in {where} settle it:\n    [data.synonyms]\n    "{local}" = "{usual}"'
                yield Fault("label contract", problem, remedy, declaration.site)


class Membership:
    """The sites of one run.

    Attributes:
        registered: The names of nodes; None in simulation.
        claims: What each site was admitted for.
        contract: Who annotates what; its classes are settled by the roll call.
        members: Site -> what it answered.
        bytes_down, bytes_up: By site, everything from the roll call to the test.
    """

    def __init__(
        self,
        method: Method,
        plan: Plan,
        participation: ParticipationSection,
        run: str,
        *,
        callbacks: Callbacks | None = None,
        registered: Registered | None = None,
        claims: ClaimsBySite = no_lists,
    ) -> None:
        self.method, self.plan, self.participation, self.run = method, plan, participation, run
        self.callbacks, self.registered, self.claims = callbacks or Callbacks(), registered, claims
        self.contract = LabelContract((), MappingProxyType({}))
        self.members: dict[str, Member] = {}
        self.bytes_down, self.bytes_up = Counter[str](), Counter[str]()
        self._roll: Roll
        self._layout = ""

    def needed(self, asked: int) -> int:
        """Return how many of the sites that are asked have to answer."""
        return self.participation.min_sites or asked

    def roll_call(self, grid: Grid, expected: int) -> LabelContract:
        """Ask every site who it is and what it annotates; settle the label contract.

        Args:
            grid: Flower's connection to the sites.
            expected: Sites to wait for; after the deadline ``min_sites`` of them suffice.

        Raises:
            TooFewSites: If too few answered in time.
            BadInput: If the declarations contradict one another or the method does not fit them.
        """
        section = self.participation
        self._roll = Roll(grid, RollCall(self.run, self.plan.model_dump_json()), self.registered)
        needed = section.min_sites or expected
        call_the_roll(self._roll, expected, needed, section.roll_call_deadline_s, self.callbacks.on_wait)
        self._leave_out(claim_faults(self._roll.members.values(), self.claims()), "labels")
        if section.min_sites:  # else every site is needed: merging says all that is wrong at once
            self._leave_out(own_faults(self._declarations()), "labels")
            self._leave_out(minority_faults(self._declarations()), "labels")
            self._leave_out(coverage_faults(self.method, self._declarations()), "labels")
        return self._settle_labels()

    def _leave_out(self, faults: Sequence[Fault], kind: str) -> None:
        """Tell the sites at fault, and go on without them.

        Raises:
            BadInput: If too few sites are left.
        """
        refuse_faulty(self._roll, faults, kind)
        needed = self.participation.min_sites
        if not needed or len(self._roll.members) < needed:
            stop_on(faults)

    def _declarations(self) -> list[Declaration]:
        return [member.declaration for member in self._roll.members.values()]

    def _settle_labels(self) -> LabelContract:
        """Make the contract and the list of members from who is on the roll."""
        try:
            self.contract = merge_declarations(self._declarations())
        except BadInput as error:
            refuse_faulty(self._roll, error.faults, "labels")
            raise
        stop_on(self.method.contract_faults(self.contract))
        on_roll = {member.answer.site: member for member in self._roll.members.values()}
        for site in self.members.keys() - on_roll.keys():
            del self.members[site]
        self._enrol(on_roll[site] for site in on_roll.keys() - self.members.keys())
        stop_on(self.method.roll_call_faults(self.context(0, NO_ARRAYS)))
        return self.contract

    @property
    def left_out(self) -> dict[str, str]:
        """Sites that do not take part as things stand, and why: they declined, or could not be taken in."""
        return {self._roll.name_of(node): reason for node, reason in sorted(self._roll.refused.items())}

    def context(self, server_round: int, statistics: Arrays) -> RoundContext:
        """Return what the method's rules may look at."""
        answers = {site: member.answer for site, member in sorted(self.members.items())}
        return RoundContext(self.plan.model.task, self.contract, answers, statistics, server_round, self.plan.run.seed)

    def settle_model(self, layout: str) -> LabelContract:
        """Fix the layout of the model; a site of another release that would build another one is left out.

        Returns:
            The contract of the sites that are left: it may have fewer classes.

        Raises:
            BadInput: Naming every such site with its release, if too few others are left.
        """
        self._layout = layout
        faults = model_faults(self.members.values(), layout)
        self._leave_out(faults, "version")
        return self._settle_labels() if faults else self.contract

    def _enrol(self, members: Iterable[Member]) -> None:
        for member in members:
            site = member.answer.site
            self.members[site] = member
            self.bytes_down[site] += member.bytes_down
            self.bytes_up[site] += member.bytes_up

    def admit_late_joiners(self, server_round: int) -> None:
        """Call the roll for sites that have connected since; who fits the run's classes and model is in."""
        for member in self._roll.ask_newcomers(JOIN_DEADLINE_S):
            if faults := model_faults([member], self._layout):
                refuse_faulty(self._roll, faults, "version")
            elif faults := claim_faults([member], self.claims()) or self._joining(member):
                refuse_faulty(self._roll, [replace(fault, site=member.answer.site) for fault in faults], "labels")
            else:
                self._enrol([member])
                self.callbacks.on_join(server_round, member.answer.site)

    def _joining(self, member: Member) -> list[Fault]:
        """Take a late joiner into the contract, whose classes are settled; or say why not."""
        declarations = [other.declaration for other in self.members.values()] + [member.declaration]
        try:
            contract = merge_declarations(declarations, self.contract.class_names)
            stop_on(self.method.contract_faults(contract))
        except BadInput as error:
            return list(error.faults)
        self.contract = contract
        return []

    def drawn(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """Return the sites of a round: all, or ``sites_per_round`` drawn from (seed, round), but for the excluded."""
        names = set(self.members) - set(excluded)
        return drawn(names, self.participation.sites_per_round, [self.plan.run.seed, server_round])

    @property
    def samples(self) -> bool:
        """Return whether a sample of the sites says how good a model is, and not all of them."""
        return 0 < self._evaluated < len(self.members)

    @property
    def _evaluated(self) -> int:
        return evaluated(self.plan.evaluation.sites, self.participation.sites_per_round)

    def drawn_to_evaluate(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """Return the sites that are asked how good a model is, but for the excluded.

        It is all of them, or a sample drawn from (seed, round) that covers the run's classes where it can.
        """
        if not self.samples:
            return sorted(set(self.members) - set(excluded))
        annotated = {site: self.contract.sites[site] for site in self.members}
        seed = [self.plan.run.seed, server_round, EVALUATION]
        return drawn_to_cover(annotated, self._evaluated, seed, excluded)
