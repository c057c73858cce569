"""The result of a partition: for each simulated site, its images and the classes that it annotates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.base.image_set import DatasetSplits, ImageSet

IndexArray = NDArray[np.intp]


@dataclass(frozen=True)
class SitePartition:
    """The images and the classes of one site.

    Attributes:
        class_names: The classes that the site annotates, sorted.
        train: Indices of the site's images in the training part of the data set.
        validation: Indices of the site's images in the validation part.
        test: Indices of the site's images in the test part; None if all sites are tested on the whole test part.
    """

    site: str
    class_names: tuple[str, ...]
    train: IndexArray
    validation: IndexArray
    test: IndexArray | None = None


@dataclass(frozen=True)
class PartitionedDataset:
    """A data set that is partitioned over sites.

    Attributes:
        splits: The images; ``parts`` has indices into them. They may be split differently than the original data set.
        parts: The sites, in the order of their names.
        server: Images of the coordinator; None in most partitions.
        empty_sites: Names of sites without training images, which are not in ``parts``.
    """

    splits: DatasetSplits
    parts: tuple[SitePartition, ...]
    server: DatasetSplits | None = None
    empty_sites: tuple[str, ...] = ()


def select_site_images(splits: DatasetSplits, part: SitePartition) -> DatasetSplits:
    """Return the images of a site, with only the label columns that it annotates."""
    test = splits.test if part.test is None else splits.test.select_rows(part.test)
    sets = (splits.train.select_rows(part.train), splits.validation.select_rows(part.validation), test)
    return DatasetSplits(*(images.select_label_columns(part.class_names) for images in sets))


def make_numbered_site_names(stem: str, count: int) -> tuple[str, ...]:
    """Return numbered site names with leading zeros, such as ``("site-01", ..., "site-12")``."""
    return tuple(f"{stem}-{number:0{len(str(count))}}" for number in range(1, count + 1))


def gather_site_images(images: ImageSet, rows: Sequence[IndexArray]) -> tuple[ImageSet, list[IndexArray]]:
    """Concatenate the images of all sites; return them, and the indices of each site's images in the result.

    Args:
        rows: For each site, indices into ``images``.
    """
    ends = np.cumsum([len(of_site) for of_site in rows])
    return images.select_rows(np.concatenate(rows)), np.split(np.arange(ends[-1]), ends[:-1])


def drop_skipped_images_list(images: ImageSet) -> ImageSet:
    """Return the images without their list of unreadable files, so that the files are not reported twice."""
    return replace(images, skipped=(), missing=0)
