"""CBAFed: pseudo-labels that are fixed for a round, with a confidence threshold that is lower for rarer classes.

Li, Li, Wang: "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning", CVPR 2023; as a
comparator in Sun et al., "FedMLP", MICCAI 2024, tables 1 and 2. We had the paper's abstract, descriptions of it and
both groups' released code, not its numbered equations.

The paper's method. Stage 1: only sites with labels train. Stage 2: at the beginning of a round, a site without labels
predicts each image with the received model. The most probable class becomes the pseudo-label if its probability exceeds
the class's threshold ``tau_c = p_c + base - std(p)``, which has an upper limit; p_c is class c's share of the labels
and pseudo-labels of the last round. A site's weight is its number of trained images. *Residual weight connection*:
every fifth round the mean is mixed half and half with the model after the last mixing; in stage 1 every fifth epoch,
with a share of 0.8 for the earlier model.

Our version, because here each site labels some of the classes. An *entry* is one class of one image. All points but the
first follow FedMLP's authors:

- Pseudo-labels are fixed for a round, as in the paper; FedMLP's authors make new ones in every batch.
- In a class that a site does not label, an entry is positive if its probability is above tau_c, negative if it is below
  ``1 - tau_c``, and otherwise omitted; p_c is class c's share of all trained entries. So p_c rises with the number of
  sites that label the class. base is 0.45 instead of 0.84; tau is limited to 0.55 to 0.95.
- A site's weight is its number of trained entries.
- With one local epoch in a round there is no fifth epoch, so in stage 1, too, the coordinator mixes every fifth round.
- The loss is the mean over labels plus one mean for each class with pseudo-labels. So one pseudo-label of a rare class
  can weigh as much as all labels. ``pseudo_label_reduction = "entries"`` takes one mean over all.
- Omitted: the paper gives an uncertain image its second most likely class if that class is rare. A class that is only
  present or absent has no second.

FedMLP's authors weigh positives by images over positives, counted with labels that the site does not have; we count the
site's own labels and pseudo-labels. Their stage 1 divides p by images; ours divides by entries, as their stage 2 does.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model, compute_logits
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import Arrays, ModelGroups, select_arrays_with_prefix
from polyclinic.strategies.aggregation.means import Weighting, Weights, mix_tensors
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.local.losses import compute_positive_weights, partial_loss
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters, Payload, Statistic
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound, Losses
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Settings, Stage, get_round_count, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, RoundContext, SiteReply, convert_to_json_numbers

Floats = NDArray[np.floating]
Float64 = NDArray[np.float64]


def _choose_mixing_period(rounds: int, settings: Settings) -> int:
    """Return 5, or in short runs one less than the rounds of the longer stage, so that a mixing takes place."""
    first = get_round_count(settings, "stage_one_rounds", 1)
    return max(1, min(5, max(first, rounds - first) - 1))


class CBAFedParameters(Parameters):
    """The ``[method]`` table of CBAFed.

    In stage 2 an unlabelled entry (a class of an image) becomes positive if the received model's probability is above
    ``tau_c``, and negative if it is below ``1 - tau_c``. The threshold is ``tau_c = clip(p_c + threshold_base - std(p),
    threshold_lowest, threshold_highest)``: p_c is class c's share of all entries that the sites trained on, and std is
    the standard deviation over classes. A mixing replaces the model by ``share * earlier model + (1 - share) * model``.

    Attributes:
        stage_one_rounds: Number of rounds before the first pseudo-labels; half of the run's rounds, at most 50, if the
            experiment gives none.
        threshold_base, threshold_lowest, threshold_highest: Constant and limits of the thresholds in the formula above.
        residual_every: Number of rounds between two mixings with the earlier model; 0 never mixes. If the experiment
            gives none: 5, or in short runs one less than the longer stage has.
        residual_stage_one: Share of the earlier model in stage 1.
        residual: Share of the earlier model in stage 2.
        balanced: True to weigh the positives of each class by ``entries / positives``, where both count the site's
            labels and pseudo-labels of the class.
        pseudo_label_reduction: ``classes`` gives the pseudo-labels of each class a mean of their own; ``entries`` takes
            one mean over labels and pseudo-labels.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "stage_one_rounds": make_share_of_rounds("half", 1, 2, most=50),
        "residual_every": RoundDefault("5, in short runs one less than the longer stage has", _choose_mixing_period),
    }
    weighting: Weighting = "samples"
    pseudo_label_reduction: Literal["classes", "entries"] = "classes"
    stage_one_rounds: int = Field(50, ge=1)
    threshold_base: float = Field(0.45, ge=0, le=1)
    threshold_lowest: float = Field(0.55, ge=0.5, le=1)
    threshold_highest: float = Field(0.95, ge=0.5, le=1)
    residual_every: int = Field(5, ge=0)
    residual_stage_one: float = Field(0.8, ge=0, le=1)
    residual: float = Field(0.5, ge=0, le=1)
    balanced: bool = True

    def list_stages(self) -> tuple[Stage, ...]:
        """Return stage 2, and the first mixing with an earlier model, which is in stage 1 if that is long enough."""
        first = self.stage_one_rounds
        period = self.residual_every
        stages = [Stage("stage 2, in which missing labels get pseudo-labels, begins", first + 1, ("stage_one_rounds",))]
        if period:
            mixing = period + 1 if first > period else first + period + 1
            settings = ("stage_one_rounds", "residual_every")
            stages.append(Stage("the first mixing with an earlier model is", mixing, settings, "residual_every = 0"))
        return tuple(stages)


