"""Sites that do everything but train, gate and audit as in any site: for measuring what is left.

python benchmarks/idle_site.py [--one-at-a-time] SITE_FOLDER [SITE_FOLDER ...]

Several folders share a process, a thread each: for more sites than a machine has memory for processes. With
``--one-at-a-time`` a process also fetches, answers and sends one message after another: for models of which it cannot
hold several.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from rich.console import Console

from polyclinic.client.app import SiteOf, answer_roll_call
from polyclinic.client.connection.fleet_client import FleetClient
from polyclinic.client.connection.service import HospitalMessageLoop, lock_site_folder
from polyclinic.client.connection.status import ClientStatus
from polyclinic.client.gate.gate import make_policy_gate
from polyclinic.client.site.settings import load_site, read_site_settings
from polyclinic.client.site.site_file import read_and_check_connection_kit
from polyclinic.common.models.network import Head
from polyclinic.common.system.resources import release_free_memory, reuse_large_buffers
from polyclinic.common.system.stopping import graceful_shutdown, stop_on_signals
from polyclinic.common.system.terminal import make_event_printer
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    ModelGroups,
    Refusal,
    RollCall,
    TrainReply,
    TrainRequest,
)

BASE: dict[int, Any] = {}
"""Size -> random numbers, of which each round's update is a multiple; one copy for all sites of the process."""
ONE_SITE = threading.Lock()
"""A process answers for one site after another: each builds the first model, and threads share torch's generator."""
ONE_MESSAGE = threading.Lock()


def idle_app(site_of: SiteOf, on_refusal: Callable[[Refusal], None], tell: Callable[[str], None]) -> ClientApp:
    """Answers every request at once, with an update that is new in every part each round: nothing can be sent twice."""
    gate, random = make_policy_gate(site_of), np.random.default_rng(0)

    def answer_alone(message: Message, context: Context, answer: Callable[[Message, Context], Message]) -> Message:
        with ONE_SITE:
            return gate(message, context, answer)

    app = ClientApp(mods=[answer_alone])

    def noise(like: Any) -> Any:
        if like.size not in BASE:
            BASE[like.size] = random.random(like.size, np.float32) * np.float32(1e-6)
        return (BASE[like.size] * np.float32(1 + random.random())).reshape(like.shape)

    @app.query("roll_call")
    def _(message: Message, context: Context) -> Message:
        return Message(
            encode_record(answer_roll_call(site_of(context), decode_record(message.content, RollCall))),
            reply_to=message,
        )

    @app.train()
    def _(message: Message, context: Context) -> Message:
        request = decode_record(message.content, TrainRequest)
        model, head = request.model, request.model.head
        assert model.trunk is not None
        assert model.norm is not None
        assert head is not None
        update = ModelGroups(
            noise(model.trunk), noise(model.norm), Head(head.class_names, noise(head.weight), noise(head.bias))
        )
        site = site_of(context)
        reply = TrainReply(request.run, request.round, site.name, len(site.train), 1.0, 1.0, 0.5, 0.0, update)
        return Message(encode_record(reply), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        request = decode_record(message.content, EvaluateRequest)
        reply = EvaluateReply(request.run, request.round, site_of(context).name, 1.0, 0.5, (), (), (), (), (), (), "")
        return Message(encode_record(reply), reply_to=message)

    return app


class OneMessageAtATime(HospitalMessageLoop):
    """A site that fetches a message only when no other site of this process works on one."""

    def _answer_message(self, link: FleetClient, received: bytes, attempts: int = 0) -> None:
        with ONE_MESSAGE:
            super()._answer_message(link, received, attempts)
            self._unsent = None
            release_free_memory()


def serve(folder: Path, loop: type[HospitalMessageLoop]) -> None:
    settings = read_site_settings(folder)
    site, kit = load_site(settings), read_and_check_connection_kit(settings)
    with lock_site_folder(settings.state_folder):
        loop(settings, kit, site, make_event_printer(Console()), ClientStatus(site.name), idle_app).run_message_loop()


def main() -> None:
    loop, arguments = HospitalMessageLoop, sys.argv[1:]
    if arguments[0] == "--one-at-a-time":
        loop, arguments = OneMessageAtATime, arguments[1:]
    else:
        reuse_large_buffers()
    first, *others = map(Path, arguments)
    with stop_on_signals(), graceful_shutdown(0):
        for other in others:
            threading.Thread(target=serve, args=(other, loop), daemon=True).start()
        serve(first, loop)


if __name__ == "__main__":
    main()
