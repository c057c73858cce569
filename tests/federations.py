"""Small whole federations, in this process, for tests: real data, real records, every site's code."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Message, RecordDict
from rich.console import Console
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from polyclinic.client.site.policy import UNLIMITED
from polyclinic.common.config import ExperimentFile, read_experiment
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.wire.codec import decode_record
from polyclinic.common.wire.records import EvaluateReply, TrainReply, TrainRequest
from polyclinic.server.simulation.backends import inline as backends
from polyclinic.server.simulation.simulate import simulate

GATED = UNLIMITED.model_copy(update={"maximum_rounds": 10_000})
"""A policy for simulated sites with gate and audit log (``polyclinic.client.simulation.SIMULATED_SITE_POLICY``)."""
VECTORS = Path(__file__).parents[2] / "shared" / "vectors"


def read_vectors(name: str) -> dict[str, Any]:
    """Read a file of ``shared/vectors``; nothing where the folder is not beside the project."""
    file = VECTORS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line, such as ``rounds.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SMALL_RUN = """
[run]
method = "surgical"
rounds = 2
seed = 3

[model]
architecture = "tiny_cnn"
channels = {channels}
image_size = 16
"""
"""The tables ``[run]`` and ``[model]`` of most federations of tests."""
INLINE_RUN = f"""{SMALL_RUN.format(channels=1)}
[training]
batch_size = 64
lr = 0.003

[simulation]
backend = "inline"
"""
"""All that a simulation in this process needs, but for data and partition."""
DIGITS = f"""{INLINE_RUN}
[data]
kind = "digits"
image_size = 16

[partition]
kind = "class_subsets"
sites = 3
shared = 2
"""


AT_COORDINATOR = {"unifed", "server_only"}
"""Methods that need images at the coordinator."""
FULL_COVERAGE = {"fedavg", "fedbn", "fedbn_plus"}
ALL_SHARED = "partition.shared=10"
OWN_IMAGES = 'server_data={kind = "digits", image_size = 16, split_seed = 5}'
ALL_DIGITS = 'data={kind = "digits", image_size = 16}'
"""All 1,797 images, where a test asks how well a model learns; else a federation trains on :func:`few_digits`."""
NEEDS = {
    **dict.fromkeys(FULL_COVERAGE, (ALL_SHARED,)),
    "unifed": ("method.epoch_cap=2",),
    "server_only": ("method.epoch_cap=2",),
    "fedmlp": ("method.stage_one_rounds=1",),
    "fedirm": ("method.supervised_rounds=1",),
    "rscfed": ("partition.shared=2", "method.consensus_sites=2"),
    "cbafed": ("partition.shared=2", "run.rounds=3", "method.stage_one_rounds=1"),
    "fednoro": ("partition.shared=2", "run.rounds=3", "method.stage_one_rounds=1"),
    "scaffold": ("partition.shared=2", "training.optimizer=sgd", "training.lr=0.05"),
}


def needs_of(method: str) -> tuple[str, ...]:
    """What a method cannot do without; unlike sites where it does not refuse them."""
    weights = (given_weights(),) if method == "fedbn_plus" else ()
    own_images = (f"server_data={few_digits()}",) if method in AT_COORDINATOR else ()
    return (*NEEDS.get(method, ("partition.shared=2",)), *own_images, *weights)


@cache
def few_digits() -> str:
    """The table of a data set of the first 690 digits at 16 x 16 pixels: training takes a third of the time."""
    digits, arrays, begin = load_digits(), dict[str, Any](), 0
    pixels = np.kron(15 * digits.images, np.ones((2, 2))).astype(np.uint8)  # 8 x 8 of 0 to 16
    for part, end in {"train": 450, "val": 570, "test": 690}.items():
        arrays |= {f"{part}_images": pixels[begin:end], f"{part}_labels": digits.target[begin:end, None]}
        begin = end
    file = temporary_folder("polyclinic-few-") / "digits.npz"
    np.savez(file, **arrays)
    return f'{{kind = "npz", path = "{file}", classes = {json.dumps(list("0123456789"))}}}'


@cache
def given_weights() -> str:
    """The override that gives the digits experiment weights: those with which it would begin anyway."""
    folder = temporary_folder("polyclinic-weights-")
    spec = ModelSpec(architecture="tiny_cnn", channels=1, image_size=16)
    tensors = build_network(spec, ("a",), seed=3).backbone.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "tiny_cnn.safetensors")
    return f'model.weights="{folder / "tiny_cnn.safetensors"}"'


def temporary_folder(prefix: str) -> Path:
    """A folder that lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@dataclass
class Traffic:
    """Every message that passed, as the records that were on the wire."""

    down: list[tuple[str, RecordDict]] = field(default_factory=list)
    up: list[tuple[str, RecordDict]] = field(default_factory=list)

    @property
    def requests(self) -> list[TrainRequest]:
        """The requests to train, in the order in which they passed; so too the replies to them and to evaluation."""
        return [decode_record(content, TrainRequest) for content in of_type(self.down, "train")]

    @property
    def replies(self) -> list[TrainReply]:
        return [decode_record(content, TrainReply) for content in of_type(self.up, "train")]

    @property
    def evaluations(self) -> list[EvaluateReply]:
        return [decode_record(content, EvaluateReply) for content in of_type(self.up, "evaluate")]


def experiment(folder: Path, *overrides: str, text: str = DIGITS) -> ExperimentFile:
    """The digits experiment with overrides, read from a file as a user's would be.

    It is of few digits, unless the text or an override names other data.
    """
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    is_few = text is DIGITS and not any(override.startswith("data") for override in overrides)
    return read_experiment(folder / "experiment.toml", (*((f"data={few_digits()}",) if is_few else ()), *overrides))


def federation(
    folder: Path, *overrides: str, out: str = "run", resume: bool = False, pages: bool = False
) -> dict[str, Any]:
    """Run it; return the summary.

    Args:
        pages: Write report and model card too: to draw them takes longer than to run the federation.
    """
    file = experiment(folder, *overrides)
    with nullcontext() if pages else patch("polyclinic.server.federation.set_up.write_run_pages"):
        return simulate(file, folder / out, Console(quiet=True), resume=resume)


@cache
def finished(*overrides: str, pages: bool = False) -> tuple[Path, dict[str, Any]]:
    """The run folder and the summary of a federation that no test disturbs: one for all tests of this process.

    Anyone who reads it must not change it.
    """
    folder = temporary_folder("polyclinic-finished-")
    summary = federation(folder, *overrides, pages=pages)
    return folder / "run", summary


def overheard(monkeypatch: Any) -> Traffic:
    """Listen on the inline backend's wire; nothing is changed."""
    traffic, answered = Traffic(), backends.InlineGrid.answer_message

    def listening(grid: backends.InlineGrid, message: Message) -> Message:
        traffic.down.append((message.metadata.message_type, message.content))
        reply = answered(grid, message)
        if reply.has_content():
            traffic.up.append((message.metadata.message_type, reply.content))
        return reply

    monkeypatch.setattr(backends.InlineGrid, "answer_message", listening)
    return traffic


def of_type(messages: Iterable[tuple[str, RecordDict]], kind: str) -> list[RecordDict]:
    """The records of one message type, in the order in which they passed."""
    return [content for message_type, content in messages if message_type == kind]


def text_of(content: RecordDict) -> str:
    """All text in a message: names of records, and every field."""
    return " ".join([*content, *(str(dict(record)) for record in content.config_records.values())])
