"""``make bundle``: all that a machine without internet needs, in one tar file: wheels, their hashes, an installer.

A bundle is for the Python version and the machine type that it is made with, and for Linux with glibc 2.28 or newer.
This file needs Python alone, so that no environment has to be installed first.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from supply.lock import CPU_INDEX, entries

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
PYTHONS = ((3, 11), (3, 12), (3, 13))
"""Python versions for which the locks have libraries."""
MACHINES = ("x86_64", "aarch64")
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "experiments"),
    *("polyclinic", "common", "data", "strategies", "studies", "server", "client"),
)
"""Files and folders of which the project's wheel is built."""
GLIBC_TAGS = (*(f"manylinux_2_{minor}" for minor in range(28, 16, -1)), "manylinux2014")
OLD_GLIBC_TAGS = (*(f"manylinux_2_{minor}" for minor in range(16, 4, -1)), "manylinux2010", "manylinux1")
"""Tags of wheels that run with glibc 2.28, newest first; the old ones exist for x86_64 only."""
YEAR_1980 = "315532800"
"""The time of all files in a wheel and a bundle, in seconds since 1970: the same content has the same SHA-256."""

README = """\
Polyclinic {version} for machines without internet: {variant}, Python {python}, glibc 2.28 or newer

Install it into a folder that does not exist yet. This needs no network and no root rights:

    sh install.sh /opt/polyclinic
    /opt/polyclinic/bin/flwr-client --help

install.sh compares every file with SHA256SUMS, and refuses a file in wheels/ that is not listed there. pip compares
every wheel with requirements.txt. Both lists are in this bundle: they show a damaged file, not an exchanged bundle. For
that, compare the SHA-256 of the tar file with the one that its maker reads out to you by telephone:

    sha256sum {name}.tar

{origin}
Another Python than `python3`:  PYTHON=/path/to/python3 sh install.sh /opt/polyclinic
To remove it:                   rm -r /opt/polyclinic
"""
CHECKED = "When this bundle was made, every library was compared with its hash in supply/*.lock.\n"
UNCHECKED = """\
When this bundle was made, every library but torch and torchvision was compared with its hash in supply/*.lock.
supply/torch-cpu.lock has no hashes: these two are the locked releases, as {index} sent them.
"""


def main() -> int:
    """Make a bundle.

    Returns:
        0 if it is made, 1 if a library has no wheel or another hash, 2 if this is a wrong Python or machine.
    """
    parser = argparse.ArgumentParser(prog="python -m supply.bundle", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="with CUDA, for NVIDIA GPUs")
    parser.add_argument("--torch-index", default=CPU_INDEX, metavar="URL", help="the index of torch for CPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="where the tar file goes")
    options = parser.parse_args()
    if sys.version_info[:2] not in PYTHONS or sys.platform != "linux" or platform.machine() not in MACHINES:
        print(
            f"A bundle is made by Python 3.11 to 3.13 on Linux; this is {target()} {sys.platform}.",
            file=sys.stderr,
        )
        return 2
    checked = options.gpu or "--hash" in (HERE / "torch-cpu.lock").read_text(encoding="utf-8")
    origin = CHECKED if checked else UNCHECKED.format(index=options.torch_index)
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch, "wheels")
        try:
            fetch_wheels(wheels, options.torch_index, gpu=options.gpu)
        except subprocess.CalledProcessError as error:
            print(f"No bundle was made: pip ended with {error.returncode}, for the reason above.", file=sys.stderr)
            return 1
        bundle = pack(wheels, options.out, "gpu" if options.gpu else "cpu", origin)
    print(f"{bundle}: {bundle.stat().st_size / 1e6:.0f} MB\nSHA-256 {sha256_of(bundle)}\n{origin}", end="")
    return 0


