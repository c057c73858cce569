"""The text of a systemd unit, or of a Podman quadlet, that keeps one of our programs running on its folder.

systemd reads both. It expands ``%`` in nearly every value and splits most values at spaces, so a path must always be
escaped. :func:`quote_for_systemd` and :func:`escape_whole_value` do this for the two kinds of values of systemd
(systemd.syntax(7), systemd.service(5)).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.common.errors import Fault

FOLDER_KEY = "X-PolyclinicFolder"
"""Key of a unit with the program's folder. systemd ignores keys that begin with ``X-``."""
RESTART_PAUSE_S = 30
"""Pause before a restart."""
STOP_TIMEOUT_S = 30
"""Time to stop before systemd kills a program; our programs need at most 7 s."""
IMAGE_USER_ID = 10001
"""User id and group id of the account inside our container images."""
NVIDIA_MODPROBE_COMMAND = "/usr/bin/nvidia-modprobe -c=0 -u"
"""Command of NVIDIA's driver that creates the GPU devices; CUDA does the same for an account with the right to
do so.
"""
_SHARED_TEMPORARY_FOLDERS = (Path("/tmp"), Path("/var/tmp"))
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ServiceProgram:
    """A program of ours that a service keeps running.

    Attributes:
        name: Name of the program, such as ``flwr-client``.
        module: Python module of the program, for an installation without its script.
        final_exit_codes: Exit codes that a restart cannot change, because a person has to fix the cause.
        image: Default name of its container image.
        what_stays: Further folders that ``service remove`` does not delete, in words; empty if there are none.
    """

    name: str
    module: str
    final_exit_codes: tuple[int, ...]
    image: str
    what_stays: str = ""

    @property
    def unit_prefix(self) -> str:
        """Prefix of the names of the program's units."""
        return f"polyclinic-{self.name.removeprefix('flwr-')}-"


@dataclass(frozen=True)
class Service:
    """A program on a folder, with the settings of its unit.

    Attributes:
        program: The program.
        name: Name of the unit, without its suffix.
        folder: The program's folder, absolute and without links.
        command: The program's command line up to ``start``.
        account: Account that runs a system unit; empty for a user unit.
        state_home: Folder of the privacy ledger, which the program gets as ``XDG_STATE_HOME``; None without one.
        writable: Further existing folders to which the program writes.
        read_only: Folders, such as those of images, that must be mounted before the start and are only read.
        port: Port on which the program listens; None if it does not listen.
        image: Name of the container image.
        gpu: True to give a container all GPUs.
        environment: Environment variables, such as a proxy with its password.
        environment_path: File with these and further variables, beside the unit. It is never in the program's folder,
            because root's ``ExecStartPre`` has these variables, too, and ``LD_PRELOAD`` would make the folder's account
            root.
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
        word: The word.
        in_command: True for an argument of a command line, in which systemd also replaces ``$NAME``.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped.replace("$", "$$") if in_command else escaped}"'


def escape_whole_value(text: str) -> str:
    """Escape a whole line's value for systemd, which reads only ``%`` in it as special, and keeps spaces and quotes."""
    return text.replace("%", "%%")


def escape_path_pattern(path: Path) -> str:
    """Escape a path that systemd reads as a file name pattern; systemd ignores a pattern without a match."""
    return escape_whole_value(re.sub(r"([\\*?\[])", r"\\\1", str(path)))


def find_unit_path_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if a path cannot be written into a unit; else an empty list."""
    problem = ""
    if _CONTROL_CHARACTER.search(str(path)):
        problem = "holds a line feed or another control character, which ends or changes a line of a unit."
    elif not str(path).isprintable():  # False for bytes that are not UTF-8, too
        problem = "holds a character that is no printable UTF-8, which systemd does not read."
    elif str(path) != str(path).strip():
        problem = "ends with a space, which systemd removes: the unit would use another folder."
    elif str(path).endswith("\\"):
        problem = "ends with a backslash, which joins the next line of a unit to this one."
    return [Fault(where, f"{str(path)!r} {problem}", "Rename the folder.")] if problem else []


def find_volume_faults(where: str, path: Path) -> list[Fault]:
    """Return a fault if a container cannot mount a path with a line ``Volume=``; else an empty list."""
    marks = [mark for mark in ":\"'\\" if mark in str(path)]
    if not marks:
        return []
    problem = f"{path} holds {marks[0]}, at which Podman ends the path: the container would get another folder."
    return [Fault(where, problem, "Rename the folder, or install the unit without --quadlet.")]


def make_systemd_unit(service: Service, *, system: bool) -> str:
    """Return the text of a ``.service`` file.

    A system unit runs as the folder's account, and can write only to its folders. A user unit has fewer protections,
    because not every kernel allows them without root's rights.
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
            f"TimeoutStopSec={STOP_TIMEOUT_S}",
            "UMask=0077",
            "NoNewPrivileges=yes",
            *(_make_sandbox_lines(service) if system else ()),
        ],
        "Install": [f"WantedBy={'multi-user' if system else 'default'}.target"],
    }
    return _join_sections(service, sections)


