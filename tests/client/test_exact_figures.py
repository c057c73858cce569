"""Figures of a federation at the level trusted are those that scikit-learn gives for the same scores."""

from pathlib import Path

import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

import polyclinic
from client.site.policy import Policy
from common.simulation import undivided_data
from tests.federations import experiment, federation


def test_each_class_has_the_figures_of_scikit_learn_at_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site tests on 361 images, 32 to 41 of which show a class."""
    monkeypatch.setattr("client.simulation.POLICY", Policy())
    summary = federation(tmp_path)
    file = experiment(tmp_path)
    test = undivided_data(file.experiment, file.base).test
    scores = polyclinic.predict(tmp_path / "run", test.images)
    tables = [summary["test"]["per_class"], *(site["per_class"] for site in summary["per_site"].values())]
    assert [len(table) for table in tables] == [10, 5, 5, 4]
    for table in tables:
        for name, figures in table.items():
            labels, values = test.labels[:, test.class_names.index(name)], scores[name].to_numpy()
            expected = {
                "auroc": roc_auc_score(labels, values),
                "average_precision": average_precision_score(labels, values),
                "balanced_accuracy": balanced_accuracy_score(labels, values >= 0.5),
            }
            assert {key: figures[key] for key in expected} == pytest.approx(expected, abs=1e-6)
            assert (figures["auroc"], figures["average_precision"]) != (1.0, 0.0)
    assert len({figures["auroc"] for figures in tables[0].values()}) == 10
