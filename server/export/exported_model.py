"""``flwr-sim export``: a trained model as one file for other runtimes, which says the same on real images."""

import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from common import __version__
from common.errors import CannotGoOn, Fault, stop_on
from common.models.inference import probabilities
from common.models.network import SplitNetwork
from common.models.saved import SavedModel, load_model, read_description
from common.models.trained import merge
from common.system.files import atomic_outputs, part_of, taken
from server.export.before_torch import ExportFormat

TOLERANCE = 1e-4
INPUT, OUTPUT = "images", "probabilities"
METADATA = "polyclinic.json"
"""In a TorchScript file."""
Pixels = NDArray[np.uint8]
Scores = NDArray[np.float32]


NEEDS = {ExportFormat.onnx: ("onnx", "onnxruntime", "onnxscript"), ExportFormat.torchscript: ()}


class OutputsDiffer(CannotGoOn):
    """The exported model says something else than ours; it was not kept."""


@dataclass(frozen=True)
class ExportCheck:
    """An exported model, compared with ours on ``images`` images."""

    path: Path
    images: int
    largest_difference: float


class FromPixels(nn.Module):
    """Pixels as they are in a file to probabilities: resize, normalisation, network, sigmoid or softmax."""

    def __init__(self, network: SplitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Probabilities ``(batch, classes)`` of pixels 0..255, ``(batch, channels, height, width)`` of any size.

        Always resizes, which leaves images of the right size as they are: a graph cannot ask as the network does.
        """
        size = self.network.spec.image_size
        resized = functional.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
        return probabilities(self.network(resized), self.network.spec.task)


def export_model(folder: Path, form: ExportFormat, destination: Path, pixels: Sequence[Pixels]) -> ExportCheck:
    """Write the model of ``folder`` to a new file, if it says the same there.

    Args:
        destination: Is there only when all is well.
        pixels: Images to compare on, batches ``(n, channels, height, width)`` with the model's channels.

    Raises:
        BadInput: If the folder holds no model, a library is missing, or the destination is taken.
        OutputsDiffer: If a probability differs by more than ``TOLERANCE``; no file is left.
    """
    faults = [*missing_libraries(form), *taken(destination)]
    saved = read_description(folder)
    stop_on(faults)
    network = load_model(folder)
    merge(network.backbone)
    model = FromPixels(network).eval().requires_grad_(False)
    part = part_of(destination)
    with atomic_outputs(destination, part):
        run = _WRITERS[form](model, metadata(saved), part)
        worst = float(np.max([largest_difference(model, run, batch) for batch in pixels]))  # NaN stays
        if not worst <= TOLERANCE:
            problem = f"the exported model's probabilities differ from ours by up to {worst:.2g}"
            raise OutputsDiffer(f"{problem}, more than {TOLERANCE:g}; {destination} was not written")
        part.replace(destination)
    return ExportCheck(destination, sum(map(len, pixels)), worst)


def missing_libraries(form: ExportFormat) -> list[Fault]:
    """What a form of file cannot be written and checked without."""
    missing = [name for name in NEEDS[form] if importlib.util.find_spec(name) is None]
    problem = f"needs {', '.join(missing)}, not installed here."
    return [Fault(f"--to {form}", problem, "pip install 'polyclinic[export]'")] if missing else []


def metadata(saved: SavedModel) -> dict[str, str]:
    """What the file says of itself, by key."""
    channels = "grey" if saved.model.channels == 1 else "RGB, in this order"
    return {
        "class_names": json.dumps(saved.class_names, ensure_ascii=False),
        "task": saved.model.task,
        "input": f"{INPUT}: uint8 (batch, {saved.model.channels}, height, width), pixels 0..255, {channels}; any size",
        "output": f"{OUTPUT}: float32 (batch, {len(saved.class_names)}), in the order of class_names",
        "preprocessing": f"all inside: bilinear antialiased resize to {saved.model.image_size} x "
        f"{saved.model.image_size}, (pixel / 255 - mean) / std with mean {list(saved.model.normalisation.mean)}, "
        f"std {list(saved.model.normalisation.std)}",
        "label_contract_sha256": saved.label_contract_sha256,
        "model_sha256": saved.model_sha256,
        "producer": f"polyclinic {__version__}",
    }


def largest_difference(model: nn.Module, run: Callable[[Pixels], Scores], batch: Pixels) -> float:
    """Between the probabilities of both; the first image also by itself. NaN where one of them is not finite."""
    pairs = [(ours(model, some), run(some)) for some in (batch[:1], batch)]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    return float(np.max([np.abs(one - other).max() for one, other in pairs]))


def ours(model: nn.Module, batch: Pixels) -> Scores:
    """What the model in this process says."""
    with torch.no_grad():
        scores: Scores = model(torch.from_numpy(batch)).numpy()
    return scores


def _write_onnx(model: FromPixels, facts: dict[str, str], path: Path) -> Callable[[Pixels], Scores]:
    import onnxruntime

    program = torch.onnx.export(
        model,
        (_example(model),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes={"images": {0: "batch", 2: "height", 3: "width"}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(facts)
    program.save(str(path), external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: np.asarray(session.run([OUTPUT], {INPUT: batch})[0])


def _write_torchscript(model: FromPixels, facts: dict[str, str], path: Path) -> Callable[[Pixels], Scores]:
    with warnings.catch_warnings():
        # torch calls TorchScript deprecated, and warns of sizes that a trace takes for constant, as they are here:
        # the first step brings every image to one size. The comparison is of other sizes than the trace.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (_example(model),), check_trace=False)  # type: ignore[no-untyped-call]
        whole = io.BytesIO()  # on a full disk torch would end the process where it writes to a path
        torch.jit.save(traced, whole, _extra_files={METADATA: json.dumps(facts, ensure_ascii=False)})
        path.write_bytes(whole.getbuffer())
        loaded = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return lambda batch: ours(loaded, batch)


def _example(model: FromPixels) -> Tensor:
    """Two images of a size that the model does not have, so that no dimension is taken for constant."""
    size = model.network.spec.image_size
    return torch.zeros(2, model.network.spec.channels, size + 5, size + 3, dtype=torch.uint8)


_WRITERS: dict[ExportFormat, Callable[[FromPixels, dict[str, str], Path], Callable[[Pixels], Scores]]] = {
    ExportFormat.onnx: _write_onnx,
    ExportFormat.torchscript: _write_torchscript,
}
