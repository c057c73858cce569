"""What the three levels of a hospital's policy cost the model of ``flwr-sim demo``: mean AUROC under each.

PYTHONPATH=. python benchmarks/levels.py [--seeds 3]

The demo's four hospitals (synthetic phantoms) in one process, all with the same ``[policy] level``; what the attacks of
``flwr-client preview --attack`` find under these levels is measured by ``attacked.py``. No figure leaves a
hospital at ``masked`` and ``private``, so every model is tested here, on all of the demo's test images. One row has the
network of ``private`` and no noise: the demo's own network has batch normalisation, which noise that
hides patients excludes.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

import polyclinic
from polyclinic.client.site.policy import SitePolicy
from polyclinic.common.config import read_experiment
from polyclinic.common.metrics.auroc import compute_mean_auroc
from polyclinic.common.simulation import load_undivided_data
from polyclinic.server.simulation.simulate import simulate
from polyclinic.studies.compare import DEMO_EXPERIMENT

WITHOUT_NORMS = ("model.norm=group", "evaluation.checkpoint=last")
NOISE = (*WITHOUT_NORMS, "privacy.level=patient", "privacy.epsilon=8")
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "`trusted`": ("trusted", ()),
    "`trusted`, with the network of `private` and its last round": ("trusted", WITHOUT_NORMS),
    "`masked`": ("masked", ("evaluation.checkpoint=last", "privacy.secure_aggregation=true")),
    "`private`": ("private", NOISE),
}


def auroc(level: str, overrides: tuple[str, ...]) -> float:
    """One run's mean AUROC over the demo's classes, on all of its test images."""
    with tempfile.TemporaryDirectory() as name:
        file = read_experiment(DEMO_EXPERIMENT, [*overrides, "simulation.backend=inline"])
        policy = SitePolicy.model_validate({"level": level})
        with (
            patch("polyclinic.client.simulation.SIMULATED_SITE_POLICY", policy),
            patch("polyclinic.server.federation.set_up.write_run_pages"),
        ):
            simulate(file, Path(name) / "run", Console(quiet=True))
        test = load_undivided_data(file.experiment, file.base_folder).test
        text = polyclinic.predict(Path(name) / "run", test.images)
        results = compute_mean_auroc(text[list(test.class_names)].to_numpy(), test.labels)
    assert results is not None, "the demo's test part shows every class"
    return results


def main() -> None:
    """Print one row a level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print("| level | mean AUROC, mean and deviation over seeds |\n| --- | --- |")
    for name, (level, overrides) in ROWS.items():
        results = [auroc(level, (*overrides, f"run.seed={seed}")) for seed in range(1, seeds + 1)]
        spread = statistics.stdev(results) if len(results) > 1 else 0.0
        print(f"| {name} | {statistics.mean(results):.3f} ± {spread:.3f} |", flush=True)


if __name__ == "__main__":
    main()
