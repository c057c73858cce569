"""A reader of a command's output that leaves early, and a full disk under it: the work is done, and the code is right.

Each line is typed in a shell, as people do: ``flwr-sim run ... | head -1``.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.network.ended import MODULES
from tests.network.real import ROOT, flwr_server, free_ports

EXPERIMENT = "experiments/digits_surgical.toml"
FULL = "standard output: cannot be written: no space left on device."


@dataclass(frozen=True)
class Said:
    """How a line of a shell ended: the code of our program, what is left of its output, what stands on the error."""

    code: int
    out: str
    err: str


def typed(line: str, *words: object) -> Said:
    """Run a line of bash; ``{}`` in it stands for a program of ours with these words."""
    program, *arguments = map(str, words)
    ours = shlex.join([sys.executable, "-m", MODULES[program], *arguments])
    script = f"{line.format(ours)}; exit ${{PIPESTATUS[0]}}"
    near = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, env=near, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


def run_into(out: Path) -> tuple[object, ...]:
    return ("flwr-sim", "run", EXPERIMENT, "--out", out, "--backend", "inline", "--set", "run.rounds=1")


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A run whose table nobody reads."""
    out = tmp_path_factory.mktemp("piped") / "run"
    return out, typed("{} | true", *run_into(out))


def test_a_run_whose_table_nobody_reads_is_done_and_ends_with_0(piped: tuple[Path, Said]) -> None:
    out, said = piped
    assert said.code == 0, said.err
    assert "error" not in said.err
    assert (out / "report.html").is_file()


@pytest.mark.network
def test_a_run_goes_on_to_its_end_when_the_reader_of_its_lines_leaves(tmp_path: Path) -> None:
    said = typed("{} 2>&1 | head -1", *run_into(tmp_path / "run"))
    assert (said.code, said.out.count("\n")) == (0, 1)
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_full_disk_under_the_table_is_said_and_the_run_is_whole(piped: tuple[Path, Said]) -> None:
    out, _ = piped
    said = typed("{} > /dev/full", *run_into(out), "--resume")
    assert (said.code, (out / "report.html").is_file()) == (1, True)
    assert FULL in " ".join(said.err.split())


def test_a_full_disk_under_standard_error_changes_nothing(piped: tuple[Path, Said]) -> None:
    out, _ = piped
    said = typed("{} 2> /dev/full", *run_into(out), "--resume")
    assert said.code == 0
    assert f"Report: {out}/report.html" in said.out


def test_a_verification_that_nobody_reads_has_its_own_exit_code(piped: tuple[Path, Said], tmp_path: Path) -> None:
    out, _ = piped
    assert typed("{} | true", "flwr-server", "verify", out).code == 0
    damaged = tmp_path / "run"
    subprocess.run(["cp", "-r", str(out), str(damaged)], check=True)
    (damaged / "rounds.jsonl").write_text("{}\n", encoding="utf-8")
    assert typed("{} | true", "flwr-server", "verify", damaged).code == 1


@pytest.mark.parametrize("line", ["{} | true", "{} | head -1", "{} 2>&1 | true"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("flwr-sim", "--help"), 0),
        (("flwr-sim", "--version"), 0),
        (("flwr-sim", "rnu"), 2),
        (("flwr-sim", "run", "none.toml", "--out", "none"), 2),
        (("flwr-client", "audit", "show", "none"), 2),
    ],
    ids=lambda each: str(each),
)
def test_a_reader_that_leaves_changes_no_exit_code(line: str, words: tuple[str, ...], code: int) -> None:
    assert typed(line, *words).code == code


@pytest.mark.parametrize(
    ("words", "code"),
    [(("flwr-sim", "--version"), 1), (("flwr-sim", "--help"), 1), (("flwr-sim", "run", "none.toml", "--out", "x"), 2)],
    ids=lambda each: str(each),
)
def test_a_full_disk_under_a_short_answer_is_said(words: tuple[str, ...], code: int) -> None:
    said = typed("{} > /dev/full", *words)
    assert said.code == code
    assert (FULL in " ".join(said.err.split())) == (code == 1)


def test_a_standard_output_that_is_closed_changes_nothing() -> None:
    assert typed("{} >&- 2>&- <&-", "flwr-sim", "--version").code == 0


@pytest.mark.network
def test_a_service_whose_log_nobody_reads_any_more_stays_up(tmp_path: Path) -> None:
    ports = ("--port", free_ports(1)[0], "--listen", "127.0.0.1")
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "127.0.0.1", *ports).code == 0
    ours = [sys.executable, "-m", MODULES["flwr-server"], "start", str(tmp_path / "trial")]
    near = {**os.environ, "PYTHONPATH": str(ROOT)}
    service = subprocess.Popen(ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=near)
    try:
        assert service.stdout is not None
        service.stdout.readline()
        service.stdout.close()
        until = time.monotonic() + 60
        while flwr_server("health", tmp_path / "trial").code and time.monotonic() < until:
            time.sleep(0.2)
        assert service.poll() is None
        service.send_signal(signal.SIGTERM)  # of which it says that it was stopped
        assert service.wait(60) == 0
    finally:
        service.kill()
