"""Figures as they leave a site whose policy does not tell exact ones.

An exact mean gives counts away: of a model whose loss is known for each label, the loss over a part is a count.
Rounding alone does not help: who may ask again sends a model that moves the figure to a border. Here

- a fifth of the patients, chosen by a secret of this site once for all, is in no figure. No number of questions tells
  more than the counts among the rest: what official statistics call a perturbation by cell key (Fraser and Wooton,
  UNECE 2005);
- one patient's loss counts up to a bound, and noise as large as the most that one patient can change goes on top. It is
  drawn from the secret and the question: the same question gets the same answer;
- of one patient at most four images are in a score (AUROC, average precision, balanced accuracy), and noise twice as
  large as the most that one patient can change goes on top: about the sampling error of so many images;
- a test score is rounded to a step that is no finer than what one image changes.
"""

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.system.files import write_atomically

FILE = "figures.key"
LEFT_OUT = 5
"""One of so many patients is in no figure."""
MOST_OF_ONE = 4
"""Images of one patient that count in a score."""
PATIENTS = 2
"""Noise on a score is as large as so many patients can change it."""
DIGITS = 4


class FigureSecret:
    """A site's secret for its figures, made when it is needed first: 256 bits from the operating system."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        path = folder / FILE
        if not path.exists():
            write_atomically(path, secrets.token_bytes(32), durable=durable, private=True)
        self._key = path.read_bytes()

    def left_out(self, patients: NDArray[np.str_]) -> NDArray[np.bool_]:
        """Which images ``(n,)`` are of patients that are in no figure."""
        every = sorted(set(patients.tolist()), key=lambda patient: self._drawn("patient", patient))
        return np.isin(patients, every[: math.ceil(len(every) / LEFT_OUT)])

    def noise(self, *question: str) -> float:
        """One draw of a standard normal for a question, the same for the same one."""
        return float(self.generator(*question).standard_normal())

    def generator(self, *about: str) -> np.random.Generator:
        """Random numbers that only this site can repeat."""
        return np.random.default_rng(int.from_bytes(self._drawn(*about)))

    def _drawn(self, *about: str) -> bytes:
        return hmac.digest(self._key, "\0".join(about).encode(), hashlib.sha256)


def by_patient(values: NDArray[np.float64], patients: NDArray[np.str_]) -> NDArray[np.float64]:
    """The mean of each patient's images: a patient with many weighs no more than another."""
    _, owners = np.unique(patients, return_inverse=True)
    return np.asarray(np.bincount(owners, values) / np.bincount(owners), np.float64)


def middle_of(losses: NDArray[np.float64], noise: float) -> float:
    """The loss of a patient near the middle, by so many patients as the noise says.

    The median itself can hang on one patient: models can be made that fail on exactly half of the others.
    """
    place = round((len(losses) - 1) / 2 + noise)
    return float(np.sort(losses)[min(max(place, 0), len(losses) - 1)])


def bounded(losses: NDArray[np.float64], middle: float, chance: float) -> tuple[NDArray[np.float64], float]:
    """Losses, cut to a bound, and that bound.

    It is twice the loss of guessing. Where some half of the patients have more, it is four times that, and so on: a
    broken model is seen as such, and one patient cannot move it far.

    Args:
        middle: Of :func:`middle_of`.
    """
    bound = 2 * chance
    while middle > bound and math.isfinite(middle):
        bound *= 4
    return np.minimum(losses, bound), bound


def step_for(count: int) -> float:
    """The step of a score of so many images: 1, 2 or 5 times a power of ten, no less than one image's part."""
    least = 1 / max(count, 1)
    power = 10.0 ** math.floor(math.log10(least))
    return min(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))


def on_steps(value: float | None, count: int) -> float | None:
    """A score between 0 and 1, on the steps that a count allows."""
    step = step_for(count)
    return None if value is None else min(max(round(round(value / step) * step, 12), 0.0), 1.0)


def of_each_few(patients: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Which images ``(n,)`` are among the first :data:`MOST_OF_ONE` of their patient."""
    order = np.argsort(patients, kind="stable")
    ordered = patients[order]
    first = np.searchsorted(ordered, ordered)
    kept = np.zeros(len(patients), np.bool_)
    kept[order] = np.arange(len(patients)) - first < MOST_OF_ONE
    return kept


def most_of_one(patients: NDArray[np.str_]) -> int:
    """The most images that one patient has."""
    return int(np.unique(patients, return_counts=True)[1].max(initial=1))


def noise_on_score(positives: int, negatives: int, images: int) -> float:
    """How large the noise is on an AUROC or a balanced accuracy of which one patient has so many images."""
    return PATIENTS * images / max(min(positives, negatives), 1)


def noise_on_precision(positives: int, images: int) -> float:
    """How large it is on an average precision, where an image before all others moves each of the precisions."""
    return PATIENTS * images * (1 + math.log(max(positives, 1))) / max(positives, 1)


def short(value: float | None) -> float | None:
    """A number of unknown range: three digits that count."""
    return None if value is None else float(f"{value:.3g}")


def share_of_one(counts: Sequence[tuple[int, int]]) -> float:
    """The most that one image changes a mean AUROC: that of each class moves by 1 / (its positives or negatives)."""
    return float(np.mean([1 / max(min(pair), 1) for pair in counts])) if counts else 0.0
