"""The installed Flower's own modules, for tests only: to compare bytes with its, and in place of its runtime."""

import importlib
from importlib.metadata import version
from typing import Any

import pytest

FLOWER = f"Flower {version('flwr')}"


def flower_module(name: str) -> Any:
    """Import a module of Flower that is not public; skip the test where this Flower has no such module."""
    try:
        return importlib.import_module(f"flwr.{name}")
    except ImportError as error:
        pytest.skip(f"{FLOWER} has no module flwr.{name} to compare with ({error})")


def enter_flower_runtime() -> None:
    """Give this process a task, a run and a node, which Flower's own strategies need to make a message."""
    try:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except ImportError:
        return
    identity.task_id, identity.run_id, identity.node_id = 1, 1, 1
