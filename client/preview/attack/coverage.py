"""List of the attacks on each record field that leaves a site, or the reason why no attack tries the field.

A test compares this list with every record that a site sends and every statistic that a method declares, so that no
field can be added without an attack or a reason.
"""

from collections.abc import Mapping

# Names of the attacks, as in the JSON output.
IMPRINT_ATTACK = "imprint"
INVERSION_ATTACK = "gradient inversion"
MATCHED_FILTER_ATTACK = "membership: matched filter"
LIRA_ATTACK = "membership: LiRA"
LOSS_ATTACK = "counts from losses"
DIGIT_ATTACK = "counts from digits"
HASH_ATTACK = "counts from hashes"
HEAD_ROW_ATTACK = "counts from head rows"
TRUNK_ATTACK = "counts from the trunk"
FAILING_MODEL_ATTACK = "models that fail"
SINGLE_PATIENT_ATTACK = "single persons"
BUDGET_ATTACK = "round the budget"

_ECHOED = "the coordinator's own words, given back"
_MASKING_KEYS = "of secure aggregation: random numbers, or keys made for one round; tests/client/test_masked_attacks.py"
_DECLARED = "what the hospital declares about itself, before any image is looked at"
_REPORTED_COUNT = (
    "a count that the policy reports as it is, under smallest_count and round_counts_to; images that are left out of "
    "training are not in it"
)
_SCORED = (
    "not tried by itself: exact like the AUROC of a run's test, of a model that the coordinator chose; off unless the "
    "hospital sets `evaluate`"
)
_COMPARED = "not tried by itself: of test images, exact like the AUROC of the test; three of the models never leave"

AttacksOrReason = tuple[str, ...] | str
"""The names of the attacks on a field, or the reason why no attack tries it."""


def _map_fields_to_attacks(names: Mapping[AttacksOrReason, str]) -> dict[str, AttacksOrReason]:
    return {name: covered for covered, group in names.items() for name in group.split()}


