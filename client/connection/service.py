"""``flwr-client start``: connect, answer, reconnect; one process that keeps torch, the device and the data loaded."""

import _thread
import contextlib
import datetime as dt
import fcntl
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client.app import SiteOf, client_app
from client.connection.before_start import of_second
from client.connection.exit_codes import ExitCode, Refused, Unreachable
from client.connection.fleet_client import (
    BUNDLE_REFUSED,
    SITE_RAISED,
    Link,
    NotTaken,
    NotThere,
    RequestRefused,
    RunOver,
    error_reply,
    expired,
    read_node_id,
)
from client.connection.pending_message import MAX_ATTEMPTS, InHand
from client.connection.status import Status
from client.connection.tls import days_valid
from client.gate.gate import note_refused
from client.gate.incoming_request import PlanRefused, read_plan
from client.site.site import Site
from client.site.site_file import Settings
from client.site.statements import Statements
from client.training.privacy import privacy_status
from common import __version__
from common.errors import BadInput, WireError, WireVersionError
from common.security.identity import SiteKit, public_line, read_key
from common.system.files import is_disk_full, remove_partial_files, write_atomically
from common.system.plain_text import printable, printable_lines
from common.system.timers import FIRST_RETRY_S, HEARTBEAT_PAUSE_S, KEY_PATIENCE_S, MAX_RETRY_S
from common.wire.canonical_bytes import small_fields
from common.wire.codec import payload_bytes
from common.wire.fleet_protocol import WIRE_VERSION
from common.wire.records import Refusal
from strategies.privacy.secure_aggregation.site import Identity

WAIT_S = 5.0
"""How long the coordinator may hold a call for a message; what the thread that gives signs of life has heard is looked
at afterwards."""
POLL_S, MAX_POLL_S = 0.03, 1.0
"""Between two calls for a message where the coordinator holds none: its room is full, or it is an older one."""
BEAT_ENDS_S = 0.5
"""How long a closing connection waits for a sign of life that is on its way; its thread ends with the process."""
DROP_SIGNAL = signal.SIGUSR1
"""By which the thread that gives signs of life interrupts the one that computes."""
CERTIFICATE_WARNING_DAYS = 30
EXIT_CODES = {"name": ExitCode.NAME, "version": ExitCode.VERSION, "labels": ExitCode.LABELS}
Tell = Callable[[str], None]


class WorkDropped(BaseException):
    """The run that this process works for has ended; all computation stops."""


