"""Over the network: a run whose noise hides patients, with a hospital of level private; and one that it declines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from client.training.privacy import PrivacyBudgetLedger
from tests.network.conftest import Trial
from tests.network.real import Site

pytestmark = pytest.mark.torture

Hospital = Callable[[str], Site]
COMMON = ("run.rounds=2", "participation.min_sites=1", "model.norm=group", "evaluation.checkpoint=last")
PRIVATE = (*COMMON, "privacy.level=patient", "privacy.noise_multiplier=8.0")


def test_a_private_hospital_takes_part_where_noise_hides_patients_and_in_no_other_run(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    usual, private = hospital("usual"), hospital("private")
    private.edit(private.toml, ("[policy]", '[policy]\nlevel = "private"'))
    for site in (usual, private):
        site.start().says("connected to trial")

    bare = trial.coordinator.run(trial.experiment, tmp_path / "bare", *COMMON, sites=2)
    assert bare.ends() == 0, bare.said
    assert "the run goes on without private: declines: policy.epsilon" in bare.said
    by_image = (*PRIVATE[:-2], "privacy.level=sample", "privacy.noise_multiplier=8.0")
    images = trial.coordinator.run(trial.experiment, tmp_path / "images", *by_image, sites=2)
    assert images.ends() == 0, images.said
    assert "the run goes on without private: declines: policy.privacy_unit" in images.said

    models = []
    for name in ("first", "again"):
        out = tmp_path / name
        run = trial.coordinator.run(trial.experiment, out, *PRIVATE, sites=2)
        assert run.ends() == 0, run.said
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        assert set(summary["privacy"]["epsilon"]) == {"usual", "private"}
        assert summary["privacy"]["level"] == "patient"
        assert set(load_file(out / "model.safetensors"))
        models.append(summary["model_sha256"])
    assert models[0] != models[1]  # a hospital's noise cannot be drawn again
    spent = PrivacyBudgetLedger(private.folder / "state")
    assert len(spent.entries) == 4  # two runs of two rounds
    assert 0 < spent.epsilon(1e-5) < 8.0
