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
from common.models.trained import make_standardising_layers
from common.models.zoo.networks import SingleValueSafeNorm
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
    (lambda: scaled({"a", "b", "c"}), lambda: scaled({"a", "b"})),
    (lambda: scaled(np.array(["a", "bc"], object)), lambda: scaled(np.array(["a", "bd"], object))),
    (lambda: scaled(np.random.default_rng(0)), lambda: scaled(np.random.RandomState(0))),
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


# ---------------------------------------------------------------------- code that an object uses

NETWORK = """
import torch
from torch import nn
from collections import namedtuple
{top}
class Base(nn.Module):
    {attribute}
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x).{activation}() * self.scale
    @property
    def scale(self): return {scale}
    @staticmethod
    def double(x): return x * {double}
class Net(Base):
    def __init__(self):
        super().__init__()
        nn.init.ones_(self.layer.weight), nn.init.zeros_(self.layer.bias)
        self.many = nn.ModuleDict({{"act": nn.{member}()}})
    def __call__(self, x): return helper([y for y in x], LIMIT)
def helper(x, limit): return inner(x, limit)
def inner(x, limit): return [{inner} for y in x]
LIMIT = {limit}
part = Net
def build(): return Net()
make = {make}
"""
PLAIN = {
    "top": "",
    "attribute": "width = 1",
    "activation": "relu",
    "scale": "1",
    "double": "2",
    "member": "ReLU",
    "inner": "y + 1",
    "limit": "{'a', 'b', 'c'}",
    "make": "lambda: Net(), lambda: Base()",
}


def load_module(folder: Path, name: str, source: str) -> Any:
    """Write a module, and import it as a notebook does after an edit."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return module


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setitem(sys.modules, "own_network", sys)  # taken out again at the end

    def load_network(**changes: str) -> Any:
        return load_module(tmp_path, "own_network", NETWORK.format(**PLAIN | changes))

    return load_network


USES: list[Callable[[Any], object]] = [
    lambda module: module.Net(),
    lambda module: module.Net,
    lambda module: module.build,
    lambda module: module.make[0],
    lambda module: [functools.partial(module.build), 3],
    lambda module: torch.no_grad()(module.build),
    lambda module: functools.lru_cache(module.build),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "change",
    [
        {"attribute": "width = 2"},
        {"activation": "tanh"},
        {"scale": "2"},
        {"double": "3"},
        {"member": "Tanh"},
        {"inner": "y - 1"},
        {"limit": "{'a', 'b', 'd'}"},
        {"limit": "{'a', 'b', 'c', 'd'}"},
    ],
)
def test_a_change_of_a_base_class_or_of_a_helper_counts(
    load: Callable[..., Any], use: Callable[[Any], object], change: dict[str, str]
) -> None:
    before = hash_python_object(use(load()))
    assert hash_python_object(use(load())) == before
    assert hash_python_object(use(load(**change))) != before


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("top", ["# a comment", "\n\n\n", "OTHER = 3", "def other(): return 3", "import random"])
def test_comments_lines_and_what_an_object_does_not_use_do_not_count(
    load: Callable[..., Any], use: Callable[[Any], object], top: str
) -> None:
    before = hash_python_object(use(load()))
    assert hash_python_object(use(load(top=top))) == before
    assert hash_python_object(use(load(attribute=f"width = 1  # of\n{top if top[0] == '#' else ''}"))) == before


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
"""


@pytest.mark.parametrize("settings", ["args", "space", "Table", "fields"])
def test_of_settings_those_that_the_code_names_count(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_settings", sys)
    module = load_module(tmp_path, "own_settings", SETTINGS.replace("{settings}", settings))
    before = hash_python_object(module.Net)
    vars(module)[settings].resume = True
    module.device = torch.device("meta")
    assert hash_python_object(module.Net) == before
    vars(module)[settings].width = 9
    assert hash_python_object(module.Net) != before


def test_of_settings_that_another_function_gets_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_build", sys)
    source = "import argparse\nargs = argparse.Namespace(width=8)\ndef f(a): return a.width\ndef use(): return f(args)"
    module = load_module(tmp_path, "own_build", source)
    before = hash_python_object(module.use)
    module.args.width = 9
    assert hash_python_object(module.use) != before


def test_of_an_object_with_a_method_all_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_loss", sys)
    source = "class Loss:\n    def __call__(self, x): return x {sign} 1\nloss = Loss()\ndef use(x): return loss(x)"
    plus, minus = (hash_python_object(load_module(tmp_path, "own_loss", source.format(sign=sign)).use) for sign in "+-")
    assert plus != minus


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
def test_two_lambdas_of_a_line_are_different(load: Callable[..., Any], make: str) -> None:
    first, second = load(make=make).make
    assert hash_python_object(first) != hash_python_object(second)
    assert [*map(hash_python_object, load(make=make).make)] == [*map(hash_python_object, (first, second))]


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
    hashes = []
    for step, unused in ((1, ""), (1, " * 2"), (2, "")):
        for name in [name for name in sys.modules if name.startswith("own_pack")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "own_pack" / "helpers.py").write_text(HELPERS.format(unused=unused))
        (tmp_path / "own_pack" / "deeper.py").write_text(f"STEP = {step}\n\n")
        importlib.invalidate_caches()
        hashes.append(hash_python_object(typed(source)))
    assert hashes[0] == hashes[1] != hashes[2]


class WithSlots:
    __slots__ = ("by",)

    def __init__(self, by: object) -> None:
        self.by = by


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (lambda: pd.DataFrame({"a": [1, 0]}), lambda: pd.DataFrame({"a": [0, 1]})),
        (lambda: pd.Series(["a", "b"]), lambda: pd.Series(["a", "c"])),
        (lambda: np.array(["p1", "p2"], object), lambda: np.array(["p1", "p3"], object)),
        (lambda: {"c.png", "a.png", "b.png"}, lambda: {"a.png", "b.png"}),
        (lambda: WithSlots([1]), lambda: WithSlots([2])),
        (lambda: nn.ModuleDict({"a": nn.ReLU()}), lambda: nn.ModuleDict({"a": nn.Tanh()})),
    ],
)
def test_values_of_tables_sets_and_slots_count_and_are_the_same_in_another_process(
    part: Callable[[], Any], other: Callable[[], Any]
) -> None:
    assert hash_python_object(part()) == hash_python_object(part())
    assert hash_python_object(part()) != hash_python_object(other())


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(0),
        lambda: logging.getLogger("own"),
        threading.Lock,
        lambda: iter([1]),
        lambda: random.Random(0),
    ],
)
def test_what_changes_by_itself_does_not_count(make: Callable[[], Any]) -> None:
    held = [make() for _ in range(40)]  # at many addresses
    assert len({hash_python_object(scaled(value)) for value in held}) == 1


@pytest.mark.parametrize(
    "part",
    [
        lambda: pc.LabelledImages(
            np.zeros((2, 8, 8), np.uint8), class_names=["a"], patients=np.array(["p", "q"], object)
        ),
        lambda: nn.Sequential(nn.ReLU(), SingleValueSafeNorm()),
        lambda: make_standardising_layers,
    ],
)
def test_code_of_this_program_and_of_installed_packages_does_not_count(
    part: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hash_python_object(part())
    for kind, name in ((pc.LabelledImages, "__eq__"), (nn.ReLU, "forward"), (SingleValueSafeNorm, "forward")):
        monkeypatch.setattr(kind, name, lambda *given: None)
    monkeypatch.setattr(pc.LabelledImages, "__doc__", "Another text.")
    assert hash_python_object(part()) == before
