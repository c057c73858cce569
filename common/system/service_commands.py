"""Arguments and output that the ``service`` commands of both programs share; :mod:`.service_files` does the work."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from polyclinic.common.system.terminal import EscapingConsole

_console = EscapingConsole()
Into = Annotated[
    Path | None,
    typer.Option("--into", help="Folder of the unit's file, to look at it first: nothing else is written or asked."),
]
System = Annotated[
    bool | None,
    typer.Option("--system/--user", help="A unit of the machine (the default for root), or of this account."),
]
Quadlet = Annotated[bool, typer.Option("--quadlet", help="Run the image by Podman: a .container file.")]
Account = Annotated[
    str, typer.Option("--account", help="Account that runs a unit of the machine; DIR's owner if left out.")
]
Image = Annotated[str, typer.Option("--image", help="The image of --quadlet.")]
UnitNameOption = Annotated[str, typer.Option("--name", help="The unit's name; from DIR's name if left out.")]
Now = Annotated[bool, typer.Option("--now", help="Start it too, now and at each boot.")]


def print_lines(lines: Iterable[str]) -> None:
    """Print lines unchanged, without wrapping."""
    for line in lines:
        _console.print(line, soft_wrap=True, highlight=False, markup=False)
