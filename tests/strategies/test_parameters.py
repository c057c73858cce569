"""Each parameter of a method changes the model; methods that ask of each class by itself refuse exclusive classes."""

from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.strategies.registry import STRATEGIES, build_strategy
from tests.federations import ALL_DIGITS, federation, finished

FEW_CLASSES = 'partition={kind = "missing_classes", sites = 3, missing = 6}'
RATES = ("method.tag_rate_negative=0.1", "method.tag_rate_positive=0.1")
LAST = "evaluation.checkpoint=last"  # the best round may be one of stage one
RUNS = {
    "cbafed": (LAST, FEW_CLASSES, "run.rounds=4", "method.stage_one_rounds=3"),
    "fedfixmatch": (),
    # Not few digits: it would tag none of them.
    "fedmlp": (ALL_DIGITS, LAST, FEW_CLASSES, "run.rounds=3", "method.stage_one_rounds=1", *RATES),
    "fednoro": (LAST, "run.rounds=4", "method.stage_one_rounds=1", "method.ramp_rounds=1"),
    "rscfed": ("method.consensus_sites=2",),
    # Thresholds that the few steps of this run reach.
    "fedlsm": (
        "method.uncertain_share=0.2", "method.present_above=0.51", "method.absent_below=0.49",
        "method.unsure_present_above=0.51", "method.unsure_absent_below=0.49",
    ),
    "sfedkd": (),
    "moon": (LAST, "run.rounds=3"),
}  # fmt: skip
VALUES = {
    "cbafed": {"stage_one_rounds": "1", "threshold_base": "0.7", "residual_every": "1", "balanced": "false"},
    "fedfixmatch": {"confidence": "0.6"},
    "fedmlp": {
        "detection": "false", "self_adaptive": "false", "consistency": "false",
        "consistency_stage_one": "false", "rounding": "floor", "heads": "own",
    },
    "fednoro": {
        "stage_one_rounds": "2", "noisy": "known", "missing": "masked",
        "distillation": "0.4", "ramp_rounds": "2", "temperature": "2",
    },
    "rscfed": {
        "consensus_sites": "1", "consensus_models": "1", "distance_scale": "1e4", "teacher_decay": "0.5",
        "temperature": "0.5", "consistency_weight": "0.1", "balanced": "false",
    },
    "fedlsm": {
        "uncertain_share": "0.4", "confident_share": "0.5", "present_above": "0.9", "absent_below": "0.1",
        "unsure_present_above": "0.9", "unsure_absent_below": "0.1", "pairs": "0.5", "mixing": "2",
        "mixed_weight": "2", "teacher_decay": "0.1", "balanced": "false",
    },
    "moon": {"contrast": "5", "temperature": "2"},
    "sfedkd": {"teachers": "1", "weight": "0.1", "temperature": "4", "order": "name", "missing": "negative"},
}  # fmt: skip
EXCLUSIVE = {name for name, kind in STRATEGIES.items() if kind.site_class.traits.supports_multi_class}


@pytest.mark.parametrize(("method", "key"), [(method, key) for method, keys in VALUES.items() for key in keys])
def test_each_parameter_changes_the_model(method: str, key: str, tmp_path: Path) -> None:
    run = (f"run.method={method}", *RUNS[method])
    changed = federation(tmp_path, *run, f"method.{key}={VALUES[method][key]}")
    assert changed["model_sha256"] != finished(*run)[1]["model_sha256"]


def test_every_method_that_does_not_pair_presence_and_absence_serves_exclusive_classes() -> None:
    assert STRATEGIES.keys() - PAIRED == EXCLUSIVE


PAIRED = {
    "cbafed",
    "condistfl",
    "fedfixmatch",
    "fedirm",
    "fedlsm",
    "fedlsr",
    "fedmlp",
    "fednoro",
    "polyclinic_parallel",
    "polyclinic_passing",
    "rscfed",
}
"""They ask of each class by itself whether an image shows it."""


@pytest.mark.parametrize("method", sorted(PAIRED))
def test_a_task_of_exclusive_classes_is_refused(method: str) -> None:
    with pytest.raises(BadInput) as refused:
        build_strategy(method, {}, "multi_class")
    assert [fault.where for fault in refused.value.faults] == ["run.method"]


@pytest.mark.parametrize("method", ["fedmlp", "fednoro"])
def test_batch_normalisation_at_the_sites_is_refused_where_a_method_compares_by_the_model_of_all(method: str) -> None:
    with pytest.raises(BadInput) as refused:
        build_strategy(method, {"trunk": "fedbn"})
    assert [fault.where for fault in refused.value.faults] == ["method.trunk"]
