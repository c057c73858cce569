"""Settings of the partition of a data set over simulated sites, as immutable pydantic models."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from polyclinic.data.base.names import Name
from polyclinic.data.base.spec import BaseDatasetSpec, ClassNames, Count, Fraction, LegacySeed


class BaseClassPartitionSpec(BaseDatasetSpec):
    """Common settings of all partitions that choose the images of a site independently of its classes.

    Attributes:
        images: ``"patients"`` distributes patients over sites; ``"source"`` makes each centre of the data a site of
            that name.
        seed: The seed of the distribution; None takes the run's seed.
        size_skew: When patients are distributed, site n gets a share in proportion to ``n ** -size_skew``: 0 gives
            equal shares, 1 gives the first of twelve sites a third of all patients.
    """

    size_skew: Annotated[float, Field(ge=0, le=3)] = 0.0
    images: Literal["patients", "source"] = "patients"
    seed: Annotated[int, Field(ge=0)] | None = None


class ClassSubsetsPartitionSpec(BaseClassPartitionSpec):
    """Some classes are annotated by all sites, and each other class by exactly one site.

    Attributes:
        sites: Number of sites; may be left out if ``images = "source"``.
        shared: The classes that all sites annotate, or how many of them to draw at random.
        minimum_positives: Positive training images that a site should have to get a class that is not shared.
    """

    kind: Literal["class_subsets"]
    sites: Count | None = None
    shared: Annotated[int, Field(ge=0)] | tuple[Name, ...] = 0
    minimum_positives: Annotated[int, Field(ge=0)] = 0


class ClassListsPartitionSpec(BaseClassPartitionSpec):
    """Each site annotates the classes that the configuration lists for it.

    With ``images = "source"``, each hospital with training images in the data set is a site, under the hospital's name.

    Attributes:
        lists: The classes by site name. With ``images = "source"``, hospitals with only test images may be listed too.
        test_labels: Used only with ``images = "source"``. ``"listed"`` keeps a test label only if the image's hospital
            lists the class; all other test labels become unknown. ``"all"`` keeps all test labels, for data in which
            every hospital looked for every class.
    """

    kind: Literal["class_lists"]
    lists: Annotated[Mapping[Name, ClassNames], Field(min_length=1)]
    test_labels: Literal["listed", "all"] = "listed"


class PaperTablePartitionSpec(BaseClassPartitionSpec):
    """Each site annotates the classes of a table in the surgical aggregation paper, for NIH ChestX-ray14.

    Attributes:
        table: ``"clients"`` for the experiments with different numbers of sites, ``"shared"`` for the experiments in
            which four sites share different classes.
        row: For ``"clients"`` the number of sites (2, 3, 4, 5, 6, 8, 10), for ``"shared"`` the number of the experiment
            (1 to 7).
    """

    kind: Literal["class_table"]
    table: Literal["clients", "shared"]
    row: int


class RandomOwnersPartitionSpec(BaseClassPartitionSpec):
    """Each class is annotated by a random number of sites, drawn uniformly from 1 to all; each site gets a class.

    Attributes:
        sites: Number of sites; may be left out if ``images = "source"``.
    """

    kind: Literal["random_owners"]
    sites: Count | None = None


class MissingClassesPartitionSpec(BaseClassPartitionSpec):
    """Each site annotates all classes except ``missing`` random classes, as in FedMLP (Sun et al., MICCAI 2024).

    If that leaves one class per site, nothing is drawn: the sites annotate the classes in turn.

    Attributes:
        sites: Number of sites; may be left out if ``images = "source"``.
        missing: Number of classes that a site does not annotate.
        lists_seed: The seed for drawing the classes; the default is the seed of the paper.
    """

    kind: Literal["missing_classes"]
    sites: Count | None = None
    missing: Annotated[int, Field(ge=0)]
    lists_seed: Annotated[int, Field(ge=0)] = 1037


class LabelSkewPartitionSpec(BaseDatasetSpec):
    """All sites annotate all classes but hold different numbers of images of each, as in FedSLD (Luo & Wu 2021).

    Only for data with one class per image. Each site has its own test images, in the same proportions as its training
    images.

    Attributes:
        shards: ``"practical"``: one site has 80 % of a class, one 10 %, and each other site 1 %;
            ``"pathological"``: each site has two classes.
        sites: Number of sites.
        seed: The seed of the distribution, by default that of the paper's code; None takes the run's seed.
        validation_fraction: Fraction of each site's training images held out for validation.
    """

    kind: Literal["label_skew"]
    shards: Literal["practical", "pathological"]
    sites: Annotated[int, Field(ge=2)] = 12
    seed: LegacySeed | None = 42
    validation_fraction: Fraction = 0.0


class DirichletPartitionSpec(BaseDatasetSpec):
    """Like ``label_skew``, but the proportions of each class are drawn from a Dirichlet distribution.

    Attributes:
        alpha: Concentration of the distribution: 0.1 is very uneven, 100 almost even.
        sites: Number of sites. A site without training images is named and is not in the run.
        seed: The seed of the distribution; None takes the run's seed.
        validation_fraction: Fraction of each site's training images held out for validation.
    """

    kind: Literal["dirichlet"]
    alpha: Annotated[float, Field(gt=0)]
    sites: Count
    seed: LegacySeed | None = None
    validation_fraction: Fraction = 0.0


class TaskMixturePartitionSpec(BaseDatasetSpec):
    """Each task of a mixture has several sites; the coordinator has images too, as in UniFed (Hassani & Rekik 2024).

    Only the mixture's training part is used. The share of each site and of the coordinator is split 70/10/20.

    Attributes:
        sites_per_task: Number of sites of each task.
        seed: The seed of the distribution; by default that of the paper's code.
        split: ``"strong"``: the classes of a task are distributed over its sites unevenly, by chance; ``"moderate"``:
            in equal numbers.
        server_fraction: Fraction of each task's images that the coordinator holds.
        limit: Maximum number of patients per task; the first in the file are taken, with ``"moderate"`` equally many of
            each class. An image whose patient is unknown counts as a patient.
    """

    kind: Literal["tasks"]
    sites_per_task: Count = 8
    split: Literal["strong", "moderate"]
    server_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    limit: Count | None = None
    seed: LegacySeed = 42


ClassPartitionSpec = (
    ClassSubsetsPartitionSpec
    | ClassListsPartitionSpec
    | PaperTablePartitionSpec
    | RandomOwnersPartitionSpec
    | MissingClassesPartitionSpec
)
LabelPartitionSpec = LabelSkewPartitionSpec | DirichletPartitionSpec
PartitionSpec = Annotated[
    ClassPartitionSpec | LabelPartitionSpec | TaskMixturePartitionSpec, Field(discriminator="kind")
]
