"""What a coordinator may ask of a hospital: plans that would cost too much are declined before anything is built."""

import json
import signal
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from polyclinic.client import app as site_app
from polyclinic.client.gate import incoming_request, plan_costs
from polyclinic.client.gate.gate import DECLINED_ERROR_CODE
from polyclinic.client.gate.incoming_request import PlanRefused, read_requested_work
from polyclinic.client.gate.policy_rules import RequestedWork, decide_on_request
from polyclinic.client.site import memory
from polyclinic.client.site.memory import LostRoundState
from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan, make_hospital_plan, read_experiment
from polyclinic.common.models.zoo.registry import build_backbone
from polyclinic.common.models.zoo.spec import TRAITS_BY_ARCHITECTURE
from polyclinic.common.wire.codec import encode_record
from polyclinic.common.wire.fleet_protocol import ROLL_CALL_TYPE
from polyclinic.common.wire.records import RollCall, TrainReply
from polyclinic.common.wire.versions import WIRE_VERSION
from polyclinic.strategies.registry import build_site_method
from tests.client.rounds import (
    called,
    changed_plan,
    images,
    judged,
    log,
    plan,
    private_plan,
    record_of,
    request,
    send,
    site,
    trained,
)

FOLDER = Path(__file__).parents[2] / "experiments"
OTHER_FILES = {"study.toml", "defaults.toml", "pyproject.toml", "benchmark.toml"}
EXPERIMENTS = sorted(path for path in FOLDER.rglob("*.toml") if path.name not in OTHER_FILES)
ORDINARY = plan()
HUGE = 10**9
MAX_STORED_RUNS, REAL_KEPT_RUNS = 4, memory.MAX_STORED_RUNS


def unchecked(content: RecordDict, **fields: str) -> RecordDict:
    """A record with other fields, which nobody checks."""
    content["fields"] = ConfigRecord({**content["fields"], **fields})
    return content


def call(at: Site, text: str, run: str = "run") -> Message:
    """Send a roll call with any text as its plan."""
    return send(
        at, ROLL_CALL_TYPE, unchecked(encode_record(RollCall("run", ORDINARY.model_dump_json())), run=run, plan=text)
    )


def text_of(of: HospitalPlan, changes: Mapping[str, Any]) -> str:
    """A plan as JSON, with other values at dotted keys, as any coordinator may write them."""
    tree = json.loads(of.model_dump_json())
    for key, value in changes.items():
        *tables, last = key.split(".")
        reduce(getitem, tables, tree)[last] = value
    text = json.dumps(tree)
    for mark, raw in RAW.items():
        text = text.replace(mark, raw)
    return text


def hospital(folder: Path, **policy: Any) -> Site:
    return replace(site(folder), policy=SitePolicy(smallest_count=0, **policy))


RAW = {
    '"DIGITS"': "1" + "0" * 10_000,
    '"FRACTION"': "0." + "1" * 10_000,
    '"LARGE"': "1e999",
    '"NESTED"': "[" * 9000 + "]" * 9000,
    '"TWICE"': '1, "epochs": 2',
}
PRIVATE = ORDINARY.privacy.model_dump() | {"level": "update"}


def network(architecture: str, image_size: int, **model: Any) -> dict[str, Any]:
    fields = {"architecture": architecture, "image_size": image_size, **model}
    return {f"model.{name}": value for name, value in fields.items()}


def noise(**privacy: float) -> dict[str, Any]:
    return {"model.norm": "group", "privacy": PRIVATE | privacy}


