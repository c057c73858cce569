"""The checks of an incoming request: the requested work, the policy's verdict, and the time limit.

A plan is checked as text before pydantic parses it, because pydantic accepts repeated keys, NaN in fields without a
schema, and values of any length.

The first request of a run that the policy allows fixes the run's plan. The site refuses any later request of the run
with another plan, so that a plan declined at the roll call cannot be sent later under the same run.

A site builds a run's initial model itself, and refuses to start training from another one. The plan determines this
model by its seed, or by the hash of a weights file. docs/privacy.md explains the limits of this check: it does not
cover models of later rounds. So a coordinator that sends its first request as one of a later round avoids the check.
"""

import hashlib
import json
import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import RecordDict
from pydantic import ValidationError

from polyclinic.client.gate.policy_rules import (
    PolicyVerdict,
    RequestedWork,
    decide_on_request,
    find_method_policy_fault,
)
from polyclinic.client.site.memory import remove_old_run_states
from polyclinic.client.site.run_entries import RunEntryFolder
from polyclinic.client.site.site import Site
from polyclinic.common import __version__
from polyclinic.common.config import HospitalPlan, parse_plan_json
from polyclinic.common.errors import BadInput, Fault, WireError
from polyclinic.common.models.network import build_network
from polyclinic.common.models.state import FrozenPart, read_model_state
from polyclinic.common.models.zoo.spec import is_external_network
from polyclinic.common.plugins import PLUGIN_PREFIX
from polyclinic.common.system.plain_names import RunName, join_plain_name
from polyclinic.common.system.toml import translate_validation_errors
from polyclinic.common.wire.canonical_bytes import read_small_fields
from polyclinic.common.wire.codec import compute_largest_rounding_errors, decode_record
from polyclinic.common.wire.records import ModelGroups, NumberFormat, TrainRequest, is_valid_run_name
from polyclinic.common.wire.versions import VERSION_FIELD, find_lacking_feature, is_spoken
from polyclinic.strategies.registry import get_cached_site_method

if TYPE_CHECKING:
    from polyclinic.client.site.approvals import ApprovalVerdict, SiteApprovals

SECONDS_PER_HOUR = 3600.0


class IncomingRequest:
    """A request to a site, with the site's stored record of the run."""

    def __init__(self, site: Site, content: RecordDict) -> None:
        self._content = content
        self._fields = fields = read_small_fields(content)
        self._site = site
        self._policy = site.policy
        self._run = str(fields.get("run", ""))
        self._runs = SiteRunRecords(site.folder, durable=site.durable)
        self._record = self._runs.find_run_record(self._run)
        self.approval: ApprovalVerdict | None = None

    def decide_and_record_plan(self) -> tuple[RequestedWork | None, PolicyVerdict]:
        """Return the requested work, and the policy's verdict: the first rule that the request breaks, if any.

        The work is None if the request has no plan, or one that is refused. If the run is new, its plan is recorded,
        and stored states of old runs are removed.
        """
        try:
            work = read_requested_work(self._fields, self._site)
        except PlanRefused as error:
            return None, PolicyVerdict(error.rule, str(error))
        verdict = PolicyVerdict("no plan") if work is None else decide_on_request(self._policy, work)
        if self._site.approvals is not None and verdict.is_allowed:
            verdict = self._decide_by_approval(self._site.approvals)
        if work is None:
            return None, verdict

        if verdict.is_allowed and is_valid_run_name(self._run):  # otherwise the handler reports the wrong run name
            run = RunName(self._run)
            plan = str(self._fields["plan"])
            if self._record is None:
                memory = self._site.folder / "memory"
                # A new run has a stored state only if its record was removed or damaged. Another plan could make
                # parts of that state leave which the first plan kept at the site.
                shutil.rmtree(join_plain_name(memory, run), ignore_errors=True)
                remove_old_run_states(memory, run)
                self._record = self._runs.record_run_plan(run, plan)
            if self._record.plan != hash_plan(plan):
                reason = "this run was announced with another plan; another plan needs a new run"
                verdict = PolicyVerdict("run.plan", reason)
            elif self._compute_seconds_left_by_policy() == 0:
                verdict = self.make_time_limit_verdict()

        # A run starts from the initial model that its plan determines. Only the first request to train is checked: that
        # of round 1, or that of round 0, in which the method UniFed ranks the sites by one epoch of training. Round 1
        # of a sequential method is not checked, because its model comes from the previous site, nor are requests in a
        # simulation, because the author of the plan controls the simulated site.
        is_first_round = work.round == 0 or (work.round == 1 and not work.method.traits.sequential)
        is_train_request = self._fields.get("wire.record") == TrainRequest.__name__
        if verdict.is_allowed and is_first_round and is_train_request and not self._site.simulated:
            try:
                request = decode_record(self._content, TrainRequest)
            except WireError:
                return work, verdict  # the request's handler reports the fault
            if reason := find_initial_model_fault(
                self._site, work.plan, request, work.method.parameters.compress_model
            ):
                verdict = PolicyVerdict("run.first_model", reason)
        return work, verdict

    def _decide_by_approval(self, approvals: "SiteApprovals") -> PolicyVerdict:
        """Return the verdict of the people who approve requests at this site."""
        self.approval = approvals.decide_on_request(self._fields, self._site)
        return PolicyVerdict(self.approval.rule, self.approval.reason)

    @contextmanager
    def limit_working_time(self) -> Iterator[None]:
        """Context manager that interrupts the work when its time is over, and adds its duration to the run's total.

        Raises:
            RequestTimeExceeded: At the current place of the work.
        """
        began = time.monotonic()
        try:
            with interrupt_after_seconds(self._compute_seconds_left_by_policy()):
                yield
        finally:
            if self._site.durable:  # a simulation needs no record of time
                self._record = self._runs.add_worked_seconds(self._run, time.monotonic() - began)

    def make_time_limit_verdict(self) -> PolicyVerdict:
        """Return the verdict on a request after its own time limit, or that of its run, has passed."""
        run_hours = self._policy.maximum_run_hours
        if run_hours is not None and self._count_seconds_worked() >= run_hours * SECONDS_PER_HOUR:
            return PolicyVerdict(
                "policy.maximum_run_hours", f"it is {run_hours:g}, and the work on this run took that long"
            )
        hours = self._policy.maximum_hours or 0.0
        return PolicyVerdict("policy.maximum_hours", f"it is {hours:g}, and the work on this request took that long")

    def _compute_seconds_left_by_policy(self) -> float | None:
        """Return the seconds that the limits of the request and of its run leave for the work; None without a limit."""
        hours = self._policy.maximum_hours
        run_hours = self._policy.maximum_run_hours
        limits = [] if hours is None else [hours * SECONDS_PER_HOUR]
        if run_hours is not None:
            limits.append(max(run_hours * SECONDS_PER_HOUR - self._count_seconds_worked(), 0.0))
        return min(limits, default=None)

    def _count_seconds_worked(self) -> float:
        return self._record.seconds if self._record else 0.0


