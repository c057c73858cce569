"""Approval by a person: nothing runs without it, after a byte has changed, after its date, or after a denial."""

import datetime as dt
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from flwr.app import Message

from polyclinic.client.approval.decide import TypedDecision, decide_on_text
from polyclinic.client.gate.gate import DECLINED_ERROR_CODE
from polyclinic.client.site import plans
from polyclinic.client.site.approvals import SiteApprovals
from polyclinic.client.site.authority_record import AuthorityRecord
from polyclinic.client.site.plans import PlanStore, RequestFacts, RequestText
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import read_site_toml_without_data
from polyclinic.common.config import HospitalPlan
from polyclinic.common.counts import CountQuestion
from polyclinic.common.errors import BadInput
from polyclinic.common.evaluation.foreign import find_model_file
from polyclinic.common.security.audit import AuditLog
from polyclinic.common.wire.counts import CountReply, CountRequest
from polyclinic.common.wire.evaluation import ScoringReply, make_scoring_request
from polyclinic.common.wire.flower_messages import APPROVAL_ERROR_CODE, APPROVAL_ERROR_MESSAGE
from polyclinic.common.wire.records import Refusal, RollCallAnswer
from polyclinic.common.wire.secure_aggregation import STAGE_BY_REQUEST, KeysRequest
from polyclinic.server.evaluation.collect import make_question
from tests.client.approvals import KHAN, PASSPHRASE, WEBER, Approver, add_approver, stored_plans, typed, write_approvers
from tests.client.rounds import called, changed_plan, judged, log, plan, record_of, send, site, trained
from tests.common.evaluation.models import write_run_model
from tests.network.real import flwr_client
from tests.processes import ROOT

PLAN = changed_plan(plan(), run={"name": "Lung findings", "purpose": "Does one model find what we miss?", "rounds": 2})
SITE_TOML = """name = "north"

[data]
kind = "folder"
images = "images"
labels = "labels.csv"
image_column = "image"
label_columns = ["b", "a"]

[policy]
approval = "required"
smallest_count = 0
"""


@dataclass(frozen=True)
class Hospital:
    """A site's folder with a person who approves, and the site as its program has it."""

    folder: Path
    weber: Approver

    @property
    def site(self) -> Site:
        policy = SitePolicy(approval="required", smallest_count=0)
        approvals = SiteApprovals(self.folder, self.folder / "state", "north", policy)
        return replace(site(self.folder / "state"), policy=policy, approvals=approvals, durable=True)

    @property
    def plans(self) -> list[str]:
        return stored_plans(self.folder)

    @property
    def decisions(self) -> list[Path]:
        return sorted((self.folder / "state" / "plans").glob("*/decision-*.json"))

    def asked(self, of: HospitalPlan = PLAN) -> list[Message]:
        """The answers to a roll call, a request to train and a request to evaluate."""
        return [called(self.site, of), trained(self.site, of), judged(self.site, of)]

    def rules(self) -> set[str]:
        return {line["rule"] for line in log(self.site) if line.get("decision") == "deny"}


def make_hospital(folder: Path) -> Hospital:
    folder.mkdir()
    (folder / "site.toml").write_text(SITE_TOML, encoding="utf-8")
    weber = add_approver(folder.parent, WEBER) if not (folder.parent / f"{WEBER}.approver").exists() else None
    assert weber is not None
    write_approvers(folder / "site.toml", weber)
    state = folder / "state"
    state.mkdir()
    record = AuthorityRecord(
        key_hash="ab" * 32, phrase="one two", coordinator="trial", since="2026-01-01T00:00:00+00:00"
    )
    (state / "authority.json").write_text(record.model_dump_json(), encoding="utf-8")
    return Hospital(folder, weber)


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return make_hospital(tmp_path / "north")


@pytest.fixture
def approved(hospital: Hospital) -> Hospital:
    """A hospital that has approved the plan."""
    called(hospital.site, PLAN)
    (sha256,) = hospital.plans
    done = hospital.weber.approve(hospital.folder, sha256)
    assert done.code == 0, done.err
    return hospital


def refused(replies: list[Message]) -> bool:
    """Whether all are refused with the one reason that the coordinator learns."""
    errors = {(reply.error.code, reply.error.reason) for reply in replies if reply.has_error()}
    return len(replies) == sum(reply.has_error() for reply in replies) and errors == {
        (APPROVAL_ERROR_CODE, APPROVAL_ERROR_MESSAGE)
    }


