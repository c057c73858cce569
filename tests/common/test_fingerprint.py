"""The hash of a part given as an object: the same in every process, another one where code or values are others."""

import functools
import importlib
import importlib.util
import linecache
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyclinic as pc
from polyclinic.common.models.trained import make_standardising_layers
from polyclinic.common.models.zoo.networks import SingleValueSafeBatchNorm
from polyclinic.common.system.hashing import hash_python_object

FACTOR = 2


def scaled(by: object) -> Callable[[Any], Any]:
    def loss(value: Any) -> Any:
        return value * by

    return loss


def of_global(value: int) -> int:
    return value * FACTOR


class Scale:
    __slots__ = ("by",)

    def __init__(self, by: object) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return value * self.by


class ScaleWithDict(Scale):
    """Has ``__dict__`` beside its slot."""


def typed(text: str) -> Any:
    """Return ``part`` of a text typed at a prompt: it has no file."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names["part"]


def ring() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def pairs() -> list[tuple[Any, Any]]:
    """Make new objects, each beside one of other code or other values."""
    values = [
        (1, 2),
        ([1, 2], [12]),
        (np.arange(3), np.arange(3.0)),
        (torch.arange(3.0), torch.arange(3.0) + 1),
        (scaled(1), scaled(2)),
        (set("abcdefghij"), set("abcdefghi")),  # of another order in nearly every process
        (np.array(["a", "bc"], object), np.array(["a", "bd"], object)),
        (np.random.default_rng(0), np.random.RandomState(0)),
        (pd.DataFrame({"a": [1, 0]}), pd.DataFrame({"a": [0, 1]})),
        (pd.Series(["a", "b"]), pd.Series(["a", "c"])),
    ]
    texts = [
        ("def part(x, by=1): return x * by", "def part(x, by=2): return x * by"),
        ("part = lambda x: x + 1", "part = lambda x: x + 2"),
        ("class part:\n    def g(self):\n        return 4", "class part:\n    def g(self):\n        return 7"),
        ("def part(x):\n    return x + 4", "def part(x):\n    return x + 7"),
        (
            "def part(x): return x in {'p', 'q', 'r', 's', 't', 'u', 'v'}",
            "def part(x): return x in {'p', 'q', 'r', 's'}",
        ),
    ]
    return [
        *((scaled(value), scaled(other)) for value, other in values),
        *((typed(text), typed(other)) for text, other in texts),
        (functools.partial(scaled(1), 3), functools.partial(scaled(1), 4)),
        (functools.partial(scaled(1), key=3), functools.partial(scaled(1), other=3)),
        (Scale([1]), Scale([2])),
        (ScaleWithDict(1), ScaleWithDict(2)),
        (Scale(1).__call__, Scale(2).__call__),
        (nn.BCEWithLogitsLoss(reduction="mean"), nn.BCEWithLogitsLoss(reduction="sum")),
        (nn.BCEWithLogitsLoss(torch.ones(2)), nn.BCEWithLogitsLoss(2 * torch.ones(2))),
        (nn.ModuleDict({"a": nn.ReLU()}), nn.ModuleDict({"a": nn.Tanh()})),
        (ring(), [1, [1]]),
    ]


def hashes() -> list[tuple[str, str]]:
    return [(hash_python_object(part), hash_python_object(other)) for part, other in pairs()]


def test_other_code_and_other_values_have_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "<string>", (10, None, ["def part(x):\n", "    return 0\n"], "<string>"))
    assert hashes() == hashes()
    assert [pair for pair, (first, second) in zip(pairs(), hashes(), strict=True) if first == second] == []


def test_a_global_that_a_function_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_python_object(of_global)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert hash_python_object(of_global) != before


def test_another_process_finds_the_same_whatever_its_hashes_of_text() -> None:
    code = "from tests.common.test_fingerprint import hashes; print(hashes())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(hashes())


# ---------------------------------------------------------------------- code that an object uses

NETWORK = """
import torch
from torch import nn
from collections import namedtuple
# top
class Base(nn.Module):
    width = 1
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x).relu() * self.scale
    @property
    def scale(self): return 1
    @staticmethod
    def double(x): return x * 2
