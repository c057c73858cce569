"""The mean AUROC of a round's validation: few images are compared in pairs, many are sorted, and the bits are equal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polyclinic.common.metrics import auroc
from polyclinic.common.metrics.auroc import compute_mean_auroc

SCORES = st.sampled_from([0.0, 0.1, 0.25, 0.25000003, 0.7, 1.0])
LABELS = st.sampled_from([0.0, 1.0, float("nan")])


def test_tied_and_unknown_images_by_hand() -> None:
    # Class 0: positives .9 and .4, negatives .4 and .1: three wins and one tie of four pairs.
    # Class 1: the known images are one positive .2 and one negative .8: no win of one pair. Class 2 has no negative.
    scores = np.array([[0.9, 0.2, 0.5], [0.4, 0.8, 0.6], [0.4, 0.9, 0.7], [0.1, 0.9, 0.8]], np.float32)
    unknown = np.nan
    labels = np.array([[1, 1, 1], [1, 0, 1], [0, unknown, unknown], [0, unknown, 1]], np.float32)
    assert compute_mean_auroc(scores, labels) == (3.5 / 4 + 0.0) / 2


@given(st.data())
def test_pairs_and_sorting_give_the_same_bits(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(0, 12), st.integers(1, 4)))
    scores = data.draw(arrays(np.float32, shape, elements=SCORES.map(np.float32)))
    labels = data.draw(arrays(np.float32, shape, elements=LABELS.map(np.float32)))
    by_pairs = compute_mean_auroc(scores, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auroc, "MAX_PAIR_COMPARISONS", -1)
        by_sorting = compute_mean_auroc(scores, labels)
    assert by_pairs == by_sorting
