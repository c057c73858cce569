"""The hash of a plug-in covers every file of its package that can run or be read."""

import base64
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import py_compile
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from polyclinic.common.errors import BadInput
from polyclinic.common.plugins import LOSSES, identify_plugin, load_plugin_entry_point
from polyclinic.common.plugins.files import has_foreign_byte_code
from tests.third_parties import forget, install_files

NAMES = ("acme", "acme_more", "acme_data", "acme_hook", "shared", "other", "third")
"""The top-level modules of this page."""
MORE = """
def answer():
    return "hashed"


def late():
    from acme import lazy

    return lazy.VALUE
"""
FILES: dict[str, str | bytes] = {
    "acme/__init__.py": "from pathlib import Path\nTEXT = (Path(__file__).parent / 'table.csv').read_text()\n",
    "acme/losses.py": "from acme_more import answer, late\nfrom acme import TEXT\n",
    "acme/lazy.py": "VALUE = 'hashed'\n",
    "acme/table.csv": "1,2\n",
    "acme/_fast.cpython-311-x86_64-linux-gnu.so": b"\x7fELF",
    "acme_more.py": MORE,
    "acme_data/weights.bin": b"\0\1",
    "acme_start.pth": "import sys\n",
    "../../../share/acme/atlas.txt": "atlas",
}
POINTS = {LOSSES: {"answer": "acme.losses:answer", "late": "acme.losses:late"}}
Patched = pytest.MonkeyPatch


@pytest.fixture
def few_packages() -> Iterator[None]:
    """Leave the environment's hundreds of packages out, in which each hash would look for files of its own."""
    before = sys.path[:]
    sys.path[:] = [entry for entry in before if not entry.endswith("site-packages")]
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def nothing_of_before(few_packages: None, monkeypatch: Patched) -> Iterator[None]:
    """Each test has modules and hashes of its own."""
    forget(monkeypatch)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def installed(
    folder: Path,
    patched: Patched,
    files: Mapping[str, str | bytes] = FILES,
    points: Mapping[str, Mapping[str, str]] = POINTS,
    name: str = "acme",
) -> Path:
    """Install a distribution for this process; return the folder that it lies in."""
    site = folder / "lib" / "python3" / "site-packages"
    install_files(site, name, files, points)
    patched.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return site


EVIL = MORE.replace("hashed", "forged")


def put_in_front(folder: Path, patched: Patched) -> None:
    """Have an earlier folder of the path bring a module of the same name."""
    (folder / "first").mkdir()
    (folder / "first" / "acme_more.py").write_text(EVIL)
    patched.syspath_prepend(str(folder / "first"))