def read_requested_work(fields: Mapping[str, Any], site: Site) -> RequestedWork | None:
    """Return the work that a request's plan asks for.

    Return None if the record has no plan, or a wire version that this release does not speak; the handler reports that.

    Raises:
        PlanRefused: If the plan is malformed, its method is not allowed or wrongly configured, or the run needs
            something that the coordinator's wire version lacks.
    """
    version = fields.get(VERSION_FIELD)
    if "plan" not in fields or not is_spoken(version):
        return None
    plan = read_plan(fields["plan"], site.policy.maximum_plan_kb)
    if reason := find_lacking_feature(fields[VERSION_FIELD], plan):
        raise PlanRefused("wire version", f"{reason} The coordinator has to install release {__version__}")
    if fault := find_method_policy_fault(site.policy, plan):  # before anything of a plug-in is imported
        raise PlanRefused("policy.methods", fault)
    try:
        method = get_cached_site_method(site.name, fields["plan"])
    except BadInput as error:
        raise PlanRefused("plan.method", describe_first_plan_fault(error.faults)) from None
    names = fields.get("class_names")
    server_round = fields.get("round", 0)
    return RequestedWork(
        plan,
        method,
        server_round if isinstance(server_round, int) else 0,
        bool(fields.get("test", False)),
        len(names) if isinstance(names, list) else len(site.declaration.canonical_names),
        site.train_samples + site.policy.round_counts_to - 1,  # the verdict must not reveal the exact number
        site.device,
        site.gpus,
    )


# ---------------------------------------------------------------------- time


class RequestTimeExceeded(BaseException):
    """Raised when the time for a request is over; ``except Exception`` does not catch it."""


