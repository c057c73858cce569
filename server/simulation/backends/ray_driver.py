"""The process that drives Ray: ``python -m polyclinic.server.simulation.backends.ray_driver SETTINGS DESCRIPTOR``.

It is separate from the coordinator's process, because Ray kills its driver when Ray's servers fail. The coordinator
then ends the run with an error message, and the run can be resumed.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from polyclinic.common.errors import BadInput, ProgramCannotContinue, raise_faults
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.data.base.image_set import restore_array_from_bytes
from polyclinic.server.simulation.backends import cluster
from polyclinic.server.simulation.backends.cluster import (
    RayWorkerSettings,
    WorkerAllocation,
    allocate_simulation_workers,
)
from polyclinic.server.simulation.backends.site_files import apply_folder_changes, read_folder_files
from polyclinic.server.simulation.backends.site_worker import SiteWorker
from polyclinic.server.simulation.backends.transfer import TransferFrame, receive_frame, send_frame

POLL_INTERVAL_S = 1.0
"""Seconds between two checks of Ray's servers."""
DISCONNECT_TIMEOUT_S = 4.0
"""Seconds to leave a joined cluster."""
MAX_INLINE_BYTES = 100_000
"""Arrays up to this size are sent with each call; larger arrays are put into Ray's object store once."""
MAX_LOSSES = 6
"""Number of lost workers after which a message is given up; its site is then absent."""
MAX_STARTS_PER_WORKER = 5
"""Number of failed starts in a row, times the number of workers, after which the run stops."""


@dataclass
class QueuedSiteMessage:
    """A message for a site, queued for a worker.

    Attributes:
        identifier: Id of the message.
        site: Index of the site in the partition.
        head: The message without its arrays.
        arrays: Bytes of the arrays, or references to them in Ray's object store.
        losses: Number of workers that were lost while they worked on this message.
    """

    identifier: str
    site: int
    head: bytes
    arrays: list[Any]
    losses: int = 0


class RayDriver:
    """Passes messages to workers, stores the changes of sites' files in the run folder, and replaces lost workers."""

    def __init__(self, connection: socket.socket, settings: RayWorkerSettings) -> None:
        self.connection = connection
        self.settings = settings
        self.workers = WorkerAllocation(0, 0.0)
        self.failed_starts = 0
        self.setup: Any = None
        self.names: list[str] = []
        self.run_folder = Path()
        self.frozen: dict[str, Any] = {}
        self.actors = set[Any]()
        self._waiting = deque[QueuedSiteMessage]()
        self._busy = set[int]()  # sites whose messages are being answered
        self._changed = asyncio.Condition()

    async def run_until_coordinator_ends(self) -> None:
        """Serve the coordinator's process until it ends the run.

        Raises:
            BadInput: If the cluster does not meet the experiment's settings.
            ProgramCannotContinue: If Ray has ended, or no worker can be started.
        """
        frames = asyncio.Queue[TransferFrame]()
        loop = asyncio.get_running_loop()

        def receive_frames() -> None:
            """Receive frames in a thread; end this process when the coordinator ends, even during the start of Ray."""
            with contextlib.suppress(EOFError):
                while True:
                    frame = receive_frame(self.connection)
                    loop.call_soon_threadsafe(frames.put_nowait, frame)
                    if frame.about["kind"] == "end":
                        time.sleep(DISCONNECT_TIMEOUT_S)
                        break
            exit_with_ray_children()

        threading.Thread(target=receive_frames, daemon=True).start()
        cluster.start_or_join_ray(self.settings)
        if self.settings.address:
            cluster.check_node_versions(cluster.collect_node_versions(), read_node_versions)
        async with asyncio.TaskGroup() as group:
            if not self.settings.address:
                group.create_task(watch_ray_servers())
            while (frame := await frames.get()).about["kind"] != "end":
                if frame.about["kind"] == "begin":
                    self._receive_run_data(frame)
                    for _ in range(self.workers.count):
                        group.create_task(self._keep_worker_running())
                else:
                    # Bytes that several messages share arrive only once.
                    buffers: list[Any] = [np.frombuffer(data, np.uint8) for data in frame.data]
                    arrays = [ray.put(buffer) if buffer.nbytes > MAX_INLINE_BYTES else buffer for buffer in buffers]
                    for message in frame.about["messages"]:
                        head_index, *array_indices = message["data"]
                        head = bytes(frame.data[head_index])
                        message_arrays = [arrays[index] for index in array_indices]
                        self._waiting.append(QueuedSiteMessage(message["id"], message["site"], head, message_arrays))
                    async with self._changed:
                        self._changed.notify_all()
            if self.settings.address:  # remove the run's files from the nodes of a joined cluster
                await asyncio.to_thread(
                    ray.wait, [actor.close.remote() for actor in self.actors], timeout=POLL_INTERVAL_S
                )
                ray.shutdown()
            exit_with_ray_children()

    def _receive_run_data(self, frame: TransferFrame) -> None:
        """Receive the data of the run, and choose the number of workers."""
        about = frame.about
        self.names = about["names"]
        self.run_folder = Path(about["run_folder"])
        machines = cluster.read_node_resources(cluster.list_living_ray_nodes())
        self.workers = allocate_simulation_workers(self.settings, len(self.names), machines)
        raise_faults(cluster.find_cluster_capacity_faults(self.settings, self.workers, machines))
        described = zip(frame.data, about["shapes"], strict=True)
        images = [restore_array_from_bytes(data, dtype, shape) for data, (dtype, shape) in described]
        shared = {key: about[key] for key in ("experiment", "base", "facts")}
        setup = {"sites": len(self.names), "images": images, "versions": cluster.collect_node_versions()}
        self.setup = ray.put({**shared, **setup})
        frozen = read_folder_files(self.run_folder / "frozen")
        self.frozen = {name: ray.put((name, start, data)) for name, start, data in frozen}
        send_frame(self.connection, {"kind": "begun", "workers": self.workers.count})

    # ------------------------------------------------------------------ workers

    async def _keep_worker_running(self) -> None:
        """Start a worker and let it answer messages; start another whenever a worker is lost.

        Raises:
            ProgramCannotContinue: If too many workers in a row fail to start.
        """
        options: Any = {"num_cpus": self.settings.threads, "num_gpus": self.workers.gpus_per_site, "max_restarts": 0}
        actor_class: Any = ray.remote(**options)(SiteWorker)
        while True:
            actor = actor_class.remote(self.settings.scratch)
            self.actors.add(actor)
            try:
                facts = await actor.set_up_worker.remote(self.setup)
            except RayError as error:
                self.failed_starts += 1
                cause = _describe_worker_loss(error)
                self._send_event_to_coordinator("worker_lost", site="", reason=cause)
                if self.failed_starts >= MAX_STARTS_PER_WORKER * self.workers.count:
                    raise ProgramCannotContinue(f"no worker could be started; the last reason: {cause}") from None
            else:
                self.failed_starts = 0
                self._send_event_to_coordinator("worker_ready", **facts)
                while await self._answer_next_message(actor):
                    pass
            self.actors.discard(actor)

    async def _answer_next_message(self, actor: Any) -> bool:
        """Let a worker answer the next message of an idle site; return False if the worker is lost.

        The message of a lost worker is queued again. After the loss of :data:`MAX_LOSSES` workers, the message is
        reported to the coordinator as lost.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: any(task.site not in self._busy for task in self._waiting))
            task = next(task for task in self._waiting if task.site not in self._busy)
            self._waiting.remove(task)
            self._busy.add(task.site)
        name = self.names[task.site]
        folder = join_plain_name(self.run_folder / "sites", PlainName(name))
        call = {"place": task.site, "site": name, "head": task.head, "frozen": dict(self.frozen)}
        try:
            answer = await actor.answer_message.remote({**call, "files": read_folder_files(folder)}, *task.arrays)
        except RayError as error:
            answer = None
            task.losses += 1
            cause = _describe_worker_loss(error)
            self._send_event_to_coordinator("worker_lost", site=name, reason=cause)
            if task.losses < MAX_LOSSES:
                self._waiting.appendleft(task)
            else:
                reason = f"its worker was lost {MAX_LOSSES} times, the last time because: {cause}"
                send_frame(self.connection, {"kind": "lost", "id": task.identifier, "reason": reason})
        else:
            head, arrays, files, frozen = answer
            apply_folder_changes(folder, files)
            # Frozen parts that this site received are shared with all sites; each part is named by its hash.
            new = [(part, start, bytes(data)) for part, start, data in frozen if data and part not in self.frozen]
            apply_folder_changes(self.run_folder / "frozen", new)
            self.frozen |= {change[0]: ray.put(change) for change in new}
            send_frame(self.connection, {"kind": "reply", "id": task.identifier}, [head, *arrays])
        async with self._changed:
            self._busy.remove(task.site)
            self._changed.notify_all()
        return answer is not None

    def _send_event_to_coordinator(self, event: str, **facts: Any) -> None:
        """Send an event for ``events.jsonl`` to the coordinator's process."""
        send_frame(self.connection, {"kind": "note", "event": event, "facts": facts})


