"""Reads a site from its folder: first ``site.toml``, with all faults reported at once, then images and labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyclinic.client.site.class_columns import (
    describe_merged_columns,
    make_label_declaration,
)
from polyclinic.client.site.disclosure import BoolMask, find_classes_hidden_by_policy, mark_images_of_hidden_classes
from polyclinic.client.site.patient_ledger import open_site_ledger
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import SiteSettings, SiteTomlContent, read_site_with_faults
from polyclinic.client.site.stated_counts import StatedImageCounts
from polyclinic.common.class_columns import group_columns_by_class
from polyclinic.common.contract import LabelDeclaration
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.gpu import count_visible_gpus, describe_gpu_count
from polyclinic.common.patients.opt_out import (
    SITE_FILE,
    Identifiers,
    LeftOutPatients,
    OptOutSource,
    leave_out_patients,
)
from polyclinic.common.patients.parts import PatientChanges, PatientPartMemory
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.security.identity import derive_storage_key, read_private_key
from polyclinic.data.base.image_set import PARTS, DatasetSplits, ImageSet, concatenate_image_sets
from polyclinic.data.base.pixel_form import PixelForm, make_pixel_form, read_as_trained
from polyclinic.data.base.spec import SPLIT_SEED, FolderDatasetSpec
from polyclinic.data.base.splits import (
    assign_images_to_parts,
    divide_splits_again,
    find_positive_images,
    split_patients,
)
from polyclinic.data.images.store import DecodedImageStore, remove_image_store
from polyclinic.data.load import find_dataset_faults, load_dataset

if TYPE_CHECKING:
    from polyclinic.client.site.approvals import SiteApprovals


def read_site_settings(folder: Path) -> SiteSettings:
    """Read ``site.toml`` of a folder, and check the data set that it names, without decoding pictures.

    Raises:
        BadInput: With every fault.
    """
    settings, faults = read_site_with_faults(folder)
    faults += find_hospital_data_faults(settings)
    if settings.file.device == "cuda" and not torch.cuda.is_available():
        faults.append(Fault(f"{SITE_FILE}: device", "is cuda, but this machine shows no GPU.", 'Set "auto" or "cpu".'))
    elif fault := find_gpu_count_fault(settings.file, count_visible_gpus()):
        faults.append(fault)
    raise_faults(faults)
    return settings


def find_gpu_count_fault(file: SiteTomlContent, visible: int) -> Fault | None:
    """Return a fault if site.toml asks for more GPUs than the program can use (``visible``); otherwise None."""
    if file.gpus == 1 or (file.device != "cpu" and file.gpus <= visible):
        return None
    if file.device == "cpu":
        return Fault(f"{SITE_FILE}: gpus", f'is {file.gpus}, but device is "cpu".', "Leave one of the two out.")
    problem = f"is {file.gpus}, but {describe_gpu_count(visible)}"
    return Fault(f"{SITE_FILE}: gpus", problem, f"Set {visible}." if visible > 1 else "Leave it out.")


def find_hospital_data_faults(settings: SiteSettings) -> list[Fault]:
    """Return the faults of a site's data set that can be found without decoding pictures."""
    with settings.permit_data_hosts():
        faults = find_dataset_faults(settings.file.data, settings.folder)
    return [replace(fault, where=f"{SITE_FILE}: {fault.where}") for fault in faults]


RELEASES_WITHOUT_STORED_PARTS = frozenset({"0.1.0"})
"""Releases that drew the parts of all patients together and did not store them; names as in the audit log."""


