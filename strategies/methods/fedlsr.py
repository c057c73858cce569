"""FedLSR: local self-regularisation against wrong labels; a comparator in FedMLP's tables.

Jiang, Sun, Wang, Liu: "Towards Federated Learning against Noisy Labels via Local Self-Regularization", CIKM 2022.
Symbols: T_s and T_d are the temperatures of sharpening and distillation, gamma is the weight of the distance of views.

The paper's method, at every site, with FedAvg. Implicit regularisation: the predictions for an image and for an
augmented view are mixed in a proportion drawn from Beta(1, 1) for each batch, then sharpened (p to the power 1 / T_s,
normalised), and cross-entropy compares the result with the label. Explicit self-distillation: the Jensen-Shannon
distance between both predictions at temperature T_d, times gamma, which grows linearly over the first rounds. The
variant FedLSR+ adds the entropy of the predictions. We had the abstract and the authors' published notebook, not the
text: values are the notebook's, and equation numbers are missing. The notebook uses sharpened probabilities as logits
of the cross-entropy, and computes the entropy of a softmax of a softmax; we use the probabilities directly.

Our version, because images have several labels and a site annotates some classes: each class has two outcomes, present
and absent, so softmax becomes sigmoid, and sharpening divides the logit. By default, classes that a site does not
annotate count as absent, which makes missing labels wrong ones, as in FedMLP's comparison; ``missing = "masked"`` omits
them from the cross-entropy. Distance and entropy need no labels and use all classes. The two views are the stored image
and a view by the experiment's ``[augmentation]``; without augmentation only sharpening has an effect. FedMLP's authors
weigh positives by images over positives, counted with labels that the site does not have; we use the site's own counts.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from polyclinic.common.models.network import Model
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.losses import Missing, compute_positive_weights, fill_missing_labels, partial_loss
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.local.stages import RoundDefault, Stage, make_share_of_rounds
from polyclinic.strategies.methods.base import Method, make_method


class FedLSRParameters(Parameters):
    """The ``[method]`` table of ``fedlsr``. gamma is the weight of the distance between two views' predictions.

    Attributes:
        distance_weight: The largest value of gamma.
        ramp_rounds: Rounds over which gamma grows: a fifth of all rounds in the authors' notebook, 40 in FedMLP's code.
            If the experiment gives none, a fifth of the run's rounds, at most 40.
        sharpening_temperature: T_s, which sharpens the mixed predictions.
        distillation_temperature: T_d, the temperature of both predictions in their distance.
        entropy_weight: Weight of the entropy: 0 is FedLSR; the notebook's FedLSR+ uses 0.6.
        missing: How the loss treats classes that a site does not annotate.
        balanced: True to weigh the positive labels of a class by the site's ratio ``known labels / positives`` of the
            class.
    """

    round_defaults: ClassVar[Mapping[str, RoundDefault]] = {
        "ramp_rounds": make_share_of_rounds("a fifth", 1, 5, most=40)
    }
    weighting: Weighting = "samples"
    distance_weight: float = Field(0.4, ge=0)
    ramp_rounds: int = Field(40, ge=0)
    sharpening_temperature: float = Field(1 / 2, gt=0)
    distillation_temperature: float = Field(1 / 3, gt=0)
    entropy_weight: float = Field(0.0, ge=0)
    missing: Missing = "negative"
    balanced: bool = True

    def list_stages(self) -> tuple[Stage, ...]:
        """Return the round in which the distance between views has its largest weight."""
        if not self.distance_weight:
            return ()
        event = "the distance between views reaches its weight"
        return (Stage(event, self.ramp_rounds + 1, ("ramp_rounds",), "ramp_rounds = 0"),)


def mix_view_predictions(first_logits: Tensor, second_logits: Tensor, share: Tensor) -> Tensor:
    """Return the logits of the probabilities ``share * first + (1 - share) * second``, of any shape."""
    first = share.log()
    second = (1 - share).log()
    present = torch.logaddexp(logsigmoid(first_logits) + first, logsigmoid(second_logits) + second)
    absent = torch.logaddexp(logsigmoid(-first_logits) + first, logsigmoid(-second_logits) + second)
    return present - absent


def jensen_shannon_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of two views' logits ``(batch, rows)`` in nats, averaged over entries."""
    divergence = first.new_zeros(())
    for sign in (1, -1):  # present, absent
        log_p, log_q = logsigmoid(sign * first), logsigmoid(sign * second)
        log_mean = torch.logaddexp(log_p, log_q) - math.log(2)
        divergence = divergence + (log_p.exp() * (log_p - log_mean) + log_q.exp() * (log_q - log_mean)).mean() / 2
    return divergence


def compute_mean_prediction_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the predictions in nats, averaged over the entries."""
    return -sum((logsigmoid(side).exp() * logsigmoid(side)).mean() for side in (logits, -logits))  # type: ignore[return-value]


def compute_view_distance_weight(finished: int, rounds: int) -> float:
    """Return gamma as a fraction of its largest value: 0 in round 1, growing to 1 after ``rounds`` finished rounds."""
    return min(1.0, finished / rounds) if rounds else 1.0


class FedLSRSite(SiteMethod):
    """The hospital's half of FedLSR: training on a mixture of two views, with a penalty on differing predictions."""

    traits = MethodTraits(
        "fedlsr",
        parameters_class=FedLSRParameters,
        supports_multi_class=False,
        reason_against_segmentation="it mixes two views of an image, whose pixels do not lie in one place",
        allows_other_loss=False,
    )
    parameters: FedLSRParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: cross-entropy of the sharpened mixture plus the distance between both views."""
        parameters = self.parameters
        weight = compute_positive_weights(context.examples.labels) if parameters.balanced else None
        gamma = parameters.distance_weight * compute_view_distance_weight(context.round - 1, parameters.ramp_rounds)

        def objective(model: Model, batch: Batch) -> Tensor:
            original = batch.logits(model, batch.images.float())
            augmented = batch.logits(model, batch.view())
            share = torch.rand((), generator=batch.generator).to(original)  # Beta(1, 1)
            sharpened = mix_view_predictions(original, augmented, share) / parameters.sharpening_temperature
            cooled = [view / parameters.distillation_temperature for view in (original, augmented)]
            disorder = (compute_mean_prediction_entropy(original) + compute_mean_prediction_entropy(augmented)) / 2
            targets = fill_missing_labels(batch.labels, batch.annotated, parameters.missing)
            supervised = partial_loss(sharpened, targets, batch.annotated, weight)
            return supervised + gamma * jensen_shannon_divergence(*cooled) + parameters.entropy_weight * disorder

        return LocalRound(objective)


FedLSR = make_method(Method, FedLSRSite)
"""The coordinator's half, with the rules of FedAvg."""
