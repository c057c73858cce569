"""These tests need a GPU that torch finds."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
