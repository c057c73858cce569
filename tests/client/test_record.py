"""The record of a hospital: each run from the audit log and the stored plans, after a check of the chain."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyclinic.client.approval.record import CSV_COLUMNS, read_hospital_record
from polyclinic.client.site.plans import PlanStore, RequestFacts, RequestText
from polyclinic.common.security.audit import AUDIT_FILE, AuditLog
from polyclinic.common.security.delivery import MANIFEST_FILE, PACKAGE_FILES, DeliveryManifest, describe_files
from polyclinic.common.security.plan_decisions import PlanDecision, sign_decision
from tests.client.rounds import changed_plan, plan
from tests.network.real import flwr_client

SITE_TOML = """name = "north"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["b"]
"""
PLAN = changed_plan(plan(), run={"name": "=Lung findings", "purpose": "What do we miss?"})
TEXT = RequestText("training", PLAN.model_dump_json())
APPROVAL = {"approver": "Dr. A. Weber", "key": "SHA256:abc", "until": "2027-06-30T22:00:00+00:00", "decision": "00"}
IMAGES = {"train": 40, "validation": 16, "test": 15, "unreadable": 2}


def entry(record: str, direction: str, server_round: int = 0, **more: Any) -> dict[str, Any]:
    facts = {"run": "ab12cd34", "round": server_round, "direction": direction, "record": record, "decision": "allow"}
    facts |= {"reason": "not allowed here"} if more.get("decision") == "deny" else {}
    return facts | {"bytes": 100, "sha256": f"{server_round}{record}"} | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hospital that took part in one run of two rounds and refused another."""
    folder = tmp_path / "north"
    state = folder / "state"
    state.mkdir(parents=True)
    (folder / "site.toml").write_text(SITE_TOML, encoding="utf-8")
    facts = RequestFacts(kind="training", time="2026-01-01T00:00:00+00:00", coordinator="trial", authority="ab" * 32)
    PlanStore(state).store_text(TEXT, facts)
    call = {"name": "=Lung findings", "plan": TEXT.sha256, "images": IMAGES, "approval": APPROVAL}
    audit = AuditLog(state)
    for line in (
        {"event": "start", "version": "0.2.0"},
        entry("RollCall", "in", decision="deny", rule="approval.missing", name="=Lung findings", plan=TEXT.sha256),
        {"event": "patients", "opted_out": 3, "opted_out_unmatched": 0},
        entry("RollCall", "in", **call),
        entry("RollCallAnswer", "out", fields=[["run", None, 4], ["train_samples", None, 8], ["positives", None, 0]]),
        entry("TrainRequest", "in", 1, approval=APPROVAL),
        entry("TrainReply", "out", 1, epsilon=0.5, bytes=1000, fields=[["update/trunk", [3], 12]]),
        entry("TrainRequest", "in", 2, approval=APPROVAL),
        entry("TrainReply", "out", 2, epsilon=0.75, bytes=1000, fields=[["update/trunk", [3], 12]]),
        entry("EvaluateRequest", "in", 2, bytes=700),
        entry("EvaluateReply", "out", 2, decision="deny", rule="policy.test_metrics", reason="it is false"),
        entry("RollCall", "in", decision="deny", rule="policy.methods", run="other", name="Bone age"),
        entry("Error", "out", run="other", kind="declined", bytes=50),
    ):
        audit.append(**line)
    return folder


def test_a_run_has_its_study_its_images_what_left_and_who_approved_it(folder: Path) -> None:
    record = read_hospital_record(folder / "state")
    run, other = record.runs
    assert record.faults == ()
    assert (run.title, run.purpose, run.coordinator) == ("=Lung findings", "What do we miss?", "trial")
    assert (run.plan, run.images, run.patients_opted_out) == (TEXT.sha256, IMAGES, 3)
    assert (run.rounds, run.epsilon, run.approvals) == ([1, 2], 0.75, [APPROVAL])
    assert (run.received_bytes, run.sent_bytes) == (100 + 100 + 100 + 700, 100 + 1000 + 1000)
    assert {name: (left.count, left.bytes, left.fields) for name, left in run.left.items()} == {
        "RollCallAnswer": (1, 100, ["train_samples"]),
        "TrainReply": (2, 2000, ["update"]),
    }
    assert (run.model["record"], run.model["sha256"]) == ("EvaluateRequest", "2EvaluateRequest")
    assert run.refused == {"approval.missing": 1, "policy.test_metrics": 1}
    assert (other.title, other.rounds, other.refused, other.images) == ("Bone age", [], {"policy.methods": 1}, {})


