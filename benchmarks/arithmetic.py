"""CPU seconds of a step forward and back in each arithmetic that ``training.precision = "fastest"`` chooses from.

python benchmarks/arithmetic.py [--models tiny_cnn,resnet18] [--side 64] [--batch 32] [--out FILE]

Grey images, one class; see :func:`strategies.local.arithmetic.step_seconds`. The last column is what a site would train
with.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.config import Experiment, Plan, plan_of
from strategies.local.arithmetic import DEFAULT, choices, fastest, step_seconds

MODELS = "tiny_cnn,fedsld_cnn,resnet18,densenet121,efficientnet_lite0"


def plan(model: str, side: int, batch: int) -> Plan:
    tables = {
        "run": {"method": "surgical"},
        "model": {"architecture": model, "channels": 1, "image_size": side},
        "training": {"batch_size": batch, "precision": "fastest"},
    }
    return plan_of(Experiment.model_validate(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked, rows = choices(), []
    table = Table("model", *map(str, asked), "chosen")
    for model in given.models.split(","):
        seconds = step_seconds(plan(model, given.side, given.batch), asked)
        best = fastest(seconds)
        table.add_row(model, *(f"{seconds[one] * 1e3:.0f} ms" for one in asked), str(best))
        told = {str(one): seconds[one] for one in asked}
        rows.append({"model": model, "seconds": told, "chosen": str(best), "times": seconds[DEFAULT] / seconds[best]})
    Console(width=150).print(table)
    if given.out:
        told_all = {"side": given.side, "batch": given.batch, "rows": rows}
        given.out.write_text(json.dumps(told_all, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
