"""The gate: what a site declines before it works, what it does not send though it was made, and what it writes down."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from polyclinic.client import app as site_app
from polyclinic.client.gate.gate import DECLINED_ERROR_CODE
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.settings import read_site_settings
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan, PlanningSection
from polyclinic.common.errors import BadInput, WireError
from polyclinic.common.security.audit import AuditLog, check_audit_log
from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.records import RollCallAnswer, TrainReply
from polyclinic.strategies.registry import STRATEGIES
from tests.client.rounds import called, judged, log, plan, private_plan, record_of, request, send, site, trained


def under(folder: Path, **policy: Any) -> Site:
    return replace(site(folder), policy=SitePolicy(smallest_count=0).model_copy(update=policy))


SURGICAL, CLIPPED = plan(), plan(parameters={"clip_update": 0.5})
NOISY = private_plan(SURGICAL, level="sample", noise_multiplier=2.0)


DECLINES: list[tuple[dict[str, Any], HospitalPlan, str, str]] = [
    ({"methods": ("fedsld",)}, SURGICAL, "policy.methods", '"surgical"'),
    ({"maximum_rounds": 19}, SURGICAL, "policy.maximum_rounds", "20 rounds"),
    ({"parts": ("trunk", "head")}, SURGICAL, "policy.parts", '"norm"'),
    ({"statistics": ("slope",)}, plan("fedmlp"), "policy.statistics", '"prototypes", "difficulty"'),
    ({"maximum_update_norm": 0.4}, CLIPPED, "policy.maximum_update_norm", "clips to 0.5"),
    ({"maximum_update_norm": 0.4}, SURGICAL, "policy.maximum_update_norm", "method.clip_update is not set"),
    ({"masked_only": True}, SURGICAL, "policy.masked_only", "privacy.secure_aggregation is not set"),
    ({"epsilon": 5.0}, SURGICAL, "policy.epsilon", "no [privacy] level"),
    ({"privacy_unit": "patient"}, NOISY, "policy.privacy_unit", 'privacy.level = "sample"'),
]


@pytest.mark.parametrize(("policy", "of", "rule", "named"), DECLINES, ids=lambda value: str(value)[:30])
def test_a_run_that_the_policy_does_not_allow_is_declined_at_the_roll_call_and_at_every_request(
    policy: dict[str, Any], of: HospitalPlan, rule: str, named: str, tmp_path: Path
) -> None:
    at = under(tmp_path, **policy)
    for reply in (called(at, of), trained(at, of), judged(at, of)):
        assert reply.error.code == DECLINED_ERROR_CODE
        assert reply.error.reason.startswith(f"declines: {rule}: ")
        assert named in reply.error.reason
    assert [(line["direction"], line["record"], line["decision"]) for line in log(at)] == [
        (direction, record, decision)
        for kind in ("RollCall", "TrainRequest", "EvaluateRequest")
        for direction, record, decision in [("in", kind, "deny"), ("out", "Error", "allow")]
    ]
    assert {line["rule"] for line in log(at) if line["decision"] == "deny"} == {rule}
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_site_that_sends_masked_updates_only_takes_part_in_no_bare_run(method: str, tmp_path: Path) -> None:
    """Also in none that averages nothing: behind a made-up trunk, figures of what was trained here show images."""
    at, of = under(tmp_path, masked_only=True), plan(method)
    for reply in (called(at, of), trained(at, of), judged(at, of)):
        assert "policy.masked_only" in reply.error.reason


@pytest.mark.parametrize("run", ["\U00020000" * 63, "..", "a/b", "", "Run", "a" * 65])
def test_no_run_has_such_a_name_and_the_audit_says_that_it_was_asked(run: str, tmp_path: Path) -> None:
    """Of four-byte letters a file's name can be too long; to some disks "Run" and "run" are one name."""
    at, content = under(tmp_path), encode_record(request(CLIPPED))
    content["fields"] = ConfigRecord({**content["fields"], "run": run})
    with pytest.raises(WireError, match="run must be small letters"):
        send(at, "train", content)
    assert [(line["direction"], line["record"]) for line in log(at)] == [("in", "TrainRequest"), ("out", "Error")]
    assert not list(tmp_path.glob("questions/*"))


def test_a_run_within_the_bounds_is_taken_part_in(tmp_path: Path) -> None:
    bounds = {"methods": ("surgical",), "maximum_rounds": 20, "statistics": (), "maximum_update_norm": 0.5}
    at = under(tmp_path, **bounds)
    for reply in (called(at, CLIPPED), trained(at, CLIPPED), judged(at, CLIPPED)):
        assert not reply.has_error()
    reply = send(at, "train", request(CLIPPED, server_round=21))
    assert reply.error.reason.startswith("declines: policy.maximum_rounds: it is 20, and the run has 21 ")


def with_statistic(reply: TrainReply) -> TrainReply:
    return replace(reply, statistics={"pixels": np.zeros(3, np.float32)})


def with_group(reply: TrainReply) -> TrainReply:
    return replace(reply, update=replace(reply.update, norm=np.zeros(4, np.float32)))


def longer(reply: TrainReply) -> TrainReply:
    return replace(reply, update=replace(reply.update, trunk=reply.update.trunk * 10))


