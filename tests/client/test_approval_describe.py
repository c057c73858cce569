"""What a plan's description says leaves, beside what a preview of that plan really sends."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.approval.describe import FIELD_DESCRIPTIONS, describe_text, list_leaving_fields
from polyclinic.client.gate.policy_rules import RequestedWork
from polyclinic.client.preview.data_dictionary import FIELD_MEANINGS
from polyclinic.client.preview.dry_run import (
    choose_preview_experiment,
    list_record_field_rows,
    make_first_round_records,
)
from polyclinic.client.site.plans import RequestFacts, RequestText, StoredText
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import SiteSettings, SiteTomlContent
from polyclinic.common.config import Experiment, make_hospital_plan
from polyclinic.common.contract import LabelDeclaration
from polyclinic.data.sources.drawn_organs import ORGANS, draw_organs
from polyclinic.strategies.registry import get_cached_site_method
from polyclinic.strategies.run_length import complete_round_settings
from tests.client.rounds import site

OPEN = {"label_counts": True, "score_histograms": True, "smallest_count": 0}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("surgical", OPEN, {}),
    ("surgical", OPEN | {"test_metrics": False, "training_figures": False}, {}),
    ("fedsld", OPEN, {}),
    ("fedmlp", OPEN, {}),
    ("surgical", OPEN | {"score_histograms": False}, {}),
    ("fedavg", OPEN, {"evaluation": {"checkpoint": "last"}, "privacy": {"level": "sample", "noise_multiplier": 2.0}}),
    ("pfl", OPEN, {}),
]


def experiment_of(method: str, tables: dict[str, Any]) -> Experiment:
    norm = {"norm": "group"} if "privacy" in tables else {}
    model = {"architecture": "tiny_cnn", "channels": 1, "image_size": 16, "neck": 8, **norm}
    tree = {"run": {"method": method, "rounds": 2}, "model": model, "training": {"batch_size": 8}}
    return complete_round_settings(Experiment.model_validate({**tree, **tables}))


def sent_fields(method: str, policy: dict[str, Any], tables: dict[str, Any], folder: Path) -> set[tuple[str, str]]:
    """Record and field of everything that leaves in a preview with something in it."""
    at = replace(site(folder), policy=SitePolicy(**policy))
    records, reasons = make_first_round_records(at, choose_preview_experiment(experiment_of(method, tables), at))
    assert reasons == []
    rows = (row for content in records for row in list_record_field_rows(content))
    names = {
        (row.record, row.field.partition("/")[0].partition(".")[0]) for row in rows if row.values not in ("", "[]")
    }
    return {(record, name) for record, name in names if name not in ("wire", "run", "round", "site")}


def listed_fields(method: str, policy: dict[str, Any], tables: dict[str, Any]) -> set[tuple[str, str]]:
    plan = make_hospital_plan(experiment_of(method, tables))
    work = RequestedWork(plan, get_cached_site_method("north", plan.model_dump_json()), plan.run.rounds)
    fields = list_leaving_fields(work, SitePolicy(**policy))
    return {(record, name) for record, names in fields.items() for name in names}


MAY_BE_EMPTY = frozenset({"pixels", "holds_frozen", "arithmetic", "model_sha256", "level", "smallest_count"})


@pytest.mark.parametrize(("method", "policy", "tables"), CASES)
def test_the_description_lists_all_that_leaves_and_nothing_that_stays(
    method: str, policy: dict[str, Any], tables: dict[str, Any], tmp_path: Path
) -> None:
    sent, listed = sent_fields(method, policy, tables, tmp_path), listed_fields(method, policy, tables)
    assert sent - listed == set()
    assert {(record, name) for record, name in listed - sent if name not in MAY_BE_EMPTY} == set()


@pytest.mark.parametrize(("counts_leave", "is_listed"), [(True, True), (False, False)])
def test_the_sums_of_volumes_are_listed_where_the_coordinator_plans_the_network(
    counts_leave: bool, is_listed: bool
) -> None:
    model = {"architecture": "monai:DynUNet", "task": "segmentation", "channels": 1, "image_size": [16, 16, 16]}
    tree = {"run": {"method": "surgical", "rounds": 2}, "model": model, "planning": {"kind": "nnunet"}}
    experiment = complete_round_settings(Experiment.model_validate(tree))
    plan = make_hospital_plan(experiment).model_copy(update={"planning": experiment.planning})
    work = RequestedWork(plan, get_cached_site_method("north", plan.model_dump_json()), plan.run.rounds)
    fields = list_leaving_fields(work, SitePolicy(**OPEN | {"label_counts": counts_leave}))
    assert ("fingerprint" in fields["RollCallAnswer"]) is is_listed
    assert "sends a second plan with it" in description(plan.model_dump_json())


OUTLINING = {"model": {"architecture": "tiny_unet", "task": "segmentation", "channels": 1, "image_size": 32}}
OF_IMAGES = {"auroc", "average_precision", "balanced_accuracy"}
"""Figures of a label for each image; a segmentation sends them without a value."""


def outlining_site(folder: Path, policy: dict[str, Any]) -> Site:
    parts = [draw_organs(24, (32, 32), np.random.default_rng(seed)) for seed in range(3)]
    declaration = LabelDeclaration("north", tuple(ORGANS))
    return Site(declaration, parts[0], parts[1], parts[2], folder, policy=SitePolicy(**policy), durable=False)


def test_a_plan_that_outlines_lists_all_that_leaves_and_no_auroc(tmp_path: Path) -> None:
    experiment = choose_preview_experiment(experiment_of("surgical", OUTLINING), outlining_site(tmp_path, OPEN))
    records, reasons = make_first_round_records(outlining_site(tmp_path, OPEN), experiment)
    assert reasons == []
    rows = [row for content in records for row in list_record_field_rows(content) if row.values not in ("", "[]")]
    sent = {(row.record, row.field.partition("/")[0].partition(".")[0]) for row in rows}
    sent -= {(record, name) for record, name in sent if name in ("wire", "run", "round", "site")}
    listed = listed_fields("surgical", OPEN, OUTLINING)
    assert sent - listed == {("EvaluateReply", name) for name in OF_IMAGES}
    assert all(set(row.values) <= set("[NaN, ]") for row in rows if row.field in OF_IMAGES)
    assert {(record, name) for record, name in listed - sent if name not in MAY_BE_EMPTY} == set()


def test_a_plan_that_outlines_is_described_by_dice_and_distance() -> None:
    plan = make_hospital_plan(experiment_of("surgical", OUTLINING))
    text = description(plan.model_dump_json(), **OPEN)
    assert "Dice and 95 % Hausdorff distance of each class, as means over the test patients" in text
    assert "For each class, counts of test patients by Dice and 95 % Hausdorff distance (1,024 steps)" in text
    assert "In how many test patients each class is outlined" in text
    assert not re.search("AUROC|precision|accuracy|scores", text)
    tables = {**OUTLINING, "privacy": {"secure_aggregation": True}, "evaluation": {"checkpoint": "last"}}
    covered = make_hospital_plan(experiment_of("surgical", tables))
    masked = description(covered.model_dump_json(), level="masked", score_histograms=True)
    assert "counts of test patients by Dice and 95 % Hausdorff distance (1,024 steps); only in a sum over" in masked
    assert "as means over the test patients" not in masked


def description(plan_text: str, kind: str = "training", **policy: Any) -> str:
    data = {
        "kind": "folder",
        "images": "images",
        "labels": "labels.csv",
        "image_column": "image",
        "label_columns": ["b"],
    }
    file = SiteTomlContent.model_validate({"name": "north", "data": data, "policy": policy})
    facts = RequestFacts(kind=kind, time="2026-01-01T00:00:00+00:00", classes={"b": "Bell"}, train=40, patients=20)
    stored = StoredText(RequestText(kind, plan_text).sha256, plan_text, facts)
    sections = describe_text(stored, SiteSettings(Path("nowhere"), file, (), {}))
    return "\n".join(f"{section.heading}\n" + "\n".join(section.lines) for section in sections)


def test_masks_change_what_the_description_says() -> None:
    plain = make_hospital_plan(experiment_of("fedavg", {}))
    tables = {"privacy": {"secure_aggregation": True}, "evaluation": {"checkpoint": "last"}}
    masked = make_hospital_plan(experiment_of("fedavg", tables | {"method": {"weighting": "uniform"}}))
    bare, covered = description(plain.model_dump_json()), description(masked.model_dump_json(), level="masked")
    assert "The change of the network's numbers by training here" in bare
    assert "Somebody who has that change can compute images of this hospital from it" in bare
    assert "The change of the network's numbers by training here" not in covered
    assert "Leaves in each round, masked" in covered
    assert "Leaves in each round, masked" not in bare
    assert "AUROC" not in covered


def test_plain_words_stand_for_fields_that_there_are() -> None:
    assert all(field in FIELD_MEANINGS[record] for record, field in FIELD_DESCRIPTIONS)
    text = description(make_hospital_plan(experiment_of("fedavg", {})).model_dump_json())
    assert re.findall(r"\w+_\w+", text) == ["tiny_cnn", "channels_last"]


def test_a_text_of_another_kind_or_no_plan_is_shown_as_it_came() -> None:
    assert "how many patients have what?" in description("how many patients have what?", kind="survey")
    assert "This release cannot read it" in description("not a plan \x1b[2J")
    assert "\x1b" not in description("not a plan \x1b[2J")
