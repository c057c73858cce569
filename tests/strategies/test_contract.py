"""What every registered method promises, whatever it does: real digits, unlike sites, real records, in this process."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from polyclinic.client import app
from polyclinic.common.config import ExperimentFile, HospitalPlan
from polyclinic.common.errors import BadInput
from polyclinic.common.security.audit import AuditLog, check_audit_log
from polyclinic.common.wire.canonical_bytes import hash_record
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.strategies.engine.state import deserialize_federation_state, serialize_federation_state
from polyclinic.strategies.registry import STRATEGIES, build_site_method, build_strategy
from tests.client.hidden_labels import IMAGES, hospital, sent, several_classes_an_image
from tests.federations import GATED, Traffic, experiment, needs_of, overheard, temporary_folder
from tests.strategies.leading import POOLED, Ran, Turned, lead

SITES = ["site-1", "site-2", "site-3"]
SITE_METHODS = {name: method().site for name, method in STRATEGIES.items()}
AVERAGING = sorted(
    name for name, site in SITE_METHODS.items() if not site.traits.sequential and site.pooled_missing_labels == "no"
)
SEQUENTIAL = sorted(name for name, site in SITE_METHODS.items() if site.traits.sequential)


def unlike(method: str, folder: Path, *overrides: str) -> ExperimentFile:
    """Three sites, few images, as unlike in their classes as the method takes."""
    return experiment(folder, f"run.method={method}", *needs_of(method), "training.batch_size=64", *overrides)


def bits(ran: Ran) -> bytes:
    return serialize_federation_state(ran.coordinator.state)


@dataclass(frozen=True)
class Whole:
    """Two rounds of a method that nothing disturbs, and every message of them."""

    ran: Ran
    traffic: Traffic
    sites: Path


@cache
def whole(method: str) -> Whole:
    """One run for all tests of this process."""
    folder = temporary_folder("polyclinic-contract-")
    with pytest.MonkeyPatch.context() as patched:
        traffic = overheard(patched)
        patched.setattr("polyclinic.client.simulation.SIMULATED_SITE_POLICY", GATED)
        return Whole(lead(unlike(method, folder), folder / "run", 2), traffic, folder / "run" / "sites")


def requests_to_one_site(method: str) -> tuple[tuple[str, ...], list[TrainRequest]]:
    """Classes that a site has in a whole run, and a request of each round that fits a site with these."""
    classes = whole(method).ran.coordinator.sites.make_round_context(1, {}).contract.sites["site-1"]
    fitting = [request for request in whole(method).traffic.requests if set(classes) <= set(request.class_names)]
    rounds = {request.round: request for request in fitting}
    assert len(rounds) >= 2
    return classes, list(rounds.values())


@pytest.mark.parametrize("method", sorted(set(STRATEGIES) - {"centralised", "server_only"}))
def test_no_update_depends_on_labels_of_hidden_classes(method: str, tmp_path: Path) -> None:
    """The requests of a whole run, to two hospitals that differ in nothing else."""
    classes, requests = requests_to_one_site(method)

    def updates(shown: int, **policy: Any) -> list[dict[str, bytes]]:
        labels = several_classes_an_image(len(classes), shown)
        at = hospital(tmp_path / f"{shown}{len(policy)}", classes, labels, **policy)
        assert at.hidden_classes("train") == set(classes[-2:])
        return sent(at, requests)

    assert updates(1) == updates(3)
    if method != "individual":  # which sends nothing
        assert updates(1, train_hidden_classes=True) != updates(3, train_hidden_classes=True)


@pytest.mark.parametrize("method", sorted(set(STRATEGIES) - {"centralised", "server_only"}))
def test_no_update_depends_on_validation_or_test_images(method: str, tmp_path: Path) -> None:
    """Nor on their labels, but where validation figures leave and the method chooses an epoch by them."""
    classes, requests = requests_to_one_site(method)
    warmed, chooses = with_warm_up(requests)
    missing = build_site_method(HospitalPlan.model_validate_json(warmed[0].plan)).missing_labels_count_as
    labels = (np.random.default_rng(0).random((IMAGES, len(classes))) < 0.75).astype(np.float32)

    def updates(*, turned: bool, **policy: Any) -> list[dict[str, bytes]]:
        at = hospital(tmp_path / f"{turned}{len(policy)}", classes, labels, turned=turned, smallest_count=2, **policy)
        return sent(at, warmed)

    assert updates(turned=False, training_figures=False) == updates(turned=True, training_figures=False)
    # individual sends nothing; where other sites' classes count as absent, they outweigh this site's own here
    if chooses and method != "individual" and missing == "masked":
        assert updates(turned=False) != updates(turned=True)


def with_warm_up(requests: Iterable[TrainRequest]) -> tuple[list[TrainRequest], bool]:
    """The same with some epochs of warm-up, where the method has any; and whether an epoch is chosen in one of them."""
    plans = [HospitalPlan.model_validate_json(request.plan) for request in requests]
    method = {**plans[0].method, "warm_up_epochs": 4, "warm_up_lr": 0.02}
    try:
        build_strategy(plans[0].run.method, method, plans[0].model.task)
    except BadInput:
        if build_site_method(plans[0]).early_stopping is None:
            return list(requests), False
        method = {**plans[0].method, "missing": "masked", "epoch_cap": 6}
    changed = [plan.model_copy(update={"method": method}).model_dump_json() for plan in plans]
    return [replace(request, plan=plan) for request, plan in zip(requests, changed, strict=True)], True


def each_is_allowed_and_written_down(traffic: Traffic, sites: Path) -> None:
    """Every record that passed has a decision and a line in its site's audit, and there is no other."""
    entries = [entry for folder in sites.iterdir() for entry in AuditLog(folder).read_entries()]
    assert [fault for folder in sites.iterdir() for fault in check_audit_log(folder).faults] == []
    for direction, passed in (("in", traffic.down), ("out", traffic.up)):
        lines = [entry for entry in entries if entry["direction"] == direction]
        assert {entry["decision"] for entry in lines} == {"allow"}
        assert sorted(entry["sha256"] for entry in lines) == sorted(hash_record(content) for _, content in passed)


KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (RollCall, RollCallAnswer, TrainRequest, TrainReply, EvaluateRequest, EvaluateReply)
}


def fields_of(content: RecordDict) -> dict[str, set[str]]:
    return {record: set(content[record]) for record in content}


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_records_hold_exactly_what_is_declared_and_leave_by_the_sites_audit(method: str) -> None:
    ran, traffic = whole(method).ran, whole(method).traffic
    for _, content in traffic.down + traffic.up:
        kind = KINDS[str(content["fields"]["wire.record"])]
        assert fields_of(encode_record(decode_record(content, kind))) == fields_of(content)
    rule, features = ran.coordinator.method, ran.coordinator.state.model.head.features
    for reply in traffic.replies:
        context = ran.coordinator.sites.make_round_context(reply.round, {})
        shapes = {name: array.shape for name, array in reply.statistics.items()}
        assert shapes == dict(rule.statistics_shape(context, reply.site, features))
    each_is_allowed_and_written_down(traffic, whole(method).sites)


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_the_order_of_replies_does_not_matter(method: str, tmp_path: Path) -> None:
    turned = lead(unlike(method, tmp_path), tmp_path / "turned", 2, wire=Turned)
    assert bits(whole(method).ran) == bits(turned)


ROBUST = {"surgical": "coordinate_median", "fedbn": "trimmed_mean", "pfl": '{kind = "krum", keep = 2}'}
"""Of each kind one in ``make test``; all methods in ``make torture``."""
TAKES_ROBUST_MEANS = [
    name if name in ROBUST else pytest.param(name, marks=pytest.mark.torture)
    for name in AVERAGING
    if not SITE_METHODS[name].traits.weighs_updates and SITE_METHODS[name].traits.payload.trunk
]


@pytest.mark.parametrize("method", TAKES_ROBUST_MEANS)
def test_the_order_of_replies_does_not_matter_to_a_robust_mean(method: str, tmp_path: Path) -> None:
    mean = ROBUST.get(method, "coordinate_median")
    file = unlike(method, tmp_path, "partition.sites=5", f"method.mean={mean}")
    straight = lead(file, tmp_path / "straight", 1)
    turned = lead(file, tmp_path / "turned", 1, wire=Turned)
    assert bits(straight) == bits(turned)
    plain = lead(unlike(method, tmp_path, "partition.sites=5"), tmp_path / "plain", 1)
    assert bits(plain) != bits(straight)


@pytest.mark.torture
@pytest.mark.parametrize("method", AVERAGING)
def test_updates_that_wait_make_the_model_of_those_added_as_they_come(method: str, tmp_path: Path) -> None:
    streamed, waiting = (
        lead(unlike(method, tmp_path, f"participation.clip={clip}"), tmp_path / clip, 2) for clip in ("off", "1000.0")
    )
    as_without_trials = replace(waiting.coordinator.state, sound_losses={}, loss_changes=())
    assert bits(streamed) == serialize_federation_state(as_without_trials)


