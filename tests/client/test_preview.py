"""The page of a hospital's own images: everything inside it, nothing to be fetched, for its owner's eyes only."""

import base64
import io
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polyclinic.client.preview.images import write_class_samples_page
from polyclinic.common.config import Experiment
from tests.client.check.sites import CLASSES, Hospital
from tests.federations import DIGITS
from tests.network.real import flwr_client

PLAIN = tomllib.loads(DIGITS)
AUGMENTED = PLAIN | {"augmentation": {"rotation": 0.1, "horizontal_flip": True}}


def pictures(page: str) -> list[Image.Image]:
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in encoded]


def page_of(hospital: Hospital, experiment: dict[str, Any] | None = None, **options: int) -> str:
    planned = experiment and Experiment.model_validate(experiment)
    return write_class_samples_page(hospital.folder, hospital.folder / "page.html", planned, **options).read_text(
        encoding="utf-8"
    )


def test_the_page_says_on_top_whom_it_is_for_and_only_its_owner_reads_it(hospital: Hospital, lax_umask: None) -> None:
    page = hospital.folder / "preview.html"
    ended = flwr_client("preview-data", hospital.folder)
    assert (ended.code, stat.S_IMODE(page.stat().st_mode)) == (0, 0o600)
    page.chmod(0o644)
    text = write_class_samples_page(hospital.folder, page, None).read_text(encoding="utf-8")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert text.split("<body>")[1].lstrip().startswith('<div class="private">For this hospital only')
    assert re.findall(r"https?://|<script|<link|url\(", text) == []
    assert "default-src 'none'" in text


def test_the_exact_records_that_would_leave_are_for_their_owner_only(
    hospital: Hospital, tmp_path: Path, lax_umask: None
) -> None:
    """An update reveals images as well as the page of images does."""
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for out in (tmp_path / "new", prepared):
        assert flwr_client("preview", hospital.folder, "--out", out).code == 0
        assert stat.S_IMODE(out.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
        assert modes == dict.fromkeys(modes, 0o600)
        assert "2-TrainReply.record" in modes


def test_each_class_and_no_class_has_images_as_read_as_seen_and_as_changed(hospital: Hospital) -> None:
    text = page_of(hospital, AUGMENTED, per_class=2)
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


def test_what_was_read_is_the_file_and_what_the_network_sees_is_its_mean_over_pixels(hospital: Hospital) -> None:
    read, received = pictures(page_of(hospital, PLAIN, per_class=1))[:2]
    name = next(row["image"] for row in hospital.table if row["part"] == "train" and row[CLASSES[0]] == "1")
    file = np.asarray(Image.open(hospital.folder / "images" / name))
    assert np.array_equal(np.asarray(read), file)
    assert abs(np.asarray(received).mean() - file.mean()) < 1


def test_a_name_that_looks_like_html_is_shown_as_it_is(hospital: Hospital) -> None:
    rows = hospital.table
    first = next(row for row in rows if row["part"] == "train" and row[CLASSES[0]] == "1")
    (hospital.folder / "images" / first["image"]).rename(hospital.folder / "images" / "<b>x.png")
    first["image"] = "<b>x.png"
    hospital.rewrite(rows)
    text = page_of(hospital)
    assert "&lt;b&gt;x.png" in text
    assert "<b>x.png" not in text
