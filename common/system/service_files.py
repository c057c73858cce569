"""Find, write and remove the systemd units of our programs: ``service install``, ``status`` and ``remove``.

A unit is found by the folder that it contains, not by its name, because a folder may be moved, and names may be chosen.
systemd is called through ``systemctl``, and only if it runs (sd_booted(3)).
"""

import contextlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyclinic.common.errors import BadInput, Fault, raise_faults
from polyclinic.common.system.accounts import AccountIds, act_as_account, find_account_ids
from polyclinic.common.system.files import write_atomically
from polyclinic.common.system.plain_names import PlainName, join_plain_name
from polyclinic.common.system.service import (
    FOLDER_KEY,
    IMAGE_USER_ID,
    Service,
    ServiceProgram,
    find_unit_path_faults,
    find_volume_faults,
    make_quadlet,
    make_systemd_unit,
)

UNIT_SUFFIX = ".service"
QUADLET_SUFFIX = ".container"
ENVIRONMENT_SUFFIX = ".env"
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy")
"""Proxy variables that gRPC reads, which are in lower case only."""
_SYSTEMD_RUN_FOLDER = Path("/run/systemd/system")
"""Folder that exists if systemd runs."""
_SYSTEM_UNIT_FOLDERS = {
    manager: [Path(f"{base}/systemd/{manager}") for base in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")]
    for manager in ("system", "user")
}
"""Manager (``system`` or ``user``) -> folders of the machine's units, which a unit of ours with the same name would
hide.
"""
_SYSTEMCTL_TIMEOUT_S = 60.0
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,254}")
_PLAIN_VALUE = re.compile(r"""[^\s"'\\]+""")


class UnitName(PlainName):
    """The name of a unit and of its container."""

    __slots__ = ()
    pattern = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
    rule = "1 to 100 letters, digits, dots, dashes and underscores, the first one a letter or digit"


@dataclass(frozen=True)
class ServiceOptions:
    """The options of ``service install`` that both programs share.

    Attributes:
        system: True for a system unit, False for a user unit; None for a system unit if root runs the command.
        quadlet: True to write a Podman quadlet instead of a systemd unit.
        into: Folder in which to write the unit for inspection only; nothing else is written, and systemd is not called.
        name: Name of the unit; empty to derive it from the folder's name.
        account: Account that runs a system unit; empty for the folder's owner.
        image: Name of the container image; empty for the program's default.
        gpu: True to give a container all GPUs.
        now: True to start the program, now and at each boot.
    """

    system: bool | None = None
    quadlet: bool = False
    into: Path | None = None
    name: str = ""
    account: str = ""
    image: str = ""
    gpu: bool = False
    now: bool = False

    @property
    def is_system(self) -> bool:
        return os.geteuid() == 0 if self.system is None else self.system


@dataclass(frozen=True)
class InstalledUnit:
    """The unit file of a folder.

    Attributes:
        path: The file.
        system: True for a system unit, False for a user unit.
        managed: True if the file is in a folder that systemd or Podman reads.
    """

    path: Path
    system: bool
    managed: bool

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_quadlet(self) -> bool:
        return self.path.suffix == QUADLET_SUFFIX

    @property
    def environment_path(self) -> Path:
        return self.path.with_suffix(ENVIRONMENT_SUFFIX)

    def make_command(self, *words: str) -> list[str]:
        """Return a ``systemctl`` command with these words, for the manager of this unit."""
        return ["systemctl", *(() if self.system else ("--user",)), *words]


# ---------------------------------------------------------------------- install


