"""``flwr-server run``: lead a federation of real sites over the SuperLink."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.config import ExperimentFile
from common.data.base.image_set import ImageSet, Splits
from common.data.load import external_images, load
from common.errors import BadInput, Fault, stop_on
from common.models.network import model_faults
from common.system.files import private_folder, remove_partial_files
from server.coordinator.admission import admitted_sites, claims_of
from server.coordinator.before_start import expected_sites, not_started
from server.coordinator.connections import read_sign_offs
from server.coordinator.folder import Coordinator, alone, keep_private
from server.deployment.superlink.control.client import answers
from server.deployment.superlink.fleet.refused_calls import FILE as REFUSED_CALLS
from server.deployment.superlink.fleet.refused_calls import RefusedCallsReader
from server.deployment.superlink.local.process import START_TIMEOUT_S, object_folder
from server.deployment.superlink.run_client.network_grid import NetworkGrid
from server.deployment.superlink.run_client.run import run_on
from server.deployment.timers import order_faults, timers
from server.federation.evaluation import RunContext
from server.federation.run import federate
from server.federation.set_up import OpenedRunFolder, lead
from server.runs.live_status import Present, note_run
from server.runs.reporter import Reporter
from server.runs.tracking import Track
from strategies.method_list import in_file
from strategies.methods.base import image_faults
from strategies.registry import strategy_of

Tell = Callable[[str], None]


def run(
    coordinator: Coordinator,
    file: ExperimentFile,
    out: Path,
    sites: int,
    tell: Tell,
    *,
    track: Track | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Lead one experiment over the connected sites into the folder ``out``; return its summary.

    Args:
        sites: How many to wait for at the roll call; 0 for every admitted site.
        track: Where figures go beside the run folder.
        resume: Go on with the run in ``out`` from its last checkpoint; if it is done, only return its summary.

    Raises:
        BadInput: With every fault, before anything is written or sent.
        TooFewSites: If not enough sites answer.
        SuperLinkGone: If ``flwr-server start`` is gone for too long.
        SystemExit: If this process is told to stop; what is done stays done.
    """
    return lead(Hospitals(coordinator, file, sites, tell), file, out, track=track, resume=resume)


class Hospitals:
    """The sites that are connected to a coordinator's SuperLink."""

    durable = True

    def __init__(self, coordinator: Coordinator, file: ExperimentFile, sites: int, tell: Tell) -> None:
        self.coordinator, self.file, self.sites, self.tell = coordinator, file, sites, tell
        self.own: Splits | None = None
        self.external: ImageSet | None = None

    def check(self, *, resume: bool) -> None:
        """Raise :class:`BadInput` for a bad experiment, too few admitted sites, or where nothing serves the sites."""
        self.own, self.external = _own_images(self.file)
        self.sites = expected_sites(self.coordinator, self.file, self.sites, resume=resume)
        if not answers(self.coordinator, within_s=START_TIMEOUT_S if resume else 0.0):
            raise BadInput([not_started(self.coordinator)])

    def alone(self) -> AbstractContextManager[object]:
        """Hold the coordinator's folder: it leads one run at a time."""
        return alone(self.coordinator, "run")

    def run(self, opening: OpenedRunFolder) -> dict[str, Any]:
        """Run the rounds over the network."""
        coordinator, experiment, out = self.coordinator, self.file.experiment, opening.folder.path
        for written in (coordinator.state, object_folder(coordinator)):
            remove_partial_files(written)
        keep_private(coordinator, self.tell)
        if private_folder(out):
            self.tell(f"other accounts could look into {out}; now only this one can (mode 700)")
        present = Present(str(out.resolve()), experiment.run.name or experiment.run.method)
        signed_off = partial(read_sign_offs, coordinator.state)
        note = partial(note_run, coordinator.state)
        reports = Reporter(present, coordinator.state, self.tell, signed_off, note)
        with reports as reporter, run_on(coordinator) as grid:
            try:
                return federate(grid, experiment, self._setting(opening, grid), [reporter])
            except (SystemExit, KeyboardInterrupt):
                opening.folder.event("stopped", reason="on request")
                raise

    def _setting(self, opening: OpenedRunFolder, grid: NetworkGrid) -> RunContext:
        coordinator, own = self.coordinator, self.own
        refused_calls = RefusedCallsReader(coordinator.state / REFUSED_CALLS)
        return RunContext(
            base=self.file.base,
            folder=opening.folder,
            run=opening.run,
            resumed=opening.resumed,
            sites=self.sites,
            workers=self.sites,
            backend="network",
            device="cuda" if torch.cuda.is_available() else "cpu",
            precision=self.file.experiment.training.precision,
            own=own,
            test=None if own is None else own.test,
            external=self.external,
            registered=grid.registered,
            left_replies=grid.left_replies,
            key_of=lambda site: admitted_sites(coordinator)[site].public_key,
            refused_calls=lambda: [_without_time(call) for call in refused_calls.new()],
            claims=claims_of(coordinator),
        )


def _without_time(call: Mapping[str, Any]) -> dict[str, Any]:
    """A refused call as an event, which has a time of its own."""
    return {name: value for name, value in call.items() if name not in ("time", "run")}


def _own_images(file: ExperimentFile) -> tuple[Splits | None, ImageSet | None]:
    """Check what can be checked before anybody is asked; return the coordinator's own images and the external ones."""
    experiment, found, own, external = file.experiment, list[Fault](), None, None
    try:
        own = load(experiment.server_data, file.base) if experiment.server_data else None
    except BadInput as error:
        found += [replace(fault, where=f"server_data: {fault.where}") for fault in error.faults]
    try:
        external = external_images(experiment.external_test, file.base)
    except BadInput as error:
        found += error.faults
    try:
        method = strategy_of(experiment)
        found += image_faults(method, own) if not found else []
        if method.site.pooled != "no":
            problem = f'"{experiment.run.method}" puts all images in one place; hospitals\' images stay where they are.'
            found.append(Fault("run.method", problem, "Only flwr-sim runs it."))
    except BadInput as error:
        found += error.faults
    found += model_faults(experiment.model, file.base) + order_faults(timers(experiment))
    stop_on([in_file(file, fault) for fault in found])
    return own, external
