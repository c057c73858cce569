"""What one hospital, and all of them, may have going on at once: calls, their time, and the bytes that they bring.

A call counts until it is over at both ends: one whose answer is never read holds memory like one that never arrives.
Where a hospital has too many, its own oldest is cancelled and not the new one refused: what a cut line left behind goes
by itself, and nobody can lock a hospital out but the hospital.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from common.system.timers import CALL_TIMEOUT_S
from server.deployment.superlink.objects.reply_bounds import LARGEST_CALL

CALLS_PER_SITE, LARGE_PER_SITE = 16, 4
"""A site makes two transfers, a sign of life and a question at a time."""
SMALL_BODY_S = 30.0
"""For the body of a call that brings no object to arrive."""
WHOLE_CALL_S = CALL_TIMEOUT_S + 10.0
"""For a whole call, its answer read: somewhat more than a site itself gives it."""


def large_at_once() -> int:
    """How many objects may be arriving at once: as many as half of this machine's memory holds."""
    return max(16, int(psutil.virtual_memory().total // 2 // LARGEST_CALL))


class NoRequest(Exception):
    """A call ended before its request had arrived."""


@dataclass(eq=False)
class Call:
    """A call that is going on.

    Attributes:
        large: Whether it brings an object.
        begun: By ``time.monotonic``.
        read: Whether its message has arrived.
        answered: Whether its answer has been made.
        counted: Whether it counts among the objects that are arriving.
        over: Whether it has ended at both ends.
    """

    context: grpc.ServicerContext
    large: bool
    begun: float
    read: bool = False
    answered: bool = False
    counted: bool = False
    over: bool = False

    def late(self, now: float) -> bool:
        """Whether its time is over."""
        return now - self.begun > (WHOLE_CALL_S if self.large or self.read else SMALL_BODY_S)


@dataclass
class CallLimits:
    """All calls of admitted hospitals that are going on.

    Args:
        large_at_once: Objects that may be arriving at once; the others wait, their bytes unread.
    """

    large_at_once: int = field(default_factory=large_at_once)
    _calls: dict[str, list[Call]] = field(default_factory=dict)
    _large: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def request(
        self, site: str, context: grpc.ServicerContext, requests: Iterator[Any], *, large: bool
    ) -> Iterator[Any]:
        """Read the one request of a call, within the limits, and lend it until the call is answered.

        Args:
            site: The hospital whose call it is: it is authenticated.
            requests: The requests of the call, none read yet.
            large: Whether the request may hold an object.

        Raises:
            NoRequest: If there is none.
            grpc.RpcError: If the call is cancelled, by the site or because it takes too long.
        """
        call = Call(context, large, time.monotonic())
        self._begin(site, call)
        try:
            self._wait_for_room(call)
            yield self._read(call, requests)
        finally:
            self._answered(call)

    @staticmethod
    def _read(call: Call, requests: Iterator[Any]) -> Any:
        try:
            request = next(requests)  # raises RpcError for a call that is over
        except StopIteration:
            raise NoRequest("the call has no request") from None
        call.read = True
        return request

    def cancel_late(self) -> list[str]:
        """Cancel what takes too long; return whose calls that were. To be called every second or so."""
        now = time.monotonic()
        with self._changed:
            late = [(site, call) for site, calls in self._calls.items() for call in calls if call.late(now)]
        for _, call in late:
            call.context.cancel()
        return [site for site, _ in late]

    @property
    def going_on(self) -> int:
        """Number of calls."""
        with self._changed:
            return sum(map(len, self._calls.values()))

    def _begin(self, site: str, call: Call) -> None:
        with self._changed:
            calls = self._calls.setdefault(site, [])
            calls.append(call)
            surplus = _surplus(calls)
        if not call.context.add_callback(lambda: self._end(site, call)):
            self._end(site, call)  # it is over already, which reading its request will show
        for one in surplus:  # not under the lock: its callback takes it
            one.context.cancel()

    def _answered(self, call: Call) -> None:
        """Note that a call's request is no longer held; its answer is, until the call is over."""
        with self._changed:
            call.answered = True
            self._large -= call.counted
            call.counted = False
            self._changed.notify_all()

    def _end(self, site: str, call: Call) -> None:
        with self._changed:
            call.over = True
            calls = self._calls[site]
            calls.remove(call)
            if not calls:
                del self._calls[site]
            self._changed.notify_all()

    def _wait_for_room(self, call: Call) -> None:
        if not call.large:
            return
        with self._changed:
            self._changed.wait_for(lambda: call.over or self._large < self.large_at_once)
            call.counted = not call.over
            self._large += call.counted


def _surplus(calls: Sequence[Call]) -> list[Call]:
    """The oldest beyond what a site may have; those that are answered go first.

    gRPC says late that a call is over. To cancel one whose answer has arrived changes nothing for the site.
    """
    by_age = sorted(calls, key=lambda call: not call.answered)  # else in the order in which they began
    bringing = [call for call in calls if call.large and not call.answered]
    return [*by_age[:-CALLS_PER_SITE], *bringing[:-LARGE_PER_SITE]]
