"""What the README tells people to type is there to be typed."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import client.cli
import server.cli
import server.sim_cli

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
PROGRAMS = {"flwr-sim": server.sim_cli.app, "flwr-server": server.cli.app, "flwr-client": client.cli.app}
COMMANDS = re.findall(r"^\s*\.venv/bin/(flwr-(?:sim|server|client)) (.*?)(?:\s+&)?(?:\s+#.*)?$", TEXT, re.MULTILINE)
TARGETS = re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_every_command_parses_and_names_files_that_exist(program: str, command: str) -> None:
    name, *arguments = shlex.split(command)
    known = typer.main.get_command(PROGRAMS[program]).commands[name]  # type: ignore[attr-defined]
    known.make_context(name, list(arguments))
    experiments = [argument for argument in arguments if argument.startswith("experiments/")]
    assert [path for path in experiments if not (ROOT / path).exists()] == []


def test_the_readme_has_commands_and_every_make_target_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(COMMANDS) >= 8
    assert set(TARGETS) <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/troubleshooting.md",
        "docs/hospital-it.md",
        "docs/operations.md",
        "docs/what-leaves.md",
        "docs/experiments.md",
        "docs/benchmarks.md",
    ],
)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if not leads_somewhere(ROOT / page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether the file is there and, where the link names one, its heading."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
