"""The coordinator's state between rounds, and how replies move it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from common.models.state import Array, Head, ModelState
from common.wire.records import (
    Arrays,
    Groups,
    TrainReply,
    no_arrays,
)
from strategies.aggregation.mean import FlatMean, HeadMean, HeadSum, MeanOfAll, RowsMean, RunningMean, moved
from strategies.aggregation.norm_bound import Lengths
from strategies.aggregation.server_optimizer import Float64, Moments, ServerOptimizer, stepped
from strategies.base.best_round import Criterion, criterion_possible, is_better, losses_by, lowest_of
from strategies.base.method import Method, Weighting, Weights
from strategies.base.round_record import FederationValidation


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


def groups_expected(sent: Groups, method: Method, annotated: Collection[str]) -> Groups:
    """The groups that a site with these classes sends back: those that the method averages."""
    head = sent.head.rows(method.rows_sent(sent.head.class_names, annotated)) if sent.head else None
    return Groups(
        sent.trunk if method.traffic.trunk else None,
        sent.norm if method.sends_norm else None,
        head if method.traffic.head else None,
        method.parameters.compress_update,
    )


@dataclass(frozen=True)
class Means:
    """The means of sites' updates, group by group; None where nobody sent a group.

    Attributes:
        model: What the sites started from.
    """

    model: ModelState
    trunk: FlatMean | None = None
    norm: FlatMean | None = None
    head: RowsMean | None = None

    def moved(self) -> ModelState:
        """The model, moved by the means; a group that nobody sent stays as it was."""
        model = self.model
        return ModelState(
            trunk=self.trunk.moved(model.trunk) if self.trunk else model.trunk,
            norm=self.norm.moved(model.norm) if self.norm else model.norm,
            head=self.head.moved(model.head) if self.head else model.head,
        )

    def stepped(self, optimizer: ServerOptimizer, moments: Moments) -> tuple[ModelState, Moments]:
        """The model, moved by a server optimiser's steps along the means.

        Batch normalisation moves by the mean itself: a running variance has no gradient. A head row that nobody sent
        stays, and so do its moments.
        """
        trunk, norm, head = self.model.trunk, self.model.norm, self.model.head
        if self.trunk:
            step, moments = stepped(optimizer, self.trunk.mean, moments, "trunk")
            trunk = moved(trunk, step)
        if self.norm:
            norm = self.norm.moved(norm)
        if self.head:
            head, moments = _stepped_head(optimizer, head, self.head.mean, moments)
        return ModelState(trunk, norm, head), MappingProxyType(dict(moments))


class RunningMeans:
    """:class:`Means` to which updates are added one by one.

    Args:
        model: What the sites started from.
        head_mean: How head rows are averaged.
    """

    def __init__(self, model: ModelState, head_mean: HeadMean) -> None:
        self._model, self._head_mean = model, head_mean
        self._trunk: RunningMean | None = None
        self._norm: RunningMean | None = None
        self._head: HeadSum | None = None

    def add(self, update: Groups, weight: float) -> None:
        """Add the groups that a site sent; they are not kept."""
        if update.trunk is not None:
            self._trunk = self._trunk or RunningMean(len(self._model.trunk))
            self._trunk.add(update.trunk, weight)
        if update.norm is not None:
            self._norm = self._norm or RunningMean(len(self._model.norm))
            self._norm.add(update.norm, weight)
        if update.head is not None:
            self._head = self._head or self._head_mean(self._model.head.class_names, self._model.head.features)
            self._head.add(update.head, weight)

    @property
    def means(self) -> Means:
        """Means of the updates added so far."""
        return Means(self._model, self._trunk, self._norm, self._head)


def _stepped_head(
    optimizer: ServerOptimizer, head: Head, mean: tuple[Float64, Float64, NDArray[np.bool_]], moments: Moments
) -> tuple[Head, Moments]:
    weight, bias, sent = mean
    for row in np.flatnonzero(sent):
        update = np.append(weight[row], bias[row])  # (features + 1,)
        step, moments = stepped(optimizer, update, moments, f"head {head.class_names[row]}")
        weight[row], bias[row] = step[:-1], step[-1]
    return Head(head.class_names, moved(head.weight, weight), moved(head.bias, bias)), moments


def site_weight(reply: TrainReply, weighting: Weighting) -> float:
    """A site's plain weight in every mean."""
    return float(reply.train_samples) if weighting == "samples" else 1.0


def means_of(model: ModelState, replies: Sequence[TrainReply], weights: Weights, head_mean: HeadMean) -> Means:
    """The means of the sites' updates.

    Args:
        model: What the sites started from.
        replies: Accepted replies in the order of site names; at least one.
        weights: One a reply.
        head_mean: How head rows are averaged.
    """
    updates, heads = [reply.update for reply in replies], RunningMeans(model, head_mean)
    for update, weight in zip(updates, weights, strict=True):
        heads.add(Groups(head=update.head), weight)
    trunk = _mean_of([update.trunk for update in updates], weights, model.trunk)
    return replace(heads.means, trunk=trunk, norm=_mean_of([update.norm for update in updates], weights, model.norm))


def _mean_of(arrays: Sequence[Array | None], weights: Weights, before: Array) -> MeanOfAll | None:
    """The mean of a group that some sites sent; None where nobody did.

    Raises:
        ValueError: If one is not as long as the model's.
    """
    sent = [(array, weight) for array, weight in zip(arrays, weights, strict=True) if array is not None]
    if wrong := [array.shape for array, _ in sent if array.shape != before.shape]:
        raise ValueError(f"expected shape {before.shape}, got {wrong[0]}")
    return MeanOfAll([array for array, _ in sent], [weight for _, weight in sent]) if sent else None


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
    losses: Mapping[str, float] = MappingProxyType({}),
) -> FederationState:
    """The state after a round.

    Args:
        counted: The sites whose replies count.
        absent: The others that were asked, with the reasons.
        losses: Site -> validation loss of the model that the round began with, where models may be taken back.
    """
    return replace(
        with_absent(state, f"round {server_round}", counted, absent),
        round=server_round,
        model=model,
        counted=MappingProxyType({**state.counted, **dict.fromkeys(counted, server_round)}),
        moments=moments,
        statistics=statistics,
        sound_losses=MappingProxyType({**state.sound_losses, **losses}),
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

    The lowest uniform mean is best (specs 1.4), unless most sites object (:mod:`strategies.base.best_round`). Where not
    the same sites judged both models, those that did decide; models that no site judged both cannot be compared, and
    the earlier stays. The first of equals is best.
    """
    if not losses:
        return state
    lowest = MappingProxyType(lowest_of(losses, state.lowest_losses))
    judged = replace(state, lowest_losses=lowest)
    if state.best is not None and not is_better(losses, state.best_losses, lowest):
        return judged
    return replace(judged, best=state.model, best_round=state.round, best_losses=MappingProxyType(dict(losses)))