class Net(Base):
    def __init__(self):
        super().__init__()
        nn.init.ones_(self.layer.weight), nn.init.zeros_(self.layer.bias)
        self.many = nn.ModuleDict({"act": nn.ReLU()})
    def __call__(self, x): return helper([y for y in x], LIMIT)
def helper(x, limit): return inner(x, limit)
def inner(x, limit): return [y + 1 for y in x]
LIMIT = {'a', 'b', 'c'}
part = Net
def build(): return Net()
make = lambda: Net(), lambda: Base()
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Write a module, and import it as a notebook does after an edit."""
    monkeypatch.setitem(sys.modules, "own_module", sys)  # taken out again at the end

    def load_module(source: str) -> Any:
        path = tmp_path / "own_module.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("own_module", path)
        sys.modules["own_module"] = module = importlib.util.module_from_spec(spec)
        exec(compile(source, str(path), "exec"), vars(module))
        return module

    return load_module


USES: list[Callable[[Any], object]] = [
    lambda module: module.Net(),
    lambda module: module.Net,
    lambda module: module.build,
    lambda module: module.make[0],
    lambda module: [functools.partial(module.build), 3],
    lambda module: torch.no_grad()(module.build),
    lambda module: functools.lru_cache(module.build),
]


def uses_of(load: Callable[[str], Any], *changes: tuple[str, str]) -> list[str]:
    """Return the hash of each way to use the network, with these changes to its source."""
    source = NETWORK
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return [hash_python_object(use(load(source))) for use in USES]


@pytest.mark.parametrize(
    "change",
    [
        ("width = 1", "width = 2"),
        (".relu()", ".tanh()"),
        ("return 1", "return 2"),
        ("x * 2", "x * 3"),
        ("nn.ReLU", "nn.Tanh"),
        ("y + 1", "y - 1"),
        ("'c'}", "'d'}"),
        ("'c'}", "'c', 'd'}"),
    ],
)
def test_a_change_of_a_base_class_or_of_a_helper_counts(load: Callable[[str], Any], change: tuple[str, str]) -> None:
    before = uses_of(load)
    assert uses_of(load) == before
    assert [new == old for new, old in zip(uses_of(load, change), before, strict=True)] == [False] * len(USES)


@pytest.mark.parametrize("top", ["# a comment", "\n\n\n", "OTHER = 3", "def other(): return 3", "import random"])
def test_what_an_object_does_not_use_does_not_count(load: Callable[[str], Any], top: str) -> None:
    assert uses_of(load, ("# top", top), ("width = 1", "width = 1  # of\n")) == uses_of(load)


@pytest.mark.parametrize(
    "make",
    [
        "lambda: 1.0, lambda: 2.0",
        "lambda x: x.relu(), lambda x: x.tanh()",
        "lambda x: x * -1.0, lambda x: x * 1.0",
        "lambda x: x * 1.0, lambda x: x * 1",
        "lambda x: x['a'], lambda x: x['b']",
        "lambda x, y=1: x * y, lambda x, y=2: x * y",
        "lambda x: (lambda y: y * 1)(x), lambda x: (lambda y: y * 2)(x)",
        "lambda: nn.ReLU(), lambda: nn.Tanh()",
        "[lambda: x for x in range(1)][0], [lambda: x for x in range(2)][0]",
        "lambda x: x in (1, 2), lambda x: x in {1, 2}",
        "lambda *, a: a, lambda a: a",
    ],
)
def test_two_lambdas_of_a_line_are_different(load: Callable[[str], Any], make: str) -> None:
    source = NETWORK.replace("lambda: Net(), lambda: Base()", make)
    first, second = map(hash_python_object, load(source).make)
    assert first != second
    assert [*map(hash_python_object, load(source).make)] == [first, second]


SETTINGS = """
import argparse, dataclasses, types
import torch
from torch import nn

