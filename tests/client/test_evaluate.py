"""``flwr-client evaluate``: models are scored at the hospital alone, on the images that no run trains on."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from polyclinic.client.site.settings import load_site_data, read_site_settings
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.patients.parts import PatientPartMemory
from polyclinic.data.base.image_set import ImageSet
from tests.client.check.sites import CLASSES, Hospital, hospital_in
from tests.common.evaluation.models import (
    describe,
    write_exported_program,
    write_onnx_model,
    write_run_model,
    write_timm_tensors,
)
from tests.network.real import flwr_client
from tests.server.commands import Ended

PARTS = ["test"] * 3 + ["train"] * 2 + ["val"]


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Hospital:
    """A hospital with two images of each patient, and columns of sex and age."""
    north = hospital_in(tmp_path_factory.mktemp("hospital") / "north", images=240)
    rows = north.table
    for number, row in enumerate(rows):
        patient = number // 2
        row |= {"patient": f"P{patient}", "part": PARTS[patient % 6]}
        row |= {"sex": "FM"[patient % 2], "age": f"{20 + patient % 60:03}Y"}
    rows[4]["sex"] = ""
    north.rewrite(rows)
    return north


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's model, an ONNX file and tensors of timm, with unlike classes and words."""
    folder = tmp_path_factory.mktemp("models")
    write_run_model(folder / "run", (*CLASSES, "Mass"))
    file = write_onnx_model(folder / "other.onnx", 2)
    synonyms = '[vocabulary.Effusion]\nsynonyms = ["Erguss"]\n[operating_points]\nErguss = 0.4\n'
    describe(folder / "other.toml", file, ("Erguss", "Cardiomegaly"), pixels=synonyms)
    tensors = write_timm_tensors(folder / "third.safetensors", 1)
    describe(folder / "third.toml", tensors, ("Effusion",), more='architecture = "timm:test_resnet"')
    return folder


def evaluate(hospital: Hospital, out: Path, *arguments: object) -> Ended:
    return flwr_client("evaluate", hospital.folder, *arguments, "--out", out)


def figures(ended: Ended, out: Path) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    content: dict[str, Any] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    return content


def select(content: dict[str, Any], model: str, name: str, **group: str) -> dict[str, Any]:
    (row,) = [
        row
        for row in content["figures"]
        if (row["model"], row["class"], row.get("group")) == (model, name, group.get("group"))
    ]
    found: dict[str, Any] = row
    return found


def test_images_of(hospital: Hospital) -> ImageSet:
    return load_site_data(read_site_settings(hospital.folder)).make_present_site()[0].test


test_images_of.__test__ = False  # type: ignore[attr-defined]


