"""The site's half: the loss that the coordinator's strategy needs, for the user's own training loop."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from common.config import TrainingSection
from common.models.network import Model
from common.wire.records import Arrays
from polyclinic.flower.checks import pack_arrays, suggest_layer, unpack_arrays
from strategies.local.objective import ClientContext, Examples
from strategies.local.site_method import SiteMethod
from strategies.methods import baselines, fedmlp, fedsld, surgical, unifed

CLASSES, ANNOTATED, TASK = "polyclinic-classes", "polyclinic-annotated", "polyclinic-task"
METHOD, PARAMETERS = "polyclinic-method", "polyclinic-parameters"
HEAD, START = "polyclinic-head", "polyclinic-start"
"""Keys of the ``ConfigRecord`` that a strategy sends: last of all the name of the model's last layer and a mark of this
start, for tags of another start are not used."""
STATISTICS = "polyclinic-statistics"
"""Name of the record with a method's statistics, in messages and replies."""
TAGS = "polyclinic-fedmlp"
"""Name of the record with FedMLP's tags, in a site's state."""

_METHODS: dict[str, type[SiteMethod]] = {
    kind.name: kind
    for kind in (
        baselines.PartialLossSite,
        baselines.VanillaSite,
        fedmlp.FedMLPSite,
        fedsld.FedSLDSite,
        surgical.SurgicalSite,
        unifed.SequentialTrainingSite,
        unifed.UniFedSite,
    )
}


def require_tensor(name: str, value: object) -> Tensor:
    """Return a value that must be a tensor.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}: use torch.as_tensor({name})")
    return value


class Site:
    """The part of a round that the coordinator sent this site with the model.

    Args:
        message: The message that the ``ClientApp``'s ``train`` or ``evaluate`` function got.

    Raises:
        ValueError: If no strategy of :mod:`polyclinic.flower` sent it.

    Attributes:
        classes: Names of the head's rows, in their order.
        annotated: Which of them this site labels, bool ``(classes,)``.
        method: The hospital's half of the coordinator's method.
    """

    def __init__(self, message: Message) -> None:
        records = message.content.config_records
        self._config: dict[str, Any] = next((dict(record) for record in records.values() if CLASSES in record), {})
        if not self._config:
            raise ValueError("the message has no labels: a strategy of polyclinic.flower did not send it")
        self.classes: tuple[str, ...] = tuple(self._config[CLASSES])
        self.annotated = torch.tensor(self._config[ANNOTATED], dtype=torch.bool)
        kind = _METHODS[self._config[METHOD]]
        parameters = kind.table.model_validate_json(self._config[PARAMETERS])
        self.method = kind(parameters.model_dump(), self._config[TASK])
        self._statistics: Arrays = unpack_arrays(records.get(STATISTICS, ConfigRecord()))

    def targets(self, targets: Tensor) -> Tensor:
        """Return targets in the form that the losses need: NaN where this site does not label the class.

        Args:
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown.

        Raises:
            TypeError: For what is no tensor.
            ValueError: For another shape or value, an image of two classes that exclude one another, or of none of them
                where this site labels all.
        """
        rows, shape = len(self.classes), tuple(require_tensor("targets", targets).shape)
        if len(shape) != 2 or shape[1] != rows:
            one_hot = f"; for numbers of classes use torch.nn.functional.one_hot(targets, {rows})"
            expected, hint = (shape[0] if shape else 0, rows), one_hot if len(shape) == 1 else ""
            raise ValueError(f"targets must be (batch, classes), {expected} here, got {shape}{hint}")
        annotated = self.annotated.to(targets.device)
        labelled = torch.where(annotated, targets.float(), torch.nan)
        if (wrong := labelled[~((labelled == 0) | (labelled == 1) | labelled.isnan())]).numel():
            raise ValueError(f"targets must be 1, 0, or NaN for unknown, got {wrong[0].item():g}")
        if self.method.task == "multi_class":
            if int(most := (labelled == 1).sum(dim=1).max() if len(labelled) else 0) > 1:
                raise ValueError(f"classes exclude one another (task multi_class), got an image of {int(most)} classes")
            if (nothing := int((labelled == 0).all(dim=1).sum())) and annotated.all():
                raise ValueError(f"{nothing} images show no class (task multi_class): mark an unknown class by NaN")
        return labelled

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one batch, a scalar: that of the coordinator's method, over the site's own classes.

        Args:
            logits: ``(batch, classes)``, in the order of :attr:`classes`.
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown, in the order of :attr:`classes`, not in that of
                this site's ``SiteLabels``; what stands in columns of other classes is ignored.

        Raises:
            TypeError: For what is no tensor.
            ValueError: For targets as in :meth:`targets`, for logits of another shape, and under ``FedSLD`` for labels
                that the counts of all sites rule out.
        """
        if require_tensor("logits", logits).ndim != 2 or logits.shape[1] != len(self.classes):
            raise ValueError(f"logits must be (batch, {len(self.classes)}), got {tuple(logits.shape)}")
        if require_tensor("targets", targets).ndim == 2 and len(targets) != len(logits):
            shape = tuple(logits.shape)
            raise ValueError(f"targets must be (batch, classes), {shape} here, got {tuple(targets.shape)}")
        labelled, annotated = self.targets(targets), self.annotated.to(logits.device)
        if "prior" in self._statistics:
            self._refuse_uncounted(labelled)
        loss = self.method.local_loss(self._statistics, Examples(logits, labelled, annotated), TrainingSection())
        return loss(logits, labelled, annotated)

    def _refuse_uncounted(self, labelled: Tensor) -> None:
        """Refuse labels that the counts of all sites rule out: FedSLD would give them the weight zero.

        Raises:
            ValueError: With the classes.
        """
        prior = torch.from_numpy(self._statistics["prior"]).to(labelled.device)
        uncounted = {"positives": ((labelled == 1) & (prior == 0)).any(dim=0)}
        if self.method.task == "multi_label":
            uncounted["negatives"] = ((labelled == 0) & (prior == 1)).any(dim=0)
        for sign, columns in uncounted.items():
            if names := [name for name, is_wrong in zip(self.classes, columns.tolist(), strict=True) if is_wrong]:
                raise ValueError(f"targets hold {sign} of {names}, of which the sites' SiteLabels count none")


