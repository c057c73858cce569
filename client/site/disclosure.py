"""Rules that keep a site from reporting anything about small groups of patients (disclosure control).

The rules count patients and not images, because many images of one patient protect nobody. A class is *hidden* if fewer
patients than the policy's threshold show it, or if fewer do not show it. The site reports neither the counts of a
hidden class nor any metric that depends on them. If every image shows exactly one class, all counts add up to the
number of images, and a single hidden count could be computed from the others; then a second class is hidden too. A few
images that show no class or several, fewer than the threshold, do not change this.

The choice of the second class must not depend on its count, because an attacker who knows the rule would learn from the
choice. The first class by name is hidden, and further classes by name until the hidden images together reach the
threshold. From sums, an attacker then only learns that a hidden count is in a range that includes 0 to the threshold.
For an attacker who also knows this rule, at least (threshold - 1) values of the count remain possible.

Hidden classes are determined from the site's whole table, before the classes of a run are selected. So a class is
hidden in all runs or in none, and the difference of two runs with different class lists discloses nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.metrics.auroc import ClassMetrics
from polyclinic.common.models.zoo.spec import Task
from polyclinic.common.wire.records import Arrays
from polyclinic.data.base.image_set import ImageSet
from polyclinic.strategies.local.method_traits import Statistic

BoolMask = NDArray[np.bool_]
"""Mask of classes, head rows or images; the functions state its shape."""


def count_patients(images: ImageSet) -> int:
    """Count the distinct patients of an image set."""
    return len(np.unique(images.patients))


def mark_classes_of_few_patients(images: ImageSet, smallest: int) -> BoolMask:
    """Mark the classes that fewer than ``smallest`` patients lack (column 0) or show (column 1), ``(classes, 2)``.

    For a class with masks, such as an organ, no figure describes the patients who lack it, so few may lack it.
    """
    kinds = [[len(np.unique(images.patients[column == kind])) for kind in (0, 1)] for column in images.labels.T]
    few: BoolMask = np.array(kinds, np.int64).reshape(-1, 2) < smallest
    if images.masks is not None:
        few[:, 0] = False
    return few


def find_classes_hidden_by_policy(images: ImageSet, smallest: int) -> frozenset[str]:
    """Return the classes whose counts and metrics are not reported.

    A class is hidden if fewer than ``smallest`` patients show it, or if fewer lack it. If one is hidden and nearly all
    images show exactly one class, its count could be computed from the other counts. So further classes are then
    hidden, in the order of names, until at least two are hidden and the hidden classes together have ``smallest``
    images. "Nearly all" means all labelled images except fewer than ``smallest``.
    """
    few = mark_classes_of_few_patients(images, smallest)
    hidden = {name for name, kinds in zip(images.class_names, few, strict=True) if kinds.any()}
    labelled = ~np.isnan(images.labels).all(axis=1)
    others = np.nan_to_num(images.labels[labelled]).sum(axis=1) != 1  # images that show no class or several
    if not hidden or not labelled.any() or others.sum() >= max(smallest, 1):
        return frozenset(hidden)
    shown = dict(zip(images.class_names, (images.labels == 1).sum(axis=0).tolist(), strict=True))
    hidden.add(min(shown))
    for name in sorted(shown):
        if len(hidden) > 1 and sum(shown[other] for other in hidden) >= smallest:
            break
        hidden.add(name)
    return frozenset(hidden)


def mark_images_of_hidden_classes(images: ImageSet, hidden: Collection[str], smallest: int) -> BoolMask:
    """Mark the images ``(n,)`` that show no visible class, if nearly all images show a class; otherwise mark none.

    If nearly all images show some class, an image that shows no visible class must show a hidden one, so its other
    labels would disclose that. "Nearly all" means that the images without any class are from fewer than ``smallest``
    patients. The images without any class are marked too, because an attacker could otherwise distinguish them from
    images of hidden classes.

    Args:
        hidden: The hidden classes; all others are visible.
    """
    shown = images.labels == 1
    labelled = ~np.isnan(images.labels).all(axis=1)
    nothing = labelled & ~shown.any(axis=1)
    if not hidden or len(np.unique(images.patients[nothing])) >= smallest:
        return np.zeros(len(images), np.bool_)
    others = [column for column, name in enumerate(images.class_names) if name not in hidden]
    alone: BoolMask = labelled & ~shown[:, others].any(axis=1)
    return alone


def remove_hidden_labels(
    images: ImageSet, hidden: Collection[str], undisclosable_images: BoolMask, task: Task
) -> ImageSet:
    """Return the images with the labels of hidden classes set to unknown.

    Args:
        undisclosable_images: Mask ``(n,)`` of images that lose all labels; see :func:`mark_images_of_hidden_classes`.
        task: In a multi-class task, an image that shows no visible class loses all labels too.
    """
    columns = [column for column, name in enumerate(images.class_names) if name in hidden]
    labels = images.labels.copy()
    labels[:, columns] = np.nan
    labels[undisclosable_images] = np.nan
    if task == "multi_class":
        labels[~(labels == 1).any(axis=1)] = np.nan
    return replace(images, labels=labels)


def round_count_down(count: int, policy: SitePolicy) -> int:
    """Round a count down to the policy's multiple, so that rounded parts never sum to more than the rounded whole."""
    return count - count % policy.round_counts_to


def mark_head_rows_of_few_patients(images: ImageSet, class_names: Sequence[str], policy: SitePolicy) -> BoolMask:
    """Mark the head rows whose class too few patients lack (column 0) or show (column 1), ``(rows, 2)``.

    Args:
        class_names: The class of each head row; rows of classes that the site does not annotate are not marked.
    """
    few = np.zeros((len(class_names), 2), np.bool_)
    if policy.smallest_count:
        few_of_class = dict(
            zip(images.class_names, mark_classes_of_few_patients(images, policy.smallest_count), strict=True)
        )
        for row, name in enumerate(class_names):
            few[row] = few_of_class.get(name, few[row])
    return few


def suppress_class_metrics(metrics: ClassMetrics, policy: SitePolicy, *, hidden: bool) -> ClassMetrics:
    """Return a class's test metrics for sending: with counts rounded down, or all None if the class is hidden."""
    if hidden or metrics.positives is None or metrics.negatives is None:
        return ClassMetrics(None, None, None, None, None, dict.fromkeys(metrics.more))
    positives, negatives = (round_count_down(count, policy) for count in (metrics.positives, metrics.negatives))
    return replace(metrics, positives=positives, negatives=negatives)


def suppress_statistics_of_few_patients(
    statistics: Arrays, declared: Collection[Statistic], few: BoolMask, policy: SitePolicy
) -> Arrays:
    """Set the entries of a method's statistics that depend on few patients to NaN, and round counts down.

    Args:
        declared: The statistics that the method declares, each with the meaning of its entries.
        few: ``(rows, 2)`` for the model's head rows, as :func:`mark_head_rows_of_few_patients` returns it.
    """
    granularity_of = {statistic.name: statistic.granularity for statistic in declared}
    limited = dict(statistics)
    for name, array in statistics.items():
        granularity = granularity_of[name]
        if granularity == "counts":
            small = few.all(axis=1) | (array < policy.smallest_count)
            limited[name] = np.where(small, np.nan, array - array % policy.round_counts_to).astype(np.float32)
        elif granularity != "images":
            small = few if granularity == "signs" else few[:, 1]
            mask = small.reshape(small.shape + (1,) * (array.ndim - small.ndim))  # broadcast over the other axes
            limited[name] = np.where(mask, np.nan, array).astype(np.float32)
    return limited
