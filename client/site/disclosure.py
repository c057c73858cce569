"""Rules that keep a site from reporting anything about small groups of patients.

Patients are counted, not images: many images of one patient are no crowd. A class with fewer patients than the policy's
threshold who show it, or fewer who do not, is *hidden*: neither of its counts is reported, nor any figure that rests on
it. Where every image shows exactly one class the counts add up to all images, so that one hidden count alone could be
worked out from the others; then another class is hidden with it. Fewer exceptions than the threshold change nothing.

The choice of that other class must not depend on its count, because somebody who knows this rule would learn from the
choice. The first class by name is hidden, and more by name while the hidden images together are fewer than the
threshold. Sums then leave every hidden count anything from 0 to the threshold at least; to somebody who also knows this
rule, each can still be any of as many values as there are counts from 1 to the threshold less one.

Hidden classes are found from the site's whole table, before the classes of a run are selected: runs with other class
lists then report parts of the same, and their difference discloses nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from client.site.policy import Policy
from common.data.base.image_set import ImageSet
from common.metrics.auroc import ClassMetrics
from common.models.zoo.spec import Task
from common.wire.records import Arrays
from strategies.local.site_method import Statistic

Few = NDArray[np.bool_]


def count_patients(images: ImageSet) -> int:
    """Count distinct patients."""
    return len(np.unique(images.patients))


def mark_classes_below_threshold(images: ImageSet, smallest: int) -> Few:
    """Mark classes with fewer patients than the threshold: ``[:, 0]`` without the class, ``[:, 1]`` with it."""
    kinds = [[len(np.unique(images.patients[column == kind])) for kind in (0, 1)] for column in images.labels.T]
    return np.array(kinds, np.int64).reshape(-1, 2) < smallest


def find_hidden_classes(images: ImageSet, smallest: int) -> frozenset[str]:
    """Find the hidden classes: no count and no figure of them is reported."""
    few = mark_classes_below_threshold(images, smallest)
    hidden = {name for name, kinds in zip(images.class_names, few, strict=True) if kinds.any()}
    labelled = ~np.isnan(images.labels).all(axis=1)
    others = np.nan_to_num(images.labels[labelled]).sum(axis=1) != 1  # images that do not show one class each
    if not hidden or not labelled.any() or others.sum() >= max(smallest, 1):
        return frozenset(hidden)
    shown = dict(zip(images.class_names, (images.labels == 1).sum(axis=0).tolist(), strict=True))
    hidden.add(min(shown))
    for name in sorted(shown):
        if len(hidden) > 1 and sum(shown[other] for other in hidden) >= smallest:
            break
        hidden.add(name)
    return frozenset(hidden)


def mark_images_of_hidden_classes(images: ImageSet, hidden: Collection[str], smallest: int) -> Few:
    """Mark images ``(n,)`` that show hidden classes only, in data where nearly all images show some class.

    There the known absence of all other classes discloses that an image shows a hidden one. That holds where classes
    exclude one another, and where one of several means that an image shows none of the others. "Nearly all" is all but
    images of fewer patients than the threshold; images that show no class are marked too, since they would tell the
    others apart.
    """
    shown, labelled = images.labels == 1, ~np.isnan(images.labels).all(axis=1)
    nothing = labelled & ~shown.any(axis=1)
    if not hidden or len(np.unique(images.patients[nothing])) >= smallest:
        return np.zeros(len(images), np.bool_)
    others = [column for column, name in enumerate(images.class_names) if name not in hidden]
    alone: Few = labelled & ~shown[:, others].any(axis=1)
    return alone


def remove_hidden_labels(images: ImageSet, hidden: Collection[str], unsaid: Few, task: Task) -> ImageSet:
    """Return images whose labels of hidden classes are unknown.

    Args:
        unsaid: Mask ``(n,)`` of images without any known label; see :func:`mark_images_of_hidden_classes`.
        task: In a multi-class task an image that shows none of the remaining classes gets no label at all.
    """
    columns = [column for column, name in enumerate(images.class_names) if name in hidden]
    labels = images.labels.copy()
    labels[:, columns] = np.nan
    labels[unsaid] = np.nan
    if task == "multi_class":
        labels[~(labels == 1).any(axis=1)] = np.nan
    return replace(images, labels=labels)


def round_count_down(count: int, policy: Policy) -> int:
    """Round a count down to the policy's multiple; rounded down, parts never exceed their whole."""
    return count - count % policy.round_counts_to


def mark_rows_below_threshold(images: ImageSet, class_names: Sequence[str], policy: Policy) -> Few:
    """Return :func:`mark_classes_below_threshold` for a head's rows; False for classes that the site lacks."""
    few = np.zeros((len(class_names), 2), np.bool_)
    if policy.smallest_count:
        few_of_class = dict(
            zip(images.class_names, mark_classes_below_threshold(images, policy.smallest_count), strict=True)
        )
        for row, name in enumerate(class_names):
            few[row] = few_of_class.get(name, few[row])
    return few


def suppress_class_metrics(metrics: ClassMetrics, policy: Policy, *, hidden: bool) -> ClassMetrics:
    """Return a class's test result as it leaves the site: rounded counts, and nothing for a hidden class."""
    if hidden or metrics.positives is None or metrics.negatives is None:
        return ClassMetrics(None, None, None, None, None, dict.fromkeys(metrics.more))
    positives, negatives = (round_count_down(count, policy) for count in (metrics.positives, metrics.negatives))
    return replace(metrics, positives=positives, negatives=negatives)


def suppress_small_statistics(statistics: Arrays, declared: Collection[Statistic], few: Few, policy: Policy) -> Arrays:
    """Replace the entries of a method's statistics that rest on few patients by NaN.

    Args:
        few: ``(rows, 2)`` for the classes of the head's rows; see :func:`mark_classes_below_threshold`.
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
            place = small.reshape(small.shape + (1,) * (array.ndim - small.ndim))
            limited[name] = np.where(place, np.nan, array).astype(np.float32)
    return limited