class FedMLPSite(Site):
    """One round of FedMLP at a site, for the user's own training loop.

    Make it after the received model was loaded and before training; it copies the model as the teacher. In the second
    stage it tags images; tags last from round to round in Flower's ``context.state``, on the site's side, by the places
    of images: give the same images in the same order in every round of a start. Others are refused.

    Args:
        message: The message that the ``ClientApp``'s ``train`` function got.
        context: The context that the same function got.
        model: A module with the received model loaded.
        head: Name of its last layer, a submodule.
        images: All training images as the model takes them, ``(n, ...)``, n at least 1, without augmentation, in one
            order.
        targets: ``(n, classes)`` of 1, 0, or NaN for unknown.

    Raises:
        TypeError: If images or targets are no tensors.
        ValueError: If the coordinator's strategy is another one, the model has no such layer or it is not the
            coordinator's head as received, targets do not fit, there is no image, or the images are not those of the
            rounds before.
    """

    def __init__(
        self, message: Message, context: Context, model: nn.Module, head: str, images: Tensor, targets: Tensor
    ) -> None:
        super().__init__(message)
        if not isinstance(self.method, fedmlp.FedMLPSite):
            raise ValueError("FedMLPSite needs the strategy FedMLP; the coordinator uses another: use Site")
        if len(require_tensor("images", images)) != len(require_tensor("targets", targets)):
            raise ValueError(f"{len(images)} images and {len(targets)} rows of targets")
        if not len(images):
            raise ValueError("a site without training images cannot take part: leave it out")
        self._context, self._marks = context, _compute_image_marks(images)
        self._model = HeadedModel(model, head, self.classes)
        self._model.refuse_other_head(message, self._config[HEAD])
        self._examples = Examples(images, self.targets(targets), self.annotated.to(images.device))
        server_round, tags = self._config["server-round"], self._stored_tags()
        self._round = self.method.client(
            ClientContext(self._model, self._examples, self._statistics, tags, server_round, TrainingSection())
        )
        self.views = 1 if server_round > self.method.parameters.stage_one_rounds else 2
        """How many augmented views of a batch :meth:`round_loss` takes: two in the first stage, one in the second."""

    def _stored_tags(self) -> Arrays:
        """Return the tags of this start's earlier rounds.

        Raises:
            ValueError: If they are of other images.
        """
        stored = self._context.state.config_records.get(TAGS, ConfigRecord())
        if stored.get(START) != self._config[START]:
            return {}
        arrays = unpack_arrays(stored)
        before = arrays["images"]
        if len(before) != len(self._marks):
            change = f"{len(self._marks)} images where there were {len(before)}"
        elif other := int((~np.isclose(before, self._marks, rtol=1e-4, atol=1e-6, equal_nan=True)).sum()):
            change = f"{other} of {len(before)} images differ"
        else:
            return {"tags": arrays["tags"]}
        raise ValueError(
            f"the images are not those of the round before, {change}: give the same images in the same order, without "
            f"augmentation; or forget the tags: del context.state[{TAGS!r}]"
        )

    def round_loss(self, rows: Tensor, *views: Tensor) -> Tensor:
        """Return the loss of one batch, a scalar.

        Args:
            rows: Places of the batch among ``images``, ``(batch,)``.
            views: :attr:`views` augmented views of these images, as the model takes them.

        Raises:
            TypeError: If a view is no tensor, or rows are no whole numbers.
            ValueError: If there is another number of views, or one has another number of images.
        """
        require_tensor("rows", rows)
        if any(not isinstance(view, Tensor) for view in views):
            raise TypeError("a view is a tensor of images: write round_loss(rows, *views)")
        if rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"rows must be whole numbers, (batch,), got {rows.dtype} {tuple(rows.shape)}")
        if len(views) != self.views:
            raise ValueError(f"this round takes {self.views} views of a batch, got {len(views)}")
        if other := [len(view) for view in views if len(view) != len(rows)]:
            raise ValueError(f"{len(rows)} rows and a view of {other[0]} images")
        examples = self._examples
        batch = BatchOfViews(rows, views[0], examples.labels[rows], examples.annotated, views=list(views))
        return self._round.objective(self._model, batch)

    def finish(self) -> dict[str, ConfigRecord]:
        """Store the tags for the next round; return what goes into the reply's ``RecordDict`` beside the model.

        The coordinator leaves out a reply without it. It is empty before the first stage's last round.
        """
        tags = pack_arrays({**self._round.method_state(self._model), "images": self._marks})
        self._context.state[TAGS] = ConfigRecord({**tags, START: self._config[START]})
        modes = [(module, module.training) for module in self._model.modules()]
        statistics = self._round.statistics(self._model, np.zeros(0, np.float32))
        for module, training in modes:  # statistics are taken in evaluation mode
            module.training = training
        return {STATISTICS: pack_arrays(statistics)}


