"""The process that drives Ray: ``python -m server.simulation.backends.ray_driver WANTED DESCRIPTOR``.

It is not the coordinator's own process, because Ray ends the process that drives it when its own processes are gone,
and with an exit code of its own. The coordinator starts another one then, and asks again what has not been answered.
"""

import contextlib
import importlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from common.data.base.image_set import of_raw
from common.errors import BadInput, CannotGoOn, Fault, stop_on
from server.simulation.backends import cluster
from server.simulation.backends.cluster import Wanted, Workers, choose_workers
from server.simulation.backends.dispatch import MOST_LOSSES, Dispatcher, Task, Worker
from server.simulation.backends.frames import Frame, receive, send
from server.simulation.backends.site_files import make_changes, whole

WORKER = "server.simulation.backends.site_worker:SiteWorker"
LOOK_S, LEAVING_S = 1.0, 4.0
"""Between two looks at Ray's processes; for leaving a cluster that goes on."""
JOIN_S = 120.0
SHARED_BYTES = 100_000
"""A larger array goes to Ray's object store once; smaller ones travel with each call."""
STARTS_PER_WORKER = 5
"""Workers that may end before they are set up, for each that is wanted, before the run is given up."""


class Driver:
    """Hands messages to workers, writes what they changed into the run folder, and replaces those that are lost."""

    def __init__(self, connection: socket.socket, wanted: Wanted) -> None:
        self.connection, self.wanted = connection, wanted
        self.events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.dispatcher = Dispatcher()
        self.failed_starts = 0
        self.setup: Any = None
        self.names: list[str] = []
        self.run_folder = Path()
        self.frozen: dict[str, Any] = {}
        self.workers = Workers(0, 0.0)
        self.actor_class: Any = None

    def run(self) -> None:
        """Serve the coordinator until it says that it is enough, or is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            with self._joined_in_time():
                cluster.start(self.wanted, lambda reason: self._note("workers_not_forked", reason=reason))
            if self.wanted.address:
                cluster.check_nodes(cluster.versions(), versions_there)
            self._begin_workers(self.wanted.sites)
            while self._step():
                pass
        except BadInput as error:
            send(self.connection, {"kind": "fault", "faults": [vars(fault) for fault in error.faults]})
        except CannotGoOn as error:
            send(self.connection, {"kind": "stopped", "reason": str(error)})
        self._close_workers()

    @contextlib.contextmanager
    def _joined_in_time(self) -> Iterator[None]:
        """Ray waits without end for a cluster that does not answer."""
        problem = f'"{self.wanted.address}" did not let this machine join within {JOIN_S:.0f} s.'
        fault = vars(Fault("simulation.address", problem, cluster.CANNOT_JOIN))

        def give_up() -> None:
            send(self.connection, {"kind": "fault", "faults": [fault]})
            end()

        timer = threading.Timer(JOIN_S, give_up)
        if self.wanted.address:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _read(self) -> None:
        try:
            while True:
                frame = receive(self.connection)
                self.events.put((self._on_frame, frame))
                if frame.about["kind"] == "end":
                    time.sleep(LEAVING_S)
        except EOFError:
            pass  # the coordinator is gone
        finally:
            end()

    def _step(self) -> bool:
        try:
            handle, *arguments = self.events.get(timeout=LOOK_S)
        except queue.Empty:
            end_if_alone()
            return True
        return handle(*arguments) is not False

    def _begin_workers(self, sites: int) -> None:
        """Start as many as are wanted, so that they import while the coordinator does."""
        machines, before = cluster.machines(cluster.nodes()), self.workers
        self.workers = choose_workers(self.wanted, sites, machines)
        stop_on(cluster.room_faults(self.wanted, self.workers, machines))
        self.actor_class = self.actor_class or ray.remote(_found(WORKER))
        kept = self.workers.count if self.workers.gpus_per_site == before.gpus_per_site else 0
        for worker in self.dispatcher.workers[kept:]:
            ray.kill(worker.actor)
            self.dispatcher.workers.remove(worker)
        while len(self.dispatcher.workers) < self.workers.count:
            self._start_one()

    def _start_one(self) -> None:
        options = {"num_cpus": self.wanted.threads, "num_gpus": self.workers.gpus_per_site, "max_restarts": 0}
        worker = Worker(self.actor_class.options(**options).remote(self.wanted.scratch))
        self.dispatcher.workers.append(worker)
        if self.setup is not None:
            self._set_up(worker)

    def _set_up(self, worker: Worker) -> None:
        reference = worker.actor.set_up.remote(self.setup)
        reference.future().add_done_callback(lambda done: self.events.put((self._on_ready, worker, done)))

    # ------------------------------------------------------------------ what comes

    def _on_frame(self, frame: Frame) -> bool:
        kind = frame.about["kind"]
        if kind == "begin":
            self._on_begin(frame)
        elif kind == "ask":
            self._on_ask(frame)
        return bool(kind != "end")

    def _on_begin(self, frame: Frame) -> None:
        about = frame.about
        self.names, self.run_folder = about["names"], Path(about["run_folder"])
        images = [of_raw(data, dtype, shape) for data, (dtype, shape) in zip(frame.data, about["shapes"], strict=True)]
        known = {key: about[key] for key in ("experiment", "base", "facts")}
        self._begin_workers(len(self.names))
        self.setup = ray.put({**known, "sites": len(self.names), "images": images, "versions": cluster.versions()})
        self.frozen = {name: ray.put((name, start, data)) for name, start, data in whole(self.run_folder / "frozen")}
        send(self.connection, {"kind": "begun", "workers": self.workers.count})
        for worker in self.dispatcher.workers:
            self._set_up(worker)

    def _on_ask(self, frame: Frame) -> None:
        """Messages: the bytes that they hold come once, however many messages hold them."""
        given: list[Any] = [np.frombuffer(data, np.uint8) for data in frame.data]
        large = {place: ray.put(array) for place, array in enumerate(given) if array.nbytes > SHARED_BYTES}
        arrays = [
            (large.get(place, array), known, str(large[place].hex()) if place in large else "")
            for place, (array, known) in enumerate(zip(given, frame.about["hashes"], strict=True))
        ]
        tasks = []
        for one in frame.about["messages"]:
            head, *places = one["data"]
            site = self.names[one["node"] - one["first"]]
            own = [arrays[place] for place in places]
            tasks.append(Task(one["id"], site, one["node"], bytes(frame.data[head]), own))
        self.dispatcher.add(tasks)
        self._assign()

    def _assign(self) -> None:
        for worker in self.dispatcher.assign():
            self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        task = worker.task
        assert task is not None, "it has just been assigned"
        newest = self.dispatcher.has_newest(worker, task.site) and task.site in worker.files
        lacking = self.frozen.keys() - worker.frozen
        call = {
            "site": task.site,
            "node": task.node,
            "head": task.head,
            "hashes": [known for _, known, _ in task.arrays],
            "keys": [key for _, _, key in task.arrays],
            "files": None if newest else whole(self._folder(task.site)),
            "frozen": [ray.get(self.frozen[name]) for name in sorted(lacking)],
        }
        worker.frozen |= lacking
        reference = worker.actor.answer.remote(call, *(array for array, _, _ in task.arrays))
        reference.future().add_done_callback(lambda done: self.events.put((self._on_answer, worker, done)))

    def _folder(self, site: str) -> Path:
        return self.run_folder / "sites" / site

    # ------------------------------------------------------------------ what workers do

    def _on_ready(self, worker: Worker, done: Future[Any]) -> None:
        if worker not in self.dispatcher.workers:
            return
        error = done.exception()
        if error is None:
            self.failed_starts, worker.ready = 0, True
            self._note("worker_ready", **done.result())
            self._assign()
            return
        self.failed_starts += 1
        self._note("worker_lost", site="", reason=_reason(error))
        if self.failed_starts >= STARTS_PER_WORKER * self.workers.count:
            raise CannotGoOn(f"no worker could be started, the last one said: {_reason(error)}")
        self._replace(worker)

    def _on_answer(self, worker: Worker, done: Future[Any]) -> None:
        if worker not in self.dispatcher.workers:
            return
        if (error := done.exception()) is not None:
            at, given_up = worker.task, self._replace(worker)
            self._note("worker_lost", site=at.site if at else "", reason=_reason(error))
            if given_up is not None:
                send(self.connection, {"kind": "lost", "id": given_up.identifier, "reason": _lost(error)})
            self._assign()
            return
        head, data, hashes, files, frozen = done.result()
        task = self.dispatcher.done(worker)
        make_changes(self._folder(task.site), files)
        self._keep_frozen(worker, frozen)
        self._assign()
        send(self.connection, {"kind": "reply", "id": task.identifier, "hashes": hashes}, [head, *data])

    def _keep_frozen(self, worker: Worker, changes: Sequence[Any]) -> None:
        """Frozen parts of a model, which one site received, are there for all: each is named by its hash."""
        new = [(name, start, bytes(data)) for name, start, data in changes if data and name not in self.frozen]
        make_changes(self.run_folder / "frozen", new)
        self.frozen |= {change[0]: ray.put(change) for change in new}
        worker.frozen |= {name for name, _, data in changes if data}

    def _note(self, event: str, **facts: Any) -> None:
        """For the run's events: nothing is lost in silence."""
        send(self.connection, {"kind": "note", "event": event, "facts": facts})

    def _close_workers(self) -> None:
        """Leave nothing of the run on the nodes of a cluster that goes on."""
        if self.wanted.address:
            ray.wait([worker.actor.close.remote() for worker in self.dispatcher.workers], timeout=LOOK_S)

    def _replace(self, worker: Worker) -> Task | None:
        """Start another worker, on a node that Ray chooses; return a message that has cost too many."""
        with contextlib.suppress(RayError):
            ray.kill(worker.actor)
        given_up = self.dispatcher.lost(worker)
        self._start_one()
        return given_up


