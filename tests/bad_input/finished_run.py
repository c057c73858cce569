"""A finished run of one round, made once a process by the command; every case gets a copy."""

import atexit
import functools
import shutil
from pathlib import Path
from tempfile import mkdtemp

from tests.bad_input.catalogue import simulation
from tests.federations import DIGITS

EXPERIMENT = DIGITS.replace("rounds = 2", "rounds = 1").replace("sites = 3", "sites = 2")


@functools.lru_cache
def _made() -> Path:
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    ended = simulation("run", folder / "experiment.toml", "--out", folder / "run")
    assert ended.code == 0, ended.err
    return folder


def copied_to(folder: Path) -> Path:
    """``experiment.toml`` and ``run/`` in ``folder``; returns the latter."""
    shutil.copytree(_made(), folder, dirs_exist_ok=True)
    return folder / "run"
