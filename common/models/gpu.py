"""Training on GPUs: deterministic results, batches split across several GPUs, CUDA graphs.

Data parallel: each GPU passes a part of the batch through the backbone; neck, head and loss process the whole batch on
the first GPU. :class:`torch.nn.parallel.DistributedDataParallel` has one loss for each part instead, which would change
methods whose loss compares the images of a batch (FedIRM, RSCFed).

CUDA graphs: with a small batch a large GPU waits for the CPU, which launches hundreds of kernels one by one in each
step. A graph launches all kernels together (:func:`torch.cuda.make_graphed_callables`).
"""

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

PARALLEL_ATTRIBUTE = "_data_parallel"
MIN_IMAGES_PER_GPU = 2
"""Minimum number of images on each GPU, because batch normalisation needs two; a smaller batch uses one GPU only."""


def split_batches_across_gpus(backbone: nn.Module, gpus: int) -> None:
    """Let a backbone split each batch across this number of GPUs; the backbone must be on the first GPU."""
    backbone.__dict__.pop(PARALLEL_ATTRIBUTE, None)
    if gpus > 1:
        backbone.__dict__[PARALLEL_ATTRIBUTE] = DataParallelBackbone(list_first_gpus(gpus))


def list_first_gpus(gpus: int) -> tuple[torch.device, ...]:
    """Return the devices of the first ``gpus`` GPUs that this process may use."""
    return tuple(torch.device("cuda", index) for index in range(gpus))


def count_visible_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return torch.cuda.device_count()


def describe_gpu_count(gpus: int) -> str:
    """Return a sentence that states this machine's number of GPUs, for the error of a user who requested more."""
    return f"this machine shows {gpus or 'no'} {'GPU' if gpus <= 1 else 'GPUs'}."


def is_data_parallel(backbone: nn.Module) -> bool:
    """Return True if a backbone splits its batches across several GPUs."""
    return PARALLEL_ATTRIBUTE in backbone.__dict__


@contextlib.contextmanager
def disable_multi_gpu_batches(backbone: nn.Module) -> Iterator[None]:
    """Switch off batch splitting across GPUs inside the ``with`` block, so that forward hooks see whole batches."""
    parallel = backbone.__dict__.pop(PARALLEL_ATTRIBUTE, None)
    try:
        yield
    finally:
        if parallel is not None:
            backbone.__dict__[PARALLEL_ATTRIBUTE] = parallel


class DataParallelBackbone:
    """Runs forward passes of a backbone on several devices, each with an equal part of the batch.

    Each step copies the weights to every device and adds up the gradients in the order of the devices, so that results
    are deterministic. Batch normalisation uses the statistics of each part; its running statistics are averaged over
    the devices.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)

    def __call__(self, backbone: nn.Module, images: Tensor) -> Tensor:
        """Return a batch's features ``(batch, width)``, on the device of ``images``."""
        if images.device != self.devices[0] or len(images) < MIN_IMAGES_PER_GPU * len(self.devices):
            return backbone(images)  # type: ignore[no-any-return]
        trained = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
        copies: Sequence[Tensor] = _CopyToDevices.apply(self.devices, *trained.values()) if trained else ()
        constants = {name: value.detach() for name, value in backbone.named_parameters() if name not in trained}
        # Copies of running statistics and other buffers, which a forward pass may write to.
        buffers_by_name = dict(backbone.named_buffers())
        buffers = [
            {name: value.to(device, copy=True) for name, value in buffers_by_name.items()} for device in self.devices
        ]
        parts = images.tensor_split(len(self.devices))
        features = []
        for index, (device, part, device_buffers) in enumerate(zip(self.devices, parts, buffers, strict=True)):
            weights = dict(zip(trained, copies[index * len(trained) :], strict=False))
            weights |= {name: value.to(device) for name, value in constants.items()}
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                features.append(torch.func.functional_call(backbone, weights | device_buffers, (part.to(device),)))
        # Ask each module, because a backbone may be frozen in part.
        if any(module.training for module in backbone.modules()):
            with torch.no_grad():
                for name, buffer in backbone.named_buffers():
                    changed = [device_buffers[name].to(buffer.device) for device_buffers in buffers]
                    # Add the mean change over the devices, so that an unchanged buffer keeps its bits.
                    if buffer.is_floating_point():
                        buffer += torch.stack([copy - buffer for copy in changed]).mean(dim=0)
                    else:
                        buffer.copy_(changed[0])
        return torch.cat([part.to(images.device) for part in features])