def install_service(service: Service, options: ServiceOptions, *, running: bool) -> list[str]:
    """Write the unit of a program on its folder; return lines for the person who installs it.

    Args:
        service: The program and its folders; this function sets name, account and command.
        options: The options of the command.
        running: True if the program already runs on the folder.

    Raises:
        BadInput: With every fault, such as a path that is invalid in a unit, an unknown account, or another unit.
    """
    system = options.is_system
    ending = QUADLET_SUFFIX if options.quadlet else UNIT_SUFFIX
    managed_folder = find_unit_place(quadlet=options.quadlet, system=system)
    unit_folder = options.into or managed_folder
    installed = find_units_of_folder(service.program, service.folder)
    present = installed if options.into is None else find_units_of_folder(service.program, service.folder, options.into)
    service = replace(
        service,
        command=() if options.quadlet else find_program_command(service.program),
        account=_choose_account(service.folder, options),
        image=options.image or service.program.image,
        gpu=options.gpu,
        environment=_read_proxies(),
    )
    earlier_units = [unit for unit in present if (unit.path.parent, unit.path.suffix) == (unit_folder, ending)]
    names = [unit.name for unit in (*earlier_units, *installed) if unit.path.suffix == ending]
    name = options.name or (names[0] if names else _choose_unit_name(service, unit_folder, system=system))
    faults = _find_service_faults(service, options)
    faults += _find_other_unit_faults(service, present, unit_folder, ending)
    faults += _find_name_faults(name, (*present, *installed), unit_folder, options)
    raise_faults(faults)
    service = replace(
        service, name=name, environment_path=join_plain_name(managed_folder, UnitName(name), ENVIRONMENT_SUFFIX)
    )
    unit = InstalledUnit(join_plain_name(unit_folder, UnitName(name), ending), system, options.into is None)
    text = (make_quadlet if options.quadlet else make_systemd_unit)(service, system=system)
    if not unit.managed:
        _write_unit(unit, text)
        note = "That is all that was written, and systemd does not look there. Without --into it is installed."
        return [f"wrote {unit.path}", note]
    make_writable_folders(service, options)
    write_environment_file(unit, service.environment, [old.environment_path for old in earlier_units])
    _write_unit(unit, text)
    for old in earlier_units:
        if old.path != unit.path:
            old.path.unlink()
            old.environment_path.unlink(missing_ok=True)
    lines = [f"wrote {unit.path}", *_make_notes(unit, service, options, running=running)]
    start = _list_start_commands(unit, is_new=not earlier_units)
    if options.now:
        for command in start:
            _run_systemctl(command)
        lines.append(f"started {name}")
    else:
        verb = "Start it again with what is new" if earlier_units else "Start it, now and at each boot"
        lines += [f"{verb}:", *(f"    {shlex.join(command)}" for command in start)]
    if not system:
        account = pwd.getpwuid(os.geteuid()).pw_name
        lines.append(f"So that it starts at boot and outlives your session: loginctl enable-linger {account}")
    return [*lines, f"Its log: {_make_log_command(unit)}"]


def find_program_command(program: ServiceProgram) -> tuple[str, ...]:
    """Return the absolute command line of a program in this environment."""
    script = Path(sys.executable).with_name(program.name)
    if os.access(script, os.X_OK):
        return (str(script),)
    return (sys.executable, "-P", "-m", program.module)


def find_unit_place(*, quadlet: bool, system: bool) -> Path:
    """Return the folder in which an administrator, or a user, puts units or quadlets.

    Args:
        quadlet: True for quadlets, False for systemd units.
        system: True for the folder of the system, False for the user's folder.
    """
    below = Path("containers/systemd") if quadlet else Path("systemd/system" if system else "systemd/user")
    if system:
        return Path("/etc") / below
    settings = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (settings if settings.is_absolute() else Path.home() / ".config") / below


def find_units_of_folder(program: ServiceProgram, folder: Path, into: Path | None = None) -> list[InstalledUnit]:
    """Return the units of a program for a folder: user and system units, or only those in ``into``."""
    units = []
    for place, system in _list_unit_places(into):
        for path in sorted(_iterate_unit_files(place)):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                lines = path.read_text(encoding="utf-8").splitlines()
                if f"{FOLDER_KEY}={folder}" in lines and f" {program.name} service " in lines[0]:
                    units.append(InstalledUnit(path, system, into is None))
    return units


def _list_unit_places(into: Path | None) -> list[tuple[Path, bool]]:
    if into is not None:
        return [(into, os.geteuid() == 0)]
    places = []
    for system in (True, False):
        for quadlet in (False, True):
            with contextlib.suppress(RuntimeError):  # an account without a home
                places.append((find_unit_place(quadlet=quadlet, system=system), system))
    return places


def _iterate_unit_files(place: Path) -> Iterator[Path]:
    for ending in (UNIT_SUFFIX, QUADLET_SUFFIX):
        yield from place.glob(f"*{ending}")


