"""Who takes part in a run: the roll call, the label contract, late joiners, the draw of a round's sites."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from flwr.serverapp import Grid

from common.config import ParticipationSection, Plan
from common.contract import Declaration, LabelContract, merge
from common.errors import BadInput, Fault, stop_on
from common.system.timers import JOIN_DEADLINE_S
from common.wire.records import NO_ARRAYS, Arrays, RollCall
from strategies.base.callbacks import Callbacks
from strategies.base.method import Method
from strategies.base.round_context import RoundContext
from strategies.rounds.participation.claims import ClaimsBySite, claim_faults, no_lists
from strategies.rounds.participation.cohorts import EVALUATION, drawn, drawn_to_cover, evaluated
from strategies.rounds.participation.label_fit import coverage_faults, minority_faults, own_faults
from strategies.rounds.participation.roll_call import (
    Member,
    Registered,
    Roll,
    call_the_roll,
    model_faults,
    refuse_faulty,
)


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
        """How many of the sites that are asked have to answer."""
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
            self._leave_out_misfits()
        return self._settle_labels()

    def _leave_out_misfits(self) -> None:
        """Leave out the sites whose labels do not fit those of the others, as far as that can be decided."""
        self._leave_out(own_faults(self._declarations()), "labels")
        self._leave_out(minority_faults(self._declarations()), "labels")
        self._leave_out(coverage_faults(self.method, self._declarations()), "labels")

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
            self.contract = merge(self._declarations())
        except BadInput as error:
            refuse_faulty(self._roll, error.faults, "labels")
            raise
        self.method.refuse_unfit(self.contract)
        on_roll = {member.answer.site: member for member in self._roll.members.values()}
        for site in self.members.keys() - on_roll.keys():
            del self.members[site]
        self._enrol(on_roll[site] for site in on_roll.keys() - self.members.keys())
        stop_on(self.method.roll_call_faults(self.known(0, NO_ARRAYS)))
        return self.contract

    @property
    def left_out(self) -> dict[str, str]:
        """Sites that do not take part as things stand, and why: they declined, or could not be taken in."""
        return {self._roll.name_of(node): reason for node, reason in sorted(self._roll.refused.items())}

    def known(self, server_round: int, statistics: Arrays) -> RoundContext:
        """What the method's coordinator half may look at."""
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
        declarations = [known.declaration for known in self.members.values()] + [member.declaration]
        try:
            contract = merge(declarations, self.contract.class_names)
            self.method.refuse_unfit(contract)
        except BadInput as error:
            return list(error.faults)
        self.contract = contract
        return []

    def drawn(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """The sites of a round: all, or ``sites_per_round`` of them drawn from (seed, round), but for the excluded."""
        names = set(self.members) - set(excluded)
        return drawn(names, self.participation.sites_per_round, [self.plan.run.seed, server_round])

    @property
    def samples(self) -> bool:
        """Whether a sample of the sites says how good a model is, and not all of them."""
        return 0 < self._evaluated < len(self.members)

    @property
    def _evaluated(self) -> int:
        return evaluated(self.plan.evaluation.sites, self.participation.sites_per_round)

    def drawn_to_evaluate(self, server_round: int, excluded: Collection[str] = ()) -> list[str]:
        """The sites that are asked how good a model is, but for the excluded.

        It is all of them, or a sample drawn from (seed, round) that covers the run's classes where it can.
        """
        if not self.samples:
            return sorted(set(self.members) - set(excluded))
        annotated = {site: self.contract.sites[site] for site in self.members}
        seed = [self.plan.run.seed, server_round, EVALUATION]
        return drawn_to_cover(annotated, self._evaluated, seed, excluded)
