"""What privacy leaves of a model: AUROC by epsilon, level, where the noise is added, and number of hospitals.

python benchmarks/private_auroc.py [--seeds 3] [--data nih ham10000] [--hospitals 3 12]

Real images of 28 pixels under ../shared/data, split among hospitals that annotate every class. A head is trained on the
96 features of a small network whose layers stay as they were drawn: 679 numbers for HAM10000, 1,358 for NIH. Ten rounds
of one epoch; at `update` three rounds of five, for there only rounds cost. No update is shortened.
Epsilon is of the whole run, by Renyi divergences at a delta of 1e-5: for one patient (of HAM10000: one lesion) at
`patient`, for one image at `sample`, for all data of a hospital at `update`. Distributed noise rests on two thirds of
the hospitals adding their share.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
train = "head"
[training]
batch_size = 64
lr = 0.02
[privacy]
accountant = "rdp"
[evaluation]
result = "last"
[participation]
clip = "off"
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
TEN_ROUNDS = ("run.rounds=10",)
ON_UPDATES = ("run.rounds=3", "training.epochs=5", "privacy.level=update", "privacy.max_update_norm=3")


def forms(hospitals: int) -> dict[str, tuple[str, ...]]:
    """The rows of the table: what each says in the experiment."""
    shares = (
        "privacy.secure_aggregation=true",
        "privacy.noise=distributed",
        f"privacy.honest_sites={math.ceil(2 * hospitals / 3)}",
    )
    found: dict[str, tuple[str, ...]] = {"none": TEN_ROUNDS}
    for epsilon in (8, 2):
        cost = f"privacy.epsilon={epsilon}"
        found[f"`update`, epsilon {epsilon}, local noise"] = (*ON_UPDATES, cost)
        found[f"`update`, epsilon {epsilon}, distributed noise"] = (*ON_UPDATES, cost, *shares)
        for level in ("patient", "sample"):
            found[f"`{level}`, epsilon {epsilon}"] = (*TEN_ROUNDS, f"privacy.level={level}", cost)
    return found


def auroc(overrides: tuple[str, ...]) -> float:
    """One run's mean AUROC on the hospitals' test images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "private.toml").write_text(EXPERIMENT, encoding="utf-8")
        file = read_experiment(folder / "private.toml", overrides)
        with patch("server.federation.set_up.write_pages"):  # to draw a report takes longer than the run
            summary: dict[str, Any] = simulate(file, folder / "run", Console(quiet=True))
    return float(summary["test"]["mean_auroc"])


def main() -> None:
    """Print one row a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--hospitals", nargs="+", type=int, default=[3, 12])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    asked = parser.parse_args()
    began = time.process_time()
    print("| data | hospitals | privacy | AUROC, mean and deviation over seeds |\n| --- | ---: | --- | --- |")
    for data in asked.data:
        for hospitals in asked.hospitals:
            fixed = (*SETS[data], f"partition.sites={hospitals}")
            for name, said in forms(hospitals).items():
                if asked.only in name:
                    found = [auroc((*fixed, *said, f"run.seed={seed}")) for seed in range(asked.seeds)]
                    spread = statistics.stdev(found) if len(found) > 1 else 0.0
                    told = f"{statistics.mean(found):.3f} ± {spread:.3f}"
                    print(f"| {data} | {hospitals} | {name} | {told} |", flush=True)
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
