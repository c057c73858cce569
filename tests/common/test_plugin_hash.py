"""The hash of a plug-in covers every file of its package that can run or be read."""

import importlib
import importlib.machinery
import importlib.util
import py_compile
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from common.errors import BadInput
from common.plugins import LOSSES, identify_plugin, load_plugin_entry_point
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
