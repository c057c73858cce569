"""Our programs, which die at a named point or are lied to by their machine, once; started again they are themselves.

    python -m tests.network.dying MARKER POINT VICTIM server run ...       what leads dies, or kills VICTIM
    python -m tests.network.dying MARKER POINT VICTIM supervised run ...   flwr-server run whose child is that
    python -m tests.network.dying MARKER POINT 0 client start DIR          a site dies
    python -m tests.network.dying MARKER POINT 0 serving start DIR         flwr-server start, whose SuperLink is lied to

``MARKER`` is a file that is there once it has happened; to the SuperLink it happens for as long as the file is there.
"""

import datetime
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROUND = 2
"""In which it happens."""


class Death:
    """What happens, once."""

    def __init__(self, marker: Path, victim: int) -> None:
        self.marker, self._victim = marker, victim

    def kill(self) -> None:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(self._victim or os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        """Raise an exception that nobody expects."""
        if not self.marker.exists():
            self.marker.touch()
            raise ZeroDivisionError("a defect")

    def set_clock(self, point: str) -> Callable[[], None]:
        """Set the clock of this process by the hours that a point names."""

        def set_it() -> None:
            wrong_clock(lambda: float(point.split()[1]))
            self.marker.touch()

        return set_it


def at(owner: Any, name: str, death: Callable[[], None], hits: Callable[..., bool], *, after: bool = False) -> None:
    """Have ``death`` come before or after a call of a function whose arguments it ``hits``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def dying(*arguments: Any, **options: Any) -> Any:
        hit = hits(*arguments, **options)
        if hit and not after:
            death()
        result = original(*arguments, **options)
        if hit and after:
            death()
        return result

    setattr(owner, name, dying)


def half_a_file(death: Callable[[], None], module: Any, name: str) -> None:
    """Write half of a file of this name beside it, then die."""
    from polyclinic.common.system.files import make_temporary_path

    original = module.write_atomically

    def dying(path: Path, content: Any, **options: Any) -> None:
        if path.name == name:
            whole = content if isinstance(content, bytes) else b"".join(content)
            make_temporary_path(path).write_bytes(whole[: len(whole) // 2])
            death()
        original(path, content, **options)

    module.write_atomically = dying


def disk_full(marker: Path, module: Any, name: str) -> None:
    """From the first file of this name on there is no room for any, until somebody removes the marker."""
    original, begun = module.write_atomically, list[str]()

    def full(path: Path, content: Any, **options: Any) -> None:
        if path.name == name and not begun:
            begun.append(name)
            marker.touch()
        if begun and marker.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content, **options)

    module.write_atomically = full


def wrong_clock(off: Callable[[], float]) -> None:
    """Let this process's clock be some hours off.

    But for gRPC: its Python half makes deadlines that its C half, which no lie here reaches, compares with the clock. A
    machine whose clock is really set has one for both.
    """
    import grpc._channel

    true_time = time.time
    grpc._channel.time = SimpleNamespace(**vars(time))
    time.time = lambda: true_time() + 3600 * off()

    class Wrong(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(hours=off())

    wrong = SimpleNamespace(**{**vars(datetime), "datetime": Wrong})
    for module in list(sys.modules.values()):
        now = vars(module).get("now")
        if getattr(now, "__module__", "").startswith("flwr."):  # Flower's clock, wherever Flower has it
            vars(module)["now"] = lambda true_now=now: true_now() + datetime.timedelta(hours=off())
        if vars(module).get("dt") is datetime:
            vars(module)["dt"] = wrong


def pushed(grid: Any, messages: Any) -> bool:
    return any(message.metadata.group_id == str(ROUND) for message in messages)


def noted(grid: Any, announced: Any) -> bool:
    return pushed(grid, [grid._requests[announced.status.request].message])


def updated(method: Any, server_round: int, means: Any, moments: Any) -> bool:
    return server_round == ROUND


def on_the_coordinator(point: str, death: Death) -> None:
    """Patch what leads a run."""
    from polyclinic.server.deployment.superlink.network_grid import NetworkGrid
    from polyclinic.server.federation import checkpoints
    from polyclinic.server.runs.reporter import RunReporter
    from polyclinic.strategies.engine import coordinator as engine
    from polyclinic.strategies.engine.coordinator import Coordinator

    checkpoint = f"round-{ROUND:06d}"

    match point:
        case "before sending" | "after sending":
            at(NetworkGrid, "push_messages", death.kill, pushed, after=point == "after sending")
        case "with a reply that it has not noted":
            at(NetworkGrid, "_assemble_reply_message", death.kill, noted, after=True)
        case "in aggregation":
            at(engine, "update_global_model", death.kill, updated)
        case "our own mistake":
            at(engine, "update_global_model", death.fail, updated)
        case "half-way through a checkpoint's state":
            half_a_file(death.kill, checkpoints, f"{checkpoint}.safetensors")
        case "between a checkpoint's two files":
            half_a_file(death.kill, checkpoints, f"{checkpoint}.json")
        case "between two rounds":
            at(RunReporter, "show_finished_round", death.kill, lambda reporter, record, state: record.round == ROUND)
        case "disk full":
            disk_full(death.marker, checkpoints, f"{checkpoint}.safetensors")
        case "clock +1" | "clock -1":
            at(Coordinator, "configure_train", death.set_clock(point), lambda loop, number, *rest: number == ROUND)


def at_the_site(point: str, death: Death) -> None:
    """Patch a site's program."""
    from polyclinic.client.connection.fleet_client import FleetClient
    from polyclinic.client.site import memory
    from polyclinic.client.training import local_round

    sending, file = list[bool](), f"round-{ROUND:06d}.safetensors"

    def replied(link: Any, received: bytes, reply: Any) -> bool:
        if hit := reply.metadata.group_id == str(ROUND) and reply.metadata.message_type == "train":
            sending.append(True)
        return hit

    def remembered(work: Any, request: Any, *rest: Any) -> bool:
        return request.round == ROUND

    match point:
        case "while training":
            at(local_round, "compute_update_to_send", death.kill, lambda task, *rest: task.memory.round == ROUND - 1)
        case "after its memory is written":
            at(local_round, "write_round_state", death.kill, remembered, after=True)
        case "half-way through its memory":
            half_a_file(death.kill, memory, file)
        case "before it sends" | "after it has sent":
            at(FleetClient, "send_reply", death.kill, replied, after=point == "after it has sent")
        case "while it sends":
            at(FleetClient, "send_reply", lambda: None, replied)
            at(FleetClient, "_send_message_object", death.kill, lambda *arguments: bool(sending), after=True)
        case "clock +1" | "clock -1":
            at(local_round, "write_round_state", death.set_clock(point), remembered)
        case "disk full":
            disk_full(death.marker, memory, file)


def main() -> None:
    """Do what the command line says."""
    marker, point, victim, program, *arguments = sys.argv[1:]
    death, again = (
        Death(Path(marker), int(victim)),
        (sys.executable, "-m", "tests.network.dying", marker, point, victim),
    )
    if program == "superlink":
        from polyclinic.server.deployment.superlink import program as superlink

        hours = float(point.split()[1])
        wrong_clock(lambda: hours * death.marker.exists())
        sys.argv[1:] = arguments
        superlink.main()
    elif program == "client":
        from polyclinic.client.cli import main as client_main

        if not death.marker.exists():
            at_the_site(point, death)
        client_main(arguments)
    else:
        from polyclinic.server import cli
        from polyclinic.server.deployment import supervisor
        from polyclinic.server.deployment.superlink import process

        command = process.make_superlink_command
        if program == "supervised":
            supervisor.LEADER_COMMAND = (*again, "server")
        elif program == "serving":
            process.make_superlink_command = lambda coordinator: [
                *again,
                "superlink",
                *command(coordinator)[command(coordinator).index("--state") :],
            ]
        elif not death.marker.exists():
            on_the_coordinator(point, death)
        cli.main(arguments)


if __name__ == "__main__":
    main()
