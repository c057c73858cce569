"""Masked runs of several rounds under the levels of a hospital's policy, with hospitals that come late or are lost."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.config import Plan
from common.wire.records import EvaluateReply, TrainRequest
from common.wire.secure_aggregation import MaskedRequest
from tests.client.masked import FOUR, Hospitals, masked_plan, of_training, with_trunk
from tests.client.rounds import OWN, beginning, evaluation, private_plan

SIX = (*FOUR, "fir", "oak")
COURSE: tuple[tuple[tuple[str, ...], dict[str, type]], ...] = (
    (SIX[:-1], {}),  # oak comes late
    (SIX, {}),
    (SIX, {"ash": MaskedRequest, "birch": MaskedRequest}),
    (SIX, {}),
)


@pytest.mark.parametrize(
    ("level", "of"),
    [
        ("masked", masked_plan()),
        # Private hospitals accept noise that hides patients; it goes on before the masks.
        ("private", private_plan(masked_plan(), level="patient", noise_multiplier=2.0, secure_aggregation=True)),
    ],
    ids=["masked", "private"],
)
def test_a_masked_run_goes_to_its_end(level: str, of: Plan, tmp_path: Path) -> None:
    here = Hospitals(tmp_path, SIX, policy={"level": level})
    for number, (members, lost) in enumerate(COURSE, 1):

        def moved(
            request: TrainRequest, times: float = 0.95**number, counted: int = min(number - 1, 1)
        ) -> TrainRequest:
            return replace(with_trunk(request, times), counted=counted)

        opened = here.opened(of, members, number, change=of_training(moved), lost=lost)
        assert list(opened.survivors) == [name for name in members if name not in lost]
        assert np.abs(opened.vector).max() > 0
    assert here.refusals == []
    requested = evaluation(of, beginning(of, OWN), 4, 4, 4)
    assert None not in [here.send(name, "evaluate", requested, EvaluateReply) for name in SIX], here.refusals