@contextmanager
def interrupt_after_seconds(seconds: float | None) -> Iterator[None]:
    """Context manager that interrupts its body after ``seconds``; None means no limit.

    It has no effect outside the main thread, because Python delivers signals there only.

    Raises:
        RequestTimeExceeded: At the current place of the body.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    (left, _) = signal.getitimer(signal.ITIMER_REAL)

    def raise_time_exceeded(number: int, frame: object) -> None:
        raise RequestTimeExceeded

    before = signal.signal(signal.SIGALRM, raise_time_exceeded)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # restart the alarm that another part had set
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3))


# ---------------------------------------------------------------------- runs

RUNS_FOLDER = "runs"
"""Folder in the state folder with one record for each run."""
OLD_RUNS_FILE = "runs.json"
"""File with the records of all runs that an earlier release wrote."""


@dataclass(frozen=True)
class SiteRunRecord:
    """A run's stored record: the hash of its plan (:func:`hash_plan`), and the site's seconds of work for the run."""

    plan: str
    seconds: float = 0.0


class SiteRunRecords:
    """The records of all runs that a site ever took part in, in the folder ``runs`` of its state folder."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self._entries = RunEntryFolder(folder / RUNS_FOLDER, folder / OLD_RUNS_FILE, durable=durable)

    def find_run_record(self, run: str) -> SiteRunRecord | None:
        """Return the record of a run; None for a new run, or for a damaged record, so that any plan is accepted."""
        entry = self._entries.read_entry(run)
        try:
            return None if entry is None else SiteRunRecord(str(entry["plan"]), float(entry["seconds"]))
        except (ValueError, KeyError, TypeError):
            return None

    def record_run_plan(self, run: str, plan: str) -> SiteRunRecord:
        """Store a new run's plan (JSON text) as a hash; return the run's record, which is unchanged if it exists."""
        return self.find_run_record(run) or self._write_record(run, SiteRunRecord(hash_plan(plan)))

    def add_worked_seconds(self, run: str, seconds: float) -> SiteRunRecord | None:
        """Add to the site's working time for a run; return the new record, or None if the run has no record."""
        if (record := self.find_run_record(run)) is None:
            return None
        return self._write_record(run, replace(record, seconds=record.seconds + seconds))

    def _write_record(self, run: str, record: SiteRunRecord) -> SiteRunRecord:
        self._entries.write_entry(run, asdict(record))
        return record


def hash_plan(plan: str) -> str:
    """Return the SHA-256 of a plan (JSON text) without the keys that may change when a run is resumed.

    These keys are the run's name and, in a plan without noise, its number of rounds. Any other text is hashed as it is.
    """
    try:
        tree = json.loads(plan)
        private = tree.get("privacy", {}).get("level", "none") != "none"
        for key in ("name",) if private else ("rounds", "name"):
            tree["run"].pop(key, None)
        plan = json.dumps(tree, sort_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # not a plan: hash the text as it is
    return hashlib.sha256(plan.encode(errors="replace")).hexdigest()


# ---------------------------------------------------------------------- the plan's text

BYTES_PER_KB = 1000
MAX_NESTING_DEPTH = 8
"""Maximum number of nested levels of tables and lists; an experiment's plan has three."""
MAX_NUMBER_DIGITS = 40
MAX_TEXT_CHARACTERS = 500
MAX_REASON_CHARACTERS = 400
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class PlanRefused(ValueError):
    """Raised for a plan that breaks a rule; ``rule`` is the rule's name in the audit log."""

    def __init__(self, rule: str, reason: str) -> None:
        self.rule = rule
        # Makes a coordinator's text safe for a log: one short line of printable ASCII.
        ascii_only = reason.encode("ascii", "backslashreplace").decode()
        printable = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in ascii_only)
        is_short = len(printable) <= MAX_REASON_CHARACTERS
        super().__init__(printable if is_short else f"{printable[:MAX_REASON_CHARACTERS]}...")


def read_plan(text: object, maximum_kb: float | None) -> HospitalPlan:
    """Read a plan that a coordinator sent as JSON text.

    Raises:
        PlanRefused: If the plan breaks a rule.
    """
    if not isinstance(text, str):
        raise PlanRefused("plan.form", "it is not text")
    length = len(text.encode(errors="replace"))
    if maximum_kb is not None and length > maximum_kb * BYTES_PER_KB:
        raise PlanRefused(
            "policy.maximum_plan_kb", f"it is {maximum_kb:g}, and the plan has {length / BYTES_PER_KB:.1f} kB"
        )
    return _parse_strictly_checked_plan(text)


