"""The check of the machine: disk, memory, GPU and file permissions, compared with the needs of a run.

:func:`measure_machine` and :func:`check_machine_resources` are separate, so a test can check any machine by numbers.
"""

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version

import psutil
import torch
from torch import Tensor

from polyclinic.client.check.findings import CheckArea
from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.gate.plan_costs import count_layer_outputs
from polyclinic.client.site.settings import find_gpu_count_fault
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common import __version__
from polyclinic.common.config import STEP_NOISE_LEVELS, HospitalPlan
from polyclinic.common.models.network import SplitNetwork
from polyclinic.common.system.files import is_exposed_to_others, make_exposed_file_remedy
from polyclinic.common.system.plain_text import format_bytes, quote_for_shell
from polyclinic.common.system.resources import read_container_memory_limit

FLOAT32_BYTES = 4
GB = 10**9
MIN_FREE_DISK_BYTES = 1 * GB
"""Minimum of free disk space, for logs, the message at work, and the file system itself."""
DISK_MODEL_COPIES = 24
"""Copies of the model in the state that a site stores on disk between rounds.

Two runs, two rounds each, at most six copies a round: the local parts as trained, as evaluated and of the best round,
the unsent rounding errors, and the optimiser's two moments.
"""
PROGRAM_BYTES = 1 * GB
"""Memory of Python, torch and Flower without a model; also the GPU memory of torch without a model."""
MEMORY_MODEL_COPIES = 6
"""Copies of the model in memory: received, network, update, the update's bytes, and the optimiser's two moments."""
GPU_MODEL_COPIES = 4
"""Copies of the model on a GPU: weights, gradients and Adam's two moments."""


@dataclass(frozen=True)
class GpuMeasurements:
    """The first GPU with its memory in bytes, and the number of GPUs."""

    name: str
    total: int
    free: int
    count: int = 1


@dataclass(frozen=True)
class MachineMeasurements:
    """Measurements of a machine; sizes are in bytes.

    Attributes:
        disk_free: Free space on the disk of the site's folder.
        memory: Memory of the machine, or of this container if it has less.
        gpu: The first GPU; None without a GPU.
        user: Numeric id of the user that runs the program.
        writable: True if that user may write to the site's folder and to the state folder in it.
        key_mode: File mode of the private key; None if there is no key.
        key_remedy: The command that hides the private key from other accounts; empty if it is hidden already.
        folder_mode: File mode of the site's folder.
    """

    disk_free: int
    memory: int
    memory_free: int
    cores: int
    gpu: GpuMeasurements | None
    user: int
    writable: bool
    key_mode: int | None
    key_remedy: str
    folder_mode: int


def measure_machine(settings: SiteSettings) -> MachineMeasurements:
    """Measure this machine and the site's folder."""
    folder = settings.folder
    key = settings.key_path
    memory = psutil.virtual_memory()
    limit = read_container_memory_limit()
    gpu = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        gpu = GpuMeasurements(torch.cuda.get_device_name(), total, free, torch.cuda.device_count())
    is_key_exposed = key.is_file() and is_exposed_to_others(key.stat())
    return MachineMeasurements(
        disk_free=shutil.disk_usage(folder).free,
        memory=min(memory.total, limit),
        memory_free=min(memory.available, limit),
        cores=len(os.sched_getaffinity(0)),
        gpu=gpu,
        user=os.geteuid(),
        writable=all(os.access(path, os.W_OK | os.X_OK) for path in (folder, settings.state_folder) if path.exists()),
        key_mode=key.stat().st_mode & 0o777 if key.is_file() else None,
        key_remedy=make_exposed_file_remedy(key, key.stat()) if is_key_exposed else "",
        folder_mode=folder.stat().st_mode & 0o777,
    )


@dataclass(frozen=True)
class TrainingResourceNeeds:
    """Estimated needs of a run, in bytes.

    Attributes:
        model: Size of one copy of the model.
        gpu: Memory of each GPU, if the network computes in float32.
    """

    model: int
    disk: int
    memory: int
    gpu: int


def estimate_training_resource_needs(
    network: SplitNetwork,
    plan: HospitalPlan,
    sample: Tensor,
    images: int,
    gpus: int = 1,
    *,
    images_on_disk: bool = False,
) -> TrainingResourceNeeds:
    """Estimate the disk, memory and GPU memory that training takes.

    Args:
        sample: One image as stored in memory, uint8 ``(1, channels, height, width)``.
        images: Number of images in all parts of the data.
        gpus: Number of GPUs that share each batch.
        images_on_disk: True if decoded images are kept on disk, and read from there batch by batch.
    """
    model = FLOAT32_BYTES * sum(tensor.numel() for tensor in network.state_dict().values())
    resident = images * sample.numel()
    # Each layer's output is kept for the backward pass, where its gradient is of the same size.
    batch = 2 * plan.training.batch_size * FLOAT32_BYTES * count_layer_outputs(network, sample.float())
    on_one_gpu = batch if plan.privacy.level in STEP_NOISE_LEVELS else batch // gpus  # noise in each step uses one GPU
    return TrainingResourceNeeds(
        model=model,
        disk=MIN_FREE_DISK_BYTES + DISK_MODEL_COPIES * model + (resident if images_on_disk else 0),
        memory=PROGRAM_BYTES + MEMORY_MODEL_COPIES * model + (0 if images_on_disk else resident) + batch,
        gpu=PROGRAM_BYTES + GPU_MODEL_COPIES * model + (0 if images_on_disk else resident) + on_one_gpu,
    )


