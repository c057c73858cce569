"""``make licences``: the licence of each library of the images and bundles, as its metadata say: docs/licences.md."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "licences.md"

STRONG = re.compile(r"\b(A?GPL|SSPL|EUPL|CPAL|OSL)\b|(?<!LESSER )GENERAL PUBLIC|AFFERO", re.IGNORECASE)
"""Licences that ask for the source of what uses the library."""
NOTED = re.compile(r"\bMPL\b|Mozilla|LGPL|LESSER|EPL|proprietary", re.IGNORECASE)
"""Licences that say something about how a library is passed on: each needs a note."""

NOTES = {
    "certifi": "MPL-2.0 asks for the source of changed files; it is installed as it is.",
    "pathspec": "MPL-2.0, as certifi.",
    "tqdm": "MPL-2.0 beside MIT, as certifi.",
    **dict.fromkeys(("nvidia", "cuda"), "NVIDIA's own terms"),
}
"""By name, or by its first word."""

SAID_ELSEWHERE = {
    "cuda-toolkit": "NVIDIA proprietary (a name for the others; holds no code and names no licence)",
    "colorama": "BSD-3-Clause (on Windows only)",
}
"""Where the metadata say nothing, or nobody installs the library here."""


@dataclass(frozen=True)
class Library:
    """One library of the locks; ``licence`` is empty where nobody says."""

    name: str
    version: str
    licence: str

    @property
    def note(self) -> str:
        return NOTES.get(self.name, NOTES.get(self.name.partition("-")[0], ""))

    @property
    def fault(self) -> str:
        """Why this library cannot be passed on as it is, or an empty string."""
        if not self.licence:
            return "its licence is unknown"
        if STRONG.search(self.licence) and not self.note:
            return f"{self.licence} asks for the source of what uses it"
        return f"{self.licence} needs a note" if NOTED.search(self.licence) and not self.note else ""


def locked() -> list[tuple[str, str]]:
    """Name and version of every library of the images and of the bundles, which hold pip too."""
    locks = ("torch.lock", "libraries.lock", "build.lock")
    text = "".join((HERE / name).read_text(encoding="utf-8") for name in locks)
    return sorted(set(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE)))


def licence_of(name: str) -> str:
    """What the installed library's metadata say: an expression, a classifier, or a short text."""
    if name in SAID_ELSEWHERE:
        return SAID_ELSEWHERE[name]
    try:
        facts = metadata(name).json
    except PackageNotFoundError:
        return ""
    classifiers = [text.rpartition(" :: ")[2] for text in facts.get("classifier", []) if text.startswith("License")]
    text = str(facts.get("license", "")).strip()
    short = text if len(text) < 60 and text != "UNKNOWN" else ""
    return str(facts.get("license_expression") or short or " or ".join(classifiers))


def page(libraries: list[Library]) -> str:
    """The page."""
    head = """# Licences of what the images and the offline bundles hold

Made by `make licences` from the metadata of the installed libraries, for the versions in `supply/*.lock`.
This project is under Apache-2.0 itself. The words of its phrases (`common/security/phrase_words.txt`) are a part of the
English list of BIP-39 as python-mnemonic carries it: MIT, copyright 2013-2016 Pavol Rusnak.

NVIDIA's libraries are only in images and bundles made with `GPU=1`. By NVIDIA's own terms they may be passed on with an
application, and not changed.

| library | version | licence | |
| --- | --- | --- | --- |
"""
    return head + "".join(f"| {each.name} | {each.version} | {each.licence} | {each.note} |\n" for each in libraries)


def main() -> None:
    """Write the page; end with a word on each library that cannot be passed on as it is."""
    before = on_page()
    libraries = [Library(name, version, licence_of(name) or before.get(name, "")) for name, version in locked()]
    PAGE.write_text(page(libraries), encoding="utf-8")
    faults = [f"{each.name}: {each.fault}" for each in libraries if each.fault]
    if faults:
        raise SystemExit("\n".join(faults))


def on_page() -> dict[str, str]:
    """Licences by name, as the page says: a library that this machine has no use for is not installed."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| \d[^|]* \| ([^|]+?) \|", text, re.MULTILINE))


if __name__ == "__main__":
    main()