@lru_cache(maxsize=4)
def _parse_strictly_checked_plan(text: str) -> HospitalPlan:
    """Parse a plan; the last few results are cached, because every request of a run holds the same plan.

    Raises:
        PlanRefused: If the text is no JSON, is nested too deeply, has a repeated key or too long a value, or is no
            plan.
    """
    depth = deepest = 0
    for letter in re.findall(r"[\[\]{}]", _JSON_STRING.sub("", text)):  # brackets inside texts do not count
        depth += 1 if letter in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING_DEPTH:
        raise PlanRefused("plan.form", f"it is nested {deepest} deep; {MAX_NESTING_DEPTH} is the most")

    def refuse_repeated_keys_and_long_texts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanRefused("plan.form", f'it has the key "{twice}" twice in one table')
        for part in (*table, *(value for value in table.values() if isinstance(value, str))):
            if len(part) > MAX_TEXT_CHARACTERS:
                raise PlanRefused(
                    "plan.form", f"it has a text of {len(part)} characters; {MAX_TEXT_CHARACTERS} is the most"
                )
        return table

    try:
        json.loads(
            text,
            object_pairs_hook=refuse_repeated_keys_and_long_texts,
            parse_constant=_refuse_nan_and_infinity,
            parse_int=_refuse_long_number,
            parse_float=lambda text: (
                value if math.isfinite(value := float(_refuse_long_number(text))) else _refuse_nan_and_infinity(text)
            ),
        )
        return parse_plan_json(text)
    except ValidationError as error:
        raise PlanRefused(
            "plan.form", describe_first_plan_fault(translate_validation_errors(error, HospitalPlan, "plan"))
        ) from None
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, PlanRefused) else PlanRefused("plan.form", f"it is no JSON: {error}") from None


def describe_first_plan_fault(faults: Sequence[Fault]) -> str:
    """Return the first fault of a plan in one line, with the number of further faults."""
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{faults[0]}".removesuffix(".") + more


def _refuse_nan_and_infinity(name: str) -> Any:
    raise PlanRefused("plan.form", f"it has {name} in the place of a number")


def _refuse_long_number(digits: str) -> str:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise PlanRefused("plan.form", f"it has a number of {len(digits)} digits; {MAX_NUMBER_DIGITS} is the most")
    return digits


# ---------------------------------------------------------------------- the first model

# Tolerance for an initial model that is built on two machines. From one seed, torch draws normal numbers that differ
# between kinds of CPU in their last bits: by at most 9e-7 with and without AVX2, in 13 networks.
ABSOLUTE_TOLERANCE = 1e-6
RELATIVE_TOLERANCE = 1e-5


def find_initial_model_fault(site: Site, plan: HospitalPlan, request: TrainRequest, form: NumberFormat) -> str:
    """Return the reason why a request's model is not the initial model that its plan determines.

    The reason is empty if the model is the right one, or cannot be checked. If the plan names a weights file that is
    not in the site's folder ``weights``, the site cannot check the model, and prints a line about it. If arrays have
    other shapes or the frozen part is missing, the request's handler reports that later.

    Args:
        form: Number format to which the plan has the coordinator round the model's trunk.
    """
    spec = plan.model
    source = "seed"
    if plan.weights_sha256 is not None:
        path = site.frozen_part_files.find_weights_file(spec, plan.weights_sha256)
        if path is None:
            file = f"the weights file with SHA-256 {plan.weights_sha256}"
            site.tell(f"the first model of this run is taken as it came: it begins with {file}, not in weights/ here")
            return ""
        spec = spec.model_copy(update={"weights": str(path)})
        source = "weights file"

    try:
        network = build_network(spec, request.class_names, plan.run.seed)
        received = request.model.to_named_arrays()
        built = ModelGroups.from_model(read_model_state(network)).to_named_arrays()
        if spec.frozen_sha256 is not None:
            sent = request.frozen.trunk
            received["frozen"] = (
                site.frozen_part_files.read_frozen_part(spec.frozen_sha256).values if sent is None else sent
            )
            built["frozen"] = FrozenPart.from_network(network).values
    except BadInput as bad:
        return f"it cannot be built here: {bad.faults[0]}".removesuffix(".")
    except WireError:
        return ""  # the frozen part is not stored here: the handler asks for it
    if {name: array.shape for name, array in received.items()} != {name: array.shape for name, array in built.items()}:
        return ""  # the model is of another network: the handler reports the wrong part

    numbers = 0
    wrong = 0
    for name, array in built.items():
        tolerance = np.abs(array)
        tolerance *= RELATIVE_TOLERANCE
        tolerance += ABSOLUTE_TOLERANCE
        if name == "trunk" and form != "float32" and request.model.form == form:
            tolerance += compute_largest_rounding_errors(received[name], form)
        numbers += array.size
        wrong += int(array.size - np.count_nonzero(np.abs(received[name] - array) <= tolerance))
    if not wrong:
        return ""

    libraries = ["torch", "torchvision"]
    if is_external_network(spec.architecture) and not spec.architecture.startswith(PLUGIN_PREFIX):
        libraries.append(spec.architecture.partition(":")[0])
    here = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(libraries))
    return (
        f"{wrong:,} of {numbers:,} numbers of the model are not those that this site builds from the plan's "
        f"{source}. Compare versions: here {here}. If the coordinator has the same, its program is not the published "
        "one, and this site must not take part"
    )
