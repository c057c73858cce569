"""Time, a task and the messages for tests that script what sites do, or run them."""

import pytest
from flwr.supercore.task_identity import TaskIdentity

from polyclinic.strategies.engine import exchange, membership
from tests.federations import Traffic, overheard
from tests.strategies.scripted import SUPERLINK, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for the exchange and the roll call; and a task, which Flower's messages ask for."""
    clock = Clock()
    for module in (exchange, membership):
        monkeypatch.setattr(module, "time", clock)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, SUPERLINK)
    return clock


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Every message of the federations that the test runs."""
    return overheard(monkeypatch)
