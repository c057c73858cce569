"""A request as it comes in: what it asks, whether the site takes part, and how long it may take."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import RecordDict

from client.gate.first_model import begins_with_it, first_model_fault
from client.gate.known_runs import Runs, digest
from client.gate.plan_text import PlanRefused, read_plan, refused
from client.gate.policy_rules import Verdict, method_fault, of_request
from client.gate.requested_work import RequestedWork
from client.gate.time_limit import at_most
from client.site.memory import forget_other_runs, forget_run
from client.site.site import Site
from common.errors import BadInput
from common.wire.canonical_bytes import small_fields
from common.wire.codec import decode
from common.wire.errors import WireError
from common.wire.hello import WIRE_VERSION
from common.wire.records import TrainRequest
from common.wire.roll_call import is_run
from strategies.registry import method_of

HOUR_S = 3600.0
ALLOWED = Verdict("policy")


class Incoming:
    """One request to a site."""

    def __init__(self, site: Site, content: RecordDict) -> None:
        self._content = content
        self._fields = fields = small_fields(content)
        self._site, self._policy = site, site.policy
        self._run = str(fields.get("run", ""))
        self._runs = Runs(site.folder, durable=site.durable)
        self._known = self._runs.known(self._run)

    def judged(self) -> tuple[RequestedWork | None, Verdict]:
        """What is asked, and whether the site takes part in it."""
        try:
            asked = asked_of(self._fields, self._site)
        except PlanRefused as error:
            return None, Verdict(error.rule, str(error))
        if asked is None:
            return None, Verdict("no plan")
        verdict = of_request(self._policy, asked)
        if verdict.allowed:
            verdict = self._as_announced()
        # In a simulation, who writes the plan owns the machine.
        if verdict.allowed and not self._site.simulated and begins_with_it(asked):
            verdict = self._with_its_first_model(asked)
        return asked, verdict

    def _with_its_first_model(self, asked: RequestedWork) -> Verdict:
        """Whether this is the model that a run of this plan begins with; any other kind of request passes."""
        if self._fields.get("wire.record") != TrainRequest.__name__:
            return ALLOWED
        try:
            request = decode(self._content, TrainRequest)
        except WireError:
            return ALLOWED  # its handler says what is wrong
        reason = first_model_fault(self._site, asked, request)
        return Verdict("run.first_model", reason) if reason else ALLOWED

    def _as_announced(self) -> Verdict:
        """Whether this is the plan that the run was announced with, and the run may take more of the site's time."""
        if not is_run(self._run):
            return ALLOWED  # the record cannot be read: its handler says what is wrong
        plan = str(self._fields["plan"])
        if self._known is None:
            forget_run(self._site.folder / "memory", self._run)
            forget_other_runs(self._site.folder / "memory", self._run)
            self._known = self._runs.settle(self._run, plan)
        if self._known.plan != digest(plan):
            return Verdict("run.plan", "this run was announced with another plan; another plan needs a new run")
        return self.out_of_time() if self._left() == 0 else ALLOWED

    @contextmanager
    def within_its_time(self) -> Iterator[None]:
        """Interrupt the work inside when its time is over; note how long it took.

        Raises:
            OutOfTime: From wherever the work is.
        """
        began = time.monotonic()
        try:
            with at_most(self._left()):
                yield
        finally:
            if self._site.durable:  # in a simulation nobody waits for what is not needed
                self._known = self._runs.worked(self._run, time.monotonic() - began)

    def out_of_time(self) -> Verdict:
        """Which limit of time stands against more work."""
        whole = self._policy.maximum_run_hours
        if whole is not None and self._worked() >= whole * HOUR_S:
            return Verdict("policy.maximum_run_hours", f"it is {whole:g}, and the work on this run took that long")
        most = self._policy.maximum_hours or 0.0
        return Verdict("policy.maximum_hours", f"it is {most:g}, and the work on this request took that long")

    def _left(self) -> float | None:
        """Seconds for this request: of its own limit and of its run's, what is less; None for no limit."""
        request, whole = self._policy.maximum_hours, self._policy.maximum_run_hours
        limits = [] if request is None else [request * HOUR_S]
        limits += [] if whole is None else [max(whole * HOUR_S - self._worked(), 0.0)]
        return min(limits, default=None)

    def _worked(self) -> float:
        return self._known.seconds if self._known else 0.0


def asked_of(fields: Mapping[str, Any], site: Site) -> RequestedWork | None:
    """What is asked; None where the record has no plan, or is of another release: its handler says what is wrong.

    Raises:
        PlanRefused: If a site does not read such a plan.
    """
    if "plan" not in fields or fields.get("wire.version") != WIRE_VERSION:
        return None
    plan = read_plan(fields["plan"], site.policy.maximum_plan_kb)
    if fault := method_fault(site.policy, plan):  # before anything of a plug-in is imported
        raise PlanRefused("policy.methods", fault)
    try:
        method = method_of(plan)
    except BadInput as error:
        raise refused(error) from None
    names, server_round = fields.get("class_names"), fields.get("round", 0)
    return RequestedWork(
        plan,
        method,
        server_round if isinstance(server_round, int) else 0,
        bool(fields.get("test", False)),
        len(names) if isinstance(names, list) else len(site.declaration.canonical),
        site.train_samples + site.policy.round_counts_to - 1,  # which plans fit must not say the last digits
        site.device,
        site.gpus,
    )
