"""The model card, and the test images in a simulated run's report."""

import base64
import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image

from polyclinic.common.config import Experiment
from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import average_metrics_over_models
from polyclinic.common.models.network import SplitNetwork, build_network, compute_image_probabilities
from polyclinic.common.models.saved import load_model, read_model_description
from polyclinic.common.models.scoring import compute_picture_probabilities
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.data.base.image_set import ImageSet
from polyclinic.data.base.spec import DigitsDatasetSpec
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.data.load import load_dataset
from polyclinic.data.partition.division import select_site_images
from polyclinic.data.partition.partition import partition_dataset
from polyclinic.data.partition.spec import ClassListsPartitionSpec
from polyclinic.server.reporting.model_card import escape_markdown, render_model_card, write_model_card
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.samples import (
    MAX_CLASSES,
    MAX_PICTURE_BYTES,
    report_shows_sample_images,
    write_sample_images,
)
from tests.federations import ALL_DIGITS, experiment, federation
from tests.network.real import lines_of

PARSER = MarkdownIt("commonmark").enable("table")
ATTRIBUTES = ("auroc", "average_precision", "balanced_accuracy")


def cells(card: str) -> list[list[str]]:
    """Return every row of every table, as a reader sees it."""
    rows: list[list[str]] = []
    for token in PARSER.parse(card):
        if token.type == "tr_open":
            rows.append([])
        if token.type == "inline" and rows and token.level >= 4:
            rows[-1].append("".join(child.content for child in token.children or ()))
    return rows


def row(card: str, first: str) -> list[str]:
    return next(row for row in cells(card) if row[0] == first)


def changed(folder: Path, **changes: Any) -> str:
    """Return the card of a run whose summary says something else here and there."""
    path = folder / "summary.json"
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(json.loads(before) | changes), encoding="utf-8")
        return render_model_card(folder)
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    lists = "{north=['0','1','2','3','4'], south=['9','8','7','6','5','0']}"
    federation(folder, ALL_DIGITS, f"partition={{kind='class_lists', lists={lists}}}", pages=True)
    return folder / "run"


