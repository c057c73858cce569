"""The house rules that a machine can hold: arrows one way, our four names, whole docstrings."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from polyclinic.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "data": {"common", "data"},
    "common": {"common", "data"},
    "strategies": {"common", "data", "strategies"},
    "server": {"common", "data", "strategies", "server"},
    "client": {"common", "data", "strategies", "client"},
    "studies": {"common", "data", "strategies", "server", "studies"},
    "polyclinic": {"common", "data", "strategies", "server", "client", "studies", "polyclinic"},
}
"""Package -> packages that it may import; ``polyclinic`` is the public one, with ``polyclinic.flower``."""
DATA_MAY_IMPORT = ("errors", "hosts", "plugins", "system")
"""What ``data`` imports of ``common``: messages, hosts, plug-ins and files. None of these knows a federation."""
PUBLIC = [*(ROOT / "polyclinic").glob("*.py"), *(ROOT / "polyclinic" / "flower").rglob("*.py")]
"""The files of the public package; its other folders are links to the packages beside it."""
FILES = sorted(
    [*PUBLIC, *(path for package in MAY_IMPORT if package != "polyclinic" for path in (ROOT / package).rglob("*.py"))]
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Level and module of every import."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def package_of(module: str) -> str:
    """The one of our packages that a module belongs to: ``common`` of ``polyclinic.common.config``; else empty."""
    top, _, rest = module.partition(".")
    if top != "polyclinic":
        return ""
    package = rest.partition(".")[0]
    return package if package in MAY_IMPORT else "polyclinic"


def test_no_module_is_imported_without_the_installed_name() -> None:
    """A user's own ``common.py`` or ``client/`` would be taken for ours."""
    folders = (*MAY_IMPORT, "tests", "benchmarks", "supply", "experiments")
    bare = [
        (str(path.relative_to(ROOT)), module)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for level, module in imports(path)
        if not level and module.split(".")[0] in MAY_IMPORT.keys() - {"polyclinic"}
    ]
    assert bare == []


def test_arrows_point_one_way_and_imports_are_absolute_and_no_test_imports_another() -> None:
    wrong = [
        (str(path.relative_to(ROOT)), module)
        for path in FILES
        for level, module in imports(path)
        if level or package_of(module) in MAY_IMPORT.keys() - MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    ]
    wrong += [
        (str(path.relative_to(ROOT)), module)
        for path in (ROOT / "tests").rglob("*.py")
        for _, module in imports(path)
        if module.startswith("tests.") and module.rsplit(".", 1)[-1].startswith("test_")
    ]
    assert wrong == []


def test_the_data_package_and_what_it_imports_know_no_federation() -> None:
    foundation = tuple(f"polyclinic.common.{name}" for name in DATA_MAY_IMPORT)
    paths = [path for module, path in MODULES.items() if module.startswith(("polyclinic.data", *foundation))]
    wrong = [
        (str(path.relative_to(ROOT)), module)
        for path in paths
        for _, module in imports(path)
        if module.startswith("polyclinic.common.")
        and not module.startswith((*foundation, "polyclinic.common.examples"))
    ]
    assert wrong == []


def test_no_other_installed_distribution_claims_our_package_name() -> None:
    assert set(packages_distributions().get("polyclinic", ["polyclinic"])) == {"polyclinic"}


FRAGMENT = re.compile(
    r"(Of|One of|The same|Those|Likewise|By|As|In|On|From|At|Nobody|Nothing|Whoever|Its|Also|And|Or) ?\b"
)
"""How docstrings begin whose subject stands elsewhere."""


def test_every_docstring_has_its_own_subject() -> None:
    fragments = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                if FRAGMENT.match(docstring):
                    fragments.append(f"{path.relative_to(ROOT)}:{node.lineno}: {docstring.splitlines()[0]}")
    assert fragments == []


