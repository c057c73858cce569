"""Hashes that are the same in every process: seeds of random generators, and hashes of Python objects."""

import argparse
import builtins
import dataclasses
import dis
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit random seed from values that identify its purpose, such as (run seed, round, site, "order")."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def hash_python_object(part: object) -> str:
    """Return the SHA-256 of a Python object's code and values, to detect that a plug-in object has changed.

    The hash includes attributes, and the compiled code of functions and classes that the user wrote. For these, it also
    includes base classes, closures, defaults, and the globals and module members that the code names. Comments, blank
    lines and line numbers have no effect. Functions and classes of installed packages, the standard library and this
    program are hashed by name only, so a change of their code is not detected. Another Python version compiles to other
    code, and gives another hash.
    """
    digest = hashlib.sha256()
    for piece in _yield_object_bytes_for_hash(part, {}):
        digest.update(f"{len(piece)}:".encode() + piece)
    return digest.hexdigest()


_VisitedObjects = dict[int, tuple[int, Any]]
"""``id`` of an object -> its number, and the object itself, so that no other object gets the same ``id``."""


def _yield_object_bytes_for_hash(part: Any, visited: _VisitedObjects) -> Iterator[bytes]:
    """Yield the bytes of an object for hashing; an object that was hashed before is replaced by its number.

    Args:
        part: The object.
        visited: The objects that were hashed before; this function adds to them.
    """
    if part is None or isinstance(part, bool | int | float | complex | str | bytes):
        yield repr(part).encode()
    elif type(part) is tuple:  # without a number, because Python may use one object for equal tuples, or not
        yield f"tuple of {len(part)}".encode()
        yield from _yield_sequence_bytes_for_hash(part, visited)
    elif id(part) in visited:
        yield f"again {visited[id(part)][0]}".encode()
    else:
        visited[id(part)] = len(visited), part
        yield type(part).__qualname__.encode()
        yield from _yield_content_bytes_for_hash(part, visited)


def _yield_content_bytes_for_hash(part: Any, visited: _VisitedObjects) -> Iterator[bytes]:
    pandas = sys.modules.get("pandas")
    if isinstance(part, types.ModuleType):
        yield part.__name__.encode()
    elif inner := next((names for kind, names in _WRAPPED_ATTRIBUTES.items() if isinstance(part, kind)), ()):
        yield from _yield_sequence_bytes_for_hash((getattr(part, name) for name in inner), visited)
    elif isinstance(part, types.FunctionType):
        yield from _yield_function_bytes_for_hash(part, visited)
    elif isinstance(part, type):
        yield from _yield_class_bytes_for_hash(part, visited)
    elif f"{type(part).__module__}.".startswith(_STATEFUL_MODULES):
        yield b"changes by itself"
    elif pandas and isinstance(part, pandas.DataFrame | pandas.Series | pandas.Index):
        names = part.columns.tolist() if hasattr(part, "columns") else part.name
        yield from _yield_object_bytes_for_hash(names, visited)
        try:
            yield pandas.util.hash_pandas_object(part).to_numpy().tobytes()
        except TypeError:  # cells that are lists
            yield from _yield_object_bytes_for_hash(part.to_numpy().tolist(), visited)
    elif hasattr(part, "tobytes") and hasattr(part, "shape"):  # a numpy array or number
        yield f"{part.dtype} {part.shape}".encode()
        is_plain = not part.dtype.hasobject  # the bytes of an object array are addresses
        yield from (part.tobytes(),) if is_plain else _yield_object_bytes_for_hash(part.tolist(), visited)
    elif type(part).__name__.startswith("Uninitialized"):  # a parameter of a lazy torch layer
        yield b"uninitialized"
    elif type(part).__name__ == "device":  # torch.device, which may differ on another machine
        yield b"device"
    elif hasattr(part, "detach") and hasattr(part, "numpy"):  # a torch tensor
        yield from _yield_object_bytes_for_hash(part.detach().cpu().float().numpy(), visited)
    else:
        yield from _yield_instance_bytes_for_hash(part, visited)


_WRAPPED_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}
"""Type of objects that wrap functions -> names of the attributes with the wrapped functions and values."""


def _yield_sequence_bytes_for_hash(parts: Any, visited: _VisitedObjects) -> Iterator[bytes]:
    for part in parts:
        yield from _yield_object_bytes_for_hash(part, visited)


