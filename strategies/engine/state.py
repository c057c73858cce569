"""The coordinator's state between rounds: how replies change it, how the best model is chosen, how it is stored.

Of two models the one with the lower mean loss is better, unless a majority of sites objects. The *criterion* of a run
defines a site's loss. ``auroc``: 1 minus the mean AUROC over the site's classes on its validation part, which is the
share of wrongly ranked pairs. ``loss``: the plain validation loss. A method that trains adjusted or weighted logits
does not minimise the plain loss, which may rise while the ranking improves. Both criteria are 0 at best and grow as a
model gets worse, so one rule serves both.

The rule of surgical aggregation's code is the lowest unweighted mean (docs/papers.md#surgical-selection). With this
rule alone one site can choose the model: a site that states 0 for one model, or a huge loss for all others, moves the
mean as far as it likes. So each site's loss is also divided by the lowest loss that the same site ever stated. This
ratio is the site's *regret* for a model; it is 1 for the site's own best model. A model's regret is the smallest value
that more than half of the sites do not exceed, so a single site has little influence on it. If both models have a
regret of at most :data:`MAX_REGRET_FROM_NOISE`, the lower mean decides, as in the paper. Otherwise the smaller regret
decides.

Influence of one lying site, if n sites validated both models:

==== =============================================================================================================
n    choices that the lying site can decide
==== =============================================================================================================
1, 2 all: nothing shows which of two sites lies
3    between models that both honest sites rate within 25 % of their best, even if both prefer the same model
4    the same, with two of the three honest sites
10   the same, with five of the nine honest sites
==== =============================================================================================================

So in a run of three sites or more, a choice takes three sites that validated both the best model so far and the
current one. If fewer did, the current one is the result until three compare again, with one exception: two sites
together keep the earlier model if both rate the current one more than 25 % above their best. Without these rules one
hospital would choose wherever the others send no figures, or would hold the run at an early model by no longer sending
its own.

If more than half of the sites rate some model within 25 % of their best, the chosen model is one of these. Stricter
rules (limiting each difference to the second largest, trimming, counting votes) chose worse rounds among honest sites,
because few sites see a difference and the noise of the others outvotes them.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load

from polyclinic.common.config import HospitalPlan
from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.models.network import Head, build_network
from polyclinic.common.models.state import ModelState, read_model_state, write_model_state
from polyclinic.common.system.files import ContentParts
from polyclinic.common.system.toml import TomlSection
from polyclinic.common.wire.codec import make_packed_array
from polyclinic.common.wire.records import (
    Arrays,
    ModelGroups,
    NumberFormat,
    make_empty_arrays,
    select_arrays_with_prefix,
)
from polyclinic.strategies.aggregation.bounds import Lengths
from polyclinic.strategies.aggregation.means import sum_in_order
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.engine.events import FederationValidation
from polyclinic.strategies.local.method_traits import Criterion
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.updates import compress_trunk

MIN_SITES_TO_OUTVOTE = 3
"""Smallest number of sites in which a majority can outvote a single site."""
MIN_SITES_TO_OBJECT = 2
"""Number of sites that together can keep the earlier model, if fewer than three sites validated both models."""
MAX_REGRET_FROM_NOISE = 1.25
"""Largest regret that may be noise; up to this regret the mean decides.

