"""How many images show a class: out of losses, and out of the digits of a score.

The model of the first says the same of every image: what a loss then moves by is a count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from client.preview.attack.kinds.adversary import Adversary
from client.preview.attack.kinds.attempt import Attempt
from common.config import Plan
from common.data.base.image_set import ImageSet
from common.models.network import build
from common.models.state import ModelState, read_state
from common.wire.roll_call import UNKNOWN_COUNT

SURE = 30.0
TESTS = 4
STOPS = "`training_figures = false`"


@dataclass(frozen=True)
class Count:
    """A count that the site tells nobody: how many images of one part show a class."""

    part: str
    row: int
    truth: int


def untold(at: Adversary) -> list[Count]:
    """Counts of training and validation images by class that the policy does not tell."""
    site, found = at.site, []
    for part in ("train", "validation"):
        images: ImageSet = getattr(site, part)
        told = set(at.rows) - site.hides(part) if part == "train" and site.policy.label_counts else set()
        found += [
            Count(part, row, int((images.labels[:, images.class_names.index(name)] == 1).sum()))
            for row, name in enumerate(at.rows)
            if len(images) and name not in told
        ]
    return found


def _small(at: Adversary) -> Plan:
    batch = max(len(at.site.train), 1)
    return at.plan(
        {"architecture": "tiny_cnn", "image_size": 16}, {"optimizer": "sgd", "lr": 1e-30, "batch_size": batch}
    )


def constant(plan: Plan, rows: tuple[str, ...], row: int | None = None) -> ModelState:
    """A model of zeros that says the same of every image; of one class that it is there, surely."""
    model = read_state(build(plan.model, rows, 1))
    for values in (model.trunk, model.norm, model.head.weight, model.head.bias):
        values[:] = 0
    if row is not None:
        model.head.bias[row] = SURE
    return model


def from_losses(at: Adversary) -> Attempt:
    """Ask for the loss of a model that is sure of one class, for each class and part."""
    plan, sought = _small(at), untold(at)
    found = [_rightly(at, plan, count) for count in sought]
    return Attempt(
        "counts from losses",
        "How many images show a class, out of losses",
        "A model that says of every image that it shows one class has a loss that counts the images without it. One "
        "request a class and part, each in a run of its own.",
        sum(found),
        len(sought),
        "counts that the site does not tell",
        STOPS,
        said=at.said,
    )


def _rightly(at: Adversary, plan: Plan, count: Count) -> bool:
    guess = _guess(at, plan, count)
    return guess is not None and round(guess) == count.truth


def _guess(at: Adversary, plan: Plan, count: Count) -> float | None:
    """Return the count that a loss gives away, as the attacker works it out.

    It knows the classes that no validation figure is over: it could try how many they are.
    """
    model = constant(plan, at.rows, count.row)
    if count.part == "train":
        trained = at.trains(plan, model)
        loss, images = (None, 0) if trained is None else (trained.train_loss, trained.train_samples)
    else:
        judged = at.judges(plan, model)
        loss, images = (None if judged is None else judged.validation_loss), len(at.site.validation)
    if loss is None:
        return None
    one_class = plan.model.task == "multi_class"
    rows = len(at.rows) - (len(at.site.hides("validation")) if count.part == "validation" else 0)
    others = 0.0 if one_class else np.log(2) * (rows - 1)
    return images - (loss * (1 if one_class else rows) - others) * images / SURE


def from_digits(at: Adversary) -> Attempt:
    """Look which pair of counts the digits of scores allow, where counts are told rounded."""
    step, test, left = at.site.policy.round_counts_to, at.site.test, dict[str, set[tuple[int, int]]]()
    for seed in range(TESTS if step > 1 else 0):
        for name, fits in _fitting_by_class(at, seed, step):
            left[name] = left.get(name, fits) & fits
    found = 0
    for name, fits in left.items():
        column = test.labels[:, test.class_names.index(name)]
        found += fits == {(int((column == 1).sum()), int((column == 0).sum()))}
    return Attempt(
        "counts from digits",
        "How many test images show a class, out of the digits of its scores",
        "AUROC and balanced accuracy are whole numbers over twice the product of both counts: of the pairs that a "
        f"rounded pair allows, few have the digits that were told. {TESTS} models, each in a run of its own."
        + ("" if step > 1 else " Here counts of large classes are told as they are."),
        found,
        len(set(at.rows) - at.site.hides("test")) if step > 1 and len(test) else 0,
        "counts that `round_counts_to` rounds",
        "`test_metrics = false`",
        said=at.said,
    )


def _fitting_by_class(at: Adversary, seed: int, step: int) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    """Train and test one model; of each class the pairs of counts that its scores allow."""
    plan, run = _small(at), at.new_run()
    model = read_state(build(plan.model, at.rows, seed))
    at.trains(plan, model, run)
    reply = at.judges(plan, model, run, test=True)
    for row, name in enumerate(() if reply is None else reply.class_names):
        assert reply is not None
        positives, negatives, auroc = reply.positives[row], reply.negatives[row], reply.auroc[row]
        if positives != UNKNOWN_COUNT and not np.isnan(auroc):
            yield name, set(_fitting((auroc, reply.balanced_accuracy[row]), positives, negatives, step))


def _fitting(scores: tuple[float, float], positives: int, negatives: int, step: int) -> Iterator[tuple[int, int]]:
    """The pairs of counts whose scores can have these digits: AUROC and balanced accuracy are whole over 2 p n."""
    for p in range(positives, positives + step):
        for n in range(negatives, negatives + step):
            told = [2 * p * n * Fraction(score) for score in scores]
            if p * n and all(abs(one - round(one)) < Fraction(1, 10**6) for one in told):
                yield p, n
