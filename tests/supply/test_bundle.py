"""The offline bundle: what is in it, and what its installer accepts; with small wheels of our own and no network."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pip
import pytest

from supply import bundle


def write_wheel(folder: Path, name: str, version: str, *, code: str, needs: str = "", scripts: str = "") -> None:
    """Write a wheel of one module."""
    facts = f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{name}.py": code,
        f"{facts}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{facts}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{facts}/entry_points.txt": scripts,
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{facts}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{facts}/RECORD": record}).items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project, its only library, and the pip that is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "library", "1.2.3", code="VERSION = '1.2.3'\n")
    program = "import library\ndef main(): print('flwr-client with library', library.VERSION)\n"
    scripts = "[console_scripts]\nflwr-client = polyclinic:main\n"
    write_wheel(folder, "polyclinic", "0.9", code=program, needs="library>=1", scripts=scripts)
    source = Path(pip.__file__).parent
    with zipfile.ZipFile(folder / f"pip-{pip.__version__}-py3-none-any.whl", "w") as archive:
        for path in source.rglob("*"):
            if "__pycache__" not in path.parts:
                archive.write(path, f"pip/{path.relative_to(source)}")
    return folder


@pytest.fixture
def unpacked(wheels: Path, tmp_path: Path) -> Path:
    """A bundle as it lies on the machine without internet."""
    made = bundle.pack(wheels, tmp_path / "dist", "cpu", bundle.CHECKED)
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / made.stem


def install(
    unpacked: Path, folder: Path | str, *, cwd: str = "/", script: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the bundle's installer from another working folder."""
    command = ["sh", script or str(unpacked / "install.sh"), str(folder)]
    surroundings = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=cwd, env=surroundings, capture_output=True, text=True, check=False)


def update_sums(unpacked: Path, *members: str) -> None:
    """Write the present SHA-256 of some files into SHA256SUMS, as someone would who exchanges them on purpose."""
    path = unpacked / "SHA256SUMS"
    text = path.read_text(encoding="utf-8")
    for member in members:
        now = hashlib.sha256((unpacked / member).read_bytes()).hexdigest()
        text = re.sub(rf"^\w+  {re.escape(member)}$", f"{now}  {member}", text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")


def test_one_command_installs_all_wheels_and_a_machines_pip_settings_do_not_count(
    unpacked: Path, tmp_path: Path
) -> None:
    settings = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONSTRAINT": "/not/there.txt", "PIP_TARGET": "/not"}
    done = install(unpacked, tmp_path / "environment", **settings)
    assert done.returncode == 0, done.stderr
    program = tmp_path / "environment" / "bin" / "flwr-client"
    ran = subprocess.run([program], env={}, capture_output=True, text=True, check=True)
    assert ran.stdout == "flwr-client with library 1.2.3\n"
    assert str(program) in done.stdout
    assert not list((tmp_path / "environment").rglob("site-packages/pip"))  # it installs, and is not installed


def test_a_damaged_wheel_is_named_and_nothing_is_installed(unpacked: Path, tmp_path: Path) -> None:
    wheel = unpacked / "wheels" / "library-1.2.3-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 1
    assert "library-1.2.3-py3-none-any.whl: FAILED" in done.stdout
    assert not (tmp_path / "environment").exists()


def test_a_wheel_that_was_exchanged_together_with_its_sum_is_refused_by_pip(unpacked: Path, tmp_path: Path) -> None:
    write_wheel(unpacked / "wheels", "library", "1.2.3", code="VERSION = 'another'\n")
    update_sums(unpacked, "wheels/library-1.2.3-py3-none-any.whl")
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "environment").exists()


def test_a_bundle_that_lacks_a_library_is_refused_and_leaves_no_folder(unpacked: Path, tmp_path: Path) -> None:
    path = unpacked / "requirements.txt"
    path.write_text(re.sub(r"^library==.*\n", "", path.read_text(encoding="utf-8"), flags=re.M), encoding="utf-8")
    update_sums(unpacked, "requirements.txt")
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 1
    assert "polyclinic 0.9 requires library, which is not installed" in done.stdout + done.stderr
    assert not (tmp_path / "environment").exists()