def test_a_module_of_an_earlier_folder_changes_the_hash(tmp_path: Path, monkeypatch: Patched) -> None:
    installed(tmp_path, monkeypatch)
    before = identify_plugin(LOSSES, "answer")
    with monkeypatch.context() as patch:
        put_in_front(tmp_path, patch)
        assert identify_plugin(LOSSES, "answer") != before
        importlib.import_module("acme_more")
    assert identify_plugin(LOSSES, "answer") != before


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
CHANGES: dict[str, Callable[[Path], object]] = {
    "second top-level module": lambda site: (site / "acme_more.py").write_text(EVIL),
    "extension module": lambda site: (site / "acme/_fast.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELG"),
    "new extension module beside a module": lambda site: (site / f"acme_more{SUFFIX}").write_bytes(b"\x7fELF"),
    "data in the package": lambda site: (site / "acme" / "table.csv").write_text("1,3\n"),
    "data in a folder of its own": lambda site: (site / "acme_data" / "weights.bin").write_bytes(b"\0\2"),
    "data outside": lambda site: (site / "../../../share/acme/atlas.txt").write_text("other"),
    "line of a .pth": lambda site: (site / "acme_start.pth").write_text("import os\n"),
    "new file in the package": lambda site: (site / "acme" / "new.py").write_text(""),
    "new file in the data's folder": lambda site: (site / "acme_data" / "new.py").write_text(""),
    "byte code without a source": lambda site: py_compile.compile(
        str(site / "acme" / "lazy.py"), cfile=str(site / "acme" / "other.pyc")
    ),
    "byte code that only lies among the caches": lambda site: (site / "acme/__pycache__/hidden.pyc").write_bytes(b"1"),
    "target of the entry point": lambda site: (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{LOSSES}]\nanswer = acme.losses:late\n"
    ),
    "metadata": lambda site: (site / "acme-1.0.dist-info" / "METADATA").write_text("Name: acme\nVersion: 1.0\nA: B\n"),
    "renamed file": lambda site: (site / "acme" / "table.csv").rename(site / "acme" / "table.tsv"),
    "removed file": lambda site: (site / "acme" / "table.csv").unlink(),
    "data under an installer's name": lambda site: (site / "acme" / "x.dist-info" / "INSTALLER").write_text("2"),
    "data that is called like a cache": lambda site: (site / "acme" / "__pycache__" / "data.bin.pyc").write_bytes(b"2"),
    "line of a .pth behind a form feed": lambda site: (site / "acme_start.pth").write_text(
        "import sys\n#\fimport os\n"
    ),
    "target of a link": lambda site: (site / "linked.txt").write_text("other"),
    "module of another distribution": lambda site: install_files(site, "other", {f"acme/losses{SUFFIX}": b"\x7f"}, {}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_of_these_changes_the_hash(change: Callable[[Path], object], tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch)
    (site / "linked.txt").write_text("text")
    (site / "acme" / "x.dist-info").mkdir()
    (site / "acme" / "__pycache__").mkdir()
    (site / "acme" / "link.txt").symlink_to(site / "linked.txt")
    (site / "acme" / "circle").symlink_to(site / "acme", target_is_directory=True)
    before = identify_plugin(LOSSES, "answer")
    assert identify_plugin(LOSSES, "answer") == before
    change(site)
    importlib.invalidate_caches()
    assert identify_plugin(LOSSES, "answer").sha256 != before.sha256


def test_the_same_distribution_has_the_same_hash_at_two_hospitals(tmp_path: Path, monkeypatch: Patched) -> None:
    here = installed(tmp_path / "here", monkeypatch)
    first = identify_plugin(LOSSES, "answer")
    monkeypatch.undo()
    forget(monkeypatch)
    there = installed(tmp_path / "elsewhere", monkeypatch, dict(reversed(FILES.items())))
    info = there / "acme-1.0.dist-info"
    (info / "INSTALLER").write_text("uv\n")
    (info / "REQUESTED").write_text("")
    (info / "direct_url.json").write_text('{"url": "file:///home/a/acme.whl"}')
    for path in (there / "acme").glob("*.py"):
        py_compile.compile(str(path))
    assert here != there
    assert identify_plugin(LOSSES, "answer").sha256 == first.sha256


def test_of_scripts_those_of_the_package_count_without_their_first_line(tmp_path: Path, monkeypatch: Patched) -> None:
    points = {**POINTS, "console_scripts": {"acme": "acme.losses:answer"}}
    scripts = {"../../../bin/acme": "#!/a/python\nimport acme", "../../../bin/acme-tool": "#!/a/python\nprint(1)\n"}
    site = installed(tmp_path, monkeypatch, {**FILES, **scripts}, points)
    before = identify_plugin(LOSSES, "answer")
    (site / "../../../bin/acme").write_text("#!/b/python\nimport sys, acme")
    (site / "../../../bin/acme-tool").write_text("#!/b/python\nprint(1)\n")
    assert identify_plugin(LOSSES, "answer") == before
    (site / "../../../bin/acme-tool").write_text("#!/b/python\nprint(2)\n")
    assert identify_plugin(LOSSES, "answer") != before


def test_an_editable_installation_counts_every_module_of_its_folder(tmp_path: Path, monkeypatch: Patched) -> None:
    source = tmp_path / "work" / "src"
    for name in ("acme/__init__.py", "acme/losses.py", "acme/lazy.py", "acme/table.csv", "acme_more.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(str(FILES[name]))
    installed(tmp_path, monkeypatch, {"__editable__.acme-1.0.pth": f"{source}\n"})
    monkeypatch.syspath_prepend(str(source))
    before = identify_plugin(LOSSES, "answer")
    shutil.move(tmp_path / "work", tmp_path / "moved")
    for path in tmp_path.rglob("*.pth"):
        path.write_text(f"{tmp_path / 'moved' / 'src'}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "moved" / "src"))
    importlib.invalidate_caches()
    assert identify_plugin(LOSSES, "answer") == before
    assert load_plugin_entry_point(LOSSES, "answer")() == "hashed"
    forget(monkeypatch)
    (tmp_path / "moved" / "src" / "acme_more.py").write_text(EVIL)
    assert identify_plugin(LOSSES, "answer") != before


def test_what_was_stamped_for_a_plan_is_what_is_loaded(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch)
    identify_plugin(LOSSES, "answer")
    (site / "acme_more.py").write_text(EVIL)
    with pytest.raises(BadInput, match="changed"):
        load_plugin_entry_point(LOSSES, "answer")


# ---------------------------------------------------------------------- byte code


def forge_byte_code(source: Path, forged: str, mode: PycInvalidationMode = PycInvalidationMode.UNCHECKED_HASH) -> None:
    """Put byte code of other code among the caches of a module, as a wheel may bring it.

    Args:
        mode: How Python decides if it is loaded; with a time stamp it has the time and size of the source.
    """
    honest, status = source.read_bytes(), source.stat()
    source.write_text(forged.ljust(status.st_size))  # a size of its own would not be loaded
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(source), invalidation_mode=mode)
    source.write_bytes(honest)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))


