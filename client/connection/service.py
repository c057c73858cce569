"""The process of ``flwr-client start``: it connects, answers messages, and keeps torch and the data loaded."""

import _thread
import contextlib
import datetime as dt
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from polyclinic.client.app import SiteOf, make_client_app
from polyclinic.client.connection.authority import record_first_connection
from polyclinic.client.connection.exit_codes import ClientExitCode, ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.client.connection.fleet_client import (
    BUNDLE_REFUSED_ERROR_CODE,
    SITE_ERROR_CODE,
    FleetClient,
    MessageContentGone,
    MessageUnreadable,
    ReplyRejected,
    RequestRefused,
    RunAlreadyEnded,
    is_message_expired,
    make_error_reply,
    read_message_id,
    read_stored_node_id,
)
from polyclinic.client.connection.pending import PendingMessage, SetAsideMessages
from polyclinic.client.connection.preflight import make_already_running_fault
from polyclinic.client.connection.status import ClientStatus
from polyclinic.client.connection.tls import check_coordinator_certificate
from polyclinic.client.connection.wire_agreement import agree_on_wire_version
from polyclinic.client.gate.gate import (
    UNREADABLE_RULE,
    AuditMark,
    record_patients,
    record_refused_request,
    record_unread_message,
)
from polyclinic.client.gate.incoming_request import PlanRefused, RequestTimeExceeded, read_plan
from polyclinic.client.site.patient_ledger import LedgerUnusable
from polyclinic.client.site.settings import SiteData
from polyclinic.client.site.site import Site
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.client.site.statements import SiteRecordSigner
from polyclinic.client.training.privacy import make_privacy_status
from polyclinic.common import __version__
from polyclinic.common.errors import BadInput, WireError, WireVersionError
from polyclinic.common.patients.opt_out import UNMATCHED_REMEDY, Identifiers, LeftOutPatients
from polyclinic.common.security.call_signatures import PROCESS_VARIABLE
from polyclinic.common.security.identity import SiteConnectionKit, format_public_key_line, read_private_key
from polyclinic.common.system.files import (
    is_disk_full,
    lock_file,
    open_own_file,
    remove_temporary_files,
    write_atomically,
)
from polyclinic.common.system.plain_text import make_printable_line, make_printable_lines, quote_for_shell
from polyclinic.common.system.resources import release_free_memory
from polyclinic.common.system.stopping import notify_of_stop_request
from polyclinic.common.system.timers import FIRST_RETRY_S, HEARTBEAT_PAUSE_S, MAX_RETRY_S, REFUSED_KEY_RETRY_S
from polyclinic.common.wire.canonical_bytes import read_small_fields
from polyclinic.common.wire.codec import count_payload_bytes
from polyclinic.common.wire.fleet_protocol import SCORING_TYPE, HelloAnswer
from polyclinic.common.wire.flower_messages import APPROVAL_ERROR_CODE
from polyclinic.common.wire.records import Refusal
from polyclinic.strategies.privacy.secure_aggregation.site import SiteSigningIdentity

LONG_POLL_S = 5.0
"""Time for which the coordinator may hold a call for a message; then the site checks the heartbeat thread's result."""
MIN_POLL_PAUSE_S = 0.03
"""First pause between two calls for a message if the coordinator answers at once that there is none."""
MAX_POLL_PAUSE_S = 1.0
"""Longest pause between two such calls."""
HEARTBEAT_STOP_TIMEOUT_S = 0.5
"""Time for which a closing connection waits for a heartbeat in progress."""
INTERRUPT_SIGNAL = signal.SIGUSR1
"""Signal with which the heartbeat thread interrupts the training thread."""
CERTIFICATE_WARNING_DAYS = 30
MAX_ATTEMPTS = 2
"""Number of processes that may die during the work on one message before the site sets the message aside.

A process that is stopped on request (SIGTERM, SIGINT, SIGHUP) does not count.
"""
EXIT_CODE_BY_REFUSAL = {"name": ClientExitCode.NAME, "version": ClientExitCode.VERSION}
"""Kind of refusal -> exit code, for the refusals that end the program because only this site can fix their cause.

Refused labels do not end the program: another site's labels may be the cause, and this site may fit the next run.
"""
REMEDY_FOR_LABELS = (
    "This program stays connected for other runs. After a change of site.toml, or if the coordinator admits more, stop"
    " it and start it again: the run then asks this site anew."
)
SET_ASIDE_RULE = "set aside"
"""Rule in the audit log for a message that made the program end before."""
FAILED_RULE = "message"
"""Rule in the audit log for a message at which the program raised an exception."""
MAX_PHASE_CHARACTERS = 60
MAX_RUN_NAME_CHARACTERS = 120
IMAGE_MESSAGE_TYPES = frozenset(
    {
        *(MessageType.TRAIN, MessageType.EVALUATE),
        *(f"{MessageType.QUERY}.roll_call", f"{MessageType.QUERY}.benefit", SCORING_TYPE),
    }
)
"""Types of messages that read images, so that the site first asks who opted out.

The messages of secure aggregation are not listed, because they belong to a round that has already read the images.
"""
Tell = Callable[[str], None]