def test_another_python_is_refused_with_the_one_that_fits(unpacked: Path, tmp_path: Path) -> None:
    (unpacked / "target.txt").write_text("3.99 x86_64\n", encoding="utf-8")
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 2
    assert "3.99 x86_64" in done.stderr
    assert bundle.target() in done.stderr
    assert not (tmp_path / "environment").exists()


def test_a_folder_that_exists_is_refused_and_stays(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "site.toml").touch()
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 2
    assert (tmp_path / "environment" / "site.toml").exists()


def test_settings_of_the_callers_shell_change_nothing(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "polyclinic.py").write_text("raise SystemExit('another polyclinic')\n", encoding="utf-8")
    shell = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "CDPATH": "."}
    shell["PYTHON"] = os.path.relpath(sys.executable, tmp_path)
    script = f"{unpacked.name}/install.sh"  # with CDPATH, cd prints the folder of a relative path once more
    done = install(unpacked, "environment", cwd=str(tmp_path), script=script, **shell)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Installed flwr-client with library 1.2.3.")
    assert (tmp_path / "environment" / "bin" / "flwr-client").is_file()


def test_a_folder_with_a_space_and_an_apostrophe_is_installed_into(unpacked: Path, tmp_path: Path) -> None:
    done = install(unpacked, tmp_path / "new folder" / "it's 50% %n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["a $(id)", "a`id`", 'a"b', "a\\b", "a\nb", "$HOME x"])
def test_a_folder_whose_name_a_shell_changes_is_refused_at_once(unpacked: Path, tmp_path: Path, name: str) -> None:
    done = install(unpacked, tmp_path / name)
    assert done.returncode == 2
    assert not (tmp_path / name).exists()
    (tmp_path / name).mkdir()  # a relative folder is a part of the same path
    assert install(unpacked, "environment", cwd=str(tmp_path / name)).returncode == 2
    assert list((tmp_path / name).iterdir()) == []


@pytest.mark.parametrize("name", ["-x", "--help", ""])
def test_an_option_is_no_folder_and_the_answer_names_the_command(unpacked: Path, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.iterdir())
    done = install(unpacked, name, cwd=str(tmp_path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "sh install.sh /opt/polyclinic" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_to_nothing_is_refused_and_stays(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "environment").symlink_to(tmp_path / "nowhere")
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 2
    assert (tmp_path / "environment").is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_made_is_refused_and_what_is_in_its_place_stays(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert install(unpacked, tmp_path / "file" / "environment").returncode == 2
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["pip-0-py3-none-any.whl", "library-9-py3-none-any.whl", ".hidden", "other"])
def test_a_file_beside_the_wheels_that_the_sums_do_not_list_runs_nothing(
    unpacked: Path, tmp_path: Path, name: str
) -> None:
    program = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    with zipfile.ZipFile(unpacked / "wheels" / name, "w") as archive:
        archive.writestr("pip/__init__.py", "")
        archive.writestr("pip/__main__.py", program)
    done = install(unpacked, tmp_path / "environment")
    assert done.returncode == 1
    assert f"wheels/{name} is not in SHA256SUMS" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "environment").exists()


def test_the_same_wheels_give_the_same_bytes_which_name_no_maker(wheels: Path, tmp_path: Path) -> None:
    first = bundle.pack(wheels, tmp_path / "first", "gpu", bundle.CHECKED)
    copies = shutil.copytree(wheels, tmp_path / "copies")
    for copy in copies.iterdir():
        os.utime(copy, (1, 1))
    second = bundle.pack(copies, tmp_path / "second", "gpu", bundle.CHECKED)
    assert first.read_bytes() == second.read_bytes()
    assert first.name == f"polyclinic-0.9-gpu-python{bundle.target().replace(' ', '-')}.tar"
    sums = first.with_name(f"{first.name}.sha256").read_text(encoding="utf-8")
    assert sums == f"{hashlib.sha256(first.read_bytes()).hexdigest()}  {first.name}\n"
    with tarfile.open(first) as archive:
        assert {(member.uid, member.uname, member.mtime) for member in archive} == {(0, "", 315532800)}


def test_the_wheel_is_built_of_sources_alone(tmp_path: Path) -> None:
    bundle.copy_source(tmp_path / "source")
    assert {path.name for path in (tmp_path / "source").iterdir()} == set(bundle.SOURCES)
    assert (tmp_path / "source" / "polyclinic" / "client").is_symlink()
    assert not list((tmp_path / "source").rglob("__pycache__"))
