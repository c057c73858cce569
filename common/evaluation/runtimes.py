"""Open a model's file with the library that runs it; a runtime maps a batch of inputs to a batch of outputs.

No file is unpickled, except by torch in a ``torch.export`` file, which is opened only if the user trusts it explicitly.
ONNX Runtime and safetensors run no code from a file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.common.models.size_limit import NetworkTooLarge, limit_network_bytes
from polyclinic.common.system.packages import import_torchvision, refuse_missing_packages
from polyclinic.common.system.plain_text import make_printable_line

if TYPE_CHECKING:
    from polyclinic.common.evaluation.foreign import ForeignModel

Runtime = Callable[[NDArray[Any]], NDArray[np.float32]]
"""A function that maps inputs ``(batch, ...)`` to outputs ``(batch, classes)``."""
MAX_MEMORY_FACTOR = 4
"""Limit on a network's memory while it is built, as a multiple of its file; :data:`EXTRA_MEMORY_BYTES` are added."""
EXTRA_MEMORY_BYTES = 256 * 2**20


# ---------------------------------------------------------------------- ONNX


def open_onnx(path: Path, output: str) -> Runtime:
    """Open an ONNX file on this machine's CPU.

    Args:
        path: The file.
        output: Name of the output to read; empty if the model has only one.

    Raises:
        BadInput: If ONNX Runtime is missing, the file is damaged, or inputs or outputs are ambiguous.
    """
    session = _open_session(path)
    inputs = session.get_inputs()
    outputs = [each.name for each in session.get_outputs()]
    if len(inputs) != 1:
        problem = f"has the inputs {quote_names(each.name for each in inputs)}; a model of images has one."
        raise BadInput([Fault(str(path), problem)])
    if (output and output not in outputs) or (not output and len(outputs) != 1):
        remedy = f'State the one to read: output = "{outputs[0]}"'
        raise BadInput([Fault(str(path), f"has the outputs {quote_names(outputs)}.", remedy)])
    size = inputs[0].shape[0] if isinstance(inputs[0].shape[0], int) else None
    chosen = output or outputs[0]

    def run(batch: NDArray[Any]) -> NDArray[np.float32]:
        try:
            return np.asarray(session.run([chosen], {inputs[0].name: batch})[0], np.float32)
        except Exception as error:  # onnxruntime raises many exception classes
            problem = f"cannot score images of shape {batch.shape[1:]}: {_shorten(error)}"
            remedy = "Are color, image_size and layout those of the model?"
            raise BadInput([Fault(str(path), problem, remedy)]) from None

    return run_in_batches_of(size, run)


def read_onnx_metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata of an ONNX file, key -> text.

    Raises:
        BadInput: If ONNX Runtime is missing, or the file is damaged.
    """
    metadata: dict[str, str] = _open_session(path).get_modelmeta().custom_metadata_map
    return metadata


def _open_session(path: Path) -> Any:
    refuse_missing_packages(str(path), "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises many exception classes
        raise BadInput([Fault(str(path), f"is no ONNX model that can be read: {_shorten(error)}")]) from None


# ---------------------------------------------------------------------- torch.export


def open_torch_export(path: Path) -> Runtime:
    """Open a ``torch.export`` file; this can run any code that its author put into it.

    Raises:
        BadInput: If torch cannot read it.
    """
    try:
        program = torch.export.load(path)
        module = program.module()
    except Exception as error:  # the file may contain anything
        raise BadInput([Fault(str(path), f"is no torch.export file that can be read: {_shorten(error)}")]) from None
    size = _read_batch_size(program)

    def run(batch: NDArray[Any]) -> NDArray[np.float32]:
        try:
            with torch.no_grad():
                outputs = module(torch.from_numpy(batch))
            return np.asarray(outputs.numpy(), np.float32)
        except Exception as error:  # the model's code may raise anything
            problem = f"cannot score images of shape {batch.shape[1:]}: {_shorten(error)}"
            remedy = "Are color, image_size and layout those of the model?"
            raise BadInput([Fault(str(path), problem, remedy)]) from None

    return run_in_batches_of(size, run)


def _read_batch_size(program: Any) -> int | None:
    """Return the batch size for which a program was exported; None if it takes any."""
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    first = values.get(names[0]) if names else None
    size = None if first is None else first.shape[0]
    return size if isinstance(size, int) else None


# ---------------------------------------------------------------------- timm


def open_timm_network(path: Path, described: "ForeignModel") -> Runtime:
    """Build a network of timm with a classifier for the described classes, and load its tensors from a safetensors
    file.

    Raises:
        BadInput: If timm has no such network, or the file's tensors do not fit the network.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    import_torchvision(described.architecture)  # timm imports it, and fails with a traceback
    import timm  # takes seconds to import

    name = described.architecture.removeprefix("timm:")
    where = f"{path.name}: architecture"
    if not timm.is_model(name):  # a name such as hf-hub:... would be downloaded
        raise BadInput([Fault(where, f"timm has no network {name}.")])
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput([Fault(str(path), f"is no safetensors file: {_shorten(error)}")]) from None
    size = sum(tensor.nbytes for tensor in tensors.values())
    options: dict[str, Any] = {
        "pretrained": False,
        "num_classes": len(described.classes),
        "in_chans": described.channels,
    }
    try:
        with torch.random.fork_rng(devices=[]), limit_network_bytes(MAX_MEMORY_FACTOR * size + EXTRA_MEMORY_BYTES):
            try:
                network = timm.create_model(name, img_size=described.image_size, **options)
            except TypeError:  # most networks take images of any size, and have no such option
                network = timm.create_model(name, **options)
        network.load_state_dict(tensors)
    except NetworkTooLarge:
        raise BadInput([Fault(where, f"{name} is far larger than the tensors of {path.name}.")]) from None
    except RuntimeError as error:  # torch lists what is missing
        problem = f"its tensors are not those of {name} with {len(described.classes)} classes and "
        problem += f"{described.channels} channels: {_shorten(error)}"
        raise BadInput([Fault(str(path), problem, "Are architecture, classes and color right?")]) from None
    network.eval()

    def run(batch: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            outputs = network(torch.from_numpy(batch))
        return np.asarray(outputs.numpy(), np.float32)

    return run


# ---------------------------------------------------------------------- batches


def run_in_batches_of(size: int | None, run: Runtime) -> Runtime:
    """Return a runtime for any batch size that calls ``run`` with ``size`` images at a time; None means any size."""
    if size is None:
        return run

    def run_in_parts(batch: NDArray[Any]) -> NDArray[np.float32]:
        parts = []
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            # Fill up the last part with copies of its first image, and drop their outputs.
            filled = np.concatenate([part, np.repeat(part[:1], size - len(part), axis=0)])
            parts.append(run(filled)[: len(part)])
        return np.concatenate(parts)

    return run_in_parts


def _shorten(error: Exception) -> str:
    lines = " ".join(str(error).split())
    return make_printable_line(lines, 300)
