"""The Flower ClientApp of a simulation: one process serves all sites, one message at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from polyclinic.client.app import make_client_app
from polyclinic.client.gate.gate import Handler, make_policy_gate
from polyclinic.client.site.policy import UNLIMITED
from polyclinic.client.site.site import Site
from polyclinic.common.config import Experiment
from polyclinic.common.simulation import SimulatedData, load_simulated_data, select_simulated_site_images
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.data.base.pixel_form import make_pixel_form
from polyclinic.data.base.spec import FolderDatasetSpec
from polyclinic.data.tables.labels import find_files_by_line
from polyclinic.strategies.local.arithmetic import read_number_format
from polyclinic.strategies.registry import build_site_method

MAX_CACHED_SITES = 1000
"""Maximum number of sites, the last ones used, that a process keeps in memory with their computed results."""
SIMULATED_SITE_POLICY = UNLIMITED
"""The policy of every simulated site."""


@dataclass(frozen=True)
class SimulatedSiteProvider:
    """Callable that returns the simulated site of a message, by the partition id in its Flower context.

    Attributes:
        experiment: The experiment as JSON, with number formats and kernels already chosen.
        base: Folder to which the experiment's paths are relative.
        run_folder: Folder of the run; its folder ``sites`` has a folder for each site.
    """

    experiment: str
    base: Path
    run_folder: Path

    def __call__(self, context: Context) -> Site:
        """Return the site of the partition id in the context; the last sites used are cached."""
        experiment = _parse_experiment(self.experiment)
        index = int(context.node_config["partition-id"])
        data = load_simulated_data(experiment, self.base)
        sites = _get_cached_run_sites(self, data)
        site = sites.pop(index, None)
        if site is None:
            images = select_simulated_site_images(data, index, build_site_method(experiment).pooled_missing_labels)
            # The coordinator's process chose number formats for the CPU, so that all sites are equal; each GPU is
            # measured.
            training = experiment.training
            use_gpu = torch.cuda.is_available() and experiment.simulation.gpus_per_site != 0
            arithmetic = None if use_gpu or training.precision == "fastest" else read_number_format(training, "cpu")
            site = Site(
                declaration=images.declaration,
                train=images.train,
                validation=images.validation,
                test=images.test,
                folder=join_plain_name(self.run_folder / "sites", PlainName(images.declaration.site)),
                device="cuda" if use_gpu else "cpu",
                gpus=experiment.simulation.gpus_per_batch,
                policy=SIMULATED_SITE_POLICY,
                durable=False,
                simulated=True,
                frozen_folder=self.run_folder / "frozen",
                arithmetic=arithmetic,
                pixel_form=make_pixel_form(
                    experiment.data, images.train.stored.shape[1:], drops_color=images.train.drops_color
                ),
                find_picture_files=_make_picture_file_finder(experiment, self.base),
            )

        sites[index] = site  # the last used site is the last entry
        if len(sites) > MAX_CACHED_SITES:
            del sites[next(iter(sites))]
        return site


def _make_picture_file_finder(experiment: Experiment, base: Path) -> Callable[[], Mapping[int, Path]] | None:
    data = experiment.data
    return partial(find_files_by_line, data, base) if isinstance(data, FolderDatasetSpec) else None


_parse_experiment = lru_cache(maxsize=1)(Experiment.model_validate_json)


@lru_cache(maxsize=1)
def _get_cached_run_sites(sites: SimulatedSiteProvider, data: SimulatedData) -> dict[int, Site]:
    return {}


def make_simulation_client_app(experiment: str, base: Path, run_folder: Path) -> ClientApp:
    """Build the ClientApp that serves all simulated sites.

    If a site's policy sets limits, its requests pass the policy gate and are recorded in an audit log; others do not.
    """
    sites = SimulatedSiteProvider(experiment, base, run_folder)
    gated = make_policy_gate(sites)

    def gate_limited_sites(message: Message, context: Context, answer: Handler) -> Message:
        return answer(message, context) if sites(context).has_no_limits else gated(message, context, answer)

    return make_client_app(sites, mods=[gate_limited_sites])
