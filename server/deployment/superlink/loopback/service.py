"""The SuperLink's answers on 127.0.0.1, to its own coordinator's programs."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from server.deployment.superlink.loopback.protocol import (
    CALLS,
    LARGEST_CALL,
    SERVICE,
    Nothing,
    Replies,
    Reply,
    Run,
    Site,
    Sites,
    Taken,
    pair,
)
from server.deployment.superlink.loopback.secret import REFUSED, knows
from server.deployment.superlink.storage.messages import StoredMessage, request_from
from server.deployment.superlink.storage.storage import Storage

THREADS = 16
_log = logging.getLogger(__name__)


class RunIsOver(Exception):
    """A call for a run that nobody leads any more, as far as the SuperLink knows."""


class Loopback:
    """The calls by name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        """What each call does."""
        return {
            "Health": lambda request: Nothing(),
            "ListSites": self._list_sites,
            "Register": self._register,
            "Unregister": self._unregister,
            "BeginRun": lambda request: Run(run_id=self._storage.begin_run(), goes_on=True),
            "EndRun": self._end_run,
            "Heartbeat": lambda request: Run(
                run_id=request.run_id, goes_on=self._storage.runs.heartbeat(request.run_id)
            ),
            "Push": self._push,
            "Replies": self._replies,
            "LetGo": self._let_go,
        }

    def _list_sites(self, request: Any) -> Any:
        found = (
            Site(node_id=one.node_id, name=one.name, state=str(one.state), public_key=one.public_key)
            for one in self._storage.sites.all()
        )
        return Sites(sites=found)

    def _register(self, request: Any) -> Any:
        self._storage.sites.register(request.name, request.public_key)
        return Nothing()

    def _unregister(self, request: Any) -> Any:
        self._storage.sites.unregister(request.node_id)
        return Nothing()

    def _end_run(self, request: Any) -> Any:
        self._storage.messages.end(request.run_id)
        return Nothing()

    def _push(self, request: Any) -> Any:
        self._refuse_over(request.run_id)
        pairs = zip(request.envelopes, request.trees, strict=True)
        requests = [request_from(*pair(envelope, tree)) for envelope, tree in pairs]
        names, missing = self._storage.messages.push(requests)
        return Taken(names=names, missing=missing)

    def _replies(self, request: Any) -> Any:
        self._refuse_over(request.run_id)
        return Replies(replies=map(_as_reply, self._storage.messages.replies(request.run_id, request.names)))

    def _let_go(self, request: Any) -> Any:
        for name in request.names:
            self._storage.messages.let_go(name)
        return Nothing()

    def _refuse_over(self, run: int) -> None:
        if not self._storage.runs.goes_on(run):
            raise RunIsOver


def _as_reply(found: Any) -> Any:
    if isinstance(found, StoredMessage):
        return Reply(asked=found.partner, envelope=found.envelope, tree=found.tree)
    root, lack = found
    return Reply(asked=root, lack=lack.name)


def serve_loopback(
    address: str, storage: Storage, certificates: tuple[bytes, bytes, bytes], secret: str
) -> tuple[grpc.Server, int]:
    """Open the port of our own programs.

    Args:
        address: On 127.0.0.1.
        certificates: The authority's, the server's, and the server's key, as PEM.
        secret: What each call must carry.

    Returns:
        The server, and the port.

    Raises:
        OSError: If the port is in use.
    """
    handlers = {name: _handler(name, answer, secret) for name, answer in Loopback(storage).calls().items()}
    options = [
        ("grpc.max_receive_message_length", LARGEST_CALL),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="loopback"),
        handlers=(grpc.method_handlers_generic_handler(SERVICE, handlers), _Refuses(secret)),
        options=options,
    )
    root, certificate, key = certificates
    try:
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)], root))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be listened on: {error}") from None
    server.start()
    return server, port


class _Refuses(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers calls of methods that are not there as those without the secret: nobody learns what there is."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if knows(handler_call_details.invocation_metadata, self._secret):
            return None

        def refuse(_: Any, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(refuse)


def _handler(name: str, answer: Callable[[Any], Any], secret: str) -> grpc.RpcMethodHandler:
    """One method; its request is read once the secret is known, and not before."""
    request_class, _ = CALLS[name]

    def answered(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        if not knows(context.invocation_metadata(), secret):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)
        try:
            return answer(next(requests))
        except RunIsOver:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the run is over")
        except Exception as error:  # the edge of the process
            _log.error("%s failed: %r", name, error)
            context.abort(grpc.StatusCode.INTERNAL, f"the SuperLink failed: {error!r}")
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(
        answered,
        request_deserializer=request_class.FromString,
        response_serializer=lambda found: found.SerializeToString(),
    )
