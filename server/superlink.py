"""Flower's SuperLink, its Control API, and a run's Grid: the network twin of :mod:`server.backends`.

Only here does the network side of the coordinator use anything of Flower beyond its public API (1.39). The SuperLink
is a process of its own; hospitals reach its Fleet API and nothing else. Our ServerApp runs in the process of
``flwr-server run``, which takes the run's task from the SuperLink over loopback, so a SuperLink that dies and comes
back costs nothing but time: registrations, messages and the run are in its database.
"""

import hashlib
import itertools
import logging
import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.common.serde import fab_to_proto, message_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from common.errors import BadInput, CannotGoOn, Fault
from common.files import write_atomically
from common.flower_objects import cut, message_of, names_in
from common.memory import LARGE_BUFFERS
from server.children import with_this_process
from server.coordinator import Coordinator
from server.object_files import ObjectFiles
from server.reply_bounds import Bound, asked_for
from server.steady_clock import OF_A_RUN, set_steady

START_TIMEOUT_S, STOP_GRACE_S = 60.0, 3.0
TASK_TIMEOUT_S = 60.0
LINK_PATIENCE_S = 900.0
"""How long a run waits for a SuperLink that does not answer."""
LEFT_AT_MOST = 20
"""Runs that are looked at, from the newest on, for one that was left; one at a time holds the folder's lock."""
ARRIVING_S, LOOK_S = 0.1, 0.005
AT_A_TIME = 4
"""Replies handed over in one look: the others stay in their files until these are added up."""
GIVEN_UP = "the SuperLink heard nothing of this run for too long, and gave it up."
_NOT_OURS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
LOST_SIGNAL = signal.SIGUSR1
"""By which the thread that gives signs of life interrupts the one that leads."""
UPLOAD_STALL_S = 120.0
"""How long nothing more of a reply that has been announced may arrive before it counts as cut off: the time that a
site gives one call."""

APP = """[project]
name = "polyclinic"
version = "1"
description = "Names the app that every site has installed; carries no code."
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "polyclinic"
[tool.flwr.app.components]
serverapp = "installed:on_the_coordinator"
clientapp = "installed:at_the_site"
[tool.flwr.app.config]
"""


class SuperLinkGone(CannotGoOn):
    """The SuperLink did not answer for longer than a run can wait."""


class RunLost(RuntimeError):
    """The SuperLink has given this run up: it heard nothing of it for too long. It goes on as a new one."""