@pytest.fixture(scope="module")
def three_sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the digits experiment, whose second site missed its second round."""
    folder = tmp_path_factory.mktemp("three-sites")
    federation(folder, ALL_DIGITS, pages=True)
    lines = lines_of(folder / "run" / "rounds.jsonl")
    lines[1] |= {"sites": ["site-1", "site-3"], "absent": {"site-2": "late"}}
    (folder / "run" / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder / "run"


def summary(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_a_run_ends_with_a_card_that_has_its_figures_owners_and_hashes(run: Path) -> None:
    card, content = (run / "MODEL_CARD.md").read_text(encoding="utf-8"), summary(run)
    seven = content["test"]["per_class"]["7"]
    counts = [str(seven["positives"]), str(seven["negatives"])]
    assert row(card, "0")[1] == "north and south (2 of 2)"
    assert [each[1:] for each in cells(card.partition("### Thresholds")[0]) if each[0] == "7"] == [
        ["south (1 of 2)", str(content["sites"]["south"]["positives"]["7"])],
        [*(f"{seven[name]:.3f}" for name in ATTRIBUTES), *counts],
    ]
    assert row(card, "north")[1:3] == ["0, 1, 2, 3 and 4", str(content["sites"]["north"]["train_samples"])]
    contract = read_model_description(run).label_contract_sha256
    assert row(card, "Label contract, SHA-256")[1] == content["contract_hash"] == contract
    assert row(card, "Model, SHA-256 of its values")[1] == content["model_sha256"]
    assert row(card, "training.lr")[1] == "0.003"
    assert row(card, "Version of flwr")[1] == version("flwr")
    for sentence in ("It is not a medical device.", "trained **in simulation**", "Scored: global model"):
        assert sentence in card


def test_limits_are_those_of_the_run(run: Path) -> None:
    test = summary(run)["test"]
    per_class = test["per_class"]
    per_class["7"] = dict.fromkeys(ATTRIBUTES) | {"positives": 0, "negatives": 9}
    per_class["8"] |= {"positives": 29, "negatives": 300}
    per_class["9"] |= {"positives": 30, "negatives": 300}
    per_class["3"] |= {"positives": 1000, "negatives": 1}
    card = changed(run, test=test | {"pooled": None})
    for limit in (
        "- **1 of 10 classes was not tested: “7” (no positive test image).**\n",
        "- The figures for “8” rest on 29 positive test images.\n",
        "- The figures for “3” rest on 1 negative test image.\n",
        "- “1”, “2”, “3” and “4” are annotated by north alone: ",
    ):
        assert limit in card
    assert "rest on 30" not in card
    assert "“0” is annotated by" not in card


def test_of_a_run_that_lets_no_test_figure_out_the_card_has_no_figure_and_no_zero(run: Path) -> None:
    none = asdict(average_metrics_over_models(()))
    assert (none["positives"], none["negatives"]) == (None, None)
    test = summary(run)["test"]
    withheld = {"per_class": dict.fromkeys(test["per_class"], none), "withheld": "figures stay at the sites"}
    card = changed(run, test=test | {"pooled": None, "mean_auroc": None} | withheld)
    assert "Not scored: figures stay at the sites." in card
    assert "balanced accuracy | test images" not in card


def test_absences_and_what_was_scored_are_limits(three_sites: Path) -> None:
    note = "mean over the sites' own test parts"
    card = changed(three_sites, backend="network", test=summary(three_sites)["test"] | {"note": note, "pooled": None})
    assert "- site-2 was absent in 1 of 2 rounds (2).\n" in card
    assert f"- The score is the {note}" in card
    assert [row(card, site)[-1] for site in ("site-1", "site-2")] == ["2 of 2", "1 of 2"]
    assert "trained by 3 sites that kept their images" in card
    assert "in simulation" not in card


def test_card_and_report_name_a_site_that_harmed_the_model(three_sites: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(three_sites, tmp_path / "run"))
    excluded = {"site-3": "its trunk moves 40 times as far as usual"}
    (run / "summary.json").write_text(json.dumps(summary(run) | {"excluded": excluded}), encoding="utf-8")
    sentence = f"site-3 harmed the model and was left out for the rest of the run: {excluded['site-3']}."
    assert f"- **{sentence}**\n" in render_model_card(run)
    assert sentence in write_run_report(run).read_text(encoding="utf-8")


def test_counts_are_shown_as_far_as_policies_let_them_out(run: Path) -> None:
    sites = summary(run)["sites"]
    sites["north"]["positives"] = {"0": 1200, "1": None, "2": 7}
    sites["south"]["positives"] = {"0": 34, "5": 9}
    card = changed(run, sites=sites)
    assert [row(card, name)[2] for name in "0123"] == ["1,234", "unknown", "7", "unknown"]
    del sites["south"]["positives"]["0"]
    assert row(changed(run, sites=sites), "0")[2] == "1,200 at 1 of 2 sites, else unknown"


def test_a_simulation_counts_what_its_sites_hold_where_the_method_does_not_ask(run: Path) -> None:
    sites = summary(run)["sites"]
    spec = ClassListsPartitionSpec(kind="class_lists", lists={name: site["classes"] for name, site in sites.items()})
    division = partition_dataset(load_dataset(DigitsDatasetSpec(kind="digits", image_size=16), Path()), spec, seed=3)
    held = {part.site: select_site_images(division.splits, part).train for part in division.parts}
    assert {site: facts["positives"] for site, facts in sites.items()} == {
        site: {name: int((images.labels[:, c] == 1).sum()) for c, name in enumerate(images.class_names)}
        for site, images in held.items()
    }
    assert set(sites["south"]["positives"]) == set(sites["south"]["classes"])


def test_thresholds_are_in_the_card_where_sites_sent_scores_and_else_it_says_that_there_are_none(run: Path) -> None:
    card, points = render_model_card(run), summary(run)["test"]["operating_points"]
    assert len(points) > 5
    for name, (youden, _) in points.items():
        (cell,) = (row[2:4] for row in cells(card) if row[:2] == [name, "Youden"])
        assert cell == [f"{youden['threshold']:.4g}", " + ".join(map(str, youden["chosen_on"]))]
    assert "thresholds have been chosen" not in card
    without = changed(run, test=summary(run)["test"] | {"operating_points": {}})
    assert "no thresholds have been chosen" in without
    assert "### Thresholds" not in without


def test_a_method_that_asks_for_label_counts_has_them_in_its_card(tmp_path: Path) -> None:
    sites = federation(tmp_path, "run.method=fedsld", "run.rounds=1", "partition.shared=10")["sites"]
    card, count = render_model_card(tmp_path / "run"), sum(site["positives"]["4"] for site in sites.values())
    assert 0 < count < sum(site["train_samples"] for site in sites.values())
    assert row(card, "4")[2] == str(count)


STRANGE = (
    *("a|b", "<img src=x>", "**bold**", "[x](y)", "a_b_c", "`code`"),
    *("\\", "&lt;", "a\n| b", "# x", "~~x~~", "1. x"),
)


def test_whatever_a_name_is_it_is_shown_as_it_is_in_one_cell() -> None:
    for name in STRANGE:
        card = f"| a | b |\n| --- | --- |\n| {escape_markdown(name)} | 1 |\n"
        assert cells(card)[1] == [" ".join(name.split()), "1"]


def test_names_of_sites_and_classes_cannot_change_the_card(run: Path) -> None:
    sites, name = summary(run)["sites"], "x | <b>y</b> | [z](http://z)"
    sites[name] = sites.pop("north")
    card = changed(run, sites=sites, name="**free** <script>")
    assert row(card, name)[1] == "0, 1, 2, 3 and 4"
    html = PARSER.render(card)
    assert not re.search("<b>|<script>|<a ", html)
    assert "Model card: **free** &lt;script&gt;</h1>" in html


def test_the_lines_for_use_give_what_predict_gives(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = load_dataset(DigitsDatasetSpec(kind="digits"), Path()).test.images[:4]
    card = (run / "MODEL_CARD.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    namespace: dict[str, Any] = {"images": images}
    monkeypatch.chdir(run.parent)
    exec(code.replace("FOLDER", "run"), namespace)
    assert (namespace["probabilities"].to_numpy() == compute_picture_probabilities(load_model(run), images)).all()


def test_a_run_without_a_global_model_has_no_card_and_one_without_its_file_of_images_a_report_without_images(
    tmp_path: Path,
) -> None:
    federation(tmp_path, "run.method=individual", "run.rounds=1", "evaluation.sample_grid=false", pages=True)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names.isdisjoint({"MODEL_CARD.md", "samples.json"})
    assert write_model_card(tmp_path / "run") is None
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert ("<img" in page, "img-src" in page) == (False, False)


def test_a_summary_of_another_model_makes_no_card(run: Path) -> None:
    with pytest.raises(BadInput, match="needs both of one run"):
        changed(run, model_sha256="0" * 64)


NAMES = ("a", "b", "c")


def images(count: int, side: int = 16, channels: int = 1, classes: tuple[str, ...] = NAMES) -> ImageSet:
    generator = np.random.default_rng(3)
    shape = (count, side, side) if channels == 1 else (count, side, side, 3)
    labels = generator.integers(0, 2, (count, len(classes))).astype(np.float32)
    blank = np.array([""] * count)
    return ImageSet(generator.integers(0, 256, shape, dtype=np.uint8), labels, classes, blank, blank)


def network(classes: tuple[str, ...] = NAMES, **more: Any) -> SplitNetwork:
    return build_network(ModelSpec(architecture="tiny_cnn", image_size=16, **{"channels": 1, **more}), classes, 0)


def written(folder: Path, model: SplitNetwork, test: ImageSet) -> dict[str, Any]:
    write_sample_images(folder, model, test)
    samples: dict[str, Any] = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return samples


def test_each_class_has_its_surest_right_and_its_gravest_wrong_images(tmp_path: Path) -> None:
    test, model = images(80), network()
    scores = compute_image_probabilities(model, convert_to_channels_first(test.images))
    for column, of_class in enumerate(written(tmp_path, model, test)["classes"]):
        of, shows = scores[:, column], test.labels[:, column] == 1
        expected = [
            *(("found", p) for p in sorted(of[shows & (of > 0.5)], reverse=True)[:2]),
            *(("missed", p) for p in sorted(of[shows & (of <= 0.5)])[:2]),
            *(("false alarm", p) for p in sorted(of[~shows & (of > 0.5)], reverse=True)[:2]),
        ]
        assert [sample["kind"] for sample in of_class["samples"]] == [kind for kind, _ in expected]
        shown = [sample["probability"] for sample in of_class["samples"]]
        np.testing.assert_allclose(shown, [p for _, p in expected])


def test_where_an_image_has_one_class_the_highest_probability_decides(tmp_path: Path) -> None:
    test = images(60)
    truth = np.random.default_rng(1).integers(0, 3, 60)
    test.labels[:] = np.eye(3, dtype=np.float32)[truth]
    model = network(task="multi_class")
    decided = compute_image_probabilities(model, convert_to_channels_first(test.images)).argmax(axis=1)
    for column, of_class in enumerate(written(tmp_path, model, test)["classes"]):
        kinds = {sample["kind"] for sample in of_class["samples"]}
        assert ("found" in kinds) == bool(((decided == column) & (truth == column)).any())
        assert ("false alarm" in kinds) == bool(((decided == column) & (truth != column)).any())


def test_an_image_of_unknown_label_is_not_shown(tmp_path: Path) -> None:
    test = images(40)
    test.labels[:, 0] = np.nan
    assert written(tmp_path, network(), test)["classes"][0] == {"name": "a", "samples": []}


def test_pictures_are_small_however_large_and_many_the_images_are(tmp_path: Path) -> None:
    classes = tuple(f"class {n:02}" for n in range(MAX_CLASSES + 3))
    samples = written(tmp_path, network(classes, channels=3), images(90, 256, 3, classes))
    files = {sample["png"] for of_class in samples["classes"] for sample in of_class["samples"]}
    assert sum(len(base64.b64decode(file)) for file in files) <= MAX_PICTURE_BYTES
    assert (len(samples["classes"]), samples["classes_left_out"]) == (MAX_CLASSES, 3)
    assert max(Image.open(io.BytesIO(base64.b64decode(file))).width for file in files) >= 24


TABLE = {"kind": "npz", "path": "chest.npz", "classes": ["a", "b"]}


@pytest.mark.parametrize(
    ("sections", "shows"),
    [
        ({}, True),
        ({"data": TABLE}, False),
        ({"server_data": TABLE}, False),
        ({"data": TABLE, "evaluation": {"sample_grid": True}}, True),
        ({"evaluation": {"sample_grid": False}}, False),
    ],
)
def test_by_itself_a_report_shows_images_of_nobody_only(sections: dict[str, Any], shows: bool, tmp_path: Path) -> None:
    digits = experiment(tmp_path, ALL_DIGITS).experiment.model_dump()
    assert report_shows_sample_images(Experiment.model_validate(digits | sections)) is shows


def test_a_report_shows_images_with_a_warning_and_nothing_that_is_no_picture(three_sites: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(three_sites, tmp_path / "run"))
    page = (run / "report.html").read_text(encoding="utf-8")
    pictures = [e.get("src", "") for e in ElementTree.fromstring(page).iter() if e.tag == "img"]
    assert pictures
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
    assert "do not pass it on" in page
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    picture = pictures[0].removeprefix("data:image/png;base64,")
    assert not any(picture in (run / name).read_text() for name in ("summary.json", "rounds.jsonl"))

    samples = run / "samples.json"
    samples.write_text(samples.read_text(encoding="utf-8").replace(picture, '\\"><script>'), encoding="utf-8")
    with pytest.raises(BadInput, match=r"samples\.json"):
        write_run_report(run)
