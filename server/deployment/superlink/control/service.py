"""The SuperLink's answers to its own coordinator's programs, over a Unix socket that no other account can reach."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from server.deployment.superlink.control.protocol import (
    CALLS,
    LARGEST_CALL,
    SERVICE,
    Begun,
    Nothing,
    Replies,
    Reply,
    Run,
    Site,
    Sites,
    Taken,
    pair,
)
from server.deployment.superlink.storage.messages import StoredMessage, request_from
from server.deployment.superlink.storage.storage import Storage

THREADS = 16
_log = logging.getLogger(__name__)


class RunIsOver(Exception):
    """A call for a run that nobody leads any more, as far as the SuperLink knows."""


class ProgramCalls:
    """The calls of the coordinator's programs, by name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        """What each call does."""
        return {
            "Health": lambda request: Nothing(),
            "ListSites": self._list_sites,
            "Register": self._register,
            "Unregister": self._unregister,
            "BeginRun": self._begin_run,
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

    def _begin_run(self, request: Any) -> Any:
        run, left = self._storage.begin_run()
        return Begun(run_id=run, envelopes=[one.envelope for one in left], trees=[one.tree for one in left])

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


def serve_programs(address: str, storage: Storage) -> grpc.Server:
    """Open the socket of the coordinator's own programs.

    Args:
        address: As gRPC writes it, ``unix:PATH``.

    Returns:
        The server, started.

    Raises:
        OSError: If the file system of the folder takes no sockets, or the folder is gone.
    """
    handlers = {name: _handler(name, answer) for name, answer in ProgramCalls(storage).calls().items()}
    options = [("grpc.max_receive_message_length", LARGEST_CALL), ("grpc.max_send_message_length", -1)]
    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="control"),
        handlers=(grpc.method_handlers_generic_handler(SERVICE, handlers),),
        options=options,
    )
    try:
        server.add_insecure_port(address)  # who may connect is decided by the mode of the folder
    except RuntimeError as error:
        raise OSError(f"no socket can be made in the folder state, which must be on a local disk: {error}") from None
    server.start()
    return server


def _handler(name: str, answer: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
    request_class, _ = CALLS[name]

    def answered(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return answer(request)
        except RunIsOver:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the run is over")
        except Exception as error:  # the edge of the process
            _log.error("%s failed: %r", name, error)
            context.abort(grpc.StatusCode.INTERNAL, f"the SuperLink failed: {error!r}")
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(
        answered,
        request_deserializer=request_class.FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )
