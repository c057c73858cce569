"""Ask hospitals a question over a Flower ``Grid``, and wait for the answers; no training round begins.

A question is a wire record with a run name and without a training plan. The same code works over the network and in a
simulation.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from polyclinic.common.system.plain_text import make_printable_line
from polyclinic.common.wire.codec import AnyRecord, encode_record
from polyclinic.common.wire.flower_messages import make_request
from polyclinic.common.wire.records import Record
from polyclinic.common.wire.secure_aggregation import STAGE_BY_REQUEST
from polyclinic.common.wire.versions import WIRE_VERSION, is_record_in_version
from polyclinic.strategies.engine.exchange import NOT_CONNECTED_REASON, decode_reply, send_and_receive

OLD_RELEASE = "its release does not know this question: install the coordinator's release there"


def make_question_run(kind: str) -> str:
    """Return a new random run name for a question: the kind, such as "count", and 16 hexadecimal digits."""
    return f"{kind}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class QuestionAnswers(Generic[AnyRecord]):
    """The hospitals' answers to a question.

    Attributes:
        answers: Site -> its answer, in the order of names.
        silent: Site -> reason for its missing answer: it is not connected, declines, or does not answer in time.
        nodes: Site that answered -> its node id.
    """

    answers: Mapping[str, AnyRecord]
    silent: Mapping[str, str]
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class QuestionExchange:
    """Sends questions to the sites of a Grid.

    Attributes:
        deadline_s: Seconds that a site has for each answer.
        registered: Returns node id -> name of the sites that may be asked; None in simulation, where the name in an
            answer is trusted.
        versions: Returns node id -> wire version of messages to the site; None for the newest version.
    """

    grid: Grid
    deadline_s: float
    registered: Callable[[], Mapping[int, str]] | None = None
    versions: Callable[[], Mapping[int, int]] | None = None

    def ask_connected_sites(self, record: Any, kind: str, expected: type[AnyRecord]) -> QuestionAnswers[AnyRecord]:
        """Ask all connected sites one question; return their answers, and the reason for each missing answer.

        Args:
            record: The question.
            kind: Flower message type of the question.
            expected: Record class of an answer.
        """
        names = dict(self.registered()) if self.registered else {}
        versions = self.versions() if self.versions else {}
        silent = dict.fromkeys(names.values(), NOT_CONNECTED_REASON)
        asked = list[int]()
        for node in self.grid.get_node_ids():
            if is_record_in_version(type(record).__name__, versions.get(node, WIRE_VERSION)):
                asked.append(node)
            else:
                silent[names.get(node, f"node {node}")] = OLD_RELEASE
        silent |= {names[node]: f"no answer within {self.deadline_s:.0f} s" for node in asked if node in names}
        answers = dict[str, AnyRecord]()
        nodes = dict[str, int]()
        content = encode_record(record)
        for node, answer, reason in self.exchange_records(dict.fromkeys(asked, content), kind, expected):
            name = names.get(node, f"node {node}")
            if answer is not None:
                if not self.registered:
                    name = str(getattr(answer, "site", ""))
                reason = _find_origin_fault(answer, record.run, name)
            if answer is None or reason:
                silent[name] = reason
                continue
            silent.pop(name, None)
            answers[name] = answer
            nodes[name] = node
        return QuestionAnswers(dict(sorted(answers.items())), dict(sorted(silent.items())), nodes)

    def exchange_records(
        self, contents: Mapping[int, RecordDict], kind: str, expected: type[AnyRecord]
    ) -> Iterator[tuple[int, AnyRecord | None, str]]:
        """Send each node its content; yield (node id, record, fault) for each reply on arrival.

        Args:
            contents: Node id -> encoded record to send.
            kind: Flower message type.
            expected: Record class of a reply. A reply of another class yields None and the fault in words.
        """
        messages = [
            make_request(content, node, kind, group_id="question", ttl=self.deadline_s)
            for node, content in contents.items()
        ]
        replies = send_and_receive(
            self.grid, messages, lambda waiting, lost: None, deadline_s=self.deadline_s, enough=len(messages)
        )
        for reply in replies:
            record, reason = decode_reply(reply, expected)
            yield reply.metadata.src_node_id, record, reason


@dataclass
class MaskedQuestionQueries:
    """Sends the requests of secure aggregation for the answers to a question.

    Attributes:
        run: Run name of the question.
        nodes: Site -> its node id.
        absent: Site -> reason why its answer to the last request is missing or not valid.
    """

    exchange: QuestionExchange
    run: str
    nodes: Mapping[str, int]
    absent: dict[str, str]

    def __call__(
        self, requests: Mapping[str, Record], expected: type[AnyRecord], enough: int
    ) -> Iterator[tuple[str, AnyRecord]]:
        """Send each site its request; yield (site, answer) for each valid answer on arrival."""
        stage = STAGE_BY_REQUEST[type(next(iter(requests.values())))]
        names = {self.nodes[site]: site for site in requests}
        self.absent |= dict.fromkeys(requests, f"no reply to {stage.replace('_', ' ')} in time")
        contents = {self.nodes[site]: encode_record(request) for site, request in requests.items()}
        kind = f"{MessageType.QUERY}.{stage}"
        for node, answer, reason in self.exchange.exchange_records(contents, kind, expected):
            site = names[node]
            reason = reason if answer is None else _find_origin_fault(answer, self.run, site)
            if answer is None or reason:
                self.absent[site] = reason
                continue
            self.absent.pop(site, None)
            yield site, answer


def _find_origin_fault(answer: Any, run: str, site: str) -> str:
    """Return the fault of an answer that names another run or site; empty if the answer is from this run and site."""
    origin = str(getattr(answer, "run", "")), str(getattr(answer, "site", ""))
    if origin == (run, site):
        return ""
    return make_printable_line(f"answer belongs to run, site {origin}, expected {(run, site)}")
