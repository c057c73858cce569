"""What ``flwr-server status`` can say of updates that did not count, or are unlike the others'."""

from pathlib import Path
from typing import Any

import numpy as np

from common.models.state import Head, ModelState
from server.deployment.status import in_words
from server.runs.live_status import Present, read_present
from server.runs.reporter import Reporter
from strategies.base.round_record import FederationValidation, RoundRecord
from strategies.base.state import FederationState

MODEL = ModelState(
    np.zeros(1, np.float32), np.zeros(1, np.float32), Head((), np.zeros((0, 1), np.float32), np.zeros(0, np.float32))
)


def done(number: int, **facts: Any) -> RoundRecord:
    nothing: dict[str, Any] = {"site_seconds": {}, "bytes_down": {}, "bytes_up": {}, "seconds": 1.0}
    facts = {"absent": {}, **nothing, **facts}
    return RoundRecord(
        number, ("east",), train_loss={"east": 0.5}, validation=FederationValidation(), aggregate_seconds=0.1, **facts
    )


def test_status_says_of_every_site_why_it_was_last_left_out_and_whose_update_is_unlike_the_others(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    with Reporter(Present("run", "trial"), tmp_path, told.append) as reporter:
        reporter.began(["east", "north", "south"], 3)
        reporter.round_done(
            done(1, absent={"north": "trunk was expected", "south": "disk full"}), FederationState(1, MODEL)
        )
        reporter.round_done(
            done(2, absent={"north": "NaN"}, far={"south": "its update is far longer"}), FederationState(2, MODEL)
        )
    present = read_present(tmp_path)
    assert present is not None
    assert present.left_out == {"north": "round 2: NaN", "south": "round 1: disk full"}
    assert present.far == {"south": "round 2: its update is far longer"}
    assert "round 2 counts south, but its update is far longer" in told
    found = {"name": "trial", "address": "", "superlink": "up", "certificate_days": 9.0, "sites": {}, "time": 0.0}
    words = str(in_words({**found, "run": vars(present)}).renderables[-1])  # type: ignore[attr-defined]
    for line in (
        "north was left out of round 2: NaN",
        "south was left out of round 1: disk full",
        "south counts in round 2: its update is far longer",
    ):
        assert line in words.splitlines()
