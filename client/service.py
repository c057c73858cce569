"""The systemd unit or Podman quadlet of ``flwr-client start``: its program, folders and account."""

import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from polyclinic.client.connection.exit_codes import ClientExitCode
from polyclinic.client.connection.preflight import is_client_running
from polyclinic.client.site.site_file import SiteSettings, read_site_toml_without_data
from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.service import Service, ServiceProgram
from polyclinic.common.system.service_files import ServiceOptions

LEDGER_PATH = Path("polyclinic", "ledger")
"""Path of the ledger's folder in ``XDG_STATE_HOME``."""
CLIENT_SERVICE = ServiceProgram(
    name="flwr-client",
    module="polyclinic.client.cli",
    # After one of these codes, a restart fails in the same way until a person here fixes the cause. Faults with other
    # codes end by themselves, when a proxy, a clock or the coordinator's certificate is right again.
    final_exit_codes=tuple(
        int(code)
        for code in (
            ClientExitCode.BAD_INPUT,
            ClientExitCode.OTHER_AUTHORITY,
            ClientExitCode.KEY,
            ClientExitCode.NAME,
            ClientExitCode.VERSION,
        )
    ),
    image="localhost/flwr-client",
    what_stays="the privacy ledger and the images",
)


def make_client_service(
    folder: Path, options: ServiceOptions, ledger: Path | None, images: Sequence[Path]
) -> tuple[Service, bool]:
    """Return the service of a site's folder, and True if ``flwr-client start`` runs on the folder already.

    Args:
        ledger: Folder that holds ``polyclinic/ledger``; None for the account's own, ``~/.local/state``.

    Raises:
        BadInput: If ``site.toml`` or a folder of images has faults, or a container has no ledger; it lists all.
    """
    settings = read_site_toml_without_data(folder)
    faults = [Fault(f"--images {path}", "there is no such folder.") for path in images if not path.is_dir()]
    if options.quadlet and ledger is None and not settings.file.policy.ledger:
        problem = "is missing: without it the privacy budget of these patients would count anew in each container."
        remedy = "Name one folder for all containers that read the same patients."
        faults.append(Fault("--ledger", problem, remedy))
    raise_faults(faults)
    state_home = ledger.resolve() if ledger else None
    writable = tuple[Path, ...]()
    if not options.quadlet:
        account = _find_account(folder, options)
        state_home = state_home or _find_state_home(account)
        writable = _list_ledger_folders(settings, account, state_home)
    service = Service(
        CLIENT_SERVICE,
        "",
        folder.resolve(),
        state_home=state_home,
        writable=writable,
        read_only=tuple(path.resolve() for path in images),
    )
    return service, is_client_running(settings.state_folder)


def _find_account(folder: Path, options: ServiceOptions) -> pwd.struct_passwd | None:
    """Return the account that will run the program; None if this machine does not know it."""
    try:
        if options.account:
            return pwd.getpwnam(options.account)
        return pwd.getpwuid(folder.stat().st_uid if options.is_system else os.geteuid())
    except KeyError:
        return None


def _find_state_home(account: pwd.struct_passwd | None) -> Path | None:
    """Return the value of ``XDG_STATE_HOME``, or its default, for an account; None for an account without a home."""
    environment_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    if account is None:
        return None
    if account.pw_uid == os.geteuid() and environment_home.is_absolute():
        return environment_home.resolve()
    home = Path(account.pw_dir)
    return (home / ".local" / "state").resolve() if home.is_dir() and home != Path("/") else None


def _list_ledger_folders(
    settings: SiteSettings, account: pwd.struct_passwd | None, state_home: Path | None
) -> tuple[Path, ...]:
    """Return the folder of the privacy ledger, to which the unit must be able to write; empty without a state home.

    Raises:
        BadInput: If ``policy.ledger`` begins with the home of an account that has none.
    """
    if ledger_path := settings.file.policy.ledger:
        if ledger_path.startswith("~"):
            home = account.pw_dir if account and ledger_path.split("/")[0] == "~" else ""
            if not home:
                problem = f'is "{ledger_path}", and the account of the unit has no such home.'
                raise BadInput([Fault("site.toml: policy.ledger", problem, "Write the whole path.")])
            ledger_path = home + ledger_path[1:]
        return ((settings.folder / ledger_path).resolve(),)
    return ((state_home / LEDGER_PATH).resolve(),) if state_home else ()
