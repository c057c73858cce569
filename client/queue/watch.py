"""The program that keeps a site connected without a GPU, and submits a job to a queue when a request waits.

It reads no image and does not import torch. It receives only the announcement of a message. The coordinator sends an
unanswered message again, so the job's ``flwr-client start`` receives it too. Both programs use one process id, so for
the coordinator they are one process, and the site stays connected while the job waits in the queue.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polyclinic.client.connection.exit_codes import ConnectionNotAccepted, CoordinatorUnreachable
from polyclinic.client.connection.fleet_client import (
    FleetClient,
    MessageContentGone,
    RunAlreadyEnded,
    read_message_id,
    read_stored_node_id,
)
from polyclinic.client.connection.tls import check_coordinator_certificate
from polyclinic.client.connection.wire_agreement import agree_on_wire_version
from polyclinic.client.queue.slurm import LOG_FILE, JobState
from polyclinic.client.queue.submitted_job import (
    SubmittedJob,
    find_last_reply,
    hash_message_id,
    read_submitted_job,
    remove_submitted_job,
)
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import ProgramCannotContinue
from polyclinic.common.security.identity import SiteConnectionKit, read_private_key
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.timers import FIRST_RETRY_S, HEARTBEAT_PAUSE_S, MAX_RETRY_S, REFUSED_KEY_RETRY_S

JOB_POLL_S = 15.0
"""Pause between two calls that ask the queue for the state of a job."""
UNANSWERED_JOB_PAUSE_S = 20.0
"""Pause after a job without an answer; it is twice as long after the second such job in a row."""
MAX_UNANSWERED_JOBS = 3
"""The program ends after so many consecutive jobs without an answer."""


class JobQueue(Protocol):
    """Interface of a job queue, such as :class:`polyclinic.client.queue.slurm.SlurmQueue`."""

    def submit_job(self, process: str) -> str:
        """Submit a job that uses this process id; return the job's number."""
        ...

    def read_job_state(self, job: str) -> JobState:
        """Return the state of a job."""
        ...


def find_listed_job(state_folder: Path, queue: JobQueue) -> tuple[SubmittedJob, JobState] | None:
    """Return the last job submitted for a state folder, with its state; None if it is over."""
    job = read_submitted_job(state_folder)
    if job is None:
        return None
    state = queue.read_job_state(job.number)
    return None if state is JobState.OVER else (job, state)