PARAMETERS, NUMBER = "policy.maximum_parameters", "policy.maximum_method_number"
KRUM = {"kind": "krum", "byzantine": HUGE, "keep": 1}
EXCESSIVE: dict[str, tuple[HospitalPlan, dict[str, Any], str]] = {
    "rounds": (ORDINARY, {"run.rounds": HUGE}, "policy.maximum_rounds"),
    "epochs": (ORDINARY, {"training.epochs": HUGE}, "policy.maximum_epochs"),
    "epochs of all rounds": (ORDINARY, {"training.epochs": 400, "run.rounds": 9000}, "policy.maximum_total_epochs"),
    "warm-up epochs": (ORDINARY, {"method.warm_up_epochs": HUGE}, "policy.maximum_epochs"),
    "epochs until a loss settles": (plan("unifed"), {"method.epoch_cap": HUGE}, "policy.maximum_epochs"),
    "epochs where no loss settles": (plan("unifed"), {"training.epochs": HUGE}, "policy.maximum_epochs"),
    "batch size": (ORDINARY, {"training.batch_size": HUGE}, "policy.maximum_batch_size"),
    "threads": (ORDINARY, {"training.threads": 1024}, "policy.maximum_threads"),
    "image size": (ORDINARY, {"model.image_size": 4096}, "policy.maximum_image_size"),
    "image size out of the schema": (ORDINARY, {"model.image_size": 10**6}, "plan.form"),
    "neck": (ORDINARY, {"model.neck": HUGE}, "plan.form"),
    "a wide neck": (ORDINARY, network("unifed_vgg11", 64, neck=65536), PARAMETERS),
    "parameters": (ORDINARY, network("femnist_cnn", 1024), PARAMETERS),
    "a dense layer as wide as the image": (ORDINARY, network("fedsld_cnn", 1000), PARAMETERS),
    "memory": (plan(batch_size=64), network("densenet121", 1024, norm="group"), "policy.maximum_memory_gb"),
    "noise that no search finds": (plan("fedavg"), noise(epsilon=1e300), "plan.privacy"),
    "noise for a delta that nothing reaches": (plan("fedavg"), noise(epsilon=0.01, delta=1e-300), "plan.privacy"),
    "passes": (plan("fedirm"), {"method.passes": HUGE}, NUMBER),
    "a number of the method": (ORDINARY, {"method.mean": KRUM}, NUMBER),
    "no such method": (ORDINARY, {"run.method": "m" * 400}, "plan.method"),
    "a long name": (ORDINARY, {"run.name": "n" * 10_000}, "plan.form"),
    "a plan of megabytes": (ORDINARY, {"run.name": "n" * 10**7}, "policy.maximum_plan_kb"),
    "an unknown table": (ORDINARY, {"extra": {"code": "import os"}}, "plan.form"),
    "a negative learning rate": (ORDINARY, {"training.lr": -1}, "plan.form"),
    "not a number": (ORDINARY, {"training.lr": float("nan")}, "plan.form"),
    "infinite": (ORDINARY, {"method.proximal_mu": float("inf")}, "plan.form"),
    "a number of 10,000 digits": (ORDINARY, {"run.rounds": "DIGITS"}, "plan.form"),
    "a fraction of 10,000 digits": (ORDINARY, {"training.lr": "FRACTION"}, "plan.form"),
    "beyond float64": (ORDINARY, {"training.lr": "LARGE"}, "plan.form"),
    "a seed beyond 64 bits": (ORDINARY, {"run.seed": 2**70}, "plan.form"),
    "nested lists": (ORDINARY, {"method.mean": "NESTED"}, "plan.form"),
    "a key twice": (ORDINARY, {"training.epochs": "TWICE"}, "plan.form"),
    "many keys": (ORDINARY, {"method": {f"k{number}": number for number in range(20_000)}}, "policy.maximum_plan_kb"),
    "a lone surrogate": (ORDINARY, {"run.method": "\ud800"}, "plan.form"),
}


@pytest.fixture(autouse=True)
def _a_machine_of_16_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.client.gate.policy_rules.measure_machine_memory", lambda device: 16 * 10**9)


@pytest.mark.parametrize(("of", "changes", "rule"), EXCESSIVE.values(), ids=EXCESSIVE)
def test_an_excessive_plan_is_declined_at_the_roll_call_within_a_second_and_16_mb(
    of: HospitalPlan, changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    at, text = hospital(tmp_path), text_of(of, changes)
    tracemalloc.start()
    began = time.perf_counter()
    reply = call(at, text)
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (reply.error.code, reply.error.reason.split(": ")[:2]) == (DECLINED_ERROR_CODE, ["declines", rule])
    assert len(reply.error.reason) < 600
    assert reply.error.reason.isprintable()
    received, left = log(at)
    assert (received["record"], received["decision"], received["rule"]) == ("RollCall", "deny", rule)
    assert (left["record"], left["kind"]) == ("Error", "declined")
    assert seconds < 1.0
    assert peak < 16 * 2**20 + 8 * len(text)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"audit"}


