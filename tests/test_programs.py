"""What goes for all three programs: help that teaches by example, their release, completion, no colours in a file."""

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

import polyclinic.client.cli
import polyclinic.server.cli
import polyclinic.studies.cli
from polyclinic.common import __version__
from tests.federations import DIGITS
from tests.processes import environment

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "flwr-sim": polyclinic.studies.cli,
    "flwr-server": polyclinic.server.cli,
    "flwr-client": polyclinic.client.cli,
}
GROUPS = {name: typer.main.get_command(module.app) for name, module in PROGRAMS.items()}


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Every command, by all the words that are typed for it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from leaves(f"{name} {word}", inner)


COMMANDS = dict(pair for name, group in GROUPS.items() for pair in leaves(name, group))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_an_example_that_parses_and_every_option_is_explained_in_its_help(words: str) -> None:
    examples = re.findall(r"Example: (.+)", COMMANDS[words].help or "")
    assert examples
    for example in examples:
        assert example.startswith(f"{words} ") or example == words
        COMMANDS[words].make_context(words, shlex.split(example.removeprefix(words)))
    name, *rest = words.split()
    assert (COMMANDS[words].help or "").split("\n")[0].endswith((".", "?"))
    shown = CliRunner().invoke(PROGRAMS[name].app, [*rest, "--help"], prog_name=name, env={"COLUMNS": "300"})
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    for parameter in COMMANDS[words].params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            explained = " ".join(str(getattr(parameter, "help", "") or "").split()).replace("\\[", "[")
            assert explained, parameter.name
            assert any(explained[:40] in line for line in lines), f"{parameter.name}: {explained}"


