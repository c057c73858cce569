"""FedAvg in pfl-research (Apple, 0.6.0), on the sites of an experiment: a contender of ``simulation.py``.

Not among our dependencies, and its own do not go with ours: ``pip install --no-deps --target FOLDER pfl
"multiprocess<0.71" dp-accounting prv-accountant dill absl-py``, then PYTHONPATH=FOLDER.

It trains the same networks on the same images in batches of the same size, as many sites a round, drawn by a generator
of its own; so it ends in another model. It keeps no state of a site and writes nothing. It validates no received
model, or each round's model on the validation images of as many sites as train.
"""

from collections.abc import Callable
from typing import Any

import torch
from bare_loop import Hospital, hospitals
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import get_user_sampler
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.config import ExperimentFile
from polyclinic.common.models.network import build_network
from polyclinic.common.simulation import load_simulated_data


class Trained(nn.Module):
    """A network with what pfl asks of it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: Tensor, classes: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return functional.cross_entropy(self.network(images), classes)

    def metrics(self, images: Tensor, classes: Tensor, eval: bool = False) -> dict[str, Any]:
        """The loss, as ours computes it of the received model."""
        loss = functional.cross_entropy(self.network(images), classes, reduction="sum")
        return {"loss": Weighted(float(loss), len(images))}


class Rounds(TrainingProcessCallback):  # type: ignore[misc]
    """Says when the first round begins and when each ends."""

    def __init__(self, on_round: Callable[[], None]) -> None:
        self.on_round = on_round

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.on_round()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.on_round()
        return False, Metrics()


def fedavg(file: ExperimentFile, on_round: Callable[[], None], *, validates: bool = False) -> str:
    """Train; the model has no hash to compare.

    Args:
        on_round: Called before the first round and after each.
        validates: Validate each round's model.
    """
    experiment = file.experiment
    spec, drawn = experiment.training, experiment.participation.sites_per_round
    sites = {str(number): site for number, site in enumerate(hospitals(file, "cpu"))}
    names = load_simulated_data(experiment, file.base_folder).label_contract.class_names
    torch.set_num_threads(spec.threads)
    network = Trained(build_network(experiment.model, names, experiment.run.seed, file.base_folder))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    names_of_sites = list(sites)
    data = FederatedDataset(lambda name: of_pfl(sites[name]), get_user_sampler("random", names_of_sites))
    validation = FederatedDataset(
        lambda name: of_pfl(sites[name], validation=True), get_user_sampler("random", names_of_sites)
    )
    rounds, cohort = experiment.run.rounds, drawn or len(sites)
    every, validating = (1, cohort) if validates else (rounds + 1, 0)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, evaluation_frequency=every, train_cohort_size=cohort, val_cohort_size=validating),
        SimulatedBackend(training_data=data, val_data=validation),
        model,
        NNTrainHyperParams(local_batch_size=spec.batch_size, local_num_epochs=spec.epochs, local_learning_rate=spec.lr),
        NNEvalHyperParams(local_batch_size=256),
        [Rounds(on_round)],
    )
    return "-"


def of_pfl(site: Hospital, *, validation: bool = False) -> Dataset:
    """A site's images, which pfl does not shuffle."""
    if validation:
        return Dataset(raw_data=[site.validation_images, site.validation_classes])
    return Dataset(raw_data=[site.images, site.classes])
