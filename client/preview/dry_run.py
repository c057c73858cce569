"""The dry run of ``flwr-client preview``: it makes the records that would leave in a first round, and sends none.

A coordinator in this process sends requests to the site's own program with its images, its gate and its policy, for one
local epoch of training. The files are in a folder that is removed afterwards. Only the initial model differs from that
of a real run.
"""

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from polyclinic.client.app import make_client_app
from polyclinic.client.preview.data_dictionary import FIELD_MEANINGS, find_field_meaning
from polyclinic.client.site.site import Site
from polyclinic.common.config import Experiment, ParticipationSection, make_hospital_plan
from polyclinic.common.counts import CountQuestion
from polyclinic.common.errors import BadInput, raise_faults
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import (
    add_frozen_hash_to_spec,
    build_initial_frozen_part,
    make_model_layout,
    read_model_state,
)
from polyclinic.common.system.files import (
    find_output_folder_faults,
    make_private_folder,
    remove_outputs_on_failure,
    write_atomically,
)
from polyclinic.common.system.plain_text import format_as_json_text
from polyclinic.common.wire.canonical_bytes import (
    COUNT_WIDTH_FIELD,
    hash_record,
    iterate_canonical_bytes,
    list_record_fields,
)
from polyclinic.common.wire.codec import count_payload_bytes, encode_record, unpack_counts
from polyclinic.common.wire.counts import CountRequest
from polyclinic.common.wire.fleet_protocol import COUNT_TYPE
from polyclinic.common.wire.flower_messages import make_request, replace_metadata
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import TooFewSites
from polyclinic.strategies.engine.state import FederationState
from polyclinic.strategies.registry import build_experiment_strategy
from polyclinic.strategies.run_length import complete_round_settings

SITE_NODE_ID = 2
ROUND_DEADLINE_S = 86_400.0
"""Deadline of a round in the dry run, which is never reached because the site answers at once."""


@dataclass(frozen=True)
class RecordFieldRow:
    """One field of a record, as a row of the printed table.

    Attributes:
        size: Size in bytes.
        values: The field's value as text; for an array, the range of its numbers.
        meaning: The field's meaning (:func:`polyclinic.client.preview.data_dictionary.find_field_meaning`).
    """

    record: str
    field: str
    shape: str
    size: int
    values: str
    meaning: str