Honest losses near their lowest vary by some percent from round to round.
"""
LOSS_OFFSET = 0.02
"""Added to both losses of a ratio, because ratios of smaller losses are noise."""

Losses = Mapping[str, float]


@dataclass(frozen=True)
class FederationState:
    """The coordinator's complete state after a round.

    Attributes:
        round: Number of completed rounds.
        model: The global model after that round.
        best: Model of the best round so far; None before any was evaluated.
        best_round: Round of the best model, -1 for none; 0 is the initial model.
        best_losses: Site -> loss of the best model, by the run's criterion.
        lowest_losses: Site -> lowest loss that it stated for any round's model, by the run's criterion.
        best_validation_losses: Site -> validation loss of the best model, which decides between equal AUROCs; empty if
            the validation loss itself is the run's criterion.
        criterion: Figure that counts as a site's loss; None before any model was validated.
        counted: Site -> last round in which its reply counted.
        left_out: Site -> why its last reply did not count, with the round; without sites whose last reply counted.
        uncounted: Site -> why its statistics do not count: those of its roll call answer, its replies and its models.
            These are sites whose last reply to training was refused, and sites that were asked to train and have no
            accepted reply yet. After its first accepted reply, a site goes on counting if a reply is merely missing.
        excluded: Site -> why it is excluded for the rest of the run.
        sound_losses: Site -> validation loss of the last model that had not collapsed; empty in runs without rollback.
        repeated: The last round that was repeated because its model had collapsed.
        loss_changes: Changes of the logarithm of the validation loss in the latest rounds, medians over sites.
        next_trial: First round in which a rise of the loss may lead to a trial again, after a trial found no harm.
        tried: Site -> round of the last trial of its long update, which found no harm.
        lengths: Site -> lengths of the parts of its last update; only in sequential training.
        moments: Moments of the server optimiser or of the coordinator's own training, arrays that a method stores, or
            the rounding error of the model.
        statistics: Statistics that the method aggregated at the coordinator.
    """

    round: int
    model: ModelState
    best: ModelState | None = None
    best_round: int = -1
    best_losses: Losses = field(default_factory=lambda: MappingProxyType({}))
    lowest_losses: Losses = field(default_factory=lambda: MappingProxyType({}))
    best_validation_losses: Losses = field(default_factory=lambda: MappingProxyType({}))
    criterion: Criterion | None = None
    counted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    left_out: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    uncounted: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    excluded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sound_losses: Losses = field(default_factory=lambda: MappingProxyType({}))
    repeated: int = 0
    loss_changes: tuple[float, ...] = ()
    next_trial: int = 0
    tried: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    lengths: Mapping[str, Lengths] = field(default_factory=lambda: MappingProxyType({}))
    moments: Moments = field(default_factory=lambda: MappingProxyType({}))
    statistics: Arrays = field(default_factory=make_empty_arrays)

    @property
    def best_or_last_model(self) -> ModelState:
        """Return the best model, or the last model if no model was validated."""
        return self.model if self.best is None else self.best


UNSENT_TRUNK = "unsent trunk"
"""Name of the model's rounding error among the moments."""


def make_initial_state(method: SiteMethod, model: ModelState) -> FederationState:
    """Return the coordinator's state before round 1, with the model as sites receive it."""
    if method.parameters.compress_model == "float32":
        return FederationState(0, model)
    rounded, moments = round_global_model(method, model, {}, np.zeros_like(model.trunk))
    return FederationState(0, rounded, moments=moments)


def round_global_model(
    method: SiteMethod, model: ModelState, moments: Moments, unsent: NDArray[np.float32]
) -> tuple[ModelState, Moments]:
    """Return the model in the number format in which sites receive it, and the moments with the new rounding error.

    The coordinator continues with the rounded model. So every site has the coordinator's model, also after missed
    rounds or a late start.

    Args:
        unsent: The rounding error of the round before, which is added to the trunk before it is rounded.
    """
    groups = ModelGroups.from_model(model)
    rounded, error = compress_trunk(groups, ModelGroups(unsent), method.parameters.compress_model)
    assert error.trunk is not None
    return rounded.to_model(), MappingProxyType({**moments, UNSENT_TRUNK: error.trunk})


def select_site_model_groups(model: ModelState, rows: Sequence[str], form: NumberFormat) -> ModelGroups:
    """Return the parts of the global model that a site receives: trunk, batch normalisation, and its head rows.

    Parts that sites keep local are included, because a site needs them in its first round, or after its disk was lost.

    Args:
        rows: Names of the classes whose head rows the site receives.
        form: Number format in which the trunk is sent; the model is already rounded to it.
    """
    return ModelGroups(model.trunk, model.norm, model.head.select_rows(tuple(rows)), form)