class _CopyToDevices(torch.autograd.Function):
    """Autograd function that copies tensors to every device and sums their gradients in the order of the devices.

    Without a fixed order the rounding of the sum would vary between runs with three or more devices.
    """

    @staticmethod
    def forward(context: Any, devices: Sequence[torch.device], *values: Tensor) -> tuple[Tensor, ...]:
        context.devices = devices
        context.set_materialize_grads(False)
        return tuple(
            value.view_as(value) if value.device == device else value.to(device)
            for device in devices
            for value in values
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        first_device = context.devices[0]
        tensor_count = len(gradients) // len(context.devices)
        sums: list[Tensor | None] = []  # None for a weight without a gradient on any device
        for index in range(tensor_count):
            parts = [gradient.to(first_device) for gradient in gradients[index::tensor_count] if gradient is not None]
            sums.append(functools.reduce(torch.add, parts) if parts else None)
        return (None, *sums)


GRAPH_ATTRIBUTE = "_replay"
GRAPH_DEVICES = ("cuda",)
"""Device types on which training steps can be recorded as CUDA graphs."""
STEPS_BEFORE_RECORDING = 20
"""Number of steps with one image shape before a graph is recorded, because recording takes as long as some
dozen steps.
"""

Step = Callable[[Tensor], Tensor]


class BackboneCudaGraph:
    """Runs training steps of a backbone by a recorded CUDA graph, with bit-identical results.

    A graph overwrites its results at each replay. So only the first forward pass of a step uses the graph, and its
    features are copied. Further forward passes of the step, evaluation, and batches of another size run without it.
    """

    def __init__(self) -> None:
        self._steps = Counter[torch.Size]()
        self._recorded_settings = tuple[object, ...]()
        self._shape = torch.Size()
        self._recorded: Step | None = None
        self._may_replay = False  # True from the start of a step to its first forward pass
        self._failed = False

    def __deepcopy__(self, memo: dict[int, object]) -> "BackboneCudaGraph":
        """Return a new object without a recorded graph, because a graph is bound to the memory of one backbone."""
        return BackboneCudaGraph()

    def discard_outdated_graph(self, backbone: nn.Module, more: object) -> None:
        """Discard the recorded graph if the backbone's tensors, its training mode or ``more`` (other settings) have
        changed.
        """
        parameters = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in backbone.parameters())
        buffers = tuple(buffer.data_ptr() for buffer in backbone.buffers())
        settings = (parameters, buffers, tuple(module.training for module in backbone.modules()), more)
        if settings != self._recorded_settings:
            self._recorded_settings = settings
            self._recorded = None
            self._steps.clear()

    def use_graph_in_next_pass(self) -> None:
        """Let the next forward pass use the graph; call this at the start of a training step."""
        self._may_replay = True

    def stop_using_graph(self) -> None:
        """Stop using the graph until the next call of :meth:`use_graph_in_next_pass`."""
        self._may_replay = False

    def __call__(self, backbone: nn.Module, images: Tensor) -> Tensor:
        """Return features ``(batch, width)`` of normalised images, by the graph if this forward pass may use it."""
        if self._failed or not self._may_replay or not torch.is_grad_enabled() or images.requires_grad:
            return backbone(images)  # type: ignore[no-any-return]
        self._may_replay = False
        if self._recorded is None:
            self._steps[images.shape] += 1  # the last batch of an epoch is smaller than the others
            if self._steps[images.shape] > STEPS_BEFORE_RECORDING:
                try:
                    self._shape = images.shape
                    self._recorded = record_cuda_graph(backbone, images)
                except RuntimeError:  # too little memory, or a layer that waits for the GPU
                    # Without a graph, steps are slower but have the same result.
                    self._failed = True
        if self._recorded is None or images.shape != self._shape:
            return backbone(images)  # type: ignore[no-any-return]
        return self._recorded(images).clone()


