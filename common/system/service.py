"""The text of a systemd unit, or of a Podman quadlet, that keeps one of our programs running on its folder.

Both forms are read by systemd, which expands ``%`` in nearly every value and splits most of them at spaces. A path is
therefore never written as it is: :func:`quote_for_systemd` and :func:`escape_whole_value` write it for the two kinds of
values that systemd has (systemd.syntax(7), systemd.service(5)).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.common.errors import Fault

FOLDER_KEY = "X-PolyclinicFolder"
"""Key of a unit that names the program's folder. systemd ignores keys that begin with ``X-``."""
RESTART_S, STOP_S = 30, 30
"""Pause before a restart; time to stop before systemd kills, of which our programs need 7 s at most."""
IMAGE_USER = 10001
"""Number of the account and of its group inside our images."""
MODPROBE = "/usr/bin/nvidia-modprobe -c=0 -u"
"""Command of NVIDIA's driver that makes the devices of its GPUs, as CUDA itself does for an account that may."""
_SHARED_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ServiceProgram:
    """A program of ours that stays up, as a unit describes it.

    Attributes:
        name: Name of the program, such as ``flwr-client``.
        module: Module that runs it, for an installation without its script.
        final_exit_codes: Exit codes after which a restart ends in the same code until a person has fixed the cause.
        image: Default name of its image.
        what_stays: Further folders that ``service remove`` leaves, in words; empty if there are none.
    """

    name: str
    module: str
    final_exit_codes: tuple[int, ...]
    image: str
    what_stays: str = ""

    @property
    def unit_prefix(self) -> str:
        """First part of the names of its units."""
        return f"polyclinic-{self.name.removeprefix('flwr-')}-"


@dataclass(frozen=True)
class Service:
    """A program on a folder, with all that its unit says.

    Attributes:
        name: Name of the unit, without its ending.
        folder: The program's folder, absolute and without links.
        command: The program's command line up to ``start``.
        account: Account that runs a unit of the system; empty for a user's own unit.
        state_home: Folder of the privacy ledger, as the variable ``XDG_STATE_HOME`` of the program; None without one.
        writable: Further folders that the program writes to; they exist.
        read_only: Folders, such as those of images, that have to be mounted first and are only read.
        port: Port that the program listens on; None if it listens on none.
        gpu: Let a container have all GPUs.
        environment: Variables, such as a proxy with its password.
        environment_path: File with these and further variables, beside the unit where systemd or Podman finds it. It
            is never in the program's folder: root's ``ExecStartPre`` has these variables too, and by ``LD_PRELOAD``
            the folder's account would become root.
    """

    program: ServiceProgram
    name: str
    folder: Path
    command: tuple[str, ...] = ()
    account: str = ""
    state_home: Path | None = None
    writable: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()
    port: int | None = None
    image: str = ""
    gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_path: Path | None = None


def quote_for_systemd(word: str, *, in_command: bool = False) -> str:
    """Quote one word of a value that systemd splits at spaces.

    Args:
        in_command: True for an argument of a command line, in which systemd replaces ``$NAME`` too.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped.replace("$", "$$") if in_command else escaped}"'


def escape_whole_value(text: str) -> str:
    """Escape a value that systemd takes as a whole, with its spaces and quotes."""
    return text.replace("%", "%%")


def escape_path_pattern(path: Path) -> str:
    """Escape a path that systemd reads as a pattern of file names: a pattern that fits no file is no error there."""
    return escape_whole_value(re.sub(r"([\\*?\[])", r"\\\1", str(path)))


def find_unit_path_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if no line of a unit can name this path; else an empty list."""
    problem = ""
    if _CONTROL.search(str(path)):
        problem = "holds a line feed or another control character, which ends or changes a line of a unit."
    elif not str(path).isprintable():  # a byte that is no UTF-8 too
        problem = "holds a character that is no printable UTF-8, which systemd does not read."
    elif str(path) != str(path).strip():
        problem = "ends with a space, which systemd removes: the unit would use another folder."
    elif str(path).endswith("\\"):
        problem = "ends with a backslash, which joins the next line of a unit to this one."
    return [Fault(where, f"{str(path)!r} {problem}", "Rename the folder.")] if problem else []