@pytest.mark.parametrize("name", ["epochs", "image size", "nested lists", "many keys"])
def test_a_plan_that_was_never_announced_is_declined_with_every_request_too(name: str, tmp_path: Path) -> None:
    at, (of, changes, rule) = hospital(tmp_path), EXCESSIVE[name]
    reply = send(at, "train", unchecked(encode_record(request(ORDINARY)), plan=text_of(of, changes)))
    assert reply.error.reason.startswith(f"declines: {rule}: ")
    assert [line["rule"] for line in log(at) if line["direction"] == "in"] == [rule]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", ["full", pytest.param("small", marks=pytest.mark.long)])
def test_no_experiment_of_ours_meets_a_limit(path: Path, scale: str, tmp_path: Path) -> None:
    experiment = read_experiment(path, [f"scale={scale}"] if "[small]" in path.read_text(encoding="utf-8") else ())
    text = make_hospital_plan(experiment.experiment).model_dump_json()
    work = read_requested_work({"plan": text, "wire.version": WIRE_VERSION}, hospital(tmp_path))
    verdict = decide_on_request(SitePolicy(), replace(work, images=10**6, rows=100))  # as large as any
    assert str(verdict) == "policy: ."


def test_a_masked_plan_of_an_earlier_wire_version_is_declined_because_no_sum_could_be_unmasked(tmp_path: Path) -> None:
    masked = private_plan(ORDINARY, secure_aggregation=True).model_dump_json()
    with pytest.raises(PlanRefused, match=f"secure aggregation needs wire version {WIRE_VERSION}") as refused:
        read_requested_work({"plan": masked, "wire.version": 16}, hospital(tmp_path))
    assert refused.value.rule == "wire version"
    assert read_requested_work({"plan": masked, "wire.version": WIRE_VERSION}, hospital(tmp_path)) is not None
    assert read_requested_work({"plan": ORDINARY.model_dump_json(), "wire.version": 16}, hospital(tmp_path)) is not None


def test_another_plan_than_that_of_the_roll_call_and_more_rounds_than_it_has_are_declined(tmp_path: Path) -> None:
    at, other = hospital(tmp_path), plan(epochs=3)
    assert not called(at, ORDINARY).has_error()
    for reply in (trained(at, other), judged(at, other), called(at, other)):
        assert reply.error.code == DECLINED_ERROR_CODE
        assert reply.error.reason.startswith("declines: run.plan: ")
    assert not trained(at, ORDINARY).has_error()
    later = send(at, "train", request(ORDINARY, server_round=21))
    assert later.error.reason == "declines: plan.rounds: the run has 20 rounds, and this is round 21."
    rules = [line["rule"] for line in log(at) if line["decision"] == "deny"]
    assert rules == ["run.plan"] * 3 + ["plan.rounds"]


OTHER_RUNS = 210
"""More runs than the 200 whose plans an earlier release remembered."""


def call_other_runs(at: Site) -> None:
    """Call the roll of many runs, as a coordinator may at any time."""
    for number in range(OTHER_RUNS):
        assert not call(at, ORDINARY.model_dump_json(), f"other-{number}").has_error()


def test_another_plan_for_an_announced_run_is_declined_after_any_number_of_other_runs(tmp_path: Path) -> None:
    at, other = hospital(tmp_path), plan(epochs=3)
    assert not called(at, ORDINARY).has_error()
    call_other_runs(at)
    for reply in (called(at, other), trained(at, other), judged(at, other)):
        assert reply.has_error()
        assert reply.error.reason.startswith("declines: run.plan: ")
    assert not trained(at, ORDINARY).has_error()


def test_the_time_of_a_run_is_counted_on_after_any_number_of_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = replace(hospital(tmp_path, maximum_run_hours=0.5 / 3600), durable=True)
    with monkeypatch.context() as patched:
        slow(patched)
        assert trained(at, ORDINARY).error.reason.startswith("stopped its work: policy.maximum_run_hours: ")
    call_other_runs(at)
    assert trained(at, ORDINARY).error.reason.startswith("declines: policy.maximum_run_hours: ")