def test_an_unapproved_plan_is_stored_and_answered_with_one_reason_and_nothing_runs(hospital: Hospital) -> None:
    assert refused(hospital.asked())
    (sha256,) = hospital.plans
    assert sha256 == RequestText("training", PLAN.model_dump_json()).sha256
    assert hospital.rules() == {"approval.missing"}
    assert not (hospital.folder / "state" / "memory").exists()
    assert not (hospital.folder / "state" / "runs").exists()


def test_an_approved_plan_runs_and_the_audit_names_who_approved_it(approved: Hospital) -> None:
    for reply in approved.asked():
        assert not reply.has_error(), reply.error.reason
    (line,) = (line for line in log(approved.site) if line.get("decision") == "allow" and "name" in line)
    (decision,) = approved.decisions
    assert line["approval"]["approver"] == WEBER
    assert line["approval"]["until"].startswith("2099-12-31")
    assert line["approval"]["key"].startswith("SHA256:")
    assert line["plan"] == decision.parent.name
    assert line["images"] == {"train": 40, "validation": 16, "test": 16, "unreadable": 0}


@pytest.mark.parametrize("keys", [{"rounds": 3}, {"name": "Lung findings "}, {"seed": 6}, {"purpose": ""}])
def test_a_plan_with_another_byte_is_another_plan_and_waits(keys: dict[str, object], approved: Hospital) -> None:
    assert refused(approved.asked(changed_plan(PLAN, run=keys)))
    assert len(approved.plans) == 2


def test_no_changed_byte_of_an_approval_is_taken(approved: Hospital) -> None:
    (path,) = approved.decisions
    content = path.read_bytes()
    approvals = approved.site.approvals
    assert approvals is not None
    assert approvals.find_verdict("training", path.parent.name).reason == ""
    for place in range(len(content)):
        other = content[place] ^ (1, 32)[place % 2]
        path.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
        assert approvals.find_verdict("training", path.parent.name).reason, (place, other)
    for other_content in (b"", content[:-1], content + b"\n", content + content):
        path.write_bytes(other_content)
        assert approvals.find_verdict("training", path.parent.name).rule == "approval.signature"
    assert refused(approved.asked())


def copy_from_other_site(hospital: Hospital) -> None:
    """The approver of two hospitals approved the same plan at the other one."""
    text = hospital.folder / "site.toml"
    text.write_text(text.read_text().replace('name = "north"', 'name = "south"'))
    (first,) = hospital.decisions
    hospital.weber.approve(hospital.folder, first.parent.name)
    text.write_text(text.read_text().replace('name = "south"', 'name = "north"'))


def copy_from_other_plan(hospital: Hospital) -> None:
    called(hospital.site, changed_plan(PLAN, run={"rounds": 1}))
    (decision,) = hospital.decisions
    (other,) = (name for name in hospital.plans if name != decision.parent.name)
    hospital.weber.approve(hospital.folder, other)
    shutil.copy(decision.parents[1] / other / "decision-0001.json", decision)


def remove_approver(hospital: Hospital) -> None:
    write_approvers(hospital.folder / "site.toml", add_approver(hospital.folder, KHAN))


def give_approver_another_key(hospital: Hospital) -> None:
    write_approvers(hospital.folder / "site.toml", add_approver(hospital.folder, WEBER))


def break_site_file(hospital: Hospital) -> None:
    with (hospital.folder / "site.toml").open("a") as file:
        file.write("[[[")


def change_coordinator(hospital: Hospital) -> None:
    path = hospital.folder / "state" / "authority.json"
    path.write_text(path.read_text().replace("ab" * 32, "cd" * 32))


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (copy_from_other_site, "approval.site"),
        (copy_from_other_plan, "approval.plan"),
        (remove_approver, "approval.signature"),
        (give_approver_another_key, "approval.signature"),
        (break_site_file, "approval.file"),
        (change_coordinator, "approval.coordinator"),
    ],
)
def test_an_approval_that_no_longer_holds_lets_nothing_run(
    harm: Callable[[Hospital], None], rule: str, approved: Hospital
) -> None:
    harm(approved)
    before = approved.rules()
    assert refused(approved.asked())
    assert approved.rules() - before - {"approval.missing"} == {rule}


