"""Units of systemd and quadlets of Podman: every path stands in them as it is, and systemd accepts them."""

import configparser
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polyclinic.client.service import CLIENT_SERVICE
from polyclinic.common.errors import BadInput
from polyclinic.common.system.service import (
    Service,
    escape_path_pattern,
    escape_whole_value,
    find_unit_path_faults,
    find_volume_faults,
    make_quadlet,
    make_systemd_unit,
    quote_for_systemd,
)
from polyclinic.common.system.service_files import PROXY_VARIABLES, ServiceOptions, make_writable_folders
from polyclinic.server.deployment.service import SERVER_PROGRAM
from tests.network.real import flwr_client, flwr_server
from tests.processes import environment

SYSTEMD = shutil.which("systemd-analyze")
STRANGE = 'north wing "a" 50% $HOME'
DATA = '[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("SUDO_UID", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "account"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def make_site(folder: Path) -> Path:
    assert flwr_client("init", folder, "--name", "north").code == 0
    text = (folder / "site.toml").read_text(encoding="utf-8")
    (folder / "site.toml").write_text(text.split("\n[data]\n")[0] + "\n" + DATA, encoding="utf-8")
    return folder


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_unit(folder: Path) -> str:
    """Text of the only unit in a folder."""
    (path,) = (path for path in folder.iterdir() if path.suffix in (".service", ".container"))
    return path.read_text(encoding="utf-8")


def make_coordinator(folder: Path, *, port: int = 9092) -> Path:
    made = flwr_server("init", folder, "--name", "trial", "--host", "127.0.0.1", "--port", port)
    assert made.code == 0, made.err
    return folder


def values(unit: str, key: str) -> list[str]:
    """Values of a key, in the order of their lines."""
    return [line.split("=", 1)[1] for line in unit.splitlines() if line.startswith(f"{key}=")]


