"""Over the network: sites that decline, also for want of noise, both sides' audits, and a line that a kill tore."""

import time
from pathlib import Path

import pytest

from polyclinic.client.training.privacy import PrivacyBudgetLedger
from tests.network.conftest import Hospital, Trial
from tests.network.federated import SLOW, Federation
from tests.network.real import eventually, flwr_client, flwr_server, summary_of

pytestmark = pytest.mark.torture


def test_a_site_declines_and_the_others_replies_are_in_both_audits(
    trial: Trial, hospital: Hospital, tmp_path: Path
) -> None:
    open_, picky = hospital("open"), hospital("picky", 'methods = ["fedavg"]')
    for site in (open_, picky):
        site.connect()
    out = tmp_path / "run"
    options = ("run.rounds=2", "participation.min_sites=1", "run.keep_updates=true")
    run = trial.coordinator.run(trial.experiment, out, *options, sites=2)
    run.succeeds()
    for output in (run.output, picky.program.output):
        assert 'declines: policy.methods: it does not have "surgical".' in output
    assert set(summary_of(out)["sites"]) == {"open"}
    assert picky.program.runs
    verified = flwr_server("verify", out / "receipt.json")
    assert verified.code == 0, verified.out
    assert "round 2: 1 updates make the model" in verified.out
    assert flwr_client("audit", "verify", open_.folder, "--receipt", out / "receipt.json").code == 0

    open_.program.kill()
    audit = open_.folder / "state" / "audit.jsonl"
    with audit.open("ab") as file:
        file.write(audit.read_bytes().splitlines()[-1][:100])
    open_.start().says("the audit's last line was torn by a kill (100 bytes)")
    eventually(lambda: flwr_client("audit", "verify", open_.folder).code == 0, "the chain goes on")
    assert "was torn by a kill; entry" in flwr_client("audit", "verify", open_.folder).out

    lines = audit.read_bytes().splitlines(keepends=True)
    audit.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert flwr_client("audit", "verify", open_.folder).code == 1


def test_a_stopped_site_is_not_waited_for_is_one_event_and_named_by_resume(federation: Federation) -> None:
    coordinator, north, out = federation.coordinator, federation.north, federation.out
    sets = (SLOW, "run.rounds=500", "participation.min_sites=1", "participation.roll_call_deadline_s=8")
    run = federation.run(*sets)
    run.says("round 2 of 500")
    assert north.program.stop() == 0
    run.says("north signed off at")
    began, waited_for = coordinator.now["run"]["round"], list[str]()
    until = time.monotonic() + 60
    while (now := coordinator.now["run"])["round"] < began + 8 and time.monotonic() < until:
        waited_for += now["waiting_for"]
    assert waited_for
    assert "north" not in waited_for
    assert run.stop() == 3
    assert (out / "events.jsonl").read_text(encoding="utf-8").count("signed off") == 1
    again = federation.run(*sets, options=("--resume",))
    assert again.ends() == 1
    assert 'Not there of the sites that took part: "north".' in " ".join(again.output.split())


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
    assert 0 < spent.compute_total_epsilon(1e-5) < 8.0
