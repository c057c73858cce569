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

from polyclinic.client.gate.incoming_request import ABSOLUTE_TOLERANCE
from polyclinic.client.site.site import Site
from polyclinic.common.config import HospitalPlan
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import FrozenPart, ModelState, read_model_state
from polyclinic.common.plugins import MODELS, PLUGIN_PREFIX, identify_plugin, register_local_plugin
from polyclinic.common.wire.codec import round_to_number_format
from polyclinic.common.wire.records import ModelGroups, NumberFormat, TrainRequest
from polyclinic.strategies.engine.state import make_initial_state
from polyclinic.strategies.methods.baselines import PartialLossSite
from tests.client.rounds import OWN, beginning, changed_plan, log, plan, request, send, site

SURGICAL, FEDSEQ, VANILLA = plan(), plan("fedseq"), plan("vanilla")


def refusal(at: Site, content: TrainRequest) -> str:
    """Why the site declines a request to train; empty where it trains."""
    reply = send(at, "train", content)
    if reply.has_content():
        assert reply.content["fields"]["wire.record"] == "TrainReply"
        return ""
    out = [(line["record"], line.get("kind")) for line in log(at) if line["direction"] == "out"]
    assert out == [("Error", "declined")]  # nothing else left
    (line,) = (line for line in log(at) if line.get("decision") == "deny")
    assert line["rule"] == "run.first_model"
    assert line["reason"] in reply.error.reason
    return str(reply.error.reason)


def moved(model: ModelState, by: float = 1.0) -> ModelState:
    """The model with one number of its trunk moved."""
    trunk = model.trunk.copy()
    trunk[7] += np.float32(by)
    return replace(model, trunk=trunk)


def last_bit(model: ModelState) -> ModelState:
    trunk = model.trunk.copy()
    trunk[7] = np.nextafter(trunk[7], np.float32(1))
    return replace(model, trunk=trunk)


def with_norm(model: ModelState) -> ModelState:
    return replace(model, norm=np.append(model.norm[:-1], model.norm[-1] * np.float32(1.001)))


def rows_swapped(model: ModelState) -> ModelState:
    head = model.head
    return replace(model, head=replace(head, weight=head.weight[::-1].copy(), bias=head.bias[::-1].copy()))


CHANGES: dict[str, tuple[Callable[[ModelState], ModelState], int]] = {
    "one number by a hundredth": (lambda model: moved(model, 0.01), 1),
    "one number that is none": (lambda model: moved(model, float("inf")), 1),
    "one running variance by a thousandth": (with_norm, 1),
    "head rows of the other class": (rows_swapped, 2 * 9),
    "a trunk with the other sign": (lambda model: replace(model, trunk=-model.trunk), 52_832),
}


@pytest.mark.parametrize(("change", "count"), CHANGES.values(), ids=CHANGES)
def test_a_changed_first_model_is_refused(
    change: Callable[[ModelState], ModelState], count: int, tmp_path: Path
) -> None:
    reason = refusal(site(tmp_path), request(SURGICAL, change(beginning(SURGICAL))))
    total = sum(array.size for array in ModelGroups.from_model(beginning(SURGICAL)).to_named_arrays().values())
    assert f"{count:,} of {total:,} numbers" in reason


OTHER_SEED = changed_plan(SURGICAL, run={"seed": 6})
TRAINED: dict[str, TrainRequest] = {
    "the plan's own": request(SURGICAL),
    "the plan's own in round 0": request(SURGICAL, server_round=0),
    "the plan's own in round 2": request(SURGICAL, server_round=2),
    "one number that differs in its last bit": request(SURGICAL, last_bit(beginning(SURGICAL))),
    # Where a method sends all rows; where it sends a site's own, their order is the site's.
    "head rows in another order": request(VANILLA, beginning(VANILLA, OWN[::-1])),
    # What the comparison does not stop: a later round, also at a site that received nothing before, and a pass.
    "a crafted model in round 2": request(SURGICAL, moved(beginning(SURGICAL)), 2),
    "a crafted model in round 5": request(SURGICAL, moved(beginning(SURGICAL)), 5),
    "a crafted model that is passed on": request(FEDSEQ, moved(beginning(FEDSEQ))),
}


@pytest.mark.parametrize("content", TRAINED.values(), ids=TRAINED)
def test_a_first_model_that_is_trained(content: TrainRequest, tmp_path: Path) -> None:
    assert refusal(site(tmp_path), content) == ""


def test_a_model_of_another_seed_is_refused_but_in_a_simulation(tmp_path: Path) -> None:
    other = request(SURGICAL, beginning(OTHER_SEED))
    assert "numbers of the model" in refusal(site(tmp_path / "hospital"), other)
    assert refusal(replace(site(tmp_path / "simulated"), simulated=True), other) == ""