def _compute_image_marks(images: Tensor) -> NDArray[np.float32]:
    """Return a number for each image ``(n,)`` that other images, and other orders of its pixels, rarely have."""
    ramp = torch.linspace(0, 1, max(images[0].numel(), 1), device=images.device)
    with torch.no_grad():
        parts = [part.flatten(1).float() @ ramp / len(ramp) for part in torch.split(images, 256)]
    return torch.cat(parts).cpu().numpy()


class HeadedModel(nn.Module):
    """Any classifier as a :class:`common.models.network.Model`: features, and a linear head on them."""

    frozen: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, head: str, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._name, self.class_names = model, head, class_names
        modules = dict(model.named_modules())
        layers = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if head not in modules:
            raise ValueError(
                f"the model has no layer {head!r}; its linear layers are {layers}.{suggest_layer(head, layers)}"
            )
        if head not in layers:
            raise ValueError(f"{head!r} is a {type(modules[head]).__name__}, not a torch.nn.Linear")

    @property
    def head(self) -> nn.Linear:
        """Return the last layer."""
        layer = self.model.get_submodule(self._name)
        assert isinstance(layer, nn.Linear), "checked when made"
        return layer

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes)``."""
        logits: Tensor = self.model(images)
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the last layer, ``(batch, features)``."""
        received = list[Tensor]()
        hook = self.head.register_forward_pre_hook(lambda module, inputs: received.append(inputs[0].detach()))
        try:
            self.model(images)
        finally:
            hook.remove()
        return received[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadedModel":
        return HeadedModel(copy.deepcopy(self.model, memo), self._name, self.class_names)

    def refuse_other_head(self, message: Message, head: str) -> None:
        """Raise if the layer is not the coordinator's head, as received.

        Raises:
            ValueError: With the reason.
        """
        key, weight = f"{head}.weight", self.head.weight.detach().cpu()
        (sent,) = (record[key].numpy() for record in message.content.array_records.values() if key in record)
        if not torch.equal(weight, torch.from_numpy(sent.copy()).to(weight.dtype)):
            raise ValueError(
                f"the weight of {self._name!r} is not the one of the coordinator's head {head!r}: it is another layer, "
                "or the received model was not loaded before FedMLPSite was made"
            )


@dataclass
class BatchOfViews:
    """A :class:`strategies.local.objective.Batch` whose views the user has drawn."""

    rows: Tensor
    images: Tensor
    labels: Tensor
    annotated: Tensor
    views: list[Tensor]
    generator: torch.Generator = torch.default_generator

    def view(self) -> Tensor:
        return self.views.pop(0)

    def logits(self, model: Model, view: Tensor) -> Tensor:
        return model(view).float()
