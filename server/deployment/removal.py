"""``flwr-server remove``: list the runs and models to which a hospital contributed that leaves the federation."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from polyclinic.common.system.files import make_private_folder
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.plain_text import quote_for_shell
from polyclinic.server.coordinator.admission import AdmittedSite
from polyclinic.server.coordinator.folder import CoordinatorFolder
from polyclinic.server.runs.affected import SiteTraces, find_traces_of_site, write_removal_record
from polyclinic.server.runs.live_status import read_run_history


def list_traces_of_site(
    coordinator: CoordinatorFolder, site: AdmittedSite, reason: str, more: Sequence[Path]
) -> SiteTraces:
    """List the runs to which a site contributed, and write the list to ``removed/NAME.json``.

    Args:
        reason: Why the site leaves, in the coordinator's words.
        more: Folders of runs that were moved or are not in the coordinator's history.
    """
    history = read_run_history(coordinator.state_path)
    folders = [Path(run["run_folder"]) for run in history if run["there"]]
    missing = [run["run_folder"] for run in history if not run["there"]]
    traces = find_traces_of_site(site.site, [*folders, *(folder.absolute() for folder in more)])
    traces.unreadable.update(dict.fromkeys(missing, "moved or removed; name its new place with --run"))
    make_private_folder(coordinator.removed_path)
    path = get_removal_record_path(coordinator, site.site)
    write_removal_record(path, site.site, reason, site.revoked, traces)
    return traces


def get_removal_record_path(coordinator: CoordinatorFolder, site: str) -> Path:
    """Return the path ``removed/NAME.json`` of the list of runs to which a removed site contributed."""
    return join_plain_name(coordinator.removed_path, PlainName(site), ".json")


def format_traces(coordinator: CoordinatorFolder, site: str, traces: SiteTraces) -> Text:
    """Format the list of runs for the terminal: a line for each run, then the next steps for the coordinator."""
    lines = [f"{site} is revoked: refused within 3 s where flwr-server start runs."]
    for run in traces.affected:
        model = f"model {run.model_sha256[:12]}" if run.model_sha256 else "the run has not ended"
        lines.append(f"{run.name}: {site} {run.describe()}; {model}; {run.folder}")
    if traces.affected:
        words = f"flwr-server run {quote_for_shell(coordinator.folder)} EXPERIMENT --out NEW"
        lines += [
            f"What {site} has contributed stays in these models. To train one again without it, use the same "
            f"experiment file, without {site} in participation.sites: {words}",
            "Their folders hold more of it: updates/, checkpoints/. Delete those that nobody needs.",
        ]
    else:
        lines.append(f"No run with {site} in its model was found.")
    lines += [f"{folder}: nobody can say if {site} is in it: {why}" for folder, why in traces.unreadable.items()]
    lines.append(f"The list stays in {get_removal_record_path(coordinator, site)}.")
    return Text("\n".join(lines))
