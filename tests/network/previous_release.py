"""The release before this one, as a wheel that is built from git history; its programs run beside this tree's."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.network.real import InstalledRelease
from tests.processes import ROOT

COMMIT = "24e2f009"
"""The last commit of the wire version before this one (:mod:`polyclinic.common.wire.versions`)."""
RELEASE = "0.1.0"
"""The release's name at that commit."""
PREFIX = ""
"""Its packages stand at the top level: ``client.cli``. Those of later releases are below ``polyclinic.``."""


def read_file(path: str) -> str:
    """Return a file of :data:`COMMIT`; skip the test if this checkout has not the commit."""
    shown = subprocess.run(["git", "show", f"{COMMIT}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        pytest.skip(f"this checkout has no git history with the previous release, {COMMIT}: git fetch --unshallow")
    return shown.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel of :data:`COMMIT`; skip the test if this checkout has not the commit."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"this checkout has no git history with the previous release, {COMMIT}: git fetch --unshallow")
    source, wheels = folder / "source", folder / "wheels"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    built = subprocess.run([*pip, "--wheel-dir", wheels, source], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.iterdir()
    return wheel


def install(folder: Path) -> InstalledRelease:
    """Unpack the wheel of the previous release into a folder of its own; its dependencies are this tree's."""
    wheel, packages = build_wheel(folder), folder / "packages"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(packages)
    return InstalledRelease(packages, PREFIX)


OF_WIRE = """
import sys, polyclinic.common
polyclinic.common.__version__ = "{release}"
import polyclinic.common.wire.versions as versions
versions.WIRE_VERSION = {wire}
versions.WIRE_FORMATS = {{{wire}: versions.WireFormat(), {wire} - 1: versions.WireFormat()}}
versions.OLDEST_WIRE_VERSION = {wire} - 1
versions.PRESENT_RELEASE = versions.StatedRelease({wire}, "{release}")
from polyclinic.client.cli import main
main(sys.argv[1:])
"""


def client_of_wire(wire: int, release: str = "9.8.7") -> str:
    """The code of a ``flwr-client`` of another release, which speaks this wire version and the one before."""
    return OF_WIRE.format(wire=wire, release=release)
