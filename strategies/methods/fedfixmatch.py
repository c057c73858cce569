"""FedFixMatch: FixMatch at every site, with FedAvg; one of the comparators of FedMLP's tables.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.

The paper's: cross-entropy of a weakly augmented view where there is a label (eq. 3); where there is none, what the
model says of the weak view, if surely enough, is the label of a strongly augmented view (eq. 4), RandAugment and
Cutout as in :mod:`common.data.images.augmentation`; no gradient through the pseudo-label; the sum of both terms, the
second weighted. The second is divided by all unlabelled entries, also those that were not sure.

Ours, for several labels an image of which a site annotates some: labelled or not is an entry, not an image. The entries
of classes that a site does not annotate are its unlabelled ones, so every image is in both terms. Each class is sure by
itself: present from the confidence on, absent up to one minus it, with sigmoids for softmax. One batch serves both
terms (the paper's ratio of unlabelled to labelled images, mu, is 1). A label that nobody knows, of a class that the
site does annotate, stays out of both. The weak views are those of the experiment's ``[augmentation]``.

FedMLP's authors weigh positives by images over positives, counted for all classes from labels that the site does not
have; we weigh the labelled entries by the site's own counts. Theirs takes 0.8 and 0.2 for sure, and only images of
which every class is; ours is 0.95, entry by entry.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from common.data.images.augmentation import augment_strongly
from common.models.network import Model
from strategies.aggregation.means import Weighting
from strategies.local.losses import compute_positive_weights, partial_loss
from strategies.local.objective import Batch, ClientContext, LocalRound
from strategies.local.site_method import Parameters, SiteMethod
from strategies.methods.base import Method


class FedFixMatchParameters(Parameters):
    """The ``[method]`` table.

    Attributes:
        confidence: The paper's tau: an entry of this probability or more counts as present, of one minus it or less
            as absent.
        unlabelled_weight: The paper's lambda_u: weight of the loss of entries without labels.
        balanced: True to weigh positive labels by the site's known labels of their class divided by its positives.
    """

    weighting: Weighting = "samples"
    confidence: float = Field(0.95, gt=0.5, lt=1)
    unlabelled_weight: float = Field(1.0, ge=0)
    balanced: bool = True


def assign_pseudo_labels(weak: Tensor, confidence: float) -> Tensor:
    """Return pseudo-labels: 1 or 0 where the model is sure, NaN elsewhere; no gradient goes through them.

    Args:
        weak: Logits of the weakly augmented view, ``(batch, unlabelled classes)``.
    """
    probabilities = weak.sigmoid()
    sure = torch.maximum(probabilities, 1 - probabilities) >= confidence
    return torch.where(sure, (probabilities > 0.5).to(weak.dtype), torch.nan)


def unlabelled_loss(strong: Tensor, pseudo: Tensor) -> Tensor:
    """Return the cross-entropy of the strong view's logits with the pseudo-labels, divided by all entries (eq. 4)."""
    entries = binary_cross_entropy_with_logits(strong, pseudo.nan_to_num(), reduction="none")
    return torch.where(pseudo.isnan(), 0.0, entries).sum() / pseudo.numel()


class FedFixMatchSite(SiteMethod):
    """The hospital's half of FedFixMatch: FixMatch, entry by entry."""

    name = "fedfixmatch"
    table = FedFixMatchParameters
    parameters: FedFixMatchParameters
    chooses_loss = False
    multi_class = False

    def client(self, context: ClientContext) -> LocalRound:
        """Return a round that trains labels on the weak view, and sure pseudo-labels on the strong view."""
        parameters = self.parameters
        weight = compute_positive_weights(context.examples.labels) if parameters.balanced else None

        def objective(model: Model, batch: Batch) -> Tensor:
            weak = batch.logits(model, batch.view())
            labelled = partial_loss(weak, batch.labels, batch.annotated, weight)
            if batch.annotated.all():
                return labelled
            strong = batch.logits(model, augment_strongly(batch.view(), batch.generator))
            pseudo = assign_pseudo_labels(weak[:, ~batch.annotated], parameters.confidence)
            return labelled + parameters.unlabelled_weight * unlabelled_loss(strong[:, ~batch.annotated], pseudo)

        return LocalRound(objective)


class FedFixMatch(Method):
    """FedAvg; each site runs FixMatch."""

    site_class = FedFixMatchSite