@pytest.mark.parametrize("method", sorted(STRATEGIES))
def test_a_resumed_run_makes_the_same_next_round(method: str, tmp_path: Path) -> None:
    file, through = unlike(method, tmp_path), whole(method).ran
    stopped = lead(file, tmp_path / "stopped", 1)
    before = serialize_federation_state(stopped.states[0])
    read = deserialize_federation_state(before)
    resumed = lead(file, tmp_path / "stopped", 2, resumed=read)
    assert serialize_federation_state(resumed.states[-1]) == serialize_federation_state(through.states[-1])
    assert serialize_federation_state(stopped.states[0]) == serialize_federation_state(read) == before
    losses = [record.mean_train_loss for record in through.records]
    assert resumed.records[-1].mean_train_loss == losses[-1] != losses[0]


def failing(monkeypatch: pytest.MonkeyPatch, site: str, server_round: int) -> None:
    """The site's disk is full in that round."""
    train = app.train_with_privacy_layers

    def train_or_fail(at: Any, request: TrainRequest, masks: Any) -> TrainReply:
        if (at.name, request.round) == (site, server_round):
            raise OSError("No space left on device")
        return train(at, request, masks)

    monkeypatch.setattr(app, "train_with_privacy_layers", train_or_fail)


def replies_of(traffic: Traffic, server_round: int) -> dict[str, TrainReply]:
    return {reply.site: reply for reply in traffic.replies if reply.round == server_round}


EVEN_SHARES = {"rscfed": ("method.consensus_sites=3", "method.distance_scale=0")}
"""With what a method that draws groups of sites gives all the same share."""
DROPS_OUT_IN = {"fedsld": 2, "fedavg_scaled": 2}
"""The round in which a site drops out, where not in the first: before its first reply, its counts enter no prior."""


@pytest.mark.parametrize("method", AVERAGING)
def test_a_site_that_drops_out_changes_nothing_but_its_own_share(
    method: str, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = EVEN_SHARES.get(method, ())
    file = unlike(method, tmp_path, "participation.min_sites=2", "method.weighting=uniform", *even)
    last = DROPS_OUT_IN.get(method, 1)
    whole = lead(file, tmp_path / "whole", last)
    before = replies_of(traffic, last)
    traffic.up.clear()
    failing(monkeypatch, "site-2", last)
    partial = lead(file, tmp_path / "partial", last)
    after = replies_of(traffic, last)
    assert set(after) == {"site-1", "site-3"}
    for site, reply in after.items():
        undisturbed = before[site].update.to_named_arrays()
        assert reply.update.to_named_arrays().keys() == undisturbed.keys()
        assert all(
            array.tobytes() == undisturbed[name].tobytes() for name, array in reply.update.to_named_arrays().items()
        )
    shift = partial.coordinator.state.model.trunk - whole.coordinator.state.model.trunk
    trunks = {site: reply.update.trunk for site, reply in before.items() if reply.update.trunk is not None}
    shares = [trunks["site-1"] + trunks["site-3"], sum(trunks.values())] if trunks else [0.0, 0.0]
    np.testing.assert_allclose(shift, np.broadcast_to(shares[0] / 2 - shares[1] / 3, shift.shape), rtol=1e-3, atol=1e-6)


def test_every_method_stands_in_one_of_the_groups() -> None:
    assert sorted([*AVERAGING, *SEQUENTIAL, *POOLED]) == sorted(STRATEGIES)


@pytest.mark.parametrize("method", [name for name in SEQUENTIAL if SITE_METHODS[name].traits.hospitals_train])
def test_a_lost_site_is_skipped_and_the_pass_goes_on_from_the_last_good_model(
    method: str, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = unlike(method, tmp_path, "participation.min_sites=2")
    failing(monkeypatch, "site-2", 1)
    ran = lead(file, tmp_path / "run", 1)
    assert dict(ran.coordinator.state.counted) == {"site-1": 1, "site-3": 1}
    hops = [request.model.trunk for request in traffic.requests if request.round == 1]
    assert len(hops) == 3
    moved = [reply.update.trunk for reply in replies_of(traffic, 1).values()]
    lost = next(place for place in range(2) if np.array_equal(hops[place], hops[place + 1]))
    reached = [hop for place, hop in enumerate(hops) if place != lost]
    np.testing.assert_allclose(reached[1] - reached[0], moved[0], atol=1e-6)
