"""A disk that is really full, under the SuperLink and the run that share a folder on it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.deployment.supervisor import rounds_done
from tests.network.conftest import Survives
from tests.network.ended import disk, fill
from tests.network.federated import REMEMBERING, SLOW, Federation, admitted
from tests.network.real import PARTIAL

pytestmark = [pytest.mark.slow, pytest.mark.torture]
MEGABYTES = 32
FULL_S = 8.0


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """The coordinator's ``state`` is on a small disk."""
    with admitted(tmp_path, PARTIAL) as federation:
        (federation.coordinator.folder / "state").mkdir(exist_ok=True)
        with disk(federation.coordinator.folder / "state", MEGABYTES * 1024):
            federation.coordinator.start()
            federation.gather()
            yield federation


def test_a_full_disk_under_the_superlink_costs_time(federation: Federation, survives: Survives) -> None:
    survives("disk full under the SuperLink")
    overrides = (SLOW, "run.rounds=3", REMEMBERING)
    run = federation.run(*overrides)
    federation.north.works_on("train", 2)
    filler = fill(federation.coordinator.folder / "state")
    time.sleep(FULL_S)
    assert rounds_done(federation.out) == 1  # nothing went on meanwhile
    filler.unlink()
    federation.ends_unharmed(run, 3, *overrides)
