"""The SuperLink's control service, on a Unix socket that only programs of the coordinator's account can reach."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from polyclinic.server.deployment.superlink.control_client import (
    CALL_MESSAGE_CLASSES,
    CONTROL_SERVICE,
    MAX_CALL_BYTES,
    proto,
)
from polyclinic.server.deployment.superlink.messages import StoredMessage, SuperLinkStorage, parse_message_envelope

MAX_THREADS = 16
_log = logging.getLogger(__name__)


class CallForEndedRun(Exception):
    """Raised for a call about a run that has ended."""


class SuperLinkControlService:
    """Answers the calls of the coordinator's programs to the SuperLink, one method per call.

    A method receives the request and returns the response as protobuf messages; their classes are in
    :data:`CALL_MESSAGE_CLASSES`.
    """

    def __init__(self, storage: SuperLinkStorage) -> None:
        self._storage = storage
        self._methods = {
            "health": self.answer_health_check,
            "list_sites": self.list_registered_sites,
            "register": self.register_site,
            "unregister": self.unregister_site,
            "begin_run": self.begin_run,
            "end_run": self.end_run,
            "heartbeat": self.record_run_heartbeat,
            "push": self.accept_requests,
            "replies": self.find_replies,
            "release": self.allow_message_file_deletion,
        }

    def answer_control_call(self, name: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Answer a call by the method for its name; abort the call with a gRPC error code if the method fails.

        Args:
            name: Name of the call, a key of :data:`CALL_MESSAGE_CLASSES`.
            request: Protobuf message of the call.
        """
        try:
            return self._methods[name](request)
        except CallForEndedRun:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the run is over")
        except Exception as error:  # the edge of the process
            _log.error("%s failed: %r", name, error)
            context.abort(grpc.StatusCode.INTERNAL, f"the SuperLink failed: {error!r}")
        raise AssertionError("abort raises")

    def answer_health_check(self, request: Any) -> Any:
        """Return an empty message, which shows that the SuperLink answers calls."""
        return proto.Nothing()

    def list_registered_sites(self, request: Any) -> Any:
        """Return all registered sites with their connection states."""
        sites = (
            proto.Site(
                node_id=site.node_id,
                name=site.name,
                state=str(site.state),
                public_key=site.public_key,
                process=site.process,
                wire=site.stated.wire if site.stated else 0,
                release=site.stated.release if site.stated else "",
            )
            for site in self._storage.sites.list_registered_sites()
        )
        return proto.Sites(sites=sites)

    def register_site(self, request: Any) -> Any:
        """Register the site of the request: its public key under its name."""
        self._storage.sites.register_site(request.name, request.public_key)
        return proto.Nothing()

    def unregister_site(self, request: Any) -> Any:
        """Remove the registration of the site whose node id is in the request."""
        self._storage.sites.unregister_site(request.node_id)
        return proto.Nothing()

    def begin_run(self, request: Any) -> Any:
        """Begin a run; end each earlier run of its sites, whose process was killed.

        The response holds the new run's number. It also holds the envelope (metadata) and the tree of object ids of
        each reply to an ended run that is not recorded yet.

        Args:
            request: Node ids of the run's sites, or a flag for all sites.
        """
        run, replies = self._storage.begin_run(None if request.all_nodes else frozenset(request.node_ids))
        envelopes = [reply.envelope for reply in replies]
        trees = [reply.tree for reply in replies]
        return proto.RunBegin(run_id=run, envelopes=envelopes, trees=trees)

    def end_run(self, request: Any) -> Any:
        """End the run whose number is in the request."""
        self._storage.messages.end_run(request.run_id)
        return proto.Nothing()

    def record_run_heartbeat(self, request: Any) -> Any:
        """Record a heartbeat of the run in the request; the response says whether the run is still active."""
        return proto.Run(run_id=request.run_id, goes_on=self._storage.runs.record_run_heartbeat(request.run_id))

    def accept_requests(self, request: Any) -> Any:
        """Store the messages of a run to sites.

        The response has the ids of the accepted messages, and the ids of their objects whose files are missing.

        Raises:
            CallForEndedRun: If the run is no longer active.
        """
        self._refuse_ended_run(request.run_id)
        messages = map(parse_message_envelope, request.envelopes, request.trees)
        requests = [StoredMessage.from_request(*message) for message in messages]
        names, missing = self._storage.messages.store_requests(requests)
        return proto.PushResult(names=names, missing=missing)

    def find_replies(self, request: Any) -> Any:
        """Find the replies to the messages whose ids are in the request.

        The response has for each message its reply, or the reason why none will come. Messages that still await a reply
        are left out.

        Raises:
            CallForEndedRun: If the run is no longer active.
        """
        self._refuse_ended_run(request.run_id)
        replies = []
        for outcome in self._storage.messages.find_replies(request.run_id, request.names):
            if isinstance(outcome, StoredMessage):
                replies.append(proto.Reply(request=outcome.partner, envelope=outcome.envelope, tree=outcome.tree))
            else:
                root, reason = outcome
                replies.append(proto.Reply(request=root, reason=reason.name))
        return proto.Replies(replies=replies)

    def allow_message_file_deletion(self, request: Any) -> Any:
        """Delete the files of the messages whose ids are in the request, unless another message needs them."""
        for name in request.names:
            self._storage.messages.release_message_objects(name)
        return proto.Nothing()

    def _refuse_ended_run(self, run: int) -> None:
        if not self._storage.runs.is_run_active(run):
            raise CallForEndedRun


def start_control_server(address: str, storage: SuperLinkStorage) -> grpc.Server:
    """Return a running gRPC server that answers calls on the control socket.

    Args:
        address: Address of the socket in gRPC's form, ``unix:PATH``.

    Raises:
        OSError: If the file system does not support sockets, or the folder does not exist.
    """
    service = SuperLinkControlService(storage)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            partial(service.answer_control_call, name),
            request_deserializer=request_class.FromString,
            response_serializer=response_class.SerializeToString,
        )
        for name, (request_class, response_class) in CALL_MESSAGE_CLASSES.items()
    }
    options = [("grpc.max_receive_message_length", MAX_CALL_BYTES), ("grpc.max_send_message_length", -1)]
    handler = grpc.method_handlers_generic_handler(CONTROL_SERVICE, handlers)
    server = grpc.server(ThreadPoolExecutor(MAX_THREADS, "control"), (handler,), options=options)
    try:
        server.add_insecure_port(address)  # the folder's mode decides who may connect
    except RuntimeError as error:
        raise OSError(f"no socket can be made in the folder state, which must be on a local disk: {error}") from None
    server.start()
    return server
