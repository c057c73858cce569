"""What all tests share: how pytest-xdist deals them out, and a machine that protects no file by itself."""

import gc
import os
import random
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile: with two, each worker takes six times as long

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.survivals import Survivals

# Hypothesis' 200 ms for an example measure how busy the machine is.
hypothesis.settings.register_profile("ours", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=600)
hypothesis.settings.load_profile("ours")

TOGETHER = {
    "test_leaving.py": "one coordinator",
    "test_refusals.py": "one coordinator",
    "test_local_ports.py": "one coordinator",
    "test_status.py": "one coordinator",
    "test_same_model.py": "one federation",
    "test_limits.py": "one federation",
    "test_flood.py": "one federation",
    "test_forger.py": "one federation",
    "test_haproxy.py": "one federation",
    "test_kills.py": "one federation",
    "test_named_kills.py": "named kills",
    "test_harm.py": "harm",
}
"""File in ``tests/network`` -> its group. (xdist's own loadgroup mode does nothing under pytest 9.2.)"""
FIRST = (
    *("one federation", "test_federations", "test_one_liar", "test_resume", "test_contract", "one coordinator"),
    *("test_progress", "test_attack", "test_wrong_calls", "test_runs", "test_privacy", "test_private_rounds"),
    *("test_wrappers", "test_commands", "test_report_pictures", "test_frozen", "test_lost_output", "test_export"),
    *("test_fedmlp", "test_fednoro", "test_external", "test_training_plugins", "test_rscfed", "test_claims"),
    *("test_backends", "test_polyclinic", "test_wheel", "test_recipes", "test_tutorials", "test_real_data"),
)
"""Long groups, the longest first: at the end no worker waits for one that began late. The two that mostly wait for
other processes, ``one federation`` and ``one coordinator``, do not begin together: a processor would be idle."""
RANKS = {name: rank for rank, name in enumerate(FIRST)}


class Queue(OrderedDict[str, dict[str, bool]]):
    """Groups of tests that are still to be dealt out; those of ``FIRST`` leave first."""

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        """The next group."""
        name = min(self, key=lambda group: RANKS.get(PurePath(group).stem, len(RANKS)))
        return name, self.pop(name)


class Dealt(LoadScopeScheduling):
    """The tests of a file to one worker, for they share runs and what fixtures made; see also ``TOGETHER``."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self.workqueue = Queue()

    def _split_scope(self, nodeid: str) -> str:
        path = PurePath(nodeid.split("::")[0])
        if path.name == "test_contract.py":
            return f"{path} {nodeid.partition('[')[2] or nodeid}"  # by the parameter of a test, its method
        return TOGETHER.get(path.name, str(path)) if path.parent.name == "network" else str(path)


def pytest_configure(config: pytest.Config) -> None:
    """Have what the tests survived counted."""
    config.pluginmanager.register(Survivals())


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through all imported modules again and again: 8 of 190 CPU seconds."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # a message of Flower is a cycle: the young are looked at as often as ever


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test the same draws in every process: a layer without a seed of its own would start with others."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def pytest_unconfigure() -> None:
    """Let the end of the process free what libraries expect to be freed: nanobind complains otherwise."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Take the place of xdist's own way of dealing, where nobody asked for another."""
    return Dealt(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture
def lax_umask() -> Iterator[None]:
    """A machine on which new files may be read and written by everybody."""
    before = os.umask(0)
    yield
    os.umask(before)
