"""``flwr-server evaluate`` over real processes: one hospital that allows it, one that does not, one not connected."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

from polyclinic.client.site.settings import load_site, read_site_as_trained, read_site_settings
from polyclinic.common.evaluation.foreign import find_model_file
from polyclinic.common.evaluation.models import open_model
from tests.common.evaluation.models import describe, write_onnx_model, write_run_model
from tests.network.real import Coordinator, Machine, Site, flwr_server, lines_of, machine

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.usefixtures("no_proxy")]

SITE = """\
name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "file"
patient_column = "patient"
split_column = "part"
label_columns = ["Effusion", "Mass"]
image_size = 16

[policy]
{policy}
"""
POLICIES = {"east": "evaluate = true", "north": ""}


def make_hospital(folder: Path, name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(120):
        Image.fromarray(random.integers(0, 255, (40, 40), dtype=np.uint8)).save(folder / "images" / f"{number}.png")
        labels = {column: int(random.random() < 0.4) for column in ("Effusion", "Mass")}
        part = "test" if number < 80 else "train"
        rows.append({"file": f"{number}.png", "patient": f"P{number}", "part": part, **labels})
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "site.toml").write_text(SITE.format(name=name, policy=POLICIES[name]), encoding="utf-8")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Coordinator, dict[str, Site]]]:
    folder = tmp_path_factory.mktemp("scoring")
    here: Machine
    with machine(folder / "machine") as here:
        for seed, name in enumerate(POLICIES):
            make_hospital(folder / "data" / name, name, seed)
        coordinator = Coordinator(here)
        sites = {name: coordinator.admit(coordinator.site(folder / "data" / name)) for name in POLICIES}
        coordinator.admit(coordinator.site(folder / "data" / "east", "west"))  # never started
        coordinator.start()
        for site in sites.values():
            site.connect()
        coordinator.sees(*sites.values())
        yield coordinator, sites


def test_models_are_scored_where_the_hospital_allows_it_and_the_others_are_named(
    hospitals: tuple[Coordinator, dict[str, Site]], tmp_path: Path
) -> None:
    coordinator, sites = hospitals
    run = write_run_model(tmp_path / "run", ("Effusion", "Mass"))
    file = describe(tmp_path / "other.toml", write_onnx_model(tmp_path / "other.onnx", 1), ("Effusion",))
    ended = flwr_server("evaluate", coordinator.folder, run, file, "--out", tmp_path / "out", "--deadline", 240)
    assert ended.code == 1, ended.err  # two hospitals have no figures
    for words in ("west did not answer: it is not connected", "north did not answer: ", "evaluate = ["):
        assert words in " ".join(ended.out.split())
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert [data["name"] for data in content["data"]] == ["east"]
    settings = read_site_settings(sites["east"].folder)
    model = open_model(find_model_file(file, frozenset()), "other")
    assert model.form is not None
    # The hospital trains on images of 16 pixels, and read them in the model's 32.
    images = read_site_as_trained(settings, model.form, lambda line: None).test
    assert images.stored.shape[1:] == (32, 32)
    scores, labels = model.compute_scores(images)[:, 0], load_site(settings).test.labels[:, 0]
    (row,) = [row for row in content["figures"] if (row["model"], row["class"]) == ("other", "Effusion")]
    assert (row["positives"], row["negatives"]) == ((labels == 1).sum(), (labels == 0).sum())
    assert row["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    page = (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")
    assert page.index("west did not answer") < page.index("<h1>")
    assert not (sites["east"].folder / "state" / "scoring").exists()
    audit = lines_of(sites["north"].folder / "state" / "audit.jsonl")
    told = [(line["record"], line.get("decision"), line.get("rule")) for line in audit if line.get("run")]
    assert told[0] == ("ScoringRequest", "deny", "policy.evaluate")


def test_a_model_that_is_none_and_a_hospital_that_is_not_admitted_are_refused(
    hospitals: tuple[Coordinator, dict[str, Site]], tmp_path: Path
) -> None:
    coordinator, _ = hospitals
    run = write_run_model(tmp_path / "run", ("Effusion",))
    assert flwr_server("evaluate", coordinator.folder, tmp_path / "none").code == 2
    ended = flwr_server("evaluate", coordinator.folder, run, "--site", "nowhere")
    assert ended.code == 2
    assert "nowhere" in ended.err
    assert flwr_server("evaluate", coordinator.folder, run, "--by", "device").code == 2