@dataclass
class SingleSiteGrid(Grid):
    """A Flower ``Grid`` with one site in this process, which collects the records and errors that leave the site."""

    site: Site

    def __post_init__(self) -> None:
        self._app = make_client_app(lambda context: self.site)
        self._pushed: dict[str, Message] = {}
        self.records: list[RecordDict] = []
        self.errors: list[str] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Sequence[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return [SITE_NODE_ID]

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        names = []
        for message in messages:
            name = str(len(self._pushed))
            self._pushed[name] = replace_metadata(message, message_id=name, run_id=1, src_node_id=1)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        replies = [
            self._app(self._pushed[name], Context(1, SITE_NODE_ID, {}, RecordDict(), {})) for name in message_ids
        ]
        for reply in replies:
            if reply.has_error():
                self.errors.append(str(reply.error.reason))
            else:
                self.records.append(reply.content)
        return replies


def choose_preview_experiment(planned: Experiment | None, site: Site) -> Experiment:
    """Return the planned experiment, or else a small one for this site, with one local epoch and without masks."""
    experiment = planned
    if experiment is None:
        model = {"architecture": "tiny_cnn", "channels": site.train.channels, "image_size": 32}
        if site.train.stored.ndim == 5:
            size = list(site.train.stored.shape[1:4])
            model = {"architecture": "tiny_cnn_3d", "channels": 1, "image_size": size}
        experiment = Experiment.model_validate({"run": {"method": "surgical"}, "model": model})
    else:
        experiment = complete_round_settings(experiment)  # as the coordinator does in a run
    training = experiment.training.model_copy(update={"epochs": 1})
    privacy = experiment.privacy.model_copy(update={"secure_aggregation": False})
    return experiment.model_copy(update={"training": training, "privacy": privacy})


def make_first_round_records(site: Site, experiment: Experiment) -> tuple[list[RecordDict], list[str]]:
    """Run the roll call, round 1 and the test of a run with this site only.

    Returns:
        The records that leave the site, and the reasons why other records are withheld.

    Raises:
        BadInput: If the method cannot use this site's labels, or needs metrics that the policy withholds.
    """
    plan = make_hospital_plan(experiment)
    frozen = build_initial_frozen_part(plan.model, plan.run.seed, Path())
    plan = plan.model_copy(update={"model": add_frozen_hash_to_spec(plan.model, frozen), "weights_sha256": None})
    with tempfile.TemporaryDirectory() as folder:
        grid = SingleSiteGrid(replace(site, folder=Path(folder), ledger=None, approvals=None, durable=False))
        participation = ParticipationSection(round_deadline_s=ROUND_DEADLINE_S)
        coordinator = Coordinator(build_experiment_strategy(plan), plan, participation, "preview", frozen=frozen)
        with suppress(TooFewSites):  # the site declined, with a reason
            contract = coordinator.sites.call_roll(grid, 1)
            network = build_network(plan.model, contract.class_names, plan.run.seed)
            coordinator.fix_run_model_layout(make_model_layout(network))
            coordinator.state = FederationState(0, read_model_state(network))
            grid.send_and_receive(coordinator.configure_train(1, grid))
            coordinator.test_result_model(grid)
        return grid.records, grid.errors


def answer_question_for_all_counts(site: Site) -> tuple[list[RecordDict], list[str]]:
    """Answer a question for all tables of counts, from a temporary count sheet.

    Returns:
        The records that would leave, and the reasons why others would not. The privacy budget is not charged.
    """
    with tempfile.TemporaryDirectory() as folder:
        grid = SingleSiteGrid(replace(site, folder=Path(folder), ledger=None, durable=False))
        request = CountRequest("preview", CountQuestion().model_dump_json())
        message = make_request(encode_record(request), SITE_NODE_ID, COUNT_TYPE)
        try:
            grid.send_and_receive([message])
        except BadInput as error:
            grid.errors += [str(fault) for fault in error.faults]
        return grid.records, grid.errors


def list_record_field_rows(content: RecordDict) -> list[RecordFieldRow]:
    """List the fields of one record for a table."""
    fields: dict[str, Any] = dict(content.config_records["fields"])
    record = str(fields["wire.record"])
    rows = list[RecordFieldRow]()
    for part in list_record_fields(content):
        if part.name not in fields:
            name, _, key = part.name.partition("/")
            array = content.array_records[name][key]
            values = f"packed as {array.dtype}"
            if array.dtype == "float32":
                values = _describe_number_range(np.frombuffer(array.data, "<f4"))
        elif isinstance(value := fields[part.name], bytes):
            width = fields.get(f"{part.name}/{COUNT_WIDTH_FIELD}")
            numbers = np.frombuffer(value, "<f4") if width is None else unpack_counts(value, width)
            values = _describe_number_range(numbers) if value else ""
        else:
            text = format_as_json_text(value, allow_nan=True) if isinstance(value, list) else str(value)
            values = text if len(text) <= 60 else f"{text[:57]}..."
        shape = "x".join(map(str, part.shape)) if part.shape is not None else ""
        rows.append(RecordFieldRow(record, part.name, shape, part.size, values, find_field_meaning(record, part.name)))
    return rows


def _describe_number_range(numbers: NDArray[np.float32] | NDArray[np.int64]) -> str:
    numbers = numbers[~np.isnan(numbers)]
    return f"{numbers.min():.3g} to {numbers.max():.3g}" if len(numbers) else "none"


def format_record_for_terminal(content: RecordDict) -> Group:
    """Format a record for the terminal; fields with the same meaning form one group."""
    field_rows = list_record_field_rows(content)
    title = f"{field_rows[0].record}: {count_payload_bytes(content):,} bytes, SHA-256 {hash_record(content)[:16]}..."
    empty = [row.field for row in field_rows if row.values in ("", "[]")]
    sent = [row for row in field_rows if row.field not in empty]
    pieces: list[Text | Padding] = [Text(f"\n{title}", style="bold")]
    width = max(len(row.field) for row in sent)
    explained = list(dict.fromkeys(FIELD_MEANINGS[field_rows[0].record].values()))
    sent.sort(key=lambda row: explained.index(row.meaning) if row.meaning in explained else len(explained))
    for words, group in groupby(sent, lambda row: row.meaning):
        for row in group:
            line = f"  {row.field:{width}}  {row.size:9,} B  {row.values}"
            pieces.append(Text(line, no_wrap=True, overflow="ellipsis"))
        pieces.append(Padding(Text(words.replace("`", ""), style="dim"), (0, 0, 0, 6)))
    if empty:
        pieces.append(Padding(Text(f"Sent empty: {', '.join(empty)}"), (0, 0, 0, 2)))
    return Group(*pieces)


def write_record_files(records: Sequence[RecordDict], out: Path) -> list[Path]:
    """Write each record's bytes to one file, and its fields and SHA-256 to a JSON file.

    Only this account can read the files, because images can be computed from an update.

    Raises:
        BadInput: If the folder exists and is not empty.
    """
    raise_faults(find_output_folder_faults(out))
    paths = list[Path]()
    with remove_outputs_on_failure(out):
        make_private_folder(out)
        for number, content in enumerate(records, 1):
            field_rows = list_record_field_rows(content)
            fields = {row.field: {"shape": row.shape, "bytes": row.size, "values": row.values} for row in field_rows}
            text = (
                format_as_json_text({"sha256": hash_record(content), "fields": fields}, indent=1, allow_nan=True) + "\n"
            )
            name = f"{number}-{field_rows[0].record}"
            paths += [out / f"{name}.record", out / f"{name}.json"]
            write_atomically(paths[-2], b"".join(iterate_canonical_bytes(content)), durable=False, private=True)
            write_atomically(paths[-1], text.encode(), durable=False, private=True)
    return paths