# ---------------------------------------------------------------------- maths


def compute_pseudo_label_thresholds(entries: Floats, base: float, lowest: float, highest: float) -> Float64:
    """Return the classes' thresholds ``tau_c = clip(p_c + base - std(p), lowest, highest)``, ``(classes,)``.

    ``p_c`` is the class's share of all ``entries``, and std is the sample standard deviation over classes.

    Args:
        entries: Number of entries of each class that all sites trained on, ``(classes,)``.
        base, lowest, highest: Constant and limits of the thresholds.
    """
    share = entries / max(float(entries.sum()), 1.0)
    spread = float(share.std(ddof=1)) if len(share) > 1 else 0.0
    return np.asarray(np.clip(share + base - spread, lowest, highest), np.float64)


def count_trained_label_entries(reply: SiteReply) -> Float64:
    """Return how many labels and pseudo-labels of each class a site trained on by its own statement, ``(classes,)``.

    Each count is limited to the site's number of training images.
    """
    return np.nan_to_num(reply.statistics["entries"].astype(np.float64)).clip(0, reply.train_samples)


def mix_with_earlier_model(model: ModelState, earlier: ModelGroups, share: float) -> ModelState:
    """Return ``share * earlier + (1 - share) * model``, value by value."""
    now = ModelGroups.from_model(model).to_named_arrays()
    values = {name: mix_tensors(array, now[name], share) for name, array in earlier.to_named_arrays().items()}
    return ModelGroups.from_named_arrays(values, model.head.class_names).to_model()


def compute_label_and_tag_loss(
    logits: Tensor, targets: Tensor, annotated: Tensor, positive_weight: Tensor | None
) -> Tensor:
    """Return the mean cross-entropy over labels, plus for each unlabelled class the mean over its pseudo-labels.

    Args:
        targets: Labels and pseudo-labels ``(batch, classes)``, NaN if there is neither.
        annotated: True for the classes that the site labels, ``(classes,)``; the others have pseudo-labels.
        positive_weight: Weight of the positives of each class, ``(classes,)``; None weighs all by 1.
    """
    is_known = ~targets.isnan()
    present = targets.nan_to_num()
    entries = binary_cross_entropy_with_logits(logits, present, reduction="none", pos_weight=positive_weight)
    sums, counts = torch.where(is_known, entries, 0.0).sum(dim=0), is_known.sum(dim=0)  # (classes,)
    labelled = sums[annotated].sum() / counts[annotated].sum().clamp(min=1)
    return labelled + (sums[~annotated] / counts[~annotated].clamp(min=1)).sum()


def assign_pseudo_labels(probabilities: Tensor, threshold: Tensor) -> Tensor:
    """Return pseudo-labels: 1 above the class's threshold, 0 below one minus the threshold, otherwise NaN.

    Args:
        probabilities: The received model's probabilities ``(n, classes)`` for images without augmentation.
        threshold: ``(classes,)``, at least 0.5.
    """
    negative_or_unsure = torch.where(probabilities < 1 - threshold, 0.0, torch.nan)
    return torch.where(probabilities > threshold, 1.0, negative_or_unsure)


# ---------------------------------------------------------------------- hospital


