"""The machine: disk, memory, GPU, rights. What was measured is one value, so that judging it needs no such machine."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import psutil
import torch

from client.check.findings import AreaFindings, Finding, fault, note, warning
from client.check.needs import DISK_FLOOR, Needs, in_words
from client.connection.exit_codes import ExitCode
from client.site.settings import gpus_lacking
from client.site.site_file import Settings
from common import __version__
from common.system.resources import container_limit


@dataclass(frozen=True)
class Gpu:
    """The first GPU, and how many there are; sizes in bytes."""

    name: str
    total: int
    free: int
    count: int = 1


@dataclass(frozen=True)
class Machine:
    """What was measured; bytes.

    Attributes:
        disk_free: Where the site's folder lies.
        memory: Of the machine, or what this container may use of it.
        gpu: The one that would be used; None without.
        user: Number of the user that runs this.
        writable: Whether that user may write to the folder, and to what the program keeps in it.
        key_mode: Rights of the private key's file; None where there is none.
        folder_mode: Rights of the folder.
    """

    disk_free: int
    memory: int
    memory_free: int
    cores: int
    gpu: Gpu | None
    user: int
    writable: bool
    key_mode: int | None
    folder_mode: int


def measured(settings: Settings) -> Machine:
    """Look at this machine and this folder."""
    folder, key, memory = settings.folder, settings.key_path, psutil.virtual_memory()
    limit = container_limit()
    own = [folder, settings.state] if settings.state.exists() else [folder]
    return Machine(
        disk_free=shutil.disk_usage(folder).free,
        memory=min(memory.total, limit),
        memory_free=min(memory.available, limit),
        cores=len(os.sched_getaffinity(0)),
        gpu=_gpu(),
        user=os.geteuid(),
        writable=all(os.access(path, os.W_OK | os.X_OK) for path in own),
        key_mode=key.stat().st_mode & 0o777 if key.is_file() else None,
        folder_mode=folder.stat().st_mode & 0o777,
    )


def _gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Gpu(torch.cuda.get_device_name(), total, free, torch.cuda.device_count())


def check_machine(machine: Machine, settings: Settings, needs: Needs | None) -> AreaFindings:
    """StopCriterion what was measured.

    Args:
        needs: None where no image could be read to reckon it from; then the disk's floor alone is held against it.
    """
    findings = [*_rights(machine, settings), *_room(machine, settings, needs)]
    short = {finding.exit_code for finding in findings}
    passed = list[str]()
    if ExitCode.DISK not in short:
        passed.append(f"{in_words(machine.disk_free)} free on disk{_of(needs.disk if needs else None)}")
    if ExitCode.MEMORY not in short:
        passed.append(f"{in_words(machine.memory)} memory, {machine.cores} cores{_of(needs.memory if needs else None)}")
    if machine.gpu and ExitCode.GPU not in short:
        used = f"; {machine.gpu.count} GPUs, {settings.file.gpus} of them used" if machine.gpu.count > 1 else ""
        used = used if settings.file.device != "cpu" else '; not used: device = "cpu"'
        passed.append(f"{machine.gpu.name}, {in_words(machine.gpu.free)} free{_of(needs.gpu if needs else None)}{used}")
    if ExitCode.PERMISSIONS not in short:
        key = "; the private key is its owner's alone" if machine.key_mode is not None else ""
        passed.append(f"{settings.folder} is writable for user {machine.user}{key}")
    versions = _versions()
    passed.append(", ".join(f"{name} {number}" for name, number in versions.items()))
    return AreaFindings(
        "machine", tuple(passed), tuple(findings), {**asdict(machine), "versions": versions} | _asked(needs)
    )


def _of(wanted: int | None) -> str:
    return f" ({in_words(wanted)} wanted)" if wanted else ""


def _asked(needs: Needs | None) -> dict[str, object]:
    return {"needs": asdict(needs)} if needs else {}


def _versions() -> dict[str, str]:
    return {
        "Polyclinic": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "Flower": version("flwr"),
    }


def _rights(machine: Machine, settings: Settings) -> Iterator[Finding]:
    if not machine.writable:
        problem = f"user {machine.user} may not write to {settings.folder}."
        yield fault(ExitCode.PERMISSIONS, problem, f"Run: chown -R {machine.user} {settings.folder}")
    if machine.key_mode is not None and machine.key_mode & 0o077:
        problem = f"{settings.key_path.name}, the private key, may be read by others (mode {machine.key_mode:o})."
        yield fault(ExitCode.PERMISSIONS, problem, f"Run: chmod 600 {settings.key_path}")
    if machine.folder_mode & 0o002:
        problem = f"everybody on this machine may write to {settings.folder} (mode {machine.folder_mode:o})."
        yield warning(ExitCode.PERMISSIONS, problem, f"Run: chmod o-w {settings.folder}")
    if machine.user == 0:
        yield note("this runs as root.", "Root rights are not needed: the container image runs as user 10001.")


def _room(machine: Machine, settings: Settings, needs: Needs | None) -> Iterator[Finding]:
    wanted = needs.disk if needs else DISK_FLOOR
    if machine.disk_free < wanted:
        problem = (
            f"{in_words(machine.disk_free)} are free on the disk of {settings.folder}; {in_words(wanted)} are wanted."
        )
        remedy = "Make room, or move the folder. Old runs' memory in state/memory may be deleted between runs."
        yield fault(ExitCode.DISK, problem, remedy)
    if settings.file.device == "cuda" and machine.gpu is None:
        problem = 'device is "cuda" in site.toml, but this machine shows no GPU.'
        remedy = 'Start the container with --gpus all and the NVIDIA container toolkit, or set device = "auto".'
        yield fault(ExitCode.GPU, problem, remedy)
    elif lacking := gpus_lacking(settings.file, machine.gpu.count if machine.gpu else 0):
        yield fault(ExitCode.GPU, f"gpus {lacking.problem}", lacking.remedy)
    if not needs:
        return
    if machine.memory_free < needs.memory:
        problem = f"{in_words(machine.memory_free)} of memory are free; this run wants {in_words(needs.memory)}."
        remedy = (
            "End other programs, give the container more, or ask the coordinator for a smaller training.batch_size."
        )
        yield warning(ExitCode.MEMORY, problem, remedy)
    gpu = machine.gpu
    if gpu and settings.file.device != "cpu" and gpu.free < needs.gpu:
        sizes = f"has {in_words(gpu.free)} free of {in_words(gpu.total)}; this run wants {in_words(needs.gpu)}"
        remedy = 'Ask the coordinator for a smaller training.batch_size, or set device = "cpu" in site.toml.'
        if gpu.total >= needs.gpu:
            remedy = "Another program has the GPU (nvidia-smi names it): end it."
        yield fault(ExitCode.GPU, f"{gpu.name} {sizes}.", remedy)
