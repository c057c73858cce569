"""How time and memory of the inline simulation grow with the number of sites and with the size of the model.

python benchmarks/growth.py [--sites 4,12,100,1000] [--models tiny_cnn,resnet18] [--out FILE] [--picture FILE.svg]

Three rounds of FedAvg, 20 training images a site in one batch, so that what is not training shows; the first round is
left out. A straight line of slope 1 on the double logarithmic picture is growth in proportion.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table
from simulation import Case, Measured, measure

from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec

MODELS = ("tiny_cnn", "fedsld_cnn", "femnist_cnn", "resnet18", "unifed_vgg11")
SITES_OF_MODELS, MODEL_OF_SITES = 4, "tiny_cnn"


def measured(case: Case) -> Measured:
    results = Measured()
    with tempfile.TemporaryDirectory() as scratch:
        measure("inline", case.write(Path(scratch) / "case"), Path(scratch), results)
    return results


def row(x: float, results: Measured) -> dict[str, float]:
    return {"x": x, "seconds": statistics.median(results.cpu), "peak_mb": results.peak_mb[0][0]}


def parameters(model: str) -> int:
    spec = ModelSpec.model_validate({"architecture": model, "channels": 1, "image_size": 32, "task": "multi_class"})
    return sum(tensor.numel() for tensor in build_network(spec, tuple("abcdefghij"), 0).parameters())


def slope(rows: list[dict[str, float]], key: str) -> float:
    """Of the logarithms, least squares over the upper half of the range: 1 is in proportion."""
    upper = rows[len(rows) // 2 - 1 :]
    return float(np.polyfit(np.log([each["x"] for each in upper]), np.log([each[key] for each in upper]), 1)[0])


def picture(by_sites: list[dict[str, float]], by_size: list[dict[str, float]], path: Path) -> None:
    mpl.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for column, (rows, label) in enumerate(
        ((by_sites, f"sites ({MODEL_OF_SITES})"), (by_size, f"parameters ({SITES_OF_MODELS} sites)"))
    ):
        for line, (key, what) in enumerate((("seconds", "CPU seconds a round"), ("peak_mb", "peak memory, MB"))):
            axis = axes[line, column]
            axis.loglog([each["x"] for each in rows], [each[key] for each in rows], "o-", color="#1f6f8b")
            axis.set_xlabel(label)
            axis.set_ylabel(what)
            axis.grid(visible=True, which="both", color="#dddddd", linewidth=0.5)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="4,12,32,100,316,1000")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    counts = [int(number) for number in arguments.sites.split(",")]
    by_sites = [row(count, measured(Case(MODEL_OF_SITES, count, 22, 3, 1, 32))) for count in counts]
    by_size = [
        row(parameters(model), measured(Case(model, SITES_OF_MODELS, 22, 3, 1, 32)))
        for model in arguments.models.split(",")
    ]
    for title, rows in (("sites", by_sites), ("parameters", by_size)):
        table = Table(title, "CPU s a round", "peak MB")
        for each in rows:
            table.add_row(f"{each['x']:.0f}", f"{each['seconds']:.3f}", f"{each['peak_mb']:.0f}")
        Console().print(table, f"slopes: time {slope(rows, 'seconds'):.2f}, memory {slope(rows, 'peak_mb'):.2f}")
    if arguments.picture:
        picture(by_sites, by_size, arguments.picture)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"sites": by_sites, "parameters": by_size}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
