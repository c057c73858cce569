"""Whether a model followed from the last one of its run, as training makes it: figures leave only of those.

Measured is the distance from the last model that the site trained from, part by part (trunk, batch normalisation, own
head rows), beside the longest such distance so far. :data:`STEPS` times as long is allowed for each round that lies
between. Only what the coordinator sent is compared: a bound that follows from the own training would say how far
that went, which masks and noise hide.

What it does not stop: the first model of a run follows from nothing, and the second one may be anywhere. It is against
mistakes more than against an attacker; docs/privacy.md says what is left.

A model is kept as a sketch: 512 sums of its numbers with random signs, drawn from the site's secret. The distance
between two sketches is that between the models to within some percent (count sketch, Charikar et al., ICALP 2002).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from client.site.told_figures import FigureSecret
from common.system.files import write_atomically
from common.wire.records import Groups

FILE = "grown.safetensors"
STEPS = 10.0
BUCKETS = 512
SLIP = 1e-6
"""Of a model's length: the same model, read again, is as far away as this at most."""
Sketches = Mapping[str, NDArray[np.float64]]
NEVER = 0


@dataclass(frozen=True)
class Grown:
    """What a site knows of the models of one run.

    Attributes:
        round: Of the last model that followed.
        last: Its parts, as sketches.
        steps: Part -> the longest distance between two models in a row, by round; none before the second.
        trained: Whether the site has trained.
    """

    round: int
    last: Sketches
    steps: Mapping[str, float]
    trained: bool = False

    def distances(self, model: Sketches, server_round: int) -> dict[str, float]:
        """How far each part of a model is from the last one, by round; 0 for one that was only read again."""
        rounds, found = max(abs(server_round - self.round), 1), dict[str, float]()
        for name, sketch in model.items():
            if name in self.last:
                distance = float(np.linalg.norm(sketch - self.last[name]))
                found[name] = distance / rounds if distance > SLIP * np.linalg.norm(self.last[name]) else 0.0
        return found

    def follows(self, model: Sketches, server_round: int) -> bool:
        """Whether a model is near enough to the last one."""
        found = self.distances(model, server_round).items()
        return all(distance <= STEPS * self.steps.get(name, np.inf) for name, distance in found)

    def then(self, model: Sketches, server_round: int) -> "Grown":
        """After a model that followed, from which training starts."""
        found = self.distances(model, server_round).items()
        longest = {name: max(distance, self.steps.get(name, 0.0)) for name, distance in found if distance}
        return replace(self, round=server_round, last={**self.last, **model}, steps={**self.steps, **longest})


class GrownModels:
    """The models of one run as a site saw them grow, on its disk beside its memory of the run."""

    def __init__(self, folder: Path, secret: FigureSecret, own: tuple[str, ...], *, durable: bool = True) -> None:
        self._path, self._secret, self._own, self._durable = folder / FILE, secret, own, durable

    def follows(self, model: Groups, server_round: int, *, trains: bool) -> bool:
        """Whether a received model is the run's first or follows from the last; a later one is compared with it then.

        Args:
            trains: Whether training starts from it; a model that is only judged is no step of the run.
        """
        found, known = self._sketches(model), self._known()
        if known is None:
            self._keep(Grown(server_round, found, {}))
            return True
        near = known.follows(found, server_round)
        if near and trains:
            self._keep(known.then(found, server_round))
        return near

    def trained_here(self) -> bool:
        """Whether this site has trained in the run."""
        known = self._known()
        return known is not None and known.trained

    def note_trained(self) -> None:
        """Note that this site trained."""
        known = self._known()
        if known is not None and not known.trained:
            self._keep(replace(known, trained=True))

    def _sketches(self, model: Groups) -> Sketches:
        return {name: self._sketch(name, part) for name, part in _parts(model, self._own).items()}

    def _sketch(self, name: str, part: NDArray[np.float32]) -> NDArray[np.float64]:
        generator = self._secret.generator("sketch", name)
        buckets = generator.integers(0, BUCKETS, len(part), np.int16)
        signs = generator.integers(0, 2, len(part), np.int8) * 2 - 1
        return np.asarray(np.bincount(buckets, part * signs, BUCKETS), np.float64)

    def _known(self) -> Grown | None:
        try:
            arrays = load(self._path.read_bytes())
        except FileNotFoundError:
            return None
        last = {name.removeprefix("last/"): array for name, array in arrays.items() if name.startswith("last/")}
        steps = {name.removeprefix("step/"): float(a[0]) for name, a in arrays.items() if name.startswith("step/")}
        return Grown(int(arrays["round"][0]), last, steps, bool(arrays.get("trained", np.zeros(1))[0]))

    def _keep(self, known: Grown) -> None:
        arrays = {f"last/{name}": sketch for name, sketch in known.last.items()}
        facts = {"round": np.array([known.round]), "trained": np.array([known.trained])}
        arrays |= {f"step/{name}": np.array([length]) for name, length in known.steps.items()}
        write_atomically(self._path, save({**arrays, **facts}), durable=self._durable)


def _parts(groups: Groups, own: tuple[str, ...]) -> dict[str, NDArray[np.float32]]:
    """Flat parts of a model or of a change; of the head the rows of own classes, in the site's order."""
    parts = {"trunk": groups.trunk, "norm": groups.norm}
    if groups.head is not None:
        head = groups.head.rows([name for name in own if name in groups.head.class_names])
        parts["head"] = np.concatenate([head.weight.ravel(), head.bias])
    return {name: part for name, part in parts.items() if part is not None and part.size}
