"""One contender of ``simulation.py`` in a process of its own: trains, and writes when each round ended.

python benchmarks/simulated_run.py CONTENDER EXPERIMENT.toml STAMPS

CONTENDER is bare, resident, inline, ray, ray:WORKERS, stock, pfl or pfl:validated.

A line of STAMPS: a word, seconds of the system-wide monotonic clock, CPU seconds of this process so far. Words:
``imported``, ``round`` (when the first begins and when each ends), ``done MODEL_SHA256``.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polyclinic.common.system.resources import exclude_imports_from_gc


def stamp(file: Path, word: str, more: str = "") -> None:
    with file.open("a", encoding="ascii") as stamps:
        stamps.write(f"{word} {time.monotonic()} {time.process_time()} {more}\n")


def bare(experiment: Path, stamps: Path) -> str:
    from bare_loop import fedavg

    from polyclinic.common.config import read_experiment

    stamp(stamps, "imported")
    return fedavg(read_experiment(experiment, []), lambda: stamp(stamps, "round"))


def resident(experiment: Path, stamps: Path) -> str:
    """The bare loop with the model on the device for the whole run; on a GPU it ends in other bits."""
    from bare_loop import fedavg

    from polyclinic.common.config import read_experiment

    stamp(stamps, "imported")
    return fedavg(read_experiment(experiment, []), lambda: stamp(stamps, "round"), resident=True)


def ours(experiment: Path, stamps: Path, backend: str) -> str:
    from rich.console import Console

    from polyclinic.common.config import read_experiment
    from polyclinic.server.federation.recorder import RunTotals
    from polyclinic.server.simulation.simulate import simulate

    began, noted = RunTotals.__init__, RunTotals.add_round_to_totals

    def beginning(books: RunTotals, *arguments: Any) -> None:
        began(books, *arguments)
        stamp(stamps, "round")

    def noting(books: RunTotals, *arguments: Any) -> None:
        noted(books, *arguments)
        stamp(stamps, "round")

    RunTotals.__init__, RunTotals.add_round_to_totals = beginning, noting  # type: ignore[method-assign, assignment]
    stamp(stamps, "imported")
    name, _, workers = backend.partition(":")
    options = [f'simulation.backend="{name}"', *([f"simulation.workers={workers}"] if workers else [])]
    out = stamps.with_name(f"{stamps.name}-run")
    try:
        return str(simulate(read_experiment(experiment, options), out, Console(quiet=True))["model_sha256"])
    finally:
        RunTotals.__init__, RunTotals.add_round_to_totals = began, noted  # type: ignore[method-assign]


def stock(experiment: Path, stamps: Path) -> str:
    import warnings

    from flwr.simulation import run_simulation
    from stock_simulation.apps import Setting, client_app, server_app

    from polyclinic.common.config import read_experiment

    stamp(stamps, "imported")
    file = read_experiment(experiment, [])
    options: Any = file.experiment
    setting = Setting(
        options.model.architecture,
        file.base_folder / "images.npz",
        options.run.rounds,
        options.training.epochs,
        options.training.batch_size,
        options.training.lr,
        drawn=options.participation.sites_per_round,
        validates=options.partition.validation_fraction > 0,
    )
    warnings.simplefilter("ignore")
    run_simulation(
        server_app(setting, lambda: stamp(stamps, "round")),
        client_app(setting),
        num_supernodes=int(options.partition.sites),
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
    return "-"


def pfl(experiment: Path, stamps: Path, *, validates: bool = False) -> str:
    from pfl_loop import fedavg

    from polyclinic.common.config import read_experiment

    stamp(stamps, "imported")
    return fedavg(read_experiment(experiment, []), lambda: stamp(stamps, "round"), validates=validates)


def main() -> None:
    contender, experiment, stamps = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    others: dict[str, Callable[[Path, Path], str]] = {
        "bare": bare,
        "resident": resident,
        "stock": stock,
        "pfl": pfl,
        "pfl:validated": partial(pfl, validates=True),
    }
    with exclude_imports_from_gc():  # as flwr-sim does
        if contender not in others:
            import polyclinic.server.simulation.simulate  # noqa: F401
    done = others[contender](experiment, stamps) if contender in others else ours(experiment, stamps, contender)
    stamp(stamps, "done", done)


if __name__ == "__main__":
    main()
