"""Facts about the parts of the driver on Ray, without Ray."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from ray.exceptions import RayError

from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.flower_messages import make_request, read_metadata
from polyclinic.server.simulation.backends import ray_process, transfer
from polyclinic.server.simulation.backends.cluster import (
    ClusterNode,
    RayWorkerSettings,
    WorkerAllocation,
    allocate_simulation_workers,
    find_cluster_capacity_faults,
    find_node_version_faults,
)
from polyclinic.server.simulation.backends.ray_driver import MAX_LOSSES, QueuedSiteMessage, RayDriver
from polyclinic.server.simulation.backends.site_files import (
    FolderChangeTracker,
    apply_folder_changes,
    read_folder_files,
    recreate_folder_with_files,
)
from polyclinic.server.simulation.backends.transfer import pack_flower_message, unpack_flower_message
from tests.server.commands import ROOT

GB = 2.0**30


def settings(workers: int = 0, threads: int = 1, gpus_per_site: float | None = None) -> RayWorkerSettings:
    return RayWorkerSettings(workers, threads, gpus_per_site, address="auto", scratch="", paths=())


CPU_NODES = (ClusterNode(4, 0, 64 * GB), ClusterNode(8, 0, 3.1 * GB))
"""Four cores, and memory for two workers of 1.5 GB."""
GPU_NODES = (ClusterNode(16, 0, 64 * GB), ClusterNode(8, 2, 64 * GB))
"""The node with two GPUs has 8 cores: four sites on each GPU."""
MANY_GPUS = (ClusterNode(16, 3, 64 * GB), ClusterNode(16, 4, 64 * GB), ClusterNode(64, 1, 64 * GB))
ONE_GPU = (ClusterNode(8, 1, 64 * GB),)


@pytest.mark.parametrize(
    ("nodes", "options", "sites", "workers"),
    [
        (CPU_NODES, {}, 100, WorkerAllocation(6, 0.0)),
        (CPU_NODES, {"threads": 4}, 100, WorkerAllocation(3, 0.0)),
        (CPU_NODES, {}, 5, WorkerAllocation(5, 0.0)),
        (CPU_NODES, {"workers": 7}, 100, WorkerAllocation(7, 0.0)),
        (CPU_NODES, {"threads": 99}, 100, WorkerAllocation(1, 0.0)),
        (GPU_NODES, {}, 100, WorkerAllocation(8, 0.25)),
        (GPU_NODES, {"workers": 3}, 100, WorkerAllocation(3, 0.5)),
        (GPU_NODES, {"gpus_per_site": 1}, 100, WorkerAllocation(2, 1.0)),
        (GPU_NODES, {"gpus_per_site": 0}, 100, WorkerAllocation(24, 0.0)),
        (MANY_GPUS, {"gpus_per_site": 2}, 100, WorkerAllocation(3, 2.0)),  # both GPUs of a site on one node
        # Ten-thousandths: 3 * 0.3334 would be more than one GPU.
        (ONE_GPU, {"workers": 3}, 100, WorkerAllocation(3, 0.3333)),
    ],
)
def test_workers_are_chosen_by_the_cores_memory_and_gpus_of_all_nodes(
    nodes: tuple[ClusterNode, ...], options: dict[str, Any], sites: int, workers: WorkerAllocation
) -> None:
    assert allocate_simulation_workers(settings(**options), sites, nodes) == workers
    assert workers.gpus_per_site != 0.3333 or nodes[0].count_fitting_sites(1, workers.gpus_per_site) == 3


@pytest.mark.parametrize(
    ("nodes", "options", "share", "needs"),
    [
        (CPU_NODES, {"threads": 9}, 0.0, "9 cores"),
        (CPU_NODES, {"gpus_per_site": 0.5}, 0.5, "1 core and 0.5 of a GPU"),
        (MANY_GPUS, {"gpus_per_site": 8}, 8.0, "1 core and 8 GPUs"),
    ],
)
def test_a_site_that_fits_no_node_is_refused(
    nodes: tuple[ClusterNode, ...], options: dict[str, Any], share: float, needs: str
) -> None:
    (fault,) = find_cluster_capacity_faults(settings(**options), WorkerAllocation(1, share), nodes)
    assert fault.where == "simulation"
    assert f"a site takes {needs}, and no node" in fault.problem
    assert find_cluster_capacity_faults(settings(threads=8), WorkerAllocation(1, 0.0), nodes) == []


def test_every_node_with_other_versions_is_named() -> None:
    here = {"Python": "3.11.7", "torch": "2.15.0"}
    others = {"a": {"Python": "3.11.7", "torch": "2.14.1"}, "b": here, "c": {"polyclinic": "none (no module)"}}
    assert [fault.problem for fault in find_node_version_faults(here, others)] == [
        "node a has torch 2.14.1, here 2.15.0.",
        "node c has Python none, here 3.11.7; torch none, here 2.15.0.",
    ]


class Actor:
    """Stands in for a Ray actor: its answers wait until the test gives them."""

    def __init__(self, *answers: Any) -> None:
        self.calls: list[str] = []
        self.answers = asyncio.Queue[Any]()
        self.answer_message = SimpleNamespace(remote=self._answer)
        for answer in answers:
            self.answers.put_nowait(answer)

    async def _answer(self, call: dict[str, Any], *arrays: Any) -> Any:
        self.calls.append(call["head"].decode())
        answer = await self.answers.get()
        if isinstance(answer, RayError):
            raise answer
        return answer


@contextmanager
def driver_of(folder: Path, *tasks: tuple[str, int]) -> Iterator[tuple[RayDriver, socket.socket]]:
    """Make a driver with these messages for these sites, and the coordinator's end of its connection."""
    ours, theirs = transfer.make_private_socket_pair()
    driver = RayDriver(theirs, settings())
    driver.names, driver.run_folder = ["ash", "birch"], folder
    driver._waiting.extend(QueuedSiteMessage(identifier, site, identifier.encode(), []) for identifier, site in tasks)
    with ours, theirs:
        yield driver, ours


