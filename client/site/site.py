"""A hospital as its own program sees it: name, labels, images, disk, device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.site.disclosure import (
    Few,
    hidden_classes,
    may_report,
    rounded_down,
    showing_hidden_alone,
    too_few_patients,
    without_labels,
)
from client.site.memory import FrozenParts, MemoryFolder
from client.site.policy import UNLIMITED, WITHOUT_LIMITS, Policy
from common.config import Plan
from common.contract import Declaration
from common.data.base.image_set import ImageSet
from common.data.images.pixels import Pixels, pixels_of
from common.models.zoo.spec import Task
from strategies.local.arithmetic import Arithmetic, chosen, in_arithmetic
from strategies.privacy.secure_aggregation.site import Identity


@dataclass(frozen=True)
class Site:
    """One site.

    Attributes:
        declaration: Its name and labels.
        train, validation, test: Its images; label columns are its canonical class names in its own order.
        folder: Where it keeps its memory and its own models.
        device: ``cpu`` or ``cuda``.
        gpus: How many GPUs each batch is split across, where the device is ``cuda``.
        policy: What else may leave.
        identity: The key that it is admitted with; None in simulation.
        durable: Flush memory to disk; off in simulation, where a crash ends the sites with everything else.
        hidden: By part, the classes of which nothing is told, where the data know more classes than the site annotates;
            see :mod:`client.site.disclosure`.
        unsaid: By part and from the same data, the images ``(n,)`` of which no label may be known in what leaves.
        simulated: In a simulation noise comes from the run's seeds, which a hospital's must not, for others know them;
            failures show; and figures leave of models of which parts stay at the site, also under masks and noise.
        tell: Prints one line for the person who looks after it.
        frozen_folder: Where frozen parts of models lie; in its own folder where None. Simulated sites share one.
        weights_folder: Where the hospital puts weights files; none are looked for where None.
        arithmetic: What a plan that asks for the fastest arithmetic gets; measured here where None.
    """

    declaration: Declaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    folder: Path
    device: str = "cpu"
    gpus: int = 1
    policy: Policy = field(default_factory=Policy)
    durable: bool = True
    identity: Identity | None = None
    hidden: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    unsaid: Mapping[str, Few] = field(default_factory=lambda: MappingProxyType({}))
    simulated: bool = False
    tell: Callable[[str], None] = lambda text: None
    frozen_folder: Path | None = None
    weights_folder: Path | None = None
    arithmetic: Arithmetic | None = None

    @cached_property
    def unlimited(self) -> bool:
        """True for a simulated site without limits: nothing of it is hidden, audited or declined."""
        return self.simulated and self.policy == UNLIMITED and not self.hidden

    def in_its_arithmetic(self, plan: Plan) -> Plan:
        """Return the plan with the arithmetic that it leaves to the site."""
        return in_arithmetic(plan, self.arithmetic_for(plan))

    def computes_as(self, plan: Plan) -> str:
        """Describe how a round of this plan is computed here, for the coordinator."""
        return f"{self.arithmetic_for(plan)}{f', {self.gpus} GPUs' if self.gpus > 1 else ''}"

    def arithmetic_for(self, plan: Plan) -> Arithmetic:
        """Return how a round of this plan is computed here."""
        if self.arithmetic is not None and plan.training.precision == "fastest":
            return self.arithmetic
        return chosen(plan, self.device, self.folder, durable=self.durable)

    @cached_property
    def train_samples(self) -> int:
        """The number of training images that the site reports."""
        return rounded_down(len(self.reported_train), self.policy)

    @cached_property
    def reported_train(self) -> ImageSet:
        """The training images that are counted in reports: those that an update is made of without masks.

        An update can say how many that are. A site that counted all of them would say with it how many it left out.
        """
        kept = self.kept_rows(self._bare_labels("train", "multi_label"))
        return self.train if kept is None else self.train.rows(kept)

    @cached_property
    def frozen_parts(self) -> FrozenParts:
        """The frozen parts of models that are here."""
        return FrozenParts(self.frozen_folder or self.folder / "frozen", self.weights_folder, durable=self.durable)

    def hides(self, part: str) -> frozenset[str]:
        """Return the classes of which nothing is reported, of one part of the data."""
        if part not in self._hidden:
            images: ImageSet = getattr(self, part)
            own = frozenset(images.class_names)
            smallest = self.policy.smallest_count
            hidden = self.hidden.get(part) if part in self.hidden or not smallest else hidden_classes(images, smallest)
            self._hidden[part] = (hidden or frozenset()) & own
        return self._hidden[part]

    def unsaid_images(self, part: str) -> Few:
        """Return the images ``(n,)`` of one part that no label may be known of in what leaves."""
        smallest, images = self.policy.smallest_count, getattr(self, part)
        return self.unsaid[part] if part in self.unsaid else showing_hidden_alone(images, self.hides(part), smallest)

    def trained_on(self, part: str, plan: Plan) -> ImageSet:
        """Return the images of one part, with the labels that a run trains on and chooses epochs by.

        An update that no noise covers shows what hidden classes' labels did to it, so it is made without them. Noise of
        the plan alone covers nothing, it may be none: the policy has to set a budget. Nor do masks: of a sum of few
        sites one can work out what some numbers of each were, where training makes these numbers one of a few.
        """
        images: ImageSet = getattr(self, part)
        return images if self.policy.epsilon is not None else self._bare_labels(part, plan.model.task)

    def _bare_labels(self, part: str, task: Task) -> ImageSet:
        """Return the images of one part with the labels that a model trains on without noise."""
        images: ImageSet = getattr(self, part)
        return images if self.policy.train_hidden_classes else self.without_hidden(part, task)

    def without_hidden(self, part: str, task: Task) -> ImageSet:
        """Return the images of one part with the labels that figures which leave may rest on."""
        images: ImageSet = getattr(self, part)
        if not self.hides(part):
            return images
        return without_labels(images, self.hides(part), self.unsaid_images(part), task)

    def kept_rows(self, labelled: ImageSet) -> NDArray[np.intp] | None:
        """Return the rows of training images that a run sees; None for all.

        A training image that lost all its labels for what it shows is left out: what a method does with unlabelled
        images would say that it is one of them. Where none would be left, all stay.

        Args:
            labelled: Of :meth:`trained_on`.
        """
        if labelled is self.train:
            return None
        emptied = np.asarray(np.isnan(labelled.labels).all(axis=1) & ~np.isnan(self.train.labels).all(axis=1))
        return np.flatnonzero(~emptied) if emptied.any() and not emptied.all() else None

    def refuse_few(self) -> None:
        """Raise if the site as a whole is too small to take part: its update is about all of its patients.

        Raises:
            BadInput: Naming the threshold, not the number.
        """
        if not self.reports("train"):
            raise too_few_patients(self.policy)

    def reports(self, part: str) -> bool:
        """Check whether anything is reported about one part of its data as a whole: not if it is of few patients."""
        if part not in self._reports:
            self._reports[part] = may_report(getattr(self, part), self.policy)
        return self._reports[part]

    @cached_property
    def _reports(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _hidden(self) -> dict[str, frozenset[str]]:
        return {}

    def for_itself(self, folder: Path, plan: Plan, *, figures_leave: bool) -> "Site":
        """Return this site for the comparison with training alone: the same images, no class is hidden from itself.

        It trains on the labels that the run trains on, and chooses by the same figures.

        Args:
            folder: Where that work keeps its memory and its models.
            figures_leave: Whether figures of these models may leave. Nothing covers them, so they are then
                trained without labels of hidden classes, also where noise or masks cover the run's update.
        """
        task = plan.model.task
        train, validation = (
            self._bare_labels(part, task) if figures_leave else self.trained_on(part, plan)
            for part in ("train", "validation")
        )
        inner = replace(
            self,
            train=train,
            validation=validation,
            folder=folder,
            policy=Policy(**{**WITHOUT_LIMITS, "smallest_count": 0}),
            hidden={},
            unsaid={},
            tell=lambda text: None,
            frozen_folder=self.frozen_folder or self.folder / "frozen",
        )
        vars(inner).update(_pixels=self._pixels, in_memory=self.in_memory)  # images are in memory once
        return inner

    def memory(self, run: str) -> MemoryFolder:
        """Return the folder of what it remembers of a run."""
        return MemoryFolder(self.folder / "memory" / run, durable=self.durable)

    @property
    def name(self) -> str:
        return self.declaration.site

    @cached_property
    def in_memory(self) -> dict[str, Any]:
        """The results that this process computed of the site's images, as long as it has them."""
        return {}

    def pixels(self, part: str) -> Pixels:
        """Return the pictures of ``train``, ``validation`` or ``test``, for the device."""
        return self._pixels[part]

    @cached_property
    def _pixels(self) -> dict[str, Pixels]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: pixels_of(images, self.device) for name, images in parts.items()}