def test_an_approval_does_not_hold_for_a_policy_that_lets_more_out(approved: Hospital) -> None:
    at = approved.site
    policy = at.policy.model_copy(update={"round_counts_to": 5})
    (decision,) = approved.decisions
    approvals = SiteApprovals(approved.folder, at.folder, "north", policy)
    assert approvals.find_verdict("training", decision.parent.name).rule == "approval.policy"
    slower = at.policy.model_copy(update={"maximum_hours": 2.0})
    assert (
        SiteApprovals(approved.folder, at.folder, "north", slower).find_verdict("training", decision.parent.name).reason
        == ""
    )


def test_a_denied_plan_stops_in_mid_run_and_only_the_audit_has_the_reason(approved: Hospital) -> None:
    at = approved.site
    assert not called(at, PLAN).has_error()
    done = approved.weber.deny(approved.folder, approved.plans[0], "no legal basis")
    assert done.code == 0, done.err
    reply = trained(at, PLAN)
    assert reply.error.code == DECLINED_ERROR_CODE
    assert "the hospital has denied it" in reply.error.reason
    assert "legal" not in reply.error.reason
    assert [line["reason"] for line in log(at) if line.get("rule") == "approval.denied"] == [
        f"{WEBER} denied it: no legal basis"
    ]
    assert approved.weber.approve(approved.folder, approved.plans[0]).code == 0
    assert not trained(at, PLAN).has_error()


def test_each_new_decision_on_a_refused_plan_is_returned_once(hospital: Hospital) -> None:
    """The site connects anew for each: a denial that came back for ever would connect for ever."""
    at = hospital.site
    approvals = at.approvals
    assert approvals is not None
    assert approvals.latest_refused_text == ""
    called(at, PLAN)
    (sha256,) = hospital.plans
    assert approvals.latest_refused_text == sha256
    assert approvals.find_new_decisions() == {}
    assert hospital.weber.deny(hospital.folder, sha256).code == 0
    assert [verdict.rule for verdict in approvals.find_new_decisions().values()] == ["approval.denied"]
    assert called(at, PLAN).error.code == DECLINED_ERROR_CODE
    assert approvals.find_new_decisions() == {}
    assert hospital.weber.approve(hospital.folder, sha256).code == 0
    assert [verdict.reason for verdict in approvals.find_new_decisions().values()] == [""]
    assert not called(at, PLAN).has_error()
    assert approvals.find_new_decisions() == {}


def test_of_plans_with_one_title_the_latest_one_can_be_told_from_the_others(hospital: Hospital) -> None:
    """Each changed experiment is a plan of its own, so that several of one title wait."""
    at, later = hospital.site, changed_plan(PLAN, run={"seed": 6})
    called(at, PLAN)
    (first,) = hospital.plans
    called(at, later)
    (second,) = set(hospital.plans) - {first}
    listed = json.loads(flwr_client("plans", "list", hospital.folder, "--json").out)
    assert {plan["sha256"]: plan["is_waiting"] for plan in listed} == {first: True, second: True}
    assert at.approvals is not None
    assert at.approvals.latest_refused_text == second
    approved = hospital.weber.approve(hospital.folder, first)
    assert second[:12] in approved.out
    assert listed[1]["time"][:16].replace("T", " ") in flwr_client("plans", "list", hospital.folder).out


def test_a_denial_stays_one_after_its_approver_was_removed(approved: Hospital) -> None:
    approved.weber.deny(approved.folder, approved.plans[0])
    remove_approver(approved)
    assert {reply.error.code for reply in approved.asked()} == {DECLINED_ERROR_CODE}


def test_an_expired_approval_stays_expired_when_the_clock_is_set_back(hospital: Hospital) -> None:
    """The audit log's last time is a lower bound of the present one."""
    called(hospital.site, PLAN)
    tomorrow = dt.datetime.now().date() + dt.timedelta(days=1)
    assert hospital.weber.approve(hospital.folder, hospital.plans[0], tomorrow.isoformat()).code == 0
    assert not called(hospital.site, PLAN).has_error()
    # A line of the day after tomorrow: the program ran then, and the clock was set back.
    audit = AuditLog(hospital.folder / "state")
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=3)
    audit.append(event="start", time=later.isoformat(timespec="milliseconds"))
    assert refused([trained(hospital.site, PLAN)])
    assert "approval.expired" in hospital.rules()


