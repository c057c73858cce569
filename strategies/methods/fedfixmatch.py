"""FedFixMatch: FixMatch at every site and FedAvg at the coordinator; a comparator in FedMLP's tables.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.

The paper's method. Labelled images: cross-entropy of a weakly augmented view (eq. 3). Unlabelled images: if the model's
prediction for the weak view is confident, it becomes the pseudo-label of a strongly augmented view (eq. 4; RandAugment
and Cutout, see :mod:`polyclinic.data.images.augmentation`), without a gradient. The loss is the first term plus
the weighted second term, which is divided by all unlabelled entries, confident or not.

Our version, because images have several labels and a site annotates some classes. An *entry* is one class of one image;
entries of classes that a site does not annotate are its unlabelled ones. So one batch serves both terms (the paper's mu
is 1). Confidence applies to each class separately, with sigmoid instead of softmax: present if the probability is at
least ``confidence``, absent if it is at most ``1 - confidence``. An unknown label of an annotated class is in neither
term. The experiment's ``[augmentation]`` makes the weak views.

FedMLP's authors weigh positives by images over positives, counted with labels that the site does not have; we use the
site's own counts. They use thresholds of 0.8 and 0.2, and only images with confident predictions for all classes; ours
is 0.95 for each entry.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from polyclinic.common.models.network import Model
from polyclinic.data.images.augmentation import augment_images_strongly
from polyclinic.strategies.aggregation.means import Weighting
from polyclinic.strategies.local.losses import compute_positive_weights, partial_loss
from polyclinic.strategies.local.method_traits import MethodTraits, Parameters
from polyclinic.strategies.local.objective import Batch, ClientContext, LocalRound
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, make_method


class FedFixMatchParameters(Parameters):
    """The ``[method]`` table of ``fedfixmatch``. An entry is one class of one image.

    Attributes:
        confidence: The paper's tau: an entry counts as present if its probability is at least ``confidence``, and as
            absent if it is at most ``1 - confidence``.
        unlabelled_weight: The paper's lambda_u: weight of the loss of entries without labels.
        balanced: True to weigh the positive labels of a class by the site's ratio ``known labels / positives`` of the
            class.
    """

    weighting: Weighting = "samples"
    confidence: float = Field(0.95, gt=0.5, lt=1)
    unlabelled_weight: float = Field(1.0, ge=0)
    balanced: bool = True


def assign_confident_pseudo_labels(weak: Tensor, confidence: float) -> Tensor:
    """Return pseudo-labels without gradient: 1 or 0 if the model is confident, otherwise NaN.

    Args:
        weak: Logits of the weakly augmented view, ``(batch, unlabelled classes)``.
    """
    probabilities = weak.sigmoid()
    sure = torch.maximum(probabilities, 1 - probabilities) >= confidence
    return torch.where(sure, (probabilities > 0.5).to(weak.dtype), torch.nan)


def compute_unlabelled_loss(strong: Tensor, pseudo: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of strong views with pseudo-labels, divided by the number of all entries (eq. 4).

    Args:
        strong: Logits of the strongly augmented views, ``(batch, unlabelled classes)``.
        pseudo: Pseudo-labels of the same shape; an entry with NaN adds 0 to the sum.
        positive_weight: Weight of each class's positives ``(classes,)``; None for 1.
    """
    targets = pseudo.nan_to_num()
    entries = binary_cross_entropy_with_logits(strong, targets, pos_weight=positive_weight, reduction="none")
    return torch.where(pseudo.isnan(), 0.0, entries).sum() / pseudo.numel()


class FedFixMatchSite(SiteMethod):
    """The hospital's half of FedFixMatch: FixMatch for each class separately."""

    traits = MethodTraits(
        "fedfixmatch",
        parameters_class=FedFixMatchParameters,
        supports_volumes=False,  # RandAugment and Cutout change pictures
        supports_multi_class=False,
        reason_against_segmentation="it compares two views of an image, whose pixels do not lie in one place",
        allows_other_loss=False,
    )
    parameters: FedFixMatchParameters

    def make_round(self, context: ClientContext) -> LocalRound:
        """Return the local round: it trains on labels with the weak view, on pseudo-labels with the strong view."""
        parameters = self.parameters
        weight = compute_positive_weights(context.examples.labels) if parameters.balanced else None

        def objective(model: Model, batch: Batch) -> Tensor:
            weak = batch.logits(model, batch.view())
            labelled = partial_loss(weak, batch.labels, batch.annotated, weight)
            if batch.annotated.all():
                return labelled
            strong = batch.logits(model, augment_images_strongly(batch.view(), batch.generator))
            pseudo = assign_confident_pseudo_labels(weak[:, ~batch.annotated], parameters.confidence)
            unlabelled = compute_unlabelled_loss(strong[:, ~batch.annotated], pseudo)
            return labelled + parameters.unlabelled_weight * unlabelled

        return LocalRound(objective)


FedFixMatch = make_method(Method, FedFixMatchSite)
"""The coordinator's half, with the rules of FedAvg."""