def record_cuda_graph(backbone: nn.Module, images: Tensor) -> Step:
    """Record a backbone's forward and backward pass as a CUDA graph; return the function that replays the graph.

    The graph is valid for this image shape and autocast setting. Recording changes neither the backbone's running
    statistics nor the state of the random generator.

    Raises:
        RuntimeError: If a layer cannot be recorded.
    """
    names, parameters = zip(*backbone.named_parameters(), strict=True)
    # Record tensors that share the parameters' memory, because a parameter in an unfinished backward pass cannot be
    # recorded.
    stand_ins = tuple(value.detach().requires_grad_(value.requires_grad) for value in parameters)
    buffers = [(buffer, buffer.clone()) for buffer in backbone.buffers()]
    kind = images.device.type
    random = torch.cuda.get_rng_state(images.device)

    def forward(pixels: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(backbone, dict(zip(names, values, strict=True)), (pixels,))  # type: ignore[no-any-return]

    try:
        enabled = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False), warnings.catch_warnings():
            # torch warms up on a separate stream, and warns that the stand-ins were made on another one.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
            example = (images.detach().clone(), *stand_ins)
            graphed: Any = torch.cuda.make_graphed_callables(forward, example, allow_unused_input=True)
    except RuntimeError:
        # Record an empty graph, because otherwise torch refuses the next random draw.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=images.device)
        raise
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.cuda.set_rng_state(random, images.device)
    return lambda pixels: graphed(pixels, *parameters)


@contextlib.contextmanager
def use_cuda_graphs(backbone: nn.Module, device: torch.device, more: object) -> Iterator[Callable[[], None]]:
    """Let the training steps of an epoch use a CUDA graph, if the device is a GPU.

    Args:
        backbone: A backbone without branches in Python, because a graph repeats the branch that was recorded.
        more: Further settings that a step depends on, such as the precision.

    Yields:
        The function to call at the start of each step.
    """
    if device.type != "cuda" or not any(parameter.requires_grad for parameter in backbone.parameters()):
        yield lambda: None
        return
    replay: BackboneCudaGraph = backbone.__dict__.setdefault(GRAPH_ATTRIBUTE, BackboneCudaGraph())
    replay.discard_outdated_graph(backbone, more)
    try:
        yield replay.use_graph_in_next_pass
    finally:
        replay.stop_using_graph()


Network = TypeVar("Network", bound=nn.Module)


def move_network_to_device(network: Network, device: str) -> Network:
    """Move a network to ``cpu`` or ``cuda``; for ``cuda`` also switch this process to deterministic algorithms."""
    if device != "cpu":
        use_deterministic_algorithms()
    return network.to(device)


def use_deterministic_algorithms() -> None:
    """Make cuDNN use deterministic algorithms, and float32 instead of the less exact TensorFloat-32."""
    # This is the older of torch's two switches; torch.export fails after the newer one, for convolutions alone.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def compute_backbone_features(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return features ``(batch, width)`` of normalised images, by several GPUs or a CUDA graph if these are switched
    on.
    """
    accelerator = backbone.__dict__.get(PARALLEL_ATTRIBUTE) or backbone.__dict__.get(GRAPH_ATTRIBUTE)
    return backbone(images) if accelerator is None else accelerator(backbone, images)  # type: ignore[no-any-return]
