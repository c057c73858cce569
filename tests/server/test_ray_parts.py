"""Facts about the parts of the driver on Ray, without Ray."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from common.wire.canonical_bytes import cached_hash, record_sha256
from server.simulation.backends import frames, ray_program
from server.simulation.backends.cluster import ClusterNode, Wanted, Workers, choose_workers, room_faults, version_faults
from server.simulation.backends.dispatch import MOST_LOSSES, Dispatcher, Task, Worker
from server.simulation.backends.inline import prepare_flower
from server.simulation.backends.packing import packed, unpacked
from server.simulation.backends.site_files import WatchedFolder, make_changes, replace_folder, whole
from tests.server.commands import ROOT

GB = 2.0**30


def wanted(workers: int = 0, threads: int = 1, gpus_per_site: float = -1.0, address: str = "auto") -> Wanted:
    return Wanted(workers, threads, gpus_per_site, address, 3, "", ())


# ---------------------------------------------------------------------- how many workers


def test_workers_are_counted_over_all_nodes_by_cores_and_memory_and_never_more_than_sites() -> None:
    nodes = [ClusterNode(4, 0, 64 * GB), ClusterNode(8, 0, 3.1 * GB)]
    # 4 cores in the first, memory for two workers of 1.5 GB in the second.
    assert choose_workers(wanted(), 100, nodes) == Workers(6, 0.0)
    assert choose_workers(wanted(threads=4), 100, nodes) == Workers(3, 0.0)
    assert choose_workers(wanted(), 5, nodes) == Workers(5, 0.0)
    assert choose_workers(wanted(workers=7), 100, nodes) == Workers(7, 0.0)
    assert choose_workers(wanted(threads=99), 100, nodes) == Workers(1, 0.0)


def test_where_only_another_node_has_gpus_sites_train_there_and_share_them() -> None:
    nodes = [ClusterNode(16, 0, 64 * GB), ClusterNode(8, 2, 64 * GB)]
    # 8 cores on the node with two GPUs: four sites on each.
    assert choose_workers(wanted(), 100, nodes) == Workers(8, 0.25)
    assert choose_workers(wanted(workers=3), 100, nodes) == Workers(3, 0.5)
    assert choose_workers(wanted(gpus_per_site=1), 100, nodes) == Workers(2, 1.0)
    assert choose_workers(wanted(gpus_per_site=0), 100, nodes) == Workers(24, 0.0)


def test_a_site_over_two_gpus_takes_two_of_one_node() -> None:
    nodes = [ClusterNode(16, 3, 64 * GB), ClusterNode(16, 4, 64 * GB), ClusterNode(64, 1, 64 * GB)]
    assert choose_workers(wanted(gpus_per_site=2), 100, nodes) == Workers(3, 2.0)
    (fault,) = room_faults(wanted(gpus_per_site=8), Workers(1, 8.0), nodes)
    assert "1 core and 8 GPUs, and no node of the cluster has that" in str(fault)


def test_three_sites_of_a_third_fit_on_a_gpu() -> None:
    chosen = choose_workers(wanted(workers=3), 100, [ClusterNode(8, 1, 64 * GB)])
    assert chosen.gpus_per_site == 0.3333  # Ray knows ten-thousandths; 3 * 0.3334 would be more than one GPU
    assert ClusterNode(8, 1, 64 * GB).room(1, chosen.gpus_per_site) == 3


def test_a_site_that_fits_on_no_node_is_refused_with_what_the_nodes_have() -> None:
    nodes = [ClusterNode(2, 0, GB), ClusterNode(4, 0, GB)]
    (fault,) = room_faults(wanted(threads=8), Workers(1, 0.0), nodes)
    assert str(fault).startswith(
        "simulation: a site takes 8 cores, and no node of the cluster has that: 2 cores, 0 GPU"
    )
    (fault,) = room_faults(wanted(gpus_per_site=0.5), Workers(1, 0.5), nodes)
    assert "1 core and 0.5 of a GPU" in str(fault)
    assert room_faults(wanted(threads=4), Workers(1, 0.0), nodes) == []


def test_every_node_with_other_versions_is_named() -> None:
    here = {"Python": "3.11.7", "torch": "2.15.0"}
    others = {"a": {"Python": "3.11.7", "torch": "2.14.1"}, "b": here, "c": {"polyclinic": "none (no module)"}}
    assert [fault.problem for fault in version_faults(here, others)] == [
        "node a has torch 2.14.1, here 2.15.0.",
        "node c has Python none, here 3.11.7; torch none, here 2.15.0.",
    ]


# ---------------------------------------------------------------------- who does what


def task(identifier: str, site: str) -> Task:
    return Task(identifier, site, 2, b"", [])


def with_workers(many: int) -> tuple[Dispatcher, list[Worker]]:
    dispatcher = Dispatcher()
    dispatcher.workers = [Worker(None, ready=True) for _ in range(many)]
    return dispatcher, list(dispatcher.workers)


def test_a_site_does_one_thing_at_a_time() -> None:
    dispatcher, (one, two) = with_workers(2)
    dispatcher.add([task("1", "a"), task("2", "a")])
    assert dispatcher.assign() == [one]
    dispatcher.done(one)
    assert dispatcher.assign() == [one]  # it has the site's folder
    assert one.task is not None
    assert (one.task.identifier, two.task) == ("2", None)


def test_a_site_goes_to_the_worker_that_has_its_folder_before_others() -> None:
    dispatcher, (one, two) = with_workers(2)
    dispatcher.add([task("1", "a"), task("2", "b")])
    dispatcher.assign()
    dispatcher.done(one), dispatcher.done(two)
    dispatcher.add([task("3", "b"), task("4", "a")])
    dispatcher.assign()
    assert [worker.task and worker.task.site for worker in (one, two)] == ["a", "b"]


def test_a_worker_with_an_older_folder_of_a_site_is_known_to_have_it() -> None:
    dispatcher, (one, two) = with_workers(2)
    dispatcher.add([task("1", "a")])
    dispatcher.assign()
    dispatcher.done(one)
    dispatcher.workers = [two]
    dispatcher.add([task("2", "a")])
    dispatcher.assign()
    dispatcher.done(two)
    assert (dispatcher.has_newest(one, "a"), dispatcher.has_newest(two, "a")) == (False, True)


def test_lost_work_is_done_first_and_elsewhere_and_given_up_after_too_many_losses() -> None:
    dispatcher, workers = with_workers(MOST_LOSSES)
    dispatcher.workers = []
    dispatcher.add([task("1", "a"), task("2", "b")])
    for count, worker in enumerate(workers, start=1):
        dispatcher.workers.append(worker)
        dispatcher.assign()
        assert worker.task is not None
        assert worker.task.identifier == "1"
        given_up = dispatcher.lost(worker)
        assert (given_up is not None) is (count == MOST_LOSSES)
    dispatcher.workers.append(Worker(None, ready=True))
    assert [worker.task and worker.task.identifier for worker in dispatcher.assign()] == ["2"]


# ---------------------------------------------------------------------- a site's folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_changes_made_in_a_copy_are_the_same_again_and_of_a_log_only_the_end_travels(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    watched = replace_folder(there, [("audit.jsonl", 0, b"one\n"), ("memory/r/round-1", 0, b"1")])
    replace_folder(here, whole(there))
    with (there / "audit.jsonl").open("ab") as audit:
        audit.write(b"two\n")
    (there / "memory/r/round-1").unlink()
    (there / "memory/r/round-2").write_bytes(b"2")
    (there / "memory/r/.round-3.1-2.part").write_bytes(b"half")
    changes = watched.changes()
    assert changes == [("memory/r/round-2", 0, b"2"), ("audit.jsonl", 4, b"two\n"), ("memory/r/round-1", -1, b"")]
    (there / "memory/r/.round-3.1-2.part").unlink()
    for _ in range(2):  # a coordinator that died in the middle makes them again
        make_changes(here, changes)
        assert contents(here) == contents(there)
    assert watched.changes() == []


def test_a_log_that_was_begun_anew_travels_whole(tmp_path: Path) -> None:
    watched = replace_folder(tmp_path / "site", [("audit.jsonl", 0, b"one\n")])
    (tmp_path / "site/audit.jsonl").rename(tmp_path / "site/audit-000001.jsonl")
    (tmp_path / "site/audit.jsonl").write_bytes(b"two, three\n")
    names = {(name, start, bytes(data)) for name, start, data in watched.changes()}
    assert names == {("audit-000001.jsonl", 0, b"one\n"), ("audit.jsonl", 0, b"two, three\n")}


def test_a_watched_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert WatchedFolder(tmp_path / "none").changes() == whole(tmp_path / "none") == []


# ---------------------------------------------------------------------- what travels


def message() -> Message:
    prepare_flower()
    trunk = Array("float32", (3,), "raw-little-endian", np.arange(3, dtype="<f4").tobytes())
    fields = ConfigRecord({"round": 3, "weight": b"\x00\xff", "names": ["a", "b"], "rate": 0.1})
    return Message(RecordDict({"trunk": ArrayRecord({"trunk": trunk}), "fields": fields}), 2, "train")


def test_a_message_comes_back_as_it_was_with_the_hashes_that_are_known() -> None:
    sent = message()
    record_sha256(sent.content)
    head, arrays = packed(sent)
    assert arrays[0].data is sent.content["trunk"]["trunk"].data  # no copy
    came = unpacked(head, arrays)
    assert record_sha256(came.content) == record_sha256(sent.content)
    assert cached_hash(came.content["trunk"]["trunk"]) == arrays[0].known_hash != ""
    assert vars(came.metadata) == vars(sent.metadata)
    assert sent.content["trunk"]["trunk"].data  # what is packed stays as it is


def test_a_message_without_content_says_why() -> None:
    came = unpacked(*packed(Message(Error(2, "no such class"), reply_to=message())))
    assert (came.error.code, came.error.reason) == (2, "no such class")


def test_a_frame_arrives_whole_and_an_end_is_told_from_a_frame() -> None:
    here, there = frames.pair()
    large = np.arange(3_000_000, dtype=np.uint8)
    sender = threading.Thread(target=frames.send, args=(here, {"kind": "x", "n": 1}, [b"", large, b"abc"]))
    sender.start()
    came = frames.receive(there)
    sender.join()
    assert came.about == {"kind": "x", "n": 1}
    assert [bytes(one) for one in came.data] == [b"", large.tobytes(), b"abc"]
    here.sendall(b"half")
    here.close()
    with pytest.raises(EOFError):
        frames.receive(there)
    there.close()


HOLD = """
import sys, time
from pathlib import Path
from server.simulation.backends.ray_program import in_use
with in_use(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_running_ones_is_not(tmp_path: Path) -> None:
    """Sites' memory lies there, and a process that gets SIGKILL can remove nothing."""
    names = ("abandoned", "without-a-lock", "held", "young")
    folders = {name: tmp_path / f"{ray_program.PREFIX}{name}" for name in names}
    for folder in (*folders.values(), tmp_path / "other"):
        (folder / "r").mkdir(parents=True)
        (folder / "r" / "memory").touch()
    holders = {}
    for name in ("abandoned", "held"):
        command = [sys.executable, "-c", HOLD, folders[name]]
        holders[name] = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert (said := holders[name].stdout) is not None
        assert said.readline() == b"held\n"
    holders["abandoned"].kill()
    holders["abandoned"].wait()
    for folder in (folders["abandoned"], folders["without-a-lock"], folders["held"], tmp_path / "other"):
        os.utime(folder, (0, 0))
    try:
        ray_program.remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "other",
            *sorted(folders[n].name for n in names[2:]),
        ]
        assert (folders["held"] / "r" / "memory").exists()
    finally:
        holders["held"].kill()
        for holder in holders.values():
            holder.communicate()
