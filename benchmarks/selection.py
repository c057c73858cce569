"""What the choice of the best round costs: test AUROC of the chosen round against that of the best one, by method.

PYTHONPATH=. python benchmarks/selection.py [--data digits,composites,ham10000] [--rounds 8] [--criterion method]

The benchmark's methods and settings, five sites, few images, in this process. After each round the global model is
scored on the test part, which chooses nothing. Methods whose sites have models of their own are left out.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.common.metrics.auroc import compute_mean_auroc
from polyclinic.common.models.network import build_network, compute_image_probabilities, select_head_row_labels
from polyclinic.common.models.state import write_model_state
from polyclinic.common.system.terminal import ProgressFormat
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.server.federation.set_up import execute_run
from polyclinic.server.runs.progress import SilentRunProgress
from polyclinic.server.simulation.simulate import SimulationBackend
from polyclinic.strategies.engine.events import RoundRecord
from polyclinic.strategies.engine.state import FederationState
from polyclinic.studies.benchmark_file import BenchmarkVariantPlan

FOLDER = Path("experiments/benchmark")
FEWER = {
    "composites": ("data.train=1000", "data.validation=300", "data.test=1000"),
    "ham10000": ("data.train_limit=1000",),
    "kermany": ("data.train_limit=1000",),
    "mednist": ("data.train_limit=1000",),
}
OWN_MODELS = {"pfl", "individual", "fedbn"}


class Scores(SilentRunProgress):
    """Scores the global model after each round."""

    def __init__(self, machine: SimulationBackend) -> None:
        super().__init__()
        self.machine, self.aurocs = machine, dict[int, float]()

    def show_finished_round(self, record: RoundRecord, state: FederationState) -> None:
        test, model = self.machine.data.test_images, state.model
        network = build_network(self.machine.experiment.model, model.head.class_names, 0)
        write_model_state(network, trunk=model.trunk, norm=model.norm, head=model.head)
        labels = select_head_row_labels(test, model.head.class_names).numpy()
        self.aurocs[record.round] = float(
            compute_mean_auroc(compute_image_probabilities(network, convert_to_channels_first(test.images)), labels)
            or 0.5
        )


class Scored(SimulationBackend):
    """One machine whose rounds are scored."""

    @contextmanager
    def _show_run_progress(self, out: Path) -> Iterator[list[SilentRunProgress]]:
        self.scores = Scores(self)
        with super()._show_run_progress(out) as watchers:
            yield [*watchers, self.scores]


def main() -> None:
    """Print a line for each method and data set, and the largest loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits,composites,ham10000")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--criterion", default="method", choices=("method", "auroc", "loss"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan, losses = BenchmarkVariantPlan.read_benchmark_variant(FOLDER, "published"), []
    plan = BenchmarkVariantPlan(plan.benchmark, plan.folder, plan.form.model_copy(update={"rounds": options.rounds}))
    for data in options.data.split(","):
        for method in (each for each in plan.list_methods_for_data(data) if each.name not in OWN_MODELS):
            run = plan.make_planned_run(data, "shared5", method, 3e-3, options.seed)
            more = (f"evaluation.criterion={options.criterion}", *FEWER.get(data, ()))
            file = read_experiment(run.experiment, (*run.overrides, *more))
            machine = Scored(file, Console(quiet=True), None, ProgressFormat.none)
            with tempfile.TemporaryDirectory() as folder:
                chosen = execute_run(machine, file, Path(folder) / "run", pages=False)["best_round"]
            results = machine.scores.aurocs
            best = max(results, key=lambda server_round: results[server_round])
            losses.append(results[best] - results.get(chosen, 0.5))
            text = f"chosen {chosen} {results.get(chosen, 0.5):.4f}, best {best} {results[best]:.4f}"
            print(f"{data:11} {method.label:30} {text}, lost {losses[-1]:.4f}", flush=True)
    within = sum(loss <= 0.005 for loss in losses)
    print(f"{within} of {len(losses)} within 0.005; the most lost is {max(losses):.4f}")


if __name__ == "__main__":
    main()