def select_reply_model_groups(sent: ModelGroups, method: SiteMethod, annotated: Collection[str]) -> ModelGroups:
    """Return the model parts that a site sends back: those that the method averages.

    Args:
        sent: The model parts that the site received.
        method: The hospital's half of the method.
        annotated: The classes that the site annotates.
    """
    head = sent.head.select_rows(method.parts.select_sent_rows(sent.head.class_names, annotated)) if sent.head else None
    return ModelGroups(
        sent.trunk if method.payload.trunk else None,
        sent.norm if method.parts.sends_batch_norm else None,
        head if method.payload.head else None,
        method.parameters.compress_update,
    )


# ---------------------------------------------------------------------- from one round to the next


def record_absent_sites(
    state: FederationState, where: str, counted: Collection[str], absent: Mapping[str, str]
) -> FederationState:
    """Return the state with the reasons why replies did not count; a site receives its reason with the next request.

    Args:
        where: Name of the exchange; every reason starts with it.
        counted: The sites whose replies count.
        absent: Site -> why its reply does not count, for the other sites that got a request.
    """
    left_out = dict(state.left_out)
    for site in counted:
        left_out.pop(site, None)
    for site, why in absent.items():
        left_out[site] = f"{where}: {why}"
    return replace(state, left_out=MappingProxyType(left_out))


def make_state_after_round(
    state: FederationState,
    server_round: int,
    counted: Collection[str],
    absent: Mapping[str, str],
    *,
    refused: Collection[str],
    model: ModelState,
    moments: Moments,
    statistics: Arrays,
) -> FederationState:
    """Return the state after a round; ``counted`` and ``absent`` are as in :func:`record_absent_sites`.

    Args:
        refused: Those of the absent sites whose reply came and was refused.
    """
    return replace(
        record_absent_sites(state, f"round {server_round}", counted, absent),
        uncounted=find_uncounted_sites(state, server_round, counted, absent, refused),
        round=server_round,
        model=model,
        counted=MappingProxyType({**state.counted, **dict.fromkeys(counted, server_round)}),
        moments=moments,
        statistics=statistics,
    )


def find_uncounted_sites(
    state: FederationState,
    server_round: int,
    counted: Collection[str],
    absent: Mapping[str, str],
    refused: Collection[str],
) -> Mapping[str, str]:
    """Return the sites whose statistics do not count after a round, with the reasons.

    Args:
        state: The state before the round.
        counted: The sites whose replies count.
        absent: Site -> why its reply does not count, for the other sites that were asked to train.
        refused: Those of the absent sites whose reply came and was refused.
    """
    uncounted = {site: why for site, why in state.uncounted.items() if site not in counted}
    for site, why in absent.items():
        # A site whose reply is merely missing still counts if an earlier reply of it did.
        if site in refused or not state.counted.get(site):
            uncounted[site] = f"round {server_round}: {why}"
    return MappingProxyType(dict(sorted(uncounted.items())))


def record_model_validation(
    state: FederationState, validation: FederationValidation, criterion: Criterion, members: int
) -> FederationState:
    """Return the state with the sites' validation of the current model, which may become the best model.

    The first validated model fixes the run's criterion: ``criterion``, or ``loss`` if at most half of the sites with a
    loss also state an AUROC. Otherwise few sites, one of which may lie, would choose the model alone.

    Args:
        validation: The sites' losses and AUROCs of the current model.
        criterion: The experiment's figure for the choice of the best model.
        members: Number of sites that take part in the run, whether they state figures or not.
    """
    if not validation.loss:
        return update_best_model(state, {}, members)
    if state.criterion is None:
        with_auroc = validation.auroc.keys() & validation.loss.keys()
        state = replace(state, criterion=criterion if 2 * len(with_auroc) > len(validation.loss) else "loss")
    if state.criterion == "loss":
        return update_best_model(state, validation.loss, members)
    complements = {site: 1 - auroc for site, auroc in validation.auroc.items()}
    return update_best_model(state, complements, members, validation.loss)


