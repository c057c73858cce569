"""FedMLP of ``polyclinic.flower``: the same statistics and losses as the product's own method."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from polyclinic.flower import FedMLP
from polyclinic.flower.records import unpack_arrays
from polyclinic.flower.strategies import FEDMLP_PARAMETERS
from polyclinic.server.simulation.backends.inline import run_with_inline_grid
from polyclinic.strategies.methods.fedmlp import (
    FedMLPParameters,
    FedMLPSite,
    average_without_nan,
    compute_class_prototypes,
)
from tests.polyclinic.apps import CLASSES, HALVES, HEAD, SITES, FedMLPApp, data, network, run

RATES = {"tag_rate_negative": 0.1, "tag_rate_positive": 0.1, "self_adaptive": False}


def own_of(part: int) -> np.ndarray[Any, Any]:
    return np.array([name in HALVES[part] for name in CLASSES])


def fedmlp(stage_one_rounds: int = 1, **parameters: Any) -> FedMLP:
    return FedMLP(stage_one_rounds=stage_one_rounds, parameters=parameters, **HEAD)


def test_no_statistics_are_sent_before_the_last_round_of_the_first_stage_nor_from_an_earlier_start() -> None:
    app, strategy = FedMLPApp(), fedmlp(3)
    run(strategy, app, rounds=2)
    assert all(not unpack_arrays(reply["polyclinic-statistics"]) for reply in app.replies.values())
    assert strategy.statistics == {}
    again = fedmlp()
    run(again, FedMLPApp(), rounds=2)
    run(again, app, rounds=1)
    assert all("polyclinic-statistics" not in sent for sent in app.sent.values())


def test_a_site_tells_the_prototypes_of_its_trained_model_and_receives_their_means() -> None:
    app, strategy = FedMLPApp(), fedmlp()
    rounds: list[dict[int, dict[str, Any]]] = []
    aggregate = strategy.aggregate_train

    def noting(server_round: int, replies: Any) -> Any:
        every = {reply.metadata.src_node_id: reply for reply in replies}
        rounds.append({node: unpack_arrays(reply.content["polyclinic-statistics"]) for node, reply in every.items()})
        return aggregate(server_round, every.values())

    strategy.aggregate_train = noting
    run(strategy, app, rounds=2)
    first = rounds[0]
    own = {str(node): own_of(node - 2) for node in first}
    prototypes = {str(node): record["prototypes"] for node, record in first.items()}
    for node, values in prototypes.items():
        assert values.shape == (10, 2, 8 * 36)
        np.testing.assert_array_equal(np.isnan(values).all(axis=(1, 2)), ~own[node])
    images = {str(node): float(len(data(node - 2, SITES)[0])) for node in first}
    sent = unpack_arrays(app.sent[2]["polyclinic-statistics"])
    np.testing.assert_allclose(sent["prototypes"], average_without_nan(prototypes, images), rtol=1e-5)
    difficulty = {str(node): record["difficulty"] for node, record in first.items()}
    mean = np.nan_to_num(average_without_nan(difficulty, images), nan=1.0)
    np.testing.assert_allclose(sent["difficulty"], mean, rtol=1e-5)
    # The features are those that the head sees: recomputed here from the last reply's model.
    trained = network()
    trained.load_state_dict(app.replies[3]["arrays"].to_torch_state_dict())
    pixels, targets = data(1, SITES)
    with torch.no_grad():
        features = trained.eval()[:4](pixels).numpy()
    labelled = np.where(own_of(1), targets.numpy(), np.nan)
    np.testing.assert_allclose(
        rounds[1][3]["prototypes"],
        compute_class_prototypes(features, labelled).astype(np.float32),
        rtol=1e-4,
        atol=1e-6,
    )


def test_tags_last_at_the_site_grow_and_are_trained_on() -> None:
    app = FedMLPApp()
    run(fedmlp(**RATES), app, rounds=4)
    counts = [(table >= 0).sum() for table in app.tags]
    assert counts[0] == 0 < counts[1] < counts[3]
    assert all((table[:, own_of(0)] == -1).all() for table in app.tags)
    for earlier, later in itertools.pairwise(app.tags):
        np.testing.assert_array_equal(later[earlier >= 0], earlier[earlier >= 0])


def test_each_part_of_the_ablation_reaches_the_sites() -> None:
    parts: list[dict[str, Any]] = [{}, {"consistency": False}, {"detection": False}]
    ends = {run(fedmlp(**RATES, **part), FedMLPApp()).arrays["0.weight"].numpy().tobytes() for part in parts}
    assert len(ends) == 3


def from_round_2(change: Callable[[Tensor, Tensor], tuple[Any, Any]]) -> FedMLPApp:
    return FedMLPApp(images=lambda number, *both: change(*both) if number >= 2 else both)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda pixels, targets: (pixels.flip(0), targets.flip(0)), id="another order"),
        pytest.param(lambda pixels, targets: (pixels.flip(2), targets), id="mirrored"),
        pytest.param(lambda pixels, targets: (pixels[:-9], targets[:-9]), id="fewer"),
    ],
)
def test_other_images_than_those_of_the_tags_are_refused_at_the_site(change: Any) -> None:
    with pytest.raises(RuntimeError, match=r"round 2: .*\n.*same images in the same order.*del context.state"):
        run(fedmlp(), from_round_2(change))


def test_the_same_images_of_another_precision_are_the_same() -> None:
    app = from_round_2(lambda pixels, targets: (pixels + 1e-7 * torch.rand_like(pixels), targets))
    assert set(run(fedmlp(), app).train_metrics_clientapp) == {1, 2}


def test_a_second_start_may_have_other_images_and_uses_no_old_tags() -> None:
    app, strategy = FedMLPApp(), fedmlp(**RATES)

    def main(grid: Any) -> None:
        for rounds in (3, 1):
            arrays = ArrayRecord(network().state_dict())
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
            app.images = lambda number, pixels, targets: (pixels.flip(0), targets.flip(0))

    run_with_inline_grid(main, app.client(), SITES)
    assert (app.tags[2] >= 0).any()  # the third round of the first start
    assert (app.tags[3] == -1).all()


def other_head(width: int) -> Callable[[nn.Module], nn.Module]:
    return lambda received: nn.Sequential(received[:4], nn.Linear(288, width))


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (FedMLPApp(images=lambda number, pixels, targets: (pixels[:0], targets[:0])), "without training images cannot"),
        (FedMLPApp(images=lambda number, pixels, targets: (pixels, targets[:, :9])), r"must be \(batch, classes\)"),
        (FedMLPApp(model=other_head(64), layer="1"), "the coordinator's head '4': it is another layer"),
        (FedMLPApp(model=other_head(10), layer="1"), "the coordinator's head '4': it is another layer"),
        (FedMLPApp(model=other_head(10), layer="fc2"), "no torch.nn.Linear 'fc2'"),
    ],
    ids=["no images", "too few columns", "a wider layer", "an untrained layer", "no layer"],
)
def test_images_or_a_layer_that_do_not_fit_are_refused_with_what_to_do(app: FedMLPApp, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(fedmlp(), app, rounds=1)


def test_finish_leaves_each_module_in_its_mode() -> None:
    def with_fixed_statistics(net: nn.Module) -> nn.Module:
        net[1].eval()  # type: ignore[index]
        return net

    app = FedMLPApp(model=with_fixed_statistics)
    run(fedmlp(), app, rounds=1)
    assert app.modes == [[True, False, True, True, True]] * SITES


def test_the_parameters_are_those_that_a_run_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set[str]()

    class Watched(FedMLPParameters):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched_traits = replace(FedMLPSite.traits, parameters_class=Watched)
    monkeypatch.setattr(FedMLPSite, "traits", watched_traits)
    run(fedmlp(self_adaptive=True), FedMLPApp())
    # A method asks which rows are sent in the product; here whole models are.
    assert read & Watched.model_fields.keys() == FEDMLP_PARAMETERS | {"stage_one_rounds", "heads"}
