"""How scores are spread: told where the experiment asks and the hospital allows it, and of small classes never."""

from pathlib import Path

import numpy as np
import pytest

from client.site.policy import Policy
from client.training.score_release import NOTHING_TOLD, told_scores
from common.metrics.score_histograms import BINS, score_histogram
from common.wire.codec import decode
from common.wire.records import EvaluateReply
from tests.federations import Traffic, federation, of_type, overheard

NAMES = ("Mass", "Edema")
SCORES = np.linspace(0, 1, 30)[:, None] * [1, 0.5]
LABELS = np.array([[1] * 12 + [0] * 15 + [np.nan] * 3, [1] * 4 + [0] * 26], np.float32).T


def test_a_hospital_that_says_nothing_of_it_tells_nothing() -> None:
    assert told_scores(Policy(), SCORES, LABELS, NAMES) == NOTHING_TOLD


def test_a_hidden_class_is_left_out_whole() -> None:
    policy = Policy(score_histograms=True)
    for hidden, told in (((), NAMES), (("Edema",), ("Mass",)), (NAMES, ())):
        assert told_scores(policy, SCORES, LABELS, NAMES, hidden)["told_classes"] == told


def test_what_is_told_are_the_counts_by_bin_one_class_after_the_other() -> None:
    told = told_scores(Policy(score_histograms=True, smallest_count=1), SCORES, LABELS, NAMES)
    for row in range(2):
        expected, part = score_histogram(SCORES[:, row], LABELS[:, row]), slice(row * BINS, (row + 1) * BINS)
        assert list(told["positive_scores"][part]) == expected.positives.tolist()
        assert list(told["negative_scores"][part]) == expected.negatives.tolist()
    assert len(told["positive_scores"]) == len(told["negative_scores"]) == 2 * BINS


def ends(traffic: Traffic) -> list[EvaluateReply]:
    """What the sites answered to the last evaluation and to the test after it."""
    return [decode(content, EvaluateReply) for content in of_type(traffic.up, "evaluate")]


def test_pooled_values_of_a_run_enclose_those_of_the_images_that_its_sites_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = overheard(monkeypatch)
    test = federation(tmp_path)["test"]
    told = [(reply.class_names, reply.told_classes) for reply in ends(traffic)]
    assert told[:3] == [((), ())] * 3
    assert all(tested and tested == spread for tested, spread in told[3:])
    for name, exact in test["per_class"].items():
        pooled = test["pooled"]["per_class"][name]
        for measure in ("auroc", "average_precision"):
            assert pooled[measure]["at_least"] - 1e-9 <= exact[measure] <= pooled[measure]["at_most"] + 1e-9
        assert pooled["balanced_accuracy"] == pytest.approx(exact["balanced_accuracy"])
        assert pooled["positives"] == len(pooled["sites"]) * exact["positives"]
    assert test["pooled"]["mean_auroc"]["value"] == pytest.approx(test["mean_auroc"], abs=0.005)


def test_a_run_that_does_not_ask_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = overheard(monkeypatch)
    test = federation(tmp_path, "evaluation.pooled=false")["test"]
    assert [reply.told_classes for reply in ends(traffic)] == [()] * 6
    assert test["pooled"] is None
