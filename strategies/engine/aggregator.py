"""Aggregators, which collect the updates of one round at the coordinator and compute their mean.

They add updates to running sums on arrival, or store them until the round is complete. Both add in the order of site
names, so that the result has the same bits in any order of arrival. An audit recomputes the means with the same
functions.
"""

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO

import numpy as np

from polyclinic.common.config import ParticipationSection, PrivacySection
from polyclinic.common.models.state import Array, ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.aggregation.bounds import (
    Lengths,
    clip_update_by_median_norms,
    compute_median_part_norms,
    compute_update_part_norms,
    divide_norms_by_medians,
)
from polyclinic.strategies.aggregation.means import (
    HeadMean,
    MergedUpdates,
    RunningUpdateMeans,
    UpdateMeans,
    Weighting,
    WholeHeadMean,
    average_updates,
    compute_site_weight,
)
from polyclinic.strategies.aggregation.robust import average_updates_robustly
from polyclinic.strategies.aggregation.server_optimizer import Moments
from polyclinic.strategies.engine.state import UNSENT_TRUNK, round_global_model
from polyclinic.strategies.local.site_method import SiteMethod
from polyclinic.strategies.methods.base import Method, RoundContext


class StreamingAggregator:
    """Adds each update to running means as soon as the updates of all sites with earlier names are added.

    Args:
        model: The model that the sites started training from.
        sites: Names of the sites whose updates are expected.
        weighting: Rule for a site's weight in every mean.
        head_mean: Makes the object that averages head rows.
        storage: Where updates wait for updates of sites with earlier names.
    """

    def __init__(
        self,
        model: ModelState,
        sites: Iterable[str],
        weighting: Weighting,
        head_mean: HeadMean,
        storage: "UpdateStorage | None" = None,
    ) -> None:
        self._means = RunningUpdateMeans(model, head_mean)
        self._weighting = weighting
        self._next = deque(sorted(sites))
        self._waiting = StoredSiteUpdates(storage or UpdateStorage())
        self._weights: dict[str, float] = {}

    def collect_update(self, reply: TrainReply) -> TrainReply:
        """Add a reply's update to the means, or store it until its turn; return the reply without the update."""
        self._weights[reply.site] = compute_site_weight(reply, self._weighting)
        self._waiting.store_update(reply.site, reply.update, briefly=self._next[0] == reply.site)
        self._add_next_updates()
        return replace(reply, update=ModelGroups())

    def skip_site(self, site: str) -> None:
        """Stop waiting for a site's update, so that updates of sites with later names can be added."""
        self._next.remove(site)
        self._add_next_updates()

    def restore_stored_updates(self, replies: Mapping[str, TrainReply]) -> Mapping[str, TrainReply]:
        """Return the replies unchanged; their updates are already in the means, and are not stored."""
        return replies

    def compute_update_means(self, context: RoundContext, replies: Mapping[str, TrainReply]) -> MergedUpdates:
        """Return the means of all collected updates; ``context`` and ``replies`` are not used."""
        return MergedUpdates(self.finish_update_means())

    def finish_update_means(self) -> UpdateMeans:
        """Add the updates that still wait for missing sites, and return the means of all collected updates."""
        self._next = deque(sorted(self._waiting))
        self._add_next_updates()
        return self._means.current_means

    def _add_next_updates(self) -> None:
        while self._next and self._next[0] in self._waiting:
            site = self._next.popleft()
            self._means.add_update(self._waiting.pop_update(site), self._weights[site])


class BufferedAggregator:
    """Stores a round's updates until the round is complete, for rules that compare all updates.

    The first updates stay in memory. The trunks of later updates are in a file, which is read block by block.

    Args:
        model: The model that the sites started from.
        storage: Where updates wait.
    """

    def __init__(self, method: Method, model: ModelState, storage: "UpdateStorage | None" = None) -> None:
        self._method = method
        self._model = model
        self._waiting = StoredSiteUpdates(storage or UpdateStorage())

    def collect_update(self, reply: TrainReply) -> TrainReply:
        """Store the update of an accepted reply; return the reply without it."""
        self._waiting.store_update(reply.site, reply.update)
        return replace(reply, update=ModelGroups())

    def skip_site(self, site: str) -> None:
        """Delete a site's stored update, if there is one."""
        if site in self._waiting:
            self._waiting.pop_update(site)

    def restore_stored_updates(self, replies: Mapping[str, TrainReply]) -> Mapping[str, TrainReply]:
        """Return the replies with their stored updates."""
        whole = dict[str, TrainReply]()
        for site, reply in replies.items():
            whole[site] = replace(reply, update=self._waiting[site])
        return whole

    def compute_update_means(self, context: RoundContext, replies: Mapping[str, TrainReply]) -> MergedUpdates:
        """Return the means of the updates that ``replies`` contain, by the method's weights or its robust mean."""
        return merge_updates(self._method, context, self._model, replies)


