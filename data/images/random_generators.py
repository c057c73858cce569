"""Find and seed the random generators that a user's data set uses.

Transforms of MONAI and albumentations have private generators, which data loaders usually seed for each worker. Here
they are seeded for each item, so that an item depends on the run's seed only. To find the generators, the search starts
at the data set and follows attributes, containers, closures and global names of functions.
"""

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
MAX_VISITED_OBJECTS = 100_000
"""Maximum number of objects that the search for generators visits."""
MAX_SEARCHED_ENTRIES = 1_000
"""Longer lists and dictionaries are not searched, because they hold data items, not transforms."""
_LEAF_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    np.ndarray,
    np.generic,
    torch.Tensor,
    types.ModuleType,
)


class RandomGenerators:
    """Seeds the random generators of a data set, and the global generators of Python, NumPy and torch.

    Args:
        dataset: The data set, with its transforms.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset_generators = list(find_random_generators(dataset))

    @contextmanager
    def use_seed(self, seed: int) -> Iterator[None]:
        """Seed all generators inside the ``with`` block; the global generators are restored after it.

        Args:
            seed: From 0 to 2**63 - 1. The n-th generator of the data set gets the seed plus n.
        """
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        for number, generator in enumerate(self._dataset_generators, start=1):
            _seed_generator(generator, seed + number)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def _seed_generator(generator: Generator, seed: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        case np.random.RandomState():
            generator.seed(seed % 2**32)
        case _:
            generator.seed(seed)


def find_random_generators(root: Any) -> Iterator[Generator]:
    """Yield each random generator that can be reached from an object, once, in a reproducible order.

    The global generators of Python, NumPy and torch are left out.
    """
    global_generators = (random._inst, np.random.mtrand._rand, torch.default_generator)
    visited = {id(generator): generator for generator in global_generators}
    waiting = deque([root])
    while waiting and len(visited) < MAX_VISITED_OBJECTS:
        value = waiting.popleft()
        if id(value) in visited or isinstance(value, _LEAF_TYPES):
            continue
        visited[id(value)] = value  # the reference keeps the object alive, so that its id is not reused
        if isinstance(value, Generator):
            yield value
        else:
            waiting.extend(_list_reachable_values(value))


def _list_reachable_values(value: Any) -> list[Any]:
    """Return the values to which an object refers: entries, attributes, and values that its code uses."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.values() if isinstance(value, Mapping) else value
        return list(entries) if len(value) <= MAX_SEARCHED_ENTRIES else []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _list_values_of_function(value)
    if isinstance(value, type):
        return []
    attributes = getattr(value, "__dict__", {})
    values = [attributes[name] for name in sorted(attributes)] if isinstance(attributes, dict) else []
    for kind in type(value).__mro__:
        parts = vars(kind)
        values += [getattr(value, name, None) for name in _list_slots(parts)]
        values += [part for part in parts.values() if isinstance(part, Generator | types.FunctionType)]
    return values


def _list_slots(parts: Mapping[str, Any]) -> list[str]:
    slots = parts.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _list_values_of_function(function: types.FunctionType) -> list[Any]:
    """Return values that the code of a function uses: closure, default arguments, and global values of its module.

    Global values are left out for functions of installed libraries, because they lead to everything that is imported.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if "site-packages" in function.__code__.co_filename or "dist-packages" in function.__code__.co_filename:
        return [*cells, *defaults]
    named = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    return [*cells, *defaults, *named]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
