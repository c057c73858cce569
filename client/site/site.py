"""A hospital as its own program knows it: name, labels, images, policy, disk and device."""

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
    count_patients,
    find_hidden_classes,
    mark_images_of_hidden_classes,
    remove_hidden_labels,
    round_count_down,
)
from client.site.memory import FrozenPartFiles, RoundStateFolder
from client.site.policy import UNLIMITED, WITHOUT_LIMITS, Policy
from common.config import Plan
from common.contract import LabelDeclaration
from common.data.base.image_set import ImageSet
from common.data.images.pixels import Pixels, pixels_on_device
from common.errors import BadInput, Fault
from common.models.zoo.spec import Task
from strategies.local.arithmetic import Arithmetic, choose_arithmetic
from strategies.privacy.secure_aggregation.site import SigningIdentity


@dataclass(frozen=True)
class Site:
    """One hospital, or one simulated site.

    Attributes:
        declaration: Name and labels.
        train, validation, test: Images; label columns are the site's canonical class names in its own order.
        folder: Folder of the site's memory and own models.
        device: ``cpu`` or ``cuda``.
        gpus: How many GPUs each batch is split across, where the device is ``cuda``.
        policy: Rules of what the site takes part in and what may leave it.
        identity: The key that the site is admitted with; None in simulation.
        durable: Flush memory to disk; off in simulation, where a crash ends the sites with everything else.
        hidden: By part, the hidden classes, where the data has more classes than the site annotates; see
            :mod:`client.site.disclosure`.
        unsaid: By part, a mask ``(n,)`` of the images whose labels nothing that leaves may rest on.
        simulated: True in a simulation: noise comes from the run's seeds, which would be known to others at a hospital;
            failures are raised; and figures leave of models with local parts, also under masks and noise.
        tell: Prints one line for the person who looks after the site.
        frozen_folder: Folder of frozen parts of models; None for one in the site's folder. Simulated sites share one.
        weights_folder: Folder of the hospital's weights files; None for no such folder.
        arithmetic: Arithmetic for plans that ask for the fastest; None to measure it here.
    """

    declaration: LabelDeclaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    folder: Path
    device: str = "cpu"
    gpus: int = 1
    policy: Policy = field(default_factory=Policy)
    durable: bool = True
    identity: SigningIdentity | None = None
    hidden: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    unsaid: Mapping[str, Few] = field(default_factory=lambda: MappingProxyType({}))
    simulated: bool = False
    tell: Callable[[str], None] = lambda text: None
    frozen_folder: Path | None = None
    weights_folder: Path | None = None
    arithmetic: Arithmetic | None = None

    @cached_property
    def has_no_limits(self) -> bool:
        """True for a simulated site without limits: nothing of it is hidden, audited or declined."""
        return self.simulated and self.policy == UNLIMITED and not self.hidden

    def arithmetic_for(self, plan: Plan) -> Arithmetic:
        """Return the number formats and kernels that this site computes with under a plan, for instance bfloat16."""
        if self.arithmetic is not None and plan.training.precision == "fastest":
            return self.arithmetic
        return choose_arithmetic(plan, self.device, self.folder, durable=self.durable)

    @cached_property
    def train_samples(self) -> int:
        """The number of training images that the site reports."""
        return round_count_down(len(self.reported_train), self.policy)

    @cached_property
    def reported_train(self) -> ImageSet:
        """The training images that are counted in reports: those that an update without masks is made of.

        An update can disclose their number. A site that counted all images would disclose how many it left out.
        """
        rows = self.kept_rows(self._images_for_plain_training("train", "multi_label"))
        return self.train if rows is None else self.train.select_rows(rows)

    @cached_property
    def frozen_parts(self) -> FrozenPartFiles:
        """The files of models' frozen parts on this site's disk."""
        return FrozenPartFiles(self.frozen_folder or self.folder / "frozen", self.weights_folder, durable=self.durable)

    def hidden_classes(self, part: str) -> frozenset[str]:
        """Return the hidden classes of one part of the data: no count and no figure of them is reported."""
        if part not in self._hidden_classes_cache:
            images: ImageSet = getattr(self, part)
            own = frozenset(images.class_names)
            smallest = self.policy.smallest_count
            hidden = (
                self.hidden.get(part) if part in self.hidden or not smallest else find_hidden_classes(images, smallest)
            )
            self._hidden_classes_cache[part] = (hidden or frozenset()) & own
        return self._hidden_classes_cache[part]

    def undisclosable_images(self, part: str) -> Few:
        """Mark ``(n,)`` the images of one part whose labels must not influence anything that the site sends.

        They show hidden classes only, or no class, where the known absence of the other classes would disclose that an
        image shows a hidden class; see :func:`mark_images_of_hidden_classes`.
        """
        smallest, images = self.policy.smallest_count, getattr(self, part)
        return (
            self.unsaid[part]
            if part in self.unsaid
            else mark_images_of_hidden_classes(images, self.hidden_classes(part), smallest)
        )

    def images_to_train_on(self, part: str, plan: Plan) -> ImageSet:
        """Return the images of one part, with the labels that a run trains on and chooses epochs by.

        An update without noise discloses the effect of hidden classes' labels, so it is made without them. Noise that
        only the plan sets may be none, so the policy has to set a budget. Masks do not cover the labels either: from a
        sum of few sites the numbers of each can be worked out where training allows only a few values of them.
        """
        images: ImageSet = getattr(self, part)
        return images if self.policy.epsilon is not None else self._images_for_plain_training(part, plan.model.task)

    def _images_for_plain_training(self, part: str, task: Task) -> ImageSet:
        """Return the images of one part with the labels that a model without noise is trained on."""
        images: ImageSet = getattr(self, part)
        return images if self.policy.train_hidden_classes else self.without_hidden(part, task)

    def without_hidden(self, part: str, task: Task) -> ImageSet:
        """Return the images of one part without the labels of hidden classes, for figures that leave."""
        images: ImageSet = getattr(self, part)
        if not self.hidden_classes(part):
            return images
        return remove_hidden_labels(images, self.hidden_classes(part), self.undisclosable_images(part), task)

    def kept_rows(self, labelled: ImageSet) -> NDArray[np.intp] | None:
        """Return the rows of the images of :meth:`images_to_train_on` that a run uses; None if it uses all images.

        An image all of whose labels were removed because of the classes that it shows is left out: the effect of an
        unlabelled image would disclose that it shows a hidden class. Where no image would be left, all stay.
        """
        if labelled is self.train:
            return None
        emptied = np.asarray(np.isnan(labelled.labels).all(axis=1) & ~np.isnan(self.train.labels).all(axis=1))
        return np.flatnonzero(~emptied) if emptied.any() and not emptied.all() else None

    def refuse_too_few_patients(self) -> None:
        """Refuse to take part where the whole site has fewer patients than the policy's threshold.

        Raises:
            BadInput: If so; it names the threshold, not the number of patients.
        """
        if not self.reports_part("train"):
            least = self.policy.smallest_count
            problem = (
                f"there are training images of fewer than {least} patients, and the policy tells nothing of so few."
            )
            remedy = "A smaller smallest_count in its [policy] lets it take part."
            raise BadInput([Fault("site.toml: policy.smallest_count", problem, remedy)])

    def reports_part(self, part: str) -> bool:
        """Return True if figures of one whole part of the data are reported: not if it is of few patients."""
        if part not in self._reports_cache:
            images: ImageSet = getattr(self, part)
            least = self.policy.smallest_count
            self._reports_cache[part] = not len(images) or not least or count_patients(images) >= least
        return self._reports_cache[part]

    @cached_property
    def _reports_cache(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _hidden_classes_cache(self) -> dict[str, frozenset[str]]:
        return {}

    def copy_for_local_training(self, folder: Path, plan: Plan, *, figures_leave: bool) -> "Site":
        """Return a site with the same images and no hidden class, for the comparison with training alone.

        The new site trains on the labels that the run trains on, and chooses by the same figures.

        Args:
            folder: Folder for the memory and the models of that training.
            figures_leave: True where figures of these models may leave. Noise and masks do not cover them, so the
                models are then trained without labels of hidden classes.
        """
        task = plan.model.task
        train, validation = (
            self._images_for_plain_training(part, task) if figures_leave else self.images_to_train_on(part, plan)
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
        # Images are in memory once.
        vars(inner).update(pixels=self.pixels, computed_results_cache=self.computed_results_cache)
        return inner

    def run_state_folder(self, run: str) -> RoundStateFolder:
        """Return the site's memory of a run."""
        return RoundStateFolder(self.folder / "memory" / run, durable=self.durable)

    @cached_property
    def name(self) -> str:
        """The site's name."""
        return self.declaration.site

    @cached_property
    def computed_results_cache(self) -> dict[str, Any]:
        """Cache of results computed from the site's images; it lasts as long as this process."""
        return {}

    @cached_property
    def pixels(self) -> dict[str, Pixels]:
        """The pictures of ``train``, ``validation`` and ``test``, for the device."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: pixels_on_device(images, self.device) for name, images in parts.items()}
