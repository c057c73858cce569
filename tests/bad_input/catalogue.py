"""Mistakes of people, files damaged on their way or on a disk, and the whole message of each.

A kind is a module of this folder with ``CASES``; its messages stand in ``messages/KIND.toml`` under the same names,
with ``{folder}`` for the folder of a case. These files hold all messages to people.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyclinic.common.errors import quote_names
from polyclinic.strategies.registry import STRATEGIES
from tests.network.real import flwr_client, flwr_server, flwr_sim
from tests.server.commands import Ended

__all__ = ["Case", "Ended", "changed", "client", "expected", "message", "server", "simulation"]

MESSAGES = Path(__file__).parent / "messages"


@dataclass(frozen=True)
class Case:
    """One malformed thing.

    Attributes:
        name: What is wrong with it.
        done: Makes it in an empty folder, and does there what a person would do with it.
        code: How the program ends.
        marks: Of pytest.
    """

    name: str
    done: Callable[[Path], Ended]
    code: int = 2
    marks: tuple[Any, ...] = field(default=())


def expected(kind: str) -> Mapping[str, str]:
    """The messages of a kind by the names of its cases."""
    messages: dict[str, str] = tomllib.loads((MESSAGES / f"{kind}.toml").read_text(encoding="utf-8"))
    return messages


def message(ended: Ended, folder: Path) -> str:
    """Return the message without the parts that differ between machines and tests."""
    text = ended.err.replace(str(folder), "{folder}").strip()
    text = text.replace(quote_names(STRATEGIES, limit=len(STRATEGIES)), "{methods}")
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:{port}", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "{sha256}", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d( UTC)?", "{date}", text)
    return re.sub(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d  ", "", text)


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A text with each first part replaced by the second; every one must be there."""
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


simulation, server, client = flwr_sim, flwr_server, flwr_client
"""The three programs, as they are typed."""
