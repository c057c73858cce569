"""Facts about reports as a real browser shows and prints them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from server.runs.reader import read_run
from studies.comparison import compare
from studies.comparison_report import write_comparison_report
from tests.federations import federation
from tests.server.chromium import View, layout, needs_browser, picture, printed

pytestmark = [pytest.mark.slow, needs_browser]
DESK, NIGHT, PHONE = View(), View(dark=True), View(500, dark=True)  # headless Chromium has no window below 500
PAGES = ("surgical", "fedmlp", "unifed", "comparison")
RUNS = {
    "surgical": ("run.rounds=2",),
    "fedmlp": ("run.method=fedmlp", "run.rounds=2", "method.stage_one_rounds=1"),
    "unifed": (
        "run.method=unifed",
        "run.rounds=2",
        "method.epoch_cap=1",
        'server_data={kind = "digits", image_size = 16, split_seed = 5}',
    ),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of small runs, and of the first against a run that went another way."""
    root = tmp_path_factory.mktemp("pages")
    for name, overrides in RUNS.items():
        federation(root, *overrides, out=name, pages=True)
    other = json.loads((root / "surgical" / "summary.json").read_text(encoding="utf-8"))
    for result in [other["test"], *other["per_site"].values()]:
        for one in result["per_class"].values():
            one["auroc"] = one["auroc"] and one["auroc"] ** 3
    shutil.copytree(root / "surgical", root / "other")
    (root / "other" / "summary.json").write_text(json.dumps({**other, "name": "a method with a long name"}))
    runs = [read_run(root / name) for name in ("surgical", "other")]
    comparison = write_comparison_report(compare(runs), root / "comparison.html")
    return {**{name: root / name / "report.html" for name in RUNS}, "comparison": comparison}


@pytest.mark.parametrize("view", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overlaps_is_cut_too_pale_beyond_the_edge_or_from_elsewhere(
    pages: dict[str, Path], name: str, view: View
) -> None:
    found = layout(pages[name], view)
    width, window = found["page"]
    assert width <= window
    assert found["beyond"] == []
    assert found["overlapping"] == []
    assert found["cut"] == []
    assert found["pale"] == []
    assert found["asked"] == []  # of the network, or of any other file
    assert 0 not in found["pictures"]
    assert bool(found["pictures"]) is (name != "comparison")


@pytest.mark.parametrize("name", ["surgical", "fedmlp"])
def test_by_night_the_page_is_dark_and_by_day_it_is_light_and_neither_is_blank(
    pages: dict[str, Path], name: str
) -> None:
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
def test_on_paper_nothing_reaches_the_edge_and_no_sheet_is_blank(
    pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
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
    """Grey pictures of a PDF file's pages, ``(height, width)``; none where poppler is not installed."""
    if (program := shutil.which("pdftoppm")) is None:
        return []
    subprocess.run([program, "-r", "50", "-gray", "-png", pdf, pdf.with_suffix("")], check=True, timeout=120)
    return [np.asarray(Image.open(file).convert("L")) for file in sorted(pdf.parent.glob("page-*.png"))]
