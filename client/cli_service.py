"""The commands ``flwr-client service``: a unit of systemd, or a Podman quadlet, that keeps ``start`` running."""

from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.system.terminal import EscapingConsole

service_app = typer.Typer(
    help="Start flwr-client at boot, and again after a kill: systemd or Podman.", no_args_is_help=True
)
_console = EscapingConsole()
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.")]
Into = Annotated[
    Path | None,
    typer.Option("--into", help="Folder of the unit's file, to look at it first: nothing else is written or asked."),
]


@service_app.command("install")
def install_client_service(
    folder: Folder,
    system: Annotated[
        bool | None,
        typer.Option("--system/--user", help="A unit of the machine (the default for root), or of this account."),
    ] = None,
    quadlet: Annotated[bool, typer.Option("--quadlet", help="Run the image by Podman: a .container file.")] = False,
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
    account: Annotated[
        str, typer.Option("--account", help="Account that runs a unit of the machine; DIR's owner if left out.")
    ] = "",
    image: Annotated[str, typer.Option("--image", help="The image of --quadlet.")] = "localhost/flwr-client",
    gpu: Annotated[bool, typer.Option("--gpu", help="Give all GPUs to the container of --quadlet, by CDI.")] = False,
    name: Annotated[str, typer.Option("--name", help="The unit's name; from DIR's name if left out.")] = "",
    into: Into = None,
    now: Annotated[bool, typer.Option("--now", help="Start it too, now and at each boot.")] = False,
) -> None:
    """Write a unit of systemd that runs flwr-client start on a folder, at boot and again after a kill.

    Example: flwr-client service install north --images /srv/images

    Example: flwr-client service install north --quadlet --ledger ledger --images /srv/images
    """
    from polyclinic.client.service import make_client_service
    from polyclinic.common.system.service_files import ServiceOptions, install_service

    options = ServiceOptions(system, quadlet, into, name, account, image, gpu, now)
    service, running = make_client_service(folder, options, ledger, images)
    _print(install_service(service, options, running=running))


@service_app.command("status")
def print_client_service_status(folder: Folder, into: Into = None) -> None:
    """Print the unit of a folder, whether it runs, and how it ended; exit with 1 if it does not run.

    Example: flwr-client service status north
    """
    from polyclinic.client.service import CLIENT
    from polyclinic.common.system.service_files import describe_service

    lines, running = describe_service(CLIENT, folder.resolve(), into)
    _print(lines)
    raise SystemExit(0 if running else 1)


@service_app.command("remove")
def remove_client_service(folder: Folder, into: Into = None) -> None:
    """Stop the unit of a folder and delete what service install wrote; the folder and the ledger stay.

    Example: flwr-client service remove north
    """
    from polyclinic.client.service import CLIENT
    from polyclinic.common.system.service_files import remove_service

    _print(remove_service(CLIENT, folder.resolve(), into))


def _print(lines: list[str]) -> None:
    for line in lines:
        _console.print(line, soft_wrap=True, highlight=False, markup=False)
