"""The number format and memory layout of local training; a plan can ask each site to measure which is fastest.

The fastest choice depends on CPU and network: on a CPU with bfloat16 instructions, bfloat16 halves the step time of a
ResNet-18 and doubles that of an EfficientNet-Lite0. Equal choices give equal bits, so a site keeps its choice until
machine, network or torch version changes.
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from polyclinic.common.config import Experiment, HospitalPlan, TrainingSection
from polyclinic.common.models.network import (
    MemoryFormat,
    autocast,
    build_network,
    cpu_supports_bf16,
    read_cpu_info,
    resolve_precision,
    set_memory_format,
    unfreeze_network,
)
from polyclinic.common.system.files import write_atomically
from polyclinic.strategies.local.training import make_training_reproducible

Request = TypeVar("Request", HospitalPlan, Experiment)
ARITHMETIC_FILE = "arithmetic.json"
TIMED_STEPS = 2
"""Number of timed steps for each arithmetic, after one step that is not timed."""
MAX_TIMED_IMAGES = 64
"""Largest number of images in a timed step; more images take longer, and the comparison stays the same."""
MAX_TIME_RATIO = 0.9
"""Largest share of the default's time that a chosen format may take, so that a second measurement agrees."""
MAX_STORED_CHOICES = 100


@dataclass(frozen=True)
class TrainingNumberFormat:
    """A number format, such as bfloat16, and the memory layout of the network's tensors."""

    precision: Literal["float32", "bf16", "fp16"]
    memory_format: MemoryFormat

    def __str__(self) -> str:
        return f"{self.precision}, {self.memory_format}"


DEFAULT_NUMBER_FORMAT = TrainingNumberFormat("float32", "channels_last")


def read_number_format(training: TrainingSection, device: str) -> TrainingNumberFormat:
    """Return the number format and memory layout of these training settings, without measuring which is fastest.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    return TrainingNumberFormat(resolve_precision(device, training.precision), training.memory_format)


def choose_number_format(plan: HospitalPlan, device: str, folder: Path, *, durable: bool) -> TrainingNumberFormat:
    """Return the number format and memory layout in which a plan's network is trained.

    For the setting ``fastest`` on a CPU they are measured once for each network, and the choice is stored.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: Folder whose ``arithmetic.json`` stores the choice.
        durable: True if the stored choice must survive a power cut.
    """
    if plan.training.precision != "fastest" or device != "cpu":
        return read_number_format(plan.training, device)
    training, (name, flags) = plan.training, read_cpu_info()
    spec = plan.model.model_dump_json(exclude={"weights", "weights_sha256", "frozen_sha256"})
    machine = torch.__version__, platform.machine(), f"{name} {sorted(flags)}"
    facts = spec, training.batch_size, training.threads, *machine  # all that a choice depends on
    about = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        choices = json.loads((folder / ARITHMETIC_FILE).read_bytes())
        stored = {key: TrainingNumberFormat(**fields) for key, fields in choices.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # a damaged file: the choices can be measured again
        stored = {}
    if about not in stored:
        stored[about] = find_fastest_number_format(time_training_steps(plan, list_cpu_number_formats()))
        newest = dict(list(stored.items())[-MAX_STORED_CHOICES:])
        text = json.dumps({name: vars(arithmetic) for name, arithmetic in newest.items()}, indent=1)
        write_atomically(folder / ARITHMETIC_FILE, text.encode(), durable=durable)
    return stored[about]


def copy_with_number_format(request: Request, arithmetic: TrainingNumberFormat) -> Request:
    """Return a copy of a plan or an experiment whose training settings name this number format and memory layout."""
    return request.model_copy(update={"training": request.training.model_copy(update=vars(arithmetic))})


def list_cpu_number_formats() -> Sequence[TrainingNumberFormat]:
    """Return all pairs of number format and memory layout that this CPU offers, the default first."""
    precisions: Sequence[Literal["float32", "bf16"]] = ("float32", "bf16") if cpu_supports_bf16() else ("float32",)
    formats: Sequence[MemoryFormat] = ("channels_last", "contiguous")
    return [TrainingNumberFormat(precision, memory_format) for precision in precisions for memory_format in formats]


def find_fastest_number_format(seconds: Mapping[TrainingNumberFormat, float]) -> TrainingNumberFormat:
    """Return the number format with the shortest training step; the default if no other is clearly faster.

    Args:
        seconds: Number format and memory layout -> seconds of a training step; includes the default.
    """
    best = min(seconds, key=lambda arithmetic: seconds[arithmetic])
    return best if seconds[best] <= MAX_TIME_RATIO * seconds[DEFAULT_NUMBER_FORMAT] else DEFAULT_NUMBER_FORMAT


def time_training_steps(
    plan: HospitalPlan, arithmetics: Sequence[TrainingNumberFormat]
) -> dict[TrainingNumberFormat, float]:
    """Return the CPU seconds of a training step in each number format, as the minimum of :data:`TIMED_STEPS` steps.

    The formats take turns, so that other programs on the machine slow all of them alike.

    Args:
        plan: The plan whose network is timed.
        arithmetics: Number formats and memory layouts to time.
    """
    spec = plan.model
    training = plan.training
    with make_training_reproducible(0, training.threads) as generator:
        shape = (min(training.batch_size, MAX_TIMED_IMAGES), *spec.input_shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        formats = dict.fromkeys(arithmetic.memory_format for arithmetic in arithmetics)
        networks = {name: set_memory_format(build_network(spec, ("",), seed=0), name) for name in formats}
        for network in networks.values():
            unfreeze_network(network)
        turns = list[dict[TrainingNumberFormat, float]]()
        for _ in range(1 + TIMED_STEPS):
            turns.append({})
            for arithmetic in arithmetics:
                network = networks[arithmetic.memory_format]
                began = time.process_time()
                with autocast(images.device, arithmetic.precision):
                    logits = network(images.float())
                logits.float().square().mean().backward()
                network.zero_grad()
                turns[-1][arithmetic] = time.process_time() - began
    return {arithmetic: min(turn[arithmetic] for turn in turns[1:]) for arithmetic in arithmetics}
