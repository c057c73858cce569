"""What leaves a hospital, field by field, in plain words: for ``flwr-client preview`` and ``docs/what-leaves.md``.

A test holds that every field of every record that a site sends stands here, and that the page says the same.
"""

from collections.abc import Mapping

from common.wire.benefit import BenefitReply
from common.wire.codec import field_names
from common.wire.records import EvaluateReply, TrainReply
from common.wire.roll_call import RefusalNoted, RollCallAnswer
from common.wire.secure_aggregation import KeysAnswer, MaskedAnswer, RevealAnswer, SharesAnswer
from strategies.registry import statistics_sent

SENT = (
    RollCallAnswer,
    TrainReply,
    EvaluateReply,
    BenefitReply,
    RefusalNoted,
    KeysAnswer,
    SharesAnswer,
    MaskedAnswer,
    RevealAnswer,
)
"""The records that a site sends; besides, errors: a reason in words."""

OF_EACH = ("run", "round", "site")
"""Fields of each record, which the page explains once."""

_RUN = "the run's identifier, as the coordinator gave it"
_SITE = "this site's name"
_ROUND = "the round's number, as the coordinator gave it"
_TRAIN_SAMPLES = (
    "how many training images there are (`round_counts_to`), without those that show hidden classes alone where these "
    "are left out"
)
_VALIDATION_LOSS = "the loss of the received model on this site's validation images, exact (`training_figures`)"
_VALIDATION_AUROC = "its AUROC on them, mean over this site's classes, exact (`training_figures`)"
_TEST_IMAGES = "how many test images there are, where the experiment counts right ones each round (`test_metrics`)"
_TEST_CORRECT = "how many of them the model puts into the right class (`test_metrics`)"

