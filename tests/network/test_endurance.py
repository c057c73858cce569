"""Two hundred rounds of ten sites under random faults: the same model, and nothing grows. Run by ``make endurance``."""

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from polyclinic.server.deployment.supervisor import count_checkpointed_rounds
from tests.federations import DIGITS
from tests.network.federated import hash_in, sites_by_round, undisturbed
from tests.network.real import Coordinator, Program, Site, eventually, exported, free_ports, machine, written

pytestmark = [pytest.mark.slow, pytest.mark.torture, pytest.mark.endurance]
ROUNDS, SITES = 200, 10
TEN = DIGITS.split("[partition]")[0] + f'[partition]\nkind = "class_subsets"\nsites = {SITES}\nshared = 2\n'
ANYBODY_UNTIL = 60
"""Until this round anybody is killed; after it only a few sites, so that the others live long enough to be measured."""
WARM_ROUNDS = 40
"""Of a process's life, in which caches and allocators fill."""
MB_A_ROUND, FILES = 0.05, 8
"""Bounds: the slope of the memory over the rounds after that, and by how much open files may differ."""
WITHIN_S = 300.0


class Measured:
    """Memory and open files of processes, by what they are and their id, at the end of rounds."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[tuple[int, float, int]]] = defaultdict(list)

    def note(self, what: str, process: psutil.Process, server_round: int) -> None:
        with suppress(psutil.Error):
            memory = process.memory_info().rss / 1e6
            self._of[what, process.pid].append((server_round, memory, process.num_fds()))

    def long_lives(self) -> dict[str, tuple[float, int, float]]:
        """What -> MB a round, difference of open files, MB at the end; for lives with enough rounds after warm-up."""
        lives = {}
        for (what, _), samples in self._of.items():
            warm = [sample for sample in samples if sample[0] >= samples[0][0] + WARM_ROUNDS]
            if len(warm) >= WARM_ROUNDS:
                rounds, memory, files = np.array(warm).T
                lives[what] = float(np.polyfit(rounds, memory, 1)[0]), int(np.ptp(files)), float(memory[-1])
        return lives


@pytest.mark.parametrize("seed", [20261121])
def test_two_hundred_rounds_of_ten_sites_under_faults_end_in_the_same_model_and_nothing_grows(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    draw, measured, out = random.Random(seed), Measured(), tmp_path / "run"
    record_property("seed", seed)
    overrides = (f"run.rounds={ROUNDS}",)
    experiment = written(TEN, tmp_path)
    model = undisturbed(experiment, tmp_path / "through", *overrides)
    with machine(tmp_path / "machine") as here:
        coordinator = Coordinator(here)
        coordinator.start()
        sites = [coordinator.admit(coordinator.site(path)) for path in exported(experiment, tmp_path / "data")]
        lines = dict[str, Program]()
        for site, own in zip(sites[:2], free_ports(2), strict=True):
            lines[site.name] = here.start("line", "-m", "tests.network.proxy", own, coordinator.port)
            site.edit(site.kit, (f":{coordinator.port}", f":{own}"))
        for site in sites:
            site.start()
        coordinator.sees(*sites)
        began = time.monotonic()
        run = coordinator.run(experiment, out, *overrides, sites=SITES)
        faults = defaultdict[str, int](int)
        for server_round in range(1, ROUNDS):
            eventually(
                lambda n=server_round: count_checkpointed_rounds(out) >= n or not run.runs,
                f"round {server_round}",
                WITHIN_S,
            )
            assert run.runs, run.output
            note_all(measured, coordinator, run, sites, server_round)
            if server_round % 7 == 0:
                fault = draw.choice(["kill", "freeze", "cut"])
                faults[fault] += 1
                harm(fault, draw, coordinator, run, sites, lines, anybody=server_round <= ANYBODY_UNTIL)
        eventually(lambda: not run.runs, "the run ends", WITHIN_S)
        seconds = time.monotonic() - began
        run.succeeds()
    for fault, number in faults.items():
        record_property("survived", (f"endurance: {fault}", number))
    record_property("same model", "endurance: kill")
    print(f"{ROUNDS} rounds, {SITES} sites, {dict(faults)}: {seconds:.0f} s, {seconds / ROUNDS:.2f} s a round")
    lives = measured.long_lives()
    for what, (slope, files, memory) in sorted(lives.items()):
        print(f"{what:12} {memory:6.0f} MB at the end, {slope:+.4f} MB a round, open files differ by {files}")
    assert hash_in(out) == model
    assert [len(names) for names in sites_by_round(out)] == [SITES] * ROUNDS
    assert {"run", "SuperLink"} <= lives.keys()
    assert len(lives) >= SITES // 2
    assert {what: slope for what, (slope, _, _) in lives.items() if slope > MB_A_ROUND} == {}
    assert {what: files for what, (_, files, _) in lives.items() if files > FILES} == {}


def note_all(measured: Measured, coordinator: Coordinator, run: Program, sites: list[Site], server_round: int) -> None:
    with suppress(psutil.Error, ValueError):
        measured.note("SuperLink", coordinator.superlink, server_round)
        (leading,) = psutil.Process(run.process.pid).children()
        measured.note("run", leading, server_round)
    for site in sites:
        with suppress(psutil.Error):
            measured.note(site.name, psutil.Process(site.program.process.pid), server_round)


def harm(
    fault: str,
    draw: random.Random,
    coordinator: Coordinator,
    run: Program,
    sites: list[Site],
    lines: dict[str, Program],
    *,
    anybody: bool,
) -> None:
    """One fault, and whatever a supervisor does about it."""
    if fault == "kill":
        victim = draw.choice([*sites[:3], *(["run", "SuperLink"] if anybody else [])])
        if victim == "run":
            coordinator.kill_leading(run)
        elif victim == "SuperLink":
            coordinator.kill_superlink()
        else:
            victim.program.kill()
            victim.start()
    elif fault == "freeze":
        with draw.choice(sites).program.frozen():
            time.sleep(draw.uniform(1.0, 3.0))
    else:
        line = lines[draw.choice(sorted(lines))]
        line.process.send_signal(draw.choice([signal.SIGUSR1, signal.SIGUSR2]))
        time.sleep(draw.uniform(1.0, 3.0))
        line.process.send_signal(signal.SIGHUP)
