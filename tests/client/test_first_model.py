"""A hospital builds the first model of a run itself, and trains from no other."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from torch import nn

from client.gate.incoming_request import ABSOLUTE
from client.site.site import Site
from common.config import Plan
from common.models.network import build
from common.models.state import FrozenPart, ModelState, read_state
from common.plugins import MODELS, PLUGIN, register_local, stamp_of
from common.wire.codec import encode
from common.wire.records import Groups, TrainRequest
from tests.client.gates import asked, log
from tests.client.rounds import OWN, beginning, plan, request, site

SURGICAL = plan("surgical", {})


def refusal(at: Site, content: TrainRequest) -> str:
    """Why the site declines a request to train; empty where it trains."""
    reply = asked(at, "train", encode(content))
    if reply.has_content():
        assert reply.content["fields"]["wire.record"] == "TrainReply"
        return ""
    out = [(line["record"], line.get("kind")) for line in log(at) if line["direction"] == "out"]
    assert out == [("Error", "declined")]  # nothing else left
    (line,) = (line for line in log(at) if line.get("decision") == "deny")
    assert line["rule"] == "run.first_model"
    assert line["reason"] in reply.error.reason
    return str(reply.error.reason)


def moved(model: ModelState, by: float) -> ModelState:
    """The model with one number of its trunk moved."""
    trunk = model.trunk.copy()
    trunk[7] += np.float32(by)
    return replace(model, trunk=trunk)


def norm_moved(model: ModelState) -> ModelState:
    norm = model.norm.copy()
    norm[-1] *= np.float32(1.001)
    return replace(model, norm=norm)


def rows_swapped(model: ModelState) -> ModelState:
    head = model.head
    return replace(model, head=replace(head, weight=head.weight[::-1].copy(), bias=head.bias[::-1].copy()))


CHANGES: dict[str, tuple[Callable[[ModelState], ModelState], int]] = {
    "one number by a hundredth": (lambda model: moved(model, 0.01), 1),
    "one number that is none": (lambda model: moved(model, float("inf")), 1),
    "one running variance by a thousandth": (norm_moved, 1),
    "head rows of the other class": (rows_swapped, 2 * 9),
    "a trunk with the other sign": (lambda model: replace(model, trunk=-model.trunk), 52_832),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_first_model_is_refused_with_the_numbers_that_differ(change: str, tmp_path: Path) -> None:
    changed, count = CHANGES[change]
    reason = refusal(site(tmp_path), request(SURGICAL, changed(beginning(SURGICAL))))
    total = sum(array.size for array in Groups.of_model(beginning(SURGICAL)).named().values())
    assert f"{count:,} of {total:,} numbers" in reason


@pytest.mark.parametrize("server_round", [0, 1])
def test_the_plans_own_first_model_is_trained(server_round: int, tmp_path: Path) -> None:
    assert refusal(site(tmp_path), request(SURGICAL, beginning(SURGICAL), server_round)) == ""


def test_one_number_may_differ_in_its_last_bit(tmp_path: Path) -> None:
    model = beginning(SURGICAL)
    trunk = model.trunk.copy()
    trunk[7] = np.nextafter(trunk[7], np.float32(1))
    assert refusal(site(tmp_path), request(SURGICAL, replace(model, trunk=trunk))) == ""


def test_the_first_model_of_a_coordinator_without_avx2_is_trained(tmp_path: Path) -> None:
    """torch draws normal numbers otherwise there, in the last bits; ATEN_CPU_CAPABILITY stands for such a machine."""
    spec = SURGICAL.model.model_copy(update={"architecture": "efficientnet_lite0", "image_size": 32})
    of = SURGICAL.model_copy(update={"model": spec})
    program = (
        "import sys, numpy; from common.config import parse_plan; from tests.client.rounds import beginning; "
        "numpy.save(sys.argv[2], beginning(parse_plan(sys.argv[1])).trunk)"
    )
    command = [sys.executable, "-c", program, of.model_dump_json(), str(tmp_path / "trunk.npy")]
    subprocess.run(command, check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})
    own, sent = beginning(of), np.load(tmp_path / "trunk.npy")
    assert np.abs(own.trunk - sent).max() < ABSOLUTE
    assert refusal(site(tmp_path), request(of, replace(own, trunk=sent))) == ""


def test_a_model_of_another_seed_than_the_plans_is_refused(tmp_path: Path) -> None:
    other = SURGICAL.model_copy(update={"run": SURGICAL.run.model_copy(update={"seed": 6})})
    assert "numbers of the model" in refusal(site(tmp_path), request(SURGICAL, beginning(other)))


def test_head_rows_go_by_their_names_in_any_order(tmp_path: Path) -> None:
    """Where a method sends all rows; where it sends a site's own, their order is the site's."""
    vanilla = plan("vanilla", {})
    assert refusal(site(tmp_path), request(vanilla, beginning(vanilla, OWN[::-1]))) == ""


def test_what_it_does_not_stop(tmp_path: Path) -> None:
    """A model in a request that says a later round, also to a site that was asked for nothing before; a pass."""
    crafted = moved(beginning(SURGICAL), 1.0)
    for server_round, model in ((2, crafted), (5, crafted), (2, beginning(SURGICAL))):
        assert refusal(site(tmp_path / "later"), request(SURGICAL, model, server_round)) == ""
    passed = plan("fedseq", {})
    assert refusal(site(tmp_path / "passed"), request(passed, moved(beginning(passed), 1.0))) == ""


def test_in_a_simulation_nobody_compares(tmp_path: Path) -> None:
    simulated = replace(site(tmp_path), simulated=True)
    assert refusal(simulated, request(SURGICAL, moved(beginning(SURGICAL), 1.0))) == ""


# ---------------------------------------------------------------------- weights files, and what nobody trains


def weights_file(folder: Path, seed: int = 99) -> tuple[Plan, ModelState]:
    """Write a backbone into a weights file; return the plan that names it, and the model that begins a run with it."""
    folder.mkdir(parents=True)
    tensors = build(SURGICAL.model, ("",), seed).state_dict()
    path = folder / "trunk.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items() if n.startswith("backbone.") and t.ndim}, path)
    named = SURGICAL.model_copy(update={"weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    spec = SURGICAL.model.model_copy(update={"weights": str(path)})
    return named, read_state(build(spec, OWN, SURGICAL.run.seed))


def test_a_hospital_that_has_the_weights_file_builds_from_it_and_refuses_another_model(tmp_path: Path) -> None:
    named, model = weights_file(tmp_path / "weights")
    at = replace(site(tmp_path / "north"), weights_folder=tmp_path / "weights")
    assert refusal(at, request(named, model)) == ""
    again = replace(site(tmp_path / "again"), weights_folder=tmp_path / "weights")
    assert "weights file. Compare" in refusal(again, request(named, moved(model, 0.01)))


def test_a_hospital_without_the_weights_file_is_told_that_nobody_compared(tmp_path: Path) -> None:
    named, model = weights_file(tmp_path / "elsewhere")
    lines: list[str] = []
    at = replace(site(tmp_path / "north"), tell=lines.append)
    assert refusal(at, request(named, moved(model, 0.01))) == ""
    assert [line for line in lines if str(named.weights_sha256) in line]


def test_a_model_of_a_weights_file_is_refused_where_the_plan_names_none(tmp_path: Path) -> None:
    _, model = weights_file(tmp_path / "weights")
    at = replace(site(tmp_path / "north"), weights_folder=tmp_path / "weights")
    assert "plan's seed" in refusal(at, request(SURGICAL, model))


def headed(frozen: FrozenPart | None = None) -> tuple[Plan, TrainRequest]:
    """A plan that trains neck and head of a frozen backbone, by default the one of its seed, and its first request."""
    spec = SURGICAL.model.model_copy(update={"train": "neck"})
    network = build(spec, OWN, SURGICAL.run.seed)
    part = frozen or FrozenPart.of(network)
    whole = SURGICAL.model_copy(update={"model": spec.model_copy(update={"frozen_sha256": part.sha256})})
    return whole, replace(request(whole, read_state(network)), frozen=Groups(trunk=part.values))


def test_a_frozen_part_is_a_part_of_the_first_model(tmp_path: Path) -> None:
    _whole, honest = headed()
    assert refusal(site(tmp_path / "honest"), honest) == ""
    kept = site(tmp_path / "honest")  # it has the part on its disk now
    assert refusal(kept, replace(honest, run="second", frozen=Groups())) == ""
    crafted = FrozenPart(honest.frozen.trunk * np.float32(2))
    assert "numbers of the model" in refusal(site(tmp_path / "crafted"), headed(crafted)[1])


def drawn_elsewhere(channels: int, image_size: int) -> nn.Module:
    """A network whose values are of no seed."""
    dense = nn.Linear(channels * image_size**2, 4)
    nn.init.constant_(dense.weight, np.random.default_rng().normal())
    return nn.Sequential(nn.Flatten(), dense)


def test_a_plug_in_that_draws_its_network_elsewhere_than_from_torch_is_refused(tmp_path: Path) -> None:
    name = register_local(MODELS, drawn_elsewhere)
    spec = SURGICAL.model.model_copy(update={"architecture": PLUGIN + name})
    of = SURGICAL.model_copy(update={"model": spec, "plugins": (stamp_of(MODELS, name),)})
    at = site(tmp_path, networks=(PLUGIN + name,))
    assert "numbers of the model" in refusal(at, request(of, beginning(of)))
