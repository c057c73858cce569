"""``flwr-server run``: lead a run of real hospitals that are connected to the SuperLink."""

import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyclinic.common.config import ExperimentFile, make_hospital_plan
from polyclinic.common.errors import BadInput, Fault, ProgramCannotContinue, raise_faults
from polyclinic.common.models.network import find_network_build_faults
from polyclinic.common.simulation import name_parts_by_vocabulary, open_simulation_image_store
from polyclinic.common.system.files import is_disk_full, make_private_folder, remove_temporary_files
from polyclinic.common.vocabulary import name_images_by_vocabulary
from polyclinic.data.base.image_set import DatasetSplits, ImageSet
from polyclinic.data.load import EXTERNAL_TEST_SECTION, load_dataset, load_external_test_images
from polyclinic.server.coordinator.admission import make_site_claim_limits_reader, read_all_admitted_sites
from polyclinic.server.coordinator.folder import CoordinatorFolder, lock_run_members, restrict_folder_to_owner
from polyclinic.server.coordinator.preflight import make_no_superlink_fault
from polyclinic.server.coordinator.state import read_site_sign_offs
from polyclinic.server.deployment.superlink.control_client import is_superlink_answering
from polyclinic.server.deployment.superlink.network_grid import open_network_grid
from polyclinic.server.deployment.superlink.process import OBJECTS_FOLDER, START_TIMEOUT_S
from polyclinic.server.deployment.superlink.refused_calls import REFUSED_CALLS_FILE as REFUSED_CALLS
from polyclinic.server.deployment.supervisor import RunExitCode
from polyclinic.server.deployment.timers import find_timer_order_faults, list_timer_settings
from polyclinic.server.federation.evaluation import RunContext
from polyclinic.server.federation.planning import find_planning_faults
from polyclinic.server.federation.run import run_federation
from polyclinic.server.federation.set_up import OpenedRunFolder, hash_run_data_sets, record_data_hashes_or_refuse
from polyclinic.server.runs.live_status import CurrentRun, JsonLinesReader, add_to_run_history
from polyclinic.server.runs.reporter import RunReporter
from polyclinic.strategies.engine.events import RunStopped
from polyclinic.strategies.method_list import prefix_fault_with_file
from polyclinic.strategies.methods.base import find_missing_coordinator_images
from polyclinic.strategies.privacy.gradients import find_network_privacy_faults
from polyclinic.strategies.registry import build_experiment_strategy
from polyclinic.strategies.run_length import complete_round_settings, find_unreached_stage_faults

Tell = Callable[[str], None]


def execute_run_or_exit(
    lead: Callable[[], dict[str, Any]], out: Path, resume_command: Sequence[str], tell: Tell
) -> dict[str, Any]:
    """Run all rounds; return the run's summary. Turn an interruption or a crash into a message and an exit code.

    Args:
        lead: Runs all rounds; returns the run's summary.
        resume_command: Command line that resumes the run, for the message.
        tell: Prints one line.

    Raises:
        RunStopped: If the run cannot go on, for instance because the disk is full.
        SystemExit: If the run was stopped on request, or by a bug.
    """
    resume_line = shlex.join(resume_command)
    try:
        return lead()
    except (BadInput, ProgramCannotContinue):
        raise
    except (SystemExit, KeyboardInterrupt):
        tell(f"stopped on request; to go on: {resume_line}")
        raise SystemExit(int(RunExitCode.ON_REQUEST)) from None
    except Exception as error:  # the process's edge
        if is_disk_full(error):
            raise RunStopped(f"no room on the disk of {out}: free some, then go on with: {resume_line}") from None
        traceback.print_exception(error)
        raise SystemExit(int(RunExitCode.CRASHED)) from None


