"""flwr-sim as a person types it, in this process."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from studies.cli import main

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
needs_real_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is absent: no real images")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def flwr_sim(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run ``flwr-sim arguments`` and return its exit code and what it printed."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return Ended(int(stopped.value.code or 0), printed.out, printed.err)
