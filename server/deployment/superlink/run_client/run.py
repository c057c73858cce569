"""One run on the SuperLink: its task taken, its Grid lent, signs of life given, its end told.

Our ServerApp runs in the process that leads, which takes the run's task from the SuperLink over loopback, so a
SuperLink that dies and comes back costs nothing but time: registrations, messages and the run are in its database.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NoReturn

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from server.coordinator.admission import members
from server.coordinator.authority import signing_identity
from server.coordinator.folder import Coordinator
from server.deployment.superlink.local.loopback import SecretInterceptor, secret_file
from server.deployment.superlink.local.process import clock_file, object_folder
from server.deployment.superlink.local.steady_clock import OF_A_RUN, set_steady
from server.deployment.superlink.objects.files import ObjectFiles
from server.deployment.superlink.run_client.control import Control, flower_key
from server.deployment.superlink.run_client.network_grid import NetworkGrid
from server.deployment.superlink.run_client.retry import GIVEN_UP, RunLost, SuperLinkGone, retrying
from server.deployment.superlink.run_client.signing import Addressee, Signing

TASK_TIMEOUT_S = 60.0
LOST_SIGNAL = signal.SIGUSR1
"""By which the thread that gives signs of life interrupts the one that leads."""


@contextmanager
def run_on(coordinator: Coordinator) -> Iterator["NetworkGrid"]:
    """Start a run on the SuperLink, take its task, and lend its Grid; tell the SuperLink how it ended.

    Raises:
        SuperLinkGone: If the SuperLink does not hand the task out, or stays away.
    """
    with closing(Control(coordinator, patient=True)) as control:
        yield from _run_on(coordinator, control)


def _run_on(coordinator: Coordinator, control: Control) -> Iterator["NetworkGrid"]:
    set_steady(OF_A_RUN, clock_file(coordinator))
    control.stop_left()
    run_id = control.start_run()
    token = _token(coordinator, control, run_id)
    files = ObjectFiles(object_folder(coordinator))
    signing = Signing(*signing_identity(coordinator), lambda: _addressees(coordinator, control))
    grid = NetworkGrid(coordinator, token, files=files, signing=signing)
    heart = HeartbeatSender(_heartbeat(grid.runtime))
    ended, why = SubStatus.FAILED, "ended by an error"
    try:
        heart.start()
        _take_task(grid, run_id)
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
        _give_back(grid, ended, why)


def _token(coordinator: Coordinator, control: Control, run_id: int) -> str:
    """The token of the run's task.

    Raises:
        SuperLinkGone: If the SuperLink does not hand the task out; then the run is stopped.
    """
    names = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    secret = SuperExecAuthHttpInterceptor(
        master_secret=secret_file(coordinator).read_bytes(), protected_methods=protected
    )
    certificate, ours = coordinator.ca_certificate.read_bytes(), SecretInterceptor(coordinator)
    executor = RuntimeHttpClient.from_server_address(
        coordinator.control_address, False, certificate, [names, secret, ours], retry_invoker=retrying()
    )
    try:
        return _acquired(executor)
    except SuperLinkGone:
        control.stop_run(run_id)
        raise
    finally:
        executor.close()


def _take_task(grid: "NetworkGrid", run_id: int) -> None:
    """Begin the task: Flower reads its identity from where this puts it."""
    given = grid.runtime.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))
    assert given.run.run_id == run_id, "one run at a time holds this folder's lock"


def _give_back(grid: "NetworkGrid", ended: str, why: str) -> None:
    """Report how the task ended, and close the connection."""
    grid.patience(1)
    try:
        grid.runtime.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=why))
    except httpx.HTTPError:
        logging.getLogger(__name__).info("the SuperLink did not receive how run %s ended", TaskIdentity.run_id)
    grid.close()


def _addressees(coordinator: Coordinator, control: Control) -> dict[int, Addressee]:
    """The sites that may take part, by node: by the key in the coordinator's files, not by the name in the database."""
    admitted = {flower_key(site.public_key): site for site in members(coordinator).values()}
    found = ((node.node_id, admitted.get(node.public_key)) for node in control.nodes())
    return {node: Addressee(site.site, site.public_key) for node, site in found if site is not None}


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