def test_a_stage_of_secure_aggregation_needs_the_approval_of_its_run(approved: Hospital) -> None:
    keys = KeysRequest("run", 1, ("east", "north", "south"), 3)
    before = send(approved.site, f"query.{STAGE_BY_REQUEST[KeysRequest]}", keys)
    assert before.error.code == APPROVAL_ERROR_CODE
    assert not called(approved.site, PLAN).has_error()
    approvals = approved.site.approvals  # as after a restart of the program
    assert approvals is not None
    fields = {"wire.record": "KeysRequest", "run": "run"}
    assert approvals.decide_on_request(fields, approved.site).facts["approver"] == WEBER
    assert approvals.decide_on_request(fields | {"run": "another"}, approved.site).rule == "approval.missing"
    assert approvals.decide_on_request(fields | {"wire.record": "SurveyRequest"}, approved.site).rule == "approval.kind"
    approved.weber.deny(approved.folder, approved.plans[0])
    assert send(approved.site, f"query.{STAGE_BY_REQUEST[KeysRequest]}", keys).error.code == DECLINED_ERROR_CODE


def ask_for_counts(at: Site, title: str) -> Message:
    return send(at, "query.count", CountRequest("count-1", CountQuestion(title=title).model_dump_json()))


def test_a_question_for_counts_needs_an_approval_of_its_own(approved: Hospital) -> None:
    assert refused([ask_for_counts(approved.site, "How many?")])
    (sha256,) = set(approved.plans) - {approved.decisions[0].parent.name}
    shown = flwr_client("plans", "show", approved.folder, sha256[:12]).out
    for words in ("How many?", "images and patients that show each class", "Nothing is trained"):
        assert words in shown
    assert approved.weber.approve(approved.folder, sha256[:12]).code == 0
    assert record_of(ask_for_counts(approved.site, "How many?"), CountReply).tables
    assert refused([ask_for_counts(approved.site, "How many? ")])
    assert [line["approval"]["approver"] for line in log(approved.site) if "approval" in line] == [WEBER]


def ask_for_figures(at: Site, title: str, folder: Path) -> Message:
    asked = make_question([find_model_file(folder, frozenset())], (), title)
    return send(
        at, "query.scoring", make_scoring_request("evaluate-1", asked.question.model_dump_json(), asked.content)
    )


def test_models_are_scored_after_an_approval_of_the_question_that_has_their_hashes(
    approved: Hospital, tmp_path: Path
) -> None:
    model = write_run_model(tmp_path / "first", ("b", "a"))
    policy = approved.site.policy.model_copy(update={"evaluate": True})
    toml = approved.folder / "site.toml"
    text = toml.read_text(encoding="utf-8")
    toml.write_text(text.replace("smallest_count = 0\n", "smallest_count = 0\nevaluate = true\n"), encoding="utf-8")
    approvals = SiteApprovals(approved.folder, approved.folder / "state", "north", policy)
    at = replace(approved.site, policy=policy, approvals=approvals)
    before = set(approved.plans)
    assert refused([ask_for_figures(at, "How good?", model)])
    (sha256,) = set(approved.plans) - before
    shown = flwr_client("plans", "show", approved.folder, sha256[:12]).out
    for words in ("How good?", "first: a model of a federated run", "average precision", "Nothing is trained"):
        assert words in shown
    assert approved.weber.approve(approved.folder, sha256[:12]).code == 0
    assert record_of(ask_for_figures(at, "How good?", model), ScoringReply).models
    other = write_run_model(tmp_path / "again" / "first", ("b", "a"), seed=1)
    assert refused([ask_for_figures(at, "How good?", other)])


def test_a_refusal_is_noted_without_an_approval(hospital: Hospital) -> None:
    reply = send(hospital.site, "query.refusal", Refusal("run", "labels", "other classes"))
    assert not reply.has_error()
    assert hospital.plans == []
    approvals = hospital.site.approvals
    assert approvals is not None
    assert approvals.decide_on_request({"wire.record": "DeliveryRequest", "run": "run"}, hospital.site).reason == ""


