"""Distributed noise at a hospital: what its policy allows, and that no share covers two things."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.client.site.policy import SitePolicy
from polyclinic.client.training.privacy import open_privacy_ledger
from polyclinic.strategies.privacy.secure_aggregation.coordinator import MaskingFailed
from tests.client.masked import FOUR, Hospitals, honest, masked_plan, of_opening, of_training, with_trunk
from tests.client.rounds import changed_plan, private_plan
from tests.federations import federation

DISTRIBUTED: Mapping[str, Any] = {
    "level": "update",
    "secure_aggregation": True,
    "noise": "distributed",
    "honest_sites": 3,
    "noise_multiplier": 2.0,
}
SHARED_NOISE = private_plan(masked_plan(), **DISTRIBUTED)


def hospitals(folder: Path, **policy: Any) -> Hospitals:
    return Hospitals(folder, FOUR, policy={"honest_sites": 3, **policy})


def test_a_round_that_is_masked_again_after_a_kill_has_the_same_noise_and_costs_once(tmp_path: Path) -> None:
    """Also hospitals that open any sum remember what their noise covered, and open none of fewer than the honest."""
    here = hospitals(tmp_path, smallest_cohort=1)
    before = here.opened(SHARED_NOISE)
    here.start(FOUR)
    assert here.opened(SHARED_NOISE).integers.tolist() == before.integers.tolist()
    assert [len(open_privacy_ledger(here.sites[name]).entries) for name in FOUR] == [1, 1, 1, 1]
    assert all((here.sites[name].folder / "masked" / "run.json").exists() for name in FOUR)
    with pytest.raises(MaskingFailed):
        here.opened(SHARED_NOISE, server_round=2, change=of_opening(survivors=FOUR[:2]))
    assert any("2 of 4 sites are left, 3 are needed" in refusal for refusal in here.refusals)


def test_two_rounds_and_two_hospitals_have_noise_of_their_own(tmp_path: Path) -> None:
    here, of = hospitals(tmp_path), changed_plan(SHARED_NOISE, privacy={"max_update_norm": 1e-6})
    first, second = here.opened(of), here.opened(of, server_round=2)
    assert abs(float(np.corrcoef(first.vector, second.vector)[0, 1])) < 0.2  # of 500 numbers
    keys = {(here.sites[name].folder / "noise.key").read_bytes() for name in FOUR}
    assert len(keys) == 4


def test_a_round_is_not_masked_with_noise_twice_for_two_requests(tmp_path: Path) -> None:
    """Each would have a share of its own, and cost once more; and their difference is of one round."""
    here = hospitals(tmp_path)
    here.opened(SHARED_NOISE)
    with pytest.raises(MaskingFailed):
        here.opened(SHARED_NOISE, change=of_training(partial(with_trunk, times=0.5)))
    assert any("was masked with noise before, for another request" in refusal for refusal in here.refusals)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"honest_sites": 2}, "policy.honest_sites: it is 2"),
        ({"peers": {"ash": "a key"}}, "policy.peers: it lists 1 sites"),
        ({"epsilon": 1.0}, "this site allows 1"),
        ({"level": "trusted", "honest_sites": 1}, "policy.honest_sites: it is 1"),
    ],
)
def test_a_hospital_takes_part_only_where_it_trusts_so_many(
    policy: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    here = hospitals(tmp_path)
    own = here.sites["ash"].policy.model_dump()
    here.change("ash", policy=SitePolicy.model_validate({**own, **policy}))
    assert here.trained(SHARED_NOISE, ["ash"], 1, honest) == {}
    assert any(refusal.startswith("ash") and reason in refusal for refusal in here.refusals)


@pytest.mark.slow
def test_a_federation_with_distributed_noise_runs_to_its_end_and_says_what_it_rests_on(tmp_path: Path) -> None:
    noise = [f"privacy.{name}={str(value).lower()}" for name, value in DISTRIBUTED.items()]
    noise += ["privacy.max_update_norm=0.01", "model.norm=group", "evaluation.checkpoint=last"]
    noise += ["partition.shared=10", "run.rounds=1"]
    privacy = federation(tmp_path, *noise)["privacy"]
    federation(tmp_path, *noise, out="again")
    written = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "again")]
    assert written[0] == written[1]
    assert (privacy["noise"], privacy["honest_sites"]) == ("distributed", 3)
    assert sorted(privacy["epsilon"]) == ["site-1", "site-2", "site-3"]
    assert privacy["epsilon_of_one_share"] > 1.5 * max(privacy["epsilon"].values())
