"""A method led by hand: over the sites of an experiment, or over sites whose replies a test scripts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from common.config import ExperimentFile, make_plan
from common.models.network import build
from common.models.state import layout_of, read_state
from common.simulation import simulated_data
from common.wire.codec import decode, encode
from common.wire.records import (
    EvaluateReply,
    EvaluateRequest,
    RollCall,
    RollCallAnswer,
    TrainReply,
    TrainRequest,
)
from server.simulation.backends.inline import import_site_app, run_inline
from strategies.engine.coordinator import Coordinator
from strategies.engine.events import Callbacks, FederationValidation, RoundRecord
from strategies.engine.sequential import make_coordinator
from strategies.engine.state import FederationState, make_array_record
from strategies.registry import build_experiment_strategy

POOLED = {"centralised"}


@dataclass
class Noted(Callbacks):
    """The rounds that counted, with the states after them, and who was absent from an exchange that is no round."""

    records: list[RoundRecord] = field(default_factory=list)
    states: list[FederationState] = field(default_factory=list)
    absences: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def on_round(self, record: RoundRecord, state: FederationState) -> None:
        self.records.append(record)
        self.states.append(state)

    def on_absent(self, phase: str, absent: Mapping[str, str]) -> None:
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


def app_of(sites: Sequence[ScriptedSite]) -> ClientApp:
    """One process that answers for all of them, as in a simulation."""
    app, at = ClientApp(), lambda context: sites[int(context.node_config["partition-id"])]

    @app.query("roll_call")
    def _(message: Message, context: Context) -> Message:
        return Message(encode(at(context).called(decode(message.content, RollCall))), reply_to=message)

    @app.train()
    def _(message: Message, context: Context) -> Message:
        reply = at(context).trained(decode(message.content, TrainRequest))
        return Message(encode(reply) if isinstance(reply, TrainReply) else reply, reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        return Message(encode(at(context).judged(decode(message.content, EvaluateRequest))), reply_to=message)

    return app


def lead(
    file: ExperimentFile,
    folder: Path,
    rounds: int,
    resumed: FederationState | None = None,
    wire: Callable[[Any], Any] = lambda grid: grid,
) -> Ran:
    """Lead a run over the experiment's sites, which keep their memory in ``folder``."""
    data, ran = simulated_data(file.experiment, file.base), Ran()
    sites = 1 if file.experiment.run.method in POOLED else len(data.parts)

    def main(grid: Any) -> None:
        plan, section = make_plan(file.experiment), file.experiment.participation
        coordinator = make_coordinator(
            build_experiment_strategy(file.experiment), plan, section, "run-1", callbacks=ran
        )
        ran.coordinator = coordinator
        contract = coordinator.sites.roll_call(wire(grid), sites)
        network = build(file.experiment.model, contract.class_names, file.experiment.run.seed)
        coordinator.settle_model(layout_of(network))
        if data.server is not None:
            coordinator.use_images(data.server, contract.class_names, "cpu")
        if resumed is not None:
            coordinator.resume(resumed, FederationValidation())
        coordinator.start(wire(grid), make_array_record(read_state(network)), rounds)

    run_inline(main, import_site_app(file.experiment.model_dump_json(), file.base, folder), sites)
    return ran
