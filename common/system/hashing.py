"""Hashes that are the same in every process: seeds of random generators, and hashes of Python objects."""

import functools
import hashlib
import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit random seed from values that name its purpose, such as (run seed, round, site, "order")."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def hash_python_object(part: object) -> str:
    """Return the SHA-256 of a Python object's code and values, to detect that a plug-in object has changed.

    The hash includes source code, attributes, and the closures, defaults and globals of functions. Of modules it
    includes only the names, so a change of an imported package is not detected.
    """
    digest = hashlib.sha256()
    for piece in _yield_object_bytes_for_hash(part, {}):
        digest.update(f"{len(piece)}:".encode() + piece)
    return digest.hexdigest()


def _yield_object_bytes_for_hash(part: Any, visited: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yield the bytes of an object for hashing; an object that occurs again is replaced by its number.

    Args:
        visited: ``id`` of an object -> its number and the object itself, which keeps the id unique.
    """
    if part is None or isinstance(part, bool | int | float | complex | str | bytes):
        yield repr(part).encode()
    elif id(part) in visited:
        yield f"again {visited[id(part)][0]}".encode()
    else:
        visited[id(part)] = len(visited), part
        yield type(part).__qualname__.encode()
        yield from _yield_content_bytes_for_hash(part, visited)


def _yield_content_bytes_for_hash(part: Any, visited: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    if isinstance(part, types.ModuleType):
        yield part.__name__.encode()
    elif isinstance(part, functools.partial):
        yield from _yield_sequence_bytes_for_hash((part.func, part.args, part.keywords), visited)
    elif isinstance(part, types.MethodType):
        yield from _yield_sequence_bytes_for_hash((part.__func__, part.__self__), visited)
    elif isinstance(part, types.FunctionType):
        yield _read_source_for_hash(part)
        closure = inspect.getclosurevars(part)
        used = {name: value for name, value in closure.globals.items() if not isinstance(value, types.ModuleType)}
        yield from _yield_sequence_bytes_for_hash(
            (part.__defaults__, part.__kwdefaults__, dict(closure.nonlocals), used), visited
        )
    elif isinstance(part, type):
        yield f"{part.__module__}.{part.__qualname__}".encode()
        yield _read_source_for_hash(part)
    elif hasattr(part, "tobytes") and hasattr(part, "shape"):  # numpy's
        yield f"{part.dtype} {part.shape}".encode()
        yield part.tobytes()
    elif type(part).__name__.startswith("Uninitialized"):  # torch's, of a lazy layer
        yield b"uninitialized"
    elif hasattr(part, "detach") and hasattr(part, "numpy"):  # torch's
        yield from _yield_object_bytes_for_hash(part.detach().cpu().float().numpy(), visited)
    elif isinstance(part, Mapping):
        yield from _yield_sequence_bytes_for_hash(chain.from_iterable(part.items()), visited)
    elif isinstance(part, Collection) and not isinstance(part, set | frozenset):
        yield from _yield_sequence_bytes_for_hash(part, visited)
    elif (state := getattr(part, "__dict__", None)) is None:
        yield re.sub(" at 0x[0-9a-f]+", "", repr(part)).encode()
    else:
        yield from _yield_sequence_bytes_for_hash((type(part), state), visited)


def _yield_sequence_bytes_for_hash(parts: Any, visited: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    for part in parts:
        yield from _yield_object_bytes_for_hash(part, visited)


def _read_source_for_hash(part: Any) -> bytes:
    """Return the source of a function or class for hashing; without a source file also the compiled code.

    Code from ``exec`` or a prompt has no source file. Python 3.13 may then return the source of other code, because
    all code from ``exec`` shares the file name "<string>".
    """
    code = getattr(part, "__code__", None)
    codes = {"": code} if code else {k: v.__code__ for k, v in vars(part).items() if isinstance(v, types.FunctionType)}
    without_file = {name: inner for name, inner in codes.items() if inner.co_filename.startswith("<")}
    text = b""
    if code not in without_file.values():
        try:
            text = inspect.getsource(part).encode()
        except (OSError, TypeError):
            without_file = codes
    return text + b"".join(name.encode() + _yield_code_bytes_for_hash(inner) for name, inner in without_file.items())


def _yield_code_bytes_for_hash(code: types.CodeType) -> bytes:
    inner = b"".join(
        _yield_code_bytes_for_hash(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    # The text of a set follows from hashes, which differ between processes: its members are sorted.
    plain = [
        sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
        for constant in code.co_consts
        if not isinstance(constant, types.CodeType)
    ]
    return code.co_code + repr((plain, code.co_names, code.co_varnames)).encode() + inner