args = argparse.Namespace(width=8, resume=False)
space = types.SimpleNamespace(width=8, resume=False)

class Table:
    width, resume = 8, False

@dataclasses.dataclass
class Fields:
    width: int = 8
    resume: bool = False

fields, device = Fields(), torch.device("cpu")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, {settings}.width).to(device)

def width_of(settings): return settings.width
def pass_on(): return width_of({settings})
"""


@pytest.mark.parametrize("name", ["args", "space", "Table", "fields"])
def test_settings_count_that_the_code_names_or_passes_on(name: str, load: Callable[[str], Any]) -> None:
    module = load(SETTINGS.replace("{settings}", name))
    settings, before, passed_on = vars(module)[name], hash_python_object(module.Net), hash_python_object(module.pass_on)
    settings.resume, module.device = True, torch.device("meta")
    assert hash_python_object(module.Net) == before
    assert hash_python_object(module.pass_on) != passed_on
    settings.width = 9
    assert hash_python_object(module.Net) != before


def test_of_an_object_with_a_method_all_counts(load: Callable[[str], Any]) -> None:
    source = "class Loss:\n    def __call__(self, x): return x {sign} 1\nloss = Loss()\ndef use(x): return loss(x)"
    plus, minus = (hash_python_object(load(source.format(sign=sign)).use) for sign in "+-")
    assert plus != minus


HELPERS = "from . import deeper\ndef act(x): return x + deeper.STEP\ndef unused(x): return x{unused}\n"


@pytest.mark.parametrize(
    "source",
    [
        "import own_pack.helpers as h\ndef part(x): return h.act(x)",
        "import own_pack.helpers\nclass part:\n    def __call__(self, x): return own_pack.helpers.act(x)",
        "from own_pack.helpers import act\ndef part(x): return [act(y) for y in x]",
        "def part(x):\n    from own_pack.helpers import act\n    return act(x)",
        "def part(x):\n    import own_pack.helpers as h\n    return h.act(x)",
    ],
)
def test_functions_of_own_modules_count_and_those_that_are_not_used_do_not(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "__init__.py").touch()
    digests = []
    for step, unused in ((1, ""), (1, " * 2"), (2, "")):
        for name in [name for name in sys.modules if name.startswith("own_pack")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "own_pack" / "helpers.py").write_text(HELPERS.format(unused=unused))
        (tmp_path / "own_pack" / "deeper.py").write_text(f"STEP = {step}\n\n")
        importlib.invalidate_caches()
        digests.append(hash_python_object(typed(source)))
    assert digests[0] == digests[1] != digests[2]


def test_what_changes_by_itself_does_not_count() -> None:
    makers = (
        lambda: np.random.default_rng(0),
        lambda: logging.getLogger("own"),
        threading.Lock,
        lambda: iter([1]),
        lambda: random.Random(0),
    )
    for make in makers:
        held = [make() for _ in range(40)]  # at many addresses
        assert len({hash_python_object(scaled(value)) for value in held}) == 1, held[0]


def test_code_of_this_program_and_of_installed_packages_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    patients = np.array(["p", "q"], object)
    images = pc.LabelledImages(np.zeros((2, 8, 8), np.uint8), class_names=["a"], patients=patients)
    parts = (images, nn.Sequential(nn.ReLU(), SingleValueSafeBatchNorm()), make_standardising_layers)
    before = [*map(hash_python_object, parts)]
    for kind, name in ((pc.LabelledImages, "__eq__"), (nn.ReLU, "forward"), (SingleValueSafeBatchNorm, "forward")):
        monkeypatch.setattr(kind, name, lambda *given: None)
    monkeypatch.setattr(pc.LabelledImages, "__doc__", "Another text.")
    assert [*map(hash_python_object, parts)] == before
