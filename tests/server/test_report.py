"""Facts about the HTML reports."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from common.metrics.auroc import ClassMetrics, summarise
from common.metrics.multi_class import ClientAccuracy, MultiClassMetrics
from common.system.plain_text import duration, format_rounds, number, signed, size
from server.reporting.run_claims import run_result
from server.reporting.run_figures import draw_density_of_sites
from server.reporting.run_report import write_run_report
from server.runs.reader import read_run
from server.runs.tracking import flatten_settings
from studies.claims import format_p_value
from studies.comparison import compare
from studies.comparison_report import write_comparison_report
from tests.server.reports import NAMES, RESULTS, body_text, check_page, write

SCORED = MultiClassMetrics(0.625, 0.5, 0.875, 0.55, 1600)
ACCURACY = ClientAccuracy(0.7, 3, 0.75, 2, {"<b>x</b>": 0.5, "north": 0.7, "south": 0.9})


def write_multi_class(folder: Path, accuracy: ClientAccuracy = ACCURACY, **more: Any) -> Path:
    test = asdict(summarise(RESULTS, {"edema"}, set(NAMES[2:]))) | {"multi_class": asdict(SCORED)}
    write(folder, test=test, client_accuracy=asdict(accuracy), **more)
    lines = [
        {"round": 1, "train_loss": 0.9},
        {"round": 2, "train_loss": 0.7, "test_accuracy": {"mean": 0.65, "pooled": 0.75}},
        {"round": 3, "train_loss": 0.6, "test_accuracy": {"mean": 0.7, "pooled": 0.6}},
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def multi_class_html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_multi_class(tmp_path_factory.mktemp("report") / "run")
    return write_run_report(folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run_html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run_report(write(tmp_path_factory.mktemp("report") / "run")).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparison_html(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("comparison")
    better = {n: ClassMetrics(r.auroc and r.auroc + 0.05, 0.5, 0.5, 9, 9) for n, r in RESULTS.items()}
    test = asdict(summarise(better, {"edema"}, set(NAMES[2:])))
    runs = [write(root / "0"), write(root / "1", name="<u>other</u>", test=test), write(root / "2", seed=2)]
    return write_comparison_report(compare([read_run(run) for run in runs]), root / "all.html").read_text("utf-8")


@pytest.mark.parametrize("page", ["run_html", "comparison_html", "multi_class_html"])
def test_a_page_is_well_formed_whole_in_itself_and_coloured_by_its_style(
    page: str, request: pytest.FixtureRequest
) -> None:
    check_page(request.getfixturevalue(page))


def test_names_are_escaped_and_shown_as_they_are(run_html: str) -> None:
    assert "<b>x</b>" not in run_html
    for name in ("<b>x</b>", "$x_1$ & <i>node</i>", "结节", "no <answer>", "surgical <script>alert(1)</script>"):
        assert name in body_text(run_html)


@pytest.mark.parametrize(
    ("page", "facts"),
    [
        ("run_html", ["0.665", "1.5 MB", "1,200", "ab" * 32, "cd" * 32, "training.lr", "5e-05", "best round: 2"]),
        ("run_html", ["1–3 (3)", "75 %", "n/a: no positive test image"]),
        ("multi_class_html", ["Accuracy is 0.625 over 1,600 images.", "0.6250.5000.8750.5501,600"]),
        ("multi_class_html", ["AccuracySensitivitySpecificityF1Test images", "every site alike (BMCTA)0.7003"]),
        ("multi_class_html", ["images pooled (BTA)0.7502", "3 sites, from 0.500 (<b>x</b>) to 0.900 (south)"]),
    ],
)
def test_a_run_report_holds_what_the_run_folder_says(
    page: str, facts: list[str], request: pytest.FixtureRequest
) -> None:
    text = body_text(request.getfixturevalue(page))
    assert [fact for fact in facts if fact not in text] == []


def test_a_run_of_yes_and_no_questions_says_nothing_of_accuracy_over_classes(run_html: str) -> None:
    assert not re.search("BMCTA|over all classes|Accuracy at the sites", body_text(run_html))


def test_the_density_has_a_tick_for_every_site() -> None:
    svg = ElementTree.fromstring(draw_density_of_sites([0.5, 0.7, 0.9, 0.9]))
    ticks = [path for path in svg.iter("path") if "var(--vermilion)" in path.get("style", "")]
    assert len(ticks) == 4 + 1  # and one in the legend


def test_sites_that_are_all_alike_have_no_density_and_the_report_says_so(tmp_path: Path) -> None:
    alike = ClientAccuracy(0.7, 1, 0.7, 1, {"north": 0.7, "south": 0.7})
    text = body_text(write_run_report(write_multi_class(tmp_path / "run", alike)).read_text(encoding="utf-8"))
    assert "No density is drawn" in text


def test_a_comparison_shows_measures_of_one_class_an_image_where_a_run_has_them(tmp_path: Path) -> None:
    runs = [read_run(write_multi_class(tmp_path / "0")), read_run(write(tmp_path / "1", name="other"))]
    text = body_text(write_comparison_report(compare(runs), tmp_path / "all.html").read_text(encoding="utf-8"))
    assert "BMCTABTA" in text
    assert "0.6250.5000.8750.5500.7000.750" in text


def test_the_same_run_gives_the_same_bytes(tmp_path: Path, run_html: str) -> None:
    assert write_run_report(write(tmp_path / "run")).read_text(encoding="utf-8") == run_html


def test_a_run_without_rounds_or_test_labels_still_has_a_report(tmp_path: Path) -> None:
    empty = asdict(summarise({}, set(), set()))
    folder = write(tmp_path / "run", test=empty, per_site={}, seconds={}, rounds=0, best_round=None, experiment={})
    (folder / "rounds.jsonl").write_text("")
    text = body_text(write_run_report(folder).read_text(encoding="utf-8"))
    assert "none of 5 classes has an AUROC" in text
    assert "n/a: not among the test set's labels" in text


def test_a_thousand_sites_are_cut_and_the_report_says_so(tmp_path: Path) -> None:
    sites = {f"site{n:04}": {"classes": NAMES} for n in range(1000)}
    text = body_text(write_run_report(write(tmp_path / "run", sites=sites)).read_text(encoding="utf-8"))
    assert "The first 60 of 1000 sites" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"summary\.json: cannot be read"):
        write_run_report(tmp_path)


def test_a_comparison_says_where_the_reference_stands(comparison_html: str) -> None:
    text = body_text(comparison_html)
    assert "<u>other</u>" in text
    assert "could not be tested against <u>other</u>" in text
    assert "all 4 differences are equal" in text


def test_a_comparison_links_the_pages_of_its_runs(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / f"{name} run", name=name)) for name in ("one", "two")]
    (tmp_path / "in").mkdir()
    elsewhere = write_comparison_report(compare(runs), tmp_path / "in" / "all.html", runs).read_text(encoding="utf-8")
    html = write_comparison_report(compare(runs), tmp_path / "all.html", runs).read_text(encoding="utf-8")
    assert '1 (<a href="one%20run/report.html">1</a>)' in html
    assert "report.html" not in elsewhere


def test_one_method_alone_has_a_report_too(tmp_path: Path) -> None:
    comparison = compare([read_run(write(tmp_path / "run"))])
    text = body_text(write_comparison_report(comparison, tmp_path / "all.html").read_text(encoding="utf-8"))
    assert "nothing to compare it with" in text


def test_the_sentence_names_the_groups_only_where_they_differ_from_all(tmp_path: Path) -> None:
    test = asdict(summarise({"edema": RESULTS["edema"]}, {"edema"}, set()))
    run = read_run(write(tmp_path / "run", test=test, classes=["edema"]))
    assert run_result(run) == (
        "After 3 rounds with 2 of 3 sites (the model is that of round 2), "
        "the mean AUROC on the test set is 0.810 over 1 class."
    )


def test_numbers_read_as_people_write_them() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_530_000, 999_600, 250_000_000, None)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "1.0 MB", "250 MB", "n/a")
    ]
    assert [duration(s) for s in (4.24, 185, 7620, None)] == ["4.2 s", "3 min 05 s", "2 h 07 min", "n/a"]
    assert [signed(d) for d in (0.0214, -0.0214, -0.0001, None)] == ["+0.021", "−0.021", "0.000", "n/a"]
    assert [format_p_value(p) for p in (0.00099, 0.0124, None)] == ["p < 0.001", "p = 0.012", "n/a"]
    assert number(float("nan")) == "not finite"
    assert format_rounds([9, 3, 4, 5]) == "3–5, 9"


def test_settings_are_flattened_to_dotted_keys() -> None:
    nested = {"run": {"seed": 1, "name": None}, "levels": [1, 2], "ray": False, "method": {}}
    assert list(flatten_settings(nested)) == [
        ("run.seed", "1"), ("run.name", "–"), ("levels", "1, 2"), ("ray", "false"), ("method", "–")
    ]  # fmt: skip