def versions_there() -> dict[str, str]:
    """The versions on a node; sent to it by value, for it may not have our package."""
    try:
        from server.simulation.backends.cluster import versions
    except ImportError as error:
        return {"polyclinic": f"none ({error})"}
    return versions()


def end_if_alone() -> None:
    """A cluster of our own that has lost its raylet or its table of contents answers nothing any more."""
    node: Any = ray._private.worker._global_node
    started: Any = node.all_processes.items() if node is not None else ()
    for kind, infos in started:
        if any(info.process.poll() is not None for info in infos):
            print(f"Ray's {kind} has ended", file=sys.stderr, flush=True)
            end()


def end() -> None:
    """End this process, and what Ray started for it here, without waiting for anything."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _reason(error: BaseException) -> str:
    """What happened, in one line."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    memory = [line for line in lines if "memory" in line.lower()]
    return (memory or lines or [type(cause).__name__])[0]


def _lost(error: BaseException) -> str:
    return f"its worker was lost {MOST_LOSSES} times, the last time since: {_reason(error)}"


def main() -> None:
    """Serve the coordinator at the other end of the socket."""
    wanted = Wanted(**json.loads(sys.argv[1]))
    connection = socket.socket(fileno=int(sys.argv[2]))
    try:
        Driver(connection, wanted).run()
        if wanted.address:
            ray.shutdown()
    except BrokenPipeError:
        pass  # the coordinator is gone
    except Exception:  # the process's edge: the coordinator reads the last line, and starts another one
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        end()


if __name__ == "__main__":
    main()
