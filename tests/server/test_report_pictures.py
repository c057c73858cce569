"""Facts about reports as a real browser shows and prints them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.server.runs.reader import read_run
from polyclinic.studies.comparison import compare_methods
from polyclinic.studies.comparison_report import write_comparison_report
from tests.federations import OWN_IMAGES, federation
from tests.server.chromium import View, layout, needs_browser, picture, printed

pytestmark = [pytest.mark.slow, needs_browser]
DESK, NIGHT, PHONE = View(), View(dark=True), View(500, dark=True)  # headless Chromium has no window below 500
PAGES = ("surgical", "fedmlp", "unifed", "comparison")
RUNS = {
    "surgical": ("run.rounds=2",),
    "fedmlp": ("run.method=fedmlp", "run.rounds=2", "method.stage_one_rounds=1"),
    "unifed": ("run.method=unifed", "run.rounds=2", "method.epoch_cap=1", OWN_IMAGES),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of small runs, and of the first against a run that went another way."""
    root = tmp_path_factory.mktemp("pages")
    for name, overrides in RUNS.items():
        federation(root, *overrides, "evaluation.sample_grid=true", out=name, pages=True)
    other = json.loads((root / "surgical" / "summary.json").read_text(encoding="utf-8"))
    for result in [other["test"], *other["per_site"].values()]:
        for figures in result["per_class"].values():
            figures["auroc"] = figures["auroc"] and figures["auroc"] ** 3
    shutil.copytree(root / "surgical", root / "other")
    (root / "other" / "summary.json").write_text(json.dumps({**other, "name": "a method with a long name"}))
    runs = [read_run(root / name) for name in ("surgical", "other")]
    comparison = write_comparison_report(compare_methods(runs), root / "comparison.html")
    return {**{name: root / name / "report.html" for name in RUNS}, "comparison": comparison}


@pytest.mark.parametrize("view", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overlaps_is_cut_pale_or_from_elsewhere(pages: dict[str, Path], name: str, view: View) -> None:
    measured = layout(pages[name], view)
    width, window = measured["page"]
    assert width <= window
    for fault in ("beyond", "overlapping", "cut", "pale", "asked"):  # asked: of the network, or of any other file
        assert measured[fault] == [], fault
    assert 0 not in measured["pictures"]
    assert bool(measured["pictures"]) is (name != "comparison")


@pytest.mark.parametrize("name", ["surgical", "fedmlp"])
def test_the_page_is_dark_by_night_light_by_day_and_never_blank(pages: dict[str, Path], name: str) -> None:
    day, night = picture(pages[name], DESK), picture(pages[name], NIGHT)
    assert day[0, 0].tolist() == [255, 255, 255]
    assert night[0, 0].max() < 40
    for shown in (day, night):
        drawn = (np.abs(shown.astype(int) - shown[0, 0]).max(axis=2) > 40).mean(axis=1)  # share of every line
        filled = drawn[: np.flatnonzero(drawn)[-1]] > 0
        assert filled.mean() > 0.3
        assert len(np.unique(shown[::5].astype(int) @ [65536, 256, 1])) > 100  # colours
    assert day.mean() > 200 > 100 > night.mean()


@pytest.mark.parametrize("name", ["surgical", "fedmlp"])
def test_on_paper_no_ink_is_at_the_edge_and_no_sheet_blank(pages: dict[str, Path], name: str, tmp_path: Path) -> None:
    file = printed(pages[name], tmp_path / "page.pdf")
    sheets = len(re.findall(rb"/Type\s*/Page\b(?!s)", file))
    assert 2 <= sheets <= 12
    for sheet in rasterised(tmp_path / "page.pdf"):
        ink = sheet < 200
        margin = sheet.shape[1] // 40
        assert 0.002 < ink.mean() < 0.4
        assert not ink[:, :margin].any()
        assert not ink[:, -margin:].any()


def rasterised(pdf: Path) -> list[np.ndarray]:
    """Return grey pictures of a PDF file's pages, ``(height, width)``; none where poppler is not installed."""
    if (program := shutil.which("pdftoppm")) is None:
        return []
    subprocess.run([program, "-r", "50", "-gray", "-png", pdf, pdf.with_suffix("")], check=True, timeout=120)
    return [np.asarray(Image.open(file).convert("L")) for file in sorted(pdf.parent.glob("page-*.png"))]