def refused(name: str = "answer") -> BadInput:
    """The refusal of a plug-in that is neither hashed nor loaded."""
    with pytest.raises(BadInput) as hashed:
        identify_plugin(LOSSES, name)
    with pytest.raises(BadInput):
        load_plugin_entry_point(LOSSES, name)
    return hashed.value


MODULES = {"acme_more.py": EVIL, "acme/lazy.py": "VALUE = 'forged'\n", "acme/__init__.py": "TEXT = 'forged'\n"}
LOADED_UNSEEN = [PycInvalidationMode.UNCHECKED_HASH, PycInvalidationMode.TIMESTAMP]


@pytest.mark.parametrize("mode", LOADED_UNSEEN)
@pytest.mark.parametrize("module", MODULES)
def test_a_package_with_byte_code_of_another_source_is_refused_and_the_command_repairs_it(
    module: str, mode: PycInvalidationMode, tmp_path: Path, monkeypatch: Patched
) -> None:
    site = installed(tmp_path, monkeypatch)
    before = identify_plugin(LOSSES, "late")
    forget(monkeypatch)
    forge_byte_code(site / module, MODULES[module], mode)
    (fault,) = refused("late").faults
    assert "acme 1.0" in fault.problem
    assert module in fault.problem
    command = fault.remedy.partition(": ")[2]
    subprocess.run(shlex.split(command), check=True, timeout=60)
    assert identify_plugin(LOSSES, "late") == before
    assert load_plugin_entry_point(LOSSES, "late")() == "hashed"


def test_byte_code_in_a_folder_of_its_own_is_compared_too(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "caches"))
    forge_byte_code(site / "acme_more.py", EVIL)
    assert not (site / "__pycache__").exists()
    refused()


