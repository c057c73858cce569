"""Facts about the test images in a simulated run's report."""

import base64
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.config import Experiment
from common.data.base.image_set import ImageSet
from common.data.images.pixels import channels_first
from common.errors import BadInput
from common.models.network import SplitNetwork, build, compute_scores
from common.models.zoo.spec import ModelSpec
from server.reporting.run_report import write_run_report
from server.runs.samples import BUDGET, CLASSES, shows_samples, write_samples
from tests.federations import experiment, federation

NAMES = ("a", "b", "c")


def images(count: int, side: int = 16, channels: int = 1, classes: tuple[str, ...] = NAMES) -> ImageSet:
    generator = np.random.default_rng(3)
    shape = (count, side, side) if channels == 1 else (count, side, side, 3)
    labels = generator.integers(0, 2, (count, len(classes))).astype(np.float32)
    blank = np.array([""] * count)
    return ImageSet(generator.integers(0, 256, shape, dtype=np.uint8), labels, classes, blank, blank)


def network(classes: tuple[str, ...] = NAMES, **more: Any) -> SplitNetwork:
    return build(ModelSpec(architecture="tiny_cnn", image_size=16, **{"channels": 1, **more}), classes, 0)


def written(folder: Path, model: SplitNetwork, test: ImageSet) -> dict[str, Any]:
    write_samples(folder, model, test)
    found: dict[str, Any] = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return found


def test_each_class_has_its_surest_right_and_its_gravest_wrong_images(tmp_path: Path) -> None:
    test, model = images(80), network()
    scores = compute_scores(model, channels_first(test.images))
    found = written(tmp_path, model, test)
    for column, of_class in enumerate(found["classes"]):
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
    said = compute_scores(model, channels_first(test.images)).argmax(axis=1)
    found = written(tmp_path, model, test)
    kinds = {name: {s["kind"] for s in of["samples"]} for name, of in zip(NAMES, found["classes"], strict=True)}
    for column, name in enumerate(NAMES):
        assert ("found" in kinds[name]) == bool(((said == column) & (truth == column)).any())
        assert ("false alarm" in kinds[name]) == bool(((said == column) & (truth != column)).any())


def test_an_image_of_unknown_label_is_not_shown(tmp_path: Path) -> None:
    test = images(40)
    test.labels[:, 0] = np.nan
    assert written(tmp_path, network(), test)["classes"][0] == {"name": "a", "samples": []}


def test_pictures_are_small_however_large_and_many_the_images_are(tmp_path: Path) -> None:
    classes = tuple(f"class {n:02}" for n in range(CLASSES + 3))
    found = written(tmp_path, network(classes, channels=3), images(90, 256, 3, classes))
    files = {sample["png"] for of_class in found["classes"] for sample in of_class["samples"]}
    assert sum(len(base64.b64decode(file)) for file in files) <= BUDGET
    assert (len(found["classes"]), found["classes_left_out"]) == (CLASSES, 3)
    assert max(Image.open(io.BytesIO(base64.b64decode(file))).width for file in files) >= 24


def test_by_itself_a_report_shows_images_of_nobody_only(tmp_path: Path) -> None:
    digits = experiment(tmp_path).experiment
    table = {"kind": "npz", "path": "chest.npz", "classes": ["a", "b"]}
    assert shows_samples(digits)
    assert not shows_samples(changed(digits, data=table))
    assert not shows_samples(changed(digits, server_data=table))
    assert shows_samples(changed(digits, data=table, evaluation={"sample_grid": True}))
    assert not shows_samples(changed(digits, evaluation={"sample_grid": False}))


def changed(one: Experiment, **sections: Any) -> Experiment:
    return Experiment.model_validate({**one.model_dump(), **sections})


def test_a_report_shows_images_with_a_warning_and_nothing_that_is_no_picture(tmp_path: Path) -> None:
    federation(tmp_path, "run.rounds=1", pages=True)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    pictures = [e.get("src", "") for e in ElementTree.fromstring(page).iter() if e.tag == "img"]
    assert pictures
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)
    assert "do not pass it on" in page
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    picture = pictures[0].removeprefix("data:image/png;base64,")
    assert not any(picture in (tmp_path / "run" / name).read_text() for name in ("summary.json", "rounds.jsonl"))

    samples = tmp_path / "run" / "samples.json"
    samples.write_text(samples.read_text(encoding="utf-8").replace(picture, '\\"><script>'), encoding="utf-8")
    with pytest.raises(BadInput, match=r"samples\.json"):
        write_run_report(tmp_path / "run")


def test_without_its_file_of_images_a_run_has_a_report_without_images(tmp_path: Path) -> None:
    federation(tmp_path, "run.rounds=1", "evaluation.sample_grid=false", pages=True)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "run" / "samples.json").exists()
    assert "<img" not in page
    assert "img-src" not in page
