"""Test figures under masks, of which the coordinator opens the sum over a cohort and no other; and runs of rounds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyclinic.common.config import HospitalPlan
from polyclinic.common.metrics.score_histograms import SCORE_BINS
from polyclinic.common.wire.records import EvaluateReply, TrainRequest
from polyclinic.common.wire.secure_aggregation import TEST_ROUND, MaskedRequest
from polyclinic.strategies.privacy.secure_aggregation.coordinator import MaskedSumRequest, MaskingFailed, UnmaskedSum
from polyclinic.strategies.privacy.secure_aggregation.vectors import FIXED_POINT_ONE, UpdateVectorLayout
from tests.client.masked import FOUR, Hospitals, masked_plan, of_training, with_trunk
from tests.client.rounds import OWN, beginning, evaluate_request, evaluation, private_plan


def sum_of_test(here: Hospitals, members: Sequence[str], run: str = "run") -> UnmaskedSum:
    """The test of the first model and the sum of its counts, as the coordinator leads them."""
    of, rows = masked_plan("surgical"), dict[str, tuple[str, ...]]()
    for name in members:
        request = evaluate_request(here.train_request(of, name, run=run))
        reply = here.send(name, "evaluate", request, EvaluateReply)
        assert (reply.class_names, reply.histogram_classes, reply.validation_classes) == ((), (), ())
        rows[name] = reply.masked_classes
    classes = tuple(sorted({row for own in rows.values() for row in own}))
    layout = UpdateVectorLayout(trunk=0, norm=0, features=2 * SCORE_BINS - 1)
    return here.unmask(MaskedSumRequest(run, TEST_ROUND, rows, classes, layout, float(FIXED_POINT_ONE)))


def test_the_sum_counts_every_hospitals_test_images_and_a_class_of_two_hospitals_stays_masked(tmp_path: Path) -> None:
    names = dict.fromkeys(FOUR, ("a", "b")) | {"ash": ("a",), "birch": ("a",)}
    here = Hospitals(tmp_path, FOUR, class_names=names)
    opened = sum_of_test(here, FOUR)
    assert (dict(opened.rows), opened.closed) == ({"a": FOUR}, ("b",))
    counts = opened.vector.reshape(2, 2, SCORE_BINS).sum(axis=2)
    columns = [site.test.labels[:, site.test.class_names.index("a")] for site in here.sites.values()]
    labels = np.concatenate(columns)
    assert counts.tolist() == [[np.sum(labels == 1), np.sum(labels == 0)], [0, 0]]


@pytest.mark.parametrize("run", ["run", "another"])
def test_the_test_of_one_model_is_summed_among_the_same_hospitals_or_not_at_all(run: str, tmp_path: Path) -> None:
    """The difference of the two sums would be the counts of the hospital that is in one of them only."""
    here, names = Hospitals(tmp_path, (*FOUR, "silent")), (*FOUR, "silent")
    policy = here.sites["silent"].policy.model_copy(update={"score_histograms": False})
    here.change("silent", policy=policy)
    first = sum_of_test(here, names)
    assert first.survivors == FOUR  # without the hospital whose policy keeps its scores
    with pytest.raises(MaskingFailed):
        sum_of_test(here, FOUR[1:], run)
    assert sum_of_test(here, names).integers.tolist() == first.integers.tolist()


SIX = (*FOUR, "fir", "oak")
Course = tuple[tuple[tuple[str, ...], dict[str, type]], ...]
COURSE: Course = (
    (SIX[:-1], {}),  # oak comes late
    (SIX, {}),
    (SIX, {"ash": MaskedRequest, "birch": MaskedRequest}),
    (SIX, {}),
)
LOSING: Course = (COURSE[0], COURSE[2])


@pytest.mark.parametrize(
    ("level", "of", "course"),
    [
        ("masked", masked_plan(), COURSE),
        # Private hospitals accept noise that hides patients; it goes on before the masks.
        (
            "private",
            private_plan(masked_plan(), level="patient", noise_multiplier=2.0, secure_aggregation=True),
            LOSING,
        ),
    ],
    ids=["masked", "private"],
)
def test_a_masked_run_goes_to_its_end(level: str, of: HospitalPlan, course: Course, tmp_path: Path) -> None:
    here = Hospitals(tmp_path, SIX, policy={"level": level})
    for number, (members, lost) in enumerate(course, 1):

        def moved(
            request: TrainRequest, times: float = 0.95**number, counted: int = min(number - 1, 1)
        ) -> TrainRequest:
            return replace(with_trunk(request, times), counted=counted)

        opened = here.opened(of, members, number, change=of_training(moved), lost=lost)
        assert list(opened.survivors) == [name for name in members if name not in lost]
        assert np.abs(opened.vector).max() > 0
    assert here.refusals == []
    requested = evaluation(of, beginning(of, OWN), *[len(course)] * 3)
    assert None not in [here.send(name, "evaluate", requested, EvaluateReply) for name in SIX], here.refusals
