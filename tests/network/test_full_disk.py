"""A disk that is really full, under the SuperLink and the run that share a folder on it."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.deployment.supervisor import rounds_done
from tests.network.federated import (
    REMEMBERING,
    SLOW,
    Federation,
    admitted,
)
from tests.network.real import PARTIAL

pytestmark = [pytest.mark.slow, pytest.mark.torture]
MEGABYTES = 32
FULL_S = 8.0
Said = Callable[[str, object], None]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own in the place of an empty folder."""
    folder.mkdir(exist_ok=True)
    assert not any(folder.iterdir())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """The coordinator's ``state`` is on a small disk."""
    with contextlib.ExitStack() as stack:
        federation = stack.enter_context(admitted(tmp_path, PARTIAL))
        stack.enter_context(small_disk(federation.coordinator.folder / "state"))
        federation.coordinator.start()
        federation.gather()
        yield federation


def fill(folder: Path) -> Path:
    """Write until there is no room for another byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_full_disk_under_the_superlink_costs_time_and_nothing_else(
    federation: Federation, tmp_path: Path, record_property: Said
) -> None:
    record_property("survived", "disk full under the SuperLink")
    record_property("same model", "disk full under the SuperLink")
    overrides = (SLOW, "run.rounds=3", REMEMBERING)
    run = federation.run(tmp_path / "run", *overrides)
    federation.north.works_on("train", 2)
    filler = fill(federation.coordinator.folder / "state")
    time.sleep(FULL_S)
    assert rounds_done(tmp_path / "run") == 1  # nothing went on meanwhile
    filler.unlink()
    federation.ends_unharmed(run, tmp_path, 3, *overrides)
