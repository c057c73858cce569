"""The data types of a method's hospital half (batch, examples, context, local round), and tools for teacher models."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.common.config import TrainingSection
from polyclinic.common.models.network import Model, select_head_row_labels
from polyclinic.common.models.zoo.networks import is_batch_norm
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.records import NO_ARRAYS, Arrays
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.images.patches import PatchSampling
from polyclinic.data.images.pixels import ImageTensors, MaskTensors, make_mask_tensors
from polyclinic.strategies.local.losses import (
    LOSSES_OF_KNOWN_LABELS,
    LossFunction,
    softmax_loss_of_known_labels,
)

AnyModel = TypeVar("AnyModel", bound=Model)
Losses = NDArray[np.float32]
"""Losses of batches ``(batches,)``, in the order of training."""


class Batch(Protocol):
    """One mini-batch of a site's images, as passed to an objective."""

    @property
    def rows(self) -> Tensor:
        """Return the indices ``(batch,)`` of the images among the site's training examples."""

    @property
    def images(self) -> Tensor:
        """Return the images as stored, uint8 ``(batch, channels, height, width)``."""

    @property
    def labels(self) -> Tensor:
        """Return the labels ``(batch, rows)``, NaN for unknown; in segmentation ``(batch, rows, *spatial)``."""

    @property
    def annotated(self) -> Tensor:
        """Return a mask of the head rows whose class the site annotates, bool ``(rows,)``."""

    @property
    def generator(self) -> torch.Generator:
        """Return the CPU generator for an objective's own random numbers."""

    def view(self) -> Tensor:
        """Return a new randomly augmented view of the images, float32 ``(batch, channels, height, width)``.

        In segmentation each call returns the same view, the one that the labels belong to.
        """

    def logits(self, model: Model, view: Tensor) -> Tensor:
        """Return the model's logits for a view of the images, float32 ``(batch, rows[, *spatial])``."""


Objective = Callable[[Model, Batch], Tensor]
"""The function that a site minimises: model and batch -> scalar."""


def plain(loss: LossFunction) -> Objective:
    """Return the objective that applies a loss to the logits of one randomly augmented view of each image."""
    return lambda model, batch: loss(batch.logits(model, batch.view()), batch.labels, batch.annotated)


