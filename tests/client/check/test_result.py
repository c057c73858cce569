"""The result of a check: on one screen, as JSON, and the counts that it hides."""

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.client.check import training
from polyclinic.client.check.data import check_site_data
from polyclinic.client.check.findings import (
    CheckArea,
    CheckResult,
    ClassImageCounts,
    make_narrow_console,
    print_check_result,
)
from polyclinic.client.check.machine import estimate_training_resource_needs
from polyclinic.client.check.pictures import picture_looks_inverted
from polyclinic.client.check.training import find_planned_training
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.site.policy import LEVEL_SENTENCES, Level
from polyclinic.client.site.settings import load_site
from polyclinic.client.site.site_file import read_site_toml_without_data, store_last_plan
from polyclinic.client.training import task
from polyclinic.common.config import Experiment, make_hospital_plan, read_experiment
from polyclinic.common.models.network import SplitNetwork, build_network
from polyclinic.common.wire.records import RollCall
from polyclinic.data.sources.built_in import draw_phantom_images
from tests.client.check.sites import CLASSES, Hospital
from tests.data.dicom_files import dicom
from tests.federations import DIGITS
from tests.network.real import flwr_client

ROOT = Path(__file__).parents[3]


def labelled(
    hospital: Hospital, cells: list[tuple[str, str]], images_a_patient: int = 1
) -> dict[str, ClassImageCounts]:
    """Give the first images these labels, and leave the others out."""
    rows = hospital.table[: len(cells)]
    for place, (row, of_row) in enumerate(zip(rows, cells, strict=True)):
        row |= dict(zip(CLASSES, of_row, strict=True), patient=str(place // images_a_patient), part="train")
    hospital.rewrite(rows)
    return {row.name: row for row in check_site_data(read_site_toml_without_data(hospital.folder), 1).classes}


NINE_OF_40 = [("1", "1")] * 9 + [("0", "1")] * 20 + [("0", "0")] * 11
NINE_OF_44 = [("1", "1")] * 9 + [("0", "1")] * 15 + [("0", "0")] * 20


@pytest.mark.parametrize(
    ("policy", "cells", "images_a_patient", "counts"),
    [
        ("", NINE_OF_40, 1, [("<10", "not told"), ("29", "11")]),
        ("", [("1", "1")] * 18 + [("0", "1")] * 22, 2, [("<10", "not told"), ("40", "0")]),
        ("smallest_count = 25", NINE_OF_44, 1, [("<25", "not told"), ("<25", "<25")]),
        ("smallest_count = 0", NINE_OF_44, 1, [("<10", "not told"), ("24", "20")]),
    ],
    ids=["fewer than ten", "patients are counted", "a policy that hides more", "no policy hides less"],
)
def test_a_class_of_few_patients_is_hidden_and_what_would_tell_it_too(
    policy: str, cells: list[tuple[str, str]], images_a_patient: int, counts: list[tuple[str, str]], hospital: Hospital
) -> None:
    hospital.edit("[data]", f"[policy]\n{policy}\n[data]")
    classes = labelled(hospital, cells, images_a_patient)
    assert [classes[name].printable_counts for name in CLASSES] == counts


@pytest.mark.parametrize(
    ("policy", "untrained"),
    [
        ("", False),
        ('level = "masked"', True),  # masks do not hide what a hidden class's labels did to a sum of few sites
        ('level = "private"', False),
        ("train_hidden_classes = false", True),
        ("train_hidden_classes = false\nepsilon = 4.0", False),
    ],
)
def test_labels_of_a_hidden_class_are_noted_as_untrained_exactly_where_a_masked_run_does_not_train_on_them(
    policy: str, untrained: bool, hospital: Hospital
) -> None:
    hospital.edit("[data]", f"[policy]\n{policy}\n[data]")
    labelled(hospital, [("1", "1")] * 9 + [("0", "1")] * 31)
    settings = read_site_toml_without_data(hospital.folder)
    notes = [
        finding.problem for finding in check_site_data(settings, 1).area.findings if "Cardiomegaly" in finding.problem
    ]
    assert len(notes) == untrained
    (hospital.folder / "e.toml").write_text(f"{DIGITS}\n[privacy]\nsecure_aggregation = true\n", encoding="utf-8")
    plan, site = make_hospital_plan(read_experiment(hospital.folder / "e.toml").experiment), load_site(settings)
    assert (site.get_images_to_train_on("train", plan) is not site.train) == untrained


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("", "account/polyclinic/ledger/ledger.sqlite. Not counted: the same patients under other names"),
        ("../common", "common/ledger.sqlite. Not counted:"),
        ("state/privacy", "ledger.sqlite, which is this folder's own: another folder with the same patients"),
        ("site.toml/below", "policy.ledger: this account cannot write to "),
    ],
)
def test_the_check_says_where_the_privacy_budget_is_counted_and_makes_no_ledger(
    place: str, problem: str, hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "account"))
    hospital.edit("[data]", f'[policy]\nlevel = "private"\nledger = "{place}"\n[data]')
    findings = check_site_data(read_site_toml_without_data(hospital.folder), 1).area.findings
    assert sum(problem in finding.problem for finding in findings) == 1
    assert list(tmp_path.rglob("ledger.sqlite")) == []


