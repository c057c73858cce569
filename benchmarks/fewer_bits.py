"""What models and updates in fewer bits save, and what they cost: bytes each way, and AUROC by seed.

python benchmarks/fewer_bits.py [--models tiny_cnn,resnet18] [--rounds 10] [--seeds 3] [--out FILE]

scikit-learn's digits, surgical aggregation, three sites with two digits of all and the others of one each, in this
process; the model of the last round, on the test part. Bytes are those of the last round to and from one site.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from polyclinic.common.config import read_experiment
from polyclinic.server.simulation.simulate import simulate

SITES = 3
EXPERIMENT = f"""
[run]
method = "surgical"
[model]
architecture = "{{model}}"
channels = 1
image_size = {{side}}
norm = "{{norm}}"
[training]
batch_size = 32
lr = {{lr}}
[evaluation]
checkpoint = "last"
[simulation]
backend = "inline"
[data]
kind = "digits"
image_size = {{side}}
[partition]
kind = "class_subsets"
sites = {SITES}
shared = 2
"""
SETTINGS = {"tiny_cnn": (16, 3e-3), "resnet18": (32, 1e-3)}
"""Network -> side of an image in pixels, and learning rate."""


@dataclass(frozen=True)
class FormatResult:
    """What one pair of number formats did with one network.

    Attributes:
        down, up: Number format of the model that sites receive, and of the update that they send.
        bytes_down, bytes_up: Bytes of one site in the last round.
        auroc: Mean AUROC of the last model, by seed.
    """

    model: str
    norm: str
    down: str
    up: str
    bytes_down: int
    bytes_up: int
    auroc: list[float]


def train_with_formats(model: str, norm: str, down: str, up: str, rounds: int, seeds: int) -> FormatResult:
    """Train once for each seed."""
    side, lr = SETTINGS[model]
    sizes, auroc = (0, 0), list[float]()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = EXPERIMENT.format(model=model, side=side, lr=lr, norm=norm)
            (folder / "digits.toml").write_text(text, encoding="utf-8")
            formats = (f"method.compress_model={down}", f"method.compress_update={up}")
            overrides = (f"run.rounds={rounds}", f"run.seed={seed}", *formats)
            summary = simulate(read_experiment(folder / "digits.toml", overrides), folder / "run", Console(quiet=True))
            last = json.loads((folder / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        auroc.append(summary["test"]["mean_auroc"])
        sizes = last["bytes_down"] // SITES, last["bytes_up"] // SITES
    return FormatResult(model, norm, down, up, *sizes, auroc)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row for each network and pair of formats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--norms", default="batch")
    parser.add_argument("--down", default="float32,float16")
    parser.add_argument("--up", default="float32,float16,int8")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    results = list[FormatResult]()
    print(
        "| network | down | up | kB down | kB up | AUROC by seed | mean |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    choices = [arguments.models, arguments.norms, arguments.down, arguments.up]
    for model, norm, down, up in itertools.product(*(choice.split(",") for choice in choices)):
        result = train_with_formats(model, norm, down, up, arguments.rounds, arguments.seeds)
        results.append(result)
        by_seed = ", ".join(f"{value:.4f}" for value in result.auroc)
        size = f"{result.bytes_down / 1e3:,.0f} | {result.bytes_up / 1e3:,.0f}"
        mean = statistics.fmean(result.auroc)
        print(f"| {model}, {norm} | {down} | {up} | {size} | {by_seed} | {mean:.4f} |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
