"""The commands ``flwr-client service``: a systemd unit or a Podman quadlet that keeps ``flwr-client start`` running."""

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
    help="Start flwr-client at boot, and again after a kill: systemd or Podman.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]


@service_app.command("install")
def install_client_service(
    folder: Folder,
    system: System = None,
    quadlet: Quadlet = False,
    ledger: Annotated[
        Path | None,
        typer.Option(
            "--ledger", help="Folder of the privacy ledger, as mounted at /ledger; the account's if left out."
        ),
    ] = None,
    images: Annotated[
        list[Path],
        typer.Option("--images", help="Folder of images: mounted before the start, and read only. Repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    account: Account = "",
    image: Image = "localhost/flwr-client",
    gpu: Annotated[bool, typer.Option("--gpu", help="Give all GPUs to the container of --quadlet, by CDI.")] = False,
    name: UnitNameOption = "",
    into: Into = None,
    now: Now = False,
) -> None:
    """Write a unit of systemd that runs flwr-client start on a folder, at boot and again after a kill.

    Example: flwr-client service install north --images /srv/images

    Example: flwr-client service install north --quadlet --ledger ledger --images /srv/images
    """
    from polyclinic.client.service import make_client_service
    from polyclinic.common.system.service_files import ServiceOptions, install_service

    options = ServiceOptions(system, quadlet, into, name, account, image, gpu, now)
    service, running = make_client_service(folder, options, ledger, images)
    print_lines(install_service(service, options, running=running))


@service_app.command("status")
def print_client_service_status(folder: Folder, into: Into = None) -> None:
    """Print the unit of a folder, whether it runs, and how it ended; exit with 1 if it does not run.

    Example: flwr-client service status north
    """
    from polyclinic.client.service import CLIENT_SERVICE
    from polyclinic.common.system.service_files import describe_service

    lines, running = describe_service(CLIENT_SERVICE, folder.resolve(), into)
    print_lines(lines)
    raise SystemExit(0 if running else 1)


@service_app.command("remove")
def remove_client_service(folder: Folder, into: Into = None) -> None:
    """Stop the unit of a folder and delete what service install wrote; the folder and the ledger stay.

    Example: flwr-client service remove north
    """
    from polyclinic.client.service import CLIENT_SERVICE
    from polyclinic.common.system.service_files import remove_service

    print_lines(remove_service(CLIENT_SERVICE, folder.resolve(), into))
