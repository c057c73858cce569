"""The program that keeps a site connected without a GPU, and submits a job to a queue when a request waits.

It reads no image and imports no torch. It takes a message's announcement only; the coordinator hands an unanswered
message out again, so that the job's ``flwr-client start`` receives it. Both call the coordinator under one process id:
for the coordinator they are one process, and the site stays connected while the job waits in the queue.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from polyclinic.client.queue.slurm import JobState
from polyclinic.client.site.site_file import SiteSettings
from polyclinic.common.errors import ProgramCannotContinue
from polyclinic.common.security.identity import SiteConnectionKit, read_private_key
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.timers import FIRST_RETRY_S, HEARTBEAT_PAUSE_S, KEY_PATIENCE_S, MAX_RETRY_S

JOB_LOOK_S = 15.0
"""Pause between two questions to the queue about a job."""
MAX_JOBS = 3
"""Number of jobs in a row that may end without an answer to one message, before the program ends with the reason."""


class JobQueue(Protocol):
    """A queue of jobs, as :class:`polyclinic.client.queue.slurm.SlurmQueue`."""

    def submit_job(self, process: str) -> str:
        """Submit the job with the process id that it has to use; return the job's number."""
        ...

    def read_job_state(self, job: str) -> JobState:
        """Return the state of a job."""
        ...


@dataclass
class QueueWatcher:
    """Connects a site, waits for messages, and submits a job for them.

    Attributes:
        tell: Prints one line for the hospital's staff.
        job_look_s: Pause between two questions to the queue about a job.
    """

    settings: SiteSettings
    kit: SiteConnectionKit
    queue: JobQueue
    tell: Callable[[str], None]
    job_look_s: float = JOB_LOOK_S
    _process: str = field(default_factory=lambda: secrets.token_hex(8))
    _job: str = ""
    _last_state: JobState = JobState.OVER
    _asked_at: float = 0.0
    _message: str = ""  # the message that the latest job was submitted for
    _jobs: int = 0  # number of jobs in a row for that message
    _error: str = ""

    def watch(self) -> None:
        """Connect and reconnect, submit jobs; never return.

        Raises:
            ConnectionNotAccepted: If the coordinator does not accept this site, or this site the coordinator.
            ProgramCannotContinue: If several jobs in a row did not answer one message.
            BadInput: If the queue refuses a job.
        """
        wait_s, patience_ends = FIRST_RETRY_S, time.monotonic() + KEY_PATIENCE_S
        while True:
            try:
                with self._open_connection() as link:
                    self._error, wait_s = "", FIRST_RETRY_S
                    self._watch_messages(link)
            except ConnectionNotAccepted as refusal:
                # A coordinator that has just opened its port is still registering the sites it has admitted.
                if not refusal.may_pass or time.monotonic() > patience_ends:
                    raise
                time.sleep(FIRST_RETRY_S)
            except (CoordinatorUnreachable, RunAlreadyEnded, MessageContentGone) as error:
                # RunAlreadyEnded: the job signed off when it was stopped, and this program signs on again.
                if isinstance(error, CoordinatorUnreachable) and str(error) != self._error:
                    self.tell(f"no connection to {self.kit.address}: {error}; trying again for as long as it takes")
                self._error = str(error)
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, MAX_RETRY_S)
                patience_ends = time.monotonic() + KEY_PATIENCE_S

    def _open_connection(self) -> FleetClient:
        check_coordinator_certificate(self.kit.address, self.kit.ca_certificate)
        key, authority = read_private_key(self.settings.key_path), self.kit.ca_certificate.encode()
        link = FleetClient(self.kit.address, authority, key, None, self._process, self.settings.file.policy)
        node_id_file = self.settings.state_folder / "node-id"
        last_node_id = read_stored_node_id(node_id_file)
        node_id = link.activate_node(last_node_id)
        if node_id != last_node_id:
            write_atomically(node_id_file, str(node_id).encode())
        if not self._job:
            self.tell(f"connected to {self.kit.coordinator} at {self.kit.address}; no job runs while nothing is asked")
        return link

    def _watch_messages(self, link: FleetClient) -> None:
        while True:
            if self._job:
                self._hold_connection_while_job_is_listed(link)
            try:
                received = link.receive_message(HEARTBEAT_PAUSE_S)
                if received is not None:
                    self._submit_job_for_message(read_message_id(received))
                link.send_heartbeat()
            except SystemExit:
                link.deactivate_node()
                self.tell("stopped on request; the site has signed off")
                raise

    def _submit_job_for_message(self, message_id: str) -> None:
        self._jobs = self._jobs + 1 if message_id == self._message else 1
        self._message = message_id
        if self._jobs > MAX_JOBS:
            problem = f"{MAX_JOBS} jobs in a row ended before a request was answered, the last one was {self._job}."
            remedy = (
                f"The reason is in {self.settings.folder / 'slurm.log'}: a fault, or too little --time for one round."
            )
            raise ProgramCannotContinue(f"{problem} {remedy}")
        self._job = self.queue.submit_job(self._process)
        self._last_state, self._asked_at = JobState.QUEUED, time.monotonic()
        self.tell(f"a request waits: submitted job {self._job}")

    def _hold_connection_while_job_is_listed(self, link: FleetClient) -> None:
        """Send heartbeats until the job is over; a stop on request leaves the job in the queue."""
        try:
            while True:
                if time.monotonic() - self._asked_at >= self.job_look_s:
                    self._asked_at, state = time.monotonic(), self.queue.read_job_state(self._job)
                    if state not in (self._last_state, JobState.UNKNOWN):
                        self.tell(f"job {self._job} is {state.value}")
                        self._last_state = state
                    if state is JobState.OVER:
                        self._job = ""
                        return
                link.send_heartbeat()
                time.sleep(min(HEARTBEAT_PAUSE_S, self.job_look_s))
        except SystemExit:
            self.tell(f"stopped on request; job {self._job} stays: scancel {self._job} ends it too")
            raise
