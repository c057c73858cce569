"""List the hosts to which an experiment connects and what is sent there; ask the user before the first connection."""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import typer

from polyclinic.common.config import Experiment, ExperimentFile
from polyclinic.common.errors import Fault, raise_faults
from polyclinic.common.hosts import SECRETS_FILE, HostUse, find_user_secrets_path, normalize_host, permit_hosts
from polyclinic.common.system.terminal import EscapingConsole
from polyclinic.data.base.spec import DataSpec
from polyclinic.data.connections import OutboundConnection, list_dataset_connections
from polyclinic.server.export.preflight import read_labelled_dataset
from polyclinic.server.runs.tracking import TrackingService, hide_password_in_urls
from polyclinic.server.simulation.backends.cluster import find_cluster_host

DATA_SECTIONS = ("data", "server_data", "external_test")
"""Tables of an experiment file that name a data set."""


def list_experiment_connections(
    experiment: Experiment, base: Path, *, samples: bool = False, sections: Sequence[str] = DATA_SECTIONS
) -> list[OutboundConnection]:
    """Return the connections to hosts of data sets that a run of an experiment on this machine makes.

    Args:
        base: The folder to which paths in the experiment are relative.
        samples: True to include examples of the values that are sent, to show them at a terminal.
        sections: The experiment's tables whose data sets the command loads.

    Raises:
        BadInput: If the user's file of secrets has a fault.
    """
    secrets_path = find_user_secrets_path()
    connections = list[OutboundConnection]()
    for section in sections:
        spec: DataSpec | None = getattr(experiment, section)
        connections += list_dataset_connections(spec, base, secrets_path, section=section, samples=samples)
    return connections


def list_coordinator_connections(file: ExperimentFile, track: TrackingService | None) -> list[OutboundConnection]:
    """Return the coordinator's connections: to hosts of its own data sets and to MLflow.

    The coordinator connects to no hospital; hospitals connect to the coordinator.

    Raises:
        BadInput: If the user's file of secrets has a fault.
    """
    sections = ("server_data", "external_test")
    connections = list_experiment_connections(
        file.experiment, file.base_folder, samples=is_person_at_terminal(), sections=sections
    )
    return [*connections, *list_tracking_connections(track)]


def list_cluster_connections(experiment: Experiment, typed: Collection[str] = ()) -> list[OutboundConnection]:
    """Return the connection to the Ray cluster that a simulation joins; empty for a cluster on this machine.

    Args:
        typed: Keys of the experiment that the user set on the command line, not in the file.
    """
    section = experiment.simulation
    host = find_cluster_host(section.address) if section.backend == "ray" else ""
    if not host:
        return []
    sent = ("all images and labels of the experiment", "the right to run programs as you on this machine")
    asks = "simulation.address" not in typed
    return [OutboundConnection(HostUse(host), f"the Ray cluster {host}", "simulation.address", sent, asks=asks)]


def list_tracking_connections(track: TrackingService | None) -> list[OutboundConnection]:
    """Return the connection to the MLflow server in ``MLFLOW_TRACKING_URI``; empty without ``--track`` or a server."""
    address = os.environ.get("MLFLOW_TRACKING_URI", "") if track else ""
    if not re.match(r"(?!file:|sqlite:)[a-z0-9+-]+:|databricks$", address, re.IGNORECASE):
        return []  # a folder or a database on this machine
    shown = hide_password_in_urls(address)
    sent = ("all settings, and the figures of every round",)
    return [OutboundConnection(HostUse(shown), f"MLflow at {shown}", "--track, MLFLOW_TRACKING_URI", sent, asks=False)]


def describe_experiment_hosts(file: ExperimentFile) -> list[str]:
    """Return lines for a person that name each host to which a simulation of an experiment connects."""
    connections = list_experiment_connections(file.experiment, file.base_folder)
    connections += list_cluster_connections(file.experiment)
    if not connections:
        return ["It talks to no other machine."]
    return ["It talks to other machines:", *(line for connection in connections for line in connection.describe())]