def _yield_instance_bytes_for_hash(part: Any, visited: _VisitedObjects) -> Iterator[bytes]:
    """Yield class, members and attributes of an instance for hashing; its ``repr`` if it has none of these."""
    state = getattr(part, "__dict__", None)
    slots = object.__getstate__(part) if _is_own_class(type(part)) else None
    if isinstance(part, set | frozenset):  # sorted, because the order in a set differs between processes
        yield from sorted(hash_python_object(member).encode() for member in part)
    elif isinstance(part, Mapping):
        yield from _yield_sequence_bytes_for_hash(chain.from_iterable(part.items()), visited)
    elif isinstance(part, list | tuple) or (isinstance(part, Collection) and not state):
        yield from _yield_sequence_bytes_for_hash(part, visited)
    elif state is None and slots is None:
        yield re.sub(" at 0x[0-9a-fA-F]+", "", repr(part)).encode()
    if isinstance(slots, tuple):  # values in the class's ``__slots__``, besides those in ``__dict__``
        yield from _yield_object_bytes_for_hash(slots[1], visited)
    if state or (state is not None and not isinstance(part, Collection)):
        lazy = {name for name in state if isinstance(getattr(type(part), name, None), functools.cached_property)}
        values = {name: value for name, value in state.items() if name not in lazy}
        yield from _yield_sequence_bytes_for_hash((type(part), values), visited)
    elif _is_own_class(type(part)):
        yield from _yield_object_bytes_for_hash(type(part), visited)


def _yield_class_bytes_for_hash(part: type, visited: _VisitedObjects) -> Iterator[bytes]:
    """Yield the names of a class and its bases, and the contents of those classes that the user wrote."""
    for kind in part.__mro__:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if kind is not part and id(kind) in visited:
            yield f"again {visited[id(kind)][0]}".encode()
        elif _is_own_class(kind):
            visited.setdefault(id(kind), (len(visited), kind))
            for name, value in sorted(vars(kind).items()):
                code = callable(value) or isinstance(value, classmethod | staticmethod | property)
                if name != "_abc_impl" and (code or not re.fullmatch("__.*__", name)):
                    yield name.encode()
                    yield from _yield_object_bytes_for_hash(value, visited)


def _yield_function_bytes_for_hash(part: types.FunctionType, visited: _VisitedObjects) -> Iterator[bytes]:
    yield f"{part.__module__}.{part.__qualname__}".encode()
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    values = {name: "empty" if cell == types.CellType() else cell.cell_contents for name, cell in cells}
    yield from _yield_sequence_bytes_for_hash((part.__defaults__, part.__kwdefaults__), visited)
    yield from _yield_object_bytes_for_hash(values, visited)
    file = part.__code__.co_filename
    name = part.__module__
    in_own_module = name in (None, "builtins") or _is_own_module(name)
    if not (in_own_module if file.startswith("<") else _is_own_file(file)):
        return
    yield _convert_code_to_bytes(part.__code__)
    codes = list(_yield_nested_codes(part.__code__))
    names = sorted({name for code in codes for name in code.co_names})
    for name, attributes in sorted(_list_globals(codes).items()):
        if name in part.__globals__:
            value = part.__globals__[name]
            # Hash only the settings that the function reads; another value of ``args.resume`` may not matter.
            if attributes is not None and _is_settings_holder(value):
                value = {attribute: getattr(value, attribute, None) for attribute in sorted(attributes)}
            yield from _yield_global_bytes_for_hash(name, value, names, visited)
    for name in sorted(set(chain.from_iterable(_yield_imported_names(code, part.__globals__) for code in codes))):
        if (module := _import_own_module(name)) is not None:
            yield from _yield_global_bytes_for_hash(name, module, names, visited)


def _yield_global_bytes_for_hash(
    name: str, value: Any, members: list[str], visited: _VisitedObjects
) -> Iterator[bytes]:
    """Yield name and bytes of a global that a user's function reads.

    Args:
        name: Name of the global.
        value: Value of the global.
        members: Names in the function's code; of a user's module, the members with these names are hashed, too.
        visited: The objects that were hashed before.
    """
    yield name.encode()
    yield from _yield_object_bytes_for_hash(value, visited)
    if isinstance(value, types.ModuleType) and _is_own_module(value.__name__):
        for member in members:
            inner = vars(value).get(member)
            if isinstance(inner, types.ModuleType) and not inner.__name__.startswith(f"{value.__name__}."):
                yield inner.__name__.encode()  # only the name, because the function may not use this module
            elif member in vars(value):
                yield from _yield_global_bytes_for_hash(member, inner, members, visited)


