"""Images a second in training on a GPU, beside a bare PyTorch loop on the same one.

python benchmarks/gpu.py [--models resnet18:64,...] [--contenders bare,inline,ray:4] [--out FILE]
python benchmarks/gpu.py --steps [--models resnet18:64,...]

The same FedAvg on the same random images, in bfloat16, channels last, the images on the GPU. All contenders end in one
model, to the bit, or the program stops:

bare     a bare PyTorch loop (benchmarks/bare_loop.py)
eager    flwr-sim run --backend inline, without CUDA graphs
inline   flwr-sim run --backend inline
ray:N    flwr-sim run --backend ray, N sites on the GPU at a time

A rate is a round's images, those of all sites, by the median of the rounds from the third on: what is recorded or
compiled is so in the first two. Memory is the most that torch had of the GPU; a worker's is not in it.

With --steps: milliseconds of a backbone's step forward and back, kernel by kernel and as CUDA graphs.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from simulated_run import bare, ours
from simulation import Case

from polyclinic.common.models import gpu
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import autocast, build_network
from polyclinic.common.models.zoo.spec import ModelSpec

MODELS = "tiny_cnn:28,resnet18:64,resnet18:224,efficientnet_lite0:224,densenet121:224"
CONTENDERS = "bare,eager,inline"


@dataclass(frozen=True)
class ContenderResult:
    """What one contender did with one case.

    Attributes:
        rates: Images a second of each round that counts.
        cpu: CPU seconds of this process, of each such round.
    """

    model: str
    side: int
    contender: str
    rates: list[float]
    cpu: list[float]
    gpu_mb: float
    sha256: str


def measured(case: Case, contender: str, folder: Path, experiment: Path) -> ContenderResult:
    """Train once."""
    stamps = folder / contender.replace(":", "")
    torch.cuda.reset_peak_memory_stats()
    previous, gpu.RECORD_AFTER = gpu.RECORD_AFTER, sys.maxsize if contender == "eager" else gpu.RECORD_AFTER
    try:
        backend = "inline" if contender == "eager" else contender
        sha256 = bare(experiment, stamps) if contender == "bare" else ours(experiment, stamps, backend)
    finally:
        gpu.RECORD_AFTER = previous
    lines = [line.split() for line in stamps.read_text(encoding="ascii").splitlines()]
    rounds = [(float(line[1]), float(line[2])) for line in lines if line[0] == "round"][2:]
    images = case.sites * case.images * case.epochs
    rates = [images / (after[0] - before[0]) for before, after in itertools.pairwise(rounds)]
    cpu = [after[1] - before[1] for before, after in itertools.pairwise(rounds)]
    memory_mb = torch.cuda.max_memory_allocated() / 1e6
    return ContenderResult(case.model, case.side, contender, rates, cpu, memory_mb, sha256)


def table_of(results: Sequence[ContenderResult]) -> Table:
    """A line for each contender."""
    table = Table("model", "side", "", "images a second", "x bare", "CPU s a round", "GPU MB")
    for each in results:
        rate = statistics.median(each.rates)
        alike = [it for it in results if (it.model, it.side, it.contender) == (each.model, each.side, "bare")]
        table.add_row(
            each.model,
            str(each.side),
            each.contender,
            f"{rate:.0f} [{min(each.rates):.0f}, {max(each.rates):.0f}]",
            f"{rate / statistics.median(alike[0].rates):.2f}" if alike else "",
            f"{statistics.median(each.cpu):.2f}",
            f"{each.gpu_mb:.0f}",
        )
    return table


def steps_of(model: str, side: int, batch: int) -> tuple[float, float]:
    """Milliseconds of a step without graphs and with them, the mean of 30 after 5."""
    spec = ModelSpec(architecture=model, channels=1, image_size=side)
    backbone = move_network_to_device(build_network(spec, ("",), seed=0), "cuda").backbone.train()
    images = torch.rand(batch, 1, side, side, device="cuda").to(memory_format=torch.channels_last)

    def milliseconds(forward: gpu.Step) -> float:
        for number in range(35):
            if number == 5:
                torch.cuda.synchronize()
                began = time.monotonic()
            with autocast(images.device, "bf16"):
                features = forward(images)
            features.float().square().mean().backward()  # type: ignore[no-untyped-call]
            backbone.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return 1000 * (time.monotonic() - began) / 30

    without = milliseconds(backbone)
    with autocast(images.device, "bf16"):
        graph = gpu.record_cuda_graph(backbone, images)
    return without, milliseconds(graph)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--images", type=int, default=352, help="of a site, a tenth of them for validation")
    parser.add_argument("--rounds", type=int, default=6, help="the first two are not counted")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", action="store_true", help="time steps of a backbone, not federations")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU")
    console, results = Console(width=140), list[ContenderResult]()
    for model, _, side in (name.partition(":") for name in arguments.models.split(",")):
        if arguments.steps:
            without, graphs = steps_of(model, int(side), arguments.batch)
            console.print(f"{model} {side} px: {without:.2f} ms without graphs, {graphs:.2f} ms with them")
            continue
        case = Case(
            model,
            arguments.sites,
            arguments.images,
            arguments.rounds,
            arguments.epochs,
            arguments.batch,
            given_side=int(side),
        )
        with tempfile.TemporaryDirectory() as scratch:
            experiment = case.write(Path(scratch) / "case")
            ours_here = [measured(case, name, Path(scratch), experiment) for name in arguments.contenders.split(",")]
        results += ours_here
        console.print(table_of(ours_here))
        if arguments.out:
            write(arguments.out, results)
        if len({each.sha256 for each in ours_here}) > 1:
            raise SystemExit(
                f"the contenders ended in different models: { {o.contender: o.sha256 for o in ours_here} }"
            )


def write(out: Path, results: Sequence[ContenderResult]) -> None:
    """Write all figures, and what they were measured on."""
    versions = {name: version(name) for name in ("flwr", "torch", "numpy")}
    machine = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} | versions
    out.write_text(
        json.dumps({"machine": machine, "rows": [asdict(each) for each in results]}, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
