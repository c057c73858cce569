"""The stored job of a queue: it outlives the program that submitted it, and an answer ends the count of its kind."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from polyclinic.client.queue.slurm import JobState
from polyclinic.client.queue.submitted_job import (
    QUEUE_FILE,
    SubmittedJob,
    find_last_reply,
    read_submitted_job,
    remove_submitted_job,
)
from polyclinic.client.queue.watch import find_listed_job
from polyclinic.common.security.audit import AuditLog

JOB = SubmittedJob(number="17", process="ab12", message="first", jobs_in_a_row=2, last_reply=5)


@pytest.mark.parametrize(
    ("message", "last_reply", "count"),
    [
        ("second", 8, 1),  # it answered, and the coordinator asks something else
        ("second", 5, 3),  # another request, and no reply to any before: the coordinator chooses the ids
        ("first", 8, 3),  # a reply in the audit that did not reach the coordinator
        ("first", 5, 3),
    ],
)
def test_only_a_job_that_has_answered_ends_the_count_of_jobs_in_a_row(
    message: str, last_reply: int, count: int
) -> None:
    assert JOB.make_next_job_count(message, last_reply) == count


def test_a_stored_job_is_read_by_the_next_program_for_the_owner_only(tmp_path: Path) -> None:
    assert read_submitted_job(tmp_path) is None
    JOB.store(tmp_path)
    assert read_submitted_job(tmp_path) == JOB
    assert (tmp_path / QUEUE_FILE).stat().st_mode & 0o777 == 0o600
    remove_submitted_job(tmp_path)
    remove_submitted_job(tmp_path)
    assert read_submitted_job(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"number": "17"}', str(asdict(JOB)), "[" * 100_000])
def test_a_damaged_file_is_no_job(content: str, tmp_path: Path) -> None:
    (tmp_path / QUEUE_FILE).write_text(content, encoding="utf-8")
    assert read_submitted_job(tmp_path) is None


def test_a_job_with_a_field_of_another_type_is_no_job(tmp_path: Path) -> None:
    for damaged in (replace(JOB, number=17), replace(JOB, jobs_in_a_row="2")):  # type: ignore[arg-type]
        damaged.store(tmp_path)
        assert read_submitted_job(tmp_path) is None


class Queue:
    """A queue in which every job has one state."""

    def __init__(self, state: JobState) -> None:
        self.state, self.questions = state, list[str]()

    def submit_job(self, process: str) -> str:
        raise AssertionError("no job is submitted here")

    def read_job_state(self, job: str) -> JobState:
        self.questions.append(job)
        return self.state


@pytest.mark.parametrize("state", list(JobState))
def test_a_stored_job_counts_as_waiting_or_running_until_the_queue_says_that_it_is_over(
    state: JobState, tmp_path: Path
) -> None:
    """UNKNOWN too: while Slurm does not answer, the job may run, and needs the process id that it was given."""
    queue = Queue(state)
    assert find_listed_job(tmp_path, queue) is None
    JOB.store(tmp_path)
    assert find_listed_job(tmp_path, queue) == (None if state is JobState.OVER else (JOB, state))
    assert queue.questions == ["17"]


def test_the_last_reply_is_the_last_entry_of_the_audit_that_leaves_the_site(tmp_path: Path) -> None:
    assert find_last_reply(tmp_path) == 0
    audit = AuditLog(tmp_path)
    audit.append(event="start")
    audit.append(direction="in", decision="allow")
    assert find_last_reply(tmp_path) == 0
    audit.append(direction="out", decision="allow")
    audit.append(direction="in", decision="deny")
    audit.append(event="start")
    assert find_last_reply(tmp_path) == 3
    (tmp_path / "audit.jsonl").rename(tmp_path / "audit-000001.jsonl")  # as a full file is
    audit.append(event="start")
    assert find_last_reply(tmp_path) == 3