_DATACLASS_METHODS = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__"}


def _list_globals(codes: Iterable[types.CodeType]) -> dict[str, set[str] | None]:
    """Return name -> attributes that code reads of each global; None if the code also uses the global in
    another way.
    """
    reads = dict[str, set[str] | None]()
    for code in codes:
        for step, following in pairwise(dis.get_instructions(code)):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                attributes = reads.setdefault(step.argval, set())
                if following.opname != "LOAD_ATTR":
                    reads[step.argval] = None
                elif attributes is not None:
                    attributes.add(following.argval)
    return reads


def _is_settings_holder(value: Any) -> bool:
    """Return True if a value only contains settings: a namespace, or a user's class without methods, or its
    instance.
    """
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return True
    kind = value if isinstance(value, type) else type(value)
    if not _is_own_class(kind) or kind.__mro__[1:] != (object,) or not hasattr(value, "__dict__"):
        return False
    written = vars(kind).keys() - {"__dict__", "__weakref__"}
    written -= _DATACLASS_METHODS if dataclasses.is_dataclass(kind) else set()
    return not any(callable(vars(kind)[name]) or hasattr(vars(kind)[name], "__get__") for name in written)


def _yield_nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _yield_nested_codes(constant)


def _yield_imported_names(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the absolute names of the modules that a function's body imports."""
    steps = list(dis.get_instructions(code))
    for number, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[number - 2].argval  # the level of a relative import is pushed two steps before
            package = names.get("__package__") or ""
            if not isinstance(level, int) or not level:
                yield step.argval
            elif package.count(".") >= level - 1:
                yield importlib.util.resolve_name("." * level + step.argval, package)


def _import_own_module(name: str) -> types.ModuleType | None:
    """Import a module that the user wrote; return None for other modules and for those that cannot be imported."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not _is_own_file(spec.origin) or spec.origin in ("built-in", "frozen"):
            return None
        return importlib.import_module(name)
    except (Exception, SystemExit):  # code of the user may raise anything; the run will report it
        return None


def _convert_code_to_bytes(code: types.CodeType) -> bytes:
    inner = b"".join(_convert_code_to_bytes(value) for value in code.co_consts if isinstance(value, types.CodeType))
    constants = [_convert_constant_to_text(value) for value in code.co_consts if not isinstance(value, types.CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return code.co_code + code.co_exceptiontable + repr((constants, names, counts)).encode() + inner


def _convert_constant_to_text(value: object) -> str:
    """Convert a constant to text, with the members of a set sorted, because their order differs between processes."""
    if isinstance(value, frozenset):
        return f"set {sorted(map(_convert_constant_to_text, value))}"
    return f"tuple {[*map(_convert_constant_to_text, value)]}" if isinstance(value, tuple) else repr(value)


_STATEFUL_MODULES = (
    *("logging.", "threading.", "_thread.", "queue.", "multiprocessing.", "concurrent.", "_io.", "random.", "weakref."),
    *("torch.utils.tensorboard.", "tensorboard.", "tensorboardX.", "tqdm.", "wandb.", "mlflow."),
)
"""Modules of classes whose instances change by themselves and do not affect a model, such as loggers."""
_PACKAGE = Path(__file__).parents[2]
# In a checkout the package's parts are links to the folders beside it.
_PROGRAM_FOLDERS = tuple(
    f"{os.path.realpath(_PACKAGE / name)}{os.sep}"
    for name in ("", "client", "common", "data", "server", "strategies", "studies")
)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _is_own_class(kind: type) -> bool:
    # A class that ``exec`` creates without a module name is also in "builtins". Flag 9 marks classes made at run time.
    if kind.__module__ == "builtins":
        return bool(kind.__flags__ & 1 << 9) and vars(builtins).get(kind.__name__) is not kind
    return _is_own_module(kind.__module__)


def _is_own_module(name: str) -> bool:
    """Return True if the user wrote a module: it is not in an installed package, the standard library or this
    program.
    """
    while name not in sys.modules and "." in name:
        name = name.rpartition(".")[0]
    if name == "__main__":  # a script or a notebook
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return _is_own_file(file) if file else name.partition(".")[0] not in sys.stdlib_module_names


@functools.cache
def _is_own_file(file: str) -> bool:
    path = os.path.abspath(file)
    if {"site-packages", "dist-packages"} & {*Path(path).parts}:
        return False
    return not path.startswith(_STANDARD_LIBRARY) and not os.path.realpath(path).startswith(_PROGRAM_FOLDERS)
