"""The page of a hospital's own images: everything inside it, nothing to be fetched, for its owner's eyes only."""

import base64
import io
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client.preview.images import write_preview
from common.config import Experiment, read_experiment
from tests.client.check.sites import CLASSES, Hospital, hospital_in
from tests.federations import DIGITS
from tests.network.real import flwr_client

AUGMENTED = DIGITS + "\n[augmentation]\nrotation = 0.1\nhorizontal_flip = true\n"


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return hospital_in(tmp_path / "north")


def experiment(folder: Path, text: str) -> Experiment:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return read_experiment(folder / "run.toml").experiment


def pictures(page: str) -> list[Image.Image]:
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def test_the_page_says_on_top_whom_it_is_for_and_only_its_owner_may_read_it(
    hospital: Hospital, lax_umask: None
) -> None:
    ended = flwr_client("preview-data", hospital.folder)
    page = hospital.folder / "preview.html"
    assert (ended.code, stat.S_IMODE(page.stat().st_mode)) == (0, 0o600)
    body = page.read_text(encoding="utf-8").split("<body>")[1]
    assert body.lstrip().startswith('<div class="private">For this hospital only: images of patients.')


def test_the_page_fetches_nothing_and_runs_nothing(hospital: Hospital, tmp_path: Path) -> None:
    text = write_preview(hospital.folder, tmp_path / "page.html", None).read_text(encoding="utf-8")
    assert re.findall(r"https?://|<script|<link|url\(", text) == []
    assert "default-src 'none'" in text


def test_each_class_and_no_class_has_images_as_read_as_seen_and_as_changed(hospital: Hospital, tmp_path: Path) -> None:
    planned = experiment(tmp_path, AUGMENTED)
    text = write_preview(hospital.folder, tmp_path / "page.html", planned, each=2).read_text(encoding="utf-8")
    headings = re.findall(r"<h2>(.*?) <small>(\d+) training images, (\d+) of them here", text)
    labels = [[float(row[name]) for name in CLASSES] for row in hospital.table if row["part"] == "train"]
    present = np.array(labels)
    expected = [*(int(present[:, column].sum()) for column in range(2)), int((present.sum(axis=1) == 0).sum())]
    assert headings == [
        (name, str(count), "2") for name, count in zip((*CLASSES, "none of these classes"), expected, strict=True)
    ]
    shown = pictures(text)
    assert len(shown) == 3 * 2 * 4
    read, received, first, second = (np.asarray(picture) for picture in shown[:4])
    assert (read.shape, received.shape) == ((32, 32), (16, 16))
    assert not np.array_equal(first, received)
    assert not np.array_equal(first, second)


def test_what_was_read_is_the_file_and_what_the_network_sees_is_its_mean_over_pixels(
    hospital: Hospital, tmp_path: Path
) -> None:
    text = write_preview(hospital.folder, tmp_path / "page.html", experiment(tmp_path, DIGITS), each=1)
    read, received = pictures(text.read_text(encoding="utf-8"))[:2]
    name = next(row["image"] for row in hospital.table if row["part"] == "train" and row[CLASSES[0]] == "1")
    file = np.asarray(Image.open(hospital.folder / "images" / name))
    assert np.array_equal(np.asarray(read), file)
    halved = np.asarray(received).astype(float)
    assert abs(halved.mean() - file.mean()) < 1


def test_a_name_that_looks_like_html_is_shown_as_it_is(hospital: Hospital, tmp_path: Path) -> None:
    rows = hospital.table
    name = "<b>x.png"
    first = next(row for row in rows if row["part"] == "train" and row[CLASSES[0]] == "1")
    (hospital.folder / "images" / first["image"]).rename(hospital.folder / "images" / name)
    first["image"] = name
    hospital.rewrite(rows)
    text = write_preview(hospital.folder, tmp_path / "page.html", None).read_text(encoding="utf-8")
    assert "&lt;b&gt;x.png" in text
    assert "<b>x.png" not in text


def test_an_existing_page_that_everybody_could_read_is_replaced_by_one_that_they_cannot(
    hospital: Hospital, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old", encoding="utf-8")
    page.chmod(0o644)
    write_preview(hospital.folder, page, None)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