class IdleLimitReached(Exception):
    """Raised if no message came within the time of ``--until-idle``."""


class PlanDecided(Exception):
    """Raised after a person approved or denied a plan that this site refused, so that the coordinator asks again."""


class RunWorkInterrupted(BaseException):
    """Raised in the main thread to stop the work for a run that has ended."""


@dataclass
class HospitalMessageLoop:
    """Connects one site to the coordinator, answers its messages and reconnects after each lost connection.

    Attributes:
        tell: Prints one line for the hospital's staff.
        status: The site's status, which ``flwr-client status`` shows.
        make_app: Builds the ClientApp that answers messages; benchmarks pass an app that does not train.
        idle_limit_s: Time without a message after which the loop ends; None for a loop without end.
        data: The site's images, with patients who opted out; None if nobody can opt out.
        opted_out: Identifiers of the patients whom ``site`` leaves out.
    """

    settings: SiteSettings
    kit: SiteConnectionKit
    site: Site
    tell: Tell
    status: ClientStatus
    make_app: Callable[[SiteOf, Callable[[Refusal], None], Callable[[str], None]], ClientApp] = make_client_app
    idle_limit_s: float | None = None
    data: SiteData | None = None
    opted_out: Identifiers = field(default_factory=dict)
    _refusal: ConnectionNotAccepted | None = None
    _unsent: tuple[bytes, Message] | None = None
    _hello: HelloAnswer | None = None  # the coordinator's answer when this site connected
    _left_out: str = ""  # rounds in which this site's reply did not count, and why, as the last message states
    _current_run: int = 0  # the run whose message is being answered
    _ended_run: int = 0  # a run that ended while this site worked for it
    _first_round: tuple[str, int, float] | None = None  # run, number and time of this process's first round
    _has_memory_to_release: bool = False  # malloc still holds memory of answered messages

    def __post_init__(self) -> None:
        def record_refusal(refusal: Refusal) -> None:
            problem = f"the coordinator does not take this site into run {refusal.run[:8]}: {refusal.reason}"
            if refusal.kind in EXIT_CODE_BY_REFUSAL:
                self._refusal = ConnectionNotAccepted(EXIT_CODE_BY_REFUSAL[refusal.kind], problem, "")
            else:
                self._report_error(problem)
                self.tell(REMEDY_FOR_LABELS)

        self._app = self.make_app(lambda context: self.site, record_refusal, self.tell)
        self._pending = PendingMessage(self.settings.state_folder / "in-hand")
        self._set_aside = SetAsideMessages(self.settings.state_folder / "set-aside")
        self._node_id_file = self.settings.state_folder / "node-id"
        self._key = read_private_key(self.settings.key_path)
        self._process = os.environ.get(PROCESS_VARIABLE) or secrets.token_hex(8)
        self._last_work = time.monotonic()
        authority = x509.load_pem_x509_certificate(self.kit.ca_certificate.encode())
        self._statements = SiteRecordSigner(self.settings.state_folder, self.site.name, self._key, authority)
        identity = SiteSigningIdentity(self._key, format_public_key_line(self._key, ""))
        self.site = replace(self.site, identity=identity, authority=authority)

    # ------------------------------------------------------------------ connections

    def run_message_loop(self) -> None:
        """Connect, answer messages, and reconnect after each lost connection; never return.

        Raises:
            IdleLimitReached: If no message has come for :attr:`idle_limit_s`.
            ConnectionNotAccepted: If the coordinator does not accept this site, or this site the coordinator.
        """
        with notify_of_stop_request(self._pending.undo_death_count):
            self._connect_and_answer_messages()

    def _connect_and_answer_messages(self) -> None:
        wait_s = FIRST_RETRY_S
        patience_ends = 0.0
        while True:
            self.status.state = "connecting"
            try:
                with self._open_connection() as link:
                    wait_s = FIRST_RETRY_S
                    self._answer_messages(link)
            except ConnectionNotAccepted as refusal:
                # A coordinator that has just opened its port may still be registering the admitted sites.
                patience_ends = patience_ends or time.monotonic() + REFUSED_KEY_RETRY_S
                if not refusal.may_pass or self._refusal or time.monotonic() > patience_ends:
                    raise
                time.sleep(FIRST_RETRY_S)
            except PlanDecided as verdicts:
                # The coordinator asks a site again that connects as a new process.
                self._process = secrets.token_hex(8)
                self.status.last_error = ""
                self.tell(f"a plan was {verdicts} here: connecting anew, so that the coordinator asks again")
            except (CoordinatorUnreachable, RunAlreadyEnded, MessageContentGone) as error:
                # The last two exceptions come if the coordinator answers a call as if it were about a run or message.
                if str(error) != self.status.last_error or self.status.state != "connecting":
                    self.tell(f"no connection to {self.kit.address}: {error}; trying again for as long as it takes")
                self.status.record_last_error(str(error))
                self._end_if_idle()
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, MAX_RETRY_S)

    @contextlib.contextmanager
    def _open_connection(self) -> Iterator[FleetClient]:
        self.status.certificate_days = days = check_coordinator_certificate(self.kit.address, self.kit.ca_certificate)
        authority = self.kit.ca_certificate.encode()
        with FleetClient(
            self.kit.address, authority, self._key, self._statements, self._process, self.site.policy
        ) as link:
            self._hello = hello = agree_on_wire_version(link, self.tell)
            if hello is not None:
                self.status.coordinator_release = hello.release
                self.status.coordinator_wire = hello.newest_wire
            last_node_id = read_stored_node_id(self._node_id_file)
            node_id = link.activate_node(last_node_id)
            record_first_connection(self.settings.state_folder, self.kit)
            if node_id != last_node_id:  # stored, so that a process started after a kill registers as the same node
                try:
                    write_atomically(self._node_id_file, str(node_id).encode())
                except OSError as error:
                    if not is_disk_full(error):
                        raise
            self.tell(f"connected to {self.kit.coordinator} at {self.kit.address}")
            if days < CERTIFICATE_WARNING_DAYS:
                self.tell(f"the coordinator's certificate expires in {days:.0f} days; it should renew it")
            stop = threading.Event()
            heartbeat = threading.Thread(target=self._send_heartbeats, args=(link, stop), name="heartbeat", daemon=True)
            heartbeat.start()

            def stop_heartbeats_and_deactivate() -> None:  # a heartbeat in progress must not arrive afterwards
                stop.set()
                heartbeat.join(timeout=HEARTBEAT_STOP_TIMEOUT_S)
                link.deactivate_node()

            try:
                yield link
            except (KeyboardInterrupt, SystemExit):
                stop_heartbeats_and_deactivate()
                raise
            except ConnectionNotAccepted as refusal:
                if refusal.exit_code is not ClientExitCode.KEY:  # a newer process may have signed on by this key
                    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # report the refusal, not the interruption
                        stop_heartbeats_and_deactivate()
                raise
            finally:
                stop.set()
                heartbeat.join(timeout=HEARTBEAT_STOP_TIMEOUT_S)

    def _send_heartbeats(self, link: FleetClient, stop: threading.Event) -> None:
        """Send heartbeats until ``stop`` is set; interrupt the main thread if the run that it works for has ended."""
        while not stop.wait(HEARTBEAT_PAUSE_S):
            try:
                link.send_heartbeat()
                self.status.last_contact = time.time()
                if run_id := self._current_run:
                    try:
                        link.check_run_active(run_id)
                    except RunAlreadyEnded:
                        self._ended_run = run_id
                        _thread.interrupt_main(INTERRUPT_SIGNAL)
            except (CoordinatorUnreachable, RunAlreadyEnded):
                continue  # the main thread will notice
            except ConnectionNotAccepted as refusal:
                self._refusal = refusal
                return

    def interrupt_ended_work(self, number: int, frame: object) -> None:
        """Handle :data:`INTERRUPT_SIGNAL`: stop the main thread's work if its run has ended.

        Raises:
            RunWorkInterrupted: At the current place of the main thread's computation.
        """
        if self._current_run and self._current_run == self._ended_run:
            raise RunWorkInterrupted

    # ------------------------------------------------------------------ messages

    def _answer_messages(self, link: FleetClient) -> None:
        """Answer messages without end, beginning with a message that an earlier process did not finish."""
        if self._unsent:
            self._send_reply(link, *self._unsent)
        elif pending := self._pending.read_message():  # an earlier process was killed during this work
            attempts, unfinished = pending
            try:
                expired = is_message_expired(unfinished, time.time())
            except MessageContentGone:
                expired = True
            if expired:
                self._pending.remove_message()
            elif attempts >= MAX_ATTEMPTS:
                self._set_message_aside(link, unfinished, attempts)
            else:
                self.tell("taking up again the work that was interrupted")
                self._answer_message(link, unfinished, attempts)
                self._last_work = time.monotonic()

        wait_s = MIN_POLL_PAUSE_S
        while True:
            if self._refusal:
                raise self._refusal
            self.status.state = "waiting"
            self.status.phase = ""
            began = time.monotonic()
            received = link.receive_message(LONG_POLL_S)
            self.status.last_contact = time.time()
            if received is None:
                if self._has_memory_to_release:
                    # Not after each message: a round that follows at once needs the same memory again.
                    release_free_memory()
                    self._has_memory_to_release = False
                self._end_if_idle()
                self._reconnect_after_decision()
                if time.monotonic() - began < LONG_POLL_S / 2:
                    time.sleep(wait_s)
                    wait_s = min(wait_s * 1.2, MAX_POLL_PAUSE_S)
                continue

            if self._set_aside.is_set_aside(read_message_id(received)):
                self._refuse_unread_message(link, received, SET_ASIDE_RULE, "it ended this site's program before")
            else:
                self._answer_message(link, received)
            wait_s = MIN_POLL_PAUSE_S
            self._last_work = time.monotonic()
            self._has_memory_to_release = True

    def _reconnect_after_decision(self) -> None:
        """Connect as a new process if a refused plan was approved or denied since, so that the coordinator asks again.

        Otherwise the coordinator would wait for a denied plan until its deadline.

        Raises:
            PlanDecided: If there is such a decision; the caller then reconnects.
        """
        approvals = self.site.approvals
        verdicts = {} if approvals is None else approvals.find_new_decisions()
        if not verdicts:
            return
        is_approval = any(not verdict.reason for verdict in verdicts.values())
        word = "approved" if is_approval else "denied"
        if PROCESS_VARIABLE in os.environ:  # flwr-client slurm watch connects under the same process id
            self.tell(f"a plan was {word} here: stop flwr-client slurm watch and start it again")
            return
        raise PlanDecided(word)

    def _end_if_idle(self) -> None:
        if self.idle_limit_s is not None and time.monotonic() - self._last_work >= self.idle_limit_s:
            raise IdleLimitReached

    def _answer_message(self, link: FleetClient, received: bytes, attempts: int = 0) -> None:
        """Fetch the content of a received message, do the requested work, and send the reply.

        No message ends the program. A message that cannot be read, or at which our code raises an exception, is
        refused, written to the audit log and answered with an error. Only other causes end the program: a requested
        stop, a full disk, or a coordinator that does not accept this site.

        Args:
            attempts: Number of processes that died while they worked on this message.
        """
        self.status.state = "working"
        try:
            # Stored before the message is read, so that a process that dies at it is counted.
            if not self._pending.begin_work(received, attempts):
                self._report_error(f"no room on the disk of {self.settings.state_folder}: free some")
            reply = self._fetch_message_and_make_reply(link, received)
        except (RunAlreadyEnded, MessageContentGone) as error:
            self._report_error(f"a message is no longer wanted: {error}")
            self._pending.remove_message()
            with contextlib.suppress(MessageContentGone):
                link.confirm_receipt(received)  # otherwise the message would come again
            return
        except RunWorkInterrupted:
            self.tell(f"run {self.status.run} ended; the work on it is dropped")
            self._current_run = 0
            self._pending.remove_message()
            return
        except BaseException as error:
            if _has_outside_cause(error):
                self._pending.store_message(received, attempts)
            raise
        self._send_reply(link, received, reply, attempts)

    def _fetch_message_and_make_reply(self, link: FleetClient, received: bytes) -> Message:
        audit = AuditMark(self.site)
        try:
            return self._read_and_answer_request(link, received)
        except MessageUnreadable as error:
            rule = UNREADABLE_RULE
            reason = str(error)
        except (CoordinatorUnreachable, ConnectionNotAccepted, RunAlreadyEnded, MessageContentGone):
            raise
        except (Exception, RequestTimeExceeded) as error:  # a defect of our code; the next message may work
            if is_disk_full(error):
                raise
            rule = FAILED_RULE
            reason = f"{type(error).__name__} while this site read it"
        self._current_run = 0
        if not audit.has_new_entry():
            record_unread_message(self.site, received, rule, reason)
        self._report_error(f"refused a message: {reason}")
        return make_error_reply(link.make_unread_message(received), SITE_ERROR_CODE, reason)

    def _read_and_answer_request(self, link: FleetClient, received: bytes) -> Message:
        """Fetch a request and do its work; answer a refused request with an error."""
        try:
            return self._make_reply(link.fetch_message_content(received))
        except RequestRefused as refused:
            reason = refused.reason
            message = refused.message
            self._refusal = self._confirm_final_refusal(refused.ends) or self._refusal
            record_refused_request(self.site, message, reason, refused.rule)
            self._report_error(f"refused a message of run {message.metadata.run_id}: {reason}")
            return make_error_reply(message, BUNDLE_REFUSED_ERROR_CODE, reason)

    def _set_message_aside(self, link: FleetClient, received: bytes, attempts: int) -> None:
        """Move a message that ended the program too often to the folder ``set-aside``, and answer it with an error."""
        reason = f"the site's process died {attempts} times while working on this"
        with contextlib.suppress(OSError):  # a full disk: the message is not worked on again in any case
            self._set_aside.set_message_aside(read_message_id(received), received, reason)
        self.tell(f"a message was put aside into {self.settings.state_folder / 'set-aside'}: {reason}")
        self._refuse_unread_message(link, received, SET_ASIDE_RULE, reason)

    def _refuse_unread_message(self, link: FleetClient, received: bytes, rule: str, reason: str) -> None:
        """Answer a message with an error without reading its content, and write the refusal to the audit log."""
        record_unread_message(self.site, received, rule, reason)
        self._report_error(f"refused a message: {reason}")
        reply = make_error_reply(link.make_unread_message(received), SITE_ERROR_CODE, reason)
        self._send_reply(link, received, reply, MAX_ATTEMPTS)

    def _send_reply(self, link: FleetClient, received: bytes, reply: Message, attempts: int = 0) -> None:
        """Send a reply; after a lost connection, the next connection sends it again.

        Args:
            attempts: Number of earlier processes that died while they worked on this message.
        """
        self._unsent = (received, reply)
        try:
            link.send_reply(received, reply)
        except ReplyRejected as error:
            self._report_error(f"the coordinator did not take the reply: {error}")
        except (RunAlreadyEnded, MessageContentGone) as error:
            self._report_error(f"the reply came too late: {error}")
        except (KeyboardInterrupt, SystemExit, CoordinatorUnreachable, ConnectionNotAccepted):
            self._pending.store_message(received, attempts)
            raise
        except Exception as error:  # a defect of our code, for instance at text that the reply repeats
            if is_disk_full(error):
                raise
            reason = f"{type(error).__name__} while the reply was sent"
            if not reply.has_error():
                self._refuse_unread_message(link, received, FAILED_RULE, reason)
                return
            self._drop_unsendable_reply(link, received, reason)
        self._unsent = None
        self._pending.remove_message()
        if self._refusal:
            raise self._refusal

    def _drop_unsendable_reply(self, link: FleetClient, received: bytes, reason: str) -> None:
        """Write to the audit log that a reply cannot be sent, and confirm its message.

        Without the confirmation the coordinator would send the message again.
        """
        record_unread_message(self.site, received, FAILED_RULE, reason)
        self._report_error(f"dropped a reply: {reason}")
        with contextlib.suppress(MessageContentGone):
            link.confirm_receipt(received)

    def _confirm_final_refusal(self, refusal: ConnectionNotAccepted | None) -> ConnectionNotAccepted | None:
        """Return a refusal that has to end the program; None if the coordinator's answer to ``Hello`` contradicts it.

        A message can name a wrong wire version or site name. It ends the program only if the coordinator stated the
        same when this site connected, or stated nothing. With another wire version this site would not be connected.
        """
        hello = self._hello
        if refusal is None or hello is None:
            return refusal
        if refusal.exit_code is ClientExitCode.VERSION:
            return None
        if refusal.exit_code is ClientExitCode.NAME and hello.site == self.site.name:
            return None
        return refusal

    def _make_reply(self, message: Message) -> Message:
        """Return the ClientApp's reply or an error reply, and print a line about the work."""
        began = time.monotonic()
        audit = AuditMark(self.site)
        context = Context(message.metadata.run_id, 0, {}, RecordDict(), {})
        try:
            self._current_run = message.metadata.run_id
            self._record_work_phase(message)
            if message.metadata.message_type in IMAGE_MESSAGE_TYPES:
                self.leave_out_opted_out_patients()
            reply = self._app(message, context)
            self._current_run = 0
        except Exception as error:  # the site continues; the coordinator gets the reason
            self._current_run = 0
            if isinstance(error, WireVersionError):
                refusal = ConnectionNotAccepted(ClientExitCode.VERSION, str(error), "")
                self._refusal = self._confirm_final_refusal(refusal) or self._refusal
            reason = describe_error_for_coordinator(error)
            if not audit.has_new_entry():  # the error came before the gate, which writes an entry for each message
                record_refused_request(self.site, message, reason, FAILED_RULE)
            self._report_error(f"{self.status.phase} failed: {error}")
            return make_error_reply(message, SITE_ERROR_CODE, reason)
        if reply.has_error():
            if reply.error.code == APPROVAL_ERROR_CODE:  # the gate has printed why
                self._report_waiting_plan()
                return reply
            self._report_error(f"{self.status.phase} of run {self.status.run}: this site {reply.error.reason}")
            return reply
        self._record_and_print_work_result(message, reply, time.monotonic() - began)
        return reply

    def _report_waiting_plan(self) -> None:
        """Print the hash of the plan for which the coordinator waits; earlier plans may have the same title."""
        folder = quote_for_shell(self.settings.folder)
        sha256 = "" if self.site.approvals is None else self.site.approvals.latest_refused_text[:12]
        if sha256:
            command = f"flwr-client plans show {folder} {sha256}"
            self._report_error(f"plan {sha256} waits for approval here: {command}")
            return
        self._report_error(f"a plan waits for approval here: flwr-client plans list {folder}")

    def leave_out_opted_out_patients(self) -> None:
        """Read the list of patients who opted out, and leave their images out from now on.

        Raises:
            OptOutsUnknown: If the command of ``data.opt_out`` fails, or ``site.toml`` cannot be read.
            BadInput: If no training image is left.
        """
        if self.data is None:
            return
        opted_out = self.data.opt_out.read_identifiers()
        if opted_out.keys() == self.opted_out.keys():
            return
        site, left_out = self.data.make_site(opted_out)
        connection_fields = {name: getattr(self.site, name) for name in ("identity", "approvals", "authority")}
        self.site = replace(site, **connection_fields)
        self.opted_out = opted_out
        self.report_left_out_patients(left_out)

    def report_left_out_patients(self, left_out: LeftOutPatients) -> None:
        """Report to the staff, and count in the audit, the patients left out and the opt-outs that fit no patient."""
        self.tell(left_out.describe())
        if warning := left_out.warn_about_unmatched():
            self.tell(f"{warning} {UNMATCHED_REMEDY}")
        record_patients(self.site, opted_out=left_out.count, opted_out_unmatched=len(left_out.unmatched))

    # ------------------------------------------------------------------ status and log lines

    def _report_error(self, reason: str) -> None:
        self.status.record_last_error(reason)
        self.tell(reason)

    def _record_work_phase(self, message: Message) -> None:
        """Record a message's run, phase and round in the status, and estimate the time left from the rounds so far."""
        fields = _read_message_scalar_fields(message)
        status = self.status
        kind = message.metadata.message_type.rsplit(".", 1)[-1].replace("_", " ")
        self.status.phase = make_printable_line(kind, MAX_PHASE_CHARACTERS)
        run = make_printable_line(str(fields.get("run", ""))[:8])
        if run != status.run:
            status.run = run
            status.round = 0
            status.rounds = 0
            status.seconds_left = None
        self.status.finished = ""
        if fields.get("test"):
            self.status.phase = "test"
        left_out = make_printable_lines(str(fields.get("left_out", "")))

        earlier_left_out = self._left_out
        self._left_out = left_out
        if left_out and left_out != earlier_left_out:
            self._report_error(f"run {self.status.run}: the reply of this site did not count in {left_out}")

        if message.metadata.message_type == MessageType.TRAIN:
            # The gate answers a fault of the plan with its reason.
            with contextlib.suppress(PlanRefused, TypeError, ValueError, OverflowError):
                plan = read_plan(fields.get("plan"), self.site.policy.maximum_plan_kb)
                server_round = int(fields.get("round", 0))
                now = time.monotonic()
                if self._first_round is None or self._first_round[0] != status.run:
                    self._first_round = (status.run, server_round, now)
                _, first_round, began = self._first_round
                status.round = server_round
                status.rounds = plan.run.rounds
                rounds_done = server_round - first_round
                rounds_left = status.rounds - server_round + 1
                status.seconds_left = rounds_left * (now - began) / rounds_done if rounds_done > 0 else None

    def _describe_run_name(self, message: Message) -> str:
        """Return the run's name in brackets if a message is a roll call; empty if the coordinator gave none."""
        if self.status.phase != "roll call":
            return ""
        with contextlib.suppress(PlanRefused, TypeError, ValueError):
            plan = read_plan(_read_message_scalar_fields(message).get("plan"), self.site.policy.maximum_plan_kb)
            return f" ({make_printable_line(plan.run.name, MAX_RUN_NAME_CHARACTERS)})" if plan.run.name else ""
        return ""

    def _record_and_print_work_result(self, message: Message, reply: Message, seconds: float) -> None:
        status = self.status
        fields = _read_message_scalar_fields(reply)
        run_label = f"run {status.run}"
        if message.metadata.message_type != MessageType.TRAIN:
            self.tell(f"{run_label}{self._describe_run_name(message)}: {status.phase} answered in {seconds:.1f} s")
            if status.phase == "roll call" and status.coordinator_release not in ("", __version__):
                self.tell(
                    f"{run_label}: the coordinator runs release {status.coordinator_release}, this site {__version__}"
                )
            if status.phase == "test":
                status.finished = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            return
        status.rounds_done += 1
        if "epsilon" in fields:
            try:
                status.privacy = make_privacy_status(self.site)
            except LedgerUnusable as error:  # the next request is answered with an error for the same reason
                self._report_error(str(error))
        sent = count_payload_bytes(reply.content) / 1e6
        loss = f", loss {fields['train_loss']:.3f}" if "train_loss" in fields else ""
        run_label += f": round {status.round} of {status.rounds}"
        self.tell(f"{run_label} trained in {seconds:.1f} s{loss}; {sent:.1f} MB to send")


