"""The sites of a simulation: one data set, cut by a partition; the same on the coordinator and in every worker."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from common.config import Experiment
from common.contract import Declaration, LabelContract, merge_declarations
from common.data.base.image_set import ImageSet, Splits, are_known, joined
from common.data.base.spec import DataSpec
from common.data.load import load
from common.data.partition.partition import SitePart, partition, site_images
from common.data.partition.spec import PartitionSpec

POOLED = "pooled"
Pooling = Literal["no", "negative", "masked", "known"]


@dataclass(frozen=True, eq=False)
class SimulatedData:
    """A data set and who holds which part of it; equal to itself alone.

    Attributes:
        splits: What the rows of ``parts`` count in.
        server: Images that the coordinator holds itself; None where the partition gives it none.
    """

    splits: Splits
    parts: tuple[SitePart, ...]
    server: Splits | None = None

    @property
    def test(self) -> ImageSet:
        """What the coordinator tests the global model on."""
        return self.splits.test if self.server is None else self.server.test

    @property
    def patients_known(self) -> bool:
        """Whether the data said of every image whose it is."""
        parts = (self.splits.train, self.splits.validation, self.splits.test)
        return all(are_known(part.patients) for part in parts)

    @property
    def positives(self) -> dict[str, dict[str, int]]:
        """Site -> class that it annotates -> its training images that show it."""
        shows = self.splits.train.labels == 1
        columns = {name: column for column, name in enumerate(self.splits.class_names)}
        return {
            part.site: {name: int(shows[part.train, columns[name]].sum()) for name in part.class_names}
            for part in self.parts
        }

    @property
    def contract(self) -> LabelContract:
        """The label contract of the sites as the partition made them, also where a baseline pools them."""
        return merge_declarations(Declaration(part.site, part.class_names) for part in self.parts)


@dataclass(frozen=True)
class SiteImages:
    """What one simulated site has."""

    declaration: Declaration
    train: ImageSet
    validation: ImageSet
    test: ImageSet


_received: dict[tuple[str, Path], Splits] = {}
"""Data sets that another process has read for this one, by their spec and folder."""


def simulated_data(experiment: Experiment, base: Path) -> SimulatedData:
    """Load and cut the data of an experiment; kept in this process for the next site that asks.

    Raises:
        BadInput: With all faults of the data set and the partition.
    """
    assert experiment.data is not None, "checked before"
    assert experiment.partition is not None, "checked before"
    data, parts = experiment.data.model_dump_json(), experiment.partition.model_dump_json()
    for_sites = (data, base) in _received  # they need nothing of the coordinator's own
    server = experiment.server_data.model_dump_json() if experiment.server_data and not for_sites else ""
    return _simulated_data(data, parts, server, experiment.run.seed, base)


def receive_data(experiment: Experiment, base: Path, splits: Splits) -> None:
    """Serve sites of this experiment from a data set that another process has read, :func:`whole_data` of it."""
    assert experiment.data is not None, "checked before"
    forget_data()
    _received.clear()
    _received[experiment.data.model_dump_json(), base] = splits


def whole_data(experiment: Experiment, base: Path) -> Splits:
    """The data set of an experiment before it is cut; kept, too."""
    assert experiment.data is not None, "checked before"
    return _whole_data(experiment.data.model_dump_json(), base)


def forget_data() -> None:
    """Read the data anew for the next run: files, and what plug-ins return, may have changed since."""
    _simulated_data.cache_clear()
    _whole_data.cache_clear()


@lru_cache(maxsize=1)
def _simulated_data(data: str, parts: str, server: str, seed: int, base: Path) -> SimulatedData:
    # Keyed by text, for specs hold mappings that cannot be hashed.
    splits = _whole_data(data, base)
    division = partition(splits, TypeAdapter(PartitionSpec).validate_json(parts), seed)
    own = load(TypeAdapter(DataSpec).validate_json(server), base) if server else division.server
    return SimulatedData(division.splits, division.parts, own)


@lru_cache(maxsize=1)
def _whole_data(data: str, base: Path) -> Splits:
    if (received := _received.get((data, base))) is not None:
        return received
    return load(TypeAdapter(DataSpec).validate_json(data), base)


def simulated_site(data: SimulatedData, index: int, pooling: Pooling) -> SiteImages:
    """The images of site ``index``, or of the one pooled site."""
    if pooling != "no":
        return _pooled(data, pooling)
    part = data.parts[index]
    own = site_images(data.splits, part)
    return SiteImages(Declaration(part.site, part.class_names), own.train, own.validation, own.test)


def site_test_images(data: SimulatedData) -> dict[str, ImageSet]:
    """Test images of the sites that have their own; every other site is tested on the whole test part."""
    return {part.site: data.splits.test.rows(part.test) for part in data.parts if part.test is not None}


def _pooled(data: SimulatedData, pooling: Pooling) -> SiteImages:
    """All sites' images in one place.

    ``negative`` takes a class that an image's site does not annotate as absent, ``masked`` as unknown, ``known`` as it
    truly is.
    """
    names = data.contract.class_names
    train = [_seen_by(data.splits.train, part, part.train, names, pooling) for part in data.parts]
    validation = [_seen_by(data.splits.validation, part, part.validation, names, pooling) for part in data.parts]
    test = _tested(data).only_classes(names)
    return SiteImages(Declaration(POOLED, names), joined(train), joined(validation), test)


def _tested(data: SimulatedData) -> ImageSet:
    """All test images of the sites that have their own, else the whole test part."""
    own = [part.test for part in data.parts if part.test is not None]
    return data.splits.test.rows(np.concatenate(own)) if own else data.splits.test


def _seen_by(
    images: ImageSet, part: SitePart, rows: NDArray[np.intp], names: tuple[str, ...], pooling: Pooling
) -> ImageSet:
    """One site's rows with the columns of all classes, its unannotated ones filled in as ``pooling`` says."""
    seen = images.rows(rows).only_classes(names)
    if pooling == "known":
        return seen
    annotated = np.array([name in part.class_names for name in names])
    filling = np.float32(0.0 if pooling == "negative" else np.nan)
    return replace(seen, labels=np.where(annotated, seen.labels, filling).astype(np.float32))
