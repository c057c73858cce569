"""The site's half: the loss that the coordinator's strategy needs, for the user's own training loop."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from flwr.app import Message
from torch import Tensor

from common.models.zoo.spec import Task
from polyclinic.flower.keys import ANNOTATED, CLASSES, MISSING, PRIOR, REDUCTION, TASK
from strategies.local.losses import Missing, filled, loss_for
from strategies.methods.fedsld import WEIGHTED, Reduction


def tensor(name: str, given: object) -> Tensor:
    """What was given, if it is a tensor.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(given, Tensor):
        kind = type(given).__name__
        raise TypeError(f"{name} must be a torch.Tensor, got {kind}: use torch.as_tensor({name})")
    return given


class Site:
    """What the coordinator told this site with the model.

    Args:
        message: The message that the ``ClientApp``'s ``train`` or ``evaluate`` function got.

    Raises:
        ValueError: If no strategy of :mod:`polyclinic.flower` sent it.

    Attributes:
        classes: Names of the head's rows, in their order.
        annotated: Which of them this site labels, bool ``(classes,)``.
    """

    def __init__(self, message: Message) -> None:
        configs = message.content.config_records.values()
        config: Mapping[str, Any] = next((one for one in configs if CLASSES in one), {})
        if not config:
            raise ValueError("the message has no labels: a strategy of polyclinic.flower did not send it")
        self.classes = tuple(cast(list[str], config[CLASSES]))
        self.annotated = torch.tensor(cast(list[bool], config[ANNOTATED]), dtype=torch.bool)
        self._task, self._missing = cast(Task, config[TASK]), cast(Missing, config[MISSING])
        prior = config.get(PRIOR)
        self._prior = None if prior is None else torch.tensor(prior, dtype=torch.float32)
        self._reduction = cast(Reduction, config.get(REDUCTION, "sum_over_batch"))

    def targets(self, targets: Tensor) -> Tensor:
        """Targets as the losses take them: NaN where this site does not label the class.

        Args:
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown.

        Raises:
            TypeError: For what is no tensor.
            ValueError: For another shape or value, an image of two classes that exclude one another, or of none of them
                where this site labels all.
        """
        rows, shape = len(self.classes), tuple(tensor("targets", targets).shape)
        if len(shape) != 2 or shape[1] != rows:
            hint = (
                f"; for numbers of classes use torch.nn.functional.one_hot(targets, {rows})" if len(shape) == 1 else ""
            )
            expected = (shape[0] if shape else 0, rows)
            raise ValueError(f"targets must be (batch, classes), {expected} here, got {shape}{hint}")
        annotated = self.annotated.to(targets.device)
        known = torch.where(annotated, targets.float(), torch.nan)
        if (wrong := known[~((known == 0) | (known == 1) | known.isnan())]).numel():
            raise ValueError(f"targets must be 1, 0, or NaN for unknown, got {wrong[0].item():g}")
        if self._task == "multi_class" and int(most := (known == 1).sum(dim=1).max() if len(known) else 0) > 1:
            raise ValueError(f"classes exclude one another (task multi_class), got an image of {int(most)} classes")
        if self._task == "multi_class" and (nothing := int((known == 0).all(dim=1).sum())) and annotated.all():
            raise ValueError(
                f"{nothing} images show none of the classes, and this site labels all of them (task multi_class): "
                "mark an image of unknown class by NaN"
            )
        return known

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch, a scalar: that of the coordinator's strategy, over the classes that this site labels.

        Args:
            logits: ``(batch, classes)``, in the order of :attr:`classes`.
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown, in the order of :attr:`classes`, not in that of
                this site's ``SiteLabels``; what stands in columns of other classes is ignored.

        Raises:
            TypeError: For what is no tensor.
            ValueError: For targets as in :meth:`targets`, for logits of another shape, and under ``FedSLD`` for labels
                that the counts of all sites rule out.
        """
        if tensor("logits", logits).ndim != 2 or logits.shape[1] != len(self.classes):
            raise ValueError(f"logits must be (batch, {len(self.classes)}), got {tuple(logits.shape)}")
        if tensor("targets", targets).ndim == 2 and len(targets) != len(logits):
            shape = tuple(logits.shape)
            raise ValueError(f"targets must be (batch, classes), {shape} here, got {tuple(targets.shape)}")
        known, annotated = self.targets(targets), self.annotated.to(logits.device)
        if self._prior is None:
            return loss_for(self._task, self._missing)(logits, known, annotated)
        self._counted(known)
        labels = filled(known, annotated, self._missing)
        return WEIGHTED[self._task](logits, labels, self._prior.to(logits.device), self._reduction)

    def _counted(self, known: Tensor) -> None:
        """Refuse labels that no site counted: they would weigh nothing, and the class be trained on the others only."""
        prior = cast(Tensor, self._prior).to(known.device)
        wrong = {"positives": ((known == 1) & (prior == 0)).any(dim=0)}
        if self._task == "multi_label":
            wrong["negatives"] = ((known == 0) & (prior == 1)).any(dim=0)
        for sign, columns in wrong.items():
            if names := [name for name, there in zip(self.classes, columns.tolist(), strict=True) if there]:
                raise ValueError(
                    f"targets hold {sign} of {names}, of which the sites' SiteLabels count none: "
                    "positives must count the training images that show each class"
                )
