"""What one hospital may state beside its update: at the roll call, and in replies that never count."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from polyclinic.client import app
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import evaluate_with_privacy_layers, train_with_privacy_layers
from polyclinic.client.training.secure_aggregation import HeldUpdateStore
from polyclinic.common.errors import BadInput, Fault
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from tests.federations import needs_of

LIAR = "site-4"
HONEST = ("site-1", "site-2", "site-3")

Answered = Callable[[RollCallAnswer], RollCallAnswer]
Replied = Callable[[TrainReply], TrainReply]
Judged = Callable[[EvaluateReply], EvaluateReply]


def lists_of_classes(liar: str = LIAR, digits: str = "0123456789") -> str:
    """The partition: of three honest sites each annotates seven digits; the liar annotates ``digits``."""
    of_honest = [digits[:7], digits[3:], digits[:3] + digits[6:]]
    lists = dict(zip(HONEST, of_honest, strict=True)) | {liar: digits}
    table = ", ".join(f'"{site}" = {list(classes)}' for site, classes in lists.items())
    return f'partition={{kind = "class_lists", lists = {{{table}}}}}'.replace("'", '"')


def plan(method: str, rounds: int) -> tuple[str, ...]:
    """The overrides of a run of this method with three honest sites and a liar, any of which may be missing."""
    needs = tuple(need for need in needs_of(method) if not need.startswith("partition."))
    own = (f"run.method={method}", f"run.rounds={rounds}", "participation.min_sites=2")
    return (*own, lists_of_classes(), *needs)


def count(images: int, share: float) -> Answered:
    """Claim this many images; in counts of labels, this share of them shows every class."""

    def claim(answer: RollCallAnswer) -> RollCallAnswer:
        shown = int(images * share)
        return replace(
            answer,
            train_samples=images,
            patients=min(answer.patients, images),
            positives=(shown,) * len(answer.positives),
            negatives=(images - shown,) * len(answer.negatives),
        )

    return claim


def times(factor: int, share: float) -> Answered:
    """Claim ``factor`` times the true number of images; this share of them shows every class."""
    return lambda answer: count(factor * answer.train_samples, share)(answer)


CLAIMS: Mapping[str, Answered] = {
    "a billion images, all positive": count(10**9, 1.0),
    "a billion images, all negative": count(10**9, 0.0),
    "ninety times its images, all positive": times(90, 1.0),
    "ninety times its images, all negative": times(90, 0.0),
    "its images, all positive": times(1, 1.0),
    "one image": count(1, 1.0),
    "the truth": lambda answer: answer,
}


def with_every_statistic(value: float) -> Replied:
    """State this number in every statistic."""

    def lie(reply: TrainReply) -> TrainReply:
        statistics = {name: np.full_like(array, value) for name, array in reply.statistics.items()}
        return replace(reply, statistics=statistics)

    return lie


def with_nan_trunk(reply: TrainReply) -> TrainReply:
    assert reply.update.trunk is not None
    return replace(reply, update=replace(reply.update, trunk=np.full_like(reply.update.trunk, np.nan)))


def with_other_image_count(reply: TrainReply) -> TrainReply:
    return replace(reply, train_samples=reply.train_samples + 1)


def with_foreign_statistic(reply: TrainReply) -> TrainReply:
    return replace(reply, statistics={**reply.statistics, "more": np.zeros(1, np.float32)})


def with_error(reply: TrainReply) -> TrainReply:
    raise BadInput([Fault("training", "diverged.")])


def with_claim(reply: TrainReply) -> TrainReply:
    """Stay with a claim of ninety times the images, so that the reply counts."""
    return replace(reply, train_samples=90 * reply.train_samples)


def with_perfect_figures(reply: EvaluateReply) -> EvaluateReply:
    """Call every model perfect, in validation and in every class of the test."""
    ones = (1.0,) * len(reply.class_names)
    perfect = replace(reply, auroc=ones, average_precision=ones, balanced_accuracy=ones)
    return replace(perfect, validation_loss=0.0, validation_auroc=1.0)


REFUSED: Mapping[str, Replied] = {
    "mismatch": with_other_image_count,
    "nan": with_nan_trunk,
    "foreign statistic": with_foreign_statistic,
    "error": with_error,
}
"""Changes by which a reply does not count."""


@dataclass(frozen=True)
class Lie:
    """A liar's answer to the roll call, and its replies.

    Attributes:
        answer: Changes its answer to the roll call; None keeps it away from the run.
        reply: Changes its replies.
        judge: Changes its replies to evaluation and test.
        counted: Rounds in which its replies are as it trained them.
    """

    answer: Answered | None
    reply: Replied = with_other_image_count
    judge: Judged | None = None
    counted: frozenset[int] = frozenset()


NEVER_THERE = Lie(None)


@contextmanager
def lying(lie: Lie, liar: str = LIAR) -> Iterator[None]:
    """Let one simulated site lie within the context."""
    honest = app.answer_roll_call

    def answer(site: Site, call: RollCall) -> RollCallAnswer:
        if site.name != liar:
            return honest(site, call)
        if lie.answer is None:
            raise BadInput([Fault("site", "is not there.")])
        return lie.answer(honest(site, call))

    def train(site: Site, request: TrainRequest, masks: HeldUpdateStore) -> TrainReply:
        reply = train_with_privacy_layers(site, request, masks)
        return reply if site.name != liar or request.round in lie.counted else lie.reply(reply)

    def evaluate(site: Site, request: EvaluateRequest, masks: HeldUpdateStore) -> EvaluateReply:
        reply = evaluate_with_privacy_layers(site, request, masks)
        return reply if site.name != liar or lie.judge is None else lie.judge(reply)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "answer_roll_call", answer)
        patched.setattr(app, "evaluate_with_privacy_layers", evaluate)
        patched.setattr(app, "train_with_privacy_layers", train)
        yield
