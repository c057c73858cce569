"""Liars and honest runs that the guard's bounds were not set on: drawn at random, for as long as one likes.

PYTHONPATH=. python benchmarks/random_liars.py [--seconds 600] [--seed 0] [--out FILE]

Each case draws a data set (digits, phantoms; HAM10000 and MNIST where ../shared/data is there), a method, the sites,
how many classes all sites annotate, rounds, epochs and a seed. It is run honestly, then with a liar of four kinds of
those below. Where all sites annotate all classes, the run is also compared to the honest one without the liar.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from one_liar import without
from rich.console import Console

from client import app
from client.site.site import Site
from client.training.private_round import private_round
from common.config import read_experiment
from common.errors import BadInput
from common.wire.records import TrainReply, TrainRequest
from server.simulation.simulate import simulate
from strategies.base.round_record import RunStopped
from tests.federations import DIGITS
from tests.liars import LIES, Answer, Lying, changed

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
DATA = Path(__file__).parents[2] / "shared" / "data"
PHANTOMS = f"""{DIGITS.partition("[data]")[0].replace("image_size = 16", "image_size = 32")}
[data]
kind = "phantom"
images = 1200
image_size = 32
[partition]
kind = "class_subsets"
sites = 3
shared = 9
"""


def permuted(site: Site, request: TrainRequest) -> TrainReply:
    """Train on each label as if it were the next class's."""
    labels = np.roll(site.train.labels, 1, axis=1)
    return private_round(replace(site, train=replace(site.train, labels=labels)), request)


KINDS: Mapping[str, Answer] = {
    **{kind: LIES[kind] for kind in ("1e30", "turned round", "turned round 10 times", "10 times", "100 times")},
    **{kind: LIES[kind] for kind in ("flipped labels", "constant")},
    "constant 1": changed(lambda array, n: np.ones_like(array)),
    "constant -0.1": changed(lambda array, n: np.full_like(array, -0.1)),
    "3 times": changed(lambda array, n: 3 * array),
    "turned round 3 times": changed(lambda array, n: -3 * array),
    "half turned round": changed(lambda array, n: np.float32(-0.5) * array),
    "nothing": changed(lambda array, n: 0 * array),
    "permuted labels": permuted,
}


@dataclass(frozen=True)
class Case:
    """An experiment, as text or file, with choices; ``full`` where all sites annotate all classes."""

    name: str
    experiment: str | Path
    choices: tuple[str, ...]
    sites: int
    full: bool
    multi_class: bool = False

    @property
    def names(self) -> list[str]:
        width = len(str(self.sites))
        return [f"site-{number:0{width}}" for number in range(1, self.sites + 1)]


def drawn(random: Random) -> Case:
    """A case."""
    seed = random.randrange(1000)
    choices = [f"run.rounds={random.choice([3, 5, 8])}", f"run.seed={seed}", "simulation.backend=inline"]
    data = random.choice(["digits", "digits", "phantoms", *(["ham10000", "mnist"] if DATA.is_dir() else [])])
    if data == "mnist":
        name = f"mnist_{random.choice(['practical', 'pathological'])}{random.choice(['', '_fedavg', '_fedprox'])}"
        choices += ["data.train_limit=3000", "training.epochs=2", "evaluation.test_each_round=false"]
        return Case(name, EXPERIMENTS / "fedsld" / f"{name}.toml", tuple(choices), 12, full=True, multi_class=True)
    sites = random.choice([2, 3, 4, 10] if data == "digits" else [2, 3, 4])
    choices.append(f"partition.sites={sites}")
    if data == "ham10000":
        method = random.choice(["surgical", "vanilla", "partial_loss", "fedavg"])
        shared = 7 if method == "fedavg" else random.choice([1, 3, 7])
        choices.append(f"partition.shared={shared}")
        return Case(data, EXPERIMENTS / f"ham10000_{method}.toml", tuple(choices), sites, full=shared == 7)
    classes = 10 if data == "digits" else 9
    method = random.choice(["surgical", "surgical", "fedavg", "fedprox", "fedsld", "vanilla", "partial_loss"])
    shared = classes if method == "fedavg" else random.choice([classes, classes, 4, 2])
    shared = max(shared, 4) if sites == 10 else shared
    choices += [f"run.method={method}", f"partition.shared={shared}", f"data.split_seed={seed}"]
    choices += ["training.epochs=3"] if random.random() < 0.3 else []
    return Case(data, DIGITS if data == "digits" else PHANTOMS, tuple(choices), sites, full=shared == classes)


def ran(case: Case, liar: str, answer: Answer | None) -> tuple[float | None, list[str]]:
    """Mean AUROC and who was left out; no AUROC where the run ended before its time."""
    vars(app)["private_round"] = private_round if answer is None else Lying(liar, answer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = case.experiment
        if isinstance(path, str):
            (folder / "experiment.toml").write_text(path, encoding="utf-8")
            path = folder / "experiment.toml"
        try:
            summary = simulate(read_experiment(path, case.choices), folder / "run", Console(quiet=True))
        except (RunStopped, BadInput) as stopped:
            return None, [str(stopped)[:200]]
        return summary["test"]["mean_auroc"], list(summary["condemned"])


def tried(case: Case, random: Random) -> list[dict[str, Any]]:
    """One line for the honest run, one for each kind of liar."""
    liar = random.choice(case.names)
    honest, named = ran(case, liar, None)
    about = {"data": case.name, "choices": case.choices, "liar": liar}
    lines: list[dict[str, Any]] = [{"kind": "honest", **about, "auroc": honest, "named": named}]
    if honest is None:
        return lines
    alone = None
    if case.full:
        with without(liar):
            alone, _ = ran(case, liar, None)
    kinds = [kind for kind in sorted(KINDS) if not (case.multi_class and kind == "flipped labels")]
    for kind in random.sample(kinds, 4):
        auroc, named = ran(case, liar, KINDS[kind])
        lines.append({"kind": kind, **about, "auroc": auroc, "named": named, "honest": honest, "without": alone})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    np.seterr(all="ignore")
    random, ends, lines = Random(asked.seed), time.monotonic() + asked.seconds, list[dict[str, Any]]()
    while time.monotonic() < ends:
        lines += tried(drawn(random), random)
        if asked.out:
            asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    lied = [line for line in lines if line["kind"] != "honest"]
    compared = [line["without"] - line["auroc"] for line in lied if line["without"] and line["auroc"]]
    honest = [line for line in lines if line["kind"] == "honest"]
    print(f"{len(honest)} honest runs, {sum(bool(line['named']) for line in honest)} with a site left out")
    print(f"{len(lied)} runs with a liar: named in {sum(line['named'] == [line['liar']] for line in lied)}, an honest")
    print(f"site left out in {sum(bool({*line['named']} - {line['liar']}) for line in lied)}")
    worse = sum(drop > 0.02 for drop in compared)
    print(f"{len(compared)} compared to the run without the liar: {worse} more than 0.02 of mean AUROC below it")
    for line in lied:
        if line["named"] != [line["liar"]]:
            print(json.dumps(line))


if __name__ == "__main__":
    main()
