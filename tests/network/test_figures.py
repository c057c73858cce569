"""Over the network, at each level: what report, model card and terminal print of three hospitals' image folders."""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from polyclinic.client.site.policy import Level
from polyclinic.client.site.settings import load_site
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common.models.network import compute_image_probabilities, select_head_row_labels
from polyclinic.common.models.saved import load_model
from polyclinic.data.images.pixels import load_pixels_on_device
from tests.federations import INLINE_RUN
from tests.network.federated import connected
from tests.network.real import Site, summary_of, written

pytestmark = pytest.mark.slow

NAMES, MEAN = ("large", "odd"), "mean of all classes"
HOSPITALS = ("east", "north", "south")
EXPERIMENT = f"""{INLINE_RUN}
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
    "masked": ("privacy.secure_aggregation=true", "evaluation.checkpoint=last"),
    "private": (
        *("privacy.level=patient", "privacy.noise_multiplier=8.0"),
        *("model.norm=group", "evaluation.checkpoint=last"),
    ),
}
Scored = dict[str, NDArray[np.floating]]
"""Class -> scores and labels."""


def image_folder(folder: Path, part: int) -> Path:
    """A third of 900 digits as pictures: 60 in the test part, of either kind of each class 20 or more."""
    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    lines = ["image,large,odd,part"]
    for place, index in enumerate(range(part, 900, 3)):
        Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(folder / "images" / f"{index}.png")
        digit, kind = int(digits.target[index]), ("test", "validation", "train", "train", "train")[place % 5]
        lines.append(f"{index}.png,{int(digit > 4)},{digit % 2},{kind}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    (folder / "site.toml").write_text(SITE.format(name=folder.name, level="trusted"))
    return folder


def scored(site: Site, run: Path) -> Scored:
    """The site's test images, scored by the run's model."""
    images, network = load_site(read_site_toml_without_data(site.folder)).test, load_model(run)
    scores = compute_image_probabilities(network, load_pixels_on_device(images, "cpu"), "float32")
    labels = select_head_row_labels(images, NAMES).numpy()
    order = [network.class_names.index(name) for name in NAMES]
    return {name: np.stack([scores[:, order[c]], labels[:, c]]) for c, name in enumerate(NAMES)}


def by_scikit_learn(of: Scored) -> dict[str, tuple[float, ...]]:
    """Class, and the mean of all -> AUROC, average precision and balanced accuracy."""
    figures = {
        name: (
            float(roc_auc_score(labels, scores)),
            float(average_precision_score(labels, scores)),
            float(balanced_accuracy_score(labels, scores > 0.5)),
        )
        for name, (scores, labels) in of.items()
    }
    return figures | {MEAN: tuple(np.mean([figures[name] for name in NAMES], axis=0))}


@dataclass(frozen=True)
class Finished:
    """A run of three hospitals: its folder, what the terminal showed, and the hospitals."""

    folder: Path
    output: str
    sites: list[Site]

    @property
    def report(self) -> str:
        """The report's text."""
        return html.unescape(re.sub(r"<[^>]+>", " ", (self.folder / "report.html").read_text(encoding="utf-8")))

    @property
    def card(self) -> dict[str, list[str]]:
        """The model card's lines of results: class -> AUROC, average precision and balanced accuracy as printed."""
        text = (self.folder / "MODEL_CARD.md").read_text(encoding="utf-8")
        lines = text.split("## How good it is")[1].split("##")[0].splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
        return {row[0]: row[1:4] for row in cells if row[0] in (*NAMES, MEAN)}


Finish = Callable[[Level], Finished]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finish]:
    """Makes three hospitals' run over TLS, at the level to which they set themselves before it."""
    folder = tmp_path_factory.mktemp("figures")
    experiment = written(EXPERIMENT, folder)
    data = [image_folder(folder / "data" / name, part) for part, name in enumerate(HOSPITALS)]
    with connected(experiment, folder / "machine", data=data) as (coordinator, sites):

        def finish(level: Level) -> Finished:
            for site in sites:
                site.end()
                site.toml.write_text(SITE.format(name=site.name, level=level))
                site.start()
            coordinator.sees(*sites)
            run = coordinator.run(experiment, folder / level, *PLANS[level], sites=3, pages=True, once=True)
            run.succeeds()
            return Finished(folder / level, run.output, sites)

        yield finish


def test_at_trusted_every_printed_figure_is_scikit_learns_to_the_digit(finished: Finish) -> None:
    run = finished("trusted")
    each = [by_scikit_learn(scored(site, run.folder)) for site in run.sites]
    true = {name: np.mean([figures[name] for figures in each], axis=0) for name in (*NAMES, MEAN)}
    assert run.card == {name: [f"{figure:.3f}" for figure in figures] for name, figures in true.items()}
    assert all(text in run.report for row in run.card.values() for text in row)
    assert all(row[0] in run.output for row in run.card.values())
    section = run.report.split("AUROC by hospital and class")[-1].split("Each hospital scored")[0]
    rows = [section.split(name)[1].split() for name in NAMES]
    for row, name in zip(rows, NAMES, strict=True):
        cells = [row[place : place + 4] for place in range(0, 12, 4)]  # such as "0.912 31 of 60"
        assert [cell[0] for cell in cells] == [f"{figures[name][0]:.3f}" for figures in each]
        labels = [scored(site, run.folder)[name][1] for site in run.sites]
        assert [cell[1::2] for cell in cells] == [[str(int(of.sum())), str(len(of))] for of in labels]


def test_at_masked_every_printed_figure_lies_within_its_error_and_no_record_holds_one_of_a_single_site(
    finished: Finish,
) -> None:
    run = finished("masked")
    each = [scored(site, run.folder) for site in run.sites]
    true = by_scikit_learn({name: np.concatenate([of[name] for of in each], axis=1) for name in NAMES})
    assert run.card.keys() == true.keys()
    for name, row in run.card.items():
        for text, figure in zip(row, true[name], strict=True):
            value, _, error = text.partition(" ± ")
            assert abs(float(value) - figure) <= float(error or 0.0005)
            assert text in run.report
        assert row[0] in run.output
    summary = summary_of(run.folder)
    assert 0 < summary["test"]["errors"]["auroc"] < 0.01
    assert_no_figure_of_one_site(summary)
    assert "AUROC by hospital and class" not in run.report
    pooled = summary["test"]["pooled"]["per_class"]
    assert {name: tuple(figures["sites"]) for name, figures in pooled.items()} == dict.fromkeys(NAMES, HOSPITALS)


def assert_no_figure_of_one_site(summary: dict[str, Any]) -> None:
    assert all((site["validation_loss"], site["per_class"]) == (None, {}) for site in summary["per_site"].values())


def test_at_private_no_figure_leaves_and_every_page_gives_the_reason(finished: Finish) -> None:
    run = finished("private")
    for page in (run.output, run.report, (run.folder / "MODEL_CARD.md").read_text(encoding="utf-8")):
        assert "the noise of this run covers updates alone" in " ".join(page.split())
    assert run.card == {}
    summary = summary_of(run.folder)
    assert summary["test"]["pooled"] is None
    assert_no_figure_of_one_site(summary)
