"""The coordinator's memory over the network: large replies wait in files, and nothing of one stays behind."""

import gc
import os
import resource
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from polyclinic.common.config import ParticipationSection
from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.codec import count_payload_bytes, encode_record
from polyclinic.common.wire.flower_messages import replace_metadata
from polyclinic.common.wire.message_objects import count_array_bytes, decode_message_objects, encode_message_objects
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.server.deployment.superlink.object_store import LARGE_ARRAY_BYTES, ReplyArrayFiles
from polyclinic.server.simulation.backends.inline import run_with_inline_grid
from polyclinic.strategies.engine import aggregator
from polyclinic.strategies.engine.aggregator import UpdateStorage, is_mapped_from_file
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.state import make_model_array_record
from polyclinic.strategies.registry import build_strategy
from tests.strategies.leading import Noted, app_of, small_plan

TRUNK = 300_000
TRUNK_BYTES = 4 * TRUNK


class LargeSite:
    """A site whose update is as large as the model, and another one for each site."""

    def __init__(self, number: int) -> None:
        self._name, self._step = f"site-{number:03d}", np.float32(1 + number / 64)

    def called(self, call: RollCall) -> RollCallAnswer:
        return RollCallAnswer(call.run, self._name, ("a", "b"), ("a", "b"), 10, 5, 9, "layout", "0.1.0")

    def trained(self, request: TrainRequest) -> TrainReply:
        model = request.model
        assert model.trunk is not None
        assert model.norm is not None
        assert model.head is not None
        head = Head(model.head.class_names, np.full_like(model.head.weight, self._step), np.ones(2, np.float32))
        update = ModelGroups(np.full_like(model.trunk, self._step), np.full_like(model.norm, self._step), head)
        return TrainReply(request.run, request.round, self._name, 10, 0.5, 0.5, None, 1.0, update)

    def judged(self, request: EvaluateRequest) -> EvaluateReply:
        return EvaluateReply(request.run, request.round, self._name, 0.5, None, (), (), (), (), (), (), "hash")


class OverNetwork:
    """A grid whose replies arrive as over the network: as objects, of which large arrays are joined in files."""

    def __init__(self, grid: Any, folder: Path) -> None:
        self.get_node_ids, self.push_messages, self._pull = grid.get_node_ids, grid.push_messages, grid.pull_messages
        self._join = ReplyArrayFiles(folder).join_array

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._arrive(reply) for reply in self._pull(message_ids)]

    def _arrive(self, reply: Message) -> Message:
        tree, contents = encode_message_objects(reply)
        most = 2 * count_array_bytes(reply.content)
        views = {name: memoryview(content) for name, content in contents.items()}
        message = decode_message_objects(tree.object_id, views, most, self._join)
        return replace_metadata(message, src_node_id=reply.metadata.src_node_id)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lead(sites: int, folder: Path, in_memory: int, **participation: Any) -> tuple[ModelState, int]:
    """Lead two rounds; return the model, and the peak of the process's own memory in bytes."""
    section = ParticipationSection.model_validate({"roll_call_deadline_s": 5.0, **participation})
    storage = UpdateStorage(folder, in_memory)
    options = {"callbacks": Noted(), "storage": storage}
    coordinator = Coordinator(build_strategy("surgical", {}), small_plan(), section, "run-1", **options)
    peak = 0

    def main(grid: Any) -> None:
        nonlocal peak
        grid = OverNetwork(grid, folder)
        coordinator.sites.call_roll(grid, sites)
        head = Head(("a", "b"), np.zeros((2, 2), np.float32), np.zeros(2, np.float32))
        first = ModelState(np.zeros(TRUNK, np.float32), np.zeros(1, np.float32), head)
        with without_garbage_collection():
            tracemalloc.start()
            coordinator.start(grid, make_model_array_record(first), 2)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()

    run_with_inline_grid(main, app_of([LargeSite(number) for number in range(sites)]), sites)
    return coordinator.state.model, peak


