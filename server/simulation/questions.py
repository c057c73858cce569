"""Ask the simulated sites of an experiment a question, in this process and with the code of ``flwr-client``."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flwr.serverapp import Grid

from polyclinic.common.config import ExperimentFile
from polyclinic.server.questions.exchange import QuestionExchange
from polyclinic.server.simulation.backends.inline import import_client_app, run_with_inline_grid
from polyclinic.server.simulation.simulate import check_simulation_experiment

T = TypeVar("T")
"""Type of the result of a question."""


def ask_simulated_sites(file: ExperimentFile, deadline_s: float, ask: Callable[[QuestionExchange], T]) -> T:
    """Ask the simulated sites of an experiment a question; return the result of ``ask``.

    Args:
        deadline_s: Seconds that a site has for each answer.
        ask: Asks over an exchange, and returns the result.

    Raises:
        BadInput: With every fault of the experiment or its data.
    """
    _, data = check_simulation_experiment(file)
    results = list[T]()

    def ask_over_grid(grid: Grid) -> None:
        results.append(ask(QuestionExchange(grid, deadline_s)))

    with tempfile.TemporaryDirectory() as folder:
        app = import_client_app(file.experiment.model_dump_json(), file.base_folder, Path(folder))
        run_with_inline_grid(ask_over_grid, app, len(data.parts))
    return results[0]
