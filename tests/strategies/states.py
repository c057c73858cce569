"""A small model."""

import numpy as np

from common.models.network import Head
from common.models.state import ModelState

ONE = ModelState(
    np.ones(1, np.float32), np.ones(0, np.float32), Head(("a",), np.ones((1, 1), np.float32), np.ones(1, np.float32))
)
