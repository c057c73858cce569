"""All that is known to cost time on a GPU, in one call that keeps to a budget: ours beside a bare loop on one device.

python benchmarks/gpu_all.py [--budget 540] [--only rounds,model,...] [--out gpu.jsonl]
python benchmarks/gpu_all.py --device cpu --budget 60           # tries the program itself where there is no GPU

Parts, those first from which most is expected:

rounds   images a second of whole runs: a bare loop with our bits, the same with the model on the device for a whole
         round, ours without CUDA graphs, ours
model    milliseconds of one site's visit without its training: load the received model, read the trained one, their
         difference and its lengths, as we do it and with all on the device
copies   GB a second of a model between memory and device: ordinary and pinned memory, alone and beside work
workers  images a second and memory with 1, 2 and 4 Ray workers; how often the data set lies in memory
batches  milliseconds to get a batch of images on the device: from ordinary and pinned memory, read ahead, and there
graphs   milliseconds of a backbone's step, kernel by kernel and as a CUDA graph

Each result is a line of JSON with hardware and versions, printed and appended to FILE as it comes. A part runs in a
process of its own, which is stopped when its share of the budget is over; what it has written until then stays. Time
that a part leaves goes to the later ones.
"""

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

Line = dict[str, Any]
HERE = Path(__file__).parent
SHARES = {"rounds": 10, "model": 3, "copies": 1, "workers": 6, "batches": 2, "graphs": 3}
"""Part -> its share of the budget."""
LEAST_PART_S = 3.0
LEAST_SET_MB = 20.0
"""Of a smaller data set the copies cannot be told from noise in the memory."""
NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Sizes:
    """How much the parts do.

    Attributes:
        rounds: Network and side of an image of the runs, in order.
        workers: The same of the runs on Ray, and the numbers of images of a site with a small and a large data set.
        models: Networks whose model is moved.
        copies_mb: Sizes of the models that are copied, in MB.
        batches: Side of an image, and number of images.
        repeat_s: Seconds for which a single operation is repeated.
    """

    rounds: Sequence[tuple[str, int]]
    sites: int
    images: int
    count: int
    workers: tuple[str, int, int, int]
    models: Sequence[tuple[str, int]]
    copies_mb: Sequence[int]
    batches: tuple[int, int]
    repeat_s: float


SIZES = {
    "cuda": Sizes(
        (("resnet18", 64), ("tiny_cnn", 28), ("resnet18", 224), ("efficientnet_lite0", 224)),
        sites=4,
        images=1056,
        count=5,
        workers=("resnet18", 64, 352, 3520),
        models=(("resnet18", 64), ("timm:vit_base_patch16_224", 224)),
        copies_mb=(45, 344),
        batches=(224, 4096),
        repeat_s=1.0,
    ),
    "cpu": Sizes(
        (("tiny_cnn", 16),),
        sites=2,
        images=80,
        count=4,
        workers=("tiny_cnn", 16, 40, 400),
        models=(("tiny_cnn", 16),),
        copies_mb=(5,),
        batches=(64, 256),
        repeat_s=0.1,
    ),
}


# ---------------------------------------------------------------------- the parts, each in a process of its own


