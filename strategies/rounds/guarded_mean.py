"""The guard in the round loop: which of its means a run can use, and what the coordinator does with its findings."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from common.config import ParticipationSection, Plan
from common.models.state import Layout, ModelState
from common.wire.records import TrainReply
from strategies.base.aggregator import Aggregator
from strategies.base.callbacks import Callbacks
from strategies.base.method import Method
from strategies.base.state import FederationState
from strategies.rounds.guard.broken_model import JUMP_SEEN, JUMP_UNSEEN, RolledBack, broken
from strategies.rounds.guard.odd_updates import Variances
from strategies.rounds.guard.update_trial import UpdateTrial
from strategies.rounds.guard.verdict import Judged
from strategies.rounds.messages.replies import validation_of


class ModelBroken(Exception):
    """The present model is broken; carries the state to go on from."""

    def __init__(self, state: FederationState) -> None:
        super().__init__("the model is broken")
        self.state = state


class RoundGuard:
    """Looks for sites that harm the model of one run.

    Attributes:
        on: Whether it does.
        sees_updates: Whether single updates can be judged by all sites from the same model.
    """

    def __init__(self, method: Method, plan: Plan, participation: ParticipationSection, callbacks: Callbacks) -> None:
        self.on = participation.guard == "on" and not method.shares_nothing and method.pooled == "no"
        self.sees_updates = not plan.privacy.secure_aggregation and not method.sequential
        # A round that is done again would cost sites more than the plan states: they decline.
        self._goes_back = plan.privacy.epsilon is None
        # Noise may make a variance negative, so with privacy none is looked at.
        self._looks_at_variances = plan.privacy.level == "none"
        self._variance_places: tuple[slice, ...] = ()
        self._callbacks = callbacks

    def settle_model(self, layout: Layout) -> None:
        """Learn where the model's variances stand."""
        places = layout.slices()
        names = [one.name for one in layout.norm if one.name.endswith("running_var")]
        self._variance_places = tuple(places[name] for name in names) if self._looks_at_variances else ()

    def variances(self, model: ModelState) -> Variances:
        """The variances of a model that are looked at."""
        return Variances(model.norm, self._variance_places)

    def refuse_broken(
        self, state: FederationState, losses: Mapping[str, float], absent: Mapping[str, str], sites: Collection[str]
    ) -> FederationState:
        """Look at what the sites say of the present model; return the state, perhaps with a site less.

        Args:
            losses: Site -> validation loss of the model.
            absent: Site -> why its reply does not count.
            sites: All of the run.

        Raises:
            ModelBroken: If it is broken, and there is a round to go back to.
        """
        guard = state.guard
        jump = JUMP_SEEN if self.sees_updates else JUMP_UNSEEN
        # Where a later round was taken back, this model was judged before: to take it back too would never end.
        judged = self.on and self._goes_back and state.round >= max(guard.repeated, 1)
        because = broken(losses, absent, guard.losses, jump) if judged else ""
        if guard.held and guard.repeated == state.round and losses and not because:
            return self.condemn(
                state, state.round, {guard.held: f"without it the model of round {state.round} is sound"}
            )
        if not because:
            return state
        repeated = guard.repeated == state.round
        if repeated and (self.sees_updates or not (guard.held or guard.to_hold or not guard.tried_all)):
            return state  # it was done again, and nobody was found: the federation itself diverges
        again = guard.next_try(state.round, sorted(set(sites) - set(guard.liars)))
        earlier = self._callbacks.on_rollback(RolledBack(state.round, state.round - 1, because, again.held))
        if earlier is None:
            return state
        raise ModelBroken(replace(earlier, guard=again.over(earlier.guard)))

    def condemn(self, state: FederationState, server_round: int, reasons: Mapping[str, str]) -> FederationState:
        """Leave sites out for the rest of the run."""
        for site, reason in reasons.items():
            self._callbacks.on_liar(server_round, site, reason)
        return replace(state, guard=state.guard.without(reasons))

    def judge_updates(
        self,
        state: FederationState,
        server_round: int,
        aggregator: Aggregator,
        accepted: Mapping[str, TrainReply],
        annotated: Mapping[str, Collection[str]],
        *,
        model_of: Callable[[Collection[str]], ModelState],
        judged: Callable[[ModelState], Judged],
    ) -> tuple[FederationState, dict[str, str]]:
        """Have the sites judge odd updates of a round; return the sites that harm, with the reasons.

        Args:
            annotated: Site -> its classes.
            model_of: The model that the updates of some sites make.
            judged: What the sites say of a model.
        """
        if not self.on or not self.sees_updates or len(accepted) < 2:
            return state, {}
        updates = {site: reply.update for site, reply in aggregator.whole(accepted).items()}
        trial = UpdateTrial(model_of, judged, self.variances(state.model))
        losses, lengths = validation_of(accepted).loss, aggregator.lengths(accepted)
        guard, reasons = trial.held(server_round, updates, lengths, annotated, guard=state.guard, judges=losses)
        return self.condemn(replace(state, guard=guard), server_round, reasons), reasons
