"""What becomes of a run in which one hospital sends what harms, among 2, 3, 4 and 10 sites, with default settings.

PYTHONPATH=. python benchmarks/one_liar.py [--sites 2,3,4,10] [--rounds 5]

scikit-learn's digits, all classes at every site, surgical aggregation, in this process. The run beside it is the honest
one without that site: the same shares of the images, and the site is not asked.
"""

import argparse
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client import app
from client.training.private_round import private_round
from strategies.rounds.strategy import FederatedAveraging
from tests.federations import federation
from tests.liars import LIES, Answer, Lying


def ran(sites: int, rounds: int, answer: Answer | None) -> tuple[float, Collection[str], int]:
    """Mean AUROC, who was left out, and how often a model was taken back."""
    vars(app)["private_round"] = private_round if answer is None else Lying(liar_of(sites), answer)
    choices = (f"run.rounds={rounds}", f"partition.sites={sites}", "partition.shared=10")
    with tempfile.TemporaryDirectory() as folder:
        summary = federation(Path(folder), *choices)
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    back = sum(event["event"] == "rolled_back" for event in events)
    return float(summary["test"]["mean_auroc"]), list(summary["condemned"]), back


def liar_of(sites: int) -> str:
    """The second site, as the partition names it."""
    return "site-2" if sites < 10 else "site-02"


@contextmanager
def without(site: str) -> Iterator[None]:
    """Runs begin with this site left out."""
    beginning = FederatedAveraging._beginning

    def left_out(strategy: FederatedAveraging, arrays: Any) -> Any:
        state = beginning(strategy, arrays)
        return replace(state, guard=state.guard.without({site: "not there"}))

    setattr(FederatedAveraging, "_beginning", left_out)  # noqa: B010 mypy: a method is assigned
    try:
        yield
    finally:
        setattr(FederatedAveraging, "_beginning", beginning)  # noqa: B010


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default="2,3,4,10")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    np.seterr(all="ignore")
    table = Table("sites", "the liar sends", "AUROC", "honest without it", "left out", "taken back")
    for sites in map(int, asked.sites.split(",")):
        with without(liar_of(sites)):
            honest, _, _ = ran(sites, asked.rounds, None)
        for kind, answer in LIES.items():
            auroc, named, back = ran(sites, asked.rounds, answer)
            table.add_row(str(sites), kind, f"{auroc:.3f}", f"{honest:.3f}", ", ".join(named) or "nobody", str(back))
    Console().print(table)


if __name__ == "__main__":
    main()
