"""Lines of the programs that stay up have date, time and zone, and are JSON objects on request."""

import datetime as dt
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d)  \S")
ZONE = {"TZ": "UTC-05:30"}  # as POSIX has it: east of Greenwich


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def server(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "server.cli", *map(str, arguments)]


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    folder = tmp_path / "trial"
    made = server("init", folder, "--name", "trial", "--host", "127.0.0.1", "--port", free_port())
    subprocess.run(made, check=True, capture_output=True, timeout=120)
    return folder


def said_until_ready(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Lines of standard output until the program is stopped, which is when it is ready; and its standard error."""
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | ZONE
    ) as process:
        assert process.stdout is not None
        lines, until = list[str](), time.monotonic() + 120
        while not any("ready" in line for line in lines) and time.monotonic() < until:
            if select.select([process.stdout], [], [], 1)[0] and not (
                lines.append(process.stdout.readline()) or lines[-1]
            ):
                break
        process.terminate()
        rest, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    return [*(line.rstrip("\n") for line in lines), *rest.splitlines()], errors


def is_now(moment: str) -> bool:
    parsed = dt.datetime.fromisoformat(moment)
    return parsed.utcoffset() == dt.timedelta(hours=5, minutes=30) and abs(parsed.timestamp() - time.time()) < 300


def test_the_coordinators_lines_have_date_time_and_zone(coordinator: Path) -> None:
    lines, errors = said_until_ready(server("start", coordinator))
    assert errors == ""
    assert any("ready" in line for line in lines)
    assert all((found := LINE.match(line)) and is_now(found[1]) for line in lines)


def test_on_request_they_are_json_and_so_are_those_of_its_log_file(coordinator: Path) -> None:
    lines, errors = said_until_ready(server("start", coordinator, "--log-format", "json"))
    assert errors == ""
    told = [json.loads(line) for line in lines]
    assert all(is_now(one["time"]) and one["level"] == "info" for one in told)
    assert any("ready" in one["message"] for one in told)
    assert told[-1]["message"].startswith("stopped on request")
    log = (coordinator / "logs" / "superlink.log").read_text(encoding="utf-8")
    assert all(set(json.loads(line)) == {"time", "message"} for line in log.splitlines())


@pytest.mark.parametrize("program", ["server.cli", "client.cli"])
def test_why_a_program_ends_is_json_too(program: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", program, "start", str(tmp_path), "--log-format", "json"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    (told,) = [json.loads(line) for line in ended.stderr.splitlines()]
    assert told["level"] == "error"
    assert str(tmp_path) in told["message"]