def words(value: str) -> list[str]:
    """Words of a value by systemd's rules: quotes and backslashes as in a shell, ``%%`` and ``$$`` for one sign."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(value)]


def verify(path: Path, *options: str) -> str:
    """What ``systemd-analyze verify`` finds wrong; it knows no manager where systemd does not run."""
    if SYSTEMD is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([SYSTEMD, *options, "verify", path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 and not done.stderr else done.stdout + done.stderr


PATH_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=40)


@given(name=PATH_TEXT)
def test_a_quoted_word_is_read_as_one_word_that_is_the_path(name: str) -> None:
    doubled = name.replace("%", "%%")  # systemd reads %% as %, and in a command line $$ as $
    assert shlex.split(quote_for_systemd(name)) == [doubled]
    assert shlex.split(quote_for_systemd(name, in_command=True)) == [doubled.replace("$", "$$")]


@given(name=PATH_TEXT)
def test_a_folder_that_no_line_can_name_is_refused_and_every_other_one_stands_on_one_line(name: str) -> None:
    folder = Path(f"/srv/{name}")
    assume(str(folder) == f"/srv/{name}")
    if find_unit_path_faults("service", folder):
        return
    unit = make_systemd_unit(
        Service(CLIENT_SERVICE, "unit", folder, ("/usr/bin/flwr-client",), account="fl"), system=True
    )
    parsed = configparser.RawConfigParser(delimiters=["="], strict=False, comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit)
    assert parsed.sections() == ["Unit", "Service", "Install"]
    assert parsed["Unit"]["X-PolyclinicFolder"] == str(folder)
    assert parsed["Service"]["WorkingDirectory"].replace("%%", "%") == str(folder)


@pytest.mark.parametrize("name", ["a\nUser=root", "a\tb", "a\x7f", "a\udcff", "a ", "a\\"])
def test_a_folder_that_would_change_the_unit_is_refused(name: str) -> None:
    assert len(find_unit_path_faults("service", Path("/srv") / name)) == 1


@pytest.mark.parametrize("name", ["a:b", 'a"b', "a'b", "a\\b"])
def test_a_folder_that_podman_would_cut_is_refused_for_a_quadlet(name: str) -> None:
    assert len(find_volume_faults("service", Path("/srv") / name)) == 1
    assert find_volume_faults("service", Path("/srv/north wing 50%")) == []


@pytest.mark.parametrize("scope", ["--system", "--user"])
def test_a_clients_unit_names_its_folder_ledger_and_images_and_systemd_accepts_it(tmp_path: Path, scope: str) -> None:
    folder, images = make_site(tmp_path / STRANGE), tmp_path / "images 1"
    images.mkdir()
    done = flwr_client("service", "install", folder, scope, "--images", images, "--into", tmp_path / "units")
    assert done.code == 0, done.err
    (path,) = (tmp_path / "units").iterdir()
    assert path.name == "polyclinic-client-north-wing-a-50-HOME.service"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    unit = path.read_text(encoding="utf-8")
    assert words(values(unit, "ExecStart")[0])[-2:] == ["start", str(folder)]
    assert values(unit, "RestartPreventExitStatus") == ["2 11 14 16 17"]
    ledger = tmp_path / "account" / "polyclinic" / "ledger"
    assert {str(folder), str(images), str(ledger)} <= set(words(values(unit, "RequiresMountsFor")[0]))
    if scope == "--system":
        assert words(values(unit, "ReadWritePaths")[0]) == [str(folder), str(ledger)]
        assert values(unit, "User") == [pwd.getpwuid(os.geteuid()).pw_name]
        assert values(unit, "CapabilityBoundingSet") == [""]
        assert verify(path) == ""
    else:
        assert (values(unit, "User"), values(unit, "ProtectSystem")) == ([], [])


def test_remove_leaves_nothing_of_what_install_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, units = make_site(tmp_path / "north"), tmp_path / "config" / "systemd" / "user"
    before = list_files(folder)
    monkeypatch.setenv("https_proxy", "http://person:secret@proxy:3128")
    assert flwr_client("service", "install", folder, "--user").code == 0
    variables = units / "polyclinic-client-north.env"
    assert stat.S_IMODE(variables.stat().st_mode) == 0o600
    assert values(read_unit(units), "EnvironmentFile") == [f"-{variables}"]
    assert "secret" not in read_unit(units)
    assert (tmp_path / "account" / "polyclinic" / "ledger").is_dir()
    assert flwr_client("service", "status", folder).code == 1  # it does not run
    removed = flwr_client("service", "remove", folder)
    assert (removed.code, removed.err) == (0, "")
    assert list(units.iterdir()) == []
    assert list_files(folder) == before
    assert flwr_client("service", "remove", folder).code == 2


def test_a_preview_writes_the_unit_alone_and_its_removal_leaves_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, units = make_site(tmp_path / "north"), tmp_path / "config" / "systemd" / "user"
    monkeypatch.setenv("https_proxy", "http://person:secret@proxy:3128")
    preview = ("service", "install", folder, "--user", "--into", tmp_path / "look")
    before = list_files(tmp_path)
    shown = flwr_client(*preview)
    assert (shown.code, "systemctl" in shown.out) == (0, False)
    assert {path for path in list_files(tmp_path) if path not in before} == {
        tmp_path / "look" / "polyclinic-client-north.service"
    }
    assert not (tmp_path / "account").exists()
    assert flwr_client("service", "install", folder, "--user").code == 0
    assert read_unit(units) == read_unit(tmp_path / "look")
    installed = list_files(units)
    assert flwr_client(*preview).code == 0
    assert flwr_client("service", "remove", folder, "--into", tmp_path / "look").code == 0
    assert list_files(units) == installed
    assert len(installed) == 2  # the unit and its variables
    assert flwr_client(*preview, "--now").code == 2


def test_lines_of_a_person_in_the_file_of_variables_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, units = make_site(tmp_path / "north"), tmp_path / "config" / "systemd" / "user"
    monkeypatch.setenv("https_proxy", "http://old:3128")
    assert flwr_client("service", "install", folder, "--user").code == 0
    variables = units / "polyclinic-client-north.env"
    with variables.open("a", encoding="utf-8") as file:
        file.write("# for CUDA\nCUDA_VISIBLE_DEVICES=1\n")
    monkeypatch.setenv("https_proxy", "http://new:3128")
    assert flwr_client("service", "install", folder, "--user").code == 0
    lines = variables.read_text(encoding="utf-8").splitlines()[1:]
    assert lines == ["https_proxy=http://new:3128", "# for CUDA", "CUDA_VISIBLE_DEVICES=1"]
    monkeypatch.delenv("https_proxy")
    assert flwr_client("service", "install", folder, "--user", "--name", "north").code == 0
    assert not variables.exists()
    assert (units / "north.env").read_text(encoding="utf-8").splitlines()[1:] == lines
    assert flwr_client("service", "remove", folder).code == 0
    assert [path.name for path in units.iterdir()] == ["north.env"]


def test_a_name_that_another_unit_has_is_refused_and_that_unit_stays(tmp_path: Path) -> None:
    first, second = make_coordinator(tmp_path / "a"), make_coordinator(tmp_path / "b")
    units = tmp_path / "units"
    units.mkdir()
    foreign = units / "backup.service"
    foreign.write_text("[Service]\nExecStart=/usr/bin/backup\n", encoding="utf-8")
    (units / "link.service").symlink_to("/nowhere")
    into = ("--into", units)
    assert flwr_server("service", "install", first, *into, "--name", "trial").code == 0
    before = list_files(units)
    for name in ("backup", "link", "trial"):
        assert flwr_server("service", "install", second, *into, "--name", name).code == 2
        assert flwr_server("service", "install", second, "--quadlet", *into, "--name", name).code == 2
    assert list_files(units) == before
    assert flwr_server("service", "install", first, *into, "--name", "trial").code == 0  # its own


def test_a_name_of_the_systems_own_units_is_refused(tmp_path: Path) -> None:
    folder, places = (
        make_coordinator(tmp_path / "trial"),
        [Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")],
    )
    names = [path.stem for place in places for path in place.glob("[a-z]*.service") if "@" not in path.name]
    if not names:
        pytest.skip("this system has no units of systemd")
    done = flwr_server("service", "install", folder, "--system", "--into", tmp_path / "u", "--name", names[0])
    assert (done.code, (tmp_path / "u").exists()) == (2, False)


class GlobResult(Structure):
    """``glob_t`` of glibc."""

    _fields_ = [
        ("count", c_size_t),
        ("paths", POINTER(c_char_p)),
        ("offset", c_size_t),
        ("flags", c_int),
        ("functions", c_void_p * 5),
    ]


@pytest.mark.parametrize("name", ["north", "a[b]", "back\\slash", "a*", "what?", "a [b] \\[c]"])
def test_a_file_of_variables_is_found_where_systemd_reads_its_path_as_a_pattern(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    (tmp_path / "ab").touch()  # matches a[b] and a*
    result = GlobResult()
    assert CDLL(None).glob(os.fsencode(escape_path_pattern(path)), 0, None, byref(result)) == 0
    assert [os.fsdecode(result.paths[number] or b"") for number in range(result.count)] == [str(path)]


def test_a_unit_names_its_file_of_variables_by_an_escaped_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a[b] 50%"))
    folder = make_coordinator(tmp_path / "trial")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert flwr_server("service", "install", folder, "--user").code == 0
    units = tmp_path / "a[b] 50%" / "systemd" / "user"
    pattern = f"{tmp_path}/a\\[b] 50%%/systemd/user/polyclinic-server-trial.env"
    assert values(read_unit(units), "EnvironmentFile") == [f"-{pattern}"]
    assert (units / "polyclinic-server-trial.env").is_file()


@pytest.mark.parametrize("image", ["x\nExec=evil", "x y", "x\\", "%h", "--privileged"])
def test_a_text_that_is_no_name_of_an_image_is_refused(tmp_path: Path, image: str) -> None:
    folder = make_coordinator(tmp_path / "trial")
    done = flwr_server("service", "install", folder, "--quadlet", f"--image={image}", "--into", tmp_path / "units")
    assert (done.code, (tmp_path / "units").exists()) == (2, False)


def test_an_image_by_port_tag_and_digest_is_accepted(tmp_path: Path) -> None:
    folder, image = make_coordinator(tmp_path / "trial"), "registry.example:5000/a_b/flwr-server:1.0@sha256:" + "a" * 64
    done = flwr_server("service", "install", folder, "--quadlet", "--image", image, "--into", tmp_path / "units")
    assert done.code == 0, done.err
    assert values(read_unit(tmp_path / "units"), "Image") == [image]


def test_install_under_sudo_names_the_proxy_that_sudo_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_coordinator(tmp_path / "trial")
    assert "--preserve-env=https_proxy" not in flwr_server("service", "install", folder, "--user").out
    monkeypatch.setenv("SUDO_UID", "1000")
    assert "sudo --preserve-env=https_proxy" in flwr_server("service", "install", folder, "--user").out
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert "--preserve-env=https_proxy" not in flwr_server("service", "install", folder, "--user").out


# ---------------------------------------------------------------------- root, on the folder of an account


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the account "nobody", which that account can reach."""
    if os.geteuid() != 0:
        pytest.skip("only root installs a unit for another account")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        give_to_nobody(Path(folder))
        yield Path(folder)


