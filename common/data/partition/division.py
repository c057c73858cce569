"""The result of every partition: the images of each site, and the classes that it annotates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.data.base.image_set import ImageSet, Splits

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class SitePartition:
    """The images and the classes of one site.

    Attributes:
        class_names: The classes it annotates, sorted.
        train: Rows of the data set's train part.
        validation: Rows of its validation part.
        test: Rows of its test part that are this site's own; None where all sites test on the whole of it.
    """

    site: str
    class_names: tuple[str, ...]
    train: Rows
    validation: Rows
    test: Rows | None = None


@dataclass(frozen=True)
class PartitionedDataset:
    """A data set divided over sites.

    Attributes:
        splits: The images that the rows of ``parts`` count in; a partition may cut the parts of a data set anew.
        parts: The sites, in the order of their names.
        server: Images that the coordinator holds itself; None in most partitions.
        empty_sites: Sites to which no training image was dealt; they have no part.
    """

    splits: Splits
    parts: tuple[SitePartition, ...]
    server: Splits | None = None
    empty_sites: tuple[str, ...] = ()


def site_images(splits: Splits, part: SitePartition) -> Splits:
    """Return a site's images with the label columns it annotates; the others are gone."""
    test = splits.test if part.test is None else splits.test.select_rows(part.test)
    sets = (splits.train.select_rows(part.train), splits.validation.select_rows(part.validation), test)
    return Splits(*(images.only_classes(part.class_names) for images in sets))


def site_names(stem: str, count: int) -> tuple[str, ...]:
    """Return numbered names, which sort as their numbers do: ``("site-01", ..., "site-12")``."""
    return tuple(f"{stem}-{number:0{len(str(count))}}" for number in range(1, count + 1))


def gather_site_images(images: ImageSet, rows: Sequence[Rows]) -> tuple[ImageSet, list[Rows]]:
    """Return the images of all sites, one site after the other, and each site's rows in them.

    Args:
        rows: Rows of ``images``, for each site.
    """
    ends = np.cumsum([len(of_site) for of_site in rows])
    return images.select_rows(np.concatenate(rows)), np.split(np.arange(ends[-1]), ends[:-1])


def without_skipped_list(images: ImageSet) -> ImageSet:
    """Return the images without their list of unreadable files, so that these are not reported twice."""
    return replace(images, skipped=(), missing=0)