class CBAFedSite(SiteMethod):
    """The hospital's half of CBAFed: from stage 2 on, it trains on labels and on pseudo-labels made before training."""

    traits = MethodTraits(
        "cbafed",
        parameters_class=CBAFedParameters,
        payload=Payload(
            statistics=(
                Statistic("entries", "counts", "how many images it took for present or absent, class by class"),
            )
        ),
        weighs_updates=True,
        supports_multi_class=False,
        reason_against_segmentation="it decides for whole images whether a class is there",
        allows_other_loss=False,
    )
    parameters: CBAFedParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: its objective is the cross-entropy of labels and pseudo-labels."""
        parameters = self.parameters
        targets = self.add_pseudo_labels(context)
        positive_weight = compute_positive_weights(targets) if parameters.balanced else None

        def objective(model: Model, batch: Batch) -> Tensor:
            logits = batch.logits(model, batch.view())
            entries = parameters.pseudo_label_reduction == "entries" or batch.annotated.all()
            loss = partial_loss if entries else compute_label_and_tag_loss
            return loss(logits, targets[batch.rows], batch.annotated, positive_weight)

        def statistics(model: Model, losses: Losses) -> Arrays:
            """Return the number of labels and pseudo-labels of each class; empty before the last round of stage 1."""
            if context.round < parameters.stage_one_rounds:
                return {}
            return {"entries": (~targets.isnan()).sum(dim=0).cpu().numpy().astype(np.float32)}

        return LocalRound(objective, statistics)

    def add_pseudo_labels(self, context: ClientContext) -> Tensor:
        """Return the site's labels and, in stage 2, pseudo-labels, ``(n, classes)``; NaN if there is neither."""
        examples = context.examples
        statistics = context.statistics
        if context.round <= self.parameters.stage_one_rounds or "thresholds" not in statistics:
            return examples.labels
        logits = compute_logits(context.network, examples.images, context.spec.precision)
        tags = assign_pseudo_labels(logits.sigmoid(), torch.tensor(statistics["thresholds"], device=logits.device))
        return torch.where(examples.annotated, examples.labels, tags)


# ---------------------------------------------------------------------- coordinator


class CBAFed(Method):
    """The coordinator's half of CBAFed: weights by trained entries, mixing with an earlier model, thresholds."""

    site_class = CBAFedSite
    site: CBAFedSite

    def statistics_for(self, context: RoundContext) -> Callable[[str], Arrays]:
        """Return a function that gives every site the pseudo-label thresholds of the classes."""
        return lambda site: context.statistics

    def statistics_shape(self, context: RoundContext, site: str, features: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of a site's numbers of labels and pseudo-labels; empty before the last round of stage 1."""
        if context.round < self.site.parameters.stage_one_rounds:
            return {}
        return {"entries": (len(context.contract.class_names),)}

    def aggregate_statistics(self, context: RoundContext, replies: Mapping[str, SiteReply]) -> Arrays:
        """Return the thresholds for the next round, once sites send their numbers of labels and pseudo-labels."""
        parameters = self.site.parameters
        if context.round < parameters.stage_one_rounds:
            return context.statistics
        entries = np.sum([count_trained_label_entries(reply) for reply in replies.values()], axis=0)  # (classes,)
        low = parameters.threshold_lowest
        high = parameters.threshold_highest
        thresholds = compute_pseudo_label_thresholds(entries, parameters.threshold_base, low, high)
        return {"thresholds": thresholds.astype(np.float32)}

    def site_weights(self, context: RoundContext, replies: Mapping[str, SiteReply], weights: Weights) -> Weights:
        """Return the sites' weights; in stage 2, multiplied by a site's number of labels and pseudo-labels per image.

        The weights are returned unchanged in stage 1, and if all products are 0.
        """
        if context.round <= self.site.parameters.stage_one_rounds:
            return weights
        sizes = [float(count_trained_label_entries(reply).sum()) / reply.train_samples for reply in replies.values()]
        scaled = [weight * size for weight, size in zip(weights, sizes, strict=True)]
        return scaled if sum(scaled) > 0 else weights

    def finalize(self, server_round: int, model: ModelState, moments: Moments) -> tuple[ModelState, Moments]:
        """Mix the model with the earlier stored one every ``residual_every`` rounds of a stage, and store the result.

        In the first round of a stage, the model is stored unmixed. In all other rounds it is returned unchanged.
        """
        parameters = self.site.parameters
        first = server_round <= parameters.stage_one_rounds
        finished = server_round - 1 - (0 if first else parameters.stage_one_rounds)  # rounds of this stage
        if not parameters.residual_every or finished % parameters.residual_every:
            return model, moments
        if finished:
            stored = select_arrays_with_prefix("earlier", moments)
            earlier = ModelGroups.from_named_arrays(stored, model.head.class_names)
            share = parameters.residual_stage_one if first else parameters.residual
            model = mix_with_earlier_model(model, earlier, share)
        named = ModelGroups.from_model(model).to_named_arrays()
        return model, {**moments, **{f"earlier/{name}": array for name, array in named.items()}}

    def compute_round_figures(self, context: RoundContext) -> Mapping[str, Any]:
        """Return each class's pseudo-label threshold for the next round.

        Empty until sites have sent their numbers of trained entries.
        """
        if "thresholds" not in context.statistics:
            return {}
        named = zip(context.contract.class_names, context.statistics["thresholds"], strict=True)
        return {"thresholds": convert_to_json_numbers(dict(named))}