def find_volume_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if a container cannot mount this path by a line ``Volume=``; else an empty list."""
    marks = [mark for mark in ":\"'\\" if mark in str(path)]
    if not marks:
        return []
    problem = f"{path} holds {marks[0]}, at which Podman ends the path: the container would get another folder."
    return [Fault(where, problem, "Rename the folder, or install the unit without --quadlet.")]


def make_systemd_unit(service: Service, *, system: bool) -> str:
    """Return the text of a ``.service`` file.

    A unit of the system runs as the folder's account and sees the whole file system read-only but for its own folders.
    A user's own unit cannot have these walls on every kernel, so that it has only those that need no rights.
    """
    variables = service.environment_path
    sections = {
        "Unit": _make_unit_section(service),
        "Service": [
            "Type=exec",
            *_make_account_lines(service, system=system),
            *(f"Environment={quote_for_systemd(f'{key}={text}')}" for key, text in _list_variables(service)),
            *([f"EnvironmentFile=-{escape_path_pattern(variables)}"] if variables else ()),
            f"WorkingDirectory={escape_whole_value(str(service.folder))}",
            f"ExecStart={_join_command(service)}",
            *_make_restart_lines(service),
            "KillMode=mixed",
            f"TimeoutStopSec={STOP_S}",
            "UMask=0077",
            "NoNewPrivileges=yes",
            *(_make_sandbox_lines(service) if system else ()),
        ],
        "Install": [f"WantedBy={'multi-user' if system else 'default'}.target"],
    }
    return _join_sections(service, sections)


def make_quadlet(service: Service, *, system: bool) -> str:
    """Return the text of a ``.container`` file, from which Podman 4.5 and later make a unit at each boot."""
    volumes = [f"Volume={escape_whole_value(str(service.folder))}:/data"]
    if service.state_home is not None:
        volumes.append(f"Volume={escape_whole_value(str(service.state_home))}:/ledger")
    places = ["/images", *(f"/images-{number}" for number in range(2, len(service.read_only) + 1))]
    for path, place in zip(service.read_only, places, strict=False):
        volumes.append(f"Volume={escape_whole_value(str(path))}:{place}:ro")
    variables = service.environment_path
    if variables and not service.environment and not variables.exists():
        variables = None  # Podman does not start a container whose file is missing
    container = [
        f"ContainerName={service.name}",
        f"Image={escape_whole_value(service.image)}",
        "Exec=start /data",
        *volumes,
        *([f"EnvironmentFile={quote_for_systemd(str(variables))}"] if variables else ()),
        *([f"PublishPort={service.port}:{service.port}"] if service.port is not None else ()),
        # The person's own account is the image's account, so that the files in the folder stay the person's.
        *([] if system else [f"UserNS=keep-id:uid={IMAGE_USER},gid={IMAGE_USER}"]),
        *(["AddDevice=nvidia.com/gpu=all"] if service.gpu else ()),
        "ReadOnly=true",
        "Tmpfs=/tmp",
        "DropCapability=all",
        "NoNewPrivileges=true",
    ]
    sections = {
        "Unit": _make_unit_section(service),
        "Container": container,
        "Service": [*_make_restart_lines(service), f"TimeoutStopSec={STOP_S}"],
        "Install": [f"WantedBy={'multi-user' if system else 'default'}.target"],
    }
    return _join_sections(service, sections)


def _join_sections(service: Service, sections: Mapping[str, Iterable[str]]) -> str:
    program = service.program.name
    head = f"# Written by {program} service install, which writes it again; {program} service remove deletes it."
    parts = ["\n".join([f"[{name}]", *lines]) for name, lines in sections.items()]
    return "\n\n".join([head, *parts]) + "\n"


def _make_unit_section(service: Service) -> list[str]:
    mounted = [service.folder, *service.writable, *service.read_only]
    if service.state_home is not None:
        mounted.append(service.state_home)
    return [
        f"Description={service.program.name} on {escape_whole_value(str(service.folder))}",
        f"{FOLDER_KEY}={service.folder}",
        "Wants=network-online.target",
        "After=network-online.target time-sync.target remote-fs.target",
        "RequiresMountsFor=" + " ".join(quote_for_systemd(str(path)) for path in dict.fromkeys(mounted)),
        "StartLimitIntervalSec=0",  # a coordinator that is away for a night is no reason to give up
    ]


def _make_restart_lines(service: Service) -> list[str]:
    return [
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        "RestartPreventExitStatus=" + " ".join(map(str, service.program.final_exit_codes)),
    ]


def _join_command(service: Service) -> str:
    program, *arguments = service.command
    words = [quote_for_systemd(program)]  # systemd replaces no $NAME in the first word
    words += [quote_for_systemd(word, in_command=True) for word in (*arguments, "start", str(service.folder))]
    return " ".join(words)


def _make_account_lines(service: Service, *, system: bool) -> list[str]:
    if not system:
        return []
    lines = [f"User={escape_whole_value(service.account)}"]
    if service.port is None:
        # Without rights CUDA cannot make the GPU's devices after a boot, and would train on the CPU.
        lines.append(f"ExecStartPre=-+{MODPROBE}")
    return lines


def _list_variables(service: Service) -> Iterator[tuple[str, str]]:
    yield "PYTHONUNBUFFERED", "1"
    if service.state_home is not None:
        yield "XDG_STATE_HOME", str(service.state_home)


def _make_sandbox_lines(service: Service) -> list[str]:
    """Return the lines that close the system to a unit, except its folders, its GPUs and the network.

    ``PrivateDevices`` and ``MemoryDenyWriteExecute`` are left out on purpose: the first hides GPUs, the second stops
    CUDA and compiled kernels.
    """
    writable = dict.fromkeys([service.folder, *service.writable])
    needs_port_right = service.port is not None and service.port < 1024
    rights = "CAP_NET_BIND_SERVICE" if needs_port_right else ""
    used = [*writable, *service.read_only, Path(service.command[0])]
    own_temporary = not any(path.is_relative_to(shared) for path in used for shared in _SHARED_TEMPORARY)
    cache = f"%t/{service.name}"
    return [
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "ReadWritePaths=" + " ".join(quote_for_systemd(str(path)) for path in writable),
        # Libraries write caches of their own, which a read-only home does not take.
        f"RuntimeDirectory={service.name}",
        *(f'Environment="{name}={cache}/{name.lower()}"' for name in ("FLWR_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")),
        *(["PrivateTmp=yes"] if own_temporary else ()),
        f"CapabilityBoundingSet={rights}",
        *([f"AmbientCapabilities={rights}"] if needs_port_right else ()),
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        *(
            f"{name}=yes"
            for name in (
                "ProtectKernelTunables",
                "ProtectKernelModules",
                "ProtectKernelLogs",
                "ProtectControlGroups",
                "ProtectClock",
                "ProtectHostname",
                "RestrictNamespaces",
                "RestrictRealtime",
                "RestrictSUIDSGID",
                "LockPersonality",
            )
        ),
    ]