def measure_rounds(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each network and contender; ours and the bare loop must end in one model on a CPU."""
    from simulation import Case

    names = ("bare", "resident", "eager", "inline") if device == "cuda" else ("bare", "resident", "inline")
    for model, side in sizes.rounds:
        case = Case(model, sizes.sites, sizes.images, sizes.count, epochs=1, batch=32, given_side=side)
        with tempfile.TemporaryDirectory() as scratch:
            experiment = case.write(Path(scratch) / "case")
            for name in names:
                yield {"model": model, "side": side, "contender": name, **train_once(case, name, experiment, device)}


def train_once(case: Any, contender: str, experiment: Path, device: str) -> Line:
    """Train a case once; the first two rounds do not count, because graphs are recorded in them."""
    import torch
    from simulated_run import bare, ours, resident

    from polyclinic.common.models import gpu

    stamps = experiment.with_name(f"stamps-{contender.replace(':', '')}")
    before = gpu.STEPS_BEFORE_RECORDING
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with MemoryWatch(device) as memory:
        try:
            if contender == "bare":
                sha256 = bare(experiment, stamps)
            elif contender == "resident":
                sha256 = resident(experiment, stamps)
            else:
                gpu.STEPS_BEFORE_RECORDING = sys.maxsize if contender == "eager" else before
                sha256 = ours(experiment, stamps, "inline" if contender == "eager" else contender)
        finally:
            gpu.STEPS_BEFORE_RECORDING = before
    lines = [line.split() for line in stamps.read_text(encoding="ascii").splitlines()]
    rounds = [(float(line[1]), float(line[2])) for line in lines if line[0] == "round"][2:]
    pairs = list(itertools.pairwise(rounds))
    rates = [case.sites * case.images * case.epochs / (after[0] - start[0]) for start, after in pairs]
    return {
        "images_a_second": round(statistics.median(rates), 1),
        "mean_images_a_second": round(statistics.fmean(rates), 1),
        "range": [round(min(rates), 1), round(max(rates), 1)],
        "cpu_s_a_round": round(statistics.fmean(after[1] - start[1] for start, after in pairs), 3),
        "memory_mb": memory.peak_mb,
        "sha256": sha256[:16],
    }


def measure_model_visit(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each network and step of a site's visit."""
    for model, side in sizes.models:
        yield from measure_visit_with_model(model, side, device, sizes.repeat_s)


def measure_visit_with_model(model: str, side: int, device: str, repeat_s: float) -> Iterator[Line]:
    """Yield a line for each step of a site's visit."""
    import torch

    from polyclinic.client.training.local_round import compute_model_difference
    from polyclinic.common.models.gpu import move_network_to_device
    from polyclinic.common.models.network import build_network
    from polyclinic.common.models.state import read_model_state, write_model_state
    from polyclinic.common.models.zoo.spec import ModelSpec
    from polyclinic.strategies.aggregation.bounds import compute_update_part_norms
    from polyclinic.strategies.registry import build_strategy

    method, rows = build_strategy("fedavg", {}).site, ("a", "b")
    spec = ModelSpec(architecture=model, channels=1, image_size=side)
    network = move_network_to_device(build_network(spec, rows, seed=0), device)
    received = read_model_state(network)
    update = compute_model_difference(received, received, method, rows)
    tensors = [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
    there = [tensor.detach().clone() for tensor in tensors]
    differences = [tensor.detach().clone() for tensor in tensors]

    def load_received() -> None:
        write_model_state(network, trunk=received.trunk, norm=received.norm, head=received.head)

    def load_on_device() -> None:
        with torch.no_grad():
            torch._foreach_copy_(tensors, there)

    def subtract_on_device() -> None:
        with torch.no_grad():
            torch._foreach_copy_(differences, tensors)
            torch._foreach_sub_(differences, there)

    steps: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "load the received model": (load_received, load_on_device),
        "read the trained model": (lambda: read_model_state(network), None),
        "difference": (lambda: compute_model_difference(received, received, method, rows), subtract_on_device),
        "lengths of parts": (
            lambda: compute_update_part_norms(update),
            lambda: torch.stack(torch._foreach_norm(differences)).norm().item(),
        ),
    }
    numbers = sum(tensor.numel() for tensor in tensors)
    for name, (ours, bare) in steps.items():
        line: Line = {"model": model, "numbers": numbers, "step": name}
        line["ours_ms"] = measure_milliseconds(ours, device, repeat_s)
        line["on_device_ms"] = None if bare is None else measure_milliseconds(bare, device, repeat_s)
        yield line


def measure_copies(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each size, kind of memory and direction."""
    if device == "cpu":
        yield {"unavailable": "a CPU has no memory of its own to copy to"}
    for megabytes, pinned, to_device in itertools.product(sizes.copies_mb, (False, True), (True, False)):
        if device == "cuda" or not pinned:
            yield measure_copy(megabytes, device, sizes.repeat_s, pinned=pinned, to_device=to_device)


def measure_copy(megabytes: int, device: str, repeat_s: float, *, pinned: bool, to_device: bool) -> Line:
    """Return the line of one copy, alone and beside work of the device on another stream."""
    import torch

    numbers, side = megabytes * 250_000, 2048 if device == "cuda" else 128
    here, there = torch.empty(numbers, pin_memory=pinned), torch.empty(numbers, device=device)
    factor = torch.randn(side, side, device=device)
    target, source = (there, here) if to_device else (here, there)
    stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def work() -> None:
        for _ in range(20):
            torch.mm(factor, factor)

    def copy_beside_work() -> None:
        with torch.cuda.stream(stream):
            copy()
        work()

    alone_ms = measure_milliseconds(copy, device, repeat_s)
    return {
        "megabytes": megabytes,
        "memory": "pinned" if pinned else "ordinary",
        "direction": "to the device" if to_device else "from the device",
        "ms": alone_ms,
        "gb_a_second": round(megabytes / max(alone_ms, 1e-3), 2),
        "work_ms": measure_milliseconds(work, device, repeat_s),
        "both_at_once_ms": measure_milliseconds(copy_beside_work, device, repeat_s),
    }


def measure_workers(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each number of workers, with a small and a large set, and how often the set lies in memory."""
    from simulation import Case

    model, side, few, many = sizes.workers
    for contender in ("inline", "ray:2", "ray:4"):
        memory_mb = list[float]()
        for images in (few, many):
            case = Case(model, 4, images, 4, epochs=1, batch=32, given_side=side)
            with tempfile.TemporaryDirectory() as scratch:
                experiment = case.write(Path(scratch) / "case")
                result = train_once(case, contender, experiment, device)
            memory_mb.append(result["memory_mb"])
            yield {"model": model, "contender": contender, "images_a_site": images, **result}
        set_mb = 4 * (many - few) * side * side / 1e6
        held = (memory_mb[1] - memory_mb[0]) / set_mb
        copies = round(held, 2) if set_mb >= LEAST_SET_MB else None
        yield {"contender": contender, "set_mb": round(set_mb, 2), "copies_of_the_set": copies}


def measure_batches(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each place where the images lie."""
    import torch

    side, count = sizes.batches
    stored = torch.randint(0, 256, (count, 1, side, side), dtype=torch.uint8)
    places = {"ordinary memory": stored, "the device": stored.to(device)}
    if device == "cuda":
        places["pinned memory"] = stored.pin_memory()
    rows = torch.randperm(count)[: count // 32 * 32].view(-1, 32)
    for place, images in places.items():
        pinned = place == "pinned memory"

        def read_epoch(images: Any = images, pinned: bool = pinned) -> None:
            for batch in rows:
                index = batch.to(images.device)
                pixels = images[index].pin_memory() if pinned else images[index]
                pixels.to(device, non_blocking=pinned).float()

        epoch_ms = measure_milliseconds(read_epoch, device, sizes.repeat_s)
        yield {"side": side, "images_in": place, "ms_a_batch": round(epoch_ms / len(rows), 4)}


def measure_graphs(sizes: Sizes, device: str) -> Iterator[Line]:
    """Yield a line for each network."""
    import torch

    from polyclinic.common.models import gpu
    from polyclinic.common.models.network import autocast, build_network
    from polyclinic.common.models.zoo.spec import ModelSpec

    if device == "cpu":
        yield {"unavailable": "a CPU records no graphs: the step is kernel by kernel"}
    for model, side in sizes.rounds:
        spec = ModelSpec(architecture=model, channels=1, image_size=side)
        backbone = gpu.move_network_to_device(build_network(spec, ("",), seed=0), device).backbone.train()
        images = torch.rand(32, 1, side, side, device=device).to(memory_format=torch.channels_last)

        def make_step(forward: gpu.Step, backbone: Any = backbone, images: Any = images) -> Callable[[], None]:
            def step() -> None:
                with autocast(images.device, "bf16" if device == "cuda" else "float32"):
                    features = forward(images)
                features.float().square().mean().backward()  # type: ignore[no-untyped-call]
                backbone.zero_grad(set_to_none=True)

            return step

        line: Line = {"model": model, "side": side}
        line["kernel_by_kernel_ms"] = measure_milliseconds(make_step(backbone), device, sizes.repeat_s)
        if device == "cuda":
            with autocast(images.device, "bf16"):
                graph = gpu.record_cuda_graph(backbone, images)
            line["graph_ms"] = measure_milliseconds(make_step(graph), device, sizes.repeat_s)
        yield line


PARTS: Mapping[str, Callable[[Sizes, str], Iterator[Line]]] = {
    "rounds": measure_rounds,
    "model": measure_model_visit,
    "copies": measure_copies,
    "workers": measure_workers,
    "batches": measure_batches,
    "graphs": measure_graphs,
}


def measure_milliseconds(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Return the median time of an operation that is repeated for so many seconds, three times at least."""
    import torch

    times = list[float]()
    ends = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times[1:]), 4)


@dataclass
class MemoryWatch:
    """The most memory in use on the GPU, of all processes; on a CPU that of this process and all that it starts."""

    device: str
    peak_mb: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "MemoryWatch":
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._read_mb())
            if self._over.wait(0.3):
                return

    def _read_mb(self) -> float:
        if self.device == "cuda":
            used = subprocess.run([*NVIDIA_SMI, "--query-gpu=memory.used"], capture_output=True, text=True, check=False)
            return float(used.stdout.split()[0]) if used.stdout.split() else 0.0
        total, own = 0, psutil.Process()
        for process in (own, *own.children(recursive=True)):
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            total += memory.rss - memory.shared
        return round(total / 1e6, 1)


