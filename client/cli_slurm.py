"""The commands ``flwr-client slurm``: training in jobs of the Slurm queue."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.system.terminal import EscapingConsole, LogFormat, LogOutputFormat, make_event_printer

slurm_app = typer.Typer(
    help="Train in jobs of Slurm, for a hospital whose GPU is behind a queue.", no_args_is_help=True
)
_console = EscapingConsole()
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder, which login and GPU nodes share.")]


@slurm_app.command("script")
def write_slurm_script(
    folder: Folder,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Options of sbatch, such as --partition=gpu --gres=gpu:1."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New file of the script; standard output where left out.")
    ] = None,
    until_idle: Annotated[
        float, typer.Option("--until-idle", min=0, help="The job ends after so many minutes without a request.")
    ] = 10,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="A job that stays, also while nothing is asked, and is queued again at its limit."),
    ] = False,
) -> None:
    """Write a batch script that trains in a job of Slurm.

    Example: flwr-client slurm script north --out north.sbatch -- --partition=gpu --gres=gpu:1 --time=04:00:00
    """
    from polyclinic.client.queue.slurm import make_batch_script
    from polyclinic.client.site.site_file import read_site_toml_without_data
    from polyclinic.common.errors import raise_faults
    from polyclinic.common.system.files import find_output_file_faults, write_atomically

    read_site_toml_without_data(folder)
    raise_faults([] if out is None else find_output_file_faults(out))
    script = make_batch_script(folder, options or (), idle_minutes=None if keep else until_idle)
    if out is None:
        print(script, end="")
        return
    write_atomically(out, script.encode())
    follow = ["sbatch", str(out)] if keep else ["flwr-client", "slurm", "watch", str(folder), "--script", str(out)]
    _console.print(f"wrote {out}; next: {shlex.join(follow)}", soft_wrap=True, highlight=False, markup=False)


@slurm_app.command("watch")
def watch_for_requests(
    folder: Folder,
    script: Annotated[Path, typer.Option("--script", help="The batch script of flwr-client slurm script.")],
    log_format: LogFormat = LogOutputFormat.text,
) -> None:
    """Stay connected without a GPU, on a login node, and submit the script when a request waits.

    Example: flwr-client slurm watch north --script north.sbatch
    """
    from polyclinic.client.connection.preflight import check_client_before_start
    from polyclinic.client.queue.slurm import SlurmQueue, find_missing_command_faults
    from polyclinic.common.errors import Fault, raise_faults
    from polyclinic.common.system.files import is_file, lock_file, make_missing_input_fault, open_own_file

    faults = [] if is_file(script) else [make_missing_input_fault(script)]
    raise_faults([*faults, *find_missing_command_faults()])
    from polyclinic.client.connection.authority import refuse_other_authority
    from polyclinic.client.queue.watch import QueueWatcher, find_listed_job
    from polyclinic.client.site.site_file import read_and_check_connection_kit, read_site_toml_without_data

    settings = read_site_toml_without_data(folder)
    queue = SlurmQueue(script.resolve())
    check_client_before_start(folder, has_job=find_listed_job(settings.state_folder, queue) is not None)
    kit = read_and_check_connection_kit(settings)
    refuse_other_authority(settings, kit)
    settings.state_folder.mkdir(parents=True, exist_ok=True)
    with open_own_file(settings.state_folder / "queue-lock", "wb") as file:
        lock_file(file, Fault(str(folder), "another flwr-client slurm watch runs on this folder."))
        QueueWatcher(settings, kit, queue, make_event_printer(_console)).watch()
