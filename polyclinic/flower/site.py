"""The site's part of a strategy: the loss for the user's training loop."""

import contextlib
import json
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from polyclinic.common.config import TrainingSection
from polyclinic.common.wire.records import Arrays
from polyclinic.flower.records import pack_arrays, unpack_arrays
from polyclinic.strategies.local.objective import ClientContext, LabelledExamples
from polyclinic.strategies.local.training import MiniBatch
from polyclinic.strategies.methods import fedmlp
from polyclinic.strategies.registry import STRATEGIES

# Keys of the ``ConfigRecord`` that a strategy sends to a site.
CLASSES_KEY = "polyclinic-classes"
ANNOTATED_KEY = "polyclinic-annotated"
TASK_KEY = "polyclinic-task"
METHOD_KEY = "polyclinic-method"
PARAMETERS_KEY = "polyclinic-parameters"
HEAD_KEY = "polyclinic-head"
START_KEY = "polyclinic-start"
"""Key of a random text that identifies a run of the strategy, so that FedMLP's tags of an earlier run are not used."""
STATISTICS_RECORD = "polyclinic-statistics"
"""Name of the record with a method's statistics, in messages and replies."""
TAGS_RECORD = "polyclinic-fedmlp"
"""Name of the record with FedMLP's tags, in the state of a site."""


