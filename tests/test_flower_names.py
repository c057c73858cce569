"""What we use of Flower beyond its public packages: counted, listed, and each one still what we take it for."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from polyclinic.strategies.methods.base import Method

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "client",
    "common",
    "data",
    "polyclinic",
    "server",
    "strategies",
    "studies",
    "benchmarks",
    "docs",
    "experiments",
)
FILES = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
TESTS = list((ROOT / "tests").rglob("*.py"))
MAY = {
    "tests/flower_internals.py": "imports what is compared, and stands in for Flower's runtime",
    "tests/common/test_flower_bytes.py": "compares our bytes with those of the installed Flower; skips where it cannot",
    "tests/common/test_fleet_protocol.py": "compares our protobuf messages with Flower's; skips where it cannot",
}
"""File that may use what is private in Flower -> why; no part of the product and no benchmark is among them."""
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation")
UNDERSCORED = re.compile(r"[\"']_(chunks|message_id|src_node_id|run_id)[\"']")
"""Attributes of Flower's messages and arrays that are its own business."""
LOADED = re.compile(r"(?:importlib\.)?import_module\(f?'(flwr\b[^']*)'\)")
FLOWER = f"Flower {version('flwr')} is not what we were written for:"


def used(path: Path) -> Iterator[str]:
    """Module and name of everything that a file takes from Flower's private modules."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text if "flwr" in text or "flower_module" in text else "")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            if node.module not in PUBLIC:
                yield from (f"{node.module}: {alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and (loaded := LOADED.match(ast.unparse(node))) and loaded[1] not in PUBLIC:
            yield loaded[1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "flower_module":
            yield ast.unparse(node.args[0])


def test_product_benchmarks_and_examples_use_no_private_name_of_flower() -> None:
    assert [(name, str(path.relative_to(ROOT))) for path in FILES for name in used(path)] == []
    reaches = [path for path in FILES if UNDERSCORED.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in reaches] == []


def test_tests_use_private_names_only_where_they_compare_with_flower() -> None:
    users = {str(path.relative_to(ROOT)) for path in TESTS if any(used(path))}
    assert users == MAY.keys()
    reaches = [path for path in TESTS if UNDERSCORED.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in reaches] == []


OVERRIDDEN = {
    "configure_train": "self server_round arrays config grid",
    "aggregate_train": "self server_round replies",
    "configure_evaluate": "self server_round arrays config grid",
    "aggregate_evaluate": "self server_round replies",
    "start": "self grid initial_arrays num_rounds timeout train_config evaluate_config evaluate_fn",
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_our_strategies_override_is_called_as_before(name: str) -> None:
    """What Flower adds at the end of ``start``, such as ``should_stop``, our strategies pass on or take."""
    from flwr.serverapp.strategy import Strategy

    there = list(inspect.signature(getattr(Strategy, name)).parameters)
    ours = OVERRIDDEN[name].split()
    assert there[: len(ours)] == ours, f"{FLOWER} Strategy.{name} takes other arguments"
    more = set(there[len(ours) :])
    taken = inspect.signature(getattr(Method, name)).parameters.keys()
    assert more <= taken, f"{FLOWER} Strategy.{name} takes {sorted(more - taken)}, too; our methods do not"


PUBLIC_NAMES = {
    "flwr.app": "Array ArrayRecord ConfigRecord Context Error Message MessageType Metadata MetricRecord RecordDict",
    "flwr.clientapp": "ClientApp",
    "flwr.serverapp": "Grid",
    "flwr.serverapp.strategy": "FedAvg Result Strategy",
}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_flower_has_the_public_names_that_we_use(module: str) -> None:
    try:
        there = importlib.import_module(module)
    except ImportError as error:
        raise AssertionError(f"{FLOWER} {module} is gone ({error})") from None
    missing = [name for name in PUBLIC_NAMES[module].split() if not hasattr(there, name)]
    assert missing == [], f"{FLOWER} {module} lacks {missing}"


def test_a_message_takes_metadata_of_our_choice() -> None:
    """The keyword is in none of Flower's overloads, but its own serialiser uses it."""
    from flwr.app import Error, RecordDict

    from polyclinic.common.wire.flower_messages import make_message, make_request, read_metadata, replace_metadata

    request = make_request(RecordDict(), 3, "train", group_id="1", ttl=5.0)
    sent = replace_metadata(request, run_id=9, message_id="named", src_node_id=1)
    stated = (sent.metadata.run_id, sent.metadata.message_id, sent.metadata.src_node_id, sent.metadata.dst_node_id)
    assert stated == (9, "named", 1, 3), f"{FLOWER} Message() or Metadata() takes other values"
    refusal = make_message(Error(7, "no"), read_metadata(sent))
    assert (refusal.error.code, refusal.metadata.reply_to_message_id) == (7, "")
