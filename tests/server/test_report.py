"""HTML reports, and the figures of a run's report."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.metrics.auroc import ClassMetrics, summarise_test_results
from polyclinic.common.metrics.multi_class import BestClientAccuracies, MultiClassMetrics
from polyclinic.common.system.plain_text import (
    format_bytes,
    format_duration,
    format_number,
    format_rounds,
    format_signed,
)
from polyclinic.server.reporting.class_figures import MAX_MATRIX_CLASSES, draw_confusion_matrix
from polyclinic.server.reporting.page import AnnotatedClassGroup
from polyclinic.server.reporting.run_claims import describe_run_result
from polyclinic.server.reporting.run_figures import (
    draw_accuracy_density,
    draw_confident_share_by_round,
    draw_label_coverage,
    draw_model_pass_order,
    draw_prototype_similarity,
)
from polyclinic.server.reporting.run_report import write_run_report
from polyclinic.server.runs.reader import read_run
from polyclinic.server.runs.schema import PrototypeSimilarity, RoundFileLine, RoundMethodStatistics, SiteSummary
from polyclinic.server.runs.tracking import flatten_settings
from polyclinic.studies.claims import format_p_value
from polyclinic.studies.comparison import compare_methods
from polyclinic.studies.comparison_report import write_comparison_report
from tests.server.reports import NAMES, RESULTS, body_text, check_page, write

SCORED = MultiClassMetrics(0.625, 0.5, 0.875, 0.55, 1600)
ACCURACY = BestClientAccuracies(0.7, 3, 0.75, 2, {"<b>x</b>": 0.5, "north": 0.7, "south": 0.9})


def write_multi_class(folder: Path, accuracy: BestClientAccuracies = ACCURACY) -> Path:
    test = asdict(summarise_test_results(RESULTS, {"edema"}, set(NAMES[2:]))) | {"multi_class": asdict(SCORED)}
    write(folder, test=test, client_accuracy=asdict(accuracy))
    lines = [
        {"round": 1, "train_loss": 0.9},
        {"round": 2, "train_loss": 0.7, "test_accuracy": {"mean": 0.65, "pooled": 0.75}},
        {"round": 3, "train_loss": 0.6, "test_accuracy": {"mean": 0.7, "pooled": 0.6}},
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def report_text(folder: Path) -> str:
    return body_text(write_run_report(folder).read_text(encoding="utf-8"))


def comparison_text(folder: Path, *runs: Path) -> str:
    written = write_comparison_report(compare_methods([read_run(run) for run in runs]), folder / "all.html")
    return body_text(written.read_text(encoding="utf-8"))


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
    better = {n: ClassMetrics(r.auroc and r.auroc + 0.05, 0.5, 0.5, 40, 9) for n, r in RESULTS.items()}
    test = asdict(summarise_test_results(better, {"edema"}, set(NAMES[2:])))
    runs = [
        write(root / "0"),
        write(root / "1", name="<u>other</u>", test=test, model_sha256="ef" * 32),
        write(root / "2", seed=2),
    ]
    return write_comparison_report(compare_methods([read_run(run) for run in runs]), root / "all.html").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("page", ["run_html", "comparison_html", "multi_class_html"])
def test_a_page_is_well_formed_whole_and_coloured_by_its_style(page: str, request: pytest.FixtureRequest) -> None:
    html = request.getfixturevalue(page)
    check_page(html)
    assert "{{" not in html


def test_names_are_escaped_and_shown_as_they_are_and_the_same_run_gives_the_same_bytes(
    run_html: str, tmp_path: Path
) -> None:
    assert write_run_report(write(tmp_path / "run")).read_text(encoding="utf-8") == run_html
    assert "<b>x</b>" not in run_html
    for name in ("<b>x</b>", "$x_1$ & <i>node</i>", "结节", "no <answer>", "surgical <script>alert(1)</script>"):
        assert name in body_text(run_html)


def test_a_round_that_validation_did_not_choose_is_not_called_the_best(tmp_path: Path) -> None:
    text = report_text(write(tmp_path / "run", last_model_because="fewer than 3 hospitals sent a validation loss"))
    assert "No best round was chosen by validation" in text
    assert "best round:" not in text
    assert "it was the best by" not in text


@pytest.mark.parametrize(
    ("page", "facts"),
    [
        ("run_html", ["0.667", "1.5 MB", "1,200", "ab" * 32, "cd" * 32, "training.lr", "5e-05", "best round: 2"]),
        ("run_html", ["it was the best by the sites’ validation AUROC."]),
        ("run_html", ["1–3 (3)", "75 %", "n/a: no positive test image"]),
        ("multi_class_html", ["Accuracy is 0.625 over 1,600 images.", "0.6250.5000.8750.5501,600"]),
        ("multi_class_html", ["AccuracySensitivitySpecificityF1Test images", "every site alike (BMCTA)0.7003"]),
        ("multi_class_html", ["images pooled (BTA)0.7502", "3 sites, from 0.500 (<b>x</b>) to 0.900 (south)"]),
        (
            "comparison_html",
            ["could not be tested against <u>other</u>", "all 3 differences are equal"],
        ),
    ],
)
def test_a_report_holds_what_its_folders_say(page: str, facts: list[str], request: pytest.FixtureRequest) -> None:
    text = body_text(request.getfixturevalue(page))
    assert [fact for fact in facts if fact not in text] == []
    # A run of yes and no questions says nothing of accuracy over classes.
    assert page != "run_html" or not re.search("BMCTA|over all classes|Accuracy at the sites", text)


def test_the_density_has_a_tick_for_every_site_and_sites_that_are_all_alike_have_none(tmp_path: Path) -> None:
    svg = ElementTree.fromstring(draw_accuracy_density([0.5, 0.7, 0.9, 0.9]))
    ticks = [path for path in svg.iter("path") if "var(--vermilion)" in path.get("style", "")]
    assert len(ticks) == 4 + 1  # and one in the legend
    alike = BestClientAccuracies(0.7, 1, 0.7, 1, {"north": 0.7, "south": 0.7})
    assert "No density is drawn" in report_text(write_multi_class(tmp_path / "run", alike))


def test_a_comparison_shows_measures_of_one_class_an_image_where_a_run_has_them(tmp_path: Path) -> None:
    text = comparison_text(tmp_path, write_multi_class(tmp_path / "0"), write(tmp_path / "1", name="other"))
    assert "BMCTABTA" in text
    assert "0.6250.5000.8750.5500.7000.750" in text


def test_a_run_without_rounds_or_test_labels_still_has_a_report(tmp_path: Path) -> None:
    empty = asdict(summarise_test_results({}, set(), set()))
    folder = write(tmp_path / "run", test=empty, per_site={}, seconds={}, rounds=0, best_round=None, experiment={})
    (folder / "rounds.jsonl").write_text("")
    text = report_text(folder)
    assert "none of 5 classes has an AUROC" in text
    assert "n/a: not among the test set's labels" in text


def test_a_thousand_sites_are_cut_and_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    sites = {f"site{n:04}": {"classes": NAMES} for n in range(1000)}
    assert "The first 60 of 1000 sites" in report_text(write(tmp_path / "run", sites=sites))
    with pytest.raises(BadInput, match=r"summary\.json: cannot be read"):
        write_run_report(tmp_path)


def test_a_comparison_links_the_pages_of_its_runs_and_one_method_alone_has_a_report_too(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / f"{name} run", name=name)) for name in ("one", "two")]
    (tmp_path / "in").mkdir()
    elsewhere, html = (
        write_comparison_report(compare_methods(runs), path, runs).read_text(encoding="utf-8")
        for path in (tmp_path / "in" / "all.html", tmp_path / "all.html")
    )
    assert '1 (<a href="one%20run/report.html">1</a>)' in html
    assert "report.html" not in elsewhere
    assert "nothing to compare it with" in comparison_text(tmp_path, tmp_path / "one run")


def test_the_sentence_names_the_groups_only_where_they_differ_from_all(tmp_path: Path) -> None:
    test = asdict(summarise_test_results({"edema": RESULTS["edema"]}, {"edema"}, set()))
    run = read_run(write(tmp_path / "run", test=test, classes=["edema"]))
    assert describe_run_result(run).endswith("the mean AUROC on the test set is 0.810 over 1 class.")


def test_numbers_read_as_people_write_them() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1_530_000, 999_600, 250_000_000, None)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "1.0 MB", "250 MB", "n/a")
    ]
    assert [format_duration(s) for s in (4.24, 185, 7620, None)] == ["4.2 s", "3 min 05 s", "2 h 07 min", "n/a"]
    assert [format_signed(d) for d in (0.0214, -0.0214, -0.0001, None)] == ["+0.021", "−0.021", "0.000", "n/a"]
    assert [format_p_value(p) for p in (0.00099, 0.0124, None)] == ["p < 0.001", "p = 0.012", "n/a"]
    assert format_number(float("nan")) == "not finite"
    assert format_rounds([9, 3, 4, 5]) == "3–5, 9"


def test_settings_are_flattened_to_dotted_keys() -> None:
    nested = {"run": {"seed": 1, "name": None}, "levels": [1, 2], "ray": False, "method": {}}
    assert list(flatten_settings(nested)) == [
        ("run.seed", "1"), ("run.name", "–"), ("levels", "1, 2"), ("ray", "false"), ("method", "–")
    ]  # fmt: skip


SITES = ["east", "north", "west"]
PASSES = [("north", "east", "west"), ("west", "north", "east"), ("west", "east")]


def passes(slopes: dict[str, float | None]) -> list[RoundFileLine]:
    learned = RoundMethodStatistics(slopes=slopes)
    return [RoundFileLine(round=n, sites=sites, learned=learned) for n, sites in enumerate(PASSES, start=1)]


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter("text")]


def test_the_order_of_passes_names_every_site_and_slopes_are_drawn_where_a_run_has_them() -> None:
    slope, drawn = "Slope of the site's loss, a batch", words(draw_model_pass_order(passes({}), SITES))
    assert (set(SITES) <= set(drawn), slope in drawn) == (True, False)
    assert slope in words(draw_model_pass_order(passes({"east": -0.1, "west": None}), SITES))


def test_prototypes_show_every_pair_and_say_what_nobody_knows() -> None:
    similarity = PrototypeSimilarity(
        classes=("a", "b", "c"), positives=((1, 0.25, None), (0.25, 1, None), (None,) * 3), signs=(0.0, 1.0, None)
    )
    drawn = words(draw_prototype_similarity(similarity))
    assert (drawn.count("0.25"), drawn.count("–"), drawn.count("n/a")) == (2, 5, 1)
    assert {"90.0", "0.0"} <= set(drawn)  # degrees: of a cosine of 0 and of 1
    # Many classes leave the numbers out, but not the cells.
    names, row = tuple(f"class {n}" for n in range(14)), (1.0, *[0.5] * 13)
    svg = draw_prototype_similarity(PrototypeSimilarity(classes=names, positives=(row,) * 14, signs=row))
    assert ("0.50" in words(svg), svg.count(" fill-opacity=")) == (False, 14 * 14)


def test_of_many_classes_the_confusion_matrix_shows_those_with_the_most_wrong_answers() -> None:
    few = draw_confusion_matrix([[3, 1], [0, 4]], ["a", "b"])
    assert [text for text in words(few) if text.isdigit()] == ["3", "1", "4"]
    size = 1_000
    table = [[9 * (row == column) for column in range(size)] for row in range(size)]
    for row in range(500, 500 + MAX_MATRIX_CLASSES):
        table[row][row + 1 if row % 2 == 0 else row - 1] = 2  # confused in pairs
    drawn = words(draw_confusion_matrix(table, [f"class {number}" for number in range(size)]))
    assert "The 60 of 1000 classes with the most wrong answers" in drawn
    labels = [text for text in drawn if text.startswith("class ")]
    assert set(labels) == {f"class {number}" for number in range(500, 560)}


@pytest.mark.parametrize(("rounds", "columns"), [(5, 5), (1000, 100)])
def test_difficulty_is_drawn_round_by_round_thinned_where_there_are_many(rounds: int, columns: int) -> None:
    learned = RoundMethodStatistics(difficulty={f"c{n}": 0.5 for n in range(12)})
    svg = draw_confident_share_by_round([RoundFileLine(round=n, learned=learned) for n in range(rounds)])
    assert svg.count(" fill-opacity=") == 12 * columns


def covered(groups: dict[str, str], *sites: str) -> str:
    """Draw groups of one-letter classes, and sites that annotate the letters of their texts."""
    records = {f"s{n}": SiteSummary(classes=tuple(names)) for n, names in enumerate(sites)}
    return draw_label_coverage(records, [AnnotatedClassGroup(kind, tuple(names)) for kind, names in groups.items()])


def test_a_figure_without_values_or_need_is_left_out() -> None:
    at_once = [RoundFileLine(round=n, sites=tuple(SITES)) for n in (1, 2)]
    for rounds in (at_once, []):  # rounds that all train at once have no order
        assert draw_model_pass_order(rounds, SITES) == ""
    assert draw_confident_share_by_round([RoundFileLine(round=1)]) == ""
    assert covered({"shared": "a", "some": "b"}, *["a", "ab"] * 12) == ""
    assert covered({"shared": "a", "some": "b"}, *["a", "ab"] * 12, "a")


@pytest.mark.parametrize(
    ("groups", "sites", "bars"),
    [
        ({"shared": "a", "some": "b"}, ["a", "ab"] * 500, 2),
        ({"shared": "a", "some": "bc"}, ["abc", "ab", "ac", "a"] * 10, 4),  # of c there are two, apart
        ({"shared": "a", "some": "b"}, ["a"] * 30, 1),
    ],
)
def test_sites_with_the_same_classes_are_under_one_bar(groups: dict[str, str], sites: list[str], bars: int) -> None:
    assert len(re.findall(r"fill: var\(--(?:blue|sky)\)", covered(groups, *sites))) == bars