def make_quadlet(service: Service, *, system: bool) -> str:
    """Return the text of a ``.container`` file, from which Podman 4.5 and later create a unit at each boot."""
    volumes = [f"Volume={escape_whole_value(str(service.folder))}:/data"]
    if service.state_home is not None:
        volumes.append(f"Volume={escape_whole_value(str(service.state_home))}:/ledger")
    places = ["/images", *(f"/images-{number}" for number in range(2, len(service.read_only) + 1))]
    for path, place in zip(service.read_only, places, strict=False):
        volumes.append(f"Volume={escape_whole_value(str(path))}:{place}:ro")
    variables = service.environment_path
    if variables and not service.environment and not variables.exists():
        variables = None  # Podman does not start a container without its environment file
    container = [
        f"ContainerName={service.name}",
        f"Image={escape_whole_value(service.image)}",
        "Exec=start /data",
        *volumes,
        *([f"EnvironmentFile={quote_for_systemd(str(variables))}"] if variables else ()),
        *([f"PublishPort={service.port}:{service.port}"] if service.port is not None else ()),
        # Map the user's account to the image's account, so that the user owns the files in the folder.
        *([] if system else [f"UserNS=keep-id:uid={IMAGE_USER_ID},gid={IMAGE_USER_ID}"]),
        *(["AddDevice=nvidia.com/gpu=all"] if service.gpu else ()),
        "ReadOnly=true",
        "Tmpfs=/tmp",
        "DropCapability=all",
        "NoNewPrivileges=true",
    ]
    sections = {
        "Unit": _make_unit_section(service),
        "Container": container,
        "Service": [*_make_restart_lines(service), f"TimeoutStopSec={STOP_TIMEOUT_S}"],
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
        "StartLimitIntervalSec=0",  # restart without limit, because a coordinator may be down for a night
    ]


def _make_restart_lines(service: Service) -> list[str]:
    return [
        "Restart=on-failure",
        f"RestartSec={RESTART_PAUSE_S}",
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
        # After a boot CUDA cannot create the GPU devices without root's rights, and would use the CPU.
        lines.append(f"ExecStartPre=-+{NVIDIA_MODPROBE_COMMAND}")
    return lines


def _list_variables(service: Service) -> Iterator[tuple[str, str]]:
    yield "PYTHONUNBUFFERED", "1"
    if service.state_home is not None:
        yield "XDG_STATE_HOME", str(service.state_home)


def _make_sandbox_lines(service: Service) -> list[str]:
    """Return the lines that restrict a unit to its folders, its GPUs and the network.

    ``PrivateDevices`` and ``MemoryDenyWriteExecute`` are left out on purpose: the first hides GPUs, the second stops
    CUDA and compiled kernels.
    """
    writable = dict.fromkeys([service.folder, *service.writable])
    needs_port_right = service.port is not None and service.port < 1024
    rights = "CAP_NET_BIND_SERVICE" if needs_port_right else ""
    used = [*writable, *service.read_only, Path(service.command[0])]
    has_private_temporary = not any(
        path.is_relative_to(shared) for path in used for shared in _SHARED_TEMPORARY_FOLDERS
    )
    cache = f"%t/{service.name}"
    return [
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "ReadWritePaths=" + " ".join(quote_for_systemd(str(path)) for path in writable),
        # Libraries write caches, which is impossible in a read-only home folder.
        f"RuntimeDirectory={service.name}",
        *(f'Environment="{name}={cache}/{name.lower()}"' for name in ("FLWR_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")),
        *(["PrivateTmp=yes"] if has_private_temporary else ()),
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
