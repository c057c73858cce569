"""What MkDocs does beside its own for the docs site: pages from elsewhere in the tree, and links that leave ``docs/``.

Pages of the repository's root become pages of the site. A file of the source that a page links to becomes a page too,
so that the site is whole without the repository. A table of ``docs/tables`` becomes a page that shows it. The
reference of the commands is made from the programs themselves.
"""

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from supply.blocks import format_table

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "containers.md",
}
"""Pages outside ``docs/`` by their names on the site."""
PROGRAMS = {
    "flwr-sim": "polyclinic.studies.cli",
    "flwr-server": "polyclinic.server.cli",
    "flwr-client": "polyclinic.client.cli",
}
API = ("polyclinic.runs", "polyclinic.flower", "polyclinic.methods", "polyclinic.data", "polyclinic.testing")
DATA = Path("docs", "tables")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash"}
TABLES = """\
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-typeset table:not([class]) td code { word-break: normal; overflow-wrap: normal; }
"""
"""Style: a key in a table's first column stays in one piece, and no other name is broken; a narrow page scrolls."""
WIDE = "---\nhide: [navigation]\n---\n\n"
"""Head of the start page, which has no pages beside it in its tab."""
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in ``docs/``."""
    texts = {name: ((ROOT / path).read_text(encoding="utf-8"), ROOT / path) for path, name in PAGES.items()}
    written = {file.src_uri: Path(config.docs_dir, file.src_uri) for file in files.documentation_pages()}
    texts |= {name: (path.read_text(encoding="utf-8"), path) for name, path in written.items()}
    linked = {path for text, at in texts.values() for path in _targets(text, at.parent) if _is_source(path)}
    for name in PAGES.values():
        head = WIDE if name == "index.md" else ""
        files.append(File.generated(config, name, content=head + _rewritten(*texts[name])))
    for path in sorted(linked):
        files.append(File.generated(config, _source_page(path), content=_shown(path)))
    for path in sorted((ROOT / DATA).glob("*.csv")):
        files.append(File.generated(config, _table_page(path), content=_shown_table(path)))
    files.append(File.generated(config, "tables.css", content=TABLES))
    files.append(File.generated(config, "commands.md", content=_commands()))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead the links of a page in ``docs/`` to the pages that stand for files outside."""
    if page.file.generated_by is not None:
        return markdown
    return _rewritten(markdown, Path(config.docs_dir, page.file.src_uri))


def _rewritten(text: str, at: Path) -> str:
    """The text with its links as they are on the site, whose pages lie in one folder."""

    def site_link(match: re.Match[str]) -> str:
        target, _, heading = match[1].partition("#")
        if not target or ":" in target:
            return match[1]
        path = (at.parent / target).resolve().relative_to(ROOT)
        return _name_on_site(path) + (f"#{heading}" if heading else "")

    unbroken = ((fenced, part if fenced else _keep_together(part)) for fenced, part in _parts(text))
    return "".join(part if fenced else _LINK.sub(site_link, part) for fenced, part in unbroken)


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """The text in order, in parts that are fenced code and parts that are not."""
    end = 0
    for fence in _FENCE.finditer(text):
        yield False, text[end : fence.start()]
        yield True, fence[0]
        end = fence.end()
    yield False, text[end:]


def _targets(text: str, folder: Path) -> Iterator[Path]:
    """The files that a text links to, from the root."""
    for fenced, part in _parts(text):
        for link in () if fenced else _LINK.findall(part):
            target = link.partition("#")[0]
            if target and ":" not in target:
                yield (folder / target).resolve().relative_to(ROOT)


def _is_source(path: Path) -> bool:
    return path.parts[0] != "docs" and path.as_posix() not in PAGES


def _name_on_site(path: Path) -> str:
    if path.as_posix() in PAGES:
        return PAGES[path.as_posix()]
    if path.parent == DATA:
        return _table_page(path)
    return _source_page(path) if _is_source(path) else path.relative_to("docs").as_posix()


def _source_page(path: Path) -> str:
    return "source-" + path.as_posix().replace("/", "-").replace(".", "-") + ".md"


def _table_page(path: Path) -> str:
    return f"table-{path.stem}.md"


def _shown_table(path: Path) -> str:
    """A page with the rows of a CSV file, and a link to the file; the search leaves it out."""
    with path.open(encoding="utf-8", newline="") as file:
        headings, *rows = ([cell.replace("|", "\\|") for cell in row] for row in csv.reader(file))
    unbroken = (map(_keep_together, row) for row in rows)
    head = f"{NOT_SEARCHED}# {path.stem}\n\nThe same as a file: [{path.name}](tables/{path.name}).\n\n"
    return f"{head}{format_table(headings, unbroken)}\n"


def _keep_together(text: str) -> str:
    """The text with a mean and its SD on one line."""
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _shown(path: Path) -> str:
    """A page with a file's text, or with the names that a folder holds; the search leaves it out."""
    whole = ROOT / path
    head = f"{NOT_SEARCHED}# {path.as_posix()}\n\n"
    if whole.is_dir():
        names = sorted(
            each.name + "/" * each.is_dir() for each in whole.iterdir() if not each.name.startswith(("_", "."))
        )
        return head + "".join(f"- `{name}`\n" for name in names)
    return head + f"````{LANGUAGES.get(path.suffix, 'text')}\n{whole.read_text(encoding='utf-8')}\n````\n"


def _commands() -> str:
    """Every command's help, as Typer writes it."""
    pages = ["# Commands\n\nMade from the programs: what `--help` prints of each command.\n"]
    for name, module in PROGRAMS.items():
        typed = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
        made = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        pages.append(re.sub(r"^#", "##", made.replace("\n# ", "\n## "), flags=re.MULTILINE))
    return "\n".join(pages)


def _api() -> str:
    return "# Python\n\nThe package `polyclinic`; [From Python](python.md) uses it.\n\n" + "\n\n".join(
        f"::: {name}" for name in API
    )
