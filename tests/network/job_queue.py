"""A queue of jobs in place of Slurm's: it starts each job at once."""

from pathlib import Path

import pytest

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


def install_queue(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Put its commands on PATH; return the folder with the numbers and the output of all its jobs."""
    jobs, programs = folder / "jobs", folder / "programs"
    jobs.mkdir()
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    patch.setenv("PATH", str(programs), prepend=":")
    patch.setenv("JOBS", str(jobs))
    return jobs


def submitted_jobs(jobs: Path) -> list[int]:
    """The numbers of all jobs so far, which are those of their processes."""
    numbers = jobs / "numbers"
    return [int(number) for number in numbers.read_text(encoding="utf-8").split()] if numbers.exists() else []
