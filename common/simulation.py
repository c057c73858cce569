"""The data of simulated sites: one data set divided by a partition; coordinator and workers compute the same
division.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from polyclinic.common.config import Experiment
from polyclinic.common.contract import LabelContract, LabelDeclaration, PooledLabels, merge_label_declarations
from polyclinic.common.errors import raise_faults
from polyclinic.common.vocabulary import Vocabulary, group_words_by_class, name_images_by_vocabulary
from polyclinic.data.base.image_set import (
    DatasetSplits,
    ImageSet,
    are_all_patients_known,
    concatenate_image_sets,
)
from polyclinic.data.base.spec import DataSpec, PluginDatasetSpec
from polyclinic.data.images.store import DecodedImageStore, open_user_image_store
from polyclinic.data.load import load_dataset
from polyclinic.data.partition.checks import find_partition_faults
from polyclinic.data.partition.division import SitePartition, select_site_images
from polyclinic.data.partition.partition import partition_dataset
from polyclinic.data.sources.plugin import read_class_names_before_items

POOLED_SITE = "pooled"
"""Name of the single site that has the images of all sites."""


@dataclass(frozen=True, eq=False)
class SimulatedData:
    """A simulation's data set and its division over the sites.

    Attributes:
        splits: The data set, to whose rows ``parts`` refers.
        parts: The row numbers and classes of each site.
        server: The coordinator's own images; None if it has none.
        empty_sites: Sites to which the partition gave no training image; they take no part in a run.
    """

    splits: DatasetSplits
    parts: tuple[SitePartition, ...]
    server: DatasetSplits | None = None
    empty_sites: tuple[str, ...] = ()

    @property
    def test_images(self) -> ImageSet:
        """The images on which the coordinator tests the global model."""
        return self.splits.test if self.server is None else self.server.test

    @property
    def patients_known(self) -> bool:
        """True if the data names the patient of every image."""
        parts = (self.splits.train, self.splits.validation, self.splits.test)
        return all(are_all_patients_known(part.patients) for part in parts)

    @property
    def has_unknown_labels(self) -> bool:
        """True if a site has training images with an unknown label for a class that it annotates."""
        labels = self.splits.train.labels
        columns = self.splits.class_names.index
        return any(np.isnan(labels[part.train][:, [*map(columns, part.class_names)]]).any() for part in self.parts)

    @property
    def fewest_site_classes(self) -> int:
        """The smallest number of classes that a site annotates."""
        return max(1, min(len(part.class_names) for part in self.parts))

    @property
    def positive_training_counts(self) -> dict[str, dict[str, int]]:
        """Site -> class that the site annotates -> number of positive training images."""
        shows = self.splits.train.labels == 1
        columns = {name: column for column, name in enumerate(self.splits.class_names)}
        return {
            part.site: {name: int(shows[part.train, columns[name]].sum()) for name in part.class_names}
            for part in self.parts
        }

    @property
    def known_labels(self) -> dict[str, NDArray[np.float32]]:
        """Class -> its known labels, 1 or 0, in all parts of the data, over the images whose site annotates
        the class.
        """
        test = self.test_images.labels
        labels: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.label_contract.class_names}
        for name, class_labels in labels.items():
            column = self.splits.class_names.index(name)
            for part in self.parts:
                if name in part.class_names:
                    class_labels += [self.splits.train.labels[part.train, column]]
                    class_labels += [self.splits.validation.labels[part.validation, column]]
            if name in self.test_images.class_names:
                class_labels += [test[:, self.test_images.class_names.index(name)]]
        joined = {name: np.concatenate(class_labels) for name, class_labels in labels.items()}
        return {name: known[~np.isnan(known)] for name, known in joined.items()}

    @property
    def unlabelled_training_count(self) -> int:
        """Number of training images that have no known label for any class that their site annotates."""
        columns = self.splits.class_names.index
        count = 0
        for part in self.parts:
            labels = self.splits.train.labels[part.train][:, [*map(columns, part.class_names)]]
            count += int(np.isnan(labels).all(axis=1).sum())
        return count

    @property
    def label_contract(self) -> LabelContract:
        """The classes that each site of the partition annotates; a baseline that pools images does not change it."""
        return merge_label_declarations(LabelDeclaration(part.site, part.class_names) for part in self.parts)


@dataclass(frozen=True)
class SimulatedSiteImages:
    """The label declaration and the images of one simulated site."""

    declaration: LabelDeclaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet


_received_data_sets: dict[tuple[str, Path], DatasetSplits] = {}
"""(Spec as JSON, folder) -> data set that another process has read and sent to this process."""
_simulated_data_cache: dict[tuple[object, ...], SimulatedData] = {}
"""The data of the last experiment, by everything that determines them."""


PrintLine = Callable[[str], object]
"""A function that prints a line about progress for the user."""


def load_simulated_data(experiment: Experiment, base: Path, print_line: PrintLine = lambda line: None) -> SimulatedData:
    """Load an experiment's data and divide it over the sites; the result is cached in this process.

    Args:
        experiment: The experiment, with data and partition.
        base: Folder in which relative paths of the experiment start.
        print_line: Prints a line about progress for the user.

    Raises:
        BadInput: With all faults of the data set and the partition.
    """
    assert experiment.data is not None, "checked before"
    assert experiment.partition is not None, "checked before"
    data = experiment.data.model_dump_json()
    parts = experiment.partition.model_dump_json()
    # A worker for sites does not need the coordinator's own images.
    for_sites = (data, base) in _received_data_sets
    server = experiment.server_data.model_dump_json() if experiment.server_data and not for_sites else ""
    vocabulary = experiment.vocabulary
    # The key has texts in place of specs, because specs contain mappings, which cannot be hashed.
    key = data, parts, server, str(vocabulary), experiment.run.seed, base
    if key not in _simulated_data_cache:
        store = open_simulation_image_store(experiment, base, print_line)
        if isinstance(experiment.data, PluginDatasetSpec) and (names := read_class_names_before_items(experiment.data)):
            class_names = tuple(group_words_by_class(names, vocabulary or {}))
            raise_faults(find_partition_faults(class_names, experiment.partition))  # before all pictures are read
        splits = name_parts_by_vocabulary(_load_cached_dataset(data, base, store), vocabulary, "data")
        division = partition_dataset(splits, experiment.partition, experiment.run.seed)
        at_server = division.server
        if server and experiment.server_data:
            server_splits = load_dataset(experiment.server_data, base, store)
            at_server = name_parts_by_vocabulary(server_splits, vocabulary, "server_data")
        _simulated_data_cache.clear()
        _simulated_data_cache[key] = SimulatedData(division.splits, division.parts, at_server, division.empty_sites)
    return _simulated_data_cache[key]


def name_parts_by_vocabulary(splits: DatasetSplits, vocabulary: Vocabulary | None, where: str) -> DatasetSplits:
    """Return all parts of a data set with synonyms in their class names replaced by the study's classes."""
    return DatasetSplits(*(name_images_by_vocabulary(images, vocabulary, where) for images in splits.parts))


