"""FedMLP of ``polyclinic.flower``: the same statistics and losses as the product's own method."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from polyclinic.flower import FedMLP, FedMLPSite
from polyclinic.flower.records import unpack_arrays
from polyclinic.flower.strategies import FEDMLP_PARAMETERS
from server.simulation.backends.inline import run_with_inline_grid
from strategies.methods.fedmlp import FedMLPParameters, average_known_entries, compute_prototypes
from tests.polyclinic.apps import CLASSES, HALVES, HEAD, SITES, FedMLPApp, data, network, run

RATES = {"tag_rate_negative": 0.1, "tag_rate_positive": 0.1, "self_adaptive": False}


def own_of(part: int) -> np.ndarray[Any, Any]:
    return np.array([name in HALVES[part] for name in CLASSES])


def test_nothing_is_told_before_the_last_round_of_the_first_stage() -> None:
    app = FedMLPApp()
    strategy = FedMLP(stage_one_rounds=3, **HEAD)
    run(strategy, app, rounds=2)
    assert all(not unpack_arrays(reply["polyclinic-statistics"]) for reply in app.replies.values())
    assert strategy.statistics == {}


def test_a_site_tells_the_prototypes_of_its_trained_model_and_receives_their_means() -> None:
    app, strategy = FedMLPApp(), FedMLP(stage_one_rounds=1, **HEAD)
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
    np.testing.assert_allclose(sent["prototypes"], average_known_entries(prototypes, images), rtol=1e-5)
    difficulty = {str(node): record["difficulty"] for node, record in first.items()}
    mean = np.nan_to_num(average_known_entries(difficulty, images), nan=1.0)
    np.testing.assert_allclose(sent["difficulty"], mean, rtol=1e-5)
    # The features are those that the head sees: recomputed here from the last reply's model.
    trained = network()
    trained.load_state_dict(app.replies[3]["arrays"].to_torch_state_dict())
    pixels, targets = data(1, SITES)
    with torch.no_grad():
        features = trained.eval()[:4](pixels).numpy()
    labelled = np.where(own_of(1), targets.numpy(), np.nan)
    np.testing.assert_allclose(
        rounds[1][3]["prototypes"], compute_prototypes(features, labelled).astype(np.float32), rtol=1e-4, atol=1e-6
    )


def test_tags_last_at_the_site_grow_and_are_trained_on() -> None:
    tags: list[np.ndarray[Any, Any]] = []

    class Watched(FedMLPApp):
        def _trained(self, message: Any, context: Any) -> Any:
            reply = super()._trained(message, context)
            if context.node_id == 2:
                tags.append(unpack_arrays(context.state["polyclinic-fedmlp"])["tags"])
            return reply

    run(FedMLP(stage_one_rounds=1, parameters=RATES, **HEAD), Watched(), rounds=4)
    counts = [(table >= 0).sum() for table in tags]
    assert counts[0] == 0 < counts[1] < counts[3]
    assert all((table[:, own_of(0)] == -1).all() for table in tags)
    for earlier, later in itertools.pairwise(tags):
        np.testing.assert_array_equal(later[earlier >= 0], earlier[earlier >= 0])


def test_each_part_of_the_ablation_reaches_the_sites() -> None:
    def end(**parameters: Any) -> bytes:
        strategy = FedMLP(stage_one_rounds=1, parameters={**RATES, **parameters}, **HEAD)
        return run(strategy, FedMLPApp(), rounds=2).arrays["0.weight"].numpy().tobytes()

    assert len({end(), end(consistency=False), end(detection=False)}) == 3


class Chosen(FedMLPApp):
    """Sites whose images, model or layer a test chooses for each round."""

    head = "4"

    def images(self, number: int, pixels: Tensor, targets: Tensor) -> tuple[Any, Any]:
        return pixels, targets

    def model(self, received: nn.Module) -> nn.Module:
        return received

    def _trained(self, message: Any, context: Any) -> RecordDict:
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        number = int(message.content["config"]["server-round"])
        images, targets = self.images(number, *data(int(context.node_config["partition-id"]), SITES))
        site = FedMLPSite(message, context, self.model(net), self.head, images, targets)
        reply = RecordDict({"arrays": ArrayRecord(net.state_dict())})
        reply["metrics"] = MetricRecord({"num-examples": len(images)})
        reply.update(site.finish())
        return reply


def with_images(change: Any, from_round: int = 1) -> Chosen:
    class Changing(Chosen):
        def images(self, number: int, pixels: Tensor, targets: Tensor) -> tuple[Any, Any]:
            return change(pixels, targets) if number >= from_round else (pixels, targets)

    return Changing()


@pytest.mark.parametrize(
    "change",
    [
        lambda pixels, targets: (pixels.flip(0), targets.flip(0)),
        lambda pixels, targets: (pixels.flip(2), targets),
        lambda pixels, targets: (pixels[:-9], targets[:-9]),
    ],
)
def test_images_of_another_order_or_number_than_the_tags_are_refused_at_the_site(change: Any) -> None:
    with pytest.raises(RuntimeError, match=r"round 2: .*\n.*same images in the same order.*del context.state"):
        run(FedMLP(stage_one_rounds=1, **HEAD), with_images(change, from_round=2), rounds=3)


def test_the_same_images_of_another_precision_are_the_same() -> None:
    app = with_images(lambda pixels, targets: (pixels + 1e-7 * torch.rand_like(pixels), targets), from_round=2)
    assert set(run(FedMLP(stage_one_rounds=1, **HEAD), app, rounds=2).train_metrics_clientapp) == {1, 2}


def test_a_second_start_may_have_other_images_and_uses_no_old_tags() -> None:
    tables: list[np.ndarray[Any, Any]] = []

    class Second(Chosen):
        starts = 0

        def images(self, number: int, pixels: Tensor, targets: Tensor) -> tuple[Any, Any]:
            return (pixels, targets) if self.starts == 1 else (pixels.flip(0), targets.flip(0))

        def _trained(self, message: Any, context: Any) -> RecordDict:
            reply = super()._trained(message, context)
            tables.append(unpack_arrays(context.state["polyclinic-fedmlp"])["tags"])
            return reply

    app, strategy = Second(), FedMLP(stage_one_rounds=1, parameters=RATES, **HEAD)

    def main(grid: Any) -> None:
        for app.starts in (1, 2):
            arrays = ArrayRecord(network().state_dict())
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=4 - app.starts)

    run_with_inline_grid(main, app.client(), SITES)
    assert (tables[SITES * 2] >= 0).any()  # the third round of the first start
    assert all((tags == -1).all() for tags in tables[SITES * 3 : SITES * 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pixels, targets: (pixels[:0], targets[:0]), "a site without training images cannot take part"),
        (lambda pixels, targets: (pixels, targets[:, :9]), r"targets must be \(batch, classes\)"),
    ],
    ids=["no_images", "too_few_columns"],
)
def test_images_that_cannot_be_trained_on_are_refused_with_what_to_do(change: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        run(FedMLP(stage_one_rounds=1, **HEAD), with_images(change), rounds=1)


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("1", nn.Linear(288, 64), "the coordinator's head '4': it is another layer"),
        ("1", nn.Linear(288, 10), "the coordinator's head '4': it is another layer"),
        ("fc2", nn.Linear(288, 10), "no torch.nn.Linear 'fc2'"),
    ],
)
def test_another_layer_than_the_coordinators_head_is_refused(name: str, layer: nn.Module, words: str) -> None:
    class Other(Chosen):
        head = name

        def model(self, received: nn.Module) -> nn.Module:
            return nn.Sequential(received[:4], layer)

    with pytest.raises(RuntimeError, match=words):
        run(FedMLP(stage_one_rounds=1, **HEAD), Other(), rounds=1)


def test_finish_leaves_each_module_in_its_mode() -> None:
    modes: list[list[bool]] = []

    class Modes(Chosen):
        def model(self, received: nn.Module) -> nn.Module:
            received.train()[1].eval()
            self.net = received
            return received

        def _trained(self, message: Any, context: Any) -> RecordDict:
            reply = super()._trained(message, context)
            modes.append([module.training for module in self.net])
            return reply

    run(FedMLP(stage_one_rounds=1, **HEAD), Modes(), rounds=1)
    assert modes == [[True, False, True, True, True]] * SITES


def test_the_parameters_are_those_that_a_run_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set[str]()

    class Watched(FedMLPParameters):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr("strategies.methods.fedmlp.FedMLPSite.table", Watched)
    run(FedMLP(stage_one_rounds=1, parameters={"self_adaptive": True}, **HEAD), FedMLPApp(), rounds=2)
    # A method asks which rows are sent in the product; here whole models are.
    assert read & Watched.model_fields.keys() == FEDMLP_PARAMETERS | {"stage_one_rounds", "heads"}