def test_where_approval_is_off_a_plan_is_stored_and_runs(hospital: Hospital) -> None:
    at = replace(hospital.site, policy=SitePolicy(smallest_count=0), approvals=None)
    answer = record_of(called(at, PLAN), RollCallAnswer)
    assert answer.train_samples == 40
    assert len(hospital.plans) == 1
    assert all("approval" not in line for line in log(at))


def test_an_unknown_coordinator_cannot_fill_the_disk(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_UNDECIDED_TEXTS", 20)
    store = PlanStore(hospital.folder / "state")
    facts = RequestFacts(kind="training", time="2026-01-01T00:00:00+00:00")
    first = RequestText("training", "0")
    store.store_text(first, facts)
    store.add_decision(first.sha256, b"of a person")
    for number in range(1, 30):
        store.store_text(RequestText("training", str(number)), facts)
    stored = {text.text for text in store.list_texts()}
    assert len(stored) == 20 + 1
    assert "0" in stored
    assert "29" in stored
    assert "1" not in stored


# ---------------------------------------------------------------------- what a person types


def test_a_key_opens_with_its_passphrase_alone(approved: Hospital) -> None:
    wrong = typed(
        *("plans", "approve", approved.folder, approved.plans[0], "--as", WEBER, "--until", "2099-01-01"),
        *("--key", approved.weber.key),
        passphrase="another one",
    )
    assert wrong.code == 2
    assert "passphrase" in wrong.err
    assert PASSPHRASE.encode() not in approved.weber.key.read_bytes()
    assert approved.weber.key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("decision", "where"),
    [
        (TypedDecision("nobody", "2099-01-01"), "--as"),
        (TypedDecision(WEBER, "2020-01-01"), "--until"),
        (TypedDecision(WEBER, "tomorrow"), "--until"),
        (TypedDecision(WEBER, "2099-01-01", purpose="two\nlines"), "--purpose"),
        (TypedDecision(WEBER), "--reason"),
    ],
)
def test_what_is_typed_wrong_is_said_and_nothing_is_decided(
    decision: TypedDecision, where: str, approved: Hospital
) -> None:
    settings = read_site_toml_without_data(approved.folder)
    stored = PlanStore(settings.state_folder).find_text(approved.plans[0][:8])
    with pytest.raises(BadInput) as raised:
        decide_on_text(settings, stored, decision, approved.weber.key, PASSPHRASE)
    assert [fault.where for fault in raised.value.faults] == [where]
    assert len(approved.decisions) == 1


def test_a_short_passphrase_is_refused(tmp_path: Path) -> None:
    made = typed("approvers", "add", WEBER, "--out", tmp_path / "key", passphrase="short")
    assert made.code == 2
    assert not (tmp_path / "key").exists()


def test_a_plan_is_found_by_the_first_digits_of_its_hash(approved: Hospital) -> None:
    (sha256,) = approved.plans
    shown = json.loads(typed("plans", "show", approved.folder, sha256[:6], "--json").out)
    assert shown["sha256"] == sha256
    assert shown["state"].startswith(f"approved by {WEBER} until 2099-12-31")
    words = json.dumps(shown["sections"], ensure_ascii=False)
    for word in (
        "Lung findings",
        "Does one model find what we miss?",
        "trial",
        "40 training images",
        "at most 2 rounds",
    ):
        assert word in words
    assert shown["sections"]["Decided so far; the last one counts"][0].endswith("Does one model find what we miss?")
    assert typed("plans", "show", approved.folder, "000000").code == 2
    assert typed("plans", "show", approved.folder, sha256[:3]).code == 2


def test_where_approval_is_off_no_module_of_it_is_loaded() -> None:
    names = (
        "polyclinic.client.approval",
        "polyclinic.client.site.approvals",
        "polyclinic.common.security.plan_decisions",
    )
    program = (
        "import sys, polyclinic.client.cli, polyclinic.client.connection.service, polyclinic.client.site.settings\n"
    )
    program += f"print([name for name in sys.modules if name.startswith({names!r})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_package_of_a_run_that_is_done_needs_no_approval(hospital: Hospital) -> None:
    approvals = hospital.site.approvals
    assert approvals is not None
    fields = {"wire.record": "DeliveryRequest", "run": "delivery-1"}
    assert not approvals.decide_on_request(fields, hospital.site).reason