def give_to_nobody(folder: Path) -> None:
    entry = pwd.getpwnam("nobody")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def make_site_of_nobody(home: Path, ledger: str) -> Path:
    folder = make_site(home / "west")
    with (folder / "site.toml").open("a", encoding="utf-8") as file:
        file.write(f'\n[policy]\nledger = "{ledger}"\n')
    give_to_nobody(folder)
    return folder


def install_as_root(folder: Path, then: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Install a unit of the system in a mount namespace of its own, so that this machine keeps its units.

    Args:
        then: Commands of a shell that look at the result, if the installation succeeded.
    """
    install = shlex.join([sys.executable, "-m", "polyclinic.client.cli", "service", "install", str(folder)])
    mount = "mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system"
    if not Path("/etc/systemd/system").is_dir() or subprocess.run(["unshare", "-m", "sh", "-c", mount]).returncode:
        pytest.skip("no private folder of units can be mounted here")
    command = ["unshare", "-m", "sh", "-c", f"{mount} || exit 99\n{install} || exit $?\n{then}"]
    return subprocess.run(command, env=environment() | variables, capture_output=True, text=True, check=False)


def test_root_writes_nothing_into_the_folder_of_an_account_but_what_that_account_may(home: Path) -> None:
    """What root writes there, and gives away by its path, may have been exchanged for a file of root's."""
    folder = make_site_of_nobody(home, str(home / "ledgers" / "shared"))
    before = {path: path.lstat().st_ctime_ns for path in (folder, *folder.rglob("*"))}
    look = "cd /etc/systemd/system && grep -h ^EnvironmentFile= *.service && stat -c '%U %a %n' *.env"
    done = install_as_root(folder, look, https_proxy="http://person:secret@proxy:3128")
    assert done.returncode == 0, done.stderr
    # Its variables are root's too: by LD_PRELOAD in them the account would become root in ExecStartPre.
    assert done.stdout.splitlines()[-2:] == [
        "EnvironmentFile=-/etc/systemd/system/polyclinic-client-west.env",
        "root 600 polyclinic-client-west.env",
    ]
    assert {path: path.lstat().st_ctime_ns for path in (folder, *folder.rglob("*"))} == before
    for made in (home / "ledgers", home / "ledgers" / "shared"):
        assert (made.owner(), stat.S_IMODE(made.stat().st_mode)) == ("nobody", 0o700)


def test_a_site_file_cannot_make_root_give_a_folder_of_systemds_to_the_account(home: Path) -> None:
    folder = make_site_of_nobody(home, "/etc/systemd/system/ssh.service.d")
    done = install_as_root(folder)
    assert done.returncode == 2
    assert "/etc/systemd/system/ssh.service.d" in done.stderr


def test_root_runs_on_no_folder_that_an_account_can_exchange(home: Path, tmp_path: Path) -> None:
    folder = make_coordinator(home / "trial")
    into = ("--into", tmp_path / "units")
    assert flwr_server("service", "install", folder, "--system", *into).code == 2
    assert not (tmp_path / "units").exists()
    give_to_nobody(folder)  # the remedy
    assert flwr_server("service", "install", folder, "--system", *into).code == 0
    assert values(read_unit(tmp_path / "units"), "User") == ["nobody"]


def test_a_link_in_the_accounts_folder_leads_root_to_no_folder_of_roots(home: Path, tmp_path: Path) -> None:
    (home / "link").symlink_to(tmp_path)
    service = Service(CLIENT_SERVICE, "west", home, account="nobody", writable=(home / "link" / "ledger",))
    with pytest.raises(BadInput):
        make_writable_folders(service, ServiceOptions(system=True))
    assert not (tmp_path / "ledger").exists()
    assert (os.geteuid(), os.getegid()) == (0, 0)
    # The remedy: a folder that the account can make.
    make_writable_folders(replace(service, writable=(home / "ledger",)), ServiceOptions(system=True))
    assert (home / "ledger").owner() == "nobody"


def test_two_folders_of_one_name_get_two_units_and_a_second_install_writes_the_same_one(tmp_path: Path) -> None:
    first, second = make_coordinator(tmp_path / "a" / "trial"), make_coordinator(tmp_path / "b" / "trial")
    for folder in (first, second, first):
        assert flwr_server("service", "install", folder, "--into", tmp_path / "units").code == 0
    names = sorted(path.name for path in (tmp_path / "units").iterdir())
    assert names == ["polyclinic-server-trial-2.service", "polyclinic-server-trial.service"]
    assert flwr_server("service", "remove", second, "--into", tmp_path / "units").code == 0
    (left,) = (tmp_path / "units").iterdir()
    assert values(left.read_text(encoding="utf-8"), "X-PolyclinicFolder") == [str(first)]


def test_a_folder_has_one_unit_of_either_form(tmp_path: Path) -> None:
    folder = make_coordinator(tmp_path / "trial")
    assert flwr_server("service", "install", folder, "--quadlet", "--into", tmp_path / "units").code == 0
    assert flwr_server("service", "install", folder, "--into", tmp_path / "units").code == 2


def test_a_container_without_a_ledger_is_refused(tmp_path: Path) -> None:
    folder = make_site(tmp_path / "north")
    assert flwr_client("service", "install", folder, "--quadlet", "--into", tmp_path / "units").code == 2
    assert not (tmp_path / "units").exists()


def test_a_quadlet_mounts_folder_ledger_and_images_and_closes_the_rest(tmp_path: Path) -> None:
    folder, images = make_site(tmp_path / "north 50%"), tmp_path / "images"
    images.mkdir()
    mounts = ("--ledger", tmp_path / "ledger", "--images", images)
    done = flwr_client("service", "install", folder, "--quadlet", "--user", "--gpu", *mounts, "--into", tmp_path / "q")
    assert done.code == 0, done.err
    (path,) = (tmp_path / "q").iterdir()
    text = path.read_text(encoding="utf-8")
    where = escape_whole_value(str(tmp_path))
    expected = [f"{where}/north 50%%:/data", f"{where}/ledger:/ledger", f"{where}/images:/images:ro"]
    assert values(text, "Volume") == expected
    for key, value in {
        "Exec": "start /data",
        "ReadOnly": "true",
        "DropCapability": "all",
        "NoNewPrivileges": "true",
        "AddDevice": "nvidia.com/gpu=all",
        "UserNS": "keep-id:uid=10001,gid=10001",
        "RestartPreventExitStatus": "2 11 14 16 17",
    }.items():
        assert values(text, key) == [value], key


def test_a_port_of_the_system_gets_the_one_right_that_it_needs(tmp_path: Path) -> None:
    folder = make_coordinator(tmp_path / "trial", port=443)
    assert flwr_server("service", "install", folder, "--system", "--into", tmp_path / "units").code == 0
    unit = next((tmp_path / "units").iterdir()).read_text(encoding="utf-8")
    for key in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert values(unit, key) == ["CAP_NET_BIND_SERVICE"]


def test_temporary_folders_stay_open_to_a_unit_that_lies_in_one() -> None:
    """A private /tmp would hide the program, or its folder."""
    for folder, expected in (("/srv/trial", ["yes"]), ("/tmp/trial", [])):
        service = Service(SERVER_PROGRAM, "unit", Path(folder), ("/usr/bin/flwr-server",), account="fl", port=9092)
        assert values(make_systemd_unit(service, system=True), "PrivateTmp") == expected


def test_a_refused_name_account_or_proxy_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_coordinator(tmp_path / "trial")
    into = ("--into", tmp_path / "units")
    assert flwr_server("service", "install", folder, "--name", "../x", *into).code == 2
    assert flwr_server("service", "install", folder, "--system", "--account", "nobody-of-that-name", *into).code == 2
    monkeypatch.setenv("https_proxy", "http://a b@proxy")
    assert flwr_server("service", "install", folder, *into).code == 2
    assert not (tmp_path / "units").exists()


def test_podmans_own_generator_makes_units_of_both_programs(tmp_path: Path) -> None:
    quadlet = next((path for path in ("/usr/libexec/podman/quadlet",) if os.access(path, os.X_OK)), None)
    if quadlet is None:
        pytest.skip("Podman with quadlets (4.5 or later) is not installed")
    for program, number in ((CLIENT_SERVICE, None), (SERVER_PROGRAM, 9092)):
        service = Service(program, program.unit_prefix + "a", tmp_path, image=program.image, port=number)
        (tmp_path / f"{service.name}.container").write_text(make_quadlet(service, system=True), encoding="utf-8")
    environment = {**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)}
    done = subprocess.run([quadlet, "-dryrun"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ExecStart=.*podman run .*:/data", done.stdout, re.MULTILINE)) == 2