Aggregator = StreamingAggregator | BufferedAggregator


def make_aggregator(
    method: Method, model: ModelState, sites: Collection[str], storage: "UpdateStorage", *, buffered: bool
) -> Aggregator:
    """Return the aggregator for a round: streaming, or buffered if a rule needs all updates of the round together.

    Args:
        storage: Where updates wait.
    """
    if buffered or method.site.parameters.mean is not None:
        return BufferedAggregator(method, model, storage)
    return StreamingAggregator(model, sites, method.site.parameters.weighting, method.head_mean_class, storage)


# ---------------------------------------------------------------------- the rules


def get_update_norm_limit(
    method: SiteMethod, participation: ParticipationSection, privacy: PrivacySection
) -> float | None:
    """Return the largest allowed length of an update, in median lengths of the round; None for no limit.

    There is no limit if the experiment has ``clip = "off"``, if every site trains alone, if all images are pooled at
    one site, or if updates are masked.
    """
    averaged = not method.parts.trains_alone and method.pooled_missing_labels == "no" and not privacy.secure_aggregation
    return participation.clip if averaged and participation.clip != "off" else None


def merge_updates(
    method: Method, context: RoundContext, model: ModelState, replies: Mapping[str, TrainReply]
) -> MergedUpdates:
    """Return the means of a round's updates, by the method's weights or its robust mean.

    Args:
        model: The model that the sites started from.
        replies: Accepted replies, in the order of site names.
    """
    parameters = method.site.parameters
    weights = list[float]()
    for reply in replies.values():
        weights.append(compute_site_weight(reply, parameters.weighting))
    if parameters.mean is not None:
        return average_updates_robustly(model, [reply.update for reply in replies.values()], weights, parameters.mean)
    weighted = method.site_weights(context, replies, weights)
    return MergedUpdates(average_updates(model, list(replies.values()), weighted, method.head_mean_class))


def update_global_model(
    method: Method, server_round: int, means: UpdateMeans, moments: Moments
) -> tuple[ModelState, Moments]:
    """Apply a round's mean updates to the global model; return the new model and the moments for the next round.

    If the model is sent in fewer bits, the new model is rounded to them, so that sites and coordinator have the same
    model. The rounding error is one of the moments, and is added to the model of the next round.
    """
    if method.site.parameters.compress_model == "float32":
        return _apply_mean_updates(method, server_round, means, moments)
    others = dict(moments)
    unsent = others.pop(UNSENT_TRUNK)
    model, updated = _apply_mean_updates(method, server_round, means, MappingProxyType(others))
    return round_global_model(method.site, model, updated, unsent)


def _apply_mean_updates(
    method: Method, server_round: int, means: UpdateMeans, moments: Moments
) -> tuple[ModelState, Moments]:
    optimizer = method.site.parameters.server_optimizer
    if optimizer is None:
        return method.finalize(server_round, means.add_means_to_model(), moments)
    return method.finalize(server_round, *means.apply_server_optimizer(optimizer, moments))


REJECTED_LENGTH_FACTOR = 10.0
"""An update longer than this multiple of the limit is rejected, because no training changes a model so much."""


@dataclass(frozen=True)
class SequentialSiteResult:
    """The result of passing a model through one site in sequential training.

    Attributes:
        model: The model for the next site: changed by the site's update, or unchanged if the update is rejected.
        lengths: Site -> lengths of the parts of its last accepted update, after shortening.
        shortened: A sentence that says how the update was shortened; empty if it was not too long.
        reason: Why the update is rejected; empty if it is accepted.
    """

    model: ModelState
    lengths: Mapping[str, Lengths]
    shortened: str = ""
    reason: str = ""


def add_sequential_site_update(
    model: ModelState, reply: TrainReply, clip: float | None, lengths: Mapping[str, Lengths]
) -> SequentialSiteResult:
    """Add one site's update to a model, shortened to at most ``clip`` times the median length of the sites' updates.

    The median is over each site's last accepted update. With fewer than three such updates, the limit for each part is
    the length of the same part of the model. An update longer than :data:`REJECTED_LENGTH_FACTOR` (10) times the limit
    is rejected.

    Args:
        model: The model that the site received.
        reply: The site's reply with its update.
        clip: The largest length of an update, in median lengths; None for no limit.
        lengths: Site -> lengths of the parts of its last accepted update.
    """
    done = ""
    if clip is not None:
        norms = compute_update_part_norms(reply.update)
        usual = compute_median_part_norms(lengths.values())
        if not usual:
            of_model = compute_update_part_norms(ModelGroups.from_model(model))
            usual = {part: length / clip for part, length in of_model.items() if length}
        if (times := max(divide_norms_by_medians(norms, usual).values(), default=0.0)) > REJECTED_LENGTH_FACTOR * clip:
            reason = f"its update is {times:.3g} times as long as usual: no training moves so far"
            return SequentialSiteResult(model, lengths, reason=reason)
        update, done = clip_update_by_median_norms(reply.update, norms, usual, clip)
        reply = replace(reply, update=update)
        lengths = MappingProxyType({**lengths, reply.site: compute_update_part_norms(update)})
    trained = average_updates(model, [reply], [1.0], WholeHeadMean).add_means_to_model()
    return SequentialSiteResult(trained, lengths, done)


