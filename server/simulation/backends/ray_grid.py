"""A Flower ``Grid`` whose sites are simulated by workers on Ray."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Error, Message

from polyclinic.common.system.resources import reuse_large_buffers
from polyclinic.data.base.image_set import (
    DatasetSplits,
    LazyPictures,
    list_array_dtypes_and_shapes,
    serialize_dataset_splits,
    view_array_as_bytes,
)
from polyclinic.data.images.pixel_cache import MemoryMappedPictures
from polyclinic.server.simulation.backends.inline import (
    CLIENT_APP_RAISED,
    FIRST_NODE,
    RunOnGrid,
    SimulatedGrid,
    silence_flower_logs,
)
from polyclinic.server.simulation.backends.ray_process import RayDriverHandle
from polyclinic.server.simulation.backends.transfer import pack_flower_message, unpack_flower_message

POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class SimulatedRunData:
    """The data of a run that workers on Ray need.

    Attributes:
        experiment: The experiment as JSON.
        base: Folder from which relative paths in the experiment start.
        run_folder: The run folder, with a folder per site in ``sites``; only this machine accesses it.
        names: Names of the sites, in the order of the partition.
        images: All images of the data set, of which each site uses its part.
        record_event: Records an event of the run, by name and fields.
    """

    experiment: str
    base: Path
    run_folder: Path
    names: tuple[str, ...]
    images: DatasetSplits
    record_event: Callable[..., None] = lambda event, **facts: None


def run_on_ray(run_on_grid: RunOnGrid, run: SimulatedRunData, process: RayDriverHandle) -> None:
    """Call a function with a Grid whose sites are simulated by workers on Ray.

    Args:
        run_on_grid: Runs the coordinator over the Grid.
        process: The process that drives Ray.
    """
    silence_flower_logs()
    reuse_large_buffers()
    try:
        run_on_grid(RayGrid(run, process))
    finally:
        process.close()


class RayGrid(SimulatedGrid):
    """A Flower Grid that passes messages to the process that drives Ray, and returns the replies.

    Attributes:
        workers: Number of sites that train at a time.
    """

    def __init__(self, run: SimulatedRunData, process: RayDriverHandle) -> None:
        super().__init__(len(run.names))
        self._record_event = run.record_event
        self._process = process
        self._pending: dict[str, Message] = {}
        # Images of a user's own data set may be drawn at random at each reading; then workers read them themselves.
        draws = any(isinstance(part.stored, LazyPictures) and part.stored.draws for part in run.images.parts)

        def describe_mapped_file(stored: LazyPictures) -> dict[str, Any] | None:
            """Describe a memory-mapped file, which workers on this machine map too instead of receiving its bytes."""
            if isinstance(stored, MemoryMappedPictures) and not process.settings.address:
                return stored.describe_for_other_process()
            return None

        facts = None
        arrays = list[Any]()
        if not draws:
            facts, arrays = serialize_dataset_splits(run.images, describe_mapped_file)
        about = {
            "kind": "begin",
            "experiment": run.experiment,
            "base": str(run.base.resolve()),
            "run_folder": str(run.run_folder.resolve()),
            "names": run.names,
            "facts": json.dumps(facts) if facts else "",
            "shapes": list_array_dtypes_and_shapes(arrays),
        }
        self.workers = process.begin_run(about, [view_array_as_bytes(array) for array in arrays])

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        """Send messages to the process that drives Ray; bytes that several messages share are sent once."""
        numbered = self.assign_message_ids(messages)
        self._pending |= numbered
        data: list[Any] = []
        indices: dict[int, int] = {}  # id() of a buffer -> its index in the frame
        described = []
        for identifier, message in numbered.items():
            head, arrays = pack_flower_message(message)
            for buffer in (head, *arrays):
                if id(buffer) not in indices:
                    indices[id(buffer)] = len(data)
                    data.append(buffer)
            message_indices = [indices[id(buffer)] for buffer in (head, *arrays)]
            site = message.metadata.dst_node_id - FIRST_NODE
            described.append({"id": identifier, "site": site, "data": message_indices})
        self._process.send_to_driver({"kind": "ask", "messages": described}, data)
        return list(numbered)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """Return the next reply if it arrives within :data:`POLL_INTERVAL_S`; never more than one."""
        frame = self._process.receive_from_driver(POLL_INTERVAL_S)
        if frame is None:
            return []
        about = frame.about
        if about["kind"] == "note":
            self._record_event(about["event"], **about["facts"])
            return []
        message = self._pending.pop(about["id"])
        if about["kind"] == "lost":
            reply = Message(Error(CLIENT_APP_RAISED, about["reason"]), reply_to=message)
        else:
            head, *arrays = frame.data
            reply = unpack_flower_message(head, arrays)
        return [reply] if reply.metadata.reply_to_message_id in message_ids else []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        raise NotImplementedError("use push_messages and pull_messages")