def _has_outside_cause(error: BaseException) -> bool:
    """Return True if the error has a cause outside of the message, so that the message is not blamed for it."""
    outside_causes = (KeyboardInterrupt, SystemExit, CoordinatorUnreachable, ConnectionNotAccepted)
    return isinstance(error, outside_causes) or is_disk_full(error)


def describe_error_for_coordinator(error: Exception) -> str:
    """Return a text about an exception that discloses nothing of a patient to the coordinator.

    For a fault of the request, a diverged training and a full disk, the text is the program's own. For any other
    exception it names only the class, because the exception's text may contain a file name with a patient's name.
    """
    if isinstance(error, WireError | FloatingPointError | BadInput):
        return str(error)
    if is_disk_full(error):
        return "no room on the site's disk; it has to free some"
    return f"{type(error).__name__} at the site; the site's own log has the text"


def _read_message_scalar_fields(message: Message) -> dict[str, Any]:
    """Return the scalar fields of a message's record, unchecked; empty if the message has no content."""
    return read_small_fields(message.content) if message.has_content() else {}


@contextlib.contextmanager
def lock_site_folder(state: Path) -> Iterator[None]:
    """Lock a site's state folder, so that only one process uses it.

    Raises:
        BadInput: If another process holds the lock.
    """
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    with open_own_file(state / "lock", "wb") as file:
        lock_file(file, make_already_running_fault(state))
        remove_temporary_files(state, below=True)
        yield
