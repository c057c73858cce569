"""A backbone's steps on a GPU as one piece.

A small batch leaves a large GPU waiting: the processor starts hundreds of kernels one by one for each step. A CUDA
graph starts them together (NVIDIA, "CUDA graphs"; :func:`torch.cuda.make_graphed_callables`).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

NAME = "_replay"
RECORD_AFTER = 20
"""Steps of one shape: to record takes as long as some dozen steps."""

Step = Callable[[Tensor], Tensor]


class BackboneGraph:
    """A backbone's steps as CUDA graphs, recorded once a process; the bits are those of the backbone itself.

    A graph writes to the same memory each time. So a step uses it for its first forward pass alone, and the features
    are copied; further views of a step, evaluation and batches of another size go through the backbone as ever.
    """

    def __init__(self) -> None:
        self._steps, self._like = Counter[torch.Size](), tuple[object, ...]()
        self._shape = torch.Size()
        self._recorded: Step | None = None
        self._free = False
        self._failed = False

    def __deepcopy__(self, memo: dict[int, object]) -> "BackboneGraph":
        """Begin anew: a graph belongs to the memory of one backbone."""
        return BackboneGraph()

    def begin_epoch(self, backbone: nn.Module, more: object) -> None:
        """Forget the graph where the backbone has moved, or is trained in another way than when it was recorded.

        Args:
            more: What else a step depends on.
        """
        parameters = tuple((one.data_ptr(), one.requires_grad) for one in backbone.parameters())
        buffers = tuple(one.data_ptr() for one in backbone.buffers())
        like = (parameters, buffers, tuple(module.training for module in backbone.modules()), more)
        if like != self._like:
            self._like, self._recorded = like, None
            self._steps.clear()

    def begin_step(self) -> None:
        """Allow the next forward pass to use the graph: what the last one left is not needed any more."""
        self._free = True

    def end_step(self) -> None:
        """Send all that follows through the backbone itself."""
        self._free = False

    def __call__(self, backbone: nn.Module, images: Tensor) -> Tensor:
        """Return features ``(batch, width)`` of images as the backbone sees them."""
        if self._failed or not self._free or not torch.is_grad_enabled() or images.requires_grad:
            return backbone(images)  # type: ignore[no-any-return]
        self._free = False
        if self._recorded is None:
            self._steps[images.shape] += 1  # the last batch of an epoch is smaller than the others
            if self._steps[images.shape] > RECORD_AFTER:
                self._shape, self._recorded = images.shape, self._tried(backbone, images)
        if self._recorded is None or images.shape != self._shape:
            return backbone(images)  # type: ignore[no-any-return]
        return self._recorded(images).clone()

    def _tried(self, backbone: nn.Module, images: Tensor) -> Step | None:
        try:
            return recorded(backbone, images)
        except RuntimeError:  # too little memory, or a layer that waits for the GPU: slower without, and not wrong
            self._failed = True
            return None


def recorded(backbone: nn.Module, images: Tensor) -> Step:
    """Record forward and backward pass for images of this shape, in the arithmetic at work.

    Running means and the state of random numbers are afterwards as before.

    Raises:
        RuntimeError: If a layer cannot be recorded; the backbone is as before then, too.
    """
    names, parameters = zip(*backbone.named_parameters(), strict=True)
    # Stand-ins in the same memory: a parameter that has a part in an unfinished backward pass cannot be recorded.
    stand_ins = tuple(one.detach().requires_grad_(one.requires_grad) for one in parameters)
    buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]
    kind, random = images.device.type, torch.cuda.get_rng_state(images.device)

    def forward(pixels: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(backbone, dict(zip(names, values, strict=True)), (pixels,))  # type: ignore[no-any-return]

    try:
        asked, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype=dtype, enabled=asked, cache_enabled=False), warnings.catch_warnings():
            # torch warms up on a stream of its own, and warns that the stand-ins were made on another.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            example = (images.detach().clone(), *stand_ins)
            made: Any = torch.cuda.make_graphed_callables(forward, example, allow_unused_input=True)
    except RuntimeError:
        _end_recording(images.device)
        raise
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.cuda.set_rng_state(random, images.device)
    return lambda pixels: made(pixels, *parameters)


def _end_recording(device: torch.device) -> None:
    """Let random numbers be drawn again: after one that failed, torch takes the next draw for a part of it."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)


@contextlib.contextmanager
def replayed(backbone: nn.Module, device: torch.device, more: object) -> Iterator[Callable[[], None]]:
    """Have an epoch's steps use graphs on a GPU; yields what each step begins with.

    Args:
        backbone: One whose steps are all alike; what Python decides anew in each step would stay as it was recorded.
        more: What else a step depends on: the precision.
    """
    if device.type != "cuda" or not any(parameter.requires_grad for parameter in backbone.parameters()):
        yield lambda: None
        return
    replay: BackboneGraph = backbone.__dict__.setdefault(NAME, BackboneGraph())
    replay.begin_epoch(backbone, more)
    try:
        yield replay.begin_step
    finally:
        replay.end_step()
