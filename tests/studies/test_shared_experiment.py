"""An experiment file that somebody else wrote sends nothing to nobody before the person at the machine has agreed.

The programs run as processes of their own, against a server of the author on 127.0.0.1.
"""

import base64
import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.fake_pacs import FakePacs, picture, running
from tests.processes import environment
from tests.studies.shared_experiments import DIGITS, EXPERIMENT, PROGRAM, STOPPED, Ended

STUDIES = 12
MEMBERS = [picture(1, study, f"P{study}") for study in range(STUDIES)]
SECRET = "AKIA-of-the-user"
DATA = """\
[{section}]
kind = "dicomweb"
url = "{url}"
labels = "{labels}"
{column}
label_columns = ["Mass", "Fluid"]
image_size = 16
{more}
"""


@dataclass
class User:
    """The machine of a person who was sent an experiment, and the author's server."""

    home: Path
    pacs: FakePacs

    def write(self, name: str = "shared.toml", *, column: str = "study", more: str = "", **changes: str) -> Path:
        """Write the experiment of the author."""
        given = {"section": "data", "url": self.pacs.url, "labels": "labels.csv"} | changes
        key = "accession_column" if column in ("accession", "patient_name") else f"{column}_column"
        text = DATA.format(column=f'{key} = "{column}"', more=more, **given)
        path = self.home / name
        path.write_text((EXPERIMENT if given["section"] == "data" else DIGITS) + text, encoding="utf-8")
        return path

    def secrets(self, text: str, mode: int = 0o600) -> Path:
        """Write the user's own file of secrets."""
        path = self.home / "config" / "polyclinic" / "secrets.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return path

    def start(self, *words: object, stdin: int = subprocess.DEVNULL, program: str = PROGRAM) -> "subprocess.Popen[str]":
        own = {"XDG_CONFIG_HOME": str(self.home / "config"), "AWS_SECRET_ACCESS_KEY": SECRET}
        own |= {"XDG_CACHE_HOME": str(self.home / "cache")}
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, words)],
            cwd=self.home,
            env=environment() | own,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: object, program: str = PROGRAM) -> Ended:
        """Run flwr-sim without a terminal."""
        process = self.start(*words, program=program)
        text, _ = process.communicate(timeout=240)
        return Ended(process.returncode, text)

    @property
    def sent(self) -> set[str]:
        """What the server has received of secrets."""
        return {request.headers.get("authorization", "") for request in self.pacs.requests}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    rows = [f"1.2.{study},A{study},Doe^Anna{study},{study % 2},{study // 2 % 2}" for study in range(STUDIES)]
    heading = "study,accession,patient_name,Mass,Fluid"
    (tmp_path / "labels.csv").write_text("\n".join([heading, *rows]), encoding="utf-8")
    with running(FakePacs(MEMBERS, page=100)) as server:
        yield User(tmp_path, server)


# What the file of somebody else names


def test_a_variable_of_the_environment_is_sent_to_nobody(user: User) -> None:
    file = user.write(more='authentication = "bearer"\nsecret_env = "AWS_SECRET_ACCESS_KEY"')
    ended = user.run("run", file, "--out", "run")
    assert user.pacs.requests == []
    assert ended.code == STOPPED
    assert SECRET not in ended.text


def test_a_private_file_of_the_user_is_sent_to_nobody(user: User) -> None:
    (user.home / "id_rsa").write_text(SECRET, encoding="utf-8")
    (user.home / "id_rsa").chmod(0o600)
    file = user.write(more=f'authentication = "bearer"\nsecret_file = "{user.home}/id_rsa"')
    ended = user.run("run", file, "--out", "run")
    assert (user.pacs.requests, ended.code) == ([], STOPPED)


def test_names_of_patients_are_sent_to_nobody_and_the_column_and_the_host_are_named(user: User) -> None:
    file = user.write(column="patient_name", labels=str(user.home / "labels.csv"))
    ended = user.run("run", file, "--out", "run")
    assert (user.pacs.requests, ended.code) == ([], STOPPED)
    for words in (user.pacs.url, '"patient_name"', str(user.home / "labels.csv"), "12 in all", "--yes"):
        assert words in ended.text
    assert "Doe^Anna" not in ended.text  # a log keeps what is printed


@pytest.mark.parametrize("section", ["server_data", "external_test"])
def test_every_table_with_images_is_asked_about(user: User, section: str) -> None:
    file = user.write(section=section)
    ended = user.run("run", file, "--out", "run")
    assert (user.pacs.requests, ended.code) == ([], STOPPED)
    assert f"{section}.url" in ended.text


