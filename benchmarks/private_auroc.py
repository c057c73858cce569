"""What privacy leaves of a model: AUROC by epsilon, level, where the noise is added, and number of hospitals.

python benchmarks/private_auroc.py [--seeds 3] [--data nih ham10000] [--hospitals 3 12]

Real images of 28 pixels under ../shared/data, a network of 17,000 numbers, ten rounds of one epoch; every hospital
annotates every class, so that nothing but the noise differs between rows. Epsilon is of the whole run for one patient
(of HAM10000: one lesion) at `patient`, for all of a hospital's data at `update`; delta is 1e-5. Distributed noise rests
on two thirds of the hospitals adding their share.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from common.config import read_experiment
from server.simulation.simulate import simulate

NIH = json.dumps([f"finding {number}" for number in range(14)])
DATA = Path(__file__).parents[2] / "shared" / "data"
EXPERIMENT = """
[run]
method = "surgical"
[model]
architecture = "tiny_cnn"
image_size = 28
norm = "group"
[training]
batch_size = 64
[evaluation]
result = "last"
[simulation]
backend = "inline"
[data]
kind = "npz"
[partition]
kind = "class_subsets"
"""
SETS: dict[str, tuple[str, ...]] = {
    "nih": (
        f"data.path={DATA}/nih_cxr14/nih_cxr14_28.npz",
        "data.patient_key=patient",
        f"data.classes={NIH}",
        "partition.shared=14",
        "model.channels=1",
    ),
    "ham10000": (
        f"data.path={DATA}/ham10000_28.npz",
        "data.patient_key=lesion",
        'data.classes=["akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"]',
        "data.train_limit=1400",
        "data.test_limit=700",
        "partition.shared=7",
        "model.channels=3",
    ),
}
PLAIN = ("training.lr=0.003",)
LARGER = ("training.lr=0.01", "training.optimizer=sgd", "privacy.level=update", "privacy.max_update_norm=0.5")
LEVELS = {"patient": (*PLAIN, "privacy.level=patient"), "update": LARGER}


def forms(hospitals: int) -> dict[str, tuple[str, ...]]:
    """The rows of the table: what each says in the experiment."""
    shares = (
        "privacy.secure_aggregation=true",
        "privacy.noise=distributed",
        f"privacy.honest_sites={math.ceil(2 * hospitals / 3)}",
    )
    found = {"none": PLAIN}
    for epsilon in (8, 2):
        cost = (f"privacy.epsilon={epsilon}",)
        found[f"`patient`, epsilon {epsilon}"] = (*LEVELS["patient"], *cost)
        found[f"`update`, epsilon {epsilon}, local noise"] = (*LEVELS["update"], *cost)
        found[f"`update`, epsilon {epsilon}, distributed noise"] = (*LEVELS["update"], *cost, *shares)
    return found


def auroc(overrides: tuple[str, ...]) -> float:
    """One run's mean AUROC on the hospitals' test images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "private.toml").write_text(EXPERIMENT, encoding="utf-8")
        file = read_experiment(folder / "private.toml", overrides)
        summary: dict[str, Any] = simulate(file, folder / "run", Console(quiet=True))
    return float(summary["test"]["mean_auroc"])


def main() -> None:
    """Print one row a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--hospitals", nargs="+", type=int, default=[3, 12])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    asked = parser.parse_args()
    began = time.process_time()
    print("| data | hospitals | privacy | AUROC, mean and deviation over seeds |\n| --- | ---: | --- | --- |")
    for data in asked.data:
        for hospitals in asked.hospitals:
            fixed = (*SETS[data], f"partition.sites={hospitals}", f"run.rounds={asked.rounds}")
            for name, said in forms(hospitals).items():
                if asked.only in name:
                    found = [auroc((*fixed, *said, f"run.seed={seed}")) for seed in range(asked.seeds)]
                    spread = statistics.stdev(found) if len(found) > 1 else 0.0
                    print(f"| {data} | {hospitals} | {name} | {statistics.mean(found):.3f} ± {spread:.3f} |", flush=True)
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
