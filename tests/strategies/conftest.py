"""Time, a task and the messages for tests that script what sites do, or run them."""

import pytest

from polyclinic.strategies.engine import exchange, membership
from tests.federations import Traffic, overheard
from tests.strategies.scripted import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for the exchange and the roll call."""
    clock = Clock()
    for module in (exchange, membership):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Every message of the federations that the test runs."""
    return overheard(monkeypatch)