@dataclass
class QueueWatcher:
    """Connects a site, waits for messages, and submits a job for them.

    Attributes:
        tell: Prints one line for the hospital's staff.
        job_poll_s: Pause between two calls that ask the queue for the state of a job.
        job_pause_s: Pause after a job without an answer.
    """

    settings: SiteSettings
    kit: SiteConnectionKit
    queue: JobQueue
    tell: Callable[[str], None]
    job_poll_s: float = JOB_POLL_S
    job_pause_s: float = UNANSWERED_JOB_PAUSE_S
    _process: str = field(default_factory=lambda: secrets.token_hex(8))
    _submitted: SubmittedJob | None = None  # the latest job, which may be over
    _is_listed: bool = False  # the latest job waits or runs
    _last_state: JobState = JobState.OVER
    _asked_at: float = 0.0
    _pause_ends: float = 0.0
    _error: str = ""

    def watch(self) -> None:
        """Connect and reconnect, submit jobs; never return.

        Raises:
            ConnectionNotAccepted: If the coordinator does not accept this site, or this site the coordinator.
            ProgramCannotContinue: If several jobs in a row answered nothing.
            BadInput: If the queue refuses a job.
        """
        self._resume_earlier_job()
        wait_s = FIRST_RETRY_S
        patience_ends = time.monotonic() + REFUSED_KEY_RETRY_S
        while True:
            try:
                with self._open_connection() as link:
                    self._error = ""
                    wait_s = FIRST_RETRY_S
                    self._watch_messages(link)
            except ConnectionNotAccepted as refusal:
                # A coordinator that has just opened its port may still be registering the admitted sites.
                if not refusal.may_pass or time.monotonic() > patience_ends:
                    raise
                time.sleep(FIRST_RETRY_S)
            except (CoordinatorUnreachable, RunAlreadyEnded, MessageContentGone) as error:
                # RunAlreadyEnded: the stopped job has disconnected the site, and this program connects it again.
                if isinstance(error, CoordinatorUnreachable) and str(error) != self._error:
                    self.tell(f"no connection to {self.kit.address}: {error}; trying again for as long as it takes")
                self._error = str(error)
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, MAX_RETRY_S)
                patience_ends = time.monotonic() + REFUSED_KEY_RETRY_S

    def _resume_earlier_job(self) -> None:
        """Continue with the job that an earlier program submitted for this folder, if it waits or runs.

        This program then uses the job's process id; with a new one, the coordinator would refuse the job.
        """
        state_folder = self.settings.state_folder
        self._submitted = read_submitted_job(state_folder)
        # The id of an ended job is not used, because the coordinator refuses it after another program has connected.
        if (listed := find_listed_job(state_folder, self.queue)) is None:
            return
        job, state = listed
        self._process = job.process
        self._is_listed = True
        self._last_state = state
        self.tell(f"job {job.number}, submitted before this program started, is {state.value}")

    @contextmanager
    def _open_connection(self) -> Iterator[FleetClient]:
        check_coordinator_certificate(self.kit.address, self.kit.ca_certificate)
        key = read_private_key(self.settings.key_path)
        authority = self.kit.ca_certificate.encode()
        with FleetClient(self.kit.address, authority, key, None, self._process, self.settings.file.policy) as link:
            agree_on_wire_version(link, self.tell)
            node_id_file = self.settings.state_folder / "node-id"
            last_node_id = read_stored_node_id(node_id_file)
            node_id = link.activate_node(last_node_id)
            if node_id != last_node_id:
                write_atomically(node_id_file, str(node_id).encode())
            idle = "" if self._is_listed else "; no job runs while nothing is asked"
            self.tell(f"connected to {self.kit.coordinator} at {self.kit.address}{idle}")
            yield link

    def _watch_messages(self, link: FleetClient) -> None:
        while True:
            if self._is_listed:
                self._hold_connection_while_job_is_listed(link)
            try:
                self._hold_connection_during_pause(link)
                received = link.receive_message(HEARTBEAT_PAUSE_S)
                if received is not None:
                    self._submit_job_for_message(read_message_id(received))
                link.send_heartbeat()
            except SystemExit:
                link.deactivate_node()
                self.tell("stopped on request; the site has signed off")
                raise

    def _submit_job_for_message(self, message_id: str) -> None:
        message = hash_message_id(message_id)
        last_reply = find_last_reply(self.settings.state_folder)
        earlier = self._submitted
        jobs_in_a_row = 1 if earlier is None else earlier.make_next_job_count(message, last_reply)
        if earlier is not None and jobs_in_a_row > MAX_UNANSWERED_JOBS:
            remove_submitted_job(self.settings.state_folder)  # after a repair, the next program counts from one
            problem = f"{MAX_UNANSWERED_JOBS} jobs in a row ended without an answer, the last one was {earlier.number}."
            remedy = (
                f"The reason is in {self.settings.folder / LOG_FILE}: a fault, too little --time for one round, or a "
                "job that waited in the queue until the coordinator went on without it."
            )
            raise ProgramCannotContinue(f"{problem} {remedy}")
        number = self.queue.submit_job(self._process)
        self._submitted = SubmittedJob(number, self._process, message, jobs_in_a_row, last_reply)
        self._submitted.store(self.settings.state_folder)
        self._is_listed = True
        self._last_state = JobState.QUEUED
        self._asked_at = time.monotonic()
        self.tell(f"a request waits: submitted job {number}")

    def _hold_connection_while_job_is_listed(self, link: FleetClient) -> None:
        """Send heartbeats until the job is over; if this program is stopped, the job stays in the queue."""
        job = self._submitted
        assert job is not None  # a job is listed
        try:
            while True:
                if time.monotonic() - self._asked_at >= self.job_poll_s:
                    self._asked_at = time.monotonic()
                    state = self.queue.read_job_state(job.number)
                    if state not in (self._last_state, JobState.UNKNOWN):
                        self.tell(f"job {job.number} is {state.value}")
                        self._last_state = state
                    if state is JobState.OVER:
                        self._end_job(job)
                        return
                link.send_heartbeat()
                time.sleep(min(HEARTBEAT_PAUSE_S, self.job_poll_s))
        except SystemExit:
            self.tell(f"stopped on request; job {job.number} stays: scancel {job.number} ends it too")
            raise

    def _end_job(self, job: SubmittedJob) -> None:
        """Record that a job is over; start a pause if it answered nothing."""
        self._is_listed = False
        has_reply = find_last_reply(self.settings.state_folder) != job.last_reply
        if not has_reply and job.jobs_in_a_row < MAX_UNANSWERED_JOBS:
            pause_s = self.job_pause_s * job.jobs_in_a_row
            self._pause_ends = time.monotonic() + pause_s
            self.tell(
                f"job {job.number} answered nothing; the next one is submitted in {pause_s:.0f} s at the earliest"
            )

    def _hold_connection_during_pause(self, link: FleetClient) -> None:
        """Send heartbeats until the pause after a job without an answer is over."""
        while (left_s := self._pause_ends - time.monotonic()) > 0:
            link.send_heartbeat()
            time.sleep(min(HEARTBEAT_PAUSE_S, left_s))
