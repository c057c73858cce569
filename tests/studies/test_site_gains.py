"""Facts about what each site gains from the reference, and how a board is told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from common.metrics.auroc import ClassMetrics, summarise
from server.runs.reader import read_run
from studies.claims import gain_sentences
from studies.comparison import Comparison, compare, write_comparison
from studies.comparison_report import draw_gains, gains_by_site

Aurocs = Mapping[str, Mapping[str, float | None]]  # site -> class -> AUROC at that site


def run(folder: Path, name: str, aurocs: Aurocs, **more: Any) -> Path:
    names = sorted({c for of_site in aurocs.values() for c in of_site})
    results = {c: ClassMetrics(0.5, 0.5, 0.5, 5, 9) for c in names}
    per_site = {
        site: {"per_class": {c: asdict(ClassMetrics(a, a, a, 5, 9)) for c, a in of_site.items()}}
        for site, of_site in aurocs.items()
    }
    content = {
        "name": name,
        "method": name,
        "rounds": 1,
        "seed": 0,
        "classes": names,
        "sites": {site: {"classes": list(of_site)} for site, of_site in aurocs.items()},
        "test": asdict(summarise(results, (), ())),
        "per_site": per_site,
        **more,
    }
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(content))
    (folder / "rounds.jsonl").write_text("")
    return folder


def compared(*folders: Path) -> Comparison:
    return compare([read_run(folder) for folder in folders])


GOOD = {"north": {"edema": 0.9, "mass": 0.7}, "south": {"edema": 0.6}}
ALONE = {"north": {"edema": 0.8, "mass": 0.74}, "south": {"edema": 0.65}}


@pytest.fixture
def two(tmp_path: Path) -> Comparison:
    return compared(run(tmp_path / "a", "good", GOOD), run(tmp_path / "b", "individual", ALONE))


def test_a_gain_is_the_mean_difference_over_the_classes_that_the_site_annotates(two: Comparison) -> None:
    north, south = two.site_gains
    # north: (.9 - .8 + .7 - .74) / 2; one of its two classes is worse
    assert (north.gain, north.auroc, north.other_auroc) == pytest.approx((0.03, 0.8, 0.77))
    assert (north.classes, north.losses, north.sd) == (("edema", "mass"), 1, None)
    assert south.gain == pytest.approx(-0.05)


def test_one_seed_is_no_verdict(two: Comparison) -> None:
    assert gain_sentences(two) == [
        "Beside training alone (individual), with too few seeds for a verdict, which needs 3: "
        "north +0.030 (0.770 → 0.800) and south −0.050 (0.650 → 0.600)."
    ]


def seeds_of(tmp_path: Path, name: str, aurocs: Aurocs, changes: Sequence[float]) -> list[Path]:
    """A run for each change, which is added to every AUROC."""
    return [
        run(
            tmp_path / f"{name}-{seed}",
            name,
            {site: {c: a and a + change for c, a in of.items()} for site, of in aurocs.items()},
            seed=seed,
        )
        for seed, change in enumerate(changes)
    ]


def test_a_board_reads_who_gains_and_who_loses(tmp_path: Path) -> None:
    good = seeds_of(tmp_path, "good", GOOD, (0.0, 0.001, 0.002))
    alone = seeds_of(tmp_path, "individual", ALONE, (0.0, 0.0, 0.0))
    assert gain_sentences(compared(*good, *alone)) == [
        "1 of 2 sites gains over training alone (individual): north +0.031 (0.770 → 0.801). "
        "1 of 2 sites loses against it: south −0.049 (0.650 → 0.601)."
    ]


def test_a_gain_within_the_seeds_spread_is_no_gain(tmp_path: Path) -> None:
    good = seeds_of(tmp_path, "good", GOOD, (-0.04, 0.0, 0.05))
    alone = seeds_of(tmp_path, "individual", ALONE, (0.0, 0.0, 0.0))
    (sentence,) = gain_sentences(compared(*good, *alone))
    assert sentence.startswith("Not distinguishable from training alone (individual) at 2 sites: north +0.033")


def test_sites_are_corrected_for_their_number(tmp_path: Path) -> None:
    sites = {f"s{n:02}": {"edema": 0.7} for n in range(40)}
    good = seeds_of(tmp_path, "good", sites, (0.01, 0.02, 0.03))
    one = compared(*good, *seeds_of(tmp_path, "x", sites, (0.0, 0.0, 0.0))).site_gains[0]
    p = ttest_1samp([0.01, 0.02, 0.03], 0.0).pvalue
    assert (one.p, one.verdict) == (pytest.approx(min(1.0, 40 * p)), "open")


def test_gains_are_averaged_over_seeds_with_their_spread(tmp_path: Path) -> None:
    other = {"north": {"edema": 0.84, "mass": 0.74}, "south": {"edema": 0.6}}
    folders = [run(tmp_path / "a", "good", GOOD), run(tmp_path / "b", "individual", ALONE)]
    folders += [run(tmp_path / "c", "good", GOOD, seed=1), run(tmp_path / "d", "individual", other, seed=1)]
    north = compared(*folders).site_gains[0]
    # .03 and .01: mean .02, sample SD .01 * sqrt(2)
    assert (north.gain, north.sd, north.seeds) == (pytest.approx(0.02), pytest.approx(0.01 * 2**0.5), (0, 1))


def test_a_class_without_an_auroc_with_one_of_them_is_left_out(tmp_path: Path) -> None:
    undefined = {"north": {"edema": 0.8, "mass": None}, "south": {"edema": None}}
    comparison = compared(run(tmp_path / "a", "good", GOOD), run(tmp_path / "b", "x", undefined))
    north, south = comparison.site_gains
    assert (north.classes, north.gain) == (("edema",), pytest.approx(0.1))
    assert (south.gain, south.reason) == (None, "no class of the site has an AUROC with both")


@pytest.mark.parametrize(
    ("other", "more", "reason"),
    [
        ({"pooled": {"edema": 0.8, "mass": 0.8}}, {}, "it has no such site"),
        ({"north": {"edema": 0.8}, "south": {"edema": 0.7}}, {}, "the site annotates other classes there"),
        (GOOD, {"per_site": {}}, "the site was not tested with both"),
        (GOOD, {"seed": 7}, "no seed in common"),
    ],
)
def test_what_cannot_be_compared_is_said_with_its_reason(
    tmp_path: Path, other: Aurocs, more: dict[str, Any], reason: str
) -> None:
    north = compared(run(tmp_path / "a", "good", GOOD), run(tmp_path / "b", "x", other, **more)).site_gains[0]
    assert (north.gain, north.reason) == (None, reason)


def test_other_test_images_are_not_compared(tmp_path: Path) -> None:
    folder = run(tmp_path / "b", "x", GOOD)
    text = (folder / "summary.json").read_text().replace('"positives": 5', '"positives": 6')
    (folder / "summary.json").write_text(text)
    comparison = compared(run(tmp_path / "a", "good", GOOD), folder)
    assert {gain.reason for gain in comparison.site_gains} == {"it was tested on other images there"}
    assert gain_sentences(comparison) == ["No site can be compared with x: it was tested on other images there."]
    assert draw_gains(comparison) == ""


def test_an_ensemble_of_local_models_is_compared_as_a_method_of_its_own(tmp_path: Path) -> None:
    test = asdict(summarise({"edema": ClassMetrics(0.75, 0.5, 0.5, 5, 9)}, (), (), "ensemble"))
    per_site = {"south": {"per_class": {"edema": asdict(ClassMetrics(0.5, 0.5, 0.5, 5, 9))}}}
    alone = run(tmp_path / "b", "individual", ALONE, ensemble={"test": test, "per_site": per_site})
    comparison = compared(run(tmp_path / "a", "good", GOOD), alone)
    assert [method.label for method in comparison.methods] == ["good", "individual", "individual (ensemble)"]
    assert comparison.methods[2].per_class == {"edema": 0.75}
    assert comparison.site_gains[-1].gain == pytest.approx(0.1)
    assert "an ensemble of models trained alone" in gain_sentences(comparison)[1]


def test_the_json_file_has_every_gain(tmp_path: Path, two: Comparison) -> None:
    written = json.loads(write_comparison(two, tmp_path / "c.json").read_text())
    assert [gain["site"] for gain in written["site_gains"]] == ["north", "south"]


def test_many_sites_are_counted_in_words_and_ranked_in_the_figure(tmp_path: Path) -> None:
    many = {f"site{n:02}": {"edema": 0.5 + n / 100} for n in range(40)}
    low = {site: {"edema": 0.5} for site in many}
    comparison = compared(run(tmp_path / "a", "good", many), run(tmp_path / "b", "x", low))
    sentence = gain_sentences(comparison)[0]
    assert "which needs 3: site39 +0.390" in sentence
    assert sentence.endswith("and 35 more.")
    assert len(gains_by_site(comparison)) == 40
    assert "from the largest loss" in draw_gains(comparison)
