"""flwr-sim: check an experiment, bring its simulated sites up, run it, write its folder."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.config import Experiment, ExperimentFile
from common.data.base.image_set import Splits
from common.data.base.spec import DataSpec
from common.data.images.decoded import write_decoded
from common.data.load import faults as data_faults
from common.data.partition.partition import partition_faults
from common.errors import BadInput, Fault, stop_on
from common.models.network import model_faults
from common.models.saved import load_model
from common.simulation import SimulatedData, own_tests, simulated_data, whole_data
from server.federation.evaluation import Setting
from server.federation.recorder import Both, Watcher
from server.federation.resume import OpenedRunFolder, finished, opened
from server.federation.run import federate
from server.reporting.live.launch import beside
from server.reporting.pages.model_card import write_model_card
from server.reporting.pages.run import write_run_report
from server.runs.folder import RunFolder
from server.runs.live_status import Present
from server.runs.reporter import Reporter
from server.runs.samples import wanted, write_samples
from server.runs.scalars import Track
from server.runs.tracking.mlflow import MLflowStore
from server.runs.tracking.progress import ProgressBar
from server.runs.tracking.trackers import store_for, tracked
from server.simulation.backends import choose_workers, inline, on_ray, site_app
from strategies.base.method import Method
from strategies.registry import method_of


def simulate(
    file: ExperimentFile,
    out: Path,
    console: Console,
    track: Track | None = None,
    *,
    resume: bool = False,
    web_port: int | None = None,
) -> dict[str, Any]:
    """Run a simulated experiment into the folder ``out``; return its summary.

    Args:
        web_port: Of a live view, 0 for any; None for no view.
        resume: Go on with the run in ``out`` from its last checkpoint; if it is done, only return its summary.

    Raises:
        BadInput: With every fault of the experiment and its data, before anything is written or trained.
        TooFewSites: If sites fail during the run.
    """
    if (summary := finished(out, resume=resume)) is not None:
        return summary
    store = store_for(track)
    method, data = checked(file)
    with opened(out, file.experiment, resume=resume, durable=False) as run:
        return _simulated(file, (method, data), run, console, store, web_port=web_port)


def _simulated(
    file: ExperimentFile,
    checked: tuple[Method, SimulatedData],
    run: OpenedRunFolder,
    console: Console,
    store: MLflowStore | None,
    *,
    web_port: int | None,
) -> dict[str, Any]:
    (method, data), experiment, folder, out = checked, file.experiment, run.folder, run.folder.path
    sites = 1 if method.pooled != "no" else len(data.parts)
    workers = choose_workers(experiment.simulation, sites, experiment.training.threads)
    ray = experiment.simulation.backend == "ray"
    setting = Setting(
        base=file.base,
        folder=folder,
        run=run.run,
        sites=sites,
        workers=workers.count if ray else 1,
        backend=experiment.simulation.backend,
        device="cuda" if torch.cuda.is_available() and experiment.simulation.gpus_per_site != 0 else "cpu",
        precision=experiment.training.precision,
        own=data.server,
        test=data.test,
        site_tests=lambda: own_tests(data),
        coverage=data.contract,
        resumed=run.resumed,
    )
    for part in ("train", "validation", "test"):
        for skipped in getattr(data.splits, part).skipped:
            folder.event("image_skipped", part=part, image=skipped.name, reason=skipped.reason)
    summaries: list[dict[str, Any]] = []
    title = f"{experiment.run.name or experiment.run.method} seed {experiment.run.seed}"
    with ExitStack() as stack:
        stack.enter_context(tracked(folder, experiment, store, console.print))
        watcher: Watcher = stack.enter_context(ProgressBar(console, title))
        if web_port is not None:
            stack.enter_context(beside(out, web_port, console.print))
            present = Present(str(out.resolve()), experiment.run.name or experiment.run.method)
            watcher = Both(watcher, stack.enter_context(Reporter(present, out, lambda line: None)))

        def main(grid: Any) -> None:
            summaries.append(federate(grid, experiment, setting, watcher))

        text, path = experiment.model_dump_json(), out.resolve()
        if ray:
            with _decoded_for_workers(whole_data(experiment, file.base), path / "images", folder) as decoded:
                on_ray(main, site_app(text, file.base, path, decoded), sites, workers, experiment.simulation.address)
        else:
            inline(main, site_app(text, file.base, path), sites)
    if method.has_global_model and len(data.test) and wanted(experiment):
        write_samples(out, load_model(out), data.test, setting.device, setting.precision)
    write_run_report(out)
    write_model_card(out)
    return summaries[0]


@contextmanager
def _decoded_for_workers(data: Splits, place: Path, folder: RunFolder) -> Iterator[Path | None]:
    """Lay the images down for as long as workers need them: decoded once, and once in memory for all of them."""
    try:
        write_decoded(data, place)
    except OSError as error:
        folder.event("images_not_shared", reason=f"{error.strerror}: every worker reads the data set itself")
        yield None
        return
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def checked(file: ExperimentFile) -> tuple[Method, SimulatedData]:
    """Check everything that can be checked before training; return the method and the data.

    Raises:
        BadInput: With all faults at once.
    """
    experiment = file.experiment
    found: list[Fault] = []
    try:
        method = method_of(experiment)
    except BadInput as error:
        found += error.faults
    found += _section_faults(experiment)
    found += model_faults(experiment.model, file.base)
    if experiment.data is not None:
        found += data_faults(experiment.data, file.base)
    if (names := _class_names(experiment.data)) and experiment.partition is not None:
        found += partition_faults(names, experiment.partition)
    stop_on([replace(fault, where=f"{file.path.name}: {fault.where}") for fault in found])
    try:
        data = simulated_data(experiment, file.base)
        contract = data.contract
        stop_on(method.image_faults(data.server))
        if method.pooled == "no":
            method.refuse_unfit(contract)
    except BadInput as error:
        raise BadInput(replace(fault, where=f"{file.path.name}: {fault.where}") for fault in error.faults) from None
    if method.pooled == "no":
        stop_on(_participation_faults(experiment, len(contract.sites), file.path.name))
    return method, data


def _class_names(data: DataSpec | None) -> tuple[str, ...]:
    """The classes as the file names them; empty where only the data can tell."""
    return getattr(data, "keep", ()) or getattr(data, "classes", ())


def _participation_faults(experiment: Experiment, sites: int, file_name: str) -> list[Fault]:
    """More sites asked for than there are."""
    return [
        Fault(f"{file_name}: participation.{key}", f"is {asked}, but the partition makes {sites} sites.")
        for key in ("min_sites", "sites_per_round")
        if (asked := getattr(experiment.participation, key)) > sites
    ]


def _section_faults(experiment: Experiment) -> list[Fault]:
    """Tables that a simulation cannot do without, and a GPU that is not there."""
    absent = [name for name in ("data", "partition") if getattr(experiment, name) is None]
    faults = [Fault(f"[{name}]", "is missing; a simulation needs it.", "See experiments/.") for name in absent]
    section = experiment.simulation
    if section.gpus_per_site > 0 and not section.address and not torch.cuda.is_available():
        problem = f"is {section.gpus_per_site}, but this machine shows no GPU."
        faults.append(Fault("simulation.gpus_per_site", problem, "Leave it out, or set 0 to train on the CPU."))
    if experiment.privacy.secure_aggregation and section.backend == "ray":
        problem = "keeps nothing in a site's memory from message to message, where the secrets of a round have to be."
        faults.append(Fault("simulation.backend", f"ray {problem}", 'Set "inline" with privacy.secure_aggregation.'))
    return faults