@pytest.mark.parametrize(
    ("level", "keys", "overridden"),
    [
        *((level, "", "") for level in LEVEL_SENTENCES),
        ("masked", "masked_only = false\nsmallest_cohort = 3", "masked_only = false"),
        ("private", 'privacy_unit = "image"\nepsilon = 3', 'epsilon = 3.0 and privacy_unit = "image"'),
        ("private", "smallest_count = 20", "round_counts_to = 1"),
    ],
)
def test_the_check_says_whom_the_policy_trusts_and_which_keys_override_its_level(
    level: Level, keys: str, overridden: str, hospital: Hospital
) -> None:
    hospital.edit("[data]", f'[policy]\nlevel = "{level}"\n{keys}\n[data]')
    findings = check_site_data(read_site_toml_without_data(hospital.folder), 1).area.findings
    assert sum(finding.problem.endswith(LEVEL_SENTENCES[level]) for finding in findings) == 1
    notes = [finding.problem for finding in findings if "overrides" in finding.problem]
    assert len(notes) == bool(overridden)
    assert all(f": {overridden}." in note for note in notes)


def test_uncertain_and_blank_cells_are_counted_apart(hospital: Hospital) -> None:
    row = labelled(hospital, [("-1", "1")] * 3 + [("", "0")] * 2 + [("1", "1")] * 12)["Cardiomegaly"]
    assert (row.present, row.absent, row.unknown, row.uncertain, row.blank) == (12, 0, 5, 3, 2)


CHESTS = draw_phantom_images(40, 48, np.random.default_rng(1)).images


def test_a_radiograph_tells_whether_it_is_inverted_and_a_colour_or_even_picture_does_not() -> None:
    assert [picture_looks_inverted(image) for image in CHESTS] == [False] * 40
    assert [picture_looks_inverted(255 - image) for image in CHESTS] == [True] * 40
    assert picture_looks_inverted(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)) is None
    assert picture_looks_inverted(np.full((32, 32), 255, dtype=np.uint8)) is None


def test_dicom_files_with_the_wrong_photometric_interpretation_are_named_by_it(hospital: Hospital) -> None:
    for place in range(20):
        pixels = CHESTS[place].astype(np.uint16) * 16
        hospital.image(place).write_bytes(dicom(pixels, PhotometricInterpretation="MONOCHROME1"))
    hospital.rewrite(hospital.table[:20])
    result = hospital.checked(offline=True)
    # So few images are a fault of their own: the site's policy would decline the run.
    findings = [finding for area in result.areas for finding in area.findings]
    (inverted,) = [finding for finding in findings if finding.exit_code == ClientExitCode.INVERTED]
    assert "20 of the 20 images" in inverted.problem
    assert "MONOCHROME1" in inverted.remedy


PLAN = make_hospital_plan(Experiment.model_validate(tomllib.loads(DIGITS)))


def test_what_a_run_needs_grows_with_model_and_batch() -> None:
    network, batch = build_network(PLAN.model, ("a", "b"), 0), PLAN.training.batch_size
    image = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    small = estimate_training_resource_needs(network, PLAN, image, 100)
    bigger = PLAN.model_copy(update={"training": PLAN.training.model_copy(update={"batch_size": 2 * batch})})
    large = estimate_training_resource_needs(network, bigger, image, 100)
    assert small.model == 4 * sum(tensor.numel() for tensor in network.state_dict().values())
    assert large.gpu - small.gpu == large.memory - small.memory > 0
    assert (large.gpu - small.gpu) % (2 * 4 * batch) == 0
    assert estimate_training_resource_needs(network, PLAN, image, 1100).gpu - small.gpu == 1000 * 16 * 16
    assert large.disk == small.disk == 10**9 + 24 * small.model


