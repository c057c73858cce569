"""What the tests of ``polyclinic.flower`` share."""

import logging

import pytest


@pytest.fixture
def flowers_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Flower's log says; the inline simulation silences it otherwise."""
    monkeypatch.setattr("server.simulation.backends.inline.silence_flower_logs", lambda: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    logging.getLogger("flwr").setLevel(logging.INFO)
    return caplog