def open_simulation_image_store(
    experiment: Experiment, base: Path, print_line: PrintLine = lambda line: None
) -> DecodedImageStore:
    """Return the store (disk cache) for the decoded images of an experiment.

    Args:
        experiment: The experiment, with the settings of the store.
        base: Folder in which relative paths of the experiment start.
        print_line: Prints a line about progress for the user.
    """
    section = experiment.simulation
    return open_user_image_store(
        print_line, str(base / section.image_cache) if section.image_cache else "", section.image_cache_gb
    )


def cache_received_data(experiment: Experiment, base: Path, splits: DatasetSplits) -> None:
    """Store a data set in this process that another process loaded by :func:`load_undivided_data` and sent."""
    assert experiment.data is not None, "checked before"
    clear_simulated_data_cache()
    _received_data_sets.clear()
    _received_data_sets[experiment.data.model_dump_json(), base] = splits


def load_undivided_data(experiment: Experiment, base: Path) -> DatasetSplits:
    """Load an experiment's data set without dividing it over the sites; the result is cached in this process."""
    assert experiment.data is not None, "checked before"
    return _load_cached_dataset(experiment.data.model_dump_json(), base, open_simulation_image_store(experiment, base))


def clear_simulated_data_cache() -> None:
    """Clear the cached data, so that the next run loads it again, in case files or plug-ins have changed."""
    _simulated_data_cache.clear()
    _load_cached_dataset.cache_clear()


@lru_cache(maxsize=1)
def _load_cached_dataset(data: str, base: Path, store: DecodedImageStore) -> DatasetSplits:
    if (received := _received_data_sets.get((data, base))) is not None:
        return received
    return load_dataset(TypeAdapter(DataSpec).validate_json(data), base, store)


def select_simulated_site_images(data: SimulatedData, index: int, pooling: PooledLabels) -> SimulatedSiteImages:
    """Return labels and images of the site at ``index``, or of a single site that pools the images of all sites.

    Args:
        data: The divided data set.
        index: Index of the site; ignored if the images are pooled.
        pooling: ``no`` for one site. Otherwise how pooled images are labelled for a class that their site does not
            annotate: absent (``negative``), unknown (``masked``), or with the true label (``known``).
    """
    if pooling == "no":
        part = data.parts[index]
        images = select_site_images(data.splits, part)
        declaration = LabelDeclaration(part.site, part.class_names)
        return SimulatedSiteImages(declaration, images.train, images.validation, images.test)
    names = data.label_contract.class_names
    splits = data.splits
    train = [_relabel_pooled_images(splits.train, part, part.train, names, pooling) for part in data.parts]
    validation = [
        _relabel_pooled_images(splits.validation, part, part.validation, names, pooling) for part in data.parts
    ]
    own_rows = [part.test for part in data.parts if part.test is not None]
    test = splits.test.select_rows(np.concatenate(own_rows)) if own_rows else splits.test
    return SimulatedSiteImages(
        LabelDeclaration(POOLED_SITE, names),
        concatenate_image_sets(train),
        concatenate_image_sets(validation),
        test.select_label_columns(names),
    )


def select_site_test_images(data: SimulatedData) -> dict[str, ImageSet]:
    """Return site -> its test images; a site without test images has no entry and is tested on the whole test part."""
    return {part.site: data.splits.test.select_rows(part.test) for part in data.parts if part.test is not None}


def _relabel_pooled_images(
    images: ImageSet, part: SitePartition, rows: NDArray[np.intp], names: tuple[str, ...], pooling: PooledLabels
) -> ImageSet:
    """Return images of one site with one label column for each of ``names``, so that several sites can be pooled.

    Args:
        images: The images of all sites.
        part: The site, with the classes that it annotates.
        rows: Row numbers of the site's images in ``images``.
        names: Names of the label columns.
        pooling: The labels of a class that the site does not annotate: 0 (``negative``), NaN (``masked``) or the true
            ones (``known``).
    """
    site_images = images.select_rows(rows).select_label_columns(names)
    if pooling == "known":
        return site_images
    annotated = np.array([name in part.class_names for name in names])
    other_label = np.float32(0.0 if pooling == "negative" else np.nan)
    return replace(site_images, labels=np.where(annotated, site_images.labels, other_label).astype(np.float32))
