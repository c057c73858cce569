"""Facts about the ensemble of models that simulated sites train alone."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from common.config import read_experiment
from common.contract import LabelContract
from common.data.base.image_set import ImageSet
from common.data.images.pixels import channels_first
from common.models.network import build, compute_scores
from common.models.saved import load_model, save_model
from common.models.zoo.spec import ModelSpec
from server.federation.ensemble import ensemble_result, local_model_folders
from server.runs.reader import read_run
from server.simulation.simulate import simulate

CONTRACT = LabelContract(("a", "b", "c"), {"north": ("b", "a"), "south": ("c", "b")})
SPEC = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)


def images(count: int, seed: int) -> ImageSet:
    generator = np.random.default_rng(seed)
    names = np.array([""] * count)
    pixels = generator.integers(0, 256, (count, 16, 16), dtype=np.uint8)
    return ImageSet(pixels, generator.integers(0, 2, (count, 3)).astype(np.float32), CONTRACT.class_names, names, names)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for seed, (site, names) in enumerate(CONTRACT.sites.items()):
        (tmp_path / "sites" / site / "model").mkdir(parents=True)
        network = build(SPEC, names, seed)
        save_model(tmp_path / "sites" / site / "model", network, label_contract_sha256="")
    return local_model_folders(tmp_path, CONTRACT)


def own_scores(folders: list[Path], test: ImageSet) -> list[np.ndarray]:
    return [compute_scores(load_model(folder), channels_first(test.images)) for folder in folders]


def test_a_class_is_averaged_over_its_owners_and_nobody_else(folders: list[Path]) -> None:
    test = images(60, 5)
    north, south = own_scores(folders, test)
    found = ensemble_result(folders, CONTRACT, test, {})["test"]["per_class"]
    assert found["a"]["auroc"] == pytest.approx(roc_auc_score(test.labels[:, 0], north[:, 1]))
    assert found["b"]["auroc"] == pytest.approx(roc_auc_score(test.labels[:, 1], north[:, 0] + south[:, 1]))
    assert found["c"]["auroc"] == pytest.approx(roc_auc_score(test.labels[:, 2], south[:, 0]))


def test_a_site_with_test_images_of_its_own_is_tested_on_them_for_its_classes(folders: list[Path]) -> None:
    test, own = images(60, 5), images(30, 6)
    result = ensemble_result(folders, CONTRACT, test, {"south": own})
    _, south = own_scores(folders, own)
    of_south = result["per_site"]["south"]["per_class"]
    assert of_south["c"]["auroc"] == pytest.approx(roc_auc_score(own.labels[:, 2], south[:, 0]))
    assert list(of_south) == ["c", "b"]
    assert result["per_site"]["north"]["per_class"]["a"] == result["test"]["per_class"]["a"]


def test_without_every_sites_model_there_is_none(tmp_path: Path, folders: list[Path]) -> None:
    (folders[0] / "model.json").unlink()
    assert local_model_folders(tmp_path, CONTRACT) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "has"), [("individual", True), ("pfl", False), ("surgical", False)])
def test_a_run_has_an_ensemble_where_sites_share_nothing(tmp_path: Path, method: str, has: bool) -> None:
    changes = [f'run.method="{method}"', "run.rounds=1", 'simulation.backend="inline"']
    experiment = Path(__file__).parents[2] / "experiments" / "digits_surgical.toml"
    simulate(read_experiment(experiment, changes), tmp_path / "run", Console(quiet=True))
    summary = read_run(tmp_path / "run").summary
    assert (summary.ensemble is not None) is has
    assert ("AUROC, ensemble" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")) is has
