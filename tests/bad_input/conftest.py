"""Programs that are tried in this process leave it as it was."""

import signal
from collections.abc import Iterator

import pytest

import client.cli


@pytest.fixture
def restored_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``start`` takes SIGTERM for itself, and its malloc's habits are for a process of its own."""
    monkeypatch.setattr(client.cli, "keep_large_buffers", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
