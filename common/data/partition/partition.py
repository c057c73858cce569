"""One data set divided over virtual sites: whose images, and which classes each site annotates."""

from common.data.base.image_set import Splits
from common.data.partition.by_class import by_classes
from common.data.partition.by_label import by_labels
from common.data.partition.by_task import by_tasks
from common.data.partition.division import Division, SitePart, site_images
from common.data.partition.spec import DirichletSpec, LabelSkewSpec, PartitionSpec, TasksSpec
from common.data.partition.spec_checks import partition_faults
from common.errors import stop_on

__all__ = ["Division", "SitePart", "partition", "partition_faults", "site_images"]


def partition(splits: Splits, spec: PartitionSpec, seed: int) -> Division:
    """Divide a data set over sites.

    Args:
        seed: Taken where ``spec.seed`` is None.

    Raises:
        BadInput: With all faults.
    """
    seed = seed if spec.seed is None else spec.seed
    stop_on(partition_faults(splits.class_names, spec))
    match spec:
        case LabelSkewSpec() | DirichletSpec():
            return by_labels(splits, spec, seed)
        case TasksSpec():
            return by_tasks(splits, spec)
        case _:
            return Division(splits, by_classes(splits, spec, seed))
