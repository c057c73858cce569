"""Distributed noise at a hospital: what its policy allows, and that no share covers two things."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.training.privacy import open_ledger
from common.config import Plan, PrivacySection
from common.wire.records import TrainRequest
from common.wire.secure_aggregation import RevealRequest
from strategies.privacy.secure_aggregation.coordinator import MaskingFailed
from tests.client.masked import Hospitals, masked_plan
from tests.federations import federation

FOUR = {"ash": 40, "birch": 40, "cedar": 40, "elm": 40}
DISTRIBUTED: Mapping[str, Any] = {
    "level": "update",
    "secure_aggregation": True,
    "noise": "distributed",
    "honest_sites": 3,
    "noise_multiplier": 2.0,
}


def shared_noise(**changed: Any) -> Plan:
    of = masked_plan()
    model = of.model.model_copy(update={"norm": "group"})
    return of.model_copy(update={"model": model, "privacy": PrivacySection.model_validate({**DISTRIBUTED, **changed})})


def hospitals(folder: Path, **policy: Any) -> Hospitals:
    return Hospitals(folder, FOUR, policy={"honest_sites": 3, **policy})


def test_a_round_that_is_masked_again_after_a_kill_has_the_same_noise_and_costs_once(tmp_path: Path) -> None:
    here, of = hospitals(tmp_path), shared_noise()
    before = here.opened(of, tuple(FOUR))
    here.start(FOUR)
    again = here.opened(of, tuple(FOUR))
    assert again.integers.tolist() == before.integers.tolist()
    assert [len(open_ledger(here.sites[name]).entries) for name in FOUR] == [1, 1, 1, 1]


def test_two_rounds_and_two_hospitals_have_noise_of_their_own(tmp_path: Path) -> None:
    here, of = hospitals(tmp_path), shared_noise(max_update_norm=1e-6)
    first, second = here.opened(of, tuple(FOUR), 1), here.opened(of, tuple(FOUR), 2)
    assert abs(float(np.corrcoef(first.vector, second.vector)[0, 1])) < 0.2  # of 500 numbers
    keys = {(here.sites[name].folder / "noise.key").read_bytes() for name in FOUR}
    assert len(keys) == 4


def test_a_round_is_not_masked_with_noise_twice_for_two_requests(tmp_path: Path) -> None:
    """Each would have a share of its own, and cost once more; and their difference is of one round."""

    def another(name: str, asked: Any) -> Any:
        if not isinstance(asked, TrainRequest) or asked.model.trunk is None:
            return asked
        return replace(asked, model=replace(asked.model, trunk=asked.model.trunk * np.float32(0.5)))

    here, of = hospitals(tmp_path), shared_noise()
    here.opened(of, tuple(FOUR))
    with pytest.raises(MaskingFailed):
        here.opened(of, tuple(FOUR), change=another)
    assert any("was masked with noise before, for another request" in one for one in here.refusals)


def test_a_hospital_that_opens_any_sum_still_remembers_what_its_noise_covered(tmp_path: Path) -> None:
    here, of = hospitals(tmp_path, smallest_cohort=1), shared_noise()
    here.opened(of, tuple(FOUR))
    here.start(FOUR)
    assert here.opened(of, tuple(FOUR)).survivors
    assert all((here.sites[name].folder / "masked" / "run.json").exists() for name in FOUR)


def test_no_sum_of_fewer_than_the_honest_sites_is_opened_whatever_the_coordinator_says(tmp_path: Path) -> None:
    def of_two(name: str, asked: Any) -> Any:
        return replace(asked, survivors=asked.survivors[:2]) if isinstance(asked, RevealRequest) else asked

    here = hospitals(tmp_path, smallest_cohort=2)
    with pytest.raises(MaskingFailed):
        here.opened(shared_noise(), tuple(FOUR), change=of_two)
    assert any("2 of 4 sites are left, 3 are needed" in one for one in here.refusals)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"honest_sites": 2}, "policy.honest_sites: it is 2, and the plan's epsilon holds only while 3 sites"),
        ({"peers": {"ash": "a key"}}, "policy.peers: it lists 1 sites, and of 3 that add their noise"),
        ({"epsilon": 1.0}, "this site allows 1"),
        ({"level": "trusted", "honest_sites": 1}, "policy.honest_sites: it is 1"),
    ],
)
def test_a_hospital_takes_part_only_where_its_policy_trusts_so_many(
    policy: dict[str, Any], why: str, tmp_path: Path
) -> None:
    here = hospitals(tmp_path)
    ash = here.sites["ash"]
    changed = type(ash.policy).model_validate({**ash.policy.model_dump(), **policy})
    here.sites["ash"] = replace(ash, policy=changed)
    here.start(["ash"])
    assert "ash" not in here.opened(shared_noise(), tuple(FOUR)).survivors
    assert any(one.startswith("ash") and why in one for one in here.refusals)


@pytest.mark.slow
def test_a_federation_with_distributed_noise_runs_to_its_end_and_says_what_it_rests_on(tmp_path: Path) -> None:
    noise = [f"privacy.{name}={str(value).lower()}" for name, value in DISTRIBUTED.items()]
    noise += ["privacy.max_update_norm=0.01", "model.norm=group", "evaluation.checkpoint=last", "partition.shared=10"]
    told = federation(tmp_path, *noise)["privacy"]
    federation(tmp_path, *noise, out="again")
    written = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "again")]
    assert written[0] == written[1]
    assert (told["noise"], told["honest_sites"]) == ("distributed", 3)
    assert sorted(told["epsilon"]) == ["site-1", "site-2", "site-3"]
    assert told["epsilon_of_one_share"] > 1.5 * max(told["epsilon"].values())