def update_best_model(
    state: FederationState, losses: Losses, members: int, validation_losses: Losses = MappingProxyType({})
) -> FederationState:
    """Return the state with the sites' losses of the current model, which becomes the best model if it is better.

    Only sites that validated both models, the earlier best one and the current one, are judges of the two.

    - A run of one or two sites, or at least three judges: :func:`is_better_model` decides. If every judge has the same
      loss for both models, :func:`is_validation_loss_lower` does. Otherwise, or if nobody validated the current model,
      the earlier one stays the best.
    - Fewer than three judges in a larger run: the current model is the best one unless :func:`do_both_judges_object`.
      If fewer than two sites validated it, there is no best model, so that the last model is the result.

    Args:
        losses: Site -> loss of the current model, by the run's criterion.
        members: Number of sites that take part in the run, whether they state figures or not.
        validation_losses: Site -> validation loss of the current model, if the criterion is the AUROC; else empty.
    """
    lowest_losses = _lower_losses(state.lowest_losses, losses)
    state = replace(state, lowest_losses=lowest_losses)
    judges = set(losses)
    if state.best:
        judges &= state.best_losses.keys()
    is_larger_run = members >= MIN_SITES_TO_OUTVOTE
    if is_larger_run and len(judges) < MIN_SITES_TO_OUTVOTE:
        if len(losses) < MIN_SITES_TO_OBJECT:
            return replace(state, best=None, best_round=-1, best_losses=MappingProxyType({}))
        earlier_stays_best = do_both_judges_object(losses, state.best_losses, lowest_losses)
    elif state.best is None:
        earlier_stays_best = not losses
    elif judges and all(losses[site] == state.best_losses[site] for site in judges):
        # A small validation part soon has an AUROC of 1, while the model still gets surer.
        earlier_stays_best = not is_validation_loss_lower(validation_losses, state.best_validation_losses)
    else:
        earlier_stays_best = not losses or not is_better_model(losses, state.best_losses, lowest_losses)
    if earlier_stays_best:
        return state
    return replace(
        state,
        best=state.model,
        best_round=state.round,
        best_losses=MappingProxyType(dict(losses)),
        best_validation_losses=MappingProxyType(dict(validation_losses)),
    )


def _lower_losses(lowest: Losses, losses: Losses) -> Losses:
    """Return site -> the lowest loss, of ``lowest`` and of the current ones."""
    lower = dict(lowest)
    for site, loss in losses.items():
        lower[site] = min(loss, lower.get(site, loss))
    return MappingProxyType(lower)


def do_both_judges_object(now: Losses, before: Losses, lowest: Losses) -> bool:
    """Return True if at least two sites validated both models, and the current one is clearly worse to each of them.

    A model is clearly worse to a site if its loss is higher than that of the previous best model, and its regret is
    above :data:`MAX_REGRET_FROM_NOISE`. The arguments are those of :func:`is_better_model`.
    """
    judges = now.keys() & before.keys()
    objectors = [
        site
        for site in judges
        if now[site] > before[site] and _compute_regret(now[site], lowest[site]) > MAX_REGRET_FROM_NOISE
    ]
    return len(judges) >= MIN_SITES_TO_OBJECT and len(objectors) == len(judges)


def is_better_model(now: Losses, before: Losses, lowest: Losses) -> bool:
    """Return True if the current model is better than the previous best one, over the sites that validated both.

    The model with the lower mean loss is better (docs/papers.md#surgical-selection). There is one exception: if at
    least three sites validated both models, and one of the models has a :func:`compute_median_regret` above
    :data:`MAX_REGRET_FROM_NOISE` (1.25), the model with the lower median regret is better.

    Args:
        now, before: Site -> validation loss of the current and of the previous best model.
        lowest: Site -> the lowest loss that it stated for any model so far.
    """
    judges = sorted(now.keys() & before.keys())
    losses_now = {site: now[site] for site in judges}
    losses_before = {site: before[site] for site in judges}
    regret_now = compute_median_regret(losses_now, lowest)
    regret_before = compute_median_regret(losses_before, lowest)
    if len(judges) >= MIN_SITES_TO_OUTVOTE and max(regret_now, regret_before) > MAX_REGRET_FROM_NOISE:
        return regret_now < regret_before
    # Both sums are over the same sites, so that the lower one has the lower mean.
    return sum_in_order(losses_now.values()) < sum_in_order(losses_before.values())