DIFFERENCES = {
    "a constant": ("X = 1.0", "X = 2.0"),
    "a zero's sign": ("X = 0.0", "X = -0.0"),
    "a number's type": ("X = 1", "X = True"),
    "a constant of a set": ("X = 1 in {0, 1}", "X = 1 in {0, True}"),
    "a constant of a function": ("def f(): return (1, 2)", "def f(): return (1, 3)"),
    "a default": ("def f(x=1): pass", "def f(x=2): pass"),
    "a name": ("import os as a", "import re as a"),
    "what is caught": (
        "def f(g):\n try:\n  g()\n except ValueError: pass",
        "def f(g):\n g()\n try:\n  pass\n except ValueError: pass",
    ),
    "a class": ("class A: x: int = 1", "class A: x: int = 3"),
}


@pytest.mark.parametrize(("honest", "forged"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_byte_code_that_differs_in_this_is_foreign(honest: str, forged: str, tmp_path: Path) -> None:
    (source := tmp_path / "module.py").write_text(honest)
    py_compile.compile(str(source), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    assert not has_foreign_byte_code(source, source.read_bytes())
    py_compile.compile(str(source), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    (other := tmp_path / "other.py").write_text(forged)
    cache = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(other), cfile=cache, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    assert has_foreign_byte_code(source, source.read_bytes())


def test_a_cache_that_is_damaged_is_foreign(tmp_path: Path) -> None:
    (source := tmp_path / "module.py").write_text("X = 1")
    cache = Path(py_compile.compile(str(source), invalidation_mode=PycInvalidationMode.UNCHECKED_HASH) or "")
    cache.write_bytes(cache.read_bytes()[:-5])
    assert has_foreign_byte_code(source, source.read_bytes())


def test_caches_that_python_made_or_does_not_load_are_no_fault(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch)
    before = identify_plugin(LOSSES, "answer")
    for mode in PycInvalidationMode:  # from a folder of another name, as in an image that was built elsewhere
        py_compile.compile(str(site / "acme_more.py"), dfile="/elsewhere/acme_more.py", invalidation_mode=mode)
        assert identify_plugin(LOSSES, "answer") == before
    times = {PycInvalidationMode.CHECKED_HASH: 1e9, PycInvalidationMode.TIMESTAMP: 1.1e9}
    for mode, changed in times.items():  # of an earlier source
        forge_byte_code(site / "acme_more.py", EVIL, mode)
        os.utime(site / "acme_more.py", (changed, changed))
        assert identify_plugin(LOSSES, "answer") == before
    cache = Path(importlib.util.cache_from_source(str(site / "acme_more.py")))
    cache.write_bytes(b"another release" + cache.read_bytes())
    assert identify_plugin(LOSSES, "answer") == before
    assert load_plugin_entry_point(LOSSES, "answer")() == "hashed"


def test_a_file_that_is_no_module_is_no_fault(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch, {**FILES, "acme/template.py": "class {{ name }}: pass"})
    cache = Path(importlib.util.cache_from_source(str(site / "acme" / "template.py")))
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(b"left from an earlier release")
    assert load_plugin_entry_point(LOSSES, "answer")() == "hashed"


@pytest.fixture
def forged_wheel(tmp_path: Path) -> Path:
    """A wheel with honest sources, and byte code of another one that Python does not compare with them."""
    built = tmp_path / "built"
    install_files(built, "acme", FILES, POINTS)
    forge_byte_code(built / "acme_more.py", EVIL)
    (info := built / "acme-1.0.dist-info").joinpath("WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files = [path for path in built.rglob("*") if path.is_file() and path.name not in ("RECORD", "INSTALLER")]
    names = [str(path.relative_to(built)) for path in files]
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip('=')},"
        for name, path in zip(names, files, strict=True)
    ]
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,\n"]))
    wheel = tmp_path / "acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*names, f"{info.name}/RECORD"]:
            archive.write(built / name, name)
    return wheel


INSTALLERS = {
    "pip": ["pip", "install", "--no-index", "--no-deps", "--no-compile", "--target"],
    "uv": ["uv", "pip", "install", "--offline", "--no-index", "--no-deps", "--no-cache", "--target"],
}
PRESENT = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason="absent")) for name in INSTALLERS
]