def with_counts(*positives: int) -> Callable[[RollCallAnswer], RollCallAnswer]:
    negatives = tuple(40 - count for count in positives)
    return lambda answer: replace(answer, positives=positives, negatives=negatives)


def with_sums_of_volumes(answer: RollCallAnswer) -> RollCallAnswer:
    return replace(answer, fingerprint="{}")


PLANNED = SURGICAL.model_copy(update={"planning": PlanningSection(kind="nnunet")})


@pytest.mark.parametrize(
    ("change", "of", "policy", "rule"),
    [
        (with_statistic, SURGICAL, {}, "method.statistics"),
        (with_group, plan("fedbn"), {}, "method.groups"),
        (longer, CLIPPED, {"maximum_update_norm": 0.5}, "policy.maximum_update_norm"),
        (lambda reply: replace(reply, test_images=4, test_correct=2), SURGICAL, {}, "policy.test_metrics"),
        (with_counts(20, 20), SURGICAL, {}, "policy.label_counts"),
        (with_counts(3, 20), plan("fedsld"), {"smallest_count": 5}, "policy.smallest_count"),
        (with_sums_of_volumes, SURGICAL, {"label_counts": True}, "plan.planning"),
        (with_sums_of_volumes, PLANNED, {"label_counts": False}, "policy.label_counts"),
    ],
    ids=[
        *("a statistic", "a group", "a longer update", "test counts", "label counts", "small counts"),
        *("sums that no plan asks for", "sums that the policy keeps"),
    ],
)
def test_what_says_more_than_method_and_policy_allow_is_made_and_not_sent(
    change: Callable[[Any], Any],
    of: HospitalPlan,
    policy: dict[str, Any],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A defect, or somebody's change, in what makes a reply."""
    at, counted = under(tmp_path, **policy), rule in ("policy.label_counts", "policy.smallest_count", "plan.planning")
    maker, ask = ("answer_roll_call", called) if counted else ("train_with_privacy_layers", trained)
    make = getattr(site_app, maker)
    monkeypatch.setattr(site_app, maker, lambda *arguments, **more: change(make(*arguments, **more)))
    assert ask(at, of).error.reason.startswith(f"does not send this: {rule}: ")
    lines = [(line["decision"], line.get("rule")) for line in log(at) if line["direction"] == "out"]
    assert lines == [("deny", rule), ("allow", None)]


def test_a_field_that_the_wire_does_not_know_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_more(record: Any) -> RecordDict:
        content = encode_record(record)
        content["fields"]["patient"] = "Doe"  # type: ignore[index]
        return content

    monkeypatch.setattr(site_app, "encode_record", with_more)
    at = under(tmp_path)
    reply = trained(at, SURGICAL)
    assert reply.error.reason.startswith("does not send this: wire: ")
    assert "Doe" not in (tmp_path / "audit.jsonl").read_text(encoding="utf-8")


def test_the_audit_has_what_passed_by_names_shapes_sizes_and_hash_and_no_value(tmp_path: Path) -> None:
    at = under(tmp_path)
    reply = trained(at, SURGICAL)
    received, left = log(at)
    assert (received["direction"], received["record"], received["round"]) == ("in", "TrainRequest", 1)
    assert received["sha256"] == hash_record(encode_record(request(SURGICAL)))
    assert (left["direction"], left["record"], left["decision"]) == ("out", "TrainReply", "allow")
    assert left["sha256"] == hash_record(reply.content)
    update = record_of(reply, TrainReply).update
    assert ["update/trunk", [len(update.trunk)], 4 * len(update.trunk)] in left["fields"]
    assert ["train_loss", None, len(str(reply.content["fields"]["train_loss"]))] in left["fields"]
    assert check_audit_log(tmp_path).faults == []


def test_where_the_audit_cannot_be_written_nothing_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **facts: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(AuditLog, "append", full)
    with pytest.raises(OSError, match="No space left"):
        trained(under(tmp_path), SURGICAL)


def test_an_error_at_the_site_is_a_line_with_its_kind_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise OSError("/images/doe.png")

    monkeypatch.setattr(site_app, "train_with_privacy_layers", failing)
    at = under(tmp_path)
    with pytest.raises(OSError, match="doe"):
        trained(at, SURGICAL)
    assert [(line["record"], line.get("kind")) for line in log(at)] == [("TrainRequest", None), ("Error", "OSError")]
    assert "doe" not in (tmp_path / "audit.jsonl").read_text(encoding="utf-8")


def test_names_in_the_policy_are_those_of_methods_and_statistics(tmp_path: Path) -> None:
    assert SitePolicy().methods is None  # every method is allowed
    assert SitePolicy(methods=tuple(STRATEGIES)).methods == tuple(STRATEGIES)
    text = 'name = "north"\n[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'
    text += '[policy]\nmethods = ["surgcal"]\nstatistics = ["prototype"]\nparts = ["tail"]\n'
    (tmp_path / "site.toml").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as raised:
        read_site_settings(tmp_path)
    places = [fault.where.removeprefix("site.toml: ") for fault in raised.value.faults]
    assert sorted(places) == ["policy.methods", "policy.parts.0", "policy.statistics"]
    assert '"surgical"' in str(raised.value)
    assert '"prototypes"' in str(raised.value)