def is_validation_loss_lower(now: Losses, before: Losses) -> bool:
    """Return True if more than half of the sites that validated both models have a lower loss with the current one.

    A majority decides and not the mean, so that one site alone cannot choose among models of equal AUROC.
    """
    judges = now.keys() & before.keys()
    lower = [site for site in judges if now[site] < before[site]]
    return 2 * len(lower) > len(judges)


def compute_median_regret(losses: Losses, lowest: Losses) -> float:
    """Return the median over sites of a site's regret for a model; 1 without sites.

    With an even number of sites it is the upper median.

    Args:
        losses: Site -> loss of the model.
        lowest: Site -> the lowest loss that it stated for any model so far.
    """
    if not losses:
        return 1.0
    regrets = sorted(_compute_regret(loss, lowest[site]) for site, loss in losses.items())
    return regrets[len(regrets) // 2]


def _compute_regret(loss: float, lowest_loss: float) -> float:
    """Return a site's regret for a model: its loss over its lowest one, with :data:`LOSS_OFFSET` added to both."""
    return (loss + LOSS_OFFSET) / (lowest_loss + LOSS_OFFSET)


# ---------------------------------------------------------------------- as bytes: tensors by name, facts as JSON

_FACTS = "facts"
_KINDS = ("model", "best", "moments", "statistics")
_DTYPES = {
    **{"<u8": "U64", "<i8": "I64", "<f8": "F64", "<f4": "F32", "<u4": "U32", "<i4": "I32"},
    **{"<f2": "F16", "<u2": "U16", "<i2": "I16", "|i1": "I8", "|u1": "U8", "|b1": "BOOL"},
}
"""NumPy's dtype -> safetensors' dtype, the widest first, so that each tensor is aligned to its item size."""


class _StoredStateHeader(TomlSection):
    """The header of a stored state: the fields that are not tensors, and the class names of the head rows."""

    round: int
    best_round: int
    best_losses: dict[str, float]
    lowest_losses: dict[str, float]
    best_validation_losses: dict[str, float] = Field(default_factory=dict)  # an earlier release wrote none
    criterion: Criterion | None
    counted: dict[str, int]
    left_out: dict[str, str]
    uncounted: dict[str, str] = Field(default_factory=dict)  # an earlier release wrote none
    class_names: tuple[str, ...]
    excluded: dict[str, str]
    sound_losses: dict[str, float]
    repeated: int
    loss_changes: tuple[float, ...] = ()  # earlier releases wrote neither these nor the trials of sites
    next_trial: int
    tried: dict[str, int] = Field(default_factory=dict)
    lengths: dict[str, dict[str, float]]


def serialize_federation_state(state: FederationState) -> bytes:
    """Return a state as the bytes of a safetensors file."""
    return b"".join(serialize_federation_state_parts(state))


def serialize_federation_state_parts(state: FederationState) -> ContentParts:
    """Return the bytes of :func:`serialize_federation_state` in parts, which share the memory of the state's arrays.

    This avoids a copy, which takes as long for a large model as writing the file.
    """
    facts: dict[str, Any] = {}
    for name in _StoredStateHeader.model_fields:
        fact = state.model.head.class_names if name == "class_names" else getattr(state, name)
        facts[name] = dict(fact) if isinstance(fact, Mapping) else fact
    facts["sound_losses"] = dict(sorted(state.sound_losses.items()))  # the same bytes no matter who replied first
    facts["tried"] = dict(sorted(state.tried.items()))
    facts["lengths"] = {site: dict(lengths) for site, lengths in sorted(state.lengths.items())}
    by_prefix: dict[str, Mapping[str, NDArray[Any]]] = {"moments": state.moments, "statistics": state.statistics}
    by_prefix["model"] = ModelGroups.from_model(state.model).to_named_arrays()
    if state.best:
        by_prefix["best"] = ModelGroups.from_model(state.best).to_named_arrays()
    tensors = {f"{prefix}/{name}": array for prefix, arrays in by_prefix.items() for name, array in arrays.items()}
    tensors[_FACTS] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    return _serialize_as_safetensors_parts(tensors)


def _serialize_as_safetensors_parts(tensors: Mapping[str, NDArray[Any]]) -> ContentParts:
    """Return the parts of a safetensors file: the header's length in 8 bytes, the header as JSON, the tensors."""
    widest_first = list(_DTYPES)
    ordered = sorted((widest_first.index(array.dtype.str), name) for name, array in tensors.items())
    header = dict[str, object]()
    data = []
    begin = 0
    for _, name in ordered:
        array = np.asarray(tensors[name], order="C")
        end = begin + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.str], "shape": array.shape, "data_offsets": (begin, end)}
        if array.nbytes:
            data.append(array.reshape(-1).view(np.uint8).data)
        begin = end
    written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    written += b" " * (-len(written) % 8)
    return [len(written).to_bytes(8, "little"), written, *data]