def test_what_an_earlier_release_knew_of_its_runs_counts_on(tmp_path: Path) -> None:
    at, other = replace(hospital(tmp_path, maximum_run_hours=1), durable=True), plan(epochs=3)
    earlier = {
        "run": {"plan": incoming_request.hash_plan(ORDINARY.model_dump_json()), "seconds": 12.0},
        "worked": {"plan": incoming_request.hash_plan(ORDINARY.model_dump_json()), "seconds": 3600.0},
    }
    (tmp_path / "runs.json").write_text(json.dumps(earlier), encoding="utf-8")
    assert called(at, other).error.reason.startswith("declines: run.plan: ")
    worked = call(at, ORDINARY.model_dump_json(), "worked")
    assert worked.error.reason.startswith("declines: policy.maximum_run_hours: ")
    assert not trained(at, ORDINARY).has_error()
    record = incoming_request.SiteRunRecords(tmp_path).find_run_record("run")
    assert record is not None
    assert record.seconds > 12.0


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"plan": "a"}', b'{"plan": "a", "seconds": "x"}'])
def test_nothing_is_left_of_a_run_whose_record_is_gone(damage: bytes, tmp_path: Path) -> None:
    """Under another plan it would tell what the first one kept at home: momentum of a run with noise, for instance."""
    at, other = hospital(tmp_path), plan(reset_optimizer=False, lr=0.02)
    assert not trained(at, plan(reset_optimizer=False)).has_error()
    (tmp_path / "runs" / "run.json").write_bytes(damage)
    second = request(other, server_round=2, counted=1)
    both = at, hospital(tmp_path / "fresh")
    for either in both:  # each says once that it has no state
        with pytest.raises(LostRoundState):
            send(either, "train", second)
    replies = [send(site, "train", second) for site in both]
    updates = [record_of(reply, TrainReply).update.to_named_arrays() for reply in replies]
    after, fresh = ({name: array.tobytes() for name, array in update.items()} for update in updates)
    assert after == fresh


def test_any_number_of_new_runs_leave_little_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_STORED_RUNS", MAX_STORED_RUNS)
    at, remembered = hospital(tmp_path), request(plan(reset_optimizer=False))
    for number in range(MAX_STORED_RUNS + 5):
        assert not send(at, "train", replace(remembered, run=f"kept-{number}")).has_error()
    assert len(list((tmp_path / "memory").iterdir())) <= MAX_STORED_RUNS + 1
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "audit" not in path.name]
    assert sum(path.stat().st_size for path in files) * REAL_KEPT_RUNS / MAX_STORED_RUNS < 200 * 10**6


