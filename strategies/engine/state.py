"""The coordinator's state between rounds, how replies move it, which of two models is better, and the model for Flower.

Of two models the mean loss decides, and the majority has a veto. What counts as a site's loss is the *criterion* of the
run. ``auroc``: 1 minus the mean AUROC over the site's own classes on its validation part, which is the share of pairs
that the model ranks wrongly. ``loss``: the plain validation loss. A method that trains adjusted or weighted logits does
not minimise the plain loss, which may rise while the ranking improves. One rule serves both, for both are 0 at best and
grow as a model gets worse.

The rule of the paper's code is the lowest uniform mean (specs 1.4). Alone it lets one site choose: who states 0 for one
model, or a huge loss for all others, moves the mean as far as it likes. So each site's loss is also compared with the
lowest that the same site ever stated: their ratio is the site's *regret* for a model, 1 at its own best. A model's
regret is the smallest one that more than half of the sites stay within: one site alone moves it no further than to
the regret of an honest neighbour. Of two models whose regrets are both at most :data:`TOLERATED`, the lower mean is
better, as in the paper. Otherwise the smaller regret is better.

What influence one lying site keeps, of n that judged both models:

==== =============================================================================================================
n    it decides
==== =============================================================================================================
1, 2 everything: nothing tells which of two is lying
3    between models that both honest sites hold within 25 % of their best, also where the two agree which is better
4    the same, with two of the three honest sites
10   the same, with five of the nine
==== =============================================================================================================

Where any model is within 25 % of their best for more than half of the sites, the chosen one is. Closer bounds (each
difference cut to the second largest, trimmed, or counted as a vote) chose worse rounds among honest sites: few of them
see a difference, and the noise of the others outvotes them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from flwr.app import Array, ArrayRecord

from common.config import Plan
from common.errors import BadInput, Fault, quoted
from common.models.network import Head, build
from common.models.state import ModelState, read_state, write_state
from common.wire.records import Arrays, Groups, no_arrays
from strategies.aggregation.bounds import Lengths
from strategies.aggregation.mean import running_sum
from strategies.aggregation.server_optimizer import Moments
from strategies.engine.round_record import FederationValidation
from strategies.local.site_method import Criterion, SiteMethod

FEWEST = 3
"""Sites of which a majority can outvote one."""
TOLERATED = 1.25
"""Honest losses near their lowest go up and down by some percent from round to round; the mean settles those."""
SMALL = 0.02
"""Added to both losses of a ratio, in nats or in shares of pairs: below it a ratio says nothing."""

Losses = Mapping[str, float]


def criterion_possible(wanted: Criterion, validation: FederationValidation) -> Criterion:
    """Return the criterion of a run, which its first judged model settles.

    It is ``loss`` where not more than half of the sites that state a loss have an AUROC: their validation parts show
    one kind of image only, and the few others, of which one may lie, would decide alone.
    """
    with_auroc = validation.auroc.keys() & validation.loss.keys()
    return wanted if 2 * len(with_auroc) > len(validation.loss) else "loss"


def losses_by(criterion: Criterion, validation: FederationValidation) -> Losses:
    """Return each site's loss by this criterion; by ``auroc`` a site without an AUROC has none."""
    return {site: 1 - auroc for site, auroc in validation.auroc.items()} if criterion == "auroc" else validation.loss


def is_better(now: Losses, before: Losses, lowest: Losses) -> bool:
    """Return whether the model of ``now`` is better than that of ``before``, over the sites that judged both.

    Args:
        now, before: Validation loss of each model, by site.
        lowest: The lowest loss that each site stated up to now, for any model.
    """
    common = sorted(set(now) & set(before))
    regrets = [regret({site: losses[site] for site in common}, lowest) for losses in (now, before)]
    if len(common) >= FEWEST and max(regrets) > TOLERATED:
        return regrets[0] < regrets[1]
    return running_sum(now[site] for site in common) < running_sum(before[site] for site in common)


def regret(losses: Losses, lowest: Losses) -> float:
    """Return how many times its lowest loss a model costs a site, at most, for more than half of the sites."""
    ratios = sorted((loss + SMALL) / (lowest[site] + SMALL) for site, loss in losses.items())
    return ratios[len(ratios) // 2] if ratios else 1.0


def lowest_of(losses: Losses, lowest: Losses) -> dict[str, float]:
    """Return the lowest losses, with these included."""
    return {**lowest, **{site: min(loss, lowest.get(site, loss)) for site, loss in losses.items()}}


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
    """Return the groups of the global model that a site with these head rows receives.

    A group that never travels up still goes down: a site takes it as its starting point in its first round, and a site
    whose disk was lost starts anew from it.
    """
    return Groups(model.trunk, model.norm, model.head.rows(tuple(rows)))


def groups_expected(sent: Groups, method: SiteMethod, annotated: Collection[str]) -> Groups:
    """Return the groups that a site with these classes sends back: those that the method averages."""
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
    """Return the state after a round.

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


def with_judgement(state: FederationState, validation: FederationValidation, wanted: Criterion) -> FederationState:
    """Take note of what sites state of the current model, by the run's criterion; see :func:`with_validation`.

    Args:
        wanted: The criterion of the method or the experiment. The first judged model settles whether it is possible,
            so that all rounds of a run are compared by one.
    """
    if not validation.loss:
        return state
    criterion = state.criterion or criterion_possible(wanted, validation)
    return with_validation(replace(state, criterion=criterion), losses_by(criterion, validation))


def with_validation(state: FederationState, losses: Mapping[str, float]) -> FederationState:
    """Take note of the current model's losses by the run's criterion, by site, and of whether it is the best so far.

    The lowest uniform mean is best (specs 1.4), unless most sites object (:mod:`strategies.engine.state`). Where
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


def array_record(model: ModelState) -> ArrayRecord:
    """Return the global model as Flower's loop carries it."""
    return ArrayRecord({name: Array(array) for name, array in Groups.of_model(model).named().items()})


def model_of(arrays: ArrayRecord, class_names: tuple[str, ...], plan: Plan) -> ModelState:
    """Return the global model from :func:`array_record`, or from a network's ``state_dict``.

    Raises:
        BadInput: If a ``state_dict`` is not of the plan's network with a head row for each class.
    """
    if is_state_dict(arrays):
        return _of_network(arrays, class_names, plan)
    head = Head(class_names, arrays["head.weight"].numpy(), arrays["head.bias"].numpy())
    return ModelState(arrays["trunk"].numpy(), arrays["norm"].numpy(), head)


def is_state_dict(arrays: ArrayRecord) -> bool:
    """Return whether these are the tensors of a network, as Flower's examples have them."""
    return "trunk" not in arrays


def state_dict_record(model: ModelState, plan: Plan) -> ArrayRecord:
    """Return the global model as the ``state_dict`` of the plan's network."""
    network = build(plan.model, model.head.class_names, plan.run.seed)
    write_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    return ArrayRecord(network.state_dict())


def _of_network(arrays: ArrayRecord, class_names: tuple[str, ...], plan: Plan) -> ModelState:
    network = build(plan.model, class_names, plan.run.seed)
    try:
        network.load_state_dict(arrays.to_torch_state_dict())
    except RuntimeError as error:
        problem = f"is no state_dict of the plan's network with the classes {quoted(class_names)}: {error}"
        raise BadInput([Fault("initial_arrays", problem)]) from None
    return read_state(network)