async def watch_ray_servers() -> None:
    """Watch Ray's server processes on this machine, because workers cannot work without them.

    Raises:
        ProgramCannotContinue: When one of the processes has ended.
    """
    names = {child.pid: child.name() for child in psutil.Process().children()}
    servers = [psutil.Process(pid) for pid, name in names.items() if name in ("raylet", "gcs_server")]
    while True:
        ended, _ = psutil.wait_procs(servers, timeout=0)
        if ended:
            raise ProgramCannotContinue(f"Ray's {names[ended[0].pid]} has ended")
        await asyncio.sleep(POLL_INTERVAL_S)


def read_node_versions() -> dict[str, str]:
    """Return a node's software versions. Ray sends this function by value, because the node may lack this package."""
    try:
        from polyclinic.server.simulation.backends.cluster import collect_node_versions
    except ImportError as error:
        return {"polyclinic": f"none ({error})"}
    return collect_node_versions()


def _describe_worker_loss(error: BaseException) -> str:
    """Return the reason why a worker was lost, in one line; if there is one about memory, this one."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    memory_lines = [line for line in lines if "memory" in line.lower()]
    return (memory_lines or lines or [type(cause).__name__])[0]


def exit_with_ray_children() -> None:
    """End this process at once, and all processes that Ray started for it on this machine."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)


def main() -> None:
    """Run the sites on Ray for the coordinator's process, which sends its messages over a socket."""
    settings = RayWorkerSettings(**json.loads(sys.argv[1]))
    connection = socket.socket(fileno=int(sys.argv[2]))
    try:
        asyncio.run(RayDriver(connection, settings).run_until_coordinator_ends())
    except* BrokenPipeError:
        pass  # the coordinator has ended
    except* BadInput as group:
        faults = [vars(fault) for error in group.exceptions for fault in getattr(error, "faults", ())]
        send_frame(connection, {"kind": "fault", "faults": faults})
    except* ProgramCannotContinue as group:
        send_frame(connection, {"kind": "stopped", "reason": str(group.exceptions[0])})
    except* Exception:  # the process's edge: the coordinator reads the last line
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        exit_with_ray_children()


if __name__ == "__main__":
    main()
