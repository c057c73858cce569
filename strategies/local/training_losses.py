"""The losses that ``[training]`` offers in the place of a method's plain one.

They are what a site minimises. Validation keeps the plain loss: it is compared between sites, rounds and runs.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from common.config import BY_STEP, TrainingSection
from common.errors import BadInput, Fault
from common.models.zoo.spec import Task
from common.plugins import LOSSES, PLUGIN, loaded
from strategies.local.losses import (
    Loss,
    Missing,
    class_of_known,
    filled,
    image_losses,
    only_known,
    positive_weights,
)


def chosen_loss(spec: TrainingSection, plain: Loss, task: Task, missing: Missing, labels: Tensor) -> Loss:
    """What a site minimises.

    Args:
        plain: The method's loss, for experiments that choose none.
        missing: What a class counts as that the site does not annotate.
        labels: Of the site's whole training part, ``(n, rows)``, NaN for unknown: ``class_weights`` counts them.

    Raises:
        BadInput: If a plug-in is named that is not installed, or does not return a scalar.
    """
    if spec.loss == "plain" and not spec.class_weights:
        return plain
    if spec.loss.startswith(PLUGIN):
        return partial(_of_plugin, spec.loss, loaded(LOSSES, spec.loss.removeprefix(PLUGIN)), missing)
    if task == "multi_class":
        return partial(_among_classes, spec, missing, class_weights(labels) if spec.class_weights else None)
    return partial(_by_entry, spec, missing, positive_weights(labels) if spec.class_weights else None)


def loss_faults(training: TrainingSection, task: Task, chooses_loss: bool, level: str) -> list[Fault]:
    """Where another loss than the method's plain one makes no sense.

    Args:
        chooses_loss: Whether the method lets ``[training]`` choose.
        level: Of differential privacy.
    """
    named = {"loss": training.loss != "plain", "class_weights": training.class_weights}
    chosen = [f"training.{key}" for key, is_set in named.items() if is_set]
    faults = []
    if not chooses_loss:
        problem = "makes no sense here: the method has a loss of its own."
        faults += [Fault(key, problem, "Leave it out.") for key in chosen]
    if level in BY_STEP and training.loss != "plain":
        problem = f'with privacy.level = "{level}" each image\'s plain loss is minimised.'
        faults.append(Fault("training.loss", problem, "Leave it out."))
    if level != "none" and training.class_weights:
        problem = "counts a site's images, and no noise covers that."
        faults.append(Fault("training.class_weights", problem, "Leave it out."))
    if training.loss == "asymmetric" and task == "multi_class":
        problem = "the asymmetric loss asks of each class by itself whether it is there; here classes exclude others."
        faults.append(Fault("training.loss", problem, 'Use "focal", or model.task = "multi_label".'))
    if training.loss.startswith(PLUGIN) and training.class_weights:
        problem = "a loss of a plug-in gets no weights: it would be left out in silence."
        faults.append(Fault("training.class_weights", problem, "Let the plug-in weigh, or leave it out."))
    return faults


def class_weights(labels: Tensor) -> Tensor:
    """Known images over the number of classes present and each class's images, ``(rows,)``; 1 for an absent class.

    The weights of all images of a site then add up to their number.

    Args:
        labels: A whole site's, ``(n, rows)``, 1 for an image's class.
    """
    images = (labels == 1).sum(dim=0)
    present = (images > 0).sum().clamp(min=1)
    return torch.where(images > 0, images.sum() / (present * images.clamp(min=1)), 1.0)


def _by_entry(
    spec: TrainingSection,
    missing: Missing,
    positive_weight: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    annotated: Tensor,
) -> Tensor:
    """Mean over the known entries of a multi-label task; a batch without any gives 0 and no gradient."""
    targets = filled(labels, annotated, missing)
    known, present = ~targets.isnan(), targets.nan_to_num()
    entries = _asymmetric(spec, logits, present) if spec.loss == "asymmetric" else _binary(spec, logits, present)
    if positive_weight is not None:
        entries = entries * torch.where(present > 0, positive_weight, 1.0)
    return torch.where(known, entries, 0.0).sum() / known.sum().clamp(min=1)


def _binary(spec: TrainingSection, logits: Tensor, present: Tensor) -> Tensor:
    """Binary cross-entropy; with ``focal``, times ``(1 - p_t) ** gamma`` (Lin et al., ICCV 2017, eq. 4)."""
    entries = binary_cross_entropy_with_logits(logits, present, reduction="none")
    return entries * (1 - torch.exp(-entries)) ** spec.focal_gamma if spec.loss == "focal" else entries


def _asymmetric(spec: TrainingSection, logits: Tensor, present: Tensor) -> Tensor:
    """Focal loss with an exponent for positives and one for negatives, whose probability is lowered by a margin.

    Ridnik et al., ICCV 2021, eq. 7; ``p_m = max(p - margin, 0)``.
    """
    of_positives, of_negatives = spec.asymmetric_gammas
    p = torch.sigmoid(logits)
    lowered = (p - spec.asymmetric_margin).clamp(min=0)
    positive = -((1 - p) ** of_positives) * logsigmoid(logits)
    negative = -(lowered**of_negatives) * torch.log1p(-lowered.clamp(max=1 - 1e-6))
    return torch.where(present > 0, positive, negative)


def _among_classes(
    spec: TrainingSection, missing: Missing, weights: Tensor | None, logits: Tensor, labels: Tensor, annotated: Tensor
) -> Tensor:
    """Weighted mean over the images whose class is known; cross-entropy, or focal loss of the class's probability."""
    losses = image_losses(only_known(logits, labels) if missing == "masked" else logits, labels)
    if spec.loss == "focal":
        losses = losses * (1 - torch.exp(-losses)) ** spec.focal_gamma
    known = class_of_known(labels)
    weighs = known.float() if weights is None else torch.where(known, weights[labels.nan_to_num().argmax(dim=1)], 0.0)
    return torch.where(known, losses * weighs, 0.0).sum() / weighs.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _of_plugin(name: str, loss: Loss, missing: Missing, logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    value = loss(logits, filled(labels, annotated, missing), annotated)
    if not isinstance(value, Tensor) or value.ndim != 0:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BadInput([Fault("training.loss", f'"{name}" returned {found}, not a scalar tensor.')])
    return value
