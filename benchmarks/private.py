"""What differential privacy costs: processor time of a site's round, and how good the model is.

python benchmarks/private.py [--rounds 10] [--seeds 2] [--out FILE]

scikit-learn's digits, all classes at each of three sites, in this process; the model of the last round, on the test
part. Times are of whole rounds, testing and averaging included, without what is done once a run.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.server.simulation.simulate import simulate
from polyclinic.strategies.engine.coordinator import Coordinator

SITES = 3
EXPERIMENT = f"""
[run]
method = "surgical"
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
norm = "group"
[training]
batch_size = 64
lr = 0.003
[evaluation]
checkpoint = "last"
[simulation]
backend = "inline"
[data]
kind = "digits"
image_size = 16
[partition]
kind = "class_subsets"
sites = {SITES}
shared = 10
"""
FORMS = {
    "none": (),
    "`sample`, epsilon 50": ("privacy.level=sample", "privacy.epsilon=50"),
    "`sample`, epsilon 8": ("privacy.level=sample", "privacy.epsilon=8"),
    "`sample`, epsilon 2": ("privacy.level=sample", "privacy.epsilon=2"),
    "`update`, epsilon 50": ("privacy.level=update", "privacy.epsilon=50"),
    "`update`, epsilon 1000": ("privacy.level=update", "privacy.epsilon=1000"),
}


class Rounds:
    """Processor time of every round but the first, in which torch and Opacus prepare themselves."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def watch(self) -> None:
        """Take the time whenever a round has counted."""
        original, clock = Coordinator.aggregate_train, [0.0]

        def timed(strategy: Coordinator, server_round: int, replies: Any) -> Any:
            result = original(strategy, server_round, replies)
            now = time.process_time()
            if server_round > 1:
                self.seconds.append(now - clock[0])
            clock[0] = now
            return result

        Coordinator.aggregate_train = timed  # type: ignore[method-assign,assignment]


def ran(rounds: int, seed: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run's summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits.toml").write_text(EXPERIMENT, encoding="utf-8")
        file = read_experiment(folder / "digits.toml", (f"run.rounds={rounds}", f"run.seed={seed}", *overrides))
        return simulate(file, folder / "run", Console(quiet=True))


def main() -> None:
    """Print one row a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments, rows = parser.parse_args(), []
    rounds = Rounds()
    rounds.watch()
    print("| privacy | CPU ms a site and round | mean AUROC, by seed |\n| --- | --- | --- |")
    for name, overrides in FORMS.items():
        rounds.seconds.clear()
        results = [ran(arguments.rounds, seed, overrides)["test"]["mean_auroc"] for seed in range(arguments.seeds)]
        text = ", ".join(f"{value:.3f}" for value in results)
        cpu_ms = statistics.median(rounds.seconds) / SITES * 1e3
        rows.append({"privacy": name, "cpu_ms": cpu_ms, "mean_auroc": results})
        print(f"| {name} | {cpu_ms:.0f} | {text} |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
