"""The coordinator's state between rounds, and how replies move it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from common.models.state import ModelState
from common.wire import Groups, TrainReply
from strategies.averaging import moved, moved_head, weighted_mean
from strategies.method import Method, Weighting


@dataclass(frozen=True)
class FederationState:
    """Everything the coordinator knows after a round.

    Attributes:
        round: Rounds completed.
        model: The global model after that round.
        best: Model of the best round so far; None before any was evaluated.
        best_round: Its round, -1 for none; 0 is the initial model.
        best_loss: Its mean validation loss.
        counted: Site -> last round in which its reply counted.
    """

    round: int
    model: ModelState
    best: ModelState | None = None
    best_round: int = -1
    best_loss: float = float("inf")
    counted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def selected(self) -> ModelState:
        """The best model, or the last where no validation loss was ever reported."""
        return self.model if self.best is None else self.best


def groups_for(model: ModelState, rows: Sequence[str]) -> Groups:
    """The groups of the global model that a site with these head rows receives.

    A group that never travels up still goes down: a site takes it as its starting point in its first round, and a site
    whose disk was lost starts anew from it.
    """
    return Groups(model.trunk, model.norm, model.head.rows(tuple(rows)))


def groups_expected(sent: Groups, method: Method) -> Groups:
    """The groups that a site sends back: those that the method averages."""
    return Groups(
        sent.trunk if method.sends_trunk else None,
        sent.norm if method.sends_norm else None,
        sent.head if method.sends_head else None,
    )


def aggregated(model: ModelState, replies: Sequence[TrainReply], weighting: Weighting) -> ModelState:
    """Move the global model by the mean of the sites' updates.

    Args:
        model: What the sites started from.
        replies: Accepted replies in the order of site names; at least one.
        weighting: Uniform, or by training images.
    """
    weights = [float(reply.train_samples) if weighting == "samples" else 1.0 for reply in replies]
    trunks = [reply.update.trunk for reply in replies if reply.update.trunk is not None]
    norms = [reply.update.norm for reply in replies if reply.update.norm is not None]
    heads = [reply.update.head for reply in replies if reply.update.head is not None]
    return ModelState(
        trunk=moved(model.trunk, weighted_mean(trunks, weights)) if trunks else model.trunk,
        norm=moved(model.norm, weighted_mean(norms, weights)) if norms else model.norm,
        head=moved_head(model.head, heads, weights) if heads else model.head,
    )


def with_validation(state: FederationState, mean_loss: float | None) -> FederationState:
    """Take note of the current model's mean validation loss; the lowest is best, the first of equals (specs 1.4)."""
    if mean_loss is None or not mean_loss < state.best_loss:
        return state
    return replace(state, best=state.model, best_round=state.round, best_loss=mean_loss)
