"""What one harmful hospital does to a model, and what each rule of the coordinator makes of it.

PYTHONPATH=. python benchmarks/harm.py updates [--rules NAME ...] [--methods NAME ...] [--sites 3,4,10]
PYTHONPATH=. python benchmarks/harm.py honest [--runs 40] [--rounds 12]
PYTHONPATH=. python benchmarks/harm.py rules [--sites 5] [--shared 4] [--seeds 3]
PYTHONPATH=. python benchmarks/harm.py seconds [--sites 1000]

scikit-learn's digits, all 1,797 of them, in this process. `updates`: one site sends something else than it trained;
beside it the honest run without that site. `honest`: small, unlike, drifting sites; nobody may be left out. Both count
what the trials of models cost: their share of the rounds' CPU seconds and of the bytes that go down. A trial because
the loss rose is possible from the seventh round on, so both have more rounds than that. `rules`: what each
rule costs honest sites that annotate unlike classes. `seconds`: CPU time of the rule. backdoors.py has the backdoors.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from polyclinic.client import app
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import train_with_privacy_layers
from polyclinic.client.training.secure_aggregation import HeldUpdateStore
from polyclinic.common.models.network import Head
from polyclinic.common.wire.records import ModelGroups, TrainReply, TrainRequest
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.layers import RollbackLayer
from polyclinic.strategies.engine.membership import RunMembership
from polyclinic.studies.claims import format_markdown_table
from tests.federations import ALL_DIGITS, federation
from tests.liars import LIES, Answer, changed

RULES: Mapping[str, tuple[str, ...]] = {
    "nothing": ("participation.clip=off",),
    "clip 1.0": ("participation.clip=1.0",),
    "clip 1.5": ("participation.clip=1.5",),
    "clip 2.0": ("participation.clip=2.0",),
    "clip 3.0": ("participation.clip=3.0",),
    "median": ("participation.clip=off", "method.mean=coordinate_median"),
    "trimmed mean": ("participation.clip=off", 'method.mean={kind = "trimmed_mean", fraction = 0.2}'),
    "Krum": ("participation.clip=off", 'method.mean={kind = "krum", byzantine = BYZANTINE}'),
    "multi-Krum": ("participation.clip=off", 'method.mean={kind = "krum", byzantine = BYZANTINE, keep = KEEP}'),
    "clip 1.5, median": ("participation.clip=1.5", "method.mean=coordinate_median"),
}


def permuted(site: Site, request: TrainRequest) -> TrainReply:
    """Train on each label as if it were the next class's."""
    labels = np.roll(site.train.labels, 1, axis=1)
    return train_with_privacy_layers(replace(site, train=replace(site.train, labels=labels)), request)


UPDATES: Mapping[str, Answer] = {
    **LIES,
    "constant 1": changed(lambda array, n: np.ones_like(array)),
    "constant -0.1": changed(lambda array, n: np.full_like(array, -0.1)),
    "3 times": changed(lambda array, n: 3 * array),
    "turned round 3 times": changed(lambda array, n: -3 * array),
    "half turned round": changed(lambda array, n: np.float32(-0.5) * array),
    "nothing": changed(lambda array, n: 0 * array),
    "permuted labels": permuted,
}

# ---------------------------------------------------------------------- one run


@dataclass
class TrialCost:
    """What the trials of models cost, of all rounds of a run or of several.

    Attributes:
        trials: Number of trials.
        seconds: CPU seconds of the trials, and of all rounds with the trials in them.
        down: Bytes that the coordinator sent for trials, and all that it sent until the last round's end.
    """

    trials: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    down: tuple[int, int] = (0, 0)

    def __add__(self, other: "TrialCost") -> "TrialCost":
        seconds = self.seconds[0] + other.seconds[0], self.seconds[1] + other.seconds[1]
        return TrialCost(
            self.trials + other.trials, seconds, (self.down[0] + other.down[0], self.down[1] + other.down[1])
        )

    @property
    def percent(self) -> tuple[float, float]:
        """Share of the trials in the CPU seconds and in the bytes."""
        of_seconds, of_bytes = (100 * some / (all_of_it or 1) for some, all_of_it in (self.seconds, self.down))
        return of_seconds, of_bytes

    def __str__(self) -> str:
        of_seconds, of_bytes = self.percent
        return f"{self.trials} ({of_seconds:.1f} % of s, {of_bytes:.1f} % of bytes)"


