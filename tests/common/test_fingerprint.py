"""The hash of a part given as an object: the same in every process, another one where code or values are others."""

import functools
import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.system.hashing import hash_python_object

FACTOR = 2


def scaled(by: object) -> Callable[[Any], Any]:
    def loss(value: Any) -> Any:
        return value * by

    return loss


def of_global(value: int) -> int:
    return value * FACTOR


class Scale:
    def __init__(self, by: object) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return value * self.by


def typed(text: str) -> Any:
    """What somebody typed at a prompt: it has no file."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names["part"]


def ring() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


PAIRS = [
    (lambda: scaled(1), lambda: scaled(2)),
    (lambda: scaled([1, 2]), lambda: scaled([12])),
    (lambda: scaled(np.arange(3)), lambda: scaled(np.arange(3.0))),
    (lambda: scaled(torch.arange(3.0)), lambda: scaled(torch.arange(3.0) + 1)),
    (lambda: scaled(scaled(1)), lambda: scaled(scaled(2))),
    (lambda: functools.partial(scaled(1), 3), lambda: functools.partial(scaled(1), 4)),
    (lambda: functools.partial(scaled(1), key=3), lambda: functools.partial(scaled(1), other=3)),
    (lambda: Scale(1), lambda: Scale(2)),
    (lambda: Scale(1).__call__, lambda: Scale(2).__call__),
    (lambda: typed("def part(x, by=1): return x * by"), lambda: typed("def part(x, by=2): return x * by")),
    (lambda: typed("part = lambda x: x + 1"), lambda: typed("part = lambda x: x + 2")),
    (
        lambda: typed("class part:\n    def __call__(self, x): return x + 1"),
        lambda: typed("class part:\n    def __call__(self, x): return x + 2"),
    ),
    (lambda: nn.BCEWithLogitsLoss(reduction="mean"), lambda: nn.BCEWithLogitsLoss(reduction="sum")),
    (lambda: nn.BCEWithLogitsLoss(torch.ones(2)), lambda: nn.BCEWithLogitsLoss(2 * torch.ones(2))),
    (ring, lambda: [1, [1]]),
    (lambda: typed("def part(x): return x in {'a', 'b', 'c'}"), lambda: typed("def part(x): return x in {'a', 'b'}")),
]


@pytest.mark.parametrize(("part", "other"), PAIRS)
def test_other_code_and_other_values_have_another_hash(part: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert hash_python_object(part()) == hash_python_object(part())
    assert hash_python_object(part()) != hash_python_object(other())


def test_a_global_that_a_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_python_object(of_global)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert hash_python_object(of_global) != before


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_finds_the_same_whatever_its_hashes_of_text(seed: str) -> None:
    code = (
        "from tests.common import test_fingerprint as t; from common.system.hashing import hash_python_object as f;"
        "print(*(f(part()) for pair in t.PAIRS for part in pair))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [hash_python_object(part()) for pair in PAIRS for part in pair]


@pytest.mark.parametrize(
    "source", ["def part(x):\n    return x + {}\n", "class part:\n    def g(self):\n        return {}\n"]
)
def test_code_without_a_file_counts(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "<string>", (10, None, ["def part(x):\n", "    return 0\n"], "<string>"))
    assert hash_python_object(typed(source.format(4))) == hash_python_object(typed(source.format(4)))
    assert hash_python_object(typed(source.format(4))) != hash_python_object(typed(source.format(7)))
