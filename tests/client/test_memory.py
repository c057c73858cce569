"""A site's memory is final only once its round has counted."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from client.site.memory import MemoryFolder, SiteMemory, forget_other_runs
from common.models.network import Head
from common.wire.records import Groups


def memory(server_round: int) -> SiteMemory:
    head = Head(("b", "a"), np.full((2, 3), server_round, np.float32), np.array([-1, 2], np.float32))
    parts = Groups(np.array([server_round, -0.5], np.float32), None, head)
    moments, step = np.array([0.5, -server_round], np.float32), np.array(7, np.float32)
    optimizer = {"head.weight/exp_avg": moments, "head.weight/step": step}
    return SiteMemory(server_round, parts, Groups(), server_round - 1, parts, 1, 0.25, optimizer)


def same(left: SiteMemory, right: SiteMemory) -> bool:
    return repr(left) == repr(right)


def test_what_was_kept_comes_back_whole(tmp_path: Path) -> None:
    MemoryFolder(tmp_path).keep(memory(3))
    back = MemoryFolder(tmp_path).recall(counted=3)
    assert repr(back.parts) == repr(memory(3).parts)
    assert (back.round, back.evaluated_round, back.best_round, back.best_loss) == (3, 2, 1, 0.25)
    assert set(back.optimizer) == set(memory(3).optimizer)
    assert back.optimizer["head.weight/step"] == 7


def test_a_round_that_did_not_count_is_forgotten(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    for server_round in (3, 4):
        folder.keep(memory(server_round))
    assert folder.recall(counted=3).round == 3
    assert [path.name for path in tmp_path.iterdir()] == ["round-000003.safetensors"]


def test_beside_the_round_that_counted_the_one_before_is_kept_to_go_back_to(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    for server_round in (2, 3, 4):
        folder.keep(memory(server_round))
    assert folder.recall(counted=4).round == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000003.safetensors", "round-000004.safetensors"]
    assert folder.recall(counted=3).round == 3
    assert [path.name for path in tmp_path.iterdir()] == ["round-000003.safetensors"]


def test_to_judge_a_model_forgets_nothing(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    for server_round in (2, 3, 4):
        folder.keep(memory(server_round))
    assert folder.recall(counted=3, forget=False).round == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_before_the_first_round_and_after_a_lost_disk_there_is_no_memory(tmp_path: Path) -> None:
    assert same(MemoryFolder(tmp_path / "never").recall(counted=0), SiteMemory())
    assert same(MemoryFolder(tmp_path / "lost").recall(counted=5), SiteMemory())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Memories of five runs, of 100 bytes each, written to 1, 2, 3, 4 and 70 days ago."""
    for days, run in ((1, "first"), (2, "second"), (3, "third"), (4, "fourth"), (70, "old")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "round-000001.safetensors").write_bytes(bytes(100))
        written = time.time() - days * 86400
        os.utime(tmp_path / run, (written, written))
    return tmp_path


def left_in(memory: Path) -> set[str]:
    return {path.name for path in memory.iterdir()}


def test_a_run_that_may_be_resumed_keeps_its_memory_however_many_others_there_were_since(runs: Path) -> None:
    forget_other_runs(runs, "next")
    assert left_in(runs) == {"first", "second", "third", "fourth"}


def test_where_memories_take_too_much_room_the_oldest_go(runs: Path) -> None:
    forget_other_runs(runs, "next", most_bytes=250)
    assert left_in(runs) == {"first", "second"}


def test_the_memory_written_last_stays_however_large(runs: Path) -> None:
    forget_other_runs(runs, "next", most_bytes=50)
    assert left_in(runs) == {"first"}


def test_a_run_that_is_asked_for_again_keeps_its_own_memory_and_takes_nobodys_room(runs: Path) -> None:
    forget_other_runs(runs, "old", most_bytes=250)
    assert left_in(runs) == {"old", "first", "second"}


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    folder.keep(memory(3))
    (tmp_path / ".round-000004.safetensors.4194305-1.part").write_bytes(b"half")
    assert folder.recall(counted=3).round == 3
    assert left_in(tmp_path) == {"round-000003.safetensors"}