@dataclass(frozen=True)
class LabelledExamples:
    """Images and labels of one part of a site's data, such as training or validation, on the network's device.

    Attributes:
        images: uint8 ``(n, channels, height, width)``.
        labels: float32 ``(n, rows)``, NaN for unknown.
        annotated: bool ``(rows,)``, the head rows whose class the site annotates.
        read_digests: Returns a number for each image, uint64 ``(n,)``, by which a method finds an image again when
            other images have come or gone; None where images never change.
        masks: The labels of each pixel; None if there are labels of images alone.
        patients: ``(n,)``, the patient of each image; None if no figure asks for it.
        sampling: How an epoch draws patches of the images; None if it reads whole images.
        image_rows: ``(n,)``, the image of each patch, if these examples are patches; None for whole images.
    """

    images: Tensor | ImageTensors
    labels: Tensor
    annotated: Tensor
    read_digests: Callable[[], NDArray[np.uint64]] | None = None
    masks: MaskTensors | None = None
    patients: NDArray[np.str_] | None = None
    sampling: PatchSampling | None = None
    image_rows: Tensor | None = None

    @property
    def examples_per_epoch(self) -> int:
        """Return the number of examples that an epoch reads: images, or patches of them."""
        return len(self) if self.sampling is None else len(self) * self.sampling.per_image

    def draw_patches(self, generator: torch.Generator) -> "LabelledExamples":
        """Return the patches of one epoch as examples; without patch sampling, these examples themselves.

        Args:
            generator: CPU generator, which decides on the patches.
        """
        if self.sampling is None:
            return self
        assert isinstance(self.images, ImageTensors), type(self.images)
        assert self.masks is not None
        patches = self.masks.draw_patches(self.labels, self.sampling, generator)
        rows = torch.from_numpy(patches.rows)
        return replace(
            self,
            images=replace(self.images, patches=patches),
            labels=self.labels[rows.to(self.labels.device)],
            masks=replace(self.masks, patches=patches),
            sampling=None,
            image_rows=rows.to(self.images.device),
        )

    def find_images(self, rows: Tensor) -> Tensor:
        """Return the indices of the images to which these examples belong."""
        return rows if self.image_rows is None else self.image_rows[rows]

    def get_labels(self, rows: Tensor) -> Tensor:
        """Return the labels of these images, ``(batch, rows)``; with masks, of each pixel."""
        labels = self.labels[rows]
        return labels if self.masks is None else self.masks.make_pixel_labels(rows, labels)

    def __len__(self) -> int:
        return len(self.images)

    def prefetch_images(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images at each index tensor in ``parts``; the next images may be read from disk in advance."""
        images = self.images
        return images.prefetch_batches(parts) if isinstance(images, ImageTensors) else (images[rows] for rows in parts)

    @cached_property
    def has_known_labels(self) -> bool:
        """Return True if at least one label is 0 or 1, not NaN."""
        return len(self) > 0 and not bool(self.labels.isnan().all())

    @cached_property
    def has_only_known_labels(self) -> bool:
        """Return True if the site annotates all classes and every label is known."""
        return len(self) > 0 and bool(self.annotated.all()) and not bool(self.labels.isnan().any())

    @cached_property
    def shows_class_in_each_image(self) -> bool:
        """Return True if at least one class of every image has the label 1."""
        return bool((self.labels == 1).any(dim=1).all())

    def simplify_loss(self, loss: LossFunction) -> LossFunction:
        """Return a loss with the same value and gradient for these examples, which is faster if all labels are known.

        A multi-class loss leaves out images without a class, so each image must have one.
        """
        faster = next((faster for plain, faster in LOSSES_OF_KNOWN_LABELS if plain is loss), None)
        if faster is None or not self.has_only_known_labels:
            return loss
        if faster is softmax_loss_of_known_labels and not self.shows_class_in_each_image:
            return loss
        return faster


def pair_pixels_with_labels(
    images: ImageSet, pixels: Tensor | ImageTensors, class_names: tuple[str, ...]
) -> LabelledExamples:
    """Combine pixels with the images' labels for these classes, on the device of the pixels."""
    of_site = frozenset(images.class_names)
    annotated = torch.tensor([name in of_site for name in class_names], dtype=torch.bool)
    labels = select_head_row_labels(images, class_names)
    return LabelledExamples(
        pixels,
        labels.to(pixels.device),
        annotated.to(pixels.device),
        lambda: images.picture_digests,
        make_mask_tensors(images, class_names, pixels.device),
        images.patients,
    )


def read_in_patches(examples: LabelledExamples, model: ModelSpec, training: TrainingSection) -> LabelledExamples:
    """Return the training examples, with patch sampling if the model has a patch size."""
    if model.patch_size is None:
        return examples
    sampling = PatchSampling(model.sides, training.patches_per_volume, training.patch_foreground)
    return replace(examples, sampling=sampling)


@dataclass(frozen=True)
class ClientContext:
    """The model, data and stored state of a site at the beginning of a round of training.

    Attributes:
        network: The received model with the site's local parts. Training changes it; copy values that must stay.
        statistics: The statistics that the coordinator sent.
        method_state: The arrays that the method stored at this site in the last round in which the site's reply
            counted.
        round: The number of the round, from 1.
        schedule_factor: Factor by which ``training.schedule`` multiplies the learning rate in this round.
    """

    network: Model
    examples: LabelledExamples
    statistics: Arrays
    method_state: Arrays
    round: int
    spec: TrainingSection
    schedule_factor: float = 1.0


@dataclass(frozen=True)
class LocalRound:
    """One round at one site as a method defines it: the objective, the statistics to send and the state to store.

    Attributes:
        objective: The function that training minimises.
        statistics: Computes the statistics that the site sends with its update, from the trained model and the losses
            of all batches.
        method_state: Computes the arrays that the site stores on its disk for the method's next round, from the trained
            model.
        lr_factor: Factor that multiplies the learning rate.
        own_objective: The function that training of the site's own model minimises, in methods that train one.
    """

    objective: Objective
    statistics: Callable[[Model, Losses], Arrays] = lambda model, losses: NO_ARRAYS
    method_state: Callable[[Model], Arrays] = lambda model: NO_ARRAYS
    lr_factor: float = 1.0
    own_objective: Objective | None = None


LocalHalf = Callable[[ClientContext], LocalRound]


def add_proximal_term(half: LocalHalf, mu: float, *, head: bool, norm: bool) -> LocalHalf:
    """Return ``half`` with a proximal term added to the loss (FedProx, MLSys 2020, eq. 2).

    The term is ``mu / 2`` times the squared distance of the trained from the received model.

    Args:
        half: Function that makes a site's local round: its objective, statistics and stored state.
        mu: Strength of the proximal term.
        head: True if the distance includes the head, because the head comes from the federation.
        norm: True if the distance includes batch normalisation, because it comes from the federation.
    """

    def list_shared_parameters(model: Model) -> list[Tensor]:
        own = set() if head else set(model.head.parameters())
        if not norm:
            own |= {value for part in model.modules() if is_batch_norm(part) for value in part.parameters()}
        return [value for value in model.parameters() if value not in own]

    def make_proximal_round(context: ClientContext) -> LocalRound:
        inner = half(context)
        received = [value.detach().clone() for value in list_shared_parameters(context.network)]

        def objective(model: Model, batch: Batch) -> Tensor:
            pairs = zip(list_shared_parameters(model), received, strict=True)
            distance = torch.stack([(now - before).square().sum() for now, before in pairs]).sum()
            return inner.objective(model, batch) + mu / 2 * distance

        return replace(inner, objective=objective)

    return make_proximal_round


# ---------------------------------------------------------------------- teachers


def copy_model_as_teacher(model: AnyModel) -> AnyModel:
    """Return a frozen copy of the model in evaluation mode, for use as a teacher."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def compute_teacher_decay(steps: int, decay: float) -> float:
    """Return the weight of the old teacher in the teacher's running mean, after ``steps`` training steps.

    It is ``1 - 1 / (steps + 1)``, as in a plain mean over the steps, but at most ``decay``.
    """
    return min(1 - 1 / (steps + 1), decay)


@torch.no_grad()
def update_teacher_average(teacher: Model, student: Model, decay: float) -> None:
    """Move a teacher's parameters and running statistics by the fraction ``1 - decay`` towards the student's."""
    now = student.state_dict()
    for name, mean in teacher.state_dict().items():
        if mean.is_floating_point():
            mean.lerp_(now[name], 1 - decay)
