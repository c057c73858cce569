"""FedMLP of ``polyclinic.flower``: the same statistics and losses as the product's own method."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from polyclinic.flower import FedMLP
from strategies.fedmlp.prototypes import global_difficulty, global_prototypes, local_prototypes
from tests.polyclinic.apps import CLASSES, HALVES, SITES, FedMLPApp, data, network, run

HEAD: dict[str, Any] = {"head": "4", "classes": CLASSES, "fraction_evaluate": 0.0}
RATES = {"tag_rate_negative": 0.1, "tag_rate_positive": 0.1, "self_adaptive": False}


def own_of(part: int) -> np.ndarray[Any, Any]:
    return np.array([name in HALVES[part] for name in CLASSES])


def test_nothing_is_told_before_the_last_round_of_the_first_stage() -> None:
    app = FedMLPApp()
    strategy = FedMLP(stage_one_rounds=3, **HEAD)
    run(strategy, app, rounds=2)
    assert all(not told for told in strategy._told.values())
    assert strategy.records() == {}


def test_a_site_tells_the_prototypes_of_its_trained_model_and_receives_their_means() -> None:
    app, strategy = FedMLPApp(), FedMLP(stage_one_rounds=1, **HEAD)
    told: list[dict[int, ArrayRecord]] = []
    aggregate = strategy.aggregate_train

    def noting(server_round: int, replies: Any) -> Any:
        came = list(replies)
        told.append({reply.metadata.src_node_id: reply.content["polyclinic-fedmlp"] for reply in came})
        return aggregate(server_round, came)

    strategy.aggregate_train = noting  # type: ignore[method-assign]
    run(strategy, app, rounds=2)
    trained = network()
    first = told[0]
    own = {str(node): own_of(node - 2) for node in first}
    prototypes = {str(node): record["prototypes"].numpy() for node, record in first.items()}
    for node, values in prototypes.items():
        assert values.shape == (10, 2, 8 * 36)
        np.testing.assert_array_equal(np.isnan(values).all(axis=(1, 2)), ~own[node])
    images = {str(node): float(len(data(node - 2, SITES)[0])) for node in first}
    sent = app.sent[2]["polyclinic-fedmlp"]
    np.testing.assert_allclose(sent["prototypes"].numpy(), global_prototypes(prototypes, images), rtol=1e-5)
    difficulty = {str(node): record["difficulty"].numpy() for node, record in first.items()}
    np.testing.assert_allclose(sent["difficulty"].numpy(), global_difficulty(difficulty, images), rtol=1e-5)
    # The features are those that the head sees: recomputed here from the last reply's model.
    trained.load_state_dict(app.replies[3]["arrays"].to_torch_state_dict())
    pixels, targets = data(1, SITES)
    with torch.no_grad():
        features = trained.eval()[:4](pixels).numpy()  # type: ignore[index]
    labelled = np.where(own_of(1), targets.numpy(), np.nan)
    np.testing.assert_allclose(
        told[1][3]["prototypes"].numpy(), local_prototypes(features, labelled).astype(np.float32), rtol=1e-4, atol=1e-6
    )


def test_tags_last_at_the_site_grow_and_are_trained_on() -> None:
    class Watched(FedMLPApp):
        kept: list[np.ndarray[Any, Any]] = []  # noqa: RUF012

        def _trained(self, message: Any, context: Any) -> Any:
            reply = super()._trained(message, context)
            if context.node_id == 2:
                self.kept.append(context.state["polyclinic-fedmlp"]["tags"].numpy().copy())
            return reply

    app = Watched()
    run(FedMLP(stage_one_rounds=1, parameters=RATES, **HEAD), app, rounds=4)
    counts = [(tags >= 0).sum() for tags in app.kept]
    assert counts[0] == 0 < counts[1] < counts[3]
    assert all((tags[:, own_of(0)] == -1).all() for tags in app.kept)
    for earlier, later in itertools.pairwise(app.kept):
        np.testing.assert_array_equal(later[earlier >= 0], earlier[earlier >= 0])


def test_each_part_of_the_ablation_reaches_the_sites() -> None:
    def end(**parameters: Any) -> bytes:
        strategy = FedMLP(stage_one_rounds=1, parameters={**RATES, **parameters}, **HEAD)
        return run(strategy, FedMLPApp(), rounds=2).arrays["0.weight"].numpy().tobytes()

    assert len({end(), end(consistency=False), end(detection=False)}) == 3


def test_parameters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="tag_rate"):
        FedMLP(stage_one_rounds=1, parameters={"tag_rate_negative": 2.0}, **HEAD)


def test_a_layer_that_is_no_linear_one_is_refused() -> None:
    from polyclinic.flower.fedmlp import _Split

    with pytest.raises(ValueError, match="'0' is a Conv2d"):
        _Split(network(), "0")