NOTHING = (b"", [], [], [])


def test_a_site_does_one_thing_at_a_time_and_its_changes_are_there_before_its_reply(tmp_path: Path) -> None:
    async def serve() -> None:
        with driver_of(tmp_path, ("1", 0), ("2", 0), ("3", 1)) as (driver, coordinator):
            busy, free = Actor(), Actor(NOTHING)
            first = asyncio.create_task(driver._answer_next_message(busy))
            await asyncio.sleep(0)
            assert await driver._answer_next_message(free)  # the second message waits for the first, of the same site
            second = asyncio.create_task(driver._answer_next_message(free))
            await asyncio.sleep(0)
            busy.answers.put_nowait((b"reply", [], [("memory/round-1", 0, b"1")], [("part", 0, b"frozen")]))
            assert await first
            free.answers.put_nowait(NOTHING)
            await second
            assert (busy.calls, free.calls) == (["1"], ["3", "2"])
            frames = [transfer.receive_frame(coordinator) for _ in range(3)]
            assert [frame.about["id"] for frame in frames] == ["3", "1", "2"]
            assert bytes(frames[1].data[0]) == b"reply"

    with patch("polyclinic.server.simulation.backends.ray_driver.ray.put", lambda change: change):
        asyncio.run(serve())
    assert contents(tmp_path) == {"sites/ash/memory/round-1": b"1", "frozen/part": b"frozen"}


