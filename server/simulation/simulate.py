"""Run a simulated experiment: check it, set up its sites, run all rounds, write the run folder."""

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from polyclinic.common.config import Experiment, ExperimentFile, make_hospital_plan
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.models.gpu import count_visible_gpus, describe_gpu_count
from polyclinic.common.models.network import Precision, find_network_build_faults
from polyclinic.common.models.saved import load_model
from polyclinic.common.models.zoo.registry import describe_missing_batch_norm, find_plugin_network_faults
from polyclinic.common.models.zoo.spec import is_segmentation
from polyclinic.common.reporting.limits import UNKNOWN_PATIENTS
from polyclinic.common.simulation import (
    POOLED_SITE,
    SimulatedData,
    clear_simulated_data_cache,
    load_simulated_data,
    load_undivided_data,
    open_simulation_image_store,
    select_site_test_images,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_text import list_first_and_count_rest
from polyclinic.common.system.terminal import ProgressFormat
from polyclinic.common.vocabulary import group_words_by_class, name_images_by_vocabulary
from polyclinic.data.base.image_set import (
    ImageSet,
    SharedPicture,
    SkippedImage,
    describe_skipped_images,
    find_missing_mask_faults,
)
from polyclinic.data.load import (
    EXTERNAL_TEST_SECTION,
    find_dataset_faults,
    find_external_test_faults,
    load_external_test_images,
    refuse_test_set_without_model_class,
)
from polyclinic.data.partition.checks import find_partition_faults
from polyclinic.server.federation.evaluation import RunContext
from polyclinic.server.federation.planning import find_planning_faults, find_unspaced_volume_faults
from polyclinic.server.federation.run import run_federation
from polyclinic.server.federation.set_up import (
    OpenedRunFolder,
    execute_run,
    hash_run_data_sets,
    read_begun_experiment,
    record_data_hashes_or_refuse,
)
from polyclinic.server.reporting.live.server import serve_live_view_during_run
from polyclinic.server.runs.live_status import CurrentRun
from polyclinic.server.runs.progress import SilentRunProgress, make_run_progress
from polyclinic.server.runs.reporter import RunReporter
from polyclinic.server.runs.samples import report_shows_sample_images, write_sample_images
from polyclinic.server.runs.tracking import TrackingService
from polyclinic.server.simulation.backends.inline import import_client_app, run_with_inline_grid
from polyclinic.server.simulation.backends.ray_grid import SimulatedRunData, run_on_ray
from polyclinic.server.simulation.backends.ray_process import RayDriverHandle, start_ray_driver
from polyclinic.server.simulation.training_notes import describe_unlabelled_images, list_training_notes
from polyclinic.strategies.engine.admission_limits import SiteAdmissionLimits
from polyclinic.strategies.local.arithmetic import choose_number_format, copy_with_number_format
from polyclinic.strategies.local.method_faults import find_contract_faults
from polyclinic.strategies.local.plugin_calls import SiteLabels, find_plugin_faults, is_transform_repeatable
from polyclinic.strategies.method_list import prefix_fault_with_file
from polyclinic.strategies.methods.base import Method, find_missing_coordinator_images
from polyclinic.strategies.privacy.gradients import find_network_privacy_faults
from polyclinic.strategies.registry import build_experiment_strategy
from polyclinic.strategies.run_length import complete_round_settings, find_unreached_stage_faults

PATIENT_KEYS = {"folder": "patient_column", "dicomweb": "patient_column", "npz": "patient_key"}
"""Kind of data set -> key of ``[data]`` that names the patient of each image."""


def simulate(
    file: ExperimentFile,
    out: Path,
    console: Console,
    track: TrackingService | None = None,
    *,
    resume: bool = False,
    web_port: int | None = None,
    progress: ProgressFormat = ProgressFormat.auto,
    pages: bool = True,
    ray_process: RayDriverHandle | None = None,
    watcher: SilentRunProgress | None = None,
    keep_data: bool = False,
) -> dict[str, Any]:
    """Run a simulated experiment and write the run folder ``out``; return the summary.

    Args:
        web_port: Port of the live view, 0 for any free port; None for no live view.
        resume: Continue the run in ``out`` from its last checkpoint. For a finished run, return its summary and write
            missing pages.
        progress: Format of the displayed progress; on a quiet console nothing is displayed.
        pages: True to write report and model card.
        ray_process: The process that drives Ray, if the caller has started it for this experiment.
        watcher: Receives the events of the run, in addition to the displayed progress.
        keep_data: True to use data again that this process has loaded for an earlier run.

    Raises:
        BadInput: If the experiment or its data have faults; before training begins or a file is written.
        TooFewSites: If sites fail during the run.
    """
    begun = read_begun_experiment(out) if resume else None
    file = replace(file, experiment=complete_round_settings(file.experiment, begun))
    with start_ray_driver(file.experiment) if ray_process is None else nullcontext(ray_process) as ray:
        simulation = SimulationBackend(
            file, console, web_port, progress, ray, watcher, keep_data=keep_data, is_begun=begun is not None
        )
        return execute_run(simulation, file, out, track=track, resume=resume, pages=pages)


_TABLE_EXAMPLES = {
    "data": 'Write [data] with its kind, such as kind = "digits"; in Python give dataset=, or '
    'settings={"data": {"kind": "digits"}}.',
    "partition": 'Write [partition], such as kind = "class_subsets", sites = 2, shared = 1; in Python '
    'settings={"partition": {"kind": "class_subsets", "sites": 2, "shared": 1}}.',
}
"""Missing table of an experiment -> remedy for the message."""


@dataclass
class SimulationBackend:
    """A backend that runs an experiment on simulated sites: on Ray, or in this process if ``ray_process`` is None.

    The arguments are those of :func:`simulate`.

    Attributes:
        is_begun: True if a run with this experiment has begun already.
    """

    file: ExperimentFile
    console: Console
    web_port: int | None
    progress: ProgressFormat
    ray_process: RayDriverHandle | None = None
    watcher: SilentRunProgress | None = None
    keep_data: bool = False
    is_begun: bool = False
    durable: bool = field(default=False, init=False)
    method: Method = field(init=False)
    data: SimulatedData = field(init=False)
    external: ImageSet | None = field(init=False)

    def __post_init__(self) -> None:
        self.experiment = self.file.experiment
        self.tell: Callable[[str], None] = partial(self.console.print, markup=False)

    def load_and_check_data(self, *, resume: bool) -> None:
        """Read the data, and check data and experiment.

        Raises:
            BadInput: If the data or the experiment have faults.
        """
        if not self.keep_data:
            clear_simulated_data_cache()
        self.method, self.data = check_simulation_experiment(self.file, self.tell, is_begun=self.is_begun)
        self.external = read_external_test_set(self.file, self.data, self.tell)

    def lock_out_other_runs(self) -> AbstractContextManager[object]:
        """Do nothing, because several simulations may run at the same time."""
        return nullcontext()

    def run_all_rounds(self, opening: OpenedRunFolder) -> dict[str, Any]:
        """Run all rounds in simulation, and choose sample images for the report."""
        experiment, folder, data = self.experiment, opening.folder, self.data
        if experiment.training.precision == "fastest":  # one choice for all sites, which a resumed run keeps
            plan = make_hospital_plan(experiment)
            arithmetic = choose_number_format(plan, self._evaluation_device, folder.path, durable=False)
            self.tell(f"fastest on this machine: {arithmetic}")
            experiment = copy_with_number_format(experiment, arithmetic)
        # Without [server_data], the coordinator's images are a part of the data set, which is hashed as a whole.
        server_data = data.server if experiment.server_data else None
        record_data_hashes_or_refuse(opening, hash_run_data_sets(data.splits, server_data, self.external))
        run_context = self._make_run_context(opening, experiment.training.precision)
        for part in ("train", "validation", "test"):
            for skipped in getattr(data.splits, part).skipped:
                folder.append_event("image_skipped", part=part, image=skipped.name, reason=skipped.reason)
        _write_shared_pictures(folder.path, data.splits.train.shared)
        for note in (*self._notes, *self._omissions):
            folder.append_event("table_note", note=note)
            self.tell(note)
        if data.empty_sites:
            folder.append_event("no_training_images", sites=list(data.empty_sites))
        untested = [part.site for part in data.parts if not len(part.validation)]
        if 0 < len(untested) < len(data.parts):
            names = list_first_and_count_rest(untested, 5)
            self.tell(f"Without validation images: {names}. The other sites alone show which round is best.")
        if sentence := describe_skipped_images(self._collect_skipped_images()):
            self.tell(sentence)
        if not data.patients_known:
            folder.append_event("patients_unknown")
            kind = self.experiment.data.kind if self.experiment.data else ""
            key = PATIENT_KEYS.get(kind)
            if key is not None:
                self.tell(f"{UNKNOWN_PATIENTS} Name data.{key} if there is one.")
        with self._show_run_progress(folder.path) as watchers:
            summary = self._run_federation(run_context, experiment, watchers)
        has_images_to_show = len(data.test_images) and report_shows_sample_images(self.experiment)
        if self.method.site.parts.has_global_model and has_images_to_show:
            network = load_model(folder.path)
            write_sample_images(folder.path, network, data.test_images, run_context.device, run_context.precision)
        return summary

    def _make_run_context(self, opening: OpenedRunFolder, precision: Precision) -> RunContext:
        experiment = self.experiment
        data = self.data
        table = getattr(experiment.data, "labels", None)
        return RunContext(
            base=self.file.base_folder,
            folder=opening.folder,
            run=opening.run,
            sites=len(self._list_site_names()),
            workers=1,
            backend=experiment.simulation.backend,
            device=self._evaluation_device,
            precision=precision,
            server_data=data.server,
            test=data.test_images,
            external=self.external,
            site_tests=lambda: select_site_test_images(data),
            coverage=data.label_contract,
            resumed=opening.resumed,
            claims=lambda: self._site_order,
            positives=data.positive_training_counts,
            table_sha256=table and hashlib.sha256((self.file.base_folder / table).read_bytes()).hexdigest(),
            patients_known=data.patients_known,
            skipped=self._collect_skipped_images(),
            notes=self._notes,
            omissions=self._omissions,
            reproducible=self._is_transform_repeatable and all(part.is_reproducible for part in data.splits.parts),
        )

    @cached_property
    def _is_transform_repeatable(self) -> bool:
        return is_transform_repeatable(self.experiment)

    @cached_property
    def _notes(self) -> tuple[str, ...]:
        """Notes for the user on data set, external test set, labels, task, loss and transform; each note once."""
        sets = [self.data.splits.train, *([self.external] if self.external else [])]
        notes = [note for images in sets for note in images.notes]
        notes += list_training_notes(
            self.experiment,
            self.data,
            self.method.site.missing_labels_count_as,
            is_transform_repeatable=self._is_transform_repeatable,
        )
        return tuple(dict.fromkeys(notes))

    @cached_property
    def _omissions(self) -> tuple[str, ...]:
        """Sentences on images that are left out of the data set or the external test set; each sentence once."""
        external = [f"External test set: {sentence}" for sentence in self.external.omissions] if self.external else []
        unlabelled = [sentence] if (sentence := describe_unlabelled_images(self.data)) else []
        return tuple(dict.fromkeys((*self.data.splits.train.omissions, *unlabelled, *external)))

    def _collect_skipped_images(self) -> list[SkippedImage]:
        """Return the images that could not be read, including those of the external test set."""
        sets = [*self.data.splits.parts, *([self.external] if self.external else [])]
        return [skip for images in sets for skip in images.skipped]

    @cached_property
    def _site_order(self) -> Mapping[str, SiteAdmissionLimits]:
        """Site -> its index in the partition, which simulates the order of admission."""
        return {site: SiteAdmissionLimits(order=index) for index, site in enumerate(self._list_site_names())}

    def _list_site_names(self) -> tuple[str, ...]:
        """Return the names of the sites, in the order of the partition."""
        is_pooled = self.method.site.pooled_missing_labels != "no"
        return (POOLED_SITE,) if is_pooled else tuple(part.site for part in self.data.parts)

    @contextmanager
    def _show_run_progress(self, out: Path) -> Iterator[list[SilentRunProgress]]:
        """Show the progress of the run in the ``with`` block, and serve the live view if ``web_port`` is set."""
        run = self.experiment.run
        name = run.name or run.method
        with ExitStack() as stack:
            shown = make_run_progress(self.progress, self.console, f"{name} seed {run.seed}")
            watchers: list[SilentRunProgress] = [stack.enter_context(shown)]
            if self.watcher is not None:
                watchers.append(self.watcher)
            if self.web_port is not None:
                stack.enter_context(serve_live_view_during_run(out, self.web_port, self.tell))
                current_run = CurrentRun(str(out.resolve()), name)
                watchers.append(stack.enter_context(RunReporter(current_run, out, lambda line: None)))
            yield watchers

    def _run_federation(
        self, run_context: RunContext, experiment: Experiment, watchers: list[SilentRunProgress]
    ) -> dict[str, Any]:
        """Run all rounds on Ray or in this process; return the run's summary."""
        base = self.file.base_folder
        summaries = list[dict[str, Any]]()

        def run_on_grid(grid: Any) -> None:
            workers = getattr(grid, "workers", run_context.workers)
            summaries.append(run_federation(grid, self.experiment, replace(run_context, workers=workers), watchers))

        text = experiment.model_dump_json()
        path = run_context.folder.path.resolve()
        if self.ray_process is not None:
            images = load_undivided_data(self.experiment, base)
            record_event = run_context.folder.append_event
            run = SimulatedRunData(text, base, path, self._list_site_names(), images, record_event)
            run_on_ray(run_on_grid, run, self.ray_process)
        else:
            run_with_inline_grid(run_on_grid, import_client_app(text, base, path), run_context.sites)
        return summaries[0]

    @property
    def _evaluation_device(self) -> str:
        """The torch device of the coordinator's own evaluation."""
        return "cuda" if torch.cuda.is_available() and self.experiment.simulation.gpus_per_site != 0 else "cpu"


def _write_shared_pictures(folder: Path, shared: Sequence[SharedPicture]) -> None:
    """Write the pictures that two parts of the data set have in common to ``duplicates.csv``, if there are any."""
    if not shared:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", "picture", "copy_in_part", "copy"])
    writer.writerows([copy.part, copy.name, copy.other_part, copy.other_name] for copy in shared)
    write_atomically(folder / "duplicates.csv", text.getvalue().encode())


def check_simulation_experiment(
    file: ExperimentFile, tell: Callable[[str], object] = lambda line: None, *, is_begun: bool = False
) -> tuple[Method, SimulatedData]:
    """Check the experiment and its data before training; return the method and the data.

    Args:
        is_begun: True for a resumed run, whose stages are not checked again.

    Raises:
        BadInput: With all faults.
    """
    faults: list[Fault] = []
    if not is_begun:
        file = replace(file, experiment=complete_round_settings(file.experiment))
        faults += find_unreached_stage_faults(file.experiment)
    experiment = file.experiment
    try:
        method = build_experiment_strategy(experiment)
    except BadInput as error:
        faults += error.faults
    faults += _find_simulation_setting_faults(experiment)
    faults += find_unspaced_volume_faults(experiment, file.base_folder)
    faults += find_planning_faults(experiment) or find_network_build_faults(
        experiment.model_before_planning, file.base_folder
    )
    if experiment.data is not None:
        faults += find_dataset_faults(experiment.data, file.base_folder)
    faults += find_external_test_faults(experiment.external_test, file.base_folder)
    # The names are empty if they are only in the data. In "classes", a table has its own names of classes.
    keys = ("keep", "class_names", "classes")
    class_names = next((names for key in keys if (names := getattr(experiment.data, key, ()))), ())
    if class_names and experiment.partition is not None:
        class_names = tuple(group_words_by_class(class_names, experiment.vocabulary or {}))
        faults += find_partition_faults(class_names, experiment.partition)
    if not faults:
        faults += find_network_privacy_faults(make_hospital_plan(experiment), method.site)
    raise_faults([prefix_fault_with_file(file, fault) for fault in faults])
    try:
        data = load_simulated_data(experiment, file.base_folder, tell)
        contract = data.label_contract
        if is_segmentation(experiment.model.task):
            server_images = None if data.server is None else data.server.train
            raise_faults(find_missing_mask_faults({"data": data.splits.train, "server_data": server_images}))
        raise_faults(find_missing_coordinator_images(method, data.server))
        classes = contract.class_names
        keeps_norm = method.site.parts.keeps_batch_norm_local
        raise_faults(find_plugin_network_faults(experiment.model_before_planning, len(classes), keeps_norm=keeps_norm))
        if keeps_norm and (sentence := describe_missing_batch_norm(experiment.model)):
            tell(sentence)
        missing = method.site.missing_labels_count_as
        labels = SiteLabels(
            fewest_classes=data.fewest_site_classes,
            has_unknown=data.has_unknown_labels,
            has_rows_of_all_classes=method.site.payload.rows == "all",
            is_pooled=method.site.pooled_missing_labels != "no",
        )
        raise_faults(find_plugin_faults(experiment, len(classes), missing, labels))
        if method.site.pooled_missing_labels == "no":
            raise_faults(find_contract_faults(method.site, contract))
    except BadInput as error:
        raise BadInput(prefix_fault_with_file(file, fault) for fault in error.faults) from None
    if method.site.pooled_missing_labels == "no":
        section = experiment.participation
        sites = len(contract.sites)
        counts = {f"participation.{key}": getattr(section, key) for key in ("min_sites", "sites_per_round")}
        counts["evaluation.sites"] = experiment.evaluation.sites or 0
        reason = f"but the partition makes {sites} sites."
        too_large = {key: count for key, count in counts.items() if count > sites}
        raise_faults([Fault(f"{file.path.name}: {key}", f"is {count}, {reason}") for key, count in too_large.items()])
    return method, data


def read_external_test_set(
    file: ExperimentFile, data: SimulatedData, tell: Callable[[str], object] = lambda line: None
) -> ImageSet | None:
    """Read the external test set; return None if the experiment has none.

    Raises:
        BadInput: If the set has faults, or labels no class of the sites.
    """
    try:
        store = open_simulation_image_store(file.experiment, file.base_folder, tell)
        images = load_external_test_images(file.experiment.external_test, file.base_folder, store)
        if images is not None:
            images = name_images_by_vocabulary(images, file.experiment.vocabulary, EXTERNAL_TEST_SECTION)
            refuse_test_set_without_model_class(images, data.label_contract.class_names)
        if is_segmentation(file.experiment.model.task):
            raise_faults(find_missing_mask_faults({EXTERNAL_TEST_SECTION: images}))
    except BadInput as error:
        raise BadInput(prefix_fault_with_file(file, fault) for fault in error.faults) from None
    return images


def _find_simulation_setting_faults(experiment: Experiment) -> list[Fault]:
    """Return a fault for each setting with which a simulation cannot run.

    The settings are a missing ``[data]`` or ``[partition]``, named hospitals, more GPUs than this process sees, and
    secure aggregation on Ray.
    """
    missing = [name for name in ("data", "partition") if getattr(experiment, name) is None]
    faults = [Fault(f"[{name}]", "is missing; a simulation needs it.", _TABLE_EXAMPLES[name]) for name in missing]
    if experiment.participation.sites:
        problem = "names hospitals; the sites of a simulation are those of its partition."
        faults.append(Fault("participation.sites", problem, "Leave it out: --set participation.sites=[]"))
    section = experiment.simulation
    gpus = section.gpus_of_each_site
    if gpus and not section.address and gpus > (visible := count_visible_gpus()):
        problem = f"is {gpus:g}, but {describe_gpu_count(visible)}"
        faults.append(Fault("simulation.gpus_per_site", problem, "Leave it out, or set 0 to train on the CPU."))
    if experiment.privacy.secure_aggregation and section.backend == "ray":
        problem = "keeps nothing in a site's memory from message to message, where the secrets of a round have to be."
        faults.append(Fault("simulation.backend", f"ray {problem}", 'Set "inline" with privacy.secure_aggregation.'))
    return faults
