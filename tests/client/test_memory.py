"""A site's memory is final only once its round has counted."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from polyclinic.client.site.memory import LostRoundState, SiteRoundState, SiteRoundStateFolder, remove_old_run_states
from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import ModelGroups


def memory(server_round: int) -> SiteRoundState:
    head = Head(("b", "a"), np.full((2, 3), server_round, np.float32), np.array([-1, 2], np.float32))
    parts = ModelGroups(np.array([server_round, -0.5], np.float32), None, head)
    moments, step = np.array([0.5, -server_round], np.float32), np.array(7, np.float32)
    optimizer = {"head.weight/exp_avg": moments, "head.weight/step": step}
    return SiteRoundState(server_round, parts, ModelGroups(), server_round - 1, parts, 1, 0.25, optimizer)


def kept_rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in folder.iterdir())


def test_what_was_kept_comes_back_whole_without_what_a_kill_left_half_written(tmp_path: Path) -> None:
    SiteRoundStateFolder(tmp_path).store_state_of_round(memory(3))
    (tmp_path / ".round-000004.safetensors.4194305-1.part").write_bytes(b"half")
    back = SiteRoundStateFolder(tmp_path).read_last_counted_state(counted=3)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000003.safetensors"]
    assert repr(back.parts) == repr(memory(3).parts)
    assert (back.round, back.evaluated_round, back.best_round, back.best_loss) == (3, 2, 1, 0.25)
    assert set(back.optimizer) == set(memory(3).optimizer)
    assert back.optimizer["head.weight/step"] == 7


@pytest.mark.parametrize(
    ("rounds", "counted", "forget", "left"),
    [
        ((3, 4), 3, True, [3]),  # round 4 did not count
        ((2, 3, 4), 4, True, [3, 4]),  # the round before is kept to go back to
        ((2, 3, 4), 3, False, [2, 3, 4]),  # to judge a model forgets nothing
    ],
)
def test_the_round_that_counted_is_recalled_and_others_are_forgotten(
    rounds: tuple[int, ...], counted: int, forget: bool, left: list[int], tmp_path: Path
) -> None:
    folder = SiteRoundStateFolder(tmp_path)
    for server_round in rounds:
        folder.store_state_of_round(memory(server_round))
    assert folder.read_last_counted_state(counted, forget=forget).round == counted
    assert kept_rounds(tmp_path) == left
    assert folder.read_last_counted_state(3).round == 3
    assert kept_rounds(tmp_path)[-1] == 3


@pytest.mark.parametrize(("counted", "expected"), [(0, True), (5, False)])
def test_before_the_first_round_and_where_nothing_is_stored_there_is_no_memory(
    counted: int, expected: bool, tmp_path: Path
) -> None:
    read = SiteRoundStateFolder(tmp_path).read_last_counted_state(counted, expected=expected)
    assert repr(read) == repr(SiteRoundState())


def test_a_lost_memory_is_refused_by_name_until_the_site_begins_anew(tmp_path: Path) -> None:
    folder = SiteRoundStateFolder(tmp_path / "memory" / "run")
    folder.store_state_of_round(memory(2))  # of a copy that is older than the checkpoint
    with pytest.raises(LostRoundState, match=r"after round 3 is missing: memory/run/round-000003.safetensors"):
        folder.read_last_counted_state(3, expected=True)
    (tmp_path / "memory" / "run" / "round-000003.safetensors").write_bytes(b"cut off")
    with pytest.raises(LostRoundState, match="after round 3 is damaged"):
        folder.read_last_counted_state(3)
    folder.store_empty_state(3)
    anew = folder.read_last_counted_state(3, expected=True)
    assert (anew.round, anew.best_round, repr(anew.parts), dict(anew.optimizer)) == (0, -1, repr(ModelGroups()), {})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Memories of five runs, of 100 bytes each, written to 1, 2, 3, 4 and 70 days ago."""
    for days, run in ((1, "first"), (2, "second"), (3, "third"), (4, "fourth"), (70, "old")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "round-000001.safetensors").write_bytes(bytes(100))
        written = time.time() - days * 86400
        os.utime(tmp_path / run, (written, written))
    return tmp_path


@pytest.mark.parametrize(
    ("run", "room", "left"),
    [
        ("next", {}, {"first", "second", "third", "fourth"}),  # which may be resumed
        ("next", {"max_bytes": 250}, {"first", "second"}),
        ("next", {"max_bytes": 50}, {"first"}),  # the newest stays however large
        ("old", {"max_bytes": 250}, {"old", "first", "second"}),  # its own takes nobody's room
    ],
)
def test_the_oldest_memories_go_where_room_is_short(run: str, room: dict[str, int], left: set[str], runs: Path) -> None:
    remove_old_run_states(runs, run, **room)
    assert {path.name for path in runs.iterdir()} == left


@pytest.mark.parametrize(
    ("run", "site", "server_round", "problem"),
    [
        ("other", "east", 3, "another run: memory/run/round-000003.safetensors: run other instead of run"),
        ("run", "north", 3, "another site: memory/run/round-000003.safetensors: site north instead of east"),
        ("run", "east", 2, "another round: memory/run/round-000003.safetensors: round 2 instead of 3"),
    ],
)
def test_a_state_under_the_name_of_another_run_site_or_round_is_refused(
    run: str, site: str, server_round: int, problem: str, tmp_path: Path
) -> None:
    SiteRoundStateFolder(tmp_path / "copied" / run, site).store_state_of_round(memory(server_round))
    place = tmp_path / "memory" / "run"
    place.mkdir(parents=True)
    copied = tmp_path / "copied" / run / f"round-{server_round:06d}.safetensors"
    (place / "round-000003.safetensors").write_bytes(copied.read_bytes())
    with pytest.raises(LostRoundState, match=problem):
        SiteRoundStateFolder(place, "east").read_last_counted_state(3)