_ROUND_FIELDS: Mapping[AttacksOrReason, str] = {_ECHOED: "run round", _DECLARED: "site"}
ATTACKS_BY_FIELD: Mapping[str, Mapping[str, AttacksOrReason]] = {
    "RollCallAnswer": _map_fields_to_attacks(
        {
            _ECHOED: "run",
            _DECLARED: "site names class_names version smallest_count level",
            _REPORTED_COUNT: "train_samples validation_samples patients positives negatives shown",
            "a hash of the plan's network": "layout",
            "about a file of the coordinator's, not about images": "holds_frozen",
            "keys of site.toml, the size of all images, and whether any image has colour": "pixels",
            "not tried: means over groups of smallest_count patients, and one sum over all of them": "fingerprint",
        }
    ),
    "TrainReply": _map_fields_to_attacks(
        {
            **_ROUND_FIELDS,
            _REPORTED_COUNT: "train_samples test_images",
            (LOSS_ATTACK,): "train_loss",
            (LOSS_ATTACK, FAILING_MODEL_ATTACK): "validation_loss",
            (BUDGET_ATTACK,): "validation_auroc",
            "depends on the number of images, which is reported, and on the machine; 0 with privacy": "seconds",
            (
                IMPRINT_ATTACK,
                INVERSION_ATTACK,
                MATCHED_FILTER_ATTACK,
                LIRA_ATTACK,
                HEAD_ROW_ATTACK,
                TRUNK_ATTACK,
                SINGLE_PATIENT_ATTACK,
            ): "update",
            "the plan's, or how many a loss took to settle: a validation loss where such figures leave": "epochs",
            "says something of the machine, and nothing of the images": "arithmetic",
            "by name, below": "statistics",
            (FAILING_MODEL_ATTACK,): "test_correct",
            "follows from the plan and train_samples": "epsilon",
        }
    ),
    "CountReply": _map_fields_to_attacks(
        {
            _ECHOED: "run",
            _DECLARED: "site level smallest_count class_names allowed refused missing",
            "the day on which the hospital made its sheet": "as_of",
            "names of lines whose counts the audit of the sheet allows; tests/client/test_count_sheet.py": (
                "tables classes states values masked_rows"
            ),
            "counts of many patients, audited by an integer program, or noisy; tests/client/test_count_attack.py": (
                "patients images"
            ),
            "follows from counts_epsilon and the number of tables": "noise",
        }
    ),
    "ScoringReply": _map_fields_to_attacks(
        {
            _ECHOED: "run models columns point_rules thresholds pair_firsts pair_seconds",
            _DECLARED: "site level smallest_count class_names over_patients classes pair_classes pair_tests",
            "names of classes that every run hides, too": "hidden",
            "says that a group is of few patients, and not which; tests/client/test_scoring.py": "withheld groups",
            _REPORTED_COUNT: "images patients positives negatives positive_patients negative_patients",
            _SCORED: (
                "auroc auroc_low auroc_high average_precision average_precision_low average_precision_high brier "
                "calibration_error differences difference_lows difference_highs standard_errors"
            ),
            "counts and sums by score that score_histograms allows: who allows them reports more than a count": (
                "positive_scores negative_scores score_sums point_rows true_positives false_positives sensitivity_low "
                "sensitivity_high specificity_low specificity_high"
            ),
        }
    ),
    "EvaluateReply": _map_fields_to_attacks(
        {
            **_ROUND_FIELDS,
            (LOSS_ATTACK, FAILING_MODEL_ATTACK, BUDGET_ATTACK): "validation_loss",
            (BUDGET_ATTACK,): "validation_auroc",
            (DIGIT_ATTACK, FAILING_MODEL_ATTACK, SINGLE_PATIENT_ATTACK, BUDGET_ATTACK): "auroc",
            "not tried by itself: exact like the AUROC beside it, and of the same scores": (
                "average_precision balanced_accuracy"
            ),
            (DIGIT_ATTACK,): "positives negatives",
            (HASH_ATTACK,): "model_sha256",
            _REPORTED_COUNT: "test_images",
            (FAILING_MODEL_ATTACK,): "test_correct",
            "counts by score that score_histograms allows: who allows them reports more than a count": (
                "positive_scores negative_scores validation_positive_scores validation_negative_scores"
            ),
            _DECLARED: "site class_names histogram_classes validation_classes masked_classes",
            _ECHOED: "run round metric_names",
            "of a plug-in that the hospital has read and listed": "metric_values",
        }
    ),
    "BenefitReply": _map_fields_to_attacks(
        {
            _ECHOED: "run round",
            (FAILING_MODEL_ATTACK,): "class_names",
            _COMPARED: "auroc mean mean_low mean_high gain gain_low gain_high",
            _DECLARED: "site over_patients",
        }
    ),
    "RefusalNoted": _map_fields_to_attacks({_ECHOED: "run", _DECLARED: "site"}),
    "KeysAnswer": _map_fields_to_attacks({**_ROUND_FIELDS, _MASKING_KEYS: "statement signature identity"}),
    "SharesAnswer": _map_fields_to_attacks(
        {_ECHOED: "run round recipients", _DECLARED: "site", _MASKING_KEYS: "letters"}
    ),
    "MaskedAnswer": _map_fields_to_attacks({**_ROUND_FIELDS, _MASKING_KEYS: "vector"}),
    "RevealAnswer": _map_fields_to_attacks(
        {_ECHOED: "run round owners segments gone", _DECLARED: "site", _MASKING_KEYS: "shares key_shares"}
    ),
}

_CLASS_MEANS = (
    "not tried: a mean over a class's images, kept back where few patients show it; statistics = [] declines it"
)
ATTACKS_BY_STATISTIC: Mapping[str, AttacksOrReason] = {
    "prototypes": _CLASS_MEANS,
    "difficulty": _CLASS_MEANS,
    "entries": "counts, under smallest_count and round_counts_to",
    "indicators": _CLASS_MEANS,
    "slope": "one number of the training loss over an epoch, which is attacked by itself",
    "learning_rate_sum": "the number of steps, from which that of images follows to within a batch",
    "relations": _CLASS_MEANS,
    "positive_share": _CLASS_MEANS,
}
UNTRIED_ATTACKS = (
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