@dataclass
class Service:
    """One site at work.

    Attributes:
        tell: Prints one line for a person.
        status: The present, shared with the health server.
        make_app: Builds what answers messages; benchmarks measure the rest with one that does not train.
    """

    settings: Settings
    kit: SiteKit
    site: Site
    tell: Tell
    status: Status
    make_app: Callable[[SiteOf, Callable[[Refusal], None], Callable[[str], None]], ClientApp] = client_app
    _refusal: Refused | None = None
    _unsent: tuple[bytes, Message, float] | None = None
    _left_out: str = ""  # why the last reply did not count, as told with the last message
    _works_for: int = 0  # the run whose message is being answered
    _over: int = 0  # a run that ended meanwhile
    _first: tuple[str, int, float] | None = None  # run, round and time of the first round that this process saw

    def __post_init__(self) -> None:
        self._app = self.make_app(lambda context: self.site, self._note_refusal, self.tell)
        self._in_hand = InHand(self.settings.state / "in-hand")
        self._node_id_file = self.settings.state / "node-id"
        self._key = read_key(self.settings.key_path)
        self._process = secrets.token_hex(8)
        authority = x509.load_pem_x509_certificate(self.kit.ca_certificate.encode())
        self._statements = Statements(self.settings.state, self.site.name, self._key, authority)
        self.site = replace(self.site, identity=Identity(self._key, public_line(self._key, "")))

    # ------------------------------------------------------------------ connections

    def run(self) -> None:
        """Connect, work, reconnect; for ever.

        Raises:
            Refused: If one side does not accept the other.
        """
        wait_s, patience_ends = FIRST_RETRY_S, 0.0
        while True:
            self.status.state = "connecting"
            try:
                with self._connected() as link:
                    wait_s = FIRST_RETRY_S
                    self._work(link)
            except Refused as refusal:
                # A coordinator that has just opened its port is still registering the sites it has admitted.
                patience_ends = patience_ends or time.monotonic() + KEY_PATIENCE_S
                if not refusal.may_pass or self._refusal or time.monotonic() > patience_ends:
                    raise
                time.sleep(FIRST_RETRY_S)
            except Unreachable as error:
                if str(error) != self.status.last_error or self.status.state != "connecting":
                    self.tell(f"no connection to {self.kit.address}: {error}; trying again for as long as it takes")
                self.status.failed(str(error))
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, MAX_RETRY_S)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Link]:
        self.status.certificate_days = days = days_valid(self.kit.address, self.kit.ca_certificate)
        authority = self.kit.ca_certificate.encode()
        with Link(self.kit.address, authority, self._key, self._statements, self._process) as link:
            node_id = link.activate(read_node_id(self._node_id_file))
            self._note_node_id(node_id)
            self.tell(f"connected to {self.kit.coordinator} at {self.kit.address}")
            self._note_release(link)
            if days < CERTIFICATE_WARNING_DAYS:
                self.tell(f"the coordinator's certificate expires in {days:.0f} days; it should renew it")
            stop = threading.Event()
            beat = threading.Thread(target=self._beat, args=(link, stop), name="heartbeat", daemon=True)
            beat.start()
            try:
                yield link
            except (KeyboardInterrupt, SystemExit):
                self._sign_off(link, stop, beat)
                raise
            except Refused as refusal:
                if refusal.exit_code is not ExitCode.KEY:  # a newer process may have signed on by this key
                    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the refusal is what has to be told
                        self._sign_off(link, stop, beat)
                raise
            finally:
                stop.set()
                beat.join(timeout=BEAT_ENDS_S)

    @staticmethod
    def _sign_off(link: Link, stop: threading.Event, beat: threading.Thread) -> None:
        """Leave; a sign of life that is still under way must not arrive after that."""
        stop.set()
        beat.join(timeout=BEAT_ENDS_S)
        link.sign_off()

    def _note_release(self, link: Link) -> None:
        """Note the coordinator's release, and whether it will refuse this one: it does so with its first request."""
        with contextlib.suppress(Unreachable, RunOver):  # the next call says what is wrong with the line
            if (hello := link.hello()) is None:
                return
            self.status.coordinator_release = hello.release
            if hello.wire != WIRE_VERSION:
                theirs = f"the coordinator's release {hello.release} speaks wire version {hello.wire}"
                self._failed(f"{theirs}, this site's {__version__} wire version {WIRE_VERSION}: no run will take it")

    def _note_node_id(self, node_id: int) -> None:
        """Keep the node id, so that a process started after a kill is the same node."""
        if node_id != read_node_id(self._node_id_file):
            try:
                write_atomically(self._node_id_file, str(node_id).encode())
            except OSError as error:
                if not is_disk_full(error):
                    raise

    def _beat(self, link: Link, stop: threading.Event) -> None:
        """Signs of life while the main thread trains; what they learn, it reads."""
        while not stop.wait(HEARTBEAT_PAUSE_S):
            try:
                link.heartbeat()
                self.status.last_contact = time.time()
                self._ask_whether_over(link)
            except Unreachable:
                continue  # the main thread will notice
            except Refused as refusal:
                self._refusal = refusal
                return

    def _ask_whether_over(self, link: Link) -> None:
        """Interrupt the main thread where nobody waits for what it does."""
        if run_id := self._works_for:
            try:
                link.refuse_if_over(run_id)
            except RunOver:
                self._over = run_id
                _thread.interrupt_main(DROP_SIGNAL)

    def drop(self, number: int, frame: object) -> None:
        """Let go of the work on a run that has ended: the handler of ``DROP_SIGNAL``, which the main thread runs.

        Raises:
            WorkDropped: Wherever the main thread is in that work.
        """
        if self._works_for and self._works_for == self._over:
            raise WorkDropped

    # ------------------------------------------------------------------ messages

    def _work(self, link: Link) -> None:
        """Answer message after message, beginning with what an earlier process or connection left."""
        if self._unsent:
            self._send(link, *self._unsent)
        elif left := self._in_hand.left():
            self._take_up(link, *left)
        wait_s = POLL_S
        while True:
            if self._refusal:
                raise self._refusal
            self.status.state, self.status.phase = "waiting", ""
            asked = time.monotonic()
            received = link.receive(WAIT_S)
            self.status.last_contact = time.time()
            if received is None:
                if time.monotonic() - asked < WAIT_S / 2:
                    time.sleep(wait_s)
                    wait_s = min(wait_s * 1.2, MAX_POLL_S)
                continue
            if not self._in_hand.take(received):
                self._failed(f"no room on the disk of {self.settings.state}: free some")
            self._answer(link, received)
            wait_s = POLL_S

    def _take_up(self, link: Link, attempts: int, received: bytes) -> None:
        """Do again what an earlier process was killed at."""
        try:
            late = expired(received, time.time())
        except NotThere:
            late = True
        if late:
            self._in_hand.done()
        elif attempts >= MAX_ATTEMPTS:
            self._answer(link, received, attempts, f"the site's process died {attempts} times while working on this")
        else:
            self.tell("taking up again the work that was interrupted")
            self._answer(link, received, attempts)

    def _answer(self, link: Link, received: bytes, attempts: int = 0, give_up: str = "") -> None:
        began = time.monotonic()
        self.status.state = "working"
        try:
            message = link.message(received)
            reply = error_reply(message, SITE_RAISED, give_up) if give_up else self._worked(message, received, attempts)
        except RequestRefused as refused:
            reason, message = refused.reason, refused.message
            self._refusal = refused.ends or self._refusal
            note_refused(self.site, message, reason)
            self._failed(f"refused a message of run {message.metadata.run_id}: {reason}")
            reply = error_reply(message, BUNDLE_REFUSED, reason)
        except (RunOver, NotThere) as error:
            self._failed(f"a message is no longer wanted: {error}")
            self._in_hand.done()
            with contextlib.suppress(NotThere):
                link.let_go(received)  # else it would come again
            return
        except WorkDropped:
            self.tell(f"run {self.status.run} ended; the work on it is dropped")
            self._works_for = 0
            self._in_hand.done()
            return
        self._send(link, received, reply, time.monotonic() - began)

    def _send(self, link: Link, received: bytes, reply: Message, seconds: float) -> None:
        """Send a reply; what cannot be sent now is sent after the next connection."""
        self._unsent = (received, reply, seconds)
        try:
            link.reply(received, reply, seconds)
        except NotTaken as error:
            self._failed(f"the coordinator did not take the reply: {error}")
        except (RunOver, NotThere) as error:
            self._failed(f"the reply came too late: {error}")
        self._unsent = None
        self._in_hand.done()
        if self._refusal:
            raise self._refusal

    def _worked(self, message: Message, received: bytes, attempts: int) -> Message:
        """Have it answered; what is on the disk meanwhile counts this process as dead, should it die."""
        self._in_hand.take(received, attempts + 1)
        try:
            return self._replied(message)
        except (KeyboardInterrupt, SystemExit):
            self._in_hand.take(received, attempts)  # told to stop, not dead
            raise

    def _replied(self, message: Message) -> Message:
        """Have the app answer; say what was done."""
        began = time.monotonic()
        context = Context(message.metadata.run_id, 0, {}, RecordDict(), {})
        try:
            self._works_for = message.metadata.run_id
            self._note_phase(message)
            reply = self._app(message, context)
            self._works_for = 0
        except Exception as error:  # the site's process edge: the coordinator gets the reason, the site goes on
            self._works_for = 0
            if isinstance(error, WireVersionError):
                self._refusal = Refused(ExitCode.VERSION, str(error), "")
            self._failed(f"{self.status.phase} failed: {error}")
            return error_reply(message, SITE_RAISED, told(error))
        if reply.has_error():
            self._failed(f"{self.status.phase} of run {self.status.run}: this site {reply.error.reason}")
            return reply
        self._say_done(message, reply, time.monotonic() - began)
        return reply

    # ------------------------------------------------------------------ words

    def _note_refusal(self, refusal: Refusal) -> None:
        problem = f"the coordinator does not take this site into run {refusal.run[:8]}: {refusal.reason}"
        self._refusal = Refused(EXIT_CODES[refusal.kind], problem, "")

    def _failed(self, reason: str) -> None:
        self.status.failed(reason)
        self.tell(reason)

    def _note_phase(self, message: Message) -> None:
        fields = _fields(message)
        self.status.phase = message.metadata.message_type.rsplit(".", 1)[-1].replace("_", " ")
        self.status.run = printable(str(fields.get("run", ""))[:8])
        self.status.finished = ""
        if fields.get("test"):
            self.status.phase = "test"
        left_out, before = printable_lines(str(fields.get("left_out", ""))), self._left_out
        self._left_out = left_out
        if left_out and left_out != before:
            self._failed(f"run {self.status.run}: the reply of this site did not count in {left_out}")
        if message.metadata.message_type == MessageType.TRAIN:
            with contextlib.suppress(PlanRefused, TypeError, ValueError):  # the gate answers that with its reason
                plan = read_plan(fields.get("plan"), self.site.policy.maximum_plan_kb)
                self._note_pace(int(fields.get("round", 0)), plan.run.rounds)

    def _note_pace(self, server_round: int, rounds: int) -> None:
        """Round, rounds, and the time left by the pace since this process's first round of the run."""
        status, now = self.status, time.monotonic()
        if self._first is None or self._first[0] != status.run:
            self._first = (status.run, server_round, now)
        _, first_round, began = self._first
        status.round, status.rounds = server_round, rounds
        done = server_round - first_round
        status.seconds_left = (status.rounds - server_round + 1) * (now - began) / done if done > 0 else None

    def _say_done(self, message: Message, reply: Message, seconds: float) -> None:
        status, fields = self.status, _fields(reply)
        where = f"run {status.run}"
        if message.metadata.message_type != MessageType.TRAIN:
            self.tell(f"{where}: {status.phase} answered in {seconds:.1f} s")
            if status.phase == "roll call" and status.coordinator_release not in ("", __version__):
                self.tell(
                    f"{where}: the coordinator runs release {status.coordinator_release}, this site {__version__}"
                )
            if status.phase == "test":
                status.finished = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            return
        status.rounds_done += 1
        if "epsilon" in fields:
            status.privacy = privacy_status(self.site)
        sent = payload_bytes(reply.content) / 1e6
        loss = f", loss {fields['train_loss']:.3f}" if "train_loss" in fields else ""
        where += f": round {status.round} of {status.rounds}"
        self.tell(f"{where} trained in {seconds:.1f} s{loss}; {sent:.1f} MB to send")


def told(error: Exception) -> str:
    """What the coordinator hears of an error: our own words about the request, else only its kind.

    The text of any other error may hold a file's name, and a file's name a patient's.
    """
    if isinstance(error, WireError | FloatingPointError | BadInput):
        return str(error)
    if is_disk_full(error):
        return "no room on the site's disk; it has to free some"
    return f"{type(error).__name__} at the site; the site's own log has the text"


def _fields(message: Message) -> dict[str, Any]:
    """The scalar fields of one of our records, unchecked: for words only."""
    return small_fields(message.content) if message.has_content() else {}


@contextlib.contextmanager
def alone_in(state: Path) -> Iterator[None]:
    """Hold a site's folder for one process.

    Raises:
        BadInput: If another has it.
    """
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    with (state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput([of_second(state)]) from None
        remove_partial_files(state, below=True)
        yield
