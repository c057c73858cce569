"""Which attack looks at each field that can leave, or why the field says nothing of images.

A test holds this list against every record that a site sends and every statistic that a method declares: a new field
needs an attack, or a reason in words, before it can be merged.
"""

from collections.abc import Mapping

IMPRINT, INVERSION = "imprint", "gradient inversion"
MATCHED, LIRA = "membership: matched filter", "membership: LiRA"
LOSSES, DIGITS, HASHES = "counts from losses", "counts from digits", "counts from hashes"
ROWS, TRUNK = "counts from head rows", "counts from the trunk"
FAILURES, PERSONS, BUDGET = "models that fail", "single persons", "round the budget"
ATTACKS = (IMPRINT, INVERSION, MATCHED, LIRA, LOSSES, DIGITS, HASHES, ROWS, TRUNK, FAILURES, PERSONS, BUDGET)

_GIVEN = "the coordinator's own words, given back"
_KEYS = "of secure aggregation: random numbers, or keys made for one round; tests/client/test_masked_attacks.py"
_DECLARED = "what the hospital declares about itself, before any image is looked at"
_TOLD_COUNT = (
    "a count that the policy tells as it is, under smallest_count and round_counts_to; images that are left out of "
    "training are not in it"
)
_COMPARED = "not tried by itself: of test images, exact like the AUROC of the test; three of the models never leave"

BY_FIELD: Mapping[str, Mapping[str, tuple[str, ...] | str]] = {
    "RollCallAnswer": {
        "run": _GIVEN,
        "site": _DECLARED,
        "names": _DECLARED,
        "class_names": _DECLARED,
        "train_samples": _TOLD_COUNT,
        "validation_samples": _TOLD_COUNT,
        "patients": _TOLD_COUNT,
        "layout": "a hash of the plan's network",
        "version": _DECLARED,
        "positives": _TOLD_COUNT,
        "negatives": _TOLD_COUNT,
        "smallest_count": _DECLARED,
        "holds_frozen": "about a file of the coordinator's, not about images",
    },
    "TrainReply": {
        "run": _GIVEN,
        "round": _GIVEN,
        "site": _DECLARED,
        "train_samples": _TOLD_COUNT,
        "train_loss": (LOSSES,),
        "validation_loss": (LOSSES, FAILURES),
        "validation_auroc": (BUDGET,),
        "seconds": "depends on the number of images, which is told, and on the machine; 0 in a run with privacy",
        "update": (IMPRINT, INVERSION, MATCHED, LIRA, ROWS, TRUNK, PERSONS),
        "epochs": "the plan's, or how many epochs a loss took to settle: a validation loss where such figures leave",
        "arithmetic": "says something of the machine, and nothing of the images",
        "statistics": "by name, below",
        "test_images": _TOLD_COUNT,
        "test_correct": (FAILURES,),
        "epsilon": "follows from the plan and train_samples",
    },
    "EvaluateReply": {
        "run": _GIVEN,
        "round": _GIVEN,
        "site": _DECLARED,
        "validation_loss": (LOSSES, FAILURES, BUDGET),
        "validation_auroc": (BUDGET,),
        "class_names": _DECLARED,
        "auroc": (DIGITS, FAILURES, PERSONS, BUDGET),
        "average_precision": "not tried by itself: exact like the AUROC beside it, and of the same scores",
        "balanced_accuracy": "not tried by itself: exact like the AUROC beside it, and of the same scores",
        "positives": (DIGITS,),
        "negatives": (DIGITS,),
        "model_sha256": (HASHES,),
        "test_images": _TOLD_COUNT,
        "test_correct": (FAILURES,),
        "told_classes": _DECLARED,
        "positive_scores": "counts by score that score_histograms allows: who allows them tells more than a count",
        "negative_scores": "counts by score that score_histograms allows: who allows them tells more than a count",
        "validation_classes": _DECLARED,
        "validation_positive_scores": "counts by score that score_histograms allows",
        "validation_negative_scores": "counts by score that score_histograms allows",
        "metric_names": _GIVEN,
        "metric_values": "of a plug-in that the hospital has read and listed",
        "masked_classes": _DECLARED,
    },
    "BenefitReply": {
        "run": _GIVEN,
        "round": _GIVEN,
        "site": _DECLARED,
        "class_names": (FAILURES,),
        "auroc": _COMPARED,
        "mean": _COMPARED,
        "mean_low": _COMPARED,
        "mean_high": _COMPARED,
        "gain": _COMPARED,
        "gain_low": _COMPARED,
        "gain_high": _COMPARED,
        "over_patients": _DECLARED,
    },
    "RefusalNoted": {"run": _GIVEN, "site": _DECLARED},
    "KeysAnswer": {
        "run": _GIVEN,
        "round": _GIVEN,
        "site": _DECLARED,
        "statement": _KEYS,
        "signature": _KEYS,
        "identity": _KEYS,
    },
    "SharesAnswer": {"run": _GIVEN, "round": _GIVEN, "site": _DECLARED, "recipients": _GIVEN, "letters": _KEYS},
    "MaskedAnswer": {"run": _GIVEN, "round": _GIVEN, "site": _DECLARED, "vector": _KEYS},
    "RevealAnswer": {
        "run": _GIVEN,
        "round": _GIVEN,
        "site": _DECLARED,
        "owners": _GIVEN,
        "segments": _GIVEN,
        "shares": _KEYS,
        "gone": _GIVEN,
        "key_shares": _KEYS,
    },
}

_MEANS = "not tried: a mean over a class's images, kept back where few patients show it; statistics = [] declines it"
BY_STATISTIC: Mapping[str, tuple[str, ...] | str] = {
    "prototypes": _MEANS,
    "difficulty": _MEANS,
    "entries": "counts, under smallest_count and round_counts_to",
    "indicators": _MEANS,
    "slope": "one number of the training loss over an epoch, which is attacked by itself",
    "relations": _MEANS,
}
NOT_TRIED = (
    "Hospitals that the coordinator makes up: without `peers` their part can be taken off a masked sum.",
    "Plans that ask for masks: a site with `masked_only` declines all of these attacks, and is not asked under masks. "
    "Plans with little noise. Tests of the product try both.",
    "Attacks on the sum of several hospitals' masked updates, and on the models that a run ends with.",
    "Attacks by another hospital of the federation, and by somebody who has taken over this machine.",
    "Statistics of single methods (prototypes, relations, indicators, difficulty), score histograms, plug-ins.",
    "How long an answer takes, and when it comes; whether training diverges; errors and declined requests as answers.",
    'Parts of the model that stay at the site (`pfl`, `trunk = "fedbn"`).',
    "The figures of the comparison with training alone: only whether a picture makes it fail.",
    "Attacks over hundreds of rounds: who may ask for years finds more than stands here.",
    "What nobody has published yet: 0 here means that these attacks found nothing, not that nothing can be found.",
)