@contextmanager
def ask_and_permit_hosts(connections: Iterable[OutboundConnection], *, yes: bool) -> Iterator[None]:
    """Print the hosts to standard error, ask the user to agree, and permit connections to them in the ``with`` block.

    Args:
        yes: True if the user has agreed by ``--yes``: the hosts are printed, and nothing is asked.

    Raises:
        BadInput: If the user has to be asked, and standard input is no terminal.
        typer.Abort: If the user declines.
    """
    distinct = list(dict.fromkeys(connections))
    needing_consent = [connection for connection in distinct if connection.asks]
    console = EscapingConsole(stderr=True)
    if distinct:
        console.print("This talks to other machines:", soft_wrap=True, highlight=False)
    for connection in distinct:
        for line in connection.describe():
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    if needing_consent and not yes:
        if not is_person_at_terminal():
            remedy = "If that is meant, agree with --yes."
            faults = [
                Fault(each.where, f"{each.address}: nobody is here to agree.", remedy) for each in needing_consent
            ]
            raise_faults(faults)
        typer.confirm("Go on?", abort=True, err=True)
    with permit_hosts((connection.use for connection in distinct), find_user_secrets_path()):
        yield


def ask_for_experiments(
    files: Iterable[ExperimentFile],
    overrides: Iterable[str] = (),
    *,
    yes: bool,
    track: TrackingService | None = None,
) -> AbstractContextManager[None]:
    """Return the context of :func:`ask_and_permit_hosts` for the hosts of simulations of these experiments.

    Args:
        overrides: Values of the option ``--set``, ``KEY=VALUE``.
    """
    connections = list[OutboundConnection]()
    samples = is_person_at_terminal()
    typed = {text.partition("=")[0].strip() for text in overrides}
    for file in files:
        connections += list_experiment_connections(file.experiment, file.base_folder, samples=samples)
        connections += list_cluster_connections(file.experiment, typed)
    return ask_and_permit_hosts([*connections, *list_tracking_connections(track)], yes=yes)


def ask_for_data(path: Path | None, *, yes: bool) -> AbstractContextManager[None]:
    """Return the context of :func:`ask_and_permit_hosts` for the hosts of the data set in the table ``[data]``.

    Args:
        path: TOML file of an experiment or a site. Other files, and None, name no host.

    Raises:
        BadInput: If the experiment file has a fault, or no ``[data]``.
    """
    connections = list[OutboundConnection]()
    if path is not None and path.suffix == ".toml":
        labelled = read_labelled_dataset(path)
        spec, base = labelled.spec, labelled.base
        # A hospital's own secrets lie beside its site.toml.
        secrets_path = base / SECRETS_FILE if labelled.state is not None else find_user_secrets_path()
        connections = list_dataset_connections(spec, base, secrets_path, samples=is_person_at_terminal())
    return ask_and_permit_hosts(connections, yes=yes)


@contextmanager
def permit_listed_hosts(
    files: Iterable[ExperimentFile], allow_hosts: Sequence[str], typed: Collection[str] = ()
) -> Iterator[None]:
    """Permit connections to the hosts of experiments in the ``with`` block, for callers from Python.

    Args:
        allow_hosts: Addresses to which the caller agrees, such as ``"https://pacs.example"``, or of Ray clusters.
        typed: Keys of the experiment that the caller set as arguments, not in the file.

    Raises:
        BadInput: For each host that is not in ``allow_hosts``, with the data that would be sent there.
    """
    connections = list[OutboundConnection]()
    for file in files:
        connections += list_experiment_connections(file.experiment, file.base_folder)
        connections += list_cluster_connections(file.experiment, typed)
    listed = {_normalize_listed_host(host) for host in allow_hosts}
    faults = [
        Fault(
            connection.where,
            f"{connection.address} is sent {'; '.join(connection.sent)}.",
            f'If that is meant, add allow_hosts=["{connection.host}"].',
        )
        for connection in dict.fromkeys(connections)
        if connection.asks and connection.host not in listed
    ]
    raise_faults(faults)
    with permit_hosts((connection.use for connection in connections), find_user_secrets_path()):
        yield


def is_person_at_terminal() -> bool:
    """Return True if standard input is a terminal, so that a person can answer a question."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _normalize_listed_host(host: str) -> str:
    try:
        return normalize_host(host)
    except ValueError:
        return host  # the address of a Ray cluster is not a URL
