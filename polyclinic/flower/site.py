"""The site's half: the loss that the coordinator's strategy needs, for the user's own training loop."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from flwr.app import Message
from torch import Tensor

from common.models.zoo.spec import Task
from polyclinic.flower.keys import ANNOTATED, CLASSES, MISSING, PRIOR, REDUCTION, TASK
from strategies.fedsld.weights import WEIGHTED, Reduction
from strategies.local.losses import Missing, filled, loss_for


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
            ValueError: For another shape or value, or an image of two classes that exclude one another.
        """
        rows, shape = len(self.classes), tuple(targets.shape)
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
        return known

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch, a scalar: that of the coordinator's strategy, over the classes that this site labels.

        Args:
            logits: ``(batch, classes)``, in the order of :attr:`classes`.
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown; what stands in columns of other classes is
                ignored.

        Raises:
            ValueError: For targets as in :meth:`targets`, and for logits of another shape.
        """
        if logits.ndim != 2 or logits.shape[1] != len(self.classes):
            raise ValueError(f"logits must be (batch, {len(self.classes)}), got {tuple(logits.shape)}")
        if targets.ndim == 2 and len(targets) != len(logits):
            shape = tuple(logits.shape)
            raise ValueError(f"targets must be (batch, classes), {shape} here, got {tuple(targets.shape)}")
        known, annotated = self.targets(targets), self.annotated.to(logits.device)
        if self._prior is None:
            return loss_for(self._task, self._missing)(logits, known, annotated)
        labels = filled(known, annotated, self._missing)
        return WEIGHTED[self._task](logits, labels, self._prior.to(logits.device), self._reduction)
