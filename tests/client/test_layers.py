"""The layers around a round: on where a plan or a policy asks for them, and absent else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from polyclinic.client.simulation import make_simulation_client_app
from polyclinic.client.site.policy import UNLIMITED, SitePolicy
from polyclinic.client.site.site import Site
from polyclinic.client.training.layers import (
    DisclosureLimitsLayer,
    FailureHidingLayer,
    UpdateClippingLayer,
    UpdateCompressionLayer,
    make_privacy_layers,
)
from polyclinic.client.training.privacy import PrivacyBudgetLayer
from polyclinic.client.training.secure_aggregation import HeldUpdateStore, SiteMaskingLayer
from polyclinic.common.config import HospitalPlan
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import RollCall, RollCallAnswer
from polyclinic.strategies.registry import build_site_method
from tests.client.rounds import plan, private_plan, site
from tests.federations import experiment

MASKED = {"secure_aggregation": True}
NOISY_UPDATE, NOISY_STEPS = ({"level": level, "noise_multiplier": 1.0} for level in ("update", "sample"))


def names(at: Site, of: HospitalPlan) -> list[str]:
    layers = make_privacy_layers(at, of, build_site_method(of), HeldUpdateStore(lambda text: None))
    return [type(layer).__name__ for layer in layers]


@pytest.mark.parametrize(
    ("simulated", "policy", "layers"),
    [
        (True, UNLIMITED, []),
        (True, SitePolicy(), ["DisclosureLimitsLayer"]),
        (False, UNLIMITED, ["DisclosureLimitsLayer"]),
    ],
    ids=["a simulation without limits", "a simulation with a policy", "a hospital"],
)
def test_a_plain_round_has_no_layer_but_disclosure_limits(
    simulated: bool, policy: SitePolicy, layers: list[str], tmp_path: Path
) -> None:
    assert names(replace(site(tmp_path), simulated=simulated, policy=policy), plan("vanilla")) == layers


@pytest.mark.parametrize(
    ("parameters", "privacy", "layers"),
    [
        ({"clip_update": 0.5}, {}, [UpdateClippingLayer]),
        ({"compress_update": "int8"}, {}, [UpdateCompressionLayer]),
        ({}, NOISY_STEPS, [PrivacyBudgetLayer, DisclosureLimitsLayer]),
        ({}, NOISY_UPDATE, [PrivacyBudgetLayer, DisclosureLimitsLayer, FailureHidingLayer]),
        ({}, MASKED, [SiteMaskingLayer, DisclosureLimitsLayer, FailureHidingLayer]),
        (
            {"clip_update": 0.5},
            {**NOISY_UPDATE, **MASKED},
            [SiteMaskingLayer, PrivacyBudgetLayer, DisclosureLimitsLayer, UpdateClippingLayer, FailureHidingLayer],
        ),
    ],
    ids=["clipping", "compression", "noisy steps", "noisy update", "masks", "all"],
)
def test_a_plan_turns_on_the_layers_that_it_names_the_outermost_first(
    parameters: dict[str, Any], privacy: dict[str, Any], layers: list[type], tmp_path: Path
) -> None:
    at = replace(site(tmp_path), simulated=True, policy=UNLIMITED)
    assert names(at, private_plan(plan("vanilla", parameters), **privacy)) == [layer.__name__ for layer in layers]


def test_a_simulated_site_without_limits_writes_no_audit_and_settles_no_plan(tmp_path: Path) -> None:
    file = experiment(tmp_path)
    app = make_simulation_client_app(file.experiment.model_dump_json(), file.base_folder, tmp_path / "run")
    request = make_request(encode_record(RollCall("run", plan("vanilla").model_dump_json())), 2, "query.roll_call")
    reply = app(request, Context(1, 2, {"partition-id": 0, "num-partitions": 3}, RecordDict(), {}))
    assert decode_record(reply.content, RollCallAnswer).site == "site-1"
    assert not list((tmp_path / "run").rglob("*.json*"))
