"""FedLSR: local self-regularisation against wrong labels; one of the comparators of FedMLP's tables.

Jiang, Sun, Wang, Liu: "Towards Federated Learning against Noisy Labels via Local Self-Regularization", CIKM 2022.
Letters: T_s is the temperature of sharpening, T_d that of distillation, gamma the weight of the distance of two views.

The paper's, at every site, beside FedAvg. Implicit: the model's predictions of an image and of an augmented view of it
are mixed, in a proportion drawn from Beta(1, 1) for each batch, sharpened (p to the power 1 / T_s, normalised), and
it is these that cross-entropy compares with the label. Explicit, self-distillation: the Jensen-Shannon distance of both
predictions, at temperature T_d, times gamma, which grows linearly over the first rounds. The discussion's FedLSR+
adds the entropy of the predictions. We had the abstract and the authors' published notebook, not the text: values are
the notebook's, and equation numbers are missing. There the library's cross-entropy takes the sharpened probabilities
for logits, and the entropy is one of a softmax of a softmax; we take both of the probabilities as they are.

Ours, for several labels an image of which a site annotates some: each class is a distribution of two, present and
absent, so softmax becomes a sigmoid, whose sharpening is a division of its logit. What a site does not annotate counts
as absent by default: FedMLP's authors compare methods against noisy labels because that makes missing labels wrong
ones; ``missing = "masked"`` leaves them out of cross-entropy. The distance and the entropy need no label and run
over all classes. The original is the image as it lies, the view is one of the experiment's ``[augmentation]``; without
any both are the same, and sharpening is all that remains. FedMLP's authors weigh positives by images over positives,
counted for all classes from labels that the site does not have; we weigh by the site's own counts.
"""

import math

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.models.network import Model
from strategies.aggregation.means import Weighting
from strategies.local.losses import Missing, compute_positive_weights, fill_missing_labels, partial_loss
from strategies.local.objective import Batch, ClientContext, LocalRound
from strategies.local.site_method import Parameters, SiteMethod
from strategies.methods.base import Method


class FedLSRParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        distance_weight: The highest value of gamma.
        ramp_rounds: Rounds over which gamma grows: a fifth of all in the authors' notebook; FedMLP's authors take 40.
        sharpening_temperature: T_s, which sharpens the mixed predictions.
        distillation_temperature: T_d, the temperature of both predictions in their distance.
        entropy_weight: Weight of the entropy: 0 is FedLSR; the notebook's FedLSR+ has 0.6.
        missing: How a class counts that a site does not annotate.
        balanced: True to weigh positive labels by the site's known labels of their class divided by its positives.
    """

    weighting: Weighting = "samples"
    distance_weight: float = Field(0.4, ge=0)
    ramp_rounds: int = Field(40, ge=0)
    sharpening_temperature: float = Field(1 / 2, gt=0)
    distillation_temperature: float = Field(1 / 3, gt=0)
    entropy_weight: float = Field(0.0, ge=0)
    missing: Missing = "negative"
    balanced: bool = True


def mix_predictions(first_logits: Tensor, second_logits: Tensor, share: Tensor) -> Tensor:
    """Return the logits of ``share`` times the first probabilities plus ``1 - share`` times the second; any shape."""
    first, second = share.log(), (1 - share).log()
    present = torch.logaddexp(logsigmoid(first_logits) + first, logsigmoid(second_logits) + second)
    absent = torch.logaddexp(logsigmoid(-first_logits) + first, logsigmoid(-second_logits) + second)
    return present - absent


def jensen_shannon_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of two predictions of each entry, in nats, as a mean over the entries.

    Args:
        first: Logits of one view ``(batch, rows)``.
        second: Logits of the other view.
    """
    divergence = first.new_zeros(())
    for sign in (1, -1):  # present, absent
        log_p, log_q = logsigmoid(sign * first), logsigmoid(sign * second)
        log_mean = torch.logaddexp(log_p, log_q) - math.log(2)
        divergence = divergence + (log_p.exp() * (log_p - log_mean) + log_q.exp() * (log_q - log_mean)).mean() / 2
    return divergence


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the entries, in nats."""
    return -sum((logsigmoid(side).exp() * logsigmoid(side)).mean() for side in (logits, -logits))  # type: ignore[return-value]


def distance_weight_share(finished: int, rounds: int) -> float:
    """Return the share of gamma's highest value: it grows from 0 in round 1 to 1 after ``rounds`` finished rounds."""
    return min(1.0, finished / rounds) if rounds else 1.0


class FedLSRSite(SiteMethod):
    """The hospital's half of FedLSR: it trains on a mixture of two views and keeps their predictions alike."""

    name = "fedlsr"
    table = FedLSRParameters
    parameters: FedLSRParameters
    chooses_loss = False
    multi_class = False

    def client(self, context: ClientContext) -> LocalRound:
        """Return a round on the cross-entropy of the sharpened mixture and the distance of both views."""
        parameters = self.parameters
        weight = compute_positive_weights(context.examples.labels) if parameters.balanced else None
        gamma = parameters.distance_weight * distance_weight_share(context.round - 1, parameters.ramp_rounds)

        def objective(model: Model, batch: Batch) -> Tensor:
            original = batch.logits(model, batch.images.float())
            augmented = batch.logits(model, batch.view())
            share = torch.rand((), generator=batch.generator).to(original)  # Beta(1, 1)
            sharpened = mix_predictions(original, augmented, share) / parameters.sharpening_temperature
            cooled = [view / parameters.distillation_temperature for view in (original, augmented)]
            disorder = (mean_entropy(original) + mean_entropy(augmented)) / 2
            targets = fill_missing_labels(batch.labels, batch.annotated, parameters.missing)
            supervised = partial_loss(sharpened, targets, batch.annotated, weight)
            return supervised + gamma * jensen_shannon_divergence(*cooled) + parameters.entropy_weight * disorder

        return LocalRound(objective)


class FedLSR(Method):
    """FedAvg; each site trains on a mixture of two views, and keeps both views' predictions alike."""

    site_class = FedLSRSite
