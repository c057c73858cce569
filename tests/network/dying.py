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

    @property
    def came(self) -> bool:
        return self.marker.exists()

    def come(self) -> None:
        if not self.came:
            self.marker.touch()
            os.kill(self._victim or os.getpid(), signal.SIGKILL)


def at(owner: Any, name: str, death: Callable[[], None], wanted: Callable[..., bool], *, after: bool = False) -> None:
    """Have ``death`` come before or after a call of a function that is ``wanted`` by its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def dying(*arguments: Any, **options: Any) -> Any:
        hit = wanted(*arguments, **options)
        if hit and not after:
            death()
        result = original(*arguments, **options)
        if hit and after:
            death()
        return result

    setattr(owner, name, dying)


def of_round(messages: Any) -> bool:
    return any(message.metadata.group_id == str(ROUND) for message in messages)


def half_a_file(death: Callable[[], None], module: Any, wanted: Callable[[str], bool]) -> None:
    """Write half of a file beside it, then die."""
    from common.system.files import partial_path

    original = module.write_atomically

    def dying(path: Path, content: Any, **options: Any) -> None:
        if wanted(path.name):
            whole = content if isinstance(content, bytes) else b"".join(content)
            partial_path(path).write_bytes(whole[: len(whole) // 2])
            death()
        original(path, content, **options)

    module.write_atomically = dying


def disk_full(death: Death, module: Any, wanted: Callable[[str], bool]) -> None:
    """From the first such file on there is no room for any, until somebody removes the marker."""
    original, begun = module.write_atomically, list[str]()

    def full(path: Path, content: Any, **options: Any) -> None:
        if wanted(path.name) and not begun:
            begun.append(path.name)
            death.marker.touch()
        if begun and death.came:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, content, **options)

    module.write_atomically = full


def set_clock(death: Death, hours: float) -> None:
    """Set the clock of this process, for everything that asks the machine for the time of day."""
    wrong_clock(lambda: hours)
    death.marker.touch()


def clock_while(marker: Path, hours: float) -> None:
    """The clock of this process is wrong for as long as a file is there."""
    wrong_clock(lambda: hours * marker.exists())


def wrong_clock(off: Callable[[], float]) -> None:
    """Let this process's clock be some hours off.

    But for gRPC: its Python half makes deadlines that its C half, which no lie here reaches, compares with the clock. A
    machine whose clock is really set has one for both.
    """
    import flwr.supercore.date
    import grpc._channel

    true_time, true_now = time.time, flwr.supercore.date.now
    grpc._channel.time = SimpleNamespace(**vars(time))
    time.time = lambda: true_time() + 3600 * off()

    class Wrong(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(hours=off())

    wrong = SimpleNamespace(**{**vars(datetime), "datetime": Wrong})
    for module in list(sys.modules.values()):
        if vars(module).get("now") is true_now:
            vars(module)["now"] = lambda: true_now() + datetime.timedelta(hours=off())
        if vars(module).get("dt") is datetime:
            vars(module)["dt"] = wrong


def on_the_coordinator(point: str, death: Death) -> None:
    """Patch what leads a run."""
    import server.federation.checkpoints
    import server.runs.reporter
    import strategies.engine.coordinator
    from server.deployment.superlink.network_grid import NetworkGrid

    loop = strategies.engine.coordinator.Coordinator
    checkpoint = f"round-{ROUND:06d}"
    match point:
        case "before sending":
            at(NetworkGrid, "push_messages", death.come, lambda grid, messages: of_round(messages))
        case "after sending":
            at(NetworkGrid, "push_messages", death.come, lambda grid, messages: of_round(messages), after=True)
        case "with a reply that it has not noted":
            at(
                NetworkGrid,
                "_make_reply",
                death.come,
                lambda grid, announced: of_round([grid._requests[announced.status.request].message]),
                after=True,
            )
        case "in aggregation":
            at(loop, "moved", death.come, lambda loop, server_round, means: server_round == ROUND)
        case "half-way through a checkpoint's state":
            half_a_file(death.come, server.federation.checkpoints, lambda name: name == f"{checkpoint}.safetensors")
        case "between a checkpoint's two files":
            half_a_file(death.come, server.federation.checkpoints, lambda name: name == f"{checkpoint}.json")
        case "between two rounds":
            at(
                server.runs.reporter.RunReporter,
                "round_done",
                death.come,
                lambda who, record, state: record.round == ROUND,
            )
        case "disk full":
            disk_full(death, server.federation.checkpoints, lambda name: name == f"{checkpoint}.safetensors")
        case "our own mistake":
            at(loop, "moved", lambda: mistake(death), lambda loop, server_round, means: server_round == ROUND)
        case "clock +1" | "clock -1":
            hours = float(point.split()[1])
            at(loop, "configure_train", lambda: set_clock(death, hours), lambda loop, number, *rest: number == ROUND)


def mistake(death: Death) -> None:
    """An exception that nobody expects."""
    if not death.came:
        death.marker.touch()
        raise ZeroDivisionError("a defect")


def at_the_site(point: str, death: Death) -> None:
    """Patch a site's program."""
    import client.site.memory
    import client.training.local_round
    from client.connection.fleet_client import FleetClient

    sending = list[bool]()

    def reply_of_round(link: Any, received: bytes, reply: Any) -> bool:
        if wanted := reply.metadata.group_id == str(ROUND) and reply.metadata.message_type == "train":
            sending.append(True)
        return wanted

    match point:
        case "while training":
            at(
                client.training.local_round,
                "compute_update",
                death.come,
                lambda task, *rest: task.memory.round == ROUND - 1,
            )
        case "after its memory is written":
            at(
                client.training.local_round,
                "write_round_memory",
                death.come,
                lambda work, request, *rest: request.round == ROUND,
                after=True,
            )
        case "half-way through its memory":
            half_a_file(death.come, client.site.memory, lambda name: name == f"round-{ROUND:06d}.safetensors")
        case "before it sends":
            at(FleetClient, "send_reply", death.come, reply_of_round)
        case "while it sends":
            at(FleetClient, "send_reply", lambda: None, reply_of_round)
            at(FleetClient, "_send_object", death.come, lambda *arguments: bool(sending), after=True)
        case "after it has sent":
            at(FleetClient, "send_reply", death.come, reply_of_round, after=True)
        case "clock +1" | "clock -1":
            hours = float(point.split()[1])
            wanted = lambda work, request, *rest: request.round == ROUND  # noqa: E731
            at(client.training.local_round, "write_round_memory", lambda: set_clock(death, hours), wanted)
        case "disk full":
            disk_full(death, client.site.memory, lambda name: name == f"round-{ROUND:06d}.safetensors")


def main() -> None:
    """As the command line says."""
    marker, point, victim, program, *arguments = sys.argv[1:]
    death = Death(Path(marker), int(victim))
    if program == "supervised":
        from server import cli
        from server.deployment import supervisor

        supervisor.PROGRAM = (sys.executable, "-m", "tests.network.dying", marker, point, victim, "server")
        cli.main(arguments)
    elif program == "serving":
        from server import cli
        from server.deployment.superlink import process

        true = process.superlink_command
        struck = [sys.executable, "-m", "tests.network.dying", marker, point, victim, "superlink"]
        process.superlink_command = lambda coordinator: [
            *struck,
            *true(coordinator)[true(coordinator).index("--state") :],
        ]
        cli.main(arguments)
    elif program == "superlink":
        from server.deployment.superlink import program as superlink

        clock_while(death.marker, float(point.split()[1]))
        sys.argv[1:] = arguments
        superlink.main()
    elif program == "server":
        from server import cli

        if not death.came:
            on_the_coordinator(point, death)
        cli.main(arguments)
    else:
        from client.cli import main as client_main

        if not death.came:
            at_the_site(point, death)
        client_main(arguments)


if __name__ == "__main__":
    main()
