"""A hospital whose GPU is behind a queue: a job trains when something is asked, and its end loses nothing."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.network.federated import undisturbed
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

SBATCH = """#!/bin/bash
# In place of Slurm's: the job runs at once, in a session of its own. Called as: sbatch --parsable SCRIPT ARGUMENT
setsid bash "$2" "$3" >> "$JOBS/log" 2>&1 &
echo "$!" | tee --append "$JOBS/numbers"
"""
SQUEUE = """#!/bin/bash
# In place of Slurm's: squeue --noheader --jobs NUMBER --format=%T
grep --quiet --no-messages 'State:.[^Z]' "/proc/$3/status" && echo RUNNING
exit 0
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the numbers and the output of all jobs, of a queue that starts each one at once."""
    jobs, programs = tmp_path / "jobs", tmp_path / "programs"
    jobs.mkdir()
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("JOBS", str(jobs))
    return jobs


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
    assert not (queue / "numbers").exists()  # nothing is asked: no job

    overrides = ("run.rounds=12",)
    run = coordinator.run(experiment, tmp_path / "run", *overrides, sites=3)
    run.says("round 3 of 12")
    first = psutil.Process(int((queue / "numbers").read_text(encoding="utf-8").split()[0]))
    first.terminate()  # as at the job's time limit
    run.succeeds()
    undisturbed(experiment, tmp_path / "simulation", *overrides)
    assert len((queue / "numbers").read_text(encoding="utf-8").split()) >= 2
    hashes = {summary_of(tmp_path / name)["model_sha256"] for name in ("run", "simulation")}
    assert len(hashes) == 1
    rounds = lines_of(tmp_path / "run" / "rounds.jsonl")
    assert [each for each in rounds if "north" not in str(each)] == []

    log = queue / "log"
    eventually(lambda: "no request came for 0.1 min" in log.read_text(encoding="utf-8"), "the job ends by itself")
    coordinator.sees(north)  # the watching program still keeps the site connected
    assert watching.stop() == 0
    coordinator.sees(north, state="stopped")


@pytest.mark.network
def test_jobs_that_answer_nothing_end_the_watching_program_with_the_reason(
    here: Machine, queue: Path, tmp_path: Path
) -> None:
    experiment, coordinator = written(PARTIAL, tmp_path), Coordinator(here)
    coordinator.start()
    _, north, _ = (coordinator.admit(coordinator.site(each)) for each in exported(experiment, tmp_path / "data"))
    script = tmp_path / "north.sbatch"
    script.write_text("#!/bin/bash\nexit 2\n", encoding="utf-8")
    watching = north.start_by("-m", "polyclinic.client.cli", "slurm", "watch", north.folder, "--script", script)
    watching.says("connected to ")
    run = coordinator.run(experiment, tmp_path / "run", "participation.min_sites=1", sites=1)
    assert watching.ends() == 1
    assert "3 jobs in a row ended before a request was answered" in watching.output
    assert len((queue / "numbers").read_text(encoding="utf-8").split()) == 3
    run.stop()
