"""The commands ``flwr-server service``: a unit of systemd, or a Podman quadlet, that keeps ``start`` running."""

from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.system.terminal import EscapingConsole

service_app = typer.Typer(
    help="Start flwr-server at boot, and again after a kill: systemd or Podman.", no_args_is_help=True
)
_console = EscapingConsole()
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]
Into = Annotated[
    Path | None,
    typer.Option("--into", help="Folder of the unit's file, to look at it first: nothing else is written or asked."),
]


@service_app.command("install")
def install_server_service(
    folder: Folder,
    system: Annotated[
        bool | None,
        typer.Option("--system/--user", help="A unit of the machine (the default for root), or of this account."),
    ] = None,
    quadlet: Annotated[bool, typer.Option("--quadlet", help="Run the image by Podman: a .container file.")] = False,
    account: Annotated[
        str, typer.Option("--account", help="Account that runs a unit of the machine; DIR's owner if left out.")
    ] = "",
    image: Annotated[str, typer.Option("--image", help="The image of --quadlet.")] = "localhost/flwr-server",
    name: Annotated[str, typer.Option("--name", help="The unit's name; from DIR's name if left out.")] = "",
    into: Into = None,
    now: Annotated[bool, typer.Option("--now", help="Start it too, now and at each boot.")] = False,
) -> None:
    """Write a unit of systemd that runs flwr-server start on a folder, at boot and again after a kill.

    Example: flwr-server service install trial

    Example: flwr-server service install trial --quadlet
    """
    from polyclinic.common.system.service_files import ServiceOptions, install_service
    from polyclinic.server.deployment.service import make_server_service

    options = ServiceOptions(system, quadlet, into, name, account, image, now=now)
    service, running = make_server_service(folder)
    _print(install_service(service, options, running=running))


@service_app.command("status")
def print_server_service_status(folder: Folder, into: Into = None) -> None:
    """Print the unit of a folder, whether it runs, and how it ended; exit with 1 if it does not run.

    Example: flwr-server service status trial
    """
    from polyclinic.common.system.service_files import describe_service
    from polyclinic.server.deployment.service import SERVER

    lines, running = describe_service(SERVER, folder.resolve(), into)
    _print(lines)
    raise SystemExit(0 if running else 1)


@service_app.command("remove")
def remove_server_service(folder: Folder, into: Into = None) -> None:
    """Stop the unit of a folder and delete what service install wrote; the folder stays.

    Example: flwr-server service remove trial
    """
    from polyclinic.common.system.service_files import remove_service
    from polyclinic.server.deployment.service import SERVER

    _print(remove_service(SERVER, folder.resolve(), into))


def _print(lines: list[str]) -> None:
    for line in lines:
        _console.print(line, soft_wrap=True, highlight=False, markup=False)
