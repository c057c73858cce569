"""What the README tells people to type is there to be typed."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from server.sim_cli import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = re.findall(r"^\.venv/bin/flwr-sim (.*?)(?:\s+#.*)?$", TEXT, re.MULTILINE)
TARGETS = re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses_and_names_files_that_exist(command: str) -> None:
    name, *arguments = shlex.split(command)
    known = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    known.make_context(name, list(arguments))
    experiments = [argument for argument in arguments if argument.startswith("experiments/")]
    assert [path for path in experiments if not (ROOT / path).is_file()] == []


def test_the_readme_has_commands_and_every_make_target_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(COMMANDS) >= 8
    assert set(TARGETS) <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
