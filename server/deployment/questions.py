"""Ask the hospitals that are connected to a coordinator's SuperLink a question, without a training run."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from polyclinic.common.errors import BadInput, Fault, quote_names
from polyclinic.server.coordinator.admission import read_unrevoked_sites
from polyclinic.server.coordinator.folder import CoordinatorFolder, lock_run_members
from polyclinic.server.coordinator.preflight import make_no_superlink_fault
from polyclinic.server.deployment.superlink.control_client import is_superlink_answering
from polyclinic.server.deployment.superlink.network_grid import open_network_grid
from polyclinic.server.questions.exchange import QuestionExchange


@contextmanager
def open_network_questions(
    coordinator: CoordinatorFolder, sites: Collection[str], deadline_s: float
) -> Iterator[QuestionExchange]:
    """Register a run of questions on the SuperLink, yield the exchange, and end the run.

    Args:
        sites: Names of the hospitals to ask; empty for all admitted hospitals.
        deadline_s: Seconds that a hospital has for each answer.

    Raises:
        BadInput: If a named hospital is not admitted, no SuperLink answers, or a run of one of them is in progress.
    """
    members = frozenset(sites)
    admitted = read_unrevoked_sites(coordinator)
    if unknown := sorted(members - admitted.keys()):
        problem = f"has {quote_names(unknown)}, and {quote_names(sorted(admitted)) or 'none'} are admitted."
        raise BadInput([Fault("sites", problem)])
    if not is_superlink_answering(coordinator):
        raise BadInput([make_no_superlink_fault(coordinator)])
    with lock_run_members(coordinator, members), open_network_grid(coordinator, members) as grid:
        yield QuestionExchange(grid, deadline_s, grid.list_registered_sites, grid.list_wire_versions)
