"""A reader of a command's output that leaves early, and a full disk under it: the work is done, and the code is right.

Each line is typed in a shell, as people do: ``flwr-sim run ... | head -1``.
"""

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network.ended import MODULES
from tests.network.real import ROOT, eventually, flwr_server, free_ports
from tests.processes import environment
from tests.server.commands import Ended

EXPERIMENT = "experiments/digits_surgical.toml"
FULL = "standard output: cannot be written: no space left on device."


def typed(line: str, *words: object) -> Ended:
    """Run a line of bash, in which ``{}`` stands for a program of ours with these words; the code is the program's."""
    program, *arguments = map(str, words)
    ours = shlex.join([sys.executable, "-m", MODULES[program], *arguments])
    script = f"{line.format(ours)}; exit ${{PIPESTATUS[0]}}"
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment(), "timeout": 300}
    done = subprocess.run(["bash", "-c", script], **options)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, " ".join(done.stderr.split()))


def run_into(out: Path) -> tuple[object, ...]:
    return ("flwr-sim", "run", EXPERIMENT, "--out", out, "--backend", "inline", "--set", "run.rounds=1")


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose table nobody reads."""
    out = tmp_path_factory.mktemp("piped") / "run"
    ended = typed("{} | true", *run_into(out))
    assert ended.code == 0, ended.err
    assert "error" not in ended.err
    assert (out / "report.html").is_file()
    return out


@pytest.mark.network
def test_a_run_goes_on_to_its_end_when_the_reader_of_its_lines_leaves(tmp_path: Path) -> None:
    ended = typed("{} 2>&1 | head -1", *run_into(tmp_path / "run"))
    assert (ended.code, ended.out.count("\n")) == (0, 1)
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_full_disk_under_the_table_is_said_and_the_run_is_whole(piped: Path) -> None:
    """The fixture tests the run whose table nobody reads."""
    ended = typed("{} > /dev/full", *run_into(piped), "--resume")
    assert (ended.code, (piped / "report.html").is_file()) == (1, True)
    assert FULL in ended.err


@pytest.mark.network
def test_a_full_disk_under_standard_error_changes_nothing(piped: Path) -> None:
    ended = typed("{} 2> /dev/full", *run_into(piped), "--resume")
    assert ended.code == 0
    assert f"Report: {piped}/report.html" in ended.out


def test_a_verification_that_nobody_reads_has_its_own_exit_code(piped: Path, tmp_path: Path) -> None:
    shutil.copytree(piped, tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").write_text("{}\n", encoding="utf-8")
    assert typed("{} | true", "flwr-server", "verify", tmp_path / "run").code == 1


READERS = ("{} | true", "{} | head -1", "{} 2>&1 | true")
WORDS = {
    "flwr-sim --help": 0,
    "flwr-sim --version": 0,
    "flwr-sim rnu": 2,
    "flwr-sim run none.toml --out none": 2,
    "flwr-client audit show none": 2,
}


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [  # make test tries one reader with each command
        pytest.param(line, words, code, marks=() if place % 3 == number else pytest.mark.long, id=line.format(words))
        for place, (words, code) in enumerate(WORDS.items())
        for number, line in enumerate(READERS)
    ],
)
def test_a_reader_that_leaves_changes_no_exit_code(line: str, words: str, code: int) -> None:
    assert typed(line, *words.split()).code == code


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [
        ("{} >&- 2>&- <&-", "flwr-sim --version", 0),
        ("{} > /dev/full", "flwr-sim --version", 1),
        ("{} > /dev/full", "flwr-sim --help", 1),
        ("{} > /dev/full", "flwr-sim run none.toml --out x", 2),
    ],
)
def test_a_full_disk_under_a_short_answer_is_said_and_closed_streams_change_nothing(
    line: str, words: str, code: int
) -> None:
    ended = typed(line, *words.split())
    assert ended.code == code
    assert (FULL in ended.err) == (code == 1)


@pytest.mark.network
def test_a_service_whose_log_nobody_reads_any_more_stays_up(tmp_path: Path) -> None:
    ports = ("--port", free_ports(1)[0], "--listen", "127.0.0.1")
    assert flwr_server("init", tmp_path / "trial", "--name", "trial", "--host", "127.0.0.1", *ports).code == 0
    ours = [sys.executable, "-m", MODULES["flwr-server"], "start", str(tmp_path / "trial")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": environment()}
    service = subprocess.Popen(ours, **options)
    try:
        assert service.stdout is not None
        service.stdout.readline()
        service.stdout.close()
        eventually(lambda: flwr_server("health", tmp_path / "trial").code == 0, "the service is well")
        assert service.poll() is None
        service.send_signal(signal.SIGTERM)  # of which it says that it was stopped
        assert service.wait(60) == 0
    finally:
        service.kill()
