"""Facts about the model card."""

import json
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from common.data.base.spec import DigitsSpec
from common.data.load import load
from common.data.partition.division import site_images
from common.data.partition.partition import partition
from common.data.partition.spec import ClassListsSpec
from common.errors import BadInput
from common.metrics.auroc import mean_metrics
from common.models.saved import load_model, read_description
from server.export.prediction import score_pictures
from server.reporting.model_card import escaped, model_card, write_model_card
from server.reporting.run_report import write_run_report
from tests.federations import federation

PARSER = MarkdownIt("commonmark").enable("table")


def cells(card: str) -> list[list[str]]:
    """Every row of every table, as a reader sees it."""
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
    """The card of a run whose summary says something else here and there."""
    path = folder / "summary.json"
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(json.loads(before) | changes), encoding="utf-8")
        return model_card(folder)
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    federation(
        folder,
        "partition={kind='class_lists', lists={north=['0','1','2','3','4'], south=['9','8','7','6','5','0']}}",
        pages=True,
    )
    return folder / "run"


def summary(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_a_run_ends_with_a_card_that_has_its_figures_owners_and_hashes(run: Path) -> None:
    card, said, saved = (run / "MODEL_CARD.md").read_text(encoding="utf-8"), summary(run), read_description(run)
    seven = said["test"]["per_class"]["7"]
    counts = [str(seven["positives"]), str(seven["negatives"])]
    assert row(card, "0")[1] == "north and south (2 of 2)"
    assert [each[1:] for each in cells(card.partition("### Thresholds")[0]) if each[0] == "7"] == [
        ["south (1 of 2)", str(said["sites"]["south"]["positives"]["7"])],
        [f"{seven['auroc']:.3f}", f"{seven['average_precision']:.3f}", f"{seven['balanced_accuracy']:.3f}", *counts],
    ]
    assert row(card, "north")[1:3] == ["0, 1, 2, 3 and 4", str(said["sites"]["north"]["train_samples"])]
    assert row(card, "Label contract, SHA-256")[1] == said["contract_hash"] == saved.label_contract_sha256
    assert row(card, "Model, SHA-256 of its values")[1] == said["model_sha256"]
    assert row(card, "training.lr")[1] == "0.003"
    assert row(card, "Version of flwr")[1] == version("flwr")
    assert "It is not a medical device." in card
    assert "trained **in simulation**" in card
    assert "Scored: global model" in card


def test_limits_are_those_of_the_run(run: Path) -> None:
    said = summary(run)
    per_class = said["test"]["per_class"]
    per_class["7"] = dict.fromkeys(("auroc", "average_precision", "balanced_accuracy")) | {
        "positives": 0,
        "negatives": 9,
    }
    per_class["8"] |= {"positives": 29, "negatives": 300}
    per_class["9"] |= {"positives": 30, "negatives": 300}
    per_class["3"] |= {"positives": 1000, "negatives": 1}
    card = changed(run, test=said["test"] | {"pooled": None})
    assert "- **1 of 10 classes was not tested: “7” (no positive test image).**\n" in card
    assert "- The figures for “8” rest on 29 positive test images.\n" in card
    assert "- The figures for “3” rest on 1 negative test image.\n" in card
    assert "rest on 30" not in card
    assert "- “1”, “2”, “3” and “4” are annotated by north alone: " in card
    assert "“0” is annotated by" not in card


def test_of_a_run_that_lets_no_test_figure_out_the_card_has_no_figure_and_no_zero(run: Path) -> None:
    none = asdict(mean_metrics(()))
    assert (none["positives"], none["negatives"]) == (None, None)
    test = summary(run)["test"]
    withheld = {"per_class": dict.fromkeys(test["per_class"], none), "withheld": "figures stay at the sites"}
    card = changed(run, test=test | {"pooled": None, "mean_auroc": None} | withheld)
    assert "Not scored: figures stay at the sites." in card
    assert "balanced accuracy | test images" not in card


def test_absences_and_what_was_scored_are_limits(tmp_path: Path) -> None:
    federation(tmp_path, pages=True)
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[1] |= {"sites": ["site-1", "site-3"], "absent": {"site-2": "late"}}
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    note = "mean over the sites' own test parts"
    card = changed(run, backend="network", test=summary(run)["test"] | {"note": note, "pooled": None})
    assert "- site-2 was absent in 1 of 2 rounds (2).\n" in card
    assert f"- The score is the {note}, and each count of test images is that of the site with most.\n" in card
    assert row(card, "site-2")[-1] == "1 of 2"
    assert row(card, "site-1")[-1] == "2 of 2"
    assert "trained by 3 sites that kept their images" in card
    assert "in simulation" not in card


def test_card_and_report_name_a_site_that_harmed_the_model(tmp_path: Path) -> None:
    federation(tmp_path, pages=True)
    path = tmp_path / "run" / "summary.json"
    excluded = {"site-3": "its trunk moves 40 times as far as usual"}
    path.write_text(json.dumps(summary(path.parent) | {"excluded": excluded}), encoding="utf-8")
    said = f"site-3 harmed the model and was left out for the rest of the run: {excluded['site-3']}."
    assert f"- **{said}**\n" in model_card(path.parent)
    assert said in write_run_report(path.parent).read_text(encoding="utf-8")


def test_counts_are_told_as_far_as_policies_do(run: Path) -> None:
    sites = summary(run)["sites"]
    sites["north"]["positives"] = {"0": 1200, "1": None, "2": 7}
    sites["south"]["positives"] = {"0": 34, "5": 9}
    assert row(changed(run, sites=sites), "0")[2] == "1,234"
    assert row(changed(run, sites=sites), "1")[2] == "unknown"
    assert row(changed(run, sites=sites), "2")[2] == "7"
    assert row(changed(run, sites=sites), "3")[2] == "unknown"
    del sites["south"]["positives"]["0"]
    assert row(changed(run, sites=sites), "0")[2] == "1,200 at 1 of 2 sites, else unknown"


def test_a_simulation_counts_what_its_sites_hold_where_the_method_does_not_ask(run: Path) -> None:
    sites = summary(run)["sites"]
    spec = ClassListsSpec(kind="class_lists", lists={name: site["classes"] for name, site in sites.items()})
    division = partition(load(DigitsSpec(kind="digits", image_size=16), Path()), spec, seed=3)
    held = {part.site: site_images(division.splits, part).train for part in division.parts}
    assert {site: found["positives"] for site, found in sites.items()} == {
        site: {name: int((images.labels[:, c] == 1).sum()) for c, name in enumerate(images.class_names)}
        for site, images in held.items()
    }
    assert set(sites["south"]["positives"]) == set(sites["south"]["classes"])


def test_thresholds_are_in_the_card_where_sites_sent_scores_and_else_it_says_that_there_are_none(run: Path) -> None:
    card, points = model_card(run), summary(run)["test"]["operating_points"]
    assert len(points) > 5
    for name, (youden, _) in points.items():
        found = [row for row in cells(card) if row[:2] == [name, "Youden"]]
        assert [(row[2], row[3]) for row in found] == [
            (f"{youden['threshold']:.4g}", " + ".join(map(str, youden["chosen_on"])))
        ]
    assert "thresholds have been chosen" not in card
    without = changed(run, test=summary(run)["test"] | {"operating_points": {}})
    assert "no thresholds have been chosen" in without
    assert "### Thresholds" not in without


def test_a_method_that_asks_for_label_counts_has_them_in_its_card(tmp_path: Path) -> None:
    federation(tmp_path, "run.method=fedsld", "run.rounds=1", "partition.shared=10", pages=True)
    card, sites = (tmp_path / "run" / "MODEL_CARD.md").read_text(encoding="utf-8"), summary(tmp_path / "run")["sites"]
    shown = sum(site["positives"]["4"] for site in sites.values())
    assert 0 < shown < sum(site["train_samples"] for site in sites.values())
    assert row(card, "4")[2] == str(shown)


STRANGE = [
    "a|b",
    "<img src=x>",
    "**bold**",
    "[x](y)",
    "a_b_c",
    "`code`",
    "\\",
    "&lt;",
    "a\n| b",
    "# x",
    "~~x~~",
    "1. x",
]


@pytest.mark.parametrize("name", STRANGE)
def test_whatever_a_name_is_it_is_shown_as_it_is_in_one_cell(name: str) -> None:
    assert cells(f"| a | b |\n| --- | --- |\n| {escaped(name)} | 1 |\n")[1] == [" ".join(name.split()), "1"]


def test_names_of_sites_and_classes_cannot_change_the_card(run: Path) -> None:
    said = summary(run)
    evil = "x | <b>y</b> | [z](http://z)"
    said["sites"][evil] = said["sites"].pop("north")
    card = changed(run, sites=said["sites"], name="**free** <script>")
    assert row(card, evil)[1] == "0, 1, 2, 3 and 4"
    html = PARSER.render(card)
    assert "<b>" not in html
    assert "<script>" not in html
    assert not re.search(r"<a ", html)
    assert "Model card: **free** &lt;script&gt;</h1>" in html


def test_the_lines_for_use_give_what_predict_gives(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = load(DigitsSpec(kind="digits"), Path()).test.images[:4]
    card = (run / "MODEL_CARD.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    namespace: dict[str, Any] = {"images": images}
    monkeypatch.chdir(run.parent)
    exec(code.replace("FOLDER", "run"), namespace)
    assert (namespace["probabilities"].to_numpy() == score_pictures(load_model(run), images)).all()


def test_a_run_without_a_global_model_has_no_card(tmp_path: Path) -> None:
    federation(tmp_path, "run.method=individual", "run.rounds=1", pages=True)
    assert not (tmp_path / "run" / "MODEL_CARD.md").exists()
    assert write_model_card(tmp_path / "run") is None


def test_a_summary_of_another_model_makes_no_card(run: Path) -> None:
    with pytest.raises(BadInput, match=r"A model card needs both of one run\."):
        changed(run, model_sha256="0" * 64)
