"""Units of systemd and quadlets of Podman: every path stands in them as it is, and systemd accepts them."""

import configparser
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from polyclinic.client.service import CLIENT
from polyclinic.common.system.service import (
    Service,
    escape_whole_value,
    find_unit_path_faults,
    find_volume_faults,
    make_quadlet,
    make_systemd_unit,
    quote_for_systemd,
)
from polyclinic.common.system.service_files import PROXIES
from polyclinic.server.deployment.service import SERVER
from tests.network.real import flwr_client, flwr_server

SYSTEMD = shutil.which("systemd-analyze")
STRANGE = 'north wing "a" 50% $HOME'
DATA = '[data]\nkind = "phantom"\nimages = 20\nimage_size = 16\n'


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "account"))


def make_site(folder: Path) -> Path:
    assert flwr_client("init", folder, "--name", "north").code == 0
    text = (folder / "site.toml").read_text(encoding="utf-8")
    (folder / "site.toml").write_text(text.split("\n[data]\n")[0] + "\n" + DATA, encoding="utf-8")
    return folder


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
    unit = make_systemd_unit(Service(CLIENT, "unit", folder, ("/usr/bin/flwr-client",), account="fl"), system=True)
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
    assert ledger.is_dir()
    if scope == "--system":
        assert words(values(unit, "ReadWritePaths")[0]) == [str(folder), str(ledger)]
        assert values(unit, "User") == [pwd.getpwuid(os.geteuid()).pw_name]
        assert values(unit, "CapabilityBoundingSet") == [""]
        assert verify(path) == ""
    else:
        assert (values(unit, "User"), values(unit, "ProtectSystem")) == ([], [])


def test_remove_leaves_nothing_of_what_install_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, units = make_site(tmp_path / "north"), tmp_path / "units"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setenv("https_proxy", "http://person:secret@proxy:3128")
    assert flwr_client("service", "install", folder, "--into", units).code == 0
    assert stat.S_IMODE((folder / "service.env").stat().st_mode) == 0o600
    assert "secret" not in next(units.iterdir()).read_text(encoding="utf-8")
    assert flwr_client("service", "status", folder, "--into", units).code == 1  # it does not run
    removed = flwr_client("service", "remove", folder, "--into", units)
    assert (removed.code, removed.err) == (0, "")
    assert list(units.iterdir()) == []
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert flwr_client("service", "remove", folder, "--into", units).code == 2


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
        service = Service(SERVER, "unit", Path(folder), ("/usr/bin/flwr-server",), account="fl", port=9092)
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
    for program, number in ((CLIENT, None), (SERVER, 9092)):
        service = Service(program, program.unit_prefix + "a", tmp_path, image=program.image, port=number)
        (tmp_path / f"{service.name}.container").write_text(make_quadlet(service, system=True), encoding="utf-8")
    environment = {**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)}
    done = subprocess.run([quadlet, "-dryrun"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ExecStart=.*podman run .*:/data", done.stdout, re.MULTILINE)) == 2
