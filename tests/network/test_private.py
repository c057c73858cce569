"""Over the network: a run whose noise hides patients, with a hospital of level private; and one that it declines."""

from pathlib import Path

import pytest

from client.training.privacy import PrivacyBudgetLedger
from tests.network.conftest import Hospital, Trial
from tests.network.real import summary_of

pytestmark = pytest.mark.torture

COMMON = ("run.rounds=2", "participation.min_sites=1", "model.norm=group", "evaluation.checkpoint=last")
PRIVATE = (*COMMON, "privacy.level=patient", "privacy.noise_multiplier=8.0")


def test_a_private_hospital_takes_part_where_noise_hides_patients(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    usual, private = hospital("usual"), hospital("private", 'level = "private"')
    for site in (usual, private):
        site.connect()
    by_image = ("privacy.level=sample", "privacy.noise_multiplier=8.0")
    for rule, privacy in (("epsilon", ()), ("privacy_unit", by_image)):
        run = trial.coordinator.run(trial.experiment, tmp_path / rule, *COMMON, *privacy, sites=2)
        run.succeeds()
        assert f"the run goes on without private: declines: policy.{rule}" in run.output
    models = set()
    for name in ("first", "again"):
        trial.coordinator.run(trial.experiment, tmp_path / name, *PRIVATE, sites=2).succeeds()
        summary = summary_of(tmp_path / name)
        assert set(summary["privacy"]["epsilon"]) == {"usual", "private"}
        assert summary["privacy"]["level"] == "patient"
        assert (tmp_path / name / "model.safetensors").stat().st_size
        models.add(summary["model_sha256"])
    assert len(models) == 2  # a hospital's noise cannot be drawn again
    spent = PrivacyBudgetLedger(private.folder / "state")
    assert len(spent.entries) == 4  # two runs of two rounds
    assert 0 < spent.epsilon(1e-5) < 8.0
