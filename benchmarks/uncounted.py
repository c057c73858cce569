"""What false statements of one site beside its update do to a model: where its replies never count, and where they do.

PYTHONPATH=. python benchmarks/uncounted.py [--methods NAME ...] [--rounds 8] [--seeds 1]

scikit-learn's digits in this process: three honest sites, each of which annotates seven of ten digits, and a liar that
annotates all. `never counts`: each reply of the liar is refused. `counts`: its replies are accepted. Beside each: the
run in which the liar was never there, with the same images at the honest sites; mean test AUROC.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.false_statements import (
    CLAIMS,
    NEVER_THERE,
    REFUSED,
    Lie,
    lying,
    plan,
    with_claim,
    with_every_statistic,
    with_perfect_figures,
)
from tests.federations import ALL_DIGITS, federation

METHODS = ("fedsld", "fedmlp", "fedirm", "fednoro", "rscfed", "cbafed")
NEVER_COUNTS: Mapping[str, Lie] = {
    "a billion images, all positive": Lie(CLAIMS["a billion images, all positive"]),
    "a billion images, all negative": Lie(CLAIMS["a billion images, all negative"]),
    "ninety times its images, all positive": Lie(CLAIMS["ninety times its images, all positive"]),
    "NaN in its updates, every model perfect": Lie(CLAIMS["the truth"], REFUSED["nan"], with_perfect_figures),
    "an error each time, all positive": Lie(CLAIMS["its images, all positive"], REFUSED["error"]),
}
COUNTS: Mapping[str, Lie] = {
    "honest": Lie(CLAIMS["the truth"], lambda reply: reply),
    "its images, all positive": Lie(CLAIMS["its images, all positive"], lambda reply: reply),
    "ninety times its images, all positive": Lie(CLAIMS["ninety times its images, all positive"], with_claim),
    "every statistic 0": Lie(CLAIMS["the truth"], with_every_statistic(0.0)),
    "every statistic 1,000,000": Lie(CLAIMS["the truth"], with_every_statistic(1e6)),
}


def run(method: str, rounds: int, seed: int, lie: Lie) -> dict[str, Any]:
    """Run a federation with a liar; return the summary."""
    choices = (*plan(method, rounds), ALL_DIGITS, f"run.seed={seed}")
    with tempfile.TemporaryDirectory() as folder, lying(lie):
        return federation(Path(folder), *choices)


def main() -> None:
    """Print a line for each method and lie, as they come, and a table of all at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--without", choices=("never counts", "counts"), nargs="*", default=())
    arguments = parser.parse_args()
    table = Table("method", "seed", "replies", "lie", "liar", "never there", "difference", "same model")
    groups = {"never counts": NEVER_COUNTS, "counts": COUNTS}
    for method in arguments.methods:
        for seed in range(arguments.seeds):
            alone = run(method, arguments.rounds, seed, NEVER_THERE)
            for replies, lies in groups.items():
                for name, lie in lies.items() if replies not in arguments.without else ():
                    beside = run(method, arguments.rounds, seed, lie)
                    aurocs = [summary["test"]["mean_auroc"] for summary in (beside, alone)]
                    same = "yes" if beside["model_sha256"] == alone["model_sha256"] else "no"
                    figures = [f"{value:.4f}" for value in (*aurocs, aurocs[0] - aurocs[1])]
                    row = [method, str(seed), replies, name, *figures, same]
                    table.add_row(*row)
                    print(*row, sep="  ", flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
