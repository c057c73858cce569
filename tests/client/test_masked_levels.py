"""Masked runs of several rounds under the levels of a hospital's policy, with hospitals that come late or are lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Plan, PrivacySection
from common.wire.records import EvaluateReply, TrainRequest
from common.wire.secure_aggregation import MaskedRequest
from tests.client.masked import Hospitals, masked_plan
from tests.client.rounds import OWN, beginning, evaluation

SIX = dict.fromkeys(("ash", "birch", "cedar", "elm", "fir", "oak"), 40)
COURSE: tuple[tuple[tuple[str, ...], dict[str, type]], ...] = (
    (("ash", "birch", "cedar", "elm", "fir"), {}),  # oak comes late
    (tuple(SIX), {}),
    (tuple(SIX), {"ash": MaskedRequest, "birch": MaskedRequest}),
    (tuple(SIX), {}),
)


def plan_for(level: str) -> Plan:
    """Private hospitals want noise that hides patients; it goes on before the masks."""
    of = masked_plan()
    if level != "private":
        return of
    privacy = {"level": "patient", "noise_multiplier": 2.0, "secure_aggregation": True}
    norm = of.model.model_copy(update={"norm": "group"})
    return of.model_copy(update={"model": norm, "privacy": PrivacySection.model_validate(privacy)})


@pytest.mark.parametrize("level", ["masked", "private"])
def test_a_masked_run_goes_to_its_end(level: str, tmp_path: Path) -> None:
    here, of = Hospitals(tmp_path, SIX, policy={"level": level}), plan_for(level)
    for number, (members, lost) in enumerate(COURSE, 1):

        def moved(name: str, asked: Any, by: float = 0.95**number, counted: int = min(number - 1, 1)) -> Any:
            if not isinstance(asked, TrainRequest) or asked.model.trunk is None:
                return asked
            model = replace(asked.model, trunk=asked.model.trunk * np.float32(by))
            return replace(asked, model=model, counted=counted)

        opened = here.opened(of, members, number, change=moved, lost=lost)
        assert list(opened.survivors) == [name for name in members if name not in lost]
        assert np.abs(opened.vector).max() > 0
    assert here.refusals == []
    told = [here.asked(name, "evaluate", evaluation(of, beginning(of, OWN), 4, 4, 4), EvaluateReply) for name in SIX]
    assert None not in told, here.refusals