def check_machine_resources(
    machine: MachineMeasurements, settings: SiteSettings, needs: TrainingResourceNeeds | None
) -> CheckArea:
    """Compare a machine's measurements with a run's needs.

    Args:
        needs: The estimated needs; None if no image could be read or the plan's method is not installed. Without an
            estimate, the free disk space is compared with a fixed minimum, and the sizes of memory and GPU are not
            checked.
    """
    area = CheckArea("machine")
    used_gpu = machine.gpu if settings.file.device != "cpu" else None
    quoted_folder = quote_for_shell(settings.folder)
    if not machine.writable:
        problem = f"user {machine.user} may not write to {settings.folder}."
        area.add_fault(ClientExitCode.PERMISSIONS, problem, f"Run: chown -R {machine.user} {quoted_folder}")
    if machine.key_mode is not None and machine.key_remedy:
        problem = f"{settings.key_path.name}, the private key, may be read by others (mode {machine.key_mode:o})."
        area.add_fault(ClientExitCode.PERMISSIONS, problem, machine.key_remedy)
    if machine.folder_mode & 0o002:
        problem = f"everybody on this machine may write to {settings.folder} (mode {machine.folder_mode:o})."
        area.add_warning(ClientExitCode.PERMISSIONS, problem, f"Run: chmod o-w {quoted_folder}")
    if machine.user == 0:
        area.add_note("this runs as root.", "Root rights are not needed: the container image runs as user 10001.")

    _check_disk_memory_and_gpu(area, machine, settings, needs)
    faulty = {finding.exit_code for finding in area.findings}
    disk = f" ({format_bytes(needs.disk)} wanted)" if needs else ""
    memory = f" ({format_bytes(needs.memory)} wanted)" if needs else ""
    gpu = f" ({format_bytes(needs.gpu)} wanted)" if needs else ""

    if ClientExitCode.DISK not in faulty:
        area.passed.append(f"{format_bytes(machine.disk_free)} free on disk{disk}")
    if ClientExitCode.MEMORY not in faulty:
        area.passed.append(f"{format_bytes(machine.memory)} memory, {machine.cores} cores{memory}")
    if machine.gpu and ClientExitCode.GPU not in faulty:
        gpu_note = f"; {machine.gpu.count} GPUs, {settings.file.gpus} of them used" if machine.gpu.count > 1 else ""
        gpu_note = gpu_note if used_gpu else '; not used: device = "cpu"'
        area.passed.append(f"{machine.gpu.name}, {format_bytes(machine.gpu.free)} free{gpu}{gpu_note}")
    if ClientExitCode.PERMISSIONS not in faulty:
        key = "; the private key is read by no other account" if machine.key_mode is not None else ""
        area.passed.append(f"{settings.folder} is writable for user {machine.user}{key}")

    versions = {
        "Polyclinic": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "Flower": version("flwr"),
    }
    area.passed.append(", ".join(f"{name} {number}" for name, number in versions.items()))
    area.facts = {**asdict(machine), "versions": versions, **({"needs": asdict(needs)} if needs else {})}
    return area


def _check_disk_memory_and_gpu(
    area: CheckArea, machine: MachineMeasurements, settings: SiteSettings, needs: TrainingResourceNeeds | None
) -> None:
    disk = needs.disk if needs else MIN_FREE_DISK_BYTES
    device = settings.file.device
    gpu = machine.gpu
    if machine.disk_free < disk:
        problem = (
            f"{format_bytes(machine.disk_free)} are free on the disk of {settings.folder}; {format_bytes(disk)} are "
            "wanted."
        )
        remedy = "Make room, or move the folder. Old runs' memory in state/memory may be deleted between runs."
        area.add_fault(ClientExitCode.DISK, problem, remedy)

    if device == "cuda" and gpu is None:
        problem = 'device is "cuda" in site.toml, but this machine shows no GPU.'
        remedy = 'Start the container with --gpus all and the NVIDIA container toolkit, or set device = "auto".'
        area.add_fault(ClientExitCode.GPU, problem, remedy)
    elif lacking := find_gpu_count_fault(settings.file, gpu.count if gpu else 0):
        area.add_fault(ClientExitCode.GPU, f"gpus {lacking.problem}", lacking.remedy)

    if needs and machine.memory_free < needs.memory:
        problem = (
            f"{format_bytes(machine.memory_free)} of memory are free; this run wants {format_bytes(needs.memory)}."
        )
        remedy = (
            "End other programs, give the container more, or ask the coordinator for a smaller training.batch_size."
        )
        area.add_warning(ClientExitCode.MEMORY, problem, remedy)
    if needs and gpu and device != "cpu" and gpu.free < needs.gpu:
        problem = (
            f"{gpu.name} has {format_bytes(gpu.free)} free of {format_bytes(gpu.total)}; this run wants "
            f"{format_bytes(needs.gpu)}."
        )
        remedy = 'Ask the coordinator for a smaller training.batch_size, or set device = "cpu" in site.toml.'
        if gpu.total >= needs.gpu:
            remedy = "Another program has the GPU (nvidia-smi names it): end it."
        area.add_fault(ClientExitCode.GPU, problem, remedy)