def _find_service_faults(service: Service, options: ServiceOptions) -> list[Fault]:
    paths = [service.folder, *service.writable, *service.read_only]
    if service.state_home is not None:
        paths.append(service.state_home)
    faults = [fault for path in dict.fromkeys(paths) for fault in find_unit_path_faults("service", path)]
    if options.quadlet:
        faults += [fault for path in dict.fromkeys(paths) for fault in find_volume_faults("service", path)]
    if options.is_system and not options.quadlet:
        try:
            pwd.getpwnam(service.account)
        except KeyError:
            problem = f'there is no account "{service.account}" here.'
            faults.append(Fault("--account", problem, "Name the account that owns the folder."))
    if options.is_system and not options.quadlet and service.account == "root":
        faults += _find_root_faults(service)
    if options.into is not None and options.now:
        faults.append(Fault("--now", "systemd starts no unit that lies in --into FOLDER.", "Leave out one of the two."))
    if not _IMAGE_NAME.fullmatch(service.image):
        problem = f"{service.image!r} is no name of an image, such as registry.example/flwr-client:1."
        faults.append(Fault("--image", problem, "Write letters, digits and . _ / : @ + - only."))
    for name, text in service.environment.items():
        if not _PLAIN_VALUE.fullmatch(text):
            problem = "holds a space, a quote or a backslash, which systemd and Podman read differently."
            faults.append(Fault(name, problem, "Write it with %20, %22, %27 or %5C."))
    return faults


def _find_root_faults(service: Service) -> list[Fault]:
    """Return a fault if another account can replace the folder on which root would run."""
    replaceable = [path for path in service.folder.parents if path.stat().st_uid != 0]
    if not replaceable:
        return []
    problem = f"root would run on it, and the owner of {replaceable[-1]} can exchange it for another folder."
    return [Fault(str(service.folder), problem, "Give it to an account of its own, or name that one by --account.")]


def _find_other_unit_faults(
    service: Service, present: Sequence[InstalledUnit], place: Path, ending: str
) -> list[Fault]:
    """Return a fault for each unit of another kind or manager, because two programs on one folder stop each other."""
    others = [unit for unit in present if (unit.path.parent, unit.path.suffix) != (place, ending)]
    remedy = f"Remove it first: {service.program.name} service remove {shlex.quote(str(service.folder))}"
    return [Fault(str(service.folder), f"{unit.path} runs it already.", remedy) for unit in others]


def _find_name_faults(name: str, own: Sequence[InstalledUnit], place: Path, options: ServiceOptions) -> list[Fault]:
    """Return a fault if another unit has this name, because our unit would replace it."""
    try:
        unit_name = UnitName(name)
    except ValueError as error:
        return [Fault("--name", f"{error}.")]
    own_paths = {unit.path for unit in own}
    places = [place, *(each for each, of_system in _list_unit_places(None) if of_system is options.is_system)]
    places += _SYSTEM_UNIT_FOLDERS["system" if options.is_system else "user"]
    paths = [join_plain_name(each, unit_name, ending) for each in places for ending in (UNIT_SUFFIX, QUADLET_SUFFIX)]
    foreign = [path for path in paths if os.path.lexists(path) and path not in own_paths]
    if not foreign:
        return []
    problem = f'"{name}" is the name of {foreign[0]}, which this unit would replace.'
    return [Fault("--name", problem, "Choose another name.")]