def test_what_is_kept_of_a_run_for_ever_is_less_than_its_lines_of_the_audit(tmp_path: Path) -> None:
    at = hospital(tmp_path)
    call_other_runs(at)
    records = list((tmp_path / "runs").iterdir())
    assert len(records) == OTHER_RUNS
    size_of_audit = (tmp_path / "audit.jsonl").stat().st_size
    assert sum(path.stat().st_size for path in records) < size_of_audit / 4


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a round take longer than any test."""

    def training(*arguments: Any) -> Any:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            sum(range(1000))
        raise AssertionError("nobody stopped it")

    monkeypatch.setattr(site_app, "train_with_privacy_layers", training)


def test_work_that_takes_too_long_is_stopped_by_the_site_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = hospital(tmp_path, maximum_hours=0.1 / 3600)
    with monkeypatch.context() as patched:
        slow(patched)
        reply = trained(at, ORDINARY)
    assert reply.error.code == DECLINED_ERROR_CODE
    assert reply.error.reason.startswith("stopped its work: policy.maximum_hours: ")
    assert [(line["direction"], line["decision"], line.get("rule")) for line in log(at)] == [
        ("in", "allow", "policy"),
        ("in", "deny", "policy.maximum_hours"),
        ("out", "allow", None),
    ]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    patient = replace(at, policy=at.policy.model_copy(update={"maximum_hours": 24.0}))
    assert not trained(patient, ORDINARY).has_error()


def test_work_on_a_run_ends_when_its_requests_took_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = replace(hospital(tmp_path, maximum_run_hours=0.1 / 3600), durable=True)
    slow(monkeypatch)
    first, second = (trained(at, ORDINARY).error.reason for _ in range(2))
    assert first.startswith("stopped its work: policy.maximum_run_hours: ")
    assert second.startswith("declines: policy.maximum_run_hours: ")
    new_run = send(at, "train", replace(request(ORDINARY), run="another"))
    assert new_run.error.reason.startswith("stopped its work")  # it has its own time


@pytest.mark.parametrize("architecture", TRAITS_BY_ARCHITECTURE)
@pytest.mark.parametrize("size", [64, pytest.param(224, marks=pytest.mark.long)])
def test_the_estimate_of_a_network_is_a_lower_bound_and_a_close_one(architecture: Any, size: int) -> None:
    image_size = (size // 2,) * 3 if TRAITS_BY_ARCHITECTURE[architecture].takes_volumes else size
    spec = ORDINARY.model.model_copy(update={"architecture": architecture, "channels": 3, "image_size": image_size})
    held = dict[int, torch.Tensor]()

    def noted(value: torch.Tensor) -> torch.Tensor:
        held[value.untyped_storage()._cdata] = value  # kept alive: no other storage takes its place
        return value

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(noted, lambda value: value):
        backbone, width = build_backbone(spec)
        own = {value.untyped_storage()._cdata for value in (*backbone.parameters(), *backbone.buffers())}
        backbone.train()(torch.empty(2, *spec.input_shape))
    activations = sum(value.untyped_storage().nbytes() for key, value in held.items() if key not in own) // 2
    neck_and_head = (width + 1) * 8 + 9 * 3
    parameters = sum(value.numel() for value in backbone.parameters()) + neck_and_head
    cost = plan_costs.estimate_network_cost(spec, rows=3)
    assert plan_costs.BACKBONE_COSTS[architecture].width == width
    assert 0.95 * parameters <= cost.parameters <= parameters
    assert 0.7 * activations <= cost.activations <= activations


def memory_bytes(of: HospitalPlan, images: int = 40) -> int:
    return plan_costs.estimate_training_memory_bytes(of, rows=2, images=images, device="cpu")


def test_memory_counts_gradients_of_every_image_and_no_more_images_than_the_site_has() -> None:
    # tiny_cnn, a neck of 8 and two rows: 52,000 + 97 * 8 + 9 * 2 numbers of 4 bytes; batches of 8 images.
    private = changed_plan(ORDINARY, privacy={"level": "sample", "noise_multiplier": 1.0})
    assert memory_bytes(private) - memory_bytes(ORDINARY) == 3 * 8 * 4 * 52_794
    assert memory_bytes(plan(batch_size=4096), images=8) == memory_bytes(ORDINARY, images=8)


def disk_bytes(of: HospitalPlan) -> int:
    return plan_costs.estimate_run_disk_bytes(of, build_site_method(of), rows=2)


def test_what_a_run_leaves_on_the_disk_is_counted() -> None:
    # 52,794 numbers: the message at work; of two rounds, Adam's two moments where the optimiser is kept.
    model = 4 * 52_794
    assert disk_bytes(plan(reset_optimizer=True)) == model
    assert disk_bytes(ORDINARY) == (1 + 2 * 2) * model
    # fedbn keeps parts of its own: three states in each file, and a model of its own.
    assert disk_bytes(plan("fedbn", reset_optimizer=True)) == (1 + 2 * 3 + 1) * model
    work = RequestedWork(ORDINARY, build_site_method(ORDINARY), rows=2, images=8)
    limits = (5 * model / 1e9, 4 * model / 1e9)
    rules = [decide_on_request(SitePolicy(maximum_disk_gb=limit), work).rule for limit in limits]
    assert rules == ["policy", "policy.maximum_disk_gb"]


def test_which_plans_are_too_large_says_no_more_of_the_number_of_images_than_the_site_tells(tmp_path: Path) -> None:
    """Plans of all sizes, one after the other, would else find the number to the image."""
    policy = SitePolicy(round_counts_to=10, maximum_memory_gb=0.01, smallest_count=10)
    least, most = (replace(site(tmp_path), policy=policy, train=images(1, count)) for count in (40, 49))
    assert least.train_samples == most.train_samples == 40
    verdicts = []
    for size in range(16, 65):
        text = text_of(ORDINARY, {"model.image_size": size, "training.batch_size": 4096})
        fields = {"plan": text, "wire.version": WIRE_VERSION}
        allowed = [
            decide_on_request(policy, work).is_allowed
            for at in (least, most)
            if (work := read_requested_work(fields, at))
        ]
        assert allowed[0] == allowed[1], size
        verdicts += allowed
    assert {True, False} == set(verdicts)
