"""TensorBoard event files; ``tensorboard --logdir`` draws them."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from server.runs.scalars import Ending

FOLDER = "tensorboard"


class TensorBoard:
    """One event file. A :class:`server.runs.scalars.Tracker`.

    Written in this thread and flushed to disk each time, where the library's ``SummaryWriter`` has a thread whose
    death nobody hears of, cleans tags of what TensorBoard can show, and puts the machine's name into the file's.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)  # it is there where a run goes on
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._write(Event(file_version="brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(step=step, summary=summary))

    def close(self, ending: Ending) -> None:
        self._records.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()