def room_of(module: str) -> str:
    """The folder a module lies in; a module at the top of a package is a room of its own."""
    path = MODULES[module].relative_to(ROOT)
    at_the_top = len(path.parts) == 2 and path.name != "__init__.py"
    return module if at_the_top else ".".join(("polyclinic", *path.parent.parts))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    installed = parts if parts[0] == "polyclinic" else ("polyclinic", *parts)
    return ".".join(installed).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def is_for_types(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:``, whose imports no program makes."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes_below(node: ast.AST, *, in_functions: bool) -> Iterator[ast.AST]:
    """The nodes below one, without names for types; those in functions run later than their module's load, if ever."""
    for child in ast.iter_child_nodes(node):
        runs_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_for_types(child) and (in_functions or not runs_later):
            yield child
            yield from nodes_below(child, in_functions=in_functions)


@cache
def imported_modules(path: Path, *, in_functions: bool = False) -> set[str]:
    """Our modules that a file imports when it is loaded, or also later in its functions."""
    names = set()
    for node in nodes_below(tree_of(path), in_functions=in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                names.add(name if name in MODULES else node.module)
    return names & MODULES.keys()


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """Rooms that lie on a circle of arrows: what is left when rooms without an arrow in or out are taken away."""
    left = {room: set(others) for room, others in arrows.items()}
    while True:
        pointed_at = set().union(*left.values()) if left else set()
        out = {room for room, others in left.items() if not others & left.keys() or room not in pointed_at}
        if not out:
            return sorted(left)
        left = {room: others - out for room, others in left.items() if room not in out}


def test_arrows_between_folders_run_one_way() -> None:
    arrows = defaultdict[str, set[str]](set)
    for module, path in MODULES.items():
        others = {room_of(other) for other in imported_modules(path)} - {room_of(module)}
        arrows[room_of(module)] |= {room for room in others if room.count(".") > 1}
    assert circle_in(dict(arrows)) == []
    planted = {
        **arrows,
        "polyclinic.strategies.aggregation": arrows["polyclinic.strategies.aggregation"]
        | {"polyclinic.strategies.engine"},
    }
    assert "polyclinic.strategies.engine" in circle_in(planted)


MADE_LATER = {
    # A hospital's process loads the methods, and nothing of the engine that leads a run.
    ("polyclinic.strategies.methods.base", "polyclinic.strategies.engine.sequential"),
}
"""File and a file that one of its functions imports, although that file imports it."""


def test_no_files_import_one_another_in_a_circle_not_even_inside_functions() -> None:
    arrows = {
        module: {
            other for other in imported_modules(path, in_functions=True) - {module} if (module, other) not in MADE_LATER
        }
        for module, path in MODULES.items()
    }
    assert circle_in(arrows) == []
    for module, other in MADE_LATER:
        assert module in circle_in({**arrows, module: arrows[module] | {other}})  # each exception is still needed


def test_the_layers_of_strategies_import_in_one_direction() -> None:
    """aggregation <- local, privacy <- methods <- engine; registry and run_length stand on top of methods."""
    below = {
        "aggregation": {"aggregation"},
        "local": {"aggregation", "local"},
        "privacy": {"aggregation", "local", "privacy"},
        "methods": {"aggregation", "local", "methods"},
        "engine": {"aggregation", "local", "privacy", "methods", "engine"},
        "method_list": set(),
        "registry": {"aggregation", "local", "privacy", "methods", "method_list"},
        "run_length": {"local", "registry"},
    }
    for module, path in MODULES.items():
        if module.startswith("polyclinic.strategies."):
            layer = module.split(".")[2]
            inner = [other for other in imported_modules(path) if other.startswith("polyclinic.strategies.")]
            others = {other.split(".")[2] for other in inner}
            assert others <= below[layer], module


def test_a_hospitals_process_loads_no_module_of_the_engine() -> None:
    engine = "polyclinic.strategies.engine"
    program = f"import sys, polyclinic.client.app; print([name for name in sys.modules if name.startswith('{engine}')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_method_is_a_few_hooks_and_has_few_classes_of_ours_above_it() -> None:
    for name, method in STRATEGIES.items():
        assert len([member for member in dir(method) if not member.startswith("_")]) <= 20, name
        ours = [base for base in method.__mro__[1:] if base.__module__.startswith("polyclinic.strategies.")]
        assert len(ours) <= 3, name
