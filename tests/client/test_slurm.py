"""The batch script for Slurm: bash and Slurm read in it what was meant."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from polyclinic.client.queue.slurm import make_job_name
from tests.network.real import flwr_client

FOLDERS = ["north", "north wing 50%", "it's $HOME"]


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = tmp_path / str(request.param)
    assert flwr_client("init", made, "--name", "north").code == 0
    return made


def script_of(folder: Path, *options: str) -> Path:
    out = folder.parent / "north.sbatch"
    done = flwr_client("slurm", "script", folder, "--out", out, *options, "--", "--gres=gpu:1", "--time=04:00:00")
    assert done.code == 0, done.err
    return out


@pytest.mark.parametrize("options", [(), ("--keep",)])
def test_bash_and_shellcheck_find_no_fault_in_a_script(folder: Path, options: tuple[str, ...]) -> None:
    script = script_of(folder, *options)
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""
    if shutil.which("shellcheck"):
        # Single quotes keep a folder's "$HOME" as it is, on purpose.
        done = subprocess.run(["shellcheck", "--exclude=SC2016", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_script_starts_the_program_on_its_folder_and_ends_it_when_nothing_is_asked(folder: Path) -> None:
    text = script_of(folder).read_text(encoding="utf-8")
    command = shlex.split(text.strip().splitlines()[-1])
    assert command[0] == "exec"
    assert command[command.index("start") :] == ["start", str(folder), "--until-idle", "10"]
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--dependency=singleton", "--signal=B:TERM@60", "--gres=gpu:1", "--time=04:00:00"} <= set(head)
    assert f'--output="{str(folder).replace("%", "%%")}/slurm.log"' in head


def test_a_job_that_stays_passes_a_stop_on_and_is_queued_again_at_its_limit_only(tmp_path: Path) -> None:
    """With a program in place of flwr-client, and another in place of scontrol; bash runs the script."""
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    lines = script_of(tmp_path / "north", "--keep").read_text(encoding="utf-8").splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.endswith(" &")]
    program = "bash -c 'trap \"echo stopped; exit 0\" TERM; echo up; while :; do sleep 0.05; done'"
    lines[place] = f"{program} &"
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n', encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "job").write_text("\n".join(lines), encoding="utf-8")
    for signal, expected in (("USR1", "up\nstopped\nscontrol requeue 7\n"), ("TERM", "up\nstopped\n")):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        job = subprocess.Popen(["bash", tmp_path / "job"], stdout=subprocess.PIPE, text=True, env=environment)
        assert job.stdout is not None
        output = job.stdout.readline()
        subprocess.run(["bash", "-c", f"kill -{signal} {job.pid}"], check=True)
        output += job.communicate(timeout=30)[0]
        assert (output, job.returncode) == (expected, 0)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb"])
def test_a_folder_that_slurm_would_cut_is_refused(name: str, tmp_path: Path) -> None:
    assert flwr_client("init", tmp_path / name, "--name", "north").code == 0
    assert flwr_client("slurm", "script", tmp_path / name).code == 2


def test_a_word_that_is_no_option_of_sbatch_is_refused(tmp_path: Path) -> None:
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    for option in ("gpu", "--time=1\nrm"):
        assert flwr_client("slurm", "script", tmp_path / "north", "--", option).code == 2


def test_two_folders_of_one_last_name_have_jobs_of_two_names(tmp_path: Path) -> None:
    """Slurm runs one job of a name at a time: of one name, each would wait for the other hospital's job."""

    def job_name(folder: Path) -> str:
        assert flwr_client("init", folder, "--name", "north").code == 0
        lines = script_of(folder).read_text(encoding="utf-8").splitlines()
        (name,) = [line.partition("--job-name=")[2] for line in lines if "--job-name=" in line]
        return name

    names = [job_name(tmp_path / federation / "north") for federation in ("fa", "fb")]
    assert all(re.fullmatch(r"polyclinic-client-north-[0-9a-f]{8}", name) for name in names)
    assert names[0] != names[1]
    (tmp_path / "link").symlink_to(tmp_path / "fa")
    assert names[0] == make_job_name((tmp_path / "link" / "north").resolve())


@pytest.mark.parametrize("minutes", ["nan", "inf"])
def test_a_number_of_minutes_that_never_pass_is_refused(minutes: str, tmp_path: Path) -> None:
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    done = flwr_client("slurm", "script", tmp_path / "north", "--until-idle", minutes)
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize("missing", ["sbatch", "squeue"])
def test_watching_where_no_job_can_be_submitted_is_refused_at_the_start(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the program would connect, and end at the first request."""
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    (tmp_path / "programs").mkdir()
    for name in {"sbatch", "squeue"} - {missing}:
        (tmp_path / "programs" / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / "programs" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    done = flwr_client("slurm", "watch", tmp_path / "north", "--script", script_of(tmp_path / "north"))
    assert done.code == 2
    assert f"{missing}: is not on PATH." in done.err


def test_watching_without_a_script_is_refused(tmp_path: Path) -> None:
    assert flwr_client("init", tmp_path / "north", "--name", "north").code == 0
    assert flwr_client("slurm", "watch", tmp_path / "north", "--script", tmp_path / "none").code == 2
