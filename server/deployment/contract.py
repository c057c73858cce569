"""``flwr-server status --contract``: make the roll call of an experiment without a run, and compare the answers.

No round begins, no hospital is refused, and no run folder is written. The hospitals store the plan, so that
``flwr-client check`` can use it.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyclinic.common.config import ExperimentFile, make_hospital_plan
from polyclinic.common.contract import CONTRACT_RUN
from polyclinic.common.contract_points import POINT_NAMES, TABLE_WIDTH, ContractPoint
from polyclinic.common.errors import BadInput
from polyclinic.common.models.state import build_initial_frozen_part
from polyclinic.common.system.terminal import fold_long_words
from polyclinic.common.wire.records import RollCall
from polyclinic.server.coordinator.admission import make_site_claim_limits_reader, read_unrevoked_sites
from polyclinic.server.coordinator.folder import CoordinatorFolder, lock_run_members
from polyclinic.server.coordinator.preflight import make_no_superlink_fault
from polyclinic.server.deployment.superlink.control_client import is_superlink_answering
from polyclinic.server.deployment.superlink.network_grid import open_network_grid
from polyclinic.server.federation.run import add_model_file_hashes
from polyclinic.strategies.engine.contract_comparison import ContractComparison, compare_sites_with_plan
from polyclinic.strategies.engine.membership import RollCaller
from polyclinic.strategies.registry import build_experiment_strategy
from polyclinic.strategies.run_length import complete_round_settings

ANSWER_TIMEOUT_S = 60.0
"""Seconds after which a hospital without an answer is not waited for."""
NOT_CONNECTED = "not connected"


@dataclass(frozen=True)
class FederationContract:
    """The result of comparing an experiment's plan with the roll call answers of the admitted hospitals.

    Attributes:
        experiment: Name of the experiment's file.
        compared: The comparison for the hospitals that answered, point by point.
        silent: Hospital -> reason for a missing answer: it is not connected, does not answer, or declines.
    """

    experiment: str
    compared: ContractComparison
    silent: Mapping[str, str]

    @property
    def is_agreed(self) -> bool:
        """True if all admitted hospitals answered and no answer contradicts the plan or another answer."""
        points = [point for points in self.compared.points.values() for point in points]
        return not self.silent and not any(point.faults for point in points)

    def as_json(self) -> dict[str, Any]:
        """Return the output of ``flwr-server status --contract --json``."""
        sites = self.compared.points.items()
        return {
            "experiment": self.experiment,
            "agreed": self.is_agreed,
            "sites": {site: {point.name: point.as_json() for point in points} for site, points in sites},
            "silent": dict(self.silent),
            "question": self.compared.question,
        }


def ask_for_contract(coordinator: CoordinatorFolder, file: ExperimentFile) -> FederationContract:
    """Make the roll call of an experiment, and compare the hospitals' answers with its plan and with each other.

    Raises:
        BadInput: If the experiment has faults, no SuperLink answers, or a run of one of its sites is in progress.
    """
    # The same plan that a run would send, so that a hospital can approve it now.
    experiment = complete_round_settings(file.with_run_name().experiment)
    method = build_experiment_strategy(experiment)
    frozen = build_initial_frozen_part(experiment.model, experiment.run.seed, file.base_folder)
    plan = make_hospital_plan(add_model_file_hashes(experiment, frozen, file.base_folder))
    if not is_superlink_answering(coordinator):
        raise BadInput([make_no_superlink_fault(coordinator)])
    sites = frozenset(experiment.participation.sites)
    with lock_run_members(coordinator, sites), open_network_grid(coordinator, sites) as grid:
        call = RollCall(f"{CONTRACT_RUN}-{secrets.token_hex(8)}", plan.model_dump_json())
        roll_caller = RollCaller(grid, call, grid.list_registered_sites, grid.list_site_processes)
        roll_caller.ask_new_sites_for_labels(ANSWER_TIMEOUT_S)
        limits = make_site_claim_limits_reader(coordinator, sites)()
        distinct = experiment.participation.distinct_classes
        compared = compare_sites_with_plan(list(roll_caller.members.values()), plan, method, limits, distinct)
        silent = {roll_caller.get_registered_site_name(node): reason for node, reason in roll_caller.refused.items()}
        for name in read_unrevoked_sites(coordinator, sites):
            if name not in compared.points:
                silent.setdefault(name, NOT_CONNECTED)
    return FederationContract(file.path.name, compared, dict(sorted(silent.items())))


def format_contract(contract: FederationContract) -> RenderableType:
    """Format the contract for the terminal: a row for each hospital, then each difference with its remedy."""
    table = fold_long_words(Table("site", *POINT_NAMES, width=TABLE_WIDTH))
    details = list[Text]()
    for site, points in contract.compared.points.items():
        table.add_row(Text(site), *map(_format_cell, points))
        for point in points:
            details += [Text(f"{site}, {point.name}: {fault}") for fault in point.faults]
    for site, reason in contract.silent.items():
        table.add_row(Text(site), Text("–" if reason != NOT_CONNECTED else reason), *(["–"] * (len(POINT_NAMES) - 1)))
        details += [Text(f"{site}: {reason}")] if reason != NOT_CONNECTED else []
    if contract.compared.question:
        details.append(Text(contract.compared.question))
    verdict = "All hospitals agree." if contract.is_agreed else "Before a run, settle what differs."
    return Group(Text(f"The contract of {contract.experiment}, before round 1"), table, *details, Text(verdict))


def _format_cell(point: ContractPoint) -> Text:
    value = point.here
    if point.name == "words":
        names = point.here.count(",") + 1
        value = f"{names} class{'es' if names > 1 else ''}"
    if point.name == "counts":
        value = point.here.split()[0]
    return Text(f"{value} !", style="bold red") if point.faults else Text(value)
