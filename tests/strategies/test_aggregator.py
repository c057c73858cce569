"""Updates are added in the order of site names, no matter who was first, and few of them wait in memory."""

import errno
import gc
import os
import weakref
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply
from polyclinic.strategies.engine import aggregator
from polyclinic.strategies.engine.aggregator import BufferedAggregator, StreamingAggregator, UpdateStorage
from polyclinic.strategies.methods.surgical import OwnersMean
from polyclinic.strategies.registry import build_strategy
from tests.strategies.folds import aggregated

SITES = ("east", "north", "south", "west")
GENERATOR = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return GENERATOR.normal(size=shape).astype(np.float32)


TRUNK = 70_001
TRUNK_BYTES = 4 * TRUNK
MODEL = ModelState(numbers(TRUNK), numbers(3), Head(("a", "b"), numbers(2, 5), numbers(2)))


def reply(site: str, samples: int) -> TrainReply:
    head = Head(("b", "a"), numbers(2, 5), numbers(2))
    return TrainReply("run", 1, site, samples, 0.5, None, None, 1.0, ModelGroups(numbers(TRUNK), numbers(3), head))


REPLIES = {site: reply(site, 3 + place) for place, site in enumerate(SITES)}


def bits(model: ModelState) -> bytes:
    return b"".join(array.tobytes() for array in ModelGroups.from_model(model).to_named_arrays().values())


@pytest.mark.parametrize("in_memory", [0, 1, 4])
@pytest.mark.parametrize("order", list(permutations(SITES)))
def test_any_order_has_the_same_bits(order: tuple[str, ...], in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", in_memory * TRUNK_BYTES)
    together = StreamingAggregator(MODEL, SITES, "samples", OwnersMean)
    for site in order:
        stripped = together.collect_update(REPLIES[site])
        assert stripped.update == ModelGroups()
        assert stripped.train_samples == REPLIES[site].train_samples
    weights = [float(REPLIES[site].train_samples) for site in SITES]
    assert bits(together.finish_update_means().add_means_to_model()) == bits(
        aggregated(MODEL, list(REPLIES.values()), weights)
    )


@pytest.mark.parametrize("refused", [(), ("east",), ("west",)])
def test_a_site_that_is_refused_or_never_answers_is_not_waited_for(refused: tuple[str, ...]) -> None:
    some = StreamingAggregator(MODEL, SITES, "uniform", OwnersMean)
    for site in ("south", "north"):
        some.collect_update(REPLIES[site])
    for site in refused:
        some.skip_site(site)
    expected = aggregated(MODEL, [REPLIES["north"], REPLIES["south"]], [1.0, 1.0])
    assert bits(some.finish_update_means().add_means_to_model()) == bits(expected)


def test_where_the_disk_has_no_room_updates_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", 0)
    together = StreamingAggregator(MODEL, SITES, "uniform", OwnersMean, UpdateStorage(tmp_path / "not-there"))
    for site in SITES[::-1]:
        together.collect_update(REPLIES[site])
    assert bits(together.finish_update_means().add_means_to_model()) == bits(
        aggregated(MODEL, list(REPLIES.values()), [1.0] * 4)
    )


@pytest.mark.parametrize("in_memory", [0, 2])
def test_waiting_updates_lie_in_files_by_name(in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", in_memory * TRUNK_BYTES)
    waiting = BufferedAggregator(build_strategy("surgical", {}), MODEL, UpdateStorage(tmp_path))
    for site in ("west", "east", "south", "north"):
        assert waiting.collect_update(REPLIES[site]).update == ModelGroups()
    waiting.skip_site("south")
    waiting.skip_site("nobody")
    with pytest.raises(KeyError):
        waiting.restore_stored_updates({"south": REPLIES["south"]})
    stripped = {site: replace(REPLIES[site], update=ModelGroups()) for site in ("east", "north", "west")}
    updates = {site: reply.update for site, reply in waiting.restore_stored_updates(stripped).items()}
    assert not list(tmp_path.iterdir())
    for site, update in updates.items():
        sent = REPLIES[site].update.to_named_arrays()
        assert update.to_named_arrays().keys() == sent.keys()
        assert all(array.tobytes() == sent[name].tobytes() for name, array in update.to_named_arrays().items())


def test_an_update_that_was_added_or_put_away_leaves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", TRUNK_BYTES)
    some, alive = StreamingAggregator(MODEL, SITES, "uniform", OwnersMean), []
    for site, stays in (("east", False), ("south", True), ("west", False), ("north", False)):
        arrived = reply(site, 3)
        trunk = arrived.update.trunk
        alive.append((weakref.ref(trunk), stays))
        some.collect_update(arrived)
        del arrived, trunk
        gc.collect()
        if site == "west":
            assert [trunk_of() is not None for trunk_of, _ in alive] == [stays for _, stays in alive]
    assert [trunk_of() for trunk_of, _ in alive] == [None] * 4


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files")
def test_many_that_wait_take_no_more_open_files_than_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024, a common limit, the sites' connections need most."""
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", 0)
    waiting = BufferedAggregator(build_strategy("surgical", {}), MODEL, UpdateStorage(tmp_path))
    replies = {f"site-{number:03d}": replace(REPLIES["north"], site=f"site-{number:03d}") for number in range(300)}
    for each in replies.values():
        waiting.collect_update(each)
    updates = waiting.restore_stored_updates(replies)
    trunks = {site: each.update.trunk for site, each in updates.items()}

    def open_files() -> int:
        """Count this process's open files below the folder; other threads and tests have others."""
        places = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(place).startswith(str(tmp_path)) for place in places)

    assert open_files() <= 2
    assert all(np.array_equal(trunk, replies[site].update.trunk) for site, trunk in trunks.items())
    del waiting, updates, trunks
    gc.collect()
    assert open_files() == 0


def test_a_disk_that_fills_up_harms_one_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", 0)
    waiting = aggregator.StoredSiteUpdates(UpdateStorage(tmp_path))
    waiting.store_update("north", REPLIES["north"].update)
    real = waiting._file._file

    class Full:
        """Takes five bytes more."""

        def write(self, data: memoryview) -> int:
            if len(data) < TRUNK_BYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data[:5])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    waiting._file._file = Full()
    waiting.store_update("south", REPLIES["south"].update)
    waiting._file._file = real
    waiting.store_update("west", REPLIES["west"].update)
    assert [site for site in waiting if isinstance(waiting[site].trunk, np.memmap)] == ["north", "west"]
    for site in ("north", "south", "west"):
        assert np.array_equal(waiting.pop_update(site).trunk, REPLIES[site].update.trunk)


def test_of_two_updates_of_one_site_the_later_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = aggregator.StoredSiteUpdates(UpdateStorage(tmp_path))
    for site, in_memory in (("north", 0), ("south", 2**20)):
        monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", in_memory)
        waiting.store_update("west", REPLIES[site].update)
    assert np.array_equal(waiting.pop_update("west").trunk, REPLIES["south"].update.trunk)
    assert waiting._bytes == 0


def test_the_room_of_updates_that_were_taken_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "MAX_UPDATE_BYTES_IN_MEMORY", 0)
    waiting = aggregator.StoredSiteUpdates(UpdateStorage(tmp_path))
    for _ in range(3):
        for site in SITES:
            waiting.store_update(site, REPLIES[site].update)
        file = waiting._file._file
        assert os.fstat(file.fileno()).st_size == len(SITES) * TRUNK_BYTES
        for site in SITES:
            waiting.pop_update(site)
