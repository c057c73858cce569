"""A site's work uses the experiment's number of CPU threads from the first copy to the last."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from polyclinic.common.models.state import read_model_state, write_model_state
from tests.federations import federation

COPIES = {write_model_state.__code__, read_model_state.__code__}


def test_a_site_copies_models_with_the_threads_of_the_experiment_and_leaves_the_process_its_own(tmp_path: Path) -> None:
    # Torch copies small arrays on all cores by default, and its idle threads double the CPU time of small models.
    counts = set[int]()

    def note_threads_of_copies(frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back
        if event == "call" and frame.f_code in COPIES and caller and "/client/" in caller.f_code.co_filename:
            counts.add(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    sys.setprofile(note_threads_of_copies)
    try:
        federation(tmp_path, "training.threads=2")
        after = torch.get_num_threads()
    finally:
        sys.setprofile(None)
        torch.set_num_threads(before)
    assert counts == {2}
    assert after == 3