@dataclass(frozen=True)
class SiteData:
    """The images and labels of a site's folder, before patients who opted out are left out.

    Attributes:
        settings: The site's settings.
        splits: All images of the data, each patient in the stored part.
        changes: Numbers of new and missing patients since the last start.
        tell: Prints lines for the hospital's staff.
        remember: True for the program that takes part in runs; False for commands that only read the data.
    """

    settings: SiteSettings
    splits: DatasetSplits
    changes: PatientChanges
    tell: Callable[[str], None]
    remember: bool

    @cached_property
    def opt_out(self) -> OptOutSource:
        return OptOutSource(self.settings.folder)

    def make_site(self, opted_out: Identifiers) -> tuple[Site, LeftOutPatients]:
        """Return the site without the patients who opted out, and these patients.

        Args:
            opted_out: Result of :meth:`OptOutSource.read_identifiers`.

        Raises:
            BadInput: If a class is wrong, or no training image is left.
        """
        splits, left_out = leave_out_patients(self.splits, opted_out)
        site = _make_site_of_splits(self.settings, splits, self.tell)
        if self.remember:
            # Also if nobody has opted out yet, because a patient may opt out during a run.
            site = replace(site, stated_counts=StatedImageCounts(self.settings.state_folder))
        return site, left_out

    def make_present_site(self) -> tuple[Site, LeftOutPatients, Identifiers]:
        """Return the site without the patients who have opted out by now, these patients, and their identifiers.

        Raises:
            BadInput: If the list of opted-out patients cannot be read, a class is wrong, or no training image is left.
        """
        opted_out = self.opt_out.require_identifiers()
        return *self.make_site(opted_out), opted_out


def load_site(
    settings: SiteSettings, tell: Callable[[str], None] = lambda line: None, *, remember: bool = False
) -> Site:
    """Read the site's images and labels; patients who opted out are left out.

    Args:
        tell: Prints lines for the hospital's staff, now and later.
        remember: Store each patient's part of the data (:class:`PatientPartMemory`).

    Raises:
        BadInput: With every fault, or with the unreadable files if there are too many.
    """
    site, _, _ = load_site_data(settings, tell, remember=remember).make_present_site()
    return site


def read_site_as_trained(settings: SiteSettings, form: PixelForm, tell: Callable[[str], None]) -> Site:
    """Read the site's images with the pixel settings of a trained model; the parts of the data stay the same.

    Raises:
        BadInput: With every fault, or with the unreadable files if there are too many.
    """
    data = read_as_trained(settings.file.data, form)
    return load_site(replace(settings, file=settings.file.model_copy(update={"data": data})), tell)


def load_site_data(
    settings: SiteSettings, tell: Callable[[str], None] = lambda line: None, *, remember: bool = False
) -> SiteData:
    """Read the site's images and labels; for the arguments, see :func:`load_site`.

    Raises:
        BadInput: With every fault, or with the unreadable files if there are too many.
    """
    try:
        with settings.permit_data_hosts():
            splits = load_dataset(settings.file.data, settings.folder, prepare_image_store(settings, tell))
        memory = PatientPartMemory(settings.state_folder)
        splits, changes = memory.keep_known_parts(
            _keep_parts_of_earlier_release(settings, memory, splits),
            given_by=_find_key_of_given_parts(settings),
            store=remember,
        )
    except BadInput as error:
        raise BadInput(_name_site_file(fault) for fault in error.faults) from None
    return SiteData(settings, splits, changes, tell, remember)


def _name_site_file(fault: Fault) -> Fault:
    return replace(fault, where=f"{SITE_FILE}: {fault.where}") if fault.where.startswith("data") else fault


def _find_key_of_given_parts(settings: SiteSettings) -> str:
    """Return the key of site.toml by which the hospital divides the data into parts; empty if parts are drawn."""
    data = settings.file.data
    if data.kind == "npz":
        return "data.path"
    return "data.split_column" if getattr(data, "split_column", None) else ""


def _keep_parts_of_earlier_release(
    settings: SiteSettings, memory: PatientPartMemory, splits: DatasetSplits
) -> DatasetSplits:
    """Return the data in the parts of release 0.1.0, for a site that took part in runs with that release.

    That release drew the parts from all patients together in each run, and the site did not store them.
    """
    data = settings.file.data
    is_drawn = data.kind in ("folder", "dicomweb") and not _find_key_of_given_parts(settings)
    has_earlier_runs = (settings.state_folder / "memory").is_dir() and not memory.path.exists()
    if not is_drawn or not has_earlier_runs:
        return splits
    releases = {entry.get("version") for entry in AuditLog(settings.state_folder).read_entries()}
    if not releases & RELEASES_WITHOUT_STORED_PARTS:
        return splits
    everything = concatenate_image_sets(splits.parts)
    seed: int = getattr(data, "split_seed", SPLIT_SEED)
    split = split_patients(everything.patients, find_positive_images(everything.labels), seed)
    return divide_splits_again(splits, [assign_images_to_parts(images.patients, split) for images in splits.parts])


