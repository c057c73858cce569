"""Slurm's side: the batch script in which ``flwr-client start`` runs, and the commands ``sbatch`` and ``squeue``."""

import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from polyclinic.client.service import CLIENT
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.security.call_signatures import PROCESS_VARIABLE
from polyclinic.common.system.service import find_unit_path_faults
from polyclinic.common.system.service_files import find_program_command

WARNING_S = 60
"""Time before the time limit at which Slurm asks the program to stop, which takes 7 s at most."""
LOG_FILE = "slurm.log"
_SUBMIT, _LIST = "sbatch", "squeue"
_COMMAND_S = 60.0
_PATH_HASH_CHARACTERS = 8
_NAME_PART = re.compile(r"[^A-Za-z0-9_.-]+")
_QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


class JobState(Enum):
    """The state of a job, as far as the watching program needs it."""

    QUEUED = "queued"
    RUNNING = "running"
    OVER = "over"
    UNKNOWN = "unknown"


def make_job_name(folder: Path) -> str:
    """Return the name of a folder's jobs, with a hash of the path: Slurm runs one job of a name at a time.

    Args:
        folder: The resolved path of the site's folder.
    """
    path_hash = hashlib.sha256(os.fsencode(folder)).hexdigest()[:_PATH_HASH_CHARACTERS]
    return f"{CLIENT.unit_prefix}{_NAME_PART.sub('-', folder.name)}-{path_hash}"


def find_missing_command_faults() -> list[Fault]:
    """Return a fault for each of Slurm's commands that cannot be started here."""
    remedy = "Run this where jobs are submitted, with Slurm's commands on PATH."
    missing = [command for command in (_SUBMIT, _LIST) if shutil.which(command) is None]
    return [Fault(command, "is not on PATH.", remedy) for command in missing]


def make_batch_script(folder: Path, options: Sequence[str], *, idle_minutes: float | None) -> str:
    """Return a batch script that runs ``flwr-client start`` on a folder.

    Args:
        options: Options of ``sbatch``, such as ``--gres=gpu:1``, one line each.
        idle_minutes: The job ends after so many minutes without a request; None for a job that stays, and that is
            queued again at its time limit.

    Raises:
        BadInput: If no line of a script can name the folder or hold an option, or if the minutes are not a number.
    """
    folder = folder.resolve()
    faults = find_unit_path_faults("slurm", folder)
    if idle_minutes is not None and not math.isfinite(idle_minutes):
        remedy = "Name a number of minutes, or let the job stay: --keep."
        faults.append(Fault("--until-idle", f"is {idle_minutes:g}, and the job would never end.", remedy))
    if '"' in str(folder) or "\\" in str(folder):
        problem = f"{folder} holds a quote or a backslash, at which Slurm ends the path of the log."
        faults.append(Fault("slurm", problem, "Rename the folder."))
    for option in options:
        if not option.startswith("-") or not option.isprintable():
            faults.append(Fault(repr(option), "is no option of sbatch.", "Write it as --name=value."))
    raise_faults(faults)
    log = str(folder / LOG_FILE).replace("%", "%%")  # Slurm replaces %j and others
    stays = idle_minutes is None
    head = [
        f"--job-name={make_job_name(folder)}",
        "--dependency=singleton",  # of this name and account, one job runs at a time
        f"--signal=B:{'USR1' if stays else 'TERM'}@{WARNING_S}",
        "--requeue" if stays else "--no-requeue",
        "--open-mode=append",
        f'--output="{log}"',
        *options,
    ]
    start = [*find_program_command(CLIENT), "start", str(folder)]
    if state_home := os.environ.get("XDG_STATE_HOME"):
        start = ["env", f"XDG_STATE_HOME={state_home}", *start]
    body = _KEEPING if stays else _WHEN_NEEDED
    command = shlex.join(start if stays else [*start, "--until-idle", f"{idle_minutes:g}"])
    lines = ["#!/bin/bash", "# Written by flwr-client slurm script.", *(f"#SBATCH {each}" for each in head)]
    return "\n".join(lines) + "\n" + body.replace("@COMMAND@", command).replace("@VARIABLE@", PROCESS_VARIABLE)


_WHEN_NEEDED = """
# The program is the job's main process, so that Slurm's SIGTERM before the time limit reaches it. The first argument
# comes from flwr-client slurm watch, which keeps the site connected meanwhile and submits this script again.
export @VARIABLE@="${1:-}"
exec @COMMAND@
"""
_KEEPING = """
program=
again=
stopped=
stop() {
    stopped=yes
    if [ -n "$program" ]; then kill -TERM "$program"; fi
}
trap 'again=yes; stop' USR1  # the time limit is near
trap stop TERM
@COMMAND@ &
program=$!
# A signal that came before the program had a number
if [ -n "$stopped" ]; then stop; fi
wait "$program"
code=$?
while kill -0 "$program" 2>/dev/null; do  # a signal ended the wait, not the program
    wait "$program"
    code=$?
done
if [ -n "$again" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmQueue:
    """The queue of this account, and the script that is submitted to it."""

    script: Path

    def submit_job(self, process: str) -> str:
        """Submit the script with one argument; return the job's number.

        Raises:
            BadInput: If Slurm refuses it.
        """
        done = _run([_SUBMIT, "--parsable", str(self.script), process])
        job = done.stdout.strip().split(";")[0]
        if done.returncode != 0 or not re.fullmatch(r"\d+", job):
            reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            command = shlex.join([_SUBMIT, str(self.script)])
            raise BadInput([Fault(command, f"Slurm refused it: {reason}", "Change the options in the script.")])
        return job

    def read_job_state(self, job: str) -> JobState:
        """Return the state of a job; UNKNOWN while Slurm does not answer."""
        done = _run([_LIST, "--noheader", "--jobs", job, "--format=%T"])
        if done.returncode != 0:
            return JobState.OVER if "Invalid job id" in done.stderr else JobState.UNKNOWN
        state = done.stdout.strip()
        if not state:
            return JobState.OVER
        return JobState.QUEUED if state in _QUEUED else JobState.RUNNING


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except FileNotFoundError:
        raise BadInput([Fault(command[0], "is not installed here.", "Run this where jobs are submitted.")]) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_COMMAND_S:.0f} s")
