"""Settings of the division of a data set over sites in a config file: checked by pydantic, unchanging afterwards."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from common.data.base.names import Name
from common.data.base.spec import BaseDataSpec, ClassNames, Count, Fraction, LegacySeed


class SitesPartitionSpec(BaseDataSpec):
    """Settings of all partitions that deal patients or centres, and deal classes apart from them.

    Attributes:
        images: ``"patients"`` deals patients over sites; ``"source"`` makes each source centre a site, under its name.
        seed: The seed of the deal; the run's own where None.
        size_skew: Where patients are dealt, the n-th site gets a share in proportion to ``n ** -size_skew``; 0 deals
            equal numbers, 1 gives the first of twelve sites a third of all.
    """

    size_skew: Annotated[float, Field(ge=0, le=3)] = 0.0
    images: Literal["patients", "source"] = "patients"
    seed: Annotated[int, Field(ge=0)] | None = None


class ClassSubsetsSpec(SitesPartitionSpec):
    """Some classes are shared by all sites, each other class is annotated by exactly one site.

    Attributes:
        sites: Number of sites; with ``images = "source"`` it may be left out.
        shared: The classes that all sites share, or their number, of which as many are drawn at random.
        minimum_positives: Deal a class to a site with fewer positive training images only if no other site has enough.
    """

    kind: Literal["class_subsets"]
    sites: Count | None = None
    shared: Annotated[int, Field(ge=0)] | tuple[Name, ...] = 0
    minimum_positives: Annotated[int, Field(ge=0)] = 0


class ClassListsSpec(SitesPartitionSpec):
    """The classes of every site are given, by the site's name.

    Attributes:
        lists: With ``images = "source"`` also a centre that has test images only may stand here.
        test_labels: Only with ``images = "source"``. ``"listed"``: in test images, too, a class that the image's centre
            does not list is unknown, because nobody has looked for it; ``"all"`` keeps all labels of test images, for
            data in which every class was looked for everywhere.
    """

    kind: Literal["class_lists"]
    lists: Annotated[Mapping[Name, ClassNames], Field(min_length=1)]
    test_labels: Literal["listed", "all"] = "listed"


class ClassTableSpec(SitesPartitionSpec):
    """The classes of every site are those of a row of the surgical aggregation paper's NIH tables.

    Attributes:
        table: ``"clients"``: sweep over the number of sites; ``"shared"``: sweep over the shared classes, four sites.
        row: K for ``"clients"`` (2, 3, 4, 5, 6, 8, 10), the run's number for ``"shared"`` (1 to 7).
    """

    kind: Literal["class_table"]
    table: Literal["clients", "shared"]
    row: int


class RandomOwnersSpec(SitesPartitionSpec):
    """Each class is annotated by a number of sites drawn uniformly from 1 to all; every site has at least one class."""

    kind: Literal["random_owners"]
    sites: Count | None = None


class MissingClassesSpec(SitesPartitionSpec):
    """Each site annotates all classes but ``missing`` drawn ones, as in FedMLP (Sun et al., MICCAI 2024).

    Where that leaves one class a site, site i annotates class i, and nothing is drawn.

    Attributes:
        sites: Number of sites; with ``images = "source"`` it may be left out.
        lists_seed: The seed of the draw of class lists, the paper's own by default.
    """

    kind: Literal["missing_classes"]
    sites: Count | None = None
    missing: Annotated[int, Field(ge=0)]
    lists_seed: Annotated[int, Field(ge=0)] = 1037


class LabelSkewSpec(BaseDataSpec):
    """All sites annotate all classes and differ in how many images of each they hold, as in FedSLD (Luo & Wu 2021).

    For data with one class per image. Each site has test images of its own, dealt like its training images.

    Attributes:
        shards: ``"practical"``: of each class one site holds 80 %, one 10 %, the others 1 % each;
            ``"pathological"``: each site holds two classes.
        seed: The seed of the deal, that of the paper's code by default; the run's own where None.
        validation_fraction: Part of each site's training images held out.
    """

    kind: Literal["label_skew"]
    shards: Literal["practical", "pathological"]
    sites: Annotated[int, Field(ge=2)] = 12
    seed: LegacySeed | None = 42
    validation_fraction: Fraction = 0.0


class DirichletSpec(BaseDataSpec):
    """Like ``label_skew``, with each class dealt over sites in proportions drawn from a Dirichlet distribution.

    Attributes:
        alpha: Concentration: 0.1 is very uneven, 100 almost even.
        seed: The seed of the deal; the run's own where None.
        validation_fraction: Part of each site's training images held out.
    """

    kind: Literal["dirichlet"]
    alpha: Annotated[float, Field(gt=0)]
    sites: Count
    seed: LegacySeed | None = None
    validation_fraction: Fraction = 0.0


class TaskPartitionSpec(BaseDataSpec):
    """Each task of a mixture has some sites, the coordinator has its own images, as in UniFed (Hassani & Rekik 2024).

    Only the mixture's train part is used: each site and the coordinator divide their share of it 70/10/20.

    Attributes:
        split: ``"strong"``: sites have their task's classes as unevenly as they come; ``"moderate"``: in equal numbers.
        server_fraction: Part of each task's images that the coordinator holds.
        limit: Use at most so many patients of each task, in file order ("moderate": evenly over classes). An image
            without a patient counts as one.
    """

    kind: Literal["tasks"]
    sites_per_task: Count = 8
    split: Literal["strong", "moderate"]
    server_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    limit: Count | None = None
    seed: LegacySeed = 42


ClassPartitionSpec = ClassSubsetsSpec | ClassListsSpec | ClassTableSpec | RandomOwnersSpec | MissingClassesSpec
LabelPartitionSpec = LabelSkewSpec | DirichletSpec
PartitionSpec = Annotated[ClassPartitionSpec | LabelPartitionSpec | TaskPartitionSpec, Field(discriminator="kind")]