def target() -> str:
    """Return the Python version and machine type that a bundle of this Python fits, such as "3.11 x86_64"."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"


def fetch_wheels(wheels: Path, torch_index: str, *, gpu: bool) -> None:
    """Download the wheels of all locked libraries and of pip into a new folder, and build that of the project.

    Raises:
        subprocess.CalledProcessError: If a library has no wheel or another hash.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "environment")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # The locked pip and setuptools build the wheel.
        subprocess.run([*pip, "install", "--no-deps", "--require-hashes", "-r", HERE / "build.lock"], check=True)

        tags = GLIBC_TAGS + OLD_GLIBC_TAGS * (platform.machine() == "x86_64")
        platforms = [part for tag in tags for part in ("--platform", f"{tag}_{platform.machine()}")]
        download = [*pip, "download", "--no-deps", "--only-binary", ":all:", *platforms, "--dest", wheels]
        installer = Path(scratch, "pip.lock")
        locked = entries((HERE / "build.lock").read_text(encoding="utf-8"))
        installer.write_text("".join(text for key, text in locked.items() if key.startswith("pip==")), encoding="utf-8")
        if not gpu:  # first, since this index may be out of reach; pip compares hashes where the lock has any
            subprocess.run([*download, "--index-url", torch_index, "-r", HERE / "torch-cpu.lock"], check=True)
        for lock in (installer, HERE / "libraries.lock", *[HERE / "torch.lock"] * gpu):
            subprocess.run([*download, "--require-hashes", "-r", lock], check=True)

        source = Path(scratch, "source")  # a build takes what an earlier one left beside the sources
        copy_source(source)
        build = [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source]
        subprocess.run(build, check=True, env={"SOURCE_DATE_EPOCH": YEAR_1980, **os.environ})


def copy_source(goal: Path) -> None:
    """Copy what the project's wheel is built of into a new folder; symlinks stay what they are."""
    goal.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, goal / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copyfile(ROOT / name, goal / name)


def pack(wheels: Path, out: Path, variant: str, origin: str) -> Path:
    """Write the tar file of a bundle, and beside it a file with its SHA-256.

    Args:
        wheels: A folder with the wheels of the project, of its libraries and of pip. Its other files become a part of
            the bundle's folder too.
        out: The folder of the tar file, which is created if needed.
        variant: "cpu" or "gpu", a part of the file's name.
        origin: What the reader has to know of where the wheels are from.

    Returns:
        The tar file's path.
    """
    files = sorted(wheels.glob("*.whl"))
    (project,) = wheels.glob("polyclinic-*.whl")
    assert len(list(wheels.glob("pip-*.whl"))) == 1, "install.sh runs the one pip that SHA256SUMS lists"
    version = project.name.split("-")[1]
    name = f"polyclinic-{version}-{variant}-python{target().replace(' ', '-')}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = {"version": version, "variant": variant.upper(), "python": target(), "name": name, "origin": origin}
        (folder / "README.txt").write_text(README.format(**words), encoding="utf-8")
        (folder / "requirements.txt").write_text(requirements_of(files), encoding="utf-8")
        (folder / "target.txt").write_text(f"{target()}\n", encoding="utf-8")
        shutil.copyfile(HERE / "install.sh", folder / "install.sh")
        members = {path.name: path for path in folder.iterdir()} | {f"wheels/{path.name}": path for path in files}
        sums = "".join(f"{sha256_of(path)}  {member}\n" for member, path in sorted(members.items()))
        (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
        members["SHA256SUMS"] = folder / "SHA256SUMS"

        out.mkdir(parents=True, exist_ok=True)
        bundle = out / f"{name}.tar"
        with tarfile.open(bundle, "w") as archive:
            for member, path in sorted(members.items()):
                archive.add(path, f"{name}/{member}", filter=_without_traces)
    (out / f"{name}.tar.sha256").write_text(f"{sha256_of(bundle)}  {bundle.name}\n", encoding="utf-8")
    return bundle


def requirements_of(wheels: list[Path]) -> str:
    """Return pip's list of what to install, with the version and SHA-256 of each wheel; pip itself is not in it."""
    lines = []
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        if name != "pip":
            lines.append(f"{re.sub(r'[-_.]+', '-', name).lower()}=={version} --hash=sha256:{sha256_of(wheel)}\n")
    return "".join(lines)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _without_traces(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take the maker's name and clock from a file of the tar."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(YEAR_1980)
    member.mode = 0o755 if member.name.endswith(".sh") else 0o644
    return member


if __name__ == "__main__":
    sys.exit(main())
