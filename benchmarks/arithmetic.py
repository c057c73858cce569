"""CPU seconds of a step forward and back in each arithmetic that ``training.precision = "fastest"`` chooses from.

python benchmarks/arithmetic.py [--models tiny_cnn,resnet18] [--side 64] [--batch 32] [--out FILE]

Grey images, one class; see :func:`polyclinic.strategies.local.arithmetic.time_training_steps`. The last column is what
a site would train with.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polyclinic.common.config import Experiment, HospitalPlan, make_hospital_plan
from polyclinic.strategies.local.arithmetic import (
    DEFAULT_NUMBER_FORMAT,
    find_fastest_number_format,
    list_cpu_number_formats,
    time_training_steps,
)

MODELS = "tiny_cnn,fedsld_cnn,resnet18,densenet121,efficientnet_lite0"


def plan(model: str, side: int, batch: int) -> HospitalPlan:
    tables = {
        "run": {"method": "surgical"},
        "model": {"architecture": model, "channels": 1, "image_size": side},
        "training": {"batch_size": batch, "precision": "fastest"},
    }
    return make_hospital_plan(Experiment.model_validate(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options, rows = list_cpu_number_formats(), []
    table = Table("model", *map(str, options), "chosen")
    for model in arguments.models.split(","):
        seconds = time_training_steps(plan(model, arguments.side, arguments.batch), options)
        best = find_fastest_number_format(seconds)
        table.add_row(model, *(f"{seconds[each] * 1e3:.0f} ms" for each in options), str(best))
        text = {str(each): seconds[each] for each in options}
        rows.append(
            {
                "model": model,
                "seconds": text,
                "chosen": str(best),
                "times": seconds[DEFAULT_NUMBER_FORMAT] / seconds[best],
            }
        )
    Console(width=150).print(table)
    if arguments.out:
        told_all = {"side": arguments.side, "batch": arguments.batch, "rows": rows}
        arguments.out.write_text(json.dumps(told_all, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
