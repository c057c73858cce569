"""A hospital whose GPU is behind a queue: a job trains when something is asked, and its end loses nothing."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.network.federated import undisturbed
from tests.network.job_queue import install_queue, submitted_jobs
from tests.network.real import (
    PARTIAL,
    Coordinator,
    Machine,
    eventually,
    exported,
    flwr_client,
    lines_of,
    machine,
    summary_of,
    written,
)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the numbers and the output of all jobs, of a queue that starts each one at once."""
    return install_queue(tmp_path, monkeypatch)


@pytest.fixture
def here(queue: Path, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path / "machine") as started:
        yield started


@pytest.mark.network
def test_a_site_that_trains_in_jobs_gives_the_model_of_an_undisturbed_run_also_if_a_job_ends_early(
    here: Machine, queue: Path, tmp_path: Path
) -> None:
    experiment, coordinator = written(PARTIAL, tmp_path), Coordinator(here)
    coordinator.start()
    east, north, south = (coordinator.admit(coordinator.site(each)) for each in exported(experiment, tmp_path / "data"))
    for site in (east, south):
        site.connect()
    script = tmp_path / "north.sbatch"
    made = flwr_client("slurm", "script", north.folder, "--out", script, "--until-idle", "0.1")
    assert made.code == 0, made.err
    watching = north.start_by("-m", "polyclinic.client.cli", "slurm", "watch", north.folder, "--script", script)
    watching.says("connected to ")
    coordinator.sees(north)
    assert submitted_jobs(queue) == []  # nothing is asked: no job

    overrides = ("run.rounds=12",)
    run = coordinator.run(experiment, tmp_path / "run", *overrides, sites=3)
    run.says("round 3 of 12")
    psutil.Process(submitted_jobs(queue)[0]).terminate()  # as at the job's time limit
    run.succeeds()
    undisturbed(experiment, tmp_path / "simulation", *overrides)
    assert len(submitted_jobs(queue)) >= 2
    hashes = {summary_of(tmp_path / name)["model_sha256"] for name in ("run", "simulation")}
    assert len(hashes) == 1
    rounds = lines_of(tmp_path / "run" / "rounds.jsonl")
    assert [each for each in rounds if "north" not in str(each)] == []

    log = queue / "log"
    eventually(lambda: "no request came for 0.1 min" in log.read_text(encoding="utf-8"), "the job ends by itself")
    watching.says(f"job {submitted_jobs(queue)[-1]} is over")
    assert "answered nothing" not in watching.output
    coordinator.sees(north)  # the watching program still keeps the site connected
    assert watching.stop() == 0
    coordinator.sees(north, state="stopped")


@pytest.mark.network
def test_a_watching_program_that_is_started_again_keeps_its_running_job_and_the_round(
    here: Machine, queue: Path, tmp_path: Path
) -> None:
    experiment, coordinator = written(PARTIAL, tmp_path), Coordinator(here)
    coordinator.start()
    east, north, south = (coordinator.admit(coordinator.site(each)) for each in exported(experiment, tmp_path / "data"))
    for site in (east, south):
        site.connect()
    script = tmp_path / "north.sbatch"
    assert flwr_client("slurm", "script", north.folder, "--out", script, "--until-idle", "0.1").code == 0
    watch = ("-m", "polyclinic.client.cli", "slurm", "watch", north.folder, "--script", script)
    watching = north.start_by(*watch)
    watching.says("connected to ")
    run = coordinator.run(experiment, tmp_path / "run", "run.rounds=12", sites=3)
    run.says("round 3 of 12")
    watching.kill()
    again = north.start_by(*watch)
    (job,) = submitted_jobs(queue)
    again.says(f"job {job}, submitted before this program started, is running")
    again.says("connected to ")
    run.succeeds()
    again.says(f"job {job} is over")
    assert submitted_jobs(queue) == [job]
    assert "no request came for 0.1 min" in (queue / "log").read_text(encoding="utf-8")
    undisturbed(experiment, tmp_path / "simulation", "run.rounds=12")
    assert len({summary_of(tmp_path / name)["model_sha256"] for name in ("run", "simulation")}) == 1
    assert again.stop() == 0
    coordinator.sees(north, state="stopped")


@pytest.mark.network
def test_three_jobs_that_answer_nothing_end_the_watching_program_also_if_each_request_is_a_new_one(
    here: Machine, queue: Path, tmp_path: Path
) -> None:
    experiment, coordinator = written(PARTIAL, tmp_path), Coordinator(here)
    coordinator.start()
    _, north, _ = (coordinator.admit(coordinator.site(each)) for each in exported(experiment, tmp_path / "data"))
    script = tmp_path / "north.sbatch"
    script.write_text("#!/bin/bash\nexit 2\n", encoding="utf-8")
    watching = north.start_by("-m", "polyclinic.client.cli", "slurm", "watch", north.folder, "--script", script)
    watching.says("connected to ")
    run = coordinator.run(experiment, tmp_path / "first", "participation.min_sites=1", sites=1)
    watching.says("answered nothing; the next one is submitted in 20 s at the earliest")
    run.stop()
    run = coordinator.run(experiment, tmp_path / "second", "participation.min_sites=1", sites=1)
    watching.says("answered nothing; the next one is submitted in 40 s at the earliest")
    assert watching.ends() == 1
    assert f"3 jobs in a row ended without an answer, the last one was {submitted_jobs(queue)[-1]}." in watching.output
    assert len(submitted_jobs(queue)) == 3
    run.stop()