@pytest.mark.parametrize("clip", [4.0, "off"])
def test_four_times_as_many_replies_take_no_more_memory(clip: Any, tmp_path: Path) -> None:
    few, many = (lead(sites, tmp_path, 0, clip=clip)[1] for sites in (4, 16))
    assert many < few + TRUNK_BYTES
    assert not list(tmp_path.iterdir())


def test_updates_in_files_give_the_bits_of_updates_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_files, _ = lead(5, tmp_path, 0)
    monkeypatch.setattr(aggregator, "MAX_MAPPED_UPDATES", 2)
    in_few_files, _ = lead(5, tmp_path, 0)
    in_memory, _ = lead(5, tmp_path / "not-there", 2**29)
    assert in_files.trunk.tobytes() == in_few_files.trunk.tobytes() == in_memory.trunk.tobytes()
    assert in_files.head.weight.tobytes() == in_memory.head.weight.tobytes()


def test_a_large_array_is_joined_in_a_file_without_a_name_and_a_small_one_in_memory(tmp_path: Path) -> None:
    for size in (LARGE_ARRAY_BYTES, LARGE_ARRAY_BYTES - 4):
        data = np.arange(size // 4, dtype="<f4").tobytes()
        parts = [memoryview(data)[:1000], memoryview(data)[1000:]]
        joined = ReplyArrayFiles(tmp_path).join_array(parts)
        array = np.frombuffer(joined, "<f4")
        assert joined == data
        assert is_mapped_from_file(array) == is_mapped_from_file(array[10:]) == (size >= LARGE_ARRAY_BYTES)
        assert not array.flags.writeable
    assert not list(tmp_path.iterdir())


def test_a_large_array_is_joined_in_memory_where_no_file_can_be_made(tmp_path: Path) -> None:
    data = os.urandom(LARGE_ARRAY_BYTES)
    assert ReplyArrayFiles(tmp_path / "not-there").join_array([memoryview(data)]) == data


def test_a_file_is_used_again_after_the_last_view_of_its_array_and_closed_at_the_end(tmp_path: Path) -> None:
    def count_open_files() -> int:
        return sum(
            os.path.realpath(Path("/proc/self/fd", name)).startswith(str(tmp_path))
            for name in os.listdir("/proc/self/fd")
        )

    data, files = [memoryview(bytes([number]) * LARGE_ARRAY_BYTES) for number in range(4)], ReplyArrayFiles(tmp_path)
    with without_garbage_collection():
        arrays = [np.frombuffer(files.join_array([each]), np.uint8) for each in data[:3]]
        opened = count_open_files()
        del arrays[0]
        arrays.append(np.frombuffer(files.join_array([data[3]]), np.uint8))
        assert count_open_files() == opened
        assert [int(array[-1]) for array in arrays] == [1, 2, 3]
        del files
        assert [int(array[-1]) for array in arrays] == [1, 2, 3]
        del arrays
        assert count_open_files() == 0


def test_counting_the_bytes_of_a_message_leaves_its_arrays_in_no_cycle() -> None:
    head = Head(("a",), np.ones((1, 2), np.float32), np.ones(1, np.float32))
    update = ModelGroups(np.ones(TRUNK, np.float32), None, head)
    reply = TrainReply("run", 1, "north", 10, 0.5, None, None, 1.0, update)
    with without_garbage_collection():
        tracemalloc.start()
        for _ in range(3):
            content = encode_record(reply)
            content["update"]["trunk"].data = bytes(TRUNK_BYTES)
            count_payload_bytes(content)
            count_array_bytes(content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2.5 * TRUNK_BYTES


def test_a_disk_that_fills_up_costs_memory_and_no_reply(tmp_path: Path) -> None:
    files, data = ReplyArrayFiles(tmp_path), bytes(range(256)) * (LARGE_ARRAY_BYTES // 256)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE_ARRAY_BYTES // 2, hard))
    try:
        joined = files.join_array([memoryview(data)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert joined == data
    assert not is_mapped_from_file(np.frombuffer(joined, "<f4"))
    assert is_mapped_from_file(np.frombuffer(files.join_array([memoryview(data)]), "<f4"))
