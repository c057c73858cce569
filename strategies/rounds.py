"""The common round loop as a Flower ``Strategy``: roll call, per-site content, participation, best model.

One exchange a round: a site first evaluates the model it receives on its validation part, which tells how good the
round before was, then trains. So the validation loss of round *t* is known when the replies of round *t + 1* are in;
one exchange after the last round closes the books. Flower's own loop takes two exchanges a round.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from common.config import ParticipationSection, Plan
from common.contract import LabelContract, merge
from common.errors import quoted
from common.models.state import Head, ModelState
from common.wire import (
    EvaluateReply,
    EvaluateRequest,
    Groups,
    RollCall,
    TrainReply,
    TrainRequest,
    encode,
    payload_bytes,
)
from strategies.method import Method
from strategies.quarantine import fault_in
from strategies.records import RoundRecord, TooFewSites, Validation
from strategies.replies import Replies, Reply, decoded, validation_of
from strategies.roll_call import Member, call_the_roll
from strategies.state import FederationState, aggregated, groups_expected, groups_for, with_validation

Q = TypeVar("Q", TrainRequest, EvaluateRequest)


class RoundStrategy(Strategy):
    """Runs one :class:`~strategies.method.Method` round by round.

    Call :meth:`roll_call`, build the initial model for the contract's classes, then :meth:`start`, then :meth:`test`.

    Attributes:
        state: Of the coordinator, after the last round.
        bytes_down, bytes_up: By site, everything from the roll call to the test.
    """

    def __init__(self, method: Method, plan: Plan, participation: ParticipationSection, run: str) -> None:
        self.method, self.plan, self.participation, self.run = method, plan, participation, run
        self.on_round: Callable[[RoundRecord, FederationState], None] = lambda record, state: None
        self.contract = LabelContract((), MappingProxyType({}))
        self.members: dict[str, Member] = {}
        self.bytes_down, self.bytes_up = Counter[str](), Counter[str]()
        self.state: FederationState
        self.last_validation = Validation()
        self._sent: dict[str, Groups] = {}
        self._down: dict[str, int] = {}
        self._plan_json = plan.model_dump_json()

    def summary(self) -> None:
        """Nothing to print: the run folder and the progress bar say what there is to say."""

    # ------------------------------------------------------------------ roll call

    def roll_call(self, grid: Grid, expected: int) -> LabelContract:
        """Ask every site who it is and what it annotates; settle the label contract.

        Args:
            grid: Flower's connection to the sites.
            expected: Sites to wait for; after the deadline ``min_sites`` of them suffice.

        Raises:
            TooFewSites: If too few answered in time.
            BadInput: If the declarations contradict one another or the method does not fit them.
        """
        section, call = self.participation, RollCall(self.run, self._plan_json)
        needed = section.min_sites or expected
        self.members = call_the_roll(grid, call, expected, needed, section.roll_call_deadline_s)
        for site, member in self.members.items():
            self.bytes_down[site] += member.bytes_down
            self.bytes_up[site] += member.bytes_up
        self.contract = merge(member.declaration for member in self.members.values())
        self.method.refuse_unfit(self.contract)
        return self.contract

    # ------------------------------------------------------------------ the loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train ``num_rounds`` rounds from the initial model, then learn how good the last one is.

        Raises:
            TooFewSites: If a round stays under ``min_sites``.
        """
        if train_config or evaluate_config or evaluate_fn:
            warnings.warn("the plan settles training and evaluation; the extra arguments are ignored", stacklevel=2)
        self.state = FederationState(0, model_state(initial_arrays, self.contract.class_names))
        arrays, result, config = initial_arrays, Result(), ConfigRecord()
        for server_round in range(1, num_rounds + 1):
            messages = self.configure_train(server_round, arrays, config, grid)
            arrays, metrics = self.aggregate_train(server_round, grid.send_and_receive(messages, timeout=timeout))
            result.train_metrics_clientapp[server_round] = metrics
        messages = self.configure_evaluate(num_rounds, arrays, config, grid)
        self.aggregate_evaluate(num_rounds, grid.send_and_receive(messages, timeout=timeout))
        result.arrays = array_record(self.state.selected)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message a site, each with that site's own head rows."""
        self._began = time.monotonic()
        self._sent, self._down = {}, {}
        chosen = self._drawn(server_round)
        return [self._train_message(server_round, site) for site in chosen]

    def _drawn(self, server_round: int) -> list[str]:
        """The sites of a round: all, or ``sites_per_round`` of them drawn from (seed, round)."""
        names, size = sorted(self.members), self.participation.sites_per_round
        if not 0 < size < len(names):
            return names
        generator = np.random.default_rng([self.plan.run.seed, server_round])
        return sorted(generator.choice(names, size, replace=False).tolist())

    def _train_message(self, server_round: int, site: str) -> Message:
        request = self._request(TrainRequest, server_round, site, self.state.model)
        self._sent[site] = groups_expected(request.model, self.method)
        return self._message(site, MessageType.TRAIN, server_round, encode(request))

    def _request(self, make: Callable[..., Q], server_round: int, site: str, model: ModelState) -> Q:
        """A request of this run and round, and the model with that site's own head rows."""
        rows = self.method.rows_of(site, self.contract)
        return make(
            run=self.run,
            round=server_round,
            plan=self._plan_json,
            contract=self.contract.hash,
            class_names=tuple(rows),
            counted=self.state.counted.get(site, 0),
            best=self.state.best_round,
            model=groups_for(model, rows),
        )

    def _message(self, site: str, kind: str, server_round: int, content: RecordDict) -> Message:
        self._down[site] = payload_bytes(content)
        self.bytes_down[site] += self._down[site]
        deadline = self.participation.round_deadline_s
        return Message(content, self.members[site].node_id, kind, group_id=str(server_round), ttl=deadline)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Check the replies, note the validation losses of the round before, move the model.

        Raises:
            TooFewSites: If fewer than ``min_sites`` replies count.
        """
        received = self._received(server_round, replies, TrainReply)
        arrived = time.monotonic()
        accepted = received.accepted
        if len(accepted) < (self.participation.min_sites or len(self._sent)):
            raise _too_few(f"round {server_round}", received, len(self._sent))
        validation = validation_of(accepted)
        judged = with_validation(self.state, validation.loss)
        model = aggregated(self.state.model, list(accepted.values()), self.method.weighting)
        counted = MappingProxyType({**self.state.counted, **dict.fromkeys(accepted, server_round)})
        self.state = replace(judged, round=server_round, model=model, counted=counted)
        record = RoundRecord(
            round=server_round,
            sites=tuple(accepted),
            absent=received.absent,
            train_loss={site: reply.train_loss for site, reply in accepted.items()},
            validation=validation,
            site_seconds={site: reply.seconds for site, reply in accepted.items()},
            bytes_down=dict(self._down),
            bytes_up=received.bytes_up,
            seconds=time.monotonic() - self._began,
            aggregate_seconds=time.monotonic() - arrived,
        )
        self.on_round(record, self.state)
        mean = float(np.mean(list(record.train_loss.values())))
        return array_record(model), MetricRecord({"train-loss": mean})

    # ------------------------------------------------------------------ evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the validation loss of the model as it stands after the last round."""
        return self._evaluate_messages(server_round, self.state.model, test=False)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note the last model's validation losses; it may be the best."""
        received = self._received(server_round, replies, EvaluateReply)
        self.last_validation = validation_of(received.accepted)
        mean = self.last_validation.mean_loss
        self.state = with_validation(self.state, self.last_validation.loss)
        return None if mean is None else MetricRecord({"validation-loss": mean})

    def test(self, grid: Grid) -> Replies[EvaluateReply]:
        """Have every site test the best model, with its own parts of it where it keeps any, on its own test part.

        Raises:
            TooFewSites: If fewer than ``min_sites`` answer and there is no global model to test instead.
        """
        messages = self._evaluate_messages(self.state.round, self.state.selected, test=True)
        replies = grid.send_and_receive(messages, timeout=self.participation.round_deadline_s)
        received = self._received(self.state.round, replies, EvaluateReply)
        needed = self.participation.min_sites or len(self.members)
        if not self.method.has_global_model and len(received.accepted) < needed:
            raise _too_few("test", received, needed)
        return received

    def _evaluate_messages(self, server_round: int, model: ModelState, *, test: bool) -> list[Message]:
        self._sent, self._down, messages = {}, {}, []
        for site in sorted(self.members):
            request = self._request(partial(EvaluateRequest, test=test), server_round, site, model)
            self._sent[site] = Groups()
            messages.append(self._message(site, MessageType.EVALUATE, server_round, encode(request)))
        return messages

    # ------------------------------------------------------------------ replies

    def _received(self, server_round: int, replies: Iterable[Message], expected: type[Reply]) -> Replies[Reply]:
        """Decode, match and quarantine replies; whoever is left out has a reason."""
        names = {member.node_id: site for site, member in self.members.items()}
        absent = dict.fromkeys(self._sent, f"no reply within {self.participation.round_deadline_s:.0f} s")
        accepted: dict[str, Reply] = {}
        sizes: dict[str, int] = {}
        for message in replies:
            site = names.get(message.metadata.src_node_id, "")
            if site not in self._sent:
                continue
            record, reason = decoded(message, expected)
            if record is not None:
                reason = self._mismatch(record, site, server_round)
                sizes[site] = payload_bytes(message.content)
                self.bytes_up[site] += sizes[site]
            if record is None or reason:
                absent[site] = reason
            else:
                absent.pop(site, None)
                accepted[site] = record
        return Replies({site: accepted[site] for site in sorted(accepted)}, absent, sizes)

    def _mismatch(self, record: TrainReply | EvaluateReply, site: str, server_round: int) -> str:
        """Why a well-formed reply does not belong here, or an empty string."""
        came, wanted = (record.run, record.round, record.site), (self.run, server_round, site)
        if came != wanted:
            return f"reply belongs to run, round, site {came}, expected {wanted}"
        if isinstance(record, TrainReply):
            if record.train_samples != (said := self.members[site].answer.train_samples):
                return f"trained on {record.train_samples} images, said {said} at the roll call"
            return fault_in(record.update, self._sent[site])
        strangers = sorted(set(record.class_names) - set(self.contract.sites[site]))
        return f"tested {quoted(strangers)}, which it does not annotate" if strangers else ""


def _too_few(what: str, received: Replies[Reply], wanted: int) -> TooFewSites:
    """Who replied to what, and why the others did not."""
    reasons = "; ".join(f"{site}: {why}" for site, why in received.absent.items())
    return TooFewSites(f"{what}: {len(received.accepted)} of {wanted} sites replied. {reasons}")


def array_record(model: ModelState) -> ArrayRecord:
    """The global model as Flower's loop carries it."""
    named = Groups(model.trunk, model.norm, model.head).named()
    return ArrayRecord({name: Array(array) for name, array in named.items()})


def model_state(arrays: ArrayRecord, class_names: tuple[str, ...]) -> ModelState:
    """The inverse of :func:`array_record`."""
    head = Head(class_names, arrays["head.weight"].numpy(), arrays["head.bias"].numpy())
    return ModelState(arrays["trunk"].numpy(), arrays["norm"].numpy(), head)