def _choose_account(folder: Path, options: ServiceOptions) -> str:
    if not options.is_system or options.quadlet:
        return ""
    if options.account:
        return options.account
    owner = folder.stat().st_uid
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def _choose_unit_name(service: Service, place: Path, *, system: bool) -> str:
    """Return the program's prefix with the folder's name, and a number if another unit has that name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", service.folder.name).strip("-.") or "folder"
    base = f"{service.program.unit_prefix}{plain}"[:90]
    places = {place, *(each for each, of_system in _list_unit_places(None) if of_system is system)}
    names = {path.stem for each in places for path in _iterate_unit_files(each)}
    number = 1
    name = base
    while name in names:
        number += 1
        name = f"{base}-{number}"
    return name


def _read_proxies() -> dict[str, str]:
    """Return the proxy variables of this shell, because a program that systemd starts does not have them."""
    return {name: os.environ[name] for name in PROXY_VARIABLES if os.environ.get(name)}


def make_writable_folders(service: Service, options: ServiceOptions) -> None:
    """Create the folders to which the unit may write, because systemd does not start a unit whose folders are missing.

    The unit's account creates them, because ``site.toml``, which may name any path, belongs to that account. If root
    created a folder and gave it to the account, the account could become root through one of systemd's folders. A
    ledger that cannot be created there is stored in the site's folder instead, and counts only for that folder.

    Raises:
        BadInput: If the account may not create one of them.
    """
    folders = (service.state_home,) if options.quadlet else service.writable
    name = "this account"
    acting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if os.geteuid() == 0 and options.is_system:
        name = f"the account {IMAGE_USER_ID} of the image" if options.quadlet else f'the account "{service.account}"'
        image = AccountIds(IMAGE_USER_ID, IMAGE_USER_ID, (IMAGE_USER_ID,))
        acting = act_as_account(image if options.quadlet else find_account_ids(service.account))
    with acting:
        for folder in filter(None, folders):
            try:
                _make_folder_and_parents(folder)
            except OSError as error:
                problem = f"{name} cannot make it: {error.strerror}."
                remedy = "Name a folder that it can make, or make one and give it to that account."
                raise BadInput([Fault(str(folder), problem, remedy)]) from None


def _make_folder_and_parents(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700)


_ENVIRONMENT_HEAD = (
    "# Written by service install: the proxies of the shell in which it ran. Add lines of your own below."
)


def write_environment_file(unit: InstalledUnit, variables: Mapping[str, str], earlier: Sequence[Path] = ()) -> None:
    """Write variables, which may contain a password, into the unit's environment file, which only its owner can read.

    Lines with other variables are kept.

    Args:
        unit: The unit.
        variables: The variables to write.
        earlier: Environment files under earlier names of this unit. If the unit has no file yet, the lines of the first
            existing one are copied.
    """
    path = unit.environment_path
    source = next((each for each in (path, *earlier) if each.exists()), None)
    if not variables and source in (None, path):
        return
    lines = _read_environment_lines(source) if source else []
    kept = [line for line in lines if _name_variable(line) not in variables]
    lines = [_ENVIRONMENT_HEAD, *(f"{name}={text}" for name, text in variables.items()), *kept]
    write_atomically(path, ("\n".join(lines) + "\n").encode(errors="surrogateescape"), private=True)


def _read_environment_lines(path: Path) -> list[str]:
    """Return the lines of an environment file without our comment; bytes that are not UTF-8 are preserved."""
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    return [line for line in lines if line not in ("", _ENVIRONMENT_HEAD)]


def _name_variable(line: str) -> str:
    return line.split("=", 1)[0].strip()


def _write_unit(unit: InstalledUnit, text: str) -> None:
    before = os.umask(0o022)  # everybody may read units, which contain no secret
    try:
        write_atomically(unit.path, text.encode())
    finally:
        os.umask(before)


def _make_notes(unit: InstalledUnit, service: Service, options: ServiceOptions, *, running: bool) -> list[str]:
    notes = []
    if service.environment:
        notes.append(f"wrote {unit.environment_path}: {', '.join(service.environment)} of this shell")
    elif "SUDO_UID" in os.environ and not unit.environment_path.exists():
        notes.append("no proxy: sudo removes https_proxy. If you have one: sudo --preserve-env=https_proxy ...")
    if running:
        notes.append(f"{service.program.name} runs on this folder already: stop it before the unit is started")
    if options.quadlet and options.is_system and service.folder.stat().st_uid != IMAGE_USER_ID:
        places = shlex.join([str(path) for path in (service.folder, service.state_home) if path])
        notes.append(
            f"the image runs as {IMAGE_USER_ID}, which does not own the folder: chown -R {IMAGE_USER_ID} {places}"
        )
    if not options.quadlet and options.is_system and service.account == "root":
        notes.append("it will run as root: give the folder to an account of its own, or name one with --account")
    return notes


def _list_start_commands(unit: InstalledUnit, *, is_new: bool) -> list[list[str]]:
    # Podman enables a quadlet by its section [Install]; a generated unit cannot be enabled.
    start = ["restart"] if unit.is_quadlet or not is_new else ["enable", "--now"]
    return [unit.make_command("daemon-reload"), unit.make_command(*start, unit.name)]


def _make_log_command(unit: InstalledUnit) -> str:
    return f"journalctl {'-u' if unit.system else '--user-unit'} {unit.name} -f"


# ---------------------------------------------------------------------- status and remove


def describe_service(program: ServiceProgram, folder: Path, into: Path | None = None) -> tuple[list[str], bool]:
    """Return lines about the units of a folder, and True if one of them is running.

    Raises:
        BadInput: If the folder has no unit.
    """
    lines = []
    running = False
    for unit in _find_units_or_fail(program, folder, into):
        lines.append(f"{unit.name}: {unit.path}")
        if not is_systemd_reachable(unit):
            lines.append("    systemd cannot be asked from here")
            continue
        state = _read_unit_state(unit)
        running = running or state.get("ActiveState") == "active"
        boot = state.get("UnitFileState") or "not loaded"
        lines.append(f"    {state.get('ActiveState')} ({state.get('SubState')}); at boot: {boot}")
        if state.get("NRestarts", "0") != "0":
            lines.append(f"    started again {state['NRestarts']} times")
        if state.get("Result") not in (None, "", "success"):
            lines.append(f"    ended with {state['Result']}, exit code {state.get('ExecMainStatus')}")
        lines.append(f"    log: {_make_log_command(unit)}")
    return lines, running


def remove_service(program: ServiceProgram, folder: Path, into: Path | None = None) -> list[str]:
    """Stop the units of a folder and delete their files; return lines about removed and remaining files.

    Raises:
        BadInput: If the folder has no unit.
    """
    lines = []
    for unit in _find_units_or_fail(program, folder, into):
        reachable = is_systemd_reachable(unit)
        if reachable:
            verbs = ("stop",) if unit.is_quadlet else ("disable", "--now")
            _run_systemctl(unit.make_command(*verbs, unit.name))
        else:
            _remove_boot_links(unit)
        unit.path.unlink()
        lines.append(f"removed {unit.path}")
        lines += _remove_environment_file(unit)
        if reachable:
            _run_systemctl(unit.make_command("daemon-reload"))
            subprocess.run(unit.make_command("reset-failed", unit.name), capture_output=True, check=False)
        elif unit.managed:
            lines.append("systemd cannot be asked from here: if it runs the program, it does so until it is stopped")
    lines.append(f"stays: {' and '.join(filter(None, [str(folder), program.what_stays]))}")
    return lines


def _remove_environment_file(unit: InstalledUnit) -> list[str]:
    """Delete the unit's environment file, unless it has lines of the user; return a line about it."""
    path = unit.environment_path
    if not unit.managed or not path.exists():
        return []
    if any(_name_variable(line) not in PROXY_VARIABLES for line in _read_environment_lines(path)):
        return [f"stays, for its lines of yours: {path}"]
    path.unlink()
    return [f"removed {path}"]


