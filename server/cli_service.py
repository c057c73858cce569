"""The commands ``flwr-server service``: install a systemd unit or a Podman quadlet that runs ``flwr-server start``."""

from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.system.service_commands import (
    Account,
    Image,
    Into,
    Now,
    Quadlet,
    System,
    UnitNameOption,
    print_lines,
)

service_app = typer.Typer(
    help="Start flwr-server at boot, and again after a kill: systemd or Podman.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]


@service_app.command("install")
def install_server_service(
    folder: Folder,
    system: System = None,
    quadlet: Quadlet = False,
    account: Account = "",
    image: Image = "localhost/flwr-server",
    name: UnitNameOption = "",
    into: Into = None,
    now: Now = False,
) -> None:
    """Write a unit of systemd that runs flwr-server start on a folder, at boot and again after a kill.

    Example: flwr-server service install trial

    Example: flwr-server service install trial --quadlet
    """
    from polyclinic.common.system.service_files import ServiceOptions, install_service
    from polyclinic.server.deployment.service import make_server_service

    options = ServiceOptions(system, quadlet, into, name, account, image, now=now)
    service, running = make_server_service(folder)
    print_lines(install_service(service, options, running=running))


@service_app.command("status")
def print_server_service_status(folder: Folder, into: Into = None) -> None:
    """Print the unit of a folder, whether it runs, and how it ended; exit with 1 if it does not run.

    Example: flwr-server service status trial
    """
    from polyclinic.common.system.service_files import describe_service
    from polyclinic.server.deployment.service import SERVER_PROGRAM

    lines, running = describe_service(SERVER_PROGRAM, folder.resolve(), into)
    print_lines(lines)
    raise SystemExit(0 if running else 1)


@service_app.command("remove")
def remove_server_service(folder: Folder, into: Into = None) -> None:
    """Stop the unit of a folder and delete what service install wrote; the folder stays.

    Example: flwr-server service remove trial
    """
    from polyclinic.common.system.service_files import remove_service
    from polyclinic.server.deployment.service import SERVER_PROGRAM

    print_lines(remove_service(SERVER_PROGRAM, folder.resolve(), into))
