"""FedAvg as a bare PyTorch loop in one process, on a GPU where there is one: the limit for the simulation.

The same images, networks, batches and float64 means as ours, in the same order, and so the same model to the bit; and
nothing else: no records, no checks, no metrics, no files but the last model's hash.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyclinic.common.config import ExperimentFile
from polyclinic.common.models.gpu import move_network_to_device
from polyclinic.common.models.network import autocast, build_network
from polyclinic.common.models.state import hash_model_state, make_model_layout, read_model_state
from polyclinic.common.simulation import load_simulated_data, select_simulated_site_images
from polyclinic.common.system.hashing import derive_seed
from polyclinic.data.images.pixels import convert_to_channels_first
from polyclinic.strategies.engine.membership import draw_random_site_names
from polyclinic.strategies.local.training import shuffle_into_batches


@dataclass(frozen=True)
class Hospital:
    """One site's tensors: uint8 images, and the class of each image."""

    name: str
    images: Tensor
    classes: Tensor
    validation_images: Tensor
    validation_classes: Tensor


def hospitals(file: ExperimentFile, device: str) -> list[Hospital]:
    """As the partition makes them."""
    data = load_simulated_data(file.experiment, file.base_folder)
    names, results = data.label_contract.class_names, []
    for index in range(len(data.parts)):
        images = select_simulated_site_images(data, index, "no")
        order = [images.train.class_names.index(name) for name in names]
        parts = (
            tensor
            for part in (images.train, images.validation)
            for tensor in (convert_to_channels_first(part.images), torch.from_numpy(part.labels[:, order].argmax(1)))
        )
        results.append(Hospital(images.declaration.site, *(part.to(device) for part in parts)))
    return sorted(results, key=lambda site: site.name)  # the order in which sums run


def fedavg(file: ExperimentFile, on_round: Callable[[], None], *, resident: bool = False) -> str:
    """Train; return the last model's hash.

    Args:
        on_round: Called before the first round and after each.
        resident: Keep the model and its mean on the device.
    """
    experiment = file.experiment
    spec, seed = experiment.training, experiment.run.seed
    names = load_simulated_data(experiment, file.base_folder).label_contract.class_names
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sites, network = (
        hospitals(file, device),
        move_network_to_device(build_network(experiment.model, names, seed, file.base_folder), device),
    )
    torch.set_num_threads(spec.threads)
    # On the CPU, as ours: a GPU multiplies by the inverse where it is to divide.
    kept_on = torch.device(device if resident else "cpu")
    state = {
        name: tensor.to(kept_on, copy=True)
        for name, tensor in network.state_dict().items()
        if tensor.is_floating_point()
    }
    every = [site.name for site in sites]
    on_round()
    for server_round in range(1, experiment.run.rounds + 1):
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
        taking_part = set(draw_random_site_names(every, experiment.participation.sites_per_round, [seed, server_round]))
        chosen = [site for site in sites if site.name in taking_part]
        images = float(sum(len(site.images) for site in chosen))
        for site in chosen:
            network.load_state_dict(state, strict=False)
            validated(network, site)
            generator = torch.Generator().manual_seed(derive_seed(seed, server_round, site.name))
            trained(network, site, spec.epochs, spec.batch_size, spec.lr, generator)
            for name, tensor in network.state_dict().items():
                if name in sums:
                    sums[name] += len(site.images) * (tensor.to(kept_on) - state[name]).double()
        for name, tensor in state.items():
            state[name] = (tensor.double() + sums[name] / images).float()
        on_round()
    network.load_state_dict(state, strict=False)
    return hash_model_state(read_model_state(network), make_model_layout(network))


def trained(
    network: nn.Module, site: Hospital, epochs: int, batch_size: int, lr: float, generator: torch.Generator
) -> None:
    """Plain SGD."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, fused=True)
    for _ in range(epochs):
        # A last batch of one joins its neighbour.
        for rows in shuffle_into_batches(len(site.images), batch_size, generator):
            with autocast(site.images.device, "auto"):  # bfloat16 on a GPU
                loss = functional.cross_entropy(network(site.images[rows]), site.classes[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def validated(network: nn.Module, site: Hospital) -> float:
    """The loss of the model as received, which chooses the best round."""
    if not len(site.validation_images):
        return np.nan
    network.eval()
    with autocast(site.images.device, "auto"):
        return float(functional.cross_entropy(network(site.validation_images), site.validation_classes))