class Site:
    """A site's view of one round: the classes that it labels, and the loss of the coordinator's method.

    Args:
        message: The message that the ``ClientApp``'s ``train`` or ``evaluate`` function received.

    Raises:
        ValueError: If the message does not come from a strategy of :mod:`polyclinic.flower`.

    Attributes:
        classes: Names of the head's rows, in order.
        annotated: bool ``(classes,)``, True for each class that this site labels.
        method: The site's half of the coordinator's method.
    """

    def __init__(self, message: Message) -> None:
        records = message.content.config_records
        self._config: dict[str, Any] = next((dict(record) for record in records.values() if CLASSES_KEY in record), {})
        if not self._config:
            raise ValueError("the message has no labels: a strategy of polyclinic.flower did not send it")
        self.classes: tuple[str, ...] = tuple(self._config[CLASSES_KEY])
        self.annotated = torch.tensor(self._config[ANNOTATED_KEY], dtype=torch.bool)
        site_class = STRATEGIES[self._config[METHOD_KEY]].site_class
        self.method = site_class(json.loads(self._config[PARAMETERS_KEY]), self._config[TASK_KEY])
        self._statistics: Arrays = unpack_arrays(records[STATISTICS_RECORD]) if STATISTICS_RECORD in records else {}

    def targets(self, targets: Tensor) -> Tensor:
        """Return a copy of the targets with NaN for every class that this site does not label.

        Raises:
            ValueError: If the shape is not ``(batch, classes)``, a value is not 1, 0 or NaN (unknown), or an image has
                two classes in a ``multi_class`` task.
        """
        shape, rows = tuple(targets.shape), len(self.classes)
        if len(shape) != 2 or shape[1] != rows:
            raise ValueError(f"targets must be (batch, classes), (batch, {rows}) here, got {shape}")
        labelled = torch.where(self.annotated.to(targets.device), targets.float(), torch.nan)
        if (wrong := labelled[~((labelled == 0) | (labelled == 1) | labelled.isnan())]).numel():
            raise ValueError(f"targets must be 1, 0, or NaN for unknown, got {wrong[0].item():g}")
        if self.method.task == "multi_class" and ((labelled == 1).sum(dim=1) > 1).any():
            raise ValueError("classes exclude one another (task multi_class), got an image of several classes")
        return labelled

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one batch, as the coordinator's method defines it, a scalar.

        The method decides if classes that this site does not label are ignored or count as negative.

        Args:
            logits: ``(batch, classes)``, in the order of :attr:`classes`.
            targets: ``(batch, classes)`` of 1, 0, or NaN for unknown, in the order of :attr:`classes` (not of this
                site's ``SiteLabels``). Columns of classes that this site does not label are ignored.

        Raises:
            ValueError: If the targets are invalid (:meth:`targets`), or their shape differs from the logits' shape.
                With ``FedSLD`` also if they contradict the image counts of all sites.
        """
        labelled, annotated = self.targets(targets), self.annotated.to(logits.device)
        if logits.shape != targets.shape:
            raise ValueError(f"logits and targets differ in shape: {tuple(logits.shape)}, {tuple(targets.shape)}")
        if "prior" in self._statistics:  # FedSLD would give such a label the weight zero
            prior = torch.from_numpy(self._statistics["prior"]).to(labelled.device)
            uncounted = (labelled == 1) & (prior == 0)
            if self.method.task == "multi_label":
                uncounted |= (labelled == 0) & (prior == 1)
            if names := [self.classes[column] for column in uncounted.any(dim=0).nonzero().flatten()]:
                raise ValueError(f"targets hold labels of {names}, of which the sites' SiteLabels count none")
        examples = LabelledExamples(logits, labelled, annotated)
        return self.method.local_loss(self._statistics, examples, TrainingSection())(logits, labelled, annotated)


class FedMLPSite(Site):
    """One round of FedMLP at a site, for the user's own training loop.

    Create the object after loading the received model and before training, because it copies the model as the teacher.
    In the second stage it assigns tags (pseudo-labels) to images. The tags are stored by image index in Flower's
    ``context.state`` at the site. Therefore pass the same images in the same order in every round.

    Args:
        message: The message that the ``ClientApp``'s ``train`` function received.
        context: The context that the ``train`` function received.
        model: A module into which the received model has been loaded.
        head: Name of the model's last layer, a submodule.
        images: All training images without augmentation, at least one, as inputs of the model, ``(n, ...)``.
        targets: ``(n, classes)`` of 1, 0, or NaN for unknown.

    Raises:
        ValueError: If the coordinator uses another strategy, or the model, targets or images are invalid.

    Attributes:
        views: Number of augmented views of a batch that :meth:`round_loss` needs: two in the first stage, one in the
            second stage.
    """

    def __init__(
        self, message: Message, context: Context, model: nn.Module, head: str, images: Tensor, targets: Tensor
    ) -> None:
        super().__init__(message)
        if not isinstance(self.method, fedmlp.FedMLPSite):
            raise ValueError("FedMLPSite needs the strategy FedMLP; the coordinator uses another: use Site")
        if not len(images) == len(targets) > 0:
            numbers = f"{len(images)} images and {len(targets)} rows of targets"
            raise ValueError(f"{numbers}; a site without training images cannot take part")
        # A fingerprint for each image, (n,): images with different pixels almost always have different numbers.
        ramp = torch.linspace(0, 1, max(images[0].numel(), 1), device=images.device)
        with torch.no_grad():
            parts = [part.flatten(1).float() @ ramp / len(ramp) for part in torch.split(images, 256)]
        self._context = context
        self._fingerprints = torch.cat(parts).cpu().numpy()
        self._model = HeadedModel(model, head, self.classes)
        weight = self._model.head.weight.detach().cpu()
        name = self._config[HEAD_KEY]
        key = f"{name}.weight"
        models = message.content.array_records.values()
        (received,) = (torch.from_numpy(model[key].numpy().copy()) for model in models if key in model)
        if not torch.equal(weight, received.to(weight.dtype)):
            reason = f"not that of the coordinator's head {name!r}: it is another layer"
            raise ValueError(f"the weight of {head!r} is {reason}, or the received model was not loaded before")
        self._examples = LabelledExamples(images, self.targets(targets), self.annotated.to(images.device))
        server_round = self._config["server-round"]
        tags = dict[str, NDArray[np.float32]]()
        stored = context.state.config_records.get(TAGS_RECORD, ConfigRecord())
        if stored.get(START_KEY) == self._config[START_KEY]:  # otherwise the tags are from an earlier run
            tags = unpack_arrays(stored)
            before = tags.pop("images")
            same_count = before.shape == self._fingerprints.shape
            if not same_count or not np.allclose(before, self._fingerprints, 1e-4, 1e-6, equal_nan=True):
                remedy = f"the same images in the same order; or forget the tags: del context.state[{TAGS_RECORD!r}]"
                raise ValueError(f"the images are not those of the round before: give {remedy}")
        self._round = self.method.make_round(
            ClientContext(self._model, self._examples, self._statistics, tags, server_round, TrainingSection())
        )
        self.views = 1 if server_round > self.method.parameters.stage_one_rounds else 2

    def round_loss(self, rows: Tensor, *views: Tensor) -> Tensor:
        """Return the loss of one batch as a scalar tensor.

        Args:
            rows: Indices of the batch's images in ``images``, ``(batch,)``.
            views: Augmented views of these images, as inputs of the model; their number is :attr:`views`.
        """
        if [len(view) for view in views] != [len(rows)] * self.views:
            raise ValueError(f"this round takes {self.views} views of a batch: write round_loss(rows, *views)")
        examples, drawn, plain = self._examples, iter(views), contextlib.nullcontext()
        labels, generator = examples.labels[rows], torch.default_generator
        batch = MiniBatch(rows, views[0], labels, examples.annotated, lambda images: next(drawn), plain, generator)
        return self._round.objective(self._model, batch)

    def finish(self) -> dict[str, ConfigRecord]:
        """Store the tags for the next round; return records that must be added to the reply's ``RecordDict``.

        Add them in every round, because the coordinator rejects a reply without them. Before the last round of the
        first stage, they are empty.
        """
        tags = pack_arrays({**self._round.method_state(self._model), "images": self._fingerprints})
        self._context.state[TAGS_RECORD] = ConfigRecord({**tags, START_KEY: self._config[START_KEY]})
        modes = [(module, module.training) for module in self._model.modules()]
        statistics = self._round.statistics(self._model, np.zeros(0, np.float32))
        for module, training in modes:  # computing the statistics has set evaluation mode
            module.training = training
        return {STATISTICS_RECORD: pack_arrays(statistics)}


class HeadedModel(nn.Module):
    """Adapts any classifier to the interface :class:`polyclinic.common.models.network.Model`.

    Args:
        model: The classifier.
        head: Name of its last layer, a dense layer.
        class_names: Names of that layer's rows.

    Raises:
        ValueError: If the classifier has no dense layer of this name.
    """

    frozen: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, head: str, class_names: tuple[str, ...]) -> None:
        super().__init__()
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if head not in layers:
            raise ValueError(f"the model has no torch.nn.Linear {head!r}; its linear layers are {list(layers)}")
        self.model, self.head, self.class_names = model, layers[head], class_names

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(batch, classes)``."""
        logits: Tensor = self.model(images)
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Return the inputs of the head, ``(batch, features)``."""
        head_inputs = list[Tensor]()
        with self.head.register_forward_pre_hook(lambda module, inputs: head_inputs.append(inputs[0].detach())):
            self.model(images)
        return head_inputs[-1]