def _make_site_of_splits(settings: SiteSettings, splits: DatasetSplits, tell: Callable[[str], None]) -> Site:
    declaration = make_label_declaration(settings, splits.class_names)
    columns = group_columns_by_class(splits.class_names, settings.labels, settings.synonyms)
    if merged := describe_merged_columns(columns):
        tell(merged)
        splits = DatasetSplits(*(images.merge_label_columns(list(columns.values())) for images in splits.parts))
    if not len(splits.train):
        raise BadInput([Fault(f"{SITE_FILE}: data", "has no training image.")])

    canonical = dict(zip(declaration.names, declaration.canonical_names, strict=True))
    # From all columns of the data, also those that the site does not annotate.
    hidden = dict[str, frozenset[str]]()
    undisclosable_images = dict[str, BoolMask]()
    smallest = settings.file.policy.smallest_count
    for part in PARTS:
        images: ImageSet = getattr(splits, part)
        classes = find_classes_hidden_by_policy(images, smallest)
        hidden[part] = frozenset(canonical[name] for name in classes if name in canonical)
        undisclosable_images[part] = mark_images_of_hidden_classes(images, classes, smallest)

    return Site(
        declaration=declaration,
        train=_select_declared_classes(splits.train, declaration),
        validation=_select_declared_classes(splits.validation, declaration),
        test=_select_declared_classes(splits.test, declaration),
        folder=settings.state_folder,
        device=choose_training_device(settings),
        gpus=settings.file.gpus,
        hidden=hidden,
        undisclosable_images=undisclosable_images,
        policy=settings.file.policy,
        weights_folder=settings.folder / "weights",
        tell=tell,
        ledger=open_site_ledger(settings),
        approvals=_make_site_approvals(settings) if settings.file.policy.approval == "required" else None,
        read_test_part=lambda form: read_site_as_trained(settings, form, tell).test,
        pixel_form=make_pixel_form(
            settings.file.data,
            splits.train.stored.shape[1:],
            drops_color=splits.train.drops_color,
            white_of_dark=splits.train.white_of_dark,
        ),
        find_picture_files=_make_picture_file_finder(settings),
    )


def _make_picture_file_finder(settings: SiteSettings) -> Callable[[], Mapping[int, Path]] | None:
    data = settings.file.data
    if not isinstance(data, FolderDatasetSpec):
        return None

    def find_picture_files() -> Mapping[int, Path]:
        # Imported late, because only counts of sizes and devices need it.
        from polyclinic.data.tables.labels import find_files_by_line

        return find_files_by_line(data, settings.folder)

    return find_picture_files


def _make_site_approvals(settings: SiteSettings) -> "SiteApprovals":
    from polyclinic.client.site.approvals import SiteApprovals  # imported late: few sites ask for approvals

    return SiteApprovals.from_settings(settings)


def prepare_image_store(settings: SiteSettings, tell: Callable[[str], None]) -> DecodedImageStore:
    """Return the store of a site's decoded images, and remove stored images that the policy no longer allows."""
    policy = settings.file.policy
    folders = {form: settings.state_folder / f"images-{form}" for form in ("encrypted", "plain")}
    for form, folder in folders.items():
        if form != policy.keep_images:
            try:
                removed = remove_image_store(folder)
            except OSError as error:
                problem = f"cannot be removed ({error.strerror or error})."
                remedy = f'Remove it: policy.keep_images = "{policy.keep_images}" does not allow these decoded images.'
                raise BadInput([Fault(str(folder), problem, remedy)]) from None
            if removed:
                tell(f"removed the decoded images in {folder}: policy.keep_images is {policy.keep_images}")
    limit = int(policy.keep_images_gb * 1e9)
    off = 'policy.keep_images = "no"'
    store = DecodedImageStore(folders.get(policy.keep_images), limit, "policy.keep_images_gb", off, tell=tell)
    if policy.keep_images != "encrypted":
        return store
    try:
        key = read_private_key(settings.key_path)
    except BadInput:  # the command works without a key, and does not report its faults
        return replace(store, folder=None)
    return replace(store, secret=derive_storage_key(key, "images"))


def choose_training_device(settings: SiteSettings) -> str:
    """Return the device that a site trains on: ``cpu`` or ``cuda``."""
    if settings.file.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.file.device


def _select_declared_classes(images: ImageSet, declaration: LabelDeclaration) -> ImageSet:
    return images.select_label_columns(declaration.names).rename_classes(declaration.canonical_names)