def test_a_denial_is_in_the_record_with_its_person_day_and_reason(folder: Path) -> None:
    facts = {"kind": "training", "sha256": TEXT.sha256, "site": "north", "coordinator": "trial", "authority": "ab" * 32}
    person = {"approver": "Dr. A. Weber", "key": "SHA256:abc", "title": "=Lung findings", "purpose": ""}
    time = "2026-01-02T10:30:00+00:00"
    denial = PlanDecision(decision="denied", time=time, reason="no legal basis", **facts, **person)
    PlanStore(folder / "state").add_decision(TEXT.sha256, sign_decision(denial, Ed25519PrivateKey.generate()))
    run, other = read_hospital_record(folder / "state").runs
    said = {"approver": "Dr. A. Weber", "key": "SHA256:abc", "time": time, "reason": "no legal basis"}
    assert (run.denials, other.denials) == ([said], [])
    shown = flwr_client("record", folder, "--csv", folder / "record.csv")
    assert "denied by Dr. A. Weber, 2026-01-02 10:30 UTC" in shown.out
    assert "reason: no legal basis" in shown.out
    with (folder / "record.csv").open(encoding="utf-8", newline="") as file:
        assert [row["denied_by"] for row in csv.DictReader(file)] == ["Dr. A. Weber: no legal basis", ""]


def test_a_study_is_found_by_a_part_of_its_title(folder: Path) -> None:
    assert [run.title for run in read_hospital_record(folder / "state", "BONE").runs] == ["Bone age"]


def test_the_record_is_a_table_of_80_columns_json_and_csv(folder: Path, tmp_path: Path) -> None:
    shown = flwr_client("record", folder, "--csv", tmp_path / "record.csv")
    assert shown.code == 0
    assert "unbroken" in shown.out.splitlines()[0]
    assert max(map(len, shown.out.splitlines()[1:])) <= 80, shown.out
    runs = json.loads(flwr_client("record", folder, "--json").out)["runs"]
    assert [run["run"] for run in runs] == ["ab12cd34", "other"]
    with (tmp_path / "record.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert rows[0]["title"] == "'=Lung findings"  # no formula for a spreadsheet
    assert (rows[0]["rounds"], rows[0]["approved_by"], rows[0]["train_images"]) == ("2", "Dr. A. Weber", "40")


def test_the_text_of_a_plan_is_printed_as_it_came(folder: Path) -> None:
    shown = flwr_client("record", folder, "--plan", TEXT.sha256[:8])
    assert shown.out == f"{TEXT.text}\n"


def test_a_changed_audit_log_is_said_first_and_by_the_exit_code(folder: Path) -> None:
    path = folder / "state" / AUDIT_FILE
    path.write_bytes(path.read_bytes().replace(b'"epsilon": 0.75', b'"epsilon": 0.25'))
    shown = flwr_client("record", folder)
    assert shown.code == 1
    assert shown.out.startswith("The audit log is NOT whole: 1 fault")


def test_a_hospital_that_did_nothing_has_no_run(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE_TOML, encoding="utf-8")
    shown = flwr_client("record", tmp_path)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "No run yet.")


def test_a_delivered_model_and_a_departure_are_in_the_record(folder: Path) -> None:
    state, audit = folder / "state", AuditLog(folder / "state")
    delivered = {"name": "Lung findings", "coordinator": "trial", "model": {"run": "ab12cd34", "sha256": "c" * 64}}
    audit.append(**entry("DeliveryRequest", "in", run="delivery-0a1b2c3d4e"))
    audit.append(event="delivered", run="delivery-0a1b2c3d4e", **delivered)
    audit.append(**entry("RefusalNoted", "out", run="delivery-0a1b2c3d4e"))
    audit.append(event="withdrawn", reason="contract ended")
    audit.append(event="withdrawal_undone")
    by_hand = DeliveryManifest(
        run="ef56",
        name="Bone age",
        site="north",
        coordinator="trial",
        time="2026-12-01T09:30:00+00:00",
        model_sha256="d" * 64,
        files=describe_files(dict.fromkeys(PACKAGE_FILES, b"")),
    )
    (state / "delivered" / "ef56").mkdir(parents=True)
    (state / "delivered" / "ef56" / MANIFEST_FILE).write_text(by_hand.model_dump_json(), encoding="utf-8")
    record = read_hospital_record(state)
    delivery = record.runs[-1]
    assert (delivery.kind, delivery.title, delivery.coordinator) == ("delivery", "Lung findings", "trial")
    assert delivery.model == {"run": "ab12cd34", "sha256": "c" * 64}
    assert [(each["event"], each["reason"]) for each in record.departures] == [
        ("withdrawn", "contract ended"),
        ("withdrawal_undone", ""),
    ]
    assert [(model["title"], model["sha256"]) for model in record.models] == [("Bone age", "d" * 64)]
    shown = flwr_client("record", folder)
    assert shown.code == 0
    for words in ("Lung findings (delivery 0a1b2c3d)", "contract ended", "Bone age", "d" * 64):
        assert words in shown.out
    assert read_hospital_record(state, "lung").models == ()
    assert "left its federation: contract ended" in flwr_client("audit", "show", folder).out