def test_the_first_model_of_a_coordinator_without_avx2_is_trained(tmp_path: Path) -> None:
    """torch draws normal numbers otherwise there, in the last bits; ATEN_CPU_CAPABILITY stands for such a machine."""
    of = changed_plan(SURGICAL, model={"architecture": "efficientnet_lite0", "image_size": 32})
    program = (
        "import sys, numpy; from polyclinic.common.models.network import build_network; "
        "from polyclinic.common.models.state import read_model_state; "
        "from polyclinic.common.models.zoo.spec import ModelSpec; "
        "spec = ModelSpec.model_validate_json(sys.argv[1]); "
        "numpy.save(sys.argv[2], read_model_state(build_network(spec, ('b', 'a'), 5)).trunk)"
    )
    command = [sys.executable, "-c", program, of.model.model_dump_json(), str(tmp_path / "trunk.npy")]
    subprocess.run(command, check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})
    own, sent = beginning(of), np.load(tmp_path / "trunk.npy")
    assert np.abs(own.trunk - sent).max() < ABSOLUTE_TOLERANCE
    assert refusal(site(tmp_path), request(of, replace(own, trunk=sent))) == ""


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_a_first_model_in_fewer_bits_is_the_plan_s_own_rounded(form: NumberFormat, tmp_path: Path) -> None:
    of = plan(parameters={"compress_model": form})
    own = beginning(of)
    rounded = make_initial_state(PartialLossSite({"compress_model": form}), own).model
    assert not np.array_equal(rounded.trunk, own.trunk)
    # The coordinator's machine may draw numbers that round to the next number of the format.
    other_bits = own.trunk * np.float32(1 + 3e-7)
    other = replace(own, trunk=round_to_number_format(other_bits, form))

    def first_request(model: ModelState, sent_as: NumberFormat) -> TrainRequest:
        train = request(of, model)
        return replace(train, model=replace(train.model, form=sent_as))

    assert refusal(site(tmp_path / "rounded"), first_request(rounded, form)) == ""
    assert refusal(site(tmp_path / "other"), first_request(other, form)) == ""
    crafted = replace(rounded, trunk=round_to_number_format(moved(rounded, 0.05).trunk, form))
    assert "numbers of the model" in refusal(site(tmp_path / "crafted"), first_request(crafted, form))
    assert "numbers of the model" in refusal(site(tmp_path / "float32"), first_request(rounded, "float32"))


def weights_file(folder: Path) -> tuple[HospitalPlan, ModelState]:
    """Write a backbone into a weights file; return the plan that names it, and the model that begins a run with it."""
    folder.mkdir(parents=True)
    tensors = build_network(SURGICAL.model, ("",), 99).state_dict()
    path = folder / "trunk.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items() if n.startswith("backbone.") and t.ndim}, path)
    named = SURGICAL.model_copy(update={"weights_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    spec = SURGICAL.model.model_copy(update={"weights": str(path)})
    return named, read_model_state(build_network(spec, OWN, SURGICAL.run.seed))


def test_a_hospital_that_has_the_weights_file_builds_from_it_and_refuses_another_model(tmp_path: Path) -> None:
    named, model = weights_file(tmp_path / "weights")
    at, again, other = (replace(site(tmp_path / name), weights_folder=tmp_path / "weights") for name in "abc")
    assert refusal(at, request(named, model)) == ""
    assert "weights file" in refusal(again, request(named, moved(model, 0.01)))
    assert "plan's seed" in refusal(other, request(SURGICAL, model))  # the plan names no file


def test_a_hospital_without_the_weights_file_is_told_that_nobody_compared(tmp_path: Path) -> None:
    named, model = weights_file(tmp_path / "elsewhere")
    lines: list[str] = []
    at = replace(site(tmp_path / "north"), tell=lines.append)
    assert refusal(at, request(named, moved(model, 0.01))) == ""
    assert [line for line in lines if str(named.weights_sha256) in line]


def headed(frozen: FrozenPart | None = None) -> TrainRequest:
    """The first request of a plan that trains neck and head of a frozen backbone, by default the one of its seed."""
    of = changed_plan(SURGICAL, model={"train": "neck"})
    network = build_network(of.model, OWN, of.run.seed)
    part = frozen or FrozenPart.from_network(network)
    of = changed_plan(of, model={"frozen_sha256": part.sha256})
    return replace(request(of, read_model_state(network)), frozen=ModelGroups(trunk=part.values))


def test_a_frozen_part_is_a_part_of_the_first_model(tmp_path: Path) -> None:
    honest, at = headed(), site(tmp_path / "honest")
    assert refusal(at, honest) == ""
    assert refusal(at, replace(honest, run="second", frozen=ModelGroups())) == ""  # it has the part on its disk now
    crafted = FrozenPart(honest.frozen.trunk * np.float32(2))
    assert "numbers of the model" in refusal(site(tmp_path / "crafted"), headed(crafted))


def test_a_plug_in_that_draws_its_network_elsewhere_than_from_torch_is_refused(tmp_path: Path) -> None:
    def drawn_elsewhere(channels: int, image_size: int) -> nn.Module:
        """A network whose values are of no seed."""
        dense = nn.Linear(channels * image_size**2, 4)
        nn.init.constant_(dense.weight, np.random.default_rng().normal())
        return nn.Sequential(nn.Flatten(), dense)

    name = register_local_plugin(MODELS, drawn_elsewhere)
    of = changed_plan(SURGICAL, model={"architecture": PLUGIN_PREFIX + name})
    of = of.model_copy(update={"plugins": (identify_plugin(MODELS, name),)})
    assert "numbers of the model" in refusal(site(tmp_path, networks=(PLUGIN_PREFIX + name,)), request(of))