class NetworkBackend:
    """Runs an experiment on the sites that are connected to a coordinator's SuperLink.

    Args:
        sites: Number of sites to wait for at the roll call, the exchange before round 1.
        begun: Experiment of the run that is resumed, as JSON; None for a new run.
    """

    durable = True

    def __init__(
        self,
        coordinator: CoordinatorFolder,
        file: ExperimentFile,
        sites: int,
        tell: Tell,
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.sites = sites
        self.tell = tell
        named = file.with_run_name(begun)
        self.file = replace(named, experiment=complete_round_settings(named.experiment, begun))
        self.is_begun = begun is not None
        self.members = frozenset(file.experiment.participation.sites)
        self.server_data: DatasetSplits | None = None
        self.external: ImageSet | None = None

    def load_and_check_data(self, *, resume: bool) -> None:
        """Load the coordinator's own images and the external test images, and check the experiment.

        Args:
            resume: True to resume a run. Then a SuperLink that is still starting is waited for.

        Raises:
            BadInput: If the experiment has faults, or no SuperLink answers.
        """
        file, experiment = self.file, self.file.experiment
        faults = [] if self.is_begun else find_unreached_stage_faults(experiment)
        store = open_simulation_image_store(experiment, file.base_folder, self.tell)
        try:
            if experiment.server_data:
                splits = load_dataset(experiment.server_data, file.base_folder, store)
                self.server_data = name_parts_by_vocabulary(splits, experiment.vocabulary, "server_data")
        except BadInput as error:
            faults += [replace(fault, where=f"server_data: {fault.where}") for fault in error.faults]
        try:
            external = load_external_test_images(experiment.external_test, file.base_folder, store)
            if external is not None:
                self.external = name_images_by_vocabulary(external, experiment.vocabulary, EXTERNAL_TEST_SECTION)
        except BadInput as error:
            faults += error.faults
        try:
            method = build_experiment_strategy(experiment)
            faults += find_missing_coordinator_images(method, self.server_data) if not faults else []
            if method.site.pooled_missing_labels != "no":
                method_name = experiment.run.method
                problem = f'"{method_name}" puts all images in one place; hospitals\' images stay where they are.'
                faults.append(Fault("run.method", problem, "Only flwr-sim runs it."))
        except BadInput as error:
            faults += error.faults
        faults += find_planning_faults(experiment) or find_network_build_faults(
            experiment.model_before_planning, file.base_folder
        )
        faults += find_timer_order_faults(list_timer_settings(experiment))
        if not faults:
            faults += find_network_privacy_faults(make_hospital_plan(experiment), method.site)
        raise_faults([prefix_fault_with_file(file, fault) for fault in faults])
        if not is_superlink_answering(self.coordinator, within_s=START_TIMEOUT_S if resume else 0.0):
            raise BadInput([make_no_superlink_fault(self.coordinator)])

    def lock_out_other_runs(self) -> AbstractContextManager[object]:
        """Return a context in which no other run of the same sites can start: a site trains for one run at a time."""
        return lock_run_members(self.coordinator, self.members)

    def _is_call_of_member(self, call: Mapping[str, Any]) -> bool:
        return not self.members or call.get("caller") in self.members

    def run_all_rounds(self, opening: OpenedRunFolder) -> dict[str, Any]:
        """Run all rounds over the network; return the run's summary."""
        coordinator, experiment, out = self.coordinator, self.file.experiment, opening.folder.path
        for folder in (coordinator.state_path, coordinator.state_path / OBJECTS_FOLDER):
            remove_temporary_files(folder)
        restrict_folder_to_owner(coordinator, self.tell)
        if make_private_folder(out):
            self.tell(f"other accounts could look into {out}; now only this one can (mode 700)")
        current_run = CurrentRun(
            str(out.resolve()),
            experiment.run.name or experiment.run.method,
            members=tuple(sorted(self.members)),
            resumed=opening.is_reopened,
        )
        signed_off = partial(read_site_sign_offs, coordinator.state_path)
        add_to_history = partial(add_to_run_history, coordinator.state_path)
        reports = RunReporter(current_run, coordinator.state_path, self.tell, signed_off, add_to_history)
        record_data_hashes_or_refuse(opening, hash_run_data_sets(None, self.server_data, self.external))
        reader = JsonLinesReader(coordinator.state_path / REFUSED_CALLS)

        def read_refused_calls() -> list[dict[str, Any]]:
            # Without the time of the call, because an event has its own time.
            calls = [call for call in reader.read_new_lines() if self._is_call_of_member(call)]
            return [{name: value for name, value in call.items() if name not in ("time", "run")} for call in calls]

        with reports as reporter, open_network_grid(coordinator, self.members) as grid:
            try:
                reader.poll_new_lines()  # skip calls that were refused before this run
                context = RunContext(
                    base=self.file.base_folder,
                    folder=opening.folder,
                    run=opening.run,
                    resumed=opening.resumed,
                    sites=self.sites,
                    workers=self.sites,
                    backend="network",
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    precision=experiment.training.precision,
                    server_data=self.server_data,
                    test=None if self.server_data is None else self.server_data.test,
                    external=self.external,
                    registered=grid.list_registered_sites,
                    read_unrecorded_replies=grid.receive_unrecorded_replies,
                    get_site_key=lambda site: read_all_admitted_sites(coordinator)[site].public_key,
                    refused_calls=read_refused_calls,
                    claims=make_site_claim_limits_reader(coordinator, self.members),
                    processes=grid.list_site_processes,
                )
                return run_federation(grid, experiment, context, [reporter])
            except (SystemExit, KeyboardInterrupt):
                opening.folder.append_event("stopped", reason="on request")
                raise