def test_lost_work_is_done_first_and_elsewhere_and_given_up_after_too_many_losses(tmp_path: Path) -> None:
    async def serve() -> None:
        with driver_of(tmp_path, ("1", 0), ("2", 1)) as (driver, coordinator):
            for count in range(1, MAX_LOSSES + 1):
                actor = Actor(RayError("socket closed"))
                assert not await driver._answer_next_message(actor)
                assert actor.calls == ["1"]
                note = transfer.receive_frame(coordinator).about
                assert note["facts"] == {"site": "ash", "reason": "socket closed"}
                assert [task.identifier for task in driver._waiting] == (["1", "2"] if count < MAX_LOSSES else ["2"])
            assert transfer.receive_frame(coordinator).about["kind"] == "lost"

    asyncio.run(serve())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_changes_made_in_a_copy_are_the_same_again_and_of_a_log_only_the_end_travels(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert FolderChangeTracker(there).list_folder_changes() == read_folder_files(there) == []  # it is not there yet
    watched = recreate_folder_with_files(there, [("audit.jsonl", 0, b"one\n"), ("memory/r/round-1", 0, b"1")])
    recreate_folder_with_files(here, read_folder_files(there))
    with (there / "audit.jsonl").open("ab") as audit:
        audit.write(b"two\n")
    (there / "memory/r/round-1").unlink()
    (there / "memory/r/round-2").write_bytes(b"2")
    (there / "memory/r/.round-3.1-2.part").write_bytes(b"half")
    changes = watched.list_folder_changes()
    assert changes == [("memory/r/round-2", 0, b"2"), ("audit.jsonl", 4, b"two\n"), ("memory/r/round-1", -1, b"")]
    (there / "memory/r/.round-3.1-2.part").unlink()
    for _ in range(2):  # a coordinator that died in the middle makes them again
        apply_folder_changes(here, changes)
        assert contents(here) == contents(there)
    assert watched.list_folder_changes() == []
    (there / "audit.jsonl").rename(there / "audit-000001.jsonl")
    (there / "audit.jsonl").write_bytes(b"begun anew")
    names = {(name, start, bytes(data)) for name, start, data in watched.list_folder_changes()}
    assert names == {("audit-000001.jsonl", 0, b"one\ntwo\n"), ("audit.jsonl", 0, b"begun anew")}


def test_a_message_comes_back_as_it_was() -> None:
    trunk = Array("float32", (3,), "raw-little-endian", np.arange(3, dtype="<f4").tobytes())
    fields = ConfigRecord({"round": 3, "weight": b"\x00\xff", "names": ["a", "b"], "rate": 0.1})
    sent = make_request(
        RecordDict({"trunk": ArrayRecord({"trunk": trunk}), "fields": fields}), 2, "train", group_id="", ttl=60.0
    )
    head, arrays = pack_flower_message(sent)
    assert arrays[0] is sent.content["trunk"]["trunk"].data  # no copy
    received = unpack_flower_message(head, arrays)
    assert hash_record(received.content) == hash_record(sent.content)
    assert read_metadata(received) == read_metadata(sent)
    assert sent.content["trunk"]["trunk"].data  # what is packed stays as it is
    error = unpack_flower_message(*pack_flower_message(Message(Error(2, "no such class"), reply_to=sent))).error
    assert (error.code, error.reason) == (2, "no such class")


def test_a_frame_arrives_whole_and_an_end_is_told_from_a_frame() -> None:
    here, there = transfer.make_private_socket_pair()
    large = np.arange(3_000_000, dtype=np.uint8)
    sender = threading.Thread(target=transfer.send_frame, args=(here, {"kind": "x", "n": 1}, [b"", large, b"abc"]))
    sender.start()
    received = transfer.receive_frame(there)
    sender.join()
    assert received.about == {"kind": "x", "n": 1}
    assert [bytes(part) for part in received.data] == [b"", large.tobytes(), b"abc"]
    here.sendall(b"half")
    here.close()
    with pytest.raises(EOFError):
        transfer.receive_frame(there)
    there.close()


HOLD = """
import sys, time
from pathlib import Path
from polyclinic.server.simulation.backends.ray_process import lock_scratch_folder
with lock_scratch_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_folders_that_a_killed_run_left_are_removed_by_the_next_and_a_running_ones_is_not(tmp_path: Path) -> None:
    """Sites' memory lies there, and a process that gets SIGKILL can remove nothing."""
    names = ("abandoned", "without-a-lock", "held", "young")
    folders = {name: tmp_path / f"{ray_process.SCRATCH_PREFIX}{name}" for name in names}
    for folder in (*folders.values(), tmp_path / "other"):
        (folder / "r").mkdir(parents=True)
        (folder / "r" / "memory").touch()
    with ExitStack() as stack:
        for name in ("abandoned", "held"):
            command = [sys.executable, "-c", HOLD, folders[name]]
            holder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT))
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            if name == "abandoned":
                holder.kill()
                holder.wait()
        for folder in (folders["abandoned"], folders["without-a-lock"], folders["held"], tmp_path / "other"):
            os.utime(folder, (0, 0))
        ray_process.remove_abandoned_folders(tmp_path)
        left = set(tmp_path.iterdir())
        assert left == {tmp_path / "other", folders["held"], folders["young"]}
        assert (folders["held"] / "r" / "memory").exists()
