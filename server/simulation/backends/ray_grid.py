"""A ``Grid`` whose sites are served by workers of a Ray cluster."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Error, Message

from common.data.base.image_set import Splits, raw, shapes, taken_apart
from common.system.resources import keep_large_buffers
from common.system.stopping import block_if_stopping
from server.simulation.backends.frames import Frame
from server.simulation.backends.inline import CLIENT_APP_RAISED, FIRST_NODE, LocalGrid, Main, prepare_flower
from server.simulation.backends.packing import ArrayBytes, packed, unpacked
from server.simulation.backends.ray_program import WORKER_READY, RayLost, RayProgram
from strategies.engine.events import RunStopped

LOOK_S = 0.1
MOST_STARTS, MOST_FIRST_STARTS = 10, 3
"""Drivers of Ray that may end one after the other without a single reply, before the run is given up.

Where no worker has ever been ready, another start will hardly do better.
"""


@dataclass(frozen=True)
class SimulatedRun:
    """What the workers need.

    Attributes:
        experiment: As JSON.
        base: Folder that the experiment's paths start from.
        run_folder: Where each site has its own folder under ``sites``; only this machine reads and writes it.
        names: The sites, in the order of the partition.
        images: The whole data set.
        note: Writes down an event of the run, by its name and facts.
    """

    experiment: str
    base: Path
    run_folder: Path
    names: tuple[str, ...]
    images: Splits
    note: Callable[..., None] = lambda event, **facts: None


def on_ray(main: Main, run: SimulatedRun, program: RayProgram) -> None:
    """Run ``main`` against sites that Ray's workers serve."""
    prepare_flower()
    keep_large_buffers()
    with RayGrid(run, program) as grid:
        main(grid)


class RayGrid(LocalGrid):
    """Messages go to the process that drives Ray, which is started again where it ends.

    Attributes:
        workers: Sites that train at a time.
    """

    def __init__(self, run: SimulatedRun, program: RayProgram) -> None:
        super().__init__(len(run.names))
        self._run, self._program = run, program
        self._asked: dict[str, Message] = {}
        self._starts, self._most_starts = 0, MOST_FIRST_STARTS
        self.workers = 1

    def __enter__(self) -> "RayGrid":
        try:
            self._begin()
        except RayLost as lost:
            self._start_again(lost)
        while self.workers_unknown:
            self._next_frame(None)
        return self

    def __exit__(self, *raised: object) -> None:
        self._program.close()

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        asked = self.numbered(messages)
        self._asked |= asked
        try:
            self._ask(asked)
        except RayLost as lost:
            self._start_again(lost)
        return list(asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        """The next reply, if one comes soon: there is never more than one."""
        reply = self._next_frame(LOOK_S)
        return [reply] if reply is not None and reply.metadata.reply_to_message_id in message_ids else []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        raise NotImplementedError("use push_messages and pull_messages")

    def _next_frame(self, within_s: float | None) -> Message | None:
        try:
            frame = self._program.receive(within_s)
        except RayLost as lost:
            self._start_again(lost)
            return None
        if frame is None:
            return None
        if frame.about["kind"] == "stopped":
            raise RunStopped(frame.about["reason"])
        if frame.about["kind"] == "note":
            if frame.about["event"] == WORKER_READY:
                self._most_starts = MOST_STARTS
            self._run.note(frame.about["event"], **frame.about["facts"])
            return None
        if frame.about["kind"] == "begun":
            self.workers, self.workers_unknown = frame.about["workers"], False
            return None
        return self._reply(frame)

    def _reply(self, frame: Frame) -> Message | None:
        message = self._asked.pop(frame.about["id"], None)
        if message is None:
            return None
        self._starts = 0
        if frame.about["kind"] == "lost":
            return Message(Error(CLIENT_APP_RAISED, frame.about["reason"]), reply_to=message)
        head, *data = frame.data
        hashes = frame.about["hashes"]
        return unpacked(head, [ArrayBytes(one, known) for one, known in zip(data, hashes, strict=True)])

    def _begin(self) -> None:
        run, self.workers_unknown = self._run, True
        facts, arrays = taken_apart(run.images)
        about = {
            "kind": "begin",
            "experiment": run.experiment,
            "base": str(run.base.resolve()),
            "run_folder": str(run.run_folder.resolve()),
            "names": run.names,
            "facts": json.dumps(facts),
            "shapes": shapes(arrays),
        }
        self._program.send(about, [raw(array) for array in arrays])

    def _ask(self, messages: dict[str, Message]) -> None:
        """Send messages; bytes that several of them hold are sent once."""
        data: list[Any] = []
        hashes: list[str] = []
        places: dict[int, int] = {}

        def place(one: ArrayBytes) -> int:
            if id(one.data) not in places:
                places[id(one.data)] = len(data)
                data.append(one.data)
                hashes.append(one.known_hash)
            return places[id(one.data)]

        asked = []
        for identifier, message in messages.items():
            head, arrays = packed(message)
            parts = [place(ArrayBytes(head, "")), *map(place, arrays)]
            asked.append({"id": identifier, "node": message.metadata.dst_node_id, "first": FIRST_NODE, "data": parts})
        self._program.send({"kind": "ask", "messages": asked, "hashes": hashes}, data)

    def _start_again(self, lost: RayLost) -> None:
        """Start Ray again, and ask again what has not been answered: work is lost, no site is.

        Raises:
            RunStopped: If Ray has ended too often.
        """
        block_if_stopping()
        while self._starts < self._most_starts:
            self._starts += 1
            self._run.note("ray_started_again", reason=str(lost))
            self._program = self._program.again()
            try:
                self._begin()
                self._ask(self._asked)
            except RayLost as again:
                lost = again
            else:
                return
        raise RunStopped(f"Ray ended {self._starts} times before a single site had answered; it said last: {lost}")
