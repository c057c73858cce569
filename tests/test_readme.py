"""Commands and links of README and docs lead somewhere, the README stays short, and texts have plain words."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

import polyclinic.client.cli
import polyclinic.server.cli
import polyclinic.studies.cli

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES}
TEXT = "\n".join(TEXTS.values())
PROGRAMS = {
    "flwr-sim": polyclinic.studies.cli.app,
    "flwr-server": polyclinic.server.cli.app,
    "flwr-client": polyclinic.client.cli.app,
}
COMMAND = r"^\s*(?:\.venv/bin/)?(flwr-(?:sim|server|client)) ([a-z][^;\n]*?)(?:\s+&)?(?:\s+#.*)?$"
COMMANDS = re.findall(COMMAND, TEXT, re.MULTILINE)
TARGETS = re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE)


def expand_braces(word: str) -> list[str]:
    """Return the paths that a shell makes of ``experiments/{a,b}.toml``; any other word as it is."""
    if not word.startswith("experiments/") or "{" not in word:
        return [word]
    before, _, rest = word.partition("{")
    choices, _, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in choices.split(",")]


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_every_command_parses_and_names_files_that_exist(program: str, command: str) -> None:
    name, *words = shlex.split(command)
    arguments = [path for word in words for path in expand_braces(word)]
    parser = typer.main.get_command(PROGRAMS[program]).commands[name]  # type: ignore[attr-defined]
    parser.make_context(name, list(arguments))
    experiments = [argument for argument in arguments if argument.startswith("experiments/")]
    assert [path for path in experiments if not (ROOT / path).exists()] == []


def test_every_make_target_of_the_pages_and_every_test_file_of_the_makefile_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(COMMANDS) >= 20
    assert set(TARGETS) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = re.findall(r"\btests/\w+(?:/\w+)*\.py", makefile)
    for prefix, names in re.findall(r"addprefix (tests/\w+/test_),\$\(addsuffix \.py,([\w ]+)\)", makefile):
        named += [f"{prefix}{name}.py" for name in names.split()]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())]
    inner = [(page, link) for page, link in links if not link.startswith("http")]
    assert [(page, link) for page, link in inner if not leads_somewhere(ROOT / page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether the file is there and, where the link names one, its heading."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


MOST_LINES, LONGEST_LINE = 130, 260
"""Of the README. Lines of tables and links are long; no paragraph is."""


def test_the_readme_is_one_screen_begins_with_the_two_commands_and_describes_its_pictures() -> None:
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > LONGEST_LINE and not line.startswith(("|", "!["))] == []
    first_screen = "\n".join(lines[:20])
    assert "pip install ." in first_screen
    assert "flwr-sim demo" in first_screen
    assert not re.search(r"\bp = 0\.", TEXTS["README.md"])
    assert {"demo", "test", "docs"} <= set(re.findall(r"`make ([a-z]+)", TEXTS["README.md"]))
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", TEXTS["README.md"])
    assert len(pictures) >= 2
    assert all(len(words) > 40 and (ROOT / path).is_file() for words, path in pictures)


def test_every_test_that_the_threat_model_names_is_there() -> None:
    page = TEXTS["docs/threat-model.md"]
    assert len(set(re.findall(r"\]\(\.\./tests/[\w/]+\.py\)", page))) > 20  # their files: the test of all links
    names = set(re.findall(r"`(test_\w+)`", page))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 10
    assert [name for name in sorted(names) if f"def {name}(" not in tests] == []


FOLDERS = ("client", "common", "data", "docker", "docs", "experiments", "polyclinic", "server", "strategies", "studies")
FOLDERS += ("supply", "benchmarks")
SUFFIXES = {".py", ".md", ".j2", ".toml", ".sh", ".ipynb", ".svg", ".js", ".yaml"}


def test_no_text_has_a_word_of_the_list() -> None:
    instead = tomllib.loads((ROOT / "tests" / "style.toml").read_text(encoding="utf-8"))["instead"]
    words = re.compile(rf"(?<![\w-])({'|'.join(instead)})(?![\w-])", re.IGNORECASE)
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    matches = []
    for path in (*ROOT.glob("*.md"), *paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for word in words.findall(line):
                plain = next(text for old, text in instead.items() if re.fullmatch(old, word, re.IGNORECASE))
                matches.append(f'{path.relative_to(ROOT)}:{number}: "{word}"; write: {plain}')
    assert len(paths) > 300
    assert not matches, "\n".join(matches)
