"""A method led by hand: over the sites of an experiment, or over sites whose replies a test scripts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from polyclinic.client.site.memory import parse_round_state
from polyclinic.common.config import ExperimentFile, HospitalPlan, make_hospital_plan
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import make_model_layout, read_model_state
from polyclinic.common.simulation import load_simulated_data
from polyclinic.common.wire.codec import decode_record, encode_record
from polyclinic.common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from polyclinic.server.simulation.backends.inline import import_client_app, run_with_inline_grid
from polyclinic.strategies.engine.coordinator import Coordinator
from polyclinic.strategies.engine.events import FederationValidation, RoundRecord, RunCallbacks
from polyclinic.strategies.engine.sequential import make_coordinator
from polyclinic.strategies.engine.state import FederationState, make_model_array_record
from polyclinic.strategies.registry import build_experiment_strategy

POOLED = {"centralised"}


@dataclass
class Noted(RunCallbacks):
    """The rounds that counted, with the states after them, and who was absent from an exchange that is no round."""

    records: list[RoundRecord] = field(default_factory=list)
    states: list[FederationState] = field(default_factory=list)
    absences: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def on_round_end(self, record: RoundRecord, state: FederationState) -> None:
        self.records.append(record)
        self.states.append(state)

    def on_absent_sites(self, phase: str, absent: Mapping[str, str]) -> None:
        self.absences.append((phase, dict(absent)))


@dataclass
class Ran(Noted):
    """A run that was led by hand: its engine, and every round with the state after it."""

    coordinator: Coordinator = field(init=False)


class ScriptedSite(Protocol):
    """A site that answers roll call, training and evaluation by a script."""

    def called(self, call: RollCall) -> RollCallAnswer: ...

    def trained(self, request: TrainRequest) -> TrainReply | RecordDict: ...

    def judged(self, request: EvaluateRequest) -> EvaluateReply: ...


class Turned:
    """A grid on which the last site is always the first to answer."""

    def __init__(self, grid: Any) -> None:
        self.get_node_ids, self._push, self._pull = grid.get_node_ids, grid.push_messages, grid.pull_messages

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return list(self._push(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return list(self._pull(list(message_ids)[::-1]))


def small_plan(method: str = "surgical", seed: int = 7) -> HospitalPlan:
    model = {"architecture": "tiny_cnn", "channels": 1, "image_size": 16}
    tables: dict[str, Any] = {"method": {}, "model": model, "training": {}, "augmentation": {}}
    return HospitalPlan.model_validate({"run": {"method": method, "seed": seed}, **tables})


def site_notes(run: Path, site: str, rounds_ago: int = 0) -> Mapping[str, np.ndarray]:
    """What a method noted at a site after the last round, or the one before it, from the site's own disk."""
    path = sorted((run / "sites" / site / "memory").glob("*/round-*.safetensors"))[-1 - rounds_ago]
    return parse_round_state(path.read_bytes())[0].method_state


def app_of(sites: Sequence[ScriptedSite]) -> ClientApp:
    """One process that answers for all of them, as in a simulation."""
    client, at = ClientApp(), lambda context: sites[int(context.node_config["partition-id"])]

    @client.query("roll_call")
    def _(message: Message, context: Context) -> Message:
        return Message(encode_record(at(context).called(decode_record(message.content, RollCall))), reply_to=message)

    @client.train()
    def _(message: Message, context: Context) -> Message:
        reply = at(context).trained(decode_record(message.content, TrainRequest))
        return Message(encode_record(reply) if isinstance(reply, TrainReply) else reply, reply_to=message)

    @client.evaluate()
    def _(message: Message, context: Context) -> Message:
        return Message(
            encode_record(at(context).judged(decode_record(message.content, EvaluateRequest))), reply_to=message
        )

    return client


def lead(
    file: ExperimentFile,
    folder: Path,
    rounds: int,
    resumed: FederationState | None = None,
    wire: Callable[[Any], Any] = lambda grid: grid,
) -> Ran:
    """Lead a run over the experiment's sites, which keep their memory in ``folder``."""
    data, ran = load_simulated_data(file.experiment, file.base_folder), Ran()
    sites = 1 if file.experiment.run.method in POOLED else len(data.parts)

    def main(grid: Any) -> None:
        plan, section = make_hospital_plan(file.experiment), file.experiment.participation
        coordinator = make_coordinator(
            build_experiment_strategy(file.experiment), plan, section, "run-1", callbacks=ran
        )
        ran.coordinator = coordinator
        contract = coordinator.sites.call_roll(wire(grid), sites)
        network = build_network(file.experiment.model, contract.class_names, file.experiment.run.seed)
        coordinator.fix_run_model_layout(make_model_layout(network))
        if data.server is not None:
            coordinator.receive_coordinator_images(data.server, contract.class_names, "cpu")
        if resumed is not None:
            coordinator.set_resume_state(resumed, FederationValidation())
        coordinator.start(wire(grid), make_model_array_record(read_model_state(network)), rounds)

    run_with_inline_grid(main, import_client_app(file.experiment.model_dump_json(), file.base_folder, folder), sites)
    return ran