MEANING: Mapping[str, Mapping[str, str]] = {
    "RollCallAnswer": {
        "run": _RUN,
        "site": _SITE,
        "names": "the classes that this site annotates, in its own words",
        "class_names": "the classes that this site annotates, in the federation's words",
        "train_samples": _TRAIN_SAMPLES,
        "validation_samples": "how many validation images there are; -1 where they are of few patients "
        "(`smallest_count`)",
        "patients": "how many patients the training images are of (`round_counts_to`)",
        "layout": "a hash of the network's structure: that both sides build the same one",
        "version": "the release of this program",
        "positives": "how many training images show each class; only where the method asks and `label_counts` allows "
        "it, -1 for a class kept back by `smallest_count`",
        "negatives": "how many training images do not show each class; under the rules of `positives`",
        "smallest_count": "this site's `smallest_count`",
        "holds_frozen": "whether the frozen part of the plan's model is on this site's disk, so that it need not be "
        "sent",
    },
    "TrainReply": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "train_samples": _TRAIN_SAMPLES,
        "train_loss": "the mean loss on the training images in the last epoch (`training_figures`); not in a run with "
        "noise, like every loss and test result (`metrics_outside_privacy`)",
        "validation_loss": _VALIDATION_LOSS,
        "validation_auroc": _VALIDATION_AUROC,
        "seconds": "how long the round took; 0 in a run with privacy and under secure aggregation",
        "update": "how training changed the numbers of the network: `trunk`, `norm` (with means and variances of "
        "features) and `head` (a row a class), as far as the method averages them and `parts` allows it",
        "epochs": "how many times it went over the training images",
        "statistics": "the method's statistics, by name; see below",
        "test_images": _TEST_IMAGES,
        "test_correct": _TEST_CORRECT,
        "epsilon": "what the run has cost this site so far, in a run with privacy",
        "arithmetic": "the format of numbers and memory, such as `float32, channels_last`, and the number of GPUs "
        "where there are several",
    },
    "EvaluateReply": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "validation_loss": _VALIDATION_LOSS,
        "validation_auroc": _VALIDATION_AUROC,
        "class_names": "the classes that were tested; none unless the run ends with this model (`test_metrics`)",
        "auroc": "the exact AUROC of each class on the test images",
        "average_precision": "the exact average precision of each class on the test images",
        "balanced_accuracy": "the exact balanced accuracy of each class on the test images",
        "positives": "how many test images show each class; -1, and no figure, for one kept back by `smallest_count`",
        "negatives": "how many test images do not show each class; -1 under the same rule",
        "model_sha256": "a hash of the network that was tested",
        "test_images": _TEST_IMAGES,
        "test_correct": _TEST_CORRECT,
        "told_classes": "the classes of the two histograms, where the experiment asks and `score_histograms` allows "
        "it; none kept back by `smallest_count`",
        "positive_scores": "for each of `told_classes` the scores of test images that show it, in 1,024 bins",
        "negative_scores": "the same of test images that do not",
        "validation_classes": "like `told_classes`, for choosing thresholds; `training_figures` must allow it, too",
        "validation_positive_scores": "like `positive_scores`, of the validation images",
        "validation_negative_scores": "like `negative_scores`, of the validation images",
        "metric_names": "metrics of plug-ins, where the experiment asks for them and `metrics` allows them",
        "metric_values": "what they say of each class, on the test images; nothing of a class kept back by "
        "`smallest_count`",
        "masked_classes": "under secure aggregation: the classes whose two histograms of test images leave in a sum "
        "over sites alone; under the rules of `told_classes`",
    },
    "BenefitReply": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "class_names": "where the experiment asks for `evaluation.alone`: the classes on which four models were "
        "compared (trained here alone, federated, that one fine-tuned here, the first two together); none kept back "
        "by `smallest_count`, and none without `test_metrics`",
        "auroc": "the exact AUROC of each model and class on the test images",
        "mean": "the mean of these AUROCs for each model",
        "mean_low": "where the 95 % interval of each mean begins",
        "mean_high": "where it ends",
        "gain": "how much the mean of each other model is above that of the model trained here alone",
        "gain_low": "where the 95 % interval of each such difference begins",
        "gain_high": "where it ends",
        "over_patients": "whether the data says which images are of one patient",
    },
    "RefusalNoted": {
        "run": _RUN,
        "site": _SITE,
    },
    "KeysAnswer": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "statement": "under secure aggregation, for the other sites too: two public keys made for this round, the "
        "classes whose head rows this site sends, `rows_alone`, its divisor, `smallest_cohort`, among whom it masks, "
        "whose sum it opened before, and hashes of what it was asked",
        "signature": "of that statement, by the key that this site is admitted with",
        "identity": "the public half of that key",
    },
    "SharesAnswer": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "recipients": "the other sites of the round",
        "letters": "a letter to each, which only that site can open: its shares of this round's secrets",
    },
    "MaskedAnswer": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "vector": "how training changed the numbers of the network, or the counts of test scores, under masks: random "
        "numbers to anyone who does not have those of all sites of the round",
    },
    "RevealAnswer": {
        "run": _RUN,
        "round": _ROUND,
        "site": _SITE,
        "owners": "sites whose masked updates arrived",
        "segments": "of each, which part of its own masks the next share is of",
        "shares": "this site's shares of those masks",
        "gone": "sites whose masked updates did not arrive",
        "key_shares": "this site's shares of their keys; of no site both",
    },
}

STATISTICS: Mapping[str, str] = statistics_sent()


def meaning(record: str, field: str) -> str:
    """What a field is; of an array, or of one of a method's statistics, what its record's field is."""
    name, _, rest = field.partition("/")
    if name == "statistics" and rest.removesuffix("/shape") in STATISTICS:
        return STATISTICS[rest.removesuffix("/shape")]
    return MEANING[record].get(name.partition(".")[0], "how the program packs its records")


def fields_in_words() -> str:
    """The page's lists, in Markdown; what each record has stands above them."""
    lines: list[str] = []
    for record in SENT:
        name = record.__name__
        lines += [f"### {name}", ""]
        own = [field for field in field_names(record) if field not in OF_EACH]
        lines += [f"- `{field}`: {MEANING[name][field]}" for field in own] or [
            "Nothing else: the site has noted a refusal."
        ]
        lines.append("")
    lines += ["### Statistics", ""]
    lines += [f"- `{name}`: {text}" for name, text in STATISTICS.items()]
    return "\n".join(lines) + "\n"