def test_three_models_of_three_kinds_are_scored_on_the_test_part_alone(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = evaluate(hospital, out, models / "run", models / "other.toml", models / "third.toml")
    content, images = figures(ended, out), test_images_of(hospital)
    (data,) = content["data"]
    assert (data["images"], data["patients"]) == (len(images), 60) == (120, 60)
    assert [model["kind"] for model in content["models"]] == ["run", "onnx", "timm"]
    scores = compute_picture_probabilities(load_model(models / "run"), images)
    for column, name in enumerate(CLASSES):
        labels, row = images.labels[:, images.class_names.index(name)], select(content, "run", name)
        assert row["auroc"] == pytest.approx(roc_auc_score(labels, scores[:, column]))
        assert row["average_precision"] == pytest.approx(average_precision_score(labels, scores[:, column]))
        assert row["auroc_interval"][0] < row["auroc"] < row["auroc_interval"][1]
    # The third model has one class, and no class of the run's is counted as absent.
    assert {row["class"] for row in content["figures"] if row["model"] == "third"} == {"Effusion"}
    assert "Mass" not in {row["class"] for row in content["figures"]}
    coverage = {each["model"]: each for each in content["coverage"]}
    assert coverage["run"]["not_annotated"] == ["Mass"]
    assert coverage["third"]["not_in_model"] == ["Cardiomegaly"]
    # "Erguss" is a synonym of Effusion, with a threshold that was stated.
    (point,) = select(content, "other", "Effusion")["points"]
    assert (point["rule"], point["threshold"]) == ("stated", 0.4)


def test_models_are_compared_on_the_same_images_by_patient_because_patients_have_two_images(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    content = figures(evaluate(hospital, out, models / "run", models / "other.toml"), out)
    compared = {each["class_name"]: each for each in content["comparisons"]}
    assert set(compared) == set(CLASSES)
    for name, each in compared.items():
        difference = select(content, "run", name)["auroc"] - select(content, "other", name)["auroc"]
        assert each["difference"]["value"] == pytest.approx(difference, abs=1e-6)
        assert each["test"] == "bootstrap by patient"
        assert each["p_value"] == each["patient_p"] != each["delong_p"]
        assert each["holm_p"] >= each["p_value"]


def test_subgroups_by_columns_that_the_user_names_divide_the_images(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    content = figures(evaluate(hospital, out, models / "run", "--by", "sex", "--by", "age:0,40,65"), out)
    whole = select(content, "run", "Effusion")
    for column, groups in (
        ("sex", ["F", "M", "not stated"]),
        ("age", ["0 to below 40", "40 to below 65", "65 and more"]),
    ):
        rows = [row for row in content["figures"] if row.get("column") == column and row["class"] == "Effusion"]
        assert [row["group"] for row in rows] == groups
        assert sum(row["positives"] for row in rows) == whole["positives"]
    table = {row["image"]: row for row in hospital.table}
    women = [row for row in table.values() if row["part"] == "test" and row["sex"] == "F"]
    row = select(content, "run", "Effusion", group="F")
    assert row["positives"] + row["negatives"] == len(women)
    assert row["positives"] == sum(each["Effusion"] == "1" for each in women)
    ended = evaluate(hospital, tmp_path / "none", models / "run", "--by", "sexe")
    assert ended.code == 2
    assert 'Did you mean "sex"?' in ended.err


def test_of_all_images_the_first_line_of_terminal_and_page_says_that_runs_trained_on_some(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = evaluate(hospital, out, models / "run", "--all")
    content = figures(ended, out)
    assert content["data"][0]["images"] == 240
    first = "All images of this site count, also those that its runs trained on."
    assert ended.out.startswith(f"! {first}")
    page = (out / "evaluation.html").read_text(encoding="utf-8")
    assert page.index(first) < page.index("<h1>")


def test_of_models_of_others_the_first_line_says_that_nobody_knows_what_they_were_trained_on(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    ended = evaluate(hospital, tmp_path / "out", models / "third.toml")
    assert ended.out.startswith("! Nobody knows here on which images third was trained.")


def test_patients_who_opted_out_and_remembered_parts_count(models: Path, tmp_path: Path) -> None:
    north = hospital_in(tmp_path / "north", images=60)
    north.edit('split_column = "part"\n', "")
    images = load_site_data(read_site_settings(north.folder)).splits.test
    content = figures(evaluate(north, tmp_path / "a", models / "run"), tmp_path / "a")
    assert content["data"][0]["images"] == len(images)
    gone = images.patients[0]
    north.edit("image_size = 32\n", f'image_size = 32\nopt_out = ["{gone}"]\n')
    content = figures(evaluate(north, tmp_path / "b", models / "run"), tmp_path / "b")
    assert content["data"][0]["images"] == int((images.patients != gone).sum())
    assert "1 patient who opted out left out" in content["data"][0]["about"]
    assert not PatientPartMemory(north.folder / "state").path.exists()  # the command only looks


def test_a_model_of_another_image_size_is_scored_on_images_that_are_read_in_that_size(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    run = write_run_model(tmp_path / "run", CLASSES)
    text = (run / "model.json").read_text(encoding="utf-8")
    (run / "model.json").write_text(text.replace('"height": 32', '"height": 48').replace('"width": 32', '"width": 48'))
    content = figures(evaluate(hospital, tmp_path / "out", run), tmp_path / "out")
    other = figures(evaluate(hospital, tmp_path / "b", models / "run"), tmp_path / "b")
    assert select(content, "run", "Effusion")["positives"] == select(other, "run", "Effusion")["positives"]
    assert select(content, "run", "Effusion")["auroc"] != select(other, "run", "Effusion")["auroc"]


def test_files_are_for_the_owner_alone_and_csv_has_the_figures_of_json(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    content = figures(evaluate(hospital, out, models / "run", models / "other.toml"), out)
    names = {"evaluation.html", "evaluation.json", "figures.csv", "comparisons.csv"}
    assert {path.name for path in out.iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}
    with (out / "figures.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(content["figures"])
    for row, of_json in zip(rows, content["figures"], strict=True):
        assert float(row["auroc"]) == pytest.approx(of_json["auroc"], abs=1e-6)
        assert int(row["positives"]) == of_json["positives"]
    assert evaluate(hospital, out, models / "run").code == 2  # nothing is written over


def test_failures_are_the_worst_images_of_each_class_on_a_page_of_their_own(
    hospital: Hospital, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = evaluate(hospital, out, models / "run", models / "third.toml", "--failures", 2)
    assert ended.code == 0, ended.err
    assert "Delete it when you have looked" in ended.out
    page = out / "failures.html"
    assert page.stat().st_mode & 0o777 == 0o600
    html = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<h2 .*?: (run|third)</h2>", html)) == 3  # two classes of the run, one of the third
    assert html.count("<img ") == 3 * 2 * 2
    images = test_images_of(hospital)
    scores = compute_picture_probabilities(load_model(models / "run"), images)[:, CLASSES.index("Effusion")]
    labels = images.labels[:, images.class_names.index("Effusion")]
    assert images.lines is not None
    by_score = np.argsort(scores, kind="stable")
    missed, alarms = by_score[labels[by_score] == 1][:2], by_score[labels[by_score] == 0][-1:-3:-1]
    worst = [*missed, *alarms]
    (section,) = [part for part in html.split("<section>") if "Effusion: run</h2>" in part]
    shown = re.findall(r'alt="(.*?)"', section)
    assert shown == [hospital.table[images.lines[row] - 2]["image"] for row in worst]
    # The figures can be passed on: no name of an image is among them.
    assert "data:image" not in (out / "evaluation.html").read_text(encoding="utf-8")
    assert shown[0] not in (out / "evaluation.json").read_text(encoding="utf-8")


def test_the_page_of_an_earlier_evaluation_does_not_stay_beside_new_figures(hospital: Hospital, models: Path) -> None:
    for options, is_there in ((("--failures", 1), True), ((), False)):
        assert flwr_client("evaluate", hospital.folder, models / "run", *options).code == 0
        assert (hospital.folder / "evaluation" / "failures.html").exists() == is_there


def test_models_that_cannot_be_scored_are_refused_before_images_are_read(hospital: Hospital, tmp_path: Path) -> None:
    file = write_exported_program(tmp_path / "a.pt2", 1)
    path = describe(tmp_path / "a.toml", file, ("Effusion",))
    ended = evaluate(hospital, tmp_path / "out", path)
    assert ended.code == 2
    assert "can run any program" in ended.err
    assert evaluate(hospital, tmp_path / "out", path, "--trust", file).code == 0
    foreign = describe(tmp_path / "b.toml", write_onnx_model(tmp_path / "b.onnx", 1), ("Fracture",))
    ended = evaluate(hospital, tmp_path / "other", foreign)
    assert ended.code == 2
    assert 'scores "Fracture", and the images are labelled "Cardiomegaly", "Effusion"' in ended.err
    assert not (tmp_path / "other").exists()


def test_the_same_command_gives_the_same_bytes(hospital: Hospital, models: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert evaluate(hospital, tmp_path / name, models / "run", models / "other.toml").code == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert np.isfinite(json.loads((tmp_path / "a" / "evaluation.json").read_text())["figures"][0]["auroc"])
