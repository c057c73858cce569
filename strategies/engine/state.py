"""The coordinator's state between rounds, and how replies move it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from common.models.state import ModelState
from common.wire.records import (
    Arrays,
    Groups,
    no_arrays,
)
from strategies.aggregation.norm_bound import Lengths
from strategies.aggregation.server_optimizer import Moments
from strategies.engine.best_round import (
    criterion_possible,
    is_better,
    losses_by,
    lowest_of,
)
from strategies.engine.round_record import FederationValidation
from strategies.local.site_method import Criterion, SiteMethod


@dataclass(frozen=True)
class FederationState:
    """Everything the coordinator knows after a round.

    Attributes:
        round: Rounds completed.
        model: The global model after that round.
        best: Model of the best round so far; None before any was evaluated.
        best_round: Its round, -1 for none; 0 is the initial model.
        best_losses: Its losses by the run's criterion, by site.
        lowest_losses: The lowest loss by that criterion that each site stated for any round's model.
        criterion: What counts as a loss there; None before any model was judged.
        counted: Site -> last round in which its reply counted.
        moments: Of the server optimiser, of the coordinator's own training, or of what a method mixes in.
        statistics: What the method's coordinator has learned.
        left_out: Site -> why its last reply did not count, with the round; a site that counted since is not there.
        excluded: Site -> why it is left out for the rest of the run.
        sound_losses: Site -> validation loss of the last model that had not collapsed; empty where none is taken back.
        repeated: The last round that was done again because its model had collapsed.
        next_trial: No update is tried before this round, after a trial in which none harmed.
        lengths: Where a model is passed on: site -> lengths of its last update.
    """

    round: int
    model: ModelState
    best: ModelState | None = None
    best_round: int = -1
    best_losses: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    lowest_losses: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    criterion: Criterion | None = None
    counted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    moments: Moments = field(default_factory=lambda: MappingProxyType({}))
    statistics: Arrays = field(default_factory=no_arrays)
    left_out: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    excluded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sound_losses: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    repeated: int = 0
    next_trial: int = 0
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def selected(self) -> ModelState:
        """The best model, or the last where no site ever judged one."""
        return self.model if self.best is None else self.best


def groups_for(model: ModelState, rows: Sequence[str]) -> Groups:
    """The groups of the global model that a site with these head rows receives.

    A group that never travels up still goes down: a site takes it as its starting point in its first round, and a site
    whose disk was lost starts anew from it.
    """
    return Groups(model.trunk, model.norm, model.head.rows(tuple(rows)))


def groups_expected(sent: Groups, method: SiteMethod, annotated: Collection[str]) -> Groups:
    """The groups that a site with these classes sends back: those that the method averages."""
    head = sent.head.rows(method.rows_sent(sent.head.class_names, annotated)) if sent.head else None
    return Groups(
        sent.trunk if method.traffic.trunk else None,
        sent.norm if method.sends_norm else None,
        head if method.traffic.head else None,
        method.parameters.compress_update,
    )


def with_absent(
    state: FederationState, where: str, counted: Collection[str], absent: Mapping[str, str]
) -> FederationState:
    """Take note of why replies of an exchange did not count, for their sites to be told."""
    before = {site: why for site, why in state.left_out.items() if site not in counted}
    now = {site: f"{where}: {why}" for site, why in absent.items()}
    return replace(state, left_out=MappingProxyType({**before, **now}))


def after_round(
    state: FederationState,
    server_round: int,
    counted: Collection[str],
    absent: Mapping[str, str],
    *,
    model: ModelState,
    moments: Moments,
    statistics: Arrays,
) -> FederationState:
    """The state after a round.

    Args:
        counted: The sites whose replies count.
        absent: The others that were asked, with the reasons.
    """
    return replace(
        with_absent(state, f"round {server_round}", counted, absent),
        round=server_round,
        model=model,
        counted=MappingProxyType({**state.counted, **dict.fromkeys(counted, server_round)}),
        moments=moments,
        statistics=statistics,
    )


def with_judgement(state: FederationState, found: FederationValidation, wanted: Criterion) -> FederationState:
    """Take note of what sites state of the current model, by the run's criterion; see :func:`with_validation`.

    Args:
        wanted: The criterion of the method or the experiment. The first judged model settles whether it is possible,
            so that all rounds of a run are compared by one.
    """
    if not found.loss:
        return state
    criterion = state.criterion or criterion_possible(wanted, found)
    return with_validation(replace(state, criterion=criterion), losses_by(criterion, found))


def with_validation(state: FederationState, losses: Mapping[str, float]) -> FederationState:
    """Take note of the current model's losses by the run's criterion, by site, and of whether it is the best so far.

    The lowest uniform mean is best (specs 1.4), unless most sites object (:mod:`strategies.engine.best_round`). Where
    not the same sites judged both models, those that did decide; models that no site judged both cannot be compared,
    and the earlier stays. The first of equals is best.
    """
    if not losses:
        return state
    lowest = MappingProxyType(lowest_of(losses, state.lowest_losses))
    judged = replace(state, lowest_losses=lowest)
    if state.best is not None and not is_better(losses, state.best_losses, lowest):
        return judged
    return replace(judged, best=state.model, best_round=state.round, best_losses=MappingProxyType(dict(losses)))
