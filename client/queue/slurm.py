"""The Slurm batch script that runs ``flwr-client start``, and calls of the commands ``sbatch`` and ``squeue``."""

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

from polyclinic.client.service import CLIENT_SERVICE
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.security.call_signatures import PROCESS_VARIABLE
from polyclinic.common.system.service import find_unit_path_faults
from polyclinic.common.system.service_files import find_program_command

STOP_NOTICE_S = 60
"""Slurm asks the program to stop this long before the job's time limit; the program needs at most 7 s."""
LOG_FILE = "slurm.log"
_SUBMIT_COMMAND = "sbatch"
_LIST_COMMAND = "squeue"
_COMMAND_TIMEOUT_S = 60.0
_PATH_HASH_CHARACTERS = 8
_INVALID_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_QUEUED_STATES = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}


class JobState(Enum):
    """The state of a job in the queue."""

    QUEUED = "queued"
    RUNNING = "running"
    OVER = "over"
    UNKNOWN = "unknown"


def make_job_name(folder: Path) -> str:
    """Return the name of a folder's jobs; it has a hash of the path, because Slurm runs one job of each name at a time.

    Args:
        folder: The resolved path of the site's folder.
    """
    path_hash = hashlib.sha256(os.fsencode(folder)).hexdigest()[:_PATH_HASH_CHARACTERS]
    return f"{CLIENT_SERVICE.unit_prefix}{_INVALID_NAME_CHARACTERS.sub('-', folder.name)}-{path_hash}"


def find_missing_command_faults() -> list[Fault]:
    """Return a fault for each of Slurm's commands that cannot be started here."""
    remedy = "Run this where jobs are submitted, with Slurm's commands on PATH."
    missing = [command for command in (_SUBMIT_COMMAND, _LIST_COMMAND) if shutil.which(command) is None]
    return [Fault(command, "is not on PATH.", remedy) for command in missing]


def make_batch_script(folder: Path, options: Sequence[str], *, idle_minutes: float | None) -> str:
    """Return a batch script that runs ``flwr-client start`` on a folder.

    Args:
        options: Options of ``sbatch``, such as ``--gres=gpu:1``, one line each.
        idle_minutes: The job ends after so many minutes without a request. None for a job without such an end, which is
            queued again at its time limit.

    Raises:
        BadInput: If a script cannot contain the folder's path or an option, or if the minutes are not a number.
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
    options_of_script = [
        f"--job-name={make_job_name(folder)}",
        "--dependency=singleton",  # of this name and account, one job runs at a time
        f"--signal=B:{'USR1' if stays else 'TERM'}@{STOP_NOTICE_S}",
        "--requeue" if stays else "--no-requeue",
        "--open-mode=append",
        f'--output="{log}"',
        *options,
    ]

    start = [*find_program_command(CLIENT_SERVICE), "start", str(folder)]
    if state_home := os.environ.get("XDG_STATE_HOME"):
        start = ["env", f"XDG_STATE_HOME={state_home}", *start]
    body = _PERMANENT_SCRIPT if stays else _ON_DEMAND_SCRIPT
    command = shlex.join(start if stays else [*start, "--until-idle", f"{idle_minutes:g}"])
    lines = [
        "#!/bin/bash",
        "# Written by flwr-client slurm script.",
        *(f"#SBATCH {each}" for each in options_of_script),
    ]
    return "\n".join(lines) + "\n" + body.replace("@COMMAND@", command).replace("@VARIABLE@", PROCESS_VARIABLE)


_ON_DEMAND_SCRIPT = """
# The program is the job's main process, so that Slurm's SIGTERM before the time limit reaches it. The first argument
# comes from flwr-client slurm watch, which keeps the site connected meanwhile and submits this script again.
export @VARIABLE@="${1:-}"
exec @COMMAND@
"""
_PERMANENT_SCRIPT = """
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
    """The Slurm queue of this account, with the script to submit."""

    script: Path

    def submit_job(self, process: str) -> str:
        """Submit the script with a process id as its argument; return the job's number.

        Raises:
            BadInput: If Slurm refuses the job.
        """
        result = _run([_SUBMIT_COMMAND, "--parsable", str(self.script), process])
        job = result.stdout.strip().split(";")[0]
        if result.returncode != 0 or not re.fullmatch(r"\d+", job):
            reason = result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
            command = shlex.join([_SUBMIT_COMMAND, str(self.script)])
            raise BadInput([Fault(command, f"Slurm refused it: {reason}", "Change the options in the script.")])
        return job

    def read_job_state(self, job: str) -> JobState:
        """Return the state of a job; UNKNOWN while Slurm does not answer."""
        result = _run([_LIST_COMMAND, "--noheader", "--jobs", job, "--format=%T"])
        if result.returncode != 0:
            return JobState.OVER if "Invalid job id" in result.stderr else JobState.UNKNOWN
        state = result.stdout.strip()
        if not state:
            return JobState.OVER
        return JobState.QUEUED if state in _QUEUED_STATES else JobState.RUNNING


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise BadInput([Fault(command[0], "is not installed here.", "Run this where jobs are submitted.")]) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_COMMAND_TIMEOUT_S:.0f} s")
