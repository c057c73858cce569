"""The file with the last submitted job in the site's state folder, and the count of jobs that answered nothing."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from polyclinic.common.security.audit import list_audit_files, parse_audit_entry
from polyclinic.common.system.files import is_disk_full, write_atomically

QUEUE_FILE = "queue.json"


@dataclass(frozen=True)
class SubmittedJob:
    """The last submitted job, which may have ended.

    Attributes:
        number: The queue's number of the job.
        process: The process id under which the job calls the coordinator.
        message: SHA-256 of the id of the message for which it was submitted.
        jobs_in_a_row: Number of consecutive jobs without an answer, with this one.
        last_reply: Entry number of the last reply in the audit log when the job was submitted; 0 without a reply.
    """

    number: str
    process: str
    message: str
    jobs_in_a_row: int
    last_reply: int

    def make_next_job_count(self, message: str, last_reply: int) -> int:
        """Return ``jobs_in_a_row`` of the next job.

        This job has answered if the audit log has a new reply and the coordinator sends another message. Both are
        needed: a coordinator can give each request a new id, and a reply in the log may not have reached the
        coordinator.
        """
        has_answered = message != self.message and last_reply != self.last_reply
        return 1 if has_answered else self.jobs_in_a_row + 1

    def store(self, state: Path) -> None:
        """Write the job to a state folder, for the next ``flwr-client slurm watch``; ignore a full disk."""
        try:
            write_atomically(state / QUEUE_FILE, json.dumps(asdict(self)).encode(), private=True)
        except OSError as error:
            if not is_disk_full(error):
                raise


def read_submitted_job(state: Path) -> SubmittedJob | None:
    """Return the stored job; None if there is none, or the file is damaged."""
    try:
        fields = json.loads((state / QUEUE_FILE).read_bytes())
        job = SubmittedJob(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (job.number, job.process, job.message)
    counts = (job.jobs_in_a_row, job.last_reply)
    is_valid = all(type(text) is str for text in texts) and all(type(count) is int for count in counts)
    return job if is_valid else None


def remove_submitted_job(state: Path) -> None:
    """Remove the stored job."""
    (state / QUEUE_FILE).unlink(missing_ok=True)


def hash_message_id(message_id: str) -> str:
    """Return the SHA-256 of a message's id; the id may be any text, because the coordinator chooses it."""
    return hashlib.sha256(message_id.encode()).hexdigest()


def find_last_reply(state: Path) -> int:
    """Return the entry number of the last reply in a state folder's audit log; 0 without a reply."""
    for path in reversed(list_audit_files(state)):
        for line in reversed(path.read_bytes().split(b"\n")):
            entry = parse_audit_entry(line)
            if entry is not None and entry.get("direction") == "out":
                return int(entry["n"])
    return 0
