"""Remedies about paths: who may read a secret, backslashes in TOML, and commands for folders with spaces."""

import os
import re
import stat
from pathlib import Path
from shlex import quote

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.system.files import find_missing_folder_faults, is_exposed_to_others
from polyclinic.common.system.toml import parse_toml, read_toml
from tests.network.real import flwr_client, flwr_server
from tests.own_files import PARTS

ROOT, OURS = 0, 10001
"""Accounts and groups."""


@pytest.mark.parametrize(
    ("mode", "owner", "group", "exposed"),
    [
        (0o600, OURS, OURS, False),
        (0o400, OURS, OURS, False),
        (0o440, ROOT, OURS, False),  # a secret of Kubernetes, with fsGroup
        (0o640, ROOT, OURS, False),
        (0o440, OURS, OURS, True),  # its owner needs no group
        (0o440, ROOT, 500, True),
        (0o460, ROOT, OURS, True),
        (0o444, ROOT, OURS, True),
        (0o604, OURS, OURS, True),
    ],
)
def test_a_group_may_read_a_secret_that_root_gave_to_this_account(
    mode: int, owner: int, group: int, exposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("geteuid", OURS), ("getegid", 1), ("getgroups", [OURS])):
        monkeypatch.setattr(os, name, lambda value=value: value)
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))
    assert is_exposed_to_others(status) == exposed


def test_root_itself_lets_no_group_read_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ROOT)
    monkeypatch.setattr(os, "getgroups", lambda: [ROOT, OURS])
    assert is_exposed_to_others(os.stat_result((stat.S_IFREG | 0o440, 0, 0, 1, ROOT, OURS, 0, 0, 0, 0)))


def test_a_path_in_double_quotes_that_became_other_signs_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = parse_toml(r'images = "D:\new\tables"')["images"]  # a line end, and a tab
    (fault,) = find_missing_folder_faults("data.images", tmp_path / path)
    assert fault.problem.startswith(rf"there is no folder {tmp_path}/D:\new\tables: ")
    assert "single quotes" in fault.remedy
    assert parse_toml(r"images = 'D:\new\tables'")["images"] == r"D:\new\tables"


@pytest.mark.parametrize("path", [r"C:\Users\x", r"C:\data", r"\\server\ux"])
def test_a_windows_path_in_double_quotes_is_refused_with_the_line_to_write(path: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'path = "{path}"\n', encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        read_toml(tmp_path / "a.toml")
    assert "single quotes" in refused.value.faults[0].remedy
    for line in (f"path = '{path}'", f'path = "{path.replace(chr(92), "/")}"'):
        (tmp_path / "a.toml").write_text(line, encoding="utf-8")
        assert read_toml(tmp_path / "a.toml")["path"].replace("/", "\\") == path


COMMAND = re.compile(r"(?:flwr-(?:sim|client|server) [a-z-]+|chmod \S+|chown -R \S+) \{([^}]*)\}")
"""A command in a message, and the first value that is filled in behind it."""
QUOTED = re.compile(r"quote_for_shell\(|quote\(|shlex\.|(word|words|places|claim|quoted_folder)$")


@pytest.mark.parametrize("part", PARTS)
def test_a_command_in_a_message_has_its_path_as_one_word(part: str) -> None:
    files = (Path(__file__).parents[2] / part).rglob("*.py")
    values = {(file.name, value) for file in files for value in COMMAND.findall(file.read_text(encoding="utf-8"))}
    assert sorted((name, value) for name, value in values if not QUOTED.match(value)) == []


def test_the_next_commands_of_a_new_coordinator_and_site_can_be_typed(tmp_path: Path) -> None:
    coordinator, site = tmp_path / "our coordinator", tmp_path / "our site"
    made = [
        flwr_server("init", coordinator, "--name", "c", "--host", "127.0.0.1"),
        flwr_client("init", site, "--name", "a"),
    ]
    printed = " ".join(" ".join(ended.out.split()) for ended in made)
    for words in (f"flwr-server start {quote(str(coordinator))}", f"flwr-client start {quote(str(site))}"):
        assert words in printed