@contextmanager
def counted_trials() -> Iterator[TrialCost]:
    """Measure the trials of the runs in the block."""
    cost = TrialCost()
    try_models, train_round = RollbackLayer._exclude_harmful_site, Coordinator._train_round

    def sent(coordinator: Coordinator) -> int:
        return sum(coordinator.sites.bytes_down.values())

    def trial(layer: RollbackLayer, *arguments: Any) -> Any:
        began, before = time.process_time(), sent(layer._coordinator)
        try:
            return try_models(layer, *arguments)
        finally:
            cost.trials += 1
            cost.seconds = (cost.seconds[0] + time.process_time() - began, cost.seconds[1])
            cost.down = (cost.down[0] + sent(layer._coordinator) - before, cost.down[1])

    def train(coordinator: Coordinator, server_round: int) -> Any:
        began = time.process_time()
        try:
            return train_round(coordinator, server_round)
        finally:
            cost.seconds = (cost.seconds[0], cost.seconds[1] + time.process_time() - began)
            cost.down = (cost.down[0], sent(coordinator))

    setattr(RollbackLayer, "_exclude_harmful_site", trial)  # noqa: B010 mypy: a method is assigned
    setattr(Coordinator, "_train_round", train)  # noqa: B010
    try:
        yield cost
    finally:
        setattr(RollbackLayer, "_exclude_harmful_site", try_models)  # noqa: B010
        setattr(Coordinator, "_train_round", train_round)  # noqa: B010


@dataclass(frozen=True)
class Result:
    """One run's mean test AUROC, who was left out, how often a model was taken back, and what trials cost."""

    auroc: float
    excluded: tuple[str, ...]
    back: int
    cost: TrialCost = field(default_factory=TrialCost)


def name_of(site: int, sites: int) -> str:
    """A site's name in the partition."""
    return f"site-{site:0{len(str(sites))}}"


def run(
    choices: Iterable[str],
    answer_of: Mapping[str, Answer],
    measure: Callable[[Path, tuple[str, ...]], object] = lambda folder, choices: None,
) -> Result:
    """One run in which the named sites answer otherwise; a run that stops has an AUROC of 0.

    Args:
        measure: Function that looks at the folder of the finished run before it is removed.
    """

    def answered(site: Site, request: TrainRequest, masks: HeldUpdateStore) -> TrainReply:
        return answer_of.get(site.name, train_with_privacy_layers)(site, request)

    vars(app)["train_with_privacy_layers"] = answered
    with tempfile.TemporaryDirectory() as folder, counted_trials() as cost:
        choices = (ALL_DIGITS, *choices)
        try:
            summary = federation(Path(folder), *choices)
        except Exception as stopped:
            return Result(0.0, (type(stopped).__name__,), 0)
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
        back = sum(event["event"] == "rolled_back" for event in events)
        measure(Path(folder), choices)
        return Result(float(summary["test"]["mean_auroc"]), tuple(summary["excluded"]), back, cost)


@contextmanager
def without(site: str) -> Iterator[None]:
    """Runs in which this site is never asked, and its images stay its own."""
    drawn, needed = RunMembership.draw_training_sites, RunMembership.count_needed_replies

    def others(members: RunMembership, server_round: int, out: Iterable[str] = ()) -> list[str]:
        return drawn(members, server_round, frozenset({*out, site}))

    setattr(RunMembership, "draw_training_sites", others)  # noqa: B010 mypy: a method is assigned
    setattr(RunMembership, "count_needed_replies", lambda members, arguments: max(needed(members, arguments), 1))  # noqa: B010
    try:
        yield
    finally:
        setattr(RunMembership, "draw_training_sites", drawn)  # noqa: B010
        setattr(RunMembership, "count_needed_replies", needed)  # noqa: B010


