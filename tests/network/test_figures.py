"""Over the network, at each level: what report, model card and terminal print of three hospitals' image folders."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from client.site.policy import Level
from client.site.settings import open_site
from client.site.site_file import read_file_only
from common.data.images.pixels import pixels_of
from common.metrics.auroc import FIGURES
from common.models.inference import label_matrix, scores_of
from common.models.saved import load_model
from tests.federations import DIGITS
from tests.network.real import Coordinator, Site, machine, written

pytestmark = pytest.mark.slow

NAMES = ("large", "odd")
EXPERIMENT = f"""{DIGITS.split("[data]")[0]}
[participation]
min_sites = 3
"""
SITE = """name = "{name}"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["large", "odd"]
split_column = "part"
image_size = 16

[policy]
level = "{level}"
"""
PLANS: dict[Level, tuple[str, ...]] = {
    "trusted": (),
    "masked": ("privacy.secure_aggregation=true", "evaluation.result=last"),
}
Scored = dict[str, tuple[NDArray[np.floating], NDArray[np.floating]]]


def image_folder(folder: Path, level: Level, part: int) -> Path:
    """A third of 900 digits as pictures: 60 in the test part, of either kind of each class 20 or more."""
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    lines = ["image,large,odd,part"]
    for place, index in enumerate(range(part, 900, 3)):
        Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(folder / "images" / f"{index}.png")
        digit, kind = int(digits.target[index]), ("test", "validation", "train", "train", "train")[place % 5]
        lines.append(f"{index}.png,{int(digit > 4)},{digit % 2},{kind}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    (folder / "site.toml").write_text(SITE.format(name=folder.name, level=level))
    return folder


def scored(site: Site, run: Path) -> Scored:
    """The site's test images, scored by the run's model: class -> scores and labels."""
    images = open_site(read_file_only(site.folder)).test
    network = load_model(run)
    scores, labels = scores_of(network, pixels_of(images, "cpu"), "float32"), label_matrix(images, NAMES).numpy()
    order = [network.class_names.index(name) for name in NAMES]
    return {name: (scores[:, order[c]], labels[:, c]) for c, name in enumerate(NAMES)}


def together(each: list[Scored]) -> Scored:
    return {
        name: (np.concatenate([s[name][0] for s in each]), np.concatenate([s[name][1] for s in each])) for name in NAMES
    }


def by_scikit_learn(of: Scored) -> dict[str, tuple[float, ...]]:
    return {
        name: (
            float(roc_auc_score(labels, scores)),
            float(average_precision_score(labels, scores)),
            float(balanced_accuracy_score(labels, scores > 0.5)),
        )
        for name, (scores, labels) in of.items()
    }


def rows_of_card(run: Path) -> dict[str, list[str]]:
    """The model card's lines of results: class -> its figures as printed."""
    text = (run / "MODEL_CARD.md").read_text(encoding="utf-8").split("## How good it is")[1].split("###")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:4] for row in cells if row[0] in (*NAMES, "mean over classes")}


@pytest.fixture(scope="module", params=list(PLANS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run at one level: the level, its folder, what the terminal showed, and the three sites."""
    level: Level = request.param
    folder = tmp_path_factory.mktemp(level)
    with machine(folder / "machine") as here:
        coordinator = Coordinator(here)
        made = [
            image_folder(folder / "data" / name, level, part) for part, name in enumerate(("east", "north", "south"))
        ]
        sites = [coordinator.admit(coordinator.site(one)) for one in made]
        coordinator.start()
        for site in sites:
            site.start()
        coordinator.sees(*sites)
        experiment = written(EXPERIMENT, folder)
        run = coordinator.run(experiment, folder / "run", *PLANS[level], sites=3, pages=True)
        assert run.ends() == 0, run.said
        yield level, folder / "run", run.said, sites


def test_every_printed_figure_is_scikit_learns_or_lies_within_its_stated_error(finished: Any) -> None:
    level, run, said, sites = finished
    each = [scored(site, run) for site in sites]
    if level == "trusted":  # the mean over the sites' own test parts
        alone = [by_scikit_learn(one) for one in each]
        true = {name: tuple(float(np.mean([one[name][c] for one in alone])) for c in range(3)) for name in NAMES}
    else:
        true = by_scikit_learn(together(each))
    true["mean over classes"] = tuple(float(np.mean([true[name][c] for name in NAMES])) for c in range(3))
    printed = rows_of_card(run)
    report = re.sub(r"<[^>]+>", " ", (run / "report.html").read_text(encoding="utf-8"))
    for name, figures in true.items():
        for text, figure in zip(printed[name], figures, strict=True):
            assert text in report
            value, _, error = text.partition(" ± ")
            assert (
                (text == f"{figure:.3f}") if level == "trusted" else abs(float(value) - figure) <= float(error or 5e-4)
            )
        assert printed[name][0] in said


def test_the_records_of_a_masked_run_hold_no_figure_of_a_single_site(finished: Any) -> None:
    level, run, _, sites = finished
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    of_sites = {site.name: summary["per_site"][site.name] for site in sites}
    told = {name: (one["validation_loss"], one["per_class"]) for name, one in of_sites.items()}
    assert (told == dict.fromkeys(told, (None, {}))) == (level != "trusted")
    pooled = summary["test"]["pooled"]["per_class"]
    assert {name: one["sites"] for name, one in pooled.items()} == {key: ["east", "north", "south"] for key in NAMES}
    assert all(0 <= summary["test"]["errors"].get(name, 0) < 0.01 for name in FIGURES)
