"""A run that ends at a named point as if killed."""

from typing import Any

import pytest


class Killed(BaseException):
    """Nothing of ours catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Let the process die in this call of a function, before or after its work."""
    original, calls = getattr(owner, name), iter(range(1, 10_000))

    def dying(*arguments: Any, **options: Any) -> Any:
        this = next(calls)
        if this == call and not after:
            raise Killed
        result = original(*arguments, **options)
        if this == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)
