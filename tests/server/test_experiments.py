"""Every experiment of the project can be run: its data are there, and its partition, method and scale fit them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import read_experiment
from common.errors import Fault
from server.simulation import simulate
from server.simulation.simulate import check_experiment
from tests.server.commands import needs_real_data

ROOT = Path(__file__).parents[2] / "experiments"
AFTER_A_PAPER = sorted(
    path
    for path in ROOT.glob("*/*.toml")
    if path.name != "pyproject.toml" and path.parent.name not in ("benchmark", "ablation")
)


FEWEST_SITES = {"surgical": 4}
WITHOUT = ("model.weights=none", "model.weights_sha256=none")
NO_WEIGHTS = {"surgical": (*WITHOUT, "method.trunk=fedavg"), "fedmlp": WITHOUT}
"""The data are the same without the weights, which are not in the repository."""


@needs_real_data
@pytest.mark.parametrize("scale", ["small", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.parametrize("folder", sorted({path.parent.name for path in AFTER_A_PAPER}))
def test_every_row_of_a_papers_table_fits_its_data(folder: str, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A table of a hundred thousand rows takes seconds to check, and many experiments have the same.
    monkeypatch.setattr(simulate, "data_faults", once_each(simulate.data_faults))
    sites = {}
    for path in sorted((ROOT / folder).glob("*.toml"), key=lambda path: same_data_together(path, scale)):
        _, data = check_experiment(read_experiment(path, [f"scale={scale}", *NO_WEIGHTS.get(folder, ())]))
        sites[path.stem] = len(data.parts)
    assert min(sites.values()) >= FEWEST_SITES.get(folder, 5)


def once_each(faults: Callable[[Any, Path], list[Fault]]) -> Callable[[Any, Path], list[Fault]]:
    """The faults of data, found once for each description."""
    found: dict[tuple[str, Path], list[Fault]] = {}

    def known(spec: Any, base: Path) -> list[Fault]:
        about = spec.model_dump_json(), base
        if about not in found:
            found[about] = faults(spec, base)
        return found[about]

    return known


def same_data_together(path: Path, scale: str) -> str:
    """The loaded data of the last experiment are kept, so those of one data set come one after another."""
    experiment = read_experiment(path, [f"scale={scale}"]).experiment
    assert experiment.data is not None
    assert experiment.partition is not None
    return experiment.data.model_dump_json() + experiment.partition.model_dump_json() + str(experiment.run.seed)
