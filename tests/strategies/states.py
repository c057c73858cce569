"""A small model, and replies of sites."""

from typing import Any

import numpy as np

from polyclinic.common.models.network import Head
from polyclinic.common.models.state import ModelState
from polyclinic.common.wire.records import ModelGroups, TrainReply

TINY = ModelState(
    np.ones(1, np.float32), np.ones(0, np.float32), Head(("a",), np.ones((1, 1), np.float32), np.ones(1, np.float32))
)


def make_reply(site: str, update: ModelGroups | None = None, samples: int = 10, **statistics: Any) -> TrainReply:
    """A reply to a request of round 2."""
    arrays = {name: np.array(values, np.float32) for name, values in statistics.items()}
    return TrainReply("run", 2, site, samples, 0.5, None, None, 1.0, update or ModelGroups(), 1, arrays)
