"""What each mean makes of five sites of which one sends its update turned round and ten times as long.

python benchmarks/poisoned.py [--rounds 3] [--seeds 2]

scikit-learn's digits, all classes at every site, in this process; the model of the last round, on the test part.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from client import app
from client.site.site import Site
from client.training.private_round import private_round
from common.config import read_experiment
from common.models.state import Head
from common.wire.records import Groups, TrainReply, TrainRequest
from server.simulation.simulate import simulate
from strategies.base.round_record import RunStopped

LIAR, TIMES = "site-3", -10.0
EXPERIMENT = """
[run]
method = "surgical"
[model]
architecture = "tiny_cnn"
channels = 1
image_size = 16
[training]
lr = 0.003
[evaluation]
result = "last"
[participation]
min_sites = 3
guard = "off"
[simulation]
backend = "inline"
[data]
kind = "digits"
image_size = 16
[partition]
kind = "class_subsets"
sites = 5
shared = 10
"""
MEANS = {
    "plain mean": (),
    "plain mean, far updates dropped": ("participation.far_updates=drop",),
    "coordinate-wise median": ("method.mean=coordinate_median",),
    "trimmed mean, 0.2": ('method.mean={kind = "trimmed_mean", fraction = 0.2}',),
    "Krum, 1 of 5": ('method.mean={kind = "krum", byzantine = 1}',),
    "multi-Krum, 3 kept": ('method.mean={kind = "krum", byzantine = 1, keep = 3}',),
}


def turned(update: Groups) -> Groups:
    """Times a negative number."""
    assert update.trunk is not None
    assert update.norm is not None
    assert update.head is not None
    head = Head(update.head.class_names, TIMES * update.head.weight, TIMES * update.head.bias)
    return Groups(TIMES * update.trunk, TIMES * update.norm, head)


def lying(site: Site, request: TrainRequest) -> TrainReply:
    """One site sends what harms most, the others what they trained."""
    reply = private_round(site, request)
    return replace(reply, update=turned(reply.update)) if site.name == LIAR else reply


def auroc(folder: Path, rounds: int, seed: int, overrides: tuple[str, ...]) -> float | None:
    """Mean AUROC of one run's last model; None where it diverged, so that no site could go on from it."""
    (folder / "digits.toml").write_text(EXPERIMENT, encoding="utf-8")
    file = read_experiment(folder / "digits.toml", (f"run.rounds={rounds}", f"run.seed={seed}", *overrides))
    try:
        summary = simulate(file, folder / "run", Console(quiet=True))
    except (RunStopped, ValueError):
        return None
    return float(summary["test"]["mean_auroc"])


def in_words(found: list[float | None]) -> str:
    """Mean and lowest value, and how many runs have none."""
    values = [value for value in found if value is not None]
    words = [f"{statistics.mean(values):.3f} ({min(values):.3f})"] if values else []
    if diverged := len(found) - len(values):
        words.append(f"{diverged} of {len(found)} diverged")
    return ", ".join(words)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    table = Table("mean", "all honest", "one of five poisoned", title="mean AUROC, mean (lowest) over seeds")
    for name, overrides in MEANS.items():
        cells = []
        for train in (private_round, lying):
            vars(app)["private_round"] = train
            found = []
            for seed in range(asked.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    found.append(auroc(Path(folder), asked.rounds, seed, overrides))
            cells.append(in_words(found))
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