class SuperLink:
    """The process: started, watched, ended."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            BadInput: If it does not, with the end of its log.
        """
        coordinator = self._coordinator
        if not (secret := _secret_file(coordinator)).exists():
            write_atomically(secret, secrets.token_bytes(32))
        secret.chmod(0o600)
        coordinator.log.parent.mkdir(parents=True, exist_ok=True)
        with coordinator.log.open("ab") as log:
            self._process = subprocess.Popen(
                command(coordinator),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(coordinator),
                preexec_fn=with_this_process(),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(coordinator):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                end = "\n    ".join(coordinator.log.read_text(errors="replace").splitlines()[-5:])
                problem = f"the SuperLink did not start. The end of {coordinator.log}:\n    {end}"
                raise BadInput([Fault(str(coordinator.folder), problem, "Is one of its ports in use?")])
            time.sleep(0.1)

    def ended(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End it: politely, and after a grace (its database stands a kill) at once."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def command(coordinator: Coordinator) -> list[str]:
    """How the SuperLink is started: one port for hospitals, everything else on loopback."""
    authority = coordinator.authority
    return [
        *(sys.executable, "-m", "server.superlink_process"),
        *("--objects", str(object_folder(coordinator).resolve())),
        *("--clock", str(_clock_file(coordinator).resolve())),
        *("--host", "127.0.0.1", "--port", str(coordinator.file.control_port)),
        *("--fleet-api-type", "grpc-rere", "--fleet-api-address", coordinator.fleet_address),
        *("--ssl-ca-certfile", str(coordinator.ca_certificate.resolve())),
        *("--ssl-certfile", str((authority / "server.crt").resolve())),
        *("--ssl-keyfile", str((authority / "server.key").resolve())),
        *("--enable-supernode-auth", "--database", str((coordinator.state / "superlink.db").resolve())),
        *("--isolation", "process", "--superexec-auth-secret-file", str(_secret_file(coordinator).resolve())),
        "--disable-runtime-dependency-installation",
    ]


def object_folder(coordinator: Coordinator) -> Path:
    """Where the contents of messages lie."""
    return coordinator.state / "objects"


def answers(coordinator: Coordinator, *, within_s: float = 0.0) -> bool:
    """Whether the SuperLink of this folder answers on loopback, now or within this time."""
    until = time.monotonic() + within_s
    while not (well := _answers(coordinator)) and time.monotonic() < until:
        time.sleep(0.2)
    return well


def _answers(coordinator: Coordinator) -> bool:
    try:
        context = ssl.create_default_context(cafile=str(coordinator.ca_certificate))
        url = f"https://{coordinator.control_address}/health"
        return httpx.get(url, verify=context, timeout=2, trust_env=False).is_success
    except (httpx.HTTPError, OSError):
        return False


@dataclass(frozen=True)
class Node:
    """A registered site as the SuperLink sees it; ``public_key`` in Flower's form."""

    node_id: int
    name: str
    online: bool
    public_key: bytes


class Control:
    """The few things that we ask of Flower's Control API.

    Args:
        patient: Wait for a SuperLink that is being restarted, as a run does.
    """

    def __init__(self, coordinator: Coordinator, *, patient: bool = False) -> None:
        quiet()
        self._client = ControlHttpClient.from_server_address(
            coordinator.control_address,
            False,
            coordinator.ca_certificate.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
            retry_invoker=_retrying() if patient else None,
        )

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def nodes(self) -> list[Node]:
        """All registered sites."""
        found = self._client.ListNodes(ListNodesRequest()).nodes_info
        return [
            Node(node.node_id, node.name, node.status == "online", node.public_key)
            for node in found
            if node.status != "unregistered"
        ]

    def register(self, name: str, public_key: str) -> None:
        """Register a site's key under its name."""
        self._client.RegisterNode(RegisterNodeRequest(public_key=flower_key(public_key), name=name))

    def unregister(self, node: Node) -> None:
        """Take a registration back: from now on every call that is signed with its key is refused."""
        self._client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))

    def start_run(self) -> int:
        """Submit the app bundle that carries no code; return the run's number."""
        content, _ = build_fab_from_files({"pyproject.toml": APP.encode()})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({}))
        return int(self._client.StartRun(request).run_id)

    def stop_run(self, run_id: int) -> None:
        """Stop a run that nobody leads."""
        self._client.StopRun(StopRunRequest(run_id=run_id))

    def stop_left(self) -> None:
        """Stop what a run left whose process was killed, so that sites drop their work on it."""
        found = self._client.ListRuns(ListRunsRequest(limit=LEFT_AT_MOST)).run_dict
        for run_id, run in found.items():
            if run.status.status != Status.FINISHED:
                with suppress(httpx.HTTPStatusError):  # it has just ended
                    self.stop_run(run_id)


def flower_key(line: str) -> bytes:
    """A public key in the form in which Flower stores it."""
    return public_key_to_bytes(load_ssh_public_key(line.encode()))  # type: ignore[arg-type]


@contextmanager
def run_on(coordinator: Coordinator) -> Iterator["NetworkGrid"]:
    """Start a run on the SuperLink, take its task, and lend its Grid; tell the SuperLink how it ended.

    Raises:
        SuperLinkGone: If the SuperLink does not hand the task out, or stays away.
    """
    with closing(Control(coordinator, patient=True)) as control:
        yield from _run_on(coordinator, control)


def _run_on(coordinator: Coordinator, control: Control) -> Iterator["NetworkGrid"]:
    set_steady(OF_A_RUN, _clock_file(coordinator))
    control.stop_left()
    run_id = control.start_run()
    names = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    secret = SuperExecAuthHttpInterceptor(
        master_secret=_secret_file(coordinator).read_bytes(), protected_methods=protected
    )
    certificate = coordinator.ca_certificate.read_bytes()
    executor = RuntimeHttpClient.from_server_address(
        coordinator.control_address, False, certificate, [names, secret], retry_invoker=_retrying()
    )
    try:
        token = _acquired(executor)
    except SuperLinkGone:
        control.stop_run(run_id)
        raise
    finally:
        executor.close()
    files = ObjectFiles(object_folder(coordinator))
    grid = NetworkGrid(coordinator.control_address, False, certificate, token=token, files=files, control=control)
    runtime = grid.runtime
    heart = HeartbeatSender(_heartbeat(runtime))
    ended, why = SubStatus.FAILED, "ended by an error"
    try:
        heart.start()
        given = runtime.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        assert given.run.run_id == run_id, "one run at a time holds this folder's lock"
        yield grid
        ended, why = SubStatus.COMPLETED, ""
    except (SystemExit, KeyboardInterrupt):
        why = "stopped on request"
        raise
    except httpx.HTTPError as error:
        raise SuperLinkGone(f"the SuperLink does not answer: {error}. Is flwr-server start still running?") from None
    finally:
        if heart.is_running:
            heart.stop()
        grid.patience(1)
        try:
            runtime.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=why))
        except httpx.HTTPError:
            logging.getLogger(__name__).info("the SuperLink was not told that run %s ended", run_id)
        grid.close()