@pytest.mark.parametrize("installer", PRESENT)
def test_a_wheel_with_forged_byte_code_is_refused_as_each_installer_leaves_it(
    installer: str, forged_wheel: Path, tmp_path: Path, monkeypatch: Patched
) -> None:
    words = INSTALLERS[installer]
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", *words, str(site), str(forged_wheel)], check=True, timeout=120)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    (fault,) = refused().faults
    subprocess.run(shlex.split(fault.remedy.partition(": ")[2]), check=True, timeout=60)
    assert load_plugin_entry_point(LOSSES, "answer")() == "hashed"


def test_a_package_in_an_archive_is_refused(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch, {"acme.pth": "acme.zip\n", "acme.zip": b""})
    with zipfile.ZipFile(site / "acme.zip", "w") as archive:
        for name in ("acme/__init__.py", "acme/losses.py", "acme_more.py"):
            archive.writestr(name, "def answer(): return 1\n")
    monkeypatch.syspath_prepend(str(site / "acme.zip"))
    with pytest.raises(BadInput):
        identify_plugin(LOSSES, "answer")
    with pytest.raises(BadInput):
        load_plugin_entry_point(LOSSES, "answer")


def test_a_shared_namespace_counts_only_the_plug_ins_own_files(tmp_path: Path, monkeypatch: Patched) -> None:
    points = {LOSSES: {"answer": "shared.mine.losses:answer"}}
    files = {"shared/mine/__init__.py": "", "shared/mine/losses.py": "from shared import theirs\n" + MORE}
    site = installed(tmp_path, monkeypatch, files, points)
    before = identify_plugin(LOSSES, "answer")
    installed(tmp_path, monkeypatch, {"shared/theirs/__init__.py": "", "shared/flat.py": ""}, {}, "other")
    assert identify_plugin(LOSSES, "answer") == before
    assert load_plugin_entry_point(LOSSES, "answer")() == "hashed"
    forget(monkeypatch)
    (site / "shared" / "mine" / "new.py").write_text("")
    assert identify_plugin(LOSSES, "answer") != before


def test_an_entry_point_into_another_distribution_counts_its_files_too(tmp_path: Path, monkeypatch: Patched) -> None:
    site = installed(tmp_path, monkeypatch, FILES, {})
    installed(tmp_path, monkeypatch, {"other.py": ""}, {LOSSES: {"answer": "acme.losses:answer"}}, "other")
    before = identify_plugin(LOSSES, "answer")
    assert before.package == "other"
    (site / "acme_more.py").write_text(EVIL)
    assert identify_plugin(LOSSES, "answer") != before


@pytest.mark.parametrize("name", ["tables.cpython-311.pyc", "tables.pypy39.opt-1.pyc", "tables.cpython-311.pyc.123"])
def test_a_file_that_is_named_as_byte_code_of_no_module_changes_the_hash(
    tmp_path: Path, monkeypatch: Patched, name: str
) -> None:
    """Hashed code of the package may read and run it."""
    folder = installed(tmp_path, monkeypatch) / "acme" / "__pycache__"
    folder.mkdir()
    hashes = set[str]()
    for payload in ("VALUE = 'reviewed'", "VALUE = 'forged'"):
        (folder / name).write_text(payload)
        forget(monkeypatch)
        hashes.add(identify_plugin(LOSSES, "answer").sha256)
    assert len(hashes) == 2
    before = hashes.pop()
    (folder / name).unlink()
    (folder / "lazy.cpython-399.pyc").write_text("of another Python")
    forget(monkeypatch)
    assert identify_plugin(LOSSES, "answer").sha256 not in {before, *hashes}
    without = identify_plugin(LOSSES, "answer")
    (folder / "lazy.cpython-399.pyc").unlink()
    forget(monkeypatch)
    assert identify_plugin(LOSSES, "answer") == without