def test_the_plan_of_the_last_roll_call_is_what_a_site_is_checked_for(hospital: Hospital) -> None:
    store_last_plan(hospital.folder / "state", RollCall("run", PLAN.model_dump_json()).plan)
    facts = hospital.checked(offline=True, experiment=None).areas[-1].facts
    expected = ("surgical", "tiny_cnn", "the last roll call")
    assert (facts["method"], facts["architecture"], facts["known_from"]) == expected
    assert facts["seconds_a_round"] >= 0
    assert facts["mb_down"] == facts["mb_up"] == pytest.approx(0.21, abs=0.01)


def test_without_any_plan_the_model_is_a_guess_and_said_to_be_one(hospital: Hospital) -> None:
    settings = read_site_toml_without_data(hospital.folder)
    planned = find_planned_training(settings, None, check_site_data(settings, 1).source)
    assert (planned.plan.model.architecture, planned.plan.model.image_size) == ("resnet18", 32)
    assert planned.assumed


def test_a_screen_has_faults_before_warnings_and_repeats_the_first_at_the_end() -> None:
    long = "A very long sentence about what is wrong, " * 5
    data, file = CheckArea("data", ["1,910 images"]), io.StringIO()
    data.add_note("nothing but notes is exit code 0")
    assert CheckResult("north", (data,)).exit_code == 0
    data.add_warning(ClientExitCode.EMPTY_FILES, long, long, [f"{row:05}.png" for row in range(48)])
    data.add_note("a note")
    data.add_fault(ClientExitCode.COLUMN, "no [Effusion] column", "Name it.")
    counts = [ClassImageCounts("Mass", 3, 90, 0, (True, False), 10)]
    print_check_result(
        CheckResult("north", (CheckArea("connection", ["well"]), data)), counts, make_narrow_console(file)
    )
    text = file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text
    assert text.index("no [Effusion] column [40]") < text.index("wrong, A very") < text.index("a note")
    assert [line.strip() for line in text.splitlines()[-2:]] == ["no [Effusion] column [40]", "→ Name it."]
    assert "exit code 40:" in text
    assert "00000.png; 00001.png; 00002.png; 00003.png; 00004.png; and 43 more" in " ".join(text.split())


def test_json_holds_every_name_and_the_exit_code_of_the_process(hospital: Hospital) -> None:
    hospital.image(3).write_bytes(b"")
    (hospital.folder / "run.toml").write_text(DIGITS, encoding="utf-8")
    ended = flwr_client("check", hospital.folder, "--offline", "--json", "--experiment", hospital.folder / "run.toml")
    result = json.loads(ended.out)
    assert set(result) == {"schema", "site", "exit_code", "areas", "contract"}
    assert list(result["areas"]) == ["connection", "machine", "data", "training"]
    assert ended.code == result["exit_code"]
    findings = result["areas"]["data"]["findings"]
    (empty,) = [finding for finding in findings if finding["exit_code"] == ClientExitCode.EMPTY_FILES]
    assert set(empty) == {"severity", "cause", "exit_code", "problem", "remedy", "names"}
    assert (empty["severity"], empty["cause"], empty["names"]) == ("warning", "empty_files", ["00003.png"])


def test_a_kit_that_is_missing_leaves_the_rest_to_be_checked(hospital: Hospital) -> None:
    (hospital.folder / "north.kit").unlink()
    result = hospital.checked()
    assert result.exit_code == ClientExitCode.BAD_INPUT
    assert "north.request" in result.most_severe_finding.remedy
    assert [area.name for area in result.areas if area.passed] == ["machine", "data", "training"]


def test_the_step_is_tried_on_a_network_of_initial_values(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not be tried on undefined memory."""
    make, epoch, losses = task.make_network_with_new_head, training.train_epoch, list[float]()

    def of_nothing(*arguments: Any) -> SplitNetwork:
        network = make(*arguments)
        for parameter in network.head.parameters():
            parameter.data.fill_(torch.nan)
        return network

    def watched(*arguments: Any) -> Any:
        of_epoch = epoch(*arguments)
        losses.extend(of_epoch.tolist())
        return of_epoch

    monkeypatch.setattr(task, "make_network_with_new_head", of_nothing)
    monkeypatch.setattr(training, "train_epoch", watched)
    assert hospital.checked(offline=True).areas[-1].facts["device"] == "cpu"
    assert losses
    assert np.isfinite(losses).all()
