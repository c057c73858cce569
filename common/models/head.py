"""A classifier's last layer as rows with names: the only part of a model that differs between sites."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import quoted


@dataclass(frozen=True, eq=False)
class Head:
    """One row per class; rows belong to names, never to positions.

    Attributes:
        class_names: Unique, in the order of the rows.
        weight: float32 ``(classes, features)``.
        bias: float32 ``(classes,)``.

    Raises:
        ValueError: If names repeat or arrays have another type or shape.
    """

    class_names: tuple[str, ...]
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        classes = len(self.class_names)
        if len(set(self.class_names)) != classes:
            raise ValueError(f"a head's class names must differ, got {quoted(self.class_names)}")
        if self.weight.dtype != np.float32 or self.bias.dtype != np.float32:
            raise ValueError(f"a head is float32, got weight {self.weight.dtype} and bias {self.bias.dtype}")
        if self.weight.ndim != 2 or len(self.weight) != classes or self.bias.shape != (classes,):
            expected = f"weight ({classes}, features) and bias ({classes},)"
            raise ValueError(f"expected {expected}, got {self.weight.shape} and {self.bias.shape}")

    @property
    def features(self) -> int:
        """Width of a row."""
        return int(self.weight.shape[1])

    def rows(self, names: Sequence[str]) -> "Head":
        """Return copies of the rows of ``names``, in that order.

        Raises:
            LookupError: If the head has no row of that name.
        """
        position = {name: row for row, name in enumerate(self.class_names)}
        missing = [name for name in names if name not in position]
        if missing:
            raise LookupError(f"no row for {quoted(missing)}; this head has {quoted(self.class_names)}")
        index = np.array([position[name] for name in names], dtype=np.intp)
        return Head(tuple(names), self.weight[index], self.bias[index])


def initial_head(class_names: Sequence[str], features: int, seed: int) -> Head:
    """Return a new head; a row depends on the seed and its own name only, so a site's rows equal the coordinator's.

    Values are uniform in +-1/sqrt(features), the distribution of :class:`torch.nn.Linear`.
    """
    rows = np.empty((len(class_names), features + 1), np.float32)  # weights and, last, the bias of a class
    for row, name in zip(rows, class_names, strict=True):
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        unit = np.random.default_rng(int.from_bytes(digest)).random(features + 1, dtype=np.float32)
        row[:] = (2 * unit - 1) / np.float32(np.sqrt(features))
    return Head(tuple(class_names), np.ascontiguousarray(rows[:, :-1]), rows[:, -1].copy())