# ---------------------------------------------------------------------- the budget


def describe_machine(device: str) -> Line:
    """Return hardware and versions."""
    versions = {name: version(name) for name in ("torch", "numpy", "flwr", "ray")}
    machine: Line = {"device": device, "cores": os.cpu_count(), "python": platform.python_version(), **versions}
    if device == "cuda":
        query = "--query-gpu=name,driver_version,memory.total"
        shown = subprocess.run([*NVIDIA_SMI, query], capture_output=True, text=True, check=False)
        machine["gpu"] = shown.stdout.strip()
    return machine


def run_part(name: str, device: str, seconds: float) -> Iterator[Line]:
    """Yield the lines of a part, and why it ended if it did not come to its end."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(HERE / "gpu_all.py"), "--device", device, "--part", name]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert child.stdout is not None
            for text in child.stdout:
                if text.startswith("{"):
                    yield json.loads(text)
            child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if stopped.is_set():
            yield {"stopped": f"after its {seconds:.0f} s of the budget"}
        elif child.returncode:
            errors.seek(0)
            yield {"failed": errors.read()[-600:]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all parts, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of the whole call")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        for line in PARTS[arguments.part](SIZES[arguments.device], arguments.device):
            print(json.dumps(line), flush=True)
        return
    began, machine = time.monotonic(), describe_machine(arguments.device)
    machine["date"] = datetime.now(UTC).date().isoformat()
    waiting = [name for name in PARTS if name in arguments.only.split(",")]
    with arguments.out.open("a", encoding="utf-8") as file:
        while waiting:
            name, *waiting = waiting
            remaining = began + arguments.budget - time.monotonic()
            seconds = remaining * SHARES[name] / (SHARES[name] + sum(SHARES[later] for later in waiting))
            lines: Iterator[Line] = iter([{"skipped": f"its share of the budget is {seconds:.1f} s"}])
            if seconds > LEAST_PART_S:
                lines = run_part(name, arguments.device, seconds)
            for line in lines:
                elapsed = round(time.monotonic() - began, 1)
                text = json.dumps({"part": name, **line, "at_s": elapsed, **machine})
                file.write(text + "\n")
                file.flush()
                print(text, flush=True)


if __name__ == "__main__":
    main()
