"""The result of a check: on one screen, as JSON, and the counts that it hides."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from client.check import training
from client.check.data import check_data
from client.check.findings import CheckArea, CheckResult, ClassCounts, make_page_console, print_result
from client.check.machine import estimate_needs
from client.check.pictures import looks_inverted
from client.check.training import find_planned_training
from client.connection.exit_codes import ExitCode
from client.site.policy import TRUST, Level
from client.site.settings import open_site
from client.site.site_file import read_file_only, write_last_plan
from client.training import task
from common.config import Plan, make_plan, read_experiment
from common.data.sources.built_in import draw_phantoms
from common.models.network import SplitNetwork, build
from common.system.stopping import STOPPED_ON_REQUEST
from common.wire.records import RollCall
from server.deployment.supervisor import RunExit
from tests.client.check.sites import CLASSES, Hospital, hospital_in
from tests.common.data.dicom_files import dicom
from tests.federations import DIGITS
from tests.network.real import flwr_client

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return hospital_in(tmp_path / "north")


# ---------------------------------------------------------------------- the label table


def labelled(hospital: Hospital, cells: list[tuple[str, str]], images_a_patient: int = 1) -> dict[str, ClassCounts]:
    """Give the first images these labels, and leave the others out."""
    rows = hospital.table[: len(cells)]
    for place, (row, of_row) in enumerate(zip(rows, cells, strict=True)):
        row |= dict(zip(CLASSES, of_row, strict=True), patient=str(place // images_a_patient), part="train")
    hospital.rewrite(rows)
    return {row.name: row for row in check_data(read_file_only(hospital.folder), 1).classes}


def test_a_class_of_fewer_than_ten_patients_is_hidden_and_what_would_tell_it_too(hospital: Hospital) -> None:
    counts = labelled(hospital, [("1", "1")] * 9 + [("0", "1")] * 20 + [("0", "0")] * 11)
    assert counts["Cardiomegaly"].printable_counts == ("<10", "not told")
    assert counts["Effusion"].printable_counts == ("29", "11")


def test_patients_are_counted_not_images(hospital: Hospital) -> None:
    counts = labelled(hospital, [("1", "1")] * 18 + [("0", "1")] * 22, images_a_patient=2)
    assert counts["Cardiomegaly"].printable_counts == ("<10", "not told")
    assert counts["Effusion"].printable_counts == ("40", "0")


def test_a_site_that_hides_more_in_its_policy_hides_more_here_and_none_hides_less(hospital: Hospital) -> None:
    cells = [("1", "1")] * 9 + [("0", "1")] * 15 + [("0", "0")] * 20
    hospital.edit("[data]", "[policy]\nsmallest_count = 25\n[data]")
    assert labelled(hospital, cells)["Effusion"].printable_counts == ("<25", "<25")
    hospital.edit("smallest_count = 25", "smallest_count = 0")
    assert labelled(hospital, cells)["Cardiomegaly"].printable_counts == ("<10", "not told")


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
    settings = read_file_only(hospital.folder)
    notes = [finding.problem for finding in check_data(settings, 1).area.findings if "Cardiomegaly" in finding.problem]
    assert len(notes) == untrained
    (hospital.folder / "e.toml").write_text(f"{DIGITS}\n[privacy]\nsecure_aggregation = true\n", encoding="utf-8")
    plan, site = make_plan(read_experiment(hospital.folder / "e.toml").experiment), open_site(settings)
    assert (site.trained_on("train", plan) is not site.train) == untrained


def notes_of(hospital: Hospital, policy: str) -> list[str]:
    hospital.edit("[data]", f"[policy]\n{policy}\n[data]")
    return [finding.problem for finding in check_data(read_file_only(hospital.folder), 1).area.findings]


@pytest.mark.parametrize("level", TRUST)
def test_the_check_says_whom_the_policy_trusts(level: Level, hospital: Hospital) -> None:
    notes = notes_of(hospital, f'level = "{level}"')
    assert sum(problem.endswith(TRUST[level]) for problem in notes) == 1
    assert not any("overrides" in problem for problem in notes)


@pytest.mark.parametrize(
    ("level", "keys", "overridden"),
    [
        ("masked", "masked_only = false\nsmallest_cohort = 3", "masked_only = false"),
        ("private", 'privacy_unit = "image"\nepsilon = 3', 'epsilon = 3.0 and privacy_unit = "image"'),
        ("private", "smallest_count = 20", "round_counts_to = 1"),
    ],
)
def test_keys_that_override_the_level_are_named(level: Level, keys: str, overridden: str, hospital: Hospital) -> None:
    (note,) = [problem for problem in notes_of(hospital, f'level = "{level}"\n{keys}') if "overrides" in problem]
    assert f": {overridden}." in note


def test_uncertain_and_blank_cells_are_counted_apart(hospital: Hospital) -> None:
    row = labelled(hospital, [("-1", "1")] * 3 + [("", "0")] * 2 + [("1", "1")] * 12)["Cardiomegaly"]
    assert (row.present, row.absent, row.unknown, row.uncertain, row.blank) == (12, 0, 5, 3, 2)


# ---------------------------------------------------------------------- inverted


def chests() -> NDArray[np.uint8]:
    return draw_phantoms(40, 48, np.random.default_rng(1)).images


def test_every_phantom_radiograph_tells_whether_it_is_inverted() -> None:
    assert [looks_inverted(image) for image in chests()] == [False] * 40
    assert [looks_inverted(255 - image) for image in chests()] == [True] * 40


def test_a_colour_picture_and_an_even_one_do_not_tell() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert looks_inverted(colour) is None
    assert looks_inverted(np.full((32, 32), 255, dtype=np.uint8)) is None


def test_dicom_files_with_the_wrong_photometric_interpretation_are_named_by_it(hospital: Hospital) -> None:
    for place in range(20):
        pixels = chests()[place].astype(np.uint16) * 16
        wrong = dicom(pixels, PhotometricInterpretation="MONOCHROME1")
        hospital.image(place).write_bytes(wrong)
    hospital.rewrite(hospital.table[:20])
    result = hospital.checked(offline=True)
    assert result.exit_code == ExitCode.INVERTED
    assert result.most_severe is not None
    assert "20 of the 20 images" in result.most_severe.problem
    assert "now MONOCHROME1" in result.most_severe.remedy


# ---------------------------------------------------------------------- needs and the plan


def test_what_a_run_needs_grows_with_model_and_batch(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    network = build(plan.model, ("a", "b"), 0)
    image, double = torch.zeros(1, 1, 16, 16, dtype=torch.uint8), plan.training.batch_size * 2
    small = estimate_needs(network, plan, image, 100)
    bigger = plan.model_copy(update={"training": plan.training.model_copy(update={"batch_size": double})})
    large = estimate_needs(network, bigger, image, 100)
    assert small.model == 4 * sum(tensor.numel() for tensor in network.state_dict().values())
    assert large.gpu - small.gpu == large.memory - small.memory > 0
    assert (large.gpu - small.gpu) % (2 * 4 * plan.training.batch_size) == 0
    assert estimate_needs(network, plan, image, 1100).gpu - small.gpu == 1000 * 16 * 16
    assert large.disk == small.disk == 10**9 + 24 * small.model


def written_plan(folder: Path) -> Plan:
    (folder / "run.toml").write_text(DIGITS, encoding="utf-8")
    return make_plan(read_experiment(folder / "run.toml").experiment)


def test_the_plan_of_the_last_roll_call_is_what_a_site_is_checked_for(hospital: Hospital, tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    write_last_plan(hospital.folder / "state", RollCall("run", plan.model_dump_json()).plan)
    facts = hospital.checked(offline=True, experiment=None).areas[-1].facts
    assert (facts["method"], facts["architecture"], facts["known_from"]) == (
        "surgical",
        "tiny_cnn",
        "the last roll call",
    )
    assert facts["seconds_a_round"] >= 0
    assert facts["mb_down"] == facts["mb_up"] == pytest.approx(0.21, abs=0.01)


def test_without_any_plan_the_model_is_a_guess_and_said_to_be_one(hospital: Hospital) -> None:
    settings = read_file_only(hospital.folder)
    planned = find_planned_training(settings, None, check_data(settings, 1).source)
    assert (planned.plan.model.architecture, planned.plan.model.image_size) == ("resnet18", 32)
    assert planned.assumed


# ---------------------------------------------------------------------- words


def on_screen(*areas: CheckArea) -> str:
    file = io.StringIO()
    print_result(
        CheckResult("north", areas), [ClassCounts("Mass", 3, 90, 0, (True, False), 10)], make_page_console(file)
    )
    return file.getvalue()


def test_a_screen_has_faults_before_warnings_and_repeats_the_first_at_the_end() -> None:
    long = "A very long sentence about what is wrong, " * 5
    data = CheckArea("data", ["1,910 images"])
    data.warn(ExitCode.EMPTY_FILES, long, long, [f"{row:05}.png" for row in range(48)])
    data.note("a note")
    data.fault(ExitCode.COLUMN, "no [Effusion] column", "Name it.")
    text = on_screen(CheckArea("connection", ["well"]), data)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\x1b" not in text
    assert text.index("no [Effusion] column [40]") < text.index("wrong, A very") < text.index("a note")
    assert [line.strip() for line in text.splitlines()[-2:]] == ["no [Effusion] column [40]", "→ Name it."]
    assert "exit code 40:" in text
    assert "00000.png; 00001.png; 00002.png; 00003.png; 00004.png; and 43 more" in " ".join(text.split())


def test_nothing_but_notes_is_exit_code_0() -> None:
    data = CheckArea("data")
    data.note("a note")
    assert CheckResult("north", (data,)).exit_code == 0
    assert "exit code" not in on_screen(data)


def test_json_holds_every_name_and_the_exit_code_of_the_process(hospital: Hospital) -> None:
    hospital.image(3).write_bytes(b"")
    (hospital.folder / "run.toml").write_text(DIGITS, encoding="utf-8")
    ended = flwr_client("check", hospital.folder, "--offline", "--json", "--experiment", hospital.folder / "run.toml")
    result = json.loads(ended.out)
    assert set(result) == {"schema", "site", "exit_code", "areas"}
    assert list(result["areas"]) == ["connection", "machine", "data", "training"]
    assert ended.code == result["exit_code"]
    findings = result["areas"]["data"]["findings"]
    (empty,) = [finding for finding in findings if finding["exit_code"] == ExitCode.EMPTY_FILES]
    assert set(empty) == {"severity", "cause", "exit_code", "problem", "remedy", "names"}
    assert (empty["severity"], empty["cause"], empty["names"]) == ("warning", "empty_files", ["00003.png"])


def test_a_kit_that_is_missing_leaves_the_rest_to_be_checked(hospital: Hospital) -> None:
    (hospital.folder / "north.kit").unlink()
    result = hospital.checked()
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.most_severe is not None
    assert "north.request" in result.most_severe.remedy
    assert [area.name for area in result.areas if area.passed] == ["machine", "data", "training"]


# ---------------------------------------------------------------------- the documentation


def listed_codes() -> Iterator[tuple[int, str]]:
    """Codes with the program that ends with them."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.split("## Exit codes")[1].split("\n## ")[0]
    yield from ((int(code), who) for code, who in re.findall(r"^\| (\d+) \| ([^|]+) \|", section, re.MULTILINE))


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    runs, simulations, audits = "flwr-server run", "flwr-sim", "flwr-server verify, flwr-client audit verify"
    others = [code for code, who in listed_codes() if who not in (runs, simulations, audits)]
    assert others == sorted([*map(int, ExitCode), STOPPED_ON_REQUEST])
    assert [code for code, who in listed_codes() if who == audits] == [1]
    assert [code for code, who in listed_codes() if who == simulations] == [int(RunExit.STOPPED), STOPPED_ON_REQUEST]
    assert [code for code, who in listed_codes() if who == runs] == [
        int(code) for code in RunExit if code not in (RunExit.DONE, RunExit.BAD_INPUT)
    ]


def test_both_pages_for_hospitals_list_the_codes_of_start_alike() -> None:
    text = (ROOT / "docs" / "hospital-it.md").read_text(encoding="utf-8").split("## When it ends")[1]
    ours = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert ours == [int(code) for code in ExitCode if code < 20]


def test_the_step_is_tried_on_a_network_with_initial_values_and_not_on_whatever_the_memory_held(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = task.network_with_new_head

    def of_nothing(*arguments: Any) -> SplitNetwork:
        network = made(*arguments)
        for parameter in network.head.parameters():
            parameter.data.fill_(torch.nan)
        return network

    monkeypatch.setattr(task, "network_with_new_head", of_nothing)
    trained = list[float]()
    epoch = training.train_epoch

    def watched(*arguments: Any) -> Any:
        losses = epoch(*arguments)
        trained.extend(losses.tolist())
        return losses

    monkeypatch.setattr(training, "train_epoch", watched)
    result = hospital.checked(offline=True)
    assert result.areas[-1].facts["device"] == "cpu"
    assert trained
    assert np.isfinite(trained).all()
