"""What the tests of ``polyclinic`` share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_pages() -> Iterator[None]:
    """Runs write no report and no model card, which take longer to draw than the run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("polyclinic.server.federation.set_up.write_run_pages", lambda *arguments, **options: None)
        yield


@pytest.fixture
def flowers_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Flower's log says; the inline simulation silences it otherwise."""
    monkeypatch.setattr("polyclinic.server.simulation.backends.inline.silence_flower_logs", lambda: None)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    logging.getLogger("flwr").setLevel(logging.INFO)
    return caplog