def _heartbeat(runtime: RuntimeHttpClient) -> Callable[[], bool]:
    """Signs of life of the run, for another thread.

    Flower's own sends SIGINT where the SuperLink has given the run up, which nobody can tell from a person's Ctrl-C.
    """
    signal.signal(LOST_SIGNAL, _lost)

    def beat() -> bool:
        try:
            known = runtime.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
        except RunLost:
            known = False
        except httpx.HTTPError:
            return False
        if not known:
            os.kill(os.getpid(), LOST_SIGNAL)
        return True

    return beat


def _lost(number: int, frame: object) -> NoReturn:
    signal.signal(LOST_SIGNAL, signal.SIG_IGN)
    raise RunLost(GIVEN_UP)


def _acquired(executor: RuntimeHttpClient) -> str:
    deadline = time.monotonic() + TASK_TIMEOUT_S
    while time.monotonic() < deadline:
        answer = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        if answer.token:
            return str(answer.token)
        time.sleep(0.1)
    raise SuperLinkGone(f"the SuperLink did not hand out the run within {TASK_TIMEOUT_S:.0f} s; see its log.")


class NetworkGrid(HttpGrid):
    """Flower's Grid, with the names under which sites are registered; contents go through files, not through HTTP."""

    def __init__(self, *arguments: Any, files: ObjectFiles, control: Control, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._retry_invoker = _retrying()
        self._files, self._control = files, control
        self._announced: dict[str, _Announced] = {}  # by the message that is answered
        self._bounds: dict[str, Bound] = {}  # likewise

    @property
    def runtime(self) -> RuntimeHttpClient:
        """Flower's Runtime API, as this run's task may use it."""
        return self._runtime_client

    def patience(self, tries: int) -> None:
        """Limit the tries of every call from now on."""
        self._retry_invoker.max_tries = tries

    def registered(self) -> Mapping[int, str]:
        """Names of all registered sites by node, connected or not."""
        return {node.node_id: node.name for node in self._control.nodes()}

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        """Put all objects into the files but one, announce the messages, then that one and what is missing still.

        With nothing missing at all, Flower would keep its record of the announcement for ever.
        """
        sent = list(messages)
        for message in sent:
            cut(message)
        of_messages = [get_all_nested_objects(message) for message in sent]
        objects = {name: found for below in of_messages for name, found in below.items()}
        sizes = {name: len(found.deflate()) for name, found in objects.items()}
        last = sent[0].object_id if sent else ""
        for name, found in objects.items():
            if name != last:
                self._files.write(name, found.deflate())
        answer = self.runtime.PushMessages(
            PushAppMessagesRequest(
                messages_list=[message_to_proto(remove_content_from_message(message)) for message in sent],
                message_object_trees=[get_object_tree(message) for message in sent],
            )
        )
        announce = make_push_object_fn_protobuf(self.runtime.PushObject, self.node, run_id, answer.session_id)
        for name in dict.fromkeys(answer.objects_to_push):
            self._files.write(name, objects[name].deflate())
            announce(name, b"")
        bounds = (
            Bound.on_reply_to([sizes[name] for name in below], asked_for(message.content))
            for message, below in zip(sent, of_messages, strict=True)
        )
        self._bounds |= dict(zip(answer.message_ids, bounds, strict=True))
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Fetch the replies that are complete; one whose content is still on its way waits for the next call.

        Flower's own waits here, seconds at a time, for the one that is being uploaded. Where all have been announced,
        a look at the files is cheap, and is repeated for a moment.
        """
        wanted = list(message_ids)
        if asked := [name for name in wanted if name not in self._announced]:  # it forgets what it has told once
            answer = self.runtime.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for proto, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                self._announced[proto.metadata.reply_to_message_id] = _Announced(proto, names_in(tree))
        here, until = self._here(wanted), time.monotonic() + ARRIVING_S
        while not here and not asked and time.monotonic() < until:
            time.sleep(LOOK_S)
            here = self._here(wanted)
        few = dict(itertools.islice(here.items(), AT_A_TIME))
        for name in few:
            del self._announced[name]
        return [self._fetched(one) for one in few.values()]

    def _here(self, wanted: Iterable[str]) -> dict[str, "_Announced"]:
        return {name: one for name in wanted if (one := self._announced.get(name)) and self._arrived(one)}

    def _arrived(self, announced: "_Announced") -> bool:
        """Whether all of a reply's content is there, or never will be, or more of it than can be right."""
        missing = [name for name in announced.missing if name and not self._files.has(name)]
        if len(missing) < len(announced.missing):
            came = set(announced.missing) - set(missing)
            announced.size += sum(self._files.size(name) for name in came)
            announced.missing, announced.since = missing, time.monotonic()
        if bound := self._bounds.get(announced.proto.metadata.reply_to_message_id):
            announced.fault = bound.fault(len(announced.names), announced.size)
        return bool(announced.fault) or not missing or time.monotonic() - announced.since > UPLOAD_STALL_S

    def _fetched(self, announced: "_Announced") -> Message:
        proto = announced.proto
        self._bounds.pop(proto.metadata.reply_to_message_id, None)
        if announced.fault:
            self._let_go(proto)
            return _error_reply(proto, ErrorCode.UNKNOWN, announced.fault)
        if announced.missing:
            reason = f"its reply was cut off: nothing came for {UPLOAD_STALL_S:.0f} s"
            return _error_reply(proto, ErrorCode.NODE_UNAVAILABLE, reason)
        message_id = proto.metadata.message_id
        try:
            message = message_of(message_id, {name: self._files.view(name) or b"" for name in announced.names})
        except ValueError as error:
            message = _error_reply(proto, ErrorCode.UNKNOWN, f"its reply cannot be read: {error}")
        self._let_go(proto)
        return message

    def _let_go(self, proto: Any) -> None:
        """Tell the SuperLink that a reply's content is not needed any more."""
        message_id = proto.metadata.message_id
        self.runtime.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=message_id)
        )


