"""A simulation counts known labels before it trains: classes of one label, and images without any."""

from pathlib import Path

import pytest

from polyclinic.server.reporting.run_claims import list_further_limitations, list_prominent_limitations
from polyclinic.server.runs.reader import read_run
from tests.network.real import flwr_sim
from tests.server.commands import Ended
from tests.server.test_own_data import made, patients, table


def ran(path: Path, *settings: str) -> Ended:
    """Run the experiment of a table for two rounds."""
    options = [part for setting in ("run.rounds=2", *settings) for part in ("--set", setting)]
    return flwr_sim("run", path.parent / "mine.toml", "--out", path.parent / "run", "--backend", "inline", *options)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """A table of two columns of 1 and blank, and its experiment."""
    path = table(tmp_path, "file,patient,Fluid,Mass", *patients(lambda n: ("1,", ",1", "1,1")[n % 3], 60))
    made(path)
    return path


def test_classes_without_any_negative_are_said_before_training_with_the_line_to_write(marked: Path) -> None:
    ended = ran(marked)
    assert ended.code == 0, ended.err
    text = " ".join(ended.out.split())
    said = text.index('NO CLASS WILL HAVE AN AUROC. Every known label of "Fluid", "Mass" says present')
    assert said < text.index("none of 2 classes has an AUROC")
    assert 'write blank = "negative" in [data]' in text
    limits = list_prominent_limitations(read_run(marked.parent / "run"))
    assert any("says present" in limit for limit in limits)
    assert not any("more rounds" in limit for limit in limits)


def test_the_line_to_write_gives_the_run_an_auroc(marked: Path) -> None:
    ended = ran(marked, 'data.blank="negative"')
    assert ended.code == 0, ended.err
    assert "says present" not in ended.out
    assert read_run(marked.parent / "run").summary.test.mean_auroc is not None


def test_images_without_a_known_label_are_counted_apart(tmp_path: Path) -> None:
    path = table(tmp_path, "file,patient,Fluid,Mass", *patients(lambda n: ("1,0", "0,1", "0,0", ",")[n % 4], 80))
    made(path)
    ended = ran(path)
    assert ended.code == 0, ended.err
    run = read_run(tmp_path / "run")
    (sentence,) = [each for each in list_further_limitations(run) if "have no known label" in each]
    assert sentence in " ".join(ended.out.split())
    training = sum(site.train_samples or 0 for site in run.summary.sites.values())
    assert f" of {training} training images" in sentence
    tested = run.summary.test.per_class["Fluid"].images
    assert tested is not None
    unlabelled, every = (int(word) for word in sentence.split(" and ")[1].split() if word.isdigit())
    assert every - unlabelled == tested