def choices_of(rule: str, sites: int, attackers: int) -> tuple[str, ...]:
    """A rule's settings for so many sites; Krum keeps what its paper proves for so many attackers, if it can."""
    byzantine = max(min(attackers, (sites - 3) // 2), 1)
    words = {"BYZANTINE": str(byzantine), "KEEP": str(sites - byzantine - 1)}
    return tuple(_filled(setting, words) for setting in RULES[rule])


def _filled(setting: str, words: Mapping[str, str]) -> str:
    for word, number in words.items():
        setting = setting.replace(word, number)
    return setting


# ---------------------------------------------------------------------- harmful updates


def harmful_updates(
    rules: Iterable[str], methods: Iterable[str], counts: Iterable[int], rounds: int, kinds: list[str]
) -> Table:
    """Return the AUROC with each harmful update, beside that of the honest run without the site that sends it."""
    table = Table(
        "method",
        "sites",
        "rule",
        "the harmful site sends",
        "AUROC",
        "honest without it",
        "left out",
        "taken back",
        "trials",
    )
    of_kind: dict[str, list[tuple[float, bool, Result]]] = {}
    for method in methods:
        for sites in counts:
            base = (f"run.method={method}", f"run.rounds={rounds}", f"partition.sites={sites}", "partition.shared=10")
            harmful = name_of(2, sites)
            for rule in rules:
                settings = base + choices_of(rule, sites, 1)
                with without(harmful):
                    honest = run(settings, {})
                below = []
                for kind in kinds or UPDATES:
                    result = run(settings, {harmful: UPDATES[kind]})
                    below.append(honest.auroc - result.auroc)
                    of_kind.setdefault(kind, []).append((below[-1], harmful in result.excluded, result))
                    aurocs = f"{result.auroc:.3f}", f"{honest.auroc:.3f}"
                    cells = (*aurocs, " ".join(result.excluded), str(result.back), str(result.cost))
                    table.add_row(method, str(sites), rule, kind, *cells)
                    print(method, sites, rule, kind, *cells, sep=" | ", flush=True)
                print(f"{method}, {sites} sites, {rule}: at most {max(below):.3f} below,", end=" ")
                print(f"{sum(each <= 0.02 for each in below)} of {len(below)} within 0.02", flush=True)
    print(markdown_by_kind(of_kind))
    return table


def markdown_by_kind(results: Mapping[str, list[tuple[float, bool, Result]]]) -> str:
    """Return a table of what each harmful update costs: the worst over all numbers of sites.

    Args:
        results: Kind -> of each run: how far its AUROC is below the honest one, whether the site was left out, and the
            result.
    """
    headings = ("the harmful site sends", "AUROC lower by at most", "left out in", "most trials")
    rows = list[tuple[str, ...]]()
    for kind, runs in results.items():
        costs = [result.cost for _, _, result in runs]
        seconds, down = (max(cost.percent[place] for cost in costs) for place in (0, 1))
        below, excluded = max(below for below, _, _ in runs), sum(out for _, out, _ in runs)
        trials = max(cost.trials for cost in costs)
        cells = (f"{below:.3f}", f"{excluded} of {len(runs)}", str(trials), f"{seconds:.0f} %", f"{down:.0f} %")
        rows.append((kind, *cells))
    return format_markdown_table((*headings, "of CPU s", "of bytes down"), rows)


# ---------------------------------------------------------------------- honest runs


def honest_runs(runs: int, rounds: int, settings: tuple[str, ...]) -> Table:
    """Sites of unlike sizes and classes, few images each, images that get darker from site to site."""
    table = Table("run", "settings", "AUROC", "left out", "taken back", "updates shortened", "trials")
    total = TrialCost()
    for number in range(runs):
        sites = (3, 4, 5, 6, 10)[number % 5]
        method = ("surgical", "fedavg", "vanilla", "fedprox")[number % 4]
        shared = 10 if method == "fedavg" or number % 3 == 0 else 4
        choices = [f"run.method={method}", f"run.seed={number}", f"partition.sites={sites}", f"run.rounds={rounds}"]
        choices += [f"partition.shared={shared}", f"data.split_seed={number}", f"training.epochs={1 + number % 3}"]
        choices += settings
        drift = number // 4 % 2 == 1  # by every method
        answer_of = {name_of(place, sites): unlike(place, drift=drift) for place in range(1, sites + 1)}
        with tempfile.TemporaryDirectory() as folder, counted_trials() as cost:
            vars(app)["train_with_privacy_layers"] = lambda site, request, masks: answer_of[site.name](site, request)  # noqa: B023
            summary = federation(Path(folder), *choices)
            events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
        back = sum(event["event"] == "rolled_back" for event in events)
        clipped = [event for event in events if event["event"] == "shortened_update"]
        total += cost
        auroc, excluded = f"{summary['test']['mean_auroc']:.3f}", " ".join(summary["excluded"])
        cells = (auroc, excluded, str(back), str(len(clipped)), str(cost))
        table.add_row(str(number), " ".join(choices), *cells)
        print(number, *choices, "drift" if drift else "", *cells, flush=True)
    table.add_row("all", "", "", "", "", "", str(total))
    return table


def unlike(place: int, *, drift: bool) -> Answer:
    """Train on a part of the images, a smaller one at each later site; where they drift, darker ones each round."""

    def answer(site: Site, request: TrainRequest) -> TrainReply:
        rows = np.arange(0, len(site.train), 1 + (place - 1) % 4)
        train = site.train.select_rows(rows)
        if drift:
            light = max(1.0 - 0.06 * place - 0.04 * request.round, 0.3)
            train = replace(train, stored=(train.images * light).astype(np.uint8), places=None)
        return replace(train_with_privacy_layers(replace(site, train=train), request), train_samples=site.train_samples)

    return answer


def honest_by_rule(rules: Iterable[str], sites: int, shared: int, seeds: int) -> Table:
    """Return the AUROC of honest runs by each rule: lowest, mean and highest over the seeds."""
    table = Table("rule", "lowest", "mean", "highest")
    for rule in rules:
        settings = (
            f"partition.sites={sites}",
            f"partition.shared={shared}",
            "run.rounds=6",
            *choices_of(rule, sites, 1),
        )
        aurocs = [run((*settings, "evaluation.checkpoint=last", f"run.seed={seed}"), {}).auroc for seed in range(seeds)]
        cells = [f"{value:.3f}" for value in (min(aurocs), sum(aurocs) / seeds, max(aurocs))]
        table.add_row(rule, *cells)
        print(rule, *cells, sep=" | ", flush=True)
    return table


# ---------------------------------------------------------------------- time


def seconds(sites: int) -> None:
    """CPU time that the rule takes of a round, beside that of the mean."""
    from polyclinic.common.models.state import ModelState
    from polyclinic.strategies.aggregation.bounds import (
        clip_update_by_median_norms,
        compute_median_part_norms,
        compute_update_part_norms,
    )
    from polyclinic.strategies.aggregation.means import BlockwiseMean

    generator = np.random.default_rng(0)
    head = Head(tuple("abcdefghij"), np.zeros((10, 96), np.float32), np.zeros(10, np.float32))
    model = ModelState(np.zeros(52_056, np.float32), np.zeros(672, np.float32), head)  # a tiny_cnn
    updates = [
        ModelGroups.from_model(model).apply_to_arrays(
            lambda array: generator.normal(size=array.shape).astype(np.float32)
        )
        for _ in range(sites)
    ]
    began = time.process_time()
    lengths = [compute_update_part_norms(update) for update in updates]
    medians = compute_median_part_norms(lengths)
    [clip_update_by_median_norms(update, length, medians, 3.0) for update, length in zip(updates, lengths, strict=True)]
    rule = time.process_time() - began
    began = time.process_time()
    trunks = [update.trunk for update in updates if update.trunk is not None]
    BlockwiseMean([(trunk, 1.0) for trunk in trunks]).add_mean_to_values(model.trunk)
    mean = time.process_time() - began
    print(f"{sites} sites, 53,698 numbers each: the rule {rule:.3f} s, the trunk's mean {mean:.3f} s")


def main() -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("updates", "honest", "rules", "seconds"))
    parser.add_argument("--rules", nargs="*")
    parser.add_argument("--methods", nargs="*", default=["surgical"])
    parser.add_argument("--sites")
    parser.add_argument("--rounds", type=int, help="by default 10, of honest runs 12")
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--shared", type=int, default=4, help="classes that all sites annotate, of ten")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    np.seterr(all="ignore")
    if arguments.what == "seconds":
        seconds(int(arguments.sites or 1000))
        return
    if arguments.what == "honest":
        settings = RULES[arguments.rules[0]] if arguments.rules else ()
        table = honest_runs(arguments.runs, arguments.rounds or 12, settings)
    elif arguments.what == "rules":
        rules = arguments.rules or ["nothing", "clip 3.0", "median", "trimmed mean", "multi-Krum", "Krum"]
        table = honest_by_rule(rules, int(arguments.sites or 5), arguments.shared, arguments.seeds)
    else:
        counts = map(int, (arguments.sites or "3,4,10").split(","))
        table = harmful_updates(
            arguments.rules or ["clip 3.0"], arguments.methods, list(counts), arguments.rounds or 10, arguments.kinds
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