def deserialize_federation_state(content: bytes) -> FederationState:
    """Read a state from the bytes that :func:`serialize_federation_state` returned.

    Raises:
        ValueError: If the bytes do not hold a state.
    """
    try:
        tensors = load(content)
        facts: dict[str, Any] = dict(_StoredStateHeader.model_validate_json(tensors[_FACTS].tobytes()))
        unknown = sorted(name for name in tensors if name != _FACTS and name.partition("/")[0] not in _KINDS)
        if unknown:
            raise ValueError(f"it holds {quote_names(unknown)}, which no state has")
        names = facts.pop("class_names")
        facts |= {name: MappingProxyType(fact) for name, fact in facts.items() if isinstance(fact, dict)}
        arrays = {kind: select_arrays_with_prefix(kind, tensors) for kind in _KINDS}
        best = ModelGroups.from_named_arrays(arrays["best"], names).to_model() if "best/trunk" in tensors else None
        return FederationState(
            model=ModelGroups.from_named_arrays(arrays["model"], names).to_model(),
            best=best,
            moments=MappingProxyType(arrays["moments"]),
            statistics=MappingProxyType(arrays["statistics"]),
            **facts,
        )
    except (SafetensorError, LookupError, TypeError) as error:
        raise ValueError(f"it holds no state of a federation: {error}") from None


# ---------------------------------------------------------------------- the model as Flower carries it


def make_model_array_record(model: ModelState) -> ArrayRecord:
    """Return the global model as Flower's ``ArrayRecord``: a read-only view of each of the model's arrays."""
    record = ArrayRecord()  # empty, because its constructor would copy the arrays
    for name, array in ModelGroups.from_model(model).to_named_arrays().items():
        record[name] = make_packed_array(array, "float32")
    return record


def is_state_dict(arrays: ArrayRecord) -> bool:
    """Return True if the arrays are a network's ``state_dict``, and not those of :func:`make_model_array_record`."""
    return "trunk" not in arrays


def read_global_model(arrays: ArrayRecord, class_names: tuple[str, ...], plan: HospitalPlan) -> ModelState:
    """Read a global model from arrays of :func:`make_model_array_record` or from a network's ``state_dict``.

    Raises:
        BadInput: If a ``state_dict`` does not fit the plan's network with a head row for each class.
    """
    if not is_state_dict(arrays):
        values = {name: np.frombuffer(array.data, "<f4").reshape(array.shape) for name, array in arrays.items()}
        return ModelState(
            values["trunk"], values["norm"], Head(class_names, values["head.weight"], values["head.bias"])
        )
    network = build_network(plan.model, class_names, plan.run.seed)
    try:
        network.load_state_dict(arrays.to_torch_state_dict())
    except RuntimeError as error:
        problem = f"is no state_dict of the plan's network with the classes {quote_names(class_names)}: {error}"
        raise BadInput([Fault("initial_arrays", problem)]) from None
    return read_model_state(network)


def make_state_dict_record(model: ModelState, plan: HospitalPlan) -> ArrayRecord:
    """Return the global model as the ``state_dict`` of the plan's network, in Flower's ``ArrayRecord``."""
    network = build_network(plan.model, model.head.class_names, plan.run.seed)
    write_model_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
    return ArrayRecord(network.state_dict())
