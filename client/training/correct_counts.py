"""How many images of its test part a site's network gets right, where the plan asks for it every round."""

from typing import TypedDict

from client.site.disclosure import told_count
from client.training.model_and_images import Work
from common.models.inference import label_matrix, scores_of


class TestCounts(TypedDict):
    """How many images of the site's test part there are, and how many the network puts into the right class."""

    test_images: int | None
    test_correct: int | None


NOT_TESTED = TestCounts(test_images=None, test_correct=None)


def counts_right_images(work: Work) -> bool:
    """Whether the experiment asks for that every round, and the site's policy lets it be told.

    That goes with exact figures only: of every model that is judged it leaves, and noise on each would average out.
    """
    policy = work.site.policy
    return work.plan.evaluation.test_each_round and policy.test_metrics and policy.exact_figures


def tally_of(work: Work) -> TestCounts:
    """Count them, unless the test part is of few patients."""
    site, test, network = work.site, work.site.test, work.network
    if not site.tells("test"):
        return NOT_TESTED
    labels = label_matrix(test, network.class_names).nan_to_num().numpy()
    known = labels.any(axis=1)
    if not known.any():
        return TestCounts(test_images=0, test_correct=0)
    scores = scores_of(network, work.seen("test"), work.plan.training.precision)
    right = scores.argmax(axis=1) == labels.argmax(axis=1)
    images, correct = (told_count(int(count), site.policy) for count in (known.sum(), (right & known).sum()))
    return TestCounts(test_images=images, test_correct=correct)