@dataclass
class _Announced:
    """A reply that the SuperLink has told of; ``missing`` objects were last fewer at ``since``, ``size`` has come.

    Attributes:
        fault: Why it is refused, whatever else of it may come.
    """

    proto: Any
    names: list[str]
    since: float = field(default_factory=time.monotonic)
    size: int = 0
    fault: str = ""
    missing: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [*self.names, ""]  # the empty name: not looked at yet


def _error_reply(proto: Any, code: int, reason: str) -> Message:
    """An error in the place of a reply that is of no use, as Flower's own Grid makes it."""
    came = proto.metadata
    metadata = Metadata(
        run_id=came.run_id,
        message_id="",
        src_node_id=came.src_node_id,
        dst_node_id=came.dst_node_id,
        reply_to_message_id=came.reply_to_message_id,
        group_id=came.group_id,
        ttl=came.ttl,
        message_type=came.message_type,
        created_at=came.created_at,
    )
    return make_message(metadata=metadata, error=Error(code, reason))


def quiet() -> None:
    """Keep Flower's own lines off the terminal; errors still come as exceptions."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _retrying() -> Any:
    """Tries again for a while, but not where the SuperLink has given the run up: Flower's own would send SIGINT."""
    invoker = make_simple_http_retry_invoker()
    invoker.max_time = LINK_PATIENCE_S
    by_flower: Any = invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _NOT_OURS:
            raise RunLost(GIVEN_UP) from None
        return bool(by_flower(error))

    invoker.should_giveup = gives_up
    return invoker


def _clock_file(coordinator: Coordinator) -> Path:
    return coordinator.state / "clock.json"


def _secret_file(coordinator: Coordinator) -> Path:
    return coordinator.state / "executor.secret"


def _environment(coordinator: Coordinator) -> dict[str, str]:
    home = str((coordinator.state / "flwr").resolve())
    return {
        **os.environ,
        **LARGE_BUFFERS,
        "FLWR_HOME": home,
        "FLWR_LOG_LEVEL": os.environ.get("FLWR_LOG_LEVEL", "WARNING"),
    }
