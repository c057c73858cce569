"""The site object of the hospital's program: name, labels, images, policy, folders and device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.disclosure import (
    BoolMask,
    count_patients,
    find_classes_hidden_by_policy,
    mark_images_of_hidden_classes,
    remove_hidden_labels,
    round_count_down,
)
from polyclinic.client.site.memory import FrozenPartFiles, SiteRoundStateFolder
from polyclinic.client.site.patient_ledger import PatientLedger
from polyclinic.client.site.policy import UNLIMITED, UNLIMITED_KEYS, SitePolicy
from polyclinic.client.site.stated_counts import StatedImageCounts
from polyclinic.common.config import HospitalPlan
from polyclinic.common.contract import LabelDeclaration, find_label_declaration_faults
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.system.plain_names import RunName, join_plain_name
from polyclinic.common.vocabulary import (
    Vocabulary,
    group_words_by_class,
    map_words_to_classes,
    merge_words_of_classes,
    name_declaration_by_vocabulary,
)
from polyclinic.data.base.image_set import PARTS, ImageSet
from polyclinic.data.base.pixel_form import PixelForm
from polyclinic.data.images.pixels import ImageTensors, load_pixels_on_device
from polyclinic.strategies.local.arithmetic import TrainingNumberFormat, choose_number_format
from polyclinic.strategies.privacy.secure_aggregation.site import SiteSigningIdentity

if TYPE_CHECKING:
    from cryptography import x509

    from polyclinic.client.site.approvals import SiteApprovals


@dataclass(frozen=True)
class Site:
    """One hospital, or one simulated site.

    Attributes:
        declaration: The site's name and class names.
        train, validation, test: Images; label columns are the site's canonical class names in its own order.
        folder: Folder of the site's stored states and own models.
        device: ``cpu`` or ``cuda``.
        gpus: Number of GPUs that share each batch, if the device is ``cuda``.
        policy: Rules for the runs that the site takes part in, and for the data that leaves it.
        identity: The site's signing key, which the coordinator has admitted; None in simulation.
        durable: Flush files to disk; False in simulation, where a crash ends all sites together.
        hidden: Part of the data -> hidden classes (:mod:`polyclinic.client.site.disclosure`), determined from all
            classes of the data, which may be more than the site annotates.
        undisclosable_images: Part of the data -> mask ``(n,)`` of the images whose labels must not influence anything
            that leaves.
        simulated: True in a simulation. Then noise is drawn from the run's seed, which others know; failures are
            raised; and metrics of models with local parts may leave in spite of masks or noise.
        tell: Prints one line for the hospital's staff.
        frozen_folder: Folder of frozen parts of models, which simulated sites share; None for one in ``folder``.
        weights_folder: Folder of the hospital's weights files; None for no such folder.
        arithmetic: Number formats and kernels for plans that ask for the fastest; None to measure them here.
        ledger: The ledger of the patients' privacy budget; None for a simulated site and for a copy of a site, which
            count costs only in their own folder.
        pixel_form: The site's pixel settings; None if unknown.
        read_test_part: Reads the test part again with other pixel settings; None for a simulated site.
        stated_counts: The numbers of training images stated at each run's roll call; None for commands without a run.
        approvals: Decides if people here have approved a request; None if the policy asks for no approval.
        authority: Certificate of the coordinator's authority, from the kit; None in simulation.
        find_picture_files: Returns line of the label table -> picture file; None where pictures are no files.
        original: If this site is a copy with the study's class names (:meth:`name_classes_by`), the site with its own
            class names; otherwise None. Both share the images in memory.
    """

    declaration: LabelDeclaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    folder: Path
    device: str = "cpu"
    gpus: int = 1
    policy: SitePolicy = field(default_factory=SitePolicy)
    durable: bool = True
    identity: SiteSigningIdentity | None = None
    hidden: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    undisclosable_images: Mapping[str, BoolMask] = field(default_factory=lambda: MappingProxyType({}))
    simulated: bool = False
    tell: Callable[[str], None] = lambda text: None
    frozen_folder: Path | None = None
    weights_folder: Path | None = None
    arithmetic: TrainingNumberFormat | None = None
    ledger: PatientLedger | None = None
    pixel_form: PixelForm | None = None
    read_test_part: Callable[[PixelForm], ImageSet] | None = None
    stated_counts: StatedImageCounts | None = None
    approvals: "SiteApprovals | None" = None
    authority: "x509.Certificate | None" = None
    find_picture_files: Callable[[], Mapping[int, Path]] | None = None
    original: "Site | None" = None

    def name_classes_by(self, vocabulary: Vocabulary | None) -> "Site":
        """Return this site with the study's class name in place of each of its class names that is a synonym.

        Several class names of the site that mean one class are merged: the class is present in an image if one of them
        is.
        """
        if not vocabulary or not (classes := map_words_to_classes(self.declaration.canonical_names, vocabulary)):
            return self
        named: dict[frozenset[tuple[str, str]], Site] = self.computed_results_cache.setdefault("named", {})
        key = frozenset(classes.items())
        if key not in named:
            declaration = name_declaration_by_vocabulary(self.declaration, vocabulary)
            raise_faults(find_label_declaration_faults(declaration))
            groups = group_words_by_class(self.declaration.canonical_names, vocabulary)
            hidden_by_part = {part: self.hidden_classes(part) for part in PARTS}

            def name_hidden_classes(part: str) -> frozenset[str]:
                # A class is hidden if one of its merged names is. Otherwise a run with another vocabulary may report
                # the other names, and the difference would be the count of the hidden name.
                return frozenset(name for name, words in groups.items() if hidden_by_part[part].intersection(words))

            named[key] = replace(
                self,
                declaration=declaration,
                train=merge_words_of_classes(self.train, vocabulary),
                validation=merge_words_of_classes(self.validation, vocabulary),
                test=merge_words_of_classes(self.test, vocabulary),
                hidden={part: name_hidden_classes(part) for part in self.hidden},
                original=self,
            )
        return named[key]

    @cached_property
    def has_no_limits(self) -> bool:
        """True for a simulated site without limits: it hides nothing, declines nothing and has no audit log."""
        return self.simulated and self.policy == UNLIMITED and not self.hidden

    def choose_arithmetic_for_plan(self, plan: HospitalPlan) -> TrainingNumberFormat:
        """Return the number formats and kernels, for instance bfloat16, with which this site trains by a plan."""
        if self.arithmetic is not None and plan.training.precision == "fastest":
            return self.arithmetic
        return choose_number_format(plan, self.device, self.folder, durable=self.durable)

    @cached_property
    def train_samples(self) -> int:
        """The number of training images that the site reports."""
        return round_count_down(len(self.reported_training_images), self.policy)

    def get_train_samples_of_run(self, run: str) -> int:
        """Return the number of training images that the site stated at the roll call of a run."""
        if self.stated_counts is None:
            return self.train_samples
        return self.stated_counts.read_count(run, self.train_samples)

    @cached_property
    def reported_training_images(self) -> ImageSet:
        """The training images that the site would train on without noise; the site reports their number.

        An update can disclose the number of images that it was trained on. Images with labels only of hidden classes
        are not trained on. If the site reported the number of all images, the difference would disclose their number.
        """
        rows = self.find_rows_to_train_on(self._get_images_for_unnoised_training("train", "multi_label"))
        return self.train if rows is None else self.train.select_rows(rows)

    @cached_property
    def frozen_part_files(self) -> FrozenPartFiles:
        """The files of frozen parts of models on this site's disk."""
        return FrozenPartFiles(self.frozen_folder or self.folder / "frozen", self.weights_folder, durable=self.durable)

    def hidden_classes(self, part: str) -> frozenset[str]:
        """Return the hidden classes of one part of the data, whose counts and metrics are not reported."""
        if part not in self._hidden_classes_cache:
            images: ImageSet = getattr(self, part)
            smallest = self.policy.smallest_count
            hidden = self.hidden.get(part, frozenset[str]())
            if part not in self.hidden and smallest:
                hidden = find_classes_hidden_by_policy(images, smallest)
            self._hidden_classes_cache[part] = hidden & frozenset(images.class_names)
        return self._hidden_classes_cache[part]

    def mark_undisclosable_images(self, part: str) -> BoolMask:
        """Mark the images of one part, ``(n,)``, whose labels must not influence anything that the site sends.

        The known labels of such an image would disclose that it shows a hidden class; see
        :func:`mark_images_of_hidden_classes`.
        """
        if part in self.undisclosable_images:
            return self.undisclosable_images[part]
        return mark_images_of_hidden_classes(getattr(self, part), self.hidden_classes(part), self.policy.smallest_count)

    def get_images_to_train_on(self, part: str, plan: HospitalPlan) -> ImageSet:
        """Return the images of one part, with the labels by which a run trains and chooses epochs.

        An update without noise discloses the effect of labels. So labels of hidden classes are removed, unless the
        policy has a privacy budget or ``train_hidden_classes``. Noise that only the plan sets does not suffice, because
        it may be zero. Masks do not suffice either: if training allows only a few values of an update, the values of
        each site can be computed from a sum of few sites.
        """
        images: ImageSet = getattr(self, part)
        return (
            images if self.policy.epsilon is not None else self._get_images_for_unnoised_training(part, plan.model.task)
        )

    def _get_images_for_unnoised_training(self, part: str, task: Task) -> ImageSet:
        """Return the images of one part with the labels that training without noise may use."""
        images: ImageSet = getattr(self, part)
        return images if self.policy.train_hidden_classes else self.get_images_without_hidden_labels(part, task)

    def get_images_without_hidden_labels(self, part: str, task: Task) -> ImageSet:
        """Return all images of one part, with the labels of hidden classes set to unknown, for metrics that are sent.

        If a hidden class could be inferred from an image's other labels, all labels of the image are unknown.
        """
        images: ImageSet = getattr(self, part)
        if not self.hidden_classes(part):
            return images
        return remove_hidden_labels(images, self.hidden_classes(part), self.mark_undisclosable_images(part), task)

    def find_rows_to_train_on(self, labelled: ImageSet) -> NDArray[np.intp] | None:
        """Return the rows of ``labelled`` that a run trains on; None if it trains on all images.

        An image that lost all its labels because of hidden classes is left out: the effect of an unlabelled image would
        disclose that it shows a hidden class. If no image would remain, all are used.

        Args:
            labelled: The training part as :meth:`get_images_to_train_on` returns it.
        """
        if labelled is self.train:
            return None
        emptied = np.asarray(np.isnan(labelled.labels).all(axis=1) & ~np.isnan(self.train.labels).all(axis=1))
        return np.flatnonzero(~emptied) if emptied.any() and not emptied.all() else None

    def refuse_too_few_patients(self) -> None:
        """Refuse to take part if the site has training images of fewer patients than the policy's threshold.

        Raises:
            BadInput: If there are too few; the message states the threshold, and not the number of patients.
        """
        if not self.may_report_metrics("train"):
            smallest = self.policy.smallest_count
            problem = (
                f"there are training images of fewer than {smallest} patients, and the policy tells nothing of so few."
            )
            remedy = "A smaller smallest_count in its [policy] lets it take part."
            raise BadInput([Fault("site.toml: policy.smallest_count", problem, remedy)])

    def may_report_metrics(self, part: str) -> bool:
        """Return True if metrics of a whole part of the data may be reported: it has enough patients, or no images."""
        if part not in self._may_report_part_cache:
            images: ImageSet = getattr(self, part)
            smallest = self.policy.smallest_count
            self._may_report_part_cache[part] = not len(images) or not smallest or count_patients(images) >= smallest
        return self._may_report_part_cache[part]

    @cached_property
    def _may_report_part_cache(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _hidden_classes_cache(self) -> dict[str, frozenset[str]]:
        return {}

    def copy_site_for_local_training(self, folder: Path, plan: HospitalPlan, *, figures_leave: bool) -> "Site":
        """Return a copy of this site that has no policy limits, and trains alone on the same images as the run.

        Args:
            folder: Folder for the states and models of training alone.
            figures_leave: True if metrics of the models trained alone may leave. Neither noise nor masks protect such
                metrics, so the copy then has only labels that training without noise may use; otherwise it has the
                run's labels.
        """
        task = plan.model.task
        train, validation = (
            self._get_images_for_unnoised_training(part, task)
            if figures_leave
            else self.get_images_to_train_on(part, plan)
            for part in ("train", "validation")
        )
        copy = replace(
            self,
            train=train,
            validation=validation,
            folder=folder,
            policy=SitePolicy(**{**UNLIMITED_KEYS, "smallest_count": 0}),
            hidden={},
            undisclosable_images={},
            tell=lambda text: None,
            ledger=None,
            stated_counts=None,
            frozen_folder=self.frozen_folder or self.folder / "frozen",
        )
        # The copy shares the images in memory.
        vars(copy).update(pixels=self.pixels, computed_results_cache=self.computed_results_cache)
        return copy

    def open_run_state_folder(self, run: str) -> SiteRoundStateFolder:
        """Return the folder with the site's stored states of a run."""
        folder = join_plain_name(self.folder / "memory", RunName(run))
        return SiteRoundStateFolder(folder, self.name, durable=self.durable)

    @cached_property
    def name(self) -> str:
        return self.declaration.site

    @cached_property
    def computed_results_cache(self) -> dict[str, Any]:
        """Cache of results computed from the site's images, for the lifetime of this process."""
        return {}

    @cached_property
    def pixels(self) -> dict[str, ImageTensors]:
        """The pixels of ``train``, ``validation`` and ``test``, ready for the device."""
        if self.original is not None:
            return self.original.pixels
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: load_pixels_on_device(images, self.device) for name, images in parts.items()}