COMMANDS = {
    "compare": ("compare", "shared.toml", "--seeds", "1", "--out", "out"),
    "study": ("study", ".", "--seeds", "1", "--out", "out"),
    "sites": ("sites", "shared.toml", "--out", "out"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_anything_before_somebody_agreed(user: User, name: str) -> None:
    user.write()
    study = 'title = "A"\npaper = "B"\nseeds = 1\n[[tables]]\ntitle = "T"\nexperiment = "shared.toml"\n'
    study += 'measures = ["auroc"]\nmethods = [{ title = "M" }]\n'
    (user.home / "study.toml").write_text(study, encoding="utf-8")
    ended = user.run(*COMMANDS[name])
    assert user.pacs.requests == []
    assert ended.code == STOPPED
    assert "--yes" in ended.text


def test_a_coordinator_is_asked_about_the_images_of_its_own_too(user: User) -> None:
    server = "import sys; from polyclinic.server.cli import main; main(sys.argv[1:])"
    assert user.run("init", "trial", "--name", "trial", "--host", "127.0.0.1", program=server).code == 0
    client = server.replace("polyclinic.server.cli", "polyclinic.client.cli")
    assert user.run("init", "north", "--name", "north", program=client).code == 0
    assert user.run("admit", "trial", "north/north.request", "--yes", program=server).code == 0
    file = user.write(section="external_test")
    ended = user.run("run", "trial", file, "--out", "run", "--resume", program=server)
    assert user.pacs.requests == []
    assert ended.code == STOPPED
    assert "--yes" in ended.text


def test_a_run_folder_of_somebody_else_makes_no_command_connect(user: User) -> None:
    (user.home / "digits.toml").write_text(DIGITS, encoding="utf-8")
    assert user.run("run", "digits.toml", "--out", "run").code == 0
    summary = json.loads((user.home / "run" / "summary.json").read_text(encoding="utf-8"))
    summary["experiment"]["data"] = {
        "kind": "dicomweb",
        "url": user.pacs.url,
        "labels": str(user.home / "labels.csv"),
        "accession_column": "patient_name",
        "label_columns": ["Mass", "Fluid"],
        "image_size": 16,
    }
    (user.home / "run" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    user.run("export", "run", "--to", "torchscript")
    user.run("evaluate", "run", user.write())
    user.run("export", "run", "--to", "torchscript", "--out", "second.pt", "--check", user.write())
    assert user.pacs.requests == []


def test_python_sends_nothing_to_a_host_that_the_caller_has_not_listed(user: User) -> None:
    user.write()
    call = "import polyclinic as pc; pc.{}"
    one = user.run(program=call.format('simulate("shared.toml", out="one")'))
    several = user.run(program=call.format('compare(["shared.toml"], seeds=1, out="two")'))
    assert user.pacs.requests == []
    for ended in (one, several):
        assert ended.code == 1
        assert f'allow_hosts=["http://127.0.0.1:{user.pacs.port}"]' in ended.text
    listed = user.run(program=call.format(f'simulate("shared.toml", out="three", allow_hosts=["{user.pacs.url}"])'))
    assert listed.code == 0, listed.text
    assert user.pacs.requests != []


def test_no_cluster_of_the_author_is_joined(user: User) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text = EXPERIMENT.replace('backend = "inline"', f'backend = "ray"\naddress = "{address}"')
        (user.home / "ray.toml").write_text(f'{text}[data]\nkind = "phantom"\n', encoding="utf-8")
        ended = user.run("run", "ray.toml", "--out", "run")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert ended.code == STOPPED
    assert address in ended.text
    assert "--yes" in ended.text


# What the user has agreed to


def test_with_yes_the_run_goes_on_and_names_the_host_and_sends_no_secret(user: User) -> None:
    ended = user.run("run", user.write(), "--out", "run", "--yes")
    assert ended.code == 0, ended.text
    assert f"{user.pacs.url} (data.url)" in ended.text
    assert user.sent == {""}


def test_runs_side_by_side_have_the_agreement_of_their_command(user: User) -> None:
    ended = user.run("compare", user.write(more='cache = "one"'), "--seeds", "1", "--out", "out", "--yes")
    assert ended.code == 0, ended.text
    assert user.sent == {""}


def test_a_secret_goes_to_its_own_host_alone(user: User) -> None:
    with running(FakePacs(MEMBERS, page=100, secret=f"Bearer {SECRET}")) as own:
        user.secrets(f'["http://127.0.0.1:{own.port}"]\nauthentication = "bearer"\nsecret = "{SECRET}"\n')
        for name, server in (("own", own), ("other", user.pacs)):
            file = user.write(f"{name}.toml", url=server.url, more=f'cache = "cache-{name}"')
            ended = user.run("sites", file, "--out", name, "--yes")
            assert ended.code == 0, ended.text
            assert SECRET not in ended.text
        assert {request.headers["authorization"] for request in own.requests} == {f"Bearer {SECRET}"}
    assert user.sent == {""}


def test_the_line_that_the_message_names_is_the_one_that_works(user: User) -> None:
    user.pacs.secret = f"Bearer {SECRET}"
    old = 'authentication = "bearer"\nsecret_env = "AWS_SECRET_ACCESS_KEY"'
    ended = user.run("run", user.write(more=old), "--out", "run")
    text = " ".join(ended.text.split())
    line, place = re.search(r'"http[^{]*\{.*?\}', text), re.search(r"write into (\S+)", text)
    assert line
    assert place
    assert Path(place[1]) == user.secrets(line[0] + "\n")
    ended = user.run("sites", user.write(), "--out", "sites", "--yes")
    assert ended.code == 0, ended.text
    assert user.sent == {f"Bearer {SECRET}"}


def test_a_ca_of_the_file_does_not_decide_who_receives_a_secret(user: User) -> None:
    host = f"https://127.0.0.1:{user.pacs.port}"
    user.secrets(f'["{host}"]\nauthentication = "basic"\nsecret = "anna:{SECRET}"\n')
    file = user.write(url=f"{host}/dicom-web", more='ca_file = "authors-ca.pem"')
    ended = user.run("run", file, "--out", "run", "--yes")
    assert (ended.code, user.pacs.requests) == (STOPPED, [])
    assert "ca_file" in ended.text
    assert base64.b64encode(f"anna:{SECRET}".encode()).decode() not in ended.text


@contextmanager
def terminal(answer: str) -> Iterator[int]:
    """A terminal at which somebody types an answer."""
    master, slave = pty.openpty()
    os.write(master, f"{answer}\n".encode())
    try:
        yield slave
    finally:
        os.close(slave)
        os.close(master)


@pytest.mark.parametrize(("answer", "code", "talks"), [("y", 0, True), ("n", 1, False)])
def test_a_person_at_a_terminal_is_asked_and_sees_what_is_sent(user: User, answer: str, code: int, talks: bool) -> None:
    file = user.write(column="accession")
    with terminal(answer) as keyboard:
        process = user.start("sites", file, "--out", "sites", stdin=keyboard)
        text, _ = process.communicate(timeout=240)
    assert process.returncode == code, text
    assert 'each value of column "accession" of labels.csv, 12 in all: A0, A1, A2, ...' in text
    assert bool(user.pacs.requests) == talks


BENCHMARK = """\
title = "B"
reference = "fedavg"
learning_rates = [1e-3]
tuning_seed = 1000
[[data]]
name = "pacs"
title = "P"
[[methods]]
name = "fedavg"
[[patterns]]
name = "p"
title = "p"
sites = 2
set = ['kind="missing_classes"', "missing=0"]
[forms.small]
title = "small"
rounds = 1
seeds = 1
blocks = [["pacs", "p"]]
rates = "tune"
[forms.tune]
title = "tune"
rounds = 1
seeds = 1
blocks = [["pacs", "p"]]
set = ['data={{kind="dicomweb", url="{url}", labels="labels.csv", accession_column="patient_name", {keys}}}']
"""


def test_a_benchmark_asks_about_the_column_of_the_runs_that_choose_learning_rates_too(user: User) -> None:
    user.write("pacs.toml")
    keys = 'label_columns=["Mass", "Fluid"], image_size=16'
    (user.home / "benchmark.toml").write_text(BENCHMARK.format(url=user.pacs.url, keys=keys), encoding="utf-8")
    with terminal("n") as keyboard:
        process = user.start("benchmark", ".", "--out", "out", stdin=keyboard)
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 1, text
    assert user.pacs.requests == []
    for column in ("study", "patient_name"):
        assert f'each value of column "{column}" of labels.csv' in text


def test_an_account_without_a_home_runs_an_experiment_on_files_of_this_machine(user: User) -> None:
    homeless = """
import os, pwd, sys
for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ.pop(name, None)
def no_entry(uid): raise KeyError(uid)
pwd.getpwuid = no_entry
"""
    (user.home / "digits.toml").write_text(DIGITS, encoding="utf-8")
    ended = user.run("run", "digits.toml", "--out", "run", program=homeless + PROGRAM)
    assert ended.code == 0, ended.text