def _find_units_or_fail(program: ServiceProgram, folder: Path, into: Path | None) -> list[InstalledUnit]:
    units = find_units_of_folder(program, folder, into)
    if not units:
        places = ", ".join(str(place) for place, _ in _list_unit_places(into))
        problem = f"no unit of {program.name} for it lies in {places}."
        raise BadInput([Fault(str(folder), problem, f"Write one: {program.name} service install DIR")])
    return units


def _remove_boot_links(unit: InstalledUnit) -> None:
    for link in unit.path.parent.glob(f"*.wants/{unit.path.name}"):
        if link.is_symlink():
            link.unlink()


def is_systemd_reachable(unit: InstalledUnit) -> bool:
    """Return True if the unit's manager is running and reads the folder of the unit."""
    if not unit.managed or shutil.which("systemctl") is None:
        return False
    if unit.system:
        return _SYSTEMD_RUN_FOLDER.is_dir()
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd").is_dir()


def _read_unit_state(unit: InstalledUnit) -> Mapping[str, str]:
    properties = "ActiveState,SubState,UnitFileState,NRestarts,Result,ExecMainStatus"
    shown = _run_systemctl(unit.make_command("show", unit.name, f"--property={properties}"))
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def _run_systemctl(command: Sequence[str]) -> str:
    """Run a systemctl command; return its output.

    Raises:
        BadInput: If it fails or cannot be run.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEMCTL_TIMEOUT_S, check=False)
        reason = "" if process.returncode == 0 else (process.stderr.strip() or f"exit code {process.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        raise BadInput([Fault(shlex.join(command), f"failed: {reason}", "Type it where systemd runs.")])
    return process.stdout