def test_a_word_that_is_no_command_is_answered_with_the_nearest_once() -> None:
    shown = CliRunner().invoke(PROGRAMS["flwr-sim"].app, ["runn"], prog_name="flwr-sim")
    assert (shown.exit_code, shown.output.count("Did you mean")) == (2, 1)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_its_release_and_its_exit_codes(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as ended:
            PROGRAMS[program].main([option])
        assert not ended.value.code
    output = capsys.readouterr().out
    assert output.startswith(f"{program} {__version__}\n")
    assert f"Usage: {program}" in output
    assert "Exit codes: 0 " in output
    assert "\x1b" not in output


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_writes_each_shells_completion_script(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv(variable, f"source_{shell}")
        with pytest.raises(SystemExit):
            PROGRAMS[program].main([])
        scripts[shell] = capsys.readouterr().out
        assert variable in scripts[shell]
        assert program in scripts[shell]
    assert subprocess.run(["bash", "-n"], input=scripts["bash"], text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [
        ("flwr-sim", "flwr-sim stu", {"study"}),
        ("flwr-server", "flwr-server re", {"revoke", "remove"}),
        ("flwr-client", "flwr-client start --h", {"--help"}),
    ],
)
def test_completion_offers_what_fits(
    program: str, typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"_{program.upper().replace('-', '_')}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        PROGRAMS[program].main([])
    assert set(capsys.readouterr().out.split()) == offered


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_fault_is_coloured_at_a_terminal_and_never_with_no_color(no_color: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    near = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    terminal = {**near, "TERM": "xterm-256color", **({"NO_COLOR": no_color} if no_color else {})}
    command = [sys.executable, "-m", "polyclinic.client.cli", "status", "nowhere"]
    ended = subprocess.run(command, cwd=ROOT, env=terminal, stdout=theirs, stderr=theirs, timeout=60, check=False)
    os.close(theirs)
    output = os.read(ours, 4096).decode()
    os.close(ours)
    assert ended.returncode == 2
    assert "error" in output
    assert bool(re.search(r"\x1b\[[\d;]*3\d", output)) is coloured


def python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python code with our packages on its path."""
    options = {"cwd": folder, "env": environment(), "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, "-c", code], **options)


UNUSED = {"sklearn", "matplotlib", "scipy", "pandas", "sympy", "torchvision", "torch._dynamo", "torch._inductor"}
"""Large packages that neither a coordinator, nor a waiting hospital, nor a run with its report needs."""
WITHOUT = [
    # Of commands that train nothing, which do not wait for torch; the first, which is always there, without Flower.
    ("polyclinic.server.deployment.superlink.program", {"torch", "flwr"}),
    *((f"server.{name}", {"torch"}) for name in ("coordinator.init", "coordinator.admission", "deployment.status")),
    ("polyclinic.server.deployment.serve", {"torch"}),
    *(
        (name, {"torch"})
        for name in (
            "polyclinic.client.site.site_file",
            "polyclinic.client.connection.status",
            "polyclinic.common.config",
        )
    ),
    *((name, UNUSED) for name in ("polyclinic.client.connection.service", "polyclinic.server.deployment.network")),
]


def test_programs_import_no_large_package_that_they_do_not_need() -> None:
    """In one process, from the lightest program to the heaviest."""
    code = f"import importlib, sys\nfor name, large in {WITHOUT!r}:\n"
    code += "    importlib.import_module(name)\n    if loads := large & set(sys.modules):\n        print(name, loads)\n"
    done = python(code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_run_with_its_report_imports_no_large_package_that_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    arguments = ["run", "a.toml", "--set", "run.rounds=1", "--backend", "inline", "--out", "run"]
    packages = {"torch", *UNUSED}
    code = f"import sys\nfrom polyclinic.studies.cli import main\ntry:\n    main({arguments!r})\n"
    code += f"except SystemExit as end:\n    print(end.code, {packages!r} & set(sys.modules))\n"
    ended = python(code, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["0 {'torch'}"], ended.stderr


AFTER_AND_BEFORE_TRAINING = tuple(
    f"polyclinic.{folder}."
    for folder in (
        *("client.approval", "client.counts", "client.delivery", "client.evaluation", "client.prediction"),
        *("client.withdrawal", "server.counts", "server.delivery", "common.evaluation"),
    )
)
"""Modules of what a hospital need not use: approval, counts, evaluation, delivery, departure."""


def test_a_hospital_and_a_run_that_only_train_import_nothing_of_counts_approval_evaluation_and_delivery(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.toml").write_text(DIGITS, encoding="utf-8")
    arguments = ["run", "a.toml", "--set", "run.rounds=1", "--backend", "inline", "--out", "run"]
    code = f"""
import sys
import polyclinic.client.cli
import polyclinic.client.connection.preflight
import polyclinic.client.connection.service
import polyclinic.client.site.settings
import polyclinic.server.deployment.network
from polyclinic.studies.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    print(end.code, [name for name in sys.modules if name.startswith({AFTER_AND_BEFORE_TRAINING!r})])
"""
    ended = python(code, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["0 []"], ended.stderr


@pytest.mark.parametrize("architecture", ["resnet18", "densenet121", "vgg11", "efficientnet_lite0"])
def test_networks_of_ours_are_built_without_torchvision(architecture: str) -> None:
    code = f"""
import sys
from polyclinic.common.models.network import build_network
from polyclinic.common.models.zoo.spec import ModelSpec
build_network(ModelSpec(architecture={architecture!r}, channels=1, image_size=32, task="multi_label"), ("a", "b"), 0)
print({UNUSED!r} & set(sys.modules))
"""
    ended = python(code)
    assert ended.stdout.splitlines() == ["set()"], ended.stderr


def test_a_run_of_ones_own_network_imports_neither_torch_compile_nor_sympy(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
from torch import nn
import polyclinic as pc
labels = np.arange(90)[:, None] // [1, 2] % 2
data = pc.LabelledImages(
    images=np.tile(255 * labels[:, :1, None], (32, 32)).astype(np.uint8), labels=labels, class_names=("a", "b"),
    patients=[str(number) for number in range(90)],
)
layers = lambda channels: (nn.Conv2d(channels, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
network = lambda channels, size: nn.Sequential(*layers(channels))
tables = {"run": {"method": "surgical", "rounds": 1}, "model": {"channels": 1, "image_size": 32}}
sites = {"kind": "class_lists", "lists": {"east": ["a", "b"], "north": ["b"]}}
run = pc.simulate({**tables, "partition": sites}, dataset=data, model=network, out="own")
print(run.summary["rounds"], {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
"""
    ended = python(code, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["1 set()"], ended.stderr


WRONG_PATHS = [
    ("polyclinic.studies.cli", "run", "nowhere.toml", "--out", "run"),
    ("polyclinic.studies.cli", "compare", "nowhere.toml", "--out", "run"),
    ("polyclinic.studies.cli", "sites", "nowhere.toml", "--out", "run"),
    ("polyclinic.client.cli", "start", "nowhere"),
    ("polyclinic.client.cli", "preview", "nowhere", "--experiment", "nowhere.toml"),
    ("polyclinic.client.cli", "preview-data", "nowhere"),
]


def test_a_wrong_path_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import contextlib, importlib, io, sys\n"
        f"for module, *words in {WRONG_PATHS!r}:\n"
        "    try:\n"
        "        with contextlib.redirect_stderr(io.StringIO()) as shown:\n"
        "            importlib.import_module(module).main(words)\n"
        "    except SystemExit as end:\n"
        "        print(*words, end.code, 'torch' in sys.modules, 'nowhere' in shown.getvalue())\n"
    )
    ended = python(code, tmp_path)
    assert ended.stdout.splitlines() == [f"{' '.join(words)} 2 False True" for _, *words in WRONG_PATHS], ended.stderr


@pytest.mark.parametrize(
    ("program", "ended_by_the_system"), [*((name, True) for name in PROGRAMS), ("jupyter", False)], ids=str
)
def test_ctrl_c_while_a_program_imports_ends_it_and_no_other_process(program: str, ended_by_the_system: bool) -> None:
    code = (
        "import signal, sys\n"
        f"sys.argv[0] = '/bin/{program}'\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import polyclinic.common\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL)\n"
    )
    done = python(code)
    assert (done.stdout.strip(), done.stderr) == (str(ended_by_the_system), "")


def test_a_locale_without_our_signs_ends_no_program() -> None:
    """As in containers and cron jobs where nobody set a locale."""
    code = (
        "from polyclinic.common.system.terminal import EscapingConsole\n"
        "from polyclinic.common.system.terminal import make_command_line_program, run_command_line_program\n"
        "app = make_command_line_program('flwr-sim', 'about', 'codes')\n"
        "@app.command()\n"
        "def tell():\n"
        "    EscapingConsole().print('\\u25cf annotated')\n"
        "@app.command()\n"
        "def other(): ...\n"
        "run_command_line_program(app, ['tell'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"? annotated", b"")