MAX_UPDATE_BYTES_IN_MEMORY = 2**29
"""Largest number of bytes of updates in memory in a simulation, where a file would cost time and save little."""
MAX_UPDATE_BYTES_IN_MEMORY_OVER_NETWORK = 2**25
"""Largest number of bytes of updates in memory in a run over the network.

The coordinator's memory then does not grow with the number of hospitals.
"""
MAX_MAPPED_UPDATES = 128
"""Largest number of updates that are each mapped from a file. A file takes two of a process's descriptors, which are
often limited to 1,024."""


@dataclass(frozen=True)
class UpdateStorage:
    """Where updates wait until the round is complete.

    Attributes:
        folder: Folder of the file with updates for which there is no room in memory; None for the system's temporary
            folder. The file has no name, so that a killed process leaves nothing.
        in_memory: Largest number of bytes of updates in memory; None for :data:`MAX_UPDATE_BYTES_IN_MEMORY`.
    """

    folder: Path | None = None
    in_memory: int | None = None


class StoredSiteUpdates(Mapping[str, ModelGroups]):
    """Stored updates by site: in memory as far as the storage allows; the trunks of further updates are in a file."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._folder = storage.folder
        self._updates = dict[str, ModelGroups]()
        self._bytes = 0
        self._in_memory = MAX_UPDATE_BYTES_IN_MEMORY if storage.in_memory is None else storage.in_memory
        self._file = TrunkSpillFile(storage.folder)
        self._places = dict[str, slice]()

    def store_update(self, site: str, update: ModelGroups, *, briefly: bool = False) -> None:
        """Store a site's update in memory, or the update's trunk on disk if memory is full.

        A trunk that came as a view of a mapped file takes no memory and stays there, as far as files may be open.

        Args:
            briefly: True if the update is removed again at once; then it stays in memory in any case.
        """
        if site in self._updates:
            self.pop_update(site)
        trunk = update.trunk
        size = _count_trunk_bytes(update)
        fits = self._bytes + size <= self._in_memory if size else len(self._updates) < MAX_MAPPED_UPDATES
        if trunk is not None and trunk.size and not briefly and not fits:
            place = self._file.append_trunk(trunk)
            if place is not None:
                self._places[site], update = place, replace(update, trunk=None)
        self._updates[site] = update
        self._bytes += _count_trunk_bytes(update)

    def pop_update(self, site: str) -> ModelGroups:
        """Remove a site's update and return it."""
        update = self[site]
        self._bytes -= _count_trunk_bytes(self._updates.pop(site))
        self._places.pop(site, None)
        if not self._places:
            self._file = TrunkSpillFile(self._folder)  # the old one goes with the last look at it
        return update

    def __getitem__(self, site: str) -> ModelGroups:
        update = self._updates[site]
        place = self._places.get(site)
        return update if place is None else replace(update, trunk=self._file.read_trunk(place))

    def __iter__(self) -> Iterator[str]:
        return iter(self._updates)

    def __len__(self) -> int:
        return len(self._updates)


def _count_trunk_bytes(update: ModelGroups) -> int:
    """Return the size of an update's trunk in bytes; 0 where the trunk is on disk."""
    trunk = update.trunk
    return 0 if trunk is None or is_mapped_from_file(trunk) else trunk.nbytes


def is_mapped_from_file(array: Array) -> bool:
    """Return True if an array is a view of a file that is mapped into memory, and so takes no memory of its own."""
    owner: object = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap)


class TrunkSpillFile:
    """A temporary file that holds the trunks of many updates in sequence; it is deleted when the process ends.

    All trunks share one file, because a process may open only a limited number of files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._mapped = np.empty(0, np.float32)

    def append_trunk(self, trunk: Array) -> slice | None:
        """Append a trunk; return the slice of the file that holds the trunk, or None if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - until the finalizer
                weakref.finalize(self, self._file.close)  # what was mapped stays so
            start = self._file.seek(0, os.SEEK_END)
        except OSError:
            return None
        try:
            left = np.ascontiguousarray(trunk, np.float32).data.cast("B")
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)
            return None
        first = start // trunk.itemsize
        return slice(first, first + trunk.size)

    def read_trunk(self, place: slice) -> Array:
        """Return the trunk in a slice of the file, a read-only float32 array ``(n,)``."""
        if len(self._mapped) < place.stop:
            assert self._file is not None
            self._mapped = np.memmap(self._file, np.float32, mode="r")
        return self._mapped[place]
